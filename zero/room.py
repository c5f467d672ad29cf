"""Whether what is offloaded fits the host, asked before anything is allocated."""

from __future__ import annotations

import torch

import accelerators
from accelerators.memory import format_bytes
from zero.config import Offload
from zero.lion import Lion
from zero.memory.flatten import Place
from zero.memory.offload import Host
from zero.plan.budget import budget_of
from zero.plan.layout import FlatLayout

_OPTIM = torch.optim
# Values an element that an optimizer remembers, where it is not two.
_MOMENTS = {_OPTIM.Adagrad: 1, _OPTIM.Adamax: 2, _OPTIM.RMSprop: 1, Lion: 1}


def num_moments(optimizer: torch.optim.Optimizer) -> int:
    """Values an element of its state; two for an optimizer that we do not know."""
    settings = optimizer.defaults
    known = _MOMENTS.get(type(optimizer), 2)
    if isinstance(optimizer, torch.optim.SGD):
        known = 0
    more = (settings.get("momentum", 0) not in (0, 0.0, None), settings.get("amsgrad", False), settings.get("centered", False))
    return known + sum(map(bool, more))


def host_beside(
    layout: FlatLayout, place: Place, offload: Offload, optimizer: torch.optim.Optimizer, ranks_here: int
) -> Host | None:
    """The host memory for what is offloaded; None where host and device are one. Raises where there is not enough."""
    has_host = not place.is_host
    budget = budget_of(layout, num_moments=num_moments(optimizer), has_host=has_host)
    needed = budget.host_peak if has_host else budget.device.total
    available = accelerators.get("cpu").memory().available
    if available is not None and needed * ranks_here > available:
        raise MemoryError(
            f"Offloading to the host was asked for, which needs {needed} bytes ({format_bytes(needed)}) on each of "
            f"{ranks_here} ranks of this machine, but {available} bytes ({format_bytes(available)}) are available to all of "
            "them. Offload a smaller part with offload={'ratio': ...}, use more machines, or a smaller model."
        )
    if not has_host:
        return None
    if offload.pinned and not place.accelerator.can_pin:
        raise ValueError(
            f"Pinned host memory was asked for, {needed} bytes of it ({format_bytes(available)} of host memory are available), "
            f"but none can be pinned for {place.accelerator.name}. Leave pinned out, and pageable memory serves."
        )
    return Host(place.accelerator, pinned=offload.pinned is not False)
