"""Activations on the host between a forward and its backward.

[Note: activations on the host] What autograd keeps of a forward is copied to pinned memory of the host on a stream of its own,
and the device's memory is free once the copy is done. A backward needs it in the opposite order: when it asks for one tensor,
the one that was kept before it is on its way too. With recomputation, blocks keep their inputs alone, so that is all that
travels.

What stays is kept as autograd does without hooks: an edit in place is an error, which torch looks for no more where there are
hooks, and a result is kept apart from the operator that made it, which would else hold itself for good.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import accelerators
from accelerators import Accelerator
from zero.memory.addresses import storage_of
from zero.sequence.around import set_around

_SMALL = 2**16  # the bytes of a tensor that stays, as a copy would cost more than its memory
_MOST_LEAVING = 2  # tensors whose copies may be on their way before the host waits


def activations_on_host(model: nn.Module, max_bytes: int | None = None) -> None:
    """Keeps on the host, between forward and backward, the activations that a backward of `model` needs. Use it with
    recomputation. Weights and small tensors stay on the device; on a CPU everything does. Not a collective.

    Args:
        model: The model, which is changed in place.
        max_bytes: The most that goes to the host in a forward; all of it by default.
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"Cannot use max_bytes={max_bytes}: it must be 0 or more. Leave it out to keep all on the host.")
    set_around(model, _OnHost(max_bytes))


class _OnHost:
    """A forward whose activations go to the host."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.streams: dict[torch.device, Any] = {}

    def __deepcopy__(self, memo: object) -> _OnHost:
        return _OnHost(self.max_bytes)

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward of a module, and keeps its activations on the host."""
        place = next((param.device for param in module.parameters()), torch.device("cpu"))
        if not torch.is_grad_enabled() or place.type == "cpu":
            return forward(module, *args, **kwargs)
        accelerator = accelerators.of(place)
        stream = self.streams.setdefault(place, accelerator.new_stream(place.index))
        weights = {storage_of(param) for param in module.parameters() if type(param) is nn.Parameter}
        kept = Kept(accelerator, stream, place, weights, self.max_bytes)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return forward(module, *args, **kwargs)


class Kept:
    """All activations of one forward that went to the host, in their order. See [Note: activations on the host]."""

    def __init__(
        self, accelerator: Accelerator, stream: Any, place: torch.device, weights: set[int], max_bytes: int | None
    ) -> None:
        self._accelerator = accelerator
        self._stream = stream
        self._place = place
        self._weights = weights  # storages
        self._room = max_bytes  # the bytes that may go; None for any number
        self._away: list[weakref.ref[_Away]] = []
        # By id of the tensor: a reference to it, its version, and the copy.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, _Away]] = {}
        # A tensor that a copy reads, its version, and the event after which the copy is done.
        self._leaving: deque[tuple[torch.Tensor, int, Any]] = deque()

    def pack(self, saved: torch.Tensor) -> Any:
        """Returns what autograd keeps: the tensor, or where its values are."""
        if not self._may_go(saved):
            return _Stays.of(saved)
        ref, version, away = self._known.get(id(saved), (None, 0, None))
        if ref is not None and ref() is saved and version == saved._version:
            return away
        if self._room is not None and saved.nbytes > self._room:
            return _Stays.of(saved)
        return self._send(saved)

    def _may_go(self, saved: torch.Tensor) -> bool:
        if type(saved) is not torch.Tensor or saved.device != self._place or saved.layout is not torch.strided:
            return False
        if saved.nbytes < _SMALL or self._is_weight(saved):
            return False
        return saved.untyped_storage().nbytes() >= saved.nbytes  # the tensor is not expanded, or a copy would take more memory

    def _send(self, saved: torch.Tensor) -> _Away:
        accelerator = self._accelerator
        while len(self._leaving) >= _MOST_LEAVING:
            self._leave()
        host = self._on_host(saved)
        self._stream.wait_stream(accelerator.current_stream(self._place.index))
        with torch.no_grad(), accelerator.in_stream(self._stream):
            host.copy_(saved, non_blocking=True)
        event = self._done()
        self._leaving.append((*_Stays.of(saved), event))
        away = _Away(host, len(self._away))
        self._away.append(weakref.ref(away))
        self._known[id(saved)] = weakref.ref(saved), saved._version, away
        if self._room is not None:
            self._room -= saved.nbytes
        return away

    def _is_weight(self, saved: torch.Tensor) -> bool:
        return storage_of(saved) in self._weights

    def _on_host(self, saved: torch.Tensor) -> torch.Tensor:
        """Returns memory of the host for a tensor."""
        return torch.empty_like(saved, device="cpu", pin_memory=self._accelerator.can_pin)

    def unpack(self, kept: Any) -> torch.Tensor:
        """Returns the tensor, and has the one that was kept before it come too."""
        self._known.clear()  # the forward is over, and its backward frees what is on the host
        while self._leaving:
            self._leave()
        if type(kept) is not _Away:
            stayed: _Stays = kept
            return stayed.get()
        self._fetch(kept)
        before = next((away for ref in reversed(self._away[: kept.number]) if (away := ref()) is not None), None)
        if before is not None:
            self._fetch(before)
        assert kept.here is not None
        tensor, event = kept.here
        kept.here = None
        event.wait(self._accelerator.current_stream(self._place.index))
        return tensor

    def _leave(self) -> None:
        """Waits for the earliest copy, and frees what it read."""
        saved, version, event = self._leaving.popleft()
        event.synchronize()
        if saved._version != version:
            raise RuntimeError(
                f"Cannot keep a tensor of shape {tuple(saved.shape)} for a backward: it was edited in place while it was "
                "copied to the host. Leave the edit out, or zero.activations_on_host."
            )

    def _fetch(self, away: _Away) -> None:
        """Begins to copy a tensor back."""
        if away.here is not None:
            return
        accelerator = self._accelerator
        tensor = torch.empty_like(away.host, device=self._place)
        self._stream.wait_stream(accelerator.current_stream(self._place.index))  # that stream may still use this memory
        with torch.no_grad(), accelerator.in_stream(self._stream):
            tensor.copy_(away.host, non_blocking=True)
        away.here = tensor, self._done()

    def _done(self) -> Any:
        event = self._accelerator.new_event()
        event.record(self._stream)
        return event

    def __del__(self) -> None:  # no backward came: memory that copies read is freed only when they are done
        for *_, event in self._leaving:
            event.synchronize()


class _Stays(NamedTuple):
    """A tensor that stays on the device."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, saved: torch.Tensor) -> _Stays:
        """Keeps a leaf itself, as the memory of a weight may be exchanged, and anything else apart from its operator."""
        return cls(saved if saved.is_leaf else saved.detach(), saved._version)

    def get(self) -> torch.Tensor:
        """Returns the tensor. Raises if it was edited."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"Cannot compute gradients with a tensor of shape {tuple(self.tensor.shape)}: it was edited in place after the "
                "forward that needs it. Leave the edit out, or make it after the backward."
            )
        return self.tensor


class _Away:
    """A tensor on the host."""

    def __init__(self, host: torch.Tensor, number: int) -> None:
        self.host = host
        self.number = number  # the number among those of its forward
        self.here: tuple[torch.Tensor, Any] | None = None  # the copy on the device and its event, once it has begun

    def __del__(self) -> None:  # the backward broke off: the memory is freed only when the copy into it is done
        if self.here is not None:
            self.here[1].synchronize()
