"""XPU keeps the contract that every accelerator keeps, where there is one."""

import pytest

from accelerators.backends.xpu import XpuAccelerator
from accelerators.testing import AcceleratorContract

if reason := XpuAccelerator().unavailable_reason():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.xpu
@pytest.mark.promise("D07", "M10", "X05", "X06", "X16", "X17")
class TestXpu(AcceleratorContract):
    accelerator = XpuAccelerator
