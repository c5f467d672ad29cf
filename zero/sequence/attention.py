"""Attention over sequences of which each rank of a mesh has a part.

Before attention each rank gives its tokens of all heads, and gets all tokens of its heads; after it the tokens come back. In
between every rank sees whole sequences, so any mask is right: causal, of a window, or of documents.

[Note: where attention is exchanged]
A module that is given to `ulysses` exchanges the attention that runs inside its forward, and so does each module in it by
itself: recomputation in a backward calls one of them, and finds the same attention there. Nothing is around a backward of a
block, so recomputation is refused in one.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from zero.comm.heads import Row, by_heads, by_tokens, exchanges_along, row_along
from zero.sequence.around import set_around
from zero.sequence.pretrained import pretrained_in, set_on_pretrained

_ATTENTION = F.scaled_dot_product_attention
# This is the operator and not the function, which is exchanged again inside a module.
attend_whole: Callable[..., torch.Tensor] = torch.ops.aten.scaled_dot_product_attention
_OF_TORCH = "torch.nn.modules."
_ATTEND = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # the modules of torch that attend
_NAMES = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
# Attention under other names, which cannot be exchanged, by the name of the call.
_OTHERS = {
    "flex_attention": "flex_attention",
    "_native_multi_head_attention": "the fast path of nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "the fast path of nn.TransformerEncoderLayer",
}


def ulysses(mesh: Any, model: nn.Module | None = None) -> Ulysses:
    """Exchanges heads of attention along `mesh`, whose ranks have the parts of the same sequences. Not a collective, but call
    it on all of these ranks. `zero.sequence_batch` cuts sequences for them.

    Args:
        mesh: A DeviceMesh of one dimension, as `mesh["sp"]`, or a process group.
        model: A model, or a part of one, in whose forward attention is exchanged from then on; a model of transformers is set
            to an attention of its own, and gets the positions of its tokens. Without one use what is returned: `with
            zero.ulysses(mesh):` around a forward, or in place of `F.scaled_dot_product_attention`.
    """
    attention = Ulysses(row_along(mesh))
    if model is not None:
        attention.set_on(model)
    return attention


class Ulysses:
    """An `F.scaled_dot_product_attention` of tensors `[..., heads, tokens, width]` of which this rank has a part of the tokens.

    It returns this rank's part of the result. A mask is of whole sequences. A collective of the ranks along the mesh."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.mode = _Exchanging(self)  # one for all modules, as blocks of one kind have their attributes in common
        self._entered: list[_Exchanging] = []

    def __deepcopy__(self, memo: object) -> Ulysses:
        return self  # ranks cannot be copied

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if key.shape[-3] != query.shape[-3] and not enable_gqa:
            raise ValueError(
                f"Cannot attend with {query.shape[-3]} heads to {key.shape[-3]}: each query has keys of its own. Pass "
                "enable_gqa=True if several share them, or as many heads of each."
            )

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            mask = None if attn_mask is None else self.mask_of_heads(attn_mask, query, key)
            return attend_whole(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        return self.around(attend, query, key, value)

    def around(
        self, attend: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Returns this rank's tokens of what `attend` makes of whole sequences, of this rank's heads."""
        (tokens,) = by_tokens([attend(*self._with_heads(query, key, value))], self.row)
        return tokens

    def _with_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns queries, keys and values of whole sequences, of this rank's heads. Heads of keys and values that would not
        divide are repeated."""
        heads, grouped, size = query.shape[-3], key.shape[-3], self.row.size
        if heads % size:
            raise ValueError(
                f"Cannot exchange {heads} heads of attention between {size} ranks: each takes the same number of them. Cut "
                f"sequences over a divisor of {heads}."
            )
        times = repeats_of(heads, grouped, size)
        if times > 1:
            key, value = (each.repeat_interleave(times, -3) for each in (key, value))
        return by_heads([query, key, value], self.row)

    def mask_of_heads(self, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Returns the mask for this rank's heads."""
        tokens, keys, heads = query.shape[-2], key.shape[-2], query.shape[-3]
        # A mask that is the same for all keys would do nothing. Its last dimension of 1 would be taken for that of a part with
        # one token.
        whole = (keys,) if self.row.size > 1 else (1, keys)
        if mask.shape[-1] not in whole or (mask.dim() > 1 and mask.shape[-2] not in (1, tokens)):
            raise ValueError(
                f"Cannot attend with a mask of shape {tuple(mask.shape)}: a sequence has {tokens} tokens on all ranks, and "
                f"{keys} to attend to. Pass the mask of whole sequences, or is_causal=True."
            )
        if mask.dim() > 2 and mask.shape[-3] > 1 and self.row.size > 1:
            return mask.narrow(-3, self.row.place * heads, heads)
        return mask

    def set_on(self, module: nn.Module) -> None:
        """Exchanges the attention in a module from now on. See [Note: where attention is exchanged]."""
        inside = pretrained_in(module)
        for model in inside:
            set_on_pretrained(self, model)
            set_around(model, _Expecting(self.row, "Give its layers the attention of transformers' ALL_ATTENTION_FUNCTIONS"))
        if module not in inside:
            set_around(module, _Expecting(self.row, "Call F.scaled_dot_product_attention in it"))
        of_pretrained = {id(each) for model in inside for each in model.modules()}
        for each in module.modules():
            plain = not type(each).__module__.startswith(_OF_TORCH) or isinstance(each, _ATTEND)
            if plain and id(each) not in of_pretrained:
                set_around(each, self.mode)

    def __enter__(self) -> Ulysses:
        mode = _Exchanging(self, is_around=True)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)  # type: ignore[no-untyped-call]


def repeats_of(heads: int, grouped: int, size: int) -> int:
    """Returns how often heads of keys and values are repeated, so that each rank has those of its queries and as many as any
    other."""
    times = size // math.gcd(grouped, size)
    return times if heads % (grouped * times) == 0 else heads // grouped


class _Exchanging(TorchFunctionMode):
    """The exchange of all attention that torch's functions compute while it is on."""

    def __init__(self, attention: Ulysses, is_around: bool = False) -> None:
        self.attention = attention
        self._is_around = is_around  # the mode is of a block, and a backward runs outside of it

    def __deepcopy__(self, memo: object) -> _Exchanging:
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_ATTENTION, F.multi_head_attention_forward) and self._is_around and not torch.compiler.is_compiling():
            _check_recomputation()
        if func is _ATTENTION:
            return self.attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            passed = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
            if passed["bias_k"] is not None or passed["add_zero_attn"]:
                raise NotImplementedError(
                    "Cannot exchange an nn.MultiheadAttention that attends to a token which is not in the sequence: each rank "
                    "would add one. Make it with add_bias_kv=False and add_zero_attn=False."
                )
            if passed.get("need_weights", True):
                raise ValueError(
                    "Cannot exchange an nn.MultiheadAttention that returns its weights: they are of whole sequences. Call it "
                    "with need_weights=False."
                )
            attention: Callable[..., torch.Tensor] = self.attention
            dropped = passed.get("is_causal") and passed.get("key_padding_mask") is None  # torch drops the mask for this hint
            if not dropped:  # torch would compare masks with this rank's tokens
                attention = partial(_attend_with, self.attention, _mask_of(passed))
                passed |= {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
            with mock.patch.object(F, _ATTENTION.__name__, attention):  # no mode is on inside of the function
                return func(**passed)
        other = _OTHERS.get(getattr(func, "__name__", ""))
        if other is not None:
            raise NotImplementedError(
                f"Cannot exchange {other}: only F.scaled_dot_product_attention is. Call that, or train the model where "
                "sequences are whole."
            )
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # a method in Python that calls super(), which torch does not trace inside of a mode
        return func(*args, **kwargs)

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward of a module, with its attention exchanged."""
        if torch.compiler.is_compiling():
            with self:
                return forward(module, *args, **kwargs)
        outer = _on.attention
        if outer is self.attention:  # each mode costs every operator a call
            return forward(module, *args, **kwargs)
        _on.attention = self.attention
        try:
            with self:
                return forward(module, *args, **kwargs)
        finally:
            _on.attention = outer


class _Expecting:
    """The forward of a model in which attention is to be exchanged. Raises if its first one exchanged none."""

    def __init__(self, row: Row, remedy: str) -> None:
        self.row, self.remedy = row, remedy
        self._is_known = row.size == 1  # nothing is exchanged there

    def __deepcopy__(self, memo: object) -> _Expecting:
        return self

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward of a model, and looks whether it exchanged attention."""
        if torch.compiler.is_compiling() or self._is_known:
            return forward(module, *args, **kwargs)
        before = exchanges_along(self.row)
        result = forward(module, *args, **kwargs)
        if exchanges_along(self.row) == before:
            raise NotImplementedError(
                f"Cannot train a {type(module).__name__} on parts of sequences: its forward exchanged no attention, so tokens "
                f"saw those of this rank alone. {self.remedy}, or train it on whole sequences."
            )
        self._is_known = True
        return result


def _mask_of(passed: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the mask that an nn.MultiheadAttention makes of the two which it is given, both of whole sequences."""
    masks = []
    for name in ("attn_mask", "key_padding_mask"):
        mask = passed.get(name)
        if mask is None:
            continue
        if mask.dtype == torch.bool:  # a mask of what is not attended to
            mask = torch.zeros(mask.shape, dtype=passed["query"].dtype, device=mask.device).masked_fill(mask, -torch.inf)
        if name == "key_padding_mask":
            mask = mask[..., None, None, :]
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (-1, passed["num_heads"]))
        masks.append(mask)
    return sum(masks[1:], masks[0]) if masks else None


def _attend_with(
    attention: Ulysses,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> torch.Tensor:
    return attention(query, key, value, mask, dropout_p, is_causal)


def _check_recomputation() -> None:
    """Raises if a backward will call this attention again: no block is around that."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                "Cannot recompute attention that is exchanged inside a block: the backward would not exchange it. Pass the "
                "model to zero.ulysses(mesh, model) in place of the block."
            )
        frame = frame.f_back


class _On(threading.local):
    """The attention that modules of this thread are inside of."""

    def __init__(self) -> None:
        self.attention: Ulysses | None = None


_on = _On()
