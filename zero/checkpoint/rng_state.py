"""The random states of Python, NumPy and torch, on the host and on the device, so that a run goes on as if it had not ended."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from accelerators import Accelerator
from accelerators.interface import host_bytes
from zero.checkpoint.manifest import ANOTHER
from zero.checkpoint.values import decode, encode
from zero.errors import BadCheckpoint


def random_bytes(accelerator: Accelerator) -> torch.Tensor:
    """Returns the states of all generators of this process, as bytes."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": accelerator.rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # a program that did not import it draws nothing from it
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    text = json.dumps(encode(states, "random numbers"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def put_back(accelerator: Accelerator, saved: torch.Tensor) -> None:
    """Restores what `random_bytes` returned. If that cannot have returned it, raises, and all are as they were."""
    before = random_bytes(accelerator)
    try:
        _set(accelerator, decode(json.loads(bytes(host_bytes(saved)))))
    except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError) as error:
        _set(accelerator, decode(json.loads(bytes(host_bytes(before)))))
        raise BadCheckpoint(f"Cannot restore random numbers: {error!s:.200}. {ANOTHER}") from error


def _set(accelerator: Accelerator, states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    accelerator.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
