"""The simulated device as an accelerator: what it does differently."""

from __future__ import annotations

from types import ModuleType

from accelerators.interface import Accelerator
from accelerators.simulated.start import bring_up, why_not


class SimulatedAccelerator(Accelerator):
    """`torch.device("sim")`. The device comes up at the first call that needs it, `unavailable_reason` included."""

    name = "sim"
    communication_backend = "staged"  # accelerators.simulated.group: through the host, over gloo
    visible_devices_variable = "SIM_VISIBLE_DEVICES"
    compile_backend = "aot_eager"
    # Torch's generic streams of a device written in Python are empty shells: without torch.sim.Stream there are none.
    _has_generic_streams = False

    def unavailable_reason(self) -> str | None:
        return why_not() or super().unavailable_reason()

    @property
    def module(self) -> ModuleType | None:
        bring_up()
        return super().module
