"""The output of commands, also if nobody reads it or it cannot be written."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import Any

NOBODY_READS = 141  # the exit status of a process that SIGPIPE ended, which most commands have then
NOT_WRITTEN = 2


class NotWritten(OSError):
    """Raised if the answer of a command could not be written."""


def write(text: str) -> None:
    """Writes to stdout at once, so that a failure is known to be one of the output."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotWritten(error.errno, error.strerror) from error


class Parser(argparse.ArgumentParser):
    """A parser of arguments that writes its help by `write`: argparse ignores it if that fails."""

    def print_help(self, file: Any = None) -> None:
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)


def answer(act: Callable[[], int]) -> int:
    """Runs a command and returns its exit status. If nobody reads the output, it is 141, without a message; if the output
    cannot be written, as on a full disk, it is 2, and stderr has the reason."""
    status: int | None = None
    try:
        if sys.stdout is None:  # Python has no stdout if the descriptor is closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            status = act()
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not has_no_reader(unknown=True):  # another connection broke
            complain(f"Cannot go on: a connection was lost ({error}). Try it again.")
            return NOT_WRITTEN
        status = NOBODY_READS
    except OSError as error:
        if not status:  # a command that failed has already said why
            complain(f"Cannot write the answer to stdout: {error.strerror or error}. Send it to where there is room.")
        status = NOT_WRITTEN
    silence()
    return status


def silence() -> None:
    """Points stdout at the null device, as Python flushes what is left in its buffer when the process ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_no_reader(unknown: bool) -> bool:
    """Returns True if nobody reads stdout any more, or `unknown` if the system cannot tell."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # this system has no poll, or stdout of a test has no descriptor
        return unknown


def complain(words: object) -> None:
    """Prints an error to stderr, if that is open."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
