"""`deepspeed.utils.logging`: the logger of this library."""

from __future__ import annotations

import functools
import logging

from zero.compat.deepspeed.utils import log_dist as log_dist
from zero.compat.deepspeed.utils import logger as logger


@functools.lru_cache(None)
def warning_once(*args: str, **options: str) -> None:
    """Logs a warning the first time that it is given."""
    logger.warning(*args, **options)  # type: ignore[arg-type]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of this library's logger, or of another, by its name."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def should_log_le(max_log_level_str: str) -> bool:
    """Returns True where the logger lets messages of that level or a lower one through."""
    level: int = getattr(logging, max_log_level_str.upper())
    return logger.getEffectiveLevel() <= level
