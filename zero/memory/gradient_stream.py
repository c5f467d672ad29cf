"""Sums of gradients that live on disk. Those that are added to or read are in memory, and leave when others come."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, MutableMapping

import torch

from zero.errors import ZeroError
from zero.memory.homes.home import Home, Stored, Transfer

_MOST = 2  # sums in memory: one that is added to or stepped with, and the next


class GradientStream:
    """Each sum is in memory, or on disk with the factors that are still to multiply it, or on its way between the two.

    `shares` has a sum that is in memory, or its stand-in. Each sum comes to memory of its own, as the last one may still be
    read. `home_of` returns the home of a bucket's sum if that is on disk, and `allocate` makes memory for it.
    """

    def __init__(
        self,
        shares: MutableMapping[int, torch.Tensor],
        home_of: Callable[[int], Home | None],
        allocate: Callable[[int], torch.Tensor],
        catch_up: Callable[[], None],
    ) -> None:
        self._shares = shares
        self._home_of = home_of
        self._allocate = allocate
        self._catch_up = catch_up
        self._stored: dict[int, Stored] = {}  # sums that live on a disk
        # Sums in memory, the last used last, each with whether it was changed.
        self._here: OrderedDict[int, bool] = OrderedDict()
        self._coming: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._leaving: deque[Transfer] = deque()
        # Factors of sums on a disk, which are applied in this order when a sum is read.
        self._factors: dict[int, list[float]] = {}

    def has(self, bucket: int) -> bool:
        """Returns whether the sum of a bucket lives on disk."""
        return self._home_of(bucket) is not None

    def prefetch(self, bucket: int) -> None:
        """Begins to read a sum that will be used."""
        if bucket in self._here or bucket in self._coming or bucket not in self._shares or not self.has(bucket):
            return
        while self._leaving:
            self._leaving.popleft().finish()
        self._make_room()
        memory = self._allocate(bucket)
        self._coming[bucket] = self._stored[bucket].read(memory), memory

    def use(self, bucket: int, writes: bool) -> None:
        """Keeps a sum in memory until others are used. What is written to it is kept if `writes`."""
        if not self.has(bucket):
            return
        self.prefetch(bucket)
        if bucket in self._coming:
            transfer, memory = self._coming.pop(bucket)
            transfer.finish()
            for factor in self._factors.pop(bucket, ()):
                memory.mul_(factor)
                writes = True
            self._shares[bucket] = memory
        self._here[bucket] = self._here.get(bucket, False) or writes
        self._here.move_to_end(bucket)

    def make_room(self, bucket: int) -> None:
        """Makes room for a sum that will be put into memory."""
        if self.has(bucket):
            self._make_room()

    def begin(self, bucket: int) -> None:
        """Notes that a sum was just put into memory."""
        if self.has(bucket):
            self._here[bucket] = True

    def multiply(self, bucket: int, factor: float) -> None:
        """Multiplies a sum when it is next read."""
        if bucket in self._here:
            self._catch_up()  # what was sent to this sum must be added before it is multiplied
            self._here[bucket] = True
            self._shares[bucket].mul_(factor)
        else:
            self._factors.setdefault(bucket, []).append(factor)

    def leave(self, bucket: int, factor: float = 1.0, is_applied: bool = True) -> None:
        """Begins to write a sum that is not used for now to disk, multiplied by `factor`. If `is_applied`, the sum in memory
        has been multiplied already, which was not noted as a change of it."""
        if bucket not in self._here:
            return
        changed, memory = self._here.pop(bucket), self._shares[bucket]
        if changed and factor != 1.0 and not is_applied:
            memory.mul_(factor)
        if not changed:
            if factor != 1.0:
                self._factors.setdefault(bucket, []).append(factor)
            self._shares[bucket] = self._stored[bucket].values
            return
        home = self._home_of(bucket)
        assert home is not None
        self._catch_up()  # what was sent to this sum must be added before the sum leaves
        if bucket not in self._stored:
            self._stored[bucket] = home.store(memory.numel(), memory.dtype)
        while len(self._leaving) >= _MOST:
            self._leaving.popleft().finish()
        self._leaving.append(self._stored[bucket].write(memory))
        self._shares[bucket] = self._stored[bucket].values

    def _make_room(self) -> None:
        while len(self._here) + len(self._coming) >= _MOST and self._here:
            self.leave(next(iter(self._here)))

    def clear(self) -> None:
        """Drops all sums. Their places on disk serve the next ones."""
        for transfer in (*self._leaving, *(transfer for transfer, _ in self._coming.values())):
            with contextlib.suppress(ZeroError):  # nobody needs these values
                transfer.finish()
        for stored in self._stored.values():
            stored.reclaim()
        self._leaving.clear()
        self._coming.clear()
        self._here.clear()
        self._factors.clear()
