"""The manifest of a checkpoint: every parameter by its canonical name, where its elements lie, and a checksum of every file.

Nothing in it depends on stages, buckets, padding or ranks: a file has stretches of parameters, and all files together have
every element once. Python's own values (settings, counts, schedules) are in the typed form of zero/checkpoint/values.py.

[Note: a manifest] Of a Linear(4, 2) with a momentum, saved by two ranks, it says of files and parameters:

    "files": [{"name": "rank-00000.safetensors", "num_bytes": 21843, "checksum": "506b9333..."}, ...],
    "parameters": {
        "weight": {"shape": [2, 4], "order": null, "dtype": "float32", "value_dtype": "float32",
                   "state": {"momentum_buffer": "float32"}, "plain": {}, "cut": null,
                   "stretches": [{"file": 1, "start": 0, "stop": 8}]}, ...}

So all 8 elements of the weight and of its momentum lie in the second rank's file, under the names that `key_of` gives.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from zero.checkpoint import values
from zero.checkpoint.values import ANOTHER
from zero.errors import BadCheckpoint, CheckpointFailed
from zero.plan.layout import Span

FORMAT, VERSION = "zero checkpoint", 1
_HEAD = re.compile(rb'\{"format":"%s","number":(\d{1,18}),"' % FORMAT.encode())
HEAD_BYTES = 80  # the bytes of a manifest's text that `number_of` needs
_FILE_NAME = re.compile(r"[A-Za-z0-9_+=@,-][A-Za-z0-9_.+=@,-]*")  # matches a name in the checkpoint's own folder
_DEEPEST = 400  # the most levels: 100 of containers that were saved, which take three each, and those around them
_MOST_DIMENSIONS = 64  # torch's own limit
MOST_COUNTED = 2**53  # the largest number of steps and the like
_NOTHING = type(None)
_TRAINING: dict[str, tuple[type, ...]] = {  # the parts that every training has, and their types; () if they may have any
    "optimizer": (str, _NOTHING), "groups": (list,), "step": (int,), "skipped_steps": (int,), "loss_scale": (dict, _NOTHING),
    "engine": (dict, _NOTHING), "schedule": (str, _NOTHING), "scheduler": (), "modules": (dict,), "ranks": (int,),
}  # fmt: skip
VALUE = "value"  # the name of a parameter's own elements, beside the entries of its state
# Stands for the names that were left out, if an imported file does not tell them: of all frozen parameters not in it.
ALL_FROZEN = "*"
# Modules that wrap another one as an attribute of this name, and are no part of the model.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its name, size and checksum."""

    name: str
    num_bytes: int
    checksum: str  # made by zero/checkpoint/disk.py


@dataclass(frozen=True)
class Stretch:
    """Elements of a parameter that lie together in one file, counted along the parameter's line."""

    file: int
    start: int
    stop: int

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


@dataclass(frozen=True)
class Stored:
    """A parameter in a checkpoint. Its value is exact: the weight is the value rounded to `dtype`."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # the order of its dimensions on the line, from the slowest; None if it is that of the shape
    dtype: str  # the dtype of the weight
    value_dtype: str
    state: dict[str, str]  # the entries of the optimizer's state that go with the elements, and their dtypes
    plain: Any  # the other entries, typed
    stretches: tuple[Stretch, ...]
    # The dimension and the lengths of parts, if the parts along it lie one after the other.
    cut: tuple[int, tuple[int, ...]] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def covers(self) -> bool:
        """Returns True if every element lies somewhere, once."""
        end = 0
        for stretch in sorted(self.stretches, key=lambda stretch: stretch.start):
            if stretch.start != end or stretch.stop < end:
                return False
            end = stretch.stop
        return _can_be(self.shape) and end == self.numel

    def lies_in(self, num_files: int) -> bool:
        """Returns True if it is in files that there are, of dtypes that there are, and its line goes through each of its
        dimensions once."""
        ordered = self.order is None or sorted(self.order) == list(range(len(self.shape)))
        if self.cut is not None:
            dim, lengths = self.cut
            divides = 0 <= dim < len(self.shape) and min(lengths, default=-1) >= 0 and sum(lengths) == self.shape[dim]
            ordered = ordered and divides and self.order is None
        known = all(map(_is_dtype, (self.dtype, self.value_dtype, *self.state.values())))
        return ordered and known and all(0 <= stretch.file < num_files for stretch in self.stretches)


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer, whole in the first file."""

    shape: tuple[int, ...]
    dtype: str

    def can_be(self) -> bool:
        """Returns True if a tensor may have this shape and dtype."""
        return _can_be(self.shape) and _is_dtype(self.dtype)


def _can_be(shape: Sequence[int]) -> bool:
    """Returns True if a tensor may have this shape; sizes beyond what memory can have are not multiplied any further."""
    most = 1
    for size in shape:
        most *= max(1, size)
        if size < 0 or most >= 2**63:
            return False
    return len(shape) <= _MOST_DIMENSIONS


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, as far as they are no tensors."""

    files: tuple[File, ...]
    parameters: dict[str, Stored]
    buffers: dict[str, Buffer]
    # Other names of a parameter or buffer, each with the name that it is stored by.
    aliases: dict[str, str] = field(default_factory=dict)
    training: Any = None  # groups, counters, schedule, loss scale and configuration, typed
    extra: Any = None  # what the caller saved, typed
    number: int = 0  # counts up in a directory: a newer checkpoint there has a higher number

    def text(self) -> str:
        """Returns the manifest as text. It begins with what is read of many checkpoints at a time, so that the rest need not be
        read."""
        wrong = [name for name in self._names() if not _is_text(name)]
        if wrong:
            raise ValueError(f"Cannot save {wrong[0]!a:.200}: this name cannot be written as UTF-8. Rename it.")
        rest = {**asdict(replace(self, training=None, extra=None)), "training": self.training, "extra": self.extra}
        head = {"format": FORMAT, "number": rest.pop("number"), "version": VERSION}
        return f"{_dumped(head)[:-1]},{_dumped({**rest, 'sha256': _hash_of({**head, **rest})})[1:]}"

    @property
    def digest(self) -> str:
        """A digest that is the same for two ranks exactly if their manifests are."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _names(self) -> Iterator[str]:
        """Yields the names of all tensors, and what their keys in files are made of."""
        yield from (*self.parameters, *self.buffers, *self.aliases)
        yield from itertools.chain.from_iterable(stored.state for stored in self.parameters.values())

    @staticmethod
    def read(text: bytes, where: str) -> Manifest:
        """Reads and checks a manifest. One changed bit is an error."""
        try:
            body = plain_json(text)
        except ValueError as error:
            raise BadCheckpoint(f"Cannot read {where}: it is not JSON ({error}). {ANOTHER}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise BadCheckpoint(f"Cannot read {where}: it is not the manifest of a checkpoint that zero saved. {ANOTHER}")
        if body.get("version") != VERSION:
            raise BadCheckpoint(
                f"Cannot read {where}: its format has version {body.get('version')!r:.20}, and this version of zero reads "
                f"{VERSION}. Load it with the version of zero that wrote it, or export it there."
            )
        if not is_within(body, _DEEPEST):
            raise BadCheckpoint(f"Cannot read {where}: it has more than {_DEEPEST} levels. {ANOTHER}")
        if body.pop("sha256", None) != _hash_of(body):
            raise BadCheckpoint(f"Cannot read {where}: its content does not have the hash that it names. {ANOTHER}")
        try:
            # Validated from `body`, as pydantic's JSON has limits that Python's has not.
            manifest = _reader().validate_python(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            what = ".".join(map(str, first["loc"]))
            raise BadCheckpoint(f"Cannot read {where}: its {what} is wrong ({first['msg']}). {ANOTHER}") from error
        wrong = [name for name, stored in manifest.parameters.items() if not stored.covers()]
        wrong += [name for name, stored in manifest.parameters.items() if not stored.lies_in(len(manifest.files))]
        wrong += [name for name, buffer in manifest.buffers.items() if not buffer.can_be()]
        # A name that leads to another folder.
        wrong += [file.name for file in manifest.files if not _FILE_NAME.fullmatch(file.name)]
        wrong += [name for name in manifest.aliases.values() if name not in {*manifest.parameters, *manifest.buffers}]
        wrong += [name for name in manifest._names() if not _is_text(name)]
        if wrong:
            shown = wrong[0].encode(errors="backslashreplace").decode()
            raise BadCheckpoint(f"Cannot read {where}: what it says of {shown:.200} cannot be true. {ANOTHER}")
        return manifest

    def training_with(self, fetch: Callable[[str, torch.dtype, list[int]], torch.Tensor]) -> dict[str, Any]:
        """Returns `training` as it was saved, with the parts that every training has; `fetch` reads its tensors."""
        training: Any = values.decode(self.training, fetch)
        wrong = _first_wrong(training)
        if wrong is not None:
            raise BadCheckpoint(f"Cannot read the checkpoint: its manifest {wrong}. {ANOTHER}")
        return {"left_out": [], **training}


def _first_wrong(training: Any) -> str | None:
    if not isinstance(training, dict):
        return "says nothing of the training"
    for name, kinds in _TRAINING.items():
        if name not in training:
            return f"lacks {name}"
        value = training[name]
        if kinds and (type(value) not in kinds or (kinds == (int,) and not 0 <= value < MOST_COUNTED)):
            return f"has a {name} that is {value!r:.60}"
    named = [group.get("params") if isinstance(group, dict) else None for group in training["groups"]]
    for names in (*named, training.get("left_out", [])):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return "has parameters without a name in its groups"
    return None


class Unreadable(ValueError):
    """A reason for which a file cannot be read, which the error about that file gives."""


def plain_json(text: bytes) -> Any:
    """Parses JSON as the standard has it: without NaN, names given twice, or more levels than Python follows. Raises a
    ValueError with the reason."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_table)
    except RecursionError:
        raise Unreadable("it has too many levels") from None


def _refuse(name: str) -> None:
    raise Unreadable(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Unreadable(f"{text:.40} is beyond what a number holds")
    return number


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Unreadable("it has one name twice")
    return made


def is_within(body: Any, levels: int) -> bool:
    """Returns True if nothing in it lies deeper. No function calls itself, as Python ends at some depth."""
    level = [body]
    for _ in range(levels):
        below = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = list(itertools.chain.from_iterable(below))
        if not level:
            return True
    return False


def _is_text(name: str) -> bool:
    """Returns True if it has no half of a surrogate pair, which no file can have."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def number_of(head: bytes) -> int | None:
    """Returns the number of a checkpoint in its directory, from the beginning of a manifest; None where it is not one."""
    match = _HEAD.match(head)
    return None if match is None else int(match[1])


@dataclass
class Part:
    """The account of what one rank has written: stretches of each parameter, and the entries of its state."""

    file: File | None = None
    stretches: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=dict)  # the dtypes of the entries that go with elements
    plain: dict[str, Any] = field(default_factory=dict)  # the other entries, typed

    def text(self) -> str:
        return _dumped(asdict(self))

    @staticmethod
    def read(text: str) -> Part:
        body = json.loads(text)
        return Part(**{**body, "file": File(**body["file"])})


@dataclass(frozen=True)
class Outline:
    """The facts of a parameter that every rank knows without asking others."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    dtype: str
    value_dtype: str
    cut: tuple[int, tuple[int, ...]] | None = None


def merged(outlines: Mapping[str, Outline], parts: Sequence[Part]) -> dict[str, Stored]:
    """Merges all ranks' parts: every element of each parameter once, and one state."""
    stored: dict[str, Stored] = {}
    for name, outline in outlines.items():
        having = [(number, part) for number, part in enumerate(parts) if name in part.stretches]
        stretches = [Stretch(number, *span) for number, part in having for span in part.stretches[name]]
        stretches.sort(key=lambda stretch: stretch.start)
        kinds = {_dumped([part.state.get(name, {}), part.plain.get(name, {})]) for _, part in having}
        if len(kinds) > 1:
            raise CheckpointFailed(
                f"Cannot save the state of {name}: values that belong to no element differ between ranks: "
                f"{' and '.join(sorted(kinds))[:200]}. Pass whole_tensors=True where the optimizer looks at whole tensors; if "
                "it does already and ranks have parts of the parameter, make its experts a ModuleList."
            )
        state, plain = (having[0][1].state.get(name, {}), having[0][1].plain.get(name, {})) if having else ({}, {})
        stored[name] = Stored(**asdict(outline), state=state, plain=plain, stretches=tuple(stretches))
        assert stored[name].covers(), f"not every element of {name} was written once: {stretches}"
    return stored


def key_of(name: str, what: str, start: int) -> str:
    """Returns the name of a stretch of a parameter in its file."""
    return f"{name}/{what}/{start}"


def buffer_key(name: str) -> str:
    return f"{name}/buffer"


@functools.cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dumped(body).encode()).hexdigest()


def _dumped(body: Any) -> str:
    # Sorted and without spaces, so that one content has one text. Dicts of the caller keep their order all the same, as they
    # are lists in typed form.
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


# names ------------------------------------------------------------------------------------------------------------------


@dataclass
class Named:
    """A model by canonical names, whatever is wrapped around it or its parts. A tensor with several names is listed by the
    first; the others are its aliases."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # the persistent ones
    modules: dict[str, nn.Module] = field(default_factory=dict)  # modules that keep more than tensors
    aliases: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Named:
        named = Named()
        first: dict[int, str] = {}
        for name, tensor in _tensors_of(model):
            name = unwrapped(name)
            if first.setdefault(id(tensor), name) != name:
                named.aliases[name] = first[id(tensor)]
            elif isinstance(tensor, nn.Parameter):
                named.parameters[name] = tensor
            else:
                named.buffers[name] = tensor
        for name, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                named.modules[unwrapped(name)] = module
        return named

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives parameters other names, by their present ones."""
        self.parameters = {names.get(name, name): param for name, param in self.parameters.items()}
        self.aliases = {alias: names.get(name, name) for alias, name in self.aliases.items()}


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what `state_dict` has, in its order, under every name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        yield from ((before + name, param) for name, param in module._parameters.items() if param is not None)
        kept = ((name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
        yield from ((before + name, buffer) for name, buffer in kept if buffer is not None)


def num_wrappers(names: Collection[str]) -> int:
    """Returns how many times everything lies in one attribute `module`, as what people write around a model calls it."""
    depth = 0
    parts = [name.split(".") for name in names]
    while parts and all(len(path) > depth + 1 and path[depth] == "module" for path in parts):
        depth += 1
    return depth


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def rewrapped(name: str, before: int, after: int) -> str:
    """Returns a name of one model with the wrappers of another one."""
    return ".".join(["module"] * after + name.split(".")[before:])
