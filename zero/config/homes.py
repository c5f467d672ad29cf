"""Where states live: reads `offload` and `homes`, in the form of this library and in DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from zero.config.base import ConfigModel
from zero.config.registry import brief
from zero.config.sizes import as_bytes

NAMES_OF_HOST = ("cpu", "host")


class Offload(ConfigModel):
    """Where masters, optimizer state and gradient shares live if not on the accelerator, and how much of them."""

    prefix = "offload."

    home: Annotated[Literal["host"], BeforeValidator(lambda given: _place(given))] = "host"
    pinned: bool | None = None  # None: where that works
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0

    @classmethod
    def of(cls, given: object) -> Offload | None:
        """From a name such as "cpu", from a dict of ours or of DeepSpeed's, or from itself."""
        converted = offload_in_our_words(given)
        return cls(**converted) if isinstance(converted, dict) else converted


def offload_in_our_words(given: object) -> Offload | dict[str, Any] | None:
    """Returns `given` in the form of this library; None where nothing is offloaded."""
    if given is None or isinstance(given, Offload):
        return given
    named = dict(given) if isinstance(given, Mapping) else {"home": given}
    if "device" in named:
        named["home"] = named.pop("device")
    if "pin_memory" in named:
        named["pinned"] = named.pop("pin_memory")
    return None if name_of_place(named.get("home", "cpu")) in ("none", "None") else named


def name_of_place(place: object) -> object:
    """Returns the name of an enum's member or of a torch.device."""
    plain = getattr(place, "value", getattr(place, "type", place))
    return plain.strip().lower() if isinstance(plain, str) else plain


def _place(given: object) -> str:
    if isinstance(given, bool):
        raise ValueError(f"Cannot use offload={given}: name the place. Use offload='cpu'.")
    if name_of_place(given) not in NAMES_OF_HOST:
        raise ValueError(
            f"Cannot use offload={brief(given)}: offload is for host memory. Use offload='cpu'; for a disk, "
            "homes={'masters': 'disk:/fast', 'moments': 'disk:/fast'}."
        )
    return "host"


DISK = "disk:"  # and a directory


class StateHome(ConfigModel):
    """Where one kind of state lives, and how much of it; the rest is on the device."""

    prefix = "homes.*."

    home: Literal["device", "host", "disk"]
    path: str | None = None  # the directory of a disk
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    pinned: bool | None = None  # None: where that works

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, given: Any) -> Any:
        if isinstance(given, Offload):
            return {"home": "host", "ratio": given.ratio, "pinned": given.pinned}
        named = dict(given) if isinstance(given, Mapping) else {"home": given}
        for alias, ours in (("device", "home"), ("pin_memory", "pinned"), ("nvme_path", "path")):
            if alias in named:
                named[ours] = named.pop(alias)
        place = named.get("home")
        if isinstance(place, str) and place.lower().startswith(DISK):
            named["home"], named["path"] = "disk", place[len(DISK) :]
        else:
            named["home"] = _named_home(place)
        if named["home"] == "disk" and not named.get("path"):
            raise ValueError("Cannot keep state on disk: no directory is given. Say 'disk:/a/directory'.")
        if named.get("path") is not None:
            named["path"] = os.path.abspath(os.fspath(named["path"]))
        return named

    @property
    def place(self) -> str:
        """What the plan calls it."""
        return DISK + str(self.path) if self.home == "disk" else self.home


def _named_home(given: object) -> str:
    name = name_of_place(given)
    for ours, names in (("host", NAMES_OF_HOST), ("device", ("device", "none", None)), ("disk", ("disk", "nvme"))):
        if name in names:
            return ours
    raise ValueError(f"Cannot keep state in {brief(given)}: homes are 'device', 'cpu' and 'disk:/directory'. Say one.")


class Homes(ConfigModel):
    """Where each kind of state lives. None: where `offload` says."""

    prefix = "homes."
    no_such_setting = "the kinds of state are weights, gradients, masters and moments."

    @classmethod
    def all_settings(cls) -> str:
        return "Use homes={'masters': 'cpu', 'moments': 'cpu'}."

    weights: StateHome | None = None
    gradients: StateHome | None = None
    masters: StateHome | None = None
    moments: StateHome | None = None
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"  # that read and write each file
    piece_bytes: Literal["auto"] | Annotated[int, Field(ge=4096, multiple_of=4096), BeforeValidator(as_bytes)] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _of_known_kinds(cls, given: Any) -> Any:
        if isinstance(given, (str, StateHome)):
            raise ValueError(
                f"Cannot use homes={brief(given)}: each kind of state has its own. Give a dict "
                "of weights, gradients, masters, moments."
            )
        return given if given is not None else {}
