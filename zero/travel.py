"""States that leave the device between two phases, and come back: what training keeps is not needed while a model generates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accelerators import Accelerator
from zero.memory.flat import FlatBuffer, Form, Shard
from zero.memory.masters import Masters
from zero.memory.offload import Crossing, Host
from zero.runtime.params import Params

STATES = ("masters", "moments", "gradients", "weights", "buffers")
# What DeepSpeed calls them.
_ALSO = {
    "hp_params": "masters",
    "optim_states": "moments",
    "lp_grads": "gradients",
    "lp_params": "weights",
    "contiguous_grad_buffer": "buffers",
}

Bring = Callable[[Host], None]


class Travel:
    """Moves what a sharded optimizer keeps on the device to the host and back.

    Only memory is exchanged: parameters, masters and the optimizer's state stay the objects that they are. What
    already lives on the host, and everything where host and device are one, stays where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        params: Params,
        forms: list[Form],
        weights: FlatBuffer,
        masters: Masters,
        gradients: Shard,
        inner: torch.optim.Optimizer,
    ) -> None:
        self._model = weakref.ref(model)
        self._accelerator = accelerator
        self._params = params
        self._forms = forms
        self._weights = weights
        self._masters = masters
        self._gradients = gradients
        self._state = inner.state
        self._away: dict[str, list[Bring]] = {}  # by state: what brings it back
        self._on_their_way: list[Crossing] = []
        self._guards: list[Any] = []  # on the model, while its weights are away

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def leave(self, include: Iterable[Any] | None, device: Any, pinned: bool, non_blocking: bool) -> list[str]:
        """Moves states to the host; those that are there already stay. Returns what was asked for."""
        names = _names(include)
        if str(device) != "cpu":
            raise ValueError(
                f"offload_states(device={str(device)!r}) was asked for, but states go to host memory only. Pass device='cpu'."
            )
        if self._gradients.device.type == "cpu":
            return names
        host = Host(self._accelerator, pinned)
        ways = {
            "masters": self._leave_masters,
            "moments": self._leave_moments,
            "gradients": self._leave_gradients,
            "weights": self._leave_weights,
        }
        for name in names:
            if name in ways and name not in self._away:
                self._away[name] = list(ways[name](host))  # also where this rank has none of it, as the others wait for it
        self._gradients.away = "gradients" in self._away
        if "weights" in self._away and not self._guards and (model := self._model()) is not None:
            self._guards = [
                model.register_forward_pre_hook(lambda *_: _refuse("forward")),
                model.register_state_dict_pre_hook(lambda *_: _refuse("state_dict")),  # type: ignore[no-untyped-call]
            ]
        self._finish(non_blocking)
        return names

    def come_back(self, non_blocking: bool, names: Iterable[str] = STATES) -> None:
        """Moves what is away to where it was."""
        self._finish(False)
        host = Host(self._accelerator, pinned=False)  # which has nothing to lend
        for name in names:
            for bring in self._away.pop(name, []):
                bring(host)
        self._gradients.away = "gradients" in self._away
        while self._guards and "weights" not in self._away:
            self._guards.pop().remove()
        self._finish(non_blocking)

    def check(self, what: str, *needed: str) -> None:
        """Raises where something is away that `what` needs."""
        away = [name for name in needed or STATES if name in self._away]
        if away:
            raise ValueError(
                f"{what}() was asked for, but {', '.join(away)} are on the host since offload_states. "
                "Call reload_states() first."
            )

    # what goes ---------------------------------------------------------------------------------------------------

    def _leave_weights(self, host: Host) -> Iterator[Bring]:
        layout, chunks = self._weights.line.layout, self._weights.chunks
        for index, flat in enumerate(chunks):
            away = self._down(host, flat)
            chunks[index] = flat.new_empty(0)
            for param in layout.chunks[index].params:
                # of the same device and dtype, or autograd would make it a new node, without our hooks
                self._params.tensors[param].data = chunks[index]
            for bucket, its in enumerate(layout.buckets):
                if its.chunk == index and not self._masters.is_copy(bucket):
                    self._masters.shard.shares[bucket] = chunks[index]
                    self._cut_masters(bucket)
            yield self._bring_chunk(index, away)
            del flat

    def _bring_chunk(self, index: int, away: torch.Tensor) -> Bring:
        def bring(host: Host) -> None:
            layout = self._weights.line.layout
            self._weights.chunks[index] = self._up(host, away)
            for param in layout.chunks[index].params:
                self._params.tensors[param].data = self._forms[param].shaped(self._weights.slot(param))
            for bucket, its in enumerate(layout.buckets):
                if its.chunk == index and not self._masters.is_copy(bucket):
                    self._masters.shard.shares[bucket] = self._weights.share(bucket, self._masters.rank)
                    self._cut_masters(bucket)

        return bring

    def _leave_masters(self, host: Host) -> Iterator[Bring]:
        """Those that are copies; the others are the weights themselves."""
        shares = self._masters.shard.shares
        for bucket in [bucket for bucket in shares if self._masters.is_copy(bucket) and not shares[bucket].is_cpu]:
            away = self._down(host, shares[bucket])
            shares[bucket] = shares[bucket].new_empty(0)  # a parameter keeps its device: not every one can change it
            self._cut_masters(bucket)
            yield self._bring_masters(bucket, away)

    def _bring_masters(self, bucket: int, away: torch.Tensor) -> Bring:
        def bring(host: Host) -> None:
            self._masters.shard.shares[bucket] = self._up(host, away)
            self._cut_masters(bucket)

        return bring

    def _leave_gradients(self, host: Host) -> Iterator[Bring]:
        shares = self._gradients.shares
        for bucket in [bucket for bucket, share in shares.items() if not share.is_cpu]:
            shares[bucket] = self._down(host, shares[bucket])
            yield self._bring_gradients(bucket)

    def _bring_gradients(self, bucket: int) -> Bring:
        def bring(host: Host) -> None:
            if bucket in self._gradients.shares:  # else they were thrown away meanwhile
                self._gradients.shares[bucket] = self._up(host, self._gradients.shares[bucket])

        return bring

    def _leave_moments(self, host: Host) -> Iterator[Bring]:
        for master in [master for pieces in self._masters.pieces.values() for _, master in pieces]:
            entries = self._state.get(master, {})
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and not value.is_cpu and value.dim():
                    entries[key] = self._down(host, value)
                    yield self._bring_entry(entries, key)
                    del value

    def _bring_entry(self, entries: dict[str, Any], key: str) -> Bring:
        def bring(host: Host) -> None:
            entries[key] = self._up(host, entries[key])

        return bring

    def _cut_masters(self, bucket: int) -> None:
        """Points the masters of a bucket at its share."""
        share = self._masters.shard.shares[bucket]
        for pieces in self._masters.pieces.values():
            for piece, master in pieces:
                if piece.bucket == bucket:
                    master.data = share[piece.in_share.start : piece.in_share.stop]

    # how it goes -------------------------------------------------------------------------------------------------

    def _down(self, host: Host, source: torch.Tensor) -> torch.Tensor:
        target = host.empty(source.numel(), source.dtype).view(source.shape)
        crossing = host.down(source, target)
        crossing.hand_over()  # so that the device's memory goes now, to whoever comes after the copy
        self._on_their_way.append(crossing)
        return target

    def _up(self, host: Host, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source, device=self._gradients.device)
        crossing = host.up(source, target)
        crossing.wait()
        self._on_their_way.append(crossing)
        return target

    def _finish(self, later: bool) -> None:
        while self._on_their_way and not later:
            self._on_their_way.pop().finish()


def _names(include: Iterable[Any] | None) -> list[str]:
    if include is None:
        return list(STATES)
    given = [include] if isinstance(include, str) else list(include)
    names = [str(getattr(name, "value", name)) for name in given]
    unknown = [name for name in names if name not in STATES and name not in _ALSO]
    if unknown:
        raise ValueError(
            f"offload_states(include={names}) was asked for, but there is no state {unknown[0]!r}. Include some of "
            f"{', '.join(STATES)}, or what DeepSpeed calls them: {', '.join(_ALSO)}."
        )
    return list(dict.fromkeys(_ALSO.get(name, name) for name in names))


def _refuse(what: str) -> None:
    raise ValueError(
        f"The model's {what} was asked for, but weights are on the host since offload_states. Call reload_states() first."
    )
