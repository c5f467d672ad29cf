"""What is known of torch's optimizers: which treat every element by itself, and how many moments they keep."""

from __future__ import annotations

import re
from typing import Any

import torch

from zero.optim.lion import Lion

# Optimizers that treat every element by itself, so that a share of the elements steps as the whole would.
_OPTIM = torch.optim


_ADAMS = (_OPTIM.Adam, _OPTIM.AdamW)


ELEMENTWISE = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.ASGD, Lion,
)  # fmt: skip


# Optimizers of other packages that keep their state in few bits, with a scale for each block of elements.
_QUANTISED = re.compile(r"(8bit|4bit|Fp8)(\d*)$")


# What a class may define and still be its parent: nothing that a step could call.
_HARMLESS = frozenset((
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__", "__parameters__",
    "__orig_bases__", "__firstlineno__", "__static_attributes__", "__slotnames__",
))  # fmt: skip


KERNELS = ("fused", "foreach")  # what a group says of how its step is computed


WHOLE_TENSOR = {
    "LAMB", "Lamb", "FusedLamb", "LARS",
    "Adafactor", "Muon", "Shampoo", "LBFGS", "SOAP", "GaLoreAdamW", "SparseAdam",
}  # fmt: skip


# Values an element that an optimizer remembers, where it is not two.
_MOMENTS = {_OPTIM.SGD: 0, _OPTIM.Adagrad: 1, _OPTIM.RMSprop: 1, _OPTIM.ASGD: 1, Lion: 1}


_MORE = ("momentum", "amsgrad", "centered")  # settings of a group that want one more


def num_moments(optimizer: torch.optim.Optimizer) -> list[int]:
    """Values an element of its state, by group; two for an optimizer that we do not know."""
    known = next((number for kind, number in _MOMENTS.items() if isinstance(optimizer, kind)), 2)
    return [known + sum(bool(group.get(setting)) for setting in _MORE) for group in optimizer.param_groups]


def known_kind(optimizer: torch.optim.Optimizer) -> type | None:
    """The class of ELEMENTWISE that the optimizer is: its own, or one that it inherits from and changes nothing of but the
    constructor."""
    kind = type(optimizer)
    for parent in kind.__mro__:
        if parent in ELEMENTWISE:
            return parent
        if not _changes_nothing(parent):
            return None
    return None


def _changes_nothing(kind: type) -> bool:
    above: Any = super(kind, kind)
    added = [name for name in vars(kind) if name not in _HARMLESS]
    return all(not hasattr(above, name) or (name == "step" and _bare(vars(kind)[name]) is _bare(above.step)) for name in added)


_TORCHS_WRAPPER = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def _bare(step: Any) -> Any:
    """Without the wrapper that torch puts around it in each class when the first object is made. A step of the user's own that
    was made with functools.wraps carries the marks of that wrapper, and is known by where its code is."""
    while getattr(step, "hooked", False) and step.__code__.co_filename == _TORCHS_WRAPPER:
        step = step.__wrapped__
    return step


def is_quantised_in_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether elements of its state share a scale with others, which may lie on another rank."""
    if any(_QUANTISED.search(kind.__name__) for kind in type(optimizer).__mro__):
        return True
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)  # as bitsandbytes has it of optimizers with both
    return isinstance(bits, int) and bits < 16
