"""The trainings that `gpu.py` and `nine_minutes.py` time on an accelerator, each made by the name of its way."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peer_models import build
from torch import nn

import accelerators

ON_DEVICE = ("stage 0", "stage 1", "stage 2", "stage 3", "stage 1 compiled", "stage 1 fp32")
# These ways do not clip: the step is taken after the backward, or in it as far as gradients have come.
UNCLIPPED = ("stage 2 offloaded unclipped", "stage 2 offloaded in backward")
OFFLOADED = ("stage 2 offloaded", "stage 3 offloaded", *UNCLIPPED)
PEERS = ("fsdp2", "fsdp2 offloaded", "deepspeed 2 offloaded", "deepspeed 3 offloaded")
WAYS = ("plain", "plain fp32", "plain compiled", *ON_DEVICE, *OFFLOADED, *PEERS)
GATHERED = 0.25  # the ratio of weights on the host that the device has in whole ones
RATE, CLIP = 1e-4, 1.0
MIB = 2**20

Step = Callable[[torch.Tensor], torch.Tensor]


class Training(NamedTuple):
    """A model in training, one way or another."""

    step: Step  # steps on a batch, and returns its loss
    num_params: int
    predicted: dict[str, int] | None = None  # predicted bytes of states, of the peak and of the host, if the way is ours


def training_of(way: str, options: argparse.Namespace) -> Training:
    """Returns the training that a way is. `options.more` are further ones of `zero.shard`, and `options.group` its group."""
    with accelerators.current().device():
        model = build(options)
    num_params = sum(param.numel() for param in model.parameters())
    if way.startswith("plain"):
        step = plain(model, half="fp32" not in way)
        for part in (model.blocks if "blocks" in way else [model]) if "compiled" in way else ():
            part.compile(backend=accelerators.current().compile_backend)
        return Training(step, num_params)
    if way.startswith("fsdp2"):
        return Training(fsdp2(model, "offloaded" in way, "compiled" in way), num_params)
    if way.startswith("deepspeed"):
        return Training(deepspeed(model, int(way.split()[1]), options.batch, "offloaded" in way), num_params)
    from zero.plan.budget import PlannedTraining, budget_of

    step, optimizer = ours(model, way, options)
    budget = budget_of(optimizer.sharding.layout_ref.layout, training=PlannedTraining(num_backwards=1))
    return Training(step, num_params, {"states": budget.states, "peak": budget.peak, "host": budget.host_peak})


def plain(model: nn.Module, half: bool) -> Step:
    """Returns a step with masters made by hand, operators on lists throughout, and the fused kernel."""
    masters = [param.detach().float().clone() for param in model.parameters()] if half else list(model.parameters())
    if half:
        model.bfloat16()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=RATE, fused=True)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(rows)
        loss.backward()
        if half:
            for master, param in zip(masters, params, strict=True):
                master.grad = param.grad.float() if param.grad is not None else None
                param.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if half:
            torch._foreach_copy_([param.detach() for param in params], masters)
        return loss.detach()

    return step


def ours(model: nn.Module, way: str, options: argparse.Namespace) -> tuple[Step, Any]:
    import zero

    optimizer = zero.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=RATE, fused="offloaded" not in way),
        **{
            "stage": int(way.split()[1]),
            "dtype": None if "fp32" in way else "bfloat16",
            "clip": None if way in UNCLIPPED else CLIP,
            "kernels": "compiled" if "offloaded" in way else "fused",
            "offload": {"home": "cpu", "step_in_backward": "in backward" in way} if "offloaded" in way else None,
            "bucket_bytes": options.bucket or "auto",
            "group": getattr(options, "group", None),
            **(weights_on_the_host(model) if way == "stage 3 offloaded" else {}),
            **getattr(options, "more", {}),
        },
    )
    if "compiled" in way:
        for part in model.blocks if way == "stage 2 compiled" else [model]:  # compiling a whole model takes minutes
            zero.compile(part)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def weights_on_the_host(model: nn.Module) -> dict[str, Any]:
    num_params = sum(param.numel() for param in model.parameters())
    return {"homes": {"weights": "cpu"}, "gathered_bytes": int(GATHERED * 2 * num_params)}


def fsdp2(model: nn.Module, offloaded: bool, compiled: bool) -> Step:
    """Returns a step of FSDP2, which frees weights after forward if they have another home: one rank gains nothing else."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    device = accelerators.current()
    backends = f"cpu:gloo,{device.name}:{device.communication_backend}"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    home = CPUOffloadPolicy() if offloaded else OffloadPolicy()
    for block in model.blocks if compiled else ():
        block.compile(backend=device.compile_backend)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy, offload_policy=home, reshard_after_forward=offloaded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(model: nn.Module, stage: int, batch: int, offloaded: bool) -> Step:
    """Returns a step of DeepSpeed, with torch's AdamW on the device, as DeepSpeed's own kernels take minutes to build."""
    import deepspeed as their

    there = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = None if offloaded else torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    if offloaded:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}
        config["zero_optimization"] |= {"offload_optimizer": there, **({"offload_param": there} if stage == 3 else {})}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    engine, *_ = their.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(rows)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
