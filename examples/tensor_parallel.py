"""A transformer whose layers are cut over ranks by torch's own plans, and whose parts are sharded over groups of ranks.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py      # layers over 2 ranks, each part in shares of 2
    torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import accelerators
import zero

CONTEXT, WIDTH, BATCH = 32, 64, 8


class Layer(nn.Module):
    """Mixes what came before each place, and then each place by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x + before))))
        return x + y


def make_model() -> nn.Module:
    """Makes the same one every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 256))


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    """Cuts the products of each layer: the first by columns, and the second by rows."""
    for layer in model:
        if isinstance(layer, Layer):
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch_of(step: int) -> torch.Tensor:
    """The samples of a step, of all groups together."""
    text = torch.tensor(list(Path(__file__).read_bytes()))  # its own source
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def train(num_steps: int = 20, stage: int = 3) -> list[float]:
    """Returns this rank's losses. Ranks that have layers together have the same samples, and so the same losses."""
    accelerator = accelerators.current()
    if not dist.is_initialized():
        dist.init_process_group(accelerator.communication_backend)
    sizes = dist.get_world_size() // 2, 2
    mesh = init_device_mesh(accelerator.device().type, sizes, mesh_dim_names=("dp", "tp"))
    model = parallelize(make_model().to(accelerator.device()), mesh["tp"])
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = zero.shard(model, adamw, stage=stage, clip=1.0, group=mesh["dp"])  # the ranks with samples of their own
    group, losses = optimizer.group, []
    for step in range(num_steps):
        samples = batch_of(step).chunk(group.size)[group.rank].to(accelerator.device())
        loss = functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses


if __name__ == "__main__":
    found = train()
    print(f"loss {found[0]:.3f}, then {found[-1]:.3f}")
