"""Collects what is saved of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zero.checkpoint import values
from zero.checkpoint.manifest import VALUE, Named, Outline, Part, buffer_key, key_of, unwrapped
from zero.checkpoint.values import random_bytes
from zero.checkpoint.writer import ShardPayload
from zero.memory.formats import ParamFormat, dtype_name, goes_with_elements, sum_dtype
from zero.memory.leaves import local_of, local_state
from zero.optim.several import name_of
from zero.plan.layout import Span, set_bits
from zero.setup.parts import Box
from zero.sharding.optimizer import ShardedOptimizer
from zero.sharding.optimizer_state import edited, lies_nowhere
from zero.sharding.state import ShardingState


@runtime_checkable
class TrainingLoop(Protocol):
    """A loop that drives a sharded optimizer and counts its steps, such as an engine."""

    optimizer: ShardedOptimizer
    lr_scheduler: Any
    global_steps: int

    @property
    def in_window(self) -> bool:
        """True if a window has begun that no step has ended."""

    @property
    def counters(self) -> dict[str, int]:
        """The numbers that it has counted."""

    def restart(self, counters: Mapping[str, int]) -> None:
        """Goes on from these counters, at the beginning of a window."""


def snapshot_of(target: Any, scheduler: Any) -> TrainingSnapshot:
    """Returns the snapshot of an optimizer, also one in a wrapper such as accelerate's, or of an engine."""
    if isinstance(target, TrainingLoop):
        return TrainingSnapshot(target.optimizer, target, scheduler)
    wraps = isinstance(target, torch.optim.Optimizer) and not isinstance(target, ShardedOptimizer)
    optimizer = getattr(target, "optimizer", None) if wraps else target
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"Cannot save or load a {type(target).__name__}: only what zero.shard or zero.initialize gave has "
            "ranks and shares. Pass that, or use torch.save for what is plain."
        )
    return TrainingSnapshot(optimizer, None, scheduler)


def finish_saving(optimizer: ShardedOptimizer) -> None:
    """Waits for a save in the background, and raises if it failed. A collective, if there is one."""
    lifetime = optimizer.sharding.lifetime
    saving = lifetime.last_save
    try:
        if saving is not None and not saving.reported:
            saving.wait()
    finally:
        # Otherwise ranks have yet to tell each other how it went, which they do at the next call.
        if saving is not None and saving.reported:
            lifetime.last_save = None


class TrainingSnapshot:
    """A training by the canonical names of its parameters, as a checkpoint stores it."""

    def __init__(self, optimizer: ShardedOptimizer, engine: TrainingLoop | None, scheduler: Any) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.scheduler = scheduler if scheduler is not None or engine is None else engine.lr_scheduler
        self.sharding: ShardingState = optimizer.sharding
        self.named = Named.of(optimizer.model)
        params, layout = self.sharding.params, self.sharding.layout_ref.layout
        names = {id(param): name for name, param in self.named.parameters.items()}
        held = (layout.shape_of(param, self.sharding.group.rank) for param in range(len(layout.params)))
        # Asked of the layout, as weights may be away.
        shapes = {id(leaf): shape for leaf, shape in zip(params.leaves, held, strict=True)}

        def box_of(name: str, tensor: torch.Tensor) -> Box:
            shape = shapes.get(id(tensor), tuple(local_of(tensor).shape))
            return self.sharding.parts.box_of(name, tensor, shape, self._part_of, unwrapped)

        boxes = {name: box_of(name, param) for name, param in self.named.parameters.items()}
        named = zip(params.names, params.leaves, strict=True)
        of_managed = [box_of(names.get(id(tensor), name), tensor) for name, tensor in named]
        self.boxes = {box.name: box for box in (*boxes.values(), *of_managed)}
        self.named.rename({name: box.name for name, box in boxes.items()})
        self.managed = [box.name for box in of_managed]
        self.left_out: set[str] = set()  # names of parameters that are not saved

    def leave_out_frozen(self) -> None:
        """Leaves out parameters that are not trained and have no master."""
        placed = {name for index, name in enumerate(self.managed) if not lies_nowhere(self.sharding, index)}
        frozen = {name for name, param in self.named.parameters.items() if not param.requires_grad}
        self.left_out = {each for name in frozen - placed for each in self.boxes[name].names or (name,)}

    def _part_of(self, family: int) -> int:
        return self.sharding.layout_ref.layout.families[family].seat_of(self.sharding.group.rank).part

    def is_first(self, tensor: torch.Tensor) -> bool:
        """Returns True if this rank is the first of those that hold the same part of a parameter."""
        family = self.sharding.parts.family_of(tensor)
        return self.sharding.layout_ref.layout.families[family].is_first(self.sharding.group.rank)

    def buffers_of_parts(self) -> dict[str, torch.Tensor]:
        """Returns the stored buffers of modules that have buffers of their own on each part."""
        parted = filter(self.sharding.parts.family_of_buffers, self.optimizer.model.modules())
        beside = {id(buffer) for module in parted for buffer in module.buffers(recurse=False)}
        return {name: buffer for name, buffer in self.named.buffers.items() if id(buffer) in beside}

    @property
    def step(self) -> int:
        return self.sharding.window.sync.step if self.engine is None else self.engine.global_steps

    def unmanaged(self) -> list[tuple[str, nn.Parameter]]:
        others = self.left_out.union(self.managed)
        return [(name, local_of(param)) for name, param in self.named.parameters.items() if name not in others]

    def aliases(self) -> dict[str, str]:
        return {alias: name for alias, name in self.named.aliases.items() if name not in self.left_out}

    def span_of(self, name: str, tensor: torch.Tensor) -> Span:
        """Returns the span of a parameter's elements in the stored tensor."""
        return Span(0, tensor.numel()).shifted(self.boxes[name].start)

    def check(self, mid_window: bool = False) -> None:
        """Raises if a window is open, since its gradients would be lost, unless the caller allows that."""
        sharding, window = self.sharding, self.sharding.window
        sharding.offloader.check("save")
        window.check_cleared()
        window.sync.check_factors()
        sharding.check_whole("save")
        if not mid_window and (window.has_unsaved or (self.engine is not None and self.engine.in_window)):
            raise ValueError(
                "Cannot save in the middle of an accumulation: gradients that no step has used yet are not saved. "
                "Save after step, throw them away with discard(), or pass mid_window=True to leave them out."
            )
        lost = set(set_bits(sharding.window.sync.tracker.replaced()))
        gone = [name for index, name in enumerate(self.managed) if index in lost]
        if gone:
            raise ValueError(f"Cannot save: {gone[0]} was replaced in the model after sharding. Shard it again.")

    def groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups, with names in place of their parameters."""

        def names(group: dict[str, Any]) -> Iterator[str]:
            for number in self.sharding.params.numbers_of(group["params"]):
                name = self.managed[number]
                yield from self.boxes[name].names or (name,)

        return [{**group, "params": list(names(group))} for group in self.optimizer.inner.param_groups]

    def training(self) -> dict[str, Any]:
        """Returns everything that is saved and is no tensor of a parameter."""
        optimizer, engine, sharding = self.optimizer, self.engine, self.sharding
        return {
            "optimizer": name_of(optimizer.inner),
            "groups": self.groups(),
            "step": sharding.window.sync.step,
            "skipped_steps": optimizer.skipped_steps,
            "loss_scale": None if optimizer.loss_scale is None else optimizer.loss_scale.progress,
            "engine": None if engine is None else engine.counters,
            "schedule": None if self.scheduler is None else type(self.scheduler).__name__,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "modules": {name: module.get_extra_state() for name, module in self.named.modules.items()},
            "config": sharding.config.model_dump(),
            "ranks": sharding.group.size,  # the number of ranks whose random numbers are saved
            "left_out": sorted(self.left_out),
        }

    def outlines(self) -> dict[str, Outline]:
        """Returns the outline of every parameter that is saved, which all ranks know alike."""
        named = self.named.parameters.items()
        outlines = {name: self._outline(name, local_of(param), None, param.dtype) for name, param in named}
        formats = self.sharding.window.grad_ops.formats
        for index, (name, tensor) in enumerate(zip(self.managed, self.sharding.params.tensors, strict=True)):
            value = tensor.dtype if lies_nowhere(self.sharding, index) else sum_dtype(tensor.dtype)
            outlines[name] = self._outline(name, tensor, formats[index].order, value)
        outlines = {name: outline for name, outline in outlines.items() if name not in self.left_out}
        return {each: outline for name, outline in outlines.items() for each in self.boxes[name].names or (name,)}

    def _outline(self, name: str, tensor: torch.Tensor, order: tuple[int, ...] | None, value: torch.dtype) -> Outline:
        box, mark = self.boxes[name], self.sharding.parts.mark_of(tensor)
        # Refused even if this rank has all elements.
        if order is not None and mark is not None and mark.dims:
            raise ValueError(f"Cannot save {name}: it is a part whose memory is not in rows. Make it contiguous.")
        return Outline(box.shape, order, dtype_name(tensor.dtype), dtype_name(value), box.cut)


@torch.no_grad()
def payload_of(snapshot: TrainingSnapshot, extra_tensors: Mapping[str, torch.Tensor], copied: bool) -> ShardPayload:
    """Returns the tensors that this rank writes, and its part of the manifest; `copied`: in memory that training leaves alone.
    Rank 0 also writes its buffers and `extra_tensors`."""
    sharding, payload = snapshot.sharding, ShardPayload(Part(), {}, {})
    masters, streams = sharding.masters, sharding.masters.streams
    streams.flush()
    if copied and any(key[0] in ("masters", "moments") for key in masters.shard.homes.disks):
        raise ValueError(
            "Cannot save with async_save=True: masters or moments are on disk, and a copy would be in memory. Save "
            "with async_save=False."
        )
    sharding.publisher.follow_edits()
    formats, states = sharding.window.grad_ops.formats, snapshot.optimizer.inner.state
    elsewhere, coming = set(sharding.window.sync.tracker.relocated()), _Coming(sharding)
    # In the order of buckets, in which states come if they live elsewhere.
    for bucket in range(len(sharding.layout_ref.layout.buckets)):
        come = partial(coming.use, bucket) if streams.streams(bucket) else None
        if come is None:
            sharding.adopt_bucket(bucket)
        for piece, master in masters.in_bucket(bucket) if _is_ours(sharding, bucket) else ():
            is_elsewhere = piece.param in elsewhere
            value = partial(edited, sharding, piece, master) if is_elsewhere else partial(torch.Tensor.detach, master)
            name, form = snapshot.managed[piece.param], formats[piece.param]
            span = piece.in_param.shifted(snapshot.boxes[name].start)
            _add(payload, name, master, states.get(master, {}), span, form, value, come)
    for index, name in enumerate(snapshot.managed):
        tensor, leaf = sharding.params.tensors[index], sharding.params.leaves[index]
        if name not in snapshot.left_out and lies_nowhere(sharding, index) and snapshot.is_first(tensor):
            _add(payload, name, tensor, local_state(leaf, states.get(leaf, {})), snapshot.span_of(name, tensor), formats[index])
    tensors: Any = payload.tensors
    for name, tensor in snapshot.unmanaged():
        if snapshot.is_first(tensor):
            _add(payload, name, tensor, {}, snapshot.span_of(name, tensor))
    if sharding.group.rank == 0:
        tensors.update({buffer_key(name): buffer for name, buffer in snapshot.named.buffers.items()})
        tensors.update(extra_tensors)
    tensors["random"] = random_bytes(sharding.accelerator)
    return payload.copied() if copied else payload


class _Coming:
    """Brings buckets that live elsewhere to memory, one after the other, with the user's edits, while the next one is read."""

    def __init__(self, sharding: ShardingState) -> None:
        self._sharding = sharding
        self._now: int | None = None
        streams, buckets = sharding.masters.streams, range(len(sharding.layout_ref.layout.buckets))
        self._next = dict(pairwise(bucket for bucket in buckets if streams.streams(bucket) and _is_ours(sharding, bucket)))

    @torch.no_grad()
    def use(self, bucket: int) -> None:
        streams = self._sharding.masters.streams
        if bucket != self._now:
            self._now = bucket
            self._sharding.adopt_bucket(bucket)
        streams.use(bucket, writes=False)
        if bucket in self._next:
            streams.prefetch(self._next[bucket])


def _is_ours(sharding: ShardingState, bucket: int) -> bool:
    """Returns whether this rank writes a bucket. Of ranks that have the same shares each writes some."""
    layout, rank = sharding.layout_ref.layout, sharding.group.rank
    family = layout.families[layout.buckets[bucket].family]
    turns, (_, number, copy) = family.num_summing(sharding.group.size) // family.num_shares, family.seat_of(rank)
    return not copy and bucket % turns == number // family.num_shares


def _add(
    payload: ShardPayload,
    name: str,
    value: torch.Tensor,
    state: Mapping[str, Any],
    span: Span,
    form: ParamFormat | None = None,
    exact_value: Callable[[], torch.Tensor] | None = None,
    come: Callable[[], None] | None = None,
) -> None:
    """Adds a stretch of a parameter, or all of it, with its state. `exact_value` returns what `value` should be. If they are
    not in memory yet, `come` brings them."""
    part, tensors = payload.part, payload.tensors
    start, stop = span.start, span.stop
    line: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach if form is None else form.line_of
    part.stretches.setdefault(name, []).append((start, stop))
    dtypes, plain = {}, {}
    entries: dict[str, Any] = {VALUE: value if exact_value is None or come is not None else exact_value()}
    for key, entry in state.items():
        if goes_with_elements(key, entry, value.shape):
            entries[key] = entry
            dtypes[key] = dtype_name(entry.dtype)
        else:
            plain[key] = values.encode(entry, f"state {key} of {name}")
    for key, entry in entries.items():
        assert key_of(name, key, start) not in tensors, key_of(name, key, start)
        tensors[key_of(name, key, start)] = line(entry.detach())  # type: ignore[index]
        if come is not None:
            source = exact_value if key == VALUE and exact_value is not None else partial(state.__getitem__, key)
            payload.late[key_of(name, key, start)] = partial(_late, come, line, source)  # type: ignore[index]
    part.state[name], part.plain[name] = dtypes, plain


def _late(
    come: Callable[[], None], line: Callable[[torch.Tensor], torch.Tensor], source: Callable[[], torch.Tensor]
) -> torch.Tensor:
    come()
    return line(source().detach())
