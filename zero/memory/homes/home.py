"""What every place where state can live does, and the plainest one: the device that computes."""

from __future__ import annotations

from typing import Protocol

import torch


class Transfer(Protocol):
    """A copy into a home or out of it, on its way."""

    def done(self) -> bool: ...

    def finish(self) -> None:
        """The host waits."""

    def wait(self) -> None:
        """What is issued to the current stream from now on comes after the copy; the host goes on."""

    def release_source(self) -> None:
        """Lets go of the source: whatever gets its memory next on the current stream comes after the copy."""


class Done:
    """A copy that has arrived."""

    def done(self) -> bool:
        return True

    def finish(self) -> None: ...

    def wait(self) -> None: ...

    def release_source(self) -> None: ...


DONE = Done()


class Home(Protocol):
    """A place where state lives: shares of gradients, masters, moments, and weights for a while.

    What lives here is computed with where it lives. Tensors on the device that computes the model reach it by `write`, and what
    lives here reaches them by `read`. Both are asynchronous, as is `add`.
    """

    device: torch.device  # of what lives here
    pinned: bool | None  # whether its memory is; None: where that works

    @property
    def num_lent_bytes(self) -> int:
        """Of memory for mirrors, lent or not."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory here, with anything in it. It goes when its last reference goes, on a disk when it is freed."""

    def free(self, stored: torch.Tensor) -> None:
        """What `allocate` gave is used no more."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is such memory as `allocate` makes, and so can live here."""

    def write(self, source: torch.Tensor, stored: torch.Tensor) -> Transfer:
        """From the device that computes into memory of this home."""

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        """From memory of this home to the device that computes."""

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        """Adds `factor * values` to what is stored, or writes it there if that is `fresh`. `values` are on the device that
        computes and may be changed; the transfer still reads them. What is stored has the sum after `catch_up`."""

    def catch_up(self) -> None:
        """Waits until everything that was sent by `add` is added."""

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory here for the values of a tensor on the device that computes: the tensor itself where both are the same place.
        To be given back."""

    def give_back(self, mirror: torch.Tensor) -> None:
        """The host has waited for all transfers that use it."""

    def release(self) -> None:
        """Lets go of memory for mirrors that nobody has."""


class DeviceHome:
    """The device that computes the model: what lives here needs no transfer."""

    pinned: bool | None = None
    num_lent_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def free(self, stored: torch.Tensor) -> None: ...

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def write(self, source: torch.Tensor, stored: torch.Tensor) -> Transfer:
        if source is not stored:
            stored.copy_(source)
        return DONE

    def read(self, stored: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self.write(stored, target)

    def add(self, values: torch.Tensor, factor: float, stored: torch.Tensor, fresh: bool) -> Transfer:
        if fresh:
            torch.mul(values, factor, out=stored)  # no pass over zeros
        else:
            stored.add_(values, alpha=factor)
        return DONE

    def catch_up(self) -> None: ...

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def give_back(self, mirror: torch.Tensor) -> None: ...

    def release(self) -> None: ...
