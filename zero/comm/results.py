"""A sum over ranks has the bits of their rows added in rank order, in the dtype of the sum, whoever adds them and when.

A collective may give an `UnreducedResult`: the ranks' rows, which the reader adds as it passes over them. A sum that is
computed first would be written and read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zero.comm.group import Pending


class UnreducedResult:
    """A sum over ranks that is not computed yet: one row from each rank, which are added where the sum is needed."""

    def __init__(self, sum_dtype: torch.dtype) -> None:
        self.sum_dtype = sum_dtype

    def done(self) -> bool:
        return True

    def addends(self) -> Sequence[torch.Tensor]:
        """Waits for the stretches and returns them, in the order of ranks. They may be read until `release`."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the reading of the addends: their memory may be written again."""

    def wait(self) -> torch.Tensor:
        rows = self.addends()
        total = torch.empty(rows[0].numel(), dtype=self.sum_dtype, device=rows[0].device)
        add_rows(rows, total)
        self.release()
        return total


class SideBySide:
    """The stretches of all ranks side by side, not added."""

    def __init__(self, unreduced: UnreducedResult) -> None:
        self._unreduced = unreduced

    def done(self) -> bool:
        return self._unreduced.done()

    def wait(self) -> torch.Tensor:
        together = torch.cat(list(self._unreduced.addends()))
        self._unreduced.release()
        return together


class SingleRankResult(UnreducedResult):
    """The result of a single rank."""

    def __init__(self, bucket: torch.Tensor, sum_dtype: torch.dtype) -> None:
        super().__init__(sum_dtype)
        self._bucket = bucket

    def addends(self) -> Sequence[torch.Tensor]:
        return [self._bucket]

    def wait(self) -> torch.Tensor:
        return self._bucket.to(self.sum_dtype)


class CompletedResult:
    """A result that was complete at once."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


_STRETCH = 2**18  # the elements that are added up at once


def add_rows(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Writes `factor` times the sum of the rows, one of which may be the target, or adds it to what is there. The sum is taken
    in the target's dtype, in the order of the rows, and on the host a stretch at a time, so that all passes but the first find
    it in the cache."""
    stretch = _STRETCH if target.is_cpu else max(1, target.numel())
    for start in range(0, target.numel(), stretch):
        part = slice(start, start + stretch)
        add_stretch([row[part] for row in rows], target[part], factor, adds)


def add_stretch(rows: Sequence[torch.Tensor], target: torch.Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Adds as `add_rows` does, without cutting into stretches, for a caller that has cut one and passes over it again. If it
    were cut once more, a thread would read what another one wrote, from the cache of another core."""
    is_total = len(rows) == 1 and rows[0].dtype == target.dtype
    is_apart = adds or any(row.data_ptr() == target.data_ptr() for row in rows[1:])
    total = rows[0] if is_total else torch.empty_like(target) if is_apart else target
    in_one_pass = len(rows) > 1 and rows[0].dtype == rows[1].dtype == target.dtype
    if in_one_pass:
        torch.add(rows[0], rows[1], out=total)
    elif not is_total:
        total.copy_(rows[0])
    for row in rows[2 if in_one_pass else 1 :]:
        total.add_(row)
    if adds:
        target.add_(total, alpha=factor)
    elif is_total or is_apart or factor != 1.0:
        torch.mul(total, factor, out=target)


def sum_in_rank_order(pieces: torch.Tensor, num_ranks: int, sum_dtype: torch.dtype) -> torch.Tensor:
    """Returns the sum of `num_ranks` equal stretches, added one after the other so that its bits depend on nothing else."""
    rows = pieces.view(num_ranks, -1)
    total = torch.empty(rows.shape[1], dtype=sum_dtype, device=pieces.device)
    add_rows(list(rows), total)
    return total


def wait_into(pending: Pending, target: torch.Tensor, factor: float, adds: bool, add: Callable[..., None] = add_rows) -> None:
    """Waits for a result, and writes or adds `factor` times it to the target: straight from the rows if there are any."""
    if isinstance(pending, UnreducedResult):
        add(pending.addends(), target, factor, adds)
        pending.release()
    else:
        add([pending.wait()], target, factor, adds)
