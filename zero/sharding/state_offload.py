"""States that leave the device between two phases, and come back: what training keeps is not needed while a model generates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from accelerators import Accelerator
from zero.config.schema import NAMES_OF_HOST, name_of_place
from zero.memory.formats import ParamFormat
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.host import HostCopy, HostPool
from zero.memory.masters import Masters
from zero.memory.weights import FlatBuffer
from zero.runtime.params.table import Params

STATES = ("masters", "moments", "gradients", "weights", "buffers")
# What DeepSpeed calls them.
_ALSO = {
    "hp_params": "masters",
    "optim_states": "moments",
    "lp_grads": "gradients",
    "lp_params": "weights",
    "contiguous_grad_buffer": "buffers",
}

Bring = Callable[[HostPool], None]

_WHAT_MODULES_DO = ("Forward", "state_dict", "load_state_dict")


class StateOffloader:
    """Moves what a sharded optimizer keeps on the device to the host and back.

    Only memory is exchanged: parameters, masters and the optimizer's state stay the objects that they are. What
    already lives on the host, and everything where host and device are one, stays where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        params: Params,
        forms: list[ParamFormat],
        weights: FlatBuffer,
        masters: Masters,
        gradients: GradientShard,
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
        self._away: dict[str, list[Bring]] = {}  # by state: what brings each part of it back
        self._on_their_way: list[HostCopy] = []
        self._guards: list[Any] = []  # on modules and parameters, while something is away that they cannot do without

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, include: Iterable[Any] | None, device: Any, pinned: bool, non_blocking: bool) -> list[str]:
        """Moves states to the host; those that are there already stay. Returns what was asked for.

        What cannot go, as there is no memory for it, is an error, and then what went comes back.
        """
        names = _names(include)
        if name_of_place(device) not in NAMES_OF_HOST:
            raise ValueError(
                f"offload_states(device={str(device)!r}) was asked for, but states go to host memory only. Pass device='cpu'."
            )
        if self._gradients.device.type == "cpu":
            return names
        host = HostPool(self._accelerator, None if pinned else False)
        ways = {
            "masters": self._leave_masters,
            "moments": self._leave_moments,
            "gradients": self._leave_gradients,
            "weights": self._leave_weights,
        }
        leaving = [name for name in names if name in ways and name not in self._away]
        try:
            for name in leaving:
                brings = self._away[name] = []  # also where this rank has none of it, as the others wait for it
                for bring in ways[name](host):
                    brings.append(bring)  # one at a time: what comes after may fail
        except BaseException:
            self.reload(False, leaving)
            raise
        self._guard()
        self._finish(non_blocking)
        return names

    def reload(self, non_blocking: bool, names: Iterable[str] = STATES) -> None:
        """Moves what is away to where it was. What does not fit the device stays, and can be brought by another call."""
        self._finish(False)
        host = HostPool(self._accelerator)  # which has nothing to lend
        try:
            for name in names:
                brings = self._away.get(name, [])
                while brings:
                    brings[0](host)
                    del brings[0]
                self._away.pop(name, None)
        finally:
            self._guard()
        self._finish(non_blocking)

    def check(self, what: str, *needed: str) -> None:
        """Raises where something is away that `what` needs."""
        self._finish(True)
        away = [name for name in needed or STATES if name in self._away]
        if away:
            raise ValueError(f"{what}() was asked for, but {_are_away(away)}")

    def _guard(self) -> None:
        """Whoever needs what is away is told, by whatever way he comes: a submodule, a copy, a graph from before."""
        while self._guards:
            self._guards.pop().remove()
        self._gradients.offloaded_states = tuple(name for name in ("weights", "gradients") if name in self._away)
        if self._gradients.offloaded_states:
            guard: Any = _Guard("A backward", self._gradients.offloaded_states)
            trained: list[Any] = [param for param in self._params.tensors if param.requires_grad]
            self._guards += [param.register_hook(guard) for param in trained]
        model = self._model()
        for module in model.modules() if model is not None and "weights" in self._away else ():
            forward, saved, loaded = (_Guard(f"{what} of a module", ["weights"]) for what in _WHAT_MODULES_DO)
            self._guards += [
                module.register_forward_pre_hook(forward),
                module.register_state_dict_pre_hook(saved),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(loaded),  # type: ignore[no-untyped-call]
            ]

    # what goes ---------------------------------------------------------------------------------------------------

    def num_bytes(self, include: Iterable[Any] | None) -> int:
        """That `leave` would move to the host, with what was assigned to `.data` left out."""
        shares, names = self._masters.shard.shares, _names(include)
        going: dict[str, list[torch.Tensor]] = {
            "masters": [shares[bucket] for bucket in shares if self._masters.is_copy(bucket)],
            "moments": [entries[key] for entries in self._state.values() for key in _that_leave(entries)],
            "gradients": list(self._gradients.shares.values()),
            "weights": self._weights.chunks,
        }
        tensors = [tensor for name in names if name not in self._away for tensor in going.get(name, ())]
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_cpu)

    def _leave_weights(self, host: HostPool) -> Iterator[Bring]:
        """What the user assigned to `.data` goes and comes by itself, as it is no edit before a step takes it in."""
        layout, chunks = self._weights.line.layout, self._weights.chunks
        for index, flat in enumerate(chunks):
            away, own, leaving = self._down(host, flat), dict[int, torch.Tensor](), list[int]()
            for param in layout.chunks[index].params:
                tensor = self._params.tensors[param]
                if (tensor.device, tensor.dtype) != (flat.device, flat.dtype):
                    continue  # it is none of ours any more
                leaving.append(param)
                if tensor.numel() and tensor.data_ptr() != self._weights.slot(param).data_ptr():
                    own[param] = self._down(host, tensor.data)
            chunks[index] = flat.new_empty(0)
            for param in leaving:
                # of the same device and dtype, or autograd would make it a new node, without our hooks
                self._params.tensors[param].data = chunks[index]
            for bucket, its in enumerate(layout.buckets):
                if its.chunk == index and not self._masters.is_copy(bucket):
                    self._masters.shard.shares[bucket] = chunks[index]
                    self._cut_masters(bucket)
            yield self._bring_chunk(index, away, own)
            del flat

    def _bring_chunk(self, index: int, away: torch.Tensor, own: dict[int, torch.Tensor]) -> Bring:
        def bring(host: HostPool) -> None:
            layout = self._weights.line.layout
            brought = {param: self._up(host, values) for param, values in own.items()}
            self._weights.chunks[index] = self._up(host, away)
            for param in layout.chunks[index].params:
                if not self._params.tensors[param].numel():  # else something was assigned meanwhile
                    place = self._forms[param].unflatten(self._weights.slot(param))
                    self._params.tensors[param].data = brought.get(param, place)
            for bucket, its in enumerate(layout.buckets):
                if its.chunk == index and not self._masters.is_copy(bucket):
                    self._masters.shard.shares[bucket] = self._weights.share(bucket, self._masters.rank)
                    self._cut_masters(bucket)

        return bring

    def _leave_masters(self, host: HostPool) -> Iterator[Bring]:
        """Those that are copies; the others are the weights themselves."""
        shares = self._masters.shard.shares
        for bucket in [bucket for bucket in shares if self._masters.is_copy(bucket) and not shares[bucket].is_cpu]:
            away = self._down(host, shares[bucket])
            shares[bucket] = shares[bucket].new_empty(0)  # a parameter keeps its device: not every one can change it
            self._cut_masters(bucket)
            yield self._bring_masters(bucket, away)

    def _bring_masters(self, bucket: int, away: torch.Tensor) -> Bring:
        def bring(host: HostPool) -> None:
            self._masters.shard.shares[bucket] = self._up(host, away)
            self._cut_masters(bucket)

        return bring

    def _leave_gradients(self, host: HostPool) -> Iterator[Bring]:
        shares = self._gradients.shares
        for bucket in [bucket for bucket, share in shares.items() if not share.is_cpu]:
            shares[bucket] = self._down(host, shares[bucket])
            yield self._bring_gradients(bucket)

    def _bring_gradients(self, bucket: int) -> Bring:
        def bring(host: HostPool) -> None:
            if bucket in self._gradients.shares:  # else they were thrown away meanwhile
                self._gradients.shares[bucket] = self._up(host, self._gradients.shares[bucket])

        return bring

    def _leave_moments(self, host: HostPool) -> Iterator[Bring]:
        for master in [master for pieces in self._masters.pieces.values() for _, master in pieces]:
            entries = self._state.get(master, {})
            for key in _that_leave(entries):
                entries[key] = self._down(host, entries[key])
                yield self._bring_entry(entries, key)

    def _bring_entry(self, entries: dict[str, Any], key: str) -> Bring:
        def bring(host: HostPool) -> None:
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

    def _down(self, host: HostPool, source: torch.Tensor) -> torch.Tensor:
        target = host.empty(source.numel(), source.dtype).view(source.shape)
        crossing = host.to_host(source, target)
        crossing.release_source()  # so that what comes after the copy can have the device's memory
        self._on_their_way.append(crossing)
        return target

    def _up(self, host: HostPool, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source, device=self._gradients.device)
        crossing = host.to_device(source, target)
        crossing.wait()
        self._on_their_way.append(crossing)
        return target

    def _finish(self, later: bool) -> None:
        """Lets go of both ends of each copy, or of those that are done by now."""
        for crossing in self._on_their_way:
            if crossing.done() or not later:
                crossing.finish()
        self._on_their_way = [crossing for crossing in self._on_their_way if not crossing.done()]


def _that_leave(entries: dict[str, Any]) -> list[str]:
    """Of an optimizer's entries for one parameter, those on the device that have a number for more than all of it."""
    return [key for key, value in entries.items() if isinstance(value, torch.Tensor) and not value.is_cpu and value.dim()]


class _Guard:
    """A hook that refuses. So does copying or pickling what it is on."""

    def __init__(self, what: str, away: Sequence[str]) -> None:
        self._what = what
        self._away = away

    def __call__(self, *_: Any) -> None:
        raise ValueError(f"{self._what} was asked for, but {_are_away(self._away)}")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(f"A copy of the model was asked for, but {_are_away(self._away)}")

    def __reduce__(self) -> NoReturn:
        raise ValueError(f"Pickling the model was asked for, but {_are_away(self._away)}")


def _are_away(names: Sequence[str]) -> str:
    return f"{', '.join(names)} are on the host since offload_states. Call reload_states() first."


def _names(include: Iterable[Any] | None) -> list[str]:
    if include is None:
        return list(STATES)
    given = list(include) if isinstance(include, Iterable) and not isinstance(include, str) else [include]
    names = [str(getattr(name, "value", name)) for name in given]
    unknown = [name for name in names if name not in STATES and name not in _ALSO]
    if unknown:
        raise ValueError(
            f"offload_states(include={names}) was asked for, but there is no state {unknown[0]!r}. Include some of "
            f"{', '.join(STATES)}, or what DeepSpeed calls them: {', '.join(_ALSO)}."
        )
    return list(dict.fromkeys(_ALSO.get(name, name) for name in names))
