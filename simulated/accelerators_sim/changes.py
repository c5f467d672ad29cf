"""Changes to the device while it is up: other settings, and capabilities taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from accelerators import selection
from accelerators_sim import group, storage, torch_private
from accelerators_sim.capabilities import parse_capabilities
from accelerators_sim.lanes import lanes
from accelerators_sim.settings import parse_order, settings
from accelerators_sim.start import bring_up


def configure(
    *, memory_bytes: int | None = None, order: str | None = None, races: bool | None = None, strict: bool | None = None
) -> None:
    """Changes settings of a device that is up, or brings it up with them. A setting that is None stays as it is."""
    bring_up()
    new = replace(settings)
    if order is not None:
        new.order, new.seed = parse_order(order)
    if memory_bytes is not None:
        new.memory_bytes = memory_bytes
    new.races = settings.races if races is None else races
    new.strict = settings.strict if strict is None else strict
    lanes.run_all()  # what was put off under the old order is not to meet the new one half done
    settings.take(new)
    if order is not None:
        lanes.reseed(new.seed)


@contextlib.contextmanager
def without(*capabilities: str) -> Iterator[None]:
    """Takes capabilities away for the length of a `with`; for tests."""
    bring_up()
    before = settings.without
    wanted = before | parse_capabilities(",".join(capabilities))
    lanes.run_all()  # work on side streams is done before the streams go
    settings.without = wanted
    _forget_answers()
    try:
        yield
    finally:
        try:
            lanes.run_all()
        finally:
            settings.without = before
            _forget_answers()


def _forget_answers() -> None:
    """Makes everything that depends on the device's capabilities ask for them anew."""
    storage.forget_prototypes()
    if torch_private.has_process_groups():
        group.register()
    selection.get("sim").forget_answers()
