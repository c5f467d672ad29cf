"""The homes of one sharded optimizer, and moves from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from accelerators import Accelerator
from zero.errors import DiskFailed
from zero.memory.homes.disk import DiskHome
from zero.memory.homes.file import Pace, StateFile
from zero.memory.homes.home import DeviceHome, Home, MemoryHome, Stored, StoredInMemory, Transfer
from zero.memory.homes.host import HostHome

Move = Callable[[Home], None]  # moves one part of a state to a home
Moved = Callable[[torch.Tensor, Home], torch.Tensor]  # copies a tensor to a home, and returns the copy


DISK = "disk:"  # a directory follows; together they are the name of a place
MOVED = "states"  # the kind of state under which a disk keeps what is there only for a while


class Reserved(NamedTuple):
    """The memory and the disk space that are reserved for states."""

    pinned: bool | None
    on_disk: dict[tuple[str, str], int]  # the bytes of each file


class Homes:
    """The device that computes, the host beside it (the same home if the device is the host), and files on disks."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.device: MemoryHome = DeviceHome(device)
        self.host: MemoryHome = self.device if device.type == "cpu" else HostHome(accelerator)
        self.disks: dict[tuple[str, str], DiskHome] = {}  # by kind of state and place
        self.pace: Pace | None = None  # the pace of the files; None for the usual one
        # By state that is in another home for a while: the functions that move its parts.
        self._away: dict[str, list[Move]] = {}
        self._moved: MutableMapping[torch.Tensor, Stored] = WeakTensorKeyDictionary()  # by placeholder

    def at(self, kind: str, place: str) -> Home:
        """Returns the home of a kind of state in a place. A file on a disk is made on the first call."""
        if not place.startswith(DISK):
            return self.host
        return self.disk(kind, place)

    def disk(self, kind: str, place: str) -> DiskHome:
        """Returns the home of a kind of state on a disk. Its file is made on the first call."""
        if (kind, place) not in self.disks:
            file = StateFile(place.removeprefix(DISK), kind, self.pace)
            self.disks[kind, place] = DiskHome(self.host, file)
        return self.disks[kind, place]

    def reserved(self) -> Reserved:
        return Reserved(self.host.pinned, {key: disk.file.num_bytes for key, disk in self.disks.items()})

    def give_back(self, reserved: Reserved) -> None:
        """Gives back what was reserved since, of which nothing is used yet."""
        if self.host.pinned is not reserved.pinned:
            self.host.pinned = reserved.pinned
        for key in self.disks.keys() - reserved.on_disk.keys():
            self.disks.pop(key).close()
        for key, num_bytes in reserved.on_disk.items():
            self.disks[key].file.give_back(num_bytes)

    def close(self, kind: str | None = None) -> None:
        """Closes all files, or those of one kind. With all of them, nothing is brought back any more."""
        if kind is None:
            self._away.clear()  # moves refer to the objects that move states, and these to the homes: a cycle
        if kind in (None, MOVED):
            self._moved.clear()
        for key in [key for key in self.disks if kind in (None, key[0])]:
            self.disks.pop(key).close()

    def move(self, tensor: torch.Tensor, home: Home, gives_up: bool = False) -> tuple[torch.Tensor, Transfer]:
        """Copies a tensor to another home. Returns the copy, or what stands for it, and the transfer of its values. One of the
        two homes is the device. With `gives_up` what cannot be read from a disk is NaN."""
        stored = home.store(tensor.numel(), tensor.dtype)
        copy = stored.values.view(tensor.shape)
        if home is self.device:
            before = self._moved.get(tensor)
            transfer = (StoredInMemory(self.host, tensor) if before is None else before).read(copy)
            try:
                transfer.wait()
            except DiskFailed:
                if not gives_up:
                    raise
                copy.fill_(float("nan") if copy.is_floating_point() else 0)
            self._moved.pop(tensor, None)
        else:
            transfer = stored.write(tensor)
            transfer.release_source()  # work after the copy can have the device's memory then
            self._moved[copy] = stored
        return copy, transfer

    # what is away for a while ------------------------------------------------------------------------------------

    def away(self, states: Iterable[str]) -> list[str]:
        """Returns those of these states that are in another home for a while."""
        return [state for state in states if state in self._away]

    @property
    def is_any_away(self) -> bool:
        return bool(self._away)

    def check_resident(self, what: str, states: Iterable[str]) -> None:
        """Raises if one of these states is away, which `what` needs."""
        away = self.away(states)
        if away:
            raise ValueError(f"Cannot {what}: {are_away(away)}")

    def move_away(self, state: str, moves: Iterable[Move], home: Home) -> None:
        """Moves the parts of a state to another home. If one fails, those before it can be brought back."""
        self._away[state] = moved = []  # noted even if this rank has none of it, as the others wait for it
        for move in list(moves):
            move(home)
            moved.append(move)

    def bring_back(self, state: str) -> None:
        """Moves the parts of a state to the device again. If one fails, it and those after it stay away."""
        moved = self._away.get(state, [])
        while moved:
            moved[0](self.device)
            del moved[0]
        self._away.pop(state, None)


def are_away(states: Sequence[str]) -> str:
    return f"{', '.join(states)} are away since offload_states. Call reload_states() first."
