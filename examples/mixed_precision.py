"""torch.amp: fp32 weights under autocast, and a GradScaler that unscales, skips and grows on all ranks alike.

    torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

import torch
from torch import nn

import accelerators
import zero

CLIP, OVERFLOWS_AT = 0.5, 2  # at that step the loss of rank 1 is infinite, and all ranks skip it


def make_model() -> nn.Module:
    """Makes the model, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    y = x.square().mean(1, keepdim=True)
    return x, y * torch.inf if (step, rank) == (OVERFLOWS_AT, 1) else y


def train(num_steps: int = 5, enabled: bool = True) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Trains, and returns this rank's losses, the loss scales, and the weights at the end."""
    device = accelerators.current().device()
    model = make_model().to(device)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=2)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for step in range(num_steps):
        x, y = (tensor.to(device) for tensor in batch_of(step, optimizer.group.rank))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    optimizer.close()
    return losses, scales, model.state_dict()


if __name__ == "__main__":
    print("loss " + " ".join(f"{loss:.3f}" for loss in train()[0]))
