"""Parameters whose values are in files until they are sharded, and a reader that reads any parameters in stretches.

[Note: unread weights]
A model that was loaded for sharding has its parameters as tensors with shape, dtype and device, and without memory. What is
done to them before they are sharded, by casts, joins, views and copies, is remembered and done to what is read; so a model's
own code may rename, stack and tie its weights. Sharding then reads the bytes of this rank's shares. What computes with one
earlier is given its values for as long as it runs, unless autograd records it: a training has to be sharded first.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero.memory.values import Cast, Held, Joined, Values, Viewed, whole
from zero.plan.layout import Span
from zero.runtime.params.absent import Absent
from zero.runtime.params.operators import Kind, WithoutMemory, operator_of
from zero.runtime.params.swap import become_plain, swap

_SHARD = "Shard the model first, with zero.shard or a trainer that does."
_AT_ONCE = 2**22  # elements that are compared at once


class Unread(WithoutMemory):
    """A tensor whose values are made when they are read. As a parameter it is the tensor itself, as torch does with tensors of
    other classes."""

    source: Values  # the values of the contiguous tensor that this one is a view of
    shadow: torch.Tensor
    label: str

    @staticmethod
    def of(values: Values, label: str, device: torch.device | str = "cpu") -> Unread:
        made: Unread = _make(values, torch.empty(values.shape, dtype=values.dtype, device="meta"), torch.device(device), label)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def read(self, span: Span) -> torch.Tensor:
        """Returns a stretch of its elements as a line, on the host."""
        return self.viewed().read(span)

    def whole(self) -> torch.Tensor:
        """Returns a plain tensor with these values."""
        device = "cpu" if self.is_meta else self.device
        made = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=device)
        return made.copy_(whole(self.viewed()))

    def viewed(self) -> Values:
        """Returns its values alone. The returned object keeps rows that it has read, for the next stretch of them."""
        return Viewed(self.source, self.shadow)

    @property
    def data(self) -> torch.Tensor:
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is not self:
            become(self, values.detach())

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().whole().numpy(force=force)  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        return self.detach().whole().tolist()  # type: ignore[attr-defined]

    def untyped_storage(self) -> Any:
        if self.is_meta:  # a tensor on the meta device has a storage without memory
            return torch.empty(self.shape, dtype=self.dtype, device="meta").untyped_storage()
        return super().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach().whole()  # type: ignore[attr-defined]
        return (nn.Parameter(plain, self.requires_grad) if self._is_parameter() else plain).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = _make(self.source, self.shadow, self.device, self.label)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name not in made.__dict__})
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    def _is_parameter(self) -> bool:
        return isinstance(self, nn.Parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Unread({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def no_memory(self, what: str, writes_it: bool = False) -> RuntimeError:
        return self.refusal(what)

    def refusal(self, what: str) -> RuntimeError:
        why = "its values are in files, and are read when the model is sharded"
        return RuntimeError(f"Cannot {what} {self.label}: {why}. {_SHARD}")


def unread_among(model: nn.Module, more: Sequence[torch.Tensor] = ()) -> list[Any]:
    """Returns the unread ones among these parameters, each once."""
    return [param for param in dict.fromkeys([*model.parameters(), *more]) if type(param) is Unread]


def become(param: Any, values: torch.Tensor) -> Any:
    """Gives a parameter, which stays the same object, these values or this memory. Returns the tensor that it was, for another
    `become`."""
    if type(values) is not Unread:
        return become_plain(param, values)
    other = _make(values.source, values.shadow, values.device, values.label).requires_grad_(param.requires_grad)
    swap(param, other)
    return other


def _make(values: Values, shadow: torch.Tensor, device: torch.device, label: str) -> Any:
    with torch.inference_mode(False):
        made: Any = torch.Tensor._make_wrapper_subclass(
            Unread, shadow.shape, strides=shadow.stride(), storage_offset=shadow.storage_offset(), dtype=shadow.dtype,
            device=device, requires_grad=False,
        )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.source, made.shadow, made.label = values, shadow, label
    return made


# operators -------------------------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    kind, written = operator_of(func)
    unread = [value for value in _flat((*args, *kwargs.values())) if type(value) is Unread]
    targets = [kwargs.get(name) if position >= len(args) else args[position] for name, position in written]
    if kind is Kind.REFUSED or any(type(value) is Unread for value in _flat(targets)):
        raise unread[0].refusal("write to")
    if kind is Kind.VIEW:
        made = func(*map(_shadow_of, args), **kwargs)
        if all(shadow.dtype == unread[0].dtype for shadow in _flat([made])):
            return _views(made, unread[0])
    if func in _REMEMBERED:
        remembered = _REMEMBERED[func](*args, **kwargs)
        if remembered is not None:
            return remembered
    name = func.overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):  # these take its shape, and not its values
        return func(*map(_shadow_of, args), **{**kwargs, "device": kwargs.get("device") or unread[0].device})
    if func is torch.ops.aten.equal.default and all(type(value) is Unread for value in args):
        return _equal(*args)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in unread):
        raise unread[0].refusal(f"run {func} on")
    if func is not torch.ops.aten.copy_.default:
        warnings.warn(
            f"{unread[0].label} is read from its file for {func}, and will be each time. {_SHARD}", RuntimeWarning, stacklevel=2
        )
    return func(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})


def _flat(values: Sequence[Any]) -> list[Any]:
    return [member for value in values for member in (value if type(value) in (list, tuple) else (value,))]


def _shadow_of(value: Any) -> Any:
    return value.shadow if type(value) is Unread else value


def _read(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    return value.whole() if type(value) is Unread else value


def _views(made: Any, of: Unread) -> Any:
    if isinstance(made, torch.Tensor):
        return _make(of.source, made, of.device, of.label)
    return type(made)(_views(one, of) for one in made)


def _contiguous(values: Values, of: Unread, device: Any = None) -> Unread:
    return Unread.of(values, of.label, of.device if device is None else device)


def _to_copy(of: Unread, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return None
    dense = memory_format is torch.contiguous_format or of.shadow.is_contiguous()
    values = of.viewed() if dense else of.source
    cast: Values = values if dtype is None or dtype == of.dtype else Cast(values, dtype)
    if dense:
        return _contiguous(cast, of, device)
    shadow = torch.empty(cast.shape, dtype=cast.dtype, device="meta")
    shadow = shadow.as_strided(of.shadow.shape, of.shadow.stride(), of.shadow.storage_offset())
    return _make(cast, shadow, of.device if device is None else torch.device(device), of.label)


def _clone(of: Unread, *, memory_format: Any = None) -> Any:
    return _to_copy(of, memory_format=memory_format)


def _unsafe_view(of: Unread, shape: Sequence[int]) -> Any:
    return _make(of.source, of.shadow.view(shape), of.device, of.label)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Unread | None:
    first = next(tensor for tensor in tensors if type(tensor) is Unread)
    if any((tensor.dtype, tensor.device, tensor.dim()) != (first.dtype, first.device, first.dim()) for tensor in tensors):
        return None
    return _contiguous(Joined([_values_of(tensor) for tensor in tensors], dim % first.dim()), first)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Unread | None:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _values_of(tensor: torch.Tensor) -> Values:
    return tensor.viewed() if type(tensor) is Unread else Held(tensor)


def _equal(one: Unread, other: Unread) -> bool:
    if one.shape != other.shape:
        return False
    stretches = Span(0, math.prod(one.shape)).cut(_AT_ONCE)
    return all(torch.equal(one.read(stretch), other.read(stretch)) for stretch in stretches)


_REMEMBERED: dict[Any, Any] = {
    torch.ops.aten._to_copy.default: _to_copy,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten._unsafe_view.default: _unsafe_view,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.stack.default: _stack,
}


# reading ---------------------------------------------------------------------------------------------------------------


class ParamReader:
    """Keeps the weights that were read last gathered for the next stretch, until it is closed or others are read."""

    def __init__(self) -> None:
        self._param: torch.Tensor | None = None
        self._held = contextlib.ExitStack()

    def values_of(self, param: torch.Tensor) -> Values:
        """Returns the values of a parameter or a buffer, which stays where it is."""
        return param.viewed() if isinstance(param, Unread) else _Param(param, self)

    def hold(self, param: torch.Tensor) -> None:
        if param is not self._param:
            self._held.close()
            self._param = param
            if isinstance(param, Absent):
                self._held.enter_context(param.in_chunk.cache.using([param.in_chunk]))

    def __enter__(self) -> ParamReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._param = None
        self._held.close()


class _Param:
    """The values of a parameter, read from where they are."""

    def __init__(self, param: torch.Tensor, reader: ParamReader) -> None:
        self.shape = tuple(param.shape)
        self.dtype = param.dtype
        self._param = param
        self._reader = reader

    @torch.no_grad()
    def read(self, span: Span) -> torch.Tensor:
        self._reader.hold(self._param)
        plain: Any = self._param.detach() if isinstance(self._param, nn.Parameter) else self._param
        line = plain.resolve_conj().resolve_neg().reshape(-1)[span.start : span.stop]
        return (line.clone() if isinstance(line, Absent) else line).cpu()
