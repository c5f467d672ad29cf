"""The training loop: from the latest checkpoint, or from the beginning, to the last step or until it is stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import accelerators
from zero.checkpoint import values
from zero.checkpoint.folder import Folder, read_manifest
from zero.comm.one_answer import exchange_texts
from zero.config.schema import OptimizerSpec, ZeroConfig
from zero.engine.engine import Engine
from zero.engine.initialize import initialize
from zero.sharding.metrics import MetricsWriter
from zero.sharding.save import save

from .launch import is_rank
from .model import Gpt
from .options import Options
from .text import Text

_KEPT = 2  # the checkpoints that are kept: if the newest is damaged, there is one more
_WARM_UP = 20  # steps
_RECORDED: dict[str, Any] = {  # the figures of a step of which the report is made
    "step": int, "loss": (int, float), "tokens_per_second": (int, float), "ranks": int, "memory_by_rank": list, "ms": dict,
}  # fmt: skip
# Signals that launchers pass on. SIGHUP, which not every system has, comes from a terminal that was closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

Show = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """The end of a training on this rank."""

    engine: Engine
    begun_at: int  # the step at which the training began or went on
    stopped_by: str | None  # None if it came to its last step


class Wish:
    """A wish to stop: Ctrl-C, a launcher's signal, or a launcher that is gone. The step that is running is finished and saved.

    A rank whose launcher was killed would train on beside those that the same command starts, in the same directory.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._parent = os.getppid() if is_rank() else None
        self._before: dict[int, Any] = {}

    def look(self) -> str | None:
        if self.reason is None and self._parent not in (None, os.getppid()):
            self.reason = "its launcher is gone"
        return self.reason

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:  # a second request ends the program at once
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def __enter__(self) -> Wish:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


def check_same(options: Options, identity: Mapping[str, Any]) -> int:
    """The step of the latest checkpoint, 0 without one. Raises where it is of another training. Not a collective."""
    folder = Folder(options.checkpoints)
    if folder.latest() is None:
        return 0
    manifest = read_manifest(folder.find(None))
    saved = values.decode(manifest.extra, lambda key, *_: key) if manifest.extra is not None else {}
    for name, value in identity.items():
        if saved.get(name) != value:
            raise ValueError(
                f"Cannot go on in {options.directory} with {name} {value}: what was saved there has {name} {saved.get(name)}. "
                "Give the same, or another --directory."
            )
    engine = values.decode(manifest.training, lambda key, *_: key)["engine"]
    return int(engine["global_steps"])


def check_directory(options: Options) -> None:
    """Makes the directory, before ranks are started that would all fail in it. Not a collective."""
    try:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        options.records.open("a").close()
    except OSError as error:
        raise ValueError(
            f"Cannot use --directory {options.directory}: {error.filename} cannot be written ({error.strerror}). Give another, "
            "or move away what is there."
        ) from error
    read_records(options.records)


def build(options: Options, stage: int) -> Engine:
    """A fresh model with its sharded optimizer. A collective."""
    torch.manual_seed(options.seed)
    model = Gpt(options.layers, options.width, options.heads, options.context, options.dropout)
    settings = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    asked: dict[str, Any] = {"dtype": None if options.dtype == "float32" else options.dtype, "offload": options.offload}
    asked["homes"] = options.homes_at(stage)
    optimizer = OptimizerSpec.of("AdamW", settings)
    config = ZeroConfig(stage=stage, accumulation=options.accumulation, clip=1.0, optimizer=optimizer, **asked)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, options.steps))

    engine: Engine = initialize(model=model, config=config, lr_scheduler=schedule)[0]
    return engine


def _rate(step: int, steps: int) -> float:
    """Returns the learning rate: it rises in a few steps, then falls along a cosine to a tenth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - _WARM_UP) / max(1, steps - _WARM_UP)))


def train(options: Options, text: Text, show: Show) -> Run:
    """Trains, saves and records. On rank 0 `show` is called with every record. A collective."""
    identity = options.identity(text.digest)
    check_same(options, identity)
    engine = build(options, options.stage)
    group = engine.optimizer.sharding.group
    options.check_ranks(group.size)
    torch.manual_seed(options.seed + 1 + group.rank)
    if exchange_texts(group, Folder(options.checkpoints).latest() or "")[0]:
        engine.load_checkpoint(options.checkpoints)
    begun_at = engine.global_steps
    if group.rank == 0:
        _forget_after(options.records, begun_at)
        options.report.unlink(missing_ok=True)
    if options.compile:
        engine.compile()
    board = Path(options.directory) / "tensorboard" if options.tensorboard else None
    with Wish() as wish, MetricsWriter(options.records, engine, board) as records:
        while engine.global_steps < options.steps:
            record, reason = _step(engine, options, text, records, wish)
            if group.rank == 0:
                show(record)
            if reason or engine.global_steps % options.save_every == 0 or engine.global_steps == options.steps:
                save(options.checkpoints, engine, extra=identity, keep_last=_KEPT)
            if reason:
                return Run(engine, begun_at, reason)
    return Run(engine, begun_at, None)


def _step(engine: Engine, options: Options, text: Text, records: MetricsWriter, wish: Wish) -> tuple[dict[str, Any], str]:
    """Takes one step. Returns its record, and the reason if it is the last one."""
    began, group = time.perf_counter(), engine.optimizer.sharding.group
    losses, samples = [], text.samples(engine.global_steps, options.batch)
    num_parts = group.size * options.accumulation
    parts = samples.tensor_split(num_parts)[group.rank * options.accumulation : (group.rank + 1) * options.accumulation]
    for part in parts:
        if options.batch % num_parts:
            engine.weight(len(part))  # otherwise the gradient would be a mean of means over unequal parts
        loss = engine(part.to(engine.device))
        losses.append(loss.detach() * (len(part) / options.batch))
        engine.backward(loss)
        engine.step()
    memory = accelerators.current().memory()
    local = [float(torch.stack(losses).sum()), memory.allocated or 0, wish.look() or ""]
    gathered = [json.loads(message) for message in exchange_texts(group, json.dumps(local))]
    seconds = time.perf_counter() - began
    record = records.write(
        loss=math.fsum(loss for loss, _, _ in gathered),
        seconds=round(seconds, 4),
        tokens_per_second=round(options.batch * options.context / seconds, 1),
        ranks=group.size,
        memory_by_rank=[allocated for _, allocated, _ in gathered],
    )
    return record, next((reason for _, _, reason in gathered if reason), "")


def _forget_after(path: Path, step: int) -> None:
    """Removes the records of steps after the checkpoint, which will be taken again."""
    if path.is_file():
        kept = [record for record in read_records(path) if record["step"] <= step]
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(fresh, path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns all complete records. A process that was killed may have left half a line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    return [_record(path, line) for line in lines if line.endswith("\n")]


def _record(path: Path, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(_is_value(name, record.get(name)) for name in _RECORDED):
        raise ValueError(
            f"Cannot go on with {path}: it has a line that is not a record. Move it away, or give another --directory."
        )
    return record


def _is_value(name: str, value: Any) -> bool:
    """Returns True if a record may have this value: what the report is made of is a number, or several by rank or by name."""
    kind = _RECORDED[name]
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return isinstance(value, kind) and bool(inside) and all(type(number) in (int, float) for number in inside)
