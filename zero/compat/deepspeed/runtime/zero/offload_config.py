"""What `engine.offload_states` moves, and where to, in DeepSpeed's words."""

from __future__ import annotations

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
