"""Batches of which each rank of a sequence takes its part of the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from accelerators.tensor_bytes import host_bytes
from zero.comm.heads import Row, numbers_of_all, row_along
from zero.errors import RanksDiffer

IGNORED = -100  # cross_entropy's label of a token without a target


def sequence_batch(batch: Mapping[str, Any], mesh: Any, group: Any = None) -> tuple[dict[str, Any], int]:
    """Cuts a batch along its tokens, and returns this rank's part and the number of targets of all ranks. A collective of the
    ranks of `group`.

    Labels are shifted before sequences are cut: `shift_labels` has the target of each token. `position_ids` are those of whole
    sequences; without them tokens are counted from 0. Sequences are padded on the right to a multiple of the number of ranks,
    by tokens that have no target, and `attention_mask` says which. Other entries with as many samples and tokens are cut too,
    and whatever else there is stays.

    The gradients of ranks are to be added up: divide each loss, a sum over this rank's targets, by the number, and shard with
    `reduce="sum"`.

    Args:
        batch: Has `input_ids`, or `inputs_embeds`, and `labels` beside them: `[samples, tokens]`, a label beside its own token.
            Ranks along `mesh` pass the same.
        mesh: The ranks that share sequences, as `ulysses` takes it; with None sequences are whole.
        group: The ranks to agree with, as `zero.shard` takes it; all by default.
    """
    row = row_along(mesh)
    samples, tokens = _size_of(batch)
    whole = _with_targets(batch, samples, tokens, row.size)
    part = {
        name: _cut(name, value, row, tokens) if _is_of_tokens(value, samples, tokens) else value
        for name, value in whole.items()
    }
    targets = part.get("shift_labels")
    num_targets = 0 if targets is None else int((targets != IGNORED).sum())
    return part, _agree(batch, row, num_targets, group.get_group() if hasattr(group, "get_group") else group)


def _size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of samples and of tokens of each."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), torch.Tensor):
            samples, tokens, *_ = batch[name].shape
            return samples, tokens
    raise ValueError(
        f"Cannot cut a batch of {', '.join(batch) or 'nothing'}: it has no input_ids, whose tokens are counted. Pass those, or "
        "inputs_embeds."
    )


def _is_of_tokens(value: Any, samples: int, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == (samples, tokens)


def _with_targets(batch: Mapping[str, Any], samples: int, tokens: int, row_size: int) -> dict[str, Any]:
    """Returns a batch with positions, and with the target of each token in place of labels beside their own tokens."""
    whole = dict(batch)
    device = next(value.device for value in (batch.get("input_ids"), batch.get("inputs_embeds")) if value is not None)
    positions = whole.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens, device=device)
    if positions.dim() < 3:  # positions of three dimensions include those of images, which the model reads itself
        whole["position_ids"] = positions.expand(samples, tokens)
    else:
        raise NotImplementedError(
            f"Cannot cut position_ids of shape {tuple(positions.shape)}: positions of several kinds are not known here. Pass "
            "those of text, [samples, tokens]."
        )
    if isinstance(whole.get("attention_mask"), torch.Tensor) and whole["attention_mask"].dim() > 2:
        raise ValueError(
            f"Cannot cut an attention_mask of shape {tuple(whole['attention_mask'].shape)}: one of pairs of tokens is not cut. "
            "Pass which tokens there are, [samples, tokens], or documents by position_ids that begin again."
        )
    if tokens % row_size and whole.get("attention_mask") is None:
        # A mask is needed, as zeros will mark padding.
        whole["attention_mask"] = torch.ones(samples, tokens, dtype=torch.int64, device=device)
    labels = whole.pop("labels", None)
    if isinstance(labels, torch.Tensor) and tuple(labels.shape) != (samples, tokens):
        raise ValueError(
            f"Cannot cut labels of shape {tuple(labels.shape)}: there is not one beside each of {tokens} tokens of {samples} "
            "samples. Pass such labels, or train on whole sequences."
        )
    if labels is not None and "shift_labels" not in whole:
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return whole


def _cut(name: str, value: torch.Tensor, row: Row, tokens: int) -> torch.Tensor:
    """Returns this rank's part of a tensor along its tokens, padded to as many on each rank."""
    length = -(-tokens // row.size)
    begin = row.place * length
    part = value[:, begin : begin + length]
    missing = length - part.shape[1]
    if not missing:
        return part.contiguous()
    if name == "position_ids":  # padding continues the last document, in which no token sees a later one
        first = max(tokens, begin)
        more = value[:, -1:] + torch.arange(first + 1 - tokens, first + 1 - tokens + missing, device=value.device)
        return torch.cat([part, more.to(value.dtype)], 1)
    padding = value.new_full((len(value), missing, *value.shape[2:]), IGNORED if name == "shift_labels" else 0)
    return torch.cat([part, padding], 1)


def _agree(batch: Mapping[str, Any], row: Row, num_targets: int, group: Any) -> int:
    """Returns the number of targets of all ranks. Raises on all of them if those of a row have other samples than each other.
    A collective."""
    everyone = numbers_of_all([min(row.ranks), row.place, num_targets, _digest_of(batch)], group)
    first: dict[int, tuple[int, int]] = {}
    for rank, (of_row, _, _, digest) in enumerate(everyone):
        other, expected = first.setdefault(of_row, (rank, digest))
        if digest != expected:
            raise RanksDiffer(
                f"Cannot cut sequences: rank {rank} of {len(everyone)} has other samples than rank {other}, and both have "
                "parts of the same sequences. Give the ranks along mesh['sp'] the same batches: a sampler counts by mesh['dp']."
            )
    return sum(number for _, _, number, _ in everyone)


def _digest_of(batch: Mapping[str, Any]) -> int:
    """Returns a number of 63 bits that batches with other tensors do not have in common."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            values = value.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(host_bytes(values))
    return int.from_bytes(digest.digest(), "little") >> 1
