"""Loads weights from files of other programs into a model, sharded or plain. Each rank reads only its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.checkpoint.manifest import Named, unwrapped
from zero.checkpoint.progress import ProgressBar
from zero.checkpoint.weight_files import WeightFiles
from zero.comm.one_answer import all_or_none, require_same_args, run_on_all
from zero.memory.leaves import local_of
from zero.memory.masters import ALL
from zero.memory.values import Values, Viewed, whole
from zero.setup.parts import Box, Parts
from zero.sharding.fill import LOAD_AGAIN, failed_on, fill
from zero.sharding.optimizer import optimizers_of
from zero.sharding.optimizer_state import lies_nowhere
from zero.sharding.state import ShardingState

_MOST_NAMED = 5


class LoadedWeights(NamedTuple):
    """The names that were missing or unexpected, as in the result of `load_state_dict`."""

    missing_keys: list[str]  # names that the model has, and the files have not
    unexpected_keys: list[str]


@torch.no_grad()
def load_weights(model: nn.Module, source: str | os.PathLike[str], *, strict: bool = True) -> LoadedWeights:
    """Loads weight files of other programs into a model. A collective if the model is sharded.

    Each rank reads the bytes of its own shares, so no rank ever has the whole. If a parameter is a part, the files have the
    whole one, and each rank reads its part.
    Values are cast as they are read, and fp32 masters get what the file has. Names match without the wrappers of compiled and
    checkpointed modules, with a prefix that all names of one side have, and by any name of tied parameters. What does not match
    is an error before anything is changed. If the files then cannot be read to the end, the error says so, and nothing is saved
    before weights are loaded again.

    Args:
        model: The model, sharded or plain.
        source: A safetensors file, several with an index, what torch.save wrote, or a folder with one of those.
        strict: False allows missing and unexpected names, and refuses other shapes only.
    """
    optimizers = optimizers_of(model)
    sharded: list[ShardingState] = [optimizer.sharding for optimizer in optimizers]

    def prepare() -> tuple[WeightFiles, _Match]:
        for sharding in sharded:
            sharding.offloader.check("load_weights")
        files = WeightFiles(source)
        try:
            match = _Match.of(model, files, strict)
            if not sharded:
                match.check_memory()
            return files, match
        except BaseException:
            files.close()
            raise

    files, match = all_or_none(sharded[0].group, "A load of weights", prepare) if sharded else prepare()
    try:
        if sharded:
            require_same_args(sharded[0].group, "A load of weights", files=files.digest, strict=strict)
        for sharding in sharded:
            sharding.placer.weights.check_edits(match.keys)
        for sharding in sharded:
            sharding.window.end(on_all=True)
        with contextlib.ExitStack() as on_failure:
            for sharding in sharded:  # if a load fails, some weights are those of before
                wholeness, what = sharding.masters.wholeness, "a load of weights"
                params = sum(1 << index for index, tensor in enumerate(sharding.params.tensors) if tensor in match.keys)
                on_failure.enter_context(wholeness.torn_by_failure(what, params, ["masters"]))
                on_failure.enter_context(wholeness.torn_by_failure(what, kinds=["unshared"]))
            _read(sharded, match.values(files))
        for sharding in sharded if not match.missing else ():
            sharding.masters.wholeness.mend(ALL, ["masters", "unshared"])
    finally:
        files.close()
    return LoadedWeights(match.missing, match.unexpected)


def _read(sharded: Sequence[ShardingState], values: dict[torch.Tensor, Values]) -> None:
    """Reads the values: those of shares, and then all others. A collective if the model is sharded."""
    failure = partial(failed_on, LOAD_AGAIN)
    for sharding in sharded:
        run_on_all(sharding.group, sharding.publisher.take_edits, failure)
        sharding.window.reducer.inflight.forget_errors()
    for sharding in sharded:
        _place_late(sharding, values)
        for tensor in fill(sharding, values):
            del values[tensor]
    shown = not sharded or sharded[0].group.rank == 0
    with ProgressBar("loading", sum(map(torch.Tensor.numel, values)), shown, "elements") as bar:

        def read() -> None:
            for tensor, each in values.items():
                tensor.copy_(whole(each))
                bar.advance(tensor.numel())

        if sharded:
            run_on_all(sharded[0].group, read, failure)
        else:
            _read_alone(read)


def _place_late(sharding: ShardingState, values: Mapping[torch.Tensor, Values]) -> None:
    """Places parameters that have no place yet, as their values would be rounded otherwise."""
    sharding.window.sync.tracker.copy_back()
    leaves = sharding.params.leaves
    late = [index for index, tensor in enumerate(sharding.params.tensors)
            if tensor in values and lies_nowhere(sharding, index) and leaves[index].requires_grad]  # fmt: skip
    if late:
        sharding.window.place_params(late)


def _read_alone(read: Callable[[], None]) -> None:
    try:
        read()
    except (OSError, RuntimeError, MemoryError) as error:
        raise failed_on(LOAD_AGAIN, error, {0: f"{type(error).__name__}: {error}"}, 1) from error


class _Match:
    """The match of a model's tensors with those of the files, by name."""

    def __init__(self) -> None:
        self.keys: dict[torch.Tensor, str] = {}
        self._boxes: dict[torch.Tensor, Box] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def check_memory(self) -> None:
        """Raises if a tensor of a plain model has no memory to read to."""
        lacking = next((name for tensor, name in self.keys.items() if tensor.is_meta), None)
        if lacking is not None:
            raise ValueError(
                f"Cannot load {lacking}: it is on the meta device, and the model is not sharded. Shard the model first, or "
                "give it memory with to_empty."
            )

    def values(self, files: WeightFiles) -> dict[torch.Tensor, Values]:
        """Returns what each tensor is to have: of a part, the part of the whole one that this rank has."""
        values: dict[torch.Tensor, Values] = {tensor: files.tensors[key] for tensor, key in self.keys.items()}
        for tensor, box in self._boxes.items():
            if tensor in values and box.shape != tuple(tensor.shape):
                shadow = box.cut_from(torch.empty(box.shape, device="meta"), tuple(tensor.shape))
                values[tensor] = Viewed(values[tensor], shadow)
        return values

    @staticmethod
    def of(model: nn.Module, files: WeightFiles, strict: bool) -> _Match:
        match, keys, named = _Match(), dict[str, str](), Named.of(model)
        parts = Parts(model)
        boxes = parts.boxes_of(named.parameters, unwrapped)
        named.parameters = {name: local_of(param) for name, param in named.parameters.items()}
        match._boxes = {param: boxes[name] for name, param in named.parameters.items()}
        named.rename({name: box.name for name, box in boxes.items()})
        twice = [f"{key} and {keys[unwrapped(key)]}" for key in files.tensors if keys.setdefault(unwrapped(key), key) != key]
        tensors: dict[str, Any] = {**named.parameters, **named.buffers}
        names: dict[str, list[str]] = {name: [name] for name in tensors}
        for alias, name in named.aliases.items():
            names[name].append(alias)
        rename = _renaming([alias for each in names.values() for alias in each], list(keys))
        used, shapes, kinds = set[str](), [], []
        for name, tensor in tensors.items():
            matches = [keys[key] for key in map(rename, names[name]) if key in keys]
            box = match._boxes.get(tensor, Box(name, tuple(tensor.shape)))
            if matches and files.tensors[matches[0]].shape != box.shape:
                box = match._boxes[tensor] = parts.box_in(name, tensor, files.tensors[matches[0]].shape) or box
            of_ranks = [rename(each) for each in box.names]
            used.update(matches, (keys[key] for key in of_ranks if key in keys))
            # Decided by names alone, so that all ranks read the same parameters.
            if not matches or any(key not in keys for key in of_ranks):
                match.missing += box.names or (name,)
            elif files.tensors[matches[0]].shape != box.shape:
                shapes.append(f"{name} is {box.shape} here and {files.tensors[matches[0]].shape} there")
            elif _kind_of(files.tensors[matches[0]].dtype) != _kind_of(tensor.dtype):
                kinds.append(f"{name} is {tensor.dtype} here and {files.tensors[matches[0]].dtype} there")
            else:
                match.keys[tensor] = matches[0]
        match.unexpected = [key for key in files.tensors if key not in used]
        wrong = {"of another shape": shapes, "of a dtype that cannot be held": kinds, "of one name": twice}
        problems = [f"{what}: {_some(entries)}" for what, entries in wrong.items() if entries]
        is_wrong = bool(problems)
        if strict:
            problems += [f"missing: {_some(match.missing)}"] if match.missing else []
            problems += [f"unexpected: {_some(match.unexpected)}"] if match.unexpected else []
        if problems:
            raise ValueError(
                f"Cannot load weights from {files.source}: {'; '.join(problems)}. Nothing was changed. Pass the files of this "
                "model" + ("." if is_wrong else ", or strict=False to leave out what does not match.")
            )
        return match


def _kind_of(dtype: torch.dtype) -> tuple[bool, bool]:
    """Returns whether a dtype has fractions and whether it has imaginary parts, which a cast could lose."""
    return dtype.is_floating_point, dtype.is_complex


def _renaming(names: list[str], keys: list[str]) -> Any:
    """Returns a function from names of the model to those in the files: the same, or with a prefix that one side lacks."""
    known = set(keys)

    def added(prefix: str) -> Any:
        return lambda name: prefix + name

    def removed(prefix: str) -> Any:
        return lambda name: name.removeprefix(prefix)

    ways = [added("")]
    for name in names[:3]:
        ways += [added(key.removesuffix(name)) for key in keys if key.endswith("." + name)]
    for key in keys[:3]:
        ways += [removed(name.removesuffix(key)) for name in names if name.endswith("." + key)]
    return max(ways, key=lambda way: sum(way(name) in known for name in names))


def _some(what: list[str]) -> str:
    more = len(what) - _MOST_NAMED
    return ", ".join(what[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
