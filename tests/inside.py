"""The one place where tests read what is inside `zero`, and where they make it fail: when something moves there, it moves here.

Functions take a sharded optimizer and say what it holds. A `Part` is something inside that a test puts its own in place of.
What users import is no matter of this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
from zero import ShardedOptimizer, ZeroConfig
from zero.checkpoint import disk, manifest, tensor_files, values
from zero.checkpoint.disk import ProgressBar
from zero.checkpoint.folder import read_manifest
from zero.checkpoint.values import first_difference as first_difference
from zero.comm import health, torch_group
from zero.comm.connect import connect
from zero.comm.group import CompletedResult, SingleRankResult, TimeLimits, UnreducedResult
from zero.comm.group import Group as Group
from zero.comm.health import RankMonitor
from zero.comm.levels import HybridGroup, replicated
from zero.comm.levels import by_hosts as by_hosts
from zero.comm.shared_memory import through_shared_memory as through_shared_memory
from zero.comm.torch_group import TorchGroup
from zero.config.deepspeed.reader import translate
from zero.memory import masters as masters_module
from zero.memory.flatten import Flattener
from zero.memory.formats import sum_dtype
from zero.memory.gathered import GatheredWeights
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes import mapped
from zero.memory.homes.disk import is_absent as is_on_disk
from zero.memory.homes.file import StateFile, page_aligned
from zero.memory.homes.home import DeviceHome
from zero.memory.homes.host import HostHome
from zero.memory.masters import Masters
from zero.memory.versions import VersionedShares
from zero.optim.optimizers import Lion
from zero.optim.traits import ELEMENTWISE, num_moments
from zero.plan import layout as layout_module
from zero.plan.budget import Budget, PlannedTraining, Traffic, budget_of, disk_bytes, traffic_of
from zero.plan.layout import Bucket, FlatLayout
from zero.runtime.kernels.sums import SumsByTorch
from zero.runtime.params import absent
from zero.runtime.params.placement import ParamPlacer
from zero.runtime.params.tracking import ParamTracker
from zero.runtime.unshard.gathers import Gathers
from zero.setup import prepare
from zero.setup.checks import check_params
from zero.setup.selection import places_of
from zero.sharding import build, optimizer_state, publisher, update
from zero.sharding.memory_usage import measured_bytes
from zero.sharding.publisher import WeightPublisher
from zero.sharding.state_offload import STATES
from zero.sharding.update import Updater
from zero.sharding.whole_values import set_master as set_master
from zero.sharding.whole_values import set_state as set_state
from zero.sharding.whole_values import whole_master as whole_master
from zero.window import inflight, rounds
from zero.window import narrowing as narrow
from zero.window.grads import GradOps, ShardedGrad
from zero.window.hooks import GradHooks
from zero.window.rounds import Reducer
from zero.window.window import Window

# What is laid out ---------------------------------------------------------------------------------------------------------


def layout(optimizer: ShardedOptimizer) -> FlatLayout:
    """The flat line, with its buckets and chunks."""
    return optimizer.sharding.layout_ref.layout


def layout_ref(optimizer: ShardedOptimizer) -> Any:
    """Returns the reference to the layout, which follows when parameters join it."""
    return optimizer.sharding.layout_ref


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


def masters_of(optimizer: ShardedOptimizer, param: int) -> list[tuple[Any, nn.Parameter]]:
    """The pieces of one parameter that this rank updates, each with its master."""
    return optimizer.sharding.masters.of(param)


def pieces_by_bucket(optimizer: ShardedOptimizer) -> dict[int, list[tuple[Any, nn.Parameter]]]:
    """The pieces that this rank updates, each with its master, by bucket."""
    return optimizer.sharding.masters.pieces


def pieces_and_masters(optimizer: ShardedOptimizer) -> list[tuple[Any, nn.Parameter]]:
    """The pieces that this rank updates, each with its master."""
    return [pair for pairs in optimizer.sharding.masters.pieces.values() for pair in pairs]


def piece_of_masters(optimizer: ShardedOptimizer, piece: Any) -> torch.Tensor:
    """The values of one piece, as they lie in this rank's share."""
    return optimizer.sharding.masters.shard.piece(piece)


def has_copies(optimizer: ShardedOptimizer, bucket: int) -> bool:
    """Returns whether masters of a bucket are copies of weights, and not the weights themselves."""
    return optimizer.sharding.masters.is_copy(bucket)


def on_the_host(optimizer: ShardedOptimizer) -> Any:
    """The home of masters on the host."""
    return optimizer.sharding.masters.shard.homes.host


def disks_of(optimizer: ShardedOptimizer) -> Mapping[Any, Any]:
    """The homes of states on a disk, by kind and place."""
    return optimizer.sharding.masters.shard.homes.disks


def homes(optimizer: ShardedOptimizer) -> Any:
    """The memories in which states live."""
    return optimizer.sharding.memory_guard.homes


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


def lines_of_masters(optimizer: ShardedOptimizer, param: int) -> list[tuple[Any, torch.Tensor]]:
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


def weights_of(optimizer: ShardedOptimizer) -> Any:
    """The weights as they are kept: their chunks and shares, and at stage 3 what is gathered."""
    return optimizer.sharding.placer.weights


def chunks(optimizer: ShardedOptimizer) -> dict[int, Any]:
    """The memory of each chunk of weights."""
    return optimizer.sharding.placer.weights.chunks


def published_chunks(optimizer: ShardedOptimizer) -> dict[int, Any]:
    """The chunks that new weights are published into."""
    return optimizer.sharding.publisher._weights.chunks


def memory_of_weights(optimizer: ShardedOptimizer) -> Iterable[torch.Tensor]:
    """Returns all memory in which this rank has weights."""
    return optimizer.sharding.placer.weights.memory()


def gathered_weights(optimizer: ShardedOptimizer) -> Any:
    """The weights that were gathered from other ranks and are kept for a while."""
    return optimizer.sharding.placer.weights.exchange.cache


def pulls(optimizer: ShardedOptimizer) -> Any:
    """Returns the part that asks other ranks for their shares of weights."""
    return optimizer.sharding.placer.weights.exchange.pulls


def poison_freed_weights() -> None:
    """Makes gathered weights NaN as they are let go, in every optimizer of this process from here on."""
    GatheredWeights.poison = True


@contextlib.contextmanager
def freed_weights_are_poison() -> Iterator[None]:
    """Makes gathered weights NaN as they are let go, while it runs."""
    with mock.patch.object(GatheredWeights, "poison", True):
        yield


def is_absent(param: Any) -> bool:
    """Returns whether a parameter's values are in shares."""
    return isinstance(param, absent.Absent)


def ranks_on_device(optimizer: ShardedOptimizer) -> int:
    """The number of ranks that are counted as users of this rank's device."""
    return optimizer.sharding.placer._place.num_ranks


# Gradients ----------------------------------------------------------------------------------------------------------------


def gradients(optimizer: ShardedOptimizer) -> Any:
    """Returns the owner of this rank's shares of gradients, and of what waits to be summed into them."""
    return optimizer.sharding.window.grad_ops.shard


def shares_of_gradients(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Returns this rank's shares of gradients whose sums were taken, in the order of buckets."""
    return optimizer.sharding.window.grad_ops.shard.present()


def bytes_of_gradients(optimizer: ShardedOptimizer) -> int:
    """The bytes of this rank's shares of gradients."""
    return optimizer.sharding.window.grad_ops.shard.num_bytes


def deferred_sums(optimizer: ShardedOptimizer) -> Any:
    """The buckets whose rows wait for somebody who needs their sum."""
    return optimizer.sharding.window.grad_ops.shard.deferred


def is_in_shares(grad: Any) -> bool:
    """Returns whether a gradient is a proxy of shares."""
    return type(grad) is ShardedGrad


# Rounds -------------------------------------------------------------------------------------------------------------------


def reducer(optimizer: ShardedOptimizer) -> Any:
    """Returns the part that fills and sends buckets."""
    return optimizer.sharding.window.reducer


def staging(optimizer: ShardedOptimizer) -> Any:
    """The scratch memory that buckets are sent from."""
    return optimizer.sharding.window.reducer.staging


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


def narrowing(optimizer: ShardedOptimizer) -> Any:
    """Returns the form in which buckets are sent."""
    return optimizer.sharding.window.reducer.inflight._narrowings[0]


def rounds_sent(optimizer: ShardedOptimizer) -> int:
    """The number of rounds that this rank has sent in its window."""
    return optimizer.sharding.window.reducer.sent


def group(optimizer: ShardedOptimizer) -> Any:
    """The group over which ranks send."""
    return optimizer.sharding.group


# The window and the step --------------------------------------------------------------------------------------------------


def window(optimizer: ShardedOptimizer) -> Window:
    """The window, with its phase."""
    return optimizer.sharding.window


def synchronization(optimizer: ShardedOptimizer) -> Any:
    """Returns the part by which ranks agree before they go on together."""
    return optimizer.sharding.window.sync


def num_steps(optimizer: ShardedOptimizer) -> int:
    """The number of the step that ranks agree on."""
    return optimizer.sharding.window.sync.step


def is_away(optimizer: ShardedOptimizer) -> bool:
    """Returns whether `offload_states` has taken states away."""
    return optimizer.sharding.offloader.is_away


def bytes_of_states(optimizer: ShardedOptimizer, states: Any) -> int:
    """The bytes that `offload_states` would move."""
    return optimizer.sharding.offloader.num_bytes(states)


def last_save(optimizer: ShardedOptimizer) -> Any:
    """The save in the background of which ranks have yet to tell each other how it went."""
    return optimizer.sharding.lifetime.last_save


def parts(optimizer: ShardedOptimizer) -> Any:
    """The object that holds all parts of a sharded optimizer, for tests that look at all of them."""
    return optimizer.sharding


def doers(optimizer: ShardedOptimizer) -> list[Any]:
    """The parts of a sharded optimizer that live as long as it does, without what they hold."""
    sharding = optimizer.sharding
    own = [sharding, sharding.window, sharding.window.reducer, sharding.hooks, sharding.masters]
    return [*own, sharding.updater, sharding.publisher, sharding.window.grad_ops]


def memory_in_use(optimizer: ShardedOptimizer) -> Budget:
    """The bytes that a training takes, as measured."""
    return measured_bytes(optimizer.sharding)


def planned(optimizer: ShardedOptimizer, rank: int, *moments: Any, **training: Any) -> Budget:
    """The bytes that a training is to take, as planned."""
    return budget_of(optimizer.sharding.layout_ref.layout, rank, PlannedTraining(*moments, **training))


def planned_of_disks(of: FlatLayout) -> Mapping[tuple[str, str], int]:
    """The bytes on disks that a layout is to take, by kind and folder."""
    return disk_bytes(of)


def planned_traffic(optimizer: ShardedOptimizer, stage: int, world: int) -> Traffic:
    """The bytes that a step is to send, as planned."""
    return traffic_of(optimizer.sharding.layout_ref.layout, stage, world)


def moments_of(optimizer: ShardedOptimizer) -> Any:
    """The number of moments that the inner optimizer keeps of an element, by group."""
    return num_moments(optimizer.sharding.updater.inner)


# Something inside that a test puts its own in place of ------------------------------------------------------------------


class Part(NamedTuple):
    """An attribute of something inside."""

    owner: Any
    name: str

    @property
    def now(self) -> Any:
        """Returns the attribute as it is now, which a replacement may call."""
        return getattr(self.owner, self.name)

    def put(self, value: Any) -> None:
        """Puts something else there, for good."""
        setattr(self.owner, self.name, value)

    def replaced(self, *by: Any, **how: Any) -> Any:
        """A context in which it is something else, given as to `mock.patch.object`."""
        return mock.patch.object(self.owner, self.name, *by, **how)


ADAPTION_OF_STATE = Part(build, "adopt_state")
ADOPTION = Part(masters_module, "adopt")
ANSWERING_A_REQUEST = Part(VersionedShares, "request")
ATTACHING_A_HOOK = Part(GradHooks, "attach")
BROADCAST = Part(TorchGroup, "broadcast")
CHECK_OF_PARAMS = Part(prepare, "check_params")
CHOICE_OF_KERNELS = Part(build, "use_kernels")
COMPARISON_OF_MASTERS = Part(Masters, "are_edited")
COPY_BETWEEN_HOST_AND_DEVICE = Part(HostHome, "_copy")
CUTTING_MASTERS = Part(Masters, "make_params")
DEFERRING_PRODUCTS = Part(GradientShard, "can_defer_product")
DIAGNOSIS = Part(RankMonitor, "diagnose")
DROPPING_GATHERS = Part(Gathers, "_drop_done")
FOLDER_SYNC = Part(disk, "sync_folder")
GATHERING_FOR_AN_OPERATOR = Part(absent, "_plain_of")
GIVING_PIECES = Part(optimizer_state, "_give_pieces")
INNER_STEP = Part(update, "step_without_hooks")
JUDGING_ON_DEVICE = Part(GradOps, "judges_on_device")
LOG_OF_THE_FLATTENER = Part(Flattener, "log")
LOOKING_AHEAD = Part(Updater, "_stay_on_device")
MAKING_ALIASES = Part(ParamTracker, "__init__")
MAKING_THE_REDUCER = Part(Reducer, "__init__")
MAKING_THE_UPDATER = Part(Updater, "__init__")
MAKING_THE_WINDOW = Part(Window, "__init__")
MAPPING_A_FILE = Part(mapped, "_map")
MEMORY_ON_DEVICE = Part(DeviceHome, "allocate")
MEMORY_ON_HOST = Part(HostHome, "allocate")
MOST_TOGETHER = Part(Updater, "_most_together")
NORM_OF_ALL = Part(GradOps, "total_norm")
NORM_OF_A_RANK = Part(GradOps, "_squares")
PROGRESS = Part(ProgressBar, "advance")
READING_A_CHUNK = Part(Flattener, "read")
READING_A_FILE = Part(disk.OpenFile, "read")
READING_FROM_DEVICE = Part(HostHome, "write")
REDUCE_SCATTER = Part(TorchGroup, "reduce_scatter")
SENDING_TO_DEVICE = Part(HostHome, "read")
SENDING_WEIGHTS = Part(WeightPublisher, "send")
STEP = Part(Updater, "step")
STEP_OF_BLOCKS = Part(Updater, "_step_inner")
SECONDS_FOR_THE_STORE = Part(health, "_ANSWER_S")
TAKING_A_MASTER = Part(Masters, "adopt_source")
TAKING_IN = Part(ParamPlacer, "_take")
WAITING_FOR_WEIGHTS = Part(WeightPublisher, "wait")
WRITING_A_CHUNK = Part(Flattener, "write")
WRITING_A_FILE = Part(disk, "write")
WRITING_TENSORS = Part(tensor_files, "write")


def transfer_of_a_disk(act: str) -> Part:
    """Reading or writing of a file of states."""
    return Part(StateFile, act)


def step_of(optimizer: ShardedOptimizer) -> Part:
    """The update of one optimizer."""
    return Part(optimizer.sharding.updater, "step")


def decision_of(optimizer: ShardedOptimizer) -> Part:
    """The judging of whether one optimizer applies a step."""
    return Part(optimizer.sharding.updater, "decide")


def begin_of_step(optimizer: ShardedOptimizer) -> Part:
    """Returns what one optimizer calls before it updates anything."""
    return Part(optimizer.sharding.updater, "begin")


def sending_of_weights(optimizer: ShardedOptimizer) -> Part:
    """The sending of one optimizer's new weights."""
    return Part(optimizer.sharding.publisher, "send")


def waiting_for_weights(optimizer: ShardedOptimizer) -> Part:
    """The waiting for one optimizer's new weights."""
    return Part(optimizer.sharding.publisher, "wait")


def synchronizing(optimizer: ShardedOptimizer) -> Part:
    """The meeting of ranks before they go on together."""
    return Part(optimizer.sharding.window.sync, "synchronize")


def parts_of_writers(optimizer: ShardedOptimizer) -> dict[str, Part]:
    """Returns what is called before weights are written, after each bucket of them, and when all are written."""
    sharding = optimizer.sharding
    return {
        "beginning": Part(sharding.publisher, "follow_edits"),
        "middle": Part(sharding.masters, "publish"),
        "end": Part(sharding.publisher, "wait"),
    }


# Faults and limits --------------------------------------------------------------------------------------------------------


def update_fails(optimizer: ShardedOptimizer, error: Any = MemoryError) -> Any:
    """A context in which the update of one optimizer fails."""
    return step_of(optimizer).replaced(side_effect=error)


def publishes_at_most(num_bytes: int) -> Any:
    """A context in which no more bytes of weights are on their way at a time."""
    return mock.patch.object(publisher, "_MOST_IN_FLIGHT", num_bytes)


def publishes_every_bucket_alone() -> Any:
    """A context in which no buckets are sent as one, however small they are."""
    return mock.patch.object(layout_module, "_MOST_AS_ONE", 0)


def only_the_long_path() -> Any:
    """A context in which no gradient takes the short path."""
    return mock.patch.object(Window, "takes_short_path", False)


def host_ahead_at_most(num_bytes: int) -> Any:
    """A context in which a host fills no more bytes of buckets, or two, before its device has come to filling them."""
    return mock.patch.object(inflight, "_AHEAD_BYTES", num_bytes)


def steps_at_most(number: int) -> Any:
    """A context in which no more elements are stepped in one call."""
    return mock.patch.object(update, "_MOST_TOGETHER", number)


def pipes_fail(function: str, error: Any) -> Any:
    """A context in which a function of the pipes between ranks of a host fails."""
    return mock.patch(f"zero.comm.pipes.{function}", side_effect=error)


@contextlib.contextmanager
def keeps_for_a_list(numel: int) -> Iterator[None]:
    """A device keeps so many elements of gradients, before a list of them is copied."""
    with mock.patch.object(rounds, "MOST_KEPT", numel):
        yield


@contextlib.contextmanager
def sums_at_once() -> Iterator[None]:
    """A block in which no sum is deferred."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradientShard, "can_defer", lambda *_: False)
        yield


@contextlib.contextmanager
def all_sums_deferred() -> Iterator[None]:
    """Defers all sums, however many and wide their rows are, and with any kernels of the step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SumsByTorch, "can_defer", lambda *_: True)
        patched.setattr(inflight, "_MOST_OF_A_SUM", float("inf"))
        patched.setattr(GradientShard, "can_defer", lambda shard, bucket: bucket not in shard)
        yield


def forget_free_wires() -> None:
    """Drops process groups that are kept for the next group, as a failure does."""
    torch_group._free_wires._kept.clear()


# What is made without an optimizer ----------------------------------------------------------------------------------------


def connected(device: str, ranks: Any, time_limit_s: float) -> Group:
    """A group of these ranks on a device of that type."""
    return connect(accelerators.get(device), ranks, TimeLimits(time_limit_s, time_limit_s))


def ranks_that_share(device: torch.device) -> Any:
    """The number of ranks whose memory is that of one device; a collective."""
    return prepare._ranks_that_share_memory(connect(accelerators.get(device.type)), device)


def completed(tensor: torch.Tensor) -> CompletedResult:
    """The result of a collective that is over."""
    return CompletedResult(tensor)


Unreduced = UnreducedResult  # what a collective gives that left its sum to whoever needs it


def is_over_at_once(pending: Any) -> bool:
    """Returns whether a collective was over when it was begun, as there is nobody to wait for."""
    return isinstance(pending, CompletedResult | SingleRankResult)


def hybrid_of(inner: Any, outer: Any, whole: Any) -> HybridGroup:
    """A group of replicas of shards."""
    return HybridGroup(whole, inner, outer)


def replicated_by(whole: Group, shard_ranks: int, part: Callable[..., Group]) -> Group:
    """A group of replicas of so many ranks, whose parts `part` makes."""
    return replicated(whole, shard_ranks, part)


def read_deepspeed_config(tree: Mapping[str, Any]) -> ZeroConfig:
    """The configuration that DeepSpeed's becomes."""
    return translate(tree).config


def check_parameters(names_of: list[str], params: list[nn.Parameter]) -> None:
    """Raises where parameters cannot be sharded."""
    check_params(names_of, params)


def places_for(settings: Mapping[str, Any], config: ZeroConfig, device: torch.device) -> Any:
    """The homes of a group's states."""
    return places_of(settings, config, device)


def manifest_in(folder: Path) -> Any:
    """The manifest of a checkpoint."""
    return read_manifest(folder)


def sealed_manifest(body: dict[str, Any]) -> str:
    """The text of a manifest with its checksum."""
    return manifest._dumped({**body, "sha256": manifest._hash_of(body)})


def decoded(value: Any) -> Any:
    """Reads a value from what a checkpoint stores for it."""
    return values.decode(value)


def makers_of_values() -> dict[str, Any]:
    """Returns the readers of stored values, by kind, in a table that a test may change."""
    return values._MADE


def kinds_by_element() -> Any:
    """The optimizers that are known to treat every element by itself."""
    return ELEMENTWISE


def lion(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """The Lion of this library."""
    return Lion(params, **settings)


def lies_on_disk(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's values are on a disk, and have no memory."""
    return is_on_disk(tensor)


def state_file(folder: str, kind: str) -> StateFile:
    """A file of states of one kind."""
    return StateFile(folder, kind)


def file_under(file: StateFile) -> Any:
    """The system's file of a file of states."""
    return file._file


def whole_pages(num_bytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Memory of whole pages, as disks are read into."""
    return page_aligned(num_bytes, make)


def bytes_in_code(numel: int) -> int:
    """The bytes that so many numbers take in eight bits."""
    return narrow.num_bytes_of(numel)


def sends_bytes(of: Any, across: bool) -> bool:
    """Returns whether buckets are sent in eight bits: by all ranks, or across hosts alone."""
    return isinstance(of, narrow.AsBytesAcross if across else narrow.AsBytes)


def codes() -> dict[str, Any]:
    """The codes of narrow buckets by the name that a user writes, which a test may change."""
    return narrow.CODES


ALL_STATES = STATES  # that `offload_states` may move
NUMBERS_IN_A_CODED_BLOCK = narrow.BLOCK
