"""The CPU keeps the contract that every accelerator keeps."""

import pytest

from accelerators.backends.cpu import CpuAccelerator
from accelerators.testing import AcceleratorContract


@pytest.mark.promise("D07", "M09", "M10", "X05", "X06", "X16", "X17")
class TestCpu(AcceleratorContract):
    accelerator = CpuAccelerator
