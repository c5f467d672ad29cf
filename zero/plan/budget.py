"""What a layout costs on one rank, in bytes: the numbers that memory is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from zero.plan.layout import ITEM_BYTES, FlatLayout


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank. Everything but the weights and what is in flight is divided among the ranks that share it."""

    weights: int
    masters: int  # nothing where the weights are as wide as their sums
    moments: int  # of the optimizer
    gradients: int  # this rank's shares, from the first round of a window until it is cleared
    in_flight: int  # buckets being filled and sent

    @property
    def states(self) -> int:
        """What is there between two windows."""
        return self.weights + self.masters + self.moments

    @property
    def peak(self) -> int:
        """The most of it at one time, while a window is being filled or stepped on."""
        return self.states + self.gradients + self.in_flight


def budget_of(layout: FlatLayout, rank: int = 0, num_moments: int = 2, num_in_flight: int = 2) -> Budget:
    """The cost of `layout` with an optimizer of `num_moments` values an element, and so many buckets in flight at a time.

    A bucket in flight is there twice: as this rank filled it, and as what it received in exchange.
    """
    shared_by = layout.num_shares
    masters = gradients = 0
    bucket_bytes = [0]
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        wide = max(item, ITEM_BYTES["float32"])
        gradients += bucket.share_numel * wide
        masters += bucket.share_numel * wide if item < wide else 0
        bucket_bytes.append(bucket.span.numel * item)
    moments = 0
    for param, spec in enumerate(layout.params):
        wide = max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"])
        # The optimizer sees pieces, never the padding between them.
        owned = sum(piece.in_param.numel for piece in layout.pieces(param, rank if shared_by > 1 else 0))
        moments += num_moments * wide * owned
    return Budget(
        weights=sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks),
        masters=masters,
        moments=moments,
        gradients=gradients,
        in_flight=2 * num_in_flight * max(bucket_bytes),
    )
