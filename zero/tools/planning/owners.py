"""Who owns which matrix, where an optimizer steps whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from accelerators.memory import format_bytes
from zero.optim.muon import is_for_muon
from zero.plan.layout import ITEM_BYTES, FlatLayout, ParamSpec


@dataclass(frozen=True)
class Owners:
    """The matrices of a layout by rank."""

    tensors: list[int]  # by rank
    num_bytes: list[int]  # of weights
    balance: float  # the work of the busiest rank, with the mean as one
    padding: float  # a part of what the matrices take
    largest_bucket: int  # bytes

    @staticmethod
    def of(layout: FlatLayout) -> Owners:
        owned = [(layout.owner(param), spec) for param, spec in enumerate(layout.params)]
        ranks = range(layout.num_shares)
        works = [layout.work_of(rank) for rank in ranks]
        items = [(bucket, ITEM_BYTES[layout.chunks[bucket.chunk].dtype]) for bucket in layout.buckets if bucket.is_whole]
        needed = sum(spec.numel * ITEM_BYTES[spec.dtype] for owner, spec in owned if owner is not None)
        taken = sum(bucket.span.numel * item for bucket, item in items)
        return Owners(
            [sum(owner == rank for owner, _ in owned) for rank in ranks],
            [sum(spec.numel * ITEM_BYTES[spec.dtype] for owner, spec in owned if owner == rank) for rank in ranks],
            max(works) * len(works) / max(1, sum(works)),
            taken / max(1, needed) - 1,
            max((bucket.span.numel * item for bucket, item in items), default=0),
        )

    def words(self) -> list[str]:
        least, most = min(self.num_bytes), max(self.num_bytes)
        each = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
        few, many = min(self.tensors), max(self.tensors)
        number = f"{many}" if few == many else f"{few} to {many}"
        return [
            f"Muon steps {sum(self.tensors)} matrices, each on the rank that owns it: {number} a rank, {each} of weights.",
            f"The busiest rank has {self.balance:.2f} of the mean work, padding takes {self.padding:.1%}, and the largest "
            f"bucket has {format_bytes(self.largest_bucket)}.",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def for_muon(params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Puts what `"type": "Muon"` in a configuration gives to Muon into a group of its own, with the work of each."""
    specs = []
    for spec in params:
        is_matrix = is_for_muon(spec.name, len(spec.shape))
        specs.append(replace(spec, work=spec.numel * min(spec.shape[-2:])) if is_matrix else replace(spec, group=1))
    if not any(spec.work for spec in specs):
        raise ValueError("Cannot plan for Muon: there is no matrix. Give a model's config.json, or a function that makes it.")
    return specs
