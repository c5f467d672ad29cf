"""Parameters without memory, whose weights every operator is given whole.

[Note: absent weights]
A parameter whose weights are in shares stays the object that it is, with shape, dtype and device, and has no storage. So do
all views of it: what autograd saves of a weight is a handle, and no memory. Below autograd, every operator that is given such
a tensor comes to `_dispatch`, whether Python called it or C++ did in a backward; there the weights are gathered for as long
as it runs. Nothing rests on modules, on hooks, or on an end of a backward: a weight cannot be read while it is not there.

A *shadow* says where a tensor lies: its tensor is on the meta device, with the size, stride and offset of the place in the
chunk. Operators run for every weight of every layer, so what they need again is kept: a shadow keeps its views, a chunk the
plain tensors of shadows while it is whole.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
from torch import nn

from zero.memory.addresses import storage_of
from zero.memory.formats import bytes_of
from zero.memory.gathered import GatheredChunk
from zero.plan.layout import Span
from zero.runtime.params.operators import Kind, WithoutMemory, is_in_place_view, operator_of

_A_CLONE = "Use a clone of it, or optimizer.gathered() around the call."
_A_SAVE = (
    "Write weights with zero.save, or save_pretrained(model, folder) of zero.integrations.transformers; what writes storages, "
    "such as torch.distributed.checkpoint, works inside optimizer.gathered(), or with clones."
)
_CLOSE = "Call close() on the optimizer first."
_TO_EMPTY = (
    "Leave to_empty out: a model that was sharded on the meta device has its shares already. Write values to it, or load some."
)
_A_VIEW = "Use the operator without the underscore, which returns a view."


class Shadow:
    """The place of a tensor in its chunk."""

    __slots__ = ("geometry", "is_conj", "is_neg", "tensor", "views")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()  # elements are conjugated or negated on reading
        self.views: dict[Any, Any] = {}  # shadows of its views, by the operator and arguments


class Absent(WithoutMemory):
    """A tensor without memory: an absent parameter, or a view of one."""

    in_chunk: GatheredChunk
    label: str
    shadow: Shadow

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    @property
    def extent(self) -> Span:
        """The span from its first to its last element, in elements of the chunk."""
        shadow = self.shadow.tensor
        if not shadow.numel():
            return Span(0, 0)
        length = sum((size - 1) * stride for size, stride in zip(shadow.shape, shadow.stride(), strict=True)) + 1
        item, whole = shadow.element_size(), self.in_chunk.dtype.itemsize
        start = shadow.storage_offset() * item
        return Span(start // whole, -(-(start + length * item) // whole))

    def whole(self) -> torch.Tensor:
        """Returns a plain tensor with these values, in memory of its own."""
        with torch.no_grad():
            return self.detach().clone(memory_format=torch.preserve_format)

    @property
    def data(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return _view_at(self.shadow, self)  # as with .data of any tensor, autograd does not see writes

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is self:
            return
        if _is_given_by_to_empty(sys._getframe(1)):
            raise self.refusal("run to_empty() on", _TO_EMPTY)
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise self.refusal(f"assign {tuple(values.shape)} {values.dtype} to .data of", _CLOSE)
        with torch.no_grad():
            self.data.copy_(_source_of(values))

    def numpy(self, *, force: bool = False) -> Any:
        array = self.whole().numpy(force=force)
        array.flags.writeable = False  # it is a copy, and writes to it would be lost
        return array

    def tolist(self) -> Any:
        return self.whole().tolist()

    def item(self) -> Any:
        return self.whole().item()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = plain = self._plain()
        return plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)  # type: ignore[no-untyped-call]

    def _plain(self) -> torch.Tensor:
        return self.whole()

    def no_memory(self, what: str, writes_it: bool = False) -> RuntimeError:
        return self.refusal(what, _A_SAVE if writes_it else _A_CLONE)

    def refusal(self, what: str, remedy: str) -> RuntimeError:
        return RuntimeError(f"Cannot {what} {self.label}: its weights are in shares, and it has no memory of its own. {remedy}")


class AbsentParameter(Absent, nn.Parameter):
    """A parameter whose weights are in shares."""

    def _plain(self) -> torch.Tensor:
        return nn.Parameter(self.whole(), self.requires_grad)

    def set_(self, *args: Any, **options: Any) -> Any:
        """Takes values as torch's parametrizations give them. torch's own `set_` would take the parameter's autograd node
        away."""
        source = args[0] if len(args) == 1 and not options and isinstance(args[0], torch.Tensor) else None
        if source is None or (source.shape, source.dtype) != (self.shape, self.dtype) or source.is_neg() or source.is_conj():
            raise self.refusal("run set_ on", _CLOSE)
        return self.copy_(_source_of(source))


class AbsentView(Absent):
    """A view of an absent parameter."""


def send_to_process(absent: Absent) -> Any:
    """Reduces an absent tensor to bytes for another process. Shared memory would be freed after the pickling, before that
    process opens it."""
    plain = absent.whole()
    geometry = tuple(plain.shape), plain.stride(), plain.dtype, plain.device
    return _receive, (bytes_of(plain), *geometry, isinstance(absent, nn.Parameter), absent.requires_grad)


def _receive(
    values: bytes, shape: Any, stride: Any, dtype: torch.dtype, device: Any, is_param: bool, requires_grad: bool
) -> torch.Tensor:
    received = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if values:
        received.copy_(torch.frombuffer(bytearray(values), dtype=dtype).view(shape))
    return nn.Parameter(received, requires_grad) if is_param else received.requires_grad_(requires_grad)


def tie_in_state_dict(_: nn.Module, state_dict: dict[str, Any], *__: Any) -> None:
    """Makes a weight with several names one tensor, as a hook of `state_dict`: without storages nothing else tells code that
    writes the dictionary that it is one weight."""
    tensors: dict[Any, Any] = {}
    for name, value in state_dict.items():
        if type(value) in _ABSENT:
            state_dict[name] = tensors.setdefault((id(value.in_chunk), value.shadow.geometry), value)


def never_compile(function: Callable[..., Any]) -> None:
    """Keeps the compiler from a function and all that it calls: it neither compiles the function's frame nor looks into a call
    of it. The compiler's own decorators would load it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):  # a torch that has no such names compiles both, which only takes time
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


never_compile(vars(Absent)["__torch_dispatch__"].__func__)  # it runs within graphs that were broken off, operator by operator
_ABSENT = frozenset((AbsentParameter, AbsentView))
for _kind in _ABSENT:
    ForkingPickler.register(_kind, send_to_process)
_MAY_HAVE = _ABSENT | {list, tuple}  # types of arguments that are absent tensors or may contain some
_MOST_VIEWS = 64  # views that a shadow keeps
_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def make_absent_param(
    in_chunk: GatheredChunk, label: str, shadow: torch.Tensor, device: torch.device, requires_grad: bool
) -> AbsentParameter:
    """Makes a parameter without memory whose place is that of its shadow."""
    return _without_memory(AbsentParameter, in_chunk, label, Shadow(shadow), device, requires_grad)  # type: ignore[no-any-return]


def _without_memory(
    cls: type[Absent], in_chunk: GatheredChunk, label: str, shadow: Shadow, device: torch.device, requires_grad: bool
) -> Any:
    size, stride, offset = shadow.geometry
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=shadow.tensor.dtype, device=device, requires_grad=requires_grad
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # C++ code that takes its pointer raises, and would crash otherwise
    if shadow.is_conj:
        torch._C._set_conj(made, True)
    if shadow.is_neg:
        torch._C._set_neg(made, True)
    made.in_chunk, made.label, made.shadow = in_chunk, label, shadow
    return made


def _is_given_by_to_empty(frame: FrameType) -> bool:
    """Returns True if a frame is that of a module's `to_empty`, which would give each rank other values."""
    function = frame.f_locals.get("fn") if frame.f_code is nn.Module._apply.__code__ else None
    return getattr(function, "__qualname__", "").startswith(f"{nn.Module.to_empty.__qualname__}.")


# operators -------------------------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    kind, written = operator_of(func)
    if kind is Kind.VIEW:
        return _view(func, args, kwargs)
    if kind is Kind.READ:
        try:
            return _run(func, args, kwargs)  # the common case, and a quick one
        except _Unsettled:
            pass
    absent = _absent_in((*args, *kwargs.values()))
    if kind is Kind.REFUSED:
        raise absent[0].refusal(f"run {func} on", _A_VIEW if is_in_place_view(func) else _CLOSE)
    if len(absent) > 1 and (many := _num_of_many(func, args, kwargs)) > 1:
        return _one_by_one(func, args, kwargs, many)
    targets = _absent_in([kwargs.get(name) if position >= len(args) else args[position] for name, position in written])
    with _gathered(absent):
        for tensor in targets:
            tensor.in_chunk.cache.make_own(tensor.in_chunk)
        return _run(func, args, kwargs, targets, is_held=True)


def _num_of_many(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the length of the lists that an operator on lists is given; 1 for others, and if lists differ, which torch
    refuses."""
    if not func.overloadpacket.__name__.startswith("_foreach_"):
        return 1
    lengths = {len(value) for value in (*args, *kwargs.values()) if _has_many(value)}
    return lengths.pop() if len(lengths) == 1 else 1


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], many: int) -> list[Any] | None:
    """Returns the results of an operator on lists that is called for one of so many tensors at a time."""
    results: list[Any] = []
    for number in range(many):
        keywords = {name: _part(value, number) for name, value in kwargs.items()}
        results += func(*(_part(value, number) for value in args), **keywords) or ()
    return results or None


def _part(value: Any, number: int) -> Any:
    return value[number : number + 1] if _has_many(value) else value


def _has_many(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1)  # a number for each


class _Unsettled(Exception):
    """Raised if a chunk is not there, or may be freed before the operator has run."""


def _run(func: Any, args: Any, kwargs: Any, targets: Sequence[Absent] = (), is_held: bool = False) -> Any:
    """Runs an operator on plain tensors. `is_held`: the chunks are counted as used; else they have to be settled. See
    [Note: threads] in zero/memory/gathered.py."""
    given: dict[int, Absent] = {}  # by id of the plain tensor that takes its place
    plain_args = [_plain_of(value, given, is_held) if type(value) in _MAY_HAVE else value for value in args]
    plain_kwargs = {name: _plain_of(value, given, is_held) for name, value in kwargs.items()} if kwargs else kwargs
    result = func(*plain_args, **plain_kwargs)
    for tensor in targets:
        tensor.in_chunk.edited(tensor.extent)
    return _apart(result, given)


def _absent_in(values: Sequence[Any]) -> list[Absent]:
    absent = []
    for value in values:
        if type(value) in _ABSENT:
            absent.append(value)
        elif type(value) in (list, tuple):
            absent += [member for member in value if type(member) in _ABSENT]
    return absent


@contextlib.contextmanager
def _gathered(absent: Sequence[Absent]) -> Iterator[None]:
    """Keeps the chunks of these tensors whole inside. They may belong to several trainings."""
    with contextlib.ExitStack() as stack:
        for cache in dict.fromkeys(tensor.in_chunk.cache for tensor in absent):
            stack.enter_context(cache.using(tensor.in_chunk for tensor in absent if tensor.in_chunk.cache is cache))
        yield


def plain_tensors(absent: Sequence[Absent]) -> list[torch.Tensor]:
    """Returns plain tensors that lie where these do, in chunks that are acquired, for as long as they are."""
    return [_plain_of(tensor, {}, is_held=True) for tensor in absent]


def _plain_of(value: Any, given: dict[int, Absent], is_held: bool) -> Any:
    """Returns the argument that the operator is given in place of this one."""
    if type(value) in (list, tuple):
        return type(value)(_plain_of(member, given, is_held) for member in value)
    if type(value) not in _ABSENT:
        return value
    shadow, chunk = value.shadow, value.in_chunk
    if is_held:
        views, memory = chunk.views, chunk.memory  # in this order, as another thread may write to a copy from now on
    else:
        settled = chunk.settled_here()
        if settled is None:
            raise _Unsettled
        memory, views, _ = settled
    plain = views.get(shadow)
    if plain is None:
        assert memory is not None
        memory = memory if memory.dtype == shadow.tensor.dtype else memory.view(shadow.tensor.dtype)
        size, stride, offset = shadow.geometry
        plain = memory.as_strided(size, stride, memory.storage_offset() + offset)  # its storage may have more than this chunk
        plain = plain.conj() if shadow.is_conj else plain
        plain = torch._neg_view(plain) if shadow.is_neg else plain
        views[shadow] = plain
    given[id(plain)] = value
    return plain


def _apart(result: Any, given: Mapping[int, Absent]) -> Any:
    """Returns a result without memory of a chunk: the absent tensor if it is an argument, and a copy if it lies in a chunk
    against the operator's schema."""
    if type(result) is torch.Tensor:
        if id(result) in given:
            return given[id(result)]
        return result.clone() if _lies_in_one(result, given) else result
    if type(result) in (list, tuple):
        return type(result)(_apart(member, given) for member in result)
    return result


def _lies_in_one(tensor: torch.Tensor, given: Mapping[int, Absent]) -> bool:
    """Returns whether a tensor has memory of one of the chunks."""
    if tensor.layout is not torch.strided:
        if tensor.layout is not torch.sparse_coo and tensor.layout not in _COMPRESSED:
            return False
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    storage = storage_of(tensor)
    for each in given.values():
        memory = each.in_chunk.memory
        if memory is not None and storage_of(memory) == storage:
            return True
    return False


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Makes views of shadows, for which nothing is gathered. Views of a parameter are no inference tensors, wherever they are
    made."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _view(func, args, kwargs)
    of: Absent = args[0]
    # operator_of has seen func, and keeps it: its id stays.
    key = id(func) if len(args) == 1 and not kwargs else (func, *map(_hashable, args[1:]), *kwargs.items())
    made = of.shadow.views.get(key)
    if made is None:
        tensors = func(of.shadow.tensor, *args[1:], **kwargs)
        made = Shadow(tensors) if isinstance(tensors, torch.Tensor) else type(tensors)(map(Shadow, tensors))
        if len(of.shadow.views) >= _MOST_VIEWS:  # as with a slice that moves
            of.shadow.views.clear()
        of.shadow.views[key] = made
    if isinstance(made, Shadow):
        return _view_at(made, of)
    return type(made)([_view_at(one, of) for one in made])


def _source_of(values: torch.Tensor) -> torch.Tensor:
    """Returns values that can be copied to a weight, even if they are read from the memory that is written to."""
    return values.whole() if isinstance(values, Absent) else values


def _hashable(value: Any) -> Any:
    return tuple(value) if type(value) is list else value


def _view_at(shadow: Shadow, of: Absent) -> AbsentView:
    return _without_memory(AbsentView, of.in_chunk, of.label, shadow, of.device, False)  # type: ignore[no-any-return]
