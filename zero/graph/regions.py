"""Blocks at stage 3 that count as one operator each: a graph for all blocks of a kind, unbroken where weights are gathered.

[Note: regions]
At stage 3 the graph of a model breaks wherever a weight is gathered, and an operator that is given an absent weight comes by
way of Python. In a *region* neither is so: the chunks of a block's weights are acquired before its call and released after it,
and the weights are plain tensors, or inputs of its graph like any others. So a graph belongs to a kind of blocks and has
nothing of a single one: it is traced with a copy of one block on the meta device, and all blocks that differ in their tensors
alone use it. What autograd saves of a weight is where it lies in its chunk, and no memory. Its backward acquires the chunks
again.

For each call the copy has the attributes of the block that is called, as they are at that time, and the block gets those that
its forward set. So the compiler sees what is changed, and makes another graph, as it does for a block without a region. A block
whose parts change, or that gets a hook, is looked at anew.

Autograd sees one node more, which makes weights of absent parameters: their gradients are what it is given. It is older than
all nodes of its block and younger than those of the blocks before, so a backward runs it when it leaves the block.

Alternatives, and why not: the compiled backward of a block could hand each gradient over where it makes it, as at other stages.
At most the gradients of one block would be gone sooner, and that was within the spread of a measured peak. For it, a graph that
all blocks of a kind share must know at each backward what autograd would still do with each gradient: sum it with another one,
call a hook, make a graph of it, return it.
"""

from __future__ import annotations

import copy
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from zero.comm import backwards
from zero.graph.torch_private import (
    calls_for_every_module,
    compiler_errors,
    hooks_of_saved_tensors,
    inner_call,
    is_transformed,
    replace_call,
)
from zero.memory.addresses import address_of, addresses_of, users_of
from zero.memory.gathered import ChunkState, GatheredChunk
from zero.memory.leaves import local_of
from zero.profiling import in_profile
from zero.runtime.params.absent import Absent, labels_of, never_compile, plain_tensors
from zero.runtime.unshard.edits import checksum

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_Call = Callable[[dict[str, torch.Tensor], tuple[Any, ...], dict[str, Any]], Any]

logger = logging.getLogger("zero")

# Attributes that torch has for parameters, hooks, children and compiling.
_OF_TORCH = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


class Kind:
    """A copy of a block that is called in its place with plain weights. It serves one call at a time.

    It is compiled, on the meta device, for all blocks that differ in their tensors alone, or not compiled, for one block.

    What a forward leaves for its backward, such as a checkpoint inside it, may call the copy of one block again. Between calls
    this copy has the block's parameters, whose weights each operator gathers.
    """

    def __init__(self, block: nn.Module, compile_: Compile | None) -> None:
        self.is_shared = compile_ is not None
        self.is_eager = False  # the compiler cannot make this graph
        self.is_free = threading.Lock()
        template = _on_meta(block) if self.is_shared else _copied(block, lambda tensor: tensor)
        self.held = [vars(module) for module in template.modules()]  # the attributes of its modules
        self.known = [frozenset(held) for held in self.held]
        self._parts = [held for module in template.modules() for held in _holders_of(module)[1:]]
        self._sizes = list(map(len, self._parts))
        self.call = _eager_call(template) if compile_ is None else _compiled_call(template, compile_)

    def failures(self) -> tuple[type[Exception], ...]:
        """Returns the errors after which blocks of this kind are called as they are without a region."""
        return (compiler_errors(),) if self.is_shared else ()

    def has_other_parts(self) -> bool:
        """Returns whether a call added parameters, buffers, children or hooks, or removed some."""
        return list(map(len, self._parts)) != self._sizes

    def attributes_of(self, modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
        """Returns each attribute of a block of this kind: where the block has it, where the copy has it, and its name."""
        return [
            (vars(module), copied, key)
            for module, copied in zip(modules, self.held, strict=True)
            for key in vars(module)
            if key not in _OF_TORCH or key == "training"
        ]


def _compiled_call(template: nn.Module, compile_: Compile) -> _Call:
    def run(tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(template, tensors, args, kwargs)

    # The compiler counts the graphs of a code object, and gives up if there are many. So each kind has a code object of its
    # own.
    code = run.__code__.replace(co_name=f"region_of_{type(template).__name__}")
    return compile_(types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__))


def _eager_call(copied: nn.Module) -> _Call:
    names: dict[int, str] = {}
    call: Callable[..., Any] = copied._call_impl
    params = [(held, key, names.setdefault(id(held[key]), name), held[key]) for held, key, name in _held(copied, "_parameters")]
    buffers = list(_held(copied, "_buffers"))

    def run(tensors: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for held, key, name, _ in params:
            held[key] = tensors[name]
        for held, key, name in buffers:
            held[key] = tensors[name]
        try:
            return call(*args, **kwargs)
        finally:
            for held, key, name, param in params:
                tensors[name], held[key] = held.get(key), param
            for held, key, name in buffers:
                tensors[name] = held.get(key)

    return run


class _Learned:
    """A region runs with this only while every part, attribute and hook of its block is as it was found here."""

    def __init__(self, block: nn.Module) -> None:
        self.kind: Kind | None = None  # None if the block is no region
        self.modules = list(block.modules())
        names: dict[int, str] = {}
        # Each entry is a table, its key, the parameter's name, and the parameter. A tied parameter has a name in the first
        # place, and an empty one in the others.
        self.params: list[tuple[dict[str, Any], str, str, Any]] = [
            (held, key, name if names.setdefault(id(held[key]), name) == name else "", held[key])
            for held, key, name in _held(block, "_parameters")
        ]
        self.buffers = list(_held(block, "_buffers"))
        self._types = list(map(type, self.modules))
        self._forward = type(block).forward  # the class may be given another one, which torch.compile sees, too
        self._holders = [held for module in self.modules for held in _holders_of(module)]
        self._parts = [
            (held, key, part)
            for module in self.modules
            for held in (module._parameters, module._modules, module._buffers)
            for key, part in held.items()
            if part is None or not isinstance(part, torch.Tensor) or held is module._parameters
        ]
        self._names = [(vars(module), key) for module in self.modules for key in vars(module) if key not in _OF_TORCH]
        self.attributes: list[tuple[dict[str, Any], dict[str, Any], str]] = []  # as `attributes_of` returns them
        self._sizes = list(map(len, self._holders))
        self.has_run = False  # a call has ended, and what it wrote by ways that no version counter counts was looked for

    def absent(self) -> dict[str, Absent]:
        """Returns the parameters whose weights are absent now, by name: they stay the same objects when they get memory."""
        return {name: param for *_, name, param in self.params if name and isinstance(param, Absent)}

    def has_changed(self) -> bool:
        return (
            list(map(len, self._holders)) != self._sizes
            or list(map(type, self.modules)) != self._types
            or type(self.modules[0]).forward is not self._forward
            or any(held.get(key) is not part for held, key, part in self._parts)
            or any(held.get(key) is None for held, key, _ in self.buffers)
            or any(key not in attributes for attributes, key in self._names)
        )

    def write_back(
        self,
        kind: Kind,
        values: Sequence[Any],
        buffers: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        apart: Callable[[Any], Any],
    ) -> None:
        """Gives the block the attributes and buffers that the forward of its copy set, of which a shared copy keeps none alive.
        What was set on the block itself meanwhile, as by a method that was bound to it, stays.

        Args:
            kind: The copy that was called.
            values: The values of `attributes` before the call.
            buffers: The buffers before the call, by name.
            tensors: The buffers after the call, among others.
            apart: Returns a value without memory that is freed.
        """
        for (attributes, copied, key), value in zip(self.attributes, values, strict=True):
            if key not in copied:
                attributes.pop(key, None)
            elif copied[key] is not value:
                attributes[key] = apart(copied[key])
                copied[key] = None if kind.is_shared else attributes[key]
        for module, copied, known in zip(self.modules, kind.held, kind.known, strict=True):
            if len(copied) != len(known):
                take = copied.pop if kind.is_shared else copied.get
                vars(module).update((key, apart(take(key))) for key in copied.keys() - known)
        for held, key, name in self.buffers:
            if tensors[name] is not buffers[name]:
                held[key] = apart(tensors[name])


class Region:
    """The call of a block whose weights are absent: what it has learned of the block holds until a part of it changes.

    What is no region is called as the block itself would be.
    """

    def __init__(
        self, block: nn.Module, name: str, kind_of: Callable[[nn.Module], Kind], tell: Callable[[str, str], None]
    ) -> None:
        self._block = weakref.ref(block)  # weak, as the block has this region
        self._name = name
        self._kind_of = kind_of
        self._tell = tell  # reports that blocks like this one are no regions, and why
        self._learned: _Learned | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None, "a region is called by its block"
        learned = self._learned
        if learned is None or learned.has_changed():
            learned = self._learned = self._learn(block)
        kind, absent = learned.kind, learned.absent()
        if kind is None or not absent or kind.is_eager or is_transformed() or calls_for_every_module():
            return inner_call(block)(*args, **kwargs)
        if not kind.is_free.acquire(blocking=False):  # another thread has called it, or its own forward
            return inner_call(block)(*args, **kwargs)
        try:
            return self._run(kind, learned, absent, args, kwargs)
        except kind.failures() as error:  # nothing has run yet, as a graph is made before it is called
            why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        finally:
            kind.is_free.release()
        result = inner_call(block)(*args, **kwargs)  # an error of the block's own says nothing about its graph
        kind.is_eager = True
        self._tell(self._name, why)
        return result

    def _learn(self, block: nn.Module) -> _Learned:
        learned = _Learned(block)
        if has_absent(block):
            reason = _why_not(block, [param for *_, param in learned.params])
            if reason is None:
                learned.kind = self._kind_of(block)
                learned.attributes = learned.kind.attributes_of(learned.modules)
            else:
                self._tell(self._name, reason)
        return learned

    def _run(
        self, kind: Kind, learned: _Learned, absent: Mapping[str, Absent], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        params = list(absent.values())
        chunks = list(dict.fromkeys(param.in_chunk for param in params))
        cache = chunks[0].cache
        values = [attributes[key] for attributes, _, key in learned.attributes]
        for (_, copied, key), value in zip(learned.attributes, values, strict=True):
            if copied.get(key) is not value:
                copied[key] = value
        buffers = {name: held[key] for held, key, name in learned.buffers}
        tensors = {name: param for *_, name, param in learned.params if name} | buffers
        with in_profile("gather", labels_of, params):
            acquired = cache.acquire(chunks)
        try:
            memories = list(map(_memory_of, chunks))
            versions = [memory._version for memory in memories]
            sums = [] if learned.has_run else list(map(checksum, memories))
            users: dict[GatheredChunk, int] = {}  # users of memory that may become another chunk's
            if all(chunk.state is ChunkState.LENT for chunk in chunks):  # lent memory stays, so that a graph may save it
                weights = dict(zip(absent, _Whole.apply(None, *params), strict=True))  # type: ignore[no-untyped-call]
                tensors |= weights
                places = addresses_of(weights.values())
                result = kind.call(tensors, args, kwargs)
                learned.write_back(kind, values, buffers, tensors, lambda value: value)
            else:
                use, spans = _Use(chunks, params), _spans_of(chunks)
                plain_tensors(params)  # from here on the chunks keep these tensors, which therefore count in the next line
                users.update(zip(chunks, map(users_of, memories), strict=True))
                weights = dict(zip(absent, _Whole.apply(weakref.ref(use), *params), strict=True))  # type: ignore[no-untyped-call]
                tensors |= weights
                places = addresses_of(weights.values())
                with torch.autograd.graph.saved_tensors_hooks(*_packing(use, spans)):
                    result = kind.call(tensors, args, kwargs)
                apart = partial(tree_map_only, torch.Tensor, partial(_apart, spans))
                result = apart(result)
                learned.write_back(kind, values, buffers, tensors, apart)
            is_edited = versions != [memory._version for memory in memories]
            is_edited |= places != addresses_of(weights.values())  # `.data` was assigned to
            # No version counts what is written by way of `.data` or of numpy. Who does that does it in the first call.
            is_edited |= not all(map(torch.equal, sums, map(checksum, memories)))
            learned.has_run = True
            is_exchanged = kind.has_other_parts() or any(tensors[name] is not weight for name, weight in weights.items())
            is_hooked = any(weight._backward_hooks for weight in weights.values())
            tensors.clear()
            weights.clear()
            for chunk, before in users.items():
                if users_of(_memory_of(chunk)) > before:  # a function keeps a weight for its backward without saving it
                    cache.leave(chunk)
        finally:
            cache.release(acquired)
        if is_edited:
            raise self._refusal("writes to its weights, and the write is lost")
        if is_exchanged:
            raise self._refusal("exchanges or adds parameters, buffers, modules or hooks, which are lost")
        if is_hooked:
            raise self._refusal("registers a hook on its weights, which is called for this backward alone")
        return result

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"Cannot run {self._name} as a region: its forward {what}. Build the model anew, and leave this block out of what "
            "blocks= names."
        )


never_compile(Region.__call__)  # a compiler of the code around a region calls it


class _Use:
    """The chunks of one call in its backward: acquired when the first weight is needed, and released when the backward leaves
    the block, when no node needs them any more, or when it ends, whichever comes first."""

    def __init__(self, chunks: Sequence[GatheredChunk], params: Sequence[Absent]) -> None:
        self.cache = chunks[0].cache
        self._chunks = chunks
        self._params = params
        self._versions = [param._version for param in params]
        self._acquired: Sequence[GatheredChunk] = ()

    def begin(self) -> None:
        if not self._acquired:
            self.check()
            with in_profile("gather", labels_of, self._params):
                self._acquired = self.cache.acquire(self._chunks)
            backwards.at_end(partial(_end, weakref.ref(self)))

    def check(self) -> None:
        if self._versions != [param._version for param in self._params]:
            raise RuntimeError(
                "Cannot run a backward: one of the weights that its forward used was stepped, loaded or edited since. Run the "
                "forward again."
            )

    def end(self) -> None:
        if self._acquired:
            acquired, self._acquired = self._acquired, ()
            self.cache.release(acquired)

    def __del__(self) -> None:  # only places keep this alive, and a node has those until it has run
        self.end()


def _end(of: weakref.ref[_Use]) -> None:
    use = of()
    if use is not None:
        use.end()


class _Whole(torch.autograd.Function):
    """The weights of absent parameters whose chunks are acquired. One node for all: a node for each costs a host 10 us."""

    @staticmethod
    def forward(ctx: Any, use: weakref.ref[_Use] | None, *params: Absent) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)  # a weight that was not used has no gradient
        # Detached, as the chunk keeps the plain tensors for other operators.
        whole = tuple(tensor.detach() for tensor in plain_tensors(params))
        ctx.mark_non_differentiable(*(each for each, param in zip(whole, params, strict=True) if not param.requires_grad))
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.use is not None:
            _end(ctx.use)
        return None, *grads


_Spans = Sequence[tuple[int, int, GatheredChunk]]  # the first and the last address of a chunk, and the chunk


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
        self._offset = offset  # the bytes from the start of the chunk
        self._dtype = tensor.dtype
        self._geometry = tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        if backwards.running() == -1:  # no backward runs, so other code looks at what a node has saved
            self._use.check()
            with self._use.cache.using([self._chunk]):
                return self._view().clone()
        self._use.begin()
        # If this backward makes a graph, that graph saves the tensor in turn, and knows nothing of the chunk. So it gets a
        # copy.
        return self._view().clone() if torch.is_grad_enabled() else self._view()

    def _view(self) -> torch.Tensor:
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
        # A graph of other blocks would call none of these.
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
    numbers: dict[int, int] = {}  # by tensor; ties are a property of a kind
    tensors = [
        (name, numbers.setdefault(id(held[key]), len(numbers)), held[key].shape, held[key].dtype, held[key].device)
        for where in ("_parameters", "_buffers")
        for held, key, name in _held(block, where)
    ]
    return type(block).forward, tuple(modules), tuple(tensors)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is known by its text."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, _PLAIN)


def _on_meta(block: nn.Module) -> nn.Module:
    def empty(tensor: torch.Tensor) -> torch.Tensor:
        like = torch.empty_like(tensor.detach(), device="meta")
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like

    return _copied(block, empty)


def _copied(block: nn.Module, replaced: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Returns a copy of a block with other tensors. It has its other attributes in common with it."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        memo |= {id(value): value for key, value in vars(module).items() if key not in _OF_TORCH}
    for where in ("_parameters", "_buffers"):
        memo |= {id(held[key]): replaced(held[key]) for held, key, _ in _held(block, where)}
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
    return any(isinstance(local_of(param), Absent) for param in module.parameters())


def make_regions(blocks: Sequence[tuple[str, nn.Module]], compile_: Compile | None) -> None:
    """Makes regions of these blocks. `compile_` compiles a function; without one, regions run operator by operator."""
    kinds: dict[object, Kind] = {}
    reasons = set[str]()

    def tell(name: str, reason: str) -> None:
        if reason not in reasons:
            reasons.add(reason)
            logger.warning("%s and blocks like it are no regions from now on, and gather weight by weight: %s", name, reason)

    def kind_of(block: nn.Module) -> Kind:
        if compile_ is None:
            return Kind(block, None)
        key = _kind_of(block)
        return kinds.get(key) or kinds.setdefault(key, Kind(block, compile_))

    for name, block in blocks:
        replace_call(block, Region(block, name, kind_of, tell))
