"""Times forward and backward with weights that live on the host, beside what computing and what the link alone would take.

    python benchmarks/host_weights.py [--size 10M] [--gathered 0.25] [--balance 0.5 1 2]

On the simulated device, which knows what comes after what on its streams. Each matrix product is given a time by its
operations, each copy one by its bytes, and a window takes as long as the longest way through all of these. So neither the load
nor the speed of the machine is in the figures. `--balance` is what the link takes for the weights, in parts of what computing
takes. `--gathered` is the memory for weights that have come, in parts of all of them, and `--bucket` the size of a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import torch
from peer_models import SIZES, VOCABULARY, Gpt
from torch.utils.flop_counter import flop_registry

import accelerators_sim as simulated
import zero
from accelerators_sim import copies, operators
from accelerators_sim.calls import Call
from accelerators_sim.lanes import Lane
from zero.comm.levels import SoloGroup


class Schedule:
    """The record of what was issued to each stream, and when it would end."""

    def __init__(self, operations_a_second: float = 1.0, bytes_a_second: float = 1.0) -> None:
        self.ends: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by stream, and by the number on it
        self.busy = Counter[str]()  # the seconds of computing, and of each direction of the link
        self._speeds = operations_a_second, bytes_a_second
        self._cost = 0.0  # the seconds of what is issued next
        self._call, self._copy, self._issue = Call, copies._copy_with_host, Lane.issue

    @contextlib.contextmanager
    def recording(self) -> Any:
        schedule = self
        with (
            mock.patch.object(operators, "Call", self._called),
            mock.patch.object(copies, "_copy_with_host", self._copied),
            mock.patch.object(Lane, "issue", lambda lane, *args: schedule._issued(lane, *args)),
        ):
            yield self

    @property
    def seconds(self) -> float:
        return max(end for ends in self.ends.values() for end in ends.values())

    def _called(self, op: Any, args: Any, kwargs: Any) -> Call:
        count = flop_registry.get(op.overloadpacket)
        if count is not None:
            self._spend("computing", count(*args, **kwargs) / self._speeds[0])
        return self._call(op, args, kwargs)

    def _copied(self, start: Any, end: Any, non_blocking: bool) -> None:
        self._spend("up" if end.on_device else "down", start.tensor.nbytes / self._speeds[1])
        self._copy(start, end, non_blocking)

    def _spend(self, what: str, seconds: float) -> None:
        self._cost = seconds
        self.busy[what] += seconds

    def _issued(self, lane: Lane, *args: Any) -> Any:
        access = self._issue(lane, *args)
        known = {**lane.clock, lane.number: lane.count - 1}
        begins = max((self.ends[number].get(count, 0.0) for number, count in known.items()), default=0.0)
        self.ends[lane.number][lane.count] = begins + self._cost
        self._cost = 0.0
        return access


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--gathered", type=float, default=0.25)
    parser.add_argument("--bucket", type=float, default=0.04)
    parser.add_argument("--balance", type=float, nargs="*", default=[0.5, 1.0, 2.0])
    args = parser.parse_args()
    simulated.bring_up()
    with torch.device("sim:0"):
        model = Gpt(*SIZES[args.size], args.length)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    homes = {"weights": "cpu", "masters": "cpu", "moments": "cpu"}
    weight_bytes = 2 * sum(param.numel() for param in model.parameters())
    kept, bucket_bytes = int(args.gathered * weight_bytes), int(args.bucket * weight_bytes)
    optimizer = zero.shard(
        model, inner, stage=3, dtype="bfloat16", homes=homes, gathered_bytes=kept, bucket_bytes=bucket_bytes, group=SoloGroup()
    )

    def window(*speeds: float) -> tuple[Schedule, Schedule]:
        rows = torch.randint(VOCABULARY, (1, args.length + 1)).to("sim:0")
        forward, backward = Schedule(*speeds), Schedule(*speeds)
        with forward.recording():
            loss = model(rows)
            torch.sim.synchronize()
        with backward.recording():
            loss.backward()
            torch.sim.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        return forward, backward

    window()  # this window learns the order of uses
    forward, backward = window()
    for name, counted in (("forward", forward), ("backward", backward)):
        up, down = (counted.busy[way] / 2**20 for way in ("up", "down"))
        print(f"{name:8} {counted.busy['computing'] / 1e9:.2f} G operations, {up:.0f} MiB up, {down:.0f} MiB down")
    operations, num_bytes = (forward.busy[what] + backward.busy[what] for what in ("computing", "up"))
    print("what a window takes, in parts of the longest of computing, up and down")
    for balance in args.balance:
        found = window(operations, num_bytes / balance)
        least = [max(each.busy.values()) for each in found]
        took = [each.seconds for each in found]
        print(
            f"link {balance:4.2f} of computing: forward {took[0] / least[0]:.2f}, backward {took[1] / least[1]:.2f}, "
            f"together {sum(took) / sum(least):.2f}"
        )
    optimizer.close()


if __name__ == "__main__":
    main()
