"""What the used keys of a DeepSpeed configuration mean here: written values and what the call implies in, a ZeroConfig out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from zero.config.deepspeed.keys import AUTO
from zero.config.registry import FUSED_IN_TORCH, OPTIMIZERS, OPTIMIZERS_REFUSED, brief, canonical, did_you_mean, real, whole
from zero.config.schema import (
    DEFAULT_BUCKET_BYTES,
    Batch,
    Dtype,
    Half,
    Kernels,
    LossScale,
    Offload,
    OptimizerSpec,
    Report,
    ScheduleSpec,
    ZeroConfig,
)

T = TypeVar("T")
# The largest power of two that is a finite fp32 number.
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
_ITEM_BYTES = {None: 4, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Implied:
    """What the rest of the call says; it answers the keys that are "auto". None: the call says nothing about it."""

    world_size: int = 1
    global_samples: int | None = None
    micro_samples: int | None = None
    accumulation: int | None = None
    dtype: str | None = None
    clip: float | None = None
    bucket_numel: int | None = DEFAULT_BUCKET_BYTES // 4
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    warmup_min_lr: float | None = 0.0
    warmup_steps: int | None = None
    total_steps: int | None = None


class Written:
    """The used keys that were written, by path, each checked when it is asked for. null counts as not written."""

    def __init__(self, values: Mapping[str, Any], implied: Implied) -> None:
        self._values = {path: value for path, value in values.items() if value is not None}
        self.implied = implied

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def value(self, path: str) -> Any:
        """What was written, or what the call implies for "auto"."""
        return self.resolved(path, self._values[path])

    def resolved(self, path: str, value: Any) -> Any:
        if value != "auto":
            return value
        answer = getattr(self.implied, AUTO[path]) if path in AUTO else None
        if answer is None:
            raise ValueError(f'{path} is "auto", but nothing in the call implies a value for it. Write the value.')
        return answer

    def answered(self, path: str) -> bool:
        """Whether there is a value: one was written, or "auto" and the call implies one."""
        return path in self and (self._values[path] != "auto" or getattr(self.implied, AUTO[path], None) is not None)

    def flag(self, path: str, default: bool = False) -> bool:
        if path not in self:
            return default
        value = self.value(path)
        if not isinstance(value, bool):
            raise ValueError(f"{path} takes true or false, but {brief(value)} was found. Write true or false.")
        return value

    def mode(self, path: str, dtype: str) -> bool:
        """Whether a precision block is on; "auto" is answered by the dtype that the call implies."""
        if path in self and self._values[path] == "auto":
            return bool(self.value(path) == dtype)
        return self.flag(path)

    def whole(self, path: str, default: int, least: int, most: int | None = None) -> int:
        number = whole(path, self.value(path)) if path in self else default
        if number < least or (most is not None and number > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{path} must be {limits}, but {brief(number)} was found. Write another whole number.")
        return number

    def size(self, path: str) -> int | None:
        return self.whole(path, 1, least=1) if path in self else None

    def real(self, path: str, default: float, *, zero_too: bool = True) -> float:
        number = real(path, self.value(path)) if path in self else default
        if number < 0 or (number == 0 and not zero_too):
            raise ValueError(f"{path} must be {'at least' if zero_too else 'above'} 0, but {brief(number)} was found. "
                             "Write a larger number.")
        return number

    def choice(self, path: str, choices: Mapping[str, T], default: T) -> T:
        if path not in self:
            return default
        value = self.value(path)
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"{path} must be one of {', '.join(choices)}, but {brief(value)} was found."
                             f"{did_you_mean(value, choices) or ' Write one of them.'}")
        return choices[value.lower()]

    def params(self, path: str) -> dict[str, Any]:
        block = self._values.get(path, {})
        if not isinstance(block, dict):
            raise ValueError(f"{path} is a block of settings, but {brief(block)} was found. Write {{...}}.")
        return {name: self.resolved(f"{path}.{name}", value) for name, value in block.items()}


def meaning(written: Written) -> ZeroConfig:
    """The configuration that the written keys ask for; each key is read in exactly one place below."""
    dtype = _dtype(written)
    autocast = _autocast(written)
    optimizer, kernels = _optimizer(written)
    accumulation, batch = _batch(written)
    clip = written.real("gradient_clipping", 0.0)
    scale = _loss_scale(written, dtype, autocast)
    checks = written.flag("bf16.check_grad_overflow", True) and dtype == "bfloat16"
    return ZeroConfig(
        stage=_stage(written),
        dtype=dtype,
        autocast=autocast,
        cast_inputs=dtype == "float16" and written.flag("fp16.auto_cast"),
        offload=_offload(written),
        bucket_bytes=_bucket_bytes(written, dtype),
        reduce=_reduce(written),
        reduce_dtype=written.choice("communication_data_type", _WIRE_DTYPES, None),
        accumulation_dtype=written.choice("data_types.grad_accum_dtype", _DTYPES, "float32"),
        predivide=_predivide(written),
        clip=clip or None,
        accumulation=accumulation,
        count_micro_steps=written.flag("managed_gradient_accumulation", True),
        on_nonfinite="skip" if scale is not None or checks else "propagate",
        on_unused="leave" if written.flag("zero_optimization.ignore_unused_parameters", True) else "raise",
        kernels=kernels,
        elementwise=written.flag("zero_allow_untested_optimizer") or None,
        drop_last=written.flag("dataloader_drop_last"),
        batch=batch,
        loss_scale=scale,
        optimizer=optimizer,
        schedule=_schedule(written),
        report=_report(written),
    )


def _stage(written: Written) -> int:
    path = "zero_optimization.stage"
    stage = written.whole(path, 0, least=0, most=3)
    if stage == 3:
        raise ValueError(f"{path} was set to 3, but parameters cannot be sharded yet. Use stage 2.")
    return stage


def _dtype(written: Written) -> Half | None:
    half, brain = written.mode("fp16.enabled", "float16"), written.mode("bf16.enabled", "bfloat16")
    if half and brain:
        raise ValueError("fp16.enabled and bf16.enabled are both true, but weights have one dtype. Turn one of them off.")
    dtype: Half | None = "float16" if half else "bfloat16" if brain else None
    path = "data_types.param_dtype"
    asked = written.choice(path, _DTYPES, dtype or "float32")
    if asked != (dtype or "float32"):
        raise ValueError(f"{path} asks for {asked}, but fp16.enabled and bf16.enabled make it {dtype or 'float32'}. "
                         f"Turn on the block that fits, or take {path} out.")
    return dtype


def _reduce(written: Written) -> Literal["mean", "sum"]:
    operations: dict[str, Literal["mean", "sum"]] = {"mean": "mean", "sum": "sum"}
    return written.choice("gradient_allreduce_op", operations, "mean")


def _autocast(written: Written) -> Half | None:
    dtype = written.choice("torch_autocast.dtype", _HALVES, "bfloat16")
    return dtype if written.flag("torch_autocast.enabled") else None


def _loss_scale(written: Written, dtype: str | None, autocast: str | None) -> LossScale | None:
    if dtype is None and autocast == "float16":
        # There is no block for it: what torch.amp.GradScaler does by default.
        return LossScale(window=2000, hysteresis=1)
    if dtype != "float16":
        return None
    fixed = written.real("fp16.loss_scale", 0.0)
    if fixed:
        return LossScale(dynamic=False, initial=fixed)
    return LossScale(
        initial=2.0 ** written.whole("fp16.initial_scale_power", 16, least=0, most=_MAX_SCALE_POWER),
        window=written.whole("fp16.loss_scale_window", 1000, least=1),
        hysteresis=written.whole("fp16.hysteresis", 2, least=1),
        refill_hysteresis=written.flag("fp16.consecutive_hysteresis"),
        minimum=written.real("fp16.min_loss_scale", 1.0, zero_too=False),
    )


def _offload(written: Written) -> Offload | None:
    device, old = "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload"
    if device in written and old in written:
        raise ValueError(f"{old} and {device} were both given, but the one replaces the other. Keep {device}.")
    home = written.choice(device, {"none": None, "cpu": "host", "nvme": "disk"}, "host" if written.flag(old) else None)
    if home == "disk":
        raise ValueError(f"{device} was set to 'nvme', but nothing is offloaded to disk yet. Use 'cpu'.")
    pin = "zero_optimization.offload_optimizer.pin_memory"
    pinned = written.flag(pin) if pin in written else None
    ratio = written.real("zero_optimization.offload_optimizer.ratio", 1.0)
    return Offload(pinned=pinned, ratio=ratio) if home else None


def _bucket_bytes(written: Written, dtype: str | None) -> int:
    path = "zero_optimization.reduce_bucket_size"
    if path not in written:
        return DEFAULT_BUCKET_BYTES
    # A bucket is counted in elements there and in bytes of the weights' dtype here.
    return written.whole(path, 1, least=1) * _ITEM_BYTES[dtype]


def _predivide(written: Written) -> float | Literal["world"]:
    path = "gradient_predivide_factor"
    factor = written.real(path, 1.0, zero_too=False)
    if not written.flag("prescale_gradients"):
        return factor
    if factor != 1.0:
        raise ValueError(f"prescale_gradients and {path}={factor:g} were both given, but gradients are divided beforehand by "
                         "one number only. Keep one of them.")
    return "world"


def _batch(written: Written) -> tuple[int | None, Batch | None]:
    keys = {"global_samples": "train_batch_size", "micro_samples": "train_micro_batch_size_per_gpu",
            "accumulation": "gradient_accumulation_steps"}
    follows_from = {"global_samples": {"micro_samples"}, "micro_samples": {"global_samples", "accumulation"},
                    "accumulation": {"global_samples", "micro_samples"}}
    sizes = {name: written.size(path) if written.answered(path) else None for name, path in keys.items()}
    for name, path in keys.items():
        if path in written and sizes[name] is None and any(sizes[other] is None for other in follows_from[name]):
            written.value(path)  # An "auto" that neither the call nor the other sizes answer: this names it.
    if sizes["global_samples"] is None and sizes["micro_samples"] is None:
        return sizes["accumulation"], None
    batch = Batch.of(**sizes, world_size=written.implied.world_size)
    return batch.accumulation, batch


def _optimizer(written: Written) -> tuple[OptimizerSpec | None, Kernels]:
    params = written.params("optimizer.params")
    if "optimizer.type" not in written:
        if params:
            raise ValueError("optimizer.params were given without optimizer.type. Give optimizer.type too.")
        return None, "torch"
    kind = canonical(written.value("optimizer.type"), OPTIMIZERS, OPTIMIZERS_REFUSED, "optimizer")
    if "max_grad_norm" in params:
        raise ValueError("optimizer.params.max_grad_norm was given, but an optimizer does not clip. "
                         "Write gradient_clipping instead.")
    plain_kernel = False
    if kind in ("Adam", "AdamW"):
        kind, plain_kernel = _adam(kind, params)
    for name in ("fp32_optimizer_states", "bias_correction", "set_grad_none"):
        if params.pop(name, True) is not True:
            raise ValueError(f"optimizer.params.{name} was set to something other than true, which is not served. Take it out.")
    spec = OptimizerSpec.of(kind, params)
    fused = kind in FUSED_IN_TORCH and not plain_kernel and spec.kwargs["foreach"] is None
    return spec, "fused" if fused else "torch"


def _adam(kind: str, params: dict[str, Any]) -> tuple[str, bool]:
    """DeepSpeed's Adam is AdamW unless told otherwise; whether torch's plain kernel was asked for."""
    flags = {"torch_adam": params.pop("torch_adam", False), "adam_w_mode": params.pop("adam_w_mode", True)}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"optimizer.params.{name} takes true or false, but {brief(value)} was found. Write true or false.")
    kind = "AdamW" if kind == "AdamW" or flags["adam_w_mode"] else "Adam"
    if flags["torch_adam"] and kind == "AdamW":
        # torch's own class brings its own default; DeepSpeed's decays nothing unless asked.
        params.setdefault("weight_decay", 1e-2)
    return kind, flags["torch_adam"]


def _schedule(written: Written) -> ScheduleSpec | None:
    params = written.params("scheduler.params")
    if "scheduler.type" not in written:
        if params:
            raise ValueError("scheduler.params were given without scheduler.type. Give scheduler.type too.")
        return None
    if params.pop("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration was given, but a schedule goes on from its own state. "
                         "Take it out and load the scheduler's state_dict.")
    return ScheduleSpec.of(written.value("scheduler.type"), params)


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
    """The folder that DeepSpeed makes of the two names."""
    names = []
    for path, default in (("tensorboard.output_path", ""), ("tensorboard.job_name", "DeepSpeedJobName")):
        name = written.value(path) if path in written else default
        if not isinstance(name, str):
            raise ValueError(f"{path} is part of a path, but {brief(name)} was found. Write a string.")
        names.append(name)
    return str(Path(*names)) if written.flag("tensorboard.enabled") else None
