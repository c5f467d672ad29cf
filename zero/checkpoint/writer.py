"""A save: every rank's files, then rank 0's manifest, now or on a thread while training goes on.

    checkpoints/.step9.saving-5e1f03a2/ `Writer.hidden`, until it is complete
        rank-00000.safetensors          1. `write`, on each rank: its tensors, synced
        rank-00000.part.json                and then its part of the manifest, which says that they are complete
        rank-00001.failed                   or, in place of the two, why it could not
        manifest.json                   2. `commit`, on rank 0, once each rank has said either: the parts become one
    checkpoints/step9/                  3. the folder is renamed, and `checkpoints/latest` names it (`Folder.commit`)

Ranks meet in the folder, not over the network: a rank says that it is done by writing a file. So the same code serves a save in
the background, while training uses the process groups.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from zero.checkpoint.folder import Folder, file_of
from zero.checkpoint.manifest import File, Manifest, Outline, Part, merged
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.tensor_files import file_of_tensors
from zero.comm.group import Group
from zero.comm.one_answer import exchange_texts
from zero.errors import CheckpointFailed, not_written

logger = logging.getLogger("zero")

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class ShardPayload:
    """The tensors that one rank writes."""

    part: Part
    tensors: Mapping[str, torch.Tensor]
    # Returns the values of tensors that are read late, by name.
    late: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def values(self, key: str) -> torch.Tensor:
        """Returns the values of a tensor. They may be overwritten when those of another tensor are asked for."""
        return self.late[key]() if key in self.late else self.tensors[key]

    def copied(self) -> ShardPayload:
        """Returns a payload of copies in host memory, so that training may change the originals while they are written."""
        return replace(self, tensors={key: self.values(key).to("cpu", copy=True) for key in self.tensors}, late={})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class CommitPlan:
    """The facts for the manifest that no rank's part has, and what becomes of the checkpoint. Rank 0 alone knows them."""

    outlines: Mapping[str, Outline]
    rest: Manifest  # all but files and parameters
    keep_last: int | None
    is_latest: bool


@dataclass(frozen=True)
class Writer:
    """Writes one rank's part of a checkpoint and, as rank 0, what makes all parts one."""

    folder: Folder
    tag: str
    hidden: Path  # the folder that the files are written to, until it gets its name
    rank: int
    size: int
    timeout_s: float

    def write(self, payload: ShardPayload) -> None:
        """Writes this rank's tensors, and then its part of the manifest, which shows rank 0 that they are complete. If it
        cannot, it tells rank 0 and raises."""
        name, contents = file_of(self.rank), file_of_tensors(payload.tensors, payload.values)
        try:
            with ProgressBar(f"saving {self.tag}", payload.num_bytes, self.rank == 0) as bar:
                size, checksum = self.folder.put(self.hidden, name, contents, bar.advance)
            part = replace(payload.part, file=File(name, size, checksum))
            self.folder.put(self.hidden, _part_of(self.rank), [part.text().encode()])
        except OSError as error:
            explained = not_written(self.folder.path, error)
            self._say(explained)
            raise explained from error
        except Exception as error:
            self._say(error)
            raise

    def _say(self, error: Exception) -> None:
        """Tells rank 0, which waits for this rank's part; without a reason if the disk has no room for one."""
        for reason in (f"{type(error).__name__}: {error}", ""):
            with contextlib.suppress(OSError):
                self.folder.put(self.hidden, _failure_of(self.rank), [reason.encode()])
                return

    def commit(self, plan: CommitPlan) -> None:
        """Makes all ranks' parts one checkpoint, which is rank 0's work, once all have written or said that they cannot."""
        if self.rank == 0:
            try:
                self._commit(plan)
            finally:
                self.give_up()  # nothing is left there if all went well

    def _commit(self, plan: CommitPlan) -> None:
        parts = [Part.read(self._await(rank)) for rank in range(self.size)]
        files = tuple(part.file for part in parts if part.file is not None)
        manifest = replace(plan.rest, files=files, parameters=merged(plan.outlines, parts))
        self.folder.drop(self.hidden, map(_part_of, range(self.size)))
        self.folder.commit(self.hidden, self.tag, manifest, plan.is_latest)
        if plan.keep_last is not None:
            self.folder.prune(plan.keep_last)

    def wait_for_all(self) -> None:
        """Waits until the others have ended, if rank 0 could not write its own part. Files that a rank writes while the folder
        is removed would stay behind."""
        if self.rank == 0:
            for rank in range(1, self.size):
                with contextlib.suppress(CheckpointFailed):
                    self._await(rank)
            self.give_up()

    def give_up(self) -> None:
        """Removes the hidden folder, on rank 0."""
        if self.rank == 0:
            self.folder.give_up(self.hidden)

    def _await(self, rank: int) -> str:
        """Waits for a rank's part of the manifest and returns it. Raises if the rank says that it failed, or nothing."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if (part := self.folder.get(self.hidden, _part_of(rank))) is not None:
                return part
            if (reason := self.folder.get(self.hidden, _failure_of(rank))) is not None:
                raise CheckpointFailed(f"rank {rank} could not write its part: {reason or 'there was no room for the reason'}")
            time.sleep(_LOOK_EVERY_S)
        raise CheckpointFailed(f"rank {rank} had not written its part {self.timeout_s:g} s after rank 0")


def _part_of(rank: int) -> str:
    return f"rank-{rank:05}.part.json"


def _failure_of(rank: int) -> str:
    return f"rank-{rank:05}.failed"


class PendingSave:
    """A checkpoint that is being written, or was. `path` is where it will be when it is complete."""

    def __init__(self, path: Path, group: Group, work: Callable[[], None], in_background: bool) -> None:
        self.path = path
        self._group = group
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None
        self.reported = False  # ranks have told each other how it went
        self._then: Callable[[], None] | None = None
        self._failure: CheckpointFailed | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._run, name="zero.save")
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        work, self._work = self._work, None  # dropped here, as it holds the tensors that are written, or a copy of them
        assert work is not None
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, `wait` says it on every rank
            self._error = error
            if self._thread is not None:
                logger.error("Checkpoint %s could not be written: %s: %s", self.path, type(error).__name__, error)

    def done(self) -> bool:
        """Returns True if `wait` would not wait for this rank's writing. Not a collective."""
        return self._thread is None or not self._thread.is_alive()

    def on_reported(self, act: Callable[[], None]) -> None:
        """Calls a function once all ranks know the result: at once if they do."""
        if self.reported:
            act()
        else:
            self._then = act

    def wait(self) -> Path:
        """Waits until the checkpoint is complete, and returns its path; raises on all ranks if one of them could not write. A
        collective, the first time."""
        if self._failure is not None:
            raise self._failure
        if self.reported:
            return self.path
        if self._thread is not None:
            self._thread.join()
        error = self._error
        texts = exchange_texts(self._group, "" if error is None else f"{type(error).__name__}: {error}")
        self.reported = True
        if self._then is not None:
            self._then()
        failures = [f"rank {rank}: {text.removesuffix('.')}" for rank, text in enumerate(texts) if text]
        if failures:
            self._failure = CheckpointFailed(
                f"Cannot write checkpoint {self.path}: it failed on {'; '.join(failures)}. The checkpoints before it are as "
                "they were. Save again when there is room and permission to write."
            )
            raise self._failure from error
        return self.path
