"""A lock on a file has one holder at a time among all processes that see the file, and ends with its process at the latest."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # errors of a file system without locks
# The seconds that another process may take to change the directory, as it may have to remove a large checkpoint.
_LONGEST_WAIT_S = 600.0
_LOOK_EVERY_S = 0.005

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()  # the locks that are open in this process


class Lock:
    """A lock on a file, for one holder at a time among all processes that see the file, on shared file systems too. It ends
    with its process at the latest, also if one that was forked from it lives on. If the file system has no locks, `is_certain`
    is False, and taking it excludes nobody."""

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self.is_certain = sys.platform != "win32"
        try:
            self._descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        except PermissionError:  # the file belongs to another user
            self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        _locks.add(self)

    def take(self) -> bool:
        """Takes the lock; False if another holder has it."""
        if sys.platform != "win32":
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    self.close()  # no caller has the object yet, so nobody else would close it
                    raise
                self.is_certain = False
        return True

    def is_of(self, path: Path) -> bool:
        """Returns True if the locked file is the one of this name, which another holder may have removed before."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    def release(self) -> None:
        """Gives the lock back if it was taken, for processes that were forked meanwhile too, and closes the file. If that is
        done before, as in those processes, nothing is done."""
        if sys.platform != "win32" and self.is_certain and self._close.alive:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Closes the file, which leaves the lock with the process that this one was forked from."""
        self._close()


def _leave_to_parent() -> None:
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Runs a block while no other process or thread is in such a block with the same file, which is removed at the end."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        lock = Lock(path)
        if lock.take() and (lock.is_of(path) or not lock.is_certain):
            break
        lock.release()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Cannot change what is in {path.parent}: another process has had {path.name} locked for "
                f"{_LONGEST_WAIT_S:g} s. End it, or use another directory."
            )
        time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # removed while it is locked: a process that waits for it finds that this name has another file
        lock.release()
