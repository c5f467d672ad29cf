"""The private parts of torch's compiler that are used, with a fallback where a version lacks them."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import _has_any_global_hook

# A function that changes a backward graph in place.
Rewrite = Callable[[torch.fx.GraphModule], None]


def why_not(backend: str) -> str | None:
    """Returns why gradients cannot be handed over inside the graphs of a backend; None where they can."""
    if backend not in _COMPILERS:
        return f"only {' and '.join(sorted(_COMPILERS))} let us at the backward graph, and not {backend}"
    try:
        compiler = _COMPILERS[backend][0]()
    except ImportError as error:
        return f"torch {torch.__version__} has no {backend} that we know: {error}"
    if _COMPILERS[backend][1] not in inspect.signature(compiler).parameters:
        return f"the {backend} of torch {torch.__version__} does not take a compiler of ours"
    if not hasattr(torch._C, "_will_engine_execute_node"):
        return f"torch {torch.__version__} does not tell which gradients are wanted"
    return None


def has_cuda_graphs(mode: str | None) -> bool:
    """Returns whether a mode of the compiler may replay recorded CUDA graphs, which would not call the operator."""
    return mode in ("reduce-overhead", "max-autotune")


def cudagraph_unsafe() -> tuple[Any, ...]:
    """Returns the tag of operators that CUDA graphs must not record, or nothing where torch has none."""
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    return () if tag is None else (tag,)


def compile_with(
    backend: str, mode: str | None, graph: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: Rewrite
) -> Callable[..., Any]:
    """Compiles with the backend of that name, after `rewrite` has changed the backward graph."""
    from torch._functorch import config

    # The cache has graphs as they were before `rewrite`, or after another one.
    with config.patch(enable_autograd_cache=False):
        find, _, compile_by = _COMPILERS[backend]
        compiled: Callable[..., Any] = compile_by(find(), mode, graph, inputs, rewrite)
        return compiled


# The code of the function that calls modules of a class, by class. Torch counts compilations by code, and compiles for sizes
# that change what differs between two calls of it, so modules of other classes must not count as calls of the same one.
_codes: weakref.WeakKeyDictionary[type, types.CodeType] = weakref.WeakKeyDictionary()


def inner_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Returns the part of a module to compile. `module.compile` compiles nothing of a module of torch's own, such as a
    Sequential: only frames of others are looked into, and what they call."""
    call_impl: Callable[..., Any] = module._call_impl
    kind = type(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_impl(*args, **kwargs)

    name = f"call of {kind.__module__}.{kind.__qualname__}"  # torch keeps sizes by it
    call.__code__ = _codes.setdefault(kind, call.__code__.replace(co_name=name))
    return call


def replace_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Makes calls of the module call `call`, as after `module.compile`. Copies of the module and its state dict do not have
    it."""
    module._compiled_call_impl = call


def compiler_errors() -> type[Exception]:
    """Returns the class of errors which say that something cannot be compiled, and that nothing of it was run."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def is_transformed() -> bool:
    """Returns whether a transform of torch.func runs, as grad or vmap."""
    return bool(torch._C._are_functorch_transforms_active())


def calls_for_every_module() -> bool:
    """Returns whether there are hooks of all modules, which are told what module is called."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def hooks_of_saved_tensors() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Returns the hooks that pack and unpack what is saved now, as of a checkpoint; if there are none, some without effect."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (lambda tensor: tensor, lambda packed: packed) if hooks is None else hooks


def is_wanted(param: torch.nn.Parameter, nodes: Iterable[Any]) -> bool:
    """Returns whether the backward going on accumulates the gradient of a parameter, of which these nodes are known; raises
    where it is to be returned instead."""
    will_run = torch._C._will_engine_execute_node
    try:
        # The parameter may have a node that is not known yet. To ask for it takes longer than all else that is done here.
        return any(map(will_run, nodes)) or bool(will_run(get_gradient_edge(param).node))
    except RuntimeError as error:
        raise RuntimeError(
            "Cannot run torch.autograd.grad for a parameter: a graph of zero.compile hands gradients over as they are made and "
            "returns none. Call it on a model compiled by torch.compile, or not compiled."
        ) from error


def _inductor() -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def _by_inductor(
    compile_fx: Callable[..., Any], mode: str | None, graph: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: Rewrite
) -> Any:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(module: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            rewrite(module)
        return compile_fx_inner(module, examples, **options)

    patches = list_mode_options(mode) if mode else None
    return compile_fx(graph, inputs, inner_compile=inner, config_patches=patches)


def _aot_eager() -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager


def _by_aot_eager(
    aot_eager: Callable[..., Any], mode: str | None, graph: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: Rewrite
) -> Any:
    from torch._dynamo.backends.debugging import boxed_nop

    def backward(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        rewrite(module)
        return boxed_nop(module, examples)

    return aot_eager(graph, list(inputs), bw_compiler=backward)


# By name: the function that finds a compiler, the argument that it must take, and the function that calls it.
_COMPILERS = {
    "inductor": (_inductor, "inner_compile", _by_inductor),
    "aot_eager": (_aot_eager, "bw_compiler", _by_aot_eager),
}
