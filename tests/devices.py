"""What tests need of this machine and this torch, as marks that skip with the reason."""

import pytest

from accelerators.simulated import SimulatedAccelerator

_lacking = SimulatedAccelerator().unavailable_reason()
needs_sim = pytest.mark.skipif(_lacking is not None, reason=str(_lacking))
