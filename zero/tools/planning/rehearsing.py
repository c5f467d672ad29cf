"""Peaks with activations: a training as one of many ranks, on a device that counts every byte."""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

import accelerators
from zero.comm.fake import fake_group
from zero.sharding.optimizer import shard

_WINDOWS = 2  # the first makes what the optimizer remembers, and learns the order of the gradients


def counting_device() -> tuple[str, str]:
    """Returns the accelerator that a rehearsal runs on, and the counter of its memory."""
    if find_spec("accelerators_sim") is None:
        raise ValueError(
            "Cannot rehearse with --batch: the simulated device, on which a rank is counted, is not installed. "
            "Do: pip install zero-accelerators-sim (in a checkout of this project: pip install ./simulated)."
        )
    if accelerators.get("sim").unavailable_reason() is None:
        import accelerators_sim

        accelerators_sim.bring_up()
        accelerators_sim.configure(order="late")  # work is done as late as it may be, which needs the most memory
        return "sim", "allocated bytes of the simulated device"
    return "cpu", "resident bytes of the CPU, since the simulated device cannot be used here"


def rehearse(
    build: Callable[[int], Any], batch: int, ranks: tuple[int, int], device: str, accumulation: int = 1, **options: Any
) -> int:
    """Returns the most bytes that rank 0 of so many, of which so many share states, holds on the device in a window, of a
    training with `shard(..., **options)` and AdamW. `build(batch)` returns a model, and a function that makes a loss of it."""
    accelerator = accelerators.get(device)
    gc.collect()
    accelerator.synchronize()
    before = accelerator.memory().allocated or 0
    with accelerator.device():
        model, loss_of = build(batch)
        inner = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
        optimizer = shard(model, inner, group=fake_group(*ranks), accumulation=accumulation, **options)
        peak = 0
        for _ in range(_WINDOWS):
            for _ in range(accumulation):
                accelerator.reset_peak_memory()
                loss = loss_of(model)
                optimizer.backward(loss)
                del loss
                peak = max(peak, accelerator.memory().peak or 0)
            accelerator.reset_peak_memory()
            optimizer.step()
            optimizer.zero_grad()
            peak = max(peak, accelerator.memory().peak or 0)
        optimizer.close()
    return peak - before
