"""Parameters without memory, whose weights are gathered for each operator that reads them.

    weight = model.fc.weight  # an `AbsentParameter`: its shape, dtype and device are as ever, and it has no memory
    turned = weight.t()       # an `AbsentView`: a view gathers nothing
    x @ turned                # `mm` comes to `_dispatch`, which gathers the chunk and runs `mm` on a plain tensor in it

[Note: absent weights]
A parameter whose weights are in shares stays the same object, with its shape, dtype and device, but has no storage. Its views
have none either, so what autograd saves of a weight for backward takes no memory. Below autograd, every operator that is given
such a tensor comes to `_dispatch`, whether Python called the operator or C++ did in a backward. There the chunks of the weights
are gathered, and stay whole while the operator runs. No module, hook or end of a backward takes part in this, so no code can
read a weight that is not gathered.

The *shadow* of an absent tensor says where the tensor lies in its chunk: it has a tensor on the meta device, with the same
size, stride and offset. Operators run for every weight of every layer, so what they need again is kept: a shadow keeps the
shadows of its views, and a chunk keeps, while it is whole, the plain tensor of each shadow.

Alternatives, and why not: hooks of modules gather what a module owns, and miss code that reads a weight of another module. If
the parameter's storage was resized to nothing between uses, its views would lose their memory with it, and an operator that
comes at another time would read memory that is gone, without an error. A kernel of our own for `linear`, by a key of dispatch
that absent parameters alone have, makes one operator of two: a step of small layers took 3 to 7 % less, and gradients of
gradients were added up in another order than torch's.
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

from accelerators.tensor_bytes import bytes_of, from_bytes
from zero.memory.addresses import storage_of
from zero.memory.gathered import GatheredChunk
from zero.plan.layout import Span
from zero.profiling import first_of, in_profile
from zero.runtime.params.operators import Kind, WithoutMemory, is_in_place_view, operator_of, wants_a_clone


class Shadow:
    """The place of a tensor in its chunk: `tensor` is on the meta device, where each parameter has a storage of its own as in
    plain torch, so an offset that is given to `as_strided` counts from its first element. That element is `start` bytes from
    the beginning of the chunk."""

    __slots__ = ("geometry", "is_conj", "is_neg", "start", "tensor", "views")

    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        self.tensor, self.start = tensor, start
        self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()  # torch conjugates or negates when elements are read
        self.views: dict[Any, Any] = {}  # shadows of its views, by the operator and arguments

    def span(self) -> Span:
        """Returns the span from its first element to its last, in bytes of the chunk."""
        if not self.tensor.numel():
            return Span(0, 0)
        length = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True)) + 1
        offset, item = int(self.tensor.storage_offset()), self.tensor.element_size()
        return Span(self.start + offset * item, self.start + (offset + length) * item)


class Absent(WithoutMemory):
    """A tensor whose values are in shares and which has no memory: an absent parameter, or a view of one."""

    in_chunk: GatheredChunk
    label: str
    shadow: Shadow

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    @property
    def extent(self) -> Span:
        """The span from this tensor's first element to its last, in elements of the chunk, whose dtype may be another."""
        span, item = self.shadow.span(), self.in_chunk.dtype.itemsize
        return Span(span.start // item, -(-span.stop // item))

    def whole(self) -> torch.Tensor:
        """Returns a plain tensor with the values of this one. It has memory of its own, which outlives the chunk."""
        with torch.no_grad():
            return self.detach().clone(memory_format=torch.preserve_format)

    @property
    def data(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return _view_at(self.shadow, self)  # autograd sees no writes to it, as with `.data` of any tensor

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
        array.flags.writeable = False  # the array is a copy: writes would not reach the weight
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
        """Copies values of the same shape and dtype, as torch's parametrizations ask by `set_`. torch's own `set_` would take
        the parameter's autograd node away, and our hooks with it."""
        source = args[0] if len(args) == 1 and not options and isinstance(args[0], torch.Tensor) else None
        if source is None or (source.shape, source.dtype) != (self.shape, self.dtype) or source.is_neg() or source.is_conj():
            raise self.refusal("run set_ on", _CLOSE)
        return self.copy_(_source_of(source))


class AbsentView(Absent):
    """A view of an absent parameter."""


_ABSENT = frozenset((AbsentParameter, AbsentView))
_MAY_HAVE = _ABSENT | {list, tuple}  # the types of arguments that are absent tensors or may contain some
_MOST_VIEWS = 64  # the most views that a shadow keeps
_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def make_absent_param(
    in_chunk: GatheredChunk, label: str, start: int, shadow: torch.Tensor, device: torch.device, requires_grad: bool
) -> AbsentParameter:
    """Makes a parameter without memory, of the shape and strides of `shadow`, which is on the meta device. It begins at the
    element `start` of its chunk. Errors call it by `label`."""
    place = Shadow(shadow, start * in_chunk.dtype.itemsize)
    return _without_memory(AbsentParameter, in_chunk, label, place, device, requires_grad)  # type: ignore[no-any-return]


def _without_memory(
    cls: type[Absent], in_chunk: GatheredChunk, label: str, shadow: Shadow, device: torch.device, requires_grad: bool
) -> Any:
    """Makes a tensor that autograd and Python take for an ordinary one, without a storage."""
    size, stride, offset = shadow.geometry
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=shadow.tensor.dtype, device=device, requires_grad=requires_grad
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # code in C++ that takes the data pointer then raises instead of crashing
    if shadow.is_conj:
        torch._C._set_conj(made, True)
    if shadow.is_neg:
        torch._C._set_neg(made, True)
    made.in_chunk, made.label, made.shadow = in_chunk, label, shadow
    return made


def _is_given_by_to_empty(frame: FrameType) -> bool:
    """Returns True if a frame runs a module's `to_empty`: it assigns uninitialized memory, with other values on each rank."""
    function = frame.f_locals.get("fn") if frame.f_code is nn.Module._apply.__code__ else None
    return getattr(function, "__qualname__", "").startswith(f"{nn.Module.to_empty.__qualname__}.")


# operators ------------------------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator of torch that was given absent tensors.

    1. A view is made of their shadows.
    2. An operator that only reads runs at once, without a lock, if its chunks are lasting.
    3. What would exchange the memory of a weight, or its shape, is refused.
    4. An operator on lists runs for one entry after the other, so that not all chunks are whole at the same time.
    5. Any other one acquires its chunks, makes those that it writes to its own, and runs.
    """
    kind, written = operator_of(func)
    if kind is Kind.VIEW:  # 1
        return _view(func, args, kwargs)
    if kind is Kind.READ:  # 2, and nearly always that is all
        try:
            return _run(func, args, kwargs)
        except _NotLasting:
            pass
    absent = _absent_in((*args, *kwargs.values()))
    if kind is Kind.REFUSED:  # 3
        remedy = _A_VIEW if is_in_place_view(func) else _A_CLONE if wants_a_clone(func) else _CLOSE
        raise absent[0].refusal(f"run {func} on", remedy)
    if len(absent) > 1 and (many := _num_of_many(func, args, kwargs)) > 1:  # 4
        return _one_by_one(func, args, kwargs, many)
    targets = _absent_in([kwargs.get(name) if position >= len(args) else args[position] for name, position in written])
    with _gathered(absent):  # 5
        for tensor in targets:
            tensor.in_chunk.cache.make_own(tensor.in_chunk)
        return _run(func, args, kwargs, targets, is_held=True)


class _NotLasting(Exception):
    """Raised if a chunk is not whole, or another thread may free it before the operator has run."""


def _run(func: Any, args: Any, kwargs: Any, targets: Sequence[Absent] = (), is_held: bool = False) -> Any:
    """Runs an operator on plain tensors in place of the absent ones. With `is_held` the caller has acquired all chunks, so that
    they are counted as used; without, each chunk must be lasting, or `_NotLasting` is raised. See [Note: threads] in
    zero/memory/gathered.py."""
    given: dict[int, Absent] = {}  # each absent tensor by the id of the plain tensor that takes its place
    plain_args = [_plain_of(value, given, is_held) if type(value) in _MAY_HAVE else value for value in args]
    plain_kwargs = {name: _plain_of(value, given, is_held) for name, value in kwargs.items()} if kwargs else kwargs
    result = func(*plain_args, **plain_kwargs)
    for tensor in targets:
        tensor.in_chunk.edited(tensor.extent)
    return _apart(result, given)


def _absent_in(values: Sequence[Any]) -> list[Absent]:
    """Returns the absent tensors among these arguments, and in lists among them."""
    absent = []
    for value in values:
        if type(value) in _ABSENT:
            absent.append(value)
        elif type(value) in (list, tuple):
            absent += [member for member in value if type(member) in _ABSENT]
    return absent


@contextlib.contextmanager
def _gathered(absent: Sequence[Absent]) -> Iterator[None]:
    """Keeps the chunks of these tensors whole inside. The tensors may belong to several trainings, each with its cache."""
    with contextlib.ExitStack() as stack:
        with in_profile("gather", labels_of, absent):
            for cache in dict.fromkeys(tensor.in_chunk.cache for tensor in absent):
                stack.enter_context(cache.using(tensor.in_chunk for tensor in absent if tensor.in_chunk.cache is cache))
        yield


def labels_of(absent: Sequence[Absent]) -> str:
    """Returns the names of what is gathered, for a profiler."""
    return first_of([tensor.label for tensor in absent])


def plain_tensors(absent: Sequence[Absent]) -> list[torch.Tensor]:
    """Returns plain tensors on the memory of absent ones. The caller has acquired the chunks of these, and uses the plain
    tensors only until it releases the chunks."""
    return [_plain_of(tensor, {}, is_held=True) for tensor in absent]


def _plain_of(value: Any, given: dict[int, Absent], is_held: bool) -> Any:
    """Returns an argument with plain tensors in place of absent ones, which are noted in `given`."""
    if type(value) in (list, tuple):
        return type(value)(_plain_of(member, given, is_held) for member in value)
    if type(value) not in _ABSENT:
        return value
    shadow, chunk = value.shadow, value.in_chunk
    if is_held:
        # Read in this order: a thread that is about to write sets the chunk's memory to a copy, and then empty views. So the
        # views of the copy never get a plain tensor on the old memory.
        views, memory = chunk.views, chunk.memory
    else:
        lasting = chunk.lasting_here()
        if lasting is None:
            raise _NotLasting
        memory, views, _ = lasting
    plain = views.get(shadow)
    if plain is None:
        assert memory is not None
        memory = memory if memory.dtype == shadow.tensor.dtype else memory.view(shadow.tensor.dtype)
        size, stride, offset = shadow.geometry
        start = memory.storage_offset() + shadow.start // memory.itemsize  # other chunks may lie before it
        plain = memory.as_strided(size, stride, start + offset)
        plain = plain.conj() if shadow.is_conj else plain
        plain = torch._neg_view(plain) if shadow.is_neg else plain
        views[shadow] = plain
    given[id(plain)] = value
    return plain


def _apart(result: Any, given: Mapping[int, Absent]) -> Any:
    """Returns a result without memory of a chunk, as that is freed later. If the result is a plain argument, the absent tensor
    takes its place. If it lies in a chunk although the operator's schema says that it is new, it is copied. Fails without it:
    test_a_result_against_its_operators_schema_lies_in_memory_of_its_own in tests/zero/runtime/test_absent.py."""
    if type(result) is torch.Tensor:
        if id(result) in given:
            return given[id(result)]
        return result.clone() if _lies_in_one(result, given) else result
    if type(result) in (list, tuple):
        return type(result)(_apart(member, given) for member in result)
    return result


def _lies_in_one(tensor: torch.Tensor, given: Mapping[int, Absent]) -> bool:
    """Returns True if a tensor lies in the memory of a chunk of these absent tensors."""
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


# views ----------------------------------------------------------------------------------------------------------------


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Makes views of an absent tensor, by views of its shadow: nothing is gathered. As with any tensor of torch, a view that is
    made in inference mode is no inference tensor if the parameter is none."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _view(func, args, kwargs)
    of: Absent = args[0]
    # The id of func is never that of another operator: operator_of keeps all operators that it was asked about.
    key = id(func) if len(args) == 1 and not kwargs else (func, *map(_hashable, args[1:]), *kwargs.items())
    made = of.shadow.views.get(key)
    if made is None:
        tensors = func(of.shadow.tensor, *args[1:], **kwargs)
        start = of.shadow.start
        many = [Shadow(each, start) for each in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
        if any(each.span().stop > start + each.tensor.untyped_storage().nbytes() for each in many):  # by `as_strided`
            raise RuntimeError(f"Cannot make this view of {of.label}: it ends beyond the weight. Give as_strided one in it.")
        made = many[0] if isinstance(tensors, torch.Tensor) else type(tensors)(many)
        if len(of.shadow.views) >= _MOST_VIEWS:  # a slice that moves, as in a loop, gives new views without end
            of.shadow.views.clear()
        of.shadow.views[key] = made
    if isinstance(made, Shadow):
        return _view_at(made, of)
    return type(made)([_view_at(one, of) for one in made])


def _hashable(value: Any) -> Any:
    return tuple(value) if type(value) is list else value


def _view_at(shadow: Shadow, of: Absent) -> AbsentView:
    return _without_memory(AbsentView, of.in_chunk, of.label, shadow, of.device, False)  # type: ignore[no-any-return]


def _source_of(values: torch.Tensor) -> torch.Tensor:
    """Returns values that can be copied to a weight. Absent ones are cloned first: they may overlap the weight in its chunk,
    and `copy_` would read what it has overwritten. Fails without it: test_a_weight_may_be_given_a_view_of_itself in
    tests/zero/runtime/test_absent.py."""
    return values.whole() if isinstance(values, Absent) else values


# operators on lists ---------------------------------------------------------------------------------------------------


def _num_of_many(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the length of the lists that a `_foreach_` operator is given; 1 for any other operator, and if the lengths of the
    lists differ, which torch refuses when the operator runs."""
    if not func.overloadpacket.__name__.startswith("_foreach_"):
        return 1
    lengths = {len(value) for value in (*args, *kwargs.values()) if _has_many(value)}
    return lengths.pop() if len(lengths) == 1 else 1


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], many: int) -> list[Any] | None:
    """Calls an operator on lists of `many` entries for one entry at a time, so that only the chunks of one are kept whole."""
    results: list[Any] = []
    for number in range(many):
        keywords = {name: _part(value, number) for name, value in kwargs.items()}
        results += func(*(_part(value, number) for value in args), **keywords) or ()
    return results or None


def _part(value: Any, number: int) -> Any:
    return value[number : number + 1] if _has_many(value) else value


def _has_many(value: Any) -> bool:
    # A tensor of one dimension has a number for each entry of the lists.
    return isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1)


# state_dict, other processes, and the compiler ------------------------------------------------------------------------


def tie_in_state_dict(_: nn.Module, state_dict: dict[str, Any], *__: Any) -> None:
    """Puts one tensor under all names of a tied weight; a hook of `state_dict`. Code that writes the dictionary recognizes tied
    weights by their storage, which absent tensors do not have."""
    tensors: dict[Any, Any] = {}
    for name, value in state_dict.items():
        if type(value) in _ABSENT:
            state_dict[name] = tensors.setdefault((id(value.in_chunk), value.shadow.start, value.shadow.geometry), value)


def send_to_process(absent: Absent) -> Any:
    """Pickles an absent tensor for another process, by its bytes. Shared memory with them would be freed after the
    pickling, before that process opens it."""
    plain = absent.whole()
    geometry = tuple(plain.shape), plain.stride(), plain.dtype, plain.device
    return _receive, (bytes_of(plain), *geometry, isinstance(absent, nn.Parameter), absent.requires_grad)


def _receive(
    values: bytes, shape: Any, stride: Any, dtype: torch.dtype, device: Any, is_param: bool, requires_grad: bool
) -> torch.Tensor:
    received = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    received.copy_(from_bytes(values, dtype, shape))
    return nn.Parameter(received, requires_grad) if is_param else received.requires_grad_(requires_grad)


def never_compile(function: Callable[..., Any]) -> None:
    """Has torch.compile leave out a function and all that it calls: the compiler neither compiles the function's frame nor
    traces into a call of it. The decorators of torch.compiler do the same, and import the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):  # a torch without these private names compiles the frame, which only takes time
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


# Where the compiler breaks a graph off, operators run one by one and come to `__torch_dispatch__`, and it would compile that.
never_compile(vars(Absent)["__torch_dispatch__"].__func__)
for _kind in _ABSENT:
    ForkingPickler.register(_kind, send_to_process)

# what is refused, and what to do instead ------------------------------------------------------------------------------

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
