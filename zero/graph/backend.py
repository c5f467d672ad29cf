"""torch.compile with a backward that hands gradients over inside its graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

import accelerators
from zero.graph.operators import has_hooks, number_of, param_of
from zero.graph.passes import ON_TRIAL, PASSES, Backward, Pass, check
from zero.graph.queries import parameters_in
from zero.graph.torch_private import (
    compile_with,
    cudagraph_unsafe,
    has_cuda_graphs,
    inner_call,
    replace_call,
    why_not,
)
from zero.runtime.params.absent import Absent

logger = logging.getLogger("zero")


class HasModule(Protocol):
    """An engine, or anything else with the model in `module`."""

    @property
    def module(self) -> nn.Module: ...


Compiled = TypeVar("Compiled", bound=nn.Module | HasModule)


class HandingOver:
    """A backend for torch.compile: another backend, with gradients of sharded parameters handed over inside the backward graph.

    [Note: handed over] All gradients of a compiled graph come out at its end, alive together, when nothing of the backward is
    left that their reduction could overlap. Here each gradient is passed to an operator where it is made, which does what the
    hooks of a parameter do otherwise. A graph has the number of the parameter only; which window takes the gradient is asked at
    that moment. So a graph knows nothing of a step, and keeps nothing of it alive.
    """

    def __init__(self, backend: str, passes: Sequence[Pass] = PASSES) -> None:
        self.backend = backend
        self.handed_over: set[int] = set()  # numbers of parameters
        self._passes = passes
        check(passes)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None) -> Callable[..., Any]:
        params = parameters_in(graph.graph)

        def rewrite(module: fx.GraphModule) -> None:
            backward = Backward(module.graph, params)
            for each in self._passes:
                each.run(backward)
            self.handed_over.update(number_of(param) for param in backward.gradients.values())
            module.recompile()

        return compile_with(self.backend, mode, graph, inputs, rewrite)


def compile(model_or_engine: Compiled, backend: Any = None, mode: str | None = None, **options: Any) -> Compiled:
    """Compiles a model, a part of one, or an engine's model in place, as torch.compile does, so that its backward hands the
    gradients of sharded parameters over as it makes them. Returns what was passed. `options` are those of torch.compile."""
    module = model_or_engine if isinstance(model_or_engine, nn.Module) else model_or_engine.module
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    backend = backend or accelerators.get(device.type).compile_backend
    reason = why_not(backend) if isinstance(backend, str) else f"{backend!r} is a backend of its own"
    if any(isinstance(param, Absent) for param in module.parameters()):
        reason = "weights are in shares, and are gathered between the graphs"
        if options.get("fullgraph"):
            raise ValueError(
                "Cannot compile with fullgraph=True at stage 3: the graph breaks where a weight is gathered. Leave fullgraph "
                "out, or use stage 2."
            )
    if reason is None and _loses_gradients(backend):
        reason = f"the {backend} of torch {torch.__version__} leaves out what hands them over"
    if reason is None and has_cuda_graphs(mode) and not cudagraph_unsafe():
        raise ValueError(
            f"Cannot compile with mode={mode!r}: torch {torch.__version__} would replay a step without handing its gradients "
            "over. Use another mode, or a torch whose operators can be tagged cudagraph_unsafe."
        )
    if reason is not None:
        logger.warning("Gradients take the ordinary way, at the end of each compiled backward: %s.", reason)
        replace_call(module, torch.compile(inner_call(module), backend=backend, mode=mode, **options))
    else:
        replace_call(module, _Call(inner_call(module), backend, mode=mode, **options))
    return model_or_engine


@functools.cache
def _loses_gradients(backend: str) -> bool:
    """Tries once whether the compiler keeps an operator without a result. One that removes it would lose every gradient
    silently."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    torch.compile(inner_call(model), backend=HandingOver(backend, ON_TRIAL))(x).sum().backward()
    grads = [param.grad for param in (model.weight, model.bias)]
    return any(grad is None or not torch.equal(grad, torch.ones_like(grad)) for grad in grads)


class _Call:
    """A compiled call. It is compiled anew when a parameter has got a hook that its graphs do not know."""

    def __init__(self, call: Callable[..., Any], backend: str, **options: Any) -> None:
        self._call = call
        self._options = options
        self._backend = HandingOver(backend)
        self._compiled = torch.compile(call, backend=self._backend, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        params = (param_of(number) for number in self._backend.handed_over)
        if any(has_hooks(param) for param in params if param is not None):
            self._backend = HandingOver(self._backend.backend)
            self._compiled = torch.compile(self._call, backend=self._backend, **self._options)
        return self._compiled(*args, **kwargs)
