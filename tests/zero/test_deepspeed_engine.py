"""What DeepSpeed's users find under the names they know: calls of the engine, optimizers, and the numbers it starts from."""

import json
import logging
import types

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero
from tests import inside
from tests.loopback import run_ranks, solo
from tests.zoo.case import mlp, real_mlp, real_numbers
from zero import Engine, ShardedOptimizer, shard
from zero.config.schema import Batch, LossScale, ZeroConfig
from zero.errors import CheckpointFailed
from zero.optim.optimizers import PlainAdam

STAGES = (0, 1, 2)
FILE = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 2}}


def sgd(model, lr=0.125):
    return torch.optim.SGD(model.parameters(), lr=lr)


def engine_of(group, stage=2, *, build=mlp, **fields):
    model = build()
    return Engine(ShardedOptimizer(model, sgd(model), ZeroConfig(stage=stage, timeout_s=20.0, **fields), group))


def loss_of(engine, seed, rank=0):
    x = real_numbers((2, 4), seed, rank).to(next(engine.parameters()).dtype)
    return engine(x).float().square().mean()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


# backward ---------------------------------------------------------------------------------------------------------------

FP16 = {"dtype": "float16", "loss_scale": LossScale(dynamic=False, initial=1024.0)}


@pytest.mark.parametrize("fields", [{}, FP16], ids=["fp32", "fp16"])
def test_a_loss_that_was_scaled_by_the_engine_is_scaled_once(fields):
    def train(backward):
        engine = engine_of(solo(), accumulation=2, **fields)
        for seed in range(4):
            backward(engine, loss_of(engine, seed))
            engine.step()
        return weights(engine.module)

    expected = train(lambda engine, loss: engine.backward(loss))
    assert same(train(lambda engine, loss: engine.scale(loss).backward()), expected)
    if fields:
        engine = engine_of(solo(), **fields)
        loss = loss_of(engine, 0)
        assert engine.scale(loss).item() == pytest.approx(1024.0 * loss.item())


def test_a_scaled_backward_that_fails_leaves_no_mark_for_the_next_one():
    def fail(grad):
        raise RuntimeError("no")

    found = []
    for fails in (False, True):
        engine = engine_of(solo(), **FP16)
        if fails:
            loss = loss_of(engine, 9)
            loss.register_hook(fail)  # before any parameter
            with pytest.raises(RuntimeError, match="no"):
                engine.scale(loss).backward()
            with pytest.raises(RuntimeError, match="Cannot send this loss backward: it does not carry the loss scale"):
                loss_of(engine, 0).backward()
            engine.zero_grad()
        engine.scale(loss_of(engine, 0)).backward()
        engine.step()
        found.append(weights(engine.module))
    assert same(*found)


def test_only_a_loss_can_be_scaled():
    for wrong in (3.0, torch.ones(1)):
        with pytest.raises(ValueError, match=r"Cannot scale: .* Pass the loss"):
            engine_of(solo()).scale(wrong)


@pytest.mark.parametrize("stage", STAGES)
def test_a_coalesced_block_sends_each_bucket_once_and_gives_the_same_step(stage):
    def train(group, coalesces):
        engine = engine_of(group, stage)
        sent = []
        for step in range(2):
            if coalesces:
                with engine.coalesce_grad_reduction():
                    for micro in range(3):
                        engine.backward(loss_of(engine, (step, micro), group.rank))
                    sent.append(inside.rounds_sent(engine.optimizer))
                    with pytest.raises(ValueError, match=r"Cannot step inside coalesce_grad_reduction\(\)"):
                        engine.step()
            else:
                for micro in range(3):
                    engine.backward(loss_of(engine, (step, micro), group.rank))
            engine.step()
        assert not any(sent), "nothing is sent before the block ends"
        return weights(engine.module)

    coalesced = run_ranks(2, lambda group: train(group, True))
    for mine, theirs in zip(coalesced, run_ranks(2, lambda group: train(group, False)), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_coalesced_block_is_not_nested_and_not_settled_where_it_raises():
    engine = engine_of(solo())
    with pytest.raises(ValueError, match="Cannot nest"), engine.coalesce_grad_reduction(), engine.coalesce_grad_reduction():
        pass
    with pytest.raises(KeyError), engine.coalesce_grad_reduction():
        raise KeyError
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert engine.global_steps == 1


# where masters and buffers start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_masters_start_from_the_weights_before_the_cast_or_after_it(stage):
    def train(group, masters):
        model = real_mlp()
        if masters == "by hand":
            model = model.bfloat16()
        optimizer = shard(model, sgd(model), stage=stage, dtype="bfloat16", group=group,
                          masters="exact" if masters == "by hand" else masters)  # fmt: skip
        for step in range(3):
            optimizer.backward(model(real_numbers((2, 4), step, group.rank).bfloat16()).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        masters = [pair for index in range(4) for pair in inside.masters_of(optimizer, index)]
        return weights(model), [master.detach().clone() for _, master in masters]

    hows = ("exact", "rounded", "by hand")
    exact, rounded, by_hand = (run_ranks(2, lambda group, how=how: train(group, how)) for how in hows)
    for one, other, mine in zip(rounded, by_hand, exact, strict=True):
        assert same(one[0], other[0]) and same(one[1], other[1])
        assert not same(mine[1], one[1])


def test_a_deepspeed_file_can_ask_for_deepspeeds_masters():
    config = {**FILE, "bf16": {"enabled": True}, "zero_accelerators": {"masters": "rounded"}}
    engine, *_ = zero.initialize(model=real_mlp(), config=config)
    assert engine.config.masters == "rounded"
    assert all(torch.equal(master, master.bfloat16().float()) for _, master in inside.masters_of(engine.optimizer, 0))
    engine.destroy()


class Buffered(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        for name in ("running", "correction_bias", "table"):
            self.register_buffer(name, torch.full((2,), 1.0 + 2.0**-12))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))


def test_buffers_are_cast_where_that_is_written_but_for_those_that_stay():
    def dtypes(**data_types):
        config = {**FILE, "bf16": {"enabled": True}, "data_types": data_types}
        engine, *_ = zero.initialize(model=model, config=config)
        found = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
        engine.destroy()
        assert found.pop("0.count") == torch.int64
        return {name.removeprefix("0."): str(dtype).removeprefix("torch.") for name, dtype in found.items()}

    model = nn.Sequential(Buffered())
    assert set(dtypes().values()) == {"float32"}
    model[0]._keep_in_fp32_modules_strict = ["correction"]
    assert dtypes(buffer_dtype="bf16") == {"running": "bfloat16", "correction_bias": "float32", "table": "bfloat16"}
    model = nn.Sequential(Buffered())
    kept = dtypes(buffer_dtype="bf16", keep_in_fp32_modules=["tab*"])
    assert kept == {"running": "bfloat16", "correction_bias": "bfloat16", "table": "float32"}


# files ------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.frozen(self.first(x)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("exclude", [False, True])
def test_the_weights_are_written_in_the_dtype_that_they_train_in(name, exclude, tmp_path):
    def program(group):
        engine = engine_of(group, build=Tied, dtype="bfloat16")
        assert engine.save_16bit_model(tmp_path / "out", name, exclude_frozen_parameters=exclude)
        assert ("frozen.weight" in engine.module_state_dict(exclude_frozen_parameters=exclude)) is not exclude
        return {key: value.clone() for key, value in engine.module.state_dict().items()}

    expected = run_ranks(2, program)[0]
    path = tmp_path / "out" / name
    found = load_file(path) if name.endswith("safetensors") else torch.load(path, weights_only=True)
    assert [file.name for file in path.parent.iterdir()] == [name]
    assert set(found) == {key for key in expected if not exclude or "frozen" not in key}
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, expected[key]) for key, value in found.items())
    assert path.stat().st_size < 4000


def test_a_file_of_torch_that_cannot_be_written_leaves_the_one_before_and_says_why(tmp_path, monkeypatch):
    def full(saved, file):
        file.write(b"half of it")
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos")  # noqa: B904 - as torch does

    engine = engine_of(solo())
    engine.save_16bit_model(tmp_path)
    before = (tmp_path / "pytorch_model.bin").read_bytes()
    with monkeypatch.context() as patched, pytest.raises(
        CheckpointFailed, match=r"^Cannot write to .*pytorch_model\.bin: No space left on device\. Make room there"
    ):
        patched.setattr(torch, "save", full)
        engine.save_16bit_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
    assert (tmp_path / "pytorch_model.bin").read_bytes() == before


def test_the_weights_are_written_in_files_of_a_given_size(tmp_path):
    def program(group):
        engine = engine_of(group, build=Tied, dtype="bfloat16")
        with pytest.raises(ValueError, match=r"Cannot write pytorch_model\.bin with max_shard_bytes=50: .* \.safetensors"):
            engine.save_16bit_model(tmp_path, max_shard_bytes=50)
        assert engine.save_16bit_model(tmp_path, "weights.safetensors", max_shard_bytes=50)
        return {key: value.clone() for key, value in engine.module.state_dict().items()}

    expected = run_ranks(2, program)[0]
    index = json.loads((tmp_path / "weights.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and set(index["weight_map"]) == set(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "weights.safetensors.index.json"]
    found = {name: value for file in files for name, value in load_file(tmp_path / file).items()}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_without_frozen_parameters_leaves_those_of_the_model(tmp_path):
    def program(group):
        engine = engine_of(group, build=Tied)
        engine.backward(engine(real_numbers((2, 4), "x", group.rank)).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path / "all")
        engine.save_checkpoint(tmp_path / "some", exclude_frozen_parameters=True)
        saved = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        with torch.no_grad():
            for param in engine.module.parameters():
                param.add_(1.0)
        engine.load_checkpoint(tmp_path / "some")
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, saved[name] + 1.0 if "frozen" in name else saved[name]), name
        engine.load_checkpoint(tmp_path / "all")
        assert all(torch.equal(param, saved[name]) for name, param in engine.module.named_parameters())
        return True

    assert all(run_ranks(2, program))
    zero.export(tmp_path / "some", tmp_path / "whole.safetensors", optimizer=tmp_path / "optimizer.pt")
    assert "frozen.weight" not in zero.read_export(tmp_path / "whole.safetensors")


def test_what_was_left_out_of_a_checkpoint_must_not_be_trained_where_it_is_loaded(tmp_path):
    engine = engine_of(solo(), build=Tied)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = engine_of(solo(), build=lambda: Tied().requires_grad_(True))
    with pytest.raises(ValueError, match=r"Only in the model: frozen\.weight"):
        other.load_checkpoint(tmp_path)


def test_a_checkpoint_within_an_accumulation_has_the_state_after_the_last_step(tmp_path, caplog):
    def micro_step(engine, seed):
        engine.backward(loss_of(engine, seed))
        engine.step()

    engine = engine_of(solo(), accumulation=2)
    for seed in range(3):
        micro_step(engine, seed)
    engine.save_checkpoint(tmp_path)
    assert "in the middle of an accumulation" in caplog.text
    micro_step(engine, 3)
    with pytest.raises(ValueError, match="in the middle of an accumulation"):
        micro_step(engine, 4)
        zero.save(tmp_path / "refused", engine)

    again = engine_of(solo(), accumulation=2)
    again.load_checkpoint(tmp_path)
    assert (again.global_steps, again.micro_steps) == (1, 2)
    for seed in range(2, 5):
        micro_step(again, seed)
    assert same(weights(again.module), weights(engine.module))


# optimizers and engines -------------------------------------------------------------------------------------------------


def class_of_deepspeed(name, module):
    """An optimizer with the name, the module and the attributes of DeepSpeed's, and nothing that steps."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), adam_w_mode=True, weight_decay=0.0, bias_correction=True):
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
        torch.optim.Optimizer.__init__(self, params, settings)
        self.adam_w_mode = adam_w_mode

    return types.new_class(name, (torch.optim.Optimizer,), {}, lambda body: body.update(__init__=__init__, __module__=module))


FUSED = class_of_deepspeed("FusedAdam", "deepspeed.ops.adam.fused_adam")
ON_CPU = class_of_deepspeed("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam")


@pytest.mark.parametrize("theirs", [FUSED, ON_CPU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("how", ["made", "function"])
def test_deepspeeds_adam_is_taken_for_what_it_computes(theirs, decoupled, how, recwarn):
    model, plain = real_mlp(), real_mlp()
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    given = theirs(model.parameters(), adam_w_mode=decoupled, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(given, 0.5) if how == "made" else None
    function = lambda params: theirs(params, adam_w_mode=decoupled, **settings)  # noqa: E731
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0, "zero_accelerators": {"kernels": "torch"}}
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=given if how == "made" else function, config=config)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    assert type(optimizer.inner) is kind
    expected = kind(plain.parameters(), **settings)
    for step in range(3):
        x = real_numbers((2, 4), step)
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        expected.step()
        expected.zero_grad()
        if schedule is not None:
            schedule.step()
            expected.param_groups[0]["lr"] *= 0.5
    assert same(model.parameters(), plain.parameters())
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
    engine.destroy()


def test_an_adam_of_deepspeeds_without_bias_correction_is_ours_with_its_groups():
    model = real_mlp()
    given = FUSED(model.parameters(), lr=0.25, bias_correction=False, adam_w_mode=False)
    engine, *_ = zero.initialize(model=model, optimizer=given, config={})
    inner = engine.client_optimizer
    assert type(inner) is PlainAdam and inner.param_groups is given.param_groups
    assert inner.param_groups[0]["lr"] == 0.25 and not inner.param_groups[0]["decoupled"]
    engine.destroy()


def test_an_adam_of_deepspeeds_with_bf16_states_is_ours_with_its_groups():
    model = real_mlp()
    given = ON_CPU(model.parameters(), lr=0.25)
    given.fp32_optimizer_states = False
    engine, *_ = zero.initialize(model=model, optimizer=given, config={"bf16": {"bf16_optimizer_states": True}})
    inner = engine.client_optimizer
    assert type(inner) is PlainAdam and inner.param_groups is given.param_groups
    assert inner.param_groups[0]["moments"] == "bfloat16" and inner.param_groups[0]["bias_correction"]
    engine.destroy()


def test_an_adam_of_deepspeeds_with_groups_of_both_kinds_or_with_a_past_is_refused():
    model = mlp()
    both = FUSED([{"params": [model[0].weight], "bias_correction": False}, {"params": [model[0].bias]}])
    with pytest.raises(ValueError, match=r"Cannot use this FusedAdam: some of its groups have bias_correction=False"):
        zero.initialize(model=model, optimizer=both, config={})
    stepped = FUSED(model.parameters())
    stepped.state[next(model.parameters())] = {"step": 1}
    with pytest.raises(ValueError, match="it has stepped already"):
        zero.initialize(model=model, optimizer=stepped, config={})


class Own(torch.optim.SGD):
    """Known to nobody, as its step may do anything."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("allow", [True, 1])
def test_an_optimizer_of_ones_own_is_allowed_in_the_words_of_the_file(allow):
    model = mlp()
    with pytest.raises(ValueError, match='write "zero_allow_untested_optimizer": true') as caught:
        zero.initialize(model=model, optimizer=Own(model.parameters(), lr=0.1), config={})
    assert "elementwise" not in str(caught.value)
    config = {"zero_allow_untested_optimizer": allow}
    engine, *_ = zero.initialize(model=model, optimizer=Own(model.parameters(), lr=0.1), config=config)
    engine.destroy()


def test_a_pipeline_module_is_refused_as_one():
    class PipelineModule(nn.Sequential):
        pass

    class Mine(PipelineModule):
        pass

    with pytest.raises(ValueError, match="Cannot initialize Mine: it is a PipelineModule, and pipeline parallelism is not"):
        zero.initialize(model=Mine(nn.Linear(2, 2)), config=FILE)


def test_a_second_engine_of_a_model_closes_the_first(caplog):
    model = mlp()
    first, *_ = zero.initialize(model=model, config=FILE)
    first.backward(loss_of(first, 0))
    second, *_ = zero.initialize(model=model, config=FILE)
    assert first.is_closed and "has an engine already, which is closed now" in caplog.text
    second.backward(loss_of(second, 0))
    second.step()
    assert second.global_steps == 1
    second.destroy()
    caplog.clear()
    third, *_ = zero.initialize(model=model, config=FILE)
    assert "has an engine already" not in caplog.text
    third.destroy()


def test_a_call_that_is_refused_leaves_the_first_engine():
    model = mlp()
    first, *_ = zero.initialize(model=model, config=FILE)
    with pytest.raises(ValueError, match="from 0 to 3"):
        zero.initialize(model=model, config={**FILE, "zero_optimization": {"stage": 4}})
    assert not first.is_closed
    first.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_without_an_optimizer_an_engine_runs_forward(stage, tmp_path, caplog):
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 3}
    engine, optimizer, loader, schedule = zero.initialize(model=mlp(), config=config)
    assert (optimizer, loader, schedule) == (None, None, None) and engine.optimizer is None
    assert "this engine only runs forward" in caplog.text
    assert engine(real_numbers((2, 4)).bfloat16()).dtype == torch.bfloat16
    assert engine.train_micro_batch_size_per_gpu() == 3 and engine.bfloat16_enabled() and engine.loss_scale() == 1.0
    assert engine.eval() is engine and not engine.training and (engine.global_rank, engine.world_size) == (0, 1)
    for call in ("backward", "step", "scale", "save_checkpoint"):
        with pytest.raises(ValueError, match="this engine has no optimizer"):
            getattr(engine, call)(None)
    assert engine.save_16bit_model(tmp_path)
    assert set(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == set(mlp().state_dict())
    engine.destroy()


def test_an_engine_for_forward_only_takes_the_weights_of_a_checkpoint(tmp_path):
    trained = engine_of(solo(), dtype="bfloat16")
    trained.backward(loss_of(trained, 0))
    trained.step()
    trained.save_checkpoint(tmp_path, client_state={"epoch": 3})
    engine, *_ = zero.initialize(model=mlp(), config={"bf16": {"enabled": True}})
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    path, state = engine.load_checkpoint(tmp_path, load_module_only=True)
    assert path.endswith("global_step1") and state == {"epoch": 3}
    assert same(weights(engine.module), weights(trained.module))
    engine.destroy()


def test_the_batch_size_changes_between_two_windows():
    def train(engine, sizes):
        for number, size in enumerate(sizes):
            engine.set_train_batch_size(size)
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(loss_of(engine, (number, micro)))
                engine.step()
        return weights(engine.module)

    batch = Batch.of(micro_samples=2, accumulation=1, world_size=1)
    engine = engine_of(solo(), batch=batch)
    found = train(engine, [2, 8, 4])
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.global_steps) == (4, 2, 3)
    assert engine.global_samples == 14
    plain = mlp()
    inner = sgd(plain)
    for number, count in enumerate([1, 4, 2]):
        for micro in range(count):
            (loss_of(plain, (number, micro)) / count).backward()
        inner.step()
        inner.zero_grad()
    for one, other in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-5)
    engine.set_train_micro_batch_size(3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 3)
    with pytest.raises(ValueError, match="not a multiple"):
        engine.set_train_batch_size(7)
    engine.backward(loss_of(engine, 9))
    with pytest.raises(ValueError, match="in the middle of an accumulation"):
        engine.set_train_batch_size(3)


def test_an_engine_says_what_its_file_says():
    engine, *_ = zero.initialize(
        model=mlp(),
        config={
            **FILE,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "managed_gradient_accumulation": False,
            "dataloader_drop_last": True,
            "scheduler": {"type": "WarmupLR", "params": {}},
            "fp16": {"enabled": True, "initial_scale_power": 3},
            "steps_per_print": 7,
            "memory_breakdown": True,
        },
    )
    assert [say() for say in engine.get_batch_info()] == [6, 2, 3]
    assert not engine.managed_gradient_accumulation() and engine.dataloader_drop_last()
    assert (engine.optimizer_name(), engine.scheduler_name(), engine.steps_per_print()) == ("adamw", "WarmupLR", 7)
    assert engine.memory_breakdown() and not engine.wall_clock_breakdown() and not engine.torch_autocast_enabled()
    assert (engine.dynamic_loss_scale(), engine.initial_dynamic_scale(), engine.loss_scale()) == (True, 8.0, 8.0)
    engine.destroy()


def test_a_loader_of_a_dataset_is_this_ranks_part():
    def program(group):
        engine = engine_of(group, batch=Batch.of(micro_samples=2, world_size=group.size))
        batches = [batch.tolist() for batch in engine.deepspeed_io(list(range(8)), route="eval")]
        whole = [batch.tolist() for batch in engine.deepspeed_io(list(range(3)), batch_size=3, data_sampler=[2, 0, 1])]
        return batches, whole

    assert run_ranks(2, program) == [([[0, 2], [4, 6]], [[2, 0, 1]]), ([[1, 3], [5, 7]], [[2, 0, 1]])]


def test_a_schedule_says_the_momentum_that_it_moves():
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}}
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    for scheduler, expected in ((cycle, [(0.9, 0.99)]), (warmup, None)):
        engine, _, _, schedule = zero.initialize(model=mlp(), config={**FILE, "scheduler": scheduler})
        assert schedule.get_mom() == expected
        engine.empty_partition_cache()
        engine.destroy()


def test_the_loss_scale_moves_as_deepspeeds_with_initialize(caplog):
    caplog.set_level(logging.ERROR)
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    engine, *_ = zero.initialize(model=mlp(), config={**FILE, "fp16": fp16})
    found = []
    for step in range(8):
        loss = loss_of(engine, step)
        engine.backward(loss * float("inf") if step == 4 else loss)
        engine.step()
        found.append(engine.loss_scale())
    assert found == [16.0, 16.0, 32.0, 32.0, 16.0, 16.0, 16.0, 32.0]
    engine.destroy()
