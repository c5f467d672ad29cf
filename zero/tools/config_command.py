"""`python -m zero config file.json`: the effective configuration of a DeepSpeed file, or why it is refused."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("config", help="print the effective configuration of a DeepSpeed JSON file",
                                   description="Reads a DeepSpeed JSON file; prints what it means here, or why it is refused.")
    parser.add_argument("file", help="a DeepSpeed JSON file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--world-size", type=int, default=1, help="the number of data-parallel ranks (default: 1)")
    parser.add_argument("--implied", action="append", default=[], metavar="NAME=VALUE",
                        help='what the call would imply for "auto", for example lr=3e-4 or dtype=bfloat16; may be repeated')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: printed. 1: the file is refused, and the reason is on stderr."""
    # Imported here: pydantic is for those who ask for a configuration, not for every subcommand.
    from zero.deepspeed_json import translate

    try:
        config, notices = translate(args.file, _implied(args))
    except (TypeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps({**config.as_dict(), "digest": config.digest, "notices": notices}, indent=2) + "\n")
        return 0
    sys.stdout.write(config.text())
    if notices:
        sys.stdout.write("\nwithout effect:\n" + "".join(f"  {notice}\n" for notice in notices))
    return 0


def _implied(args: argparse.Namespace) -> Any:
    from dataclasses import fields

    from zero.deepspeed_meaning import Implied
    from zero.recipes import did_you_mean

    known = {field.name for field in fields(Implied)}
    values: dict[str, Any] = {"world_size": args.world_size}
    for given in args.implied:
        name, equals, text = given.partition("=")
        if not equals or name not in known:
            raise ValueError(f"--implied {given!r} was given, but it takes NAME=VALUE with one of {', '.join(sorted(known))}."
                             f"{did_you_mean(name, known) or ' Write it that way.'}")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return Implied(**values)
