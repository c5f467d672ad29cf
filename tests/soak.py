"""A long training on two ranks that fail at random, go on, save, and start again; at night and on request.

    python -m tests.soak                       2,000 steps, about one fault in 25
    python -m tests.soak --steps 300 --seed 5  others

What comes out must be, bit by bit, what comes out where nothing fails: weights, the optimizer's state, the schedule and the
loss of every step. The faults and the saves follow from the seed. What a rank's program does about them is what a user's
would: a step that failed is cleared and taken again, ranks that lost each other connect anew, and whoever is torn in the
middle of an update loads the latest checkpoint, as ranks do that were started again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.faults import FailingAdamW, end_as_the_interpreter_does
from zero.errors import GroupLost, RanksDiffer, ZeroError

WORLD = 2
LIMIT_S = 3.0  # the ranks' own limit; a rank that stalls does so for more than twice as long
MOST_S = 600.0  # the limit of one start of the ranks
STEPS_A_FAULT, STEPS_A_SAVE = 25, 12
KEPT = 3

# What goes wrong, how many times in 100, and at which places.
KINDS = {
    "raises, and goes on": (30, ("forward", "backward", "after the backward", "update")),
    "overflows": (15, ("forward",)),
    "stalls": (8, ("forward", "backward", "after the backward", "update")),
    "raises, and ends": (12, ("forward", "backward", "update", "after the step")),
    "is killed": (17, ("forward", "backward", "update", "after the step", "save")),
    "is interrupted": (6, ("forward", "backward", "after the step")),
    "ends, and starts again": (12, ("after the step",)),
}
ENDS = ("raises, and ends", "is killed", "is interrupted", "ends, and starts again")  # all ranks are started again after these
ALL_ARE_THERE = ("did not come", "all ranks are there")  # the texts of a lost group after which ranks connect anew


class Trouble(Exception):
    """What a rank's own program raises."""


@dataclass(frozen=True)
class Fault:
    step: int
    kind: str
    where: str
    rank: int
    delay_s: float  # the seconds from the beginning of a save


def faults(steps: int, seed: int) -> dict[int, Fault]:
    chance, drawn = random.Random(f"faults {seed}"), {}
    for step in range(2, steps + 1):
        if chance.random() < 1 / STEPS_A_FAULT:
            [kind] = chance.choices(list(KINDS), [often for often, _ in KINDS.values()])
            where = chance.choice(KINDS[kind][1])
            drawn[step] = Fault(step, kind, where, chance.randrange(WORLD), chance.random() * 0.02)
    return drawn


def saves(step: int, seed: int, fault: Fault | None) -> str | None:
    """How the training is saved after a step."""
    chance = random.Random(f"save {seed} {step}")
    due = chance.random() < 1 / STEPS_A_SAVE or (fault is not None and fault.where == "save")
    return chance.choice(("at once", "in the background")) if due else None


class Program:
    """What one rank does, from wherever the latest checkpoint is."""

    def __init__(self, rank: int, folder: Path, planned: dict[int, Fault], over: set[int], seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
        self.model = nn.Sequential(*layers)
        inner = FailingAdamW(self.model.parameters(), lr=0.02)
        inner.at = lambda: self.at("update")
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 500)
        limits = {"timeout_s": LIMIT_S, "first_step_timeout_s": 60.0, "elementwise": True}
        self.optimizer = zero.shard(self.model, inner, stage=2, bucket_bytes=1024, on_nonfinite="skip", **limits)
        self.rank, self.folder, self.seed = rank, folder, seed
        self.planned, self.over = planned, set(over)
        self.done = self.load()
        self.model[3].weight.register_hook(lambda _: self.at("backward"))

    def load(self) -> int:
        self.note("load")
        return zero.load(self.folder / "saved", self.optimizer, scheduler=self.schedule)["steps"] if self.is_saved else 0

    @property
    def is_saved(self) -> bool:
        return zero.latest(self.folder / "saved") is not None

    def save(self, step: int, async_save: bool) -> None:
        saving = {"extra": {"steps": step}, "scheduler": self.schedule, "keep_last": KEPT, "async_save": async_save}
        zero.save(self.folder / "saved", self.optimizer, f"step{step}", **saving)
        self.note("save")

    def note(self, *words: object) -> None:
        """What happened, for whoever reads it at the end; a line is whole or not there."""
        with (self.folder / f"rank {self.rank}").open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def due(self, where: str) -> Fault | None:
        fault = self.planned.get(self.done + 1)
        if fault is None or fault.where != where or fault.step in self.over:
            return None
        concerns = fault.rank == self.rank or fault.kind == "ends, and starts again"
        return fault if concerns else None

    def at(self, where: str) -> None:
        fault = self.due(where)
        if fault is None:
            return
        self.over.add(fault.step)
        self.note("fault", fault.step)
        if fault.kind == "raises, and goes on":
            raise Trouble(fault.where)
        if fault.kind == "raises, and ends":
            end_as_the_interpreter_does(ArithmeticError("too much of it"))
        if fault.kind == "stalls":
            time.sleep(2 * LIMIT_S + 1.0)
        elif fault.kind == "is interrupted":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1.0)
            except KeyboardInterrupt as error:
                end_as_the_interpreter_does(error)
        elif fault.kind == "is killed" and where == "save":
            threading.Timer(fault.delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        elif fault.kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, steps: int) -> str | None:
        """Trains to that step; the fault that ends it before."""
        if not self.is_saved:
            self.save(0, async_save=False)
        while self.done < steps:
            torn = False
            try:
                loss = self.forward_and_backward()
                skipped = self.optimizer.skipped_steps
                torn = True
                self.optimizer.step()
                torn = False
                if self.optimizer.skipped_steps > skipped:
                    self.optimizer.zero_grad()
                    continue
                self.optimizer.zero_grad()
                self.note("loss", self.done + 1, loss.hex())
            except (Trouble, ZeroError) as error:
                if isinstance(error, GroupLost) and not any(said in str(error) for said in ALL_ARE_THERE):
                    raise
                self.go_on_after(error, torn and isinstance(error, Trouble))
                continue
            self.schedule.step()
            try:
                if self.finish_step() is not None:
                    return "ends, and starts again"
            except RanksDiffer as error:  # this rank came to a save, and the other one failed in the update before
                self.go_on_after(error, torn=False)
        self.save(steps, async_save=False)
        return None

    def forward_and_backward(self) -> float:
        step = self.done + 1
        torch.manual_seed(hash((self.seed, step, self.rank)))
        x = torch.randn(8, 16)
        overflow = self.due("forward")
        if overflow is not None and overflow.kind == "overflows":
            x[0, 0] = torch.inf
        self.at("forward")
        loss = (self.model(x) - x[:, :4]).square().mean()
        loss.backward()
        self.at("after the backward")
        return loss.item()

    def finish_step(self) -> Fault | None:
        """What follows a step that was taken; the fault after which this program starts again."""
        ends = self.due("after the step")
        self.at("after the step")
        how = saves(self.done + 1, self.seed, self.planned.get(self.done + 1))
        self.at("save")
        self.done += 1
        if how is not None:
            self.save(self.done, how == "in the background")
        return ends if ends is not None and ends.kind == "ends, and starts again" else None

    def go_on_after(self, error: Exception, torn: bool) -> None:
        if isinstance(error, (GroupLost, RanksDiffer)):
            self.note("rebuild")
            try:
                self.optimizer.rebuild()
            except ZeroError:
                torn = True
        else:
            self.note("clear")
            try:
                self.optimizer.zero_grad()
            except RanksDiffer as lost:  # the other rank has stepped, and came to a save
                self.go_on_after(lost, torn)
                return
        if self.optimizer.any_rank(torn):
            self.done = self.load()


def train(rank: int, world: int, folder: Path, planned: dict[int, Fault], over: set[int], steps: int, seed: int) -> object:
    if threading.current_thread() is threading.main_thread():
        # A process that a shell starts in the background lacks this handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    program = Program(rank, folder, planned, over, seed)
    ended = program.run(steps)
    if ended is not None:
        return None
    weights = {name: weight.detach().clone() for name, weight in program.model.named_parameters()}
    state = program.optimizer.state_dict()
    del state["skipped_steps"]  # the steps that overflowed were taken again
    # A load draws an order of its own.
    state["state"] = {name: dict(sorted(held.items())) for name, held in sorted(state["state"].items())}
    return {"weights": weights, "state": state, "schedule": dict(sorted(program.schedule.state_dict().items()))}


@dataclass
class Result:
    """What came of a training."""

    ends: list[object]  # by rank
    losses: list[dict[str, str]]  # by rank and step
    counts: Counter[str]
    faults: Counter[str]


def train_through(folder: Path, planned: dict[int, Fault], steps: int, seed: int) -> Result:
    """Starts the ranks until they are through, and looks whether who did not fail named who did."""
    folder.mkdir()
    for starts in itertools.count(1):  # noqa: B007 - it is looked at below
        over = {int(line.split()[1]) for line in _lines(folder) if line.startswith("fault")}
        found = ranks.outcomes(WORLD, train, folder, planned, over, steps, seed, timeout=MOST_S)
        if all(outcome.ok and outcome.value is not None for outcome in found):
            break  # every rank came to the last step
        now = {int(line.split()[1]) for line in _lines(folder) if line.startswith("fault")} - over
        _check_ends(found, [planned[step] for step in sorted(now)])
    counts = Counter({"start": starts}) + Counter(line.split()[0] for line in _lines(folder, rank=0))
    losses = [dict(line.split()[1:] for line in _lines(folder, rank) if line.startswith("loss")) for rank in range(WORLD)]
    return Result([outcome.value for outcome in found], losses, counts, Counter(fault.kind for fault in planned.values()))


def _lines(folder: Path, rank: int | None = None) -> list[str]:
    paths = sorted(folder.glob("rank *")) if rank is None else [folder / f"rank {rank}"]
    return [line for path in paths for line in path.read_text().splitlines()]


def _check_ends(found: Sequence[ranks.Outcome], happened: Sequence[Fault]) -> None:
    assert happened and happened[-1].kind in ENDS, f"{happened[-1:]}\n{ranks.describe(found)}"
    fault = happened[-1]
    if fault.kind == "ends, and starts again":
        assert all(outcome.ok for outcome in found), ranks.describe(found)
        return
    for outcome in found:
        if outcome.rank == fault.rank:
            assert outcome.kind == "died", f"{fault}\n{ranks.describe(found)}"
        else:
            named = outcome.kind in ("GroupLost", "CheckpointFailed") and f"rank {fault.rank} " in outcome.text.lower()
            assert named, f"{fault}\n{ranks.describe(found)}"


def difference(calm: Result, disturbed: Result) -> str | None:
    for rank in range(WORLD):
        if calm.losses[rank] != disturbed.losses[rank]:
            step = next(step for step, loss in calm.losses[rank].items() if disturbed.losses[rank].get(step) != loss)
            return f"the loss of step {step} on rank {rank}"
    for rank, (one, other) in enumerate(zip(calm.ends, disturbed.ends, strict=True)):
        found = inside.first_difference(one, other, f"rank {rank}")
        if found is not None:
            return found
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="A long training with faults, and one without.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20260801)
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    planned = faults(given.steps, given.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        begun = time.monotonic()
        calm = train_through(Path(folder) / "calm", {}, given.steps, given.seed)
        print(f"{given.steps} steps undisturbed in {time.monotonic() - begun:.0f} s", flush=True)
        begun = time.monotonic()
        disturbed = train_through(Path(folder) / "disturbed", planned, given.steps, given.seed)
        left = sorted(path.name for path in (Path(folder) / "disturbed" / "saved").iterdir())
    print(f"{given.steps} steps with {len(planned)} faults in {time.monotonic() - begun:.0f} s:")
    print("    " + ", ".join(f"{count} {kind}" for kind, count in disturbed.faults.most_common()))
    print("    " + ", ".join(f"{disturbed.counts[what]} x {what}" for what in ("start", "load", "save", "clear", "rebuild")))
    print(f"    left in the folder of checkpoints: {', '.join(left)}")
    found = difference(calm, disturbed)
    print("Every loss, weight and state is bit by bit the same." if found is None else f"The first difference: {found}")
    return 0 if found is None and len(left) == KEPT + 1 else 1


if __name__ == "__main__":
    from tests.soak import main as imported_main  # ranks import what they run, and this file by its name

    sys.exit(imported_main())
