"""Stop 7, publish: every rank's new share becomes everybody's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.comm.group import Group
from zero.memory.flat import FlatBuffer, Line
from zero.memory.masters import Masters
from zero.runtime.agreement import set_bits
from zero.runtime.params import Params


class Gatherer:
    """Writes the weights, and nobody else does."""

    def __init__(self, line: Line, params: Params, group: Group, weights: FlatBuffer, masters: Masters) -> None:
        self._line = line
        self._params = params
        self._group = group
        self._weights = weights
        self._masters = masters

    def adopt(self, buckets: Sequence[int]) -> None:
        """Takes the user's edits of the weights over, before anything is made from the masters."""
        for bucket in buckets:
            if self._masters.is_copy(bucket):
                self._masters.adopt(bucket)

    def publish(self, buckets: Sequence[int], params: int) -> None:
        """Casts and gathers the buckets of these parameters; when this returns every weight is the new one, on a device for
        whatever is issued next."""
        pending = []
        for bucket in buckets:
            if self._masters.is_copy(bucket):
                self._masters.publish(bucket)
            if self._line.layout.num_shares > 1:
                pending.append(self._group.all_gather(self._weights.bucket(bucket)))
        for gathered in pending:
            gathered.wait()
        # Writing the flat buffer tells the parameters' version counters nothing; without this, backward through a graph from
        # before the step would take the new weights for the old ones and give wrong gradients where plain torch raises.
        # Those beside them keep their values, and their graphs.
        for param in set_bits(params):
            torch.autograd.graph.increment_version(self._params.tensors[param])
