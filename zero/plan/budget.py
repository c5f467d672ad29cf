"""What a layout costs on one rank, in bytes: the numbers that memory is measured against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zero.plan.layout import ITEM_BYTES, FlatLayout

_TRAVELLING = 5  # shares of a bucket's weights on the host: two that come, one that is made, two that go


@dataclass(frozen=True)
class Shares:
    """Bytes of what is divided among the ranks, in one memory."""

    masters: int = 0  # nothing where the weights are as wide as their sums and in the same memory
    moments: int = 0  # of the optimizer
    gradients: int = 0  # this rank's shares, from the first round of a window until it is cleared

    @property
    def total(self) -> int:
        return self.masters + self.moments + self.gradients


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank: on the device of the weights, and on a host beside it."""

    weights: int
    device: Shares
    in_flight: int  # buckets being filled and sent
    host: Shares = Shares()
    in_transit: int = 0  # weights on the host, on their way to be compared or back

    @property
    def states(self) -> int:
        """What is on the device between two windows."""
        return self.weights + self.device.masters + self.device.moments

    @property
    def peak(self) -> int:
        """The most on the device at one time, while a window is being filled or stepped on."""
        return self.weights + self.device.total + self.in_flight

    @property
    def host_peak(self) -> int:
        return self.host.total + self.in_transit


def budget_of(
    layout: FlatLayout, rank: int = 0, num_moments: int = 2, num_in_flight: int = 2, has_host: bool = False
) -> Budget:
    """The cost of `layout` with an optimizer of `num_moments` values an element, and so many buckets in flight at a time.

    A bucket in flight is there twice: as this rank filled it, and as what it received in exchange. `has_host`: offloaded
    shares are in other memory than the weights.
    """
    found = {False: Counter[str](), True: Counter[str]()}
    bucket_bytes, share_bytes = [0], [0]
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        wide = max(item, ITEM_BYTES["float32"])
        there = bucket.offloaded and has_host
        found[there]["gradients"] += bucket.share_numel * wide
        found[there]["masters"] += bucket.share_numel * wide if item < wide or there else 0
        bucket_bytes.append(bucket.span.numel * item)
        share_bytes.append(bucket.share_numel * item if there else 0)
    for param, spec in enumerate(layout.params):
        wide = max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"])
        # The optimizer sees pieces, never the padding between them.
        for piece in layout.pieces(param, rank if layout.num_shares > 1 else 0):
            there = layout.buckets[piece.bucket].offloaded and has_host
            found[there]["moments"] += num_moments * wide * piece.in_param.numel
    return Budget(
        weights=sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks),
        device=Shares(**found[False]),
        in_flight=2 * num_in_flight * max(bucket_bytes),
        host=Shares(**found[True]),
        in_transit=_TRAVELLING * max(share_bytes),
    )
