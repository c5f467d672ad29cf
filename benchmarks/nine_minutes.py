"""The answers of one borrowed accelerator in nine minutes: parts with a time limit each, and a line of JSON for each answer.

    python benchmarks/gpu.py --nine-minutes FILE                        appends lines to FILE
    python benchmarks/gpu.py --nine-minutes FILE --deepspeed FOLDER     with DeepSpeed, of packages that lie in FOLDER
    python benchmarks/gpu.py --table FILE                               a section of docs/performance.md, from these lines

FOLDER is made where there is a network, for the Python of the other machine:
`pip install --target FOLDER --no-deps deepspeed hjson einops msgpack ninja packaging py-cpuinfo tqdm`.

Parts come in the order of what is wanted most. A line is in the file before the next answer is computed, so that what is known
stays if the machine is taken away. Each *way* of a part is a process of its own, forked from one that has imported torch and
has not touched the device. One that fails, or that is not done in time, is a line that says so, and the next one runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu_ways import MIB, UNCLIPPED, Training, training_of
from host_step import bandwidth
from offload_step import LANDING_CROSSES, STEP_CROSSES, crossing
from peer_models import SIZES, batch

import accelerators
import zero.comm.torch_group as torch_group
from zero.comm.group import TimeLimits

Answer = dict[str, Any]

ROOT = Path(__file__).parent.parent
SHARDED = ("plain", "stage 2", "stage 3")
THROUGHPUT = ("plain", "stage 2", "stage 3", "fsdp2", "deepspeed 2", "deepspeed 3", "stage 0", "stage 1")
# The last one has a graph for each block.
COMPILED = ("plain compiled blocks", "stage 3 compiled", "fsdp2 compiled", "stage 2 compiled")
OFFLOADED = ("stage 3 pinned", "stage 3 pageable", "stage 2 offloaded", *UNCLIPPED)


class Trained:
    """A way of training, warm, and a step of it for each call."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        self.device = accelerators.current()
        self.bytes_before = self.device.memory().allocated or 0
        self.training: Training = training_of(way, options)
        self._rows = [batch(options, 0, number).to(self.device.device()) for number in range(4)]
        self._number = 0
        for _ in range(options.warm_up):
            self.step()
        self.device.synchronize()

    def step(self) -> torch.Tensor:
        self._number += 1
        return self.training.step(self._rows[self._number % 4])


# parts: each is given a way and yields answers --------------------------------------------------------------------------


def machine(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """The machine, and what its memories and its link carry."""
    device = accelerators.current()
    yield {
        "card": _card(), "accelerator": device.name, "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "cores": os.cpu_count(), "clocks": _clocks(),
    }  # fmt: skip
    num_bytes = options.copied_mib * MIB
    down, up = crossing(device, num_bytes)
    yield {"down_gb_s": down / 1e9, "up_gb_s": up / 1e9}
    one, other = (torch.ones(num_bytes, dtype=torch.uint8, device=device.device()) for _ in range(2))
    yield {"device_gb_s": 2 * num_bytes / _fastest(lambda: other.copy_(one)) / 1e9}
    yield {"host_gb_s": bandwidth() / 1e9}


def _card() -> str:
    device = accelerators.current()
    name = getattr(device.module, "get_device_name", None)
    return str(name(device.current_index())) if name is not None else f"simulated device {device.name}"


def _clocks() -> str | None:
    """The clocks of an NVIDIA card and their limits, in MHz."""
    query = "clocks.sm,clocks.max.sm,clocks.mem,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None


def _fastest(call: Callable[[], object]) -> float:
    device = accelerators.current()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


class _Several(int):
    """The number of ranks of a group of one that does all that a group of several does."""

    def __eq__(self, other: object) -> bool:
        return other != 1 and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return other == 1 or super().__gt__(other)

    def __le__(self, other: int) -> bool:
        return not self > other

    __hash__ = int.__hash__


class _OneOfSeveral(torch_group.TorchGroup):
    """A group of one rank that takes no short cut: its collectives are those of the device's own backend."""

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = _Several(size)


def collectives(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """Runs each kind of collective over the device's backend, once; or a step through them, in which the host may not wait
    for the device."""
    group = _alone()
    if way != "each kind":
        trained = Trained(way, _with(options, group=group))
        answer: Answer = {"error": None}
        with _waits("error") as places:
            try:
                trained.step()
            except RuntimeError as error:  # the device reports the error at a wait
                answer["error"] = str(error).splitlines()[0]
        yield {**answer, "num_waits": len(places), "first_wait": places[0] if places else None}
        return
    in_fp32 = [torch.float32]
    kinds = {"reduce_scatter": in_fp32, "all_to_all": [], "all_reduce": in_fp32, "all_gather": [], "broadcast": []}
    for dtype in (torch.bfloat16, torch.float32):
        for kind, arguments in kinds.items():
            sent = torch.arange(1024, device=accelerators.current().device()).to(dtype)
            expected = sent.double().cpu()
            came = getattr(group, kind)(sent, *arguments).wait().double().cpu()
            yield {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "is_right": torch.equal(came, expected)}


def _alone() -> Any:
    """A group of this process alone, of the backend that its device has."""
    import torch.distributed as dist

    device = accelerators.current()
    if not dist.is_initialized():
        backends = f"cpu:gloo,{device.name}:{device.communication_backend}"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    return _OneOfSeveral(device, None, TimeLimits())


@contextlib.contextmanager
def _waits(mode: str = "warn") -> Iterator[list[str]]:
    """The places inside where the host waits for the device. With `mode` "error" a GPU's first one raises."""
    device = accelerators.current()
    places: list[str] = []
    if device.name == "sim":
        from accelerators_sim.waits import recorded_waits

        with recorded_waits() as record:
            yield places
        places += [wait.place.removeprefix(f"{ROOT}/") for wait in record if wait.waiter == "the host"]
        return
    set_mode = getattr(device.module, "set_sync_debug_mode", None)
    if set_mode is None:
        raise ValueError(f"Cannot count waits: torch.{device.name} does not tell them. Run this part on CUDA.")

    def note(*_: Any, **__: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if "site-packages" not in frame.filename]
        places.append("; ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-5:-1]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        set_mode(mode)
        try:
            yield places
        finally:
            set_mode("default")


def waits(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """The number of times that the host waits for the device in a step, and where first."""
    trained = Trained(way, options)
    with _waits() as places:
        trained.step()
    most = dict(Counter(places).most_common(5))
    yield {"num_waits": len(places), "first_wait": places[0] if places else None, "places": most}


def profile(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """The launches of a step, where the host is meanwhile, and how long the device has nothing to do."""
    trained = Trained(way, options)
    events, counts = _profiled(trained)
    spans = [(each.time_range.start, each.time_range.end) for each in events if _is_on_device(each)]
    busy, idle = _busy_and_idle(spans)
    stops = Counter[str]()
    for each in events:
        if each.name.startswith("zero."):
            stops[each.name] += each.self_cpu_time_total / 1e3
    yield {**counts, "device_ms": busy, "idle_ms": idle, "host_ms": {name: round(ms, 3) for name, ms in stops.most_common()}}


def _profiled(trained: Trained) -> tuple[Sequence[Any], dict[str, int]]:
    """The events of a step, and how much of each kind the device was given."""
    with contextlib.ExitStack() as stack:
        launches: Sequence[Any] = ()
        if trained.device.name == "sim":
            from accelerators_sim.waits import recorded_launches

            launches = stack.enter_context(recorded_launches())
        profiled = stack.enter_context(torch.profiler.profile())
        trained.step()
        trained.device.synchronize()
    events = profiled.events() or []
    if trained.device.name == "sim":
        return events, {"launches": len(launches), "copies": sum("copy" in each.operator for each in launches)}
    ran = [each for each in events if _is_on_device(each)]
    copies = sum(each.name.startswith(("Memcpy", "Memset")) for each in ran)
    launched = sum("LaunchKernel" in each.name for each in events)
    return events, {"launches": launched, "copies": copies, "kernels": len(ran) - copies}


def _is_on_device(event: Any) -> bool:
    return event.device_type is not torch.autograd.DeviceType.CPU


def _busy_and_idle(spans: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Milliseconds in which something ran, and in which nothing did between the first and the last of it; of microseconds."""
    if not spans:
        return None, None
    busy, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy / 1e3, (end - min(begin for begin, _ in spans) - busy) / 1e3


def throughput(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """Steps between two events, in which nothing is waited for: what one takes, and what the host needs to issue it."""
    trained = Trained(way, options)
    device = trained.device
    device.reset_peak_memory()
    events = [device.new_event(timing=True) for _ in range(2)] if device.has_streams else []
    begin = time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(options.steps):
        loss = trained.step()
    for event in events[1:]:
        event.record()
    issued = time.perf_counter() - begin
    device.synchronize()
    took = events[0].elapsed_time(events[1]) if events else 1e3 * (time.perf_counter() - begin)
    memory = device.memory()
    yield {
        "step_ms": took / options.steps, "host_ms": 1e3 * issued / options.steps, "loss": loss.item(),
        "peak_mib": ((memory.peak or 0) - trained.bytes_before) / MIB,
        "num_params": trained.training.num_params,
    }  # fmt: skip


def on_device(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """The step that hangs on no number of the device, and the one that reads the norm."""
    policy = {"device decides": "propagate", "host decides": "raise"}[way]
    given = _with(options, more={"on_nonfinite": policy})
    yield from throughput("stage 2", given)
    trained = Trained("stage 2", given)
    with _waits() as places:
        trained.step()
    yield {"num_waits": len(places), **_profiled(trained)[1]}


def offloaded(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    """A step with states on the host, beside what its bytes need on the link."""
    if way.startswith("stage 2 offloaded"):
        given, crosses = options, LANDING_CROSSES + STEP_CROSSES
    else:
        home = {"home": "cpu", "pinned": way == "stage 3 pinned"}
        more = {"homes": dict.fromkeys(("weights", "masters", "moments"), home), "gathered_bytes": 0, "kernels": "compiled"}
        given, crosses = _with(options, more=more), LANDING_CROSSES + 2 + 2  # weights come for forward and for backward
        way = "stage 3"
    down, up = crossing(accelerators.current(), options.copied_mib * MIB)
    for answer in throughput(way, given):
        yield {**answer, "link_ms": 1e3 * answer["num_params"] * crosses / min(down, up)}


def beside_the_plan(way: str, options: argparse.Namespace) -> Iterator[Answer]:
    trained = Trained(way, options)
    trained.device.reset_peak_memory()
    trained.step()
    trained.device.synchronize()
    memory, predicted = trained.device.memory(), trained.training.predicted
    assert predicted is not None
    yield {
        "peak_mib": ((memory.peak or 0) - trained.bytes_before) / MIB, "planned_peak_mib": predicted["peak"] / MIB,
        "states_mib": ((memory.allocated or 0) - trained.bytes_before) / MIB, "planned_mib": predicted["states"] / MIB,
    }  # fmt: skip


def _with(options: argparse.Namespace, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **more})


@dataclass(frozen=True)
class Part:
    """A question, the ways that are asked it, and the seconds that all of them have together."""

    name: str
    seconds: float
    ask: Callable[[str, argparse.Namespace], Iterator[Answer]]
    ways: Sequence[str]
    columns: Sequence[tuple[str, str]]  # the columns of its table: the name of an answer, and the heading
    has_sizes: bool = False  # it is measured with the second model too, after everything was measured with the first
    rounds: int = 1  # the number of rounds, of which the best counts, by the first column

    def jobs(self, options: argparse.Namespace) -> list[tuple[str, str, int]]:
        sizes = options.sizes if self.has_sizes else options.sizes[:1]
        return [(way, size, number) for size in sizes for number in range(self.rounds) for way in self.ways]


_STEP = (("step_ms", "step, ms"), ("host_ms", "issued in, ms"), ("peak_mib", "peak, MiB"), ("loss", "loss"))
_WAITS = (("num_waits", "waits of the host"), ("first_wait", "the first"))
PARTS = (
    Part("machine", 15, machine, ("this one",), (("down_gb_s", "down, GB/s"), ("up_gb_s", "up, GB/s"),
         ("device_gb_s", "on the device, GB/s"), ("host_gb_s", "host memory, GB/s"), ("clocks", "clocks"))),
    Part("collectives", 45, collectives, ("each kind", *SHARDED[1:]), (("kind", "kind"), ("dtype", "dtype"),
         ("is_right", "right"), *_WAITS, ("error", "error"))),
    Part("waits", 60, waits, SHARDED, _WAITS),
    Part("profile", 65, profile, SHARDED, (("launches", "launches"), ("kernels", "kernels"), ("copies", "copies"),
         ("device_ms", "device busy, ms"), ("idle_ms", "idle, ms"), ("host_ms", "host, ms"))),
    Part("throughput", 150, throughput, THROUGHPUT, _STEP, has_sizes=True, rounds=2),
    Part("step on the device", 60, on_device, ("device decides", "host decides"), (*_STEP, ("num_waits", "waits"),
         ("launches", "launches"))),
    Part("compiled", 65, throughput, COMPILED, _STEP),
    Part("offloaded", 65, offloaded, OFFLOADED, (*_STEP[:3], ("link_ms", "the link needs, ms"))),
    Part("plan", 15, beside_the_plan, SHARDED[1:], (("peak_mib", "peak, MiB"), ("planned_peak_mib", "planned"),
         ("states_mib", "between steps, MiB"), ("planned_mib", "planned between steps"))),
)  # fmt: skip


# running ----------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Asks all parts, and appends what they answer to a file, line by line. Returns how many were not answered."""
    limits = dict(limit.split("=") for limit in options.limit)
    begin, unanswered = time.monotonic(), 0
    with Path(options.nine_minutes).open("a") as file:
        for part in PARTS:
            if options.parts and part.name not in options.parts:
                continue
            until = time.monotonic() + float(limits.get(part.name, part.seconds))
            jobs, failed = part.jobs(options), set[tuple[str, str]]()
            for number, (way, size, round_) in enumerate(jobs):
                if (way, size) in failed:
                    continue
                # One that hangs leaves some time to the others.
                limit = (until - time.monotonic()) / math.sqrt(len(jobs) - number)
                asked = {"part": part.name, "way": way, "size": size, "round": round_}
                for answer in _answers(partial(part.ask, way, _with(options, size=size)), limit):
                    if "failed" in answer:
                        failed.add((way, size))
                        unanswered += 1
                    line = json.dumps({**asked, "at_s": round(time.monotonic() - begin, 1), **answer})
                    print(line, file=file, flush=True)
                    os.fsync(file.fileno())
                    print(line, flush=True)
    return unanswered


def _answers(ask: Callable[[], Iterator[Answer]], limit: float) -> Iterator[Answer]:
    """The answers of a process of its own; a reason in place of those that do not come in so many seconds."""
    if limit <= 0:
        yield {"failed": "its part had no time left"}
        return
    until, context = time.monotonic() + limit, multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+", errors="replace") as words, receiving:
        process = context.Process(target=_serve, args=(ask, sending, words.fileno()))
        process.start()
        sending.close()
        try:
            while receiving.poll(max(0.0, until - time.monotonic())):
                try:
                    answer = receiving.recv()
                except EOFError:
                    process.join(1.0)
                    words.seek(0)
                    errors = re.findall(r"^[\w.]*(?:Error|Exception|Failed|Interrupt|Exit)\b.*", words.read(), re.MULTILINE)
                    yield {"failed": errors[-1] if errors else f"its process ended with {process.exitcode}"}
                    return
                if answer is None:
                    return
                yield answer
            yield {"failed": f"it was not done in {limit:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def _serve(ask: Callable[[], Iterator[Answer]], sending: Connection, words: int) -> None:
    os.setpgid(0, 0)  # what it starts ends with it
    os.dup2(words, 1), os.dup2(words, 2)
    for answer in ask():
        sending.send(answer)
    sending.send(None)
    time.sleep(60)  # some peers end with complaints, or never, so the parent ends all of them


# the table --------------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Answer]) -> str:
    """A section of a page."""
    facts = {key: value for line in lines if line["part"] == "machine" for key, value in line.items()}
    sizes = {line["size"]: line["num_params"] for line in lines if "num_params" in line}
    models = " and ".join(f"{count / 1e6:.1f} M" for count in sizes.values())
    text = [
        f"## Nine minutes on one {facts.get('card', 'accelerator that did not say its name')}",
        "",
        f"`python benchmarks/gpu.py --nine-minutes FILE`: GPTs of {models or 'no'} parameters, bf16 with fp32 masters, one "
        f"rank, torch {facts.get('torch', '?')}, {facts.get('date', '?')}. The better of two rounds counts, where there are "
        "two.",
        "",
    ]
    for part in PARTS:
        of_part = [line for line in lines if line["part"] == part.name]
        if of_part:
            text += [f"### {part.name.capitalize()}", "", *_rows(part, of_part), ""]
    return "\n".join(text)


def _rows(part: Part, lines: Sequence[Answer]) -> Iterator[str]:
    answered = [line for line in lines if any(key in line for key, _ in part.columns)]
    columns = [(key, heading) for key, heading in part.columns if any(line.get(key) is not None for line in answered)]
    names = ["size", "way"] if len({line["size"] for line in lines}) > 1 else ["way"]
    if columns:
        yield f"| {' | '.join(names + [heading for _, heading in columns])} |"
        yield f"|{'---|' * (len(names) + len(columns))}"
    for line in _best(part, answered):
        yield f"| {' | '.join([line[name] for name in names] + [_cell(line.get(key)) for key, _ in columns])} |"
    reasons = {(line["way"], line["size"]): line["failed"] for line in lines if "failed" in line}
    if columns and reasons:
        yield ""
    for (way, size), reason in reasons.items():
        yield f"- {way}, {size}: no answer, {reason}"


def _best(part: Part, answered: Sequence[Answer]) -> list[Answer]:
    """A row for each way and kind. Where it has several rounds, that of the best one."""
    best: dict[tuple[str, ...], Answer] = {}
    key = part.columns[0][0]
    for line in answered:
        of = (line["size"], line["way"], *(str(line.get(name)) for name in ("kind", "dtype")))
        if of not in best or line["round"] == best[of]["round"]:  # this line is another answer of the best round
            best[of] = best.get(of, {}) | line
        elif line[key] < best[of][key]:
            best[of] = line
    return list(best.values())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return "" if value is None else str(value).replace("|", "/")


def read(path: str) -> list[Answer]:
    """The lines of a file. The last one may be half of one, where the machine was taken away."""
    lines = []
    for text in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def main(options: argparse.Namespace) -> int:
    if options.table:
        print(table(read(options.table)))
        return 0
    sys.path[:0] = [options.deepspeed] if options.deepspeed else []
    unknown = set(options.parts or ()) - {part.name for part in PARTS} | set(options.sizes) - set(SIZES)
    if unknown:
        raise SystemExit(f"Cannot ask about {', '.join(sorted(unknown))}: there is no such part or size. See PARTS and SIZES.")
    unanswered = run(options)
    if unanswered:
        print(f"{unanswered} questions have no answer; the lines with \"failed\" say why", file=sys.stderr)
    return 0
