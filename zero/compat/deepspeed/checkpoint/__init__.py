"""`deepspeed.checkpoint`: what scripts take of it. Checkpoints themselves are the engine's."""

from __future__ import annotations

from zero.compat.deepspeed.checkpoint import utils as utils
