"""Reads `zero=`: options of `zero.shard`, or a DeepSpeed configuration whose "auto" the framework's arguments answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero.config.deepspeed.mapping import Implied
from zero.config.deepspeed.reader import read_deepspeed, read_tree
from zero.config.schema import ZeroConfig
from zero.engine.parts import CutSizes

logger = logging.getLogger("zero")

Given = Mapping[str, Any] | str | os.PathLike[str]

# Settings that a framework decides itself; all others are options of `zero.shard`. The framework also handles steps that are
# not finite, as it would not know of a step that was skipped here.
_FRAMEWORKS_OWN = frozenset((
    "dtype", "autocast", "cast_inputs", "loss_scale", "on_nonfinite", "clip", "accumulation", "batch", "count_micro_steps",
    "drop_last", "optimizer", "schedule", "report", "buffers", "tensor_ranks", "expert_ranks",
    "sequence_ranks",
))  # fmt: skip
# Settings of these that a DeepSpeed file may have without effect, each with DeepSpeed's key.
_LEFT = {
    "drop_last": "dataloader_drop_last",
    "count_micro_steps": "managed_gradient_accumulation",
    "report": "steps_per_print, wall_clock_breakdown, memory_breakdown or tensorboard",
}
# DeepSpeed's keys for what a framework decides, each with the field of Implied that has the framework's value.
_DECIDED = {
    "gradient_clipping": "clip",
    "gradient_accumulation_steps": "accumulation",
    "train_micro_batch_size_per_gpu": "micro_samples",
    "train_batch_size": "global_samples",
}


@dataclass(frozen=True)
class Framework:
    """The arguments of a framework: what they imply for a configuration, and their names, by the field of `Implied`."""

    name: str
    implied: Implied
    words: Mapping[str, str] = field(default_factory=dict)
    builds: bool = False  # the framework builds the optimizer and schedule of the configuration, and cuts the model as it says


def sizes_of(given: Given) -> CutSizes:
    """Returns the numbers of ranks over which a DeepSpeed configuration cuts a model by its plan in transformers."""
    return CutSizes(1, 1) if isinstance(given, Mapping) and "stage" in given else CutSizes.of(given)


def sequence_ranks_of(given: Given) -> int:
    """Returns how many ranks have the parts of the same sequences. What is wrong with a file is said when it is read."""
    is_plain = isinstance(given, Mapping) and "stage" in given
    size = given.get("sequence_ranks") if is_plain else read_tree(given).get("sequence_parallel_size")  # type: ignore[union-attr]
    return size if isinstance(size, int) and size > 1 else 1


def check_ddp(given: Mapping[str, Any], hook: object = None, averaging: object = None) -> None:
    """Refuses what was asked of DistributedDataParallel, which wraps nothing here, and changes results; warns of what has no
    effect. `given` are its arguments, but for its hook and the period of model averaging."""
    if hook:
        raise ValueError(
            f"Cannot use a communication hook of DistributedDataParallel ({hook}): nothing is wrapped in it. Leave it out, and "
            "use zero={'reduce_dtype': 'bfloat16'} or 'int8' for fewer bytes."
        )
    if averaging:
        raise ValueError(f"Cannot use model_averaging_period={averaging}: gradients are averaged at each step. Leave it out.")
    if given.get("bucket_cap_mb") is not None:
        logger.warning("bucket_cap_mb of DistributedDataParallel has no effect here. Use zero={'bucket_bytes': ...}.")


@dataclass(frozen=True)
class Options:
    """The options for `zero.shard`, and the configuration that they were read from; None if they were passed as options."""

    shard: dict[str, Any]
    config: ZeroConfig | None = None


def read_options(given: Given, framework: Framework) -> Options:
    """Reads a mapping with a stage as options; any other mapping, and a path, as a DeepSpeed configuration. Raises where that
    and the framework's arguments contradict each other."""
    if isinstance(given, Mapping) and "stage" in given:
        return Options({name: value for name, value in given.items() if name != "sequence_ranks"})
    tree, implied = read_tree(given), framework.implied
    for path, name in _DECIDED.items():
        if tree.get(path) == "auto" and getattr(implied, name) is None:
            del tree[path]  # the loop decides, and no other code reads it
    if tree.get("gradient_clipping") is None:
        tree["gradient_clipping"] = 0 if implied.clip is None else "auto"  # the loop clips, or nobody does
    config = read_deepspeed(tree, implied)
    wrong = [*_differing(tree, config, framework), *_not_built(tree, config, framework)]
    if wrong:
        raise ValueError(
            f"Cannot use this DeepSpeed configuration under {framework.name}: {'; '.join(wrong)}. Change these settings."
        )
    plain = ZeroConfig(stage=config.stage)
    for name, keys in _LEFT.items():
        if getattr(config, name) != getattr(plain, name):
            logger.info("%s has no effect in a configuration file: %s does this itself", keys, framework.name)
    options = {name: getattr(config, name) for name in ZeroConfig.model_fields if name not in _FRAMEWORKS_OWN}
    if config.dtype == "bfloat16":
        options["dtype"] = config.dtype
    if implied.clip is None:
        options["clip"] = config.clip
    return Options(options, config)


def _differing(tree: Mapping[str, Any], config: ZeroConfig, framework: Framework) -> list[str]:
    implied, batch = framework.implied, config.batch
    values = {
        "clip": config.clip or 0.0,
        "accumulation": config.accumulation,
        "micro_samples": None if batch is None else batch.micro_samples,
        "global_samples": None if batch is None else batch.global_samples,
    }
    differences = []
    for path, name in _DECIDED.items():
        value, decided = values[name], getattr(implied, name)
        if tree.get(path) is not None and decided is not None and value != decided:
            word = framework.words.get(name, name)
            differences.append(f'{path} is {value}, but {word} makes it {decided} (write "auto", or change one of them)')
    if config.dtype == "float16" and implied.dtype != "float16":
        word = framework.words.get("dtype", "its precision")
        differences.append(f"fp16.enabled is true, which is the framework's to do (set {word} to fp16)")
    if config.autocast is not None:
        word = framework.words.get("dtype", "its precision")
        differences.append(f"torch_autocast.enabled is true, but autocast is the framework's (set {word} instead)")
    return differences


def _not_built(tree: Mapping[str, Any], config: ZeroConfig, framework: Framework) -> list[str]:
    if framework.builds:
        return []
    blocks = {"optimizer": config.optimizer, "scheduler": config.schedule}
    wrong = [f"it has the block {name!r}, but the loop makes its own (take it out)" for name, spec in blocks.items() if spec]
    if config.sequence_ranks > 1:
        wrong.append("sequence_parallel_size cuts batches, but the loop makes its own (take it out, and call zero.ulysses and "
                     "zero.sequence_batch)")  # fmt: skip
    if config.tensor_ranks > 1 or config.expert_ranks > 1:
        wrong.append("autotp_size or autoep_size cuts a model, but the loop makes its own (take it out, and load the model "
                     "with from_pretrained(distributed_config=...), or cut it by torch's parallelize_module)")  # fmt: skip
    return wrong
