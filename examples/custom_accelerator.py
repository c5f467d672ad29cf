"""An accelerator of your own, registered and used, with no edit of ours.

    python examples/custom_accelerator.py
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import accelerators
from accelerators.backends.cpu import CpuAccelerator
from accelerators.streams import Stream


@accelerators.register("counting", priority=10)
class CountingAccelerator(CpuAccelerator):
    """The CPU, counting how often it was waited for: a tool to find code that waits too much."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def synchronize(self, index: int | None = None) -> None:
        self.waits["synchronize"] += 1
        super().synchronize(index)

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[Stream]:
        self.waits["in_stream"] += 1
        with super().in_stream(stream):
            yield stream


def scaled_sum(x: torch.Tensor) -> float:
    """Returns twice the sum of a tensor, by code that knows nothing of the accelerator above."""
    accelerator = accelerators.current()
    stream = accelerator.new_stream()
    with accelerator.in_stream(stream):
        result = (2 * x).sum()
    stream.synchronize()
    accelerator.synchronize()  # once more than needed
    return result.item()


if __name__ == "__main__":
    with accelerators.using("counting") as accelerator:
        assert isinstance(accelerator, CountingAccelerator)
        print(scaled_sum(torch.ones(3, device=accelerator.device())), dict(accelerator.waits))
