"""Frozen groups of settings. Mistakes are reported as `Cannot X: Y. Do Z.`"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zero.config.registry import brief, did_you_mean


class ConfigModel(BaseModel):
    """A frozen group of settings. A mistake in it raises one ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            # pydantic's own report is kept out of the traceback: it says the same in more lines.
            raise ValueError("\n".join(_explain(type(self), problem) for problem in error.errors())) from None
        except TypeError as error:  # of Python, since a block within is called with its settings by name
            if "keywords must be strings" not in str(error):
                raise
            raise ValueError(
                f"Cannot make {type(self).__name__}: names of settings in a block are not strings. Give each as 'name': value."
            ) from None


def _explain(block: type[ConfigModel], problem: Any) -> str:
    """One pydantic problem: what cannot be used, why, and what to do."""
    place = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in block.model_fields)
    if problem["type"] == "value_error":
        words = str(problem["ctx"]["error"])
        return words if words.endswith((".", "?")) else words + "."
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        return (f"Cannot use {name!r}: {block.__name__} has no such setting. Use one of {', '.join(block.model_fields)}."
                f"{did_you_mean(name, block.model_fields)}")
    if problem["type"] == "missing":
        return f"Cannot make {block.__name__}: {place!r} is missing and has no default. Give {place}=."
    rule = problem["msg"].removeprefix("Input ")
    return f"Cannot use {block.__name__}.{place}={brief(problem['input'])}: it {rule}. Give a value that fits."
