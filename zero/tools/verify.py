"""Trains a few steps twice, sharded and in plain PyTorch, and finds the first difference by name.

[Note: what is compared] Both runs see the same batches and the same random numbers. After every step the weights are compared,
this rank's masters, and its part of the optimizer's state: an optimizer that divides by the size of the gradient hides a wrong
factor in its weights, and its state shows it. The sharded run does nothing that training would not do.

[Note: the plain run] It trains on the global batch and uses none of the code of sharded training. Every rank has a plain copy
of the model and steps a plain optimizer. Gradients are added over the ranks by hand, in rank order, from bytes that travel as
host messages. Nothing that lays out, reduces, scales, clips or publishes in sharded training is used. If a rank has parts of
larger parameters, its copy has them too: gradients of a part are added over the ranks that have it and samples of their own.
With `whole` it is a model that is not cut instead, which each rank trains alone on its samples. A fault of the model's own
exchange, as of tokens between experts, is in both runs otherwise."""

from __future__ import annotations

import copy
import fnmatch
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

import accelerators
from accelerators.tensor_bytes import bytes_of, from_bytes
from zero.comm.group import Group
from zero.comm.levels import copies_of, of_family
from zero.comm.one_answer import exchange_texts
from zero.config.deepspeed.mapping import Implied
from zero.config.schema import Report, ZeroConfig, check_supported
from zero.engine.base import autocast_of
from zero.engine.engine import Engine
from zero.engine.initialize import Source, effective, move, read_config
from zero.engine.make_optimizer import given_optimizer, own_optimizer
from zero.memory.formats import DTYPES, dtype_name, sum_dtype
from zero.memory.leaves import local_grad, local_of, local_state
from zero.optim.several import as_one, with_members
from zero.optim.traits import rounds_within
from zero.setup.module_sync import cast_inputs
from zero.setup.parts import Box, Parts
from zero.sharding.optimizer import ShardedOptimizer

_HEAD = struct.Struct("<?ii")  # the head of a message: whether it has gradients, the part, and the copy of whole parameters

# The differences that the same arithmetic in another order may make: as a ratio of the largest number in a tensor, and of the
# distance that its elements have moved. From the second step on, both runs compute with numbers that they have rounded before.
_FIRST_STEP = 1e-5
_LATER_STEPS = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_ROUNDINGS = 4


@dataclass(frozen=True)
class Difference:
    """A tensor in which the two runs differ by more than rounding."""

    step: int
    parameter: str
    what: str  # "weight", "master", or the name of an entry of the optimizer's state
    rank: int
    found: float  # the value at the place of the largest difference
    expected: float
    largest: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, parameter {self.parameter}: its {self.what} on rank {self.rank} differs by {self.largest:.3g} "
            f"(allowed {self.allowed:.3g}): it is {self.found!r} and should be {self.expected!r}"
        )


@dataclass(frozen=True)
class Verification:
    """The result of `verify`, the same on every rank."""

    num_ranks: int
    stage: int
    num_steps: int  # the number of steps that were compared
    num_parameters: int
    tolerance: tuple[str, ...]
    first: Difference | None

    @property
    def equal(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        where = f"{self.num_parameters} parameters, stage {self.stage}, ranks: {self.num_ranks}, steps: {self.num_steps}"
        result = "equal" if self.first is None else f"different: {self.first}"
        return "\n".join([f"{result} ({where})", *(f"tolerance of {line}" for line in self.tolerance)])

    def as_dict(self) -> dict[str, Any]:
        """Returns it as plain JSON values."""
        return {"equal": self.equal, **asdict(self)}


def verify(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Any,
    config: Source,
    *,
    group: Any = None,
    whole: nn.Module | None = None,
) -> Verification:
    """Trains copies of `model`, sharded and plain, and returns where they first differ. A collective.

    Nothing that is passed is changed, nor are the random numbers to come.

    Args:
        model: The model, which is copied.
        batches: This rank's micro-batches; as many as the accumulation says make a step.
        loss: A function of the model and a batch that returns the loss of one micro-batch.
        optimizer: As for `zero.initialize`.
        config: As for `zero.initialize`.
        group: The ranks that have samples of their own, as `zero.shard` takes it.
        whole: If ranks have parts of the model's parameters, the model that is not cut, for the plain run. It computes without
            other ranks, and its parameters have the names of a checkpoint. They take the values of the parts.
    """
    from zero.comm.connect import connect  # imported late, as torch.distributed is needed only for training

    accelerator, parts = accelerators.current(), Parts(model)
    if group is None:
        parts.check_said()
    ranks = connect(accelerator, group, shared_memory=False if parts.meshes else None, meshes=parts.meshes)
    named = [*model.named_parameters(), *(() if whole is None else whole.named_parameters())]
    random_state, grads = accelerator.rng_state(), [(name, param, param.grad) for name, param in named]
    try:
        for _, param, _ in grads:
            param.grad = None  # a backward would add to it
        with torch.enable_grad():
            verification = _verify(_Subject.of(model, optimizer, config, ranks, whole), list(batches), loss, group)
    finally:
        touched = [name for name, param, _ in grads if param.grad is not None]
        for _, param, grad in grads:
            param.grad = grad
        accelerator.set_rng_state(random_state)
        if ranks is not group:
            ranks.close()
    if touched:
        raise ValueError(
            f"Cannot verify a {type(model).__name__}: its copies compute with {touched[0]} of the model itself, which a "
            "function that was put on it holds, as a forward that transformers made for a plan. Compare it with one process."
        )
    return verification


@dataclass(frozen=True)
class _Subject:
    """The training of both runs, as rank 0 has it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    make: Callable[[Any], torch.optim.Optimizer] | None
    config: ZeroConfig
    group: Group
    whole: nn.Module | None  # the model that is not cut, with the weights of all parts
    boxes: dict[str, Box]  # by name: the place of a parameter in the model that is not cut

    @staticmethod
    def of(model: nn.Module, optimizer: Any, source: Source, group: Group, whole: nn.Module | None) -> _Subject:
        accelerator = accelerators.current()
        optimizer = as_one(optimizer)
        is_made = isinstance(optimizer, torch.optim.Optimizer)
        if is_made and whole is not None:
            raise ValueError(
                f"Cannot verify with whole=: the {type(optimizer).__name__} has the parameters of the model that is cut. Pass "
                "a function that makes the optimizer from parameters."
            )
        replica, given = _copied(model, optimizer if is_made else None)
        example = given if is_made or optimizer is None else given_optimizer(optimizer, list(replica.parameters()))
        config = effective(read_config(source, Implied(world_size=of_family(group, 0).size)), example, None)
        if example is None and config.optimizer is None:
            raise ValueError("Cannot verify a training without an optimizer. Pass optimizer=, or write one in config.")
        changes: dict[str, Any] = {"report": Report()}  # this trial is not part of the training's log
        if config.kernels == "auto":
            # Other kernels round differently, which shows if a gradient consists of rounding errors, such as that of a bias
            # before a BatchNorm.
            changes["kernels"] = "torch"
        config = config.model_copy(update=changes)
        check_supported(config)
        move(replica, accelerator.device())
        for param, state in given.state.items() if given is not None else ():
            state.update({key: value.to(param.device) for key, value in state.items() if _is_elementwise(value, param)})
        parts = Parts(replica)
        for tensor, part in (*parts.of_parameters(replica), *parts.of_buffers(replica)):
            of_ranks = group.all_gather_bytes(part.to_bytes(4, "little") + bytes_of(tensor))
            first = next(message[4:] for message in of_ranks if int.from_bytes(message[:4], "little") == part)
            tensor.data.copy_(from_bytes(first, tensor.dtype, tensor.shape))
        boxes: dict[str, Box] = {}
        if whole is not None:
            parts.agree(replica.parameters(), group)
            boxes = parts.boxes_of(dict(replica.named_parameters()), str)
            whole, _ = _copied(whole, None)
            move(whole, accelerator.device())
            _fill(whole, replica, boxes, group)
        return _Subject(replica, given, None if is_made else optimizer, config, group, whole, boxes)

    def copied(self, for_plain: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns a copy of the model, or of the whole one if there is one for the plain run, and an optimizer of its own."""
        model, inner = _copied(self.whole if for_plain and self.whole is not None else self.model, self.optimizer)
        params = list(model.parameters())
        if inner is None:
            inner = own_optimizer(self.config, params, model) if self.make is None else given_optimizer(self.make, params)
            strangers = {id(param) for group in inner.param_groups for param in group["params"]} - set(map(id, params))
            if strangers:
                raise ValueError(
                    f"Cannot verify: the function that makes the optimizer gave it {len(strangers)} parameters that are not "
                    "those of its argument. Make the optimizer from the function's argument."
                )
        return model, inner


def _copied(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copies a model and its optimizer. Groups of ranks stay those that they are, and what parameters say of themselves."""
    from zero.comm.torch_world import not_copied

    with not_copied():
        copied, inner = copy.deepcopy((model, optimizer))
    for param, other in zip(model.parameters(), copied.parameters(), strict=True):
        other.__dict__.update({name: value for name, value in param.__dict__.items() if name not in other.__dict__})
    return copied, inner


@torch.no_grad()
def _fill(whole: nn.Module, replica: nn.Module, boxes: dict[str, Box], group: Group) -> None:
    """Gives the parameters of a whole model the values of their parts, and freezes those that are frozen. A collective."""
    named = dict(whole.named_parameters())
    missing = {name: param.numel() for name, param in named.items()}
    for name, param in replica.named_parameters():
        local, box = local_of(param), boxes[name]
        said = [box.name, box.shape, box.corner, list(local.shape), dtype_name(local.dtype), param.requires_grad]
        values: dict[bytes, bytes] = {}  # if several ranks have a part, the first one's values
        for message in group.all_gather_bytes(json.dumps(said).encode() + b"\n" + bytes_of(local)):
            values.setdefault(*message.split(b"\n", 1))
        for place, content in values.items():
            part_name, shape, corner, part_shape, dtype, is_trained = json.loads(place)
            target = named.get(part_name)
            if target is None or list(target.shape) != shape or dtype_name(target.dtype) != dtype:
                raise ValueError(
                    f"Cannot verify with whole=: the model has parts of {part_name} of shape {shape} in {dtype}, and the whole "
                    f"one has {'none' if target is None else f'one of shape {[*target.shape]} in {dtype_name(target.dtype)}'}. "
                    "Pass the model before it was cut, in the same dtype."
                )
            target.requires_grad_(is_trained)
            if content:
                part = from_bytes(content, target.dtype, part_shape)
                Box(part_name, (), corner=corner).cut_from(target, part_shape).copy_(part)
                missing[part_name] -= part.numel()
    for name, numel in missing.items():
        if numel:
            raise ValueError(
                f"Cannot verify with whole=: the parts on all ranks have {named[name].numel() - numel} elements of {name}, "
                f"which has {named[name].numel()}. Pass the model before it was cut, and let the parts be all of it."
            )


def _verify(
    subject: _Subject, batches: list[Any], loss: Callable[[Any, Any], torch.Tensor], given: Any = None
) -> Verification:
    accelerator, config, group = accelerators.current(), subject.config, subject.group
    windows = list(_windows(batches, config.accumulation or 1, group))
    plain = PlainRun(*subject.copied(for_plain=True), config, group)
    sharded = ShardedOptimizer(*subject.copied(), config, given)  # over connections of its own, as in a training
    first, num_steps = None, 0
    try:
        pair, engine = _Pair(plain, sharded, subject.boxes), Engine(sharded)
        model = callable_of(engine.module, config)
        while first is None and num_steps < len(windows):
            window, scale = windows[num_steps], engine.loss_scale()
            for number, batch in enumerate(window, 1):
                random_state = accelerator.rng_state()
                plain.backward(lambda copied, batch=batch: loss(copied, batch), scale)  # type: ignore[misc]
                accelerator.set_rng_state(random_state)
                engine.backward(loss(model, batch))
                if number == len(window):
                    plain.step(scale)
                if number == len(window) or config.count_micro_steps:
                    engine.step()
            first = _first_of_all(pair.difference(num_steps), group)
            num_steps += 1
        return Verification(group.size, config.stage, num_steps, len(pair.names), pair.tolerance, first)
    finally:
        sharded.close()


def _windows(batches: list[Any], accumulation: int, group: Group) -> Iterator[list[Any]]:
    """Splits micro-batches into steps; an incomplete last one is left out."""
    numbers = [int.from_bytes(message, "little") for message in group.all_gather_bytes(len(batches).to_bytes(8, "little"))]
    if len(set(numbers)) != 1 or numbers[0] < accumulation:
        raise ValueError(
            f"Cannot verify: ranks 0 to {group.size - 1} gave {', '.join(map(str, numbers))} batches, and a step takes "
            f"{accumulation}. Give every rank the same number of batches, enough for a step."
        )
    for start in range(0, len(batches) - accumulation + 1, accumulation):
        yield batches[start : start + accumulation]


class _Pair:
    """The two runs side by side."""

    def __init__(self, plain: PlainRun, sharded: ShardedOptimizer, boxes: dict[str, Box]) -> None:
        self._plain = plain
        self._sharded = sharded
        self.names = sharded.sharding.params.names
        params = [param for group in sharded.param_groups for param in group["params"]]
        position = {id(param): number for number, param in enumerate(params)}
        # Both optimizers were copied from one, so their parameters come in the same order. Parameters of a whole model have
        # another order.
        self._number = {i: position[id(param)] for i, param in enumerate(sharded.sharding.params.leaves)}
        # The places in the plain run's parameters; None if the parameter is whole.
        self._boxes = [boxes[name] if boxes else None for name in self.names]
        number_of = {param.name: number for number, param in enumerate(plain.params)}
        self._plain_number = [self._number[i] if box is None else number_of[box.name] for i, box in enumerate(self._boxes)]
        rounded = [param for member, group in with_members(sharded.inner) if rounds_within(member) for param in group["params"]]
        self._rounded = {position[id(param)] for param in rounded}  # parameters whose step is rounded to bfloat16 on its way
        dtypes = [torch.bfloat16] * bool(rounded) + [param.dtype for param in params]
        self._narrowest = min(dtypes, key=lambda dtype: -torch.finfo(dtype).eps)

    @property
    def tolerance(self) -> tuple[str, ...]:
        dtypes = sorted({dtype_name(param.dtype) for param in self._sharded.sharding.params.tensors})
        return tuple(self._tolerance_of(dtype) for dtype in dtypes)

    def _tolerance_of(self, dtype: str) -> str:
        sums = dtype_name(sum_dtype(getattr(torch, dtype)))
        text = f"{dtype}: {_ROUNDINGS} roundings of {sums} a step, and of what moved {_FIRST_STEP:g}, {self._later:g} later"
        text = text if sums == dtype else f"{text}; one rounding to {dtype} in the weights"
        return f"{text}; of what Muon moved {_LATER_STEPS['bfloat16']:g}" if self._rounded else text

    @property
    def _later(self) -> float:
        return _LATER_STEPS[dtype_name(self._narrowest)]

    @torch.no_grad()
    def difference(self, step: int) -> tuple[int, Difference] | None:
        """Returns the first difference on this rank, in the order of the parameters, with the parameter's number."""
        for index, name in enumerate(self.names):
            for what, actual, expected, moved in self._tensors(index):
                by_muon = self._number[index] in self._rounded and what in ("weight", "master")
                part = _FIRST_STEP if step == 0 and not by_muon else self._later
                wrong = _compared(actual, expected, moved, part, step + 1)
                if wrong is not None:
                    return index, Difference(step, name, what, self._sharded.sharding.group.rank, *wrong)
        return None

    def _tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
        """Yields what this rank has of a parameter, with what it should be and how far that has moved."""
        plain, sharding = self._plain, self._sharded.sharding
        number = self._plain_number[index]
        master, moved, form = plain.params[number].master, plain.moved[number], sharding.window.grad_ops.formats[index]
        state, box, tensor = plain.inner.state.get(master, {}), self._boxes[index], sharding.params.tensors[index]

        def held(value: torch.Tensor) -> torch.Tensor:
            return value if box is None else box.cut_from(value, tuple(tensor.shape))

        yield "weight", tensor, held(plain.params[number].weight), moved
        for piece, local in sharding.masters.of(index):
            span = slice(piece.in_param.start, piece.in_param.stop)
            yield "master", form.line_of(local), form.flatten(held(master))[span], moved
            local_state = self._sharded.inner.state.get(local, {})
            if local_state.keys() != state.keys():
                yield f"state ({', '.join(local_state) or 'none'}; plain: {', '.join(state) or 'none'})", _ONE, 0 * _ONE, 0.0
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    goes_along = value.shape == master.shape and local_state[key].shape == local.shape
                    actual, expected = local_state[key], value
                    if goes_along:
                        actual, expected = form.line_of(actual), form.flatten(held(value))[span]
                    yield key, actual, expected, float(value.abs().max()) if value.numel() else 0.0


_ONE = torch.ones(1)


def _compared(
    actual: torch.Tensor, expected: torch.Tensor, moved: float, part: float, num_steps: int
) -> tuple[float, float, float, float] | None:
    """Returns where two tensors differ most and by more than is allowed: what is there, what should be, the difference, the
    limit."""
    if not expected.numel():
        return None
    wide = sum_dtype(expected.dtype) if expected.is_floating_point() else torch.float64
    output, target = actual.detach().to(wide), expected.detach().to(actual.device, wide)
    same = (output == target) | (output.isnan() & target.isnan())
    if bool(same.all()):
        return None
    limit = target.abs().nan_to_num(posinf=0.0).max() * (_ROUNDINGS * num_steps * torch.finfo(wide).eps) + part * moved
    limits = limit + target.abs().nan_to_num(posinf=0.0) * (torch.finfo(expected.dtype).eps if expected.dtype != wide else 0.0)
    excess = torch.where(same, 0.0, (output - target).abs().nan_to_num(nan=torch.inf) - limits)
    index = int(excess.reshape(-1).argmax())
    if not bool(excess.reshape(-1)[index] > 0):
        return None
    value, target_value = float(output.reshape(-1)[index]), float(target.reshape(-1)[index])
    return value, target_value, abs(value - target_value), float(limits.reshape(-1)[index])


def _first_of_all(local: tuple[int, Difference] | None, group: Group) -> Difference | None:
    """Returns the difference of the first parameter, and of the first rank that has one there; the same on every rank."""
    texts = exchange_texts(group, json.dumps(None if local is None else [local[0], asdict(local[1])]))
    entries = [entry for entry in map(json.loads, texts) if entry is not None]
    if not entries:
        return None
    _, difference = min(entries, key=lambda one: (one[0], one[1]["rank"]))
    return Difference(**difference)


def _is_elementwise(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


class _Trained(NamedTuple):
    """A parameter of the plain copy: what the model has, its memory on this rank, and what the optimizer steps."""

    name: str
    leaf: Any
    weight: nn.Parameter
    master: nn.Parameter
    part: int  # this rank's part of a larger parameter; 0 for a whole one
    is_own: bool  # ranks with other parts have another parameter of this name


class PlainRun:
    """The plain copy of one rank, see [Note: the plain run]. Weights in 16 bits have masters in fp32, which the optimizer
    steps."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, config: ZeroConfig, group: Group) -> None:
        self.inner = inner
        self._model = model
        self._config = config
        self._group = group
        self._sums: dict[int, torch.Tensor] = {}  # by the parameter's number: the sum of this rank's gradients
        copies = copies_of(group)
        self._copy = copies[group.rank].copy if copies else 0  # this rank's copy of the whole parameters
        leaves, parts = [param for entry in inner.param_groups for param in entry["params"]], Parts(model, inner)
        names = {id(param): name for name, param in model.named_parameters()}
        before = [local_of(leaf).detach().clone() for leaf in leaves]
        _cast(model, leaves, config)
        cast_inputs(model, config)
        self.params = [
            _Trained(
                names.get(id(leaf), ""), leaf, weight, _master_of(weight, value), parts.part_of(leaf),
                parts.spec_of(leaf).is_own,
            )
            for leaf, weight, value in zip(leaves, map(local_of, leaves), before, strict=True)
        ]
        self.moved = [0.0] * len(leaves)  # the largest move of an element of each parameter, added up over the steps
        self._let_the_optimizer_step_masters()

    def _let_the_optimizer_step_masters(self) -> None:
        master_of = {id(param.leaf): param.master for param in self.params}
        for group in self.inner.param_groups:
            group["params"] = [master_of[id(leaf)] for leaf in group["params"]]
        for param in self.params:
            if param.master is not param.leaf and param.leaf in self.inner.state:
                self.inner.state[param.master] = local_state(param.leaf, self.inner.state.pop(param.leaf))

    def backward(self, loss: Callable[[Any], torch.Tensor], scale: float) -> None:
        """Adds the gradients of one micro-batch; `loss` is called with the model. `scale` is the loss scale of 16 bits."""
        value = loss(callable_of(self._model, self._config)) / (self._config.accumulation or 1)
        torch.autograd.backward(value if scale == 1.0 else value.float() * scale)
        for index, param in enumerate(self.params):
            if param.leaf.grad is not None:
                grad = local_grad(param.leaf, param.leaf.grad.detach()).to(sum_dtype(param.weight.dtype))
                self._sums[index] = self._sums[index] + grad if index in self._sums else grad.clone()
                param.leaf.grad = None

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Steps on the sum over all ranks, unless it is not finite and such steps are to be skipped."""
        masters = [param.master for param in self.params]
        before = [master.detach().clone() for master in masters]
        for index, master in enumerate(masters):
            master.grad = self._global_grad(index, scale)
        self._sums.clear()
        grads = [master.grad for master in masters if master.grad is not None]
        finite = bytes([all(bool(grad.isfinite().all()) for grad in grads)])
        if self._config.on_nonfinite == "propagate" or all(map(any, self._group.all_gather_bytes(finite))):
            if self._config.clip is not None:
                nn.utils.clip_grads_with_norm_(masters, self._config.clip, self._total_norm())
            self.inner.step()
        for index, param in enumerate(self.params):
            param.master.grad = None
            if param.master is not param.weight:
                param.weight.copy_(param.master)
            if param.master.numel():
                self.moved[index] += float((param.master - before[index]).abs().max())

    def _total_norm(self) -> torch.Tensor:
        """Returns the norm of all gradients, each part of a parameter once."""
        grads = [(param.part, param.master.grad) for param in self.params]
        local_norms = [(part, 0.0 if grad is None else float(grad.norm())) for part, grad in grads]
        of_ranks = map(json.loads, exchange_texts(self._group, json.dumps(local_norms)))
        norms = [norm for of_param in zip(*of_ranks, strict=True) for norm in dict(reversed(of_param)).values()]
        return torch.tensor(math.hypot(*norms), dtype=torch.float64)

    def _global_grad(self, index: int, scale: float) -> torch.Tensor | None:
        """Returns the sum over the ranks, divided as was asked; None if no rank had a gradient."""
        param, local_sum = self.params[index], self._sums.get(index)
        values = torch.zeros_like(param.master) if local_sum is None else local_sum
        head = _HEAD.pack(local_sum is not None, param.part, self._copy)
        messages = self._group.all_gather_bytes(head + bytes_of(values))
        heads = [_HEAD.unpack(message[: _HEAD.size]) for message in messages]
        if not any(is_there for is_there, part, _ in heads if part == param.part or not param.is_own):
            return None
        total = torch.zeros(param.master.numel(), dtype=param.master.dtype)
        for said, message in zip(heads, messages, strict=True):
            if said == (True, param.part, self._copy):
                total += from_bytes(message[_HEAD.size :], total.dtype)
        reduce = self._config.reduce
        divisor = of_family(self._group, 0).size if reduce == "mean" else 1.0 if reduce == "sum" else reduce
        return (total / (divisor * scale)).reshape(param.master.shape).to(param.master.device)


def callable_of(model: nn.Module, config: ZeroConfig) -> Any:
    """Returns the model itself, or what calls it under the autocast of the configuration."""
    if config.autocast is None:
        return model

    def call(*inputs: Any, **named: Any) -> Any:
        with autocast_of(config, next(model.parameters()).device):
            return model(*inputs, **named)

    return call


def _cast(model: nn.Module, weights: list[nn.Parameter], config: ZeroConfig) -> None:
    """Casts floating parameters that are trained or frozen, unless they or a module above them are to stay."""
    if config.dtype is None:
        return
    kept, trained = set(), {id(weight) for weight in weights}
    for name, param in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(part, pattern) for part in above for pattern in config.keep_fp32):
            kept.add(id(param))
    for param in {id(param): param for param in (*model.parameters(), *weights)}.values():
        if param.is_floating_point() and id(param) not in kept and (id(param) in trained or not param.requires_grad):
            param.data = param.data.to(DTYPES[config.dtype])


def _master_of(weight: nn.Parameter, before: torch.Tensor) -> nn.Parameter:
    """Returns what the optimizer steps: the weight, or a wide copy of what it was before it was cast."""
    wide = sum_dtype(weight.dtype)
    return weight if weight.dtype == wide else nn.Parameter(before.to(wide), requires_grad=weight.requires_grad)
