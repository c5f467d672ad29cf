"""One call gives what a DeepSpeed script asks for, or an error that names the argument, and then nothing is changed."""

import argparse
import inspect
import json
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

import zero
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.zoo.case import mlp, real_mlp, real_numbers
from zero.checkpoint.importers import import_checkpoint
from zero.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from zero.config.schema import Batch, OptimizerSpec, Report, ScheduleSpec, ZeroConfig, check_plain_loop, check_supported
from zero.optim.optimizers import Lion, PlainAdam

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


UNCLIPPED = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0}


def written(**more):
    usual = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": {"stage": 2}}
    return {**usual, "gradient_clipping": 0, **more}


def samples(count=12):
    return list(real_numbers((count, 4), "samples"))


def train(engine, batches):
    for x in batches:
        engine.backward(engine(x).square().mean())
        engine.step()


# what it gives ----------------------------------------------------------------------------------------------------------


def test_it_gives_an_engine_its_optimizer_a_loader_and_a_scheduler():
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    model = mlp()
    config = written(scheduler=schedule, gradient_accumulation_steps=3)
    engine, optimizer, loader, scheduler = zero.initialize(model=model, training_data=samples(), config=config)
    assert isinstance(engine, zero.Engine) and isinstance(optimizer, zero.ShardedOptimizer)
    assert engine.module is model and engine.optimizer is optimizer
    assert engine.training_dataloader is loader and engine.lr_scheduler is scheduler
    assert [batch.shape for batch in loader] == [(2, 4)] * 6
    assert type(optimizer.inner) is torch.optim.AdamW and engine.config.kernels in ("compiled", "fused")
    train(engine, loader)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 6, 12)
    assert scheduler.last_epoch == 2 and 0 < engine.get_lr()[0] < 1e-2


def test_without_data_and_schedule_these_are_none():
    _, _, loader, scheduler = zero.initialize(model=mlp(), config=written())
    assert loader is None and scheduler is None


@pytest.mark.parametrize(("clip", "norm"), [(0.5, 0.5), (None, 1.0), (0, math.inf)])
def test_a_model_trains_as_plain_torch_trains_it(clip, norm):
    engine, *_ = zero.initialize(model=real_mlp(), config=written(gradient_clipping=clip))
    plain = real_mlp()
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for x in (real_numbers((2, 4), step) for step in range(4)):
        train(engine, [3 * x])
        plain(3 * x).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), norm) > 1.0, "what clips nothing shows nothing"
        inner.step()
        inner.zero_grad()
    for mine, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("place", ["config", "config_params", "args"])
@pytest.mark.parametrize("kind", ["dict", "path", "object"])
def test_the_configuration_may_be_in_several_places_and_forms(place, kind, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(written()))
    own = ZeroConfig(stage=2, optimizer=OptimizerSpec.of("AdamW", {"lr": 1e-2, "weight_decay": 0.1}), kernels="fused")
    source = {"dict": written(), "path": str(path), "object": own}[kind]
    call = {"args": argparse.Namespace(deepspeed_config=source, local_rank=0)} if place == "args" else {place: source}
    engine, optimizer, *_ = zero.initialize(model=mlp(), **call)
    assert engine.zero_optimization_stage() == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_what_the_caller_passed_is_not_changed():
    config = written()
    before = json.dumps(config)
    zero.initialize(model=mlp(), config=config)
    assert json.dumps(config) == before


def test_parameters_come_as_a_list_an_iterator_or_groups():
    for parameters in (list, iter, lambda params: [{"params": list(params), "lr": 0.5}]):
        model = mlp()
        _, optimizer, *_ = zero.initialize(model=model, model_parameters=parameters(model.parameters()), config=written())
        found = [param for group in optimizer.param_groups for param in group["params"]]
        assert list(map(id, found)) == list(map(id, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.5
    model = mlp()
    _, optimizer, *_ = zero.initialize(model=model, model_parameters=model[2].parameters(), config=written())
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_an_optimizer_or_a_function_for_one_goes_before_the_written_one():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=sgd, config=written())
    assert optimizer.inner is sgd and engine.config.optimizer is None and engine.config.kernels == "torch"
    _, optimizer, *_ = zero.initialize(model=mlp(), optimizer=lambda params: torch.optim.SGD(params, lr=0.25), config=written())
    assert type(optimizer.inner) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 0.25


def test_auto_is_answered_by_the_rest_of_the_call():
    model = mlp().bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25)
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2}},
    }
    loader = DataLoader(samples(), batch_size=3)
    engine, _, same, scheduler = zero.initialize(model=model, optimizer=adam, training_data=loader, config=auto)
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.train_micro_batch_size_per_gpu() == 3 and engine.train_batch_size() == 6
    assert same is loader
    assert dict(engine.config.schedule.settings)["warmup_max_lr"] == 0.5 and scheduler is not None
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu is"):
        zero.initialize(model=mlp(), config=written(train_micro_batch_size_per_gpu="auto"))
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr is"):
        zero.initialize(model=mlp(), config=written(optimizer={"type": "AdamW", "params": {"lr": "auto"}}))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def test_the_loader_drops_the_last_batch_only_when_told_and_collates_as_told():
    _, _, loader, _ = zero.initialize(model=mlp(), training_data=Numbers(), config=written(train_micro_batch_size_per_gpu=4))
    assert [len(batch) for batch in loader] == [4, 4, 2] and len(loader) == 3
    config = written(train_micro_batch_size_per_gpu=4, dataloader_drop_last=True)
    _, _, loader, _ = zero.initialize(model=mlp(), training_data=Numbers(), collate_fn=tuple, config=config)
    assert [len(batch) for batch in loader] == [4, 4] and all(type(batch) is tuple for batch in loader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(4))


def test_a_stream_of_samples_is_batched_too():
    _, _, loader, _ = zero.initialize(model=mlp(), training_data=Stream(), config=written())
    assert [batch.shape for batch in loader] == [(2, 4)] * 2


def on_each_rank(rank, world):
    torch.manual_seed(rank)  # ranks that start apart are made equal
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    engine, _, loader, _ = zero.initialize(model=model, training_data=Numbers(), config=written(gradient_accumulation_steps=2))
    indices = [int(row[0]) for batch in loader for row in batch]
    train(engine, loader)
    engine.flush()
    engine.check()
    return indices, engine.train_batch_size(), engine.global_steps, [param.detach().clone() for param in engine.parameters()]


def test_every_rank_gets_its_part_of_the_data_and_the_same_weights():
    found = ranks.run(2, on_each_rank)
    assert sorted(found[0][0] + found[1][0]) == list(range(10))
    assert [one[1:3] for one in found] == [(8, 2)] * 2
    assert all(torch.equal(one, other) for one, other in zip(found[0][3], found[1][3], strict=True))


def on_a_device(rank, world):
    import accelerators
    import accelerators_sim as simulated

    simulated.bring_up()
    with accelerators.using("sim"):
        found = []
        for optimizer in (None, lambda params: torch.optim.SGD(params, lr=0.5), "made before"):
            model = mlp()
            held = list(map(id, model.parameters()))
            if optimizer == "made before":
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=written())
            before = [param.detach().cpu() for param in model.parameters()]
            train(engine, [real_numbers((2, 4)).to(engine.device)])
            moved = [not torch.equal(param.cpu(), value) for param, value in zip(model.parameters(), before, strict=True)]
            found.append((str(engine.device), list(map(id, model.parameters())) == held, all(moved)))
        return found, torch.__future__.get_swap_module_params_on_conversion()


@needs_sim
def test_a_model_that_moves_to_the_device_keeps_its_parameters_and_is_trained():
    """Some devices' tensors are of another kind, and plain torch would then make new Parameters that no optimizer knows."""
    [(found, swaps)] = ranks.run(1, on_a_device, fresh=True)
    assert found == [("sim:0", True, True)] * 3 and not swaps


# schedules --------------------------------------------------------------------------------------------------------------


def three_groups(model):
    first, second, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}, {"params": rest}], lr=0.125)


SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0, lambda step: 1.0 / (step + 1)]),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.5, 0.25, 0.125], total_steps=10, cycle_momentum=False),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


def trace(model, optimizer, scheduler, step):
    rates = []
    for number in range(6):
        model(real_numbers((2, 4), number)).square().mean().backward()
        step(number)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.promise("O04")
@pytest.mark.promise("O03")
@pytest.mark.parametrize("when", ["before", "after", "handed over before", "handed over as a function"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_torchs_schedules_drive_each_group_whenever_they_were_made(kind, when):
    plain = real_mlp()
    inner = three_groups(plain)
    scheduler = SCHEDULES[kind](inner)

    def plain_step(number):
        inner.step()
        inner.zero_grad()
        scheduler.step(*([1.0] if kind == "plateau" else []))

    expected = trace(plain, inner, scheduler, plain_step)
    assert len({tuple(rates) for rates in expected}) > 1

    model = real_mlp()
    mine = three_groups(model)
    made = SCHEDULES[kind](mine) if "before" in when else SCHEDULES[kind] if "function" in when else None
    engine, optimizer, _, handed = zero.initialize(
        model=model, optimizer=mine, lr_scheduler=made if "handed" in when else None, config=UNCLIPPED
    )
    driven = made if when == "before" else SCHEDULES[kind](optimizer) if when == "after" else None
    metrics = {"metrics": 1.0} if kind == "plateau" else {}

    def step(number):
        engine.step(lr_kwargs=metrics if handed is not None else None)
        if driven is not None:
            driven.step(*metrics.values())

    assert trace(model, optimizer, None, step) == expected
    for found, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, plain_param, rtol=1e-6, atol=1e-7)


# what cannot be served --------------------------------------------------------------------------------------------------


def other_schedule():
    return ExponentialLR(torch.optim.SGD(mlp().parameters(), lr=1.0), 0.5)


REFUSED = {
    "no model": ({"model": None}, ValueError, r"initialize\(model=None\)"),
    "mpu": ({"mpu": object()}, ValueError, r"initialize\(mpu=.*\): it has no get_data_parallel_group"),
    "no configuration": ({"config": None}, ValueError, "no configuration was given"),
    "two configurations": ({"config_params": written()}, ValueError, "config and config_params were"),
    "an old name too": ({"args": argparse.Namespace(deepscale_config="x")}, ValueError, "and args.deepscale_config were"),
    "a schedule of no optimizer": (
        {"config": {"zero_optimization": {"stage": 1}}, "lr_scheduler": list}, ValueError, "Cannot use lr_scheduler",
    ),
    "no optimizer at all": ({"optimizer": 3}, TypeError, "Cannot use optimizer=3:"),
    "a function for something else": ({"optimizer": lambda params: 3}, TypeError, "returns a int"),
    "parameters of another": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=1.0), "model_parameters": mlp().parameters()},
        ValueError,
        "neither the model nor the optimizer has",
    ),
    "a scheduler of another": ({"lr_scheduler": other_schedule()}, ValueError, "drives another optimizer"),
    "no scheduler": ({"lr_scheduler": 3}, TypeError, r"it has no step\(\)"),
    "nothing to collate": ({"collate_fn": list}, ValueError, "collate_fn"),
    "a mesh": ({"mesh_param": (2, 2)}, ValueError, "an engine makes no mesh"),
    "another port": ({"distributed_port": 29501}, ValueError, "ranks meet where their launcher says"),
    "no batch size": (
        {"training_data": Numbers(), "config": {"optimizer": ADAMW}}, ValueError, "Write train_micro_batch_size_per_gpu",
    ),
    "ranks that are not there": (
        {"config": ZeroConfig(stage=0, batch=Batch.of(micro_samples=1, world_size=3))}, ValueError, "a batch for 3 ranks: ",
    ),
    "an unknown key": ({"config": written(gradient_cliping=1.0)}, ValueError, "Did you mean 'gradient_clipping'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_served_is_named_and_nothing_is_changed(name):
    call, kind, words = REFUSED[name]
    model = mlp()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(kind, match=words):
        zero.initialize(**{"model": model, "config": written(), **call})
    assert [param.data_ptr() for param in model.parameters()] == pointers
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    zero.initialize(model=model, config=written())  # and it can be done right afterwards


def test_the_oldest_name_of_the_file_is_read_and_told(caplog):
    engine, *_ = zero.initialize(argparse.Namespace(deepscale_config=written()), mlp())
    assert engine.zero_optimization_stage() == 2 and "called args.deepspeed_config by now" in caplog.text
    engine.close()


def test_parameters_that_the_optimizer_leaves_out_are_left_alone(caplog):
    model = real_mlp()
    first, *others = model.parameters()
    before = first.detach().clone()
    optimizer = torch.optim.SGD(others, lr=0.5)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=written())
    engine.backward(engine(real_numbers((2, 4))).square().mean())
    engine.step()
    assert torch.equal(first, before) and "in no group of the optimizer, left alone: 0.weight" in caplog.text
    engine.close()


def test_the_arguments_are_deepspeeds_in_its_order():
    assert list(inspect.signature(zero.initialize).parameters) == [
        "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
        "dist_init_required", "collate_fn", "config", "mesh_param", "config_params", "group",
    ]  # fmt: skip


def test_arguments_that_ask_for_nothing_are_taken(monkeypatch):
    nothing = {"distributed_port": 29500, "mesh_param": None, "mpu": None, "dist_init_required": False}
    zero.initialize(model=mlp(), config=written(), **nothing)[0].close()
    monkeypatch.setenv("MASTER_PORT", "29511")
    zero.initialize(model=mlp(), config=written(), distributed_port=29511)[0].close()


def test_a_group_that_should_be_there_by_now_is_not_started(monkeypatch):
    started = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **options: started.append(arguments))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Cannot connect 2 ranks with dist_init_required=False: torch\.distributed"):
        zero.initialize(model=mlp(), config=written(), dist_init_required=False)
    assert started == []


def test_a_schedule_that_cannot_be_made_leaves_a_plain_model():
    def raises(optimizer):
        raise RuntimeError("no schedule today")

    model = mlp()
    with pytest.raises(RuntimeError, match="no schedule today"):
        zero.initialize(model=model, lr_scheduler=raises, config=written())
    model(real_numbers((1, 4))).sum().backward()
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())


def test_a_setting_that_nobody_honours_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"Cannot use accumulation_dtype.*: .+\. Take it out"):
        check_supported(ZeroConfig(stage=2, accumulation_dtype="bfloat16"))


ONLY_AN_ENGINE = {
    "autocast": "bfloat16",
    "optimizer": OptimizerSpec.of("SGD"),
    "schedule": ScheduleSpec.of("WarmupLR"),
    "drop_last": True,
    "count_micro_steps": False,
    "report": Report(memory=True),
}


@pytest.mark.parametrize("field", ONLY_AN_ENGINE)
def test_what_only_an_engine_does_is_refused_to_a_plain_loop(field):
    with pytest.raises(ValueError, match=f"Cannot use {field}: .*train with zero.initialize"):
        check_plain_loop(ZeroConfig(stage=2, **{field: ONLY_AN_ENGINE[field]}))
    check_plain_loop(ZeroConfig(stage=2))


def test_a_parameter_that_nobody_uses_is_an_error_where_that_was_asked_for():
    for ignored in (True, False):
        stage = {"stage": 2, "ignore_unused_parameters": ignored}
        engine, *_ = zero.initialize(model=mlp(), config=written(zero_optimization=stage))
        before = [param.detach().clone() for param in engine.parameters()]
        engine.backward(engine.module[0](real_numbers((2, 4))).sum())
        if ignored:
            engine.step()
            continue
        with pytest.raises(ValueError, match=r"no rank had a gradient for 2\.weight, 2\.bias \(2 such parameters\)") as caught:
            engine.step()
        assert "on_unused" not in str(caught.value), "in the words of the file"
        assert all(torch.equal(param, value) for param, value in zip(engine.parameters(), before, strict=True))
        engine.discard()
        train(engine, [real_numbers((2, 4))])
        assert engine.global_steps == 1


def test_what_makes_training_differ_from_plain_training_is_told(caplog):
    caplog.set_level("INFO", logger="zero")
    check_supported(ZeroConfig(stage=2, dtype="bfloat16", reduce_dtype="bfloat16"))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["gradients"]


# Adam without bias correction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_plain_adam_steps_by_its_averages_as_they_are(decoupled):
    param, rate, (first, second), decay = nn.Parameter(torch.tensor([1.0, -2.0])), 0.1, (0.9, 0.99), 0.5
    settings = {"betas": (first, second), "weight_decay": decay, "decoupled": decoupled, "bias_correction": False}
    adam = PlainAdam([param], lr=rate, **settings)
    value, mean, square = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for grads in ([1.0, -1.0], [-20.0, 3.0]):
        param.grad = torch.tensor(grads)
        adam.step(lambda: None)
        for i, grad in enumerate(grads):
            grad += 0.0 if decoupled else decay * value[i]
            mean[i] = first * mean[i] + (1 - first) * grad
            square[i] = second * square[i] + (1 - second) * grad * grad
            value[i] -= rate * (mean[i] / (math.sqrt(square[i]) + 1e-8) + (decay * value[i] if decoupled else 0.0))
    torch.testing.assert_close(param.detach(), torch.tensor(value))


@pytest.mark.parametrize(("decoupled", "kind"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_a_plain_adam_is_torchs_if_nothing_else_is_said(decoupled, kind):
    models = real_mlp(), real_mlp()
    mine = PlainAdam(models[0].parameters(), lr=0.05, weight_decay=0.1, decoupled=decoupled)
    theirs = kind(models[1].parameters(), lr=0.05, weight_decay=0.1)
    for step in range(4):
        for model, optimizer in zip(models, (mine, theirs), strict=True):
            model(real_numbers((2, 4), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


UNCORRECTED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False}}}
NARROW = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "amsgrad": False}}, "bf16": {"bf16_optimizer_states": True}}


@pytest.mark.parametrize("file", [UNCORRECTED, NARROW], ids=["uncorrected", "narrow"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_adam_of_a_file_trains_in_shares_and_is_saved(stage, file, tmp_path):
    engine, optimizer, *_ = zero.initialize(model=real_mlp(), config=written(**file, zero_optimization={"stage": stage}))
    inner, plain = optimizer.inner, real_mlp()
    assert type(inner) is PlainAdam
    adam = PlainAdam(plain.parameters(), **{name: inner.defaults[name] for name in inner.defaults if name != "params"})

    def check_step(step):
        x = real_numbers((2, 4), step)
        train(engine, [x])
        plain(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
        pairs = zip(engine.module.state_dict().values(), plain.state_dict().values(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)

    for step in range(3):
        check_step(step)
    moment = engine.whole_state(engine.module[0].weight)["exp_avg"]
    assert moment.dtype == (torch.bfloat16 if file is NARROW else torch.float32)
    engine.save_checkpoint(tmp_path)
    with torch.no_grad():
        engine.module[0].weight.zero_()
    engine.load_checkpoint(tmp_path)
    check_step(3)
    engine.save_checkpoint(tmp_path)
    zero.export(tmp_path, tmp_path / "exported", format="dcp")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    train(engine, [real_numbers((2, 4), 9)])  # a load undoes this
    zero.load(tmp_path / "imported", optimizer)
    check_step(4)
    engine.destroy()


@pytest.mark.parametrize("how", ["made", "function"])
def test_an_adam_that_is_passed_has_moments_in_bf16_if_it_says_so_as_the_file(how):
    """What it computes is what the one of the file does."""
    settings = {"lr": 1e-2, "adamw_mode": False, "fp32_optimizer_states": False}
    function = partial(DeepSpeedCPUAdam, **settings)
    models = [real_mlp(), real_mlp()]
    narrow = written(bf16=NARROW["bf16"], zero_optimization={"stage": 2})
    given = function if how == "function" else function(models[0].parameters())
    passed, *_ = zero.initialize(model=models[0], optimizer=given, config=narrow)
    named, *_ = zero.initialize(model=models[1], config={**narrow, **NARROW})
    for step in range(3):
        for engine in (passed, named):
            train(engine, [real_numbers((2, 4), step)])
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))
    assert passed.whole_state(models[0][0].weight)["exp_avg_sq"].dtype == torch.bfloat16
    passed.destroy()
    named.destroy()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, PlainAdam])
@pytest.mark.parametrize("file", [{}, NARROW], ids=["alone", "with one of the file"])
def test_an_adam_with_moments_in_fp32_is_refused_where_the_file_asks_for_bf16(kind, file):
    model = real_mlp()
    narrow = written(**{"bf16": NARROW["bf16"], **file})
    with pytest.raises(ValueError, match=r"^Cannot use bf16\.bf16_optimizer_states with the Adam .* pass DeepSpeedCPUAdam\("):
        zero.initialize(model=model, optimizer=kind(model.parameters()), config=narrow)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.initialize(model=model, optimizer=sgd, config=written(bf16=NARROW["bf16"]))[0].destroy()


def test_moments_in_bf16_that_were_asked_for_of_a_passed_adam_are_refused_on_a_disk(tmp_path):
    model = real_mlp()
    narrow = DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    places = {"masters": f"disk:{tmp_path}", "moments": f"disk:{tmp_path}"}
    with pytest.raises(ValueError, match=r"moments of this PlainAdam are bf16, .* or fp32_optimizer_states=False"):
        zero.shard(model, narrow, stage=2, homes=places)
    zero.shard(model, PlainAdam(model.parameters(), bias_correction=False), stage=2, homes=places).close()


# Lion -------------------------------------------------------------------------------------------------------------------


def test_lion_steps_by_the_sign_of_its_momentum():
    param, rate, (now, later), decay = nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), 0.1, (0.9, 0.99), 0.5
    lion = Lion([param], lr=rate, betas=(now, later), weight_decay=decay)
    value, momentum = [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]
    for grads in ([1.0, -1.0, 0.0], [-20.0, 3.0, 0.5]):
        param.grad = torch.tensor(grads)
        lion.step()
        for i, grad in enumerate(grads):
            blend = now * momentum[i] + (1 - now) * grad
            value[i] = value[i] * (1 - rate * decay) - rate * (math.copysign(1.0, blend) if blend else 0.0)
            momentum[i] = later * momentum[i] + (1 - later) * grad
    torch.testing.assert_close(param.detach(), torch.tensor(value))
    torch.testing.assert_close(lion.state[param]["exp_avg"], torch.tensor(momentum))


def test_lion_by_name_trains_in_shares():
    config = written(optimizer={"type": "Lion", "params": {"lr": 1e-2, "weight_decay": 0.1}})
    engine, optimizer, *_ = zero.initialize(model=real_mlp(), config=config)
    assert type(optimizer.inner) is Lion
    plain = real_mlp()
    lion = Lion(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for x in (real_numbers((2, 4), step) for step in range(3)):
        train(engine, [x])
        plain(x).square().mean().backward()
        lion.step()
        lion.zero_grad()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(engine.parameters(), plain.parameters(), strict=True))


def test_an_engine_can_be_made_of_what_shard_gave():
    model = mlp()
    engine = zero.Engine(zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1, group=solo(), accumulation=2))
    train(engine, [real_numbers((2, 4), step) for step in range(4)])
    assert engine.global_steps == 2


def test_an_optimizer_that_evaluates_the_loss_several_times_a_step_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match="Cannot shard LBFGS: it evaluates the loss several times a step"):
        zero.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=written())
