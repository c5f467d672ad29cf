"""Several optimizers of one model as one, such as Muon for its matrices and AdamW for the rest; and optimizers of torch without
its compiler and without their hooks.

[Note: no compiler] Making an optimizer loads torch's compiler, 70 MiB and a second or two in every process, because torch tells
it to leave `add_param_group` alone. If the compiler is not loaded there is nothing to tell, so the method is called as it is;
torch tells the compiler later, should it be loaded. What steps in one pass never needs it; the `step` of most of torch's
optimizers loads it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from zero.optim.muon import fused_step, is_fused
from zero.optim.optimizers import loss_of

OneOrSeveral: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# Torch keeps under this name what the compiler made of a method, and looks for it before it loads the compiler.
_TOLD = "__dynamo_disable"


@contextlib.contextmanager
def skip_dynamo_import() -> Iterator[None]:
    """Makes a block in which optimizers are made without loading the compiler."""
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(method, _TOLD):
        yield
        return
    with contextlib.suppress(AttributeError):  # raised if the method was replaced by an object without attributes
        setattr(method, _TOLD, method)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):  # another thread may have deleted it already
            if getattr(method, _TOLD, None) is method:
                delattr(method, _TOLD)


class Optimizers(torch.optim.Optimizer):
    """An optimizer with the groups of all its members, which are their own dicts, and one state for all. A step steps each
    member, in order."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)
        self._is_made = False
        super().__init__([group for member in members for group in member.param_groups], {})
        self._is_made = True
        for member in members:
            self.state.update(member.state)
            member.state = self.state
        self.register_step_pre_hook(self._before)
        self.register_step_post_hook(self._after)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which says under "optimizer" which member is to step it."""
        if not self._is_made:
            super().add_param_group(param_group)
            return
        to = param_group.get("optimizer")
        member = next((member for member in self.members if member is to), None)
        if member is None:
            raise ValueError(
                'Cannot add a group to several optimizers: its "optimizer" is none of them. Write {"params": ..., "optimizer": '
                "muon}, with the one that is to step it."
            )
        held = {id(param) for group in self.param_groups for param in group["params"]}
        num_groups, num_of_member = len(self.param_groups), len(member.param_groups)
        try:
            member.add_param_group({key: value for key, value in param_group.items() if key != "optimizer"})
            self.param_groups.append(member.param_groups[-1])
            if not held.isdisjoint(map(id, self.param_groups[-1]["params"])):
                raise ValueError("Cannot add this group: a parameter of it is in a group already. List every parameter once.")
        except BaseException:
            del self.param_groups[num_groups:], member.param_groups[num_of_member:]
            raise

    def remove_last_group(self) -> None:
        group = self.param_groups.pop()
        for member in self.members:
            member.param_groups[:] = [other for other in member.param_groups if other is not group]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for member in self.members:
            step_without_hooks(member)
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizers:
        # Torch copies groups and state of each member.
        return Optimizers([copy.deepcopy(member, memo) for member in self.members])

    def check(self) -> None:
        """Raises if a member is not what it was when they were put together."""
        known = set(map(id, self.param_groups))
        for member in self.members:
            if member.state is not self.state or not known.issuperset(map(id, member.param_groups)):
                raise ValueError(
                    f"Cannot step: the {type(member).__name__} that was sharded has got other state or other groups since. Use "
                    "the sharded optimizer for load_state_dict, and change its groups and its state in place."
                )

    def _before(self, _: Any, args: Any, options: Any) -> None:
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined]  # a schedule made on it looks whether it steps
            for hook in member._optimizer_step_pre_hooks.values():
                hook(member, args, options)

    def _after(self, _: Any, args: Any, options: Any) -> None:
        for member in self.members:
            for hook in member._optimizer_step_post_hooks.values():
                hook(member, args, options)


def as_one(optimizer: Any) -> Any:
    """Returns the optimizer, or several of a list as one."""
    if not isinstance(optimizer, (list, tuple)) or not optimizer:
        return optimizer
    for member in optimizer:
        _check_member(member)
    return Optimizers(optimizer) if len(optimizer) != 1 else optimizer[0]


def _check_member(member: Any) -> None:
    if not isinstance(member, torch.optim.Optimizer):
        raise TypeError(f"Cannot shard a list with a {type(member).__name__} in it. Pass torch.optim.Optimizers.")
    if hasattr(member, "sharding"):
        raise ValueError("Cannot shard a list with an optimizer that is sharded already. Pass it once, or close() it first.")
    if any(callable(getattr(type(member), mode, None)) for mode in ("train", "eval")):
        raise ValueError(f"Cannot shard {type(member).__name__} beside others: it has modes. Shard it alone.")


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers that step."""
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)


def with_members(optimizer: torch.optim.Optimizer) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Returns every group with the optimizer that steps it."""
    stepped_by = {id(group): member for member in members_of(optimizer) for group in member.param_groups}
    return [(stepped_by[id(group)], group) for group in optimizer.param_groups]


def remove_last_group(optimizer: torch.optim.Optimizer) -> None:
    """Removes the group that was added last."""
    if isinstance(optimizer, Optimizers):
        optimizer.remove_last_group()
    else:
        optimizer.param_groups.pop()


def name_of(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(type(member).__name__ for member in members_of(optimizer))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Steps without hooks. The optimizer that the user holds runs them, once."""
    if has_step_of_its_own(optimizer):
        optimizer.step()
        return
    if is_fused(optimizer):
        fused_step(optimizer)
        return
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if somebody put another `step` on the object, which is then called once, with everything."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def of_user(optimizer: torch.optim.Optimizer) -> Callable[[], torch.optim.Optimizer]:
    """Returns a function that gives an optimizer of the user's, which the sharded one keeps, without keeping it. See [Note: the
    user's] in zero/sharding/optimizer.py."""
    ref = weakref.ref(optimizer)

    def get() -> torch.optim.Optimizer:
        present = ref()
        assert present is not None, "a training is used whose optimizer is gone"
        return present

    return get
