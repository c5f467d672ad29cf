"""accelerate's loop, sharded: ShardedAccelerator in the place of Accelerator, and nothing else changes.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero.integrations.accelerate import ShardedAccelerator

NUM_SAMPLES, CLIP = 64, 0.1


def make_model() -> nn.Module:
    """Makes the model, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.square().mean(1, keepdim=True))


def train(num_steps: int, save_to: str | None = None, resume_from: str | None = None, **options: Any) -> list[Any]:
    """Trains, and returns this rank's losses and the weights at the end."""
    accelerator = ShardedAccelerator(zero={"stage": 2}, gradient_accumulation_steps=2, **options)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(make_data(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume_from is not None:
        accelerator.load_state(resume_from)
        loader = accelerator.skip_first_batches(loader, accelerator.step)

    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 2 * num_steps:
            break
    if save_to is not None:
        accelerator.save_state(save_to)
    accelerator.sharded.close()
    return [losses, accelerator.unwrap_model(model).state_dict()]


if __name__ == "__main__":
    print("loss " + " ".join(f"{loss:.3f}" for loss in train(4)[0]))
