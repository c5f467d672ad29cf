"""torch.compile with a backward that hands gradients over inside its graph.

An operator hands each gradient to its window, at the place where it was made. Passes over the backward graph put it there, and
the backend of torch.compile runs them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

import accelerators
from zero.graph.regions import blocks_in, has_absent, make_regions
from zero.graph.torch_private import (
    compile_with,
    cudagraph_unsafe,
    has_cuda_graphs,
    inner_call,
    is_wanted,
    replace_call,
    why_not,
)
from zero.plan.budget import MOST_HELD
from zero.window.hooks import are_alone, nodes_of
from zero.window.short_path import Lent
from zero.window.window import Window, window_of

Known = Callable[[], "nn.Parameter | None"]

_numbers: dict[int, int] = {}  # by id
_params: list[weakref.ref[nn.Parameter]] = []  # by the number that stands in the graphs

logger = logging.getLogger("zero")


def parameters_in(graph: fx.Graph) -> list[Known]:
    """Returns for each input, by its number, what gives the parameter that it is, as long as there is one; None for whatever
    else."""
    return [_parameter(node) for node in graph.nodes if node.op == "placeholder"]


def _parameter(node: fx.Node) -> Known:
    argument = node.meta.get("grapharg")
    example = None if argument is None else argument.example
    return weakref.ref(example) if isinstance(example, nn.Parameter) else lambda: None


def gradients_in(graph: fx.Graph, params: Sequence[Known]) -> dict[int, nn.Parameter]:
    """The outputs of a backward graph, by number, that are gradients of parameters: it has one for each input of the forward
    graph, in their order. Nothing where the number or the shapes say that this is not so: an input that is several tensors, as
    a DTensor may be, has several outputs, and those after it come later."""
    (outputs,) = graph.output_node().args
    if not isinstance(outputs, (list, tuple)) or len(outputs) != len(params):
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


def number_of(param: nn.Parameter) -> int:
    """Returns the number of a parameter in graphs."""
    number = _numbers.get(id(param))
    if number is None or _params[number]() is not param:
        number = _numbers[id(param)] = len(_params)
        _params.append(weakref.ref(param))
    return number


def param_of(number: int) -> nn.Parameter | None:
    """Returns the parameter of a number, or None once it is gone."""
    return _params[number]()


# The schema says that the operator changes the gradients, as the code that takes them does. Without that, inductor dropped the
# operator (torch 2.8).
torch.library.define("zero::hand_over", "(Tensor(a!)[] grads, int[] numbers) -> ()", tags=cudagraph_unsafe())


# The second key is that of torch.autograd.grad of several gradients at once, which accumulates none.
@torch.library.impl("zero::hand_over", ("CompositeExplicitAutograd", "Batched"))
def _hand_over_now(grads: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """Hands gradients to the windows of the parameters with these numbers. The graph holds the numbers only, so that it keeps
    nothing alive."""
    of_windows: dict[Window, list[Lent]] = {}
    for grad, number in zip(grads, numbers, strict=True):
        param = param_of(number)
        if param is None or not param.requires_grad or not is_wanted(param, nodes_of(param)):
            continue  # autograd accumulates none of a frozen one
        if not are_alone(param):  # autograd would call them with None, after all work of this graph
            raise RuntimeError(
                f"Cannot call the hook of a parameter of shape {tuple(param.shape)}: it was registered after the forward, "
                "which was compiled for none. Register hooks before the forward."
            )
        window, dtype = window_of(param), getattr(param, "grad_dtype", param.dtype)
        if dtype is not None and grad.dtype is not dtype:
            grad = grad.to(dtype)  # autograd casts a gradient in the same way
        if window is None:
            torch.autograd.backward(param, grad.clone())  # the graph goes on to use its own memory
        else:
            of_windows.setdefault(window, []).append((window.params.index[id(param)], grad))
    for window, lent in of_windows.items():
        window.hand_over(lent)


def _fake(grads: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """Runs in place of the operator while torch traces."""


torch.library.register_fake("zero::hand_over", _fake)

OPERATOR = torch.ops.zero.hand_over.default
torch.fx.node.has_side_effect(OPERATOR)  # a side effect is all that it has


@dataclass
class Backward:
    """A backward graph, and what earlier passes found in it."""

    graph: fx.Graph
    params: Sequence[Known]  # by input of the forward graph
    # By output: the parameters whose gradients are handed over.
    gradients: dict[int, nn.Parameter] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """A pass: a function, what it needs and what it provides."""

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
        if window_of(param) is None or not are_alone(param):
            del backward.gradients[number]


def find_all_gradients(backward: Backward) -> None:
    """Finds the gradients of all parameters."""
    backward.gradients = gradients_in(backward.graph, backward.params)


def hand_over(backward: Backward) -> None:
    """Inserts the operator that takes gradients right after they are made, and returns nothing in their place, so that nothing
    keeps them."""
    output = backward.graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    for numbers in _lists_of(backward, outputs):
        made = [outputs[number] for number in numbers]
        with backward.graph.inserting_after(made[-1]):
            params = [number_of(backward.gradients[number]) for number in numbers]
            backward.graph.call_function(OPERATOR, (made, params))
        for number in numbers:
            outputs[number] = None
    output.args = (tuple(outputs),)


def _lists_of(backward: Backward, outputs: Sequence[fx.Node]) -> Iterator[Sequence[int]]:
    """Yields the numbers of gradients in the order of their making, in lists that one call takes: small ones that follow each
    other, of `MOST_HELD` elements together, or a large one alone. One tensor may be the gradient of several parameters, but
    stands in a list once."""
    places = {node: place for place, node in enumerate(backward.graph.nodes)}
    numbers, room = list[int](), MOST_HELD
    for number in sorted(backward.gradients, key=lambda number: places[outputs[number]]):
        numel = backward.gradients[number].numel()
        if numbers and (numel > room or outputs[number] is outputs[numbers[-1]]):
            yield numbers
            numbers, room = [], MOST_HELD
        numbers.append(number)
        room -= numel
    if numbers:
        yield numbers


_FOUND, _HANDED_OVER = frozenset({"gradients"}), frozenset({"gradients handed over"})
_HAND_OVER = Pass(hand_over, provides=_HANDED_OVER, requires=_FOUND, conflicts=_HANDED_OVER)
PASSES = (Pass(find_gradients, provides=_FOUND), _HAND_OVER)
ON_TRIAL = (Pass(find_all_gradients, provides=_FOUND), _HAND_OVER)


class HasModule(Protocol):
    """An engine, or anything else with the model in `module`."""

    @property
    def module(self) -> nn.Module: ...


Compiled = TypeVar("Compiled", bound=nn.Module | HasModule)


class HandingOver:
    """A backend for torch.compile: another backend, with gradients of sharded parameters handed over inside the backward graph.

    [Note: handed over] All gradients of a compiled graph come out at its end, alive together, when nothing of the backward is
    left that their reduction could overlap. Here each gradient is passed to an operator where it is made, which does what the
    hooks of a parameter do otherwise; small ones wait for the next few, as a call costs more than they do. A graph has the
    number of the parameter only; which window takes the gradient is asked at that moment. So a graph knows nothing of a step,
    and keeps nothing of it alive.

    [Note: of other parameters] Parameters are inputs of a graph, and torch calls one graph for all modules with the same code:
    where graphs break inside blocks, each block has that of the first one. Its numbers would hand the gradients of all blocks
    to the first. So it is called with its own parameters only. For others torch compiles the same graph again, once, without
    the operator. Fails without it:
    tests/zero/graph/test_hand_over.py::test_blocks_whose_graphs_break_keep_their_gradients_apart.
    """

    def __init__(self, backend: str, passes: Sequence[Pass] = PASSES) -> None:
        self.backend = backend
        self.handed_over: set[int] = set()  # the numbers of parameters
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

        compiled = compile_with(self.backend, mode, graph, inputs, rewrite)
        known = [(number, param) for number, param in enumerate(params) if param() is not None]
        of_others = torch.compile(graph, backend=self.backend, mode=mode)

        def call(*args: Any) -> Any:
            is_own = all(args[number] is param() for number, param in known)
            return (compiled if is_own else of_others)(*args)

        return call


def compile(
    model_or_engine: Compiled,
    backend: Any = None,
    mode: str | None = None,
    *,
    blocks: type[nn.Module] | Sequence[nn.Module] | None = None,
    **options: Any,
) -> Compiled:
    """Compiles a model in place, so that its backward hands the gradients of sharded parameters over as it makes them. Returns
    what was passed. Not a collective.

    At stage 3 the model's `blocks` are compiled, each as one graph, and the code between them is not.

    Args:
        model_or_engine: A model, a part of one, or an engine, whose model is compiled.
        backend: As torch.compile takes it.
        mode: As torch.compile takes it.
        blocks: The modules to compile at stage 3, or a class of modules; by default those that repeat side by side in a
            container.
        **options: Other options of torch.compile.
    """
    module = model_or_engine if isinstance(model_or_engine, nn.Module) else model_or_engine.module
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    backend = backend or accelerators.of(device).compile_backend
    reason = why_not(backend) if isinstance(backend, str) else f"{backend!r} is a backend of its own"
    if has_absent(module):
        regions = blocks_in(module, blocks)
        if regions:
            options["fullgraph"] = True
            make_regions(regions, functools.partial(torch.compile, backend=backend, mode=mode, **options))
            return model_or_engine
        reason = "weights are in shares, and are gathered between the graphs"
        if options.get("fullgraph"):
            raise ValueError(
                "Cannot compile with fullgraph=True at stage 3: the graph breaks where a weight is gathered, and the model has "
                "no blocks that repeat. Name them with blocks=, leave fullgraph out, or use stage 2."
            )
    if reason is None and "options" in options:
        reason = "torch takes options= for its own backends only"
    if reason is None and _loses_gradients(backend):
        reason = f"the {backend} of torch {torch.__version__} leaves out what hands them over"
    if reason is None and has_cuda_graphs(mode) and not cudagraph_unsafe():
        raise ValueError(
            f"Cannot compile with mode={mode!r}: torch {torch.__version__} would replay a step without handing its gradients "
            "over. Use another mode, or a torch whose operators can be tagged cudagraph_unsafe."
        )
    if reason is not None:
        logger.warning("Gradients are reduced after each compiled backward, and not during it: %s.", reason)
        replace_call(module, torch.compile(inner_call(module), backend=backend, mode=mode, **options))
    else:
        replace_call(module, _Call(inner_call(module), backend, mode=mode, **options))
    return model_or_engine


def as_regions(
    model_or_engine: Compiled, *, blocks: type[nn.Module] | Sequence[nn.Module] | None = None
) -> Compiled:
    """Makes stage 3 gather all weights of a block at once. Without it, each operator gathers the weights that it is given,
    which takes the host longer. Does nothing at other stages. Returns what was passed. Not a collective.

    Args:
        model_or_engine: A model, a part of one, or an engine.
        blocks: The modules to gather at once, or a class of modules; by default those that repeat side by side in a container.
    """
    module = model_or_engine if isinstance(model_or_engine, nn.Module) else model_or_engine.module
    make_regions(blocks_in(module, blocks), None)
    return model_or_engine


class _Trial(nn.Linear):
    """The model of a trial, whose sizes are no others of a Linear."""


@functools.cache
def _loses_gradients(backend: str) -> bool:
    """Tries once whether the compiler keeps an operator without a result. One that removes it would lose every gradient
    silently."""
    model, x = _Trial(2, 2), torch.ones(1, 2)
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
        if not all(are_alone(param) for param in params if param is not None):
            self._backend = HandingOver(self._backend.backend)
            self._compiled = torch.compile(self._call, backend=self._backend, **self._options)
        return self._compiled(*args, **kwargs)
