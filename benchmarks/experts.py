"""A mixture of experts over ranks beside its peers: the same model through us, through FSDP2 with experts on their own mesh,
and through DeepSpeed's ZeRO-2 with its own layer of experts, whose script trains through us too.

    python benchmarks/experts.py                              what is installed here
    python benchmarks/experts.py --deepspeed PYTHON           and DeepSpeed, in an environment that has it (ci/setup --peers)
    python benchmarks/experts.py --ep 4 --rounds 5 --json out.json

Eight experts, two for each token, fp32, AdamW, clipped to one norm. Systems take turns, each in fresh processes. *step* is the
median over rounds of the median step, a step being as long as the slowest rank's; *peak* is what is resident, of memory that
ranks share each one's part; *wire* is what a rank receives through sockets in a step; *processor* is the time of all ranks
together, a median of steps as well. *bare* is the model with the optimizer of plain torch on each rank, and no sum over ranks:
its step and its peak are the floor of every way to train this model. Losses of FSDP2 and of us must agree, and those of
DeepSpeed's script through both; that layer weighs experts otherwise, so beside the model's they need only fall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer_systems import received_bytes, resident
from peers import found_by_ranks
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

NUM_EXPERTS, TOP, VOCABULARY, RATE, CLIP = 8, 2, 256, 1e-3, 1.0
TOLERANCE = 1e-3  # the largest difference between our losses and FSDP2's, as a ratio of the first loss
BARE, OURS, FSDP2, OURS_BY_IMPORT, DEEPSPEED = "bare", "ours", "fsdp2", "deepspeed's script by us", "deepspeed"


class Experts(nn.Module):
    """Weights of some experts, `[expert, in, out]`, for rows that are sorted by expert."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts, up, down = rows.split(counts.tolist()), self.up, self.down
        return torch.cat([functional.gelu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])


class Mixture(nn.Module):
    """Sends each token to two experts on the ranks of a mesh, and adds what comes back."""

    def __init__(self, width: int, mesh: Any) -> None:
        super().__init__()
        self.router, self.ranks = nn.Linear(width, NUM_EXPERTS, bias=False), mesh.get_group()
        whole, number = Experts(NUM_EXPERTS, width), NUM_EXPERTS // mesh.size()
        self.experts, first = Experts(number, width), mesh.get_local_rank() * number
        with torch.no_grad():
            self.experts.up.copy_(whole.up[first : first + number])
            self.experts.down.copy_(whole.down[first : first + number])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weight, choice = self.router(tokens).softmax(-1).topk(TOP, -1)
        choice = choice.flatten()
        order, counts = choice.argsort(stable=True), torch.bincount(choice, minlength=NUM_EXPERTS)
        size, come = dist.get_world_size(self.ranks), torch.empty_like(counts)
        dist.all_to_all_single(come, counts, group=self.ranks)
        send, receive = counts.view(size, -1).sum(1).tolist(), come.view(size, -1).sum(1).tolist()
        given = all_to_all_single_autograd(tokens.repeat_interleave(TOP, 0)[order], receive, send, self.ranks)
        own = torch.arange(NUM_EXPERTS // size).repeat(size).repeat_interleave(come).argsort(stable=True)
        done = self.experts(given[own], come.view(size, -1).sum(0))
        done = all_to_all_single_autograd(torch.zeros_like(done).index_copy(0, own, done), send, receive, self.ranks)
        back = torch.zeros_like(done).index_copy(0, order, done).view(-1, TOP, x.shape[-1])
        return x + (back * weight.unsqueeze(-1)).sum(1).view(x.shape)


def model_of(options: argparse.Namespace, mixture: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    width = options.width
    layers = [layer for _ in range(options.layers) for layer in (nn.Linear(width, width), mixture(width))]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


def mesh_of(options: argparse.Namespace) -> Any:
    return init_device_mesh("cpu", (options.world // options.ep, options.ep), mesh_dim_names=("same", "ep"))


def loss_of(model: Any, samples: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


Step = Callable[[torch.Tensor], torch.Tensor]


def bare(options: argparse.Namespace) -> Step:
    mesh = mesh_of(options)
    model = model_of(options, lambda width: Mixture(width, mesh["ep"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(samples: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, samples)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(options: argparse.Namespace) -> Step:
    import zero

    mesh = mesh_of(options)
    model = model_of(options, lambda width: Mixture(width, mesh["ep"]))
    for module in model.modules():
        if isinstance(module, Experts):
            zero.part(module, mesh["ep"])
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=RATE), stage=2, clip=CLIP)

    def step(samples: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(options: argparse.Namespace) -> Step:
    """Experts over the ranks that have the same ones, the rest over all, and norms joined by hand, as it cannot clip over two
    meshes."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(options)
    model = model_of(options, lambda width: Mixture(width, mesh["ep"]))
    everyone = init_device_mesh("cpu", (options.world,))
    of_experts = []
    for module in model:
        if isinstance(module, Mixture):
            fully_shard(module.experts, mesh=mesh["same"], reshard_after_forward=False)
            module.experts.set_gradient_divide_factor(options.world)
            module.experts.set_force_sum_reduction_for_comms(True)
            of_experts += list(module.experts.parameters())
            fully_shard(module, mesh=everyone, reshard_after_forward=False)
    fully_shard(model, mesh=everyone, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    chosen = set(of_experts)
    rest = [param for param in model.parameters() if param not in chosen]

    def step(samples: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, samples)
        loss.backward()
        squares = [nn.utils.get_total_norm([p.grad for p in params]).full_tensor().square() for params in (rest, of_experts)]
        dist.all_reduce(squares[1], group=mesh["ep"].get_group())
        norm = sum(squares).sqrt()
        nn.utils.clip_grads_with_norm_(rest, CLIP, norm)
        nn.utils.clip_grads_with_norm_(of_experts, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(options: argparse.Namespace, name: str = "deepspeed") -> Step:
    their, layer, utils = (import_module(f"{name}{part}") for part in ("", ".moe.layer", ".moe.utils"))
    their.init_distributed("gloo")

    class Theirs(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))
            self.layer = layer.MoE(width, expert, NUM_EXPERTS, options.ep, k=TOP, capacity_factor=2.0, use_rts=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            added: torch.Tensor = self.layer(x)[0]
            return x + added

    model = model_of(options, Theirs)
    groups = utils.split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = their.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=RATE, fused=True), config={
        "train_micro_batch_size_per_gpu": options.batch, "gradient_clipping": CLIP, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2, "overlap_comm": False}, "zero_allow_untested_optimizer": True,
    })  # fmt: skip

    def step(samples: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, samples)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[[argparse.Namespace], Step]] = {
    BARE: bare, OURS: ours, FSDP2: fsdp2, OURS_BY_IMPORT: partial(deepspeed, name="zero.compat.deepspeed"), DEEPSPEED: deepspeed
}  # fmt: skip


def as_rank(options: argparse.Namespace) -> None:
    """Trains one system on this rank, and writes what it found."""
    torch.set_num_threads(1)
    if options.system not in (OURS_BY_IMPORT, DEEPSPEED):
        dist.init_process_group("gloo")
    step = SYSTEMS[options.system](options)
    rank, seconds, processor, losses = dist.get_rank(), [], [], []
    for number in range(options.warm_up + options.steps):
        if number == options.warm_up:
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # this resets the mark of the peak
            received = received_bytes()
        generator = torch.Generator().manual_seed(1000 * number + rank)
        start = torch.randint(VOCABULARY, (options.batch, 1), generator=generator)
        samples = (start + torch.arange(options.context + 1) * 7) % VOCABULARY
        begin, of_processor = time.perf_counter(), time.process_time()
        losses.append(step(samples))
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - of_processor)
    found = torch.stack(losses)
    dist.all_reduce(found)
    result = {
        "seconds": seconds[options.warm_up :],
        "processor": processor[options.warm_up :],
        "losses": (found / options.world).tolist(),
        "peak_bytes": resident()[0],
        "received_bytes": (received_bytes() - received) / options.steps,
    }
    Path(options.result, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


def run(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the ranks of one system found, put together."""
    python = options.deepspeed if system == DEEPSPEED else sys.executable
    found, _ = found_by_ranks([python, __file__, "--as-rank"], system, options, threads=1)
    return {
        "step": statistics.median(map(max, zip(*(each["seconds"] for each in found), strict=True))),
        "processor": statistics.median(map(sum, zip(*(each["processor"] for each in found), strict=True))),
        "peak_bytes": max(each["peak_bytes"] for each in found),
        "received_bytes": max(each["received_bytes"] for each in found),
        "losses": found[0]["losses"],
    }


def wrong_losses(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    of_systems = {system: runs[0]["losses"] for system, runs in found.items()}
    wrong = [f"{system}: its losses do not fall" for system, losses in of_systems.items() if losses[-1] >= losses[0]]
    for one, other in ((OURS, FSDP2), (OURS_BY_IMPORT, DEEPSPEED)):
        if one in of_systems and other in of_systems:
            first = of_systems[one][0]
            apart = max(abs(a - b) / first for a, b in zip(of_systems[one], of_systems[other], strict=True))
            if apart > TOLERANCE:
                wrong.append(f"{other} and {one}: losses are up to {apart:.5f} apart")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("world", 4), ("ep", 2), ("width", 256), ("layers", 3), ("batch", 4), ("context", 64), ("steps", 10),
                        ("warm-up", 4), ("rounds", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--deepspeed", help="a Python that has DeepSpeed")
    parser.add_argument("--json")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        as_rank(argparse.Namespace(**json.loads(options.as_rank)))
    systems = [name for name in SYSTEMS if name != DEEPSPEED or options.deepspeed]
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for _ in range(options.rounds):
        for system in systems:
            found[system].append(run(system, options))
    heads = ("step", "of it ours", "processor", "peak", "of it ours", "wire", "last loss")
    print("|", " | ".join((f"{options.world} ranks, experts over {options.ep}", *heads)), "|")
    print("|---|---|---|---|---|---|---|---|")
    for system, runs in found.items():
        step, processor = (1000 * statistics.median(each[key] for each in runs) for key in ("step", "processor"))
        of_ours = found[OURS_BY_IMPORT if system == DEEPSPEED else OURS]
        pairs = list(zip(of_ours, runs, strict=True))
        times, peaks = (statistics.median(one[key] / other[key] for one, other in pairs) for key in ("step", "peak_bytes"))
        peak, wire = (statistics.median(each[key] for each in runs) / 2**20 for key in ("peak_bytes", "received_bytes"))
        cells = (f"{step:.0f} ms", f"{times:.2f}", f"{processor:.0f} ms", f"{peak:.0f} MiB", f"{peaks:.2f}", f"{wire:.1f} MiB")
        print("|", " | ".join((system, *cells, f"{runs[0]['losses'][-1]:.3f}")), "|")
    if options.json:
        Path(options.json).write_text(json.dumps(found))
    wrong = wrong_losses(found)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
