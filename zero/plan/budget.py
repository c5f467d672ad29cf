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
    """Bytes of one rank: on the device of the weights, and on a host beside it. What the user's own graph and batch need
    comes on top."""

    weights: int
    device: Shares
    staging: int  # buckets being filled and sent; kept for the next window
    exchanged: int = 0  # what the ranks' buckets become, until it is kept, and the gradient that has just come
    stepping: int = 0  # what the optimizer needs beside its states while it steps on the device
    host: Shares = Shares()
    in_transit: int = 0  # weights on the host, on their way to be compared or back

    @property
    def states(self) -> int:
        """What is on the device between two windows."""
        return self.weights + self.device.masters + self.device.moments + self.staging

    @property
    def peak(self) -> int:
        """The most on the device at one time, while a window is being filled or stepped on."""
        return self.states + self.device.gradients + max(self.exchanged, self.stepping)

    @property
    def host_peak(self) -> int:
        return self.host.total + self.in_transit


def budget_of(
    layout: FlatLayout, rank: int = 0, num_moments: int = 2, num_in_flight: int = 2, has_host: bool = False
) -> Budget:
    """The cost of `layout` with an optimizer of `num_moments` values an element, and so many buckets in flight at a time.

    A bucket in flight is there as this rank filled it, as the pieces of all ranks that it received in exchange, and as their
    sum, which is apart unless a single rank has it in the right dtype already. On its way to the host the sum stays until
    the next one comes. `has_host`: offloaded shares are in other memory than the weights.
    """
    found = {False: Counter[str](), True: Counter[str]()}
    filled, received, coming, stepped, share_bytes = [0], [0], [0], [0], [0]
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        wide = max(item, ITEM_BYTES["float32"])
        there = bucket.offloaded and has_host
        share = bucket.share_numel * wide
        found[there]["gradients"] += share
        found[there]["masters"] += share if item < wide or there else 0
        filled.append(bucket.span.numel * item)
        pieces = bucket.span.numel * item if layout.num_shares > 1 else 0
        total = share if pieces or item < wide else 0
        received.append(pieces + total)
        coming.append(total if there else 0)
        stepped.append(0 if there else share)
        share_bytes.append(bucket.share_numel * item if there else 0)
    for param, spec in enumerate(layout.params):
        wide = max(ITEM_BYTES[spec.dtype], ITEM_BYTES["float32"])
        # The optimizer sees pieces, never the padding between them.
        for piece in layout.pieces(param, rank if layout.num_shares > 1 else 0):
            there = layout.buckets[piece.bucket].offloaded and has_host
            found[there]["moments"] += num_moments * wide * piece.in_param.numel
    gradients = [spec.numel * ITEM_BYTES[spec.dtype] for spec in layout.params]
    return Budget(
        weights=sum(chunk.numel * ITEM_BYTES[chunk.dtype] for chunk in layout.chunks),
        device=Shares(**found[False]),
        staging=num_in_flight * max(filled),
        exchanged=num_in_flight * max(received) + max(coming) + max(gradients, default=0),
        stepping=max(stepped),
        host=Shares(**found[True]),
        in_transit=sum(sorted([*share_bytes, *share_bytes])[-_TRAVELLING:]),  # of one bucket one that comes and one that goes
    )
