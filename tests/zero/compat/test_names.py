"""Every name of DeepSpeed's that scripts import or call is served, does nothing, or says when it is used what to write."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import zero.compat.deepspeed as deepspeed
from tests.zoo.case import mlp, real_mlp, real_numbers
from zero.compat.deepspeed.absent import Absent
from zero.compat.deepspeed.accelerator import get_accelerator

LIST = (Path(__file__).parents[2] / "data" / "deepspeed_names.txt").read_text(encoding="utf-8")
MODULES = [line.partition(":")[::2] for line in (Path(__file__).parents[2] / "data" / "deepspeed_modules.txt")
           .read_text(encoding="utf-8").splitlines() if not line.startswith("#")]  # fmt: skip
SECTIONS = dict(re.findall(r"^\[(\w+)\]\n(.*?)(?=^\[|\Z)", LIST, re.MULTILINE | re.DOTALL))
IMPORTS = [(place, name) for line in SECTIONS["imports"].split("\n") if line
           for place, names in [line.split(": ")] for name in names.split()]  # fmt: skip
FILE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
FP16 = {**FILE, "fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 2}}


@pytest.fixture
def engine():
    engine, *_ = deepspeed.initialize(model=real_mlp(), config=FILE)
    yield engine
    engine.destroy()


def test_every_name_is_imported_and_says_what_to_write_if_it_is_not_here():
    for place, name in IMPORTS:
        module = importlib.import_module("zero.compat.deepspeed" + ("" if place == "." else f".{place}"))
        found = getattr(module, name.rstrip("!"))
        is_absent = isinstance(found, type) and issubclass(found, Absent)
        assert is_absent == name.endswith("!"), (place, name)
        if is_absent:
            text = rf"Cannot use {found.__name__} of DeepSpeed: it is not here\. [A-Z`].*\."
            with pytest.raises(NotImplementedError, match=text):
                found(1, some=2)


@pytest.mark.parametrize(("place", "names"), MODULES)
def test_every_module_is_imported_by_its_path_in_each_way(place, names):
    path = "zero.compat.deepspeed" + ("" if place == "." else f".{place}")
    seen = {}
    exec(f"import {path} as d", seen)
    assert importlib.import_module(path) is seen["d"]
    for name in names.split():
        exec(f"from {path} import {name}", seen)
        assert seen[name] is getattr(seen["d"], name)
        assert not (isinstance(seen[name], type) and issubclass(seen[name], Absent))


@pytest.mark.parametrize("what", ["engine", "optimizer", "accelerator"])
def test_every_name_on_what_deepspeed_returns_is_there_or_says_what_to_write(what, engine):
    target = {"engine": engine, "optimizer": engine.optimizer, "accelerator": get_accelerator()}[what]
    for name in SECTIONS[what].split():
        if name.endswith("!"):
            with pytest.raises((AttributeError, NotImplementedError), match=name[:-1]) as caught:
                getattr(target, name[:-1])
            assert "Ask the optimizer or the model" not in str(caught.value)
        else:
            getattr(target, name)


def test_the_list_has_what_scripts_were_stopped_by():
    names = {name for _, name in IMPORTS}
    assert {"ZeroParamStatus", "recursive_getattr", "FusedLamb!", "FusedLion", "LossScaler!"} <= names
    assert {"tput_timer", "set_lr", "monitor", "mpu", "client_optimizer", "timers"} <= set(SECTIONS["engine"].split())


# what serves ------------------------------------------------------------------------------------------------------------


def train(engine, steps=3):
    for seed in range(steps):
        engine.backward(engine(real_numbers((2, 4), seed).to(next(engine.parameters()).dtype)).float().square().mean())
        engine.step()


def test_an_engine_counts_epochs_and_samples_of_a_second(engine):
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
    train(engine)
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1 and engine.tput_timer.global_step_count == 3
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")


def test_a_throughput_timer_of_a_script_tells_what_it_measured_every_few_steps():
    told = []
    timer = deepspeed.utils.timer.ThroughputTimer(None, 4, 1, 2, True, told.append)
    for step in range(4):
        for is_last in (False, True):
            assert not timer.started
            timer.start()
            assert timer.started
            timer.stop(global_step=is_last, report_speed=step != 3 or is_last)
    assert [line.split(", ")[0] for line in told] == [
        f"epoch=0/micro_step={2 * step}/global_step={step}" for step in (2, 2, 4, 4)
    ]
    speed = told[0].split(", ")[1:]
    assert [part.split("=")[0] for part in speed] == ["RunningAvgSamplesPerSec", "CurrSamplesPerSec"]
    assert float(speed[0].split("=")[1]) == float(speed[1].split("=")[1]) > 0  # both are of one step
    timer.steps_per_output = 0
    timer.start()
    with pytest.raises(ValueError, match="Cannot use steps_per_output=0"):
        timer.stop(global_step=True)
    with pytest.raises(ValueError, match="Cannot use steps_per_output=-1"):
        deepspeed.utils.timer.ThroughputTimer(None, 4, steps_per_output=-1)


def test_a_throughput_timer_does_nothing_where_its_configuration_says_so():
    off = deepspeed.utils.timer.ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), 4)
    off.start()
    off.stop(global_step=True)
    assert not off.started and off.global_step_count == off.micro_step_count == 0


def test_timers_measure_by_name(engine, caplog):
    caplog.set_level("INFO", logger="zero")
    timer = engine.timers("data")
    for _ in range(2):
        timer.start()
        timer.stop()
    assert 0 < timer.mean() < timer.elapsed(reset=False) and engine.timers("data") is timer
    engine.timers.log(["data", "unknown"])
    assert "time (ms) | data: " in caplog.text and timer.elapsed() == 0.0
    assert engine.timers.get_mean(["data"]) == {"data": 0.0} and list(engine.timers.get_timers()) == ["data"]
    with pytest.raises(ValueError, match="Cannot stop timer 'data': it is not running"):
        timer.stop()


def test_a_timer_that_is_read_while_it_runs_goes_on(engine):
    timer = engine.timers("batch")
    timer.start()
    assert timer.elapsed() > 0 and timer.started_
    timer.stop()  # it raised when reading had stopped the timer
    assert timer.elapsed(reset=False) > 0 and not timer.started_
    assert engine.timers.memory_usage()


def test_an_evaluation_does_not_count_as_training_time(engine):
    engine.eval()
    engine(real_numbers((2, 4)))
    engine.train()
    assert not engine.tput_timer.started
    engine(real_numbers((2, 4)))
    assert engine.tput_timer.started


def test_logging_helpers_warn_once_and_set_the_level(caplog):
    helpers = deepspeed.utils.logging
    for _ in range(2):
        helpers.warning_once("a thing is missing")
    assert caplog.text.count("a thing is missing") == 1
    level = helpers.logger.level
    helpers.set_log_level_from_string("error")
    assert helpers.should_log_le("error") and not helpers.should_log_le("warning")
    helpers.logger.setLevel(level)


def test_modules_of_a_name_are_the_same_as_the_names_above_them():
    from zero.compat.deepspeed.comm import comm
    from zero.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam

    assert comm.all_reduce is deepspeed.dist.all_reduce is torch.distributed.all_reduce
    assert DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from zero.compat.deepspeed.comm import no_such_name")


def test_learning_rates_are_set_by_hand(engine):
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5] and engine.optimizer.get_lr() == 0.5
    engine.optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25] and engine.client_optimizer.param_groups[0]["lr"] == 0.25


def test_a_module_state_dict_is_loaded_as_a_checkpoint_has_it(engine):
    state = {name: torch.ones_like(tensor) for name, tensor in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": state})
    assert all((param == 1).all() for param in engine.parameters())
    engine.load_module_state_dict({"0.bias": torch.zeros_like(state["0.bias"])}, strict=False)
    assert not engine.module[0].bias.any() and engine.module[0].weight.all()
    seen = []
    engine.load_module_state_dict(state, custom_load_fn=lambda src, dst: seen.append((src, dst)))
    assert seen == [(state, engine.module)]


def test_weights_are_saved_under_the_old_name_too(engine, tmp_path):
    assert engine.save_fp16_model(tmp_path)
    assert torch.load(tmp_path / "pytorch_model.bin").keys() == engine.module_state_dict().keys()


def test_a_monitor_takes_figures_whether_or_not_anybody_writes_them(engine):
    engine.monitor.write_events([("loss", 1.0, 3)])
    assert not engine.monitor.enabled and engine.mpu is None


def test_an_engine_without_an_optimizer_has_a_monitor_and_timers():
    engine, *_ = deepspeed.initialize(model=mlp(), config={"train_micro_batch_size_per_gpu": 2})
    engine.monitor.write_events([("loss", 1.0, 3)])
    assert not engine.monitor.enabled and engine.mpu is None and engine.timers("data").elapsed() == 0.0
    engine.destroy()


def test_an_overflow_is_seen_on_the_optimizer(engine):
    assert not engine.optimizer.overflow
    train(engine, 1)
    assert not engine.optimizer.overflow
    engine.backward(engine(real_numbers((2, 4)) * float("inf")).square().mean())
    engine.step()
    assert engine.optimizer.overflow


def test_a_backward_of_the_callers_without_the_loss_scale_is_refused_and_the_next_one_counts():
    engine, *_ = deepspeed.initialize(model=real_mlp(), config=FP16)
    x = real_numbers((2, 4)).half()
    with pytest.raises(RuntimeError, match=r"does not carry the loss scale of 256.* engine.scale\(loss\).backward\(\)"):
        engine(x).float().square().mean().backward()
    engine.zero_grad()
    engine.scale(engine(x).float().square().mean()).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_an_engine_without_an_optimizer_has_a_loss_scaler_that_can_be_set():
    engine, *_ = deepspeed.initialize(model=mlp(), config={"train_micro_batch_size_per_gpu": 2})
    assert engine.loss_scaler.loss_scale == 1.0 and engine.client_optimizer is None
    engine.loss_scaler = own = object()
    assert engine.loss_scaler is own
    engine.destroy()


def test_a_cpu_is_any_device_that_is_asked_for():
    get_accelerator().set_device(3)
    assert get_accelerator().current_device() == 0


def test_a_local_rank_that_torchrun_does_not_pass_is_told_of(monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_RANK", "0")
    for local_rank, told in ((0, False), (-1, True)):
        engine, *_ = deepspeed.initialize(args=type("Args", (), {"local_rank": local_rank}), model=mlp(), config=FILE)
        engine.destroy()
        assert ("torchrun passes no --local_rank. Read LOCAL_RANK, which is 0" in caplog.text) == told


def test_a_lion_is_ours():
    optimizer = deepspeed.ops.lion.FusedLion(mlp().parameters(), lr=0.1)
    assert isinstance(optimizer, deepspeed.ops.lion.DeepSpeedCPULion) and optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="Cannot make a Lion with fp32_optimizer_states=False"):
        deepspeed.ops.lion.DeepSpeedCPULion(mlp().parameters(), fp32_optimizer_states=False)


def test_modules_are_found_and_replaced_by_their_names():
    helper, model = deepspeed.compression.helper, mlp()
    helper.recursive_setattr(model, "0.bias", torch.nn.Parameter(torch.ones(8)))
    assert helper.recursive_getattr(model, "0.bias").sum() == 8
    helper.recursive_setattr(model, "extra", torch.nn.ReLU())
    assert isinstance(model.extra, torch.nn.ReLU)


def test_groups_of_one_rank():
    groups = deepspeed.utils.groups
    assert groups.get_data_parallel_world_size() == groups.get_model_parallel_world_size() == 1
    assert groups.get_data_parallel_rank() == groups._get_sequence_parallel_rank() == 0


def test_batches_go_to_a_device_with_all_that_is_in_them():
    utils = deepspeed.runtime.utils
    tensor = torch.ones(2)
    batch = {"ids": [tensor, (tensor, tensor)]}
    moved = utils.move_to_device(batch, "meta")
    assert [type(each) for each in moved["ids"]] == [torch.Tensor, tuple] and moved["ids"][1][0].device.type == "meta"
    assert utils.copy_to_device({"ids": tensor, "name": "x"}, "meta", torch.is_tensor)["name"] == "x"
    assert utils.copy_to_device([tensor], "cpu", lambda _: False) == [tensor]
    double = utils.move_to_device(tensor, torch.float64, torch.is_tensor)  # in place, whatever `to` is asked for
    assert double is tensor and tensor.dtype == torch.float64


def test_timers_that_measure_nothing_have_the_names_of_those_that_do(engine):
    none = deepspeed.utils.timer.NoopTimer()
    for timer in (none("data"), engine.timers("data")):
        timer.start()
        timer.stop()
    assert none("data").elapsed() == none("data").mean() == 0 and none.get_timers() == {}
    none.log(["data"])
    none.get_mean(["data"])


def test_what_init_would_have_changed_is_neither_undone_nor_done_again():
    states = deepspeed.zero.partition_parameters
    assert states is deepspeed.runtime.zero.partition_parameters and deepspeed.zero.ZeroParamStatus is states.ZeroParamStatus
    made = []
    with deepspeed.zero.Init():
        for switch in (states.shutdown_init_context, states.restore_init_context):
            switch()
            made.append(mlp())
    assert not any(states.is_zero_param(param) for model in made for param in model.parameters())


def test_a_class_of_a_package_that_is_here_in_part_is_no_module():
    from zero.compat.deepspeed.ops.adam import ZenFlowCPUAdam
    from zero.compat.deepspeed.runtime.zero import TiledLinear, stage3

    assert issubclass(ZenFlowCPUAdam, Absent) and issubclass(TiledLinear, Absent)
    assert stage3.__name__.endswith("runtime.zero.stage3")
    # without an import of their own, as there: whether or not another test has imported the first one; none has the second
    assert issubclass(deepspeed.monitor.monitor.MonitorMaster, Absent)
    assert "zero.compat.deepspeed.monitor.wandb" not in sys.modules
    with pytest.raises(NotImplementedError, match=r'Cannot use WandbMonitor of DeepSpeed: .* A "tensorboard" block'):
        deepspeed.monitor.wandb.WandbMonitor()


def test_an_entry_or_an_attribute_of_what_is_not_here_says_what_to_write():
    from zero.compat.deepspeed.compile.passes import zero3_compile
    from zero.compat.deepspeed.module_inject.auto_ep_config import PRESET_MODELS

    for use in (lambda: "mixtral" in PRESET_MODELS, lambda: list(PRESET_MODELS), lambda: len(PRESET_MODELS)):
        with pytest.raises(NotImplementedError, match=r"Cannot use PRESET_MODELS of DeepSpeed: it is not here\. There is no"):
            use()
    with pytest.raises(AttributeError, match=r"zero3_compile\.add_z3_gather_release of DeepSpeed: .* Torch\.compile"):
        zero3_compile.add_z3_gather_release()
    assert not hasattr(PRESET_MODELS, "__wrapped__") and not isinstance(mlp(), deepspeed.PipelineModule)


def test_flat_collectives_are_torchs(engine):
    deepspeed.init_distributed()
    assert engine.data_parallel_group is torch.distributed.group.WORLD is not None
    assert deepspeed.comm.has_all_gather_into_tensor() and deepspeed.comm.has_reduce_scatter_tensor()
    whole, part = torch.zeros(2), torch.ones(2)
    deepspeed.comm.allgather_fn(whole, part)
    assert whole.tolist() == [1, 1]
    deepspeed.comm.reduce_scatter_fn(part, whole * 2)
    assert part.tolist() == [2, 2]


def test_a_line_is_logged_once(caplog):
    caplog.set_level("INFO", logger="zero")
    for _ in range(2):
        deepspeed.utils.log_dist_once("a line about a thing", ranks=[0])
    assert caplog.text.count("a line about a thing") == 1
    helpers = deepspeed.utils.logging
    assert helpers.get_log_level_from_string("info") == helpers.log_levels["info"] == helpers.get_current_level()


def test_weights_for_one_file_are_whole_on_rank_0_and_none_elsewhere(engine, monkeypatch):
    assert not engine.zero_optimization_partition_weights() and engine.zero_gather_16bit_weights_on_model_save()
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert whole.keys() == engine.module_state_dict().keys()
    engine.module[0].weight.requires_grad_(False)
    assert "0.weight" not in engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    monkeypatch.setattr(type(engine), "group", SimpleNamespace(rank=1))
    assert engine._consolidated_16bit_state_dict() is None


def test_a_loss_of_two_engines_goes_backward_once(engine):
    other, *_ = deepspeed.initialize(model=real_mlp(), config=FILE)
    sum(each(real_numbers((2, 4))).square().mean() for each in (engine, other)).backward()
    for each in (engine, other):
        each._backward_epilogue()
        each.step()
    assert engine.was_step_applied() and other.was_step_applied()
    other.destroy()
