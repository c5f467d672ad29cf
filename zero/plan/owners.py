"""The owners of tensors, if an optimizer looks at whole ones: which rank has which.

[Note: shelves]
A bucket of whole tensors has a region for each rank, all of one length, and each tensor lies in one of them: so an equal
share of the bucket is all of some tensors. Tensors of one size and one amount of work are put side by side, one a rank, on a
*shelf*: that leaves no padding, and every rank has as much to do. What is left over of a size has the rest of its shelf
filled with smaller tensors, which those that backward reaches last are taken for. Who gets which region of a shelf is free,
and is chosen so that the ranks' work comes out even. If it does not, as there are few tensors for many ranks, the shelves
that are to blame are made one, which is packed by work alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EVEN = 1.1  # the most work of a rank, in multiples of the mean, if tensors can be given away so


class Tensor(NamedTuple):
    """A tensor that will have an owner."""

    param: int
    numel: int  # the elements, padding included
    work: int


Region = list[Tensor]
Shelf = list[Region]  # the regions of one shelf, one for each rank


def shelves_of(tensors: Sequence[Tensor], loads: Sequence[int]) -> list[Shelf]:
    """Returns shelves of these tensors, which come in the order in which backward reaches them; `loads` is the work that each
    rank has already."""
    # The more uneven a shelf is, the earlier its regions are given away, as later shelves can make up for it.
    shelves = sorted(_by_size(tensors, len(loads)), key=lambda shelf: min(map(work_of, shelf)) - max(map(work_of, shelf)))
    best, packed = _given_away(shelves, loads), 2
    while not _is_even(best, loads) and packed < 2 * len(shelves):
        together = _packed([tensor for shelf in shelves[:packed] for region in shelf for tensor in region], loads)
        other = [together, *_given_away(shelves[packed:], _after([together], loads))]
        best = min(best, other, key=lambda shelves: max(_after(shelves, loads)))
        packed *= 2
    return best


def _is_even(shelves: Sequence[Shelf], loads: Sequence[int]) -> bool:
    after, largest = _after(shelves, loads), max((t.work for shelf in shelves for r in shelf for t in r), default=0)
    return max(after) <= max(EVEN * sum(after) / len(after), largest, *loads)


def _by_size(tensors: Sequence[Tensor], num_ranks: int) -> list[Shelf]:
    sizes: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in tensors:
        sizes.setdefault((tensor.numel, tensor.work), []).append(tensor)
    shelves: list[Shelf] = []
    waiting = [sizes[size] for size in sorted(sizes, reverse=True)]
    while waiting:
        alike, *waiting = waiting
        full = len(alike) - len(alike) % num_ranks
        shelves += [[[tensor] for tensor in alike[start : start + num_ranks]] for start in range(0, full, num_ranks)]
        if alike[full:]:
            regions = [[tensor] for tensor in alike[full:]]
            shelves.append([*regions, *_filled(waiting, alike[0].numel, num_ranks - len(regions))])
    return shelves


def _filled(waiting: Sequence[list[Tensor]], height: int, number: int) -> list[Region]:
    """Returns so many regions of at most this height, of tensors that are taken from the ends of the lists: the largest first,
    each to the region that has the least to do of those that have room."""
    regions: list[Region] = [[] for _ in range(number)]
    room = [height] * number
    for alike in waiting:
        while alike:
            index = min(range(number), key=lambda index: (room[index] < alike[-1].numel, work_of(regions[index]), index))
            if room[index] < alike[-1].numel:
                break
            room[index] -= alike[-1].numel
            regions[index].append(alike.pop())
    return regions


def _given_away(shelves: Sequence[Shelf], loads: Sequence[int]) -> list[Shelf]:
    """Returns each shelf with its regions in the order of ranks: the one with the most work is that of the rank that has the
    least."""
    ordered, now = list[Shelf](), list(loads)
    for shelf in shelves:
        ranks = sorted(range(len(now)), key=lambda rank: (now[rank], rank))
        region_of = dict(zip(ranks, sorted(shelf, key=lambda region: -work_of(region)), strict=True))
        ordered.append([region_of[rank] for rank in range(len(now))])
        now = _after(ordered[-1:], now)
    return ordered


def _packed(tensors: Sequence[Tensor], loads: Sequence[int]) -> Shelf:
    """Returns one shelf of all of them: the most work first, each to the first rank that it fits, with the least limit with
    which all fit."""
    busiest_first = sorted(tensors, key=lambda tensor: -tensor.work)
    low, high = max(loads) - 1, max(loads) + sum(tensor.work for tensor in tensors)
    best = _fitted(busiest_first, loads, high)
    while high - low > 1:
        middle = (low + high) // 2
        fitted = _fitted(busiest_first, loads, middle)
        low, high, best = (middle, high, best) if fitted is None else (low, middle, fitted)
    assert best is not None
    return best


def _fitted(tensors: Sequence[Tensor], loads: Sequence[int], most: int) -> Shelf | None:
    now, shelf = list(loads), [Region() for _ in loads]
    for tensor in tensors:
        rank = next((rank for rank, load in enumerate(now) if load + tensor.work <= most), None)
        if rank is None:
            return None
        now[rank] += tensor.work
        shelf[rank].append(tensor)
    return shelf


def _after(shelves: Sequence[Shelf], loads: Sequence[int]) -> list[int]:
    """Returns the work of each rank with these shelves."""
    return [load + sum(work_of(shelf[rank]) for shelf in shelves) for rank, load in enumerate(loads)]


def stacked(shelves: Iterable[Shelf], most: int) -> list[Shelf]:
    """Returns the shelves as backward fills them, with as many together as have no more than `most` elements."""
    stacks: list[Shelf] = []
    for shelf in sorted(shelves, key=lambda shelf: -min(tensor.param for region in shelf for tensor in region)):
        grown = [[*region, *more] for region, more in zip(stacks[-1], shelf, strict=True)] if stacks else shelf
        if stacks and height_of(grown) * len(grown) <= most:
            stacks[-1] = grown
        else:
            stacks.append(shelf)
    return stacks


def starts_in(shelf: Shelf) -> dict[int, int]:
    """Returns where each parameter begins: one region after the other, each as long as the longest."""
    starts: dict[int, int] = {}
    for rank, region in enumerate(shelf):
        offset = rank * height_of(shelf)
        for tensor in region:
            starts[tensor.param] = offset
            offset += tensor.numel
    return starts


def height_of(shelf: Shelf) -> int:
    return max(sum(tensor.numel for tensor in region) for region in shelf)


def work_of(region: Region) -> int:
    return sum(tensor.work for tensor in region)
