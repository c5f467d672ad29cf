"""The configuration of a training: one frozen object, checked once, before anything is built.

    config = ZeroConfig(stage=2, dtype="bfloat16", clip=1.0)
    config.clip                   # 1.0; it cannot be assigned to
    config.digest                 # equal exactly if all settings are, which ranks compare
    ZeroConfig(stage=2, clp=1.0)  # ValueError: Cannot use clp: zero.shard has no such option. Did you mean 'clip'? ...

`ZeroConfig` has every setting, with a sentence under each. The blocks that some settings consist of, as `Offload`, are in
blocks.py, with the words in which a mistake is told. `zero/config/deepspeed/reader.py` makes a `ZeroConfig` of a DeepSpeed
file. Dtypes are names ("bfloat16"): nothing here imports torch.

A new setting is a field of `ZeroConfig` and a row of docs/config.md; what it excludes is a row of `_no_impossible_pairs`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from zero.config.blocks import (
    Batch,
    BucketBytes,
    Bytes,
    Coded,
    ConfigModel,
    Count,
    Dtype,
    Half,
    Kernels,
    LossScale,
    Names,
    Offload,
    OnNonfinite,
    OptimizerSpec,
    Positive,
    Report,
    ScheduleSpec,
    StateHome,
    StateHomes,
    as_loss_scale,
    offload_in_our_words,
    read_bytes,
)
from zero.config.registry import FUSED_IN_TORCH

# All that a script needs to write a configuration is imported from here.
__all__ = [
    "Batch", "Coded", "LossScale", "Offload", "OptimizerSpec", "Report", "ScheduleSpec", "StateHome", "StateHomes",
    "ZeroConfig",
]  # fmt: skip

logger = logging.getLogger("zero")

PROPAGATES_FP16 = (
    "Cannot use on_nonfinite='propagate' with float16 weights: their gradients overflow now and then, and every weight would "
    "become NaN. Leave on_nonfinite out, which skips such steps, or use 'raise' to find out where they come from."
)


class ZeroConfig(ConfigModel):
    """All settings of `zero.shard` and `zero.initialize`. Equal objects have equal digests. docs/config.md explains each
    setting."""

    no_such_setting = "zero.shard has no such option."
    meaning_of_default: ClassVar[Mapping[str, str]] = {"clip": " to turn clipping off"}

    # what is sharded

    stage: Annotated[int, Field(ge=0, le=3)]
    """The states that are sharded: 0 none, 1 masters and moments, 2 gradients too, 3 weights too."""

    # precision

    dtype: Dtype | None = None
    """Casts floating parameters to it and keeps fp32 masters. None: parameters stay as they are."""
    keep_fp32: Names = ()
    """Patterns of names of modules or parameters that are not cast."""
    masters: Literal["exact", "rounded"] = "exact"
    """The start of masters: "exact" from the weights before the cast, "rounded" from those after it."""
    buffer_dtype: Dtype | None = None
    """Casts floating buffers to it."""
    keep_fp32_buffers: Names | None = None
    """Patterns of names of buffers that are not cast. None: those that a transformers model lists itself."""
    buffers: Literal["local", "broadcast"] = "local"
    """The buffers that ranks have: "local", each its own; "broadcast", those of rank 0 from every step on, as with DDP."""
    autocast: Half | None = None
    """The engine calls the model under torch.autocast with this dtype."""
    cast_inputs: bool = False
    """Casts floating inputs of the model's own forward to `dtype`. Default: True if `dtype` is given."""

    # where states live

    offload: Annotated[Offload | None, BeforeValidator(offload_in_our_words)] = None
    """Keeps masters, moments and gradients, at stage 3 weights too, on the host: "cpu", or an `Offload` block."""
    homes: StateHomes = StateHomes()
    """Homes of single kinds of state, if not where `offload` says: device, host or disk."""

    # memory, and what travels

    bucket_bytes: Literal["auto"] | BucketBytes = "auto"
    """Bytes that are reduced at once: a number, "16MiB", or "auto" (16 to 64 MiB, less over a network on the host)."""
    gathered_bytes: Literal["auto", "all"] | Bytes = "auto"
    """Stage 3: the most bytes of gathered weights on a device. "all" keeps them from forward to backward."""
    keep_whole_numel: Annotated[int, Field(ge=0)] = 0
    """Stage 3: parameters of up to this many elements are kept whole on every rank."""
    shard_ranks: Literal["host"] | Count | None = None
    """The number of consecutive ranks that share the states; other groups of as many have them too. None: all ranks."""
    shared_memory: bool = True
    """Ranks of one host exchange host tensors through shared memory, once they have proved that they can."""
    align_bytes: Annotated[int, Field(ge=16, le=4096), BeforeValidator(read_bytes)] = 64
    """Alignment of each parameter in its bucket: a power of two."""

    # sums of gradients

    reduce: Literal["mean", "sum"] | Positive = "mean"
    """The division of a sum over ranks: "mean", "sum" for none, or the number that it is divided by."""
    reduce_dtype: Dtype | Coded | None = None
    """Wider gradients are rounded to it before they travel; they are still summed in fp32. "int8" is not exact."""
    accumulation_dtype: Dtype = "float32"
    """The dtype that sums are added in. Only float32 is implemented."""
    predivide: Literal["world"] | Positive = 1.0
    """DeepSpeed's gradient_predivide_factor. Accepted without effect, as sums are fp32."""

    # a step

    clip: Positive | None = None
    """The largest global norm of the gradients of a step. None: no clipping."""
    accumulation: Count | None = None
    """The number of backwards of a step. An engine also divides the loss by it; `zero.shard` never does."""
    count_micro_steps: bool = True
    """`engine.step` counts micro-steps, and steps only after the last one of an accumulation."""
    on_nonfinite: OnNonfinite = "propagate"
    """The effect of a NaN or infinite gradient: "propagate" as in torch, "skip" the step, or "raise"."""
    check_weights_every: Count | None = None
    """All ranks compare their weights every so many steps. None: never."""
    on_unused: Literal["leave", "raise"] = "leave"
    """The effect on a parameter without a gradient on any rank: "leave" it as it is, or "raise"."""

    # how it is computed

    kernels: Kernels = "auto"
    """The kernels of a step: "torch", "fused", "compiled", or "auto", the fastest that all ranks have."""
    elementwise: bool | None = None
    """Says of an optimizer that is unknown here that it treats every element by itself."""
    whole_tensors: bool | None = None
    """Says that it looks at whole tensors, one at a time; each tensor then belongs to one rank."""

    # the ranks

    start: Literal["broadcast", "verify"] = "broadcast"
    """Construction: "broadcast" the weights of rank 0, or "verify" that all ranks have the same."""
    timeout_s: Positive = 60.0
    """Seconds that ranks wait for one of them before it is named and the training ends."""
    first_step_timeout_s: Positive = 1800.0
    """The same until the end of the first step, in which ranks may compile."""
    tensor_ranks: Count = 1
    """`zero.initialize`: ranks over which the model's own plan cuts its layers. They get the same samples."""
    expert_ranks: Count = 1
    """`zero.initialize`: ranks over which the model's own plan has its experts."""
    sequence_ranks: Count = 1
    """`ShardedTrainer`: ranks that have the parts of the same sequences."""

    # what an engine builds, and the loss scale

    drop_last: bool = False
    """A loader leaves out the last, smaller batch."""
    batch: Batch | None = None
    """Samples of a step and a micro-step, and how many of these make a step on how many ranks."""
    loss_scale: Annotated[LossScale | None, BeforeValidator(as_loss_scale)] = None
    """The loss scale of fp16: a fixed number, "dynamic", or a `LossScale` block."""
    optimizer: OptimizerSpec | None = None
    """The optimizer to build, by name and settings."""
    schedule: ScheduleSpec | None = None
    """The schedule of the learning rate to build, by name and settings."""
    report: Report = Report()
    """Records of a run: what is logged and written, how often, and where."""

    @classmethod
    def all_settings(cls) -> str:
        return "All options are in docs/config.md."

    @model_validator(mode="before")
    @classmethod
    def _accumulation_follows_the_batch(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("batch"), Batch) and given.get("accumulation") is None:
            return {**given, "accumulation": given["batch"].accumulation}
        return given

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow_from_others(cls, given: Any) -> Any:
        """Skips steps that are not finite if there is a loss scale, and casts inputs if weights are cast."""
        if not isinstance(given, Mapping):
            return given
        implied: dict[str, Any] = {"cast_inputs": True} if given.get("dtype") is not None else {}
        if given.get("loss_scale") is not None or given.get("dtype") == "float16":
            implied["on_nonfinite"] = "skip"
        return {**implied, **given}

    @model_validator(mode="after")
    def _no_impossible_pairs(self) -> ZeroConfig:
        scale, half = self.loss_scale, self.dtype in ("bfloat16", "float16")
        rules = (
            (self.batch is not None and self.accumulation != self.batch.accumulation,
             "Cannot use accumulation: the batch was counted with another number of micro-batches. Give one of the two"),
            (scale is not None and self.dtype == "bfloat16",
             "Cannot use loss_scale: bfloat16 has a range that needs none. Leave loss_scale out, or use float16"),
            (self.dtype == "float16" and self.on_nonfinite == "propagate", PROPAGATES_FP16),
            (scale is not None and scale.dynamic and self.on_nonfinite == "propagate",
             "Cannot use on_nonfinite='propagate': a dynamic loss scale moves only when steps are skipped. "
             "Use 'skip', 'raise' to find out where they come from, or a fixed scale"),
            (self.align_bytes & (self.align_bytes - 1) != 0,
             f"Cannot use align_bytes={self.align_bytes}: memory is aligned to powers of two. Use 16, 32, 64 or more"),
            (self.cast_inputs and self.dtype is None,
             "Cannot use cast_inputs=True: there is no dtype to cast them to. Give dtype"),
            (self.autocast is not None and half and self.autocast != self.dtype,
             "Cannot use autocast in another 16-bit dtype than the weights have. Use one dtype for both, or leave one out"),
            (self.predivide != 1.0 and self.reduce == "sum",
             "Cannot use predivide: reduce='sum' divides nothing. Leave predivide out, or reduce by mean"),
            (self.reduce_dtype in get_args(Coded) and self.stage == 0,
             f"Cannot use reduce_dtype={self.reduce_dtype!r} at stage 0: the backend takes its sums. Use stage 1, 2 or 3"),
            (self.kernels == "fused" and self.optimizer is not None and self.optimizer.kind not in FUSED_IN_TORCH,
             "Cannot use kernels='fused': torch has no fused kernel for this optimizer. Use kernels='torch'"),
            (bool(self.elementwise and self.whole_tensors), "Cannot use elementwise with whole_tensors. Give one of them"),
            (self.first_step_timeout_s < self.timeout_s,
             "Cannot use first_step_timeout_s shorter than timeout_s: the first step may compile. Make it at least as long"),
        )
        for broken, words in rules:
            if broken:
                raise ValueError(words)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the effective configuration as plain JSON values."""
        plain = self.model_dump(mode="json")
        for name in ("optimizer", "schedule"):
            if plain[name] is not None:
                plain[name]["settings"] = dict(plain[name]["settings"])
        return plain

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits, equal exactly if effective configurations are equal."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """Returns the effective configuration as lines `key=value`, each with its whole name."""
        return [f"{name}={value!r}" for name, value in _flat(self.as_dict())]

    def text(self) -> str:
        """Returns the effective configuration as lines `key = value`: plain settings first, then each group of settings."""
        lines, groups = [], []
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                groups += ["", f"[{name}]"]
                groups += [f"{key.removeprefix('settings.')} = {_shown(item)}" for key, item in _flat(value)]
            else:
                lines.append(f"{name} = {_shown(value)}")
        return "\n".join([*lines, *groups, "", f"digest = {self.digest}"]) + "\n"


def _flat(block: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in block.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return pairs


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# what is implemented --------------------------------------------------------------------------------------------------


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
        (config.tensor_ranks > 1, "tensor_ranks", "the model is cut before it is sharded"),
        (config.expert_ranks > 1, "expert_ranks", "the model is cut before it is sharded"),
    )  # fmt: skip
    _refuse(rules, "Leave it out, or train with zero.initialize.")
    check_whole_sequences(config)


def check_whole_sequences(config: ZeroConfig) -> None:
    """Refuses to cut sequences in a loop that makes its own batches."""
    rule = config.sequence_ranks > 1, "sequence_ranks", "this loop makes its own batches"
    _refuse((rule,), "Call zero.ulysses(mesh, model), and cut each batch by zero.sequence_batch; a ShardedTrainer does both.")


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
