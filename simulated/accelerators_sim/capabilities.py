"""The capabilities that the simulated device can be told to lack, one at a time, as real devices do."""

from __future__ import annotations

from collections.abc import Collection

import torch

# By capability: the parts that are missing when it is taken away.
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
    "group": "a process group of its own; torch.distributed has no backend for the device",
    "avg": "ReduceOp.AVG in collectives",
    "reduce_scatter": "reduce_scatter in collectives, in every form",
    "coalesced": "coalesced collectives",
    "bf16_collectives": "collectives on bfloat16 tensors",
    "int64_gather": "all_gather of int64 tensors",
}

_DTYPE_OF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def parse_capabilities(text: str) -> frozenset[str]:
    """Reads `streams, pin` as a set of names."""
    names = frozenset(name.strip().lower() for name in text.split(",") if name.strip())
    if unknown := sorted(names - set(CAPABILITIES)):
        raise ValueError(
            f"Cannot set SIM_WITHOUT={text}: the device has no capability {', '.join(unknown)}. "
            f"Take away some of {', '.join(CAPABILITIES)}."
        )
    return names


def check_dtype(dtype: torch.dtype, without: Collection[str]) -> None:
    """Raises if a dtype was taken away, as torch does on devices that never had it."""
    for capability in without:
        if _DTYPE_OF.get(capability) is dtype:
            raise TypeError(
                f"Cannot make a tensor of {dtype}: the simulated device has no such numbers (SIM_WITHOUT={capability}). "
                "Use a dtype that accelerators.current().supported_dtypes() lists."
            )
