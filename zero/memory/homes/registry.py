"""The homes of one sharded optimizer, and the way from one to another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerators import Accelerator
from zero.memory.homes.home import DeviceHome, Home, Transfer
from zero.memory.homes.host import HostHome

Move = Callable[[Home], None]  # of one part of a state, to that home
Moved = Callable[[torch.Tensor, Home], torch.Tensor]  # a copy of it there


class Homes:
    """The device that computes and the host beside it, which are one where the device is the host."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.device: Home = DeviceHome(device)
        self.host: Home = self.device if device.type == "cpu" else HostHome(accelerator)
        self.away: dict[str, list[Move]] = {}  # what is in another home for a while, by state: what brings its parts back

    def move(self, tensor: torch.Tensor, home: Home) -> tuple[torch.Tensor, Transfer]:
        """A copy of a tensor in another home, and the transfer of its values. One of the two homes is the device."""
        target = home.allocate(tensor.numel(), tensor.dtype).view(tensor.shape)
        if home is self.device:
            transfer = self.host.read(tensor, target)
            transfer.wait()
        else:
            transfer = home.write(tensor, target)
            transfer.release_source()  # so that what comes after the copy can have the device's memory
        return target, transfer
