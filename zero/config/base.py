"""Frozen groups of settings. Mistakes are reported as `Cannot X: Y. Do Z.`"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from zero.config.registry import brief, did_you_mean


class ConfigModel(BaseModel):
    """A frozen group of settings. A mistake in it raises one ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    prefix: ClassVar[str] = ""  # of the names of its settings in errors
    no_such_setting: ClassVar[str] = "there is no such setting."
    meaning_of_default: ClassVar[Mapping[str, str]] = {}  # of some settings, as the end of a sentence

    @classmethod
    def all_settings(cls) -> str:
        """Returns the sentence that says which settings there are."""
        return f"Use one of {', '.join(cls.model_fields)}."

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            # pydantic's own report is kept out of the traceback: it says the same in more lines.
            raise ValueError("\n".join(_explain(type(self), error.errors()))) from None
        except TypeError as error:  # of Python, since a block within is called with its settings by name
            if "keywords must be strings" not in str(error):
                raise
            raise ValueError(
                f"Cannot make {type(self).__name__}: names of settings in a block are not strings. Give each as 'name': value."
            ) from None


def _explain(block: type[ConfigModel], problems: Sequence[Any]) -> list[str]:
    """Returns what cannot be used, why, and what to do; of what may be of several kinds the problem of each in one sentence."""
    by_place: dict[str, list[Any]] = {}
    for problem in problems:
        place = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in block.model_fields)
        by_place.setdefault(place or str(problem["loc"]), []).append(problem)
    return [_sentence(block, place, together) for place, together in by_place.items()]


def _sentence(block: type[ConfigModel], place: str, problems: Sequence[Any]) -> str:
    first = problems[0]
    if first["type"] == "value_error":
        words = str(first["ctx"]["error"])
        return words if words.endswith((".", "?")) else words + "."
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        near = did_you_mean(name, block.model_fields)
        return f"Cannot use {block.prefix}{name}: {block.no_such_setting}{near} {block.all_settings()}"
    if first["type"] == "missing":
        return f"Cannot make {block.__name__}: {place!r} is missing and has no default. Give {place}=."
    bounds = [problem for problem in problems if problem["type"] in _BOUNDS]
    if bounds:
        (limit,) = (value for name, value in bounds[0]["ctx"].items() if name in ("gt", "ge", "lt", "le"))
        why = f"it must be {_BOUNDS[bounds[0]['type']]} {limit:g}"
    else:
        why = f"it takes {_either(_kind(place, problem) for problem in problems)}"
    choices = [choice for problem in problems for choice in re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))]
    remedy = did_you_mean(first["input"], choices) if isinstance(first["input"], str) else ""
    return f"Cannot use {block.prefix}{place}={brief(first['input'])}: {why}.{remedy or ' ' + _remedy(block, place)}"


_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "True or False", "string": "a text", "finite": "a finite number",
    "tuple": "a list of texts",
}  # fmt: skip


def _kind(place: str, problem: Any) -> str:
    """Returns what a value would have been to be of one kind."""
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    kind = _KINDS.get(problem["type"].partition("_")[0])
    if kind is None:
        return str(problem["msg"]).removeprefix("Input should be ")
    return f"{kind} of bytes, such as '16MiB'," if place.endswith("_bytes") and kind == "a whole number" else kind


def _either(kinds: Iterable[str]) -> str:
    *others, last = dict.fromkeys(part for kind in kinds for part in re.split(" or |, (?=')", kind))
    return f"{', '.join(others)} or {last}".removesuffix(",") if others else last.removesuffix(",")


def _remedy(block: type[ConfigModel], place: str) -> str:
    field = block.model_fields.get(place)
    if field is None or field.is_required():
        return "Give a value that fits."
    return f"Use {block.prefix}{place}={field.default!r}{block.meaning_of_default.get(place, '')}."
