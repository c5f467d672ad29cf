"""Reads a DeepSpeed configuration, file or dict, as DeepSpeed 0.19.8 means it, into a ZeroConfig.

Which keys count is in `zero/config/deepspeed/keys.py`. Without `gradient_clipping` gradients are clipped at 1.0, as DeepSpeed
0.19.8 clips them at every stage and in every precision, and the log line of each load says so. One default differs on purpose:
fp32 weights take a step whose gradients are not finite, as they do in plain torch. DeepSpeed does so at stage 0 too, but at
stages 1 and 2 it skips the step wherever it computes the norm (`compute_grad_norm`, its default). In 16 bits both skip, unless
`check_grad_overflow` of bf16 is false.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from zero.config.deepspeed.keys import (
    ALIASES,
    BLOCKS,
    CHOICES,
    HARMLESS,
    KNOWN,
    OF_STAGE_3,
    OFF,
    QUIET,
    REFUSED,
    SWITCHES,
    USED,
)
from zero.config.deepspeed.mapping import CLIP, Implied, Written, expert_ranks, meaning, tensor_ranks
from zero.config.registry import brief, did_you_mean
from zero.config.schema import ZeroConfig
from zero.errors import is_ours

# No documented key lies deeper than eight blocks. A dict that contains itself exceeds this limit, too.
_MAX_DEPTH = 32


class Reading(NamedTuple):
    """A configuration, and notices for the author of the file, one line each."""

    config: ZeroConfig
    notices: tuple[str, ...]


def read_deepspeed(source: str | os.PathLike[str] | Mapping[str, Any], implied: Implied | None = None) -> ZeroConfig:
    """Returns the configuration that a DeepSpeed file or dict asks for; one warning of the logger 'zero', on the launcher's
    first rank, names what has no effect, or one that the file does not show."""
    config, notices = translate(source, implied)
    if notices and os.environ.get("RANK", "0") == "0":  # otherwise each rank would warn
        first = "DeepSpeed settings that are ignored, mean something else here or take a default that changes results:"
        logging.getLogger("zero").warning("%s", "\n  ".join([first, *notices]))
    return config


def translate(source: str | os.PathLike[str] | Mapping[str, Any], implied: Implied | None = None) -> Reading:
    """Does what `read_deepspeed` does, but returns the notices and logs nothing. The caller's dict is only read."""
    tree = read_tree(source)
    sorted_out = _Sorting(_stage_of(tree))
    sorted_out.walk(tree, "", quiet=False)
    written = Written(sorted_out.used, implied or Implied())
    notices = [f"{path}: {why}" for path, why in sorted_out.harmless.items()]
    if "gradient_clipping" not in written:
        notices.append(f"gradient_clipping: not given, so clipped at {CLIP}, as by DeepSpeed 0.19.8; 0 clips nothing")
    config = meaning(written, sorted_out.problems)
    return Reading(config, (*notices, *written.notices))


def parallel_sizes(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[int, int]:
    """Returns over how many ranks layers and experts lie, which decides how many ranks have samples of their own. What is wrong
    with a file that says nothing of that is left to `read_deepspeed`."""
    sorted_out = _Sorting(None)
    sorted_out.walk(read_tree(source), "", quiet=False)
    written = Written(sorted_out.used, Implied())
    sizes = tensor_ranks(written), expert_ranks(written)
    if max(sizes) > 1:
        written.problems += sorted_out.problems
        written.check()
    return sizes


def read_tree(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Reads the text as plain blocks and values, without a look at their meaning. The caller's dict is only read."""
    tree = _plain(source if isinstance(source, Mapping) else _parsed(source), "", 0)
    if not isinstance(tree, dict):
        raise ValueError(f"Cannot read a DeepSpeed configuration: {brief(tree)} is not a block of keys. Write {{...}}.")
    return tree


def _parsed(source: object) -> Any:
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"Cannot read a DeepSpeed configuration from {brief(source)}, a {type(source).__name__}. "
                        "Give a dict or the path of a JSON file.")
    name = f"Cannot read the DeepSpeed configuration {brief(os.fspath(source))}:"
    try:
        with open(source, encoding="utf-8-sig") as file:
            text = file.read()
    except FileNotFoundError as error:
        encoded = _from_base64(source)
        if encoded is None:
            raise ValueError(f"{name} there is no such file. Give the path of a JSON file, or a dict.") from error
        text = encoded
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} byte {error.start} is not UTF-8. Save the file as UTF-8.") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} it cannot be opened ({why}). Give the path of a JSON file, or a dict.") from error
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        return _read_hjson(name, os.fsdecode(source).endswith(".hjson"), text, error)
    except RecursionError:
        raise _endless(name) from None


def _read_hjson(name: str, is_named_so: bool, text: str, not_json: json.JSONDecodeError) -> Any:
    """Reads what is no JSON by the package that DeepSpeed reads every file with."""
    where = f"line {not_json.lineno}, column {not_json.colno}"
    try:
        import hjson
    except ImportError:
        if is_named_so:
            raise ValueError(f"{name} it is Hjson, which is read by a package that is not installed. "
                             "Install zero-accelerators[hjson].") from None
        raise ValueError(f"{name} {where} is not JSON: {not_json.msg}. Repair it there. If it is meant to be Hjson, with "
                         "comments for instance, install zero-accelerators[hjson].") from not_json
    if not text.strip():  # hjson reads an empty text as a file without a setting
        raise ValueError(f"{name} it is empty. Write {{}} for a file without a setting.")
    try:
        return hjson.loads(text, object_pairs_hook=_without_duplicates, parse_int=_whole_number)
    except RecursionError:
        raise _endless(name) from None
    # Hjson raises the latter two if it looks behind the end, and for 1e999.
    except (ValueError, IndexError, OverflowError) as error:
        if is_ours(str(error)):  # about a key or a number
            raise
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, hjson.HjsonDecodeError) else "it breaks off"
        said = f"{place}: {getattr(error, 'msg', error)}"
        raise ValueError(f"{name} it is neither JSON ({where}: {not_json.msg}) nor Hjson ({said}). Repair it there.") from error


def _endless(name: str) -> ValueError:
    return ValueError(f"{name} its blocks are nested without end. Flatten it.")


def _from_base64(source: str | os.PathLike[str]) -> str | None:
    """Decodes a configuration in base64, as launchers pass it on; None where the text is none."""
    try:
        text = base64.b64decode(os.fsencode(source), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"Cannot use the key {brief(twice)}: it is written {keys.count(twice)} times in one block. "
                         "Delete all but one.")
    return block


def _whole_number(text: str) -> int:
    if len(text) > 400:
        raise ValueError(f"Cannot read a number of {len(text)} digits: it is too large. Write a smaller one.")
    return int(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"Cannot read the number {text}: JSON has none of that name. Write a finite number.")


def _plain(value: Any, path: str, depth: int) -> Any:
    """Returns a copy made of dicts, lists and plain values only, so that nothing of the caller's is kept or can be changed."""
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"Cannot use {path[:60]}: it lies more than {_MAX_DEPTH} blocks deep, and no known key does. Flatten it."
        )
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"Cannot use {path}: its number is too large. Write a smaller one.") from None
        # Callers that build the dict in Python write infinity for "never print"; no other key can mean it.
        if not math.isfinite(value) and not (path == "steps_per_print" and value > 0):
            raise ValueError(f"Cannot use {path}: {brief(value)}: it is not finite. Write a finite number.")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                place = path or "the configuration"
                raise TypeError(
                    f"Cannot use the key {brief(key)} in {place}: it is a {type(key).__name__}. Write keys as strings."
                )
        return {key: _plain(item, f"{path}.{key}" if path else key, depth + 1) for key, item in value.items()}
    raise TypeError(f"Cannot use {path or 'the configuration'} {brief(value)}: it is a {type(value).__name__}. "
                    "Give true, false, a number, a string, a list or a block.")


class _Sorting:
    """Sorts what was written into used and harmless, by path; of a refused or unknown key it notes why."""

    def __init__(self, stage: object) -> None:
        self._stage = stage
        self.problems: list[str] = []
        self.used: dict[str, Any] = {}
        self.harmless: dict[str, str] = {}

    def walk(self, block: dict[str, Any], prefix: str, quiet: bool) -> None:
        for old, new in ALIASES.items():
            if old in block and new in block and not prefix:
                self.problems.append(
                    f"{old!r} and {new!r} were both given, but they are two spellings of one block. Keep {new!r}."
                )
        for key, value in block.items():
            path = ALIASES.get(prefix + key, prefix + key)
            if path == "zero_optimization" and isinstance(value, bool):
                value = {"stage": int(value)}
            if path in BLOCKS and isinstance(value, dict):
                self.walk(value, path + ".", quiet or _asks_for_nothing(path, value))
            elif path in BLOCKS:
                if value is not None:
                    self.problems.append(f"Cannot use {path} {brief(value)}: it is not a block of keys. Write {{...}}.")
            elif path not in KNOWN:
                self.problems.append(_unknown(path))
            elif path in OF_STAGE_3 and self._stage in (0, 1, 2):
                if value not in (None, False, "none", *QUIET.get(path, ())):
                    self.harmless[path] = OF_STAGE_3[path]
            elif path in USED:
                self.used[path] = value
            elif quiet or value is None or value == {}:
                continue
            elif path in HARMLESS:
                if path in CHOICES and str(value).lower() not in CHOICES[path]:
                    self.problems.append(
                        f"Cannot use {path} {brief(value)}: it has to be one of {', '.join(CHOICES[path])}. Write one of them."
                    )
                elif not any(type(value) is type(off) and value == off for off in QUIET.get(path, ())):
                    self.harmless[path] = HARMLESS[path]
            elif not _asks_for_nothing(path, value):
                self.problems.append(f"Cannot use {path} {brief(value)}: {REFUSED[path]}. Take it out.")


def _stage_of(tree: Mapping[str, Any]) -> object:
    block = tree.get("zero_optimization")
    return block.get("stage", 0) if isinstance(block, dict) else int(block) if isinstance(block, bool) else 0


def _asks_for_nothing(path: str, value: Any) -> bool:
    if isinstance(value, dict):
        if path in SWITCHES:
            switch, off = SWITCHES[path]
            return value.get(switch) is None or value[switch] in off
        return not value
    return value is None or value is False or (not isinstance(value, bool) and value in OFF.get(path, ()))


def _unknown(path: str) -> str:
    block, _, name = path.rpartition(".")
    siblings = {known.removeprefix(block + "." if block else "").split(".")[0] for known in KNOWN if known.startswith(block)}
    siblings |= set(ALIASES) if not block else set()
    elsewhere = [known for known in sorted(KNOWN) if known.endswith("." + name)]
    hint = did_you_mean(name, siblings) or (f" Did you mean {elsewhere[0]!r}?" if elsewhere else " Take it out, or correct it.")
    who = block if block == "zero_accelerators" else "DeepSpeed 0.19.8"
    return f"Cannot use {path[:120]!r}: {who} has no such key.{hint}"
