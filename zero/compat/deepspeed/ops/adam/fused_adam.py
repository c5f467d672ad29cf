"""`deepspeed.ops.adam.fused_adam`: where DeepSpeed defines it."""

from __future__ import annotations

from zero.compat.deepspeed.ops.adam import FusedAdam as FusedAdam
