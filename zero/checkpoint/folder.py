"""The directory of the checkpoints: how one is added, found, opened and removed. Nothing else touches the files of one.

[Note: commit] A checkpoint is written to a hidden folder beside the others, and renamed when every file of it is synced. The
pointer to the latest is written last, so it always names a complete checkpoint, whenever a process is stopped. If the tag
exists, the old checkpoint is renamed away first; a reader that comes between the two renames finds it by its other name.

[Note: several processes] Processes may save into one directory at the same time. Who changes which checkpoints there are does
so alone, by a lock on the directory. A hidden folder is locked as long as its save goes on, so that nobody else removes it; a
lock ends with its process, and what the dead left is removed by the next save.

[Note: a store] Who writes a checkpoint calls `begin`, whose result each rank `sees`, then `put`, `get` and `drop` for its
files, and at last `commit` or `give_up`. Who reads one calls `open`, which gives an `OpenCheckpoint`, and of its files `size`,
`read` and `read_into`. So a place for checkpoints that is no directory, as an object store, has to do these, and `latest` and
`prune`. No protocol repeats them while `Folder` is the only store. What other programs wrote or are to read lies in files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero.checkpoint import disk, locks
from zero.checkpoint.disk import OpenFile
from zero.checkpoint.manifest import HEAD_BYTES, Manifest, number_of
from zero.checkpoint.progress import Written
from zero.checkpoint.values import ANOTHER
from zero.errors import BadCheckpoint

logger = logging.getLogger("zero")

LATEST, MANIFEST = "latest", "manifest.json"
_LOCK = ".lock"  # the file that is locked in the directory while it is changed, and in a hidden folder while it is written
_TAG = re.compile(r"[A-Za-z0-9_+=@,-][A-Za-z0-9_.+=@,-]{0,199}")  # a tag becomes the name of a folder, on any system
_being_written: dict[Path, locks.Lock] = {}  # by path, as this process may train several models into one directory
_MOST_AT_ONCE = 256  # the number of files that are opened before any is read
_MOST_BEGUN = 100  # the number of tries to open a checkpoint, as others may save the tag anew each time
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
            return check_tag(disk.content(self.path / LATEST).decode("utf-8").strip())
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

    def open(self, tag: str | None = None) -> OpenCheckpoint:
        """Opens a checkpoint, by default the latest."""
        return OpenCheckpoint(self, tag)

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
                match = _HIDDEN.fullmatch(path.name)
                if match is None or _is_written(path):
                    continue
                shown = self.path / match["tag"]
                if not path.name.endswith(".replaced") or (shown / MANIFEST).is_file():
                    # If a rank of a dead program still writes there, the next save removes the rest.
                    shutil.rmtree(path, ignore_errors=True)
                elif not os.path.lexists(shown):
                    # The save was stopped between its two renames, so the checkpoint before still counts.
                    disk.rename(path, shown)
            hidden = self._unseen(tag)
            os.mkdir(hidden)
            lock = locks.Lock(hidden / _LOCK)
            lock.take()
            _being_written[hidden] = lock
        return hidden

    def _unseen(self, tag: str) -> Path:
        """Returns a new name for a folder that is no checkpoint yet or any more; the next save removes what is left there."""
        return self.path / f".{tag}.saving-{secrets.token_hex(4)}"

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return locks.alone(self.path / _LOCK)

    def sees(self, hidden: Path) -> bool:
        """Returns True if this rank can write to what another one has begun."""
        return hidden.is_dir()

    def put(
        self, hidden: Path, name: str, contents: Iterable[bytes | memoryview], advance: Written = lambda _: None
    ) -> tuple[int, str]:
        """Writes a file of a checkpoint that was begun, and syncs it; ranks that `get` it see all of it or nothing. Returns its
        size in bytes and its checksum."""
        unseen = hidden / f".{name}"
        size, checksum = disk.write(unseen, contents, advance)
        os.rename(unseen, hidden / name)
        return size, checksum

    def get(self, hidden: Path, name: str) -> str | None:
        """Returns the text that a rank has `put`; None if it has not yet."""
        try:
            return (hidden / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def drop(self, hidden: Path, names: Iterable[str]) -> None:
        """Removes files that are no part of the checkpoint."""
        for name in names:
            os.unlink(hidden / name)

    def give_up(self, hidden: Path) -> None:
        """Removes what was written and not committed."""
        shutil.rmtree(hidden, ignore_errors=True)
        lock = _being_written.pop(hidden, None)
        if lock is not None:
            lock.release()

    def commit(self, hidden: Path, tag: str, manifest: Manifest, is_latest: bool = True) -> Path:
        """Makes what was written a checkpoint, and the pointer name it."""
        with self._alone():
            manifest = replace(manifest, number=max((number for number, _ in self._numbered()), default=0) + 1)
            disk.write(hidden / MANIFEST, [manifest.text().encode()])
            os.unlink(hidden / _LOCK)  # nobody looks for the lock before the folder has its name
            disk.sync_folder(hidden)
            target, replaced = self.path / tag, self._replaced(tag)
            if target.exists() and replaced.exists():  # another process was stopped before it removed the replaced one
                self._remove(replaced, tag)
            try:
                if target.exists():
                    os.rename(target, replaced)
                disk.rename(hidden, target)
                if is_latest:
                    disk.replace(self.path / LATEST, f"{tag}\n")
            except OSError:
                with contextlib.suppress(OSError):  # puts back what was there, as far as possible
                    os.rename(target, hidden)
                with contextlib.suppress(OSError):
                    os.rename(replaced, target)
                raise
            disk.sync_folder(self.path)  # readers find the new one by now, so nothing is put back if this fails
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


class OpenCheckpoint:
    """All that is looked up in it belongs to one save of a tag, whatever other processes remove or save anew meanwhile.

    [Note: a reader] Another process may remove the checkpoint or save its tag anew at any time. The manifest and the files are
    looked up in the folder that was opened first, so they belong together, and they are open before the first is read. If the
    folder loses its name before that, the reader begins again with the folder that has the name now.
    """

    def __init__(self, directory: Folder, tag: str | None) -> None:
        self._directory, self._tag = directory, tag
        for _ in range(_MOST_BEGUN):
            self._found = directory.find(tag)
            self.path = directory.by_its_tag(self._found)
            if self._open():
                return
        raise BadCheckpoint(f"Cannot read {self.path}: others saved it anew each time it was read. Load another tag.")

    def _open(self) -> bool:
        """Opens the files; False if the folder lost its name before that was done."""
        try:
            self._folder = os.open(self._found, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self._close_folder = weakref.finalize(self, os.close, self._folder)
        self._files: dict[int, OpenFile | OSError] = {}
        try:
            text = disk.content(self.path / MANIFEST, within=self._folder)
        except OSError as error:
            if self._has_lost_its_name():
                self.close()
                return False
            raise BadCheckpoint(f"Cannot read {self.path / MANIFEST}: {error.strerror}. {ANOTHER}") from error
        self.manifest = Manifest.read(text, str(self.path / MANIFEST))
        self._files = dict(enumerate(self._look_up(file.name) for file in self.manifest.files[:_MOST_AT_ONCE]))
        wrong = [opened for opened in self._files.values() if isinstance(opened, OSError)]
        if wrong and self._has_lost_its_name():
            self.close()
            return False
        # Files are opened one at a time then, when they are asked for.
        if any(error.errno in (errno.EMFILE, errno.ENFILE) for error in wrong):
            self._close_files()
        return True

    def _look_up(self, name: str) -> OpenFile | OSError:
        try:
            return OpenFile(self.path / name, self._folder)
        except OSError as error:
            return error  # raised when somebody wants this file

    def _has_lost_its_name(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._found), os.fstat(self._folder))
        except OSError:
            return True

    def is_current(self) -> bool:
        """Returns True if who asks for the same checkpoint now gets this one; False if that cannot be found out."""
        try:
            return not self._has_lost_its_name() and (self._tag is not None or self._directory.latest() == self.path.name)
        except (OSError, BadCheckpoint):
            return False

    def file(self, number: int) -> OpenFile:
        """Returns a file of the manifest."""
        if not 0 <= number < len(self.manifest.files):
            raise BadCheckpoint(f"Cannot read {self.path}: it has no file {number}. {ANOTHER}")
        if number not in self._files:
            self._files[number] = self._look_up(self.manifest.files[number].name)
        opened = self._files[number]
        if isinstance(opened, OSError):
            path = self.path / self.manifest.files[number].name
            if self._has_lost_its_name():
                raise BadCheckpoint(f"Cannot read {path}: it was removed or saved anew meanwhile. Load again.") from opened
            raise BadCheckpoint(f"Cannot read {path}: {opened.strerror}. {ANOTHER}") from opened
        return opened

    def check_file(self, number: int, read: Written = lambda _: None) -> None:
        """Raises unless a file is, bit for bit, the one that was saved."""
        self._check_size(number)
        opened, expected = self.file(number), self.manifest.files[number].checksum
        try:
            wrong = "its content has not the checksum that the manifest gives" if opened.checksum(read) != expected else None
        except OSError as error:
            wrong = error.strerror
        if wrong is not None:
            raise BadCheckpoint(f"Cannot read {opened.path}: {wrong}. {ANOTHER}")

    def check_sizes(self) -> None:
        """Raises unless all files that were opened at first are there and have their sizes. Reads nothing."""
        for number in list(self._files):
            self._check_size(number)

    def _check_size(self, number: int) -> None:
        opened, expected = self.file(number), self.manifest.files[number].num_bytes
        try:
            num_bytes = opened.size()
            wrong = None if num_bytes == expected else f"it has {num_bytes} bytes and had {expected}"
        except OSError as error:
            wrong = error.strerror
        if wrong is not None:
            raise BadCheckpoint(f"Cannot read {opened.path}: {wrong}. {ANOTHER}")

    def close(self) -> None:
        self._close_files()
        self._close_folder()

    def _close_files(self) -> None:
        for opened in self._files.values():
            if isinstance(opened, OpenFile):
                opened.close()
        self._files.clear()


def is_checkpoint(path: Path) -> bool:
    """Returns True if a folder is a checkpoint of ours, or one that is being written or removed."""
    return _number(path) is not None or _HIDDEN.fullmatch(path.name) is not None


def _is_written(path: Path) -> bool:
    """Returns whether a hidden folder belongs to a save that goes on."""
    try:
        lock = locks.Lock(path / _LOCK, create=False)
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
        return number_of(disk.content(path / MANIFEST, HEAD_BYTES))
    except (OSError, BadCheckpoint):
        return None


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        text = disk.content(path)
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}. {ANOTHER}") from error
    return Manifest.read(text, str(path))
