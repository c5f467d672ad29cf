"""A model of bytes on long sequences, of which each rank of a row has a part; several rows have samples of their own.

    torchrun --nproc-per-node 2 examples/long_context.py       # sequences over 2 ranks
    torchrun --nproc-per-node 4 examples/long_context.py 2     # over 2 of 4, each two with samples of their own
    python examples/long_context.py                            # whole sequences on one
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accelerators
import zero

LENGTH, WIDTH, HEADS, BATCH = 256, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        z: torch.Tensor = self.mlp(x)
        return x + z


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: torch.Tensor = self.head(x)
        return logits


def batch_of(step: int, row: int) -> dict[str, torch.Tensor]:
    """The samples of a step, of one row of ranks, with labels beside their own tokens."""
    text = torch.tensor(list(Path(zero.__file__).read_bytes()))
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(1000 * step + row))
    tokens = text[starts + torch.arange(LENGTH)]
    return {"input_ids": tokens, "labels": tokens}


def train(num_steps: int = 20, ranks_of_sequence: int | None = None, stage: int = 3) -> list[float]:
    """Returns the losses: the mean over the tokens of all ranks."""
    accelerator = accelerators.current()
    if dist.is_torchelastic_launched():
        dist.init_process_group(accelerator.communication_backend)
    torch.manual_seed(0)
    model, mesh, row = Model().to(accelerator.device()), None, 0
    if dist.is_initialized():
        size = ranks_of_sequence or dist.get_world_size()
        sizes = dist.get_world_size() // size, size
        both: Any = init_device_mesh(accelerator.device().type, sizes, mesh_dim_names=("dp", "sp"))
        mesh, row = both["sp"], both["dp"].get_local_rank()
        zero.ulysses(mesh, model)  # attention sees whole sequences
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-3), stage=stage, clip=1.0, reduce="sum")
    losses = []
    for step in range(num_steps):
        part, num_targets = zero.sequence_batch(batch_of(step, row), mesh)
        part = {name: value.to(accelerator.device()) for name, value in part.items()}
        logits = model(part["input_ids"], part["position_ids"])
        loss = functional.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum") / num_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item())
    optimizer.close()
    return losses


if __name__ == "__main__":
    found = train(ranks_of_sequence=int(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(f"loss {found[0]:.3f}, then {found[-1]:.3f}")
