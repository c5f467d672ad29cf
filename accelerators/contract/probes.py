"""How the contract suite probes a device: it holds memory, reads figures, draws numbers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerators.interface import Accelerator

MIB = 1 << 20


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(inspect.unwrap(function)).parameters.values()]


def set_and_ask(it: Accelerator, index: int) -> int:
    it.set_index(index)
    return it.current_index()


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def size_for(it: Accelerator) -> int:
    """How many bytes to try with: enough to show beside everything else, and no more than a quarter of what is left."""
    available = it.memory().available
    return 64 * MIB if available is None else min(64 * MIB, available // 4 // MIB * MIB)


def hold(it: Accelerator, num_bytes: int) -> torch.Tensor:
    held = torch.ones(num_bytes // 4, device=it.device())  # written, as untouched memory may not be allocated yet
    it.synchronize()
    return held


def figure(it: Accelerator, name: str) -> int:
    it.synchronize()
    value: int | None = getattr(it.memory(), name)
    if value is None:
        pytest.skip(f"{it.name} does not tell {name} memory")
    return value


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a dtype works: another sum than the accelerator's own probe, which is exact in all of them."""
    try:
        x = torch.arange(8, device=device).to(dtype)
        return bool((torch.outer(x, x).sum(0) - x).float().cpu().tolist() == [27.0 * i for i in range(8)])
    except (RuntimeError, TypeError):
        return False


def drawn_after(it: Accelerator, prepare: Callable[[], object]) -> tuple[list[float], list[float]]:
    prepare()
    return torch.rand(4).tolist(), torch.rand(4, device=it.device()).cpu().tolist()
