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

A file imports files of lower levels only, inside functions and for annotations too; this one loads each name when it is
first used.

| level | file             | what it is for                                                                               |
|-------|------------------|----------------------------------------------------------------------------------------------|
| 0     | torch_private.py | every private name of torch that is used                                                     |
| 0     | capabilities.py  | what the device can be told to lack                                                          |
| 1     | settings.py      | the switches, and the one object that says how they are set                                  |
| 1     | waits.py         | the line of the user's code that asks for work, and records of waits and launches            |
| 1     | plans.py         | what the schema of an operator says                                                          |
| 1     | autocast.py      | which operators `torch.autocast` runs in which dtype                                         |
| 2     | race.py          | the past of each block of memory, and what is a race                                         |
| 3     | lanes.py         | the queue of put-off work behind every stream, and what the host waited for                  |
| 4     | backward.py      | the lane of a backward node                                                                  |
| 4     | pinned.py        | pinned host memory, and the host's own reads and writes of it                                |
| 5     | current.py       | the current device and lane of a thread, and one random generator a device                   |
| 6     | storage.py       | the memory of the devices, and the tensors on it                                             |
| 6     | streams.py       | `torch.sim.Stream` and `torch.sim.Event`                                                     |
| 7     | calls.py         | one call of an operator: its arguments as the host takes them, its results as device tensors |
| 7     | copies.py        | copies between devices, and between device and host                                          |
| 7     | module.py        | `torch.sim`                                                                                  |
| 7     | saving.py        | new storages for `torch.save`, `torch.load` and `copy.deepcopy`                              |
| 8     | operators.py     | runs every operator that has no kernel of its own                                            |
| 8     | group.py         | the process group, an instance of the staged one, and what it tells the race detector        |
| 9     | kernels.py       | the operators that have a kernel of their own, as a table                                    |
| 10    | start.py         | registers all of it with torch, once a process, and changes it while it is up                |
| 11    | accelerator.py   | the device as an `Accelerator`                                                               |
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerators_sim.accelerator import SimulatedAccelerator as SimulatedAccelerator
    from accelerators_sim.capabilities import CAPABILITIES as CAPABILITIES
    from accelerators_sim.group import register as register_group
    from accelerators_sim.race import RaceError as RaceError
    from accelerators_sim.race import without_races as without_races
    from accelerators_sim.start import bring_up as bring_up
    from accelerators_sim.start import configure as configure
    from accelerators_sim.start import without as without
    from accelerators_sim.waits import recorded_waits as recorded_waits

_HOME = {
    "CAPABILITIES": ("capabilities", "CAPABILITIES"),
    "RaceError": ("race", "RaceError"),
    "SimulatedAccelerator": ("accelerator", "SimulatedAccelerator"),
    "bring_up": ("start", "bring_up"),
    "configure": ("start", "configure"),
    "recorded_waits": ("waits", "recorded_waits"),
    "register_group": ("group", "register"),
    "without": ("start", "without"),
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
        raise AttributeError(f"module 'accelerators_sim' has no attribute '{name}'. It has: {', '.join(__all__)}.")
    module, attribute = _HOME[name]
    return getattr(import_module(f"accelerators_sim.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
