"""What is written in a DeepSpeed configuration, checked key by key, and what the call implies where that is "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from zero.config.deepspeed.keys import AUTO
from zero.config.registry import brief, did_you_mean, real, whole
from zero.config.sizes import as_bytes

T = TypeVar("T")

# What stands for a value that nothing implies, so that the rest of its block can be checked too.
_STAND_INS: dict[str, Any] = {"betas": (0.9, 0.999)}


class ConfigProblems(ValueError):
    """Everything that is wrong with one configuration. `unanswered` are the keys that are "auto" where nothing in the call
    implies a value, each with the name of the argument that would."""

    def __init__(self, messages: list[str], unanswered: Mapping[str, str | None]) -> None:
        self.unanswered = dict(unanswered)
        problems = [*messages, *([_about_auto(self.unanswered)] if unanswered else [])]
        if len(problems) > 1:
            numbered = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
            problems = [f"Cannot use the DeepSpeed configuration: it has {len(problems)} problems.{numbered}"]
        super().__init__(problems[0])


def _about_auto(unanswered: Mapping[str, str | None]) -> str:
    named = [path if name is None else f"{path} ({name})" for path, name in unanswered.items()]
    if len(named) == 1:
        [(path, name)] = unanswered.items()
        answer = "" if name is None else f" ({name})"
        return f'{path} is "auto", but nothing in the call implies a value for it{answer}. Write the value.'
    return f'These keys are "auto", but nothing in the call implies values for them: {", ".join(named)}. Write the values.'


class _UnansweredError(ValueError):
    """A key is "auto", and nothing in the call implies a value for it."""


@dataclass(frozen=True)
class Implied:
    """What the rest of the call implies for keys that are "auto", and of an Adam that was passed. None: it implies nothing."""

    world_size: int = 1
    global_samples: int | None = None
    micro_samples: int | None = None
    accumulation: int | None = None
    dtype: str | None = None
    clip: float | None = None
    bucket_numel: int | None = 4 * 2**20
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    warmup_min_lr: float | None = 0.0
    warmup_steps: int | None = None
    total_steps: int | None = None
    adam_moments: str | None = None  # the dtype of its moments


class Written:
    """The used keys that are written, by path, each checked when it is read; null counts as not written. Where one is wrong the
    problem is noted and its default is used, so that all problems are found."""

    def __init__(self, values: Mapping[str, Any], implied: Implied) -> None:
        self._values = {path: value for path, value in values.items() if value is not None}
        self.implied = implied
        self.problems: list[str] = []
        self.notices: list[str] = []  # for the author of the file
        self.unanswered: dict[str, str | None] = {}

    def tried(self, read: Callable[[Written], T], default: T) -> T:
        """Returns what `read` makes of this. Where that raises, the problem is noted and the default is returned."""
        try:
            return read(self)
        except _UnansweredError:
            pass
        except ValueError as error:
            for problem in str(error).split("\n"):
                self.note(problem)
        return default

    def note(self, problem: str) -> None:
        """Notes a problem."""
        if problem not in self.problems:
            self.problems.append(problem)

    def tell(self, path: str, notice: str) -> None:
        """Tells the author of the file how a key is taken."""
        self.notices.append(f"{path}: {notice}")

    def check(self) -> None:
        """Raises with all problems that were noted."""
        if self.problems or self.unanswered:
            raise ConfigProblems(self.problems, self.unanswered)

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def value(self, path: str) -> Any:
        """What was written, or what the call implies for "auto"."""
        return self.resolved(path, self._values[path])

    def resolved(self, path: str, value: Any) -> Any:
        if value != "auto":
            return value
        answer = getattr(self.implied, AUTO[path]) if path in AUTO else None
        if answer is None:
            self.note_unanswered(path)
            raise _UnansweredError(path)
        return answer

    def note_unanswered(self, path: str) -> None:
        """This one is "auto", and a value is needed that nothing implies."""
        self.unanswered[path] = AUTO.get(path)

    def answered(self, path: str) -> bool:
        """Whether there is a value: one is written, or it is "auto" and the call implies one."""
        return path in self and (self._values[path] != "auto" or getattr(self.implied, AUTO[path], None) is not None)

    def _checked(self, path: str, check: Callable[[Any], T], default: T) -> T:
        return self.tried(lambda _: check(self.value(path)), default) if path in self else default

    def flag(self, path: str, default: bool = False) -> bool:
        return self._checked(path, partial(flag, path), default)

    def mode(self, path: str, dtype: str) -> bool:
        """Whether a precision block is on; "auto" is answered by the dtype that the call implies."""
        if path in self and self._values[path] == "auto":
            return bool(self.value(path) == dtype)
        return self.flag(path)

    def whole(self, path: str, default: int, least: int, most: int | None = None) -> int:
        def check(value: Any) -> int:
            number = whole(path, value)
            if number < least or (most is not None and number > most):
                limits = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"Cannot use {path} {brief(number)}: it has to be {limits}. Write another whole number.")
            return number

        return self._checked(path, check, default)

    def bytes_or(self, path: str, words: tuple[str, ...]) -> int | str:
        """A number of bytes or one of these words, the first where nothing was written."""
        given = as_bytes(self._values.get(path, words[0]))
        if isinstance(given, str) and given in words:
            return given
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            self.note(f"Cannot use {path}={brief(given)}: that is no size. Write bytes, 4GiB or {' or '.join(words)}.")
            return words[0]
        return given

    def size(self, path: str) -> int | None:
        return self.whole(path, 1, least=1) if path in self else None

    def real(self, path: str, default: float, *, zero_too: bool = True) -> float:
        def check(value: Any) -> float:
            number = real(path, value)
            if number < 0 or (number == 0 and not zero_too):
                raise ValueError(f"Cannot use {path} {brief(number)}: it has to be {'at least' if zero_too else 'above'} 0. "
                                 "Write a larger number.")
            return number

        return self._checked(path, check, default)

    def choice(self, path: str, choices: Mapping[str, T], default: T) -> T:
        def check(value: Any) -> T:
            if not isinstance(value, str) or value.lower() not in choices:
                raise ValueError(f"Cannot use {path} {brief(value)}: it has to be one of {', '.join(choices)}."
                                 f"{did_you_mean(value, choices) or ' Write one of them.'}")
            return choices[value.lower()]

        return self._checked(path, check, default)

    def params(self, path: str) -> dict[str, Any]:
        block = self._values.get(path, {})
        if not isinstance(block, dict):
            raise ValueError(f"Cannot use {path} {brief(block)}: it has to be a block of settings. Write {{...}}.")
        return {name: self._param(path, name, value) for name, value in block.items()}

    def _param(self, path: str, name: str, value: Any) -> Any:
        try:
            return self.resolved(f"{path}.{name}", value)
        except _UnansweredError:
            return _STAND_INS.get(name, 1)

    def names(self, path: str) -> tuple[str, ...] | None:
        """A list of texts; None where nothing was written, or "auto"."""
        value = self._values.get(path)
        if value is None or value == "auto":
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"Cannot use {path} {brief(value)}: it has to be a list of names. Write [...] or \"auto\".")
        return tuple(value)


def flag(name: str, value: object) -> bool:
    """True or false, which may be written as 1 or 0."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"Cannot use {name} {brief(value)}: it has to be true or false. Write one of these.")
