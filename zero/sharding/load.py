"""Loads a checkpoint into a training: everything is read and checked first, then everything is changed.

    1. open       all ranks open the same checkpoint, and were called alike                     `_open_on_all`
    2. verify     each file is the one that was saved; each is read by one rank                 `_verify`
    3. compare    the model has the tensors of the checkpoint, the optimizer its groups         `_Loading.check`, `read_plain`
    4. restore    schedule, extra state of modules, random numbers. This runs code of users,    `_Loading.take_plain`
                  and is undone on all ranks if it raises on one
    5. fill       bucket by bucket, this rank's shares of masters and of the optimizer's        `_Loading.fill`
                  state; each bucket is sent as new weights once it is read
    6. count      steps, the loss scale and an engine's counters                                `_take_counters`

An error up to 4 leaves the training as it was. After one in 5 all ranks raise, and
none saves or gives whole values until a load succeeds.

*Plain* is what is no tensor of a parameter: Python's own values, such as Adam's `step` or the state of a schedule. Tensors are
matched by name alone. A checkpoint knows neither stage nor shares: `CheckpointReader` is asked for a span of a parameter, and
finds the files that it lies in, however many ranks wrote them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.folder import Folder
from zero.checkpoint.manifest import ALL_FROZEN, MOST_COUNTED, VALUE, Buffer, Stored, num_wrappers, rewrapped
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.reader import CheckpointReader
from zero.checkpoint.values import ANOTHER, put_back, random_bytes
from zero.comm.one_answer import all_or_none, exchange_texts, require_same_args, run_on_all
from zero.errors import BadCheckpoint
from zero.memory.formats import ParamFormat, dtype_named
from zero.memory.masters import KINDS
from zero.optim.several import name_of
from zero.plan.layout import Block, Piece
from zero.sharding.fill import LOAD_AGAIN, failed_on
from zero.sharding.loss_scaler import loaded_scale
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.optimizer_state import lies_nowhere, plain_entry, take_settings
from zero.sharding.publish import by_bucket, publish
from zero.sharding.snapshot import TrainingLoop, TrainingSnapshot, finish_saving, snapshot_of

logger = logging.getLogger("zero")

_MOST_NAMED = 5
_MOST_OPENED = 100  # the number of tries, as other processes may keep saving this tag anew


def load(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | TrainingLoop,
    tag: str | None = None,
    *,
    scheduler: Any = None,
    optimizer_states: bool = True,
    scheduler_states: bool = True,
    counters: bool = True,
) -> Any:
    """Loads a checkpoint into a training, and returns what was saved as `extra`. A collective.

    It may have been saved by any number of ranks, at any stage, in any dtype, offloaded or not. Gradients of the window are
    thrown away. Random numbers are restored if the number of ranks is the same. If anything is wrong with the checkpoint, an
    error is raised and the training is as it was.

        start = zero.load("checkpoints", optimizer)["step"] + 1  # extra={"step": step}

    Args:
        directory: The directory that `save` was given.
        target: The sharded optimizer, or an engine.
        tag: The name of a checkpoint; the latest by default.
        scheduler: A schedule to load into; that of an engine by default.
        optimizer_states: False keeps the state that the optimizer has.
        scheduler_states: False keeps that of the schedule.
        counters: False keeps the counts, the loss scale and the random numbers.
    """
    snapshot = snapshot_of(target, scheduler)
    return load_from(directory, snapshot, tag, optimizer_states, scheduler_states, counters)[1]


def load_from(
    directory: Any, snapshot: TrainingSnapshot, tag: str | None, optimizer_states: bool, scheduler_states: bool, counters: bool
) -> tuple[Path, Any]:
    """Loads as `load` does; returns the path of the checkpoint too."""
    optimizer, group = snapshot.optimizer, snapshot.sharding.group
    finish_saving(optimizer)
    has_schedule = snapshot.scheduler is not None and bool(scheduler_states)
    flags = {"optimizer_states": bool(optimizer_states), "schedule": has_schedule, "counters": bool(counters)}
    with contextlib.closing(_open_on_all(directory, tag, snapshot, optimizer_states)) as reader:  # 1
        require_same_args(group, "A load", checkpoint=reader.manifest.digest, tag=reader.path.name, **flags)
        all_or_none(group, "A load", lambda: _verify(reader, group.rank, group.size))  # 2
        loading = all_or_none(  # 3
            group, "A load", lambda: _Loading(snapshot, reader, bool(optimizer_states), has_schedule, bool(counters))
        )
        all_or_none(group, "A load", lambda: loading.check(range(group.rank, len(reader.manifest.files), group.size)))
        all_or_none(group, "A load", loading.read_plain)
        snapshot.sharding.placer.weights.check_edits(loading.written())
        loading.take_plain()  # 4
        snapshot.sharding.offloader.give_up()
        snapshot.sharding.window.end(on_all=True)
        with snapshot.sharding.masters.wholeness.torn_by_failure("a load", kinds=loading.kinds):  # 5
            run_on_all(group, snapshot.sharding.publisher.take_edits, _load_failed)
            loading.place_late()
            run_on_all(group, loading.fill_unshared, _load_failed)
            loading.fill()
        snapshot.sharding.placer.weights.note_written(*loading.written())
        if counters:  # 6
            _take_counters(snapshot, loading.training)
        if snapshot.engine is not None:
            snapshot.engine.restart((counters and loading.training["engine"]) or snapshot.engine.counters)
    return reader.path, loading.extra


_load_failed = partial(failed_on, LOAD_AGAIN, what="complete a load")


def latest(directory: str | os.PathLike[str]) -> str | None:
    """Returns the tag of the newest complete checkpoint in a directory, or None. Not a collective."""
    return Folder.at(directory).latest()


def _open_on_all(directory: Any, tag: str | None, snapshot: TrainingSnapshot, optimizer_states: bool) -> CheckpointReader:
    """Opens a checkpoint on all ranks: the same one, if others replace it meanwhile. A collective."""
    group = snapshot.sharding.group

    def open_here() -> CheckpointReader:
        snapshot.sharding.offloader.check_load("load", optimizer_states)
        return CheckpointReader(directory, tag)

    for attempt in itertools.count(1):
        reader = all_or_none(group, "A load", open_here)
        digest, is_current = reader.manifest.digest, reader.is_current()
        opened = [json.loads(text) for text in exchange_texts(group, json.dumps([digest, is_current]))]
        are_same = all(other == digest for other, _ in opened)
        if are_same or all(current for _, current in opened) or attempt == _MOST_OPENED:
            return reader  # if the ranks still see different directories, the next check tells all of them
        reader.close()
    raise AssertionError


def _verify(reader: CheckpointReader, rank: int, size: int) -> None:
    """Checks the files. Each of them is read by one rank, and a rank on another machine may lack it: all ranks look for all."""
    reader.check_sizes()
    reader.check_files(range(rank, len(reader.manifest.files), size), rank == 0)


class _Loading:
    """Nothing of the training is changed before `take_plain`, when all ranks have checked what will be loaded."""

    def __init__(
        self, snapshot: TrainingSnapshot, reader: CheckpointReader, states: bool, schedule: bool, counters: bool
    ) -> None:
        self._snapshot = snapshot
        self._manifest = manifest = reader.manifest
        self._reader = reader
        self._states = states  # the optimizer's states are loaded, too
        self._schedule = schedule
        self._counters = counters
        stored_names = [*manifest.parameters, *manifest.buffers, *manifest.aliases]
        names = [*snapshot.named.parameters, *snapshot.named.buffers, *snapshot.named.aliases]
        self._wrappers = num_wrappers(names), num_wrappers(stored_names)
        self._plain: dict[str, dict[str, Any]] = {}  # the values of its state that are not by element, by parameter
        self.training = reader.training()
        self.extra: Any = None
        self._left_out = set(self.training["left_out"])

    def written(self) -> set[torch.Tensor]:
        """Returns the parameters that get other values."""
        return {tensor for name, tensor in self._tensors().items() if not self._stays(name)}

    def check(self, files: Collection[int]) -> None:
        """Raises unless the model and the checkpoint have the same tensors. This rank looks at some of the files."""
        self._reader.check(files)
        tensors = {name: tensor for name, tensor in self._tensors().items() if not self._stays(name)}
        kept = [name for name in self._tensors() if name not in tensors]
        if ALL_FROZEN in self._left_out and kept:  # nobody has said that these were left out
            logger.warning("%s", _listed("The checkpoint lacks these frozen parameters, which stay as they are", kept))
        wrong: dict[str, list[str]] = {}
        self._compare("", tensors, self._manifest.parameters, wrong)
        self._compare("buffer ", self._snapshot.named.buffers, self._manifest.buffers, wrong)
        if wrong:
            listed = " ".join(_listed(what, names) for what, names in wrong.items())
            raise ValueError(
                f"Cannot load: the checkpoint is of another model. {listed} {self._no_parameter(wrong)}"
                "Build the model that was saved; nothing is matched by its position."
            )

    def _no_parameter(self, wrong: Mapping[str, Sequence[str]]) -> str:
        """Returns what to do with an imported buffer that nothing in its file told from a parameter, or an empty text."""
        buffers = [name for name in wrong.get("Only in the checkpoint", ()) if name in self._snapshot.named.buffers]
        return f"{buffers[0]} is a buffer of the model: import it with --buffer {buffers[0]}. " if buffers else ""

    def _compare(
        self,
        kind: str,
        tensors: Mapping[str, torch.Tensor],
        stored: Mapping[str, Stored | Buffer],
        wrong: dict[str, list[str]],
    ) -> None:
        """Adds names of tensors that cannot be loaded to `wrong`, by the reason."""
        boxes = self._snapshot.boxes if not kind else {}
        used = {self._source(name) for name in tensors}
        used |= {self._source(name) for box in boxes.values() for name in box.names}
        for name, tensor in tensors.items():
            entry, shape = stored.get(self._source(name)), boxes[name].shape if name in boxes else tuple(tensor.shape)
            if entry is None:
                wrong.setdefault("Only in the model", []).append(f"{kind}{name}")
            elif entry.shape != shape:
                shapes = f"{kind}{name} ({entry.shape} in the checkpoint, {shape} in the model)"
                wrong.setdefault("Of other shapes", []).append(shapes)
        for name in stored:
            if name not in used:
                wrong.setdefault("Only in the checkpoint", []).append(f"{kind}{name}")

    def read_plain(self) -> None:
        """Reads everything but tensors of parameters. Raises unless the optimizer is the one whose state was saved."""
        self.extra = self._reader.extra()
        if self._counters:
            self._check_counters()
        modules, model_modules = self.training["modules"], self._snapshot.named.modules
        if set(modules) != set(map(self._source, model_modules)):
            raise ValueError(
                f"Cannot load: modules with extra state are {', '.join(modules) or 'none'} in the checkpoint and "
                f"{', '.join(model_modules) or 'none'} in the model. Build the model that was saved."
            )
        kind, saved = type(self._snapshot.scheduler).__name__, self.training["schedule"]
        if self._schedule and saved not in (None, kind):
            raise ValueError(
                f"Cannot load into the schedule {kind}: {saved} was saved. Make the schedule that was saved, or load with "
                "scheduler_states=False."
            )
        if self._schedule and self.training["scheduler"] is None:
            logger.warning("The checkpoint has no schedule, so this training's stays as it is.")
        if self._states:
            self._check_optimizer()
            self._plain = {name: self._reader.plain(name) for name in self._manifest.parameters}

    def _check_counters(self) -> None:
        engine, counted, progress = self._snapshot.engine, self.training["engine"], self.training["loss_scale"]
        wrong = [number for number in (counted or {}).values() if type(number) is not int or not 0 <= number < MOST_COUNTED]
        for number in (progress or {}).values():
            if type(number) not in (int, float, type(None)) or (type(number) is int and abs(number) >= MOST_COUNTED):
                wrong.append(number)
        if engine is not None and counted is not None:
            wrong += sorted(engine.counters.keys() - counted.keys())
        if wrong:
            raise BadCheckpoint(f"Cannot load: the manifest has wrong counters ({wrong[0]!r:.60}). {ANOTHER}")
        if progress is not None:
            _scale_of(self._snapshot, self.training)

    def _check_optimizer(self) -> None:
        snapshot, saved = self._snapshot, self.training["groups"]
        inner = snapshot.optimizer.inner
        hint = "Make the optimizer that was saved, or load with optimizer_states=False."
        if self.training["optimizer"] not in (None, name_of(inner)):  # an imported checkpoint does not name its optimizer
            raise ValueError(
                f"Cannot load into {name_of(inner)}: the state is that of {self.training['optimizer']}. {hint}"
            )
        if not saved:
            raise ValueError("Cannot load: the checkpoint has no state of an optimizer. Load with optimizer_states=False.")
        # Frozen parameters may be missing: a step leaves them alone, and not every program that saves lists them.
        frozen = {self._source(name) for name, param in snapshot.named.parameters.items() if not param.requires_grad}
        groups = [set(map(self._source, group["params"])) - frozen for group in snapshot.groups()]
        stored = [set(group["params"]) - frozen for group in saved]
        if groups != stored:
            pairs = enumerate(zip(groups, stored, strict=False))
            number = next((n for n, (a, b) in pairs if a != b), min(len(groups), len(stored)))
            one, other = (names[number] if number < len(names) else set() for names in (groups, stored))
            differing = sorted(one ^ other)
            raise ValueError(
                f"Cannot load: the optimizer has {len(groups)} groups and the saved one {len(stored)}; group {number} differs "
                f"in {', '.join(differing[:_MOST_NAMED]) or 'nothing but its place'}. {hint}"
            )
        snapshot.sharding.updater.check(saved)

    def take_plain(self) -> None:
        """Restores the schedule, the modules' extra state and the random numbers. This runs code of users: if it raises on any
        rank, all ranks get back what they had."""
        snapshot, saved = self._snapshot, self.training
        schedule = snapshot.scheduler if self._schedule and saved["scheduler"] is not None else None
        before = None if schedule is None else copy.deepcopy(schedule.state_dict())
        changed: list[tuple[Any, Any]] = []  # modules, each with the state that it had before
        drawn = random_bytes(snapshot.sharding.accelerator)

        def take() -> None:
            if schedule is not None:
                schedule.load_state_dict(copy.deepcopy(saved["scheduler"]))
            for name, module in snapshot.named.modules.items():
                had = copy.deepcopy(module.get_extra_state())
                module.set_extra_state(saved["modules"][self._source(name)])
                changed.append((module, had))
            if self._counters:
                _take_random_numbers(self._reader, saved["ranks"], snapshot)

        try:
            all_or_none(snapshot.sharding.group, "A load", take)
        except BaseException:
            if schedule is not None:
                schedule.load_state_dict(before)
            for module, had in changed:
                module.set_extra_state(had)
            put_back(snapshot.sharding.accelerator, drawn)
            raise
        rates = None if schedule is None or self._states else saved["scheduler"].get("_last_lr")
        for group, rate in zip(snapshot.optimizer.inner.param_groups, rates or (), strict=False):
            # Without the optimizer's state, the rate comes from the schedule, which goes on from it.
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate

    def place_late(self) -> None:
        """Places parameters whose exact values would be rounded otherwise. From here on nothing is expected to fail. A
        collective."""
        snapshot, sharding = self._snapshot, self._snapshot.sharding
        sharding.begin_load()
        named = enumerate(snapshot.managed)
        late = [index for index, name in named if lies_nowhere(sharding, index) and self._had_master(name)]
        if late:
            sharding.window.place_params(late)

    @torch.no_grad()
    def fill_unshared(self) -> None:
        """Writes what every rank writes alike: parameters that are not trained, and buffers."""
        snapshot, sharding = self._snapshot, self._snapshot.sharding
        for index, name in enumerate(snapshot.managed):
            if lies_nowhere(sharding, index) and not self._stays(name):
                self._fill_whole(name, sharding.params.tensors[index], sharding.params.leaves[index])
        for name, param in snapshot.unmanaged():
            if self._stays(name):
                continue
            param.copy_(self._whole(name, VALUE, tuple(param.shape)))
        for name, buffer in snapshot.named.buffers.items():
            buffer.copy_(self._reader.buffer(self._source(name)))

    @torch.no_grad()
    def fill(self) -> None:
        """Writes this rank's shares of masters and of the optimizer's state, and publishes them, bucket by bucket, as some are
        in memory only for a while. If all of a bucket is loaded, its old values are not read."""
        snapshot, sharding = self._snapshot, self._snapshot.sharding
        masters, streams = sharding.masters, sharding.masters.streams
        if self._states:
            streams.abandon()
        use = streams.overwrite if self._states else streams.use
        total = sum(share.numel() for share in masters.shard.shares.values())
        batches, kinds = by_bucket(sharding), self.kinds
        with ProgressBar("loading", total, sharding.group.rank == 0, "elements") as bar:

            def written() -> Iterator[Sequence[Block]]:
                for bucket, blocks in enumerate(batches):
                    use(bucket)
                    for piece, master in masters.in_bucket(bucket):
                        self._fill_piece(piece, master)
                    masters.publish(blocks)
                    bar.advance(sharding.layout_ref.layout.buckets[bucket].share_numel)
                    yield blocks

            prepare = sharding.publisher.follow_edits
            publish(sharding, batches, prepare, written(), "a load", _load_failed, kinds=kinds, replaces=kinds)
        if self._states:
            take_settings(snapshot.optimizer.inner, self.training["groups"])
            sharding.updater.order_state()

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of state that are replaced."""
        return KINDS if self._states else ["masters", "unshared"]

    def _fill_whole(self, name: str, tensor: torch.Tensor, leaf: torch.Tensor) -> None:
        inner, source = self._snapshot.optimizer.inner, self._source(name)
        shape = tuple(tensor.shape)
        tensor.copy_(self._whole(name, VALUE, shape))
        if self._states:
            kinds = self._manifest.parameters[source].state
            entries = {key: self._whole(name, key, shape).to(tensor.device) for key in kinds}
            inner.state.pop(leaf, None)
            if entries or self._plain[source]:
                inner.state[leaf] = {**entries, **self._plain[source]}

    def _whole(self, name: str, what: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns all that this rank holds of a parameter, or of an entry of its state."""
        whole, box = self._reader.whole(self._source(name), what), self._snapshot.boxes[name]
        if tuple(whole.shape) == shape:
            return whole
        line = ParamFormat(box.shape, None, box.cut).flatten(whole)
        return line[box.start : box.start + math.prod(shape)].view(shape)

    def _fill_piece(self, piece: Piece, master: torch.nn.Parameter) -> None:
        sharding, inner, name = self._snapshot.sharding, self._snapshot.optimizer.inner, self._snapshot.managed[piece.param]
        source = self._source(name)
        form, stored = sharding.window.grad_ops.formats[piece.param], self._manifest.parameters[source]
        box = self._snapshot.boxes[name]
        whole = ParamFormat(box.shape, form.order, box.cut) if box.shape != form.shape else form
        span = piece.in_param.shifted(box.start)
        self._reader.copy(source, VALUE, whole, span, form.line_of(master.detach()))
        if not self._states:
            return
        before, entries = inner.state.pop(master, {}), {}
        for key, dtype in stored.state.items():
            wide = master.dtype if dtype == stored.value_dtype else dtype_named(dtype)
            held = before.get(key)
            entries[key] = held if _fits(held, master, wide) else torch.empty_like(master, dtype=wide)
            self._reader.copy(source, key, whole, span, form.line_of(entries[key].detach()))
        entries |= {key: plain_entry(sharding.masters, inner, piece.param, value) for key, value in self._plain[source].items()}
        if entries:
            inner.state[master] = entries

    def _stays(self, name: str) -> bool:
        """Returns whether a parameter keeps its value, as it was left out of the checkpoint and is not trained here either."""
        snapshot, source = self._snapshot, self._source(name)
        is_unnamed = ALL_FROZEN in self._left_out and source not in self._manifest.parameters
        if source not in self._left_out and not is_unnamed:
            return False
        return name not in snapshot.managed or lies_nowhere(snapshot.sharding, snapshot.managed.index(name))

    def _tensors(self) -> dict[str, torch.Tensor]:
        managed = zip(self._snapshot.managed, self._snapshot.sharding.params.tensors, strict=True)
        return {**self._snapshot.named.parameters, **dict(managed)}

    def _had_master(self, name: str) -> bool:
        stored = self._manifest.parameters.get(self._source(name))
        return stored is not None and stored.value_dtype != stored.dtype

    def _source(self, name: str) -> str:
        """Returns the name that a parameter or buffer is stored by: wrappers may differ, and tied ones may have had another
        first name."""
        name = rewrapped(name, *self._wrappers)
        return self._manifest.aliases.get(name, name)


def _fits(held: Any, master: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether an entry of the state can be overwritten: its elements lie as those of the master do."""
    kind = (master.shape, master.stride(), dtype)
    return type(held) is torch.Tensor and (held.shape, held.stride(), held.dtype) == kind


@torch.no_grad()
def _take_counters(snapshot: TrainingSnapshot, training: Mapping[str, Any]) -> None:
    optimizer, sharding = snapshot.optimizer, snapshot.sharding
    sharding.window.sync.go_on_from(training["step"])
    optimizer.skipped_steps = training["skipped_steps"]
    if training["loss_scale"] is not None:
        snapshot.sharding.loss_scaler.scale = _scale_of(snapshot, training)


def _scale_of(snapshot: TrainingSnapshot, training: Mapping[str, Any]) -> Any:
    try:
        return loaded_scale(snapshot.optimizer.loss_scale, training, False)
    except TypeError as error:  # the manifest has a name that a loss scale does not have
        raise BadCheckpoint(f"Cannot load: the manifest's loss scale is not valid ({error}). {ANOTHER}") from error


def _take_random_numbers(reader: CheckpointReader, num_ranks: int, snapshot: TrainingSnapshot) -> None:
    group = snapshot.sharding.group
    if num_ranks == group.size:
        put_back(snapshot.sharding.accelerator, reader.random_bytes(group.rank))
    elif group.rank == 0:
        logger.info("Random states are not restored: those of %d ranks were saved, and %d train.", num_ranks, group.size)


def _listed(what: str, names: Sequence[str]) -> str:
    """Returns the first of the names, and how many more there are, as a text."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{what}: {', '.join(names[:_MOST_NAMED])}{more}."
