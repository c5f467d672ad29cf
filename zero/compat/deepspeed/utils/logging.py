"""`deepspeed.utils.logging`: the logger of this library."""

from __future__ import annotations

import functools
import logging

from zero.compat.deepspeed.absent import rest_of
from zero.compat.deepspeed.utils import log_dist as log_dist
from zero.compat.deepspeed.utils import log_dist_once as log_dist_once
from zero.compat.deepspeed.utils import logger as logger
from zero.compat.deepspeed.utils import set_log_level_from_string as set_log_level_from_string

log_levels = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


@functools.lru_cache(None)
def warning_once(*args: str, **options: str) -> None:
    """Logs a warning the first time that it is given."""
    logger.warning(*args, **options)  # type: ignore[arg-type]


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level."""
    level: int = getattr(logging, log_level_str.upper())
    return level


def get_current_level() -> int:
    """The level of the logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Returns True where the logger lets messages of that level or a lower one through."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


__getattr__ = rest_of(__name__)
