"""Muon with faster products: the step of torch's with kernels="fused", and of one for parameters of several matrices.

[Note: products] Nearly all of the step is products of matrices. The product of a matrix with its transpose is symmetric, so
half of it is computed, in blocks, and the rest copied. Matrices of one shape are multiplied together on an accelerator; on the
host that gains nothing. A processor without instructions for bfloat16 multiplies in it up to a hundred times slower than in
float32: there each product is computed from the same rounded values, added up in float32, and rounded. Only the order in which
a product is added up can differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zero.optim.optimizers import loss_of

TORCHS: tuple[Any, ...] = tuple(kind for name, kind in vars(torch.optim).items() if name == "Muon")  # torch has it from 2.9 on
ROUNDED_TO = torch.bfloat16  # torch's Muon rounds to the same dtype
# Rows of a block, and the fewest: a block of a few rows is added up in another order than the whole, and is no faster.
_ROWS, _FEWEST = 256, 64
_LEAST_ROWS = 512  # rows of the smallest matrix that is cut into blocks


_NO_MATRICES = ("embed", "lm_head")  # Muon leaves parameters alone that have these in their names


def is_for_muon(name: str, num_dims: int) -> bool:
    """Returns True if a parameter is a matrix, or several, that Muon steps and not AdamW; told by name as DeepSpeed does."""
    return num_dims >= 2 and not any(word in name.lower() for word in _NO_MATRICES)


DEFAULTS = {
    "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None, "num_heads": 1,
}  # fmt: skip
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("lr", "weight_decay", "momentum"), lambda number: number >= 0),
    "adjust_lr_fn": lambda way: way in _ADJUSTMENTS,
}


class Muon(torch.optim.Optimizer):
    """torch's Muon, with its settings, for parameters of one matrix or several, each of which is made orthogonal by itself.

    A parameter of three dimensions has one for each index of the first, as experts have whose weights lie in one tensor. Where
    its group has `num_heads`, a parameter of two has so many, one above the other, as the projections of an attention have.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        unknown = sorted(settings.keys() - DEFAULTS.keys())
        if unknown:
            raise TypeError(f"Cannot make Muon with {', '.join(unknown)}: it has no such setting. Use {', '.join(DEFAULTS)}.")
        super().__init__(params, {**DEFAULTS, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [name for name, fits in _FITS.items() if not fits(group[name])]
        if wrong:
            self.param_groups.pop()
            settings = ", ".join(f"{name}={group[name]!r}" for name in wrong)
            raise ValueError(
                f"Cannot make Muon with {settings}. Give numbers of 0 or more, and as adjust_lr_fn one of "
                f"{', '.join(map(repr, _ADJUSTMENTS))}."
            )
        for param in group["params"]:
            if not is_of_matrices(param, group["num_heads"]):
                self.param_groups.pop()
                raise ValueError(
                    f"Cannot make Muon for a parameter of shape {tuple(param.shape)} with num_heads={group['num_heads']}: it "
                    "is not made of matrices. Give it two dimensions, with rows for each head, or three, or leave it to AdamW."
                )

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state dict as torch's does. State of torch's own Muon has no `num_heads`, and leaves those that are here."""
        heads = [group["num_heads"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, num_heads in zip(self.param_groups, heads, strict=True):
            group.setdefault("num_heads", num_heads)

    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        fused_step(self)
        return loss


MUON = (*TORCHS, Muon)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if an optimizer is torch's own Muon and its groups say `fused`."""
    return type(optimizer) in TORCHS and any(group.get("fused") for group in optimizer.param_groups)


@torch.no_grad()
def fused_step(muon: torch.optim.Optimizer) -> None:
    for group in muon.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        grads: list[torch.Tensor] = [param.grad for param in params]
        moments = [_moment_of(muon, param, grad) for param, grad in zip(params, grads, strict=True)]
        heads = group.get("num_heads", 1)
        params, grads, moments = (
            [matrix for tensor in tensors for matrix in _matrices_of(tensor, heads)] for tensors in (params, grads, moments)
        )
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for index, param in enumerate(params):
            alone = index if param.is_cpu else None
            kinds.setdefault((param.shape, param.dtype, param.device, alone), []).append(index)
        for alike in kinds.values():
            _step_alike(group, *([tensors[index] for index in alike] for tensors in (params, grads, moments)))


def is_of_matrices(tensor: torch.Tensor, num_heads: int) -> bool:
    """Returns True if a tensor consists of matrices, so many in two dimensions."""
    if tensor.dim() == 2:
        return num_heads > 0 and tensor.size(0) % num_heads == 0
    return tensor.dim() == 3 and num_heads == 1


def _matrices_of(tensor: torch.Tensor, num_heads: int) -> Sequence[torch.Tensor]:
    if tensor.dim() == 2:
        return tensor.chunk(num_heads)
    return tensor.unbind()


def _moment_of(muon: torch.optim.Optimizer, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    state: dict[str, Any] = muon.state[param]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    moment: torch.Tensor = state["momentum_buffer"]
    return moment


def _step_alike(
    group: Mapping[str, Any], params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], moments: Sequence[torch.Tensor]
) -> None:
    lr, momentum = float(group["lr"]), group["momentum"]
    for grad, moment in zip(grads, moments, strict=True):
        moment.lerp_(grad, 1 - momentum)
    pairs = zip(grads, moments, strict=True)
    wanted = [grad.lerp(moment, momentum) if group["nesterov"] else moment for grad, moment in pairs]
    rows, columns = params[0].shape
    updates = orthogonal(wanted, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rate = lr * _factor(group["adjust_lr_fn"], rows, columns)
    for param, update in zip(params, updates, strict=True):
        param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-rate)


def _factor(way: str | None, rows: int, columns: int) -> float:
    """Returns the factor by which torch's Muon adjusts a rate."""
    if way == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if way in (None, "original") else 1.0


def orthogonal(
    matrices: Sequence[torch.Tensor], coefficients: Sequence[float], num_steps: int, eps: float
) -> Iterable[torch.Tensor]:
    """Runs Newton-Schulz on matrices of one shape, as torch's Muon does."""
    is_tall = matrices[0].size(0) > matrices[0].size(1)
    rounded = [matrix.to(ROUNDED_TO, copy=True) for matrix in matrices]
    lying = [matrix.T if is_tall else matrix for matrix in rounded]
    for matrix in lying:
        matrix.div_(matrix.norm().clamp(min=eps))
    products = _Products(lying)
    a, b, c = coefficients
    for _ in range(num_steps):
        products.iterate(a, b, c)
    return [matrix.T if is_tall else matrix for matrix in products.matrices()]


class _Products:
    """The products of matrices of one shape, with memory for their operands."""

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        first = matrices[0]
        self._is_wide = first.is_cpu and first.dtype == torch.bfloat16 and not has_bfloat16()
        together = torch.stack(list(matrices)) if len(matrices) > 1 else first[None]
        self._now = together.float() if self._is_wide else together
        self._next = torch.empty(self._now.shape, dtype=self._now.dtype, device=first.device)
        self._spare = self._now if self._now.is_contiguous() else torch.empty_like(self._next)
        self._gram, self._update = (self._now.new_empty((*self._now.shape[:2], first.size(0))) for _ in range(2))
        self._dtype = first.dtype

    def iterate(self, a: float, b: float, c: float) -> None:
        self._multiply_with_itself()
        torch.baddbmm(self._gram, self._gram, self._gram, beta=b, alpha=c, out=self._update)
        self._round(self._update)
        torch.baddbmm(self._now, self._update, self._now, beta=a, out=self._next)
        self._round(self._next)
        self._now, self._next, self._spare = self._next, self._spare, self._next

    def _multiply_with_itself(self) -> None:
        rows = self._now.size(1)
        if not self._now.is_cpu or rows < _LEAST_ROWS:
            torch.bmm(self._now, self._now.mT, out=self._gram)
        else:
            for matrix, gram in zip(self._now, self._gram, strict=True):
                for start in range(0, rows - _FEWEST, _ROWS):
                    stop = start + _ROWS if start + _ROWS < rows - _FEWEST else rows
                    torch.mm(matrix[start:stop], matrix[start:].T, out=gram[start:stop, start:])
                    gram[stop:, start:stop] = gram[start:stop, stop:].T
        self._round(self._gram)

    def _round(self, values: torch.Tensor) -> None:
        if self._is_wide:
            values.copy_(values.to(self._dtype))

    def matrices(self) -> Iterable[torch.Tensor]:
        return self._now.to(self._dtype)


def has_bfloat16() -> bool:
    """Returns True if this processor multiplies matrices in bfloat16 with instructions for it."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
