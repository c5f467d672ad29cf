"""One rank of one system of `peers.py`, in a process of its own, with the system's fastest flags.

Every system is a function that gets the fp32 model and returns what computes a micro-batch's loss and sends it backward, and
what steps. Nothing but `ours` imports this project, so that the others run in whatever environment they are installed in.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peer_models import batch, build
from torch import nn

RATE, CLIP = 1e-4, 1.0
_EVERY_S = 0.002
_TCP_INFO_RECEIVED = 128  # the offset of a socket's count of received bytes


class System(NamedTuple):
    # Takes rows, and whether they are the last micro-batch; returns the loss.
    backward: Callable[[torch.Tensor, bool], torch.Tensor]
    step: Callable[[], object]
    predicted_bytes: int = 0  # a rank's weights, gradients and states, if the system predicts them


def half(options: argparse.Namespace) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]


def bare(model: nn.Module, options: argparse.Namespace) -> System:
    """Makes a system of forward and backward alone: no communication, no step."""
    model = model.to(half(options))

    def backward(rows: torch.Tensor, last: bool) -> torch.Tensor:
        loss = model(rows)
        (loss / options.accumulation).backward()
        return loss.detach()

    weights_and_gradients = 2 * sum(param.nbytes for param in model.parameters())
    return System(backward, model.zero_grad, weights_and_gradients)


def plain(model: nn.Module, options: argparse.Namespace) -> System:
    """Makes a system of one rank alone, with fp32 masters: what a step costs without any sharding."""
    model = model.to(half(options))
    params = list(model.parameters())
    masters = [param.detach().float().clone() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=RATE, fused=True)

    def backward(rows: torch.Tensor, last: bool) -> torch.Tensor:
        loss = model(rows)
        (loss / options.accumulation).backward()
        return loss.detach()

    def step() -> None:
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([param.detach() for param in params], masters)

    return System(backward, step)


def ddp(model: nn.Module, options: argparse.Namespace, sharded: bool = False) -> System:
    """Makes DDP on weights of the training's dtype: it keeps no fp32 masters."""
    model = nn.parallel.DistributedDataParallel(
        model.to(half(options)), gradient_as_bucket_view=True, static_graph=options.accumulation == 1
    )
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=RATE, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def backward(rows: torch.Tensor, last: bool) -> torch.Tensor:
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(rows)
            (loss / options.accumulation).backward()
        return loss.detach()

    return System(backward, stepping(model, optimizer))


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns what plain torch does after the backwards: clip, step, and clear the gradients."""

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(
    model: nn.Module, options: argparse.Namespace, reshard: bool = False, sizes: tuple[int, ...] | None = None
) -> System:
    """Makes FSDP2: as ZeRO-2, where whole parameters stay from forward to backward, or as ZeRO-3, with `reshard`.
    Gradients travel in the training's dtype. `sizes` are those of a mesh of two dimensions, if the ranks have one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes = sizes or (options.world,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    policy = MixedPrecisionPolicy(param_dtype=half(options), reduce_dtype=half(options))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def backward(rows: torch.Tensor, last: bool) -> torch.Tensor:
        model.set_requires_gradient_sync(last)
        loss = model(rows)
        (loss / options.accumulation).backward()
        return loss.detach()

    return System(backward, stepping(model, optimizer))


def deepspeed(model: nn.Module, options: argparse.Namespace, stage: int, offload: bool = False) -> System:
    import deepspeed as their

    sharding: dict[str, Any] = {
        "stage": stage, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": options.their_bucket,
        "allgather_bucket_size": options.their_bucket,
    }  # fmt: skip
    if offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": options.dtype == "bf16"},
        "gradient_clipping": CLIP,
        "zero_optimization": sharding,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
        "steps_per_print": 10**9,
    }
    engine, *_ = their.initialize(model=model, model_parameters=model.parameters(), config=config)
    return driven(engine)


def driven(engine: Any) -> System:
    """Makes a system of an engine, which divides by the accumulation and knows which micro-batch is the last."""

    def backward(rows: torch.Tensor, last: bool) -> torch.Tensor:
        loss = engine(rows)
        engine.backward(loss)
        if not last:
            engine.step()
        return loss.detach()

    return System(backward, engine.step)


def ours(
    model: nn.Module,
    options: argparse.Namespace,
    stage: int,
    offload: bool = False,
    shared: bool = True,
    in_regions: bool = False,
    **more: Any,
) -> System:
    import zero
    from zero.config.schema import Batch, OptimizerSpec
    from zero.plan.budget import PlannedTraining, cost_of

    config = zero.ZeroConfig(
        stage=stage,
        dtype="bfloat16" if options.dtype == "bf16" else None,
        clip=CLIP,
        batch=Batch.of(micro_samples=options.batch, accumulation=options.accumulation, world_size=options.world),
        kernels=options.kernels,
        optimizer=OptimizerSpec.of("AdamW", {"lr": RATE, "weight_decay": 0.01}),
        offload="cpu" if offload else None,
        shared_memory=shared,
        **({"bucket_bytes": options.our_bucket} if options.our_bucket else {}),
        **more,
    )
    engine, optimizer, *_ = zero.initialize(model=model, config=config)
    if getattr(options, "compile", False):
        zero.compile(engine, "inductor")
    elif in_regions:
        zero.as_regions(engine)
    in_one_pass = options.kernels != "torch"
    layout, rank = optimizer.sharding.layout_ref.layout, optimizer.sharding.group.inner.rank
    training = PlannedTraining(num_ranks=options.world, one_host=shared, fused_step=in_one_pass)
    cost = cost_of(layout, stage, rank, options.accumulation, training)
    return driven(engine)._replace(predicted_bytes=cost.peak)


class Uncomputed(nn.Module):
    """The parameters of a model, each of which gets a gradient of zeros."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([0.0 * param.flatten()[0].float() for param in self.model.parameters()]).sum()


SYSTEMS: dict[str, Callable[[nn.Module, argparse.Namespace], System]] = {
    "bare": bare,
    "plain": plain,
    "ddp": ddp,
    "ddp-zero": lambda model, options: ddp(model, options, sharded=True),
    "fsdp2": fsdp2,
    "fsdp2-3": lambda model, options: fsdp2(model, options, reshard=True),
    "fsdp2-host": lambda model, options: fsdp2(model, options, sizes=(options.hosts, options.ranks)),
    "deepspeed-1": lambda model, options: deepspeed(model, options, 1),
    "deepspeed-2": lambda model, options: deepspeed(model, options, 2),
    "deepspeed-3": lambda model, options: deepspeed(model, options, 3),
    "deepspeed-2-offload": lambda model, options: deepspeed(model, options, 2, offload=True),
    "ours-0": lambda model, options: ours(model, options, 0),
    "ours-1": lambda model, options: ours(model, options, 1),
    "ours-2": lambda model, options: ours(model, options, 2),
    "ours-3": lambda model, options: ours(model, options, 3),
    "ours-3-regions": lambda model, options: ours(model, options, 3, in_regions=True),
    "ours-2-uncomputed": lambda model, options: ours(Uncomputed(model), options, 2),
    "ours-1-host": lambda model, options: ours(model, options, 1, shard_ranks="host"),
    "ours-2-host": lambda model, options: ours(model, options, 2, shard_ranks="host"),
    "ours-3-host": lambda model, options: ours(model, options, 3, shard_ranks="host"),
    "ours-2-int8": lambda model, options: ours(model, options, 2, reduce_dtype="int8"),
    "ours-2-offload": lambda model, options: ours(model, options, 2, offload=True),
    "ours-1-gloo": lambda model, options: ours(model, options, 1, shared=False),
    "ours-2-gloo": lambda model, options: ours(model, options, 2, shared=False),
    "ours-3-gloo": lambda model, options: ours(model, options, 3, shared=False),
}


def received_bytes() -> int:
    """Returns the bytes that came to this process through TCP so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(int(name))) as wire:
            if wire.family in (socket.AF_INET, socket.AF_INET6) and wire.type == socket.SOCK_STREAM:
                info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("<Q", info, _TCP_INFO_RECEIVED)[0]
    return total


def crossed_bytes() -> tuple[int, int]:
    """Returns the bytes that left this host so far and those that came, with headers, without what it sent to itself."""
    rows = [line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    counts = [counts.split() for name, counts in rows if name.strip() != "lo"]
    return sum(int(each[8]) for each in counts), sum(int(each[0]) for each in counts)


@contextlib.contextmanager
def watched(samples: list[tuple[float, ...]]) -> Iterator[None]:
    """Notes every two milliseconds the time, the bytes that left this host and that came, and this process's processor time."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            samples.append((time.perf_counter(), *crossed_bytes(), time.process_time()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def resident() -> tuple[int, int]:
    """The peak of resident bytes, and of memory that others see too this process's part: of a page that two see, a half."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    parts = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    peak, shared, part = (int(text.split()[0]) * 1024 for text in (lines["VmHWM"], lines["RssShmem"], parts["Pss_Shmem"]))
    return peak - shared + part, part


def timed_steps(options: argparse.Namespace, rank: int) -> Iterator[None]:
    """Yields once for each step that is timed. With `turns`, several systems train beside each other, and one of them at a time
    takes some steps: what the machine does meanwhile meets all of them."""
    if not getattr(options, "turns", None):
        yield from itertools.repeat(None, options.steps)
        return
    path, number, of = Path(options.turns["file"]), options.turns["number"], options.turns["of"]
    for turn in range(number, number + of * options.turns["turns"], of):
        while rank == 0 and int(path.read_text()) < turn:
            time.sleep(_EVERY_S)
        dist.barrier()
        yield from itertools.repeat(None, options.steps // options.turns["turns"])
        dist.barrier()
        if rank == 0 and int(path.read_text()) == turn:  # otherwise a system has ended by an error, and nobody waits any more
            beside = path.with_suffix(f".{number}")
            beside.write_text(str(turn + 1))
            beside.replace(path)


def train(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    model = build(options)
    num_params = sum(param.numel() for param in model.parameters())
    if getattr(options, "compile", False) and not options.system.startswith("ours"):
        for block in model.blocks:  # done before the blocks are wrapped, as FSDP2 documents it
            block.compile()
    system = SYSTEMS[options.system](model, options)
    del model
    number = 0

    def step(marks: list[float] | None = None) -> tuple[float, float, torch.Tensor]:
        nonlocal number
        rows = [batch(options, rank, number + micro) for micro in range(options.accumulation)]
        number += options.accumulation
        processor = time.process_time()
        begin = time.perf_counter()
        losses = [system.backward(part, micro + 1 == len(rows)) for micro, part in enumerate(rows)]
        middle = time.perf_counter()
        system.step()
        if marks is not None:
            marks += [begin, middle, time.perf_counter()]
        took = time.perf_counter() - begin, time.process_time() - processor
        return *took, torch.stack(losses).float().mean()

    found = [step() for _ in range(options.warm_up)]
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # this resets the mark of the peak
    received, sent = received_bytes(), crossed_bytes()[0]
    found += [step() for _ in timed_steps(options, rank)]
    received, sent = received_bytes() - received, crossed_bytes()[0] - sent
    peak, shared = resident()
    samples: list[tuple[float, ...]] = []
    marks: list[float] = []
    if getattr(options, "watch", False):
        with watched(samples):
            step(), step(marks), step()  # measured between other steps, as what is sent last may come when a step has ended
    losses = torch.stack([loss for *_, loss in found])
    dist.all_reduce(losses)
    return {
        "num_params": num_params,
        "seconds": [seconds for seconds, *_ in found[options.warm_up :]],
        "processor_seconds": [seconds for _, seconds, _ in found[options.warm_up :]],
        "losses": (losses / options.world).tolist(),
        "peak_bytes": peak,
        "predicted_bytes": system.predicted_bytes,
        "shared_bytes": shared,
        "received_bytes": received / options.steps,
        "sent_bytes": sent / options.steps,
        "samples": samples,
        "marks": marks,  # the times at which the watched step began, its backward ended, and the step ended
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", help="what peers.py was asked for, as JSON")
    options = argparse.Namespace(**json.loads(parser.parse_args().options))
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = train(options, rank)
    Path(options.result, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves while others still wait for a message
    os._exit(0)  # some systems end with complaints, or never


if __name__ == "__main__":
    main()
