"""`deepspeed.ops.adam.cpu_adam`: where DeepSpeed defines it."""

from __future__ import annotations

from zero.compat.deepspeed.ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
