"""`deepspeed.utils.logging`: the logger of this library."""

from __future__ import annotations

from zero.compat.deepspeed.utils import log_dist as log_dist
from zero.compat.deepspeed.utils import logger as logger
