"""`deepspeed.runtime`: its schedules of the learning rate, its functions for scripts, and names of states."""

from __future__ import annotations

from zero.compat.deepspeed.runtime import engine as engine
from zero.compat.deepspeed.runtime import lr_schedules as lr_schedules
from zero.compat.deepspeed.runtime import utils as utils
from zero.compat.deepspeed.runtime import zero as zero
