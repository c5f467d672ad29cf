"""A language model: accumulation under no_sync, a GradScaler, clipping, warm-up."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask))


def train(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(4):
        for micro in range(2):
            tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
                scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    return losses
