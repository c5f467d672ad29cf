"""The updater of stops 5 and 6: it decides about settled gradients, and lets the user's optimizer step on this rank's shares.

In come sums that are those of all ranks; out go this rank's masters, stepped and rounded to weights, which publish.py sends.
`step` in step.py makes the calls of one step, in this order:

    1. `decide`    from the norm of the sums: apply or skip, and the factor that clips, alike on all ranks
    2. `batches`   which blocks of this rank's share are stepped together; see [Note: blocks]
    3. `begin`     state of the optimizer for blocks that are stepped in one pass over memory
    4. `step`      for each batch: adopt the user's edits of weights, clip, step the masters, round them to weights

A *master* is the copy of a weight, in fp32, that the optimizer steps; a *block* is a part of a share that fits into the cache,
and one rank's part of a parameter in it is a *piece*: see zero/plan/layout.py.

The optimizer that steps is the user's own: `_step_inner` gives it masters in place of its parameters, for the length of a call.
Alternatives, and why not: if its groups held masters for good, schedules and scripts that look for the model's parameters there
would not find them. A second optimizer of that type, made from the masters, would need the arguments of the user's constructor,
and would lack the hooks and whatever else was changed on the object.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

import accelerators
from accelerators.streams import Event, InOrderStream
from zero.errors import NonFinite
from zero.memory.masters import ALL, Masters
from zero.optim.several import has_step_of_its_own, members_of, step_without_hooks
from zero.optim.traits import known_kind, steps_by_blocks
from zero.plan.layout import Block, FlatLayout
from zero.profiling import Timed, first_of, stop
from zero.runtime.kernels.adam_step import FusedStep, Gradient, Member, Stepped
from zero.runtime.kernels.sums import stretch_of
from zero.runtime.params.table import Params
from zero.sharding.share_state import StateOfShares
from zero.window.grads import GradOps

_MOST_NAMES = 5  # the number of parameters that an error names
# With `fused`, these skip a step by themselves if they are told `found_inf`.
_SKIP_BY_THEMSELVES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# Elements that one call of a fused kernel steps: it takes some milliseconds, in which no new weights are sent.
_MOST_TOGETHER = 2**26


@dataclass(frozen=True)
class StepPolicy:
    """The settings that decide about a step."""

    clip: float | None = None
    on_nonfinite: str = "propagate"  # the others are "skip" and "raise"


@dataclass(frozen=True)
class StepDecision:
    """The decision of all ranks about the gradients of a window."""

    apply: bool
    grad_norm: float | LateNumber  # the norm of the gradients that the step was given, before its own clipping
    coefficient: float | torch.Tensor = 1.0  # multiplies gradients, to clip them
    nonfinite: str = ""  # names what is not finite, if the step is skipped for that
    # On the device, 1.0 if the optimizer itself skips this step, which the host learns later.
    found_inf: torch.Tensor | None = None
    differing: LateNumber | None = None  # the rank whose factors differ from those of rank 0, for which the step is skipped too


class Updater(Timed):
    """The decision about a step is the same on all ranks, and each steps only its own shares.

    [Note: blocks]
    An optimizer that is known to treat every element by itself is given one block after the other, or as many as the
    processor's cache holds, and each is there from one thing to the next: its edits adopted, its gradients clipped, stepped,
    and cast. On a device its fused kernel, if it has one, is given more at a time, as there each call costs. One that is known
    to treat every tensor by itself is given one bucket of whole tensors after the other, which are on their way to the other
    ranks while the next is stepped. Any other steps on all at once.
    """

    def __init__(
        self,
        params: Params,
        grad_ops: GradOps,
        masters: Masters,
        inner: torch.optim.Optimizer,
        policy: StepPolicy,
        fused_step: FusedStep | None,
        restore_kernels: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.restore_kernels = restore_kernels  # gives the user's groups their settings again
        self._params = params
        self._grad_ops = grad_ops
        self._masters = masters
        self._inner_ref = weakref.ref(inner)  # see [Note: the user's] in zero/sharding/optimizer.py
        self._fused_step = fused_step
        self._places: dict[int, tuple[int, int]] = {}  # the place of each parameter in the user's groups, during this step
        self._ids_in_groups: list[list[int]] = []  # by group: the ids of its parameters, when `_places` was made
        self._groups: list[dict[str, Any]] = []
        self._members: dict[Block, list[Member]] = {}  # the members of each block that is stepped in one pass, in their order
        self._members_for: tuple[int, FlatLayout | None] = 0, None  # the `used` and the layout for which `_members` was made
        self._adopted: set[Block] = set()  # blocks whose edits this step has taken over already
        # The settings of the groups, and the members of each block, for masters that are stepped in a backward.
        self._groups_ahead: list[dict[str, Any]] = []
        self._members_ahead: dict[Block, list[Member]] = {}
        self._norms = [LateNumber(masters.shard.device) for _ in range(2)]  # one for the next step, and one for the last
        self._differing = LateNumber(masters.shard.device)  # the rank with other factors, of the last step that compared them
        self.skipped = SkippedSteps(masters.shard.device)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The user's optimizer, while there is the sharded one."""
        inner = self._inner_ref()
        assert inner is not None, "a training is used whose optimizer is gone"
        return inner

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises if these settings of groups are none that the step can be computed with."""
        if self._fused_step is not None:
            self._fused_step.check(groups)

    # 1 decide ----------------------------------------------------------------------------------------------------

    @stop("settle")
    def decide(self, used: int, factors: Sequence[torch.Tensor], *, scale_waits: bool = False) -> StepDecision:
        """Decides from the settled sums, with the same answer on every rank: whether the gradients are finite, and how they are
        clipped. Raises, or has a step change nothing, if ranks have different `factors`. `scale_waits` says that the host must
        know whether the step is skipped, as a loss scale depends on it."""
        self.check(self.inner.param_groups)  # the groups belong to the user, who may have changed them
        compared = self._stay_on_device(used)
        policy = self.policy.on_nonfinite
        may_be_skipped = policy != "propagate" or bool(factors)
        host_must_know = policy == "raise" or (policy == "skip" and scale_waits)
        needs_no_host = not host_must_know and (not may_be_skipped or self._skips_by_itself())
        if needs_no_host and self._grad_ops.judges_on_device and self._all_stay_on_device():
            return self._decided_on_device(compared, factors)
        norm, are_edited = self._grad_ops.total_norm(self._masters.are_edited(compared), factors)
        for block in itertools.compress(compared, are_edited):
            self._masters.adopt(block)
        self._adopted = set(compared)
        if not math.isfinite(norm) and self.policy.on_nonfinite != "propagate":
            if self.policy.on_nonfinite == "raise":
                raise self.nonfinite(norm)
            return StepDecision(False, norm, nonfinite=self._where_nonfinite())
        if self.policy.clip is None:
            return StepDecision(True, norm)
        coefficient = self.policy.clip / (norm + 1e-6)  # the formula of torch.nn.utils.clip_grad_norm_
        return StepDecision(True, norm, min(1.0, coefficient) if not math.isnan(coefficient) else coefficient)

    def _decided_on_device(self, compared: Sequence[Block], factors: Sequence[torch.Tensor]) -> StepDecision:
        """Decides where the sums are. What the host does in the step hangs on no number, so it waits for none: a step that is
        skipped runs too, and the optimizer changes nothing in it."""
        for block in compared:
            # Adopted without asking whether anything was edited, as the answer would have to be waited for.
            self._masters.adopt(block)
        self._adopted = set(compared)
        norm, differing = self._grad_ops.total_norm_on_device(factors)
        late, _ = self._norms
        late.expect(norm)
        found_inf, late_rank = None, None
        if self.policy.on_nonfinite != "propagate":
            found_inf = norm.isfinite().logical_not().to(torch.float32)
        if differing is not None:
            late_rank = self._differing
            late_rank.expect(differing)
            differs = (differing > 0).to(torch.float32)
            found_inf = differs if found_inf is None else torch.maximum(found_inf, differs)
        coefficient: float | torch.Tensor = 1.0
        if self.policy.clip is not None:
            coefficient = torch.clamp(self.policy.clip / (norm + 1e-6), max=1.0)
            if found_inf is not None:
                coefficient.masked_fill_(found_inf.bool(), 1.0)  # a step that is skipped leaves the sums as they are
        return StepDecision(True, late, coefficient, found_inf=found_inf, differing=late_rank)

    def _skips_by_itself(self) -> bool:
        """Returns whether the kernels of the user's optimizer leave weights, moments and counts alone if they are told
        `found_inf`, as a GradScaler tells them. With momentum, SGD's first step would leave buffers that nobody wrote."""
        members, groups = members_of(self.inner), self.inner.param_groups
        return (
            all(known_kind(member, _SKIP_BY_THEMSELVES) for member in members)
            and not any(map(has_step_of_its_own, (*members, self.inner)))
            and all(group.get("fused") and not group.get("momentum") for group in groups)
        )

    def note_stepped(self) -> None:
        """Notes that the step succeeded: until the next one does, the norm is that of this one."""
        self._norms.reverse()

    def _all_stay_on_device(self) -> bool:
        return all(map(self._stays_on_device, range(len(self._masters.layout_ref.layout.buckets))))

    def _stay_on_device(self, used: int) -> list[Block]:
        """Returns the blocks whose edits are looked for before the step, if all is on a device. Shares of weights may still be
        edited by other ranks, and what is on its way to a home elsewhere still takes memory."""
        layout, masters = self._masters.layout_ref.layout, self._masters
        if not self._all_stay_on_device():
            return []
        reached = (bucket for bucket, params in enumerate(layout.params_in) if params & used and masters.is_copy(bucket))
        return [block for bucket in reached if masters.has_whole_weights(bucket) for block in layout.blocks(bucket)]

    @property
    def has_other_groups(self) -> bool:
        """True if the user's optimizer has other groups, or other parameters in them, than when their places were found."""
        groups = self.inner.param_groups
        held = [list(map(id, group["params"])) for group in groups]
        return held != self._ids_in_groups or not all(map(is_, groups, self._groups))

    # 2 batches ---------------------------------------------------------------------------------------------------

    def batches(self, blocks: Sequence[Block]) -> list[Sequence[Block]]:
        """Returns the blocks that are stepped together, batch by batch."""
        index, groups = self._params.index, self.inner.param_groups
        if self.has_other_groups:
            held = [list(map(id, group["params"])) for group in groups]
            places = (((number, position), param) for number, of in enumerate(held) for position, param in enumerate(of))
            self._places = {index[param]: place for place, param in places if param in index}
            self._ids_in_groups, self._groups = held, list(groups)
            self._members.clear()
            self._members_ahead.clear()
            self._groups_ahead = [{} for _ in groups]
        if not steps_by_blocks(self.inner):
            return [blocks]
        is_fused = all(group.get("fused") for group in groups) and all(map(known_kind, members_of(self.inner)))
        batches: list[list[Block]] = []
        room = -1  # the number of elements for which the last batch has room
        # The largest batch, by the place where states live.
        buckets, most_of = self._masters.layout_ref.layout.buckets, dict[object, int]()
        for block in blocks:
            numel, where = block.span.numel, (buckets[block.bucket].offloaded, buckets[block.bucket].away)
            most = most_of.get(where)
            if most is None:
                most = most_of[where] = self._most_together(block.bucket, is_fused)
            if numel <= min(room, most):
                batches[-1].append(block)
                room -= numel
            else:
                batches.append([block])
                room = most - numel
        return [*batches]

    def _most_together(self, bucket: int, is_fused: bool) -> int:
        """Returns the most elements that are stepped in one call: few on the host, for its cache, and many on a device, where
        each call costs."""
        if is_fused and self._stays_on_device(bucket):
            return _MOST_TOGETHER
        stays = self._masters.shard.homes.host is self._masters.shard.homes.device and not (
            self._masters.streams.streams(bucket) or self._grad_ops.shard.stream.has(bucket)
        )
        return stretch_of(0) if stays else 0

    def _stays_on_device(self, bucket: int) -> bool:
        """Returns whether all that is stepped of a bucket is on a device beside the host, and not only for its turn."""
        return self._masters.stays_on_device(bucket) and not self._grad_ops.shard.stream.has(bucket)

    # 3 begin, 4 step ---------------------------------------------------------------------------------------------

    @stop("step")
    def begin(self, batches: Iterable[Sequence[Block]], used: int) -> None:
        """Moves the state of what will be stepped to where the fused step on the host has it. Other steps need nothing."""
        shard, layout, ahead = self._masters.shard, self._masters.layout_ref.layout, self._masters.ahead
        if self._fused_step is None or not self.steps_fused:
            self._members.clear()
            return
        if self._members_for[0] != used or self._members_for[1] is not layout:
            self._members.clear()
            self._members_for = used, layout
        to_step = (block for batch in batches for block in batch if block.bucket not in ahead)
        blocks = [block for block in to_step if shard.share(block.bucket).is_cpu]
        for block in blocks:
            if block not in self._members:
                self._members[block] = self._members_of(block, used, self.inner.param_groups)
        stay = blocks if layout.stays_on_device else [
            block for block in blocks if not self._masters.streams.streams(block.bucket)
        ]
        self._fused_step.adopt_state([(block, self._members[block], shard.share(block.bucket)) for block in stay])

    @property
    def steps_fused(self) -> bool:
        """True if the step on the host is the fused one, and not one that somebody gave the user's optimizer."""
        inner = self.inner
        return self._fused_step is not None and not has_step_of_its_own(inner) and _is_torchs(type(inner).step)

    def _members_of(self, block: Block, used: int, groups: Sequence[dict[str, Any]]) -> list[Member]:
        places = self._places
        return [
            (piece, master, groups[places[piece.param][0]] if used >> piece.param & 1 and piece.param in places else None)
            for piece, master in self._masters.in_block(block)
        ]

    @stop("step", lambda _, batch, *__, **___: first_of([f"bucket {block.bucket}" for block in batch]))
    def step(self, batch: Sequence[Block], used: int, decision: StepDecision) -> None:
        """Adopts the user's edits of the weights, steps the masters of what was used, and rounds all to weights (stop 6)."""
        if batch[0].bucket in self._masters.ahead:  # on the host each block is a batch
            self._masters.publish(batch)
            return
        coefficient = decision.coefficient
        streams, layout = self._masters.streams, self._masters.layout_ref.layout
        come = () if layout.stays_on_device else batch  # the blocks whose states may have to come
        for block in come:
            streams.use(block.bucket)
        is_fused = self._fused_step is not None and batch[0] in self._members
        if self._fused_step is not None and is_fused:
            assert isinstance(coefficient, float)  # and no tensor: before a fused step the host has judged
            self._step_fused(self._fused_step, batch, come, coefficient)
        else:
            for block in batch:
                if block not in self._adopted:
                    self._masters.adopt(block)
            self._adopted.difference_update(batch)
            if isinstance(coefficient, torch.Tensor) or coefficient != 1.0:
                self._grad_ops.multiply(batch, coefficient)
            with self._with_found_inf(decision.found_inf):
                self._step_inner(batch, used)
            self._masters.publish(batch)
        for block in come:
            if block.is_last:
                streams.leave(block.bucket)
                if isinstance(coefficient, float):
                    self._grad_ops.shard.stream.leave(block.bucket, coefficient, is_applied=not is_fused)

    def _step_fused(
        self, fused_step: FusedStep, batch: Sequence[Block], come: Sequence[Block], coefficient: float
    ) -> None:
        masters, gradients, stepped = self._masters, self._grad_ops.shard, list[Stepped]()
        streamed = {block.bucket for block in come if masters.streams.streams(block.bucket)}
        on_disk = {block.bucket for block in come if gradients.stream.has(block.bucket)}  # the sums of these live on a disk
        for block in batch:
            bucket, members, weights, rounded = block.bucket, self._members[block], None, None
            share = masters.shard.share(bucket)
            if bucket in streamed:
                fused_step.take_lines(bucket, masters.streams.lines(bucket))
                fused_step.adopt_state([(block, members, share)], stays=False)
            if masters.is_copy(bucket):
                weights, rounded = masters.weights_of(block), masters.rounded_of(block)
            rows, factors = gradients.addends(bucket)
            stepped.append(Stepped(block, members, share, Gradient(rows, (*factors, coefficient)), weights, rounded))
        fused_step.step(stepped)
        for block, _, _, _, weights, _ in stepped:
            if block.bucket not in on_disk:  # a sum on a disk is told of the factor when it leaves
                self._grad_ops.defer_scale(block.bucket, coefficient)
            if weights is not None:
                masters.compared(block)
                masters.written(block)
            if block.bucket in streamed:
                fused_step.take_lines(block.bucket, {})

    # ahead of the step: see zero/sharding/ahead.py ---------------------------------------------------------------

    def keep_settings(self) -> None:
        """Keeps the settings of the user's groups for what is stepped in this backward, in dicts that stay the same objects."""
        self.batches([])  # finds the places of parameters
        groups = self.inner.param_groups
        self.check(groups)
        for kept, group in zip(self._groups_ahead, groups, strict=True):
            copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            kept.clear()
            kept.update(copied, params=())

    def to_step_ahead(self, bucket: int) -> list[tuple[Block, list[Member], torch.Tensor]]:
        """Returns the blocks of a bucket whose parameters all have their gradient, as `step_ahead` takes them."""
        blocks, share = self._masters.layout_ref.layout.blocks(bucket), self._masters.shard.share(bucket)
        for block in blocks:
            if block not in self._members_ahead:
                self._members_ahead[block] = self._members_of(block, ALL, self._groups_ahead)
        return [(block, self._members_ahead[block], share) for block in blocks]

    @torch.no_grad()
    def step_ahead(
        self, stepped: Sequence[tuple[Block, list[Member], torch.Tensor]], total: torch.Tensor, factor: float
    ) -> None:
        """Adopts edits of the weights, which have been fetched, and steps the masters of a bucket from `factor` times its sum.
        Runs in a thread of its own. What it rounds, into memory that was lent for the weights, nobody reads."""
        assert self._fused_step is not None
        self._fused_step.adopt_state(stepped)
        for block, members, share in stepped:
            weights = self._masters.weights_of(block)
            self._fused_step.step([Stepped(block, members, share, Gradient([total], (factor,)), weights, weights)])

    @contextlib.contextmanager
    def _with_found_inf(self, found_inf: torch.Tensor | None) -> Iterator[None]:
        """Tells the user's optimizer of what is not finite, by the attribute that a GradScaler uses."""
        members = [] if found_inf is None else members_of(self.inner)
        for member in members:
            member.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for member in members:
                del member.found_inf  # type: ignore[attr-defined]

    def _step_inner(self, batch: Sequence[Block], used: int) -> None:
        """Steps the user's optimizer on a batch. As in torch, parameters without a gradient and their state are left alone."""
        fed: list[tuple[tuple[int, int], nn.Parameter]] = []
        for block in batch:
            sums = self._grad_ops.shard.sum_of(block.bucket)
            for piece, master in self._masters.in_block(block):
                if used >> piece.param & 1 and piece.param in self._places:
                    master.grad = self._masters.unflatten(piece, sums[piece.in_share.start : piece.in_share.stop])
                    fed.append((self._places[piece.param], master))
        fed.sort(key=lambda member: member[0])
        try:
            with self._in_groups(fed):
                step_without_hooks(self.inner)
        finally:
            for _, master in fed:
                master.grad = None

    @contextlib.contextmanager
    def _in_groups(self, masters: list[tuple[tuple[int, int], nn.Parameter]]) -> Iterator[None]:
        """Exchanges the parameters in the user's own groups for these masters, and puts them back whatever happens."""
        groups = self.inner.param_groups
        kept = [group["params"] for group in groups]
        try:
            for number, group in enumerate(groups):
                group["params"] = [master for (group_index, _), master in masters if group_index == number]
            yield
        finally:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params

    # the state of the user's optimizer ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def all_masters(self) -> Iterator[None]:
        """Puts the masters of all parameters into the user's groups inside, for code that looks at each of them outside of a
        step."""
        self.batches([])
        held = [
            ((self._places[piece.param], piece.in_param.start), master)
            for pieces in self._masters.pieces.values()
            for piece, master in pieces
            if piece.param in self._places
        ]
        held.sort(key=lambda member: member[0])
        with self._in_groups([(place, master) for (place, _), master in held]):
            yield

    def forget_moments(self) -> None:
        """Forgets moments that will be loaded, so that there need not be memory for both."""
        self._members.clear()
        self._members_ahead.clear()
        if self._fused_step is not None:
            self._fused_step.release()

    def order_state(self) -> None:
        """Puts the state that was loaded into the order in which steps would have made it."""
        layout, state = self._masters.layout_ref.layout, self.inner.state
        blocks = [block for bucket in range(len(layout.buckets)) for block in layout.blocks(bucket)]
        for batch in self.batches(blocks):
            members = [member for block in batch for member in self._masters.in_block(block)]
            if self._fused_step is None:
                members.sort(key=lambda member: self._places.get(member[0].param, (0, 0)))
            for _, master in members:
                if master in state:
                    state[master] = state.pop(master)

    def forget_state(self) -> None:
        """Takes the masters' state out of the user's optimizer, which would keep it alive. One that is gone has none."""
        inner = self._inner_ref()
        state = {} if inner is None else inner.state
        for pieces in self._masters.pieces.values():
            for _, master in pieces:
                state.pop(master, None)
        if isinstance(state, StateOfShares):
            state.end()
        self.forget_moments()

    # what is not finite ------------------------------------------------------------------------------------------

    def nonfinite(self, norm: float) -> NonFinite:
        """Returns the error that names parameters which are not finite, and the ranks that they came from. A collective."""
        return NonFinite(
            f"Cannot step: the norm of the gradients is {norm}: {self._where_nonfinite()}. Nothing was applied. Look at the "
            "loss and the batch there, or set on_nonfinite to 'skip' or 'propagate'."
        )

    def _where_nonfinite(self) -> str:
        nonfinite, ranks = self._nonfinite_names(), ", ".join(map(str, self._grad_ops.sources_of_nonfinite()))
        more = len(nonfinite) - _MOST_NAMES
        names = ", ".join(nonfinite[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"in {names}, from rank {ranks}" if ranks else f"in {names}"

    def _nonfinite_names(self) -> list[str]:
        norms = self._grad_ops.norms(range(len(self._params.names)), 2.0)
        return [self._params.names[index] for index, norm in norms.items() if not math.isfinite(norm)]


def _is_torchs(step: Any) -> bool:
    """Returns whether a step is torch's own. Another one, which somebody gave the class, is called in place of ours."""
    return str(getattr(step, "__module__", "")).startswith("torch.")


# what the host learns late --------------------------------------------------------------------------------------------


class LateNumber:
    """The last number that a device was told to compute. A read waits for it, and not for later work of the device."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerators.of(device)
        self._mirror = torch.empty(1, dtype=self._accelerator.norm_dtype(), device="cpu")
        if not self._accelerator.is_synchronous:  # pinned now, as a driver may wait for all work of its device when it pins
            self._mirror = self._accelerator.pin(self._mirror)
        self._is_there: Event | None = None
        self._number = self._mirror

    def expect(self, number: torch.Tensor) -> None:
        """Begins to bring a number to the host, in place of the one before."""
        stream = self._accelerator.current_stream(number.device.index)
        self._number = number
        if not isinstance(stream, InOrderStream):  # marking a place in such a stream means waiting for it
            # Copied by the stream that computes the number: another stream might still be reading when its memory is used
            # again.
            self._mirror.copy_(number.view(1), non_blocking=True)
            self._is_there = stream.record_event()

    def __float__(self) -> float:
        if self._is_there is None:
            return float(self._number)
        self._is_there.synchronize()
        return float(self._mirror)

    def if_come(self) -> float | None:
        """Returns it without waiting, or None if the device has not come to it."""
        return float(self._mirror) if self._is_there is not None and self._is_there.query() else None


class SkippedSteps:
    """Counts the steps that were skipped: those for which the host decided it, and those that an optimizer on a device skipped
    while the host went on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_host = 0
        self._by_device: torch.Tensor | None = None  # the number of steps that were skipped there
        self._late: LateNumber | None = None  # the same number, on its way to the host
        self._told = 0  # how many of the device's `news` has returned

    def add(self, found_inf: torch.Tensor | None = None) -> None:
        """Counts a step that is skipped, or one that a device skips if `found_inf` is 1."""
        if found_inf is None:
            self._by_host += 1
            return
        if self._by_device is None or self._late is None:
            self._by_device, self._late = torch.zeros_like(found_inf), LateNumber(self._device)
        self._by_device.add_(found_inf)
        self._late.expect(self._by_device)

    def __int__(self) -> int:
        return self._by_host + (0 if self._late is None else int(float(self._late)))

    def go_on_from(self, number: int) -> None:
        """Counts on from the number of a checkpoint."""
        self._by_host, self._by_device, self._late, self._told = number, None, None, 0

    def news(self) -> int:
        """Returns how many a device skipped since the last call, as far as that is known without waiting."""
        number = None if self._late is None else self._late.if_come()
        if number is None:
            return 0
        before, self._told = self._told, int(number)
        return self._told - before
