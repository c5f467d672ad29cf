"""Device modules and plug-ins that are not there, for tests of how the real ones are asked and chosen."""

from __future__ import annotations

import sys
from importlib import machinery
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def fake_device_module(num_devices: int = 1, **functions: Any) -> SimpleNamespace:
    """The least that torch asks of a device's module, and whatever else is given."""
    state = SimpleNamespace(current=0)

    def set_device(index: int) -> None:
        state.current = index

    least = {
        "is_available": lambda: num_devices > 0,
        "device_count": lambda: num_devices,
        "current_device": lambda: state.current,
        "set_device": set_device,
    }
    return SimpleNamespace(**{**least, **functions})


def give_torch(monkeypatch: pytest.MonkeyPatch, **modules: SimpleNamespace | None) -> None:
    """Torch with these device modules, by name, instead of its own; None for none. The others stay as they are."""
    real = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        name = getattr(device, "type", str(device).partition(":")[0])
        if name not in modules:
            return real(device)
        if modules[name] is None:
            raise RuntimeError(f"Device '{name}' does not have a corresponding module registered as 'torch.{name}'.")
        return modules[name]

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    if "cuda" in modules:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
    if "xpu" in modules:
        monkeypatch.setattr(torch.version, "xpu", "20250000")
    if "mps" in modules:
        there = modules["mps"] is not None and modules["mps"].is_available()
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)


def install_plugin(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module that can be imported and does nothing, as a plug-in without its driver."""
    module = ModuleType(name)
    module.__spec__ = machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def name_accelerator(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Torch says that this is the machine's accelerator."""
    named = None if name is None else SimpleNamespace(type=name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: named)
