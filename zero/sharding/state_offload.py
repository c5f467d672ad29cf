"""Moves states from the device between two phases and back: while a model generates, for instance, training state is not
needed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from accelerators import Accelerator
from zero.config.blocks import NAMES_OF_HOST, name_of_place
from zero.errors import DiskFailed
from zero.memory.addresses import starts_where
from zero.memory.formats import ParamFormat
from zero.memory.gradient_shard import NEEDED
from zero.memory.homes.disk import is_absent
from zero.memory.homes.home import Home, Transfer
from zero.memory.homes.host import HostHome
from zero.memory.homes.registry import DISK, MOVED, Move, are_away
from zero.memory.masters import Masters
from zero.memory.weights import Weights
from zero.runtime.params.table import Params
from zero.window.window import Window

STATES = ("masters", "moments", "gradients", "weights", "buffers")
# The names that DeepSpeed gives them.
_ALSO = {
    "hp_params": "masters",
    "optim_states": "moments",
    "lp_grads": "gradients",
    "lp_params": "weights",
    "contiguous_grad_buffer": "buffers",
}

_WHAT_MODULES_DO = ("forward", "state_dict", "load_state_dict")  # the methods that are refused while weights are away


class StateOffloader:
    """Only memory is exchanged: parameters, masters and the optimizer's state stay the objects that they are.

    It moves what a sharded optimizer keeps on the device to another home, and back. What already lives on the host stays where
    it is, and so does everything if host and device are one.

    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        params: Params,
        formats: list[ParamFormat],
        weights: Weights,
        masters: Masters,
        inner: torch.optim.Optimizer,
        window: Window,
    ) -> None:
        gradients = window.grad_ops.shard
        self._window = window
        self._model = weakref.ref(model)
        self._accelerator = accelerator
        self._params = params
        self._formats = formats
        self._weights = weights
        self._masters = masters
        self._gradients = gradients
        self._state = inner.state
        self._homes = gradients.homes
        self._in_transfer: list[Transfer] = []
        self._cannot_read = False  # something that is away on a disk cannot be read, and can only be loaded again
        self._gives_up = False  # values that cannot be read become NaN
        self._guards: list[Any] = []  # hooks on modules and parameters that need what is away

    @property
    def is_away(self) -> bool:
        return self._homes.is_any_away

    def offload(self, include: Iterable[Any] | None, device: Any, pinned: bool, non_blocking: bool) -> list[str]:
        """Moves states to the host or to disk. What is not on the device stays. Returns the names of the states.

        If memory for something is missing, everything that was moved comes back and an error is raised.
        """
        names = _names(include)
        to_disk = str(name_of_place(device)).startswith(DISK)
        self._masters.streams.flush()
        if name_of_place(device) not in NAMES_OF_HOST and not to_disk:
            raise ValueError(
                f"Cannot offload states with device={str(device)!r}: they go to host memory or to disk. Pass device='cpu' or "
                "device='disk:/a/directory'."
            )
        if to_disk:
            home = self._homes.at(MOVED, str(device).strip())
        elif self._homes.host is self._homes.device:
            return names
        else:
            home = HostHome(self._accelerator, None if pinned else False)
            home.link = self._homes.host.link  # the same link counts all that crosses
        parts = {
            "masters": self._master_parts,
            "moments": self._moment_parts,
            "gradients": self._gradient_parts,
            "weights": self._weight_parts,
        }
        leaving = [name for name in names if name in parts and not self._homes.away([name])]
        try:
            for name in leaving:
                self._homes.move_away(name, parts[name](), home)
        except BaseException:
            self.reload(False, leaving)
            raise
        self._guard()
        self._finish(non_blocking)
        return names

    def reload(self, non_blocking: bool, names: Iterable[str] = STATES, gives_up: bool = False) -> None:
        """Moves everything that is away to where it was. What does not fit the device stays away until another call, as does
        what cannot be read from a disk; with `gives_up` that is NaN."""
        self._finish(False)
        self._gives_up = gives_up
        try:
            for name in names:
                self._homes.bring_back(name)
            if not self.is_away:
                self._homes.close(MOVED)
        except DiskFailed:
            self._cannot_read = True
            raise
        finally:
            self._gives_up = False
            self._guard()
        self._cannot_read = False
        self._finish(non_blocking)

    def check(self, what: str, *needed: str) -> None:
        """Raises if something is away that `what` needs, or if masters are ahead of their weights, which only a step ends."""
        if what != "step":
            self._window.refuse_ahead(f"call {what}()")
        self._finish(True)
        self._homes.check_resident(f"call {what}()", needed or STATES)

    def check_load(self, what: str, is_whole: bool) -> None:
        """Raises if states are away that a load needs. A load of everything replaces states that are lost or cannot be read."""
        if not is_whole:
            self._masters.streams.check()
        if not (self._cannot_read and is_whole):
            self.check(what)

    def give_up(self) -> None:
        """Brings back as NaN what cannot be read any more, as everything is loaded now."""
        if self._cannot_read:
            self.reload(False, gives_up=True)

    def _guard(self) -> None:
        """Attaches hooks that refuse what needs a state that is away: submodules, copies, and graphs from before."""
        while self._guards:
            self._guards.pop().remove()
        away = self._homes.away(NEEDED)
        if away:
            guard: Any = _Guard("run a backward", away)
            trained: list[Any] = [param for param in self._params.leaves if param.requires_grad]
            self._guards += [param.register_hook(guard) for param in trained]
        model = self._model()
        for module in model.modules() if model is not None and "weights" in away else ():
            forward, saved, loaded = (_Guard(f"call {what} of a module", ["weights"]) for what in _WHAT_MODULES_DO)
            self._guards += [
                module.register_forward_pre_hook(forward),
                module.register_state_dict_pre_hook(saved),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(loaded),  # type: ignore[no-untyped-call]
            ]

    # what goes: each part as what moves it to a home -------------------------------------------------------------

    def num_bytes(self, include: Iterable[Any] | None, device: Any = "cpu") -> int:
        """Returns the bytes that `offload` would move to the host, without what was assigned to `.data`."""
        if str(name_of_place(device)).startswith(DISK):
            return 0
        shares, names = self._masters.shard.shares, _names(include)
        going: dict[str, list[torch.Tensor]] = {
            "masters": [shares[bucket] for bucket in self._copies()],
            "moments": [entries[key] for entries, key in self._moments()],
            "gradients": list(self._gradients.shares.values()),
            "weights": list(self._weights.memory()),
        }
        tensors = [tensor for name in names if not self._homes.away([name]) for tensor in going.get(name, ())]
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_cpu)

    def _copies(self) -> list[int]:
        """Returns the buckets whose masters are copies on the device; others are the weights themselves, or on the host."""
        shares = self._masters.shard.shares
        return [bucket for bucket in shares if self._masters.is_copy(bucket) and self._is_here(shares[bucket])]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is on the device."""
        return tensor.device == self._homes.device.device and not is_absent(tensor)

    def _moments(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the optimizer's entries on the device, with their keys, that are more than one number for all of a
        parameter."""
        for pieces in self._masters.pieces.values():
            for _, master in pieces:
                entries = self._state.get(master, {})
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor) and value.dim() and self._is_here(value):
                        yield entries, key

    def _master_parts(self) -> Iterator[Move]:
        return (partial(self._move_masters, bucket) for bucket in self._copies())

    def _move_masters(self, bucket: int, home: Home) -> None:
        shares = self._masters.shard.shares
        shares[bucket] = self._moved(shares[bucket], home)
        self._masters.cut(bucket)

    def _moment_parts(self) -> Iterator[Move]:
        return (partial(self._move_moment, entries, key) for entries, key in self._moments())

    def _move_moment(self, entries: dict[str, Any], key: str, home: Home) -> None:
        entries[key] = self._moved(entries[key], home)

    def _gradient_parts(self) -> Iterator[Move]:
        shares = self._gradients.shares
        return (partial(self._move_gradients, bucket) for bucket in shares if self._is_here(shares[bucket]))

    def _move_gradients(self, bucket: int, home: Home) -> None:
        shares = self._gradients.shares
        if bucket in shares:  # the window may have thrown them away meanwhile
            shares[bucket] = self._moved(shares[bucket], home)

    def _weight_parts(self) -> Iterator[Move]:
        yield from (partial(self._move_chunk, index, []) for index in self._weights.whole_chunks)
        yield from (partial(self._move_weights, move) for move in self._weights.share_moves(self._moved_in_memory))

    def _move_weights(self, move: Move, home: Home) -> None:
        move(home)
        for bucket in self._weights.renewed():
            self._masters.renew(bucket)

    def _move_chunk(self, index: int, stored: list[_StoredChunk], home: Home) -> None:
        if home is self._homes.device:
            self._load_chunk(index, stored[0])
            stored.clear()  # cleared last, when all of the chunk is back
        else:
            stored.append(self._store_chunk(index, home))

    def _store_chunk(self, index: int, home: Home) -> _StoredChunk:
        chunks, params = self._weights.whole_chunks, self._params.tensors
        flat, stored = chunks[index], _StoredChunk(self._moved(chunks[index], home), {})
        in_chunk = [(param, params[param]) for param in self._weights.layout_ref.layout.chunks[index].params]
        ours = [(param, tensor) for param, tensor in in_chunk if (tensor.device, tensor.dtype) == (flat.device, flat.dtype)]
        for param, tensor in ours:
            memory = self._weights.memory_of(param)
            if tensor.numel() and memory is not None and not starts_where(tensor, memory):
                stored.assigned[param] = self._moved(tensor.data, home)
        chunks[index] = flat.new_empty(0)
        for _, tensor in ours:
            # Of the same device and dtype: otherwise autograd would make a new node for it, which has no hooks of ours.
            tensor.data = chunks[index]
        self._renew_masters(index)
        return stored

    def _load_chunk(self, index: int, stored: _StoredChunk) -> None:
        loaded = {param: self._moved(values, self._homes.device) for param, values in stored.assigned.items()}
        self._weights.whole_chunks[index] = self._moved(stored.flat, self._homes.device)
        for param in self._weights.layout_ref.layout.chunks[index].params:
            tensor = self._params.tensors[param]
            if self._weights.memory_of(param) is None or tensor.numel():
                continue  # the parameter has no memory, or was assigned something meanwhile
            if param in loaded:
                tensor.data = loaded[param]
            else:
                self._weights.attach(param, tensor, self._formats[param])
        self._renew_masters(index)

    def _renew_masters(self, chunk: int) -> None:
        """Points masters that are the weights themselves at the present weights."""
        for bucket in self._weights.layout_ref.layout.buckets_in(chunk):
            self._masters.renew(bucket)

    def _moved_in_memory(self, tensor: torch.Tensor, home: Home) -> torch.Tensor:
        """Moves a share of the weights, which is read where it lies, to memory of a home."""
        return self._moved(tensor, home.memory)

    def _moved(self, tensor: torch.Tensor, home: Home) -> torch.Tensor:
        moved, transfer = self._homes.move(tensor, home, self._gives_up)
        self._in_transfer.append(transfer)
        return moved

    def _finish(self, later: bool) -> None:
        """Drops both ends of each copy. With `later` it waits for none, and drops those that are done."""
        for transfer in self._in_transfer:
            if transfer.done() or not later:
                transfer.finish()
        self._in_transfer = [transfer for transfer in self._in_transfer if not transfer.done()]


class _StoredChunk(NamedTuple):
    """A chunk of the weights in another home. Values that the user assigned to `.data` are moved apart from it, as they are no
    edit before a step takes them in."""

    flat: torch.Tensor
    assigned: dict[int, torch.Tensor]  # the values of those parameters, by number


class _Guard:
    """A hook that raises when it is called. Copying or pickling its module raises too."""

    def __init__(self, what: str, away: Sequence[str]) -> None:
        self._what = what
        self._away = away

    def __call__(self, *_: Any) -> None:
        raise ValueError(f"Cannot {self._what}: {are_away(self._away)}")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(f"Cannot copy the model: {are_away(self._away)}")

    def __reduce__(self) -> NoReturn:
        raise ValueError(f"Cannot pickle the model: {are_away(self._away)}")


def _names(include: Iterable[Any] | None) -> list[str]:
    if include is None:
        return list(STATES)
    given = list(include) if isinstance(include, Iterable) and not isinstance(include, str) else [include]
    names = [str(getattr(name, "value", name)) for name in given]
    unknown = [name for name in names if name not in STATES and name not in _ALSO]
    if unknown:
        raise ValueError(
            f"Cannot call offload_states(include={names}): there is no state {unknown[0]!r}. Include some of "
            f"{', '.join(STATES)}, or DeepSpeed's names of them: {', '.join(_ALSO)}."
        )
    return list(dict.fromkeys(_ALSO.get(name, name) for name in names))
