"""Losses and modules by chunks of tokens, so that what is computed in between does not grow with the length.

[Note: chunks] A module that treats each token by itself gives the same for a part of its tokens. What it computes in between is
made for one chunk at a time, and made again in the backward, so that only its input and output are kept. The gradient of a
weight is a sum over chunks. That of a head is added up in fp32 at least; autograd adds up those of a module, in their dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero.sequence.around import set_around
from zero.sequence.batch import IGNORED
from zero.sequence.pretrained import pretrained_in, set_loss_of_pretrained

CHUNK = 1024  # tokens


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tokens: int = CHUNK,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Returns the sum over all targets of `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, computed by
    chunks of tokens. To get a mean, divide it by the number of targets, which `zero.sequence_batch` returns. Not a
    collective.

    Args:
        hidden: The inputs of the last layer, `[..., width]`.
        weight: The weight of that layer, `[classes, width]`.
        targets: The classes, in the shape of `hidden` without the last dimension.
        bias: The bias of that layer, if it has one.
        tokens: The number of tokens in a chunk, whose logits are in memory at a time.
        ignore_index: The target of tokens that add nothing to the sum.
    """
    _check_chunks(tokens)
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"Cannot compute a loss of {tuple(hidden.shape)} and targets {tuple(targets.shape)}: there is no target for each "
            "token. Pass targets of the same shape without the width, shifted as zero.sequence_batch does."
        )
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        cast = [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in (hidden, weight, bias)]
        hidden, weight, bias = cast  # type: ignore[assignment]
    given = hidden.unsqueeze(0).flatten(0, -2), weight, bias, targets.flatten()
    loss: torch.Tensor = _Loss.apply(*given, tokens, ignore_index)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    """A sum of losses whose logits are computed twice, a chunk at a time. See [Note: chunks]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tokens: int,
        ignored: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.tokens, ctx.ignored = tokens, ignored
        total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
        for chunk in _chunks(len(hidden), tokens):
            logits, counts = _logits(hidden[chunk], weight, bias), targets[chunk] != ignored
            logits -= logits.amax(-1, keepdim=True)
            of_targets = logits.gather(-1, targets[chunk].where(counts, 0).unsqueeze(-1)).squeeze(-1)
            total += (logits.exp_().sum(-1).log_() - of_targets).masked_fill_(~counts, 0).sum()
            del logits  # freed before those of the next chunk are made
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # true with create_graph=True
            return (*_differentiable(ctx, hidden, weight, bias, targets, grad), None, None, None)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros(weight.shape, dtype=_wide(weight.dtype), device=hidden.device) if needs_weight else None
        of_bias = torch.zeros(bias.shape, dtype=_wide(bias.dtype), device=hidden.device) if needs_bias else None
        for chunk in _chunks(len(hidden), ctx.tokens):
            counts = targets[chunk] != ctx.ignored
            delta = _logits(hidden[chunk], weight, bias)
            delta -= delta.amax(-1, keepdim=True)
            delta /= delta.exp_().sum(-1, keepdim=True)
            delta[torch.arange(len(delta), device=delta.device), targets[chunk].where(counts, 0)] -= 1
            delta *= (counts * grad).unsqueeze(-1)
            if of_bias is not None:
                of_bias += delta.sum(0)
            delta = delta.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = delta @ weight
            if of_weight is not None:
                of_weight += delta.T @ hidden[chunk]
            del delta
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None, None, None


def _differentiable(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Returns the gradients of hidden, weight and bias as autograd makes them, of whole logits, so that they have gradients."""
    # Views of the three, as one may have been made from another: an embedding may be tied to the head.
    given = [None if each is None else each.view_as(each) for each in (hidden, weight, bias)]
    logits = _logits(*given)  # type: ignore[arg-type]
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=ctx.ignored)
    wanted = [each for each, needs in zip(given, ctx.needs_input_grad, strict=False) if needs]
    made = iter(torch.autograd.grad(total, wanted, grad, create_graph=True))  # type: ignore[arg-type]
    return [next(made) if needs else None for needs in ctx.needs_input_grad[:3]]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits.to(_wide(logits.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_chunks(tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"Cannot use tokens={tokens}: a chunk has at least one token. Pass 1 or more.")


def _chunks(length: int, tokens: int) -> Iterator[slice]:
    return (slice(start, start + tokens) for start in range(0, length, tokens))


def in_chunks(module: nn.Module, tokens: int = CHUNK) -> None:
    """Makes a module run by chunks of tokens, in its forward and once more in the backward. Not a collective.

    The module treats each token by itself, as an MLP does: its input is `[..., tokens, width]`, and so is its output. Other
    arguments are passed on as they are. A causal language model of transformers computes its loss by chunks instead, and never
    has all logits in memory.

    Args:
        module: The module, which is changed in place.
        tokens: The number of tokens in a chunk.
    """
    _check_chunks(tokens)
    inside = pretrained_in(module)
    if inside and inside[0] is module:
        set_loss_of_pretrained(module, partial(linear_cross_entropy, tokens=tokens))
    else:
        set_around(module, _Chunks(tokens))


class _Chunks:
    """A forward that is called with some tokens after the other."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:  # all are passed by name
            name = [*inspect.signature(forward).parameters][1]
            args, kwargs = (kwargs[name],), {other: value for other, value in kwargs.items() if other != name}
        x, *others = args
        if x.dim() < 2 or x.shape[-2] <= self.tokens:
            return forward(module, *args, **kwargs)
        recomputed = torch.is_grad_enabled()
        made: list[torch.Tensor] = []
        for chunk in x.split(self.tokens, -2):
            if recomputed:
                made.append(checkpoint(forward, module, chunk, *others, use_reentrant=False, **kwargs))
            else:
                made.append(forward(module, chunk, *others, **kwargs))
            shape = tuple(made[-1].shape) if isinstance(made[-1], torch.Tensor) else f"a {type(made[-1]).__name__}"
            if shape[:-1] != chunk.shape[:-1]:
                raise ValueError(
                    f"Cannot run a {type(module).__name__} by chunks of tokens: it makes {shape} of {tuple(chunk.shape)}. Give "
                    "zero.in_chunks a module whose output is [..., tokens, width], as its input is."
                )
        return torch.cat(made, -2)
