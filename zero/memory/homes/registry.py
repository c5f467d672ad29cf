"""The homes of one sharded optimizer, and moves from one to another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerators import Accelerator
from zero.memory.homes.disk import DiskHome, is_absent
from zero.memory.homes.file import Pace, StateFile
from zero.memory.homes.home import DeviceHome, Home, Transfer
from zero.memory.homes.host import HostHome

Move = Callable[[Home], None]  # of one part of a state, to that home
Moved = Callable[[torch.Tensor, Home], torch.Tensor]  # a copy of it there


DISK = "disk:"  # and a directory: the name of a place


class Homes:
    """The device that computes, the host beside it (the same home where the device is the host), and files on disks."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.device: Home = DeviceHome(device)
        self.host: Home = self.device if device.type == "cpu" else HostHome(accelerator)
        self.disks: dict[tuple[str, str], DiskHome] = {}  # by the kind of state and the place
        self.pace: Pace | None = None  # of their files; None for the usual one
        self.away: dict[str, list[Move]] = {}  # what is in another home for a while, by state: what brings its parts back

    def at(self, kind: str, place: str) -> Home:
        """Returns the home of a kind of state in a place. A file on a disk is made on the first call."""
        if not place.startswith(DISK):
            return self.host
        if (kind, place) not in self.disks:
            file = StateFile(place.removeprefix(DISK), kind, self.pace)
            self.disks[kind, place] = DiskHome(self.host, file)
        return self.disks[kind, place]

    def close(self, kind: str | None = None) -> None:
        """Closes all files, or those of one kind."""
        for key in [key for key in self.disks if kind in (None, key[0])]:
            self.disks.pop(key).close()

    def move(self, tensor: torch.Tensor, home: Home) -> tuple[torch.Tensor, Transfer]:
        """Copies a tensor to another home. Returns the copy and the transfer of its values. One of the two homes is the
        device."""
        stored = home.allocate(tensor.numel(), tensor.dtype)
        target = stored.view(tensor.shape)
        if home is self.device:
            source = next((disk for disk in self.disks.values() if disk.holds(tensor)), None)
            transfer = (source or self.host).read(tensor, target)
            transfer.wait()
        else:
            transfer = home.write(tensor, stored if is_absent(stored) else target)
            transfer.release_source()  # so that what comes after the copy can have the device's memory
        return target, transfer
