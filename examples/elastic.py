"""Goes on training when a rank dies: from the latest complete checkpoint, with as many ranks as there are then.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or torchrun's new ranks look for the dead ones (pytorch#135712)
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py checkpoints

The launcher starts the ranks again, and each of them takes the same way through this file. To see it, let a rank die:
DIE_AT_STEP=7 kills rank 1 in its seventh step, once.
"""

import os
import signal
import sys

import torch

import accelerators
import zero

STEPS, SAVE_EVERY, SAMPLES = 12, 3, 12  # SAMPLES a step, of all ranks together, so that any number of them trains alike


def batch_of(step, rank, size):
    """Returns this rank's part of the step's samples. The samples of a step are the same at any number of ranks."""
    chance = torch.Generator().manual_seed(step)
    samples = torch.randn(SAMPLES, 8, generator=chance)
    return samples[rank::size]


def main(folder):
    accelerator = accelerators.current()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(accelerator.device())
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.02), stage=2, timeout_s=20)
    rank, size = optimizer.group.rank, optimizer.group.size
    done = zero.load(folder, optimizer)["steps"] if zero.latest(folder) else 0
    for step in range(done + 1, STEPS + 1):
        samples = batch_of(step, rank, size).to(accelerator.device())
        loss = (model(samples).squeeze(1) - samples.sum(1)).square().mean()
        loss.backward()
        if (os.environ.get("DIE_AT_STEP"), rank, os.environ.get("TORCHELASTIC_RESTART_COUNT")) == (str(step), 1, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} of {STEPS} with {size} ranks, norm {optimizer.grad_norm:.6g}", flush=True)
        if step % SAVE_EVERY == 0:
            zero.save(folder, optimizer, extra={"steps": step}, keep_last=2)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py FOLDER_FOR_CHECKPOINTS")
    main(sys.argv[1])
