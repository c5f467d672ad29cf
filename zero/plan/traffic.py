"""Bytes that a rank sends for one step: what a layout and a stage must cost on any network. `docs/scaling.md` shows them."""

from __future__ import annotations

from dataclasses import dataclass

from zero.plan.layout import ITEM_BYTES, FlatLayout
from zero.plan.stages import stage_of

# Large enough that a collective is worth its latency, small enough that a few in flight do not matter beside the model.
USUAL_BUCKET_BYTES = 16 * 2**20  # of a model of a gigabyte or less
_MOST_BYTES = 64 * 2**20
_NUM = 64
_LEAST_ON_NETWORK = 3 * 2**20  # each costs a millisecond or more of two processors
_LEAST_OF_A_RANK = 2**18  # which a delay of five microseconds is nothing to
_NUM_ON_NETWORK = 16


def default_bucket_bytes(weight_bytes: int, world: int, on_network: bool, is_host: bool = True) -> int:
    """Returns what `bucket_bytes="auto"` is, for host tensors that go over a network or others. What is sent first waits for a
    bucket of gradients, and what is sent last for a bucket of the step: over a network buckets are smaller, to hide the rest.
    Those of large models are larger, as each costs time on the host; so are those of one rank on a device, which sends nothing
    and waits for the host alone."""
    if world == 1 and not is_host:
        return _MOST_BYTES
    if not on_network:
        return min(_MOST_BYTES, max(USUAL_BUCKET_BYTES, weight_bytes // _NUM))
    least = max(_LEAST_ON_NETWORK, world * _LEAST_OF_A_RANK)
    return min(USUAL_BUCKET_BYTES, max(least, weight_bytes // _NUM_ON_NETWORK))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step."""

    gradients: int
    weights: int
    passes: int  # round all ranks: one for a collective, two for an all-reduce
    across: int = 0  # gradients again, from one group of ranks that share states to the others

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.across

    def seconds(self, world: int, link_bytes_per_s: float, latency_s: float) -> float:
        """What it takes where each rank sends at so many bytes a second, and what goes round passes all ranks in turn."""
        return self.total / link_bytes_per_s + self.passes * (world - 1) * latency_s


def traffic_of(layout: FlatLayout, stage: int, world: int, num_backwards: int = 1) -> Traffic:
    """For a window of `num_backwards`, on `world` ranks that all use all of the layout's parameters. Where fewer share it, the
    others have replicas.

    A reduce-scatter and an all-gather of N bytes both send N (world - 1) / world from each rank, an all-reduce twice as many,
    and of sums, which are fp32 or wider.
    """
    row = stage_of(stage)
    rounds = 1 if row.accumulates_locally else num_backwards
    # what waited for the end of an accumulation is wider than its weights, and is sent so
    as_sums = not row.shards_optimizer or (row.accumulates_locally and num_backwards > 1)
    num_shares = layout.num_shares if row.shards_optimizer else world
    replicas = world // num_shares
    gradients = weights = across = 0
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        sent = bucket.span.numel * (num_shares - 1) // num_shares
        across += 2 * (bucket.share_numel * (replicas - 1) // replicas) * max(4, item)
        gradients += rounds * sent * (max(4, item) if as_sums else item) * (1 if row.shards_optimizer else 2)
        weights += sent * item * (2 if row.shards_weights else 1) if row.shards_optimizer else 0  # for forward and backward
    passes = (rounds + 1) * (num_shares > 1) + 2 * (replicas > 1)
    return Traffic(gradients, weights, passes * len(layout.buckets), across)
