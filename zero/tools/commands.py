"""The subcommands of `python -m zero` but for `plan` and `verify`, and what all of them share: help, tables and exit statuses.

    python -m zero inspect checkpoints                       # what a checkpoint holds, and whether its files are whole
    python -m zero export checkpoints weights.safetensors    # its weights in files that other libraries read
    python -m zero import ds_checkpoints checkpoints         # a checkpoint made of what DeepSpeed or torch saved
    python -m zero config ds_config.json                     # what a DeepSpeed configuration means here

Each command is two functions: `add_NAME(subparsers)` says what may be typed, and sets `run` to `_NAME(args)`, which does it and
returns the exit status. zero/__main__.py lists them, and calls `run` by `status_of`. `_import` is the plainest. `plan` and
`verify`, in zero/tools/plan.py and verify_script.py, are made alike. Torch is imported by a command that needs it when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerators.memory import parse_bytes
from accelerators.output import NotWritten, complain, write
from zero.errors import ZeroError, not_written

if TYPE_CHECKING:
    from zero.checkpoint.manifest import Manifest

DONE, NO, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130
_STATUSES = "Exit status: 0 {done}, 1 {no}, 2 it could not be done or found out, and the reason is on stderr."

Subparsers = Any  # argparse keeps the type of its own result private

_DTYPES = ("float32", "bfloat16", "float16")


# what commands share --------------------------------------------------------------------------------------------------


def add_command(
    subparsers: Subparsers,
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
    done: str = "done",
    no: str = "is not used",
) -> argparse.ArgumentParser:
    """Adds a subcommand with `--json`; `done` and `no` describe exit status 0 and 1."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description, epilog=_STATUSES.format(done=done, no=no),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)
    return parser


def status_of(act: Callable[[], int]) -> int:
    """Runs a command and returns its exit status. If it fails, says why on stderr and returns the status for that."""
    try:
        return int(act())
    except (BrokenPipeError, NotWritten):
        raise
    except (ValueError, TypeError, OSError, MemoryError, ZeroError) as error:
        complain(_words_of(error))
        return IMPOSSIBLE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # only one of several ranks reports it
            complain("Interrupted at once: what was begun is not finished.")
        return INTERRUPTED


def _words_of(error: Exception) -> str:
    """Returns the text of an error. The system's own has no remedy, and may not say where it was."""
    if not isinstance(error, OSError):
        return str(error)
    return str(not_written(error.filename or "a file", error)).replace("Cannot write to", "Cannot use", 1)


def tell(as_json: bool, answer: Mapping[str, Any], text: str) -> None:
    """Prints the answer, as JSON for programs or as text for people."""
    write((json.dumps(answer, indent=2) if as_json else text.rstrip("\n")) + "\n")


@contextlib.contextmanager
def code_of(words: str) -> Iterator[None]:
    """Tells what fails in a block, which runs a script or function of the user's, as a mistake in that, with its place."""
    from accelerators.selection import words_of  # importing this may load torch

    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = words_of(error)  # the error may fail to make its own text
        if isinstance(error, (ValueError, TypeError, ZeroError)) and said.partition(": ")[2].startswith("Cannot "):
            raise
        places = traceback.extract_tb(error.__traceback__)
        where = f" ({places[-1].filename}, line {places[-1].lineno})" if places[1:] else ""
        ended = isinstance(error, SystemExit)
        how = "it ends the process" if ended else f"it fails with {said}"
        raise ValueError(f"Cannot use {words}: {how}{where}. Repair it.") from error


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Formats columns as wide as their content; the first ones, which are names, to the left, numbers to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if index < left else cell.rjust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def pairs(figures: Mapping[str, Any]) -> str:
    """Formats one figure a line, under its name."""
    return table(("", ""), ((name.replace("_", " "), str(value)) for name, value in figures.items()), left=2).lstrip("\n")


# inspect --------------------------------------------------------------------------------------------------------------


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


# export ---------------------------------------------------------------------------------------------------------------


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


# import ---------------------------------------------------------------------------------------------------------------


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


# config ---------------------------------------------------------------------------------------------------------------


def add_config(subparsers: Subparsers) -> None:
    """Adds `python -m zero config`."""
    parser = add_command(
        subparsers, "config", "print the effective configuration of a DeepSpeed JSON file, or the defaults",
        "Reads a DeepSpeed JSON file; prints what it means here, or why it is refused.\n"
        "Without one, prints the defaults of zero.shard(..., stage=2).", _config,
        "accepted", "refused",
    )  # fmt: skip
    parser.add_argument("file", nargs="?", help="a DeepSpeed JSON file (default: none, the defaults of zero.shard)")
    parser.add_argument("--world-size", type=int, default=1, help="the number of data-parallel ranks (default: 1)")
    parser.add_argument("--implied", action="append", default=[], metavar="NAME=VALUE",
                        help='what the call would imply for "auto", for example lr=3e-4 or dtype=bfloat16; may be repeated')


def _config(args: argparse.Namespace) -> int:
    """Shows the effective configuration, or why the file is refused and what may be typed instead."""
    from zero.config.deepspeed.mapping import ConfigProblems
    from zero.config.deepspeed.reader import translate
    from zero.config.schema import ZeroConfig

    implied = _implied(args)
    if args.file is None and (args.implied or args.world_size != 1):
        raise ValueError("Cannot use --implied or --world-size: there is no file that they could fill in. Give one.")
    try:
        config, notices = (ZeroConfig(stage=2), ()) if args.file is None else translate(args.file, implied)
    except (TypeError, ValueError) as error:
        if isinstance(error.__cause__, OSError):  # the file could not be read, so there is nothing to refuse
            raise
        complain(error)
        if isinstance(error, ConfigProblems):
            _suggest(args, error.unanswered.values())
        return NO
    text = config.text()
    if notices:
        text += "\nwithout effect:\n" + "".join(f"  {notice}\n" for notice in notices)
    tell(args.json, {**config.as_dict(), "digest": config.digest, "notices": notices}, text)
    return DONE


def _suggest(args: argparse.Namespace, names: Iterable[str | None]) -> None:
    """Prints the line to type for keys that are "auto"."""
    answers = [name for name in dict.fromkeys(names) if name is not None]
    if answers:
        given = [f"--world-size {args.world_size}"] if args.world_size != 1 else []
        given += [f"--implied {shlex.quote(answer)}" for answer in args.implied]
        given += [f"--implied {name}=..." for name in answers]
        complain(f"To see it with values for these: python -m zero config {shlex.quote(args.file)} {' '.join(given)}")


def _implied(args: argparse.Namespace) -> Any:
    """Reads each `--implied NAME=VALUE`: what the rest of a call would say for keys that are "auto"."""
    from dataclasses import fields

    from zero.config.deepspeed.mapping import Implied
    from zero.config.registry import did_you_mean

    known = {field.name for field in fields(Implied)} - {"adam_moments"}
    values: dict[str, Any] = {"world_size": args.world_size}
    for given in args.implied:
        name, equals, text = given.partition("=")
        if not equals or name not in known:
            raise ValueError(f"Cannot use --implied {given!r}: it takes NAME=VALUE with one of {', '.join(sorted(known))}."
                             f"{did_you_mean(name, known) or ' Write it that way.'}")
        try:
            values[name] = tuple(json.loads(f"[{text.strip('[]')}]")) if name == "betas" else json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
        numbers = values[name] if name == "betas" else [values[name]]
        if name == "dtype" and text not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"Cannot use --implied {given!r}: it is not a dtype of weights. Use float32, float16 or bfloat16.")
        if name != "dtype" and any(type(number) not in (int, float) for number in numbers):
            raise ValueError(f"Cannot use --implied {given!r}: it takes numbers. Write it like {name}=1.")
    return Implied(**values)
