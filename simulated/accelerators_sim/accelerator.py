"""The simulated device as an accelerator: what it does differently."""

from __future__ import annotations

import os
from functools import cached_property
from types import ModuleType

import torch

from accelerators.interface import Accelerator
from accelerators_sim.settings import read_settings
from accelerators_sim.start import bring_up, is_up, why_not


class SimulatedAccelerator(Accelerator):
    """`torch.device("sim")`. The device comes up at the first call that needs it; asking whether it could does not."""

    name = "sim"
    visible_devices_variable = "SIM_VISIBLE_DEVICES"
    compile_backend = "aot_eager"
    # Torch's generic streams of a device written in Python are empty shells: without torch.sim.Stream there are none.
    _has_generic_streams = False

    def unavailable_reason(self) -> str | None:
        if is_up():
            return super().unavailable_reason()
        try:
            num_devices = read_settings(os.environ).devices
        except ValueError as error:
            return str(error)
        return why_not() or (None if num_devices else "SIM_DEVICES and SIM_VISIBLE_DEVICES leave no device")

    @cached_property
    def communication_backend(self) -> str:
        """The device's own where it has one, which torch knows once the device is up."""
        bring_up()
        return super().communication_backend

    def with_own_storage(self, stretch: torch.Tensor) -> torch.Tensor:
        from accelerators_sim.storage import with_own_storage  # imported late, as it needs the device to be up

        return with_own_storage(stretch)

    @property
    def module(self) -> ModuleType | None:
        bring_up()
        return super().module
