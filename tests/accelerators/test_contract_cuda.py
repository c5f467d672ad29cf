"""CUDA keeps the contract that every accelerator keeps, where there is one."""

import pytest

from accelerators.backends.cuda import CudaAccelerator
from accelerators.testing import AcceleratorContract
from tests.devices import CudaThroughHost

if reason := CudaAccelerator().unavailable_reason():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.cuda
@pytest.mark.promise("D07", "M10", "X05", "X06", "X16", "X17")
class TestCuda(AcceleratorContract):
    accelerator = CudaAccelerator


@pytest.mark.cuda
class TestCudaThroughHost(AcceleratorContract):
    accelerator = CudaThroughHost
