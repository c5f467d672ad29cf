"""Random trainings at stage 3 whose ranks take branches, stop early, evaluate and generate, each as it likes.

    python -m tests.divergence --runs 100 --world 2 3 --by memory messages collectives
    python -m tests.divergence --runs 1 --seed 1234 --world 3 --by messages    # one of them again
    python -m tests.divergence --runs 100 --by nccl --queues 2 8    # over the stand-in for NCCL, with so many hardware queues
    python -m tests.divergence --runs 100 --by nccl --crowd    # the same, with other streams in one queue in each run

Each read of a weight is, bit by bit, what plain PyTorch has after the same steps on the batches of all ranks: a hook rounds
gradients so that their sums are exact, in whatever order. The whole program of a rank follows from the seed, so that one
process can replay those of all ranks. Nothing is tried twice.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import zero
from tests import faults, nccl_like, ranks
from tests.promises.offloads import place_of

STEPS, NUM_BRANCHES, WIDTH = 5, 4, 6
STEPS_IN_ONE = 4096  # a gradient is rounded to a multiple of one part in this number
LIMIT_S = 30.0
TRANSPORTS = ("memory", "messages", "collectives")
NCCL = "nccl"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BRANCHES))

    def forward(self, x, picked):
        h = self.first(x)
        for index in picked:
            h = h + torch.tanh(self.branches[index](h))
        return self.last(h)


def build(seed, device):
    torch.manual_seed(seed)
    model = Model().to(device)
    for param in model.parameters():
        param.register_hook(rounded)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def rounded(grad):
    """Such numbers of less than 4096 in size have exact sums."""
    return grad.mul(STEPS_IN_ONE).round_().div_(STEPS_IN_ONE)


def window_of(seed, rank, step):
    """What a rank does in a window: things with their arguments, in order. All ranks have as many collectives."""
    chance = random.Random(f"{seed} {rank} {step}")

    def picked():
        return [index for index in range(NUM_BRANCHES) if chance.random() < 0.5]

    todo = [("train", picked(), chance.randrange(2**31)) for _ in range(chance.randint(1, 4))]
    todo += [("evaluate", picked(), chance.randrange(2**31)) for _ in range(chance.randint(0, 3))]
    todo += [("generate", picked(), chance.randint(1, 6)) for _ in range(chance.randint(0, 1))]
    todo += [("read", chance.randrange(NUM_BRANCHES), None) for _ in range(chance.randint(0, 4))]
    todo += [("sleep", chance.random() * 0.05, None) for _ in range(chance.randint(0, 1))]
    todo += [("collective", None, None)] * random.Random(f"{seed} all {step}").randint(0, 2)
    chance.shuffle(todo)
    return todo


def batch(data_seed, model):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(data_seed))
    return x.to(model.last.bias.device)


def train_on(model, picked, data_seed):
    x = batch(data_seed, model)
    (model(x, picked).square().mean() / 4).backward()


def edit(seed, step, model):
    """The same on all ranks."""
    chance = random.Random(f"{seed} edit {step}")
    with torch.no_grad():
        if chance.random() < 0.4:
            model.branches[chance.randrange(NUM_BRANCHES)].weight.mul_(0.75)
        if chance.random() < 0.3:
            model.last.bias[1:].add_(0.25)
        if chance.random() < 0.2:
            model.first.weight.data.clamp_(-0.5, 0.5)


def expected_weights(seed, world, device="cpu"):
    """Of plain PyTorch, in each window."""
    model, optimizer = build(seed, device)
    found = []
    for step in range(STEPS):
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
        for rank in range(world):
            for what, first, second in window_of(seed, rank, step):
                if what == "train":
                    train_on(model, first, second)
        optimizer.step()
        optimizer.zero_grad()
        edit(seed, step, model)
    found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


class Reader:
    """Compares what a rank reads, and notes how long it waited."""

    def __init__(self, model):
        self.named = dict(model.named_parameters())
        self.num_reads, self.slowest_s = 0, 0.0

    def check(self, names, expected):
        for name in names:
            begun = time.monotonic()
            value = self.named[name].detach().clone()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            self.num_reads += 1
            assert torch.equal(value, expected[name]), f"{name} is {value.tolist()}, and not {expected[name].tolist()}"


def run_rank(rank, world, seed, by, device="cpu"):
    """`by`: how weights come from other ranks, by memory that ranks share, messages, or collectives beside messages."""
    with faults.collectives_beside() if by == "collectives" else contextlib.nullcontext():
        return train(rank, world, seed, by == "memory", place_of(rank, device))


def run_over_nccl(rank, world, seed):
    return train(rank, world, seed, False, torch.device("sim", torch.sim.current_device()))


def train(rank, world, seed, shared_memory, device):
    expected = expected_weights(seed, world, device)
    model, inner = build(seed, device)
    options = {"bucket_bytes": 160, "gathered_bytes": random.Random(f"{seed} budget").choice((0, 400, "all"))}
    limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0}
    optimizer = zero.shard(model, inner, stage=3, reduce="sum", shared_memory=shared_memory, **options, **limits)
    faults.poison_freed_weights(optimizer)  # a stale read is NaN
    reader = Reader(model)
    for step in range(STEPS):
        for what, first, second in window_of(seed, rank, step):
            if what == "train":
                train_on(model, first, second)
            elif what == "evaluate":
                evaluate(reader, expected[step], model, first, second)
            elif what == "generate":
                for _ in range(second):
                    evaluate(reader, expected[step], model, first, second)
            elif what == "read":
                reader.check([f"branches.{first}.weight", "first.bias"], expected[step])
            elif what == "sleep":
                time.sleep(first)
            elif what == "collective":
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total.item() == world
        optimizer.step()
        optimizer.zero_grad()
        edit(seed, step, model)
    reader.check(reader.named, expected[STEPS])
    optimizer.close()
    return reader.num_reads, reader.slowest_s


def evaluate(reader, expected, model, picked, data_seed):
    x = batch(data_seed, model)
    with torch.no_grad():
        found = model(x, picked)
        wanted = torch.func.functional_call(model, expected, (x, picked))
    assert torch.equal(found, wanted), f"the model gives {found.tolist()}, and not {wanted.tolist()}"
    reader.check(["last.weight", *(f"branches.{index}.bias" for index in picked)], expected)


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m tests.divergence", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--by", choices=(*TRANSPORTS, NCCL), nargs="+", default=TRANSPORTS)
    parser.add_argument("--queues", type=int, nargs="+", default=[8], help="of a device, over the stand-in for NCCL")
    parser.add_argument("--crowd", action="store_true", help="streams share queues by the seed")
    parser.add_argument("--device", default="cpu", help="sim, or one that there is; cuda:staged: ranks share a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each further one has the next number")
    given = parser.parse_args(arguments)
    num_failed = 0
    for seed in range(given.seed, given.seed + given.runs):
        for world in given.world:
            for by, queues in ((way, each) for way in given.by for each in (given.queues if way == NCCL else [0])):
                apart = {} if given.device == "cpu" else {"apart": given.device}
                if by == NCCL:
                    room = {"queues": queues, "crowd": seed if given.crowd else None}
                    found = nccl_like.outcomes(world, run_over_nccl, seed, timeout=120.0, **room)
                else:
                    found = ranks.outcomes(world, run_rank, seed, by, given.device, timeout=120.0, **apart)
                right = all(outcome.ok for outcome in found)
                num_failed += not right
                reads = sum(outcome.value[0] for outcome in found) if right else 0
                slowest = max(outcome.value[1] for outcome in found) if right else 0.0
                over = f" --queues {queues}{' --crowd' if given.crowd else ''}" if queues else ""
                print(f"--seed {seed} --world {world} --by {by}{over}: ", end="")
                print(f"{reads} reads right, slowest {slowest:.3f} s" if right else ranks.describe(found), flush=True)
    print(f"{num_failed} runs failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    from tests import divergence  # ranks import what they run, by its name

    sys.exit(divergence.main(sys.argv[1:]))
