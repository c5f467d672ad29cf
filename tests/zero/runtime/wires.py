"""A group of one rank that notes what is sent, and may hold it back until somebody waits."""

import torch


class Wire:
    outer = needs = None

    def __init__(self, size=1):
        self.rank, self.size, self.inner = 0, size, self
        self.sent = []
        self.holds_back = False

    def reduce_scatter(self, bucket, sum_dtype):
        self.sent.append(bucket.clone())
        return Held(bucket.to(sum_dtype, copy=True), self)

    all_reduce = reduce_scatter

    def all_gather_bytes(self, message):
        return [message]


class Held:
    def __init__(self, result: torch.Tensor, wire: Wire):
        self.result, self.wire = result, wire

    def done(self):
        return not self.wire.holds_back

    def wait(self):
        return self.result
