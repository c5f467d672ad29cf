"""`python -m zero`: the tools, one subcommand each."""

from __future__ import annotations

import sys
from functools import partial

from accelerators.output import Parser, answer
from zero.tools import (
    config_command,
    export_command,
    import_command,
    inspect_command,
    plan_command,
    verify_command,
)
from zero.tools.cli import IMPOSSIBLE, complain, status_of

# Each has add_parser(subparsers), which sets `run`, a function of the parsed arguments that returns the exit status.
COMMANDS = (plan_command, verify_command, config_command, inspect_command, export_command, import_command)
_GONE = {  # what was one, by name, and what is typed now
    "train": "Cannot run `zero train`: the demonstration is an example of the checkout now, and not installed. Run "
    "`python examples/train` there, with the same options.",
}


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
    if words[0] in _GONE:
        complain(_GONE[words[0]])
        return IMPOSSIBLE
    args = parser.parse_args(words)
    return status_of(partial(args.run, args))


if __name__ == "__main__":
    sys.exit(main())
