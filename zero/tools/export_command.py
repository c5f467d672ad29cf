"""`python -m zero export DIR OUT`: whole weights out of a checkpoint, for plain torch."""

from __future__ import annotations

import argparse
import re
import sys

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "export", help="write a checkpoint's weights to safetensors files", description="Needs no ranks and no model."
    )
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("out", help="a file to write; with --shard-size a folder")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--shard-size", metavar="BYTES", help="write files of about this size, such as 5G, and an index")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating weights (default: as they were trained)")
    parser.add_argument("--optimizer", metavar="FILE", help="also write a state dict for a plain torch optimizer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: written. 1: not, and the reason is on stderr."""
    # Imported here: torch is not for those who ask for another subcommand.
    import torch

    from zero.checkpoint.exporting import export
    from zero.errors import ZeroError

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    try:
        shard_bytes = None if args.shard_size is None else _bytes_of(args.shard_size)
        made = export(args.directory, args.out, args.tag, shard_bytes=shard_bytes, dtype=dtype, optimizer=args.optimizer)
    except (ValueError, OSError, ZeroError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in made))
    return 0


def _bytes_of(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise ValueError(f"--shard-size {text} was given, but it is a number of bytes, with K, M or G behind it. Try 5G.")
    return int(found[1]) * _UNITS[found[2].upper()]
