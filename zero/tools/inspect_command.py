"""`python -m zero inspect DIR`: what a checkpoint holds, and whether it is complete and undamaged."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zero.tools.cli import DONE, NO, Subparsers, add_command, complain, pairs, table, tell

if TYPE_CHECKING:
    from zero.checkpoint.manifest import Manifest


def add_parser(subparsers: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(
        subparsers, "inspect", "show what a checkpoint holds and check its files", "Needs no ranks and no model.", run,
        "whole", "damaged",
    )  # fmt: skip
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--parameters", action="store_true", help="list every parameter and buffer")
    parser.add_argument("--no-check", action="store_true", help="do not read the files to check their checksums")


def run(args: argparse.Namespace) -> int:
    # Imported here: torch is not for those who ask for another subcommand.
    from zero.checkpoint.tensor_files import CheckpointReader
    from zero.errors import BadCheckpoint

    wrong = []
    try:
        with contextlib.closing(CheckpointReader(args.directory, args.tag)) as reader:
            manifest, figures = reader.manifest, _figures(reader.manifest)
            for number in range(0 if args.no_check else len(manifest.files)):
                try:
                    reader.check_file(number)
                except BadCheckpoint as error:
                    wrong.append(str(error))
    except BadCheckpoint as error:
        complain(error)
        return NO
    answer = {"path": str(reader.path), **figures, "damaged": wrong}
    text = pairs({name: value for name, value in answer.items() if name != "damaged"}) + "\n"
    if args.parameters:
        text += "\n" + table(("name", "dtype and shape"), _shapes(manifest).items(), left=2) + "\n\n"
    text += "not checked" if args.no_check else f"{len(manifest.files)} files, {len(wrong)} of them damaged"
    tell(args.json, {**answer, "parameters": _shapes(manifest)}, text)
    for problem in wrong:
        complain(problem)
    return NO if wrong else DONE


def _figures(manifest: Manifest) -> Mapping[str, Any]:
    import torch

    training = manifest.training_with(lambda key, dtype, shape: torch.empty(shape, dtype=dtype, device="meta"))
    return {
        "ranks_that_saved": len(manifest.files),
        "bytes": sum(file.num_bytes for file in manifest.files),
        "parameters": len(manifest.parameters),
        "elements": sum(stored.numel for stored in manifest.parameters.values()),
        "dtypes": ", ".join(sorted({stored.dtype for stored in manifest.parameters.values()})) or "none",
        "buffers": len(manifest.buffers),
        "tied": len(manifest.aliases),
        "optimizer": training["optimizer"] or "unknown",
        "state": ", ".join(sorted({key for stored in manifest.parameters.values() for key in stored.state})) or "none",
        "groups": len(training["groups"]),
        "step": training["step"],
        "skipped_steps": training["skipped_steps"],
        "schedule": "no" if training["scheduler"] is None else "yes",
        "extra": "no" if manifest.extra is None else "yes",
    }


def _shapes(manifest: Manifest) -> dict[str, str]:
    shapes = {name: f"{stored.dtype} {list(stored.shape)}" for name, stored in manifest.parameters.items()}
    shapes |= {name: f"{buffer.dtype} {list(buffer.shape)}, a buffer" for name, buffer in manifest.buffers.items()}
    return shapes | {alias: f"is {name}" for alias, name in manifest.aliases.items()}
