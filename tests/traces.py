"""What training gave, rank by rank and step by step, and the comparison that names the first difference."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Script = Callable[..., Generator[str, None, Any]]

LOW = (torch.bfloat16, torch.float16)


class CaseLike(Protocol):
    """What is needed of a case; tests.zoo has the real ones."""

    name: str
    build: Callable[[], nn.Module]
    script: Script
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    keep_fp32: Sequence[str]
    reduce: str | float


@dataclass
class Step:
    """What one rank had after one window."""

    weights: dict[str, Tensor]
    observed: Any = None  # the value that the script returned
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # the global gradients, if the script looked at them
    masters: dict[str, Tensor] = field(default_factory=dict)  # the fp32 copies of parameters that are stored in less
    loss_scale: float | None = None


@dataclass
class Trace:
    rank: int
    world: int
    steps: list[Step] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] | None = None  # the optimizer's state, by parameter name


Look = Callable[[], "dict[str, Any]"]


def train(case: CaseLike, model: nn.Module, optimizer: Any, rank: int, world: int, look: Look = dict) -> Trace:
    """Run a case on one real rank. `look()` gives further fields of each step, such as masters and loss_scale."""
    trace = Trace(rank, world)
    for number in range(case.steps):
        window = case.script(model, optimizer, rank, world, number)
        observed = None
        while True:
            try:
                next(window)
            except StopIteration as end:
                observed = end.value
                break
        trace.steps.append(Step(weights_of(model), copied(observed), **look()))
    trace.buffers = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
    return trace


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def copied(value: Any) -> Any:
    """A detached copy on the host of whatever a script returned."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value


# Comparison -------------------------------------------------------------------------------------------------------------

# Absolute if a value is below one, and relative above.
TOLERANCE = 1e-6
MASTER_TOLERANCE = 1e-5


def compare(ours: Sequence[Trace], expected: Sequence[Trace], *, exact: bool, state: bool = False, name: str = "") -> None:
    """Raise AssertionError with the first step, rank and parameter that differ, and by how much.

    name: of the case, said first in the error.
    exact: every bit. Else fp32 and wider to 1e-6, masters to 1e-5, and weights stored in less to one unit in the last place.
    """
    try:
        _compare_traces(ours, expected, exact, state)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}" if name else str(error)) from None


def _compare_traces(ours: Sequence[Trace], expected: Sequence[Trace], exact: bool, state: bool) -> None:
    if len(ours) != len(expected):
        raise AssertionError(f"there are traces of {len(ours)} ranks where {len(expected)} are expected")
    for number in range(len(expected[0].steps)):
        for mine, theirs in zip(ours, expected, strict=True):
            where = f"step {number}, rank {theirs.rank} of {theirs.world}"
            if number >= len(mine.steps):
                raise AssertionError(f"{where}: there is no such step in {len(mine.steps)}")
            _compare_step(mine.steps[number], theirs.steps[number], where, exact)
    for mine, theirs in zip(ours, expected, strict=True):
        where = f"after the last step, rank {theirs.rank} of {theirs.world}"
        _compare_value(mine.buffers, theirs.buffers, f"{where}, buffers", exact, TOLERANCE)
        if state:
            tolerance = MASTER_TOLERANCE if any(step.masters for step in theirs.steps) else TOLERANCE
            _compare_value(mine.state, theirs.state, f"{where}, optimizer state", exact, tolerance)


def _compare_step(mine: Step, theirs: Step, where: str, exact: bool) -> None:
    if list(mine.weights) != list(theirs.weights):
        raise AssertionError(f"{where}: the parameters are {list(mine.weights)} and should be {list(theirs.weights)}")
    for name, expected in theirs.weights.items():
        if name in mine.masters and name in theirs.masters:
            _compare_tensor(mine.masters[name], theirs.masters[name], f"{where}, master of {name}", exact, MASTER_TOLERANCE)
        _compare_tensor(mine.weights[name], expected, f"{where}, parameter {name}", exact, TOLERANCE)
    for name, grad in mine.grads.items():
        _compare_value(grad, theirs.grads[name], f"{where}, gradient of {name}", exact, TOLERANCE, of_largest=True)
    _compare_value(mine.observed, theirs.observed, f"{where}, what the script returned", exact, TOLERANCE)
    if mine.loss_scale is not None and mine.loss_scale != theirs.loss_scale:
        raise AssertionError(f"{where}: the loss scale is {mine.loss_scale} and should be {theirs.loss_scale}")


def _compare_value(mine: Any, theirs: Any, where: str, exact: bool, tolerance: float, of_largest: bool = False) -> None:
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        _compare_tensor(mine, theirs, where, exact, tolerance, of_largest)
    elif isinstance(theirs, dict) and isinstance(mine, dict):
        if mine.keys() != theirs.keys():
            raise AssertionError(f"{where}: there are {sorted(mine)} and should be {sorted(theirs)}")
        for key, value in theirs.items():
            _compare_value(mine[key], value, f"{where}, {key}", exact, tolerance)
    elif isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _compare_value(one, other, f"{where}, [{index}]", exact, tolerance)
    elif isinstance(theirs, float) and isinstance(mine, (float, Tensor)):
        numbers = (torch.as_tensor(number, dtype=torch.float64) for number in (mine, theirs))
        _compare_tensor(*numbers, where, exact, tolerance)
    elif mine != theirs:
        raise AssertionError(f"{where}: it is {mine!r} and should be {theirs!r}")


def _compare_tensor(mine: Tensor, theirs: Tensor, where: str, exact: bool, tolerance: float, of_largest: bool = False) -> None:
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        raise AssertionError(
            f"{where}: it is {tuple(mine.shape)} of {mine.dtype} and should be {tuple(theirs.shape)} of {theirs.dtype}"
        )
    wrong = ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    if not exact and wrong.any():
        wrong &= _outside(mine, theirs, tolerance, of_largest)
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    difference = (mine.double() - theirs.double()).abs().nan_to_num(nan=float("inf"))
    raise AssertionError(
        f"{where}: {int(wrong.sum())} of {wrong.numel()} elements differ by up to {difference.max().item():.3g}"
        f" ({'every bit should be equal' if exact else f'tolerance {_name_of(mine.dtype, tolerance)}'}); the first is"
        f" {list(first)}: {mine[first].item()!r} and should be {theirs[first].item()!r}"
    )


def _outside(mine: Tensor, theirs: Tensor, tolerance: float, of_largest: bool) -> Tensor:
    if mine.dtype in LOW:
        return ((_ordered(mine) - _ordered(theirs)).abs() > 1) | (mine.isnan() != theirs.isnan())
    if not mine.is_floating_point():
        return torch.ones_like(theirs, dtype=torch.bool)
    size = theirs.double().abs()
    # The small elements of a gradient are differences of numbers as large as its largest one.
    limit = tolerance * (size.max() if of_largest else size).clamp(min=1.0)
    return ~((mine.double() - theirs.double()).abs() <= limit)


def _ordered(tensor: Tensor) -> Tensor:
    """16-bit floats as integers in the order of their values, so that neighbours differ by one."""
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _name_of(dtype: torch.dtype, tolerance: float) -> str:
    return "one unit in the last place" if dtype in LOW else f"{tolerance:g}"


def leads_to(root: Any, wanted: Mapping[str, Any]) -> str | None:
    """The name of one of these objects that something refers to, over any number of others, but for classes and modules."""
    numbers, known, todo = {id(one): name for name, one in wanted.items()}, {id(root): root}, [root]
    while todo:
        one = todo.pop()
        refers = gc.get_referents(one)
        for other in refers:
            if id(other) in numbers:
                return numbers[id(other)]
            is_code = isinstance(other, (type, types.ModuleType)) or other is getattr(one, "__globals__", None)
            if id(other) not in known and not is_code:
                known[id(other)] = other
                todo.append(other)
    return None
