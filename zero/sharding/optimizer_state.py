"""Makes the optimizer's state whole, by parameter name, and cuts whole state into pieces.

A parameter's state has entries that go with its elements (moments), which every rank holds for its pieces, and
entries that do not (step counts), which every rank holds alike. Which is which is written beside the state: for
a 0-dim parameter the shapes do not tell.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zero.checkpoint import values
from zero.comm.one_answer import exchange_texts
from zero.errors import ZeroError
from zero.memory.formats import dtype_name, goes_with_elements, sum_dtype
from zero.memory.leaves import like_leaf, local_state
from zero.memory.masters import exact
from zero.optim.several import members_of
from zero.optim.traits import KERNELS, is_elementwise

if TYPE_CHECKING:
    from zero.memory.masters import Masters
    from zero.plan.layout import Piece
    from zero.sharding.state import ShardingState

logger = logging.getLogger("zero")

_OF_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # the key of quantised values in its state dicts


def whole_state(sharding: ShardingState, inner: torch.optim.Optimizer, param: int) -> dict[str, Any]:
    """Returns one parameter's state as plain torch would hold it; empty if no rank has any. A collective."""
    state, keys = _whole_state(sharding, inner, param)
    return {key: like_leaf(sharding.params.leaves[param], value) if key in keys else value for key, value in state.items()}


def whole_state_dict(sharding: ShardingState, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state by parameter name, which keys of it go with elements, the exact values of rounded weights, and the
    groups."""
    sharding.adopt_on_all()
    states, elementwise, masters = {}, {}, {}
    elsewhere = sharding.window.sync.tracker.relocated()  # `adopt` does not see edits of parameters that were moved
    for param, name in enumerate(sharding.params.names):
        state, keys = _whole_state(sharding, inner, param)
        if state:
            states[name] = state
            elementwise[name] = sorted(keys)
        if _has_copy(sharding, param):
            dtype = sum_dtype(sharding.params.tensors[param].dtype)

            def value(piece: Piece, is_elsewhere: bool = param in elsewhere) -> torch.Tensor:
                master = sharding.masters.streams.piece(piece)
                return edited(sharding, piece, master) if is_elsewhere else master

            masters[name] = sharding.to_home(param, sharding.window.grad_ops.whole(param, value, dtype))
    params, groups = sharding.params, []
    for group in inner.param_groups:
        groups.append({**group, "params": [params.names[number] for number in params.numbers_of(group["params"])]})
    result = {"state": states, "elementwise": elementwise, "masters": masters, "param_groups": groups}
    parts = _parts_here(sharding)
    return {**result, "kernels": sharding.config.kernels, **({"parts": parts} if parts else {})}


def _parts_here(sharding: ShardingState) -> dict[str, int]:
    """Returns the part that this rank has of each parameter of which it has one."""
    layout, rank = sharding.layout_ref.layout, sharding.group.rank
    return {
        name: layout.families[spec.family].seat_of(rank).part
        for name, spec in zip(sharding.params.names, layout.params, strict=True)
        if spec.family
    }


def edited(sharding: ShardingState, piece: Piece, master: torch.Tensor) -> torch.Tensor:
    """Returns the exact value of one piece that is in memory, for a parameter that lies elsewhere than it was put."""
    form = sharding.window.grad_ops.formats[piece.param]
    line = form.flatten(sharding.params.tensors[piece.param].detach())[piece.in_param.start : piece.in_param.stop]
    return exact(form.shaped_like(master, line).to(master.device), master)


def _has_copy(sharding: ShardingState, param: int) -> bool:
    return any(sharding.masters.is_copy(bucket) for bucket in sharding.layout_ref.layout.buckets_of(param))


class _CheckedState(NamedTuple):
    """The content of a state dict that fits this training, by parameter name."""

    states: dict[str, dict[str, Any]]
    elementwise: dict[str, set[str]]  # the keys of each state that go with the parameter's elements
    masters: Mapping[str, torch.Tensor]


@torch.no_grad()
def load_state(sharding: ShardingState, inner: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads state by name, or by number as torch's own optimizer saved it. Everything is checked before anything changes.

    How the step is computed (`fused`, `foreach`) stays as it is.
    """
    states, elementwise, masters = _checked(sharding, inner, state_dict)
    kernels = state_dict.get("kernels", sharding.config.kernels)
    if kernels != sharding.config.kernels:
        logger.warning("The state was saved with kernels=%r; this run uses kernels=%r.", kernels, sharding.config.kernels)
    sharding.masters.wholeness.begin("load_state_dict()", kinds=["moments"])
    take_settings(inner, state_dict["param_groups"])
    sharding.updater.forget_moments()
    for param, name in enumerate(sharding.params.names):
        inner.state.pop(sharding.params.leaves[param], None)
        for piece, master in sharding.masters.of(param):
            sharding.masters.streams.use(piece.bucket, renews=True)
            inner.state.pop(master, None)
        if name in states and lies_nowhere(sharding, param):
            inner.state[sharding.params.leaves[param]] = copy.deepcopy(dict(states[name]))
        elif name in states:
            _give_pieces(sharding.masters, inner, param, states[name], elementwise[name])
        if name in masters:
            line = sharding.window.grad_ops.formats[param].flatten(masters[name])
            for piece, master in sharding.masters.of(param):
                # Otherwise the master is a view of the weights, which are not loaded here.
                if sharding.masters.is_copy(piece.bucket):
                    sharding.masters.streams.use(piece.bucket)
                    master.copy_(sharding.masters.unflatten(piece, line[piece.in_param.start : piece.in_param.stop]))
    sharding.updater.order_state()
    sharding.masters.wholeness.end(["moments"])


def _checked(sharding: ShardingState, inner: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> _CheckedState:
    """Returns the state by parameter name. Raises unless it is that of these groups, parameters, parts and shapes."""
    groups = state_dict["param_groups"]
    sharding.updater.check(groups)
    if len(groups) != len(inner.param_groups):
        raise ValueError(
            f"Cannot load the state of {len(groups)} parameter groups: the optimizer has {len(inner.param_groups)}. "
            "Make the same groups."
        )
    names = _names_in_groups(sharding, inner, groups)
    states = {names.get(key, key): dict(state) for key, state in state_dict["state"].items()}
    leaves = dict(zip(sharding.params.names, sharding.params.leaves, strict=True))
    for name, state in states.items():
        state.update(state.pop(_OF_BITSANDBYTES, {}))
        state.update(local_state(leaves[name], state) if name in leaves else {})
    masters = state_dict.get("masters", {})
    unknown = [name for name in (*states, *masters) if name not in sharding.params.names]
    if unknown:
        raise ValueError(
            f"Cannot load the state of {unknown[0]}: it is not a parameter of this optimizer ({len(unknown)} such names). "
            "Load it into the model that it was saved from."
        )
    for name, part in _parts_here(sharding).items():
        saved = state_dict.get("parts", {}).get(name, part)
        if saved != part:
            raise ValueError(
                f"Cannot load the state of {name}: it is of part {saved}, and this rank has part {part}. Load what "
                "state_dict() gave on a rank that had this part, or write checkpoints with zero.save."
            )
    layout, rank = sharding.layout_ref.layout, sharding.group.rank
    shapes = {name: torch.Size(layout.shape_of(param, rank)) for param, name in enumerate(sharding.params.names)}
    elementwise = _elementwise_keys(inner, state_dict.get("elementwise"), states, shapes)
    for name, state in (*states.items(), *((name, {"master": master}) for name, master in masters.items())):
        for key in {*elementwise.get(name, ()), "master"}.intersection(state):
            if isinstance(state[key], torch.Tensor) and state[key].shape != shapes[name]:
                raise ValueError(
                    f"Cannot load {key} of {name}: its shape is {tuple(state[key].shape)}, and the parameter's "
                    f"{tuple(shapes[name])}. Load it into the model that it was saved from."
                )
    return _CheckedState(states, elementwise, masters)


def _elementwise_keys(
    inner: torch.optim.Optimizer, saved: Any, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, set[str]]:
    """Returns the keys of each parameter's state that go with its elements: as saved, by parameter or, in older states, for all
    of them; else by shape. An elementwise optimizer has the same keys for all parameters."""
    if isinstance(saved, Mapping):
        return {name: set(saved.get(name, ())) for name in states}
    keys = {name: {key for key, value in state.items() if goes_with_elements(key, value, shapes[name])}
             for name, state in states.items()}  # fmt: skip
    if all(map(is_elementwise, members_of(inner))):
        return dict.fromkeys(states, set().union(*keys.values()) if saved is None else set(saved))
    return keys


def _names_in_groups(
    sharding: ShardingState, inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> dict[Any, str]:
    """Returns the parameter that each number in a plain optimizer's groups stands for; nothing if they have names."""
    names: dict[Any, str] = {}
    for group, saved in zip(inner.param_groups, groups, strict=True):
        numbers = [number for number in saved["params"] if isinstance(number, int)]
        if numbers and len(numbers) != len(group["params"]):
            raise ValueError(
                f"Cannot load a group of {len(numbers)} parameters into one of {len(group['params'])}. "
                "Make the same groups."
            )
        for number, param in zip(numbers, group["params"], strict=False):
            if id(param) in sharding.params.index:
                names[number] = sharding.params.names[sharding.params.index[id(param)]]
    if names:
        pairs = [f"{number} as {name}" for number, name in names.items()]
        logger.warning("State of a plain optimizer is taken by position: %s", ", ".join(pairs))
    return names


def take_settings(inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group its saved settings. How the step is computed stays as it is."""
    filled: set[int] = set()
    for group, saved in zip(inner.param_groups, groups, strict=True):
        kept = {key: value for key, value in saved.items() if key != "params" and key not in KERNELS}
        group.update({key: _setting(group.get(key), value, filled) for key, value in kept.items()})


def _setting(now: Any, saved: Any, filled: set[int]) -> Any:
    """Returns a saved setting of a group. A rate that is a tensor is filled, since schedules and captured graphs know the
    tensor. If several groups have one tensor, it gets the rate of the first."""
    if not isinstance(saved, torch.Tensor):
        return copy.deepcopy(saved)
    if isinstance(now, torch.Tensor) and now.shape == saved.shape and id(now) not in filled:
        filled.add(id(now))
        return now.copy_(saved)
    return saved.to(now.device if isinstance(now, torch.Tensor) else saved.device, copy=True)


def adopt_state(leaves: Sequence[torch.Tensor], masters: Masters, inner: torch.optim.Optimizer) -> None:
    """Hands the state that an optimizer already has for the parameters to their masters."""
    for param, leaf in enumerate(leaves):
        if masters.layout_ref.layout.slots[param] is None:
            continue  # the parameter keeps its state itself until it is trained
        state = local_state(leaf, dict.pop(inner.state, leaf, {}))  # what it had until now: a `StateOfShares` would find none
        if state:
            shape = torch.Size(masters.layout_ref.layout.shape_of(param, masters.rank))
            keys = {key for key, value in state.items() if goes_with_elements(key, value, shape)}
            _give_pieces(masters, inner, param, state, keys)


def lies_nowhere(sharding: ShardingState, param: int) -> bool:
    return sharding.layout_ref.layout.slots[param] is None


def plain_entry(masters: Masters, inner: torch.optim.Optimizer, param: int, value: Any) -> Any:
    """Returns a copy of an entry that goes with no element, on the device that torch wants: a number, such as a step count, on
    the host, and a tensor, as optimizers of whole tensors have, beside its master."""
    if isinstance(value, (list, tuple, dict)):
        copies = [plain_entry(masters, inner, param, each) for each in (value.values() if isinstance(value, dict) else value)]
        return type(value)(zip(value, copies, strict=True) if isinstance(value, dict) else copies)
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    settings = inner.param_groups[masters.layout_ref.layout.params[param].group]
    beside = value.dim() or settings.get("fused") or settings.get("capturable")
    return value.to(masters.of(param)[0][1].device if beside else value.device, copy=True)


def _give_pieces(
    masters: Masters, inner: torch.optim.Optimizer, param: int, state: Mapping[str, Any], elementwise: set[str]
) -> None:
    form = masters.formats[param]
    for piece, master in masters.of(param):
        masters.streams.use(piece.bucket)
        entries: dict[str, Any] = {}
        for key, value in state.items():
            if key in elementwise:
                line = form.flatten(value.to(master.device))
                entries[key] = masters.unflatten(piece, line[piece.in_param.start : piece.in_param.stop]).clone()
            else:
                entries[key] = plain_entry(masters, inner, param, value)
        inner.state[master] = entries


def _whole_state(sharding: ShardingState, inner: torch.optim.Optimizer, param: int) -> tuple[dict[str, Any], set[str]]:
    if lies_nowhere(sharding, param):
        leaf = sharding.params.leaves[param]
        kept = copy.deepcopy(local_state(leaf, inner.state.get(leaf, {})))
        shape = sharding.params.tensors[param].shape
        return kept, {key for key, value in kept.items() if goes_with_elements(key, value, shape)}
    stepped = [(piece, master) for piece, master in sharding.masters.of(param) if master in inner.state]
    local, pieces = [(master, inner.state[master]) for _, master in stepped], [piece for piece, _ in stepped]
    name = sharding.params.names[param]
    texts = [_described(local)]
    spec = sharding.layout_ref.layout.params[param]
    if not sharding.is_whole_here or (spec.numel and not spec.least_numel):
        texts = exchange_texts(sharding.group, texts[0])  # a rank that has no piece learns what the others have
    of_ranks = [[entries for entries in json.loads(text) if entries] for text in texts]
    family, rank = sharding.layout_ref.layout.family_of(param), sharding.group.rank
    holders = next(ranks for ranks in family.holders(len(texts)) if rank in ranks) if len(texts) > 1 else [0]
    known: dict[str, list[Any]] = {}  # the entries of the part that this rank has
    for described in (described for holder in holders for described in of_ranks[holder]):
        for key, entry in described.items():
            if json.dumps(known.setdefault(key, entry)) != json.dumps(entry) or entry[0] == "unknown":
                raise ZeroError(
                    f"Cannot gather {key} of {name}: it is neither one value for each element nor a plain value that all "
                    f"ranks share: {str(entry[2])[:60]}. Pass whole_tensors=True where the optimizer looks at whole "
                    "tensors."
                )
    # Gathering is a collective, so all ranks go through the entries of all: an expert that is a rank's own may have been
    # stepped where that of another rank was not.
    everything = {key: entry for of_rank in of_ranks for described in of_rank for key, entry in described.items()}
    if not spec.is_own:
        known = everything | known  # needed for a part without elements, which has no state itself
    whole: dict[str, Any] = {}
    for key, (kind, dtype, value) in (everything | known).items():
        if kind == "elements":
            states = {piece: state for piece, (_, state) in zip(pieces, local, strict=True) if key in state}

            def entry(piece: Piece, key: str = key, states: Mapping[Any, Any] = states) -> torch.Tensor | None:
                if piece not in states:
                    return None
                sharding.masters.streams.use(piece.bucket, writes=False)
                tensor: torch.Tensor = states[piece][key]
                return tensor

            gathered = sharding.window.grad_ops.whole(param, entry, getattr(torch, dtype))
            if key in known:
                whole[key] = sharding.to_home(param, gathered)
        elif key in known:
            whole[key] = values.decode(value)
    return whole, {key for key, (kind, _, _) in known.items() if kind == "elements"}


def _described(states: Sequence[tuple[torch.Tensor, Mapping[str, Any]]]) -> str:
    """Returns the kind and dtype of every entry of every master's state, and the values of entries that do not go by
    element."""
    described: list[dict[str, list[Any]]] = [{} for _ in states]
    for entries, (master, state) in zip(described, states, strict=True):
        for key, value in state.items():
            if goes_with_elements(key, value, master.shape):
                entries[key] = ["elements", dtype_name(value.dtype), None]
                continue
            try:
                entries[key] = ["value", None, values.encode(value, key)]
            except ValueError:
                entries[key] = ["unknown", None, repr(value)]
    return json.dumps(described)
