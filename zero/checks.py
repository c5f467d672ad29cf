"""What cannot be sharded, said before anything is changed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerators import Accelerator
from zero.comm.group import Group, exchange_about
from zero.errors import RanksDiffer
from zero.lion import Lion
from zero.memory.flat import DTYPES, bytes_of, overlapping
from zero.runtime.compiled import passes
from zero.runtime.compiled_adam import CompiledAdam
from zero.runtime.fused_adam import FusedAdam
from zero.runtime.one_pass import OnePass
from zero.runtime.params import Params
from zero.without_compiler import without_compiler

# Optimizers that treat every element by itself, so that a share of the elements steps as the whole would.
_OPTIM = torch.optim
_ADAMS = (_OPTIM.Adam, _OPTIM.AdamW)
ELEMENTWISE = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax, _OPTIM.Adagrad, _OPTIM.Adadelta,
    _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.ASGD, Lion,
)  # fmt: skip
KERNELS = ("fused", "foreach")  # what a group says of how its step is computed
BITS = 16  # bytes that stand for the bits of one tensor
WHOLE_TENSOR = {
    "LAMB", "Lamb", "FusedLamb", "LARS",
    "Adafactor", "Muon", "Shampoo", "LBFGS", "SOAP", "GaLoreAdamW", "SparseAdam",
}  # fmt: skip


def check_model(model: nn.Module) -> None:
    """Refuses what is no model, and a model that somebody else already distributes."""
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise TypeError(f"Sharding a model was asked for, but a {found} was found. Pass an nn.Module, then its optimizer.")
    for name, module in model.named_modules():
        kind = type(module)
        path = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or "FSDP" in kind.__name__:
            where = f"its module {name}" if name else "it"
            raise ValueError(
                f"Sharding {type(model).__name__} was asked for, but {where} is a {path}, which distributes gradients itself. "
                "Pass the plain model."
            )
        lazy = [param for param, tensor in module.named_parameters(name, recurse=False) if nn.parameter.is_lazy(tensor)]
        if lazy:
            raise ValueError(
                f"Sharding was asked for, but {lazy[0]} has no shape yet. Run the model once, so that its lazy modules know "
                "theirs, then make its optimizer."
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"Sharding was asked for, but {name or kind.__name__} is an embedding with sparse=True, whose gradients cannot "
                "be added up densely. Use sparse=False."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
    """Refuses an optimizer that needs whole tensors, and one that nobody vouches for."""
    if hasattr(optimizer, "parts"):
        raise ValueError("Sharding was asked for with an optimizer that is sharded already. Pass it once, or close() it first.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = type(optimizer).__name__
        raise TypeError(f"An optimizer was asked for, but a {found} was found. Pass a torch.optim.Optimizer.")
    kind = type(optimizer)
    whole = next((base.__name__ for base in kind.__mro__ if base.__name__ in WHOLE_TENSOR), None)
    if whole is not None:
        raise ValueError(
            f"Sharding with {kind.__name__} was asked for, but {whole} looks at whole tensors, and each rank would give it a "
            "share of them. Use an optimizer that treats every element by itself, such as AdamW."
        )
    if kind not in ELEMENTWISE and not elementwise:
        known = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise ValueError(
            f"Sharding with {kind.__module__}.{kind.__qualname__} was asked for, which is not known to treat every element by "
            f"itself. Pass elementwise=True if it does, or use one of {known}."
        )


def check_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses the optimizer of another model, and a parameter that it would update twice, as torch does where it sees
    the groups being made."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trainable = [param for param in model.parameters() if param.requires_grad]
    if trainable and not any(id(param) in known for param in model.parameters()):
        raise ValueError(
            f"Sharding {type(model).__name__} was asked for, but none of its {len(trainable)} trainable parameters is in the "
            f"{type(optimizer).__name__} that was passed. Make the optimizer from this model's parameters, after it was copied "
            "or moved."
        )
    seen: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in seen:
                name = next((name for name, tensor in model.named_parameters() if tensor is param), "a parameter")
                before = seen[id(param)]
                where = f"groups {before} and {index}" if before != index else f"group {index} twice"
                raise ValueError(
                    f"Sharding was asked for, but {name} is in {where} of the optimizer. List every parameter once."
                )
            seen[id(param)] = index


def check_settings_on_host(optimizer: torch.optim.Optimizer, ratios: Mapping[int, float]) -> None:
    """Refuses settings of groups that a step on the host could not use, and would find out in the middle of the first one.
    `ratios`: how much of each group is to be stepped there."""
    for index in sorted(index for index, ratio in ratios.items() if ratio):
        group, asked = optimizer.param_groups[index], f"Offloading group {index} of the optimizer was asked for, but"
        found = {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor) and not value.is_cpu}
        for key, device in found.items():
            raise ValueError(
                f"{asked} its {key} is a tensor on {device}, which a step on the host cannot use. Give a number, or a tensor "
                "on the CPU."
            )
        if group.get("capturable"):
            raise ValueError(f"{asked} it has capturable=True, which steps on an accelerator alone. Leave it out.")
        if ratios[index] < 1.0 and isinstance(optimizer, torch.optim.ASGD) and group.get("foreach") is not False:
            raise ValueError(
                f"{asked} with ratio={ratios[index]} torch's loops for devices would round one part of a parameter's eta, "
                "those for the host another, and no one value could be saved. Make the optimizer with foreach=False."
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
        what = f"{one} overlaps itself" if one == other else f"{one} and {other} share memory without being one parameter"
        raise ValueError(
            f"Sharding was asked for, but {what}. Tie parameters by using the same Parameter, or give each its own storage."
        )


def check_views(model: nn.Module, names: Sequence[str], tensors: Sequence[nn.Parameter]) -> None:
    """Refuses what looks at the memory of a parameter, which will be elsewhere."""
    managed = {id(tensor) for tensor in tensors}
    in_storage: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        in_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
    for name, other in (*model.named_parameters(), *model.named_buffers()):
        if id(other) in managed or other.layout != torch.strided or type(other.data) is not torch.Tensor:
            continue
        for index in in_storage.get(other.untyped_storage().data_ptr(), ()):
            if overlapping([tensors[index], other]) is not None:
                raise ValueError(
                    f"Sharding was asked for, but {name} looks at the memory of parameter {names[index]}, which moves. "
                    "Register such a view after sharding, or make it in forward."
                )


def _problem_of(tensor: nn.Parameter) -> str | None:
    if type(tensor) is not nn.Parameter or type(tensor.data) is not torch.Tensor:
        kind = type(tensor.data) if type(tensor) is nn.Parameter else type(tensor)
        return f"is a {kind.__module__}.{kind.__qualname__}, whose bits cannot be laid flat. Leave it out of the optimizer."
    if tensor.is_meta:
        return "is on the meta device and has no values yet. Materialise the model first, with to_empty and its initialisation."
    if tensor.is_complex():
        return "is complex, which is not supported. Make its view_as_real the parameter, and view it as complex in the module."
    if tensor.dtype not in DTYPES.values():
        return f"has dtype {tensor.dtype}, which cannot be trained in shares. Supported: {', '.join(DTYPES)}."
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}. Only dense parameters can be sharded."
    return None


def check_kernels(
    optimizer: torch.optim.Optimizer, kernels: str, device: torch.device, on_host: bool = False
) -> None:
    """Refuses a kernel of the step that there is none of, by trying it: torch has no list of where they run. `on_host`: masters
    are stepped there."""
    reason, one_pass = None, one_pass_of(optimizer, kernels)
    if one_pass is not None:
        one_pass.check(optimizer.param_groups)
    if kernels == "fused":
        reason = _why_not_fused(optimizer, device)
    elif kernels == "compiled":
        reason = _why_not_compiled(optimizer, on_host)
    if reason is not None:
        raise ValueError(f"kernels={kernels!r} was asked for, but {reason}. Use kernels='torch'.")


def has_one_pass(optimizer: torch.optim.Optimizer, kernels: str) -> bool:
    return kernels != "torch" and type(optimizer) in _ADAMS


def one_pass_of(optimizer: torch.optim.Optimizer, kernels: str) -> OnePass | None:
    """The step on the host, where it is one that knows what the optimizer computes."""
    if not has_one_pass(optimizer, kernels):
        return None
    return OnePass(optimizer, CompiledAdam() if kernels == "compiled" else FusedAdam())


def _why_not_fused(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    kind: Any = type(optimizer)
    if "fused" not in optimizer.defaults:
        return f"{kind.__name__} has no fused kernel"
    param = nn.Parameter(torch.zeros(1, device=device))
    param.grad = torch.zeros_like(param)
    step = inspect.unwrap(kind.step) if kind in _ADAMS else kind.step  # of torch's alone it is known what it is wrapped in
    try:
        with without_compiler(), torch.no_grad():
            step(kind([param], lr=0.0, fused=True))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"the fused kernel of {kind.__name__} does not run on {device}: {error}"
    return None


def _why_not_compiled(optimizer: torch.optim.Optimizer, on_host: bool) -> str | None:
    if type(optimizer) not in _ADAMS:
        return f"only Adam and AdamW have a compiled step, and not {type(optimizer).__name__}"
    if not on_host:
        return "it is compiled for the host, where nothing is stepped here: nothing is offloaded"
    try:
        passes()
    except RuntimeError as error:
        return f"the step could not be compiled: {error}"
    return None


def use_kernels(optimizer: torch.optim.Optimizer, kernels: str) -> Callable[[], None]:
    """Decides once how the step computes; 'torch' is whatever the user's optimizer does. Returns what undoes it."""
    if kernels != "fused":
        return lambda: None
    before = {id(group): _kernels_of(group) for group in optimizer.param_groups}
    usual = _kernels_of(optimizer.defaults)
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)

    def undo() -> None:
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings.update(before.get(id(settings), usual))  # a group that came later has what is usual

    return undo


def _kernels_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in KERNELS if name in settings}


def check_devices(names: Sequence[str], tensors: Iterable[nn.Parameter], device: torch.device) -> None:
    """Refuses to take in what lies elsewhere than the rest."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != device:
            raise ValueError(
                f"add_param_group was asked to take {name}, but it is on {tensor.device}, and what is sharded is on {device}. "
                "Move it there first."
            )


def check_dtypes(accelerator: Accelerator, dtypes: Iterable[torch.dtype]) -> None:
    for dtype in dtypes:
        if not accelerator.supports(dtype):
            works = ", ".join(str(known).removeprefix("torch.") for known in accelerator.supported_dtypes())
            raise ValueError(
                f"Weights in {dtype} were asked for, but {accelerator.name} does not compute in it. Supported here: {works}."
            )


def check_original(sharded: torch.optim.Optimizer, inner: torch.optim.Optimizer, params: Params) -> None:
    """Refuses what was done to the optimizer that was sharded, and not to the one that it became: both have their groups and
    their state in common, and what one alone has got would be without effect."""
    changed = "other state" if inner.state is not sharded.state else "other groups"
    if inner.state is sharded.state and inner.param_groups is sharded.param_groups:
        held = [param for group in inner.param_groups for param in group["params"] if id(param) not in params.index]
        if not any(param.requires_grad for param in held):
            return
        changed = "parameters in its groups that were not added by add_param_group"
    raise ValueError(
        f"A step was asked for, but the {type(inner).__name__} that was sharded has got {changed} since. Use the sharded "
        "optimizer for load_state_dict and add_param_group, and change its groups and its state in place."
    )


def check_used(params: Params, used: int) -> None:
    """Refuses a step for which some trainable parameter has no gradient on any rank."""
    named = enumerate(zip(params.names, params.tensors, strict=True))
    idle = [name for index, (name, tensor) in named if tensor.requires_grad and not used >> index & 1]
    if idle:
        raise ValueError(
            f"A step with on_unused='raise' was asked for, but no rank had a gradient for {', '.join(idle[:5])} "
            f"({len(idle)} such parameters). Nothing was applied. Use them in the loss, freeze them, or omit on_unused."
        )


def check_weights(named: Mapping[str, torch.Tensor], group: Group) -> None:
    """Raises on every rank unless all have the same bits in every one of them; a collective."""
    mine = b"".join(map(bits_of, named.values()))
    everyone = exchange_about(group, "check", mine)
    for rank, theirs in enumerate(everyone):
        for index, name in enumerate(named):
            here = slice(index * BITS, (index + 1) * BITS)
            if theirs[here] != everyone[0][here]:
                raise RanksDiffer(
                    f"Equal weights were asked for, but ranks 0 and {rank} have different bits in {name}. "
                    "Edit weights on all ranks alike, or load a checkpoint."
                )


def bits_of(tensor: torch.Tensor) -> bytes:
    """A digest of the values."""
    return hashlib.sha256(bytes_of(tensor)).digest()[:BITS]
