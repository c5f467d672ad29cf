"""Models of transformers whose attention is exchanged: an attention and a mask of one name, and positions of whole sequences.

transformers makes a mask from what it sees, which is a part of each sequence. Here a model's forward first gathers positions
and padding of whole sequences, and the mask is made of those, with the function that the model has for it. Documents begin
where positions do not go on. If nothing else is masked than other documents and what comes later, each document is attended to
by itself, and no mask is made, whose memory would grow with the square of the length.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from zero.comm.heads import Row, gathered_along
from zero.sequence.around import arounds_of, kind_of, set_around

_LAYERS = {"full_attention", "sliding_attention"}
_NOT_TAKEN = ("softcap", "s_aux", "position_bias", "cache")  # arguments that torch's attention does not take
_BEFORE, _AFTER = -1, -2  # padding before and after a sequence
_attend: Callable[..., torch.Tensor] = torch.ops.aten.scaled_dot_product_attention


class Exchange(Protocol):
    """The attention that models get."""

    row: Row

    def around(
        self, attend: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Returns this rank's tokens of what `attend` makes of whole sequences, of this rank's heads."""

    def mask_of_heads(self, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Returns a mask of whole sequences for this rank's heads."""


class Whole(NamedTuple):
    """The positions of all tokens of whole sequences, and which of these are no padding."""

    positions: torch.Tensor
    present: torch.Tensor


_inside: dict[str, Whole] = {}  # by the name of its attention: the forward that runs


def pretrained_in(module: nn.Module) -> list[Any]:
    """Returns the models of transformers in a module, each without those inside of it."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    outermost = dict[str, Any]()
    for name, each in module.named_modules():
        if isinstance(each, PreTrainedModel) and not any(not outer or name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = each
    return list(outermost.values())


def set_on_pretrained(attention: Exchange, model: Any) -> None:
    """Exchanges the attention of a model from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface

    _check_layers(model)
    _own_config(model)
    call = _Call(attention, _attentions_of(model), _first_position(model))
    AttentionInterface.register(call.name, attention_over(attention))
    AttentionMaskInterface.register(call.name, _mask_over(call.name))
    model.set_attn_implementation(call.name)
    call.check(model)
    set_around(model, call)


def _models_in(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "set_attn_implementation")]


def _attentions_of(model: nn.Module) -> list[Any]:
    """Returns the attention of each of the models in one, as it was before any was exchanged."""
    known = next((each.before for each in arounds_of(model) if isinstance(each, _Call)), None)
    return [each.config._attn_implementation for each in _models_in(model)] if known is None else known


def _own_config(model: Any) -> None:
    """Gives a model a configuration that it shares with no other one, as the attention of each is set there."""
    copied: dict[int, Any] = {}
    copy.deepcopy(model.config, copied)
    for module in model.modules():
        vars(module).update({name: copied[id(value)] for name, value in vars(module).items()
                             if isinstance(value, type(model.config)) and id(value) in copied})  # fmt: skip


def set_loss_of_pretrained(model: Any, loss: Callable[..., torch.Tensor]) -> None:
    """Makes a causal language model compute its loss by `loss(hidden, weight, targets, bias)`, a sum over targets, and no
    logits if it is given labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, known = model.get_output_embeddings(), model.loss_function
    if kind_of(head) is not nn.Linear or (known is not ForCausalLMLoss and not isinstance(known, _LossByChunks)):
        raise NotImplementedError(
            f"Cannot compute the loss of a {type(model).__name__} by chunks: it is not that of a linear head of a causal "
            "language model. Use zero.linear_cross_entropy in a forward of your own."
        )
    later = _HeadLater()
    set_around(head, later)
    set_around(model, _LossLater(later))
    model.loss_function = _LossByChunks(loss)


class _LossByChunks:
    """The loss of a model whose logits are not computed; where they are, that of transformers."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss

    def __call__(
        self,
        logits: Any,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if not isinstance(logits, Later):
            from transformers.loss.loss_utils import ForCausalLMLoss

            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            plain: torch.Tensor = ForCausalLMLoss(logits, labels, vocab_size, ignore_index=ignore_index, **given)
            return plain
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        targets = targets.to(logits.hidden.device).masked_fill(targets == ignore_index, -100)
        total = self.loss(logits.hidden, logits.head.weight, targets, logits.head.bias)
        return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class Later:
    """Logits that are not computed: what a head was given. Whatever reads them raises."""

    def __init__(self, hidden: torch.Tensor, head: nn.Linear) -> None:
        self.hidden, self.head = hidden, head

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "Cannot read logits: the loss is computed by chunks, and they are never whole. Call the model without labels, or "
            "leave zero.in_chunks out for this model."
        )

    __getattr__ = __getitem__ = __truediv__ = __mul__ = __rmul__ = __add__ = __matmul__ = __len__ = _refuse


class _HeadLater:
    """The head of a model, which is left out while a loss is computed by chunks."""

    def __init__(self) -> None:
        self.is_left_out = False

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the head was given, or its logits."""
        return Later(args[0], module) if self.is_left_out else forward(module, *args, **kwargs)  # type: ignore[arg-type]


class _LossLater:
    """The forward of a model that is given labels, and returns no logits then."""

    def __init__(self, head: _HeadLater) -> None:
        self.head = head

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward, without its head if there are labels."""
        passed = _by_name(forward, module, args, kwargs)
        outer = self.head.is_left_out
        self.head.is_left_out = passed.get("labels") is not None
        try:
            return forward(module, **passed)
        finally:
            self.head.is_left_out = outer

    def undone_in(self, module: nn.Module) -> nn.Module:
        """Returns a copy, with the same tensors, that has the loss of transformers."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        copied: Any = copy.copy(module)
        copied.loss_function = ForCausalLMLoss
        return copied  # type: ignore[no-any-return]


def _check_layers(model: Any) -> None:
    kind, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise NotImplementedError(
            f"Cannot train a {kind} on parts of sequences: its forward takes no position_ids, and would count from 0 in each. "
            "Train it on whole sequences."
        )
    config = model.config.get_text_config()
    others = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    recurrent = [name for name, each in model.named_modules() if isinstance(each, nn.Conv1d) and each.kernel_size[0] > 1]
    if others or recurrent:
        what = f"layers of type {', '.join(sorted(others))}" if others else f"{recurrent[0]}"
        raise NotImplementedError(
            f"Cannot train a {kind} on parts of sequences: {what} would carry nothing from one part to the next. Train a model "
            "whose layers attend, or this one on whole sequences."
        )


def _first_position(model: nn.Module) -> int:
    """Returns the position of a first token. Tables of positions that have a row of padding begin after it, as RoBERTa's do."""
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    return max((each.padding_idx + 1 for each in tables if getattr(each, "padding_idx", None) is not None), default=0)


class _Call:
    """The forward of a model that gets a part of each sequence."""

    def __init__(self, attention: Exchange, before: list[Any], first_position: int) -> None:
        self.attention = attention
        self.before = before  # by model in it: what was set there
        self.first_position = first_position
        self.name = f"ulysses_{attention.row.name}"

    def __deepcopy__(self, memo: object) -> _Call:
        return self

    def undone_in(self, module: nn.Module) -> nn.Module:
        """Returns a copy, with the same tensors, that attends as it did before."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in itertools.chain(module.parameters(), module.buffers())}
        copied = copy.deepcopy(module, memo)
        for each, before in zip(_models_in(copied), self.before, strict=True):
            each.config._attn_implementation = before
        return copied

    def check(self, model: Any) -> None:
        """Raises if the model attends in another way than was set."""
        others = {str(each.config._attn_implementation) for each in _models_in(model)} - {self.name}
        if others:
            raise ValueError(
                f"Cannot attend over parts of sequences with attn_implementation={min(others)!r}: a {type(model).__name__} was "
                "to exchange heads of attention. Leave what zero.ulysses set, and give it models that take another attention."
            )

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward with positions of whole sequences. A collective of the ranks that have their parts."""
        self.check(module)
        passed = _by_name(forward, module, args, kwargs)
        if "use_cache" in inspect.signature(forward).parameters:
            passed["use_cache"] = False  # a cache would have a part of each sequence
        whole = self._gather(passed)
        _check_positions(module, whole, self.first_position)
        outer, _inside[self.name] = _inside.get(self.name), whole
        try:
            result = forward(module, **_with_loss(forward, module, passed))
        finally:
            if outer is None:
                del _inside[self.name]
            else:
                _inside[self.name] = outer
        _check_of_tokens(module, result)
        return result

    def _gather(self, passed: dict[str, Any]) -> Whole:
        """Returns what ranks have of each sequence, and passes the model what follows from it for a part."""
        if passed.get("past_key_values") is not None:
            raise ValueError("Cannot go on from past_key_values with parts of sequences. Generate with whole ones.")
        tokens = passed.get("input_ids")
        tokens = passed["inputs_embeds"] if tokens is None else tokens
        samples, length = tokens.shape[:2]
        positions, present = passed.get("position_ids"), passed.get("attention_mask")
        if positions is None:
            positions = torch.arange(length, device=tokens.device) + self.attention.row.place * length
        positions = positions.expand(samples, length)
        if present is None or present.dim() != 2:
            everything = torch.ones_like(positions)
            passed["attention_mask"] = everything if present is None else present  # a mask of pairs is of whole sequences
            present = everything
        else:
            passed["attention_mask"] = torch.ones_like(present)  # without a mask, transformers looks for documents in a part
        passed["position_ids"] = positions
        both = torch.stack([positions.to(torch.int64), present.to(torch.int64)])
        return Whole(*gathered_along(both, self.attention.row))


def _check_positions(model: nn.Module, whole: Whole, first: int) -> None:
    """Raises if a model counts tokens from another number than 0, and these were not."""
    if first and ((whole.positions < first) & (whole.present != 0)).any():
        raise ValueError(
            f"Cannot train a {type(model).__name__} with position_ids below {first}: those are of padding. Pass "
            f"position_ids that begin at {first} to zero.sequence_batch."
        )


def _check_of_tokens(model: nn.Module, result: Any) -> None:
    """Raises if a model made a result of a whole sequence, or compares its tokens, and saw those of this rank."""
    logits = getattr(result, "logits", None)
    if hasattr(result, "start_logits") or (isinstance(logits, torch.Tensor) and logits.dim() < 3):
        raise NotImplementedError(
            f"Cannot train a {type(model).__name__} on parts of sequences: its results are of whole sequences, and would be "
            "made of this rank's tokens. Train a model with results of each token, or this one on whole sequences."
        )


def _by_name(
    forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns what is passed to a forward, by the names of its parameters."""
    _, *names = inspect.signature(forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _with_loss(forward: Callable[..., Any], model: Any, passed: dict[str, Any]) -> dict[str, Any]:
    """Returns what is passed with the labels of a part, which the model has to use as they are. Raises if it would not."""
    targets = passed.get("shift_labels")
    if targets is None and passed.get("labels") is None:
        return passed
    if targets is None:
        raise ValueError(
            "Cannot compute a loss of labels in a part of each sequence: the model would shift them there, and the last "
            "one's target is on another rank. Pass shift_labels, as zero.sequence_batch returns them."
        )
    if passed.get("num_items_in_batch") is None:
        raise ValueError(
            "Cannot compute a mean of the targets of a part of each sequence: parts have different numbers of them. Pass "
            "num_items_in_batch=, the number that zero.sequence_batch returns, and shard with reduce='sum'."
        )
    taken = inspect.signature(model.loss_function).parameters
    if "shift_labels" not in taken or not any(each.kind is each.VAR_KEYWORD for each in _parameters(forward)):
        raise NotImplementedError(
            f"Cannot compute the loss of a {type(model).__name__}: it takes no shift_labels. Compute it from the logits, with "
            "the shift_labels that zero.sequence_batch returns."
        )
    return {**passed, "labels": targets}


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())


def _mask_over(name: str) -> Callable[..., torch.Tensor | None]:
    """Returns a function that makes masks for transformers: none, if nothing is masked but what comes later; the document of
    each token, `[samples, tokens]`; or pairs of tokens, `[samples, 1, tokens, tokens]`."""
    from transformers import masking_utils as of

    def mask(
        batch_size: int, mask_function: Any = of.causal_mask_function, use_vmap: bool = False, device: Any = None, **_: Any
    ) -> torch.Tensor | None:
        whole = _inside.get(name)
        if whole is None:
            raise RuntimeError(
                "Cannot make a mask of whole sequences: this is the forward of a part of a model that zero.ulysses was "
                "given. Give zero.ulysses the model that is called."
            )
        is_causal = mask_function is of.causal_mask_function
        if is_causal or mask_function is of.bidirectional_mask_function:
            documents = documents_of(whole)
            if documents is not None:
                return documents.cpu() if documents.any() else None
        if _sees_tensors(mask_function):
            raise NotImplementedError(
                "Cannot make a mask of whole sequences by a function that has seen a part of them, as those of images and of "
                "chunks have. Pass the mask itself, [samples, 1, tokens, tokens]."
            )
        positions, present = whole
        packed = of.find_packed_sequence_indices(positions)
        if packed is not None:
            mask_function = of.packed_sequence_compatibility_function(mask_function, positions, packed)
        length, padding = positions.shape[1], None if present.all() else present.bool()
        made: torch.Tensor = of.sdpa_mask(batch_size=batch_size, q_length=length, kv_length=length, mask_function=mask_function,
                            attention_mask=padding, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)  # fmt: skip
        return made

    return mask


def documents_of(whole: Whole) -> torch.Tensor | None:
    """Returns the number of each token's document in its sample, and `_BEFORE` and `_AFTER` for padding before and after all
    of them; None if there is padding between."""
    positions, present = whole[0], whole[1] != 0
    comes, goes = present[:, 1:] & ~present[:, :-1], present[:, :-1] & ~present[:, 1:]
    if (present[:, 0].int() + comes.sum(1) > 1).any():
        return None
    begins = torch.zeros_like(present)
    begins[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | comes
    documents = (begins & present).cumsum(1)
    is_after = F.pad(goes, (1, 0)).cumsum(1) > 0
    return documents.masked_fill(~present, _BEFORE).masked_fill(is_after, _AFTER).to(torch.int32)


def _sees_tensors(function: Any) -> bool:
    """Returns whether a function of a mask, or one that it calls, is about tensors."""
    for cell in getattr(function, "__closure__", None) or ():
        values = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        if any(isinstance(value, torch.Tensor) or (callable(value) and _sees_tensors(value)) for value in values):
            return True
    return False


def attention_over(attention: Exchange) -> Callable[..., tuple[torch.Tensor, None]]:
    """Returns the attention for transformers."""

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        refused = [name for name in _NOT_TAKEN if others.get(name) is not None]
        if refused:
            raise NotImplementedError(
                f"Cannot exchange attention with {refused[0]}: torch's attention has none. Train the model on whole sequences."
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
            if attention_mask is None:
                return _attend(query, key, value, is_causal=causal, **options)
            if attention_mask.dim() > 2:
                return _attend(query, key, value, attention.mask_of_heads(attention_mask, query, key), **options)
            if torch.compiler.is_compiling():  # documents are values, which a graph does not know
                return _attend(query, key, value, _pairs_in(attention_mask.to(query.device), causal), **options)
            return _by_documents(query, key, value, attention_mask, is_causal=causal, **options)

        return attention.around(attend, query, key, value).transpose(1, 2).contiguous(), None

    return forward


def _pairs_in(documents: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Returns the mask of pairs of tokens that `_by_documents` attends to."""
    is_token = documents >= 0
    last, first = documents.amax(1, keepdim=True), documents.masked_fill(~is_token, 2**31 - 1).amin(1, keepdim=True)
    looks_at = torch.where(documents == _AFTER, last, documents)
    if not is_causal:
        looks_at = torch.where(documents == _BEFORE, first, looks_at)
    pairs = (looks_at[:, :, None] == documents[:, None, :]) & is_token[:, None, :]
    return (pairs.tril() if is_causal else pairs)[:, None]


def _by_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, is_causal: bool, **options: Any
) -> torch.Tensor:
    """Attends to each document by itself. Padding attends as it does under a mask of which tokens there are: to the document
    beside it, or to none if that comes later and is not looked at."""
    samples = []
    for index, numbers in enumerate(documents):
        kinds, lengths = (each.tolist() for each in torch.unique_consecutive(numbers, return_counts=True))
        stops = list(itertools.accumulate(lengths))
        spans = [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
        parts = []
        for place, (kind, span) in enumerate(zip(kinds, spans, strict=True)):
            beside = place + {_BEFORE: 1, _AFTER: -1}.get(kind, 0)
            if kind == _BEFORE and (is_causal or beside == len(spans)):
                shape = (1, query.shape[1], lengths[place], value.shape[-1])
                parts.append(query.new_zeros(shape))
                continue
            keys = (slice(index, index + 1), slice(None), spans[beside])
            attended = query[index : index + 1, :, span], key[keys], value[keys]
            parts.append(_attend(*attended, is_causal=is_causal and kind >= 0, **options))
        samples.append(torch.cat(parts, 2))
    return torch.cat(samples)
