"""The shares as the optimizer sees them: an nn.Parameter for each piece; a parameter with one owner keeps its shape."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch

from accelerators.streams import Event
from zero.memory.formats import ParamFormat, sum_dtype
from zero.memory.homes.home import DONE, MemoryHome, Transfer
from zero.memory.shard import LayoutRef, Shard, weakly
from zero.memory.streams import Streams
from zero.memory.weights import Weights
from zero.plan.layout import Block, Piece, Span

_MOST_ON_THE_WAY = 2  # buckets that travel back to the device while the next one is stepped


SHARED = ("masters", "moments")
KINDS = (*SHARED, "unshared")  # unshared: parameters and buffers that are in no share
ALL = -1  # all parameters, as bits


class Wholeness:
    """This rank's masters, moments and what is unshared are whole unless an update of them broke off and nothing has replaced
    them since.

    An update that succeeds leaves torn what was torn before it: it steps values that are stepped in part.
    """

    def __init__(self) -> None:
        self._torn = dict.fromkeys(KINDS, 0)  # by kind: parameters, as bits
        self._before = self._torn  # what was torn before the running update
        self._params = 0  # the parameters of the running update
        self._lock = threading.Lock()  # the thread that watches the device calls `tear` too
        self._cause = ""
        self._errors: list[str] = []  # errors of the user's load that runs

    @property
    def is_whole(self) -> bool:
        return not any(self._torn.values())

    def begin(self, cause: str, params: int = ALL, kinds: Collection[str] = SHARED) -> None:
        """Begins to write what these parameters have of these kinds: torn from here on, unless `end` is reached."""
        with self._lock:
            self._before, self._params = self._torn, params
            self._torn = self._note(self._torn, cause, params, kinds)

    def end(self, replaced: Collection[str] = ()) -> None:
        """Ends an update that wrote all that it should, of these kinds without reading what was there."""
        with self._lock:
            self._torn = self._before
        self.mend(self._params, replaced)

    def tear(self, cause: str, params: int = ALL, kinds: Collection[str] = SHARED) -> None:
        """Notes what was written in part, whatever becomes of the update that runs. Of several causes the first one is told."""
        with self._lock:
            self._torn = self._note(self._torn, cause, params, kinds)
            self._before = self._note(self._before, cause, params, kinds)

    def _note(self, torn: dict[str, int], cause: str, params: int, kinds: Collection[str]) -> dict[str, int]:
        self._cause = cause if self.is_whole else self._cause
        return {kind: bits | (params if kind in kinds else 0) for kind, bits in torn.items()}

    def mend(self, params: int, kinds: Collection[str]) -> None:
        """Notes that these kinds of these parameters were replaced, without reading what was there."""
        with self._lock:
            self._torn = {kind: bits & ~(params if kind in kinds else 0) for kind, bits in self._torn.items()}

    @contextlib.contextmanager
    def torn_by_failure(self, cause: str, params: int = ALL, kinds: Collection[str] = SHARED) -> Iterator[None]:
        """Notes all of these as torn if what runs inside breaks off, whatever of it was written."""
        try:
            yield
        except BaseException:
            self.tear(cause, params, kinds)
            raise

    def note_loading(self, *about: Any) -> None:
        """Keeps the list of errors of a load, as a hook before it: torch calls hooks after it even if there are errors."""
        self._errors = about[-1]

    def note_loaded(self, _: torch.nn.Module, incompatible: Any) -> None:
        """Notes that the user has loaded all weights of the model, as a hook of its `load_state_dict`."""
        if not incompatible.missing_keys and not self._errors:
            self.mend(ALL, ["masters", "unshared"])

    def describe(self) -> str:
        return f"{self._cause} broke off, so weights may be written in part"

    def check(self, what: str) -> None:
        """Raises if something is torn."""
        if not self.is_whole:
            raise ValueError(
                f"Cannot {what}: {self.describe()}. Load a checkpoint on all ranks, with zero.load, or with load_state_dict of "
                "the model that was sharded and of the optimizer."
            )


class Masters:
    """Between updates a weight is always its master's rounded value, unless the user edited it or an update broke off.

    Masters are this rank's shares in the dtype of sums, cut into parameters. If the weights have that dtype themselves and
    are in the same memory, a master is a view of them and costs nothing. Otherwise it is their exact value, of which the weight
    is the rounded copy; with `rounded` it starts from that copy.
    """

    def __init__(
        self,
        layout_ref: LayoutRef,
        rank: int,
        weights: Weights,
        shard: Shard,
        formats: Sequence[ParamFormat],
        state: MutableMapping[Any, Any],
        rounded: bool = False,
    ) -> None:
        self.shard = shard
        self.streams = Streams(shard, state, weakly(self.in_bucket), weakly(self.unflatten), weakly(self.cut))
        self.pieces: dict[int, list[tuple[Piece, torch.nn.Parameter]]] = {}  # by parameter
        self._in_block: dict[Block, list[tuple[Piece, torch.nn.Parameter]]] = {}
        self.layout_ref = layout_ref
        self.rank = rank
        self.formats = formats
        self.wholeness = Wholeness()
        self._rounded_at_start = rounded
        self._weights = weights
        # By bucket: a copy on its way, the weights, and the memory that they are copied to in the home of their masters. That
        # memory may be the weights themselves.
        self._fetched: dict[int, tuple[Transfer, torch.Tensor, torch.Tensor]] = {}
        # By bucket, while its blocks are stepped: its weights, and the memory for new ones. On a device the two are the same.
        self._rounded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent: dict[MemoryHome, deque[tuple[Transfer, torch.Tensor]]] = {}  # new weights on their way to the device
        self.ahead: set[int] = set()  # buckets whose masters were stepped in the backward: their weights are those of before

    def adopt_source(self, bucket: int, source: torch.Tensor, given: bool = False) -> bool:
        """Makes the master of a bucket from `source`, this rank's share of the weights before they were cast. Returns whether
        the master is `source` itself, which may be kept if it is `given`."""
        share, kept = self._weights.share(bucket, self.rank), False
        if self.is_copy(bucket):
            if self._rounded_at_start:
                source, given = share, False
            dtype = sum_dtype(self.layout_ref.dtype_of(bucket))
            stored = self.streams.store(bucket, source, dtype)
            if stored is not None:
                self.shard.shares[bucket] = stored
                return False
            kept = given and source.dtype == dtype and self.shard.home_of(bucket).holds(source)
            share = source if kept else self.shard.allocate(bucket).copy_(source)
        self.shard.shares[bucket] = share
        return kept

    def make_params(self) -> None:
        """Makes the parameters of every slot that has none yet, once its buckets have their masters."""
        layout = self.layout_ref.layout
        for slot in layout.slots:
            if slot is not None and slot.param not in self.pieces:
                pieces = layout.pieces(slot.param, self.rank)
                self.pieces[slot.param] = [
                    (piece, torch.nn.Parameter(self.unflatten(piece, self.shard.piece(piece)))) for piece in pieces
                ]
                for piece, master in self.pieces[slot.param]:
                    self._in_block.setdefault(layout.block_of(piece), []).append((piece, master))
        for members in self._in_block.values():
            members.sort(key=lambda member: member[0].in_share.start)

    def cut(self, bucket: int) -> None:
        """Points the parameters of a bucket at its share. While that is on another device or away they are empty: a parameter
        keeps its device, as not every one can change it."""
        share = self.shard.shares[bucket]
        for piece, master in self.in_bucket(bucket):
            is_here = share.device == master.device and share.numel() > 0  # a share of weights that are away is empty
            line = share[piece.in_share.start : piece.in_share.stop]
            master.data = self.unflatten(piece, line) if is_here else master.new_empty(0)

    def renew(self, bucket: int) -> None:
        """Points the masters of a bucket at its weights, which are in other memory by now. Masters that are copies stay."""
        if not self.is_copy(bucket):
            self.shard.shares[bucket] = self._weights.share(bucket, self.rank)
            self.cut(bucket)

    def unflatten(self, piece: Piece, line: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a piece as the optimizer is given them: a parameter with one owner has its own shape."""
        has_owner = self.layout_ref.layout.buckets[piece.bucket].has_owners
        return self.formats[piece.param].unflatten(line) if has_owner else line

    def of(self, param: int) -> list[tuple[Piece, torch.nn.Parameter]]:
        return self.pieces.get(param, [])

    def in_block(self, block: Block) -> list[tuple[Piece, torch.nn.Parameter]]:
        """Returns the pieces of a block in the order in which they lie, with their masters."""
        return self._in_block.get(block, [])

    def in_bucket(self, bucket: int) -> list[tuple[Piece, torch.nn.Parameter]]:
        return [member for block in self.layout_ref.layout.blocks(bucket) for member in self.in_block(block)]

    def is_copy(self, bucket: int) -> bool:
        dtype, homes, home = self.layout_ref.dtype_of(bucket), self.shard.homes, self.shard.home_of(bucket)
        if dtype != sum_dtype(dtype):
            return True
        is_beside = home is homes.device or (home is homes.host and self._weights.share(bucket, self.rank).is_cpu)
        return not is_beside

    def has_whole_weights(self, bucket: int) -> bool:
        """Returns whether this rank has all weights of a bucket, and not its share of them alone."""
        return self.layout_ref.layout.buckets[bucket].chunk in self._weights.whole_chunks

    def fetch(self, bucket: int, after: Event | None = None) -> None:
        """Begins to copy the weights that `adopt` will compare with, as `write` of a home copies them. Those of a bucket that
        is `ahead` were compared."""
        if bucket not in self._fetched and bucket not in self.ahead and self.is_copy(bucket):
            self._fetch(bucket, after)

    def _fetch(self, bucket: int, after: Event | None = None) -> None:
        home, weights = self.shard.home_of(bucket), self.weights_there(bucket)
        mirror = home.mirror(weights)
        self._fetched[bucket] = home.write(weights, mirror, after), weights, mirror

    def hold_weights(self, bucket: int) -> None:
        """Makes what the current stream is given next, which may change weights, come after the copy that `fetch` began."""
        self._fetched[bucket][0].wait()

    def adopt(self, block: Block) -> None:
        """Takes over edits of the weights: wherever a weight is not its master's rounded value."""
        assert block.bucket not in self.ahead, "weights of before a step would take the place of its masters"
        if self.is_copy(block.bucket):
            self.streams.use(block.bucket, writes=False)
            if adopt(self.weights_of(block), self._cut(block)):
                self.streams.use(block.bucket)
            self.compared(block)

    def are_edited(self, blocks: Sequence[Block]) -> torch.Tensor:
        """Returns for each of some blocks that stay on the device whether `adopt` would change it, as a tensor that nobody
        waits for."""
        edited = []
        for block in blocks:
            weights = self.weights_of(block)
            edited.append((weights != self._cut(block).to(weights.dtype)).any().view(1))
            self.compared(block)
        return torch.cat(edited) if edited else torch.empty(0, device="cpu")

    def publish(self, blocks: Sequence[Block]) -> None:
        """Rounds the masters of blocks into this rank's share of the weights. Blocks that stay on the device are one
        operation."""
        on_device: list[Block] = []
        for block in blocks:
            if not self.is_copy(block.bucket):
                continue
            if self.stays_on_device(block.bucket):
                on_device.append(block)
            else:
                self.streams.use(block.bucket, writes=False)
                self.rounded_of(block).copy_(self._cut(block))
                self.written(block)
        if on_device:
            torch._foreach_copy_([self.rounded_of(block) for block in on_device], [self._cut(block) for block in on_device])
        for block in on_device:
            self.written(block)

    def stays_on_device(self, bucket: int) -> bool:
        """Returns whether the masters of a bucket always stay on a device other than the host."""
        home, homes = self.shard.home_of(bucket), self.shard.homes
        return home is homes.device and home is not homes.host and not self.streams.streams(bucket)

    def weights_of(self, block: Block) -> torch.Tensor:
        """Returns the present weights of a block in the home of its masters, which are a copy, for use until `compared`."""
        if block.bucket not in self._fetched:
            self._fetch(block.bucket)
        return cut(self.fetched(block.bucket), block.span)

    def fetched(self, bucket: int) -> torch.Tensor:
        """Returns the copy of the weights of a bucket that `fetch` began, when it is there."""
        transfer, _, mirror = self._fetched[bucket]
        transfer.finish()
        return mirror

    def weights_there(self, bucket: int) -> torch.Tensor:
        """Returns the present weights of a bucket where they live."""
        return self._weights.share(bucket, self.rank)

    def compared(self, block: Block) -> None:
        if block.is_last:
            self.shard.home_of(block.bucket).give_back(self._fetched.pop(block.bucket)[-1])

    def rounded_of(self, block: Block) -> torch.Tensor:
        """Returns memory in the home of a block's masters that its new weights are to be written to, until `written`."""
        if block.bucket not in self._rounded:
            home = self.shard.home_of(block.bucket)
            self._get_back(home, _MOST_ON_THE_WAY - 1)
            # A copy travels, even of masters that need no rounding, as masters may be written again at any time.
            fetched = self._fetched.get(block.bucket)
            weights = self._weights.share(block.bucket, self.rank) if fetched is None else fetched[1]
            self._rounded[block.bucket] = weights, home.mirror(weights)
        return cut(self._rounded[block.bucket][1], block.span)

    def written(self, block: Block) -> None:
        """Sends the new weights of a bucket to the device once its last block is written. Work that is issued to the device
        after that comes after the copy."""
        if block.is_last:
            home, (weights, rounded) = self.shard.home_of(block.bucket), self._rounded.pop(block.bucket)
            transfer = home.read(rounded, weights)
            if transfer is DONE:
                home.give_back(rounded)
            else:
                transfer.wait()
                self._sent.setdefault(home, deque()).append((transfer, rounded))

    def _cut(self, block: Block) -> torch.Tensor:
        return cut(self.shard.share(block.bucket), block.span)

    def take_back_sent(self) -> None:
        """Takes back the memory of new weights that the last step sent to the device: it has them once it computes with
        them."""
        for home in self._sent:
            self._get_back(home, 0)

    def _get_back(self, home: MemoryHome, most: int) -> None:
        """Waits until at most `most` copies are on their way from a home to the device."""
        sent = self._sent.get(home)
        while sent and len(sent) > most:
            transfer, rounded = sent.popleft()
            transfer.finish()
            home.give_back(rounded)

    def abandon(self) -> None:
        """Drops what a failed step was copying: the weights may change before the next one."""
        for bucket, (transfer, _, mirror) in self._fetched.items():
            transfer.finish()
            self.shard.home_of(bucket).give_back(mirror)
        for bucket, (_, rounded) in self._rounded.items():
            self.shard.home_of(bucket).give_back(rounded)
        for home in self._sent:
            self._get_back(home, 0)
        self._fetched.clear()
        self._rounded.clear()
        self.streams.abandon()

    def forget(self, chunk: int) -> None:
        """Drops the masters of this chunk and all after it."""
        layout = self.layout_ref.layout
        gone = {index for index, bucket in enumerate(layout.buckets) if bucket.chunk >= chunk}
        self.streams.forget(gone)
        self.pieces = {param: pieces for param, pieces in self.pieces.items() if gone.isdisjoint(layout.buckets_of(param))}
        self._in_block = {block: members for block, members in self._in_block.items() if block.bucket not in gone}
        self.shard.shares = {bucket: share for bucket, share in self.shard.shares.items() if bucket not in gone}

    def release(self) -> None:
        """Frees all masters."""
        self.abandon()
        self.pieces.clear()
        self._in_block.clear()
        self.streams.release()
        self.shard.release()
        self.shard.homes.host.release()
        self.shard.homes.close()


def cut(line: torch.Tensor, span: Span) -> torch.Tensor:
    """Returns a part of a line; the line itself if it is all of it, which nearly every block of a small bucket is."""
    return line if span.numel == line.numel() else line[span.start : span.stop]


def adopt(weights: torch.Tensor, masters: torch.Tensor) -> bool:
    """Sets masters to their weights wherever a weight is not the rounded master. Returns whether any may have been set."""
    changed = False
    # Adopted a part at a time, as the scratch memory is several times the weights. On a device each call costs more, so its
    # parts are larger.
    numel = max(2**18, masters.numel() // 16) if masters.is_cpu else max(2**16, masters.numel() // 2)
    for weight, master in zip(torch.split(weights, numel), torch.split(masters, numel), strict=True):
        if master.is_cpu and same_bits(weight, master.to(weight.dtype, copy=True)):
            continue  # nearly always; a device is not asked, as the host would have to wait for its answer
        exact(weight, master, out=master)
        changed = True
    return changed


def adopt_together(weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """Does what `adopt` does for many small tensors on the host, which are compared by one call."""
    given = torch.cat(weights)
    rounded = torch.empty_like(given)
    torch._foreach_copy_(torch.split(rounded, [weight.numel() for weight in weights]), masters)
    if not same_bits(given, rounded):
        for weight, master in zip(weights, masters, strict=True):
            adopt(weight, master)


def exact(weights: torch.Tensor, masters: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the exact values of weights: their masters, except where a weight is not its master's rounded value."""
    return torch.where(weights != masters.to(weights.dtype), weights.to(masters.dtype), masters, out=out)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(weights: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Returns whether weights have the bits of `rounded`, which is overwritten. It is the fastest way that torch has: `equal`
    and `any` look at one number after the other, and `equal` with one thread."""
    bits = _BITS[weights.element_size()]
    return weights.numel() == 0 or not rounded.view(bits).ne_(weights.view(bits)).max()
