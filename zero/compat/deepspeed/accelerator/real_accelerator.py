"""`deepspeed.accelerator.real_accelerator`: which accelerator there is."""

from __future__ import annotations

from zero.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from zero.compat.deepspeed.accelerator import set_accelerator as set_accelerator
