"""Counts the bytes that a training holds now on one rank; `zero/plan/budget.py` predicts the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.memory.homes.disk import is_absent
from zero.plan.budget import Shares
from zero.sharding.state import ShardingState


@dataclass(frozen=True)
class MeasuredBytes:
    """The bytes of one rank, by kind of state and place."""

    device: Shares
    buckets: int
    host: Shares  # zero if the accelerator computes in host memory
    disk: Shares

    @property
    def total(self) -> int:
        return self.device.total + self.buckets


def measured_bytes(sharding: ShardingState) -> MeasuredBytes:
    """Counts the bytes that are held now. Gradients count from the first round of a window until it is cleared."""
    on_disk = Counter[str]()
    shares = {False: Counter[str](), True: Counter[str]()}  # the key says whether they lie on a host beside the weights
    device = sharding.masters.shard.device

    def count(kind: str, tensor: torch.Tensor) -> None:
        if is_absent(tensor):
            on_disk[kind] += tensor.nbytes
            return
        shares[tensor.device != device][kind] += _num_bytes(tensor)

    for tensor in sharding.placer.weights.memory():
        count("weights", tensor)
    on_disk["weights"] = sharding.placer.weights.num_disk_bytes
    for bucket, master in sharding.masters.shard.shares.items():
        if sharding.masters.is_copy(bucket):
            count("masters", master)
    for state in sharding.updater.inner.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                count("moments", value)
    for gradient in (*sharding.window.grad_ops.shard.shares.values(), *sharding.window.since_settling.pending.values()):
        count("gradients", gradient)
    shares[False]["gradients"] += sum(rows.num_bytes for rows in sharding.window.grad_ops.shard.deferred.values())
    shares[False]["gradients"] += sharding.window.reducer.num_wide_bytes
    buckets = sharding.window.reducer.num_staging_bytes
    return MeasuredBytes(Shares(**shares[False]), buckets, Shares(**shares[True]), Shares(**on_disk))


def _num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor. A tensor that is made of others, as those of few bits are, takes what they take."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    parts, _ = tensor.__tensor_flatten__()
    return sum(_num_bytes(getattr(tensor, part)) for part in parts)
