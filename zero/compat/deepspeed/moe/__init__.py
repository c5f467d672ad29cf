"""`deepspeed.moe`: experts are not split over ranks here, and what a script imports from it says so when it is used."""

from __future__ import annotations

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.moe import layer as layer
from zero.compat.deepspeed.moe import utils as utils

__getattr__ = rest_of(__name__, has_modules=True)
