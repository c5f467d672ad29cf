"""The blocks that some settings of a `ZeroConfig` consist of, the types of settings, and how a mistake in any of them is told.

    Offload(home="cpu", ratio=0.5).ratio  # 0.5
    Offload.of({"device": "cpu", "pin_memory": True})  # as DeepSpeed writes it
    LossScale(windw=100)  # ValueError: Cannot use loss_scale.windw: there is no such setting. Did you mean 'window'? ...

Every block is a `ConfigModel`: frozen, and strict about types. Each setting has its type, its default, and a sentence under it.
Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from accelerators.memory import parse_bytes
from zero.config.registry import (
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


def read_bytes(given: Any) -> Any:
    """Returns the number of bytes that a text such as `1.5 GiB` or `500 MB` stands for; anything else unchanged, so that the
    check of its setting refuses it."""
    try:
        return parse_bytes(given) if isinstance(given, str) else given
    except ValueError:
        return given


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
Bytes = Annotated[int, Field(ge=0), BeforeValidator(read_bytes)]
BucketBytes = Annotated[int, Field(ge=1), BeforeValidator(read_bytes)]
Positive = Annotated[float, Field(gt=0)]


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
    piece_bytes: Literal["auto"] | Annotated[int, Field(ge=4096, multiple_of=4096), BeforeValidator(read_bytes)] = "auto"
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


def as_loss_scale(given: Any) -> Any:
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
