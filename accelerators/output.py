"""The output of commands, and what becomes of it if nobody reads it or it cannot be written."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import Any

NOBODY_READS = 141  # what a shell says of a process that ended by SIGPIPE, as most commands do then
NOT_WRITTEN = 2


class NotWritten(OSError):
    """The answer of a command could not be written."""


def write(text: str) -> None:
    """Writes to stdout now, so that a failure is not taken for one of anything else."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotWritten(error.errno, error.strerror) from error


class Parser(argparse.ArgumentParser):
    """A parser of arguments whose help is written as any answer is: argparse's own says nothing of a write that fails."""

    def print_help(self, file: Any = None) -> None:
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)


def answer(act: Callable[[], int]) -> int:
    """Runs a command and returns its exit status. If nobody reads what it writes, that is 141 and no word is said; if it cannot
    be written, as on a full disk, 2, with the reason on stderr."""
    status: int | None = None
    try:
        if sys.stdout is None:  # so Python has it if it is closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            status = act()
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not has_no_reader(unknown=True):  # another connection
            complain(f"Cannot go on: a connection was lost ({error}). Try it again.")
            return NOT_WRITTEN
        status = NOBODY_READS
    except OSError as error:
        if not status:  # else it said what is wrong before
            complain(f"Cannot write the answer to stdout: {error.strerror or error}. Send it to where there is room.")
        status = NOT_WRITTEN
    silence()
    return status


def silence() -> None:
    """Sends what is still written to stdout nowhere: what is left is written again when the process ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_no_reader(unknown: bool) -> bool:
    """Returns True if nobody reads stdout any more; `unknown` if it cannot be asked."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # of a system without it, or of what stands for stdout in tests
        return unknown


def complain(words: object) -> None:
    """Prints an error, if there is where to."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
