"""What every rank of the pool in tests.ranks has from the start: its fork server imports this, and runs no operator by it."""

# ruff: noqa: E402, F401
import contextlib
import gc

gc.disable()  # what imports make stays, and would be walked through again and again

import pytest
import torch._dynamo  # what the first optimizer of a process imports, in three seconds
import torch._inductor.compile_fx  # and what the first compiled function does, in one
import torch.distributed

import tests.promises.trainings  # with the zoo, the oracle and what they import
import zero.comm.torch_group
import zero.engine.initialize
from zero.runtime.kernels.native import passes

with contextlib.suppress(RuntimeError):  # without a compiler; a test that needs one says so
    passes()

gc.freeze()
gc.enable()
