"""The layer of experts."""

from __future__ import annotations

from zero.compat.deepspeed.absent import absent

MoE = absent("MoE")
