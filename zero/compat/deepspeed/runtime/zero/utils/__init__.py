"""`deepspeed.runtime.zero.utils`: whether a parameter is one of DeepSpeed's."""

from __future__ import annotations

from typing import Any

from zero.compat.deepspeed.absent import rest_of


def is_zero_param(parameter: Any) -> bool:
    """False: no parameter has what DeepSpeed writes on its own, and `numel()` is that of the whole wherever it is asked."""
    return False


__getattr__ = rest_of(__name__)
