"""The configuration of a training: one frozen object, checked once, before anything is built.

Dtypes are names ("bfloat16"): nothing here imports torch. `zero/config/deepspeed/reader.py` makes one of a DeepSpeed file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from zero.config.base import ConfigModel
from zero.config.homes import NAMES_OF_HOST as NAMES_OF_HOST
from zero.config.homes import Homes, offload_in_our_words
from zero.config.homes import Offload as Offload
from zero.config.homes import name_of_place as name_of_place
from zero.config.registry import (
    FUSED_IN_TORCH,
    OPTIMIZERS,
    OPTIMIZERS_REFUSED,
    SCHEDULES,
    Setting,
    Value,
    brief,
    canonical,
    complete,
)
from zero.config.sizes import as_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

Half = Literal["bfloat16", "float16"]
Kernels = Literal["auto", "torch", "fused", "compiled"]
Dtype = Literal["float32", "bfloat16", "float16"]
Coded = Literal["int8"]  # what gradients travel in as bytes; zero/window/narrowing.py has the code of each
OnNonfinite = Literal["skip", "raise", "propagate"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]
Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0), BeforeValidator(as_bytes)]
BucketBytes = Annotated[int, Field(ge=1), BeforeValidator(as_bytes)]
Positive = Annotated[float, Field(gt=0)]


PROPAGATES_FP16 = (
    "Cannot use on_nonfinite='propagate' with float16 weights: their gradients overflow now and then, and every weight would "
    "become NaN. Leave on_nonfinite out, which skips such steps, or use 'raise' to find out where they come from."
)


class LossScale(ConfigModel):
    """Scaling of the loss for fp16: fixed at `initial`, or moved up and down as gradients are finite or not."""

    prefix = "loss_scale."

    dynamic: bool = True
    initial: Annotated[float, Field(gt=0, lt=2.0**128)] = 65536.0
    window: Count = 1000
    hysteresis: Count = 2
    refill_hysteresis: bool = False
    cooldown: Annotated[int, Field(ge=0)] = 0  # finite steps at the start and after an overflow that the window does not count
    minimum: Positive = 1.0
    max_skips: Count = 100

    @model_validator(mode="after")
    def _starts_above_its_floor(self) -> LossScale:
        if self.dynamic and self.initial < self.minimum:
            raise ValueError(f"Cannot start the loss scale at {self.initial:g}: its minimum is {self.minimum:g}. "
                             "Raise initial or lower minimum.")
        return self


def _as_loss_scale(given: Any) -> Any:
    """A number is a fixed scale, and "dynamic" the default one."""
    if given == "dynamic":
        return LossScale()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return LossScale(dynamic=False, initial=given)
    if given is not None and not isinstance(given, (LossScale, Mapping)):
        raise ValueError(f"Cannot use loss_scale={given!r}. Give a number for a fixed scale, 'dynamic', or a LossScale.")
    return given


class Batch(ConfigModel):
    """The number of samples of a step. `of` computes the one that was left out; global = micro x accumulation x ranks always
    holds."""

    prefix = "batch."

    global_samples: Count
    micro_samples: Count
    accumulation: Count
    world_size: Count

    @classmethod
    def of(cls, *, global_samples: int | None = None, micro_samples: int | None = None, accumulation: int | None = None,
           world_size: int = 1) -> Batch:
        """A batch from any two of its three sizes, or from one without accumulation."""
        given = {"global_samples": global_samples, "micro_samples": micro_samples, "accumulation": accumulation}
        sizes = {**given, "world_size": world_size}
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"Cannot make a batch with {name}={brief(size)}: a size is a whole number from 1 up. "
                                 f"Give a positive {name}.")
        if global_samples is None and micro_samples is None:
            raise ValueError(f"Cannot make a batch: of its sizes only accumulation={accumulation} is known. "
                             "Give global_samples or micro_samples.")
        if accumulation is None and (global_samples is None or micro_samples is None):
            accumulation = 1
        if micro_samples is None:
            assert global_samples is not None and accumulation is not None
            micro_samples = _divided("global_samples", global_samples, accumulation=accumulation, world_size=world_size)
        elif accumulation is None:
            assert global_samples is not None
            accumulation = _divided("global_samples", global_samples, micro_samples=micro_samples, world_size=world_size)
        assert accumulation is not None
        if global_samples is None:
            global_samples = micro_samples * accumulation * world_size
        return cls(global_samples=global_samples, micro_samples=micro_samples, accumulation=accumulation, world_size=world_size)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Batch:
        product = self.micro_samples * self.accumulation * self.world_size
        if product != self.global_samples:
            raise ValueError(
                f"Cannot use {self.global_samples} samples a step: {self.micro_samples} samples x {self.accumulation} "
                f"micro-batches x {self.world_size} ranks make {product}. Change one of them, or leave one out.")
        return self


def _divided(name: str, total: int, **factors: int) -> int:
    product = 1
    for factor in factors.values():
        product *= factor
    if total % product:
        terms = " x ".join(f"{factor_name}={factor}" for factor_name, factor in factors.items())
        raise ValueError(f"Cannot use {name}={total}: it is not a multiple of {terms} = {product}. "
                         f"Choose a multiple, for example {max(1, round(total / product)) * product}.")
    return total // product


def _pairs(given: object) -> object:
    """Settings as sorted pairs: unlike a dict inside a frozen object, they cannot be changed and have one order."""
    if isinstance(given, Mapping):
        return tuple(sorted((str(name), tuple(v) if isinstance(v, list) else v) for name, v in given.items()))
    return given


Settings = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_pairs)]


class Recipe(ConfigModel):
    """Something to build, by name, with all its settings; those not given take the defaults of `zero/config/registry.py`."""

    what: ClassVar[str]
    known: ClassVar[Mapping[str, Mapping[str, Setting]]]
    refused: ClassVar[Mapping[str, str]] = {}

    kind: str
    settings: Settings = ()

    @classmethod
    def of(cls, kind: str, settings: Mapping[str, object] | None = None) -> Self:
        """The recipe of that name, in any case of letters."""
        return cls(kind=kind, settings=settings or {})  # type: ignore[arg-type]

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kind = canonical(given.get("kind"), cls.known, cls.refused, cls.what)
        return {**given, "kind": kind, "settings": complete(kind, cls.known[kind], dict(given.get("settings") or {}))}

    @property
    def kwargs(self) -> dict[str, Value]:
        """The settings as keyword arguments; a new dict each time."""
        return dict(self.settings)


class OptimizerSpec(Recipe):
    """An optimizer by name."""

    what, known, refused = "optimizer", OPTIMIZERS, OPTIMIZERS_REFUSED


class ScheduleSpec(Recipe):
    """A learning rate schedule by name."""

    what, known = "schedule", SCHEDULES


class Report(ConfigModel):
    """What a run logs and records while it trains."""

    prefix = "report."

    every_steps: Count | None = None
    wall_clock: bool = False
    memory: bool = False
    tensorboard: str | None = None  # a folder


class ZeroConfig(ConfigModel):
    """All settings of `zero.shard` and `zero.initialize`. Equal objects have equal digests. docs/config.md explains each
    setting."""

    no_such_setting = "zero.shard has no such option."
    meaning_of_default: ClassVar[Mapping[str, str]] = {"clip": " to turn clipping off"}

    stage: Annotated[int, Field(ge=0, le=3)]
    dtype: Dtype | None = None
    keep_fp32: Names = ()
    masters: Literal["exact", "rounded"] = "exact"  # from the weights before they were cast, or after
    buffer_dtype: Dtype | None = None  # what floating buffers are cast to
    keep_fp32_buffers: Names | None = None  # those that are not; None: what the model lists itself, as transformers' do
    buffers: Literal["local", "broadcast"] = "local"  # each rank's own, or rank 0's from every step on
    autocast: Half | None = None
    cast_inputs: bool = False  # floating inputs of the model's forward to `dtype`; True where that is given
    offload: Annotated[Offload | None, BeforeValidator(offload_in_our_words)] = None
    homes: Homes = Homes()  # of kinds of state that have others than `offload` says
    bucket_bytes: Literal["auto"] | BucketBytes = "auto"  # 16 to 64 MiB, and less for host tensors that go over a network
    gathered_bytes: Literal["auto", "all"] | Bytes = "auto"  # of whole weights on a device at stage 3
    keep_whole_numel: Annotated[int, Field(ge=0)] = 0  # elements up to which a parameter is never in shares there
    shard_ranks: Literal["host"] | Count | None = None  # that states are in shares of, and replicated beyond; None: all
    shared_memory: bool = True  # between ranks of one host that prove they can; False: ordinary collectives
    align_bytes: Annotated[int, Field(ge=16, le=4096), BeforeValidator(as_bytes)] = 64
    reduce: Literal["mean", "sum"] | Positive = "mean"
    reduce_dtype: Dtype | Coded | None = None  # what wider gradients are rounded to before they travel; sums are fp32
    accumulation_dtype: Dtype = "float32"
    predivide: Literal["world"] | Positive = 1.0
    clip: Positive | None = None
    accumulation: Count | None = None
    count_micro_steps: bool = True
    on_nonfinite: OnNonfinite = "propagate"
    check_weights_every: Count | None = None  # so many steps, all ranks compare their weights
    on_unused: Literal["leave", "raise"] = "leave"
    kernels: Kernels = "auto"  # the fastest that all ranks have and that gives the optimizer's own results to rounding
    elementwise: bool | None = None  # what an optimizer is that nothing is known of: it treats every element by itself
    whole_tensors: bool | None = None  # or it looks at whole tensors, one at a time
    start: Literal["broadcast", "verify"] = "broadcast"
    timeout_s: Positive = 60.0
    first_step_timeout_s: Positive = 1800.0
    drop_last: bool = False
    batch: Batch | None = None
    loss_scale: Annotated[LossScale | None, BeforeValidator(_as_loss_scale)] = None
    optimizer: OptimizerSpec | None = None
    schedule: ScheduleSpec | None = None
    report: Report = Report()

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
        """The effective configuration as plain JSON values."""
        plain = self.model_dump(mode="json")
        for name in ("optimizer", "schedule"):
            if plain[name] is not None:
                plain[name]["settings"] = dict(plain[name]["settings"])
        return plain

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits, equal exactly where effective configurations are equal."""
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
