"""What is predicted before anything is allocated."""

import pytest
import torch

from tests.zoo.case import real_loss, real_mlp
from zero.checks import ELEMENTWISE
from zero.memory.flat import goes_with_elements
from zero.room import num_moments

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
