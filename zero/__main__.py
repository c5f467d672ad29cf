"""`python -m zero`: the tools, one subcommand each."""

from __future__ import annotations

import argparse
import os
import sys

from zero.errors import ZeroError
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
    parser = argparse.ArgumentParser(prog="python -m zero", description="Sharded training on any torch device.")
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
    except (ValueError, TypeError, OSError, MemoryError, ZeroError) as error:
        complain(error)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of several ranks one says so
            complain("Interrupted at once: what was begun is not finished.")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
