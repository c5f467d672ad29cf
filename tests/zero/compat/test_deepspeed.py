"""A script of DeepSpeed's users runs with one import changed, and what is not there says what to write instead."""

import argparse
import importlib
import logging

import pytest
import torch
from torch import nn

import zero.compat.deepspeed as deepspeed
from accelerators.backends.cpu import CpuAccelerator
from accelerators.compat.deepspeed import adapt
from accelerators.testing import AcceleratorContract
from tests import programs, ranks
from tests.zoo.case import mlp, real_mlp, real_numbers
from zero.compat.deepspeed.absent import ABSENT
from zero.compat.deepspeed.accelerator import get_accelerator, set_accelerator
from zero.compat.deepspeed.pipe import PipelineModule
from zero.compat.deepspeed.runtime.zero import offload_config
from zero.compat.deepspeed.utils import (
    RepeatingLoader,
    log_dist,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
    zero_to_fp32,
)

FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}

# The form of such scripts; `deepspeed` is ours.
SCRIPT = '''
import argparse
import torch
import zero.compat.deepspeed as deepspeed
from zero.compat.deepspeed import comm as dist
from zero.compat.deepspeed.accelerator import get_accelerator

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
deepspeed.init_distributed()
rank, device = dist.get_rank(), get_accelerator().current_device_name()
torch.manual_seed(rank)
with deepspeed.zero.Init(config_dict_or_path=path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1):
    if rank == 1:
        for param in model.parameters():
            torch.nn.init.constant_(param, 0.125)
started = [param.detach().clone() for param in model.parameters()]
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(4):
    x = torch.full((2, 4), 1.0 + rank + step, device=device, requires_grad=True)
    hidden = deepspeed.checkpointing.checkpoint(engine.module[0], x)
    loss = engine.module[2](hidden.relu()).square().mean()
    engine.backward(loss)
    engine.step()
moment = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
with deepspeed.zero.GatheredParameters([model[2].bias], modifier_rank=0):
    if rank == 0:
        model[2].bias.data.fill_(2.0)
exact = deepspeed.utils.safe_get_full_fp32_param(model[2].bias)
total = torch.ones(1)
dist.all_reduce(total)
found = started, engine.global_steps, moment, exact, total.item(), [param.detach().clone() for param in model.parameters()]
'''


def run_script(rank, world, path):
    namespace = {"path": path}
    exec(compile(SCRIPT, "script.py", "exec"), namespace)
    namespace["engine"].destroy()
    return namespace["found"]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_ordinary_script_runs_on_two_ranks(stage, tmp_path):
    (tmp_path / "ds.json").write_text(str({**FILE, "zero_optimization": {"stage": stage}}).replace("'", '"'))
    first, second = ranks.run(2, run_script, str(tmp_path / "ds.json"), group=True, timeout=120.0)
    started, steps, moment, exact, total, weights = first
    assert all(torch.equal(param, torch.full_like(param, 0.125)) for param in started + second[0])
    assert steps == 2 and moment.shape == (8, 4) and moment.any() and total == 2.0
    assert torch.equal(exact, torch.full((3,), 2.0)) and torch.equal(weights[-1], exact)
    assert torch.equal(moment, second[2]) and torch.equal(exact, second[3])
    assert all(torch.equal(one, other) for one, other in zip(weights, second[5], strict=True))


def test_a_script_of_one_process_may_start_a_world_of_one():
    program = """
import zero.compat.deepspeed as deepspeed
from zero.compat.deepspeed import comm
deepspeed.init_distributed(dist_backend="gloo")
deepspeed.init_distributed()
comm.barrier()
print(comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_all_ranks_from_group(), comm.is_initialized())
"""
    result = programs.python("-c", program)
    assert result.stdout.splitlines()[-1:] == ["0 1 0 [0] True"], result.stderr  # gloo of torch 2.8 has words of its own


def test_leaf_modules_of_stage_3_are_found_and_need_nothing():
    model = real_mlp()
    linear = [module for module in model if isinstance(module, torch.nn.Linear)]
    assert deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.Linear]) == linear
    assert deepspeed.utils.unset_z3_leaf_modules(model, ["Linear"]) == linear


# values of one parameter ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fp32", "bf16"])
def engine(request):
    bf16 = {"bf16": {"enabled": True}} if request.param == "bf16" else {}
    engine, *_ = deepspeed.initialize(model=real_mlp(), config={**FILE, **bf16, "gradient_accumulation_steps": 1})
    yield engine
    engine.destroy()


def backward(engine, seed=0):
    engine.backward(engine(real_numbers((2, 4), seed).to(next(engine.parameters()).dtype)).float().square().mean())


def test_gradients_are_read_and_set_whole(engine):
    param = engine.module[0].weight
    assert safe_get_full_grad(param) is None
    with pytest.raises(ValueError, match=r"Cannot set the gradient of 0.weight: no rank has one"):
        safe_set_full_grad(param, torch.ones_like(param))
    engine.discard()
    backward(engine)
    grad = safe_get_full_grad(param)
    assert grad.dtype == torch.float32 and grad.shape == param.shape and grad.any()
    safe_set_full_grad(param, torch.full(param.shape, 0.3))
    assert torch.equal(safe_get_full_grad(param), torch.full(param.shape, 0.3))
    safe_update_full_grad_vectorized(engine.parameters(), lambda grad, _: grad * 2)
    assert torch.equal(safe_get_full_grad(param), torch.full(param.shape, 0.6))
    with pytest.raises(ValueError, match="from a tensor of shape"):
        safe_set_full_grad(param, torch.ones(1))
    engine.step()


def test_exact_weights_are_read_and_set_whole(engine):
    param = engine.module[0].weight
    value = torch.linspace(0.1, 0.9, param.numel()).reshape(param.shape)
    safe_set_full_fp32_param(param, value)
    assert torch.equal(param, value.to(param.dtype))
    assert torch.equal(safe_get_full_fp32_param(param), value)
    with torch.no_grad():
        param.fill_(0.5)
    assert torch.equal(safe_get_full_fp32_param(param), torch.full(param.shape, 0.5))
    safe_set_full_fp32_param(param, value)
    backward(engine)
    engine.step()
    moved = safe_get_full_fp32_param(param) - value
    assert 0 < moved.abs().max() < 0.011  # one step of AdamW from there


def test_moments_are_read_and_set_whole(engine):
    param = engine.module[2].weight
    assert safe_get_full_optimizer_state(param, "exp_avg") is None
    with pytest.raises(ValueError, match=r"Cannot set state 'exp_avg' of 2.weight: .* Step once before"):
        safe_set_full_optimizer_state(param, torch.zeros(param.shape), "exp_avg")
    backward(engine)
    engine.step()
    value = torch.rand(param.shape)
    safe_set_full_optimizer_state(param, value, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), value)
    assert safe_get_full_optimizer_state(param, "exp_avg_sq").any()


def test_what_no_optimizer_manages_has_nothing_and_takes_nothing():
    param = mlp()[0].weight
    assert safe_get_full_grad(param) is None and safe_get_full_fp32_param(param) is None
    assert safe_get_full_optimizer_state(param, "exp_avg") is None
    with pytest.raises(ValueError, match="no sharded optimizer manages it"):
        safe_set_full_fp32_param(param, param)


def test_the_same_on_two_ranks():
    for one, other in ranks.run(2, on_two_ranks, group=True, timeout=120.0):
        assert one and other


def on_two_ranks(rank, world):
    engine, *_ = deepspeed.initialize(model=real_mlp(), config={**FILE, "bf16": {"enabled": True}})
    for _ in range(2):
        backward(engine, rank)
        engine.step()
    found = []
    for param in engine.parameters():
        value = torch.linspace(0.1, 0.9, param.numel()).reshape(param.shape)
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, value, "exp_avg_sq")
        found.append(torch.equal(safe_get_full_fp32_param(param), value) and torch.equal(param, value.bfloat16()))
        found.append(torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), value))
    engine.destroy()
    return all(found[::2]), all(found[1::2])


# other names ------------------------------------------------------------------------------------------------------------


class TestAcceleratorBehindDeepSpeedsInterface(AcceleratorContract):
    """Ours behind DeepSpeed's interface behind ours."""

    accelerator = lambda: adapt(deepspeed.accelerator.AcceleratorCalls(CpuAccelerator()))  # noqa: E731


def test_the_usual_calls_of_an_accelerator():
    it = get_accelerator()
    assert it.device_name() == it.current_device_name() == "cpu" and it.current_device() == 0 and it.device_count() == 1
    assert it.is_bf16_supported() and torch.float32 in it.supported_dtypes() and it.communication_backend_name() == "gloo"
    assert it.on_accelerator(torch.ones(1)) and it.FloatTensor([1.0]).dtype == torch.float32
    assert it.memory_allocated() > 0 and it.total_memory() > it.available_memory() > 0
    it.manual_seed(3)
    state = it.get_rng_state()
    drawn = torch.rand(2)
    it.set_rng_state(state)
    assert torch.equal(torch.rand(2), drawn)
    with it.device(0), it.stream(it.current_stream()):
        it.range_push("step")
        it.range_pop()
    environment = {}
    it.set_visible_devices_envs(environment, [0, 1])
    assert environment == {}
    with pytest.raises(NotImplementedError, match=r"Cannot use create_op_builder .* kernels= chooses"):
        it.create_op_builder("FusedAdamBuilder")
    with pytest.raises(AttributeError, match="Ask the accelerator itself"):
        it.no_such_call()


def test_another_accelerator_is_used_from_then_on():
    before = get_accelerator()
    set_accelerator(before)
    assert get_accelerator().own is before.own
    with pytest.raises(TypeError, match="it lacks"):
        set_accelerator(object())


def test_arguments_are_added_and_read():
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
    assert args.deepspeed and args.deepspeed_config is None


def test_recomputation_gives_the_same_gradients():
    def gradients(call):
        layer, x = nn.Linear(4, 4), real_numbers((2, 4)).requires_grad_()
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        call(lambda x: layer(x).tanh(), x).sum().backward()
        return layer.weight.grad

    checkpointing = deepspeed.checkpointing
    expected = gradients(lambda function, x: function(x))
    assert torch.equal(gradients(checkpointing.checkpoint), expected)
    assert torch.equal(gradients(checkpointing.non_reentrant_checkpoint), expected)


def test_options_of_recomputation_are_taken_and_told(caplog):
    deepspeed.checkpointing.configure(None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured() and "partition_activations without effect" in caplog.text
    deepspeed.checkpointing.reset()


def test_its_adams_and_schedules_are_torchs_with_its_arguments():
    model = mlp()
    adam = deepspeed.ops.adam
    assert type(adam.FusedAdam(model.parameters(), lr=0.1)) is torch.optim.AdamW
    optimizer = adam.DeepSpeedCPUAdam(model.parameters(), lr=0.1, adamw_mode=False)
    assert type(optimizer) is torch.optim.Adam and optimizer.param_groups[0]["fused"]
    assert isinstance(adam.FusedAdam(model.parameters(), bias_correction=False), adam.DeepSpeedCPUAdam)
    with pytest.raises(ValueError, match="Cannot make an Adam with amsgrad=True and fp32_optimizer_states=False"):
        adam.DeepSpeedCPUAdam(model.parameters(), amsgrad=True, fp32_optimizer_states=False)
    schedules = deepspeed.runtime.lr_schedules
    schedule = schedules.WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=2, warmup_type="linear")
    optimizer.step()
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="Load its state_dict"):
        schedules.WarmupLR(optimizer, last_batch_iteration=3)


def test_what_it_makes_is_of_the_kind_that_a_script_asks_for(engine):
    adam, schedules = deepspeed.ops.adam, deepspeed.runtime.lr_schedules
    assert isinstance(engine.optimizer, adam.FusedAdam) and not isinstance(torch.optim.SGD(mlp().parameters()), adam.FusedAdam)
    optimizer = torch.optim.Adam(mlp().parameters())
    schedule = schedules.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4, cycle_max_mom=0.95)
    assert isinstance(schedule, schedules.OneCycle) and not isinstance(schedule, schedules.WarmupLR)
    assert schedule.get_mom() == [(0.95, 0.99)] and optimizer.param_groups[0]["betas"][0] == 0.8
    schedule.step(3)  # after the fourth iteration, of which 0 is the first
    assert optimizer.param_groups[0]["lr"] == 0.5 and schedule.get_mom() == [(0.8, 0.99)]


def test_a_wrong_file_raises_the_error_that_a_script_catches():
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="zero_optimisation"):
        deepspeed.initialize(model=mlp(), config=FILE | {"zero_optimisation": {}})
    assert (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) == (0, 19, 8)


def test_copies_to_be_saved_own_only_what_they_show():
    part = torch.arange(10.0)[2:4]
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [part], "b": 3})
    assert torch.equal(copied["a"][0], part) and copied["a"][0].untyped_storage().nbytes() == 8 and copied["b"] == 3


def test_what_is_frozen_has_no_exact_value_and_a_quantized_weight_stays_so():
    model = real_mlp()
    first, *_ = model.parameters()
    first.requires_grad_(False)
    model.quantized = nn.Parameter(torch.ones(4, dtype=torch.float8_e5m2), requires_grad=False)
    engine, *_ = deepspeed.initialize(model=model, config=FILE | {"bf16": {"enabled": True}})
    assert safe_get_full_fp32_param(first) is None and first.dtype == torch.bfloat16
    assert model.quantized.dtype == torch.float8_e5m2
    engine.destroy()


def test_whole_weights_come_out_of_a_checkpoint(engine, tmp_path):
    engine.save_checkpoint(tmp_path)
    expected = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(real_mlp(), tmp_path)
    assert all(torch.equal(param, expected[name]) for name, param in model.named_parameters())
    for safe, name in ((False, "pytorch_model.bin"), (True, "model.safetensors")):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=safe)
        assert (tmp_path / "out" / name).is_file()
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)


def test_states_are_offloaded_by_deepspeeds_names(engine):
    kinds, where = offload_config.OffloadStateTypeEnum, offload_config.OffloadDeviceEnum
    backward(engine)
    engine.step()
    engine.offload_states(include=list(kinds), device=where.cpu, pin_memory=False)
    engine.reload_states()
    backward(engine, 1)
    engine.step()
    assert engine.global_steps == 2


def test_a_loader_repeats_and_lines_are_logged(caplog):
    caplog.set_level(logging.INFO, logger="zero")
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    log_dist("hello", ranks=[0])
    log_dist("not here", ranks=[3])
    assert "hello" in caplog.text and "not here" not in caplog.text


def test_what_is_not_there_can_be_imported_and_says_what_to_write_when_it_is_used():
    model = PipelineModule  # a script may ask `isinstance(model, PipelineModule)`
    assert not isinstance(mlp(), model) and not isinstance(mlp(), deepspeed.moe.layer.MoE)
    homes = {"deepspeed": deepspeed, "utils": deepspeed.utils, "zero": deepspeed.zero, "comm": deepspeed.comm}
    for name, instead in ABSENT.items():
        for home in homes.values():
            with pytest.raises(NotImplementedError, match=f"Cannot use {name} of DeepSpeed: it is not here") as caught:
                getattr(home, name)(layers=[])
            assert instead[1:] in str(caught.value)
    for home in (*homes.values(), deepspeed.checkpointing):
        with pytest.raises(AttributeError, match="no_such_name"):
            home.no_such_name  # noqa: B018


def test_nothing_of_deepspeed_is_imported():
    program = "import sys, zero.compat.deepspeed as d; print([name for name in sys.modules if name.startswith('deepspeed')])"
    result = programs.python("-c", program)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ops.lamb", "Initialize takes a LAMB of another package"),
        ("ops.op_builder", "There are no operators to build"),
        ("runtime.engine", "Initialize returns the engine"),
        ("runtime.zero.stage_1_and_2", "Initialize returns the optimizer"),
        ("utils.groups", "Torch's parallelize_module"),
        ("launcher.runner", "Start ranks with torchrun"),
    ],
)
def test_what_a_module_that_is_not_here_has_says_what_to_write_instead(name, instead):
    module = importlib.import_module(f"zero.compat.deepspeed.{name}")
    with pytest.raises(NotImplementedError, match=f"Cannot use SomeName of DeepSpeed: it is not here. {instead}"):
        module.SomeName()
    with pytest.raises(AttributeError):
        module.__some_name__  # noqa: B018


def test_a_module_that_deepspeed_has_not_either_cannot_be_imported():
    with pytest.raises(ModuleNotFoundError, match=r"Cannot import zero\.compat\.deepspeed\.something_new: .* docs/from-"):
        importlib.import_module("zero.compat.deepspeed.something_new")


def test_memory_is_pinned_as_deepspeed_asks_for_it():
    it = deepspeed.get_accelerator()
    assert it.pin_empty(2, 3, dtype=torch.bfloat16).shape == (2, 3)
    assert it.pin_empty_like(torch.ones(4)).shape == (4,)
    with pytest.raises(NotImplementedError, match="use pin_memory"):
        it.register_host_memory(torch.ones(4))
