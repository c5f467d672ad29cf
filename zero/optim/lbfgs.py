"""What torch's LBFGS remembers, by parameter.

[Note: LBFGS in shares]
LBFGS takes all parameters for one vector, and keeps others as long as that with its first parameter. Between steps each of
these is cut by parameter here, and what belongs to one goes where its state goes with any other optimizer: into shares, files
and other homes. A step is given the vectors that this rank has parts of. It treats their elements by themselves, but for sums
of products and for the largest element: a `SharedVector` takes these over all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_VECTORS = ("d", "prev_flat_grad")
_HISTORIES = ("old_dirs", "old_stps")  # lists of vectors
_SCRATCH = "al"

OverRanks = Callable[[float], Sequence[float]]  # what each rank has, from what this one has


class SharedVector(torch.Tensor):
    """This rank's part of a vector."""

    over_ranks: OverRanks

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OVER_ALL:
                result = func(*args, **(kwargs or {}))
                return result.as_subclass(cls) if type(result) is torch.Tensor and result.dim() else result
            local = func(*args) if args[0].numel() else torch.zeros(())
            parts = torch.tensor(cls.over_ranks(local.item()), dtype=torch.float64, device="cpu")
            return _OVER_ALL[func](parts).to(args[0].dtype)


_OVER_ALL: dict[Any, Any] = {torch.Tensor.dot: torch.sum, torch.Tensor.sum: torch.sum, torch.Tensor.max: torch.max}


def cut(state: MutableMapping[Any, Any], keys: Sequence[Any], shapes: Sequence[torch.Size]) -> None:
    """Cuts the state of the first key, where it has vectors as torch has them, into that of each."""
    if not any(name in state.get(keys[0], ()) for name in _HISTORIES):
        return
    whole = state.pop(keys[0])
    lists = {f"{name}.{index}": each for name in _HISTORIES for index, each in enumerate(whole.get(name) or ())}
    vectors = {**{name: whole[name] for name in _VECTORS if whole.get(name) is not None}, **lists}
    numbers = {name: _number(value) for name, value in whole.items() if name not in (*_VECTORS, *_HISTORIES, _SCRATCH)}
    numels = [shape.numel() for shape in shapes]
    pieces = {name: vector.as_subclass(torch.Tensor).split(numels) for name, vector in vectors.items()}
    for index, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        state[key] = {**numbers, **{name: piece[index].view(shape) for name, piece in pieces.items()}}


@contextlib.contextmanager
def in_one(
    optimizer: Any, params: Sequence[torch.Tensor], outline: Mapping[str, Any], over_ranks: OverRanks | None
) -> Iterator[None]:
    """LBFGS steps these parameters, with state that is one for all of them and is cut at the end. `over_ranks`: where each rank
    has parts."""
    kind: type[torch.Tensor] = torch.Tensor
    if over_ranks is not None:
        kind = type("SharedVector", (SharedVector,), {"over_ranks": staticmethod(over_ranks)})
    whole = _put_together(optimizer.state, params, outline, kind)
    gather, attributes = optimizer._gather_flat_grad, vars(optimizer)
    before = {name: attributes[name] for name in ("_params", "_numel_cache", "_gather_flat_grad") if name in attributes}
    optimizer._params, optimizer._numel_cache = params, None
    optimizer._gather_flat_grad = lambda: gather().as_subclass(kind)
    for param in params:
        optimizer.state.pop(param, None)
    optimizer.state[params[0]] = whole
    try:
        yield
    finally:
        del optimizer._gather_flat_grad
        attributes.update(before)
        cut(optimizer.state, params, [param.shape for param in params])


def outline_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in the state of one parameter, and None for each vector."""
    return {name: None if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _put_together(
    state: Mapping[Any, Any], params: Sequence[torch.Tensor], outline: Mapping[str, Any], kind: type[torch.Tensor]
) -> dict[str, Any]:
    """Of a parameter without state, as it was not trained so far, all vectors are zeros, as torch has them."""
    entries = [state.get(param, {}) for param in params]
    names = [name for name, value in outline.items() if value is None]
    whole: dict[str, Any] = {name: value for name, value in outline.items() if value is not None}
    if names:
        whole |= {name: [] for name in _HISTORIES}
    for name in sorted(names, key=lambda name: (len(name), name)):  # of a history the first one first
        parts = [entry.get(name) for entry in entries]
        parts = [torch.zeros_like(param) if part is None else part for part, param in zip(parts, params, strict=True)]
        vector = torch.cat([part.reshape(-1) for part in parts]).as_subclass(kind)
        of, dot, _ = name.partition(".")
        if dot:
            whole[of].append(vector)
        else:
            whole[name] = vector
    return whole


def _number(value: Any) -> Any:
    """A number of Python's, as its tensors have no element of a parameter."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) else value
