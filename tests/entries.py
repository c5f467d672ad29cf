"""What a case's script and its judge need of the library: a configuration, an engine that looks like an optimizer, masters."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from torch import nn

from tests import inside
from tests.grid import APART, BUCKET_NUMEL, Point
from tests.oracle import DTYPES, LOW, DynamicScale, StaticScale
from tests.zoo import Case
from zero import Engine, ShardedOptimizer
from zero.config.schema import LossScale, Offload, ZeroConfig

_NAMES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


class Driven:
    """An engine as a case's script knows it: the optimizer, with the few words more that an oracle's optimizer has too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.engine.backward(loss, **options)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync()

    def weight(self, amount: float) -> None:
        self.engine.weight(amount)

    def no_contribution(self) -> None:
        self.engine.no_contribution()

    def settle(self) -> None:
        self.engine.settle()

    def discard(self) -> None:
        self.engine.discard()

    def whole_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.engine.whole_grad(parameter)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.engine.optimizer.add_param_group(group)


_DISK = {"home": "disk", "path": tempfile.gettempdir()}
_ON_DISK = {
    "disk": dict.fromkeys(("gradients", "masters", "moments"), _DISK),
    "half on disk": {"masters": {**_DISK, "ratio": 0.5}, "moments": _DISK, "gradients": {**_DISK, "ratio": 0.5}},
    "parts on disk": {"masters": {**_DISK, "ratio": 0.3}, "moments": {**_DISK, "ratio": 0.7}},
    "all on disk": dict.fromkeys(("weights", "gradients", "masters", "moments"), _DISK),
    "weights on disk": {"weights": {**_DISK, "ratio": 0.6}},
}


def config_of(case: Case, point: Point, time_limit_s: float = 30.0) -> ZeroConfig:
    """What a point asks of the library, as the oracle understands it."""
    scale = point.loss_scale()
    skips = isinstance(scale, (DynamicScale, StaticScale))
    return ZeroConfig(
        stage=point.stage,
        dtype=_NAMES[point.dtype],
        keep_fp32=tuple(case.keep_fp32),
        bucket_bytes=BUCKET_NUMEL[point.bucket] * DTYPES[point.dtype].itemsize,
        reduce=case.reduce,
        loss_scale=_loss_scale(scale) if point.dtype == "fp16" else None,
        on_nonfinite="skip" if skips or point.dtype == "fp16" else "propagate",
        **{"whole_tensors" if "whole" in case.tags else "elementwise": True},
        timeout_s=time_limit_s,
        gathered_bytes=0,  # the least budget, with which most is fetched and freed
        kernels=point.kernels,
        cast_inputs=False,  # the oracle casts no inputs
        shared_memory=point.device != APART,
        shard_ranks=point.shard_ranks,
        offload={"half": Offload(ratio=0.5), "all": Offload()}.get(point.offload),
        homes=_ON_DISK.get(point.offload, {}),
    )


def _loss_scale(scale: DynamicScale | StaticScale | None) -> LossScale:
    if isinstance(scale, DynamicScale):
        return LossScale(initial=scale.scale, window=scale.window, hysteresis=scale.hysteresis, minimum=scale.minimum)
    return LossScale(dynamic=False, initial=1.0 if scale is None else scale.scale)


def masters_of(optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    """The fp32 copies of weights that are stored in less, whole; a collective."""
    masters, slots = {}, inside.layout(optimizer).slots
    for index, (name, param) in enumerate(zip(inside.names(optimizer), inside.tensors(optimizer), strict=True)):
        if param.dtype in LOW and slots[index] is not None:
            masters[name] = inside.streamed_master(optimizer, index, torch.float32).detach().cpu()
    return masters
