"""Masters and moments that live elsewhere than where they are stepped: they come for the step, a bucket at a time.

[Note: streams] At most three buckets are in memory: one that is read, one that is stepped, and one that is written. Outside of
a step a bucket also comes when its masters or moments are read or written, and leaves when others come. Meanwhile tensors of
their shape and dtype without memory stand for them. In memory a line has all values of one kind of a share; a state that the
optimizer makes anew in a step is copied to a line, as is one that the user puts in the place of what is away.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.errors import DiskFailed, ZeroError
from zero.memory.addresses import starts_where, storage_of
from zero.memory.formats import goes_with_elements
from zero.memory.homes.home import Home, Stored, Transfer
from zero.memory.shard import Shard
from zero.plan.layout import Piece

_MOST = 3  # buckets in memory
MASTERS = "masters"

_LOST = (
    "Cannot use masters and moments: an update of them was broken off, or could not be written to disk, and their values are "
    "lost. Load the last checkpoint, with its optimizer states."
)

Member = tuple[Piece, torch.nn.Parameter]


@dataclass
class _Stretch:
    """A bucket in memory: its lines by name."""

    lines: dict[str, torch.Tensor]
    arriving: list[Transfer]
    changed: bool = False
    is_cut: bool = False  # parameters and states are views of its lines
    versions: dict[str, int] = field(default_factory=dict)  # the versions of its lines when it was cut; others show an edit

    def arrive(self) -> None:
        arriving, self.arriving = self.arriving, []
        _finish(arriving)


def _finish(transfers: Iterable[Transfer]) -> None:
    """Waits for all transfers, and then raises their first error."""
    errors = []
    for transfer in transfers:
        try:
            transfer.finish()
        except ZeroError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Returns whether two tensors have one storage. A stand-in has the length of its line, and memory for one number."""
    return storage_of(tensor) == storage_of(of)


class Streams:
    """Each line of a bucket is where it lives, or in memory, or on its way between the two, or its bucket is in `_lost`.

    `state` is the optimizer's; `members` gives the pieces of a bucket and `unflatten` a piece in its form; `cut` points the
    masters of a bucket at its share.
    """

    def __init__(
        self,
        shard: Shard,
        state: MutableMapping[Any, Any],
        members: Callable[[int], Sequence[Member]],
        unflatten: Callable[[Piece, torch.Tensor], torch.Tensor],
        cut: Callable[[int], None],
    ) -> None:
        self._shard = shard
        self._state = state
        self._members = members
        self._unflatten = unflatten
        self._cut = cut
        self._stored: dict[int, dict[str, Stored]] = {}  # by bucket and name: its lines where they live
        self._here: OrderedDict[int, _Stretch] = OrderedDict()  # the last used last
        self._leaving: deque[tuple[int, list[Transfer]]] = deque()
        self._lost: set[int] = set()  # buckets without values: a write failed, or all of them will be written

    def home_of(self, bucket: int, kind: str) -> Home | None:
        """Returns the home of a kind of state of a bucket; None if it lives where it is stepped."""
        away = self._shard.layout_ref.layout.buckets[bucket].away
        place = dict(away).get(kind) if away else None  # nearly always nothing is away, and a step asks for each bucket
        return None if place is None else self._shard.homes.at(kind, place)

    def streams(self, bucket: int) -> bool:
        """Returns whether masters or moments of a bucket have to come for a step."""
        return MASTERS in self._stored.get(bucket, {}) or self.home_of(bucket, "moments") is not None

    def store(self, bucket: int, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Writes the masters of a bucket to their home and returns their stand-in; None if they live where they are stepped."""
        home = self.home_of(bucket, MASTERS)
        if home is None:
            return None
        stored = home.store(source.numel(), dtype)
        stored.write(source.to(dtype)).finish()
        self._stored.setdefault(bucket, {})[MASTERS] = stored
        self._release_memory()
        return stored.values

    def prefetch(self, bucket: int, renews: bool = False) -> None:
        """Begins to read a bucket that will be used. If its values are lost, `renews` gives it memory all the same."""
        if bucket in self._here or not self.streams(bucket):
            return
        if bucket in self._lost and not renews:
            raise DiskFailed(_LOST)
        while any(leaving == bucket for leaving, _ in self._leaving):
            self._finish_oldest()
        self._make_room()
        stretch = self._here[bucket] = _Stretch({}, [])
        for name, stored in self._stored.get(bucket, {}).items():
            line = stretch.lines[name] = self._memory(bucket, stored)
            if bucket in self._lost:
                self._blank(bucket, line.zero_())
                stretch.changed = True
            else:
                stretch.arriving.append(stored.read(line))
        self._lost.discard(bucket)

    def use(self, bucket: int, writes: bool = True, renews: bool = False) -> None:
        """Keeps a bucket in memory until others are used. Masters that are written to are kept if `writes`, moments always. If
        the bucket cannot be read, it stays where it lives. If its values are lost, `renews` makes them NaN."""
        self.prefetch(bucket, renews)
        if bucket not in self._here:
            return
        self._here.move_to_end(bucket)
        stretch = self._here[bucket]
        if not stretch.is_cut:
            try:
                stretch.arrive()
            except BaseException:
                self._drop(bucket)
                raise
            self._take_edits(bucket, stretch)
            self._point(bucket, stretch.lines)
            stretch.versions = {name: line._version for name, line in stretch.lines.items()}
            stretch.is_cut = True
        stretch.changed |= writes

    def check(self) -> None:
        """Raises if values are lost, or if something was written to the stand-in of a moment on disk."""
        if self._lost:
            raise DiskFailed(_LOST)
        self._check_written(self._stored)

    def overwrite(self, bucket: int) -> None:
        """Keeps a bucket in memory all of which will be written. It is not read, and is NaN until then."""
        if bucket not in self._here and self.streams(bucket):
            self._lost.add(bucket)
        self.use(bucket, renews=True)

    def lines(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """Returns the moments of a bucket by name; none if it is not in memory."""
        stretch = self._here.get(bucket)
        return {} if stretch is None else {name: line for name, line in stretch.lines.items() if name != MASTERS}

    def piece(self, piece: Piece) -> torch.Tensor:
        """Returns a piece of the masters, to be read at once."""
        self.use(piece.bucket, writes=False)
        return self._shard.piece(piece)

    def leave(self, bucket: int) -> None:
        """Begins to write a bucket to its home, if it is in memory."""
        stretch = self._here.get(bucket)
        if stretch is None:
            return
        if not stretch.changed and not self._was_edited(bucket, stretch):
            self._drop(bucket)
            return
        try:
            self._gather(bucket, stretch)
        except BaseException:
            self._lost.add(bucket)
            self._drop(bucket)
            raise
        del self._here[bucket]
        stored = self._stored.get(bucket, {})
        self._point(bucket, {name: entry.values for name, entry in stored.items()})
        if stretch.lines:
            self._leaving.append((bucket, [stored[name].write(line) for name, line in stretch.lines.items()]))

    def _drop(self, bucket: int) -> None:
        """Frees the memory of a bucket, whose values are where they live."""
        stretch, stored = self._here.pop(bucket), self._stored.get(bucket, {})
        with contextlib.suppress(ZeroError):  # nobody used the values
            stretch.arrive()
        self._point(bucket, {name: entry.values for name, entry in stored.items()})
        for name in stretch.lines.keys() & stored.keys():
            stored[name].take_back()

    def flush(self) -> None:
        """Writes everything to its home, waits for that, and frees the memory: backward may need it."""
        for bucket in list(self._here):
            self.leave(bucket)
        while self._leaving:
            self._finish_oldest()
        self._release_memory()

    def abandon(self) -> None:
        """Ends a step that failed. Buckets that were being stepped, or had not reached their home, are lost."""
        for bucket, stretch in list(self._here.items()):
            if stretch.changed or self._was_edited(bucket, stretch):
                self._lost.add(bucket)
            self._drop(bucket)
        while self._leaving:
            with contextlib.suppress(ZeroError):
                self._finish_oldest()
        for lines in self._stored.values():
            for stored in lines.values():
                stored.reclaim()

    def forget(self, buckets: set[int]) -> None:
        """Drops buckets that are there no more."""
        for bucket in buckets & self._stored.keys():
            self._here.pop(bucket, None)
            self._lost.discard(bucket)
            for stored in self._stored.pop(bucket).values():
                stored.free()

    def release(self) -> None:
        """Frees everything."""
        self._here.clear()
        self._leaving.clear()
        self._stored.clear()

    # inside ------------------------------------------------------------------------------------------------------

    def _release_memory(self) -> None:
        for home in self._shard.homes.disks.values():
            if home.device == self._shard.device:
                home.release()

    def _blank(self, bucket: int, line: torch.Tensor) -> None:
        """Makes every element of a line that belongs to a parameter NaN."""
        for piece, _ in self._members(bucket):
            line[piece.in_share.start : piece.in_share.stop] = float("nan")

    def _make_room(self) -> None:
        while len(self._here) + len(self._leaving) >= _MOST:
            if not self._leaving:
                self.leave(next(iter(self._here)))
            if self._leaving:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, transfers = self._leaving.popleft()
        try:
            _finish(transfers)
        except BaseException:
            self._lost.add(bucket)
            raise

    def _memory(self, bucket: int, stored: Stored) -> torch.Tensor:
        """Returns memory for a line in the home where it is stepped."""
        home = self._shard.home_of(bucket)
        lent = stored.lend(home.device)
        if lent is not None:
            return lent
        with torch.inference_mode(False):
            return home.allocate(stored.values.numel(), stored.values.dtype)

    def _check_written(self, buckets: Iterable[int]) -> None:
        entries = [entry for bucket in buckets for entry in self._stored.get(bucket, {}).items()]
        # Masters follow the weights anyway.
        spoilt = [name for name, stored in entries if stored.is_spoilt() and name != MASTERS]
        if spoilt:
            raise ValueError(
                f"Cannot change {spoilt[0]} in place: it is on disk, and the tensor that was written to only stands for it. "
                "The change is dropped. Put another tensor in its place in optimizer.state."
            )

    def _take_edits(self, bucket: int, stretch: _Stretch) -> None:
        """Copies tensors that the user put in the place of moments that were away to their lines."""
        self._check_written([bucket])
        for piece, name, value in self._moments(bucket):
            line = stretch.lines.get(name)
            if line is not None and value.dtype == line.dtype and not _is_view(value, self._stored[bucket][name].values):
                self._own(piece, line).copy_(value)
                stretch.changed = True

    def _was_edited(self, bucket: int, stretch: _Stretch) -> bool:
        """Returns whether moments in memory were written to, or had other tensors put in their place."""
        if not stretch.is_cut:
            return False
        lines = {name: line for name, line in stretch.lines.items() if name != MASTERS}
        return any(line._version != stretch.versions[name] for name, line in lines.items()) or any(
            name in lines and not starts_where(self._own(piece, lines[name]), value)
            for piece, name, value in self._moments(bucket)
        )

    def _own(self, piece: Piece, line: torch.Tensor) -> torch.Tensor:
        """Returns a piece of a line in the form of its parameter."""
        return self._unflatten(piece, line[piece.in_share.start : piece.in_share.stop])

    def _point(self, bucket: int, lines: Mapping[str, torch.Tensor]) -> None:
        """Makes masters and states views of these lines."""
        if MASTERS in lines:
            self._shard.shares[bucket] = lines[MASTERS]
            self._cut(bucket)
        for name, line in lines.items():
            if name == MASTERS:
                continue
            for piece, master in self._members(bucket):
                entries = self._state.get(master, {})
                if name in entries and (entries[name].shape, entries[name].dtype) == (master.shape, line.dtype):
                    entries[name] = self._own(piece, line)

    def _gather(self, bucket: int, stretch: _Stretch) -> None:
        """Copies moments that are in other memory than their line to it, and gives every line an entry in its home."""
        home, stored = self.home_of(bucket, "moments"), self._stored.setdefault(bucket, {})
        if home is None:
            return
        names = set()
        for piece, name, value in self._moments(bucket):
            line = stretch.lines.get(name)
            if line is None:
                stored[name] = home.store(self._shard.layout_ref.layout.buckets[bucket].share_numel, value.dtype)
                line = stretch.lines[name] = self._memory(bucket, stored[name]).zero_()
            if line.dtype != value.dtype:
                continue  # a value of another dtype stays where it is
            names.add(name)
            target = self._own(piece, line)
            if not starts_where(target, value):
                target.copy_(value)
        for name in stored.keys() - names - {MASTERS}:
            del stretch.lines[name]
            stored.pop(name).free()

    def _moments(self, bucket: int) -> Iterator[tuple[Piece, str, torch.Tensor]]:
        for piece, master in self._members(bucket):
            for name, value in self._state.get(master, {}).items():
                if goes_with_elements(name, value, master.shape):
                    yield piece, name, value
