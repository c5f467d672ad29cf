"""`deepspeed.moe.utils`: every parameter is one of data parallelism, that of an expert too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero.compat.deepspeed.absent import rest_of


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has layers of DeepSpeed's MoE, and how many experts: it has none."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """False: no parameter belongs to some ranks alone."""
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group says that it is of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: list[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """All of them as shared ones, and none of experts."""
    return list(params), []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: Any = None
) -> list[dict[str, Any]]:
    """The groups as they are, in a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """The parameters, or groups, as they are."""
    return model_parameters


__getattr__ = rest_of(__name__)
