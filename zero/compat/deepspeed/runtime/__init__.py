"""`deepspeed.runtime`: its schedules of the learning rate."""

from __future__ import annotations

from zero.compat.deepspeed.runtime import lr_schedules as lr_schedules
