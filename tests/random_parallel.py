"""Parallel models drawn by seed: experts, cut layers or both over some ranks of four, beside one process on the joint batch.

    python -m tests.random_parallel SEED...           trains these again and says what is wrong with them
    python -m tests.random_parallel --first 200       those of seeds 0 to 199
    python -m tests.random_parallel --device nccl 7   on the simulated device, where streams wait for ranks; with "sim" hosts do
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import accelerators
import zero
from tests import nccl_like, ranks
from tests.experts import ALL_KINDS, COPIED, CUT, SPREAD, as_held, batches, beside_layers, group_of, loss_of, mixture, parted
from tests.promises import test_tensor_parallel as cut

WORLD, NUM_STEPS = 4, 4
HOST, WAITING_HOST, WAITING_STREAMS = DEVICES = ("cpu", "sim", "nccl")
LARGEST = 1e-10  # the largest difference in float64, after an AdamW whose eps keeps the last bit of a sum from becoming a sign


@dataclass
class Plan:
    """The choices that are drawn for a training."""

    kind: str  # the kind of experts, or "layers" for those that a plan of torch cuts
    over: int  # the number of ranks that have them together
    options: dict[str, Any] = field(default_factory=dict)
    plan: str = ""  # the plan that cuts layers
    way: str = ""  # the way of experts beside layers that are cut over two ranks, if there are any
    micro_steps: int = 1
    frozen: str = ""  # frozen parameters have this in their names
    never: int | None = None  # the expert that gets no token
    idle: int | None = None  # the step at which rank 3 has no tokens
    save_at: int | None = None
    by_user: bool = False  # the user clips

    @staticmethod
    def draw(seed: int) -> Plan:
        draw = random.Random(seed)
        stage = draw.choice((0, 1, 2, 2, 3, 3))
        options: dict[str, Any] = {"stage": stage, "bucket_bytes": draw.choice((128, 512, 2048, 2**20))}
        if draw.random() < 0.5:
            options["shared_memory"] = False
        if stage == 3:
            options |= {"keep_whole_numel": draw.choice((0, 20, 200)), "gathered_bytes": draw.choice((0, 1000, 10**9))}
        if draw.random() < 0.5:
            options["clip"] = draw.choice((0.02, 0.3))
        plan = Plan(draw.choice((*ALL_KINDS, "layers")), draw.choice((2, 4)), options)
        plan.micro_steps = draw.choice((1, 1, 2, 3))
        plan.by_user = "clip" in options and draw.random() < 0.4
        plan.save_at = draw.choice((None, None, 1, 2))
        if plan.kind == "layers":
            plan.plan, plan.frozen = draw.choice([*cut.PLANS]), draw.choice(("", "", "0.", "1.up", "2.norm"))
            return plan
        plan.over = draw.choice((1, 2, 4))
        if draw.random() < 0.3:
            options["shard_ranks"] = draw.choice((1, 2))
        plan.frozen = draw.choice(("", "", "shared", "down", "router", "embed"))
        plan.never = draw.choice((None, None, 0, 3))
        plan.idle = draw.choice((None, None, 1))
        if draw.random() < 0.4:
            plan.way = draw.choice((COPIED, CUT, SPREAD) if plan.kind.endswith("DTensors") else (COPIED, SPREAD))
            plan.over = WORLD if plan.way == SPREAD else draw.choice((1, 2)) if plan.way == COPIED else 2
        return plan

    @property
    def num_groups(self) -> int:
        """The number of ranks that have samples of their own."""
        return WORLD // self.over if self.kind == "layers" else 2 if self.way else WORLD


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02, eps=0.1)


def freeze(model: nn.Module, name_has: str) -> nn.Module:
    for name, param in model.named_parameters() if name_has else ():
        param.requires_grad_(name_has not in name)
    return model


def loss(plan: Plan, model: nn.Module, step: int, micro_step: int, index: int) -> torch.Tensor:
    device = next(model.parameters()).device
    if plan.kind == "layers":
        return cut.loss_of(model, cut.batch_of(10 * step + micro_step, index).to(device))
    tokens, targets = (each.to(device) for each in batches(WORLD, 10 * step + micro_step)[index])
    if step == plan.idle and index == plan.num_groups - 1:
        return model(tokens[:0]).sum()
    return loss_of(model, (tokens, targets))


def built(plan: Plan, rank: int, device: torch.device) -> tuple[Any, Any, int, dict[str, Any]]:
    """Returns the whole model, this rank's on a device, the number of its samples and the options that say so."""
    names = ("dp", "tp") if plan.kind == "layers" else ("ep", "tp") if plan.way else ("same", "ep")
    over = 2 if plan.way else plan.over
    mesh = init_device_mesh(device.type, (WORLD // over, over), mesh_dim_names=names)
    if plan.kind == "layers":
        model = cut.make_model()
        own = cut.parallel(copy.deepcopy(model).to(device), mesh["tp"], plan.plan)
        return model, own, mesh["dp"].get_local_rank(), {"group": mesh["dp"]}
    model = mixture(ALL_KINDS[plan.kind], plan.never)
    given = copy.deepcopy(model).to(device)
    if plan.way:
        return model, beside_layers(given, mesh, plan.way, plan.over), mesh["ep"].get_local_rank(), {"group": mesh["ep"]}
    own = parted(given, mesh["ep"])
    return model, own, rank, group_of(own)


def train(plan: Plan, rank: int, folder: str, device: torch.device = torch.device("cpu")) -> str | None:  # noqa: B008
    """Trains on this rank, and says what is wrong."""
    options, groups = dict(plan.options), plan.num_groups
    whole, model, index, given = built(plan, rank, device)
    freeze(whole, plan.frozen), freeze(model, plan.frozen)
    plain, clip = adamw(whole), options.get("clip")
    if plan.by_user:
        del options["clip"]
    optimizer = zero.shard(model, adamw(model), accumulation=plan.micro_steps, **given, **options)
    for step in range(NUM_STEPS):
        plain.zero_grad()
        for micro_step in range(plan.micro_steps):
            (loss(plan, model, step, micro_step, index) / plan.micro_steps).backward()
            for each in range(groups):
                (loss(plan, whole, step, micro_step, each) / groups / plan.micro_steps).backward()
        trained = [param for param in model.parameters() if param.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(trained, clip)) if plan.by_user and clip is not None else None
        optimizer.step()
        norm = optimizer.grad_norm if norm is None else norm
        optimizer.zero_grad()
        expected = float(nn.utils.get_total_norm([param.grad for param in whole.parameters() if param.grad is not None]))
        if clip is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), clip)
        plain.step()
        if norm is None or abs(norm / expected - 1) > LARGEST:
            return f"step {step}: the norm is {norm}, and {expected} in one process"
        if step == plan.save_at:
            zero.save(folder, optimizer)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            zero.load(folder, optimizer)
    optimizer.check()
    values = as_held(whole, model)
    for name, param in model.named_parameters():
        apart = float((cut.whole_of(param).cpu() - values[name]).abs().max())
        if not apart <= LARGEST:
            return f"{name} is {apart} off after {NUM_STEPS} steps"
    optimizer.close()
    return None


def trained(rank: int, world: int, seeds: list[int], folder: str) -> list[tuple[int, str | None]]:
    return [(seed, train(Plan.draw(seed), rank, f"{folder}/{seed}")) for seed in seeds]


def trained_on_a_device(rank: int, world: int, how: str, seeds: list[int], folder: str) -> list[tuple[int, str | None]]:
    """The same on the simulated device, over its own groups or such as NCCL's."""
    if how == WAITING_STREAMS:
        nccl_like.install(num_queues=2 if seeds[0] % 2 else 8)
    accelerator = accelerators.use("sim")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(accelerator.communication_backend, store=store, rank=rank, world_size=world)
    found = []
    for seed in seeds:
        plan = Plan.draw(seed)
        if seed % 3 == 0 and plan.options["stage"]:
            plan.options["offload"] = "cpu"
        found.append((seed, train(plan, rank, f"{folder}/{seed}", accelerator.device())))
    return found


def wrong(seeds: list[int], how: str = HOST) -> list[str]:
    """Returns what is wrong with the trainings of these seeds, with all that was drawn."""
    from tests import random_parallel  # the name by which ranks import it

    timeout = 60.0 + 10.0 * len(seeds)
    with tempfile.TemporaryDirectory() as folder:
        if how == HOST:
            found = ranks.run(WORLD, random_parallel.trained, seeds, str(Path(folder)), timeout=timeout)
        else:
            program, own_processes = random_parallel.trained_on_a_device, {"fresh": True, "group": False}
            found = ranks.run(WORLD, program, how, seeds, folder, timeout=timeout, **own_processes)
    return [f"seed {seed}, rank {rank}: {said}: {Plan.draw(seed)}"
            for rank, of_rank in enumerate(found) for seed, said in of_rank if said is not None]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", choices=DEVICES, default=HOST)
    given = parser.parse_args()
    seeds, said = given.seeds or list(range(given.first)), list[str]()
    for start in range(0, len(seeds), 10):
        said += wrong(seeds[start : start + 10], given.device)
        print(f"{min(len(seeds), start + 10)} trained, {len(said)} wrong", flush=True)
    print("\n".join(said))
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
