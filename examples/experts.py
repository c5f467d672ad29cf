"""A mixture of experts with its experts over ranks, beside a sharded rest: tokens go to the ranks of their experts and back.

    torchrun --nproc-per-node 4 examples/experts.py      # experts over 2 ranks, each of them on 2
    torchrun --nproc-per-node 4 examples/experts.py 4    # over 4
    python examples/experts.py                           # all on one

A checkpoint that one of them leaves in `experts-checkpoint` is where the next one goes on, whatever its ranks.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import accelerators
import zero

NUM_EXPERTS, TOP, WIDTH, CONTEXT, BATCH = 8, 2, 32, 32, 16


class Experts(nn.Module):
    """The experts of this rank: two weights of shape `[expert, in, out]`, for rows that are sorted by expert."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(number, 4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([functional.gelu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(parts)])


class Mixture(nn.Module):
    """Sends each token to `TOP` experts, on whatever ranks of the mesh they are."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.ranks = None if mesh is None else mesh.get_group()
        self.experts = Experts(NUM_EXPERTS if mesh is None else NUM_EXPERTS // mesh.size())
        if mesh is not None:
            zero.part(self.experts, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weight, choice = self.router(tokens).softmax(-1).topk(TOP, -1)
        choice = choice.flatten()
        order, counts = choice.argsort(stable=True), torch.bincount(choice, minlength=NUM_EXPERTS)
        rows = tokens.repeat_interleave(TOP, 0)[order]
        done = self.experts(rows, counts) if self.ranks is None else self.elsewhere(rows, counts)
        back = torch.zeros_like(done).index_copy(0, order, done).view(-1, TOP, WIDTH)
        return x + (back * weight.unsqueeze(-1)).sum(1).view(x.shape)

    def elsewhere(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size(self.ranks)
        come = torch.empty_like(counts)  # rows for each expert of this rank, from each rank
        dist.all_to_all_single(come, counts, group=self.ranks)
        send, receive = counts.view(size, -1).sum(1).tolist(), come.view(size, -1).sum(1).tolist()
        given = all_to_all_single_autograd(rows, receive, send, self.ranks)
        own = torch.arange(NUM_EXPERTS // size, device=rows.device).repeat(size)
        order = own.repeat_interleave(come).argsort(stable=True)
        done = self.experts(given[order], come.view(size, -1).sum(0))
        return all_to_all_single_autograd(torch.zeros_like(done).index_copy(0, order, done), send, receive, self.ranks)


def make_model(mesh: Any = None) -> nn.Module:
    """A model over bytes. What a rank draws for its experts is taken from the first rank that has the same ones."""
    torch.manual_seed(0 if mesh is None else mesh.get_local_rank())
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), Mixture(mesh))]
    return nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.Linear(WIDTH, 256))


def batch_of(step: int) -> torch.Tensor:
    """The samples of a step, of all ranks together."""
    text = torch.tensor(list(Path(__file__).read_bytes()))  # its own source
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def train(num_steps: int = 20, ranks_of_experts: int = 2, stage: int = 2, folder: str | None = None) -> list[float]:
    """Returns this rank's losses."""
    accelerator, mesh = accelerators.current(), None
    if dist.is_torchelastic_launched():
        dist.init_process_group(accelerator.communication_backend)
    if dist.is_initialized():
        sizes = dist.get_world_size() // ranks_of_experts, ranks_of_experts
        mesh = init_device_mesh(accelerator.device().type, sizes, mesh_dim_names=("same", "ep"))["ep"]
    model = make_model(mesh).to(accelerator.device())
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-3), stage=stage, clip=1.0)
    group, losses = optimizer.group, []
    first = zero.load(folder, optimizer) if folder is not None and zero.latest(folder) else 0
    for step in range(first, first + num_steps):
        samples = batch_of(step).chunk(group.size)[group.rank].to(accelerator.device())
        loss = functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        zero.save(folder, optimizer, extra=first + num_steps)
    optimizer.close()
    return losses


if __name__ == "__main__":
    found = train(ranks_of_experts=int(sys.argv[1]) if len(sys.argv) > 1 else 2, folder="experts-checkpoint")
    print(f"loss {found[0]:.3f}, then {found[-1]:.3f}")
