"""What every rank of the pool in tests.ranks has from the start: its fork server imports this, and runs no operator by it."""

# ruff: noqa: E402, F401
import contextlib
import gc
import os
import weakref
from datetime import timedelta
from functools import cache
from typing import Any

gc.disable()  # what imports make stays, and would be walked through again and again

import psutil
import pytest
import torch._dynamo  # what the first optimizer of a process imports, in three seconds
import torch._inductor.compile_fx  # and what the first compiled function does, in one
import torch.distributed.tensor.debug  # what a rank imports after its first call, as it forgets meshes

import accelerators.backends.cpu
import accelerators.staged.group
import tests.nccl_like  # with the simulated device, which is not up, and with named faults
import tests.promises.trainings  # with the zoo, the oracle and what they import
import zero.comm.torch_group
import zero.engine.initialize
from zero.runtime.kernels.native import passes

with contextlib.suppress(RuntimeError):  # without a compiler; a test that needs one says so
    passes()

torch_gloo = torch.distributed.ProcessGroupGloo


@cache
def device_of(process: int, interface: str | None) -> Any:
    """Returns the connections of a process, with the thread that looks after them, which no fork has."""
    return torch_gloo.create_device(interface=interface) if interface else torch_gloo.create_default_device()


class GlooOnOneDevice(torch_gloo):
    """A process group of gloo whose connections one thread of the process looks after, as those of all its groups.

    Torch gives each group a thread. A training has half a dozen groups: their threads look a hundred times a second whether
    they have to do, and each is waited for when its group ends. That was a fifth of the time of tests with ranks. Hosts of
    tests/hosts.py, and ranks that a command of ours starts, have torch's own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = torch_gloo._Options()
        options._devices = [device_of(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))]
        options._timeout, options._threads = timeout, 2  # as torch has it
        super().__init__(store, rank, size, options)


torch.distributed.distributed_c10d.ProcessGroupGloo = GlooOnOneDevice

# As a process ends, torch would take its own operators back one by one, a twentieth of a second.
for finalizer in list(weakref.finalize._registry):
    if finalizer.peek()[1] is torch.library._del_library:
        finalizer.atexit = False

gc.freeze()
gc.enable()
