"""FSDP2 with a checkpoint of torch.distributed.checkpoint, from which a second model goes on."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(seed, stage):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer


def steps(model, optimizer, numbers):
    losses = []
    for step in numbers:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x[:, :2].abs()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(stage):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = build(0, stage)
    losses = steps(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])

    model, optimizer = build(1, stage)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return losses + steps(model, optimizer, range(3, 6))
