"""Makes the simulated device exist, once a process, at the first call that needs it; and changes it while it is up.

Functions import the parts that they need, so that asking whether the device could come up loads none of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace

from accelerators import selection
from accelerators_sim import torch_private

_lock = threading.Lock()
_libraries: list[object] = []  # a library's kernels go when it goes
_is_up = False


def why_not() -> str | None:
    """Returns why the device cannot come up here, or None. Changes nothing."""
    return None if _is_up else torch_private.why_not()


def is_up() -> bool:
    return _is_up


def bring_up() -> None:
    """Registers the device with torch, with the settings of the environment, or raises saying why it cannot be."""
    global _is_up
    if _is_up:
        return
    with _lock:
        if _is_up:
            return
        reason = torch_private.why_not()
        if reason is not None:
            raise RuntimeError(
                f"Cannot use the simulated device: {reason}. Use another accelerator, or another process."
            )
        _register()
        _is_up = True


def _register() -> None:
    from accelerators_sim import storage
    from accelerators_sim.current import current_device, engine_set_device, make_generators
    from accelerators_sim.lanes import lanes
    from accelerators_sim.module import DeviceModule
    from accelerators_sim.settings import read_settings, settings
    from accelerators_sim.streams import synchronize_device

    # The order matters: settings come before what they size, and the device type before kernels for it.
    settings.take(read_settings(os.environ))
    storage.accounts.extend(storage.Account(index) for index in range(settings.devices))
    lanes.start(settings.devices, settings.seed)
    make_generators(settings.devices)
    answers = torch_private.Answers(settings.devices, current_device, engine_set_device, synchronize_device)
    torch_private.register_device(DeviceModule(torch_private.NAME), answers)
    _register_kernels()
    if torch_private.has_process_groups():
        from accelerators_sim import group

        group.register()


def _register_kernels() -> None:
    from accelerators_sim import autocast, kernels, operators, pinned, saving

    fallbacks, aten = torch_private.new_library("_"), torch_private.new_library("aten")
    _libraries.extend((fallbacks, aten))
    fallbacks.fallback(operators.run, "PrivateUse1")
    for name, kernel in kernels.kernels().items():
        aten.impl(name, kernel, "PrivateUse1")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Warning only once for all operators"
        )  # the host's kernels are exchanged on purpose
        pinned.register(aten, fallbacks)
    autocast.register(aten, fallbacks)
    saving.register()


def configure(
    *, memory_bytes: int | None = None, order: str | None = None, races: bool | None = None, strict: bool | None = None
) -> None:
    """Changes settings of a device that is up, or brings it up with them. A setting that is None stays as it is."""
    from accelerators_sim.lanes import lanes
    from accelerators_sim.settings import parse_order, settings

    bring_up()
    new = replace(settings)
    if order is not None:
        new.order, new.seed = parse_order(order)
    if memory_bytes is not None:
        new.memory_bytes = memory_bytes
    new.races = settings.races if races is None else races
    new.strict = settings.strict if strict is None else strict
    lanes.run_all()  # no work of the old order may be half done when the new one begins
    settings.take(new)
    if order is not None:
        lanes.reseed(new.seed)


@contextlib.contextmanager
def without(*capabilities: str) -> Iterator[None]:
    """Takes capabilities away for the length of a `with`; for tests."""
    from accelerators_sim.capabilities import parse_capabilities
    from accelerators_sim.lanes import lanes
    from accelerators_sim.settings import settings

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
    from accelerators_sim import storage

    storage.forget_prototypes()
    if torch_private.has_process_groups():
        from accelerators_sim import group

        group.register()
    selection.get("sim").forget_answers()
