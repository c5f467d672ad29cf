"""`deepspeed.moe`: experts are not split over ranks here, and what a script imports from it says so when it is used."""

from __future__ import annotations

from zero.compat.deepspeed.moe import layer as layer
from zero.compat.deepspeed.moe import utils as utils
