"""How many backwards make a step, as DeepSpeed counts: by calls of step, unless the caller says where a window ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Accumulation:
    """How far a window of micro-steps is, and where it ends."""

    declared: int  # micro-steps that make a step
    counted: bool  # False: the window ends where the caller steps, whatever their number
    override: bool | None = None  # the caller's own word, until the window ends
    micro_steps: int = 0  # of this window
    backwards: int = 0  # since the last micro-step
    divided: bool = False  # whether the gradients of this window carry the declared divisor
    loss: torch.Tensor | None = None  # the sum of what this rank sent backward in this window, where somebody wants to know

    @property
    def at_end(self) -> bool:
        if self.override is not None:
            return self.override
        return self.counted and self.micro_steps + 1 >= self.declared

    @property
    def num_micro_batches(self) -> int:
        """A micro-step may have several backwards; those that no micro-step has counted yet are one each."""
        return self.micro_steps + self.backwards

    def add(self, loss: torch.Tensor) -> None:
        loss = loss.detach().float().sum()
        self.loss = loss if self.loss is None else self.loss + loss

    def count(self) -> None:
        self.micro_steps += 1
        self.backwards = 0

    def begin(self) -> None:
        self.override, self.micro_steps, self.backwards, self.divided, self.loss = None, 0, 0, False, None
