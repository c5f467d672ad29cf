"""Checks whether the model still computes with what lies in flat memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn

from zero.memory.addresses import KnownMemory
from zero.memory.formats import ParamFormat
from zero.memory.leaves import local_of
from zero.memory.weights import Weights
from zero.runtime.params.table import Params

logger = logging.getLogger("zero")


_VALUES = methodcaller("values")  # returns the values of a dictionary, or of what a scripted module has in its place


class ModuleTables:
    """The tables of parameters and of children that the modules of a model have, and what was in them when that was noted."""

    def __init__(self) -> None:
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []  # the values of all tables, one after the other

    def note(self, model: nn.Module) -> None:
        self._tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
        self._sizes = list(map(len, self._tables))
        self._values = list(chain.from_iterable(map(_VALUES, self._tables)))

    def have_other_sizes(self) -> bool:
        """Returns whether a module gained or lost a parameter or a child."""
        return list(map(len, self._tables)) != self._sizes

    def have_changed(self) -> bool:
        return self.have_other_sizes() or not all(map(is_, chain.from_iterable(map(_VALUES, self._tables)), self._values))


class ParamTracker:
    """At every settling each parameter in flat memory lies where it was put, or is found to have been moved or replaced.

    After `module.weight = nn.Parameter(...)` or `model.half()` the optimizer has memory that the model no longer reads:
    training would go on without effect. So each settling compares, at a cost of two comparisons a parameter: is every module's
    table of parameters and of children the same as last time, and does each parameter lie where it was put.

    What was assigned to `.data` and fits is an edit, which a step takes in. Until then it is left where it is: code that
    exchanges memory to evaluate with averaged weights exchanges it back.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Params,
        weights: Weights,
        formats: Sequence[ParamFormat],
        unmanaged: Collection[str],
        renew: Callable[[], None],
        tables: ModuleTables,
    ) -> None:
        self._model = weakref.ref(model)  # see [Note: the user's] in zero/sharding/optimizer.py
        self._params = params
        self._weights = weights
        self._formats = formats
        self._unmanaged = set(unmanaged)  # names of trainable parameters that the user was told are left alone
        self._members: set[int] = set()  # numbers of the parameters that the model has; the optimizer alone knows the others
        self._places = KnownMemory()
        self._tables = weakref.ref(tables)  # weak, as the tables keep modules of the model alive
        self._replaced = 0
        self._warned_of_sharing = False
        self._renew = weakref.WeakMethod(renew)  # attaches hooks anew; weak, as its object holds this one
        self.register()
        self._note_tables(model)

    def check_model(self) -> None:
        """Attaches hooks anew if the model changed, at the start of a backward: a parametrization that was added gives a
        parameter a new autograd node without our hooks. It takes the parameter out of the table of its module, or adds a child
        to those that are there."""
        renew, tables = self._renew(), self._tables()
        if renew is not None and (tables is None or tables.have_other_sizes()):
            renew()

    def register(self) -> None:
        """Takes in parameters that are managed from now on. Changes of the model are looked at when ranks settle, as more
        groups may be added before."""
        self._members |= self._present()

    def _present(self) -> set[int]:
        model = self._model()
        ids = {id(param) for param in model.parameters()} if model is not None else ()
        return {index for index, tensor in enumerate(self._params.leaves) if id(tensor) in ids}

    def forget(self, first: int) -> None:
        """Forgets this parameter and all after it."""
        self._members = {index for index in self._members if index < first}
        self._places.forget(first)

    def invalidate(self) -> None:
        """Forgets where parameters lie: flat memory has moved."""
        self._places.forget()

    def replaced(self) -> int:
        """Returns the parameters, as bits, that the model replaced by others, or moved to memory that does not fit."""
        if self._replaced or self._model_changed():
            self._look_through_the_model()
        other = sum(1 << index for index in self.relocated() if not self._fits(index))
        return self._replaced | other | sum(1 << index for index in self._exchanged())

    def _exchanged(self) -> list[int]:
        """Returns the parameters whose DTensor has another local tensor than when it was sharded."""
        pairs = enumerate(zip(self._params.leaves, self._params.tensors, strict=True))
        return [index for index, (leaf, tensor) in pairs if leaf is not tensor and local_of(leaf) is not tensor]

    @torch.no_grad()
    def copy_back(self) -> None:
        """Copies what was assigned to `.data` to where the parameter lies."""
        for index in self.relocated():
            tensor = self._params.tensors[index]
            self._place_of(index).copy_(tensor)
            if tensor.is_cpu and tensor.is_shared():  # type: ignore[no-untyped-call]
                self._warn_of_sharing(index)
            self._weights.attach(index, tensor, self._formats[index])

    def _warn_of_sharing(self, index: int) -> None:
        if not self._warned_of_sharing:
            logger.warning(
                "Weights were moved to memory that processes share (%s), and are back where this optimizer updates them: other "
                "processes keep what they were. Send them a state_dict() after each step that they are to see.",
                self._params.names[index],
            )
        self._warned_of_sharing = True

    def relocated(self) -> list[int]:
        """Returns the parameters that do not lie where they were put."""
        layout = self._weights.layout_ref.layout
        for index in self._places.unknown(len(self._params.tensors)):
            if layout.slots[index] is not None:
                self._places.note(index, self._weights.memory_of(index) if self._formats[index].numel else None)
        return self._places.changed(self._params.tensors)

    def _model_changed(self) -> bool:
        tables = self._tables()
        return tables is None or tables.have_changed()

    def _note_tables(self, model: nn.Module) -> None:
        tables = self._tables()
        if tables is not None:
            tables.note(model)

    def _look_through_the_model(self) -> None:
        model = self._model()
        if model is None:  # the model was collected together with its optimizer, so nobody reads its parameters any more
            return
        self._note_tables(model)
        names, known, present = dict(model.named_parameters()), self._params.index, self._present()
        new = [name for name, param in names.items() if param.requires_grad and id(param) not in known]
        new = [name for name in new if name not in self._unmanaged]
        gone = self._members - present
        # A parameter that is merely gone was removed on purpose, and so was one that a frozen or a managed parameter replaced.
        # If there is a new parameter to train that is not managed, it may replace one that is gone.
        self._replaced = sum(1 << index for index in gone) if new else 0
        if not self._replaced:
            self._members = present
        if new and not self._replaced:
            self._unmanaged.update(new)
            logger.warning(
                "Trainable parameters were attached after sharding and are not trained: %s. Give them to the optimizer with "
                "add_param_group.", ", ".join(new),
            )  # fmt: skip

    def _place_of(self, index: int) -> torch.Tensor:
        memory = self._weights.memory_of(index)
        assert memory is not None  # a parameter without memory takes no other by `.data`
        form = self._formats[index]
        return form.unflatten(memory[: form.numel])

    def _fits(self, index: int) -> bool:
        tensor, place = self._params.tensors[index], self._place_of(index)
        return (tensor.shape, tensor.dtype, tensor.device) == (place.shape, place.dtype, place.device)
