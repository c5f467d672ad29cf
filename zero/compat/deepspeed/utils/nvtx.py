"""`deepspeed.utils.nvtx`: the decorator that marks functions for a profiler."""

from __future__ import annotations

from zero.compat.deepspeed.utils import instrument_w_nvtx as instrument_w_nvtx
