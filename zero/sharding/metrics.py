"""Writes what every step did as a line of JSON, and for TensorBoard if that is asked for."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero.errors import not_written
from zero.profiling import STOPS, during
from zero.sharding.memory_usage import measured_bytes
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.snapshot import TrainingLoop

_PHASES = ("forward", "backward", *STOPS)


def by_phase(times: Mapping[str, float]) -> dict[str, float]:
    """Returns times by name, in the order in which a step goes through them; names of the caller's own come last."""
    return {name: times[name] for name in (*_PHASES, *times) if name in times}


class MetricsWriter:
    """Writes one record a step, on rank 0.

    Use `with zero.MetricsWriter("metrics.jsonl", optimizer) as metrics`, and `metrics.write(loss=...)` after each step. From
    then on the stops of a step are timed.

    A record has the step, the norm of the gradients before clipping, the loss scale, the learning rate, milliseconds by stop
    since the last record, bytes moved since then and held now, and whatever is passed to `write`. `link` is what crossed
    between a device and its host, `disk` what went to disks and came from there.

    Args:
        path: A file of JSON lines; with None the records are for TensorBoard alone.
        target: The sharded optimizer, or an engine.
        tensorboard: A folder for TensorBoard.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        target: TrainingLoop | ShardedOptimizer,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        self._optimizer = target if isinstance(target, ShardedOptimizer) else target.optimizer
        sharding = self._optimizer.sharding
        # Made on all ranks, so that all raise if TensorBoard is missing.
        writer = None if tensorboard is None else board_writer()
        self._clock = sharding.clock()
        self._ms, self._moved = self._clock.read(), self._sent()
        self._on_disk = self._files()
        self._crossed: dict[str, float] = self._link()
        self._file: Any = None
        self._board: Any = None
        if sharding.group.rank == 0:
            self._board = None if writer is None or tensorboard is None else writer(os.fspath(tensorboard))
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Times the code of a `with` block, such as the forward of a plain loop; records have it under `name`."""
        with during(name, self._clock):
            yield

    def write(self, **figures: Any) -> dict[str, Any]:
        """Writes the record of the last step, with `figures` in it, and returns it. Ranks other than 0 write none. Not a
        collective."""
        optimizer, sharding = self._optimizer, self._optimizer.sharding
        before, self._ms = self._ms, self._clock.read()
        sent, self._moved = self._moved, self._sent()
        ms = {name: round(now - before.get(name, 0.0), 3) for name, now in by_phase(self._ms).items()}
        now = measured_bytes(sharding)
        live = {**asdict(now.device), "buckets": now.buckets}
        if now.host.total:
            live |= {f"host_{kind}": amount for kind, amount in asdict(now.host).items()}
        reading = sharding.accelerator.memory()
        record = {
            "step": sharding.window.sync.step,
            **figures,
            "norm": optimizer.grad_norm,
            "scale": None if optimizer.loss_scale is None else optimizer.loss_scale.value,
            "skipped_steps": optimizer.skipped_steps,
            "lr": float(optimizer.param_groups[0]["lr"]),
            "ms": ms,
            "moved_bytes": {wire: amount - sent[wire] for wire, amount in self._moved.items()},
            "live_bytes": {**live, "allocated": reading.allocated, "peak": reading.peak},
        }
        if sharding.masters.shard.homes.host.link is not None:
            crossed, self._crossed = self._crossed, self._link()
            record["link"] = {name: round(amount - crossed[name], 3) for name, amount in self._crossed.items()}
        if sharding.masters.shard.homes.disks:
            record["disk"] = self._disk()
        if self._file is not None:
            try:
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()  # what cannot be written now is written with the next record
            except OSError as error:
                raise not_written(self._file.name, error) from error
        if self._board is not None:
            for name, value in _flat(record):
                self._board.add_scalar(name, value, record["step"])
            self._board.flush()  # otherwise a training that is killed loses its last two minutes
        return record

    def add(self, figures: Iterable[tuple[str, Any, int]]) -> None:
        """Writes figures of the caller's own for TensorBoard: name, value and step of each. Not a collective."""
        if self._board is not None:
            for name, value, step in figures:
                self._board.add_scalar(name, float(value), step)
            self._board.flush()

    def _sent(self) -> dict[str, int]:
        sharding = self._optimizer.sharding
        reduced, fetched = sharding.window.reducer.inflight.num_bytes, sharding.placer.weights.num_fetched_bytes
        return {"reduced": reduced, "published": sharding.publisher.num_bytes, "fetched": fetched}

    def _link(self) -> dict[str, float]:
        """Returns what crossed between the device and the host beside it so far: bytes, and milliseconds waited for copies."""
        link = self._optimizer.sharding.masters.shard.homes.host.link
        if link is None:
            return {}
        named = {"to_device_bytes": link.to_device_bytes, "to_host_bytes": link.to_host_bytes}
        return {**named, "waited_ms": 1000 * link.waited_s}

    def _disk(self) -> dict[str, float]:
        """Returns the figures of disks since the last record: bytes, milliseconds waited for them, and bytes a second of
        reading and writing."""
        before, self._on_disk = self._on_disk, self._files()
        since = {name: value - before[name] for name, value in self._on_disk.items()}
        busy_s = since.pop("busy_ms") / 1000
        speed = (since["read_bytes"] + since["written_bytes"]) / busy_s if busy_s else 0.0
        return {**since, "waited_ms": round(since["waited_ms"], 3), "bytes_per_s": round(speed)}

    def _files(self) -> dict[str, float]:
        """Returns the figures of all files on disks so far."""
        files = [disk.file for disk in self._optimizer.sharding.masters.shard.homes.disks.values()]
        return {
            "read_bytes": sum(file.num_read for file in files),
            "written_bytes": sum(file.num_written for file in files),
            "waited_ms": 1000 * sum(file.waited_s for file in files),
            "busy_ms": 1000 * sum(file.busy_s / file.pace.threads for file in files),
        }

    def close(self) -> None:
        """Closes the files. Not a collective."""
        (file, self._file), (board, self._board) = (self._file, None), (self._board, None)
        try:
            if file is not None:
                file.close()
        except OSError as error:
            raise not_written(file.name, error) from error
        finally:
            if board is not None:
                board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def board_writer() -> Callable[[str], Any]:
    """Returns a writer for TensorBoard. Raises ValueError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"Cannot write records for TensorBoard: it cannot be imported ({error}). Install the extra: "
            "pip install 'zero-accelerators[tensorboard]'."
        ) from error
    return SummaryWriter


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Returns the numbers of a record under one name each, for plots over `step`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and prefix + name != "step":
            yield prefix + name, value
