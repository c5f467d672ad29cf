"""`torch.autocast("sim")`: products in the narrow dtype, and what needs range or precision in fp32, as torch does on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerators_sim import torch_private

KEY = "AutocastPrivateUse1"

_NARROW = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "linear", "matmul", "mm", "mv",
    "scaled_dot_product_attention",
)  # fmt: skip
_WIDE = (
    "binary_cross_entropy_with_logits", "cosine_similarity", "cross_entropy_loss", "cumprod", "cumsum", "exp", "group_norm",
    "kl_div", "l1_loss", "layer_norm", "log", "log_softmax.int", "mse_loss", "native_layer_norm", "nll_loss", "norm.Scalar",
    "pow.Tensor_Scalar", "prod", "smooth_l1_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList",
)  # fmt: skip


def register(library: Any, fallbacks: Any) -> None:
    fallbacks.fallback(torch.library.fallthrough_kernel, KEY)
    for names, dtype_now in ((_NARROW, _narrow_dtype), (_WIDE, _wide_dtype)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _casting(op, dtype_now), KEY)
    torch.set_autocast_dtype(torch_private.NAME, torch.bfloat16)


def _narrow_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(torch_private.NAME)


def _wide_dtype() -> torch.dtype:
    return torch.float32


def _casting(op: Any, dtype_now: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_now()
        with torch_private.excluding(KEY):
            return op(*(_cast(value, dtype) for value in args), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        castable = (
            value.is_floating_point() and value.dtype not in (dtype, torch.float64) and value.device.type == torch_private.NAME
        )
        return value.to(dtype) if castable else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
