"""`python -m zero`: the tools, one subcommand each."""

from __future__ import annotations

import sys
from functools import partial

from accelerators.output import Parser, answer, complain
from zero.tools.checkpoint_commands import add_export, add_import, add_inspect
from zero.tools.commands import IMPOSSIBLE, status_of
from zero.tools.config_command import add_config
from zero.tools.plan import add_plan
from zero.tools.verify_script import add_verify

# Each function adds a subcommand, which sets `run`: a function of the parsed arguments that returns the exit status.
COMMANDS = {
    "plan": add_plan, "verify": add_verify, "config": add_config, "inspect": add_inspect, "export": add_export,
    "import": add_import,
}  # fmt: skip
_GONE = {  # subcommands that are gone, each with what to type now
    "train": "Cannot run `zero train`: the demonstration is an example of the checkout now, and not installed. Run "
    "`python examples/train` there, with the same options.",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; the exit status is returned."""
    return answer(partial(_main, argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m zero", description="Sharded training on any torch device.")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS.values():
        add(subparsers)
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
