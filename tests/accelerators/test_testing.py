"""The contract suite: an author's three lines are enough, and it finds accelerators that do not keep it."""


import pytest

from tests import programs

HONEST = """
from accelerators.testing import AcceleratorContract
from accelerators.backends.cpu import CpuAccelerator
class TestMine(AcceleratorContract):
    accelerator = CpuAccelerator
class TestFactory(AcceleratorContract):
    accelerator = lambda: CpuAccelerator()
class TestObject(AcceleratorContract):
    accelerator = CpuAccelerator()
class TestName(AcceleratorContract):
    accelerator = "cpu"
class TestAbsent(AcceleratorContract):
    accelerator = "mtia"
class TestNotInstalled(AcceleratorContract):
    accelerator = "npu"
"""

# A lie of each kind, and the test of the contract that must find it.
LIES = {
    "def current_index(self): return '0'": "test_every_answer_has_exactly_the_type_that_the_interface_names",
    "def supports(self, dtype): return None": "test_every_answer_has_exactly_the_type_that_the_interface_names",
    "def memory(self): return super().memory()": "test_no_member_of_the_interface_is_called_differently",
    "def set_index(self, index): pass": "test_an_index_beyond_the_devices_is_refused_in_three_parts",
    "def _check_index(self, index): return int(index)": "test_an_index_of_another_type_is_refused",
    "def device(self, index=None): return torch.device('meta')": "test_a_tensor_lies_on_the_device_that_was_named",
    "def read_memory(self, index): r = super().read_memory(0); return replace(r, peak=r.allocated)":
        "test_the_peak_is_the_high_water_mark_and_not_a_sample",
    "def read_memory(self, index): return MemoryReading(1 << 40, 1 << 39, 1 << 20, 1 << 20)":
        "test_allocated_memory_rises_and_falls_with_what_is_held",
    "def read_memory(self, index): r = super().read_memory(0); return replace(r, available=r.total + 1)":
        "test_a_reading_agrees_with_itself",
    "def memory(self, index=None): return self.read_memory(self._index(index))":
        "test_accelerator_memory_caps_what_is_reported",
    "def new_event(self, timing=False): return Never()":
        "test_the_time_between_two_events_is_in_milliseconds_and_within_the_hosts",
    "def supports(self, dtype): return True": "test_a_dtype_without_arithmetic_is_not_supported",
    "def _probe_dtype(self, dtype): return dtype == torch.float32": "test_a_dtype_is_supported_exactly_when_it_computes",
    "def norm_dtype(self): return torch.float32": "test_the_preferred_dtypes_are_supported_ones",
    "def manual_seed(self, seed): pass": "test_a_seed_decides_the_numbers_of_host_and_device",
    "def set_rng_state(self, states, index=None): pass": "test_the_random_state_comes_back_on_host_and_device",
    "def pin(self, tensor): return tensor.clone()": "test_pinned_memory_is_pinned_and_the_same_numbers",
    "def identity(self, index=None): return ''": "test_devices_are_told_apart",
    "def with_own_storage(self, stretch): return stretch.clone()":
        "test_a_stretch_with_a_storage_of_its_own_is_the_same_memory_and_keeps_it",
    "def unavailable_reason(self): return ''": "test_what_is_available_gives_no_reason_against_it",
    "is_synchronous = False": "test_work_is_done_when_a_call_returns_on_the_cpu_and_not_where_streams_order_it",
    "def in_stream(self, stream): return contextlib.nullcontext()":
        "test_in_stream_makes_a_stream_current_and_puts_the_old_one_back",
    "def in_stream(self, stream): return contextlib.suppress(KeyError)":
        "test_in_stream_makes_a_stream_current_and_puts_the_old_one_back",
    "can_pin = True\n    def pin(self, tensor): self.can_pin = False; return tensor":
        "test_pinned_memory_is_pinned_and_the_same_numbers",
}  # fmt: skip

LYING = """
import contextlib
import time
from dataclasses import replace
import torch
from accelerators.backends.cpu import CpuAccelerator
from accelerators.memory import MemoryReading
from accelerators.streams import InOrderEvent
from accelerators.testing import AcceleratorContract

class Never(InOrderEvent):
    def __init__(self): super().__init__(lambda: None)
    def elapsed_time(self, end): return 1e9
"""


def run(tmp_path, source, *options):
    (tmp_path / "test_by_an_author.py").write_text(source)
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--strict-markers", *options]
    return programs.python("-m", "pytest", *words, cwd=tmp_path).stdout


@pytest.mark.full
def test_a_class_a_function_an_object_or_a_name_serve_and_what_is_absent_is_skipped(tmp_path):
    report = run(tmp_path, HONEST, "-rs")
    assert " failed" not in report and " error" not in report, report
    assert "torch.mtia" in report and "torch_npu is not installed" in report
    assert int(report.split(" passed")[0].split()[-1]) >= 4 * 30


def test_every_lie_is_found_by_the_test_that_is_there_for_it(tmp_path):
    classes = []
    for number, lie in enumerate(LIES):
        classes.append(f"class Lie{number}(CpuAccelerator):\n    {lie}")
        classes.append(f"class Test{number}(AcceleratorContract):\n    accelerator = Lie{number}")
    tests = [f"test_by_an_author.py::Test{number}::{test}" for number, test in enumerate(LIES.values())]
    report = run(tmp_path, LYING + "\n".join(classes), "-rfE", "--tb=no", *tests)
    for lie, test in zip(LIES, tests, strict=True):
        assert f"FAILED {test}" in report or f"ERROR {test}" in report, f"no test found {lie!r}\n{report}"


@pytest.mark.full
def test_a_failing_check_says_what_to_override(tmp_path):
    lies = """
class Lie(CpuAccelerator):
    def read_memory(self, index): r = super().read_memory(0); return replace(r, available=r.total + 1)
    def _check_index(self, index): return int(index)
    communication_backend = "no_such_backend"
class TestLie(AcceleratorContract):
    accelerator = Lie
"""
    checks = (
        *("test_a_reading_agrees_with_itself", "test_an_index_of_another_type_is_refused"),
        "test_two_ranks_add_gather_and_exchange",
    )
    report = run(tmp_path, LYING + lies, *(f"test_by_an_author.py::TestLie::{check}" for check in checks))
    for members in ("read_memory", "_check_index", "communication_backend"):
        assert f"Override {members} in your subclass of accelerators.Accelerator." in report, report
    assert "no_such_backend" in report
