"""Files without a name that lie in host memory, for several mappings or for other processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def memory_file(num_bytes: int) -> int:
    """Returns the descriptor of a file that never grows or shrinks. Only what was written takes memory."""
    if sys.platform != "linux":
        raise OSError("only Linux has memory files that can be sealed and reached by others")
    descriptor = os.memfd_create("zero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reach(process: int, remote_fd: int, num_bytes: int) -> int:
    """Returns a descriptor of the memory file of so many bytes that another process has open. Raises OSError where it is
    another file."""
    descriptor = os.open(f"/proc/{process}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if size != num_bytes or seals != _SEALS:
            raise OSError(f"process {process} has {size} bytes there with seals {seals}, and told of {num_bytes}")
        on_failure.pop_all()
    return descriptor


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
