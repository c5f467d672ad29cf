"""Which candidate is chosen, and which of its devices. Pure functions without memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelerators.launch import whole_number
from accelerators.registry import Candidate

logger = logging.getLogger("accelerators")


@dataclass(frozen=True)
class Request:
    """What the user asked for, and in which words, so that an error can repeat them."""

    name: str
    index: int | None
    asked: str


def parse_request(text: str, asked: str) -> Request | None:
    """`" CUDA:1 "` as cuda and 1; None where it names nothing."""
    name, colon, index = (part.strip() for part in text.lower().partition(":"))
    if not name and not colon:
        return None
    if not name or (colon and not index.isdecimal()):
        raise ValueError(f"Cannot use {asked}: it is neither a name nor name:index. Write it like cuda or cuda:1.")
    return Request(name, int(index) if colon else None, asked)


def requested_by(environment: Mapping[str, str]) -> Request | None:
    """ACCELERATOR, or DS_ACCELERATOR where that is unset; empty is unset."""
    for variable in ("ACCELERATOR", "DS_ACCELERATOR"):
        request = parse_request(environment.get(variable, ""), f"{variable}={environment.get(variable, '')}")
        if request is not None:
            return request
    return None


def choose(candidates: Iterable[Candidate]) -> Candidate:
    """Returns the first usable candidate. They are in the order of priority, and the CPU is always usable."""
    usable: list[Candidate] = []
    for candidate in candidates:
        if usable and candidate.priority < usable[0].priority:
            break  # nothing from here on can win, and what cannot win need not be tried
        if candidate.usable:
            usable.append(candidate)
    if len(usable) > 1:
        names = ", ".join(candidate.name for candidate in usable)
        logger.info("Accelerators %s have the same priority; %s is taken. Set ACCELERATOR to choose.", names, usable[0].name)
    return usable[0]


def check(candidate: Candidate, request: Request) -> None:
    """Raises unless the accelerator that is named can be used."""
    if candidate.reason is not None:
        raise ValueError(
            f"Cannot use {request.asked}: {candidate.reason}. "
            "Install what it needs, or use another: python -m accelerators shows which work here."
        ) from candidate.trial.cause


def choose_index(request: Request | None, environment: Mapping[str, str], device_count: int) -> int | None:
    """Which device this process should use; None leaves the current one as it is.

    An index that is named wins; then the launcher's LOCAL_RANK. A launcher that shows each rank its own device
    leaves one visible, whose index is 0 whatever the rank.
    """
    if request is not None and request.index is not None:
        if request.index >= device_count:
            visible = f"{device_count} {request.name} {'is' if device_count == 1 else 'are'} visible here"
            raise ValueError(
                f"Cannot use {request.asked}: {visible}. "
                f"Use {request.name}:0{f' to {request.name}:{device_count - 1}' if device_count > 1 else ''}."
            )
        return request.index
    local_rank = whole_number(environment, "LOCAL_RANK")
    if local_rank is None:
        return None
    if device_count == 1:
        return 0
    if local_rank >= device_count:
        raise ValueError(
            f"Cannot use LOCAL_RANK={local_rank}: only {device_count} devices are visible here. "
            "Start one rank a device, or show each rank one device of its own."
        )
    return local_rank
