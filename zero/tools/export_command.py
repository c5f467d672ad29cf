"""`python -m zero export DIR OUT`: whole weights out of a checkpoint, for plain torch."""

from __future__ import annotations

import argparse
import re

from zero.tools.cli import DONE, Subparsers, add_command, tell

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(
        subparsers, "export", "write a checkpoint's weights to safetensors files", "Needs no ranks and no model.", run,
        "written",
    )  # fmt: skip
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("out", help="a file to write; with --shard-size a folder")
    parser.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors", help="dcp: a folder for FSDP2")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--shard-size", metavar="BYTES", help="write files of about this size, such as 5G, and an index")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating weights (default: as they were trained)")
    parser.add_argument("--optimizer", metavar="FILE", help="also write a state dict for a plain torch optimizer")


def run(args: argparse.Namespace) -> int:
    # Imported here: torch is not for those who ask for another subcommand.
    import torch

    from zero.checkpoint.export import export

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    shard_bytes = None if args.shard_size is None else _bytes_of(args.shard_size)
    options = {"shard_bytes": shard_bytes, "dtype": dtype, "optimizer": args.optimizer, "format": args.format}
    made = export(args.directory, args.out, args.tag, **options)
    tell(args.json, {"written": [str(path) for path in made]}, "\n".join(map(str, made)))
    return DONE


def _bytes_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"Cannot use --shard-size {text}: it takes a number of bytes, with K, M or G behind it. Try 5G.")
    return int(match[1]) * _UNITS[match[2].upper()]
