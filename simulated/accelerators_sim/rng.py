"""Random numbers: one generator a device, so that a device's state is its own and the host's draws do not move it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim.settings import settings

generators: list[torch.Generator] = []


def start(device_count: int) -> None:
    generators.extend(torch.Generator().manual_seed(torch.initial_seed()) for _ in range(device_count))


def with_generator(index: int, how: str, keywords: dict[str, Any], call: Callable[[], Any]) -> Any:
    """Runs a random operator on the generator of its device."""
    if settings.lacks("rng") or keywords.get("generator") is not None:
        return call()
    generator = generators[index]
    if how == "argument":
        keywords["generator"] = generator
        return call()
    # Operators such as native_dropout take no generator and use the host's: it stands in for the device's meanwhile.
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return call()
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)
