"""`python -m zero`: the tools, one subcommand each."""

from __future__ import annotations

import argparse
import sys

from zero.tools import config_command, export_command, import_command, inspect_command, verify_command

# Each has add_parser(subparsers), which sets `run`, a function of the parsed arguments that returns the exit status.
COMMANDS = (config_command, export_command, import_command, inspect_command, verify_command)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; the exit status is returned."""
    parser = argparse.ArgumentParser(prog="python -m zero", description="Sharded training on any torch device.")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
