"""Blocks at stage 3 that count as one operator each: a graph for all blocks of a kind, unbroken where weights are gathered.

[Note: regions]
At stage 3 the graph of a model breaks wherever a weight is gathered. In a *region* it need not: the chunks of a block's weights
are acquired before its call and released after it, and the weights are inputs of its graph like any others. So a graph belongs
to a kind of blocks and has nothing of a single one: it is traced with a copy of one block on the meta device, and all blocks
that differ in their tensors alone use it. What the graph saves of a weight is where it lies in its chunk, and no memory. The
backward of a region, which is one node, acquires the chunks again and releases them when it has run.

For each call the copy has the attributes of the block that is called, as they are at that time, and the block gets those that
its forward set. So the compiler sees what is changed, and makes another graph, as it does for a block without a region. A block
whose parts change, or that gets a hook, is looked at anew.

Autograd sees one node more, which makes weights of absent parameters: their gradients are what it is given.
"""

from __future__ import annotations

import copy
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from zero.graph.torch_private import (
    compiler_errors,
    hooks_of_saved_tensors,
    inner_call,
    is_transformed,
    node_of_graph,
    replace_call,
)
from zero.memory.addresses import address_of
from zero.memory.gathered import GatheredChunk
from zero.runtime.params.absent import Absent, never_compile, plain_tensors

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

logger = logging.getLogger("zero")

_OF_TORCH = frozenset((*vars(nn.Module()), "_compiled_call_impl"))  # attributes of parameters, hooks, children and compiling
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_DEEPEST = 4  # nodes between an output and the node of its graph, which are views of what that returns


class Kind:
    """All blocks that differ in their tensors alone, and their graph."""

    def __init__(self, block: nn.Module, compile_: Compile) -> None:
        self.is_eager = False  # as the compiler cannot do it
        template = _on_meta(block)
        self.held = [vars(module) for module in template.modules()]  # attributes of the copy
        self.known = [frozenset(held) for held in self.held]

        def run(tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return functional_call(template, tensors, args, kwargs)

        # The compiler counts the graphs of a code object, and gives up when there are many: each kind has one of its own.
        code = run.__code__.replace(co_name=f"region_of_{type(block).__name__}")
        self.call = compile_(types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__))

    def attributes_of(self, modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
        """Returns each attribute of a block of this kind: where the block has it, where the copy has it, and its name."""
        return [
            (vars(module), copied, key)
            for module, copied in zip(modules, self.held, strict=True)
            for key in vars(module)
            if key not in _OF_TORCH or key == "training"
        ]


class Region:
    """The call of a block whose weights are absent: what it has learned of the block holds until a part of it changes.

    Whatever it is not compiled for is called as the block itself would be.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        kinds: dict[object, Kind],
        make: Callable[[nn.Module], Kind],
        tell: Callable[[str, str], None],
    ) -> None:
        self._block = weakref.ref(block)  # which has this region
        self._name = name
        self._kinds = kinds
        self._make = make
        self._tell = tell  # that blocks like one have no graph, and why
        self._kind: Kind | None = None  # None for a block that is not compiled
        # What was learned holds as long as these have their sizes, and these values are where they were.
        self._holders: list[Any] = []
        self._sizes: list[int] = []
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        self._modules: list[nn.Module] = []
        self._types: list[type] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        # Where each is held, as what, its name, and it. A tied one has one name, and an empty one in other places.
        self._params: list[tuple[dict[str, Any], str, str, Any]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None, "a region is called by its block"
        absent = self._absent(block)
        kind = self._kind
        if not absent or kind is None or kind.is_eager or is_transformed():
            return inner_call(block)(*args, **kwargs)
        try:
            return self._run(kind, absent, args, kwargs)
        except compiler_errors() as error:  # nothing has run: a graph is there before it is called
            why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        result = inner_call(block)(*args, **kwargs)  # an error of its own says nothing about its graph
        kind.is_eager = True
        self._tell(self._name, why)
        return result

    def _absent(self, block: nn.Module) -> dict[str, Absent]:
        """Returns the parameters whose weights are absent, by name. Learns what the block consists of if that has changed."""
        if not self._params or self._has_changed():
            self._learn(block)
        return {name: param for *_, name, param in self._params if name and isinstance(param, Absent)}

    def _has_changed(self) -> bool:
        return (
            list(map(len, self._holders)) != self._sizes
            or list(map(type, self._modules)) != self._types
            or any(held.get(key) is not part for held, key, part in self._parts)
            or any(held.get(key) is None for held, key, _ in self._buffers)
            or any(key not in attributes for attributes, _, key in self._attributes)
        )

    def _learn(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        names: dict[int, str] = {}
        self._params = [
            (held, key, name if names.setdefault(id(held[key]), name) == name else "", held[key])
            for held, key, name in _held(block, "_parameters")
        ]
        self._buffers = list(_held(block, "_buffers"))
        self._types = list(map(type, self._modules))
        self._holders = [held for module in self._modules for held in _holders_of(module)]
        self._parts = [
            (held, key, part)
            for module in self._modules
            for held in (module._parameters, module._modules, module._buffers)
            for key, part in held.items()
            if part is None or not isinstance(part, torch.Tensor) or held is module._parameters
        ]
        self._kind, self._attributes = None, []
        params = [param for *_, param in self._params]
        reason = _why_not(block, params)
        if reason is not None and has_absent(block):
            self._tell(self._name, reason)
        elif has_absent(block):
            key = _kind_of(block)
            self._kind = self._kinds.get(key) or self._kinds.setdefault(key, self._make(block))
            self._attributes = self._kind.attributes_of(self._modules)
        self._sizes = list(map(len, self._holders))

    def _run(self, kind: Kind, absent: Mapping[str, Absent], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        params = list(absent.values())
        chunks = list(dict.fromkeys(param.in_chunk for param in params))
        cache = chunks[0].cache
        for attributes, copied, key in self._attributes:
            if copied.get(key) is not attributes[key]:
                copied[key] = attributes[key]
        tensors = {name: param for *_, name, param in self._params if name}
        tensors |= {name: held[key] for held, key, name in self._buffers}
        held = cache.acquire(chunks)
        try:
            versions = [_memory_of(chunk)._version for chunk in chunks]
            tensors |= zip(absent, _Whole.apply(*params), strict=True)  # type: ignore[no-untyped-call]
            if all(chunk.is_lent for chunk in chunks):  # memory that stays, so that a graph may save it
                result = kind.call(tensors, args, kwargs)
                self._write_back(kind)
            else:
                use, spans = _Use(chunks, params), _spans_of(chunks)
                with torch.autograd.graph.saved_tensors_hooks(*_packing(use, spans)):
                    result = kind.call(tensors, args, kwargs)
                for node in node_of_graph(result, _DEEPEST):
                    node.register_hook(use.end)
                apart = partial(tree_map_only, torch.Tensor, partial(_apart, spans))
                result = apart(result)
                self._write_back(kind, apart)
            edited = versions != [_memory_of(chunk)._version for chunk in chunks]
        finally:
            cache.release(held)
        if edited:
            raise RuntimeError(
                f"Cannot run {self._name} as a region: its forward writes to its weights, and the write is lost. Load a "
                "checkpoint, and call zero.compile with blocks= that leave it out."
            )
        return result

    def _write_back(self, kind: Kind, apart: Callable[[Any], Any] = lambda value: value) -> None:
        """Gives the block the attributes that its forward set, of which the copy keeps none alive. `apart` returns a value
        without memory that is freed."""
        for attributes, copied, key in self._attributes:
            if copied[key] is not attributes[key]:
                attributes[key], copied[key] = apart(copied[key]), None
        for module, copied, known in zip(self._modules, kind.held, kind.known, strict=True):
            if len(copied) != len(known):
                vars(module).update((key, apart(copied.pop(key))) for key in copied.keys() - known)


never_compile(Region.__call__)  # a compiler of what is around a region calls it


class _Use:
    """The chunks of one call in its backward: acquired when the first weight is needed, released when the node has run, or when
    its graph is gone."""

    def __init__(self, chunks: Sequence[GatheredChunk], params: Sequence[Absent]) -> None:
        self.cache = chunks[0].cache
        self._chunks = chunks
        self._params = params
        self._versions = [param._version for param in params]
        self._held: Sequence[GatheredChunk] = ()

    def begin(self) -> None:
        if not self._held:
            if self._versions != [param._version for param in self._params]:
                raise RuntimeError(
                    "Cannot run a backward: one of the weights that its forward used was stepped, loaded or edited since. Run "
                    "the forward again."
                )
            self._held = self.cache.acquire(self._chunks)

    def end(self, *_: object) -> None:
        if self._held:
            held, self._held = self._held, ()
            self.cache.release(held)

    def __del__(self) -> None:  # of a backward that broke off
        self.end()


class _Whole(torch.autograd.Function):
    """The weights of absent parameters whose chunks are acquired. One node for all: a node for each costs a host 10 us."""

    @staticmethod
    def forward(ctx: Any, *params: Absent) -> tuple[torch.Tensor, ...]:
        whole = tuple(tensor.detach() for tensor in plain_tensors(params))  # the chunk keeps those for other operators
        ctx.mark_non_differentiable(*(each for each, param in zip(whole, params, strict=True) if not param.requires_grad))
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


_Spans = Sequence[tuple[int, int, GatheredChunk]]  # addresses from where to where, and the chunk that lies there


def _spans_of(chunks: Sequence[GatheredChunk]) -> _Spans:
    memories = [(_memory_of(chunk), chunk) for chunk in chunks]
    return [(address_of(memory), address_of(memory) + memory.nbytes, chunk) for memory, chunk in memories]


def _packing(use: _Use, spans: _Spans) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Returns the hooks by which a graph saves where a weight lies, and all else as it would be saved outside of the region."""
    outer_pack, outer_unpack = hooks_of_saved_tensors()

    def pack(saved: torch.Tensor) -> Any:
        if type(saved) is torch.Tensor:
            address = address_of(saved)
            for begin, end, chunk in spans:
                if begin <= address < end:
                    return _Place(use, chunk, address - begin, saved)
        return outer_pack(saved)

    def unpack(packed: Any) -> torch.Tensor:
        return packed.tensor() if type(packed) is _Place else outer_unpack(packed)

    return pack, unpack


def _apart(spans: _Spans, value: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a value that lies in a chunk, as a weight that is returned does, and any other as it is."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return value
    return value.clone() if any(begin <= address_of(value) < end for begin, end, _ in spans) else value


class _Place:
    """A place in a chunk, in place of a tensor that lies there."""

    __slots__ = ("_chunk", "_dtype", "_geometry", "_offset", "_use")

    def __init__(self, use: _Use, chunk: GatheredChunk, offset: int, tensor: torch.Tensor) -> None:
        self._use = use
        self._chunk = chunk
        self._offset = offset  # bytes from the start of the chunk
        self._dtype = tensor.dtype
        self._geometry = tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        self._use.begin()
        memory = _memory_of(self._chunk).view(self._dtype)
        return memory.as_strided(*self._geometry, memory.storage_offset() + self._offset // memory.itemsize)


def _memory_of(chunk: GatheredChunk) -> torch.Tensor:
    assert chunk.memory is not None, "a chunk that is acquired has memory"
    return chunk.memory


def _holders_of(module: nn.Module) -> tuple[Mapping[Any, Any], ...]:
    """Returns where a module has its parts, attributes and hooks."""
    parts = module._parameters, module._buffers, module._modules
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return vars(module), *parts, *hooks


def _why_not(block: nn.Module, params: Sequence[Any]) -> str | None:
    """Returns why a block cannot have the graph of blocks like it; None if it can."""
    for name, module in block.named_modules():
        # A graph of other blocks would not call these.
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or "forward" in vars(module):
            return f"{name or 'the block'} has {'hooks' if any(hooks) else 'a forward of its own'}"
    if len({param.in_chunk.cache for param in params if isinstance(param, Absent)}) > 1:
        return "two optimizers train its weights"
    others = {type(param) for param in params if not isinstance(param, Absent)} - {nn.Parameter}
    return f"it has a parameter of {others.pop().__name__}" if others else None


def _held(block: nn.Module, where: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields where each parameter, or buffer, of a block is held, as what, and its name in the block."""
    for prefix, module in block.named_modules():
        held = getattr(module, where)
        for key, tensor in held.items():
            if tensor is not None:
                yield held, key, f"{prefix}.{key}" if prefix else key


def _kind_of(block: nn.Module) -> object:
    """Returns what blocks of one kind have in common: everything but the values of tensors."""
    modules = []
    for name, module in block.named_modules(remove_duplicate=False):
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        plain = {key: value for key, value in attributes.items() if _is_plain(value)}
        others = frozenset((key, id(value)) for key, value in attributes.items() if key not in plain)
        modules.append((name, type(module), repr(sorted(plain.items())), others))
    numbers: dict[int, int] = {}  # by tensor: ties are a property of a kind
    tensors = [
        (name, numbers.setdefault(id(held[key]), len(numbers)), held[key].shape, held[key].dtype, held[key].device)
        for where in ("_parameters", "_buffers")
        for held, key, name in _held(block, where)
    ]
    return tuple(modules), tuple(tensors)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is known by its text."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, _PLAIN)


def _on_meta(block: nn.Module) -> nn.Module:
    """Returns a copy of a block without values. It has its other attributes in common with it."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        memo |= {id(value): value for key, value in vars(module).items() if key not in _OF_TORCH}
    for held, key, _ in _held(block, "_parameters"):
        memo[id(held[key])] = nn.Parameter(torch.empty_like(held[key].detach(), device="meta"), held[key].requires_grad)
    for held, key, _ in _held(block, "_buffers"):
        memo[id(held[key])] = torch.empty_like(held[key], device="meta")
    return copy.deepcopy(block, memo)


def blocks_in(
    module: nn.Module, wanted: type[nn.Module] | Sequence[nn.Module] | None = None
) -> list[tuple[str, nn.Module]]:
    """Returns the blocks of a model with absent weights, by name: those that are `wanted`, or modules of one class with parts
    of their own, side by side in a container. None of them is in another one."""
    if wanted is None:
        candidates = list(_repeated_in(module))
    elif isinstance(wanted, type):
        candidates = [(name, each) for name, each in module.named_modules() if isinstance(each, wanted)]
    else:
        ids = set(map(id, wanted))
        candidates = [(name, each) for name, each in module.named_modules() if id(each) in ids]
    blocks: dict[str, nn.Module] = {}
    for name, block in candidates:
        if has_absent(block) and not any(f"{name}.".startswith(f"{outer}.") for outer in blocks):
            blocks[name] = block
    return list(blocks.items())


def _repeated_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, container in module.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            blocks = list(container.named_children())
            classes = [type(block) for _, block in blocks]
            for key, block in blocks:
                if classes.count(type(block)) > 1 and any(True for _ in block.children()):
                    yield f"{name}.{key}" if name else key, block


def has_absent(module: nn.Module) -> bool:
    return any(isinstance(param, Absent) for param in module.parameters())


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]], compile_: Compile) -> None:
    """Makes regions of these blocks. `compile_` compiles a function."""
    kinds: dict[object, Kind] = {}
    reasons = set[str]()

    def tell(name: str, reason: str) -> None:
        if reason not in reasons:
            reasons.add(reason)
            logger.warning("%s and blocks like it are called without a graph from now on: %s", name, reason)

    for name, block in blocks:
        replace_call(block, Region(block, name, kinds, lambda block: Kind(block, compile_), tell))
