"""`deepspeed.ops.lion.fused_lion`: where DeepSpeed defines it."""

from __future__ import annotations

from zero.compat.deepspeed.ops.lion import FusedLion as FusedLion
