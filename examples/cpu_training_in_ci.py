"""Two ranks train one model, sharded, on a machine without a GPU, as a CI job does. Exit status 0 says that the loss fell.

    ACCELERATOR=cpu python examples/cpu_training_in_ci.py

On a machine with several GPUs the same file runs on those: torchrun --nproc-per-node 8 examples/cpu_training_in_ci.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import accelerators
import zero

NUM_RANKS = 2
NUM_STEPS = 40


def train(num_steps: int) -> list[float]:
    """The mean loss over all ranks, step by step."""
    accelerator = accelerators.current()
    accelerator.manual_seed(0)  # the same run every time
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(accelerator.device())
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.02), stage=2)  # every rank gets rank 0's weights
    accelerator.manual_seed(1 + dist.get_rank())  # other data on each

    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 8, device=accelerator.device())
        loss = torch.nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    optimizer.close()
    return losses


def main() -> None:
    losses = train(NUM_STEPS)
    first, last = losses[0], losses[-1]
    if dist.get_rank() == 0:
        name = accelerators.current().name
        print(f"{dist.get_world_size()} ranks on {name}: loss {first:.3f}, after {NUM_STEPS} steps {last:.3f}")
    if not last < first / 2:
        sys.exit(f"Rank {dist.get_rank()}: the loss did not fall from {first:.3f} to less than half, it is {last:.3f}.")


if __name__ == "__main__":
    if "RANK" in os.environ:  # a launcher started this process
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        sys.exit(subprocess.run([*torchrun, __file__]).returncode)
