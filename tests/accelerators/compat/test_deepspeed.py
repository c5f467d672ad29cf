"""An object with DeepSpeed's accelerator interface becomes an accelerator that keeps the contract."""

import os
from pathlib import Path

import psutil
import pytest
import torch

import accelerators
from accelerators.backends.cpu import CpuAccelerator
from accelerators.compat.deepspeed import adapt
from accelerators.testing import AcceleratorContract
from accelerators_sim import bring_up
from tests import programs
from tests.devices import needs_sim

INSIDE = "TEST_ADAPTED_CONTRACT"


class Host:
    """The host as DeepSpeed's accelerator for it answers: one synchronous device without streams."""

    Stream = Event = None

    def is_available(self):
        return True

    def is_synchronized_device(self):
        return True

    def device_name(self, device_index=None):
        return "cpu"

    def device_count(self):
        return 2  # NUMA nodes

    def current_device(self):
        return "1"

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def stream(self, stream):
        raise AssertionError("there are no streams")

    def current_stream(self, device_index=None):
        raise AssertionError("there are no streams")

    def total_memory(self, device_index=None):
        return psutil.virtual_memory().total

    def available_memory(self, device_index=None):
        return psutil.virtual_memory().available

    def memory_allocated(self, device_index=None):
        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index=None):
        return None

    def reset_peak_memory_stats(self, device_index=None):
        pass

    def empty_cache(self):
        pass

    def manual_seed_all(self, seed):
        return torch.manual_seed(seed)

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def pin_memory(self, tensor):
        return tensor

    def communication_backend_name(self):
        return "gloo"

    def get_compile_backend(self):
        return "inductor"

    def visible_devices_envs(self):
        return ["NUMA_VISIBLE"]


class Chip(Host):
    """A device with streams and memory of its own: the simulated one, asked as a vendor's object asks his."""

    def __init__(self):
        bring_up()
        self.chip = torch.get_device_module("sim")
        self.Stream, self.Event = self.chip.Stream, self.chip.Event

    def is_synchronized_device(self):
        return False

    def device_name(self, device_index=None):
        return "sim" if device_index is None else f"sim:{device_index}"

    def device_count(self):
        return self.chip.device_count()

    def current_device(self):
        return torch.device("sim", self.chip.current_device())

    def set_device(self, device_index):
        self.chip.set_device(device_index)

    def synchronize(self, device_index=None):
        self.chip.synchronize(device_index)

    def stream(self, stream):
        return self.chip.stream(stream)

    def current_stream(self, device_index=None):
        return self.chip.current_stream(device_index)

    def total_memory(self, device_index=None):
        return self.chip.mem_get_info(device_index)[1]

    def available_memory(self, device_index=None):
        return self.chip.mem_get_info(device_index)[0]

    def memory_allocated(self, device_index=None):
        return self.chip.memory_allocated(device_index)

    def max_memory_allocated(self, device_index=None):
        return self.chip.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index=None):
        self.chip.reset_peak_memory_stats(device_index)

    def manual_seed_all(self, seed):
        self.chip.manual_seed_all(seed)

    def get_rng_state(self, device_index=None):
        return self.chip.get_rng_state(device_index)

    def set_rng_state(self, new_state, device_index=None):
        self.chip.set_rng_state(new_state, device_index)

    def pin_memory(self, tensor):
        return tensor.pin_memory()


class TestAdaptedHost(AcceleratorContract):
    accelerator = lambda: adapt(Host())  # noqa: E731 - a function that makes one


if os.environ.get(INSIDE):

    class TestAdaptedChip(AcceleratorContract):
        accelerator = lambda: adapt(Chip())  # noqa: E731


@pytest.mark.full
@needs_sim
def test_an_adapted_device_with_streams_keeps_the_contract():
    words = ["-q", "-rsfE", "-p", "no:cacheprovider", f"{__file__}::TestAdaptedChip"]
    environment = {**os.environ, INSIDE: "1", "SIM_MEMORY": "1GiB", "SIM_DEVICES": "2"}
    root = Path(__file__).parents[3]
    result = programs.python("-m", "pytest", *words, cwd=root, env=environment, timeout=300)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


def test_it_says_what_the_object_says():
    it = adapt(Host())
    assert (it.name, it.communication_backend, it.compile_backend, it.visible_devices_variable) == (
        "cpu", "gloo", "inductor", "NUMA_VISIBLE",
    )  # fmt: skip
    assert it.is_synchronous and it.memory().peak is None and it.memory().total == CpuAccelerator().memory().total
    with accelerators.using("cpu"):
        assert accelerators.current().name == it.name


def test_a_device_that_is_not_there_gives_a_reason():
    class Absent(Host):
        def is_available(self):
            return False

    class Empty(Host):
        def device_count(self):
            return 0

    assert adapt(Absent()).unavailable_reason() == "Absent.is_available() is False"
    assert adapt(Empty()).unavailable_reason() == "Empty has 0 devices"


def test_what_is_no_such_object_is_refused_with_what_it_lacks():
    class Half:
        def is_available(self):
            return True

    with pytest.raises(TypeError, match=r"Cannot adapt a Half: .*it lacks .*device_count.*Add them"):
        adapt(Half())
    with pytest.raises(TypeError, match=r"Cannot adapt the class Host: .*Pass Host\(\)"):
        adapt(Host)
