"""What tests need of this machine and this torch, as marks that skip with the reason."""

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator

_lacking = SimulatedAccelerator().unavailable_reason()
needs_sim = pytest.mark.skipif(_lacking is not None, reason=str(_lacking))

needs_wide_grads = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason=f"torch {torch.__version__} keeps a .grad in the dtype of its parameter; from 2.10 on it may be wider",
)
