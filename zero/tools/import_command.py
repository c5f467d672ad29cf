"""`python -m zero import SOURCE OUT`: what DeepSpeed or plain torch saved, as a checkpoint of ours."""

from __future__ import annotations

import argparse

from zero.tools.cli import DONE, Subparsers, add_command, tell


def add_parser(subparsers: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(
        subparsers, "import", "make a checkpoint of what DeepSpeed or torch saved", "Runs no code of what it reads.",
        run, "written",
    )  # fmt: skip
    parser.add_argument("source", help="of DeepSpeed's ZeRO, of torch.distributed.checkpoint, or a model's state dict")
    parser.add_argument("out", help="the directory to write a checkpoint into")
    parser.add_argument("--tag", help="which checkpoint of DeepSpeed's (default: the latest)")
    parser.add_argument("--optimizer", metavar="FILE", help="the optimizer's state, where it lies apart")
    help_text = "names in a model's state dict that are no parameters, such as '*.mask'; may be given several times"
    parser.add_argument("--buffer", metavar="PATTERN", action="append", default=[], help=help_text)


def run(args: argparse.Namespace) -> int:
    # Imported here: torch is not for those who ask for another subcommand.
    from zero.checkpoint.importers import import_checkpoint

    made = import_checkpoint(args.source, args.out, args.tag, optimizer=args.optimizer, buffers=args.buffer)
    tell(args.json, {"written": str(made)}, str(made))
    return DONE
