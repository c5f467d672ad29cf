"""The commands on files of checkpoints: `inspect`, `export` and `import`.

    python -m zero inspect checkpoints                       # what a checkpoint holds, and whether its files are whole
    python -m zero export checkpoints weights.safetensors    # its weights in files that other libraries read
    python -m zero import ds_checkpoints checkpoints         # a checkpoint made of what DeepSpeed or torch saved
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerators.memory import parse_bytes
from accelerators.output import complain
from zero.tools.commands import DONE, NO, Subparsers, add_command, pairs, table, tell

if TYPE_CHECKING:
    from zero.checkpoint.manifest import Manifest

_DTYPES = ("float32", "bfloat16", "float16")


def add_inspect(subparsers: Subparsers) -> None:
    """Adds `python -m zero inspect`."""
    parser = add_command(
        subparsers, "inspect", "show what a checkpoint holds and check its files", "Needs no ranks and no model.", _inspect,
        "whole", "damaged",
    )  # fmt: skip
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--parameters", action="store_true", help="list every parameter and buffer")
    parser.add_argument("--no-check", action="store_true", help="do not read the files to check their checksums")


def _inspect(args: argparse.Namespace) -> int:
    """Shows what the manifest says, and which files do not have the checksum that it says."""
    from zero.checkpoint.reader import CheckpointReader
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
    """Returns what a checkpoint holds, in numbers, by name."""
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
    """Returns dtype and shape of each parameter and buffer, in words, by name."""
    shapes = {name: f"{stored.dtype} {list(stored.shape)}" for name, stored in manifest.parameters.items()}
    shapes |= {name: f"{buffer.dtype} {list(buffer.shape)}, a buffer" for name, buffer in manifest.buffers.items()}
    return shapes | {alias: f"is {name}" for alias, name in manifest.aliases.items()}


def add_export(subparsers: Subparsers) -> None:
    """Adds `python -m zero export`."""
    parser = add_command(
        subparsers, "export", "write a checkpoint's weights to safetensors files", "Needs no ranks and no model.", _export,
        "written",
    )  # fmt: skip
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("out", help="a file to write; with --shard-size a folder")
    parser.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors", help="dcp: a folder for FSDP2")
    parser.add_argument("--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--shard-size", metavar="BYTES", help="write files of about this size, such as 5G, and an index")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating weights (default: as they were trained)")
    parser.add_argument("--optimizer", metavar="FILE", help="also write a state dict for a plain torch optimizer")


def _export(args: argparse.Namespace) -> int:
    import torch

    from zero.checkpoint.export import export

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    shard_bytes = None if args.shard_size is None else parse_bytes(args.shard_size)
    if shard_bytes == 0:
        raise ValueError("Cannot use --shard-size 0: a file has a byte or more. Try 5GB.")
    options = {"shard_bytes": shard_bytes, "dtype": dtype, "optimizer": args.optimizer, "format": args.format}
    made = export(args.directory, args.out, args.tag, **options)
    tell(args.json, {"written": [str(path) for path in made]}, "\n".join(map(str, made)))
    return DONE


def add_import(subparsers: Subparsers) -> None:
    """Adds `python -m zero import`."""
    parser = add_command(
        subparsers, "import", "make a checkpoint of what DeepSpeed or torch saved", "Runs no code of what it reads.",
        _import, "written",
    )  # fmt: skip
    parser.add_argument("source", help="of DeepSpeed's ZeRO, of torch.distributed.checkpoint, or a model's state dict")
    parser.add_argument("out", help="the directory to write a checkpoint into")
    parser.add_argument("--tag", help="which checkpoint of DeepSpeed's (default: the latest)")
    parser.add_argument("--optimizer", metavar="FILE", help="the file of the optimizer's state, if it has one of its own")
    help_text = "names in a model's state dict that are no parameters, such as '*.mask'; may be given several times"
    parser.add_argument("--buffer", metavar="PATTERN", action="append", default=[], help=help_text)


def _import(args: argparse.Namespace) -> int:
    from zero.checkpoint.importers import import_checkpoint

    made = import_checkpoint(args.source, args.out, args.tag, optimizer=args.optimizer, buffers=args.buffer)
    tell(args.json, {"written": str(made)}, str(made))
    return DONE
