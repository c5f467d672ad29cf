"""Passes over a backward graph, in order. Each says what it needs and what it provides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from zero.graph.operators import OPERATOR, has_hooks, number_of
from zero.graph.queries import Known, gradients_in
from zero.window.window import window_of


@dataclass
class Backward:
    """A backward graph, and what earlier passes found in it."""

    graph: fx.Graph
    params: Sequence[Known]  # by input of the forward graph
    gradients: dict[int, nn.Parameter] = field(default_factory=dict)  # by output, those that are to be handed over


@dataclass(frozen=True)
class Pass:
    """One pass: a function, what it needs and what it provides."""

    run: Callable[[Backward], None]
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()


def check(passes: Sequence[Pass], given: Iterable[str] = ()) -> None:
    """Raises where passes cannot run in this order, before any of them runs."""
    provided = set(given)
    for number, each in enumerate(passes):
        name = each.run.__name__
        if missing := each.requires - provided:
            raise ValueError(
                f"Cannot run pass {number}, {name}: it needs {_words(missing)}, which none before it provides. Reorder them."
            )
        if unwanted := each.conflicts & provided:
            raise ValueError(
                f"Cannot run pass {number}, {name}: it cannot follow what provides {_words(unwanted)}. Leave one of them out."
            )
        provided |= each.provides


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def find_gradients(backward: Backward) -> None:
    """Finds the gradients of sharded parameters that have no hooks of users."""
    find_all_gradients(backward)
    for number, param in list(backward.gradients.items()):
        if window_of(param) is None or has_hooks(param):
            del backward.gradients[number]


def find_all_gradients(backward: Backward) -> None:
    """Finds the gradients of all parameters."""
    backward.gradients = gradients_in(backward.graph, backward.params)


def hand_over(backward: Backward) -> None:
    """Inserts the operator that takes each gradient right after it is made, and returns nothing in its place, so that nothing
    keeps it."""
    output = backward.graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    for number, param in backward.gradients.items():
        made = outputs[number]
        assert isinstance(made, fx.Node)
        with backward.graph.inserting_after(made):
            backward.graph.call_function(OPERATOR, (made, number_of(param)))
        outputs[number] = None
    output.args = (tuple(outputs),)


_FOUND, _HANDED_OVER = frozenset({"gradients"}), frozenset({"gradients handed over"})
_HAND_OVER = Pass(hand_over, provides=_HANDED_OVER, requires=_FOUND, conflicts=_HANDED_OVER)
PASSES = (Pass(find_gradients, provides=_FOUND), _HAND_OVER)
ON_TRIAL = (Pass(find_all_gradients, provides=_FOUND), _HAND_OVER)
