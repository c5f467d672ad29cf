"""The weights of a model on this rank: all of them, in flat memory, or this rank's shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import accelerators
from accelerators import Accelerator
from zero.memory.addresses import address_of
from zero.memory.formats import DTYPES, ParamFormat
from zero.memory.homes.registry import Move, Moved
from zero.memory.shard import LayoutRef
from zero.plan.homes import Away
from zero.plan.layout import PartSpec, Span


@dataclass(frozen=True)
class Place:
    """The device that chunks live on, and the number of ranks that share its memory."""

    accelerator: Accelerator
    device: torch.device
    num_ranks: int = 1

    @property
    def is_host(self) -> bool:
        return self.device.type == "cpu"

    def has_room_for(self, num_bytes: int) -> bool:
        available = self.accelerator.memory(self.device.index).available
        return available is None or num_bytes <= available // self.num_ranks


class GatherOrder(Protocol):
    """The order of gathers of weights, in which rounds of gradients have a place. All ranks count the same rounds."""

    def close_round(self) -> None:
        """Notes that a round is full. It may wait on the host."""

    def begin_round(self) -> None:
        """Begins the gathers that come before the next round, which is sent now."""

    def end_round(self) -> None:
        """Notes that the round was sent."""


class Weights(Protocol):
    """The weights that a rank keeps between two steps. Chunks are filled one after the other."""

    layout_ref: LayoutRef

    @property
    def num_chunks(self) -> int:
        """The number of chunks that are filled."""

    def memory(self) -> Iterable[torch.Tensor]:
        """Returns the memory of this rank's weights, without what is on a disk."""

    @property
    def num_disk_bytes(self) -> int:
        """Bytes of this rank's weights on disks."""

    def room(self) -> float:
        """Returns the bytes on the device that whole weights may still take."""

    @property
    def num_fetched_bytes(self) -> int:
        """Bytes that came from other ranks so far, for operators that needed them."""

    @property
    def are_read_by_others(self) -> bool:
        """True if other ranks may read shares of this one at any time until they close."""

    def prepare(self) -> None:
        """Prepares memory for chunks that are new in the layout and will be filled. A collective."""

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        """Gives the next chunk these values. Returns whether its memory is `source` itself, which may be kept if it is
        `given`."""

    def forget(self, chunk: int = 0) -> None:
        """Drops this chunk and all after it."""

    def attach(self, param: int, tensor: torch.nn.Parameter, param_format: ParamFormat) -> None:
        """Points the parameter at its slot, with a storage of its own, by which tools tell weights apart."""

    def detach(self, tensor: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Makes the parameter a plain one, with these values as its memory."""

    def memory_of(self, param: int) -> torch.Tensor | None:
        """Returns the memory of an attached parameter; None if it has none."""

    def take_frozen(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.nn.Parameter],
        place: Place,
        offload: float,
        away: tuple[Away, ...],
        awaited: Container[torch.nn.Parameter],
        part_specs: Sequence[PartSpec],
    ) -> None:
        """Takes over frozen parameters, which have the same values on all ranks. They need not be whole on any rank, the
        fraction `offload` of them is not on the device, and what is `away` is not in memory. Those that are `awaited` get
        values before they are read. A collective."""

    def has_frozen(self, tensor: torch.nn.Parameter) -> bool:
        """Returns whether a parameter was taken by `take_frozen`, and is not trained by now."""

    def frozen(self) -> Sequence[torch.nn.Parameter]:
        """Returns all parameters for which `has_frozen` is True."""

    def frozen_pieces(self) -> Iterator[tuple[torch.nn.Parameter, ParamFormat, list[tuple[Span, torch.Tensor]]]]:
        """Yields frozen parameters, in one order on all ranks, with the memory of this rank's parts of each, to be written in a
        step."""

    def return_frozen(self) -> None:
        """Makes frozen parameters whole again."""

    @property
    def whole_chunks(self) -> dict[int, torch.Tensor]:
        """The chunks, by number, that parameters have their memory in, if they have any."""

    def share_moves(self, moved: Moved) -> Iterator[Move]:
        """Yields a function for each share on the device that is not all of its chunk, which moves the share to a home by means
        of `moved`."""

    def share(self, bucket: int, rank: int) -> torch.Tensor:
        """Returns this rank's share as it is now."""

    def to_publish(self, bucket: int) -> torch.Tensor | None:
        """Returns the memory that the new shares of all ranks are gathered into after a step; None if ranks fetch them on
        use."""

    def expect_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes tensors that were on the meta device and must get values."""

    def expect_buffers(self, unwritten: Callable[[], list[str]]) -> None:
        """Notes the function that names the buffers that were on the meta device and have no values yet."""

    def note_written(self, *tensors: torch.Tensor) -> None:
        """Notes that these parameters have values."""

    def check_written(self) -> None:
        """Raises if a parameter or buffer that was on the meta device has no values yet."""

    def renewed(self) -> Sequence[int]:
        """Returns the buckets whose share has come to other memory since the last call, as the user edited weights."""

    def check_edits(self, written: Collection[torch.Tensor]) -> None:
        """Raises unless all ranks edited alike the parameters that are not `written`, as those will be loaded. A collective if
        weights are in shares."""

    def take_edits(self) -> None:
        """Takes over what the user edited, alike on all ranks or not. All ranks call it, and have met since they read
        weights."""

    def schedules(self) -> Sequence[GatherOrder]:
        """Returns the orders of gathers that rounds of gradients have a place in; none if weights come otherwise."""

    def begin_step(self) -> None:
        """Begins a step, in which shares are written. A collective."""

    def end_step(self) -> None:
        """Makes the present values of the shares the new weights."""

    def reconnect(self) -> None:
        """Goes on over new connections of the group. A collective."""

    def close(self) -> None:
        """Ends the use of weights, when no parameter is attached any more. A collective if weights are in shares."""


def is_part(tensor: torch.Tensor) -> bool:
    """Returns True if the storage of a tensor is longer than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


class CopiedInStateDict:
    """A hook of a model's `state_dict` for devices where weights are parts of one storage. It puts copies in their place: one
    for a weight under several names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, _: torch.nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        copies: dict[int, torch.Tensor] = {}
        for name in [prefix + name for name in self._names if prefix + name in state_dict]:
            value = state_dict[name]
            if is_part(value) and not isinstance(value, torch.nn.Parameter):
                address = address_of(value)
                copies[address] = copies[address] if address in copies else value.clone()
                state_dict[name] = copies[address]


class FlatBuffer:
    """Weights that are whole on this rank, in a 1-D tensor for each chunk."""

    def __init__(self, layout_ref: LayoutRef) -> None:
        self.layout_ref = layout_ref
        self.chunks: dict[int, torch.Tensor] = {}

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def memory(self) -> Iterable[torch.Tensor]:
        return self.chunks.values()

    @property
    def num_disk_bytes(self) -> int:
        return 0

    def room(self) -> float:
        return math.inf

    @property
    def num_fetched_bytes(self) -> int:
        return 0

    @property
    def are_read_by_others(self) -> bool:
        return False

    def prepare(self) -> None: ...

    def fill(self, chunk: int, source: torch.Tensor, device: torch.device, given: bool = True) -> bool:
        dtype = DTYPES[self.layout_ref.layout.chunks[chunk].dtype]
        self.chunks[chunk] = source.to(device=device, dtype=dtype, copy=not given)
        return self.chunks[chunk] is source

    def forget(self, chunk: int = 0) -> None:
        for each in [each for each in self.chunks if each >= chunk]:
            del self.chunks[each]

    def attach(self, param: int, tensor: torch.nn.Parameter, param_format: ParamFormat) -> None:
        memory = self.memory_of(param)[: param_format.numel]
        tensor.data = param_format.unflatten(accelerators.of(memory.device).with_own_storage(memory))

    def detach(self, tensor: torch.nn.Parameter, values: torch.Tensor) -> None:
        tensor.data = values

    def memory_of(self, param: int) -> torch.Tensor:
        slot = self.layout_ref.layout.slots[param]
        assert slot is not None
        return self.chunks[slot.chunk][slot.span.start : slot.span.stop]

    def take_frozen(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.nn.Parameter],
        place: Place,
        offload: float,
        away: tuple[Away, ...],
        awaited: Container[torch.nn.Parameter],
        part_specs: Sequence[PartSpec],
    ) -> None: ...

    def has_frozen(self, tensor: torch.nn.Parameter) -> bool:
        return False

    def frozen(self) -> Sequence[torch.nn.Parameter]:
        return ()

    def frozen_pieces(self) -> Iterator[tuple[torch.nn.Parameter, ParamFormat, list[tuple[Span, torch.Tensor]]]]:
        return iter(())

    def return_frozen(self) -> None: ...

    @property
    def whole_chunks(self) -> dict[int, torch.Tensor]:
        return self.chunks

    def share_moves(self, moved: Moved) -> Iterator[Move]:
        return iter(())

    def share(self, bucket: int, rank: int) -> torch.Tensor:
        entry = self.layout_ref.layout.buckets[bucket]
        span = entry.share(self.layout_ref.layout.share_of(bucket, rank))
        return self.chunks[entry.chunk][span.start : span.stop]

    def to_publish(self, bucket: int) -> torch.Tensor | None:
        entry = self.layout_ref.layout.buckets[bucket]
        if entry.num_shares == 1:
            return None
        return self.chunks[entry.chunk][entry.span.start : entry.span.stop]

    def expect_values(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def expect_buffers(self, unwritten: Callable[[], list[str]]) -> None: ...

    def note_written(self, *tensors: torch.Tensor) -> None: ...

    def check_written(self) -> None: ...

    def renewed(self) -> Sequence[int]:
        return ()

    def check_edits(self, written: Collection[torch.Tensor]) -> None: ...

    def schedules(self) -> Sequence[GatherOrder]:
        return ()

    def take_edits(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def reconnect(self) -> None: ...

    def close(self) -> None: ...
