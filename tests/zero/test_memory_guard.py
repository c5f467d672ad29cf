"""What is predicted before anything is allocated."""

import pytest
import torch
from torch import nn

import accelerators
import zero
from accelerators.backends.cpu import CpuAccelerator
from tests import inside, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.zoo.case import real_loss, real_mlp
from zero import shard
from zero.memory.formats import goes_with_elements
from zero.optim.traits import ELEMENTWISE, num_moments
from zero.plan.budget import PlannedTraining, budget_of
from zero.runtime.kernels.select import has_fused_step

SETTINGS = ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"momentum": 0.9, "centered": True})


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_so_many_values_of_an_element_are_predicted_for_each_group_as_an_optimizer_remembers(kind):
    model = real_mlp()
    usual = kind(model.parameters(), lr=0.01).defaults
    for settings in SETTINGS:
        if not settings.keys() <= usual.keys():
            continue
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **settings}]
        optimizer = kind(groups, lr=0.01)
        real_loss(model(torch.ones(3, 4))).backward()
        optimizer.step()
        remembered = []
        for group in optimizer.param_groups:
            state = [(param, optimizer.state.get(param, {})) for param in group["params"]]
            counts = {sum(goes_with_elements(key, value, param.shape) for key, value in own.items()) for param, own in state}
            remembered += counts
        assert remembered == num_moments(optimizer)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("bucket_bytes", [256, 2**20])
def test_moments_take_what_is_predicted_also_where_groups_that_want_more_and_fewer_share_a_bucket(kernels, bucket_bytes):
    model = real_mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "amsgrad": True}]
    inner = torch.optim.AdamW(groups, lr=0.01)
    optimizer = shard(model, inner, stage=2, kernels=kernels, bucket_bytes=bucket_bytes, group=solo())
    real_loss(model(torch.ones(3, 4))).backward()
    optimizer.step()
    moments = [value for state in inner.state.values() for name, value in state.items() if name != "step"]
    storages = {moment.untyped_storage().data_ptr(): moment.untyped_storage().nbytes() for moment in moments}
    layout, in_lines = inside.layout(optimizer), has_fused_step(inner, kernels)
    planned = budget_of(layout, training=PlannedTraining(num_moments(inner), in_lines=in_lines))
    assert sum(storages.values()) == planned.device.moments


def ranks_that_share_a_device(rank, world):
    model = nn.Linear(2, 2).to(accelerators.current().device())
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    try:
        return next(model.parameters()).device.index, inside.ranks_on_device(optimizer)
    finally:
        optimizer.close()


@needs_sim
@pytest.mark.parametrize(("second", "expected"), [("1", [(0, 1)] * 2), ("0", [(0, 2)] * 2)])
def test_ranks_that_are_shown_one_device_each_share_none_though_all_have_index_0(second, expected):
    env = [{"ACCELERATOR": "sim", "SIM_DEVICES": "2", "SIM_VISIBLE_DEVICES": seen} for seen in ("0", second)]
    assert ranks.run(2, ranks_that_share_a_device, env=env) == expected


class Dim(CpuAccelerator):
    """The CPU under another name, with memory of which nothing is known."""

    def __init__(self):
        super().__init__()
        self.num_readings = 0

    def read_memory(self, index):
        self.num_readings += 1
        return accelerators.MemoryReading(None, None, None, None)


def test_the_accelerator_that_was_chosen_for_a_device_is_the_one_that_a_training_asks():
    usual = accelerators.get("cpu")
    with accelerators.using(Dim()) as dim:
        assert accelerators.of(torch.device("cpu")) is dim is not usual
        model = real_mlp()
        optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=2, group=solo())
        real_loss(model(torch.ones(3, 4))).backward()
        optimizer.step()
        assert optimizer.sharding.accelerator is dim and dim.num_readings
        optimizer.close()
    assert accelerators.of(torch.device("cpu")) is usual
