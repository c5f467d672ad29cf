"""What every rank of the pool in tests.ranks has from the start: its fork server imports this, and runs no operator by it."""

# ruff: noqa: F401
import contextlib

import pytest
import torch._dynamo  # what the first optimizer of a process imports, in three seconds
import torch.distributed

import zero.engine.initialize
from zero.runtime.kernels.native import passes

with contextlib.suppress(RuntimeError):  # without a compiler; a test that needs one says so
    passes()
