"""Makes subcommands of `python -m zero`, with the exit statuses, tables and errors of one line that they share.

Each command is two functions:

    def add_import(subparsers):     # says what may be typed; zero/__main__.py lists these
        parser = add_command(subparsers, "import", summary, description, _import, "written")
        parser.add_argument("source")

    def _import(args):              # does it; `status_of` calls it, and tells errors
        ...                         # torch is imported here and not for the help
        return DONE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accelerators.output import NotWritten, complain, write
from zero.errors import ZeroError, is_ours, not_written

DONE, NO, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130
_STATUSES = "Exit status: 0 {done}, 1 {no}, 2 it could not be done or found out, and the reason is on stderr."

Subparsers = Any  # argparse keeps the type of its own result private


def add_command(
    subparsers: Subparsers,
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
    done: str = "done",
    no: str = "is not used",
) -> argparse.ArgumentParser:
    """Adds a subcommand with `--json`; `done` and `no` describe exit status 0 and 1."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description, epilog=_STATUSES.format(done=done, no=no),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)
    return parser


def status_of(act: Callable[[], int]) -> int:
    """Runs a command and returns its exit status. If it fails, says why on stderr and returns the status for that."""
    try:
        return int(act())
    except (BrokenPipeError, NotWritten):  # nobody reads what it says; `answer` of accelerators/output.py ends the program
        raise
    except (ValueError, TypeError, OSError, MemoryError, ZeroError) as error:
        complain(_words_of(error))
        return IMPOSSIBLE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # only one of several ranks reports it
            complain("Interrupted at once: what was begun is not finished.")
        return INTERRUPTED


def _words_of(error: Exception) -> str:
    """Returns the text of an error. The system's own has no remedy, and may not say where it was."""
    if not isinstance(error, OSError):
        return str(error)
    return str(not_written(error.filename or "a file", error, act="use"))


def tell(as_json: bool, answer: Mapping[str, Any], text: str) -> None:
    """Prints the answer, as JSON for programs or as text for people."""
    write((json.dumps(answer, indent=2) if as_json else text.rstrip("\n")) + "\n")


@contextlib.contextmanager
def code_of(words: str) -> Iterator[None]:
    """Tells what fails in a block, which runs a script or function of the user's, as a mistake in that, with its place."""
    from accelerators.selection import words_of  # importing this may load torch

    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = words_of(error)  # its class and its text, which it may fail to make
        _, _, text = said.partition(": ")
        if isinstance(error, (ValueError, TypeError, ZeroError)) and is_ours(text):
            raise
        _, *places = traceback.extract_tb(error.__traceback__)  # the first one is the `yield`
        where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        ended = isinstance(error, SystemExit)
        how = "it ends the process" if ended else f"it fails with {said}"
        raise ValueError(f"Cannot use {words}: {how}{where}. Repair it.") from error


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Formats columns as wide as their content; the first ones, which are names, to the left, numbers to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if index < left else cell.rjust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def pairs(figures: Mapping[str, Any]) -> str:
    """Formats one figure a line, under its name."""
    return table(("", ""), ((name.replace("_", " "), str(value)) for name, value in figures.items()), left=2).lstrip("\n")
