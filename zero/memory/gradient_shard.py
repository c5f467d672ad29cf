"""This rank's shares of the gradients, as they come, are added up and are looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

import accelerators
from zero.memory.deferred_sum import DeferredSum
from zero.memory.formats import by_device
from zero.memory.homes.host import HostCopy, HostPool
from zero.memory.shard import LayoutRef, Shard

_MOST_ON_THE_WAY = 2  # sums that travel to the host while the next one is made; each keeps its memory on the device


class GradientShard(Shard):
    """Shares of gradients. What is added to those on the host is copied there while others go on. Reading a share waits until
    everything has arrived and is added up. Host memory is kept for the next window: nothing else keeps
    it ready, and the system would clear every page of it again.
    """

    def __init__(self, layout_ref: LayoutRef, device: torch.device, host: HostPool | None = None) -> None:
        super().__init__(layout_ref, device, host)
        self.deferred: dict[int, DeferredSum] = {}  # see [Note: deferred sums]
        self._wanted = [True, False]  # whether somebody but the step wanted a sum: in the last window, and in this one
        self.offloaded_states: Sequence[str] = ()  # what gradients cannot do without and was moved to the host for a while
        self._kept: dict[int, torch.Tensor] = {}
        self._deferred_scales: dict[int, float] = {}  # what shares are to be multiplied by when somebody looks at them
        self._arriving: deque[_Coming] = deque()

    def _is_on_host(self, bucket: int) -> bool:
        return self.device.type == "cpu" or self.is_offloaded(bucket)

    def share(self, bucket: int) -> torch.Tensor:
        """The share of a bucket; zeros when nothing was added to it yet."""
        self._wanted[1] = True
        return self._sum_of(bucket)

    def _sum_of(self, bucket: int) -> torch.Tensor:
        self.check_resident()
        self._add_arrived()
        self.materialize(bucket)
        if bucket not in self.shares:
            self.shares[bucket] = self.allocate(bucket).zero_()
        self._apply_deferred_scale(bucket)
        return self.shares[bucket]

    def add(self, bucket: int, values: torch.Tensor, factor: float) -> HostCopy | None:
        """Adds `factor * values`, which may be changed; the first ones are written, so that no pass over zeros is made.

        Returns the crossing that still reads `values`, if there is one.
        """
        if self.is_offloaded(bucket):
            self.check_resident()
            self._apply_deferred_scale(bucket)
            return self._send(bucket, values, factor)
        target, fresh = self.target(bucket)
        if fresh:
            torch.mul(values, factor, out=target)
        else:
            target.add_(values, alpha=factor)
        return None

    def target(self, bucket: int) -> tuple[torch.Tensor, bool]:
        """Where values of a bucket that does not travel are to be added; or to be written, if it is fresh."""
        self.check_resident()
        self._apply_deferred_scale(bucket)
        self.materialize(bucket)
        fresh = bucket not in self.shares
        if fresh:
            self.shares[bucket] = self.allocate(bucket)
        self._wanted[1] |= not fresh
        return self.shares[bucket], fresh

    def __contains__(self, bucket: int) -> bool:
        """Whether anything was added to a share yet."""
        return bucket in self.shares or bucket in self.deferred

    def addends(self, bucket: int) -> tuple[Sequence[torch.Tensor], tuple[float, ...]]:
        """What a share is the sum of, and what that is to be multiplied by, one after the other."""
        if bucket not in self.deferred:
            return [self._sum_of(bucket)], ()
        self.check_resident()
        return self.deferred[bucket].addends, self.deferred[bucket].factors

    def can_defer(self, bucket: int) -> bool:
        """Whether rows may wait here, if they can anywhere."""
        return bucket not in self and not self.is_offloaded(bucket) and not any(self._wanted)

    def defer(self, bucket: int, rows: DeferredSum) -> None:
        self.deferred[bucket] = rows
        if self._kept.pop(bucket, None) is not None:
            accelerators.get(self.device.type).empty_cache()  # that it takes the place of

    def materialize(self, bucket: int) -> None:
        """What waits waits no more."""
        if bucket in self.deferred:
            share = self.allocate(bucket)
            self.deferred[bucket].add_into(share)
            self.shares[bucket] = share
            self.deferred.pop(bucket).release()

    def _send(self, bucket: int, values: torch.Tensor, factor: float) -> HostCopy:
        assert self.host is not None
        self._add_arrived(most=_MOST_ON_THE_WAY - 1)  # a host that is ahead waits here, for a copy and never for another rank
        if bucket in self.shares:
            landing = self.host.borrow(values.numel(), values.dtype)
            coming = _Coming(bucket, self.host.to_host(values, landing), landing, factor)
        else:
            share = self.shares[bucket] = self.allocate(bucket)
            coming = _Coming(bucket, self.host.to_host(values if factor == 1.0 else values.mul_(factor), share))
        self._arriving.append(coming)
        return coming.crossing

    def _add_arrived(self, most: int = 0) -> None:
        """Adds what has arrived on the host, in the order in which it was sent, until no more than so many are on their way."""
        while self._arriving and (len(self._arriving) > most or self._arriving[0].crossing.done()):
            coming = self._arriving.popleft()
            coming.crossing.finish()
            if coming.landing is not None and self.host is not None:
                self.shares[coming.bucket].add_(coming.landing, alpha=coming.factor)
                self.host.give_back(coming.landing)

    def defer_scale(self, bucket: int, factor: float) -> None:
        """Multiplies a share when it is next looked at: never, if it is cleared before."""
        if bucket in self.deferred:
            self.deferred[bucket].factors += (factor,)
            return
        self._deferred_scales[bucket] = self._deferred_scales.get(bucket, 1.0) * factor

    def _apply_deferred_scale(self, bucket: int) -> None:
        if bucket in self._deferred_scales:
            self.shares[bucket].mul_(self._deferred_scales.pop(bucket))

    def check_resident(self) -> None:
        """Raises while states that gradients need are on the host."""
        if self.offloaded_states:
            raise ValueError(
                f"Gradients were asked for, but {', '.join(self.offloaded_states)} are on the host since offload_states. "
                "Call reload_states() first."
            )

    def multiply(self, factor: float) -> None:
        for rows in self.deferred.values():
            rows.factors += (factor,)
        if self.shares and factor != 1.0:
            for indices in by_device(shares := self.present()):
                torch._foreach_mul_([shares[index] for index in indices], factor)

    def present(self) -> list[torch.Tensor]:
        """The shares whose sums were taken, in the order of buckets."""
        return [self._sum_of(bucket) for bucket in sorted(self.shares)]

    def clear(self) -> None:
        self._add_arrived()  # memory that a copy still writes must not be somebody else's
        if self.shares or self.deferred:
            self._wanted = [self._wanted[1], False]
        at_home = {bucket: share for bucket, share in self.shares.items() if self._is_on_host(bucket)}
        self._kept.update(at_home)  # and not those that are there for a while
        self.shares.clear()
        for rows in self.deferred.values():
            rows.release()
        self.deferred.clear()
        self._deferred_scales.clear()

    def release(self) -> None:
        """Lets go of everything."""
        self.clear()
        self._kept.clear()

    @property
    def num_staged_bytes(self) -> int:
        """Of these, those that are staging buffers."""
        return sum(rows.num_bytes for rows in self.deferred.values() if rows.is_staged)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(rows.num_bytes for rows in self.deferred.values())

    def allocate(self, bucket: int) -> torch.Tensor:
        return self._kept.pop(bucket) if bucket in self._kept else super().allocate(bucket)


class _Coming(NamedTuple):
    """What is on its way to a share: the first into the share itself, whatever is to be added beside it."""

    bucket: int
    crossing: HostCopy
    landing: torch.Tensor | None = None
    factor: float = 1.0
