"""Checks memory: host memory before anything is allocated, device memory by explaining the error when it runs out."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

import accelerators
from accelerators import Accelerator
from accelerators.memory import format_bytes
from zero.config.blocks import StateHome
from zero.memory.homes.registry import Homes
from zero.memory.shard import LayoutRef
from zero.memory.weights import Place
from zero.optim.traits import num_moments, steps_by_blocks
from zero.plan.budget import Budget, PlannedTraining, budget_of, busiest_rank, disk_bytes
from zero.plan.homes import KINDS, Away
from zero.plan.layout import ITEM_BYTES, FlatLayout


class MemoryGuard:
    """Knows the memory of this rank: of the host, for what is offloaded there, and of the device, for the error when it runs
    out."""

    def __init__(
        self,
        place: Place,
        optimizer: torch.optim.Optimizer,
        contiguous_moments: bool,
        ranks_here: int,
        shards_weights: bool = False,
    ) -> None:
        self.homes = Homes(place.accelerator, place.device)  # they take no memory until they are asked for some
        self._place = place
        self._optimizer_ref = weakref.ref(optimizer)  # see [Note: the user's] in zero/sharding/optimizer.py
        # One line has the moments of all of a share, as a step in one pass needs it.
        self._contiguous_moments = contiguous_moments
        self._ranks_here = ranks_here
        self._shards_weights = shards_weights

    @property
    def accelerator(self) -> Accelerator:
        return self._place.accelerator

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "a training is planned whose optimizer is gone"
        return optimizer

    @contextlib.contextmanager
    def explain_oom(self, asked: str, layout_ref: LayoutRef) -> Iterator[None]:
        """Adds to an out-of-memory error inside what there is, what was predicted, and which setting fits."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._optimizer_ref() is None:  # the optimizer is being collected, so nobody can change a setting
                raise
            what = asked[0].lower() + asked[1:]
            raise type(error)(f"Cannot allocate memory for {what}: {self._shortage(layout_ref.layout)} ({error})") from error

    def _shortage(self, layout: FlatLayout) -> str:
        reading = self._place.accelerator.memory(self._place.device.index)
        free = reading.available or 0
        reachable = (free + (reading.allocated or 0)) // self._place.num_ranks
        needed = self._budget(layout, self._shards_weights).peak
        said = (
            f"{free} bytes ({format_bytes(free)}) are free; what is kept and sent for training needs {needed} at its peak, "
            f"beside activations, and {reachable} can be had."
        )
        for setting, other, shards_weights in _settings_beside(layout, self._shards_weights):
            peak = self._budget(other, shards_weights).peak
            if peak < min(needed, reachable):
                return f"{said} With {setting} it would need {peak}."
        return f"{said} No setting makes that fit: use more ranks, a narrower dtype, or a smaller model or batch."

    def _budget(self, layout: FlatLayout, shards_weights: bool) -> Budget:
        training = PlannedTraining(
            num_moments(self._optimizer), by_blocks=steps_by_blocks(self._optimizer), in_lines=self._contiguous_moments,
            shards_weights=shards_weights, on_host=self._place.is_host,
        )  # fmt: skip
        return budget_of(layout, busiest_rank(layout), training)

    def room_for_weights(self, asked: int | str, layout: FlatLayout, tensors: Iterable[torch.Tensor]) -> float:
        """Returns how many bytes of whole weights this rank may have at a time at stage 3: half of what is free beside the
        states of training, as activations need the other half. `tensors` will be in shares. Each rank decides for itself."""
        if asked == "all":
            return math.inf
        if isinstance(asked, int):
            return asked
        available = self._place.accelerator.memory(self._place.device.index).available
        if available is None:
            return 0
        budget = self._budget(layout, True)
        taken = sum(tensor.nbytes for tensor in tensors if tensor.device == self._place.device)
        return max(0, available // self._place.num_ranks + taken - (budget.peak - budget.gathered)) / 2

    def reserve(
        self,
        homes: Iterable[StateHome | None],
        layout: FlatLayout,
        before: FlatLayout | None = None,
        held: int | None = None,
        frozen: int = 0,
    ) -> None:
        """Raises unless what is offloaded of `layout` fits, in the kind of memory that is asked for, and reserves space on
        disks, but for weights; nothing is allocated yet. `before` is what has its memory already; so have `held` bytes of
        weights, and `frozen` ones will take memory that is not on a disk. If these are given and the device is the host,
        what stays there has to fit too."""
        asked = [home for home in homes if home is not None]
        if self._place.is_host and held is not None:
            self._check_host(layout, held, frozen)
        for (kind, place), num_bytes in disk_bytes(layout, busiest_rank(layout), num_moments(self._optimizer)).items():
            self.homes.disk(kind, place).file.reserve(num_bytes)
        needed = self._needed(layout) - (0 if before is None else self._needed(before))
        if not needed:
            return
        pinned = self._pinned([home.pinned for home in asked if home.home == "host" and home.ratio])
        available = accelerators.get("cpu").memory().available
        if available is not None and needed * self._ranks_here > available:
            raise MemoryError(
                f"Cannot keep {needed} bytes ({format_bytes(needed)}) on the host for each of {self._ranks_here} ranks of this "
                f"machine: {available} bytes ({format_bytes(available)}) are available to all of them. Offload a smaller part "
                "with offload={'ratio': ...}, use more machines, or a smaller model."
            )
        # The host tries to allocate a stretch as large as any that will be allocated at once, as only trying shows whether it
        # can.
        piece = max((bucket.share_numel for bucket in layout.buckets if bucket.offloaded), default=0) * ITEM_BYTES["float32"]
        if pinned and not self._can_pin(piece):
            raise ValueError(
                f"Cannot pin {needed} bytes of host memory: {'some' if available is None else available} bytes of it are "
                f"available, and no piece of {piece} bytes can be pinned for {self._place.accelerator.name}. "
                "Leave pinned out, and pageable memory serves."
            )
        self.homes.host.pinned = pinned

    def _check_host(self, layout: FlatLayout, held: int, frozen: int) -> None:
        """Raises unless everything that is not on disk fits, where the device is the host."""
        needed = self._budget(layout, self._shards_weights).peak - held + frozen
        available = self._place.accelerator.memory().available
        if available is None or needed * self._place.num_ranks <= available:
            return
        for kinds in (KINDS, ("weights", *KINDS)) if self._shards_weights else (KINDS,):
            stays = 0 if "weights" in kinds else frozen
            away = self._budget(_on_disk(layout, kinds), self._shards_weights).peak - held + stays
            if away * self._place.num_ranks <= available:
                advice = f"With homes={dict.fromkeys(kinds, 'disk:/directory')} it would need {away} ({format_bytes(away)})."
                break
        else:
            advice = "No homes make that fit: use more ranks, smaller buckets, or a smaller model."
        raise MemoryError(
            f"Cannot keep {needed} bytes ({format_bytes(needed)}) on the host for each of {self._place.num_ranks} ranks of "
            f"this machine: {available} bytes ({format_bytes(available)}) are available to all of them. {advice}"
        )

    def check(self, asked: str, needed: int) -> None:
        """Raises unless so many bytes of this rank fit on the host, which other ranks may be filling too."""
        available = accelerators.get("cpu").memory().available
        if available is not None and needed > available:
            raise MemoryError(
                f"Cannot do {asked}: it needs {needed} bytes ({format_bytes(needed)}) of host memory, and {available} "
                f"({format_bytes(available)}) are available. Include fewer states, or leave them where they are."
            )

    def _needed(self, layout: FlatLayout) -> int:
        return self._budget(layout, self._shards_weights).host_peak

    def _pinned(self, asked: list[bool | None]) -> bool | None:
        """Returns what all say together."""
        said = {pinned for pinned in (*asked, self.homes.host.pinned) if pinned is not None}
        if len(said) > 1:
            raise ValueError(
                "Cannot use pinned host memory for some groups and pageable memory for others: one kind serves all of them. "
                "Say the same for all, or leave pinned out of the others."
            )
        return said.pop() if said else None

    def _can_pin(self, num_bytes: int) -> bool:
        piece = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._place.accelerator.can_pin and self._place.accelerator.pin(piece).is_pinned()


def _on_disk(layout: FlatLayout, kinds: Iterable[str]) -> FlatLayout:
    away = tuple(Away(kind, "disk:/directory") for kind in kinds)
    bare = replace(layout, params=tuple(replace(spec, away=away) for spec in layout.params), chunks=(), buckets=())
    slotted = [index for index, slot in enumerate(layout.slots) if slot is not None]
    return replace(bare, slots=(None,) * len(layout.slots)).extended(slotted)


def _settings_beside(layout: FlatLayout, shards_weights: bool) -> Iterator[tuple[str, FlatLayout, bool]]:
    """Yields what one could have asked for instead, the mildest first: in words, its layout, and whether weights are in
    shares."""
    slotted = [index for index, slot in enumerate(layout.slots) if slot is not None]
    bare = replace(layout, slots=(None,) * len(layout.slots), chunks=(), buckets=())
    smaller = replace(bare, bucket_bytes=max(1, layout.bucket_bytes // 8))
    away = replace(smaller, params=tuple(replace(spec, offload=1.0) for spec in layout.params))
    yield f"bucket_bytes={smaller.bucket_bytes}", smaller.extended(slotted), shards_weights
    if layout.num_shares == 1:
        sharded = replace(smaller, num_shares=2, bucket_bytes=layout.bucket_bytes).extended(slotted)
        yield "stage=2 on 2 ranks", sharded, shards_weights
    elif not shards_weights:
        yield "stage=3", layout, True
    yield "offload='cpu'", replace(away, bucket_bytes=layout.bucket_bytes).extended(slotted), shards_weights
    yield f"offload='cpu' and bucket_bytes={smaller.bucket_bytes}", away.extended(slotted), shards_weights
    if not shards_weights:
        yield f"stage=3, offload='cpu' and bucket_bytes={smaller.bucket_bytes}", away.extended(slotted), True
