"""`python -m zero import SOURCE OUT`: what DeepSpeed or plain torch saved, as a checkpoint of ours."""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "import", help="make a checkpoint of what DeepSpeed or plain torch saved", description="Runs no code of what it reads."
    )
    parser.add_argument("source", help="a directory of DeepSpeed ZeRO-1 or ZeRO-2, or a file with a model's state dict")
    parser.add_argument("out", help="the directory to write a checkpoint into")
    parser.add_argument("--tag", help="which checkpoint of DeepSpeed's (default: the latest)")
    parser.add_argument("--optimizer", metavar="FILE", help="a plain optimizer's state dict, beside a model's")
    told = "names in a model's state dict that are no parameters, such as '*.mask'; may be given several times"
    parser.add_argument("--buffer", metavar="PATTERN", action="append", default=[], help=told)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: written. 1: not, and the reason is on stderr."""
    # Imported here: torch is not for those who ask for another subcommand.
    from zero.checkpoint.importing import import_checkpoint
    from zero.errors import ZeroError

    try:
        made = import_checkpoint(args.source, args.out, args.tag, optimizer=args.optimizer, buffers=args.buffer)
    except (ValueError, OSError, ZeroError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{made}\n")
    return 0
