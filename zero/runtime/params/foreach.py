"""Runs operators on lists for one tensor after the other, so that not all have to be whole at one time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def num_of_many(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the length of the lists that an operator on lists is given; 1 for others, and if lists differ, which torch
    refuses."""
    if not func.overloadpacket.__name__.startswith("_foreach_"):
        return 1
    lengths = {len(value) for value in (*args, *kwargs.values()) if _has_many(value)}
    return lengths.pop() if len(lengths) == 1 else 1


def one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], many: int) -> list[Any] | None:
    """Returns the results of an operator on lists that is called for one of so many tensors at a time."""
    results: list[Any] = []
    for number in range(many):
        keywords = {name: _part(value, number) for name, value in kwargs.items()}
        results += func(*(_part(value, number) for value in args), **keywords) or ()
    return results or None


def _part(value: Any, number: int) -> Any:
    return value[number : number + 1] if _has_many(value) else value


def _has_many(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1)  # a number for each
