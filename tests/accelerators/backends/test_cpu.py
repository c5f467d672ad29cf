"""The CPU as a device: one of it, as many cores as the mask allows, and a true high-water mark."""

import os
import sys

import pytest
import torch

from accelerators.backends import cpu
from accelerators.backends.cpu import CpuAccelerator
from accelerators.interface import FLOATING_DTYPES
from tests import programs

MIB = 1 << 20


@pytest.mark.promise("X08")
@pytest.mark.parametrize(
    "environment",
    [{}, {"LOCAL_SIZE": "8"}, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, {"OMP_NUM_THREADS": "7"}, {"WORLD_SIZE": "16"}],
    ids=str,
)
def test_there_is_one_cpu_whatever_the_environment_says(monkeypatch, environment):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    it = CpuAccelerator()
    assert it.device_count() == 1
    assert it.current_index() == 0
    assert it.device() == it.device(0) == torch.device("cpu")


def test_the_affinity_mask_counts_the_cores():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity mask")
    before = os.sched_getaffinity(0)
    assert CpuAccelerator().num_cores() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert CpuAccelerator().num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.promise("M10")
def test_pinning_is_nothing_on_the_cpu(caplog):
    it, tensor = CpuAccelerator(), torch.ones(3)
    assert it.can_pin is False
    assert it.pin(tensor) is tensor
    assert tensor.is_pinned() is False
    assert not caplog.records


@pytest.mark.promise("M09")
def test_the_peak_sees_200_mb_that_were_held_between_two_questions():
    it = CpuAccelerator()
    it.reset_peak_memory()
    before = it.memory()
    torch.ones(200 * MIB // 4)
    after = it.memory()
    assert after.allocated < before.allocated + 50 * MIB
    if before.peak_since == "process start":
        assert after.peak >= before.peak  # said to be so, and no lower
    else:
        assert after.peak >= before.peak + 190 * MIB
        it.reset_peak_memory()
        assert it.memory().peak <= before.peak + 100 * MIB


def test_before_any_reset_the_peak_is_since_the_process_started():
    assert CpuAccelerator().memory().peak_since == "process start"


@pytest.mark.promise("M09")
def test_where_the_mark_cannot_be_reset_the_reading_says_so(monkeypatch):
    monkeypatch.setattr(cpu, "reset_peak_linux", lambda: False)
    it = CpuAccelerator()
    it.reset_peak_memory()
    assert it.memory().peak_since == "process start"


def test_a_read_only_proc_is_no_error(tmp_path):
    assert cpu.reset_peak_linux(str(tmp_path)) is False


def test_elsewhere_psutil_tells_the_same_kind_of_figures():
    reading = cpu.read_elsewhere()
    assert reading.peak_since == "process start"
    assert 0 < reading.allocated <= reading.total
    assert 0 < reading.available <= reading.total
    # Both systems count in their own unit; a wrong one would be off by a thousand.
    assert reading.allocated / 2 < reading.peak < reading.total


def test_linux_reads_its_own_files_and_does_not_load_psutil():
    if sys.platform != "linux":
        pytest.skip("only Linux has /proc")
    program = """
        import sys, accelerators
        accelerator = accelerators.get("cpu")
        accelerator.reset_peak_memory()
        accelerator.memory()
        assert "psutil" not in sys.modules
    """
    result = programs.with_torch(program)
    assert result.returncode == 0, result.stderr


@pytest.mark.promise("D07")
def test_support_of_a_dtype_is_a_strict_bool_and_true_only_of_what_computes():
    it = CpuAccelerator()
    for dtype in (*FLOATING_DTYPES, torch.int64, torch.complex64, torch.bool, torch.qint8):
        assert type(it.supports(dtype)) is bool
    assert it.supports(torch.float32) and it.supports(torch.int32) and it.supports(torch.complex64)
    assert not it.supports(torch.bool) and not it.supports(torch.qint8)


def test_the_cpu_is_always_usable():
    assert CpuAccelerator().unavailable_reason() is None
    assert CpuAccelerator().is_synchronous is True
