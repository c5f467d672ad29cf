"""Facts that are known of optimizers: which treat every element by itself, which look at whole tensors, and how many moments
they keep."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero.errors import full_name
from zero.optim.muon import MUON
from zero.optim.optimizers import Lion, PlainAdam, has_narrow_moments
from zero.optim.several import has_step_of_its_own, members_of, with_members

_OPTIM = torch.optim
_ADAMS = (_OPTIM.Adam, _OPTIM.AdamW)

# These optimizers treat every element by itself, so that a share of the elements steps as the whole would.
ELEMENTWISE = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.ASGD, Lion, PlainAdam,
)  # fmt: skip

# Optimizers of other packages whose names match keep their state in few bits, with a scale for each block of elements.
_QUANTISED = re.compile(r"(8bit|4bit|Fp8)(\d*)$")
_OF_ONE_MOMENT = re.compile(r"\b(Lion|SGD|RMSprop|Adagrad|LARS)|1State")

# A class that defines only these is still its parent, as a step calls none of them.
_HARMLESS = frozenset((
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__", "__parameters__",
    "__orig_bases__", "__firstlineno__", "__static_attributes__", "__slotnames__",
))  # fmt: skip

KERNELS = ("fused", "foreach")  # settings of a group that say how its step is computed

# Optimizers of torch whose steps of two tensors have nothing to do with each other.
_BY_BLOCKS = (*ELEMENTWISE, *MUON, _OPTIM.Adafactor)

# Optimizers of other packages with that property: all of a module, or one class.
_BY_BLOCKS_ELSEWHERE = ("bitsandbytes.optim.", "lion_pytorch.lion_pytorch.Lion")

# Elementwise optimizers of other packages. Some count their calls, so they step everything at once.
ELEMENTWISE_ELSEWHERE = {
    "schedulefree.adamw_schedulefree.AdamWScheduleFree", "schedulefree.sgd_schedulefree.SGDScheduleFree",
    "schedulefree.radam_schedulefree.RAdamScheduleFree", "lion_pytorch.lion_pytorch.Lion", "lion_pytorch.foreach.Lion",
}  # fmt: skip

# Optimizers that look at one tensor at a time, as a whole. `_OF_MATRICES` names those that compute with its rows and columns.
WHOLE_TENSOR = {
    "LAMB", "Lamb", "LARS", "Adafactor", "AdaFactor", "CAME",
    "Muon", "Shampoo", "SOAP", "GaLore", "GaLoreAdamW", "GaLoreAdafactor",
}  # fmt: skip
_OF_MATRICES = {"Muon", "Shampoo", "SOAP", "GaLore", "GaLoreAdamW", "GaLoreAdafactor"}

# Optimizers that add something up over all parameters, and what they add up. They step only if every rank has all of
# everything.
OF_ALL_TENSORS = {
    "LBFGS": "searches along one line through all parameters",
    "FusedLamb": "divides by the norm of all gradients together",
    "FusedLAMB": "divides by the norm of all gradients together",
    "Prodigy": "finds its rate from sums over all parameters",
    "DAdaptAdam": "finds its rate from sums over all parameters",
    "DAdaptSGD": "finds its rate from sums over all parameters",
    "DAdaptLion": "finds its rate from sums over all parameters",
    "DAdaptAdaGrad": "finds its rate from sums over all parameters",
}

# With one of these settings, an optimizer of WHOLE_TENSOR becomes one of OF_ALL_TENSORS.
_OVER_ALL = ("max_grad_norm", "pre_norm")

# The number of values that an optimizer remembers for an element, if it is not two.
_MOMENTS = {_OPTIM.SGD: 0, _OPTIM.Adagrad: 1, _OPTIM.RMSprop: 1, _OPTIM.ASGD: 1, Lion: 1, _OPTIM.Adafactor: 0,
            **dict.fromkeys(MUON, 1)}  # fmt: skip

_MORE = ("momentum", "amsgrad", "centered")  # each of these settings of a group adds one value


def num_moments(optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the number of values an element of its state, by group: two for an optimizer that we do not know, and parts of
    one for few bits."""
    return [_num_moments(member, group) for member, group in with_members(optimizer)]


def _num_moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    if is_quantised_in_blocks(optimizer):
        names = " ".join(kind.__name__ for kind in type(optimizer).__mro__)
        bits = 4 if "4bit" in names else 8
        scales = 32 / float(group.get("block_size", 128 if bits == 4 else 256))
        return (1 if re.search(_OF_ONE_MOMENT, names) else 2) * (bits + scales) / 32
    if has_narrow_moments(optimizer):
        return 1  # it keeps two values of half the width
    known = next((number for kind, number in _MOMENTS.items() if isinstance(optimizer, kind)), 2)
    return known + (0 if isinstance(optimizer, MUON) else sum(bool(group.get(setting)) for setting in _MORE))


def known_kind(optimizer: torch.optim.Optimizer, among: Collection[type] = ELEMENTWISE) -> type | None:
    """Returns the class of ELEMENTWISE that the optimizer is: its own, or one that it inherits from and changes nothing of but
    the constructor."""
    kind = type(optimizer)
    for parent in kind.__mro__:
        if parent in among:
            return parent
        if not _changes_nothing(parent):
            return None
    return None


def steps_by_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if it may step its parameters in several calls: no code counts its calls or needs all parameters at once."""
    members = members_of(optimizer)
    known = all(known_kind(each, _BY_BLOCKS) or full_name(type(each)).startswith(_BY_BLOCKS_ELSEWHERE) for each in members)
    narrow = any(map(has_narrow_moments, members))  # their bytes are not laid out as lines of sums
    return known and not narrow and not any(map(has_step_of_its_own, (*members, optimizer)))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if it is known to treat every element by itself."""
    return known_kind(optimizer) is not None or full_name(type(optimizer)) in ELEMENTWISE_ELSEWHERE


def _changes_nothing(kind: type) -> bool:
    above: Any = super(kind, kind)
    added = [name for name in vars(kind) if name not in _HARMLESS]
    return all(not hasattr(above, name) or (name == "step" and _bare(vars(kind)[name]) is _bare(above.step)) for name in added)


_TORCHS_WRAPPER = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def _bare(step: Any) -> Any:
    """Returns a step without the wrapper that torch puts around it in each class when the first object is made. A step of the
    user's own that was made with functools.wraps carries the marks of that wrapper, and is known by where its code is."""
    while getattr(step, "hooked", False) and step.__code__.co_filename == _TORCHS_WRAPPER:
        step = step.__wrapped__
    return step


def is_quantised_in_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if elements of its state share a scale with others, which may lie on another rank."""
    # Bitsandbytes has this attribute, for 8 and for 32 bits.
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if isinstance(bits, int):
        return bits < 16
    return any(_QUANTISED.search(kind.__name__) for kind in type(optimizer).__mro__)


def of_all_tensors(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why it must see all parameters to step one, or None."""
    reason = next((OF_ALL_TENSORS[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in OF_ALL_TENSORS), None)
    settings = [name for name in _OVER_ALL if any(group.get(name) for group in optimizer.param_groups)]
    # Without `pre_norm`, pytorch_optimizer's max_grad_norm does not look at the other parameters.
    if not getattr(optimizer, "pre_norm", True):
        settings = []
    if reason is None and known_whole(optimizer) is not None and settings:
        return f"divides by the norm of all gradients together, with {settings[0]}={optimizer.param_groups[0].get(settings[0])}"
    return reason


# Names of torch.distributed's functions, without those that other functions have, too.
_COLLECTIVES = frozenset((
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "broadcast", "batch_isend_irecv",
))  # fmt: skip


def communicates_by(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the collective that its code calls, if any, as that of one which shares its work out among ranks itself."""
    kinds = type(optimizer).__mro__
    methods = [value for kind in kinds[: kinds.index(torch.optim.Optimizer)] for value in vars(kind).values()]
    for method in map(inspect.unwrap, methods):
        names, known = set(_names_in(method)), getattr(method, "__globals__", {})
        origins = {getattr(known.get(name), place, "") for name in names for place in ("__name__", "__module__")}
        is_torchs = "distributed" in names or any(str(origin).startswith("torch.distributed") for origin in origins)
        if is_torchs and not names.isdisjoint(_COLLECTIVES):
            return min(names & _COLLECTIVES)
    return None


def _names_in(function: Any) -> Iterator[str]:
    """Yields the names that code uses, and code inside it."""
    code = getattr(function, "__code__", function)
    if isinstance(code, types.CodeType):
        yield from code.co_names
        for inner in code.co_consts:
            yield from _names_in(inner)


def overridden_by_place(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if bitsandbytes has settings for single parameters, which it finds by their identity or by their places in
    groups: a step of shares is given other objects at other places."""
    manager = getattr(optimizer, "mng", None)
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    held = [id(getattr(module, name)) for module, name, _ in getattr(manager, "module_weight_config_triple", ())]
    by_identity = [*getattr(manager, "pid2config", ()), *held]
    return not params.isdisjoint(by_identity) or bool(getattr(manager, "index2config", ()))


def evaluates(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether its step calls its closure several times."""
    return any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__)


def known_whole(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why it needs whole tensors, or None if that is not known of it."""
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in WHOLE_TENSOR), None)
    if name is not None:
        return f"{name} looks at whole tensors"
    if is_quantised_in_blocks(optimizer):
        return "its state is quantised in blocks, whose elements share a scale"
    if any(base.__module__.startswith("bitsandbytes.optim.") for base in type(optimizer).__mro__):
        return "optimizers of bitsandbytes can clip and scale by the norm of a whole tensor"
    return None


def rounds_within(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if its step rounds to bfloat16 on its way, so that the last bit of a gradient can be seen in the update."""
    return any(base.__name__ == "Muon" for base in type(optimizer).__mro__)


def whole_groups(optimizer: torch.optim.Optimizer, whole_tensors: bool | None) -> list[bool]:
    """Returns for each group whether each of its tensors belongs to one rank: what the group says, else what is known of its
    optimizer, else what the user says of unknown optimizers."""
    return [_is_whole(member, group, bool(whole_tensors)) for member, group in with_members(optimizer)]


def _is_whole(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], whole_tensors: bool) -> bool:
    if of_all_tensors(optimizer) is not None:
        return True
    if known_whole(optimizer) is not None or group.get("whole") is not None:
        return bool(group.get("whole", True))
    return whole_tensors and not is_elementwise(optimizer)


def work_of(optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int]) -> int:
    """Returns the work of the update of one whole tensor, as a number without a unit: work on an element of a matrix grows with
    the shorter side."""
    member, settings = with_members(optimizer)[group]
    if len(shape) < 2 or all(base.__name__ not in _OF_MATRICES for base in type(member).__mro__):
        return max(1, math.prod(shape))
    rows = shape[-2] // int(settings.get("num_heads", 1))
    return max(1, math.prod(shape)) * max(1, min(rows, shape[-1]))


def sees_across(optimizer: torch.optim.Optimizer, group: int, dim: int, num_dims: int) -> bool:
    """Returns whether the update of a whole tensor depends on what lies elsewhere along a dimension. Muon's matrices are in the
    last two, and several heads along the rows."""
    member, settings = with_members(optimizer)[group]
    names = {base.__name__ for base in type(member).__mro__}
    if "Muon" in names:
        return dim == num_dims - 1 or (dim == num_dims - 2 and int(settings.get("num_heads", 1)) == 1)
    return bool(names & WHOLE_TENSOR)


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns a line for each group, with its settings that can be compared as text."""
    return "\n".join(f"group {_settings_of(group)}" for group in optimizer.param_groups)


def _settings_of(group: dict[str, Any]) -> str:
    settings = {}
    for key, value in sorted(group.items()):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float, str, tuple, type(None))):
            settings[key] = repr(value)
    return ", ".join(f"{key}={value}" for key, value in settings.items())
