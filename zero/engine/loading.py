"""Loaders that give each rank its part of a dataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zero.comm.group import Group


def loader_of(
    dataset: Any, batch_size: int, group: Group, *, shuffle: bool = True, sampler: Any = None, **options: Any
) -> Any:
    """A DataLoader with torch's `options`, of this rank's part unless a sampler is given."""
    if isinstance(dataset, IterableDataset):
        if group.size > 1:
            raise ValueError(
                f"Cannot load an IterableDataset on {group.size} ranks: each of them would get all of it. Let it give each "
                "rank its part, and pass a DataLoader of it."
            )
    elif sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=group.size, rank=group.rank, shuffle=shuffle)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)
