"""What a user says about a window: which backwards belong to it, what they count, and when its gradients are final."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from zero.sharding.state import ShardingState


class Windows:
    """The part of a sharded optimizer that speaks of windows."""

    step: Callable[..., Any]
    zero_grad: Callable[..., None]

    @property
    def parts(self) -> ShardingState:
        raise NotImplementedError

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside wait on this rank until the window is settled. No collective."""
        with self.parts.window.policy.no_sync():
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the backwards to come end the accumulation, until the window ends. No collective."""
        self.parts.window.policy.override = bool(is_boundary)

    def weight(self, amount: float) -> None:
        """The micro-batch to come, of as many backwards as it has, counts `amount`, its tokens for instance: the gradient
        becomes the mean over the weights of all ranks and micro-batches. Zero is allowed. No collective."""
        window = self.parts.window
        if not 0 <= amount < float("inf"):
            raise ValueError(
                f"weight({amount}) was asked for, but a weight is a finite number of 0 or more. Pass what the batch counts."
            )
        window.check_cleared()
        since = window.state
        unweighted = (since.collected or since.pending) and not since.weights
        if since.synchronized or unweighted:
            why = "was settled already, so its mean is taken" if since.synchronized else "has a gradient without a weight"
            raise ValueError(
                f"weight({amount}) was asked for, but this window {why}. Give every micro-batch of a window its weight, before "
                "clipping, reading gradients or stepping, or none."
            )
        window.state.weights.append(float(amount))
        window.scaling.weight = float(amount)

    def no_contribution(self) -> None:
        """This rank has nothing to send backward in this window; it counts as zeros. No collective."""
        window = self.parts.window
        self.parts.offloader.check("no_contribution", "weights", "gradients")
        window.check_cleared()
        window.state.no_contribution = True
        if not window.state.proxies_installed:
            window.install_proxies()  # what all ranks clip by is global, here too

    def settle(self) -> None:
        """Makes the gradients of this window final, as the first operation on one does. A collective."""
        self.parts.offloader.check("settle", "weights", "gradients")
        self.parts.window.settle("settle")

    def discard(self) -> None:
        """Throws this window's gradients away. A collective, unless a step has used the window and nothing came since."""
        self.zero_grad()

    def flush(self) -> None:
        """Steps on what there is and clears it. A collective."""
        self.step()
        self.zero_grad()
