"""Benchmarks run where what they compare is there, and say so where it is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import needs_sim

ROOT = Path(__file__).parent.parent


def offload_step(accelerator, *options):
    environment = {**os.environ, "ACCELERATOR": accelerator, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/offload_step.py", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_on_the_host_alone_an_offloaded_step_has_nothing_to_be_compared_with():
    found = offload_step("cpu")
    assert found.returncode == 1 and not found.stdout
    asked, what, to_do = found.stderr.strip().replace(", but ", ". ").split(". ")
    assert "was asked for" in asked and "is the host" in what and to_do.startswith("Run it on a machine with another")


@needs_sim
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_an_offloaded_step_is_timed_beside_one_on_the_device_and_what_bounds_it(kernels):
    found = offload_step("sim", "--params", "20000", "--rounds", "1", "--kernels", kernels)
    assert found.returncode == 0, found.stderr
    for line in ("plain torch", "ours, on device", f"offloaded, {kernels}", "crossing takes", "memory takes"):
        assert line in found.stdout, found.stdout


def test_a_checkpoint_is_timed_beside_plain_files(tmp_path):
    environment = {**os.environ, "ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--params", "2000000", "--rounds", "1", "--folder", str(tmp_path)]
    command = [sys.executable, "benchmarks/checkpoint.py", *options]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    assert "save" in found.stdout and "plain read" in found.stdout, found.stdout
