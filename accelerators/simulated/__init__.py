"""A whole torch device in pure Python, for testing and trying: `torch.device("sim")`, on host memory.

    ACCELERATOR=sim python train.py         # or accelerators.use("sim")

It has real storages and views, several devices with a memory size that they enforce, streams whose work is done
as late as the rules allow, and a detector that raises `RaceError` where two accesses are ordered by nothing.

| variable              | meaning                                                                       | default |
|-----------------------|-------------------------------------------------------------------------------|---------|
| `SIM_DEVICES`         | how many devices there are                                                    | 2       |
| `SIM_VISIBLE_DEVICES` | which of them this process sees, as in `0,1`                                  | all     |
| `SIM_MEMORY`          | bytes of each, as in `16GiB`                                                  | 16GiB   |
| `SIM_WITHOUT`         | capabilities taken away, as in `streams,pin` (all names: capabilities.py)     | none    |
| `SIM_ORDER`           | when put-off work runs: `late`, `random:SEED`, or `eager` (nothing is put off) | late    |
| `SIM_RACES`           | `0` switches the race detector off                                            | 1       |
| `SIM_STRICT`          | `1`: non_blocking copies of pageable host memory are put off too              | 0       |

Importing this package touches nothing. The device comes up at the first real call on `SimulatedAccelerator`, or with
`bring_up()`; torch has room for one such device a process, and counts devices at the first backward: it must be up by then.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerators.simulated.accelerator import SimulatedAccelerator as SimulatedAccelerator
    from accelerators.simulated.capabilities import CAPABILITIES as CAPABILITIES
    from accelerators.simulated.changes import configure as configure
    from accelerators.simulated.changes import without as without
    from accelerators.simulated.group import register as register_group
    from accelerators.simulated.race import RaceError as RaceError
    from accelerators.simulated.race import without_races as without_races
    from accelerators.simulated.start import bring_up as bring_up
    from accelerators.simulated.waits import recorded_waits as recorded_waits

_HOME = {
    "CAPABILITIES": ("capabilities", "CAPABILITIES"),
    "RaceError": ("race", "RaceError"),
    "SimulatedAccelerator": ("accelerator", "SimulatedAccelerator"),
    "bring_up": ("start", "bring_up"),
    "configure": ("changes", "configure"),
    "recorded_waits": ("waits", "recorded_waits"),
    "register_group": ("group", "register"),
    "without": ("changes", "without"),
    "without_races": ("race", "without_races"),
}

__all__ = [
    "CAPABILITIES",
    "RaceError",
    "SimulatedAccelerator",
    "bring_up",
    "configure",
    "recorded_waits",
    "register_group",
    "without",
    "without_races",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'accelerators.simulated' has no attribute '{name}'. It has: {', '.join(__all__)}.")
    module, attribute = _HOME[name]
    return getattr(import_module(f"accelerators.simulated.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
