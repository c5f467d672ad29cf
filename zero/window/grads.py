"""The tensor that `.grad` is while gradients are sharded, and the arithmetic on this rank's shares of them.

[Note: ShardedGrad]
Code that people write between backward and step reads `p.grad is None`, takes norms, scales, clips, adds. A
`ShardedGrad` has the parameter's shape, dtype and device, and forwards these to the shares. Its first operation
settles the window, which is a collective, so all ranks must do the same; what it answers is the global
gradient's and has the same bits on every rank. What cannot be done on a share without the rest raises, and
names the call that can.

Alternatives, and why not: if `.grad` was None until the step, code that clips would find nothing to clip. If it was this
rank's own gradient, or its share, the norm would be another one on each rank, and ranks would clip differently without a word.
"""

from __future__ import annotations

import itertools
import math
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

import accelerators
from zero.comm.group import Group
from zero.comm.levels import of_family
from zero.comm.one_answer import exchange_about, run_on_all
from zero.errors import DiskFailed, ZeroError
from zero.memory.formats import ParamFormat, by_device, sum_dtype
from zero.memory.leaves import is_dtensor
from zero.memory.norms import joined, norm_of_all, norm_of_norms, norms_of, on_host
from zero.memory.shard import LayoutRef
from zero.plan.layout import Block, ParamSpec, Piece
from zero.window.agreement import gradients_differ
from zero.window.inflight import InflightReductions

aten = torch.ops.aten

# In-place operators that change each element by itself. Tensor arguments of the gradient's shape are cut like it.
_ELEMENTWISE = {
    "mul_", "div_", "add_", "sub_", "pow_", "neg_", "abs_", "sign_", "sqrt_", "zero_", "fill_", "copy_", "nan_to_num_",
    "clamp_", "clamp_min_", "clamp_max_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_",
}  # fmt: skip
_PRODUCTS = (aten.mul_, aten.mul_.Tensor)
_OF_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch.distributed's operators
# An operator of one tensor does what the `_foreach_` one of another name does.
_OF_ONE_TENSOR = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}
_WITH_VALUE = ("addcmul_", "addcdiv_")  # a factor that `_foreach_` has by its place is a keyword of one tensor's operator


class Shares(Protocol):
    """The window of some `ShardedGrad`s, as they see it."""

    def norm(self, param: int, order: float) -> torch.Tensor: ...
    def apply_inplace(
        self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> None: ...
    def unscale(self, params: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None: ...


class ShardedGrad(torch.Tensor):
    """The gradient of a parameter over all ranks, of which this rank has a share; see [Note: ShardedGrad]."""

    param: int
    label: str  # the parameter's name; torch has taken `name`
    window: weakref.ref[Shares]  # weak, as the user may hold this tensor for longer than the window lives
    ended: bool  # the window that this stood for is over
    own_dtype: torch.dtype  # equals `dtype`, for which torch calls into Python at each reading

    @staticmethod
    def __new__(cls, like: torch.nn.Parameter, param: int, name: str, window: Shares) -> ShardedGrad:
        made: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.param, made.label, made.window, made.ended, made.own_dtype = param, name, weakref.ref(window), False, like.dtype
        return made

    def __init__(self, like: torch.nn.Parameter, param: int, name: str, window: Shares) -> None:
        pass

    @property
    def shares(self) -> Shares:
        window = self.window()
        if window is None:
            raise ZeroError(
                "Cannot use a gradient: its sharded optimizer is gone. Keep the optimizer while gradients are used."
            )
        return window

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedGrad({self.label!r}, shape={tuple(self.shape)}, dtype={self.own_dtype}: each rank holds its share; "
            "optimizer.whole_grad(parameter) returns all of it)"
        )

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    # A parameter without memory refuses more (WithoutMemory). This one must raise torch's own errors, because a compiler that
    # describes `.grad` of a parameter asks for its storage and goes on after torch's error.

    def numpy(self, *, force: bool = False) -> Any:
        raise _refusal("numpy", self)

    def tolist(self) -> Any:
        raise _refusal("tolist", self)

    def share_memory_(self) -> Any:
        raise _refusal("share_memory_", self)

    def __dlpack__(self, **options: Any) -> Any:
        raise _refusal("__dlpack__", self)  # torch would lend a null address, which others read

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickling", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without no_grad, autograd would record what is done to a gradient, and the `ShardedGrad` would keep that graph from
        # window to window.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        _check_windows((*args, *kwargs.values()))
        packet = func.overloadpacket.__name__
        if func.namespace in _OF_COLLECTIVES:
            raise _of_all_ranks(packet, _first_in((*args, *kwargs.values())))
        if packet == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if packet.startswith("_foreach_") and isinstance(args[0], (list, tuple)):
            return _each(packet.removeprefix("_foreach_"), args, kwargs)
        return _one(packet, func, args, kwargs)


def _one(packet: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    self = args[0]
    if not isinstance(self, ShardedGrad):
        raise _refusal(packet, _first_in((*args, *kwargs.values())))
    if packet in _ELEMENTWISE:
        self.shares.apply_inplace(self.param, func, args[1:], kwargs)
        return self
    if packet in ("linalg_vector_norm", "norm"):
        given = dict(zip(("ord", "dim", "keepdim"), args[1:], strict=False)) | kwargs
        if not given.get("keepdim") and _all_dims(self, given.get("dim")):
            return _norm(self, given.get("ord", given.get("p")), given.get("dtype"))
    if packet in ("detach", "alias"):
        return self  # there is no graph to detach from, and no storage for a second tensor to share
    raise _refusal(packet, self)


def _all_dims(tensor: torch.Tensor, dim: int | Sequence[int] | None) -> bool:
    num_dims = max(tensor.dim(), 1)
    named = [dim] if isinstance(dim, int) else dim or range(num_dims)  # torch means all dimensions if none is named
    return {one + num_dims if one < 0 else one for one in named} == set(range(num_dims))


def _norm(self: ShardedGrad, order: Any, dtype: torch.dtype | None) -> torch.Tensor:
    order = 2.0 if order is None else float(order)
    if not order >= 0.0:
        raise _refusal(f"a norm of order {order:g}", self)
    norm = self.shares.norm(self.param, order)
    return norm if dtype is None else norm.to(dtype)


def _each(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a `_foreach_` operator as one operator a tensor."""
    results = []
    for index in range(len(args[0])):
        arguments = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
        if not isinstance(arguments[0], ShardedGrad):
            raise _refusal(f"_foreach_{name}", _first_in(arguments))
        if name == "norm":
            results.append(_norm(arguments[0], arguments[1] if len(arguments) > 1 else None, kwargs.get("dtype")))
        else:
            single = _OF_ONE_TENSOR.get(name, name)
            if name in _WITH_VALUE and len(arguments) > 3:
                kwargs = {"value": arguments.pop()}
            results.append(_one(single, getattr(aten, single, None), arguments, kwargs))
    return results if name == "norm" else None


def _unscale(grads: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    sharded = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    others = [grad for grad in grads if not isinstance(grad, ShardedGrad)]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inverse_scale)
    sharded[0].shares.unscale([grad.param for grad in sharded], found_inf, inverse_scale)


def _check_windows(arguments: Sequence[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            _check_windows(argument)
        elif isinstance(argument, ShardedGrad) and argument.ended:
            raise ZeroError(
                f"Cannot use this gradient of {argument.label}: its window has ended, and its values are gone. "
                "Read .grad again, or keep optimizer.whole_grad(parameter) before."
            )


def _first_in(arguments: Sequence[Any]) -> ShardedGrad | None:
    """Returns the `ShardedGrad` that an operator was given, which may be in a list."""
    for argument in arguments:
        candidate = _first_in(argument) if isinstance(argument, (list, tuple)) else argument
        if isinstance(candidate, ShardedGrad):
            return candidate
    return None


def _refusal(packet: str, grad: ShardedGrad | None) -> NotImplementedError:
    whose = "a parameter" if grad is None else grad.label
    return NotImplementedError(
        f"Cannot run {packet} on the gradient of {whose}: every rank holds only its share of it. "
        "Use norms of orders from 0 up and in-place arithmetic on .grad, or get all of it with "
        "optimizer.whole_grad(parameter), on all ranks. Step with the optimizer that zero.shard returned. Delete what averages "
        "gradients over ranks, such as DistributedDataParallel: they are averaged already."
    )


def _of_all_ranks(packet: str, grad: ShardedGrad | None) -> NotImplementedError:
    whose = "a parameter" if grad is None else grad.label
    return NotImplementedError(
        f"Cannot run {packet} on the gradient of {whose}: it is averaged over all ranks already, or added up with "
        "reduce='sum'. Delete this call, and the division by the number of ranks beside it."
    )


def written_by_two(name: str) -> ValueError:
    """Returns the error for two threads that write the same gradient: each would take away what the other has written."""
    return ValueError(
        f"Cannot collect the gradient of {name}: a backward in another thread is writing it, or failed while it did. Run "
        "backwards that share parameters one after the other, and call zero_grad after one that failed."
    )


def reading_failed(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    """Returns what all ranks raise if one of them cannot read what it has on disk."""
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return error or DiskFailed(f"Cannot read state: it failed on {where}")


class _OnDevice(NamedTuple):
    """A number on a device."""

    place: int  # the number's place among the device numbers of this window, in the order in which the user applied them


class GradChanges:
    """The record of what the user did to each settled gradient, in his order: by it ranks find that what they did differs.

    A number on a device, such as the factor of torch's clipping, is in the digest by its place among all such numbers: to read
    the value the host would wait for the device. The judgement of a step compares the values; on any other occasion the digest
    reads them. Ranks may use equal numbers in different forms, such as a float on one rank and a tensor on another, or one
    tensor for all gradients and one for each. Then their digests differ, and what `values` returns is equal.
    """

    def __init__(self) -> None:
        self.unread: list[torch.Tensor] = []  # numbers on a device; copies, as the caller may change his own
        self._read: list[float] = []  # the values of the earlier ones, which were in `unread` until they were read
        self._by_param: dict[int, list[tuple[str, list[Any]]]] = {}  # operators and their described arguments
        self._last: tuple[torch.Tensor, int, float | _OnDevice] | None = None  # the last number, and how it is described

    def digest(self, occasion: str) -> int:
        """Returns the digest of all gradients; 0 if nothing was done to any."""
        if occasion not in ("step", "zero_grad"):  # a zero_grad throws gradients away, and a step compares the numbers itself
            self._read_all()
        return zlib.crc32(repr((sorted(self._by_param.items()), self._read)).encode()) if self._by_param else 0

    def values(self) -> str:
        """Returns a digest by the values of all numbers, wherever these lie. The host waits for those on a device, and
        the judgement of the step need not compare them any more."""
        self._read_all()
        changes = [
            (param, operator, [self._read[each.place] if isinstance(each, _OnDevice) else each for each in arguments])
            for param, operators in sorted(self._by_param.items())
            for operator, arguments in operators
        ]
        return f"{zlib.crc32(repr(changes).encode())}"

    def _read_all(self) -> None:
        self._read += itertools.chain.from_iterable(on_host(self.unread))
        self.unread = []

    def note(self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], spec: ParamSpec) -> None:
        described = [self._described(argument, spec) for argument in arguments]
        self._by_param.setdefault(param, []).append((str(operator), described))

    def _described(self, argument: Any, spec: ParamSpec) -> Any:
        """Describes a number on the host by its value, whatever its type; a number on a device by its place among these; a
        tensor of several numbers, of which each rank uses its own part, by its shape, without the dimensions along which parts
        are uneven, as their lengths differ between ranks."""
        if not isinstance(argument, torch.Tensor):
            return float(argument) if isinstance(argument, (int, float)) else argument
        shape, more = list(argument.shape), argument.dim() - len(spec.shape)
        uneven = [dim + more for dim in spec.uneven_dims if dim + more >= 0]
        for dim in uneven:
            del shape[dim]
        if uneven:
            return tuple(shape)
        if argument.numel() != 1 or isinstance(argument, ShardedGrad) or is_dtensor(argument):
            return tuple(shape)
        if argument.is_cpu or argument.is_inference():  # read each time, as `.data` raises no version
            return self._number(argument)
        if self._last is None or self._last[0] is not argument or self._last[1] != argument._version:
            self._last = argument, argument._version, self._number(argument)  # noted once for all gradients that it multiplies
        return self._last[2]

    def _number(self, argument: torch.Tensor) -> float | _OnDevice:
        if argument.is_cpu:
            return float(argument)
        dtype = accelerators.of(argument.device).norm_dtype()
        self.unread.append(argument.detach().to(dtype, copy=True).view(1))
        return _OnDevice(len(self._read) + len(self.unread) - 1)


class GradOps:
    """Computes on this rank's shares of settled gradients, for parameters by index. What is known of them is the window's."""

    def __init__(self, layout_ref: LayoutRef, formats: list[ParamFormat], group: Group, flight: InflightReductions) -> None:
        self.shard = flight.shard
        self._inflight = flight
        self.formats = formats
        self._layout_ref = layout_ref
        self._group = group

    def sources_of_nonfinite(self) -> list[int]:
        """Returns the ranks whose own gradients are not finite, if that is looked for. A collective."""
        if not self._inflight.checks_finite:
            return []
        flags = self.exchange_numbers([float(not self._inflight.is_finite)], "the search for what is not finite")
        return [rank for rank, [flag] in enumerate(flags) if flag]

    def pieces(self, param: int) -> tuple[Piece, ...]:
        return tuple(self._layout_ref.layout.pieces(param, self._group.rank))

    # for `ShardedGrad`s ------------------------------------------------------------------------------------------

    def norms(self, params: Sequence[int], order: float) -> dict[int, float]:
        """Returns the norms of some parameters' global gradients, with the same bits on all ranks. A collective."""
        present = (piece for param in params for piece in self.pieces(param) if piece.bucket in self.shard)
        local: dict[int, list[float]] = {param: [] for param in params}
        for pieces in self._at_one_time(present):
            for piece, amount in zip(pieces, norms_of([self.shard.piece(piece) for piece in pieces], order), strict=True):
                local[piece.param].append(amount)
        local_norms = [joined(norms, order) for norms in local.values()]
        layout, of_ranks = self._layout_ref.layout, [tuple(local_norms)]
        if layout.is_sharded or layout.parted:
            of_ranks = self.exchange_numbers(local_norms, f"the {order:g}-norm of {len(params)} gradients")
        norms: dict[int, float] = {}
        for param, of_param in zip(params, zip(*of_ranks, strict=True), strict=True):
            family = layout.family_of(param)
            norms[param] = joined([norm for rank, norm in enumerate(of_param) if family.counts(rank)], order)
        return norms

    def norms_there(self, dtypes: Mapping[int, torch.dtype], order: float) -> dict[int, torch.Tensor]:
        """Returns the norms of parameters, as `norms` does, in these dtypes as 0-dim tensors on the device of the sums. No host
        waits for them if ranks can exchange them there; else they come to the host, and go back by one copy for each dtype, as
        a host waits for the device with each. A collective."""
        if self.judges_on_device and self._sums_are_on_device():
            norms = self._norms_on_device(list(dtypes), order)
            by_dtype = {dtype: norms.to(dtype).unbind() for dtype in set(dtypes.values())}
            return {param: by_dtype[dtype][place] for place, (param, dtype) in enumerate(dtypes.items())}
        numbers, tensors = self.norms(list(dtypes), order), dict[int, torch.Tensor]()
        for dtype in set(dtypes.values()):
            params = [param for param in numbers if dtypes[param] is dtype]
            values = torch.tensor([numbers[param] for param in params], dtype=dtype, device=self.shard.device)
            tensors.update(zip(params, values.unbind(), strict=True))
        return tensors

    def _sums_are_on_device(self) -> bool:
        device, has = self.shard.device, self.shard.stream.has
        are_there = (share.device == device and not has(bucket) for bucket, share in self.shard.shares.items())
        return device.type != "cpu" and all(are_there)

    def _norms_on_device(self, params: Sequence[int], order: float) -> torch.Tensor:
        """Returns the norms of parameters as a vector on the device, with the same bits on all ranks. A collective."""
        if self._group.size > 1:  # devices would wait for ever if a rank asked for another norm, so hosts compare that before
            exchange_about(self._group, f"the {order:g}-norm of {len(params)} gradients on the device", b"")
        of_params = [[piece for piece in self.pieces(param) if piece.bucket in self.shard] for param in params]
        sums = [self.shard.piece(piece) for pieces in of_params for piece in pieces]
        norms = iter(torch._foreach_norm(sums, order) if sums else ())
        none = torch.zeros((), device=self.shard.device)  # the norm of what nobody used, or has its piece on another rank
        most = max(1, *map(len, of_params))
        table = [next(norms) if number < len(pieces) else none for pieces in of_params for number in range(most)]
        norm_dtype = accelerators.of(self.shard.device).norm_dtype()
        of_rank = norm_of_norms(torch.stack(table).to(norm_dtype).view(-1, most).t(), order)
        if self._group.size == 1 or not self._layout_ref.layout.is_sharded:
            return of_rank
        of_ranks = of_rank.new_zeros(self._group.size, len(params))
        of_ranks[self._group.rank] = of_rank
        self._group.inner.all_gather(of_ranks.view(-1)).wait()
        return norm_of_norms(of_ranks, order)

    def apply(self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Applies an elementwise in-place operator to this rank's part of a gradient."""
        for piece in self.pieces(param):
            if operator in _PRODUCTS and self.shard.can_defer_product(piece, arguments[0]):
                self.shard.defer_product(piece, arguments[0])  # the host waits for the factor once, when it needs the sum
                continue
            parts = [self._cut(argument, piece) for argument in arguments]
            operator(self.shard.piece(piece), *parts, **{name: self._cut(value, piece) for name, value in keywords.items()})

    def unscale(self, params: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Divides gradients by a GradScaler's scale. If one rank finds an infinite number, `found_inf` says so on all."""
        local = float(found_inf.item())
        for pieces in self._at_one_time(piece for param in params for piece in self.pieces(param)):
            grads = [self.shard.piece(piece) for piece in pieces]
            for indices in by_device(grads):
                device_grads = [grads[index] for index in indices]
                device_found_inf, inverse = found_inf.to(device_grads[0].device), inverse_scale.to(device_grads[0].device)
                torch._amp_foreach_non_finite_check_and_unscale_(device_grads, device_found_inf, inverse)
                local = max(local, float(device_found_inf.item()))
        largest = max(self.exchange_numbers([local], "unscale_"))
        found_inf.fill_(largest[0])

    # for the updater ---------------------------------------------------------------------------------------------

    def total_norm(self, beside: torch.Tensor, factors: Sequence[torch.Tensor]) -> tuple[float, list[float]]:
        """Returns the 2-norm of all gradients together, with the same bits on every rank; infinite or NaN if a gradient is.
        Also returns the numbers of the vector `beside`, which come by the same copy, so that the host waits once. Raises if
        `factors` differ between ranks; every rank has the same number of them. A collective."""
        squares, [numbers, *of_factors] = self._squares([beside, *factors])
        if self._group.size > 1:
            message = [*squares, *itertools.chain.from_iterable(of_factors)]
            of_ranks = self.exchange_numbers(message, "the norm of all gradients")
            first = of_ranks[0][len(squares) :]
            for rank, of_rank in enumerate(of_ranks):
                if not all(map(_is_same, first, of_rank[len(squares) :])):
                    raise gradients_differ(rank, "step")
            squares = self._added_once(of_ranks)
        return float(sum(squares) ** 0.5), numbers

    def _added_once(self, of_ranks: Sequence[Sequence[float]]) -> list[float]:
        """Returns the sum of each family's numbers over the ranks that have every share of every part once. The others would
        add up otherwise, on other threads or processors."""
        return [
            sum(numbers[number] for rank, numbers in enumerate(of_ranks) if family.counts(rank))
            for number, family in enumerate(self._layout_ref.layout.families)
        ]

    @property
    def judges_on_device(self) -> bool:
        """Returns True if ranks can exchange the norm while no host waits for it. Replicas cannot: the squares that each would
        add up need not have the same bits. Nor can ranks that hold different parts, as the norm counts each part once."""
        is_plain = self._group.outer is None and not self._layout_ref.layout.parted
        return self._group.size == 1 or (self._group.needs is not None and is_plain)

    def total_norm_on_device(self, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the same where the sums are, so that nobody waits for it: the norm, and a rank whose `factors` are not those
        of rank 0, or 0 if there is none; None without factors. A collective."""
        dtype = accelerators.of(self.shard.device).norm_dtype()
        norm = norm_of_all(self.shard.present() or [torch.zeros(1, device=self.shard.device)], dtype)
        group = self._group.inner
        if group.size == 1:
            return norm, None
        of_ranks = norm.new_zeros(group.size, 1 + len(factors))
        of_ranks[group.rank] = torch.cat([norm.view(1), *(factor.to(norm) for factor in factors)])
        group.all_gather(of_ranks.view(-1)).wait()
        norm, given = norm_of_norms(of_ranks[: self._layout_ref.layout.num_shares, 0]), of_ranks[:, 1:]
        if not factors:
            return norm, None
        differs = ((given != given[0]) & ~(given.isnan() & given[0].isnan())).any(dim=1)
        return norm, (differs * torch.arange(group.size, dtype=dtype, device=norm.device)).max()

    def _squares(self, beside: Sequence[torch.Tensor]) -> tuple[list[float], list[list[float]]]:
        """Returns the square of the norm of what this rank has, by family, and the numbers of vectors `beside` it. Buckets are
        added up in their order, whichever of them wait as rows."""
        shard = self.shard
        in_memory = [bucket for bucket in sorted(shard.shares) if not shard.stream.has(bucket)]
        of_memory, numbers = self._inflight.sums.squares(shard.present(), beside)
        squares = dict(zip(in_memory, of_memory, strict=True))
        apart = list(filter(shard.stream.has, sorted(shard.shares)))
        for bucket, following in itertools.zip_longest(apart, apart[1:]):
            share = shard.sum_of(bucket)
            if following is not None:
                shard.stream.prefetch(following)
            [squares[bucket]], _ = self._inflight.sums.squares([share])
        dtypes = [sum_dtype(self._layout_ref.dtype_of(bucket)) for bucket in shard.deferred]
        of_rows = self._inflight.sums.squares_of_rows(list(shard.deferred.values()), dtypes)
        squares.update(zip(shard.deferred, of_rows, strict=True))
        layout = self._layout_ref.layout
        families = range(len(layout.families))
        return [sum(squares[i] for i in sorted(squares) if layout.buckets[i].family == family) for family in families], numbers

    def multiply(self, blocks: Iterable[Block], factor: float | torch.Tensor) -> None:
        """Multiplies all of some blocks. Norms that were computed before hold no more."""
        lines = []
        for block in blocks:
            streamed = self.shard.stream.has(block.bucket)  # the stream is told of the change when this block leaves memory
            lines.append(self.shard.sum_of(block.bucket, writes=not streamed)[block.span.start : block.span.stop])
        torch._foreach_mul_(lines, factor)

    def defer_scale(self, bucket: int, factor: float) -> None:
        """Multiplies all of a bucket when it is next read."""
        if factor != 1.0:
            self.shard.defer_scale(bucket, factor)

    def zero(self, param: int) -> None:
        for piece in self.pieces(param):
            if piece.bucket in self.shard:
                self.shard.zero(piece)

    def whole(self, param: int, values: Callable[[Piece], torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Returns all of a parameter's values, from every rank's pieces, in its shape: of this rank's part of it. Zeros where a
        piece has none. A collective."""
        parts: list[torch.Tensor] = [torch.empty(0, dtype=dtype, device=self.shard.device)]
        for index, in_bucket, _ in self._layout_ref.layout.stretches_of(param):
            bucket = self._layout_ref.layout.buckets[index]
            gathered = torch.zeros(bucket.span.numel, dtype=dtype, device=self.shard.device)
            read = partial(self._read, param, index, values, gathered)
            if self._layout_ref.layout.is_sharded and bucket.away:
                run_on_all(self._group, read, reading_failed)
            else:
                read()
            if bucket.num_shares > 1:
                of_family(self._group, bucket.family).inner.all_gather(gathered).wait()
            parts.append(gathered[in_bucket.start : in_bucket.stop])
        form = self.formats[param]
        return form.unflatten(torch.cat(parts)[: form.numel]).clone(memory_format=torch.preserve_format)

    def _read(
        self, param: int, bucket: int, values: Callable[[Piece], torch.Tensor | None], gathered: torch.Tensor
    ) -> None:
        layout = self._layout_ref.layout
        offset = layout.share_of(bucket, self._group.rank) * layout.buckets[bucket].share_numel
        for piece in self.pieces(param):
            value = values(piece) if piece.bucket == bucket else None
            if value is not None:
                line = self.formats[param].line_of(value)
                gathered[offset + piece.in_share.start : offset + piece.in_share.stop].copy_(line)

    def exchange_numbers(self, numbers: Sequence[float], subject: str = "an operation on .grad") -> list[tuple[float, ...]]:
        """Returns every rank's numbers, by rank. All ranks pass as many."""
        packing = struct.Struct(f"<{len(numbers)}d")
        return [packing.unpack(message) for message in exchange_about(self._group, subject, packing.pack(*numbers))]

    # inside ------------------------------------------------------------------------------------------------------

    def _at_one_time(self, pieces: Iterable[Piece]) -> list[list[Piece]]:
        """Returns lists of pieces that may be in memory together: one of those in memory, then one for each piece on disk."""
        in_memory, apart = list[Piece](), list[list[Piece]]()
        for piece in pieces:
            if self.shard.stream.has(piece.bucket):
                apart.append([piece])
            else:
                in_memory.append(piece)
        return [in_memory, *apart] if in_memory else apart

    def _cut(self, argument: Any, piece: Piece) -> Any:
        """Returns the part of a tensor operand that lies beside a piece; numbers and 0-dim tensors as they are."""
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.dim() == 0:
            return argument if argument.is_cpu else argument.to(self.shard.piece(piece).device)
        if isinstance(argument, ShardedGrad) and argument.param == piece.param:
            return self.shard.piece(piece)
        form = self.formats[piece.param]
        values = form.flatten(argument.detach().expand(form.shape))[piece.in_param.start : piece.in_param.stop]
        return values.to(self.shard.piece(piece).device)


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
