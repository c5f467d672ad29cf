"""What of a training is saved, and saving it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero.checkpoint import typed
from zero.checkpoint.agreed import agreed, asked_alike
from zero.checkpoint.folder import Folder, check_tag
from zero.checkpoint.names import Named
from zero.checkpoint.random_state import random_bytes
from zero.checkpoint.writing import Cargo, Plan, Saving, Writer
from zero.comm.group import Group, exchange_texts
from zero.errors import ZeroError
from zero.memory.flat import Form, dtype_name, goes_with_elements, sum_dtype
from zero.plan.layout import Piece
from zero.plan.manifest import VALUE, Buffer, Manifest, Outline, Part, buffer_key, key_of
from zero.state import edited, lies_nowhere

if TYPE_CHECKING:
    from zero.engine import Engine
    from zero.optimizer import ShardedOptimizer
    from zero.parts import Parts


def save(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | Engine,
    tag: str | None = None,
    extra: Any = None,
    *,
    scheduler: Any = None,
    async_save: bool = False,
    keep_last: int | None = None,
    is_latest: bool = True,
) -> Saving:
    """Writes a checkpoint of the training that `target` does into `directory`, which all ranks see. A collective.

    Saved are weights and persistent buffers, the optimizer's state and its groups, the loss scale, the counters, random
    numbers, the schedule (the engine's, or `scheduler`) and `extra`, which is rank 0's: tensors, numbers, texts, and lists,
    tuples, sets and dicts of them. With `async_save` the state is copied to the host and written on a thread; `wait()` of
    what is returned, or the next save or load, says whether that went well. With `keep_last=n` older checkpoints than
    the n newest go, once this one is complete; unless `is_latest` it is loaded by its tag alone. A directory is one training's.
    """
    about = shown(target, scheduler)
    optimizer, parts = about.optimizer, about.parts
    finish_saving(optimizer)
    tag = f"global_step{about.step}" if tag is None else tag
    folder, kept, rest = agreed(
        parts.group, "A save", lambda: _checked(directory, tag, extra, keep_last, about, parts.group.rank == 0)
    )
    asked_alike(parts.group, "A save", tag=tag, keep_last=keep_last, async_save=bool(async_save), is_latest=bool(is_latest))
    place = _meet_in(folder, tag, parts.group)
    writer = Writer(folder, tag, place, parts.group.rank, parts.group.size, parts.config.timeout_s)
    plan = Plan(about.outlines(), rest, keep_last, is_latest)

    def write() -> None:
        writer.write(cargo)

    def write_and_commit() -> None:
        try:
            write()
        except BaseException:
            writer.wait_for_all()
            raise
        writer.commit(plan)

    try:
        cargo = agreed(parts.group, "A save", lambda: _cargo(about, kept, async_save))
        if not async_save:
            agreed(parts.group, "A save", write)
    except BaseException:
        _clear(place, parts.group)
        raise
    saving = Saving(folder.path / tag, parts.group, write_and_commit if async_save else lambda: writer.commit(plan), async_save)
    if async_save:
        parts.saving = saving
    else:
        saving.wait()
    return saving


def shown(target: Any, scheduler: Any) -> Shown:
    """An optimizer, or an engine with the one that is in it."""
    from zero.engine import Engine
    from zero.optimizer import ShardedOptimizer

    if isinstance(target, Engine):
        return Shown(target.optimizer, target, scheduler)
    if not isinstance(target, ShardedOptimizer):
        raise TypeError(
            f"A checkpoint of a {type(target).__name__} was asked for, but only what zero.shard or zero.initialize gave has "
            "ranks and shares. Pass that, or use torch.save for what is plain."
        )
    return Shown(target, None, scheduler)


def finish_saving(optimizer: ShardedOptimizer) -> None:
    """Waits for what is being written in the background, and says where it failed. A collective, if there is any."""
    saving, optimizer.parts.saving = optimizer.parts.saving, None
    if saving is not None and not saving.told:
        saving.wait()


def _meet_in(folder: Folder, tag: str, group: Group) -> Path:
    """A hidden folder that rank 0 makes and all see."""
    made = agreed(group, "A save", lambda: folder.begin(tag) if group.rank == 0 else None)
    name = exchange_texts(group, "" if made is None else made.name)[0]
    place = folder.path / name

    def look() -> Path:
        if not place.is_dir():
            raise FileNotFoundError(f"{place} is not there, though rank 0 made it. Give all ranks a directory that they share")
        return place

    try:
        return agreed(group, "A save", look)
    except BaseException:
        _clear(made, group)
        raise


def _clear(place: Path | None, group: Group) -> None:
    """Rank 0 takes away what was written, and nobody goes on before it is gone."""
    if group.rank == 0 and place is not None:
        Folder(place.parent).give_up(place)
    with contextlib.suppress(ZeroError):
        group.exchange(b"")


def _checked(
    directory: Any, tag: str, extra: Any, keep_last: int | None, about: Shown, is_first: bool
) -> tuple[Folder, dict[str, torch.Tensor], Manifest]:
    """All that can be said before anything is written; gives the tensors of `extra`, and a manifest without parameters."""
    folder = Folder.at(directory)
    check_tag(tag)
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last={keep_last!r} was asked for, but the new checkpoint at least stays. Pass 1 or more.")
    about.check()
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        key = f"extra/{len(kept)}"
        kept[key] = tensor
        return key

    if not is_first:
        return folder, {}, Manifest((), {}, {})
    coded = {}
    for name, value in (("extra", extra), ("training", about.training())):
        coded[name] = typed.encode(value, name, keep)
        back = typed.decode(json.loads(json.dumps(coded[name])), lambda key, *_: kept[key])
        wrong = typed.first_difference(value, back, name)
        if wrong is not None:
            raise ValueError(f"A checkpoint of {wrong} was asked for, but it would come back as another. Store something else.")
    buffers = {name: Buffer(tuple(buffer.shape), dtype_name(buffer.dtype)) for name, buffer in about.named.buffers.items()}
    return folder, kept, Manifest((), {}, buffers, about.named.aliases, coded["training"], coded["extra"])


class Shown:
    """A training as a checkpoint shows it: by canonical names."""

    def __init__(self, optimizer: ShardedOptimizer, engine: Engine | None, scheduler: Any) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.scheduler = scheduler if scheduler is not None or engine is None else engine.lr_scheduler
        self.parts: Parts = optimizer.parts
        self.named = Named.of(optimizer.model)
        own = {id(param): name for name, param in self.named.parameters.items()}
        params = self.parts.params
        self.managed = [own.get(id(tensor), name) for name, tensor in zip(params.names, params.tensors, strict=True)]

    @property
    def step(self) -> int:
        return self.parts.window.settler.step if self.engine is None else self.engine.global_steps

    def unmanaged(self) -> list[tuple[str, nn.Parameter]]:
        managed = set(self.managed)
        return [(name, param) for name, param in self.named.parameters.items() if name not in managed]

    def check(self) -> None:
        """Raises where a window is open: its gradients would be lost."""
        parts, since = self.parts, self.parts.window.since
        parts.travel.check("save")
        parts.window.notice()
        pending = since.unsettled or (since.settled and not since.stepped)
        if pending or (self.engine is not None and self.engine.in_window):
            raise ValueError(
                "A save was asked for in the middle of an accumulation, but gradients that no step has used yet are not saved. "
                "Save after step, or throw them away with discard()."
            )
        lost = parts.window.settler.aliases.lost()
        gone = [name for index, name in enumerate(self.managed) if lost >> index & 1]
        if gone:
            raise ValueError(f"A save was asked for, but {gone[0]} was replaced in the model after sharding. Shard it again.")

    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, with names for their parameters."""
        index = self.parts.params.index
        return [
            {**group, "params": [self.managed[index[id(param)]] for param in group["params"] if id(param) in index]}
            for group in self.optimizer.inner.param_groups
        ]

    def training(self) -> dict[str, Any]:
        """What is no tensor of a parameter."""
        optimizer, engine, parts = self.optimizer, self.engine, self.parts
        return {
            "optimizer": type(optimizer.inner).__name__,
            "groups": self.groups(),
            "step": parts.window.settler.step,
            "skipped_steps": optimizer.skipped_steps,
            "loss_scale": None if optimizer.loss_scale is None else optimizer.loss_scale.progress,
            "engine": None if engine is None else engine.counters,
            "schedule": None if self.scheduler is None else type(self.scheduler).__name__,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "modules": {name: module.get_extra_state() for name, module in self.named.modules.items()},
            "config": parts.config.model_dump(),
            "ranks": parts.group.size,  # whose random numbers are there
        }

    def outlines(self) -> dict[str, Outline]:
        """Every parameter that is saved, as all ranks know it."""
        found = {name: _outline(tensor, None, tensor.dtype) for name, tensor in self.named.parameters.items()}
        forms = self.parts.window.shares.forms
        for index, (name, tensor) in enumerate(zip(self.managed, self.parts.params.tensors, strict=True)):
            value = tensor.dtype if lies_nowhere(self.parts, index) else sum_dtype(tensor.dtype)
            found[name] = _outline(tensor, forms[index].order, value)
        return found


def _outline(tensor: torch.Tensor, order: tuple[int, ...] | None, value: torch.dtype) -> Outline:
    return Outline(tuple(tensor.shape), order, dtype_name(tensor.dtype), dtype_name(value))


@torch.no_grad()
def _cargo(about: Shown, kept: Mapping[str, torch.Tensor], copied: bool) -> Cargo:
    parts = about.parts
    parts.adopt()
    cargo = Cargo(Part(), {})
    elsewhere = set(parts.window.settler.aliases.elsewhere())
    for index, name in enumerate(about.managed):
        if not lies_nowhere(parts, index):
            for piece, master in parts.masters.of(index):
                if _is_ours(parts, piece):
                    value = edited(parts, index, piece, master) if index in elsewhere else master
                    _add(cargo, name, value, about.optimizer.inner.state.get(master, {}), piece)
        elif parts.group.rank == 0:
            tensor, form = parts.params.tensors[index], parts.window.shares.forms[index]
            _add(cargo, name, tensor, about.optimizer.inner.state.get(tensor, {}), None, form)
    tensors: Any = cargo.tensors
    if parts.group.rank == 0:
        for name, tensor in about.unmanaged():
            _add(cargo, name, tensor, {}, None)
        tensors.update({buffer_key(name): buffer for name, buffer in about.named.buffers.items()})
        tensors.update(kept)
    tensors["random"] = random_bytes(parts.accelerator)
    return cargo.copied() if copied else cargo


def _is_ours(parts: Parts, piece: Piece) -> bool:
    """What all ranks have is written by one, and every rank has some of it to write."""
    shared = parts.line.layout.num_shares > 1
    return shared or piece.bucket % parts.group.size == parts.group.rank


def _add(
    cargo: Cargo, name: str, value: torch.Tensor, state: Mapping[str, Any], piece: Piece | None, form: Form | None = None
) -> None:
    """A stretch of a parameter, or all of it, with its state."""
    part, tensors = cargo.part, cargo.tensors
    start, stop = (0, value.numel()) if piece is None else (piece.in_param.start, piece.in_param.stop)
    line: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach if form is None else form.line
    part.stretches.setdefault(name, []).append((start, stop))
    dtypes, plain = {}, {}
    entries: dict[str, Any] = {VALUE: value}
    for key, entry in state.items():
        if goes_with_elements(key, entry, value.shape):
            entries[key] = entry
            dtypes[key] = dtype_name(entry.dtype)
        else:
            plain[key] = typed.encode(entry, f"state {key} of {name}")
    for key, entry in entries.items():
        assert key_of(name, key, start) not in tensors, key_of(name, key, start)
        tensors[key_of(name, key, start)] = line(entry.detach())  # type: ignore[index]
    part.state[name], part.plain[name] = dtypes, plain
