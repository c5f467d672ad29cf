"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights out of a checkpoint of ours. `python -m zero import` reads DeepSpeed's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.export import export, read_weights


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The state dict of the plain model, with fp32 weights. No collective."""
    if exclude_frozen_parameters:
        raise ValueError(
            "Cannot leave out frozen parameters here: a checkpoint does not say which are. Save it with "
            "exclude_frozen_parameters=True."
        )
    state = read_weights(checkpoint_dir, tag)[1]
    floats = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {**state, **{name: value.float() for name, value in floats.items()}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the host, with the checkpoint's fp32 weights. No collective."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes them into a folder: `model.safetensors`, or `pytorch_model.bin` without `safe_serialization`. No collective."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        export(checkpoint_dir, folder / "model.safetensors", tag, dtype=torch.float32)
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        torch.save(state, folder / "pytorch_model.bin")
