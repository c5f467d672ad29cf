"""Two ranks train one model on a machine without a GPU, as a CI job does. Exit status 0 says that the loss fell.

    ACCELERATOR=cpu python examples/cpu_training_in_ci.py

The ranks average their gradients with plain torch.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import accelerators

NUM_RANKS = 2
NUM_STEPS = 40


def train(num_steps: int) -> list[float]:
    """The mean loss over all ranks, step by step; needs a process group."""
    accelerator = accelerators.current()
    torch.manual_seed(0)  # the same model on every rank
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(accelerator.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    accelerator.manual_seed(1 + dist.get_rank())  # other data on each

    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 8, device=accelerator.device())
        loss = torch.nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()

        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def run_rank(rank: int, meeting_point: str) -> None:
    backend = accelerators.current().communication_backend
    dist.init_process_group(backend, init_method=f"file://{meeting_point}", rank=rank, world_size=NUM_RANKS)
    try:
        losses = train(NUM_STEPS)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        name = accelerators.current().name
        print(f"{NUM_RANKS} ranks on {name}: loss {losses[0]:.3f}, after {NUM_STEPS} steps {losses[-1]:.3f}")
    if not losses[-1] < losses[0] / 2:
        sys.exit(f"Rank {rank}: the loss did not fall from {losses[0]:.3f} to less than half, it is {losses[-1]:.3f}.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(str(Path(folder) / "meeting_point"),), nprocs=NUM_RANKS)
