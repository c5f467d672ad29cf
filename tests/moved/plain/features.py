"""accelerate: accumulation, clipping, a schedule, metrics of all ranks, and a state that training goes back to."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(stage):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    losses = []
    for epoch in range(2):
        if epoch == 1:
            accelerator.load_state(folder)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        if epoch == 0:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    return losses
