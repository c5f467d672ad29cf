"""Draws what device, link and host do in two steps of a training, if the host reads the norm and if it does not.

    python benchmarks/timeline.py --plot FILE.svg

On the simulated device, which knows what comes after what. A launch takes the host 8 microseconds, a matrix product takes the
device so long that all of them take `--balance` times as long as all launches, any other kernel and a copy 2 microseconds. So
nothing in the picture is measured, and it is the same on any machine. The two ways are stage 2 with `on_nonfinite="raise"`,
where each step waits for the norm of the gradients, and with the default, where the device decides.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peer_models import SIZES, VOCABULARY, Gpt
from torch.utils.flop_counter import flop_registry

import accelerators_sim as simulated
import zero
from accelerators_sim import copies, operators
from accelerators_sim.calls import Call
from accelerators_sim.lanes import Lane, Lanes
from zero.comm.levels import SoloGroup

LAUNCH_US, SMALL_US = 8.0, 2.0
ROWS = ("device", "link", "host launches", "host waits")
COLOURS = dict(zip(ROWS, ("#4878a8", "#d98b3a", "#5a9e6f", "#b8b8b8"), strict=True))
WAYS = {"the host reads the norm": {"on_nonfinite": "raise"}, "the device decides": {}}

Spans = dict[str, list[tuple[float, float]]]


class Timeline:
    """The times, in microseconds, at which each piece of work that a host issues would begin and end."""

    def __init__(self, operations_a_us: float) -> None:
        self.spans: Spans = {row: [] for row in ROWS}
        self.operations = 0.0
        self.host_us = 0.0
        self._ends: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by stream, and by the number on it
        self._speed = operations_a_us
        self._next = ("device", SMALL_US)  # the stream and the time of what is issued next
        self._call, self._copy, self._issue, self._wait = Call, copies._copy_with_host, Lane.issue, Lanes.wait_host

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        timeline = self
        with (
            mock.patch.object(operators, "Call", self._called),
            mock.patch.object(copies, "_copy_with_host", self._copied),
            mock.patch.object(Lane, "issue", lambda lane, *args: timeline._issued(lane, *args)),
            mock.patch.object(Lanes, "wait_host", lambda lanes, *args: timeline._waited(lanes, *args)),
        ):
            yield

    def _called(self, op: Any, args: Any, kwargs: Any) -> Call:
        count = flop_registry.get(op.overloadpacket)
        if count is not None:
            operations = count(*args, **kwargs)
            self.operations += operations
            self._next = "device", operations / self._speed
        return self._call(op, args, kwargs)

    def _copied(self, *args: Any) -> None:
        self._next = "link", SMALL_US
        self._copy(*args)

    def _issued(self, lane: Lane, operator: str, *args: Any) -> Any:
        access = self._issue(lane, operator, *args)
        begins = max((self._ends[number].get(count, 0.0) for number, count in self._before(lane).items()), default=0.0)
        (row, cost), self._next = self._next, ("device", SMALL_US)
        if operator.startswith("aten::empty"):  # such an operator only takes memory
            self._ends[lane.number][lane.count] = begins
            return access
        self._host("host launches", self.host_us + LAUNCH_US)
        begins = max(begins, self.host_us)
        self.spans[row].append((begins, begins + cost))
        self._ends[lane.number][lane.count] = begins + cost
        return access

    @staticmethod
    def _before(lane: Lane) -> dict[int, int]:
        return {**lane.clock, lane.number: lane.count - 1}

    def _waited(self, lanes: Lanes, awaited: Lane, clock: dict[int, int]) -> None:
        self._wait(lanes, awaited, clock)
        ends = max((self._ends[number].get(count, 0.0) for number, count in clock.items()), default=0.0)
        if ends > self.host_us:
            self._host("host waits", ends)

    def _host(self, row: str, until: float) -> None:
        self.spans[row].append((self.host_us, until))
        self.host_us = until


def record(options: argparse.Namespace, operations_a_us: float, given: dict[str, Any]) -> Timeline:
    torch.manual_seed(0)
    with torch.device("sim:0"):
        model = Gpt(*SIZES[options.size], options.length)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharding = {"stage": 2, "dtype": "bfloat16", "clip": 1.0, "kernels": "fused", "group": SoloGroup()}
    optimizer = zero.shard(model, inner, **sharding, **given)

    def step() -> None:
        model(torch.randint(VOCABULARY, (1, options.length + 1)).to("sim:0", non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    torch.sim.synchronize()
    timeline = Timeline(operations_a_us)
    with timeline.recording():
        step(), step()
    optimizer.close()
    return timeline


def drawn(timelines: dict[str, Timeline]) -> str:
    width, left, high, apart = 860, 110, 16, 24
    longest = max(end for each in timelines.values() for spans in each.spans.values() for _, end in spans)
    unit = (width - left - 10) / longest
    parts, y = [], 10.0
    for way, timeline in timelines.items():
        end = max(end for spans in timeline.spans.values() for _, end in spans)
        parts.append(f'<text x="10" y="{y + 12}">{way}: {end / 1000:.1f} ms for two steps</text>')
        for row, spans in timeline.spans.items():
            y += apart
            parts.append(f'<text x="10" y="{y + 12}">{row}</text>')
            for begin, until in joined(spans, 0.5 / unit):
                place = f'x="{left + unit * begin:.1f}" width="{max(0.5, unit * (until - begin)):.1f}"'
                parts.append(f'<rect {place} y="{y}" height="{high}" fill="{COLOURS[row]}"/>')
        y += 2 * apart
    size = f'width="{width}" height="{y:.0f}" viewBox="0 0 {width} {y:.0f}" font-family="sans-serif" font-size="12"'
    style = "<style>text{fill:#24292f} @media (prefers-color-scheme: dark){text{fill:#e6edf3}}</style>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, *parts, "</svg>", ""])


def joined(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans without gaps that nobody would see."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] < gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--balance", type=float, default=1.2)
    parser.add_argument("--plot", metavar="FILE.svg")
    options = parser.parse_args()
    simulated.bring_up()
    trial = record(options, 1.0, {})
    launching = sum(end - begin for begin, end in trial.spans["host launches"])
    timelines = {
        way: record(options, trial.operations / (options.balance * launching), given) for way, given in WAYS.items()
    }
    for way, timeline in timelines.items():
        busy = {row: sum(end - begin for begin, end in spans) / 1000 for row, spans in timeline.spans.items()}
        end = max(end for spans in timeline.spans.values() for _, end in spans) / 1000
        print(f"{way}: {end:.2f} ms; " + ", ".join(f"{row} {ms:.2f}" for row, ms in busy.items()))
    if options.plot:
        Path(options.plot).write_text(drawn(timelines))


if __name__ == "__main__":
    main()
