"""The optimizer of an engine is the one that was passed, or the one that the configuration describes.

One of DeepSpeed's own kinds is exchanged for the one that computes the same on shares, with the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zero.config.schema import OptimizerSpec, ZeroConfig
from zero.errors import full_name
from zero.optim.muon import TORCHS, Muon, is_for_muon, is_of_matrices
from zero.optim.optimizers import Lion, PlainAdam, has_narrow_moments
from zero.optim.several import as_one, members_of, skip_dynamo_import, with_members
from zero.optim.traits import ELEMENTWISE, is_elementwise, known_whole, of_all_tensors

# DeepSpeed's own Adams, recognized by name. They compute the same as torch's, with kernels for whole memory that a share has no
# use for.
_THEIRS = "deepspeed.ops.adam"
_ADAMS = {"FusedAdam", "DeepSpeedCPUAdam"}
_OURS = {"Lion": Lion, "PlainAdam": PlainAdam}  # optimizers that torch does not have


def _class_of(spec: OptimizerSpec) -> Callable[..., torch.optim.Optimizer]:
    optimizer_class: Callable[..., torch.optim.Optimizer] = _OURS.get(spec.kind) or getattr(torch.optim, spec.kind)
    return optimizer_class


def own_optimizer(config: ZeroConfig, params: list[Any], model: nn.Module | None = None) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration describes, of these parameters of the model."""
    assert config.optimizer is not None
    if config.optimizer.kind == "Muon":
        return _muon_and_adamw(config.optimizer.kwargs, params, model)
    more = {"fused": True} if config.kernels == "fused" else {}
    with skip_dynamo_import():
        return _class_of(config.optimizer)(params, **config.optimizer.kwargs, **more)


_OF_MUON, _OF_ADAM = ("lr", "momentum", "weight_decay"), ("lr", "betas", "eps", "weight_decay")


def _muon_and_adamw(settings: Mapping[str, Any], params: list[Any], model: nn.Module | None) -> torch.optim.Optimizer:
    """Makes Muon for matrices and AdamW for the rest, told apart as DeepSpeed does it: by name and shape, or by a parameter's
    own `use_muon` and `muon_num_heads`. Settings of a group go before those of the configuration."""
    names = {id(param): name for name, param in ([] if model is None else model.named_parameters())}
    lr = settings["lr"]
    rates = {"muon": (settings["muon_lr"], lr, 0.02), "adam": (settings["adam_lr"], lr, 3e-4)}
    muon, adam = ({**settings, "lr": next(rate for rate in of_it if rate is not None)} for of_it in rates.values())
    halves: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in params if any(isinstance(entry, dict) for entry in params) else [{"params": params}]:
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        is_matrix = [bool(getattr(p, "use_muon", is_for_muon(names.get(id(p), ""), p.dim()))) for p in tensors]
        for half, (defaults, keys) in {True: (muon, _OF_MUON), False: (adam, _OF_ADAM)}.items():
            members = [param for param, is_one in zip(tensors, is_matrix, strict=True) if is_one == half]
            heads = [getattr(param, "muon_num_heads", None) if half else None for param in members]
            for number in dict.fromkeys(heads):
                alike = [param for param, has in zip(members, heads, strict=True) if has == number]
                made = {"params": alike, **{key: group.get(key, defaults[key]) for key in keys}}
                halves[half].append(made if number is None else {**made, "num_heads": number})
    _check_matrices(halves[True], model)
    are_matrices = all("num_heads" not in group and all(p.dim() == 2 for p in group["params"]) for group in halves[True])
    if halves[True] and are_matrices and not TORCHS:
        raise ValueError(f"Cannot make Muon: torch {torch.__version__} has none. Use torch 2.9 or a later one.")
    with skip_dynamo_import():
        kinds = {**dict.fromkeys(TORCHS if are_matrices else (Muon,), halves[True]), torch.optim.AdamW: halves[False]}
        optimizer: torch.optim.Optimizer = as_one([kind(groups) for kind, groups in kinds.items() if groups])
    return optimizer


def _check_matrices(groups: list[dict[str, Any]], model: nn.Module | None) -> None:
    """Refuses with its name what is not made of matrices."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    for group in groups:
        heads = group.get("num_heads", 1)
        for param in group["params"]:
            if not is_of_matrices(param, heads):
                also = f" with {heads} heads" if heads != 1 else ""
                raise ValueError(
                    f"Cannot make Muon for {names.get(id(param), 'a parameter')}: its shape is {tuple(param.shape)}{also}, "
                    "and Muon steps matrices. Set use_muon = False on it, so that AdamW trains it, or make it one parameter a "
                    "matrix."
                )


def given_optimizer(optimizer: Any, params: list[Any]) -> torch.optim.Optimizer:
    """Returns the optimizer that was passed, several as one, or the one that a passed function makes. An Adam of DeepSpeed's
    own is replaced by torch's."""
    with skip_dynamo_import():
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer) else optimizer(params)
        made = as_one(made)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"Cannot use optimizer={optimizer!r}: it is or returns a {type(made).__name__}. Pass a torch.optim.Optimizer, "
            "or a function that makes one from the parameters."
        )
    if not is_deepspeeds_adam(made):
        return made
    with skip_dynamo_import():
        return _adam_of(made)


def _adam_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes torch's Adam or AdamW, or ours without bias correction or with moments in bf16, in place of one of DeepSpeed's. It
    has the same groups, so that a schedule made on the one drives the other."""
    kind = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(f"Cannot use this {kind}: it has stepped already. Pass a new one, and load a checkpoint into it.")
    corrected = {bool(group.get("bias_correction", True)) for group in optimizer.param_groups}
    if len(corrected) > 1:
        raise ValueError(f"Cannot use this {kind}: some of its groups have bias_correction=False. Make two of it in a list.")
    is_decoupled, is_wide = getattr(optimizer, "adam_w_mode", True), getattr(optimizer, "fp32_optimizer_states", True)
    made: torch.optim.Optimizer
    if corrected == {False} or not is_wide:
        moments = None if is_wide else "bfloat16"
        made = PlainAdam(optimizer.param_groups, decoupled=is_decoupled, bias_correction=corrected == {True}, moments=moments)
    else:
        made = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(optimizer.param_groups)
    made.param_groups = optimizer.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule made on it looks whether it steps
    return made


def moments_of_adam(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the dtype that moments of an Adam or AdamW have beside fp32 weights; None for another optimizer."""
    adams = [member for member in members_of(optimizer) if isinstance(member, (torch.optim.Adam, torch.optim.AdamW, PlainAdam))]
    if not adams:
        return None
    return "bfloat16" if all(map(has_narrow_moments, adams)) else "float32"


def is_deepspeeds_adam(optimizer: torch.optim.Optimizer) -> bool:
    return any(base.__module__.startswith(_THEIRS) and base.__name__ in _ADAMS for base in type(optimizer).__mro__)


def check_known(optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
    """Refuses an optimizer of an unknown kind, with the key of a DeepSpeed file that allows it. One that looks at all tensors
    together is refused elsewhere."""
    for member, group in with_members(optimizer):
        kind, known = type(member), (is_elementwise(member), known_whole(member), of_all_tensors(member), "whole" in group)
        if not (any(known) or config.elementwise or config.whole_tensors):
            raise ValueError(
                f"Cannot shard {full_name(kind)}: it is not known to treat every element by itself. If it "
                'does, write "zero_allow_untested_optimizer": true in the configuration; if it looks at whole tensors, one at '
                'a time, give its groups "whole": True; or use one of '
                f"{', '.join(known.__name__ for known in ELEMENTWISE)}."
            )
