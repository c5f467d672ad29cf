"""The command `config`: what a DeepSpeed configuration means here.

    python -m zero config ds_config.json
    python -m zero config ds_config.json --implied lr=3e-4    # with what the rest of a call would say for "auto"
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable
from typing import Any

from accelerators.output import complain
from zero.tools.commands import DONE, NO, Subparsers, add_command, tell


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
