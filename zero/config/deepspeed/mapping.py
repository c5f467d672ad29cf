"""Makes a ZeroConfig of the used keys of a DeepSpeed configuration, and of what the call implies.

`Written` checks each key as it is read, and collects all problems; `meaning` reads each key in exactly one place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from zero.config.blocks import (
    Batch,
    Coded,
    Dtype,
    Half,
    Kernels,
    LossScale,
    Offload,
    OnNonfinite,
    OptimizerSpec,
    Report,
    ScheduleSpec,
    StateHome,
    StateHomes,
    read_bytes,
)
from zero.config.deepspeed.keys import AUTO
from zero.config.registry import OPTIMIZERS, OPTIMIZERS_REFUSED, brief, canonical, did_you_mean, real, whole
from zero.config.schema import ZeroConfig

T = TypeVar("T")
Spec = TypeVar("Spec", OptimizerSpec, ScheduleSpec)

CLIP = 1.0  # DeepSpeed's default norm, at every stage and in every precision
# 2 to this power is the largest power of two that is a finite fp32 number.
_MAX_SCALE_POWER = 127
_HALVES: dict[str, Half] = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}
_DTYPES: dict[str, Dtype] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **_HALVES,
}
_WIRE_DTYPES = {name: _DTYPES[name] for name in ("fp32", "fp16", "bf16")}
# ITEM_BYTES of zero/plan/layout.py has them too. Neither room may import the other, and a test compares what comes of them.
_ITEM_BYTES = {None: 4, "float32": 4, "float16": 2, "bfloat16": 2}
# These stand for values that nothing implies, so that the rest of their block can be checked too.
_STAND_INS: dict[str, Any] = {"betas": (0.9, 0.999)}


@dataclass(frozen=True)
class Implied:
    """The values that the rest of the call implies for keys that are "auto", and of an Adam that was passed. None: it implies
    nothing."""

    world_size: int = 1
    global_samples: int | None = None
    micro_samples: int | None = None
    accumulation: int | None = None
    dtype: str | None = None
    clip: float | None = None
    bucket_numel: int | None = 4 * 2**20
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    warmup_min_lr: float | None = 0.0
    warmup_steps: int | None = None
    total_steps: int | None = None
    adam_moments: str | None = None  # the dtype of its moments


class Written:
    """The used keys that are written, by path, each checked when it is read; null counts as not written. If one is wrong, the
    problem is noted and its default is used, so that all problems are found."""

    def __init__(self, values: Mapping[str, Any], implied: Implied) -> None:
        self._values = {path: value for path, value in values.items() if value is not None}
        self.implied = implied
        self.problems: list[str] = []
        self.notices: list[str] = []  # messages to the author of the file
        self.unanswered: dict[str, str | None] = {}

    def tried(self, read: Callable[[Written], T], default: T) -> T:
        """Returns what `read` makes of this. If that raises, the problem is noted and the default is returned."""
        try:
            return read(self)
        except _UnansweredError:
            pass
        except ValueError as error:
            for problem in str(error).split("\n"):
                self.note(problem)
        return default

    def note(self, problem: str) -> None:
        """Notes a problem."""
        if problem not in self.problems:
            self.problems.append(problem)

    def tell(self, path: str, notice: str) -> None:
        """Tells the author of the file how a key is taken."""
        self.notices.append(f"{path}: {notice}")

    def check(self) -> None:
        """Raises with all problems that were noted."""
        if self.problems or self.unanswered:
            raise ConfigProblems(self.problems, self.unanswered)

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def value(self, path: str) -> Any:
        """Returns what was written, or what the call implies for "auto"."""
        return self.resolved(path, self._values[path])

    def resolved(self, path: str, value: Any) -> Any:
        if value != "auto":
            return value
        answer = getattr(self.implied, AUTO[path]) if path in AUTO else None
        if answer is None:
            self.note_unanswered(path)
            raise _UnansweredError(path)
        return answer

    def note_unanswered(self, path: str) -> None:
        """Notes that this key is "auto", and a value is needed that nothing implies."""
        self.unanswered[path] = AUTO.get(path)

    def answered(self, path: str) -> bool:
        """Returns True if there is a value: one is written, or it is "auto" and the call implies one."""
        return path in self and (self._values[path] != "auto" or getattr(self.implied, AUTO[path], None) is not None)

    def _checked(self, path: str, check: Callable[[Any], T], default: T) -> T:
        return self.tried(lambda _: check(self.value(path)), default) if path in self else default

    def flag(self, path: str, default: bool = False) -> bool:
        return self._checked(path, partial(flag, path), default)

    def mode(self, path: str, dtype: str) -> bool:
        """Returns True if a precision block is on; "auto" is answered by the dtype that the call implies."""
        if path in self and self._values[path] == "auto":
            return bool(self.value(path) == dtype)
        return self.flag(path)

    def whole(self, path: str, default: int, least: int, most: int | None = None) -> int:
        def check(value: Any) -> int:
            number = whole(path, value)
            if number < least or (most is not None and number > most):
                limits = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"Cannot use {path} {brief(number)}: it has to be {limits}. Write another whole number.")
            return number

        return self._checked(path, check, default)

    def bytes_or(self, path: str, words: tuple[str, ...]) -> int | str:
        """Returns a number of bytes or one of these words, the first if nothing was written."""
        given = read_bytes(self._values.get(path, words[0]))
        if isinstance(given, str) and given in words:
            return given
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            self.note(f"Cannot use {path}={brief(given)}: that is not a size. Write bytes, 4GiB or {' or '.join(words)}.")
            return words[0]
        return given

    def size(self, path: str) -> int | None:
        return self.whole(path, 1, least=1) if path in self else None

    def real(self, path: str, default: float, *, zero_too: bool = True) -> float:
        def check(value: Any) -> float:
            number = real(path, value)
            if number < 0 or (number == 0 and not zero_too):
                raise ValueError(f"Cannot use {path} {brief(number)}: it has to be {'at least' if zero_too else 'above'} 0. "
                                 "Write a larger number.")
            return number

        return self._checked(path, check, default)

    def choice(self, path: str, choices: Mapping[str, T], default: T) -> T:
        def check(value: Any) -> T:
            if not isinstance(value, str) or value.lower() not in choices:
                raise ValueError(f"Cannot use {path} {brief(value)}: it has to be one of {', '.join(choices)}."
                                 f"{did_you_mean(value, choices) or ' Write one of them.'}")
            return choices[value.lower()]

        return self._checked(path, check, default)

    def params(self, path: str) -> dict[str, Any]:
        block = self._values.get(path, {})
        if not isinstance(block, dict):
            raise ValueError(f"Cannot use {path} {brief(block)}: it has to be a block of settings. Write {{...}}.")
        return {name: self._param(path, name, value) for name, value in block.items()}

    def _param(self, path: str, name: str, value: Any) -> Any:
        try:
            return self.resolved(f"{path}.{name}", value)
        except _UnansweredError:
            return _STAND_INS.get(name, 1)

    def names(self, path: str) -> tuple[str, ...] | None:
        """Returns a list of texts; None if nothing was written, or "auto"."""
        value = self._values.get(path)
        if value is None or value == "auto":
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"Cannot use {path} {brief(value)}: it has to be a list of names. Write [...] or \"auto\".")
        return tuple(value)


class ConfigProblems(ValueError):
    """The collection of all that is wrong with one configuration. `unanswered` are the keys that are "auto" if nothing in the
    call implies a value, each with the name of the argument that would."""

    def __init__(self, messages: list[str], unanswered: Mapping[str, str | None]) -> None:
        self.unanswered = dict(unanswered)
        problems = [*messages, *([_about_auto(self.unanswered)] if unanswered else [])]
        if len(problems) > 1:
            numbered = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
            problems = [f"Cannot use the DeepSpeed configuration: it has {len(problems)} problems.{numbered}"]
        super().__init__(problems[0])


def _about_auto(unanswered: Mapping[str, str | None]) -> str:
    named = [path if name is None else f"{path} ({name})" for path, name in unanswered.items()]
    if len(named) == 1:
        [(path, name)] = unanswered.items()
        answer = "" if name is None else f" ({name})"
        return f'{path} is "auto", but nothing in the call implies a value for it{answer}. Write the value.'
    return f'These keys are "auto", but nothing in the call implies values for them: {", ".join(named)}. Write the values.'


class _UnansweredError(ValueError):
    """A key is "auto", and nothing in the call implies a value for it."""


def flag(name: str, value: object) -> bool:
    """Returns True or False, which may be written as 1 or 0. Raises for anything else."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"Cannot use {name} {brief(value)}: it has to be true or false. Write one of these.")


def meaning(written: Written, problems: Sequence[str] = ()) -> ZeroConfig:
    """Returns the configuration that the written keys ask for. Each key is read in exactly one place below. All problems are
    raised together: those of the stage, which decides about others, then those found before, then the rest."""
    tried = written.tried
    stage = written.whole("zero_optimization.stage", 0, least=0, most=3)
    written.problems += problems
    dtype = tried(_dtype, None)
    autocast = _autocast(written)
    if autocast is not None and dtype is not None and autocast != dtype:
        block = "fp16" if dtype == "float16" else "bf16"
        written.problems.append(
            f"torch_autocast.enabled and {block}.enabled are both true, but torch_autocast.dtype is {autocast}. Write {dtype} "
            "there, or turn one of them off."
        )
    no_optimizer: tuple[OptimizerSpec | None, Kernels] = (None, "auto")
    no_batch: tuple[int | None, Batch | None] = (None, None)
    optimizer, kernels = tried(_optimizer, no_optimizer)
    accumulation, batch = tried(_batch, no_batch)
    clip = written.real("gradient_clipping", CLIP)
    scale = tried(lambda _: _loss_scale(written, dtype, autocast), None)
    checks = written.flag("bf16.check_grad_overflow", True) and dtype == "bfloat16"
    leaves = written.flag("zero_optimization.ignore_unused_parameters", True)
    settings: dict[str, Any] = {
        "stage": stage,
        "dtype": dtype,
        "masters": _masters(written),
        "buffer_dtype": written.choice("data_types.buffer_dtype", _DTYPES, None),
        "keep_fp32_buffers": tried(lambda _: written.names("data_types.keep_in_fp32_modules"), None),
        "autocast": autocast,
        "cast_inputs": dtype == "float16" and written.flag("fp16.auto_cast"),
        "offload": tried(lambda _: _offload(written, stage), None),
        "homes": tried(lambda _: _homes(written, stage), StateHomes()),
        "bucket_bytes": _bucket_bytes(written, dtype),
        "gathered_bytes": written.bytes_or("zero_accelerators.gathered_bytes", ("auto", "all")),
        "keep_whole_numel": written.whole("zero_accelerators.keep_whole_numel", 0, least=0),
        "shard_ranks": tried(_shard_ranks, None),
        "reduce": _reduce(written),
        "reduce_dtype": tried(lambda _: _reduce_dtype(written, stage), None),
        "clip": clip or None,
        "accumulation": accumulation,
        "count_micro_steps": written.flag("managed_gradient_accumulation", True),
        **_on_nonfinite(written, checks),
        "on_unused": "leave" if leaves else "raise",
        "kernels": written.choice("zero_accelerators.kernels", {name: name for name in get_args(Kernels)}, kernels),
        "elementwise": written.flag("zero_allow_untested_optimizer") or None,
        "tensor_ranks": tensor_ranks(written),
        "expert_ranks": expert_ranks(written),
        "sequence_ranks": written.whole("sequence_parallel_size", 1, least=1),
        "drop_last": written.flag("dataloader_drop_last"),
        "batch": batch,
        "loss_scale": scale,
        "optimizer": optimizer,
        "schedule": tried(_schedule, None),
        "report": tried(_report, Report()),
    }
    written.check()
    return ZeroConfig(**settings)


def tensor_ranks(written: Written) -> int:
    """Returns over how many ranks layers lie."""
    return max(written.whole("tensor_parallel.autotp_size", 1, least=0), 1)


def expert_ranks(written: Written) -> int:
    """Returns over how many ranks experts lie."""
    size = written.whole("expert_parallel.autoep_size", 1, least=1)
    return size if written.flag("expert_parallel.enabled") else 1


def _masters(written: Written) -> Literal["exact", "rounded"]:
    choices: dict[str, Literal["exact", "rounded"]] = {"exact": "exact", "rounded": "rounded"}
    return written.choice("zero_accelerators.masters", choices, "exact")


def _on_nonfinite(written: Written, skips: bool) -> dict[str, OnNonfinite]:
    """Returns the setting, unless it is the one that the precision implies."""
    path, choices = "zero_accelerators.on_nonfinite", {name: name for name in get_args(OnNonfinite)}
    if path in written:
        return {"on_nonfinite": written.choice(path, choices, "skip")}
    return {"on_nonfinite": "skip"} if skips else {}


def _dtype(written: Written) -> Half | None:
    half, brain = written.mode("fp16.enabled", "float16"), written.mode("bf16.enabled", "bfloat16")
    if half and brain:
        raise ValueError("Cannot use fp16.enabled with bf16.enabled: weights have one dtype. Turn one of them off.")
    dtype: Half | None = "float16" if half else "bfloat16" if brain else None
    path = "data_types.param_dtype"
    asked = written.choice(path, _DTYPES, dtype or "float32")
    if asked != (dtype or "float32"):
        raise ValueError(f"Cannot use {path} {asked}: fp16.enabled and bf16.enabled make it {dtype or 'float32'}. "
                         f"Turn on the block that fits, or take {path} out.")
    return dtype


def _reduce(written: Written) -> Literal["mean", "sum"]:
    operations: dict[str, Literal["mean", "sum"]] = {"mean": "mean", "sum": "sum"}
    return written.choice("gradient_allreduce_op", operations, "mean")


def _reduce_dtype(written: Written, stage: int) -> Dtype | Coded | None:
    key = "zero_optimization.zero_quantized_gradients"
    if not written.flag(key):
        return written.choice("communication_data_type", _WIRE_DTYPES, None)
    if stage == 0:
        raise ValueError(f"Cannot use {key} at stage 0: its sums are taken by the backend. Use another stage, or turn it off.")
    return "int8"


def _autocast(written: Written) -> Half | None:
    dtype = written.choice("torch_autocast.dtype", _HALVES, "bfloat16")
    return dtype if written.flag("torch_autocast.enabled") else None


def _loss_scale(written: Written, dtype: str | None, autocast: str | None) -> LossScale | None:
    if dtype is None and autocast == "float16":
        # DeepSpeed has no block for it, so the scale is that of torch.amp.GradScaler by default.
        return LossScale(window=2000, hysteresis=1)
    if dtype != "float16":
        return None
    fixed = written.real("fp16.loss_scale", 0.0)
    if fixed:
        return LossScale(dynamic=False, initial=fixed)
    initial = 2.0 ** written.whole("fp16.initial_scale_power", 16, least=0, most=_MAX_SCALE_POWER)
    minimum = written.real("fp16.min_loss_scale", 1.0, zero_too=False)
    if initial < minimum:
        written.note(f"Cannot start the loss scale at {initial:g} (fp16.initial_scale_power): fp16.min_loss_scale is "
                     f"{minimum:g}. Raise fp16.initial_scale_power, or lower fp16.min_loss_scale.")
    return LossScale(
        initial=max(initial, minimum),
        window=written.whole("fp16.loss_scale_window", 1000, least=1),
        hysteresis=written.whole("fp16.hysteresis", 2, least=1),
        refill_hysteresis=written.flag("fp16.consecutive_hysteresis"),
        cooldown=1,  # DeepSpeed's window is one finite step longer at the start and after an overflow
        minimum=minimum,
    )


def _offload(written: Written, stage: int) -> Offload | None:
    device, old = "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload"
    if device in written and old in written:
        raise ValueError(f"Cannot use {old} with {device}: the one replaces the other. Keep {device}.")
    home = written.choice(device, {"none": None, "cpu": "host", "nvme": "disk"}, "host" if written.flag(old) else None)
    if home is None and stage == 3 and _offloads_weights(written):
        path = _PARAM_DEVICE if _PARAM_DEVICE in written else "zero_optimization.cpu_offload_param"
        written.tell(path, "masters and moments are on the host too, as they are stepped where their weights are")
        home = "host"
    pin = "zero_optimization.offload_optimizer.pin_memory"
    pinned = written.flag(pin) if pin in written else None
    ratio = written.real("zero_optimization.offload_optimizer.ratio", 1.0)
    return Offload(pinned=pinned, ratio=ratio) if home == "host" else None


def _homes(written: Written, stage: int) -> StateHomes:
    """Returns a disk for masters and moments, and the host or a disk for weights."""
    homes: dict[str, Any] = {}
    ratio = written.real("zero_optimization.offload_optimizer.ratio", 1.0)
    disk = _directory(written, "zero_optimization.offload_optimizer")
    if disk is not None:
        homes = dict.fromkeys(("masters", "moments"), StateHome(home="disk", path=disk, ratio=ratio))
    if stage == 3 and _offloads_weights(written):  # weights are offloaded by the same ratio as their masters
        disk = _directory(written, "zero_optimization.offload_param")
        homes["weights"] = StateHome(home="host" if disk is None else "disk", path=disk, ratio=ratio)
    return StateHomes(**homes)


def _directory(written: Written, block: str) -> str | None:
    """Returns the directory of a disk, where a block says so."""
    if not written.choice(f"{block}.device", {"none": False, "cpu": False, "nvme": True}, False):
        return None
    path = written.value(f"{block}.nvme_path") if f"{block}.nvme_path" in written else None
    if not isinstance(path, str) or not path:
        raise ValueError(f"Cannot use {block}.device 'nvme' without nvme_path. Write a directory of that disk there.")
    return path


_PARAM_DEVICE = "zero_optimization.offload_param.device"


def _offloads_weights(written: Written) -> bool:
    old = written.flag("zero_optimization.cpu_offload_param")
    return written.choice(_PARAM_DEVICE, {"none": False, "cpu": True, "nvme": True}, old)


def _shard_ranks(written: Written) -> int | Literal["host"] | None:
    hpz, mics = "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"
    key = "zero_accelerators.shard_ranks"
    sizes: dict[str, int | Literal["host"]] = {}
    if key in written and written.value(key) == "host":
        sizes[key] = "host"
    elif key in written:
        sizes[key] = written.whole(key, 1, least=1)
    for path, off in ((hpz, 1), (mics, 0)):  # each with the value that asks for nothing
        size = written.whole(path, off, least=0 if path == hpz else -1)
        if size > off:
            sizes[path] = size
    if len(set(sizes.values())) > 1:
        settings = ", ".join(f"{path} {size}" for path, size in sizes.items())
        raise ValueError(f"Cannot use {settings}: they say how many ranks share the states, and differ. Keep {key}.")
    return next(iter(sizes.values()), None)


def _bucket_bytes(written: Written, dtype: str | None) -> int | Literal["auto"]:
    path = "zero_optimization.reduce_bucket_size"
    if path not in written:
        return "auto"
    # DeepSpeed counts a bucket in elements, and we count it in bytes of the weights' dtype.
    return written.whole(path, 1, least=1) * _ITEM_BYTES[dtype]


def _batch(written: Written) -> tuple[int | None, Batch | None]:
    keys = {"global_samples": "train_batch_size", "micro_samples": "train_micro_batch_size_per_gpu",
            "accumulation": "gradient_accumulation_steps"}
    sizes = {name: written.size(path) if written.answered(path) else None for name, path in keys.items()}
    known = {name for name, size in sizes.items() if size is not None}
    needed = []  # the sizes that neither the call nor the other sizes answer
    if not {"global_samples", "accumulation"} <= known:
        needed.append("micro_samples")
    if not {"global_samples", "micro_samples"} <= known:
        needed.append("accumulation")
    if keys["micro_samples"] not in written:
        needed.append("global_samples")
    for name in needed:
        if sizes[name] is None and keys[name] in written:
            written.note_unanswered(keys[name])
    if sizes["global_samples"] is None and sizes["micro_samples"] is None:
        return sizes["accumulation"], None
    try:
        batch = Batch.of(**sizes, world_size=written.implied.world_size)
    except ValueError as error:
        words = str(error)
        for name, path in keys.items():
            words = words.replace(name, path)
        raise ValueError(words) from None
    return batch.accumulation, batch


def _optimizer(written: Written) -> tuple[OptimizerSpec | None, Kernels]:
    params = written.params("optimizer.params")
    if "optimizer.type" not in written:
        _narrow_moments(written, None)
        if params:
            raise ValueError("Cannot use optimizer.params without optimizer.type. Give optimizer.type too.")
        return None, "auto"
    kind = canonical(written.value("optimizer.type"), OPTIMIZERS, OPTIMIZERS_REFUSED, "optimizer")
    if params.pop("max_grad_norm", None) is not None:
        written.note("Cannot use optimizer.params.max_grad_norm: an optimizer does not clip. Write gradient_clipping instead.")
    plain_kernel = False
    if kind in ("Adam", "AdamW"):
        kind, plain_kernel = _adam(written, kind, params)
    is_adam, narrow = kind in ("Adam", "AdamW"), _narrow_moments(written, kind)
    names = ("fp32_optimizer_states", "bias_correction", "set_grad_none")
    flags = {name: _flag_in(written, params, name, True) for name in names}
    for name, is_on in flags.items():
        served = (is_adam and name == "bias_correction") or (narrow and name == "fp32_optimizer_states")
        if not is_on and not served:
            written.note(f"Cannot use optimizer.params.{name}=false: only true is supported here. Take it out.")
    corrected = flags["bias_correction"]
    if is_adam and (narrow or not corrected):
        params = {name: value for name, value in params.items() if value is not False and value is not None}
        params |= {"decoupled": kind == "AdamW", "bias_correction": corrected, "moments": "bfloat16" if narrow else None}
        kind = "PlainAdam"
    spec = _spec(OptimizerSpec, "optimizer", kind, params)
    return spec, "torch" if plain_kernel or spec.kwargs.get("foreach") is not None else "auto"


def _narrow_moments(written: Written, kind: Any) -> bool:
    """Returns True if moments are in bf16, as they may be if an Adam steps in memory."""
    asked, device = "bf16.bf16_optimizer_states", "zero_optimization.offload_optimizer.device"
    if not written.flag(asked):
        return False
    is_adam, passed = kind in ("Adam", "AdamW"), written.implied.adam_moments
    if (device in written and written.value(device) == "nvme") or not (is_adam or passed):
        written.tell(asked, "moments are float32 on a disk, and of other optimizers than Adam and AdamW, which is more exact")
        return False
    if passed == "float32":
        written.note(
            f"Cannot use {asked} with the Adam that was passed: its moments are float32. Name it in the file as optimizer.type "
            "instead, or pass DeepSpeedCPUAdam(..., fp32_optimizer_states=False) of zero.compat.deepspeed."
        )
    return is_adam


def _flag_in(written: Written, params: dict[str, Any], name: str, default: bool) -> bool:
    """Takes a parameter of the optimizer out, and returns it as a flag."""
    value = params.pop(name, default)
    return written.tried(lambda _: flag(f"optimizer.params.{name}", value), default)


def _spec(make: type[Spec], block: str, kind: Any, params: dict[str, Any]) -> Spec:
    """Makes the recipe of an optimizer or a schedule. Its errors name the keys as they are written."""
    try:
        return make.of(kind, params)
    except ValueError as error:
        raise ValueError(re.sub(r"^Cannot use \w+\.", f"Cannot use {block}.params.", str(error), flags=re.MULTILINE)) from None


def _adam(written: Written, kind: str, params: dict[str, Any]) -> tuple[str, bool]:
    """Returns the kind of DeepSpeed's Adam, which is AdamW unless the file says otherwise, and whether it takes torch's plain
    kernel."""
    torchs, decoupled = _flag_in(written, params, "torch_adam", False), _flag_in(written, params, "adam_w_mode", True)
    kind = "AdamW" if kind == "AdamW" or decoupled else "Adam"
    if torchs and kind == "AdamW":
        # torch's own class has a default of its own; DeepSpeed's decays nothing unless asked to.
        params.setdefault("weight_decay", 1e-2)
    return kind, torchs


def _schedule(written: Written) -> ScheduleSpec | None:
    params = written.params("scheduler.params")
    if "scheduler.type" not in written:
        if params:
            raise ValueError("Cannot use scheduler.params without scheduler.type. Give scheduler.type too.")
        return None
    if params.pop("last_batch_iteration", -1) != -1:
        written.note("Cannot use scheduler.params.last_batch_iteration: a schedule goes on from its own state. "
                     "Take it out and load the scheduler's state_dict.")
    return _spec(ScheduleSpec, "scheduler", written.value("scheduler.type"), params)


def _report(written: Written) -> Report:
    path = "steps_per_print"
    never = path not in written or written.value(path) == math.inf
    return Report(
        every_steps=None if never else written.whole(path, 1, least=1),
        wall_clock=written.flag("wall_clock_breakdown"),
        memory=written.flag("memory_breakdown"),
        tensorboard=_board(written),
    )


def _board(written: Written) -> str | None:
    """Returns the folder that DeepSpeed makes of the two names."""
    names = []
    for path, default in (("tensorboard.output_path", ""), ("tensorboard.job_name", "DeepSpeedJobName")):
        name = written.value(path) if path in written else default
        if not isinstance(name, str):
            written.note(f"Cannot use {path} {brief(name)}: it is part of a path. Write a string.")
        names.append(str(name))
    return str(Path(*names)) if written.flag("tensorboard.enabled") else None
