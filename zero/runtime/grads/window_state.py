"""What this rank did in the window since it last settled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class WindowState:
    """What this rank did since the last settling."""

    collected: int = 0  # parameters whose gradient was collected
    accumulated: int = 0  # parameters of which several gradients are added up before any is sent
    removed: int = 0  # parameters whose .grad the user set to None
    replaced: int = 0  # parameters whose .grad the user set to a tensor of his own
    writing: dict[int, int] = field(default_factory=dict)  # parameters whose .grad autograd is writing, and the thread
    pending: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients of this rank that wait here
    user_grads: dict[int, torch.Tensor] = field(default_factory=dict)  # the user's own tensors
    clears: int = 0  # times the user cleared all .grad while rounds were unsettled
    weights: list[float] = field(default_factory=list)  # of the micro-batches so far, where they have any
    no_contribution: bool = False  # said that it has no contribution
    failed: bool = False
    mid_update: bool = False  # in the middle of an update
    proxies_installed: bool = False  # every trainable parameter's .grad holds a `ShardedGrad`
    in_backward: bool = False
    consumed: bool = False  # nothing came since a step has used what there is
    synchronized: bool = False  # gradients of the window were made final before, so what comes now is added to final sums
    aborted: bool = False  # an error ended the window, which the other ranks know of

    @property
    def backward_failed(self) -> bool:
        """True when a backward has ended by an exception, which nobody else may have seen."""
        return self.in_backward and torch._C._current_graph_task_id() == -1

    @property
    def needs_sync(self) -> bool:
        """True when other ranks must hear of it before it can be used, or thrown away."""
        gradients = self.collected or self.pending or self.user_grads or self.removed or self.replaced
        return bool(gradients or self.clears or self.weights or self.no_contribution or self.failed or self.backward_failed)
