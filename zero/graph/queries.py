"""Questions about graphs of torch.compile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import fx, nn

Known = Callable[[], "nn.Parameter | None"]


def parameters_in(graph: fx.Graph) -> list[Known]:
    """By number of an input: what gives the parameter that it is, as long as there is one; None for whatever else."""
    return [_parameter(node) for node in graph.nodes if node.op == "placeholder"]


def _parameter(node: fx.Node) -> Known:
    argument = node.meta.get("grapharg")
    example = None if argument is None else argument.example
    return weakref.ref(example) if isinstance(example, nn.Parameter) else lambda: None


def gradients_in(graph: fx.Graph, params: Sequence[Known]) -> dict[int, nn.Parameter]:
    """The outputs of a backward graph, by number, that are gradients of parameters: it has one for each input of the forward
    graph, in their order. Nothing where the shapes say that this is not so."""
    (outputs,) = graph.output_node().args
    if not isinstance(outputs, (list, tuple)) or len(outputs) < len(params):
        return {}
    gradients = {}
    for number, (output, known) in enumerate(zip(outputs, params, strict=False)):
        param = known()
        if param is None or not isinstance(output, fx.Node):
            continue
        if getattr(output.meta.get("val"), "shape", None) != param.shape:
            return {}
        gradients[number] = param
    return gradients
