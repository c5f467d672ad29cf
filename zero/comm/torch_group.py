"""torch.distributed, spoken here and nowhere else.

[Note: wires]
Everything goes over process groups of our own, made at construction, so that nothing of ours can pair with a
collective of the user's. Tensors have one group; host messages have another, over gloo, because a rank that is
behind on tensors must still be able to say so. A third one is quiet until something failed: ranks that are
still there meet on it to find out who is not.

For a sub-group only its members are here to make them (`use_local_synchronization`), and torch then names groups by
their ranks and the number of groups alive: made again after being destroyed, they get the old name and find the
old addresses in the store. So those of a sub-group are kept when it is closed, for whoever shards over it next.

[Note: which collective]
Gloo adds bf16 in bf16, so 256 + 1 gives 256, and its reduce-scatter is slow; exchanging the pieces and adding
them in fp32 is exact and two to four times as fast. Its all-gather likewise loses to one broadcast an owner.
Backends of accelerators have native collectives that are fast, and exact when given what they shall add in.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerators import Accelerator
from accelerators.launch import read_launch
from zero.comm.group import Group, Pending, Ready, sum_in_rank_order
from zero.comm.loopback import solo
from zero.errors import GroupLost

# torch 2.13 has new names for these and warns of the old ones
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_kept: list[tuple[Any, list[int], str, list[Any]]] = []  # world, ranks, backend and groups of closed sub-groups

_FRAME_BYTES = 1024  # what nearly every message fits into, its length included
_MEETING_S = 2.0  # how long the ranks that are left wait for each other to find out who is missing


def connect(accelerator: Accelerator, group: Any = None, time_limit_s: float = 60.0, may_start: bool = True) -> Group:
    """The group to train with: the user's, else the launcher's, else a single rank."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return _checked(group)
    initialised = dist.is_available() and dist.is_initialized()
    if not initialised:
        if group is not None:
            raise ValueError(
                "A process group was passed, but torch.distributed is not initialised. Call init_process_group first."
            )
        world_size = read_launch(os.environ).world_size
        if world_size == 1:
            return solo()
        if not may_start:
            raise ValueError(
                f"dist_init_required=False was given and {world_size} ranks were started, but torch.distributed is not "
                "initialised. Call init_process_group first, or leave dist_init_required out."
            )
        dist.init_process_group(accelerator.communication_backend, timeout=datetime.timedelta(seconds=time_limit_s))
        atexit.register(_leave)
    elif group is None and dist.get_world_size() == 1:
        read_launch(os.environ).check_group(1)
    base = group if group is not None else dist.group.WORLD
    assert base is not None
    return TorchGroup(accelerator, base, time_limit_s, owns_world=not initialised)


def _leave() -> None:
    """Ends the groups that we made before the interpreter ends: gloo's threads hold tensors, and must not outlive it."""
    _kept.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _checked(group: Any) -> Group:
    if not all(hasattr(group, name) for name in ("rank", "size", "reduce_scatter", "all_gather", "exchange")):
        raise TypeError(
            f"group={group!r} was passed, which is neither a torch.distributed process group nor a zero Group. "
            "Pass what torch.distributed.new_group returned, or leave it out for all ranks."
        )
    checked: Group = group
    return checked


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved, as what every backend moves: some have no 16-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _Works:
    """Collectives of torch on their way, and what is to be done with their output."""

    def __init__(self, owner: TorchGroup, works: list[Any], finish: Callable[[], torch.Tensor]) -> None:
        self._owner, self._works, self._finish = owner, works, finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        for work in self._works:
            self._owner.guarded(work.wait)
        return self._finish()


class TorchGroup:
    def __init__(self, accelerator: Accelerator, base: dist.ProcessGroup, time_limit_s: float, owns_world: bool) -> None:
        self.rank = dist.get_rank(base)
        self.size = dist.get_world_size(base)
        self._time_limit_s = time_limit_s
        self.owns_world = owns_world
        self._ranks = dist.get_process_group_ranks(base)
        self._backend = accelerator.communication_backend
        self._tensors, self._messages, self._quiet = self._take_kept() or [
            self._new_group(backend) for backend in (self._backend, "gloo", "gloo")
        ]
        self._lost: str | None = None
        self._world: object = dist.group.WORLD  # whose end is ours too; None once we are closed

    def _new_group(self, backend: str) -> Any:
        limit = datetime.timedelta(seconds=self._time_limit_s)
        return dist.new_group(self._ranks, timeout=limit, backend=backend, use_local_synchronization=self._is_part)

    @property
    def _is_part(self) -> bool:
        return self.size < dist.get_world_size()

    def _take_kept(self) -> list[Any] | None:
        for index, (world, ranks, backend, groups) in enumerate(_kept):
            if world is dist.group.WORLD and ranks == self._ranks and backend == self._backend:
                del _kept[index]
                return groups
        return None

    # tensors -----------------------------------------------------------------------------------------------------

    def reduce_scatter(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return Ready(bucket.to(sum_dtype))
        if self._backend == "nccl" and bucket.dtype == sum_dtype:
            share = torch.empty(bucket.numel() // self.size, dtype=sum_dtype, device=bucket.device)
            work = self._start(_scatter_sum, share, bucket)
            return _Works(self, [work], lambda: share)
        pieces = torch.empty_like(bucket)
        work = self._start(dist.all_to_all_single, _bits(pieces), _bits(bucket))
        return _Works(self, [work], lambda: sum_in_rank_order(pieces, self.size, sum_dtype))

    def all_reduce(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> Pending:
        if self.size == 1:
            return Ready(bucket.to(sum_dtype))
        total = bucket.to(sum_dtype, copy=True)
        return _Works(self, [self._start(dist.all_reduce, total)], lambda: total)

    def all_gather(self, bucket: torch.Tensor) -> Pending:
        if self.size == 1:
            return Ready(bucket)
        numel = bucket.numel() // self.size
        if self._backend == "nccl":
            mine = bucket[self.rank * numel : (self.rank + 1) * numel]
            return _Works(self, [self._start(_gather_into, bucket, mine)], lambda: bucket)
        parts = zip(bucket.view(self.size, numel), self._ranks, strict=True)
        works = [self._start(dist.broadcast, _bits(part), src=rank) for part, rank in parts]
        return _Works(self, works, lambda: bucket)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        if self.size == 1:
            return Ready(tensor)
        return _Works(self, [self._start(dist.broadcast, _bits(tensor), src=self._ranks[0])], lambda: tensor)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    # messages ----------------------------------------------------------------------------------------------------

    def exchange(self, message: bytes) -> list[bytes]:
        if self.size == 1:
            return [message]
        # Gloo ends the process where sizes differ, as they do when one rank asks for something else than the others. So what
        # is sent first has one size whatever it is about, and says how much is to follow.
        framed = len(message).to_bytes(8, "little") + message
        heads = self._gather(framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0"))
        lengths = [8 + int.from_bytes(head[:8], "little") for head in heads]
        rest = max(lengths) - _FRAME_BYTES
        tails = self._gather(framed[_FRAME_BYTES:].ljust(rest, b"\0")) if rest > 0 else [b""] * self.size
        return [(head + tail)[8:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]

    def _gather(self, message: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        everyone = torch.empty(self.size * len(message), dtype=torch.uint8, device="cpu")
        self.guarded(lambda: _gather_into(everyone, mine, group=self._messages))
        whole = everyone.numpy().tobytes()
        return [whole[start : start + len(message)] for start in range(0, len(whole), len(message))]

    # failure -----------------------------------------------------------------------------------------------------

    def guarded(self, call: Callable[[], Any]) -> Any:
        """What `call` gives; its failure ends the group, and every later call says so with the first cause."""
        if self._lost is not None:
            raise GroupLost(f"A collective was asked for, but this group was lost before: {self._lost} Start the ranks again.")
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and not self._is_over:
                raise
            self._lost = self._who_is_missing(error)
            raise GroupLost(
                f"A collective of {self.size} ranks was asked for on rank {self.rank}, but {self._lost} Start the ranks again."
            ) from error

    def _who_is_missing(self, error: Exception) -> str:
        if self._is_over:
            return "torch.distributed was ended since the group was made, so close() what trains before that."
        limit = datetime.timedelta(seconds=_MEETING_S)
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        try:
            dist.monitored_barrier(self._quiet, timeout=limit, wait_all_ranks=True)
        except RuntimeError as absence:
            return f"it failed ({first_line}). Of the ranks: {str(absence).splitlines()[0]}."
        return f"it failed ({first_line}), though all ranks are still there."

    def _start(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.guarded(lambda: collective(*arguments, group=self._tensors, async_op=True, **options))

    @property
    def _is_over(self) -> bool:
        return not dist.is_initialized() or self._world is not dist.group.WORLD

    def close(self) -> None:
        if self._is_over:
            return
        self._world = None
        groups = [self._tensors, self._messages, self._quiet]
        if self._is_part and self._lost is None:
            _kept[:] = [kept for kept in _kept if kept[0] is dist.group.WORLD]
            _kept.append((dist.group.WORLD, self._ranks, self._backend, groups))
            return
        for group in groups:
            dist.destroy_process_group(group)
        if self.owns_world:
            dist.destroy_process_group()
