"""The directory of the checkpoints: how one is added, found and removed.

[Note: commit] A checkpoint is written to a hidden folder beside the others, and renamed when every file of it is synced. The
pointer to the latest is written last, so it always names a complete checkpoint, whenever a process is stopped. If the tag
exists, the old checkpoint is renamed away first; a reader that comes between the two renames finds it by its other name.

[Note: several processes] Processes may save into one directory at the same time. Who changes which checkpoints there are does
so alone, by a lock on the directory. A hidden folder is locked as long as its save goes on, so that nobody else removes it; a
lock ends with its process, and what the dead left is removed by the next save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero.checkpoint import disk
from zero.checkpoint.manifest import HEAD_BYTES, Manifest, number_of
from zero.checkpoint.values import ANOTHER
from zero.errors import BadCheckpoint

logger = logging.getLogger("zero")

LATEST, MANIFEST = "latest", "manifest.json"
_LOCK = ".lock"  # the file that is locked in the directory while it is changed, and in a hidden folder while it is written
_TAG = re.compile(r"[A-Za-z0-9_+=@,-][A-Za-z0-9_.+=@,-]{0,199}")  # a tag becomes the name of a folder, on any system
_being_written: dict[Path, disk.Lock] = {}  # by path, as this process may train several models into one directory
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(saving-[0-9a-z]+|replaced)")


def file_of(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def check_tag(tag: object) -> str:
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise ValueError(
            f"Cannot use tag={tag!r}: a tag names a folder. Use letters, digits and _ . + = @ , - without a dot in front, and "
            f"not {LATEST!r}."
        )
    return tag


@dataclass(frozen=True)
class Folder:
    """A directory of checkpoints."""

    path: Path

    @staticmethod
    def at(directory: Any) -> Folder:
        # An empty name comes from a variable that was not set, and does not mean the current directory.
        if not (name := os.fspath(directory)) or "\0" in name:
            raise ValueError(f"Cannot use {name!r} as a directory of checkpoints: it is no path. Pass '.' for the current one.")
        return Folder(Path(os.path.abspath(os.fspath(directory))))

    # finding -----------------------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Returns the tag that the pointer names, or None."""
        try:
            return check_tag((self.path / LATEST).read_text(encoding="utf-8").strip())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise BadCheckpoint(f"Cannot read {self.path / LATEST}: it names no checkpoint. {error}") from error

    def find(self, tag: str | None) -> Path:
        """Returns the folder of a checkpoint, by default of the latest."""
        wanted = self.latest() if tag is None else check_tag(tag)
        if wanted is None:
            is_one = _number(self.path) is not None
            remedy = f"its directory {self.path.parent}, and tag={self.path.name!r}" if is_one else "a tag, or save one first"
            raise FileNotFoundError(
                f"Cannot find the latest checkpoint in {self.path}: no file {LATEST!r} there names one. Give {remedy}."
            )
        for folder in (self.path / wanted, self._replaced(wanted)) * 3:  # a save may be renaming one to the other
            if (folder / MANIFEST).is_file():
                return folder
        if tag is None and self.latest() != wanted:
            return self.find(None)  # another checkpoint has become the latest, and this one was removed
        raise FileNotFoundError(
            f"Cannot find checkpoint {wanted} in {self.path}: no folder of that name has a {MANIFEST}. "
            f"Use one of those there: {', '.join(self.tags()) or 'none'}."
        )

    def tags(self) -> list[str]:
        """Returns the tags of all checkpoints, the oldest first."""
        return [tag for _, tag in self._numbered()]

    def _numbered(self) -> list[tuple[int, str]]:
        """Returns checkpoints by the numbers that they were given. Times would not do: a clock may be set back, and a copy has
        another time."""
        numbers = ((_number(path), path.name) for path in self._folders() if not path.name.startswith("."))
        return sorted((number, tag) for number, tag in numbers if number is not None)

    def _folders(self) -> Iterator[Path]:
        if self.path.is_dir():
            yield from (path for path in self.path.iterdir() if path.is_dir() and not path.is_symlink())

    def by_its_tag(self, path: Path) -> Path:
        """Returns the path that what `find` returned has, but for the moment in which another takes its place."""
        return self.path / path.name.removeprefix(".").removesuffix(".replaced") if path.name.startswith(".") else path

    def _replaced(self, tag: str) -> Path:
        return self.path / f".{tag}.replaced"

    # appearing ---------------------------------------------------------------------------------------------------

    def begin(self, tag: str) -> Path:
        """Makes a hidden folder to write to, and removes those of saves that were stopped."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._alone():
            target = self.path / tag
            if target.is_symlink() or (target.exists() and _number(target) is None):
                raise FileExistsError(f"Cannot save as {target}: something else has that name. Choose another tag.")
            for path in list(self._folders()):
                hidden = _HIDDEN.fullmatch(path.name)
                if hidden is None or _is_written(path):
                    continue
                shown = self.path / hidden["tag"]
                if not path.name.endswith(".replaced") or (shown / MANIFEST).is_file():
                    # If a rank of a dead program still writes there, the next save removes the rest.
                    shutil.rmtree(path, ignore_errors=True)
                elif not os.path.lexists(shown):
                    # The save was stopped between its two renames, so the checkpoint before still counts.
                    disk.rename(path, shown)
            made = self._unseen(tag)
            os.mkdir(made)
            lock = disk.Lock(made / _LOCK)
            lock.take()
            _being_written[made] = lock
        return made

    def _unseen(self, tag: str) -> Path:
        """Returns a new name for a folder that is no checkpoint yet or any more; the next save removes what is left there."""
        return self.path / f".{tag}.saving-{secrets.token_hex(4)}"

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return disk.alone(self.path / _LOCK)

    def give_up(self, written: Path) -> None:
        """Removes what was written and not committed."""
        shutil.rmtree(written, ignore_errors=True)
        lock = _being_written.pop(written, None)
        if lock is not None:
            lock.release()

    def commit(self, written: Path, tag: str, manifest: Manifest, is_latest: bool = True) -> Path:
        """Makes what was written a checkpoint, and the pointer name it."""
        with self._alone():
            manifest = replace(manifest, number=max((number for number, _ in self._numbered()), default=0) + 1)
            disk.write(written / MANIFEST, [manifest.text().encode()])
            os.unlink(written / _LOCK)  # nobody looks for the lock before the folder has its name
            disk.sync_folder(written)
            target, replaced = self.path / tag, self._replaced(tag)
            if target.exists() and replaced.exists():  # another process was stopped before it removed the replaced one
                self._remove(replaced, tag)
            try:
                if target.exists():
                    os.rename(target, replaced)
                disk.rename(written, target)
                if is_latest:
                    disk.replace(self.path / LATEST, f"{tag}\n")
            except OSError:
                with contextlib.suppress(OSError):  # puts back what was there, as far as possible
                    os.rename(target, written)
                with contextlib.suppress(OSError):
                    os.rename(replaced, target)
                raise
            if replaced.exists():
                self._remove(replaced, tag)
        return target

    def _remove(self, path: Path, tag: str) -> None:
        """Removes a checkpoint of which nothing hangs any more; so what cannot be removed is no failure of the save."""
        try:
            disk.remove_folder(path, self._unseen(tag))
        except OSError as error:
            logger.warning("Cannot remove %s: %s. Remove it, or make it removable.", path, error.strerror or error)

    def prune(self, keep: int) -> None:
        """Removes all checkpoints but the newest, and never the one that the pointer names."""
        with self._alone():
            tags, latest = self.tags(), self.latest()
            for tag in tags[: max(0, len(tags) - keep)]:
                if tag != latest:
                    self._remove(self.path / tag, tag)


def is_checkpoint(path: Path) -> bool:
    """Returns True if a folder is a checkpoint of ours, or one that is being written or removed."""
    return _number(path) is not None or _HIDDEN.fullmatch(path.name) is not None


def _is_written(path: Path) -> bool:
    """Returns whether a hidden folder belongs to a save that goes on."""
    try:
        lock = disk.Lock(path / _LOCK, create=False)
    except FileNotFoundError:
        return False  # a writer holds a lock as long as others can see the folder
    try:
        is_free = lock.take()
        if not lock.is_certain:
            logger.warning("Cannot find out whether %s is written: its file system has no locks. Remove it if not.", path)
        return not (is_free and lock.is_certain)
    finally:
        lock.release()


def _number(path: Path) -> int | None:
    """Returns the number of a checkpoint of ours, damaged or not. Whatever else is in the directory is None, and never taken
    away."""
    try:
        with open(path / MANIFEST, "rb") as file:
            return number_of(file.read(HEAD_BYTES))
    except OSError:
        return None


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}. {ANOTHER}") from error
    return Manifest.read(text, str(path))
