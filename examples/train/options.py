"""The options of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero.plan.homes import KINDS

WEIGHTS = "weights"
_SAME = ("layers", "width", "context", "batch", "dropout", "seed")


def heads_of(width: int) -> int:
    """Returns the number of heads of a layer of this width; a head is 64 wide."""
    return max(1, width // 64)


@dataclass(frozen=True)
class Options:
    """The options of a training, as they were given."""

    directory: str
    data: str | None
    steps: int
    batch: int  # the samples of a step, of all ranks together
    layers: int
    width: int
    context: int
    dropout: float
    lr: float
    seed: int
    stage: int
    dtype: str
    offload: str
    homes: Sequence[str]  # each is KIND=PLACE
    accumulation: int
    compile: bool
    save_every: int
    log_every: int
    tensorboard: bool
    json: bool

    def check(self) -> None:
        """Raises where these options make no training."""
        if not self.directory:  # an empty name comes from a variable that was not set, and does not mean the current directory
            raise ValueError("Cannot train with --directory '': it names none. Give '.' for the current one.")
        counts = ("steps", "batch", "layers", "width", "context", "accumulation", "save_every", "log_every")
        for name in counts:
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ValueError(f"Cannot train with {option}: it is at least 1. Raise it.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"Cannot train with --dropout {self.dropout}: it is a probability. Give 0 or more and less than 1."
            )
        if not 0.0 < self.lr < math.inf:
            raise ValueError(f"Cannot train with --lr {self.lr}: a learning rate is finite and above 0. Try 1e-3.")
        if self.width > 64 and self.width % 64:
            raise ValueError(f"Cannot train with --width {self.width}: heads are 64 wide. Give a multiple of 64, or less.")
        self.homes_at(self.stage)

    def homes_at(self, stage: int) -> dict[str, str]:
        """Returns where each kind of state lives at a stage. A home of weights counts only at the stage of the training."""
        homes = {}
        for given in self.homes:
            kind, _, place = given.partition("=")
            if kind not in (WEIGHTS, *KINDS) or not place:
                raise ValueError(
                    f"Cannot train with --homes {given}: it has another form. Give KIND=PLACE, of {WEIGHTS}, {', '.join(KINDS)}"
                    " and of cpu, disk:/a/directory."
                )
            if kind != WEIGHTS or stage == self.stage:
                homes[kind] = place
        return homes

    def check_ranks(self, num_ranks: int) -> None:
        """Raises where some rank would have nothing to do."""
        if self.batch < num_ranks * self.accumulation:
            raise ValueError(
                f"Cannot train with --batch {self.batch}: {num_ranks} ranks of {self.accumulation} micro-batches need "
                f"{num_ranks * self.accumulation} samples or more. Raise it."
            )

    @property
    def heads(self) -> int:
        return heads_of(self.width)

    @property
    def checkpoints(self) -> Path:
        return Path(self.directory) / "checkpoints"

    @property
    def records(self) -> Path:
        return Path(self.directory) / "records.jsonl"

    @property
    def report(self) -> Path:
        return Path(self.directory) / "report.html"

    def identity(self, text_digest: str) -> dict[str, Any]:
        """The options that a resumed training must have in common with the saved one."""
        return {**{name: value for name, value in asdict(self).items() if name in _SAME}, "text": text_digest}
