"""What the simulated device can be told to lack, one thing at a time, as real devices do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from accelerators.simulated.settings import parse_capabilities, settings

# What is missing when a capability is taken away.
CAPABILITIES = {
    "streams": "torch.sim.Stream and what goes with it; every copy blocks",
    "events": "torch.sim.Event",
    "pin": "pinned host memory; asking for it raises",
    "bf16": "bfloat16 tensors on the device; making one raises",
    "fp16": "float16 tensors on the device; making one raises",
    "fp64": "float64 tensors on the device; making one raises",
    "memory_figures": "torch.sim.memory_allocated, mem_get_info and the like",
    "rng": "torch.sim.get_rng_state, set_rng_state and manual_seed; random numbers come from the host's generator",
    "synchronize": "torch.sim.synchronize",
    "record_stream": "Tensor.record_stream; calling it raises",
    "avg": "ReduceOp.AVG in collectives",
    "reduce_scatter": "reduce_scatter in collectives, in every form",
    "coalesced": "coalesced collectives",
    "bf16_collectives": "collectives on bfloat16 tensors",
    "int64_gather": "all_gather of int64 tensors",
}

_DTYPE_OF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def lacks(capability: str) -> bool:
    return capability in settings.without


def check_dtype(dtype: torch.dtype) -> None:
    """Raises for a dtype that was taken away, as torch does on devices that never had it."""
    for capability in settings.without:
        if _DTYPE_OF.get(capability) is dtype:
            raise TypeError(
                f"A tensor of {dtype} was asked for on the simulated device, but it has no such numbers "
                f"(SIM_WITHOUT={capability}). Use a dtype that accelerators.current().supported_dtypes() lists."
            )


@contextlib.contextmanager
def without(*capabilities: str) -> Iterator[None]:
    """Takes capabilities away for the length of a `with`; for tests."""
    from accelerators.simulated.lanes import lanes
    from accelerators.simulated.start import bring_up

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
    """What was found out about the device while it could do more, or less, is asked anew."""
    import accelerators
    from accelerators.simulated import storage

    storage.forget_prototypes()
    accelerators.get("sim").forget_answers()
