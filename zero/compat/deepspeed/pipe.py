"""`deepspeed.pipe`: there is no pipeline here, and what a script imports from it says so when it is used."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of

__getattr__ = rest_of("zero.compat.deepspeed.runtime.pipe")
