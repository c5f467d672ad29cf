"""Which settings of a configuration are implemented. Others are refused here, with the reason."""

from __future__ import annotations

import logging
from typing import get_args

from zero.config.schema import Coded, Report, ZeroConfig

logger = logging.getLogger("zero")


def check_supported(config: ZeroConfig) -> None:
    """Refuses settings that are not implemented, before anything is built."""
    rules = (
        (config.accumulation_dtype != "float32", f"accumulation_dtype={config.accumulation_dtype!r}",
         "gradients are always added up in float32"),
    )  # fmt: skip
    _refuse(rules, "Take it out of the configuration.")
    for reason in _of_another_result(config):
        logger.info("%s", reason)


def check_plain_loop(config: ZeroConfig) -> None:
    """Refuses settings that only an engine implements: a plain loop calls the model and its schedule itself."""
    why = "a plain loop does that itself"
    rules = (
        (config.autocast is not None, "autocast", why),
        (config.optimizer is not None, "optimizer", "shard steps with the optimizer that was passed"),
        (config.schedule is not None, "schedule", why),
        (config.drop_last, "drop_last", why),
        (config.batch is not None, "batch", "a plain loop makes its own batches; accumulation= says how many make a step"),
        (not config.count_micro_steps, "count_micro_steps", "every step of a plain loop steps"),
        (config.report != Report(), "report", why),
    )  # fmt: skip
    _refuse(rules, "Leave it out, or train with zero.initialize.")


def _refuse(rules: tuple[tuple[bool, str, str], ...], remedy: str) -> None:
    for asked, what, why in rules:
        if asked:
            raise ValueError(f"Cannot use {what}: {why}. {remedy}")


def _of_another_result(config: ZeroConfig) -> list[str]:
    """Returns remarks on settings that make training differ from plain training."""
    messages = []
    if config.reduce_dtype in get_args(Coded):
        messages.append(f"gradients travel as {config.reduce_dtype}: training is near to plain training, and not equal to it")
        if config.shard_ranks is not None:
            messages.append("they do so inside each group of shard_ranks; across groups their sums are float32")
    elif config.reduce_dtype is not None:
        messages.append(f"gradients wider than {config.reduce_dtype} are rounded to it and travel so; all are added in float32")
    return messages
