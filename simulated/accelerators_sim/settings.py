"""The settings of the simulated device: read from the environment when it comes up, and changed by `configure` in start.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from accelerators.memory import parse_bytes
from accelerators_sim.capabilities import parse_capabilities

DEFAULT_MEMORY = "16GiB"
ORDERS = ("late", "random", "eager")


@dataclass
class Settings:
    """The value of each switch. The process has one such object, `settings`, which every module of this package holds."""

    devices: int = 2
    memory_bytes: int = field(default_factory=lambda: parse_bytes(DEFAULT_MEMORY))
    without: frozenset[str] = frozenset()
    order: str = "late"
    seed: int = 0
    races: bool = True
    strict: bool = False

    def lacks(self, capability: str) -> bool:
        return capability in self.without

    def take(self, new: Settings) -> None:
        """Takes over every value of `new`."""
        for each in fields(Settings):
            setattr(self, each.name, getattr(new, each.name))


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Reads the settings from the variables of `environment`; unset and empty ones leave the default."""

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
    """Reads `random:7` as random and 7; the other orders have no seed."""
    order, colon, seed = text.strip().lower().partition(":")
    if order not in ORDERS or (colon and (order != "random" or not seed.isdecimal())):
        raise ValueError(f"Cannot set SIM_ORDER={text}: an order is late, random:SEED or eager. Write one of these.")
    return order, int(seed or 0)


def _count_devices(devices: str, visible: str | None) -> int:
    if not devices.isdecimal():
        raise ValueError(f"Cannot set SIM_DEVICES={devices}: it takes a number of devices. Write it like 2.")
    if visible is None or not visible.strip():
        return int(devices)
    shown = [index.strip() for index in visible.split(",")]
    if not all(index.isdecimal() and int(index) < int(devices) for index in shown) or len(set(shown)) != len(shown):
        raise ValueError(
            f"Cannot set SIM_VISIBLE_DEVICES={visible}: there are {devices} devices. "
            f"List different indices from 0 to {int(devices) - 1}, or set SIM_DEVICES."
        )
    return len(shown)


def _parse_switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"Cannot set {name}={text}: it is a switch. Set it to 0 or 1.")
    return text == "1"


settings = Settings()
