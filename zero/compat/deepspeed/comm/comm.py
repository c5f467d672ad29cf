"""`deepspeed.comm.comm`: the same as `deepspeed.comm`."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed import comm


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
