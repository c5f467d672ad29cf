"""Tensors without memory: what all of them refuse, and what an operator does with its arguments, by its schema."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch


class Kind(Enum):
    """The kinds of operators, by what they do with their arguments."""

    VIEW = "its results are views of its argument"
    READ = "reads"
    WRITE = "writes to some arguments"
    REFUSED = "exchanges the memory of its argument, or its shape, or wants a clone"


class Operator(NamedTuple):
    """An operator's kind, and the arguments that it writes to."""

    kind: Kind
    written: tuple[tuple[str, int], ...] = ()  # names and positions of the arguments that it writes to


class WithoutMemory(torch.Tensor):
    """A tensor whose values lie elsewhere, or nowhere yet. It refuses code that takes its memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def no_memory(self, what: str, writes_it: bool = False) -> RuntimeError:
        """Returns the error for code that takes its memory: code that writes it to files, if `writes_it`."""
        raise NotImplementedError

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.numpy().__array__(*args, **options)

    def data_ptr(self) -> int:
        raise self.no_memory("take data_ptr() of")

    def storage(self) -> Any:
        raise self.no_memory("take storage() of", writes_it=True)

    def untyped_storage(self) -> Any:
        raise self.no_memory("take untyped_storage() of", writes_it=True)

    def is_shared(self) -> bool:
        return False

    def share_memory_(self) -> Any:
        raise self.no_memory("share the memory of")

    def __dlpack__(self, **options: Any) -> Any:
        raise self.no_memory("lend the memory of")


_known: dict[int, tuple[Any, Operator]] = {}  # by id, which is faster than by hash; operators in it are never freed
_EXCHANGES_MEMORY = {"set_", "resize_", "resize_as_", "swap_"}
_MAY_COPY = {"to"}  # `to` returns its argument or a copy; the copy is whole if a subclass calls it
_OF_TANGENTS = {"_make_dual", "_new_zeros_with_same_feature_meta"}  # a tangent is as large as all memory of its tensor
_WANTS_A_CLONE = {
    *("as_strided_copy", "as_strided_scatter"),  # take an offset from the first element of a storage; a chunk has many weights
    "_sparse_mm_reduce_impl",  # computes what its backward reads only if its argument requires a gradient
}


def wants_a_clone(func: Any) -> bool:
    """Returns whether an operator does with the memory of a chunk something else than with that of a parameter."""
    return func.overloadpacket.__name__ in _WANTS_A_CLONE


def is_in_place_view(func: Any) -> bool:
    """Returns whether an operator changes the shape of its argument, and not its elements."""
    return torch.Tag.inplace_view in func.tags and func.overloadpacket.__name__ not in (*_EXCHANGES_MEMORY, "detach_")


def operator_of(func: Any) -> Operator:
    """Returns the kind of an operator, and the arguments that it writes to."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = func, _by_schema(func)
    return known[1]


def _by_schema(func: Any) -> Operator:
    if func.overloadpacket.__name__ in (*_EXCHANGES_MEMORY, *_OF_TANGENTS, *_WANTS_A_CLONE) or is_in_place_view(func):
        return Operator(Kind.REFUSED)
    arguments, results = func._schema.arguments, func._schema.returns
    written = tuple(
        (argument.name, position)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if written:
        return Operator(Kind.WRITE, written)
    is_view = any(result.alias_info is not None for result in results) and func.overloadpacket.__name__ not in _MAY_COPY
    return Operator(Kind.VIEW if is_view else Kind.READ)
