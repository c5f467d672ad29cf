"""MPS, with torch.mps replaced: no machine of ours has one."""

import pytest
import torch

from accelerators.backends.mps import MpsAccelerator
from accelerators.memory import MemoryReading
from accelerators.streams import InOrderStream
from tests.accelerators.fakes import fake_device_module, give_torch


@pytest.fixture
def calls(monkeypatch):
    """An MPS whose functions, like torch's, take no index."""
    seen = []
    give_torch(monkeypatch, mps=fake_device_module(1))
    functions = {
        "recommended_max_memory": lambda: 1000,
        "current_allocated_memory": lambda: 300,
        "synchronize": lambda: seen.append("synchronize"),
        "get_rng_state": lambda: torch.zeros(4),
        "set_rng_state": lambda state: seen.append(state.tolist()),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.mps, name, function)
    return seen


def test_there_is_one_device_whose_queue_runs_beside_the_host(calls):
    it = MpsAccelerator()
    assert it.is_available()
    assert (it.device_count(), it.current_index(), it.is_synchronous) == (1, 0, False)
    assert type(it.new_stream()) is InOrderStream
    it.new_event().record()
    assert calls == ["synchronize"]


def test_memory_has_no_peak_because_torch_keeps_none(calls):
    assert MpsAccelerator().memory() == MemoryReading(total=1000, available=700, allocated=300, peak=None)


def test_the_random_state_needs_no_index(calls):
    it = MpsAccelerator()
    states = it.rng_state()
    assert set(states) == {"cpu", "mps"}
    it.set_rng_state(states)
    assert calls == [[0, 0, 0, 0]]


def test_a_torch_without_mps_says_so(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert MpsAccelerator().unavailable_reason() == f"this torch is built without MPS (torch {torch.__version__})"
    assert not MpsAccelerator().is_available()


def test_every_function_of_torch_mps_that_is_called_exists():
    for name in ("recommended_max_memory", "current_allocated_memory", "synchronize", "get_rng_state", "set_rng_state"):
        assert callable(getattr(torch.mps, name, None)), f"torch {torch.__version__} has no torch.mps.{name}"
