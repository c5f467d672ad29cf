"""What is known of torch's optimizers: which treat every element by itself, and how many moments they keep."""

from __future__ import annotations

import torch

from zero.optim.lion import Lion

# Optimizers that treat every element by itself, so that a share of the elements steps as the whole would.
_OPTIM = torch.optim


_ADAMS = (_OPTIM.Adam, _OPTIM.AdamW)


ELEMENTWISE = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.ASGD, Lion,
)  # fmt: skip


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
