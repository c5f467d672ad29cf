"""What the environment says about the simulated device, read once when it comes up, and changed from Python after that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from accelerators.memory import parse_bytes

DEFAULT_MEMORY = "16GiB"
ORDERS = ("late", "random", "eager")


@dataclass
class Settings:
    """One value a switch. The process has one, `settings`; `configure` changes it."""

    devices: int = 2
    memory_bytes: int = field(default_factory=lambda: parse_bytes(DEFAULT_MEMORY))
    without: frozenset[str] = frozenset()
    order: str = "late"
    seed: int = 0
    races: bool = True
    strict: bool = False


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings that the variables of `environment` ask for; unset and empty ones leave the default."""

    def text(name: str, default: str) -> str:
        return environment.get(name, "").strip() or default

    order, seed = parse_order(text("SIM_ORDER", "late"))
    return Settings(
        devices=_count_devices(text("SIM_DEVICES", "2"), environment.get("SIM_VISIBLE_DEVICES")),
        memory_bytes=parse_bytes(text("SIM_MEMORY", DEFAULT_MEMORY)),
        without=parse_capabilities(text("SIM_WITHOUT", "")),
        order=order,
        seed=seed,
        races=_parse_switch("SIM_RACES", text("SIM_RACES", "1")),
        strict=_parse_switch("SIM_STRICT", text("SIM_STRICT", "0")),
    )


def parse_order(text: str) -> tuple[str, int]:
    """`random:7` as random and 7; the other orders have no seed."""
    order, colon, seed = text.strip().lower().partition(":")
    if order not in ORDERS or (colon and (order != "random" or not seed.isdecimal())):
        raise ValueError(f"SIM_ORDER={text} was asked for, but an order is late, random:SEED or eager. Write one of these.")
    return order, int(seed or 0)


def parse_capabilities(text: str) -> frozenset[str]:
    from accelerators.simulated.capabilities import CAPABILITIES

    names = frozenset(name.strip().lower() for name in text.split(",") if name.strip())
    if unknown := sorted(names - set(CAPABILITIES)):
        raise ValueError(
            f"SIM_WITHOUT={text} was asked for, but the device has no capability {', '.join(unknown)}. "
            f"Take away some of {', '.join(CAPABILITIES)}."
        )
    return names


def _count_devices(devices: str, visible: str | None) -> int:
    if not devices.isdecimal():
        raise ValueError(f"SIM_DEVICES={devices} was set, but a number of devices belongs there. Write it like 2.")
    if visible is None or not visible.strip():
        return int(devices)
    shown = [index.strip() for index in visible.split(",")]
    if not all(index.isdecimal() and int(index) < int(devices) for index in shown) or len(set(shown)) != len(shown):
        raise ValueError(
            f"SIM_VISIBLE_DEVICES={visible} was set, but there are {devices} devices. "
            f"List different indices from 0 to {int(devices) - 1}, or set SIM_DEVICES."
        )
    return len(shown)


def _parse_switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text} was set, but it is a switch. Set it to 0 or 1.")
    return text == "1"


settings = Settings()


def read_environment() -> None:
    """Takes over what the environment says; called once, when the device comes up."""
    _take(read_settings(os.environ))


def configure(
    *, memory_bytes: int | None = None, order: str | None = None, races: bool | None = None, strict: bool | None = None
) -> None:
    """Changes settings of a device that is up, or brings it up with them; what is None stays."""
    from accelerators.simulated.lanes import lanes
    from accelerators.simulated.start import bring_up

    bring_up()
    new = replace(settings)
    if order is not None:
        new.order, new.seed = parse_order(order)
    if memory_bytes is not None:
        new.memory_bytes = memory_bytes
    new.races = settings.races if races is None else races
    new.strict = settings.strict if strict is None else strict
    lanes.run_all()  # what was put off under the old order is not to meet the new one half done
    _take(new)
    if order is not None:
        lanes.reseed(new.seed)


def _take(new: Settings) -> None:
    # In place: every module of this package holds the one object.
    for each in fields(Settings):
        setattr(settings, each.name, getattr(new, each.name))
