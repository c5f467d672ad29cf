"""Draws what device, link and host do in two steps of a training, in two ways.

    python benchmarks/timeline.py --plot FILE.svg               the host reads the norm, and does not
    python benchmarks/timeline.py --offload --plot FILE.svg     masters are stepped after the backward, and in it

On the simulated device, which knows what comes after what. A launch takes the host 8 microseconds, a matrix product takes the
device so long that all of them take `--balance` times as long as all launches, any other kernel and a copy 2 microseconds. So
nothing in the picture is measured, and it is the same on any machine. Two ways are stage 2 with `on_nonfinite="raise"`, where
each step waits for the norm of the gradients, and with the default, where the device decides.

With `--offload`, masters are on the host. A launch takes 0.1 microseconds, as what a large model computes hides launches. All
weights cross the link in `--link` times the time of all matrix products, and are stepped on the host in `--host` times it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from peer_models import SIZES, VOCABULARY, Gpt
from torch.utils.flop_counter import flop_registry

import accelerators_sim as simulated
import zero
from accelerators_sim import copies, operators
from accelerators_sim.calls import Call
from accelerators_sim.lanes import Lane, Lanes, host, lanes
from accelerators_sim.streams import Event
from zero.comm.levels import SoloGroup
from zero.runtime.kernels.adam_step import FusedStep, Stepped
from zero.sharding import ahead

SMALL_US = 2.0
STEP_US, BUCKETS = 50_000.0, 24  # what a step with masters on the host computes on the device, and its buckets
ROWS = ("device", "link", "host launches", "host waits", "host steps")
COLOURS = dict(zip(ROWS, ("#4878a8", "#d98b3a", "#5a9e6f", "#b8b8b8", "#a0527f"), strict=True))
WAYS: dict[str, dict[str, Any]] = {
    "the host reads the norm": {"clip": 1.0, "on_nonfinite": "raise"},
    "the device decides": {"clip": 1.0},
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "masters are stepped after the backward": {"offload": "cpu"},
    "masters are stepped in the backward": {"offload": {"home": "cpu", "step_in_backward": True}},
}

Spans = dict[str, list[tuple[float, float]]]


class Costs(NamedTuple):
    """The microseconds of what is not small."""

    launch: float = 8.0
    operation: float = 1.0  # of a matrix product
    crossing: float = 0.0  # of a byte on the link
    stepping: float = 0.0  # of an element on the host


class Timeline:
    """The times, in microseconds, at which each piece of work that a host issues would begin and end."""

    def __init__(self, costs: Costs) -> None:
        self.spans: Spans = {row: [] for row in ROWS}
        self.operations = 0.0
        self.host_us = 0.0  # the time of the thread that runs
        self.beside_us = 0.0  # the time from which the thread beside the main one has nothing to do
        self._ends: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by stream, and by the number on it
        self._costs = costs
        self._next = ("device", SMALL_US)  # the stream and the time of what is issued next
        self._call, self._copy, self._issue, self._wait = Call, copies._copy_with_host, Lane.issue, Lanes.wait_host
        self._step = FusedStep.step
        self._is_beside = False  # the thread beside the main one runs, of which steps alone are drawn

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Notes what is issued meanwhile. Streams do not learn what a thread of the host has waited for: its time says that,
        and it orders nothing of the other thread."""
        timeline = self
        with (
            simulated.without_races(),
            mock.patch.object(Lane, "hear", lambda lane: None),
            mock.patch.object(operators, "Call", self._called),
            mock.patch.object(copies, "_copy_with_host", self._copied),
            mock.patch.object(Lane, "issue", lambda lane, *args: timeline._issued(lane, *args)),
            mock.patch.object(Lanes, "wait_host", lambda lanes, *args: timeline._waited(lanes, *args)),
            mock.patch.object(Event, "query", lambda event: timeline._asked(event)),
            mock.patch.object(FusedStep, "step", lambda step, batch: timeline._stepped(step, batch)),
            mock.patch.object(ahead, "ThreadPoolExecutor", lambda *args, **options: ThreadBeside(timeline)),
        ):
            yield

    def _called(self, op: Any, args: Any, kwargs: Any) -> Call:
        count = flop_registry.get(op.overloadpacket)
        if count is not None:
            operations = count(*args, **kwargs)
            self.operations += operations
            self._next = "device", operations * self._costs.operation
        return self._call(op, args, kwargs)

    def _copied(self, start: copies.End, *args: Any) -> None:
        self._next = "link", SMALL_US + start.tensor.nbytes * self._costs.crossing
        self._copy(start, *args)

    def _issued(self, lane: Lane, operator: str, *args: Any) -> Any:
        access = self._issue(lane, operator, *args)
        begins = self._end_of(self._before(lane))
        (row, cost), self._next = self._next, ("device", SMALL_US)
        if operator.startswith("aten::empty"):  # such an operator only takes memory
            self._ends[lane.number][lane.count] = begins
            return access
        self._host("host launches", self.host_us + self._costs.launch)
        begins = max(begins, self.host_us)
        self.spans[row].append((begins, begins + cost))
        self._ends[lane.number][lane.count] = begins + cost
        return access

    @staticmethod
    def _before(lane: Lane) -> dict[int, int]:
        return {**lane.clock, lane.number: lane.count - 1}

    def _waited(self, lanes: Lanes, awaited: Lane, clock: dict[int, int]) -> None:
        self._wait(lanes, awaited, clock)
        self.wait_until(self._end_of(clock))

    def _end_of(self, clock: dict[int, int]) -> float:
        return max((self._ends[number].get(count, 0.0) for number, count in clock.items()), default=0.0)

    def _asked(self, event: Event) -> bool:
        if self._end_of(event._clock) > self.host_us:
            return False
        if event._task is not None:
            lanes.run_to(event._task)
        host.learn(event._clock)
        return True

    def _stepped(self, step: FusedStep, batch: list[Stepped]) -> None:
        self._step(step, batch)
        numel = sum(each.block.span.numel for each in batch)
        self._host("host steps", self.host_us + numel * self._costs.stepping)

    def wait_until(self, end: float) -> None:
        if end > self.host_us:
            self._host("host waits", end)

    def _host(self, row: str, until: float) -> None:
        if row == "host steps" or not self._is_beside:
            self.spans[row].append((self.host_us, until))
        self.host_us = until

    def run_beside(self, call: Callable[..., object], *args: Any) -> None:
        """Runs what the thread beside the main one begins now, or when it is free."""
        before, self.host_us, self._is_beside = self.host_us, max(self.beside_us, self.host_us), True
        try:
            call(*args)
        finally:
            self.beside_us, self.host_us, self._is_beside = self.host_us, before, False

    def begin(self) -> None:
        """Begins anew, when nothing is on its way."""
        self.spans, self.operations, self.host_us, self.beside_us = {row: [] for row in ROWS}, 0.0, 0.0, 0.0
        self._ends.clear()


class ThreadBeside:
    """A pool of one thread, whose work is done at once and counts as done at its end on the timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def submit(self, call: Callable[..., object], *args: Any) -> WorkBeside:
        self._timeline.run_beside(call, *args)
        return WorkBeside(self._timeline, self._timeline.beside_us)

    def shutdown(self) -> None:
        """Has nothing to end."""


class WorkBeside(NamedTuple):
    """The work of that thread, as a future."""

    timeline: Timeline
    end_us: float

    def done(self) -> bool:
        return self.timeline.host_us >= self.end_us

    def exception(self) -> None:
        self.timeline.wait_until(self.end_us)


def record(options: argparse.Namespace, costs: Costs, given: dict[str, Any]) -> Timeline:
    torch.manual_seed(0)
    with torch.device("sim:0"):
        model = Gpt(*SIZES[options.size], options.length)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharding = {"stage": 2, "dtype": "bfloat16", "kernels": "fused", "group": SoloGroup()}
    timeline = Timeline(costs)
    with timeline.recording():
        optimizer = zero.shard(model, inner, **sharding, **given)

        def step() -> None:
            model(torch.randint(VOCABULARY, (1, options.length + 1)).to("sim:0", non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(), step()
        torch.sim.synchronize()
        timeline.begin()
        step(), step()
    optimizer.close()
    return timeline


def ways_of(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], Costs]:
    """Returns what is drawn, and the costs that the options ask for."""
    trial = record(options, Costs(), {})
    if not options.offload:
        launching = sum(end - begin for begin, end in trial.spans["host launches"])
        return WAYS, Costs(operation=options.balance * launching / trial.operations)
    num_params = sum(param.numel() for param in Gpt(*SIZES[options.size], options.length).parameters())
    ways = {way: {"bucket_bytes": num_params // BUCKETS, **given} for way, given in OFFLOADED.items()}
    crossing, stepping = options.link * STEP_US / (2 * num_params), options.host * STEP_US / num_params
    return ways, Costs(SMALL_US / 20, 2 * STEP_US / trial.operations, crossing, stepping)


def drawn(timelines: dict[str, Timeline]) -> str:
    width, left, high, apart = 860, 110, 16, 24
    longest = max(end for each in timelines.values() for spans in each.spans.values() for _, end in spans)
    unit = (width - left - 10) / longest
    parts, y = [], 10.0
    for way, timeline in timelines.items():
        end = max(end for spans in timeline.spans.values() for _, end in spans)
        parts.append(f'<text x="10" y="{y + 12}">{way}: {end / 1000:.1f} ms for two steps</text>')
        for row, spans in timeline.spans.items():
            if not spans:
                continue
            y += apart
            parts.append(f'<text x="10" y="{y + 12}">{row}</text>')
            for begin, until in joined(spans, 1 / unit):
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
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--link", type=float, default=0.4)
    parser.add_argument("--host", type=float, default=1.0)
    parser.add_argument("--plot", metavar="FILE.svg")
    options = parser.parse_args()
    simulated.bring_up()
    ways, costs = ways_of(options)
    timelines = {way: record(options, costs, given) for way, given in ways.items()}
    for way, timeline in timelines.items():
        busy = {row: sum(end - begin for begin, end in spans) / 1000 for row, spans in timeline.spans.items()}
        end = max(end for spans in timeline.spans.values() for _, end in spans) / 1000
        print(f"{way}: {end:.2f} ms; " + ", ".join(f"{row} {ms:.2f}" for row, ms in busy.items()))
    if options.plot:
        Path(options.plot).write_text(drawn(timelines))


if __name__ == "__main__":
    main()
