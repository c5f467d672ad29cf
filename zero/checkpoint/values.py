"""Writes Python's own values as JSON that restores their types, the states of random generators among them.

Plain JSON makes a tuple a list and the key 3 the text "3", and has no infinity and no bytes: a schedule with its milestones in
such a dict would go on with a constant rate. So what JSON does not keep is written as `{"$": its type, "v": its parts}`, and a
value that cannot be written is refused with the path to it. Of classes only those of tensors that a package declares safe to
torch are looked up, and of functions none, so reading a checkpoint runs no code of its own.
"""

from __future__ import annotations

import base64
import collections
import datetime
import itertools
import json
import math
import pathlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.serialization import get_safe_globals
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerators import Accelerator
from accelerators.tensor_bytes import bytes_of, from_bytes, host_bytes
from zero.errors import BadCheckpoint, full_name, refusing
from zero.memory.formats import dtype_name, dtype_named

ANOTHER = "Load another checkpoint."  # the remedy for a damaged one
_DEEPEST = 100  # the most levels of containers: Python's own JSON ends at a number that depends on its caller
_MOST_BITS = 10_000  # the most bits of an integer: Python limits the digits of a decimal that it reads
_INLINE_BYTES = 1024  # the most bytes of a tensor that stays in the text; a larger one goes to a file
_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered", collections.Counter: "counter"}
_MADE_FROM_ITEMS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _CONTAINERS.items()}
_MADE_FROM_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
}

Keep = Callable[[torch.Tensor], str]  # writes a tensor to a file, and returns its name there
Fetch = Callable[[str, torch.dtype, list[int]], torch.Tensor]


def encode(value: Any, path: str, keep: Keep | None = None) -> Any:
    """Returns a value as JSON. Raises a ValueError with the path to what cannot be stored."""
    return _Encoder(keep).encode(value, path)


class _Encoder:
    """Encodes values, and knows the path to the present one."""

    def __init__(self, keep: Keep | None) -> None:
        self._keep = keep
        self._around: list[int] = []  # the ids of the containers around the value

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MOST_BITS):
            return value
        if kind is float:
            return value if math.isfinite(value) else _tagged("float", struct.pack("<d", value).hex())
        if kind in (list, collections.deque) or kind in _CONTAINERS or kind in _MAPPINGS:
            return self._container(value, path)
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if is_traceable_wrapper_subclass(value) and full_name(kind) in _safe_classes():
            return self._parts(value, path)
        made = _simple(value)
        if made is None:
            raise ValueError(
                f"Cannot save {path}: a {full_name(kind)} cannot be stored. Use tensors, numbers, "
                "texts, bytes, and lists, tuples, sets and dicts of them."
            )
        return made

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._around:
            raise ValueError(f"Cannot save {path}: it contains itself. Save something without a circle.")
        if len(self._around) == _DEEPEST:
            raise ValueError(f"Cannot save {path}: it lies {_DEEPEST} levels deep. Save flatter values.")
        self._around.append(id(value))
        try:
            kind = type(value)
            if kind in _MAPPINGS:
                if kind is dict and all(type(key) is str for key in value) and _keeps(value):
                    return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
                pairs = [[self.encode(k, f"{path} (a key)"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
                return _tagged(_MAPPINGS[kind], pairs)
            items = [self.encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
            if kind is collections.deque:
                return _tagged("deque", [items, value.maxlen])
            return items if kind is list else _tagged(_CONTAINERS[kind], items)
        finally:
            self._around.pop()

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise ValueError(f"Cannot save {path}: it is not a dense tensor with values. Make it one.")
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        # Factors of matrices are such tensors, and the bits of a product depend on their strides.
        if not value.is_contiguous() and value.permute(order).is_contiguous():
            return _tagged("permuted", [order, self._tensor(value.permute(order), path)])
        made = [dtype_name(value.dtype), list(value.shape)]
        if self._keep is not None and value.nbytes > _INLINE_BYTES:
            coded = _tagged("tensor in a file", [*made, self._keep(value.detach())])
        else:
            coded = _tagged("tensor", [*made, base64.b64encode(bytes_of(value)).decode()])
        return _tagged("wants a gradient", coded) if value.requires_grad else coded

    def _parts(self, value: Any, path: str) -> Any:
        """Encodes a tensor that is made of others, as one of few bits."""
        names, about = value.__tensor_flatten__()
        parts = {name: self.encode(getattr(value, name), f"{path}.{name}") for name in names}
        given = [self.encode(about, path), list(value.shape), list(value.stride())]
        return _tagged("parts", [full_name(type(value)), parts, *given])


def _safe_classes() -> dict[str, Any]:
    """Returns the classes of tensors that packages which are imported declare to be safe to read, as to torch.load."""
    return {full_name(kind): kind for kind in get_safe_globals() if isinstance(kind, type) and issubclass(kind, torch.Tensor)}


def _keeps(value: dict[str, Any]) -> bool:
    """Returns True if JSON gives the dict back in its order; the manifest is written sorted."""
    return "$" not in value and list(value) == sorted(value)


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {"$": name, "v": value}


def _simple(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    if kind is complex:
        return _tagged("complex", struct.pack("<dd", value.real, value.imag).hex())
    if kind in (torch.dtype, torch.device):
        return _tagged(kind.__name__, str(value).removeprefix("torch."))
    if isinstance(value, pathlib.PurePath) and kind is type(pathlib.Path()):
        return _tagged("path", str(value))
    if kind in (datetime.datetime, datetime.date, datetime.time):
        zone, fold = getattr(value, "tzinfo", None), getattr(value, "fold", 0)
        return None if fold or type(zone) not in (type(None), datetime.timezone) else _tagged(kind.__name__, value.isoformat())
    if kind is datetime.timedelta:
        return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
    if kind in (range, slice):
        parts = [value.start, value.stop, value.step]
        return _tagged(kind.__name__, parts) if all(part is None or type(part) is int for part in parts) else None
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        return _numpy(value)
    return None


def _numpy(value: Any) -> dict[str, Any] | None:
    name, is_array = value.dtype.str, type(value).__name__ == "ndarray"
    if value.dtype.kind not in "biufc" or not (is_array or value.shape == ()):
        return None
    return _tagged("array" if is_array else "scalar", [name, list(value.shape), base64.b64encode(value.tobytes()).decode()])


def decode(coded: Any, fetch: Fetch | None = None) -> Any:
    """Returns what `encode` was given. Raises BadCheckpoint, which is a ValueError, for what it cannot have made."""

    def refusal(error: Exception) -> Exception:
        what = f"it is none that was saved ({type(error).__name__}: {error!s:.200})"
        refused = BadCheckpoint(f"Cannot read a value of the checkpoint: {what}. Load another checkpoint.")
        return error if isinstance(error, OSError) else refused

    with refusing(refusal):
        return _decode(coded, fetch)


def _decode(coded: Any, fetch: Fetch | None) -> Any:
    if isinstance(coded, list):
        return [_decode(item, fetch) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if "$" not in coded:
        return {key: _decode(item, fetch) for key, item in coded.items()}
    name, value = coded["$"], coded["v"]
    if name in _MADE_FROM_ITEMS:
        return _MADE_FROM_ITEMS[name](_decode(item, fetch) for item in value)
    if name in _MADE_FROM_PAIRS:
        return _MADE_FROM_PAIRS[name]([(_decode(key, fetch), _decode(item, fetch)) for key, item in value])
    if name == "deque":
        return collections.deque([_decode(item, fetch) for item in value[0]], value[1])
    if name == "tensor in a file" and fetch is not None:
        dtype, shape, key = value
        return fetch(key, dtype_named(dtype), shape)
    if name == "parts":
        kind, parts, about, size, stride = value
        if kind not in _safe_classes():
            raise BadCheckpoint(f"Cannot read a {kind}: no package that is imported declares it safe. Import its package.")
        made = {each: _decode(part, fetch) for each, part in parts.items()}
        return _safe_classes()[kind].__tensor_unflatten__(made, _decode(about, fetch), size, stride)
    if name == "permuted":
        return _leaf(_decode(value[1], fetch), [value[0].index(dim) for dim in range(len(value[0]))])
    if name == "wants a gradient":
        return _decode(value, fetch).detach().requires_grad_()
    make = _MADE.get(name)
    if make is None:
        raise BadCheckpoint(f"Cannot read a value of type {name!r}: the format has no such type ({value!r:.60}). {ANOTHER}")
    return make(value)


def _leaf(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    return tensor.detach().permute(order).requires_grad_(tensor.requires_grad)


def _tensor_from(value: Any) -> torch.Tensor:
    dtype, shape, data = value
    return from_bytes(base64.b64decode(data), dtype_named(dtype), shape)


def _numpy_from(value: Any) -> Any:
    import numpy  # imported here, as a program without such values does not need it

    dtype, shape, data = value
    return numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()


_MADE: dict[str, Callable[[Any], Any]] = {
    "float": lambda value: struct.unpack("<d", bytes.fromhex(value))[0],
    "complex": lambda value: complex(*struct.unpack("<dd", bytes.fromhex(value))),
    "bytes": base64.b64decode,
    "bytearray": lambda value: bytearray(base64.b64decode(value)),
    "dtype": dtype_named,
    "device": torch.device,
    "path": pathlib.Path,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda value: datetime.timedelta(*value),
    "range": lambda value: range(*value),
    "slice": lambda value: slice(*value),
    "tensor": _tensor_from,
    "array": _numpy_from,
    "scalar": lambda value: _numpy_from(value)[()],
}


def first_difference(one: Any, other: Any, path: str) -> str | None:
    """Returns the path to where two values differ, in type or in bits; None if they are the same."""
    if type(one) is not type(other):
        return path
    if isinstance(one, torch.Tensor):
        kinds = [(tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in (one, other)]
        return None if kinds[0] == kinds[1] and bytes_of(one) == bytes_of(other) else path
    if type(one) in _MAPPINGS:
        if len(one) != len(other):
            return path
        pairs = zip(one.items(), other.items(), strict=True)
        keys = (first_difference(a, c, f"{path} (a key)") for (a, _), (c, _) in pairs)
        both = zip(one.items(), other.values(), strict=True)
        values = (first_difference(value, other_value, f"{path}[{key!r}]") for (key, value), other_value in both)
        return next((difference for difference in itertools.chain(list(keys), values) if difference is not None), None)
    if isinstance(one, (list, tuple, collections.deque)):
        if len(one) != len(other) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return path
        inside = (first_difference(a, b, f"{path}[{number}]") for number, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((difference for difference in inside if difference is not None), None)
    if type(one) is float:
        return None if struct.pack("<d", one) == struct.pack("<d", other) else path
    if hasattr(one, "tobytes") and hasattr(one, "dtype"):
        return None if one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes() else path
    return None if one == other or repr(one) == repr(other) else path


# random numbers ---------------------------------------------------------------------------------------------------------


def random_bytes(accelerator: Accelerator) -> torch.Tensor:
    """Returns the states of the generators of Python, NumPy and torch, on the host and on the device, as bytes. A run that gets
    them back goes on as if it had not ended."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": accelerator.rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # a program that did not import it draws nothing from it
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    text = json.dumps(encode(states, "random numbers"))
    return from_bytes(text.encode(), torch.uint8)


def put_back(accelerator: Accelerator, saved: torch.Tensor) -> None:
    """Restores what `random_bytes` returned. If that cannot have returned it, raises, and all are as they were."""
    before = random_bytes(accelerator)
    try:
        _set_generators(accelerator, decode(json.loads(bytes(host_bytes(saved)))))
    except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError) as error:
        _set_generators(accelerator, decode(json.loads(bytes(host_bytes(before)))))
        raise BadCheckpoint(f"Cannot restore random numbers: {error!s:.200}. {ANOTHER}") from error


def _set_generators(accelerator: Accelerator, states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    accelerator.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
