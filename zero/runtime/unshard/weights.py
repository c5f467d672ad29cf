"""Weights in shares: this rank keeps its own, and fetches those of others when an operator needs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zero.comm.exchange import exchange_about
from zero.comm.group import Group
from zero.comm.pulls import Pull, Pulls
from zero.comm.results import CompletedResult
from zero.errors import RanksDiffer
from zero.memory.formats import DTYPES, ParamFormat
from zero.memory.gathered import Arrival, GatheredChunk, GatheredWeights
from zero.memory.shard import LayoutRef
from zero.memory.versions import VersionedShares
from zero.plan.layout import Bucket
from zero.plan.spans import Span
from zero.runtime.params.absent import Absent, make_absent_param
from zero.runtime.params.swap import become_absent, become_plain
from zero.runtime.params.table import Params
from zero.runtime.unshard.edits import EditLog

_STEP_ENDED = -2  # in place of a bucket: nothing but the version, for who waits for a rank to end its step


class ShardedWeights:
    """The weights of all buckets on all ranks: this rank has its share of each, by version. See [Note: absent weights].

    Ranks may read whatever they like between two steps, each for itself. They must make the same edits in the same order.

    [Note: visible weights]
    Ranks that share host memory keep their shares of a chunk side by side in it. So all of them see whole chunks as the last
    step left them, and nothing is gathered: a rank only waits until the others have ended their step. What a user edits since
    is in memory of the rank that edits, as others may be reading; such a chunk is gathered from all ranks until the next step.
    """

    def __init__(self, layout_ref: LayoutRef, params: Params, group: Group, device: torch.device, budget_bytes: float) -> None:
        self.layout_ref = layout_ref
        self.weights = GatheredWeights(device, self, budget_bytes)
        self._params = params
        self._group = group
        self._device = device
        self._rank = group.rank
        self._shares: dict[int, torch.Tensor] = {}  # this rank's, on the device
        self._versions = VersionedShares()  # the same in host memory, as other ranks get them
        self._versions.add(_STEP_ENDED, torch.zeros(1))
        self._common: dict[int, torch.Tensor] = {}  # chunks in memory that all ranks see
        self._edits = EditLog()
        self._renewed: set[int] = set()
        self._pulls = Pulls(group.new_wire(), self._versions.request)
        self._others: Pull | None = None  # whether they have ended the last step
        self._lock = threading.RLock()  # forward and backward run in threads of their own

    # what is kept ------------------------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        return len(self.weights.chunks)

    @property
    def num_bytes(self) -> int:
        return sum(share.nbytes for share in self._shares.values())

    def prepare(self) -> None:
        layout = self.layout_ref.layout
        new = range(self.num_chunks, len(layout.chunks))
        sizes = [layout.chunks[chunk].numel * DTYPES[layout.chunks[chunk].dtype].itemsize for chunk in new]
        shared = self._group.shared_host_memory
        if shared is not None:
            self._common.update(zip(new, shared.common(sizes), strict=True))
        elif self._group.size == 1 and self._device.type == "cpu":
            self._common.update((chunk, torch.empty(size, dtype=torch.uint8)) for chunk, size in zip(new, sizes, strict=True))

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        layout = self.layout_ref.layout
        dtype = DTYPES[layout.chunks[chunk].dtype]
        self.weights.add_chunk(layout.chunks[chunk].numel, dtype)
        with torch.inference_mode(False):  # steps will change it
            for index, bucket in self._buckets_of(chunk):
                own = bucket.share(self._rank)
                served = source[own.start : own.stop].to(device="cpu", dtype=dtype, copy=True)
                if chunk in self._common:
                    served = self._common[chunk].view(dtype)[own.start : own.stop].copy_(served)
                self._shares[index] = served.to(device)
                self._versions.add(index, served)
        return False

    def forget(self, chunk: int = 0) -> None:
        for each in range(chunk, self.num_chunks):
            for index, _ in self._buckets_of(each):
                self._shares.pop(index, None)
                self._versions.forget(index)
        self._common = {each: memory for each, memory in self._common.items() if each < chunk}
        self.weights.forget(chunk)

    def _buckets_of(self, chunk: int) -> list[tuple[int, Bucket]]:
        layout = self.layout_ref.layout
        return [(index, layout.buckets[index]) for index in layout.buckets_in(chunk)]

    # parameters --------------------------------------------------------------------------------------------------

    def attach(self, param: int, tensor: torch.nn.Parameter, param_format: ParamFormat) -> None:
        slot = self.layout_ref.layout.slots[param]
        assert slot is not None
        chunk = self.weights.chunks[slot.chunk]
        line = torch.empty(chunk.numel, dtype=chunk.dtype, device="meta")
        shadow = param_format.unflatten(line[slot.span.start : slot.span.stop])
        name = self._params.names[param]
        become_absent(tensor, make_absent_param(self, chunk.index, param, name, shadow, self._device, tensor.requires_grad))

    def detach(self, tensor: torch.nn.Parameter, values: torch.Tensor) -> None:
        if isinstance(tensor, Absent):
            become_plain(tensor, values)
        else:
            tensor.data = values

    def memory_of(self, param: int) -> None:
        return None

    def edited(self, chunk: GatheredChunk, tensor: Absent) -> None:
        """Takes over what an operator of the user wrote to a gathered chunk."""
        memory, written = chunk.memory, tensor.extent
        assert memory is not None
        with self._lock, torch.inference_mode(False):
            if self._group.size > 1:  # else there is nobody to compare with
                self._edits.note(chunk.index, written, memory)
            for index, bucket in self._buckets_of(chunk.index):
                own = bucket.share(self._rank)
                edited = own.overlap(written)
                inside = Span(0, 0) if edited is None else edited.shifted(-own.start)
                values = memory[:0] if edited is None else memory[edited.start : edited.stop]
                self._versions.edit(index, inside, values.cpu())
                if self._device.type == "cpu":
                    self._shares[index] = self._versions.newest(index)
                    self._renewed.add(index)
                else:
                    self._shares[index][inside.start : inside.stop] = values

    # gathering ---------------------------------------------------------------------------------------------------

    def visible(self, chunk: int) -> torch.Tensor | None:
        common = self._common.get(chunk)
        if common is None or self._device.type != "cpu" or self._is_edited(chunk):
            return None
        self._wait_for_others()
        return common.view(self.weights.chunks[chunk].dtype)

    def fetch(self, chunk: int, memory: torch.Tensor) -> Arrival:
        """Fills memory with a chunk: this rank's shares, and those of others as of this rank's own version."""
        common = self._common.get(chunk)
        if common is not None and not self._is_edited(chunk):
            self._wait_for_others()
            return CompletedResult(memory.copy_(common.view(memory.dtype)))
        landing = memory if memory.is_cpu else torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
        pulls, own_spans = [], []
        for index, bucket in self._buckets_of(chunk):
            own, span = bucket.share(self._rank), bucket.span
            memory[own.start : own.stop] = self._shares[index]
            pulls.append(self._pulls.begin(index, landing[span.start : span.stop], *self._versions.version(index)))
            own_spans.append(own)
        return _Landing(pulls, landing, memory, own_spans)

    def _is_edited(self, chunk: int) -> bool:
        return any(self._versions.version(index).edits for index, _ in self._buckets_of(chunk))

    def _wait_for_others(self) -> None:
        """What all ranks see is whole once every rank has ended the last step."""
        if self._others is not None:
            self._others.wait()
            self._others = None

    # a step ------------------------------------------------------------------------------------------------------

    def share(self, bucket: int, rank: int) -> torch.Tensor:
        assert rank == self._rank
        return self._shares[bucket]

    def to_publish(self, bucket: int) -> None:
        return None

    def renewed(self) -> Sequence[int]:
        renewed, self._renewed = sorted(self._renewed), set()
        return renewed

    def begin_step(self) -> None:
        self.weights.end_window()  # this rank reads nothing any more
        digests = exchange_about(self._group, "an update of weights in shares", self._edits.digest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RanksDiffer(
                    f"Cannot step: rank {rank} of {len(digests)} edited weights that rank 0 did not edit so since the last "
                    "step. Edit weights alike on all ranks."
                )
        self._edits.clear()
        for index in self._versions.begin_step():
            if self._device.type == "cpu":
                self._shares[index] = self._versions.newest(index)
                self._renewed.add(index)

    def end_step(self) -> None:
        if self._device.type != "cpu":
            for index, share in self._shares.items():
                self._versions.newest(index).copy_(share)
        self._versions.end_step()
        self._ask_others()

    def _ask_others(self) -> None:
        if self._common and self._group.size > 1:
            self._others = self._pulls.begin(_STEP_ENDED, torch.empty(self._group.size), *self._versions.version(_STEP_ENDED))

    def close(self) -> None:
        self._wait_for_others()
        self._pulls.close()

    def reconnect(self) -> None:
        self.weights.free_all()
        self._pulls = Pulls(self._group.new_wire(), self._versions.request)
        self._ask_others()


class _Landing:
    """A chunk on its way, which lands on the host where the device is another one."""

    def __init__(self, pulls: Sequence[Pull], landing: torch.Tensor, memory: torch.Tensor, own: Sequence[Span]) -> None:
        self._pulls = pulls
        self._landing = landing
        self._memory = memory
        self._own = own

    def wait(self) -> None:
        for pull in self._pulls:
            pull.wait()
        if self._landing is not self._memory:
            start = 0
            for own in (*self._own, Span(self._memory.numel(), self._memory.numel())):  # what this rank has is there
                self._memory[start : own.start] = self._landing[start : own.start]
                start = own.stop
