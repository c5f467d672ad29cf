"""The arithmetic behind `ShardedGrad`s, on this rank's shares of the gradients."""

from __future__ import annotations

import itertools
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import accelerators
from zero.comm.exchange import exchange_about, run_on_all
from zero.comm.group import Group
from zero.errors import DiskFailed, ZeroError
from zero.memory.formats import DTYPES, ParamFormat, by_device, sum_dtype
from zero.memory.norms import joined, norm_of_all, norm_of_norms, norms_of
from zero.memory.shard import LayoutRef
from zero.plan.layout import Block, Piece
from zero.runtime.params.grad_proxy import ShardedGrad
from zero.runtime.reduce.inflight import InflightReductions


def reading_failed(error: Exception | None, failed: Mapping[int, str], size: int) -> Exception:
    """What all ranks raise where one of them cannot read what it has on disk."""
    where = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return error or DiskFailed(f"Cannot read state: it failed on {where}")


class ShardedGradOps:
    """Norms, arithmetic and whole gradients, for parameters by index. Everything here is meant for a settled window.

    A norm needs all ranks, so it is computed for every parameter at once, in one exchange, and remembered until
    that parameter's gradient changes: code that asks for a thousand norms in turn costs one.
    """

    def __init__(self, layout_ref: LayoutRef, formats: list[ParamFormat], group: Group, flight: InflightReductions) -> None:
        self.shard = flight.shard
        self._inflight = flight
        self.formats = formats
        self._layout_ref = layout_ref
        self._group = group
        self._synchronize: weakref.ref[Any] | None = None
        self._sharded = layout_ref.layout.num_shares > 1
        self._rank = group.inner.rank if self._sharded else 0
        self._norms: dict[float, dict[int, float]] = {}
        self._changes: dict[int, int] = {}  # digest of what the user did to each, in its order
        self._factor: tuple[torch.Tensor, int, float] | None = None  # the last that was read

    def bind(self, settle: Callable[[str], int]) -> None:
        """`settle` settles the window before a `ShardedGrad` is used and returns who has a gradient. It is held weakly."""
        self._synchronize = weakref.WeakMethod(settle)

    def _settle(self, occasion: str) -> int:
        settle = self._synchronize() if self._synchronize is not None else None
        if settle is None:
            raise ZeroError(
                "Cannot use a gradient: its sharded optimizer is gone. Keep the optimizer while gradients are used."
            )
        self.shard.check_resident()
        used: int = settle(occasion)
        return used

    def sources_of_nonfinite(self) -> list[int]:
        """The ranks whose own gradients are not finite, where that is looked for. A collective."""
        if not self._inflight.checks_finite:
            return []
        flags = self.exchange_numbers([float(not self._inflight.is_finite)], "the search for what is not finite")
        return [rank for rank, [flag] in enumerate(flags) if flag]

    def pieces(self, param: int) -> tuple[Piece, ...]:
        return tuple(self._layout_ref.layout.pieces(param, self._rank))

    # what `ShardedGrad`s ask ------------------------------------------------------------------------------------------

    def norm(self, param: int, order: float) -> torch.Tensor:
        """The norm of one parameter's global gradient, a 0-dim tensor with the same bits on every rank."""
        self._settle("an operation on .grad")
        known = self._norms.setdefault(order, {})
        if param not in known:
            self._compute_norms(order, known)
        dtype = sum_dtype(DTYPES[self._layout_ref.layout.params[param].dtype])  # not rounded to bf16: clipping multiplies by it
        return torch.tensor(known[param], dtype=dtype, device=self.shard.device)

    def apply_inplace(
        self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> None:
        """Applies an elementwise in-place operator to this rank's part of a gradient."""
        if not self._settle("an operation on .grad") >> param & 1:
            return  # it stood for a gradient that turned out to be none
        self._note_change(param, operator, (*arguments, *keywords.values()))
        for piece in self.pieces(param):
            parts = [self._cut(argument, piece) for argument in arguments]
            operator(self.shard.piece(piece), *parts, **{name: self._cut(value, piece) for name, value in keywords.items()})
        self.forget_norms(param)

    @property
    def changes(self) -> int:
        """Returns a digest of the user's operations on gradients, by which ranks find that theirs differ. 0 for none."""
        return zlib.crc32(repr(sorted(self._changes.items())).encode()) if self._changes else 0

    def _note_change(self, param: int, operator: Callable[..., Any], arguments: Sequence[Any]) -> None:
        description = f"{operator} {[self._described(argument) for argument in arguments]}"
        self._changes[param] = zlib.crc32(description.encode(), self._changes.get(param, 0))

    def _described(self, argument: Any) -> Any:
        """Describes a number by its value, whatever its type; a tensor of several numbers, of which each rank uses its own
        part, by its shape."""
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.numel() != 1 or isinstance(argument, ShardedGrad):
            return tuple(argument.shape)
        if self._factor is None or self._factor[0] is not argument or self._factor[1] != argument._version:
            self._factor = argument, argument._version, float(argument)  # read once for all that it multiplies
        return self._factor[2]

    def unscale(self, params: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Divides by a GradScaler's scale. All ranks are told what any of them finds infinite."""
        self._settle("unscale_")
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
        self._norms.clear()

    # for the updater ---------------------------------------------------------------------------------------------

    def total_norm(self) -> float:
        """The 2-norm of all gradients together, with the same bits on every rank; inf or nan where a gradient is."""
        square = self._square()
        if self._group.size > 1:
            squares = [numbers[0] for numbers in self.exchange_numbers([square], "the norm of all gradients")]
            # Of the first that have a share each: ranks of other threads or processors add up otherwise.
            square = sum(squares[: self._layout_ref.layout.num_shares])
        return float(square**0.5)

    @property
    def judges_on_device(self) -> bool:
        """Returns whether ranks can tell each other the norm without a host waiting for it. Replicas cannot: the sums that each
        would add up need not have the same bits."""
        return self._group.size == 1 or (self._group.needs is not None and self._group.outer is None)

    def total_norm_on_device(self) -> torch.Tensor:
        """Computes the same where the sums are, so that nobody waits for it. A collective."""
        dtype = accelerators.get(self.shard.device.type).norm_dtype()
        norm = norm_of_all(self.shard.present() or [torch.zeros(1, device=self.shard.device)], dtype)
        group = self._group.inner
        if group.size == 1:
            return norm
        of_ranks = norm.new_zeros(group.size)
        of_ranks[group.rank] = norm
        group.all_gather(of_ranks).wait()
        return norm_of_norms(of_ranks[: self._layout_ref.layout.num_shares])

    def _square(self) -> float:
        """Of this rank's part, added up bucket by bucket, so that it does not matter which of them wait."""
        shard = self.shard
        in_memory = [bucket for bucket in sorted(shard.shares) if not shard.stream.has(bucket)]
        squares = dict(zip(in_memory, self._inflight.sums.squares(shard.present()), strict=True))
        apart = list(filter(shard.stream.has, sorted(shard.shares)))
        for bucket, following in itertools.zip_longest(apart, apart[1:]):
            share = shard.sum_of(bucket)
            if following is not None:
                shard.stream.prefetch(following)
            [squares[bucket]] = self._inflight.sums.squares([share])
        dtypes = [sum_dtype(self._layout_ref.dtype_of(bucket)) for bucket in shard.deferred]
        of_rows = self._inflight.sums.squares_of_rows(list(shard.deferred.values()), dtypes)
        squares.update(zip(shard.deferred, of_rows, strict=True))
        return sum(squares[bucket] for bucket in sorted(squares))

    def multiply(self, blocks: Iterable[Block], factor: float | torch.Tensor) -> None:
        """Multiplies all of some blocks. Norms that were computed before hold no more."""
        lines = []
        for block in blocks:
            streamed = self.shard.stream.has(block.bucket)  # and told of it when it leaves
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
        self.forget_norms(param)

    def clear(self) -> None:
        self.shard.clear()
        self._norms.clear()
        self._changes.clear()
        self._factor = None

    def forget_norms(self, param: int | None = None) -> None:
        for known in self._norms.values():
            if param is None:
                known.clear()
            else:
                known.pop(param, None)

    def whole(self, param: int, values: Callable[[Piece], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Returns all of a parameter's values, from every rank's pieces, in its shape. A collective."""
        parts: list[torch.Tensor] = [torch.empty(0, dtype=dtype, device=self.shard.device)]
        for index, part, _ in self._layout_ref.layout.parts(param):
            bucket = self._layout_ref.layout.buckets[index]
            gathered = torch.zeros(bucket.span.numel, dtype=dtype, device=self.shard.device)
            read = partial(self._read, param, index, values, gathered)
            if self._sharded and bucket.away:
                run_on_all(self._group, read, reading_failed)
            else:
                read()
            if self._sharded:
                self._group.inner.all_gather(gathered).wait()
            parts.append(gathered[part.start : part.stop])
        return self.formats[param].unflatten(torch.cat(parts)).clone(memory_format=torch.preserve_format)

    def _read(self, param: int, bucket: int, values: Callable[[Piece], torch.Tensor], gathered: torch.Tensor) -> None:
        offset = self._rank * self._layout_ref.layout.buckets[bucket].share_numel
        for piece in self.pieces(param):
            if piece.bucket == bucket:
                line = self.formats[param].line_of(values(piece))
                gathered[offset + piece.in_share.start : offset + piece.in_share.stop].copy_(line)

    def exchange_numbers(self, numbers: Sequence[float], subject: str = "an operation on .grad") -> list[tuple[float, ...]]:
        """Returns every rank's numbers, by rank. All ranks pass as many."""
        packing = struct.Struct(f"<{len(numbers)}d")
        return [packing.unpack(message) for message in exchange_about(self._group, subject, packing.pack(*numbers))]

    # inside ------------------------------------------------------------------------------------------------------

    def _compute_norms(self, order: float, known: dict[int, float]) -> None:
        """Computes the norms that are not known. Which these are is the same on every rank."""
        missing = [param for param in range(len(self._layout_ref.layout.params)) if param not in known]
        present = (piece for param in missing for piece in self.pieces(param) if piece.bucket in self.shard)
        local: dict[int, list[float]] = {param: [] for param in missing}
        for pieces in self._at_one_time(present):
            for piece, amount in zip(pieces, norms_of([self.shard.piece(piece) for piece in pieces], order), strict=True):
                local[piece.param].append(amount)
        local_norms = [joined(norms, order) for norms in local.values()]
        subject = f"the {order:g}-norm of {len(missing)} gradients"
        parts = [tuple(local_norms)]
        if self._sharded:
            parts = self.exchange_numbers(local_norms, subject)[: self._layout_ref.layout.num_shares]
        known.update(zip(missing, (joined(norms, order) for norms in zip(*parts, strict=True)), strict=True))

    def _at_one_time(self, pieces: Iterable[Piece]) -> list[list[Piece]]:
        """All that may be in memory together: what is there anyway, then what is on disk, piece by piece."""
        in_memory, apart = list[Piece](), list[list[Piece]]()
        for piece in pieces:
            if self.shard.stream.has(piece.bucket):
                apart.append([piece])
            else:
                in_memory.append(piece)
        return [in_memory, *apart] if in_memory else apart

    def _cut(self, argument: Any, piece: Piece) -> Any:
        """A tensor operand's part that lies beside a piece; numbers and 0-dim tensors as they are."""
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.dim() == 0:
            return argument if argument.is_cpu else argument.to(self.shard.piece(piece).device)
        if isinstance(argument, ShardedGrad) and argument.param == piece.param:
            return self.shard.piece(piece)
        form = self.formats[piece.param]
        values = form.flatten(argument.detach().expand(form.shape))[piece.in_param.start : piece.in_param.stop]
        return values.to(self.shard.piece(piece).device)
