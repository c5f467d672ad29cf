"""Tells the other ranks what this one has done since the last settling."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from zero.comm.exchange import exchange_about, exchange_texts, first_difference
from zero.comm.group import Group
from zero.memory.shard import LayoutRef
from zero.runtime.params.table import Params
from zero.runtime.params.tracking import ParamTracker
from zero.runtime.sync.agreement import Agreement, Codec, Counts, agree


class WindowSync:
    """Tells the other ranks what this one has done and found, and hears it from them."""

    def __init__(
        self,
        group: Group,
        params: Params,
        layout_ref: LayoutRef,
        configuration: str,
        aliases: ParamTracker,
        settings: Callable[[], str],
    ) -> None:
        self.size = group.size
        self._step = 0
        self.tracker = aliases
        self.sync_count = 0
        self._group = group
        self._params = params
        self._layout_ref = layout_ref
        self._configuration = configuration  # as text
        self._settings = settings  # of the optimizer's groups, as text

    @property
    def step(self) -> int:
        """Steps so far, those that were skipped among them."""
        return self._step

    def count_step(self) -> None:
        self._step += 1

    def go_on_from(self, step: int) -> None:
        """Counts on from the step of a checkpoint."""
        self._step = step

    def set_phase(self, where: str, place: Callable[[], str] | None = None) -> None:
        """Publishes what this rank is doing; `place` says more exactly where, if it ends there."""
        phase = f"{where} of step {self.step + 1}"
        if phase != self._group.phase:
            self._group.set_phase(phase, place)

    def synchronize(self, local: Counts, order: Sequence[int], place: str) -> Agreement:
        """What follows from the counts of all ranks, of which these are this rank's, under the agreed `order` of rounds. Where
        this rank failed, `place` says where. A collective."""
        layout = self._layout_ref.layout
        codec = Codec(len(layout.params), len(layout.buckets))
        counts = replace(
            local,
            step=self.step,
            settles=self.sync_count,
            digest=self._built(),
            settings=_short_digest(self._settings() if local.occasion == "step" else ""),
            trained=sum(1 << index for index, tensor in enumerate(self._params.tensors) if tensor.requires_grad),
            lost=0 if local.occasion == "zero_grad" else self.tracker.replaced(),
        )
        messages = exchange_about(self._group, "step, zero_grad or settling", codec.pack(counts))
        self.sync_count += 1

        def explain(what: str, rank: int) -> str:
            return self._explain(what, rank, place)

        return agree([codec.unpack(message) for message in messages], order, self._params.names, explain)

    def _built(self) -> bytes:
        return _short_digest(f"{self._layout_ref.layout.digest} {self._configuration}")

    def _explain(self, what: str, rank: int, place: str) -> str:
        """The first difference between rank 0 and another, or the place where that one failed; a collective."""
        if what == "failed":
            return exchange_texts(self._group, place)[rank]
        specs = self._layout_ref.layout.params
        params = (f"parameter {spec.name} {spec.shape} {spec.dtype} in group {spec.group}" for spec in specs)
        text = self._settings() if what == "settings" else "\n".join((self._configuration, *params))
        texts = exchange_texts(self._group, text)
        return first_difference(texts[0], texts[rank], rank)


def _short_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]
