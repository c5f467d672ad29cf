"""Saves a training as a checkpoint: it is checked, then written to a hidden folder, and at last the folder gets its name.

    1. check     what can be refused before anything is written, on all ranks                `_checked`
    2. meet      rank 0 makes a hidden folder, and waits until all ranks see it              `_meet_in`
    3. collect   this rank's tensors, with `async_save` as copies in host memory             `payload_of`
    4. write     each rank its tensors, and then its part of the manifest                    `Writer.write`
    5. commit    rank 0 makes one manifest of the parts, and renames the folder              `Writer.commit`

An error in 1 to 4 removes the folder, and all ranks raise; the checkpoints before are as they were. With `async_save` a thread
does 4 and 5 while training goes on, and `wait` on the result, or the next save or load, tells all ranks how it went.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import values
from zero.checkpoint.folder import Folder, check_tag
from zero.checkpoint.manifest import Buffer, Manifest, Outline
from zero.checkpoint.writer import CommitPlan, PendingSave, Writer
from zero.comm.group import Group
from zero.comm.one_answer import all_or_none, exchange_about, exchange_texts, require_same_args
from zero.errors import RanksDiffer, ZeroError, not_written
from zero.memory.formats import dtype_name
from zero.setup.checks import BITS, bits_of
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.snapshot import TrainingLoop, TrainingSnapshot, finish_saving, payload_of, snapshot_of


def save(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | TrainingLoop,
    tag: str | None = None,
    extra: Any = None,
    *,
    scheduler: Any = None,
    async_save: bool = False,
    keep_last: int | None = None,
    is_latest: bool = True,
    exclude_frozen: bool = False,
    mid_window: bool = False,
) -> PendingSave:
    """Writes a checkpoint of a training. A collective.

    It holds weights and persistent buffers, the optimizer's state and groups, the loss scale, the counters, random numbers, the
    schedule and `extra`. In the middle of an accumulation it raises, unless `mid_window` allows it.

    Args:
        directory: A directory for this training alone, which all ranks see.
        target: The sharded optimizer, or an engine.
        tag: The name of the checkpoint; "global_step" and the number of steps by default.
        extra: Rank 0's tensors, numbers, texts, and lists, tuples, sets and dicts of them; `load` returns it.
        scheduler: A schedule to save; that of an engine by default.
        async_save: Copies the state to the host, and has a thread write it. `wait()` on the result, or the next save or load,
            raises if that failed.
        keep_last: The number of newest checkpoints to keep; older ones are removed once this one is complete.
        is_latest: False does not make it the latest checkpoint: `load` then needs its tag.
        exclude_frozen: Leaves out parameters that are not trained; a load keeps the model's own.
        mid_window: Saves in the middle of an accumulation, without its gradients.
    """
    snapshot = snapshot_of(target, scheduler)
    if exclude_frozen:
        snapshot.leave_out_frozen()
    optimizer, sharding = snapshot.optimizer, snapshot.sharding
    finish_saving(optimizer)
    tag = f"global_step{snapshot.step}" if tag is None else tag
    folder, extra_tensors, rest, outlines = all_or_none(  # 1
        sharding.group, "A save", lambda: _checked(directory, tag, extra, keep_last, snapshot, mid_window)
    )
    flags = {"async_save": bool(async_save), "is_latest": bool(is_latest), "exclude_frozen": bool(exclude_frozen)}
    require_same_args(sharding.group, "A save", tag=tag, keep_last=keep_last, **flags)
    _check_buffers_of_parts(snapshot)
    hidden = _meet_in(folder, tag, sharding.group)  # 2
    writer = Writer(folder, tag, hidden, sharding.group.rank, sharding.group.size, sharding.config.timeout_s)
    plan = CommitPlan(outlines, rest, keep_last, is_latest)

    def write() -> None:
        writer.write(payload)

    def write_and_commit() -> None:
        try:
            write()
        except BaseException:
            writer.wait_for_all()
            raise
        writer.commit(plan)

    try:
        payload = all_or_none(sharding.group, "A save", lambda: payload_of(snapshot, extra_tensors, async_save))  # 3
        if not async_save:
            all_or_none(sharding.group, "A save", write)  # 4
            sharding.masters.streams.flush()
    except BaseException:
        _clear(hidden, sharding.group)
        raise
    saving = PendingSave(  # 5, and with `async_save` 4 too
        folder.path / tag, sharding.group, write_and_commit if async_save else lambda: writer.commit(plan), async_save
    )
    if async_save:
        sharding.lifetime.last_save = saving
    else:
        saving.wait()
    return saving


def _check_buffers_of_parts(snapshot: TrainingSnapshot) -> None:
    """Raises on all ranks if parts have other values in a buffer than rank 0, whose are saved. A collective, of ranks that
    hold parts."""
    sharding = snapshot.sharding
    named = snapshot.buffers_of_parts() if sharding.parts.meshes else {}
    if not named:
        return
    everyone = exchange_about(sharding.group, "A save", b"".join(map(bits_of, named.values())))
    for rank, rank_bits in enumerate(everyone):
        for index, name in enumerate(named):
            bits = slice(index * BITS, (index + 1) * BITS)
            if rank_bits[bits] != everyone[0][bits]:
                raise RanksDiffer(
                    f"Cannot save {name}: it is a buffer beside parts, of which rank 0's is saved, and rank {rank} has other "
                    "values in it. Make it a frozen parameter, or a buffer that is not persistent."
                )


def _meet_in(folder: Folder, tag: str, group: Group) -> Path:
    """Makes a hidden folder on rank 0, and waits until all ranks see it."""
    made = all_or_none(group, "A save", lambda: _begin(folder, tag) if group.rank == 0 else None)
    name = exchange_texts(group, "" if made is None else made.name)[0]
    hidden = folder.path / name

    def look() -> Path:
        if not folder.sees(hidden):
            raise FileNotFoundError(
                f"Cannot save to {hidden}: rank 0 made it, and this rank does not see it. Give all ranks a directory that they "
                "share."
            )
        return hidden

    try:
        return all_or_none(group, "A save", look)
    except BaseException:
        _clear(made, group)
        raise


def _begin(folder: Folder, tag: str) -> Path:
    try:
        return folder.begin(tag)
    except OSError as error:
        raise not_written(folder.path, error) from error.__cause__


def _clear(hidden: Path | None, group: Group) -> None:
    """Removes what was written, on rank 0; the others wait until it is gone."""
    if group.rank == 0 and hidden is not None:
        Folder(hidden.parent).give_up(hidden)
    with contextlib.suppress(ZeroError):
        group.all_gather_bytes(b"")


def _checked(
    directory: Any, tag: str, extra: Any, keep_last: int | None, snapshot: TrainingSnapshot, mid_window: bool
) -> tuple[Folder, dict[str, torch.Tensor], Manifest, dict[str, Outline]]:
    """Raises what can be raised before anything is written. Returns the folder, the tensors of `extra` by the names that they
    are stored under, a manifest without files and parameters, and the outlines of the parameters."""
    folder = Folder.at(directory)
    check_tag(tag)
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"Cannot save with keep_last={keep_last!r}: the new checkpoint is always kept. Pass 1 or more.")
    snapshot.check(mid_window)
    outlines = snapshot.outlines()
    extra_tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        key = f"extra/{len(extra_tensors)}"
        extra_tensors[key] = tensor
        return key

    if snapshot.sharding.group.rank:
        return folder, {}, Manifest((), {}, {}), outlines
    coded = {}
    for name, value in (("extra", extra), ("training", snapshot.training())):
        coded[name] = values.encode(value, name, keep)
        back = values.decode(json.loads(json.dumps(coded[name])), lambda key, *_: extra_tensors[key])
        wrong = values.first_difference(value, back, name)
        if wrong is not None:
            raise ValueError(f"Cannot save {wrong}: a load would return another value. Store something else.")
    buffers = {name: Buffer(tuple(buffer.shape), dtype_name(buffer.dtype)) for name, buffer in snapshot.named.buffers.items()}
    manifest = Manifest((), {}, buffers, snapshot.aliases(), coded["training"], coded["extra"])
    return folder, extra_tensors, manifest, outlines
