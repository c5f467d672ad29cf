"""Optimizer state by parameter name: whole out of pieces, and pieces out of whole.

A parameter's state has entries that go with its elements (moments), which every rank holds for its pieces, and
entries that do not (step counts), which every rank holds alike. Which is which is written beside the state: for
a 0-dim parameter the shapes do not tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from zero.comm.group import exchange_texts
from zero.construction import Parts
from zero.memory.flat import dtype_name

_NOT_ELEMENTWISE = {"step", "eta", "mu"}  # 0-dim entries of torch's own optimizers


def whole_state(parts: Parts, inner: torch.optim.Optimizer, param: int) -> dict[str, Any]:
    """One parameter's state as plain torch would hold it; a collective. Empty where no rank has any."""
    return _whole_state(parts, inner, param)[0]


def whole_state_dict(parts: Parts, inner: torch.optim.Optimizer) -> dict[str, Any]:
    states, elementwise = {}, set()
    for param, name in enumerate(parts.params.names):
        state, keys = _whole_state(parts, inner, param)
        if state:
            states[name] = state
            elementwise |= keys
    index, names = parts.params.index, parts.params.names
    groups = []
    for group in inner.param_groups:
        named = [names[index[id(param)]] for param in group["params"] if id(param) in index]
        groups.append({**group, "params": named})
    return {"state": states, "elementwise": sorted(elementwise), "param_groups": groups}


def load_state(parts: Parts, inner: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks everything, then changes the state."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    unknown = [name for name in states if name not in parts.params.names]
    if unknown:
        raise ValueError(
            f"State of {unknown[0]} was passed, which is no parameter of this optimizer ({len(unknown)} such names). "
            "Load it into the model that it was saved from."
        )
    if len(groups) != len(inner.param_groups):
        raise ValueError(
            f"State of {len(groups)} parameter groups was passed to an optimizer of {len(inner.param_groups)}. "
            "Make the same groups."
        )
    elementwise = set(state_dict["elementwise"])
    for name, state in states.items():
        shape = parts.line.layout.params[parts.params.names.index(name)].shape
        for key in elementwise.intersection(state):
            if tuple(state[key].shape) != shape:
                raise ValueError(
                    f"State {key} of {name} was passed with shape {tuple(state[key].shape)}, but the parameter has {shape}. "
                    "Load it into the model that it was saved from."
                )
    for group, saved in zip(inner.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for param, name in enumerate(parts.params.names):
        for _, master in parts.masters.of(param):
            inner.state.pop(master, None)
        if name in states:
            _give_pieces(parts, inner, param, states[name], elementwise)


def adopt_state(parts: Parts, inner: torch.optim.Optimizer) -> None:
    """Hands what an optimizer that has stepped already knows about the parameters to their masters."""
    for param, tensor in enumerate(parts.params.tensors):
        state = inner.state.pop(tensor, None)
        if state:
            keys = {key for key, value in state.items() if _goes_with_elements(key, value, tensor.shape)}
            _give_pieces(parts, inner, param, state, keys)


def _goes_with_elements(key: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and key not in _NOT_ELEMENTWISE


def _give_pieces(
    parts: Parts, inner: torch.optim.Optimizer, param: int, state: Mapping[str, Any], elementwise: set[str]
) -> None:
    form = parts.window.shares.forms[param]
    for piece, master in parts.masters.of(param):
        own: dict[str, Any] = {}
        for key, value in state.items():
            if key in elementwise:
                line = form.line(value.to(master.device))
                own[key] = line[piece.in_param.start : piece.in_param.stop].clone()
            else:
                own[key] = value.clone() if isinstance(value, torch.Tensor) else value
        inner.state[master] = own


def _whole_state(parts: Parts, inner: torch.optim.Optimizer, param: int) -> tuple[dict[str, Any], set[str]]:
    own = [(piece, inner.state[master]) for piece, master in parts.masters.of(param) if master in inner.state]
    described: dict[str, list[Any]] = {}
    for piece, state in own:
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                described[key] = ["value", None, value]
            elif value.shape == (piece.in_share.numel,):
                described[key] = ["elements", dtype_name(value.dtype), None]
            else:
                described[key] = ["tensor", dtype_name(value.dtype), value.tolist()]
    known: dict[str, list[Any]] = {}
    for text in exchange_texts(parts.group, json.dumps(described)):  # a rank without a piece learns here what the others have
        for key, entry in json.loads(text).items():
            known.setdefault(key, entry)
    whole: dict[str, Any] = {}
    for key, (kind, dtype, value) in known.items():
        if kind == "elements":
            pieces = {piece: state[key] for piece, state in own}
            whole[key] = parts.window.shares.whole(param, pieces.__getitem__, getattr(torch, dtype))
        else:
            whole[key] = value if kind == "value" else torch.tensor(value, dtype=getattr(torch, dtype))
    return whole, {key for key, (kind, _, _) in known.items() if kind == "elements"}
