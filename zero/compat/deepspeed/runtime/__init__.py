"""`deepspeed.runtime`: its schedules of the learning rate, and names of states."""

from __future__ import annotations

from zero.compat.deepspeed.runtime import lr_schedules as lr_schedules
from zero.compat.deepspeed.runtime import zero as zero
