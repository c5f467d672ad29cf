"""The parameters that are managed, and their `.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Params:
    """The managed parameters in the model's order. Everywhere else they are numbers."""

    def __init__(
        self, tensors: Sequence[torch.nn.Parameter], names: Sequence[str], leaves: Sequence[torch.nn.Parameter] | None = None
    ) -> None:
        self.tensors: list[torch.nn.Parameter] = []
        # The parameters that autograd and the user have: the same, or DTensors of them.
        self.leaves: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.index: dict[int, int] = {}  # the number of a parameter, by id of its tensor or its leaf
        self.reached: int | None = None  # the parameter that the last backward, or the running one, came to last
        self.add(tensors, names, tensors if leaves is None else leaves)
        self._usual: dict[int, torch.dtype | None] = {}  # by parameter whose `grad_dtype` was changed here: the dtype before

    @property
    def all(self) -> int:
        """Returns all parameters, as bits."""
        return (1 << len(self.tensors)) - 1

    def add(
        self, tensors: Sequence[torch.nn.Parameter], names: Sequence[str], leaves: Sequence[torch.nn.Parameter]
    ) -> None:
        for name, tensor, leaf in zip(names, tensors, leaves, strict=True):
            self.tensors.append(tensor)
            self.leaves.append(leaf)
            self.names.append(name)
            # Done last, as `forget` removes the entries of what is in `tensors`.
            self.index[id(tensor)] = self.index[id(leaf)] = len(self.tensors) - 1

    def forget(self, first: int) -> None:
        """Removes this parameter and all after it."""
        for tensor in (*self.tensors[first:], *self.leaves[first:]):
            self.index.pop(id(tensor), None)
        del self.tensors[first:], self.leaves[first:], self.names[first:]

    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the numbers of those of these parameters that are managed, in their order."""
        return [self.index[id(tensor)] for tensor in tensors if id(tensor) in self.index]

    def names_in(self, model: torch.nn.Module, tensors: Sequence[torch.nn.Parameter]) -> list[str]:
        """Returns the names of parameters that are new; a parameter that is not the model's gets a number."""
        by_id = {id(param): name for name, param in model.named_parameters()}
        extra = sum(name.startswith("optimizer.") for name in self.names)
        return [by_id.get(id(tensor), f"optimizer.{extra + index}") for index, tensor in enumerate(tensors)]

    def clear_grads(self) -> None:
        """Sets every `.grad` to None."""
        for leaf in self.leaves:
            leaf.grad = None
        for index in list(self._usual):
            self.restore(index)

    def set_grad(self, index: int, grad: torch.Tensor | None) -> None:
        param = self.leaves[index]
        if grad is None:
            param.grad = None
            if self._usual:
                self.restore(index)
            return
        try:
            param.grad = grad
        except (RuntimeError, TypeError):  # trying costs less than asking each time
            self._set_of_another_dtype(index, param, grad)

    def _set_of_another_dtype(self, index: int, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        dtype = getattr(grad, "own_dtype", grad.dtype)  # a `ShardedGrad` has a dtype of its own
        if dtype != param.dtype and not hasattr(param, "grad_dtype"):
            # Exchanged by the user, which settling will find; torch before 2.10 cannot hold the gradient.
            self.set_grad(index, None)
            return
        allowed = getattr(param, "grad_dtype", dtype)
        if allowed is not None and allowed != dtype:
            param.grad = None  # torch changes the dtype of an empty .grad only
            self._usual.setdefault(index, allowed)
            param.grad_dtype = dtype
        param.grad = grad

    def restore(self, index: int) -> None:
        """Lets an empty `.grad` hold again what it could before."""
        if index in self._usual and self.leaves[index].grad is None:
            self.leaves[index].grad_dtype = self._usual.pop(index)
