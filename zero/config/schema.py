"""The configuration of a training: one frozen object, checked once, before anything is built.

    config = ZeroConfig(stage=2, dtype="bfloat16", clip=1.0)
    config.clip                   # 1.0; it cannot be assigned to
    config.digest                 # equal exactly if all settings are, which ranks compare
    ZeroConfig(stage=2, clp=1.0)  # ValueError: Cannot use clp: zero.shard has no such option. Did you mean 'clip'? ...

`ZeroConfig` has every setting, with a sentence under each. Before it stand the blocks that some settings consist of; after it
what is not implemented, and how a mistake is told. `zero/config/deepspeed/reader.py` makes a `ZeroConfig` of a DeepSpeed file.
Dtypes are names ("bfloat16"): nothing here imports torch.

A new setting is a field of `ZeroConfig` and a row of docs/config.md; what it excludes is a row of `_no_impossible_pairs`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

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
    did_you_mean,
)

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("zero")

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}{end}": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1) for end in ("", "b")}


def as_bytes(given: Any) -> Any:
    """Returns the number of `4GiB`, `1.5 GiB` or `500 MB` as `accelerators.memory` does; anything else unchanged."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", given.lower()) if isinstance(given, str) else None
    return given if match is None or match[2] not in _UNITS else int(Fraction(match[1]) * _UNITS[match[2]])


class ConfigModel(BaseModel):
    """A frozen group of settings. A mistake in it raises one ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    prefix: ClassVar[str] = ""  # errors begin the names of its settings with this
    no_such_setting: ClassVar[str] = "there is no such setting."
    meaning_of_default: ClassVar[Mapping[str, str]] = {}  # the end of a sentence on what a default means, by setting

    @classmethod
    def all_settings(cls) -> str:
        """Returns the sentence that says which settings there are."""
        return f"Use one of {', '.join(cls.model_fields)}."

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            # pydantic's own report is kept out of the traceback, as it says the same in more lines.
            raise ValueError("\n".join(_explain(type(self), error.errors()))) from None
        except TypeError as error:  # Python raises this, as a block within is called with its settings by name
            if "keywords must be strings" not in str(error):
                raise
            raise ValueError(
                f"Cannot make {type(self).__name__}: names of settings in a block are not strings. Give each as 'name': value."
            ) from None


# types of settings -----------------------------------------------------------------------------------------------------


Half = Literal["bfloat16", "float16"]
Kernels = Literal["auto", "torch", "fused", "compiled"]
Dtype = Literal["float32", "bfloat16", "float16"]
Coded = Literal["int8"]  # gradients travel as bytes; zero/window/narrowing.py has the code of each
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

# homes of states -------------------------------------------------------------------------------------------------------


NAMES_OF_HOST = ("cpu", "host")


class Offload(ConfigModel):
    """The place of masters, optimizer state and gradient shares if they are not on the accelerator, and how much of them is
    there."""

    prefix = "offload."

    home: Annotated[Literal["host"], BeforeValidator(lambda given: _place(given))] = "host"
    """The memory beside the accelerator: "host", or "cpu", which is the same. For a disk there is `homes`."""
    pinned: bool | None = None
    """Pins that memory, so that copies run beside the host's work. None: if it can be pinned."""
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The part of the states that is there; the rest stays on the accelerator."""
    step_in_backward: bool = False
    """One rank: masters are stepped on the host while backward goes on. Its weights cross the link meanwhile, and until `step`
    nothing but that may follow."""

    @classmethod
    def of(cls, given: object) -> Offload | None:
        """Makes one of a name such as "cpu", of a dict of ours or of DeepSpeed's, or returns what is one."""
        converted = offload_in_our_words(given)
        return cls(**converted) if isinstance(converted, dict) else converted


def offload_in_our_words(given: object) -> Offload | dict[str, Any] | None:
    """Returns `given` in the form of this library; None if nothing is offloaded."""
    if given is None or isinstance(given, Offload):
        return given
    named = dict(given) if isinstance(given, Mapping) else {"home": given}
    if "device" in named:
        named["home"] = named.pop("device")
    if "pin_memory" in named:
        named["pinned"] = named.pop("pin_memory")
    return None if name_of_place(named.get("home", "cpu")) in ("none", "None") else named


def name_of_place(place: object) -> object:
    """Returns the name of an enum's member or of a torch.device."""
    plain = getattr(place, "value", getattr(place, "type", place))
    return plain.strip().lower() if isinstance(plain, str) else plain


def _place(given: object) -> str:
    if isinstance(given, bool):
        raise ValueError(f"Cannot use offload={given}: name the place. Use offload={'cpu' if given else None!r}.")
    if name_of_place(given) not in NAMES_OF_HOST:
        raise ValueError(
            f"Cannot use offload={brief(given)}: offload is for host memory. Use offload='cpu'; for a disk, "
            "homes={'masters': 'disk:/fast', 'moments': 'disk:/fast'}."
        )
    return "host"


DISK = "disk:"  # a directory follows


class StateHome(ConfigModel):
    """The home of one kind of state, and how much of it lives there; the rest is on the device."""

    prefix = "homes.*."

    home: Literal["device", "host", "disk"]
    """The place; "disk:/directory" names a disk with its path."""
    path: str | None = None
    """The directory of a disk; None for other homes."""
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The part of this kind of state that is there; the rest stays on the device."""
    pinned: bool | None = None
    """Pins host memory. None: if it can be pinned."""

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, given: Any) -> Any:
        if isinstance(given, Offload):
            return {"home": "host", "ratio": given.ratio, "pinned": given.pinned}
        named = dict(given) if isinstance(given, Mapping) else {"home": given}
        for alias, ours in (("device", "home"), ("pin_memory", "pinned"), ("nvme_path", "path")):
            if alias in named:
                named[ours] = named.pop(alias)
        place = named.get("home")
        if isinstance(place, str) and place.lower().startswith(DISK):
            named["home"], named["path"] = "disk", place[len(DISK) :]
        else:
            named["home"] = _named_home(place)
        if named["home"] == "disk" and not named.get("path"):
            raise ValueError("Cannot keep state on disk: no directory is given. Say 'disk:/a/directory'.")
        if named.get("path") is not None:
            named["path"] = os.path.abspath(os.fspath(named["path"]))
        return named

    @property
    def place(self) -> str:
        """The name of the home in a plan."""
        return DISK + str(self.path) if self.home == "disk" else self.home


def _named_home(given: object) -> str:
    name = name_of_place(given)
    for ours, names in (("host", NAMES_OF_HOST), ("device", ("device", "none", None)), ("disk", ("disk", "nvme"))):
        if name in names:
            return ours
    raise ValueError(f"Cannot keep state in {brief(given)}: homes are 'device', 'cpu' and 'disk:/directory'. Say one.")


class StateHomes(ConfigModel):
    """The home of each kind of state. None: where `offload` says."""

    prefix = "homes."
    no_such_setting = "the kinds of state are weights, gradients, masters and moments."

    @classmethod
    def all_settings(cls) -> str:
        return "Use homes={'masters': 'cpu', 'moments': 'cpu'}."

    weights: StateHome | None = None
    """Weights; stages 0 to 2 keep them on the device."""
    gradients: StateHome | None = None
    """This rank's sums of gradients, between backward and step."""
    masters: StateHome | None = None
    """The fp32 copies of 16-bit weights, which the optimizer steps."""
    moments: StateHome | None = None
    """The optimizer's own state, such as the two moments of Adam."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Disks: the threads that read and write each file. "auto": as many as rank 0 finds fastest."""
    piece_bytes: Literal["auto"] | Annotated[int, Field(ge=4096, multiple_of=4096), BeforeValidator(as_bytes)] = "auto"
    """Disks: the bytes that a thread reads or writes at a time. "auto": as many as rank 0 finds fastest."""

    @model_validator(mode="before")
    @classmethod
    def _of_known_kinds(cls, given: Any) -> Any:
        if isinstance(given, (str, StateHome)):
            raise ValueError(
                f"Cannot use homes={brief(given)}: each kind of state has its own. Give a dict "
                "of weights, gradients, masters, moments."
            )
        return given if given is not None else {}


# precision, batch, optimizer and report -------------------------------------------------------------------------------


class LossScale(ConfigModel):
    """Scaling of the loss for fp16: fixed at `initial`, or moved up and down as gradients are finite or not."""

    prefix = "loss_scale."

    dynamic: bool = True
    """True moves the scale by the rules below; False leaves it at `initial`."""
    initial: Annotated[float, Field(gt=0, lt=2.0**128)] = 65536.0
    """The scale of the first step."""
    window: Count = 1000
    """So many finite steps in a row double the scale."""
    hysteresis: Count = 2
    """From the overflow of this number on each one halves the scale; those before it only skip their step."""
    refill_hysteresis: bool = False
    """True forgives as many overflows again after each finite step, False after each growth of the scale."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Finite steps at the start and after an overflow that `window` does not count."""
    minimum: Positive = 1.0
    """The scale never falls below it."""
    max_skips: Count = 100
    """So many skipped steps in a row are an error if the scale is fixed, or at its minimum."""

    @model_validator(mode="after")
    def _starts_above_its_floor(self) -> LossScale:
        if self.dynamic and self.initial < self.minimum:
            raise ValueError(f"Cannot start the loss scale at {self.initial:g}: its minimum is {self.minimum:g}. "
                             "Raise initial or lower minimum.")
        return self


def _as_loss_scale(given: Any) -> Any:
    """Makes a fixed scale of a number, and the default one of "dynamic"."""
    if given == "dynamic":
        return LossScale()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return LossScale(dynamic=False, initial=given)
    if given is not None and not isinstance(given, (LossScale, Mapping)):
        raise ValueError(f"Cannot use loss_scale={given!r}. Give a number for a fixed scale, 'dynamic', or a LossScale.")
    return given


class Batch(ConfigModel):
    """The number of samples of a step. `of` computes the size that was left out; global = micro x accumulation x ranks always
    holds."""

    prefix = "batch."

    global_samples: Count
    """Samples of a step, over all ranks."""
    micro_samples: Count
    """Samples of one backward of one rank."""
    accumulation: Count
    """Backwards of a rank that make a step."""
    world_size: Count
    """Ranks that have samples of their own."""

    @classmethod
    def of(cls, *, global_samples: int | None = None, micro_samples: int | None = None, accumulation: int | None = None,
           world_size: int = 1) -> Batch:
        """Makes a batch of any two of its three sizes, or of one without accumulation."""
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
    """Returns settings as sorted pairs: unlike a dict inside a frozen object, they cannot be changed and have one order."""
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
        """Makes the recipe of that name, in any case of letters."""
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
    """The settings of what a run logs and records while it trains."""

    prefix = "report."

    every_steps: Count | None = None
    """Rank 0 logs a line every so many steps. None: none, unless one of the two below is True, and then at each step."""
    wall_clock: bool = False
    """The line has the times of the phases of a step."""
    memory: bool = False
    """The line has what the device's memory holds."""
    tensorboard: str | None = None
    """The folder that records for TensorBoard are written to. None: there are none."""


# the whole ------------------------------------------------------------------------------------------------------------


class ZeroConfig(ConfigModel):
    """All settings of `zero.shard` and `zero.initialize`. Equal objects have equal digests. docs/config.md explains each
    setting."""

    no_such_setting = "zero.shard has no such option."
    meaning_of_default: ClassVar[Mapping[str, str]] = {"clip": " to turn clipping off"}

    stage: Annotated[int, Field(ge=0, le=3)]
    """The states that are sharded: 0 none, 1 masters and moments, 2 gradients too, 3 weights too."""
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
    offload: Annotated[Offload | None, BeforeValidator(offload_in_our_words)] = None
    """Keeps masters, moments and gradients, at stage 3 weights too, on the host: "cpu", or an `Offload` block."""
    homes: StateHomes = StateHomes()
    """Homes of single kinds of state, if not where `offload` says: device, host or disk."""
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
    align_bytes: Annotated[int, Field(ge=16, le=4096), BeforeValidator(as_bytes)] = 64
    """Alignment of each parameter in its bucket: a power of two."""
    reduce: Literal["mean", "sum"] | Positive = "mean"
    """The division of a sum over ranks: "mean", "sum" for none, or the number that it is divided by."""
    reduce_dtype: Dtype | Coded | None = None
    """Wider gradients are rounded to it before they travel; they are still summed in fp32. "int8" is not exact."""
    accumulation_dtype: Dtype = "float32"
    """The dtype that sums are added in. Only float32 is implemented."""
    predivide: Literal["world"] | Positive = 1.0
    """DeepSpeed's gradient_predivide_factor. Accepted without effect, as sums are fp32."""
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
    kernels: Kernels = "auto"
    """The kernels of a step: "torch", "fused", "compiled", or "auto", the fastest that all ranks have."""
    elementwise: bool | None = None
    """Says of an optimizer that is unknown here that it treats every element by itself."""
    whole_tensors: bool | None = None
    """Says that it looks at whole tensors, one at a time; each tensor then belongs to one rank."""
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
    drop_last: bool = False
    """A loader leaves out the last, smaller batch."""
    batch: Batch | None = None
    """Samples of a step and a micro-step, and how many of these make a step on how many ranks."""
    loss_scale: Annotated[LossScale | None, BeforeValidator(_as_loss_scale)] = None
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


# how a mistake is told ------------------------------------------------------------------------------------------------


def _explain(block: type[ConfigModel], problems: Sequence[Any]) -> list[str]:
    """Returns sentences that say what cannot be used, why, and what to do. What may be of several kinds has the problems of all
    in one sentence."""
    by_place: dict[str, list[Any]] = {}
    for problem in problems:
        place = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in block.model_fields)
        by_place.setdefault(place or str(problem["loc"]), []).append(problem)
    return [_sentence(block, place, together) for place, together in by_place.items()]


def _sentence(block: type[ConfigModel], place: str, problems: Sequence[Any]) -> str:
    first = problems[0]
    if first["type"] == "value_error":
        words = str(first["ctx"]["error"])
        return words if words.endswith((".", "?")) else words + "."
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        near = did_you_mean(name, block.model_fields)
        return f"Cannot use {block.prefix}{name}: {block.no_such_setting}{near} {block.all_settings()}"
    if first["type"] == "missing":
        return f"Cannot make {block.__name__}: {place!r} is missing and has no default. Give {place}=."
    bounds = [problem for problem in problems if problem["type"] in _BOUNDS]
    if bounds:
        (limit,) = (value for name, value in bounds[0]["ctx"].items() if name in ("gt", "ge", "lt", "le"))
        why = f"it must be {_BOUNDS[bounds[0]['type']]} {limit:g}"
    else:
        why = f"it takes {_either(_kind(place, problem) for problem in problems)}"
    choices = [choice for problem in problems for choice in re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))]
    remedy = did_you_mean(first["input"], choices, cutoff=0.5) if isinstance(first["input"], str) else ""
    return f"Cannot use {block.prefix}{place}={brief(first['input'])}: {why}.{remedy or ' ' + _remedy(block, place)}"


_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "True or False", "string": "a text", "finite": "a finite number",
    "tuple": "a list of texts",
}  # fmt: skip


def _kind(place: str, problem: Any) -> str:
    """Returns the words for the one kind that a value is not of."""
    if problem["type"] == "literal_error":
        return str(problem["ctx"]["expected"])
    kind = _KINDS.get(problem["type"].partition("_")[0])
    if kind is None:
        return str(problem["msg"]).removeprefix("Input should be ")
    return f"{kind} of bytes, such as '16MiB'," if place.endswith("_bytes") and kind == "a whole number" else kind


def _either(kinds: Iterable[str]) -> str:
    *others, last = dict.fromkeys(part for kind in kinds for part in re.split(" or |, (?=')", kind))
    return f"{', '.join(others)} or {last}".removesuffix(",") if others else last.removesuffix(",")


def _remedy(block: type[ConfigModel], place: str) -> str:
    field = block.model_fields.get(place)
    if field is None or field.is_required():
        return "Give a value that fits."
    return f"Use {block.prefix}{place}={field.default!r}{block.meaning_of_default.get(place, '')}."
