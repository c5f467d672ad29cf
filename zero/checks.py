"""What cannot be sharded, said before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accelerators import Accelerator
from zero.memory.flat import DTYPES, overlapping

# Optimizers of torch that treat every element by itself, so that a share of the elements steps as the whole would.
_OPTIM = torch.optim
ELEMENTWISE = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.ASGD,
)  # fmt: skip
WHOLE_TENSOR = {"LAMB", "Lamb", "FusedLamb", "LARS", "Adafactor", "Muon", "Shampoo", "LBFGS", "SOAP", "GaLoreAdamW", "SparseAdam"}


def check_model(model: nn.Module) -> None:
    """Refuses a model that somebody else already distributes."""
    for name, module in model.named_modules():
        kind = type(module)
        path = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or "FSDP" in kind.__name__:
            where = f"its module {name}" if name else "it"
            raise ValueError(
                f"Sharding {type(model).__name__} was asked for, but {where} is a {path}, which distributes gradients itself. "
                "Pass the plain model."
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"Sharding was asked for, but {name or kind.__name__} is an embedding with sparse=True, whose gradients cannot be "
                "added up densely. Use sparse=False."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
    """Refuses an optimizer that needs whole tensors, and one that nobody vouches for."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"An optimizer was asked for, but a {type(optimizer).__name__} was found. Pass a torch.optim.Optimizer.")
    kind = type(optimizer)
    whole = next((base.__name__ for base in kind.__mro__ if base.__name__ in WHOLE_TENSOR), None)
    if whole is not None:
        raise ValueError(
            f"Sharding with {kind.__name__} was asked for, but {whole} looks at whole tensors, and each rank would give it a share of "
            "them. Use an optimizer that treats every element by itself, such as AdamW."
        )
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise ValueError(
            f"Sharding with {kind.__module__}.{kind.__qualname__} was asked for, which is not known to treat every element by itself. "
            f"Pass elementwise=True if it does, or use one of {known}."
        )


def check_params(names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Refuses parameters that cannot lie in flat memory."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        first = {str(tensor.device): name for name, tensor in reversed(list(zip(names, tensors, strict=True)))}
        raise ValueError(
            f"Sharding was asked for, but the parameters are on several devices: {first}. Move the model to one device first."
        )
    for name, tensor in zip(names, tensors, strict=True):
        problem = _problem_of(tensor)
        if problem is not None:
            raise ValueError(f"Sharding was asked for, but parameter {name} {problem}")
    pair = overlapping(tensors)
    if pair is not None:
        one, other = names[pair[0]], names[pair[1]]
        what = f"parameter {one} overlaps itself" if one == other else f"parameters {one} and {other} share memory without being one parameter"
        raise ValueError(f"Sharding was asked for, but {what}. Tie them by using the same Parameter, or give each its own storage.")


def _problem_of(tensor: nn.Parameter) -> str | None:
    kind = type(tensor)
    if kind is not nn.Parameter and not isinstance(tensor, nn.parameter.Buffer) and kind.__name__ not in ("Parameter",):
        return f"is a {kind.__module__}.{kind.__qualname__}, whose bits cannot be laid flat. Leave it out of the optimizer, or convert it."
    if type(tensor.data) is not torch.Tensor:
        return f"holds a {type(tensor.data).__name__}, whose bits cannot be laid flat. Leave it out of the optimizer, or convert it."
    if tensor.is_meta:
        return "is on the meta device and has no values yet. Materialise the model first, with to_empty and its own initialisation."
    if tensor.is_complex():
        return "is complex, which is not supported. Use torch.view_as_real in the module, and keep the real view as its parameter."
    if tensor.dtype not in DTYPES.values():
        return f"has dtype {tensor.dtype}, which cannot be trained in shares. Supported: {', '.join(DTYPES)}."
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}. Only dense parameters can be sharded."
    return None


def check_dtypes(accelerator: Accelerator, dtypes: Iterable[torch.dtype]) -> None:
    for dtype in dtypes:
        if not accelerator.supports(dtype):
            works = ", ".join(str(known).removeprefix("torch.") for known in accelerator.supported_dtypes())
            raise ValueError(f"Weights in {dtype} were asked for, but {accelerator.name} does not compute in it. Supported here: {works}.")
