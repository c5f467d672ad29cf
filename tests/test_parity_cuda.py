"""Sharded training on a GPU equals plain torch on the same GPU: one rank, and two that share it."""

import pytest

from tests import grid, parity
from tests.devices import CudaAccelerator

if reason := CudaAccelerator().unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

NUM_PARTS = 8  # the parts may run beside each other

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_gpu_equals_the_oracle(part):
    failures = parity.run(grid.on_cuda()[part::NUM_PARTS])
    assert not failures, str(failures)
