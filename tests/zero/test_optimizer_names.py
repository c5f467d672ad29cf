"""The optimizer of `zero.initialize` by DeepSpeed's names, and the order of its state."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import zero
from tests import ranks
from tests.zoo.case import real_mlp, real_numbers

FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}
HALVES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fixed": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}


def initialized(stage=2, half="fp32", rank=0, **more):
    config = {**FILE, **HALVES[half], "zero_optimization": {"stage": stage}}
    if "optimizer" in more:
        del config["optimizer"]
    more.setdefault("model", real_mlp())
    return zero.initialize(config=config, **more)


def train(engine, steps=3, rank=0):
    for seed in range(steps):
        x = real_numbers((2, 4), seed, rank).to(next(engine.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


@pytest.mark.parametrize(("half", "scale", "moves"), [("fp32", 1.0, False), ("fp16", 256.0, True), ("fixed", 128.0, False)])
def test_the_loss_scale_has_deepspeeds_names(half, scale, moves):
    engine, optimizer, *_ = initialized(half=half)
    assert optimizer.cur_scale == optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == scale
    assert optimizer.dynamic_loss_scale is moves and optimizer.loss_scaler.dynamic is moves
    assert optimizer.loss_scale_config.cur_scale == scale and optimizer.loss_scale_config.dynamic_loss_scale is moves
    assert optimizer.needs_scaler() is (half != "fp32")
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", ["fp32", "bf16"])
def test_the_optimizer_that_was_passed_is_seen_with_this_ranks_shares(stage, half):
    model = real_mlp()
    passed = torch.optim.Adam(model.parameters(), lr=0.01)
    engine, optimizer, *_ = initialized(stage, half, model=model, optimizer=passed)
    train(engine)
    own = optimizer.optimizer
    assert type(own) is torch.optim.Adam and own.defaults == passed.defaults
    steps = [own.state[share]["step"].item() for group in own.param_groups for share in group["params"]]
    assert steps and set(steps) == {engine.global_steps}
    assert sum(share.numel() for share in own.param_groups[0]["params"]) == sum(p.numel() for p in real_mlp().parameters())
    saved = copy.deepcopy(own.state_dict())
    assert sorted(saved["state"]) == saved["param_groups"][0]["params"] and saved["param_groups"][0]["lr"] == 0.01
    engine.destroy()
    with pytest.raises(ValueError, match="optimizer that was closed"):
        optimizer.optimizer  # noqa: B018


def test_its_settings_are_those_that_train():
    engine, optimizer, *_ = initialized()
    own = optimizer.optimizer
    schedule = StepLR(own, step_size=1, gamma=0.5)
    train(engine, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"] == 0.005
    optimizer.param_groups[0]["lr"] = 0.25
    group = own.param_groups[0]
    assert group["lr"] == 0.25 and dict(group).keys() == optimizer.param_groups[0].keys() and len(group) == len(dict(group))
    group["mine"] = 3
    assert optimizer.param_groups[0]["mine"] == 3
    del group["mine"]
    assert "mine" not in optimizer.param_groups[0]
    engine.destroy()


def test_what_only_all_ranks_can_do_is_not_done_with_shares():
    engine, optimizer, *_ = initialized()
    own = optimizer.optimizer
    with pytest.raises(ValueError, match="Call step of the engine"):
        own.step()
    with pytest.raises(ValueError, match="Save and load with the engine"):
        own.load_state_dict(own.state_dict())
    with pytest.raises(ValueError, match="Call add_param_group of the optimizer"):
        own.param_groups[0]["params"] = []
    engine.destroy()


# order ------------------------------------------------------------------------------------------------------------------


def entries(optimizer):
    return [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine) for mine, theirs in pairs)


def load_in_order(rank, world, stage, half, folder):
    engine, optimizer, *_ = initialized(stage, half)
    train(engine, rank=rank)
    expected, by_number = entries(optimizer), copy.deepcopy(optimizer.optimizer.state_dict())
    engine.save_checkpoint(folder)
    state_dict = copy.deepcopy(optimizer.state_dict())
    engine.destroy()
    found = []
    for load in (lambda engine: engine.load_checkpoint(folder), lambda engine: engine.optimizer.load_state_dict(state_dict)):
        engine, optimizer, *_ = initialized(stage, half)
        load(engine)
        numbers = optimizer.optimizer.state_dict()["state"]
        found.append(same(entries(optimizer), expected) and list(numbers) == list(by_number["state"]))
        engine.destroy()
    return found, len(expected)


@pytest.mark.parametrize("half", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loaded_state_is_in_the_order_in_which_steps_made_it(stage, half, tmp_path):
    results = ranks.run(2, load_in_order, stage, half, str(tmp_path), group=True, timeout=120.0)
    assert [found for found, _ in results] == [[True, True]] * 2 and sum(count for _, count in results) >= 4
