"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns the same dict, list or tuple with copies of its tensors, which have no more memory than they show."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
