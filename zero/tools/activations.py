"""The memory of what a training computes in between, counted without computing anything.

[Note: counted on nothing] A forward and a backward run on torch's meta device, whose tensors have shapes and no values. Each
storage counts from when it is made until nothing holds it. Weights are left out, and so is a gradient of theirs once it is
whole, as both are counted with the states. Attention is that of kernels that keep no scores.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerators import Accelerator
from zero.comm.heads import planned_row
from zero.sequence.attention import Ulysses
from zero.sequence.host import Kept
from zero.sequence.memory import in_chunks
from zero.sequence.pretrained import attention_over

_META = "meta"
_ATTENTION = "zero_plan"  # transformers makes no masks for an attention of this name
_MLP = ".mlp"  # the end of an MLP's name


@dataclass(frozen=True)
class Sequences:
    """A training on sequences of so many tokens, and what keeps its memory small."""

    tokens: int
    ranks: int = 1  # the ranks that have parts of the same sequences
    recomputes: bool = False
    loss_chunk: int | None = None  # the tokens whose logits exist at one time; None for all
    mlp_chunk: int | None = None
    on_host: bool = False

    @property
    def tokens_of_a_rank(self) -> int:
        return -(-self.tokens // self.ranks)


@dataclass(frozen=True)
class Activations:
    """The most bytes at one time beside weights and gradients, on a device and on a host beside it."""

    device: int
    host: int
    slope: float  # the bytes of the device for one more token of a rank


Build = Callable[[Sequences], "tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]"]


def activations_of(build: Build, sequences: Sequences) -> Activations:
    """Returns what a training takes, of which `build(sequences)` makes a model on the meta device and a function that makes a
    loss of it. The slope is that between half as many tokens and all of them."""
    fewer = replace(sequences, tokens=max(1, sequences.tokens // 2))
    few, all_ = _count(build, fewer), _count(build, sequences)
    more = sequences.tokens_of_a_rank - fewer.tokens_of_a_rank
    return Activations(*all_, (all_[0] - few[0]) / more if more else 0.0)


def from_config(config: Mapping[str, Any], dtype: torch.dtype) -> Build:
    """Returns what builds the causal language model of a configuration, with all that is chosen. Needs transformers."""

    def build(sequences: Sequences) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        attention = Ulysses(planned_row(sequences.ranks))
        AttentionInterface.register(_ATTENTION, attention_over(attention))
        named = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
        options = {"attn_implementation": _ATTENTION, "dtype": dtype}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**named), **options)
        if sequences.recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if sequences.loss_chunk is not None:
            in_chunks(model, sequences.loss_chunk)
        if sequences.mlp_chunk is not None:
            mlps = [module for name, module in model.named_modules() if name.endswith(_MLP)]
            if not mlps:
                raise ValueError(
                    f"Cannot plan with --mlp-chunk: a {type(model).__name__} has no module called mlp. Give a function that "
                    "calls zero.in_chunks."
                )
            for mlp in mlps:
                in_chunks(mlp, sequences.mlp_chunk)
        ids = torch.zeros(1, sequences.tokens_of_a_rank, dtype=torch.int64)
        batch = {"input_ids": ids, "position_ids": ids, "labels": ids, "shift_labels": ids}
        return model.train(), lambda model: model(**batch, num_items_in_batch=ids.numel(), use_cache=False).loss

    return build


def from_function(function: Callable[[int], Any]) -> Build:
    """Returns what builds the model of a function of the user's, which is given the tokens of a rank."""

    def build(sequences: Sequences) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, loss_of = function(sequences.tokens_of_a_rank)
        if sequences.ranks > 1:
            Ulysses(planned_row(sequences.ranks)).set_on(model)
        return model, loss_of

    return build


def _count(build: Build, sequences: Sequences) -> tuple[int, int]:
    """Returns the most bytes on the device and on the host. See [Note: counted on nothing]."""
    with torch.device(_META), _attention_without_scores():
        model, loss_of = build(sequences)
        params = list(model.parameters())
        live = _Live((*params, *model.buffers()))
        trained = [param for param in params if param.requires_grad]
        hooks = [param.register_post_accumulate_grad_hook(_drop) for param in trained]  # type: ignore[no-untyped-call]
        on_host = _hooks(_KeptOnHost(live)) if sequences.on_host else contextlib.nullcontext()
        with live:
            with on_host:
                loss = loss_of(model)
            loss.backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
    return live.device.most, live.host.most


def _drop(param: torch.Tensor) -> None:
    param.grad = None


def _hooks(kept: Kept) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)


@contextlib.contextmanager
def _attention_without_scores() -> Iterator[None]:
    """Makes attention on the meta device keep as much as a flash kernel does: its inputs, its result, and a number a token."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        return result

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


class _Bytes:
    """The bytes in one memory, now and at their most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The count of all storages that operators have made and something still holds, without the known ones."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.host = _Bytes(), _Bytes()
        self.makes = self.device  # where new storages are counted
        self.known = {id(tensor.untyped_storage()) for tensor in known}
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each.untyped_storage() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        for storage in made:
            if id(storage) not in self.known and id(storage) not in self._refs:
                self._see(storage)
        if func is torch.ops.zero.exchange_heads.default:  # the messages that came exist beside the result of this operator
            self.device.add(messages := sum(storage.nbytes() for storage in made))
            self.device.add(-messages)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        memory, number, num_bytes = self.makes, id(storage), storage.nbytes()
        memory.add(num_bytes)

        def end(_: Any) -> None:
            del self._refs[number]
            memory.add(-num_bytes)

        self._refs[number] = weakref.ref(storage, end)


class _NoDevice(Accelerator):
    """The meta device, whose work is done when it is given."""

    name = _META

    def synchronize(self, index: int | None = None) -> None:
        """Waits for nothing."""


class _KeptOnHost(Kept):
    """Every tensor that is kept counts for the host while it is away, and none for the device; both lie on the meta device."""

    def __init__(self, live: _Live) -> None:
        device = _NoDevice()
        super().__init__(device, device.new_stream(), torch.device(_META), set(), None)
        self._live = live

    def _is_weight(self, saved: torch.Tensor) -> bool:
        return id(saved.untyped_storage()) in self._live.known

    def _on_host(self, saved: torch.Tensor) -> torch.Tensor:
        self._live.makes = self._live.host
        try:
            return torch.empty_like(saved)
        finally:
            self._live.makes = self._live.device
