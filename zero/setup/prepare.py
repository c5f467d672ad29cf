"""Everything that can be said and decided before anything is changed."""

from __future__ import annotations

import socket

import torch
from torch import nn

import accelerators
from accelerators import Accelerator
from zero.comm.exchange import exchange_texts
from zero.comm.group import Group
from zero.config.schema import ZeroConfig
from zero.runtime.grads.ownership import check_unmanaged
from zero.runtime.kernels.select import check_kernels, kinds_on_host
from zero.setup.model_checks import (
    check_dtypes,
    check_groups,
    check_model,
    check_optimizer,
    check_params,
    check_settings_on_host,
    check_views,
)
from zero.setup.param_selection import Chosen, choose


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> Chosen:
    """Everything that can be said before anything is changed."""
    check_optimizer(optimizer, config.elementwise)
    check_model(model)
    check_groups(optimizer, model)
    chosen = choose(model, optimizer, config)
    check_unmanaged(chosen.names, chosen.tensors)
    check_params(chosen.names, chosen.tensors)
    check_views(model, chosen.names, chosen.tensors)
    device = _device_of(chosen.tensors)
    check_dtypes(accelerators.get(device.type), set(chosen.dtypes))
    check_settings_on_host(optimizer, dict(zip(chosen.groups, chosen.offload, strict=True)))
    check_kernels(optimizer, config.kernels, device, bool(kinds_on_host(chosen.specs(), device)))
    return chosen


def _accelerator_of(optimizer: torch.optim.Optimizer) -> Accelerator:
    """Of the first parameter that is somewhere."""
    tensors = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return accelerators.current() if device is None else accelerators.get(device.type)


def _device_of(tensors: list[nn.Parameter]) -> torch.device:
    return tensors[0].device if tensors else accelerators.current().device()


def _ranks_that_share_memory(group: Group, device: torch.device) -> int:
    """How many ranks of the group draw on the same memory as this one."""
    where = f"{socket.gethostname()} {device.type} {0 if device.type == 'cpu' else device.index}"
    places = exchange_texts(group, where)
    return places.count(where)
