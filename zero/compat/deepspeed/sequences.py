"""DeepSpeed's Ulysses for models of transformers: its two classes, over `zero.ulysses` and `zero.sequence_batch`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

import accelerators
from zero.comm.torch_world import new_mesh
from zero.compat.deepspeed import comm
from zero.sequence.attention import ulysses
from zero.sequence.batch import sequence_batch


class SequenceRanks:
    """The ranks of a sequence, as an `mpu` says them. Gradients are averaged over all ranks, as each has tokens of its own."""

    def __init__(self, size: int) -> None:
        device = accelerators.current().device()
        self.mesh = new_mesh(device, data=comm.get_world_size() // size, sequence=size)
        self.sequence_ranks = size

    def get_sequence_parallel_group(self) -> Any:
        """Returns the group of the ranks that have the parts of the same sequences."""
        return self.mesh["sequence"].get_group()

    def get_sequence_parallel_world_size(self) -> int:
        """Returns the number of ranks that have the parts of the same sequences."""
        return self.sequence_ranks

    def get_sequence_parallel_rank(self) -> int:
        """Returns the number of this rank's part."""
        return self.mesh["sequence"].get_local_rank()

    def get_data_parallel_group(self) -> Any:
        """Returns the group of all ranks."""
        return comm.get_world_group()

    def get_model_parallel_world_size(self) -> int:
        """Returns 1, as no layer is cut."""
        return 1

    def get_model_parallel_group(self) -> None:
        """Returns None, as no layer is cut."""


class UlyssesSPAttentionHF:
    """The call of a script before `initialize`."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str = "sdpa", sequence_parallel_size: int = 1, **_: Any
    ) -> SequenceRanks | None:
        """Exchanges the attention of a model over so many neighbouring ranks, and returns the `mpu` for `initialize`; None for
        one rank. A collective."""
        if sequence_parallel_size == 1:
            return None
        if not isinstance(model_name_or_path, nn.Module):
            raise ValueError(
                f"Cannot exchange the attention of {model_name_or_path!r}: it is no model yet, and positions of whole "
                "sequences are given to a model. Load it first, and pass the model itself."
            )
        if core_attn_implementation != "sdpa":
            raise ValueError(
                f"Cannot use core_attn_implementation={core_attn_implementation!r}: attention is torch's own here, which has "
                "flash kernels too. Pass 'sdpa'."
            )
        ranks = SequenceRanks(sequence_parallel_size)
        ulysses(ranks.mesh["sequence"], model_name_or_path)
        return ranks


class UlyssesSPDataLoaderAdapter:
    """A loader whose batches all ranks of a sequence share: each rank's own ones come in turn, cut to this rank's tokens, with
    `shift_labels`. Every batch is a collective of these ranks."""

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.group, self.size, self.device = dl, sp_group, sp_world_size, device

    def __len__(self) -> int:
        return len(self.dl) * self.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.dl:
            batches: list[Any] = [None] * self.size
            comm.all_gather_object(batches, batch, group=self.group)
            for each in batches:
                part, _ = sequence_batch(each, self.group, self.group)
                yield {
                    name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in part.items()
                }
