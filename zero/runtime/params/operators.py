"""What an operator of torch does with its arguments, by its schema."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, NamedTuple


class Kind(Enum):
    """What an operator does with its arguments."""

    VIEW = "its results are views of its argument"
    READ = "reads"
    WRITE = "writes to some arguments"
    REFUSED = "exchanges the memory of its argument"


class Operator(NamedTuple):
    """An operator's kind, and the arguments that it writes to."""

    kind: Kind
    written: tuple[tuple[str, int], ...] = ()  # arguments that it writes to: name and position


_EXCHANGES_MEMORY = {"set_", "resize_", "resize_as_", "swap_"}


@cache
def operator_of(func: Any) -> Operator:
    """The kind of an operator, and what it writes to."""
    if func.overloadpacket.__name__ in _EXCHANGES_MEMORY:
        return Operator(Kind.REFUSED)
    arguments, results = func._schema.arguments, func._schema.returns
    written = tuple(
        (argument.name, position)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if written:
        return Operator(Kind.WRITE, written)
    is_view = any(result.alias_info is not None for result in results)
    return Operator(Kind.VIEW if is_view else Kind.READ)
