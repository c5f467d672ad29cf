"""Decides once which kernels a step runs with."""

from __future__ import annotations

import inspect
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zero.comm.group import Group
from zero.comm.one_answer import exchange_texts
from zero.memory.formats import DTYPES, sum_dtype
from zero.optim.muon import MUON
from zero.optim.several import members_of, skip_dynamo_import
from zero.optim.traits import _ADAMS, KERNELS, known_kind
from zero.plan.layout import ParamSpec
from zero.runtime.kernels.adam_kernels import CompiledAdam, FusedAdam
from zero.runtime.kernels.adam_step import FusedStep, StepDtypes
from zero.runtime.kernels.native import passes

logger = logging.getLogger("zero")


def check_kernels(optimizer: torch.optim.Optimizer, kernels: str, device: torch.device, on_host: bool = False) -> None:
    """Refuses kernels that the device or the optimizer does not have, by trying them: torch has no list of where they run.
    `on_host`: masters are stepped on the host."""
    reason, step, muon = None, fused_step_of(optimizer, kernels), list[torch.optim.Optimizer]()
    if kernels == "fused":
        muon = [member for member in members_of(optimizer) if type(member) in MUON]
    members = [member for member in members_of(optimizer) if member not in muon]
    if kernels != "torch" and any(group.get("whole") for member in members for group in member.param_groups):
        reason = "a group says that its tensors are whole, and those step as the optimizer has it"
    elif step is not None:
        step.check(optimizer.param_groups)
    if reason is None and kernels == "fused":
        reason = next(filter(None, (_why_not_fused(member, device) for member in members)), None)
    elif reason is None and kernels == "compiled":
        reason = _why_not_compiled(optimizer, on_host)
    if reason is not None:
        raise ValueError(f"Cannot use kernels={kernels!r}: {reason}. Use kernels='torch'.")


def agreed_kernels(optimizer: torch.optim.Optimizer, kernels: str, device: torch.device, on_host: bool, group: Group) -> str:
    """Returns the kernels that all ranks step with: those that are asked for, or for "auto" the fastest that each of them has.
    `on_host`: all masters are stepped on the host. A collective."""
    if kernels != "auto":
        return kernels
    reasons = _refusals(optimizer, device, on_host)
    everyone = [json.loads(text) for text in exchange_texts(group, json.dumps(reasons))]
    for name in ("compiled", "fused"):
        lacking = [rank for rank, refusals in enumerate(everyone) if name in refusals]
        if not lacking:
            return name
        if len(lacking) < group.size and group.rank == 0:
            why = everyone[lacking[0]][name]
            logger.warning("kernels='auto' does without %r on all ranks, as rank %d lacks it: %s", name, lacking[0], why)
    return "torch"


def _refusals(optimizer: torch.optim.Optimizer, device: torch.device, on_host: bool) -> dict[str, str]:
    """Returns why kernels other than torch's are not for this optimizer, by name. Choices of its own settings are respected."""
    groups, members = optimizer.param_groups, members_of(optimizer)
    if any(group.get("foreach") is not None or group.get("fused") is False for group in groups):
        return dict.fromkeys(("compiled", "fused"), "the optimizer's own settings choose its kernel")
    # The fused SGD of torch is left out: it fails at a step in which some parameters have momentum already and some have none.
    if any(known_kind(member) not in _ADAMS and type(member) not in MUON for member in members):
        return dict.fromkeys(("compiled", "fused"), "only Adam, AdamW and Muon have a faster step with the same results")
    reasons = {"compiled": "fused=True of the optimizer chooses its kernel"} if any(map(_is_fused, groups)) else {}
    for name in {"compiled", "fused"} - reasons.keys():
        try:
            check_kernels(optimizer, name, device, on_host)
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def _is_fused(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused"))


def has_fused_step(optimizer: torch.optim.Optimizer, kernels: str) -> bool:
    return kernels != "torch" and known_kind(optimizer) in _ADAMS


def fused_step_of(optimizer: torch.optim.Optimizer, kernels: str) -> FusedStep | None:
    """Returns the step on the host for an optimizer whose arithmetic is known, else None."""
    if not has_fused_step(optimizer, kernels):
        return None
    return FusedStep(optimizer, CompiledAdam() if kernels == "compiled" else FusedAdam())


def _why_not_fused(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    kind: Any = known_kind(optimizer) or type(optimizer)
    if "fused" not in optimizer.defaults:
        return f"{kind.__name__} has no fused kernel"
    param = nn.Parameter(torch.zeros(1, device=device))
    param.grad = torch.zeros_like(param)
    step = inspect.unwrap(kind.step) if kind in _ADAMS else kind.step  # the wrappers of torch's own steps are known
    try:
        with skip_dynamo_import(), torch.no_grad():
            step(kind([param], lr=0.0, fused=True))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"the fused kernel of {kind.__name__} does not run on {device}: {error}"
    return None


def _why_not_compiled(optimizer: torch.optim.Optimizer, on_host: bool) -> str | None:
    if known_kind(optimizer) not in _ADAMS:
        return f"only Adam and AdamW have a compiled step, and not {type(optimizer).__name__}"
    if not on_host:
        return "it is compiled for the host, where nothing is stepped here: nothing is offloaded"
    try:
        passes()
    except RuntimeError as error:
        return f"the step could not be compiled: {error}"
    return None


def use_kernels(optimizer: torch.optim.Optimizer, kernels: str) -> Callable[[], None]:
    """Sets how the step computes; 'torch' leaves it to the user's optimizer. Returns a function that undoes it."""
    if kernels != "fused":
        return lambda: None
    before = {id(group): _kernels_of(group) for group in optimizer.param_groups}
    usual, ref = _kernels_of(optimizer.defaults), weakref.ref(optimizer)  # see [Note: the user's] in zero/sharding/optimizer.py
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)

    def undo() -> None:
        present = ref()
        for settings in (present.defaults, *present.param_groups) if present is not None else ():
            for name in KERNELS:
                settings.pop(name, None)
            settings.update(before.get(id(settings), usual))  # a group that came later gets the defaults

    return undo


def _kernels_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in KERNELS if name in settings}


def host_step_dtypes(specs: Iterable[ParamSpec], device: torch.device) -> set[StepDtypes]:
    """Returns the dtypes of masters that are stepped on the host."""
    kinds = set[StepDtypes]()
    for spec in specs:
        dtype, masters = DTYPES[spec.dtype], sum_dtype(DTYPES[spec.dtype])
        if device.type != "cpu" and spec.offload:
            kinds.add(StepDtypes(masters, dtype, dtype))
        elif device.type == "cpu" and dtype == masters:
            kinds.add(StepDtypes(masters))
        elif device.type == "cpu":
            kinds.add(StepDtypes(masters, compared=dtype))
    return kinds
