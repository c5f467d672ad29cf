"""The one place where tests read what is inside `zero`: when something moves there, it moves here.

Functions take a sharded optimizer and answer a question about it, in numbers, tensors and other things that users have. Those
that return a part itself are for unit tests: a promise that called them would depend on how the part is made.
tests/faults.py makes the inside fail. What users import is no matter of this module.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accelerators
from tests.traces import leads_to
from zero import ShardedOptimizer, ZeroConfig
from zero.checkpoint import manifest, values
from zero.checkpoint.folder import read_manifest
from zero.checkpoint.values import first_difference as first_difference
from zero.comm.connect import connect
from zero.comm.group import Group as Group
from zero.comm.group import Pending, TimeLimits
from zero.comm.levels import HybridGroup, replicated
from zero.comm.levels import by_hosts as by_hosts
from zero.comm.results import CompletedResult, SingleRankResult
from zero.comm.shared_memory import through_shared_memory as through_shared_memory
from zero.config.deepspeed.reader import translate
from zero.memory.formats import sum_dtype
from zero.memory.gathered import ChunkState, GatheredWeights
from zero.memory.homes.disk import is_absent as is_on_disk
from zero.memory.weights import Weights
from zero.optim.optimizers import Lion
from zero.optim.traits import ELEMENTWISE, num_moments
from zero.plan.budget import Budget, PlannedTraining, Traffic, budget_of, disk_bytes, traffic_of
from zero.plan.layout import Bucket, FlatLayout, Piece, Span
from zero.runtime.params import absent
from zero.runtime.params.unread import Unread
from zero.setup import prepare
from zero.setup.selection import placement_of
from zero.sharding.memory_usage import measured_bytes
from zero.sharding.state_offload import STATES
from zero.sharding.whole_values import set_master as set_master
from zero.sharding.whole_values import set_state as set_state
from zero.sharding.whole_values import whole_master as whole_master
from zero.window import narrowing as narrow
from zero.window.grads import ShardedGrad
from zero.window.window import Window

# What is laid out ---------------------------------------------------------------------------------------------------------


def layout(optimizer: ShardedOptimizer) -> FlatLayout:
    """The flat line, with its buckets and chunks."""
    return optimizer.sharding.layout_ref.layout


def buckets(optimizer: ShardedOptimizer) -> tuple[Bucket, ...]:
    """The buckets, in the order of the line."""
    return optimizer.sharding.layout_ref.layout.buckets


def names(optimizer: ShardedOptimizer) -> list[str]:
    """The names of parameters, by their number."""
    return optimizer.sharding.params.names


def tensors(optimizer: ShardedOptimizer) -> list[nn.Parameter]:
    """The parameters, by their number."""
    return optimizer.sharding.params.tensors


def number_of(optimizer: ShardedOptimizer, param: nn.Parameter) -> int:
    """The number of a parameter."""
    return optimizer.sharding.params.index[id(param)]


# Masters ------------------------------------------------------------------------------------------------------------------


def shares_of_masters(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Returns this rank's shares of masters, in the order of buckets."""
    return optimizer.sharding.masters.shard.present()


def masters_by_bucket(optimizer: ShardedOptimizer) -> dict[int, torch.Tensor]:
    """Returns this rank's shares of masters, by bucket."""
    return optimizer.sharding.masters.shard.shares


def share_of_masters(optimizer: ShardedOptimizer, bucket: int) -> torch.Tensor:
    """Returns this rank's masters of one bucket."""
    return optimizer.sharding.masters.shard.share(bucket)


def bytes_of_masters(optimizer: ShardedOptimizer) -> int:
    """The bytes of this rank's shares of masters."""
    return optimizer.sharding.masters.shard.num_bytes


def device_of_masters(optimizer: ShardedOptimizer) -> torch.device:
    """The device on which a training computes, wherever its masters live."""
    return optimizer.sharding.masters.shard.device


def masters_of(optimizer: ShardedOptimizer, param: int) -> list[tuple[Piece, nn.Parameter]]:
    """The pieces of one parameter that this rank updates, each with its master."""
    return optimizer.sharding.masters.of(param)


def pieces_by_bucket(optimizer: ShardedOptimizer) -> dict[int, list[tuple[Piece, nn.Parameter]]]:
    """The pieces that this rank updates, each with its master, by bucket."""
    return optimizer.sharding.masters.pieces


def pieces_and_masters(optimizer: ShardedOptimizer) -> list[tuple[Piece, nn.Parameter]]:
    """The pieces that this rank updates, each with its master."""
    return [pair for pairs in optimizer.sharding.masters.pieces.values() for pair in pairs]


def piece_of_masters(optimizer: ShardedOptimizer, piece: Any) -> torch.Tensor:
    """The values of one piece, as they lie in this rank's share."""
    return optimizer.sharding.masters.shard.piece(piece)


def has_copies(optimizer: ShardedOptimizer, bucket: int) -> bool:
    """Returns whether masters of a bucket are copies of weights, and not the weights themselves."""
    return optimizer.sharding.masters.is_copy(bucket)


def lent_host_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of host memory that are lent to states and to copies of them; of a closed optimizer, too."""
    return optimizer._sharding.memory_guard.homes.host.num_lent_bytes


def host_is_device(optimizer: ShardedOptimizer) -> bool:
    """Returns whether states on the host have the same home as those on the device."""
    homes = optimizer.sharding.memory_guard.homes
    return homes.host is homes.device


def num_copies_to_host(optimizer: ShardedOptimizer) -> int:
    """The number of copies to the host that are on their way, or whose values are still to be added there."""
    return len(optimizer.sharding.memory_guard.homes.host._arriving)


def num_ahead(optimizer: ShardedOptimizer) -> int:
    """The number of buckets whose masters are stepped, or are being stepped, while their weights are those of before."""
    return len(optimizer.sharding.masters.ahead)


def num_weights_on_their_way(optimizer: ShardedOptimizer) -> int:
    """The number of copies of new weights, from the host to the device, that have not ended."""
    sent = optimizer.sharding.masters._sent.values()
    return sum(not transfer.done() for of_home in sent for transfer, _ in of_home)


def descriptors_of_disks(optimizer: ShardedOptimizer) -> dict[str, int]:
    """The file descriptors of states on disks, by kind."""
    disks = optimizer.sharding.masters.shard.homes.disks
    return {kind: disk.file.fileno() for (kind, _), disk in disks.items()}


def disk_traffic(optimizer: ShardedOptimizer) -> dict[str, tuple[int, int]]:
    """The bytes that were read from disks and written to them, by kind."""
    disks = optimizer.sharding.masters.shard.homes.disks
    return {kind: (disk.file.num_read, disk.file.num_written) for (kind, _), disk in disks.items()}


def finish_reads(optimizer: ShardedOptimizer) -> None:
    """Ends what is read from a disk ahead of its use."""
    optimizer.sharding.masters.streams.flush()


def fetch_masters(optimizer: ShardedOptimizer, bucket: int) -> None:
    """Brings masters of a bucket to the device, as a step that fails then leaves them."""
    optimizer.sharding.masters.fetch(bucket)


def whole_updated(optimizer: ShardedOptimizer, param: int) -> torch.Tensor:
    """Makes whole on every rank what the optimizer updates of one parameter; a collective."""
    sharding = optimizer.sharding
    own = {piece: master.detach() for piece, master in sharding.masters.of(param)}
    return sharding.window.grad_ops.whole(param, own.__getitem__, sum_dtype(sharding.params.tensors[param].dtype))


def has_narrow_weight(optimizer: ShardedOptimizer, param: int) -> bool:
    """Returns whether a parameter has a slot, and is stored in less than its master."""
    dtype = optimizer.sharding.params.tensors[param].dtype
    return sum_dtype(dtype) != dtype and optimizer.sharding.layout_ref.layout.slots[param] is not None


def streamed_master(optimizer: ShardedOptimizer, param: int, dtype: torch.dtype) -> torch.Tensor:
    """The master of one parameter, whole, read from wherever it lives; a collective."""
    sharding = optimizer.sharding
    return sharding.window.grad_ops.whole(param, sharding.masters.streams.piece, dtype)


def lines_of_masters(optimizer: ShardedOptimizer, param: int) -> list[tuple[Span, torch.Tensor]]:
    """Returns the pieces of a parameter's masters on this rank: where each is in the parameter, and its values on the flat
    line."""
    sharding = optimizer.sharding
    form = sharding.window.grad_ops.formats[param]
    masters = [(piece, sharding.masters.streams.piece(piece).clone()) for piece, _ in sharding.masters.of(param)]
    return [(piece.in_param, form.line_of(master)) for piece, master in masters]


def from_line(optimizer: ShardedOptimizer, param: int, line: torch.Tensor) -> torch.Tensor:
    """A whole parameter of the values that it has on the flat line."""
    return optimizer.sharding.window.grad_ops.formats[param].unflatten(line)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters and sums of weights of that dtype."""
    return sum_dtype(dtype)


# Weights ------------------------------------------------------------------------------------------------------------------


def weights_of(optimizer: ShardedOptimizer) -> Weights:
    """The weights as they are kept: their chunks and shares, and at stage 3 what is gathered."""
    return optimizer.sharding.placer.weights


def chunks(optimizer: ShardedOptimizer) -> dict[int, torch.Tensor]:
    """The memory of each chunk of weights, at stages that keep them whole."""
    return optimizer.sharding.placer.weights.chunks


def published_chunks(optimizer: ShardedOptimizer) -> dict[int, torch.Tensor]:
    """The chunks that new weights are published into."""
    return optimizer.sharding.publisher._weights.chunks


def memory_of_weights(optimizer: ShardedOptimizer) -> Iterable[torch.Tensor]:
    """Returns all memory in which this rank has weights."""
    return optimizer.sharding.placer.weights.memory()


def served_shares(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Returns the host memory in which other ranks read this one's shares of weights, which may be on their way there."""
    exchange = optimizer.sharding.placer.weights.exchange
    return [exchange.versions.place(number) for number in exchange._shares]


def share_of_weights(optimizer: ShardedOptimizer, bucket: int, rank: int) -> torch.Tensor:
    """Returns one rank's share of the weights of a bucket."""
    return optimizer.sharding.placer.weights.share(bucket, rank)


def bytes_of_weights(optimizer: ShardedOptimizer) -> int:
    """The bytes of all memory in which this rank has weights."""
    return sum(tensor.nbytes for tensor in optimizer.sharding.placer.weights.memory())


def bytes_of_weights_on_disk(optimizer: ShardedOptimizer) -> int:
    """The bytes of weights that this rank has on disks."""
    return optimizer.sharding.placer.weights.num_disk_bytes


def sizes_of_chunks(optimizer: ShardedOptimizer) -> list[int]:
    """The bytes of each chunk of weights in shares, whole, those of frozen weights too, from the largest down."""
    weights = optimizer.sharding.placer.weights
    return sorted((chunk.num_bytes for each in (weights, weights._frozen) for chunk in each.chunks.values()), reverse=True)


def num_chunks_in_use(optimizer: ShardedOptimizer) -> int:
    """The number of whole chunks that an operator uses."""
    weights = optimizer.sharding.placer.weights
    return sum(chunk.num_users > 0 for chunk in weights.chunks.values())


def num_fetches(optimizer: ShardedOptimizer) -> int:
    """The number of chunks that were made whole from shares."""
    return gathered_weights(optimizer).num_fetches


def fetched_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of weights that came from other ranks, by gathers and on request."""
    return optimizer.sharding.placer.weights.num_fetched_bytes


def pulled_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of weights that came from other ranks on request."""
    return optimizer.sharding.placer.weights.exchange.pulls.num_pulled_bytes


def bytes_of_whole_chunks(optimizer: ShardedOptimizer) -> int:
    """The bytes of chunks that are whole now."""
    return gathered_weights(optimizer).num_bytes


def peak_of_whole_chunks(optimizer: ShardedOptimizer) -> int:
    """The most bytes of chunks that were whole at one time."""
    return gathered_weights(optimizer).peak_bytes


def are_left_to_others(optimizer: ShardedOptimizer) -> bool:
    """Returns whether the memory of a chunk was left to tensors that are kept in it."""
    return any(chunk.state is ChunkState.OWN for chunk in gathered_weights(optimizer)._gathered)


def free_whole_chunks(optimizer: ShardedOptimizer) -> None:
    """Lets go of all whole chunks that nothing uses."""
    gathered_weights(optimizer).free_all()


def edits_of_weights(optimizer: ShardedOptimizer) -> tuple[int, int]:
    """Returns how many edits of one share are kept for other ranks, at most, and how many weights are noted as edited."""
    exchange = optimizer.sharding.placer.weights.exchange
    return max(len(share.overwritten) for share in exchange.versions._shares.values()), len(exchange._edits._edits)


def gathered_weights(optimizer: ShardedOptimizer) -> GatheredWeights:
    """The weights that were gathered from other ranks and are kept for a while."""
    return optimizer.sharding.placer.weights.exchange.cache


def is_absent(param: Any) -> bool:
    """Returns whether a parameter's values are in shares."""
    return isinstance(param, absent.Absent)


def is_unread(param: Any) -> bool:
    """Returns whether a parameter's values are still in files."""
    return type(param) is Unread


def ranks_on_device(optimizer: ShardedOptimizer) -> int:
    """The number of ranks that are counted as users of this rank's device."""
    return optimizer.sharding.placer._place.num_ranks


# Gradients ----------------------------------------------------------------------------------------------------------------


def shares_of_gradients(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Returns this rank's shares of gradients whose sums were taken, in the order of buckets."""
    return optimizer.sharding.window.grad_ops.shard.present()


def num_gradients_in_memory(optimizer: ShardedOptimizer) -> int:
    """The number of this rank's shares of gradients that have memory."""
    return len(optimizer.sharding.window.grad_ops.shard.shares)


def bytes_of_gradients(optimizer: ShardedOptimizer) -> int:
    """The bytes of this rank's shares of gradients."""
    return optimizer.sharding.window.grad_ops.shard.num_bytes


def num_deferred_sums(optimizer: ShardedOptimizer) -> int:
    """The number of buckets whose rows wait for somebody who needs their sum."""
    return len(optimizer.sharding.window.grad_ops.shard.deferred)


def add_up_one_bucket(optimizer: ShardedOptimizer) -> None:
    """Adds up the rows of a bucket that wait, as somebody who reads its sum."""
    shard = optimizer.sharding.window.grad_ops.shard
    shard.share(next(iter(shard.deferred)))


def bytes_for_gradients(optimizer: ShardedOptimizer) -> int:
    """The bytes of sums, of memory that is kept for the next ones, and of the buffers of buckets."""
    shard = optimizer.sharding.window.grad_ops.shard
    sums = sum(share.nbytes for share in (*shard._kept.values(), *shard.shares.values()))
    return sums + optimizer.sharding.window.reducer.staging.num_bytes()


def throw_away_gradients(optimizer: ShardedOptimizer) -> None:
    """Throws away the sums of a window, as its end does, and nothing else of it."""
    optimizer.sharding.window.grad_ops.shard.clear()


@contextlib.contextmanager
def sums_count_as_unread(optimizer: ShardedOptimizer) -> Iterator[None]:
    """Has what is read of sums inside the block change nothing about the next window: nobody counts as having wanted them."""
    shard = optimizer.sharding.window.grad_ops.shard
    before = list(shard._wanted)
    yield
    shard._wanted[:] = before


def is_in_shares(grad: Any) -> bool:
    """Returns whether a gradient is a proxy of shares."""
    return type(grad) is ShardedGrad


# Rounds -------------------------------------------------------------------------------------------------------------------


def num_open_rounds(optimizer: ShardedOptimizer) -> int:
    """The number of buckets that are being filled."""
    return len(optimizer.sharding.window.reducer._rounds)


def borrowed_buffers(optimizer: ShardedOptimizer) -> int:
    """The number of buffers of buckets that are filled or sent; of a closed optimizer, too."""
    return optimizer._sharding.window.reducer.staging.borrowed


def most_borrowed_buffers(optimizer: ShardedOptimizer) -> int:
    """The most buffers of buckets that were filled or sent at one time."""
    return optimizer.sharding.window.reducer.staging.most_borrowed


def num_free_buffers(optimizer: ShardedOptimizer) -> int:
    """The number of buffers of buckets that nobody uses and that are kept."""
    return sum(map(len, optimizer.sharding.window.reducer.staging._free.values()))


def buffer_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of buffers that buckets of this window are in, or rows of them."""
    return optimizer.sharding.window.reducer.num_staging_bytes


def send_needed(optimizer: ShardedOptimizer) -> None:
    """Sends what waits on the host, as where another rank says that its device waits for it."""
    sent_by = optimizer.sharding.window.reducer
    sent_by.send_needed(f"{sent_by._window} {sent_by.sent}")


def free_staging_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of staging that nobody has borrowed."""
    free = optimizer.sharding.window.reducer.staging._free.values()
    return sum(returned.memory.buffer.nbytes for kept in free for returned in kept)


def bytes_in_flight(optimizer: ShardedOptimizer) -> int:
    """The bytes of buckets that were sent and not yet received."""
    return optimizer.sharding.window.reducer.inflight.num_bytes


def sends_bytes(optimizer: ShardedOptimizer, across: bool) -> bool:
    """Returns whether buckets are sent in eight bits: by all ranks, or across hosts alone."""
    kind = narrow.AsBytesAcross if across else narrow.AsBytes
    return isinstance(optimizer.sharding.window.reducer.inflight._narrowings[0], kind)


def rounding_errors(optimizer: ShardedOptimizer) -> Mapping[int, tuple[torch.Tensor, float]]:
    """Returns the rounding errors that come with the next gradients, by bucket; of a closed optimizer, too."""
    return optimizer._sharding.window.reducer.inflight._narrowings[0]._coder.missing


def rounds_sent(optimizer: ShardedOptimizer) -> int:
    """The number of rounds that this rank has sent in its window."""
    return optimizer.sharding.window.reducer.sent


def group(optimizer: ShardedOptimizer) -> Group:
    """The group over which ranks send."""
    return optimizer.sharding.group


def kind_of_group(optimizer: ShardedOptimizer) -> str:
    """The name of the class of the group over which ranks send."""
    return type(optimizer.sharding.group).__name__


def ranks_of_a_share(optimizer: ShardedOptimizer) -> int:
    """The number of ranks that have different shares; the others have replicas of them."""
    return optimizer.sharding.group.inner.size


def share_host_memory(optimizer: ShardedOptimizer) -> tuple[bool, bool, bool]:
    """Returns whether ranks send through shared memory: all ranks, those of different shares, and those of replicas."""
    whole = optimizer.sharding.group
    of_ranks = whole, whole.inner, whole.outer or whole
    all_ranks, inner, outer = (each.shared_host_memory is not None for each in of_ranks)
    return all_ranks, inner, outer


def sizes_of_groups(optimizer: ShardedOptimizer) -> tuple[int, int, int]:
    """The number of all ranks, of those of different shares, and of those of replicas."""
    whole = optimizer.sharding.group
    return whole.size, whole.inner.size, 1 if whole.outer is None else whole.outer.size


def tell_all(optimizer: ShardedOptimizer, message: bytes) -> list[bytes]:
    """Returns the messages of all ranks, by rank, with zeros after those that are shorter than others; a collective."""
    among = optimizer.sharding.group
    sizes = [int.from_bytes(size, "little") for size in among.all_gather_bytes(len(message).to_bytes(8, "little"))]
    return among.all_gather_bytes(message.ljust(max(sizes), b"\0"))


def num_stretches_with_pages(optimizer: ShardedOptimizer) -> Callable[[], int]:
    """Returns a function for the number of stretches of shared memory that have pages and that weights were sent from. It is
    asked for before the optimizer is closed, and may be called afterwards."""
    stretches = optimizer.sharding.group.inner._arena._stretches
    return lambda: sum(each.sent[0] == 1 and each.sent[1] >= 0 and not each.vacant for each in stretches)


# The window and the step --------------------------------------------------------------------------------------------------


def window(optimizer: ShardedOptimizer) -> Window:
    """The window, with its phase."""
    return optimizer.sharding.window


def must_tell_others(optimizer: ShardedOptimizer) -> bool:
    """Returns whether other ranks must hear of the window before it is used."""
    return optimizer.sharding.window.needs_sync


def has_settled_gradients(optimizer: ShardedOptimizer) -> bool:
    """Returns whether any parameter was used, as all ranks agreed when they last settled."""
    return bool(optimizer.sharding.window.used)


def backward_failed(optimizer: ShardedOptimizer) -> bool:
    """Returns whether the window knows that a backward broke off."""
    return optimizer.sharding.window.backward_failed


def count_a_step_alone(optimizer: ShardedOptimizer) -> None:
    """Counts a step that this rank has taken and the others have not."""
    optimizer.sharding.window.sync.count_step()


def num_steps(optimizer: ShardedOptimizer) -> int:
    """The number of the step that ranks agree on."""
    return optimizer.sharding.window.sync.step


def is_away(optimizer: ShardedOptimizer) -> bool:
    """Returns whether `offload_states` has taken states away."""
    return optimizer.sharding.offloader.is_away


def bytes_of_states(optimizer: ShardedOptimizer, states: Any) -> int:
    """The bytes that `offload_states` would move."""
    return optimizer.sharding.offloader.num_bytes(states)


def has_unreported_save(optimizer: ShardedOptimizer) -> bool:
    """Returns whether ranks have yet to tell each other how a save in the background went."""
    return optimizer.sharding.lifetime.last_save is not None


def tensors_inside(optimizer: ShardedOptimizer, skip: set[int]) -> dict[str, torch.Tensor]:
    """Every tensor that the parts of a sharded optimizer hold, by how it was reached. `skip` has the ids of objects that are
    not looked into."""
    tensors: dict[str, torch.Tensor] = {}
    seen, waiting = set(skip), list[tuple[str, Any]]([("", optimizer.sharding)])
    while waiting:
        path, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            tensors[path] = thing
        elif isinstance(thing, dict):
            waiting += [(f"{path}[{key!r}]", value) for key, value in thing.items()]
        elif isinstance(thing, (list, tuple, set, deque)):
            waiting += [(f"{path}[{number}]", value) for number, value in enumerate(thing)]
        elif type(thing).__module__.startswith("zero."):
            named = vars(thing) if hasattr(thing, "__dict__") else {n: getattr(thing, n) for n in type(thing).__slots__}
            waiting += [(f"{path}.{name}", value) for name, value in named.items()]
    return tensors


def hold_window(optimizer: ShardedOptimizer) -> Callable[[], None]:
    """Keeps the window of an optimizer alive, and nothing else of it. Returns what lets go of it."""
    held = [optimizer.sharding.window]
    return held.clear


def _doers(optimizer: ShardedOptimizer) -> list[Any]:
    """The parts of a sharded optimizer that live as long as it does, without what they hold."""
    sharding = optimizer.sharding
    of_window = [sharding.window, sharding.window.reducer, sharding.window.grad_ops]
    return [sharding, *of_window, sharding.hooks, sharding.masters, sharding.updater, sharding.publisher]


def parts_alive(optimizer: ShardedOptimizer) -> Callable[[], list[str]]:
    """Returns a function for the names of the parts of a sharded optimizer that are still there. It keeps none of them."""
    refs = [weakref.ref(part) for part in _doers(optimizer)]
    return lambda: [type(part).__name__ for part in (ref() for ref in refs) if part is not None]


def parts_lead_to(optimizer: ShardedOptimizer, wanted: Mapping[str, Any]) -> str | None:
    """The name of one of these objects that the parts of a sharded optimizer refer to, over any number of others."""
    return leads_to(_doers(optimizer), wanted)


def memory_in_use(optimizer: ShardedOptimizer) -> Budget:
    """The bytes that a training takes, as measured."""
    return measured_bytes(optimizer.sharding)


def planned(optimizer: ShardedOptimizer, rank: int, *moments: Any, **training: Any) -> Budget:
    """The bytes that a training is to take, as planned."""
    return budget_of(optimizer.sharding.layout_ref.layout, rank, PlannedTraining(*moments, **training))


def planned_of_disks(of: FlatLayout, rank: int = 0, moments: Any = 2) -> Mapping[tuple[str, str], int]:
    """The bytes on disks that a layout is to take, by kind and folder."""
    return disk_bytes(of, rank, moments)


def planned_traffic(optimizer: ShardedOptimizer, stage: int, world: int) -> Traffic:
    """The bytes that a step is to send, as planned."""
    return traffic_of(optimizer.sharding.layout_ref.layout, stage, world)


def moments_of(optimizer: ShardedOptimizer) -> list[float]:
    """The number of moments that the inner optimizer keeps of an element, by group."""
    return num_moments(optimizer.sharding.updater.inner)


# Where something runs: a line of the source, as a simulated device notes it, or the thread ------------------------------------


def collects_gradients(place: str) -> bool:
    """Returns whether a line is of what collects gradients and sends them."""
    return "/zero/window/" in place


def is_for_edits_or_transfers(place: str) -> bool:
    """Returns whether a line looks for edits of weights, or moves what another rank sends or reads, or what the host has."""
    return any(part in place for part in ("/zero/memory/masters.py", "/zero/comm/", "/zero/memory/homes/host.py"))


def keeps_pace(place: str) -> bool:
    """Returns whether a line has the host wait where it is too many rounds ahead of its device."""
    return "/zero/window/pace.py" in place


def reads_what_came_late(place: str) -> bool:
    """Returns whether a line has the host wait for a number that the device was told to compute in an earlier step."""
    return "/zero/sharding/update.py" in place


def on_the_thread_for_device_waits() -> bool:
    """Returns whether this is the thread that looks after what the device waits for."""
    return threading.current_thread().name == "zero-device"


def on_the_thread_for_gathers() -> bool:
    """Returns whether this is the thread that looks after gathers of weights."""
    return threading.current_thread().name == "zero-gathers"


# What is made without an optimizer ----------------------------------------------------------------------------------------


def connected(device: str, ranks: Any, time_limit_s: float) -> Group:
    """A group of these ranks on a device of that type."""
    return connect(accelerators.get(device), ranks, TimeLimits(time_limit_s, time_limit_s))


def ranks_that_share(device: torch.device) -> int:
    """The number of ranks whose memory is that of one device; a collective."""
    return prepare._ranks_that_share_memory(connect(accelerators.get(device.type)), device)


def completed(tensor: torch.Tensor) -> Pending:
    """The result of a collective that is over."""
    return CompletedResult(tensor)


def is_over_at_once(pending: Any) -> bool:
    """Returns whether a collective was over when it was begun, as there is nobody to wait for."""
    return isinstance(pending, CompletedResult | SingleRankResult)


def hybrid_of(inner: Any, outer: Any, whole: Any) -> Group:
    """A group of replicas of shards."""
    return HybridGroup(whole, inner, outer)


def replicated_by(whole: Group, shard_ranks: int, part: Callable[..., Group]) -> Group:
    """A group of replicas of so many ranks, whose parts `part` makes."""
    return replicated(whole, shard_ranks, part)


def read_deepspeed_config(tree: Mapping[str, Any]) -> ZeroConfig:
    """The configuration that DeepSpeed's becomes."""
    return translate(tree).config


def offloaded_ratio(settings: Mapping[str, Any], config: ZeroConfig, device: torch.device) -> float:
    """The ratio of states on the host that a configuration and the settings of a group decide; raises if they fit no home."""
    return placement_of(settings, config, device).offload


def training_saved_in(folder: Path) -> dict[str, Any]:
    """Reads what a checkpoint says of its training, apart from tensors."""
    return values.decode(read_manifest(folder).training)


def sealed_manifest(body: dict[str, Any]) -> str:
    """The text of a manifest with its checksum."""
    return manifest._dumped({**body, "sha256": manifest._hash_of(body)})


def kinds_by_element() -> tuple[type[torch.optim.Optimizer], ...]:
    """The optimizers that are known to treat every element by itself."""
    return ELEMENTWISE


def lion(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """The Lion of this library."""
    return Lion(params, **settings)


def lies_on_disk(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's values are on a disk, and have no memory."""
    return is_on_disk(tensor)


def bytes_in_code(numel: int) -> int:
    """The bytes that so many numbers take in eight bits."""
    return narrow.num_bytes_of(numel)


def codes() -> dict[str, Callable[[int], narrow.Code]]:
    """The codes of narrow buckets by the name that a user writes."""
    return dict(narrow.CODES)


ALL_STATES = STATES  # the states that `offload_states` may move
NUMBERS_IN_A_CODED_BLOCK = narrow.BLOCK
