"""Where the states of a group of parameters are to live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zero.config.homes import Homes, Offload, StateHome
from zero.config.schema import ZeroConfig
from zero.optim.traits import steps_by_blocks
from zero.plan.homes import Away
from zero.plan.stages import stage_of

_DEVICE = StateHome(home="device")


class Places(NamedTuple):
    """What the layout is told of it."""

    offload: float = 0.0  # how much is stepped on the host beside a device
    away: tuple[Away, ...] = ()


def homes_of(group: Mapping[str, Any], config: ZeroConfig) -> dict[str, StateHome | None]:
    """By kind: its own "homes", else what the configuration says; then its own "offload", else that of the configuration."""
    own = group.get("homes", config.homes)
    homes = own if isinstance(own, Homes) else Homes(**(own or {}))
    offload = Offload.of(group["offload"]) if "offload" in group else config.offload
    general = None if offload is None else StateHome(home="host", ratio=offload.ratio, pinned=offload.pinned)
    return {kind: getattr(homes, kind) or general for kind in ("weights", "gradients", "masters", "moments")}


def places_of(group: Mapping[str, Any], config: ZeroConfig, device: torch.device) -> Places:
    """Raises where the homes of a group exclude each other."""
    homes = homes_of(group, config)
    masters, is_host = homes["masters"] or _DEVICE, device.type == "cpu"  # where weights are there is nowhere else to step
    steps_here = is_host or masters.home == "device" or not masters.ratio
    _check(homes, steps_here, is_host, stage_of(config.stage).shards_weights)
    away = []
    for kind in ("gradients", "masters", "moments"):
        home = homes[kind] or _DEVICE
        is_apart = home.home == "disk" or (home.home == "host" and steps_here and not is_host)
        if is_apart and home.ratio:
            away.append(Away(kind, home.place, home.ratio))
    return Places(0.0 if steps_here else masters.ratio, tuple(away))


def _check(homes: Mapping[str, StateHome | None], steps_here: bool, is_host: bool, shards_weights: bool) -> None:
    weights, gradients, moments = homes["weights"], homes["gradients"], homes["moments"]
    if weights is not None and weights.home == "disk":
        raise ValueError(
            "Cannot keep weights on disk: they are read in forward and backward. Keep them on the host with "
            "'weights': 'cpu', and masters, moments and gradients on disk."
        )
    if is_host:
        return
    names = {"gradients": gradients, "moments": moments}
    if shards_weights:
        names["weights"] = weights
    elif weights is not None and weights.home == "host" and homes["masters"] is not weights:
        raise ValueError("Cannot keep weights on the host: they are whole on the device below stage 3. Use stage=3.")
    for name, home in names.items():
        if home is not None and not steps_here and home.home == "device":
            raise ValueError(
                f"Cannot keep {name} on the device: masters are stepped on the host. Leave {name} out, and they go there too."
            )
    for name in ("gradients", "weights"):
        home = names.get(name)
        if home is not None and steps_here and home.home == "host" and home.ratio:
            raise ValueError(
                f"Cannot keep {name} on the host: masters are stepped on the device. Give masters the home 'cpu' or a disk too."
            )


def check_streams(optimizer: torch.optim.Optimizer, places: Mapping[int, Places]) -> None:
    """Raises where states are to come for the step a bucket at a time, and the optimizer wants all of them. By group."""
    apart = {each.kind for own in places.values() for each in own.away} & {"masters", "moments"}
    if apart and not steps_by_blocks(optimizer):
        raise ValueError(
            f"Cannot keep {' and '.join(sorted(apart))} apart from where they are stepped: {type(optimizer).__name__} is not "
            "known to step one parameter after the other, so all of them would be in memory. Use an optimizer of torch, or "
            "offload='cpu'."
        )
