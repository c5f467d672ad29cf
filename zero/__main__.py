"""`python -m zero`: the tools, one subcommand each."""

from __future__ import annotations

import os
import sys
from functools import partial

from accelerators.output import NotWritten, Parser, answer
from zero.errors import ZeroError, not_written
from zero.tools import (
    config_command,
    export_command,
    import_command,
    inspect_command,
    plan_command,
    train_command,
    verify_command,
)
from zero.tools.cli import IMPOSSIBLE, INTERRUPTED, complain

# Each has add_parser(subparsers), which sets `run`, a function of the parsed arguments that returns the exit status.
COMMANDS = (
    train_command, plan_command, verify_command, config_command, inspect_command, export_command, import_command,
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; the exit status is returned."""
    return answer(partial(_main, argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m zero", description="Sharded training on any torch device.")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help(sys.stderr)
        return IMPOSSIBLE
    args = parser.parse_args(words)
    args.words = words  # for those who start processes that do the same
    try:
        return int(args.run(args))
    except (BrokenPipeError, NotWritten):
        raise
    except (ValueError, TypeError, OSError, MemoryError, ZeroError) as error:
        complain(_words_of(error))
        return IMPOSSIBLE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of several ranks one says so
            complain("Interrupted at once: what was begun is not finished.")
        return INTERRUPTED


def _words_of(error: Exception) -> str:
    """Returns the text of an error. The system's own has no remedy, and may not say where it was."""
    if not isinstance(error, OSError):
        return str(error)
    return str(not_written(error.filename or "a file", error)).replace("Cannot write to", "Cannot use", 1)


if __name__ == "__main__":
    sys.exit(main())
