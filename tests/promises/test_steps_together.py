"""A fused kernel steps many buckets of a device at a time, to the bits of one after the other."""

import math
import tempfile
from collections import Counter
from functools import partial

import pytest
import torch

from tests import faults, inside
from tests.devices import needs_cuda, needs_muon, needs_sim
from tests.promises.offloads import bits, difference, on_device, send


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)


def lion_called_fused(model):
    """The simulated device has no fused kernel. This step takes no notice of the word."""
    optimizer = inside.lion(model.parameters(), lr=0.02)
    optimizer.param_groups[0]["fused"] = True
    return optimizer


def fused_muon(model):
    optimizer = torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02)
    optimizer.param_groups[0]["fused"] = True
    return optimizer


def steps(most, model, optimizer, rank):
    """Bits after some steps, and how many blocks each call of the step had."""
    numbers, step = [], faults.STEP_OF_BLOCKS.now

    def counted(self, batch, used):
        numbers.append(len(batch))
        step(self, batch, used)

    with faults.steps_at_most(most), faults.STEP_OF_BLOCKS.replaced(counted):
        for number in range(3):
            send(model, optimizer, rank, number)
            optimizer.step()
            optimizer.zero_grad()
    return bits(model, optimizer), numbers


DISK = {"home": "disk", "path": tempfile.gettempdir()}
HOMES = {
    "on the device": {},
    "half on the host": {"offload": {"ratio": 0.5}},
    "moments on the host": {"homes": {"moments": "cpu"}},
    "moments on disk": {"homes": {"moments": DISK}},
    "gradients on disk": {"homes": {"gradients": DISK}},
}
DAILY = ("half on the host", "moments on disk")
TOGETHER = ("on the device", "half on the host")  # what comes for its turn alone is not


on_devices = pytest.mark.parametrize(
    ("device", "make"),
    [pytest.param("sim", lion_called_fused, marks=needs_sim), pytest.param("cuda", fused_adamw, marks=needs_cuda)],
)


@on_devices
@pytest.mark.parametrize("homes", [name if name in DAILY else pytest.param(name, marks=pytest.mark.full) for name in HOMES])
def test_many_buckets_at_a_time_have_the_bits_of_one_after_the_other(device, make, homes):
    points = [
        {"stage": stage, "dtype": dtype, "clip": 0.5, "make": make, **HOMES[homes]}
        for stage in (1, 2, 3)
        for dtype in ("bfloat16", None)
    ]
    [one_by_one], [some], [all_] = (on_device(device, 1, partial(steps, most), points) for most in (0, 70, 2**26))
    calls = Counter()
    for (expected, ones), (of_some, few), (of_all, most) in zip(one_by_one, some, all_, strict=True):
        assert difference(of_some, expected) is None and difference(of_all, expected) is None
        assert set(ones) == {1} and sum(most) == sum(few) == sum(ones) > 3 * 3
        calls += {"all": len(most), "some": len(few), "one": len(ones)}
    if homes in TOGETHER:
        assert calls["all"] <= calls["some"] < calls["one"]
    else:
        assert calls["all"] == calls["some"] == calls["one"]


def steps_with_edits(ahead, model, optimizer, rank):
    """Bits after edits before a step, before one that is skipped for what was edited, and after that one; and in the order of
    what was done how many blocks were compared, that the norm was read, and that edits of a block were taken over."""
    param, order = next(model.parameters()), []
    compare, norm, take_over = faults.COMPARISON_OF_MASTERS.now, faults.NORM_OF_ALL.now, faults.ADOPTION.now

    def total_norm(self, *given):
        order.append("norm")
        return norm(self, *given)

    def are_edited(self, blocks):
        order.append(len(blocks))
        return compare(self, blocks)

    def adopt(weights, own):
        order.append("adopt")
        return take_over(weights, own)

    look_at = faults.LOOKING_AHEAD.now if ahead else lambda self, used: []
    with (
        faults.LOOKING_AHEAD.replaced(look_at),
        faults.COMPARISON_OF_MASTERS.replaced(are_edited),
        faults.NORM_OF_ALL.replaced(total_norm),
        faults.ADOPTION.replaced(adopt),
    ):
        for number, factor in enumerate((2.0, math.inf, 0.0, 1.0)):
            kept = param.detach().clone()
            param.data.mul_(factor)
            send(model, optimizer, rank, number)
            optimizer.step()
            assert optimizer.skipped_steps == (number >= 1)
            if factor == math.inf:
                param.data.copy_(kept)
            optimizer.zero_grad()
    return bits(model, optimizer), order


@on_devices
@pytest.mark.parametrize("stage", [1, 3])
def test_edits_are_looked_for_while_the_host_waits_for_the_norm(device, make, stage):
    point = {"stage": stage, "dtype": "bfloat16", "clip": 0.5, "on_nonfinite": "skip", "make": make}
    [[(late, order)]], [[(early, order_early)]] = (
        on_device(device, 1, partial(steps_with_edits, ahead), [point]) for ahead in (False, True)
    )
    assert difference(early, late) is None
    all_ = order[2 : order.index(0, 2)]
    assert set(all_) == {"adopt"} and len(all_) > 3
    assert order == [0, "norm", *all_, 0, "norm", 0, "norm", *all_, 0, "norm", *all_]  # nothing before what is skipped
    if stage == 3:
        assert order_early == order
    else:
        edited = [len(all_), "norm", "adopt"]
        assert order_early == [*edited, *edited, *edited, *edited[:-1]]


@needs_sim
@needs_muon
def test_a_kernel_that_takes_memory_steps_one_bucket_at_a_time():
    [[(_, ones)]] = on_device("sim", 1, partial(steps, 2**26), [{"make": fused_muon}])
    assert set(ones) == {1}
