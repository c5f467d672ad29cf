"""`deepspeed.checkpoint`: the names that scripts import from it. The engine saves and loads checkpoints."""

from __future__ import annotations

from zero.compat.deepspeed.checkpoint import utils as utils
