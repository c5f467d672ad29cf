"""What `.grad` is while the gradient itself is sharded: a tensor without storage that stands for all of it.

[Note: ShardedGrad]
Code that people write between backward and step reads `p.grad is None`, takes norms, scales, clips, adds. A
`ShardedGrad` has the parameter's shape, dtype and device, and forwards these to the shares. Its first operation
settles the window, which is a collective, so all ranks must do the same; what it answers is the global
gradient's and has the same bits on every rank. What cannot be done on a share without the rest raises, and
names the call that can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zero.errors import ZeroError

aten = torch.ops.aten

# In-place operators that change each element by itself. Tensor arguments of the gradient's shape are cut like it.
_ELEMENTWISE = {
    "mul_", "div_", "add_", "sub_", "pow_", "neg_", "abs_", "sign_", "sqrt_", "zero_", "fill_", "copy_", "nan_to_num_",
    "clamp_", "clamp_min_", "clamp_max_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_",
}  # fmt: skip
_OF_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch.distributed's operators
_OF_ONE_TENSOR = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}  # where a `_foreach_` operator is called otherwise there


class Shares(Protocol):
    """The arithmetic behind all `ShardedGrad`s of a model."""

    def norm(self, param: int, order: float) -> torch.Tensor: ...
    def apply_inplace(
        self, param: int, operator: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> None: ...
    def unscale(self, params: Sequence[int], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None: ...


class ShardedGrad(torch.Tensor):
    """The gradient of a parameter over all ranks, of which this rank has a share; see [Note: ShardedGrad]."""

    param: int
    label: str  # its name; `name` is taken by torch
    shares: Shares
    ended: bool  # its window did
    own_dtype: torch.dtype  # the same as `dtype`, for which torch asks us each time

    @staticmethod
    def __new__(cls, like: torch.nn.Parameter, param: int, name: str, shares: Shares) -> ShardedGrad:
        made: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.param, made.label, made.shares, made.ended, made.own_dtype = param, name, shares, False, like.dtype
        return made

    def __init__(self, like: torch.nn.Parameter, param: int, name: str, shares: Shares) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedGrad({self.label!r}, shape={tuple(self.shape)}, dtype={self.own_dtype}: each rank holds its share; "
            "optimizer.whole_grad(parameter) returns all of it)"
        )

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        raise _refusal("numpy", self)

    def tolist(self) -> Any:
        raise _refusal("tolist", self)

    def share_memory_(self) -> Any:
        raise _refusal("share_memory_", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickling", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A graph of what is done to a gradient would be kept by the `ShardedGrad`, from window to window.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        _check_windows((*args, *kwargs.values()))
        packet = func.overloadpacket.__name__
        if func.namespace in _OF_COLLECTIVES:
            raise _of_all_ranks(packet, _first_in((*args, *kwargs.values())))
        if packet == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if packet.startswith("_foreach_") and isinstance(args[0], (list, tuple)):
            return _each(packet.removeprefix("_foreach_"), args, kwargs)
        return _one(packet, func, args, kwargs)


def _one(packet: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    self = args[0]
    if not isinstance(self, ShardedGrad):
        raise _refusal(packet, _first_in((*args, *kwargs.values())))
    if packet in _ELEMENTWISE:
        self.shares.apply_inplace(self.param, func, args[1:], kwargs)
        return self
    if packet in ("linalg_vector_norm", "norm"):
        given = dict(zip(("ord", "dim", "keepdim"), args[1:], strict=False)) | kwargs
        if not given.get("keepdim") and _all_dims(self, given.get("dim")):
            return _norm(self, given.get("ord", given.get("p")), given.get("dtype"))
    if packet in ("detach", "alias"):
        return self  # nothing to detach from; both would share the storage that there is none of
    raise _refusal(packet, self)


def _all_dims(tensor: torch.Tensor, dim: int | Sequence[int] | None) -> bool:
    num_dims = max(tensor.dim(), 1)
    named = [dim] if isinstance(dim, int) else dim or range(num_dims)  # none named: all are meant
    return {one + num_dims if one < 0 else one for one in named} == set(range(num_dims))


def _norm(self: ShardedGrad, order: Any, dtype: torch.dtype | None) -> torch.Tensor:
    order = 2.0 if order is None else float(order)
    if not order >= 0.0:
        raise _refusal(f"a norm of order {order:g}", self)
    norm = self.shares.norm(self.param, order)
    return norm if dtype is None else norm.to(dtype)


def _each(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A `_foreach_` operator as one operator a tensor."""
    results = []
    for index in range(len(args[0])):
        arguments = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
        if not isinstance(arguments[0], ShardedGrad):
            raise _refusal(f"_foreach_{name}", _first_in(arguments))
        if name == "norm":
            results.append(_norm(arguments[0], arguments[1] if len(arguments) > 1 else None, kwargs.get("dtype")))
        else:
            single = _OF_ONE_TENSOR.get(name, name)
            results.append(_one(single, getattr(aten, single, None), arguments, kwargs))
    return results if name == "norm" else None


def _unscale(grads: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    sharded = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    others = [grad for grad in grads if not isinstance(grad, ShardedGrad)]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inverse_scale)
    sharded[0].shares.unscale([grad.param for grad in sharded], found_inf, inverse_scale)


def _check_windows(arguments: Sequence[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            _check_windows(argument)
        elif isinstance(argument, ShardedGrad) and argument.ended:
            raise ZeroError(
                f"Cannot use this gradient of {argument.label}: its window has ended, and its values are gone. "
                "Read .grad again, or keep optimizer.whole_grad(parameter) before."
            )


def _first_in(arguments: Sequence[Any]) -> ShardedGrad | None:
    """The `ShardedGrad` that an operator was given, which may be in a list."""
    for argument in arguments:
        candidate = _first_in(argument) if isinstance(argument, (list, tuple)) else argument
        if isinstance(candidate, ShardedGrad):
            return candidate
    return None


def _refusal(packet: str, grad: ShardedGrad | None) -> NotImplementedError:
    whose = "a parameter" if grad is None else grad.label
    return NotImplementedError(
        f"Cannot run {packet} on the gradient of {whose}: every rank holds only its share of it. "
        "Use norms of orders from 0 up and in-place arithmetic on .grad, or get all of it with "
        "optimizer.whole_grad(parameter), on all ranks. Delete what averages gradients over ranks, such as "
        "DistributedDataParallel: they are averaged already."
    )


def _of_all_ranks(packet: str, grad: ShardedGrad | None) -> NotImplementedError:
    whose = "a parameter" if grad is None else grad.label
    return NotImplementedError(
        f"Cannot run {packet} on the gradient of {whose}: it is averaged over all ranks already, or added up with "
        "reduce='sum'. Delete this call, and the division by the number of ranks beside it."
    )
