"""The facts in an operator's schema: what it changes, whether it draws random numbers, and how it can be put off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerators_sim import torch_private

# Operators whose indices may lie on the host, as torch itself moves them.
_MAY_MIX = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
# Operators that run at once. The first changes running statistics of which its schema tells nothing. In evaluation the first
# two give empty statistics on the host and on a GPU, and torch works out full ones; it does so only once its compiler is
# imported. If channels come last, and a size is 1, torch works out other strides for the next two than their kernels give, and
# sums get another order. Of the last one it works out norms in fp16 for weights in fp16, where kernels give and take fp32.
_RUN_AT_ONCE = frozenset(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "_native_batch_norm_legit_no_training", "convolution", "native_batch_norm_backward"),
        "_weight_norm_interface",
    )
)


@dataclass(frozen=True)
class Plan:
    """The facts in the schema of one operator, read once."""

    name: str
    writes: frozenset[int]  # positions of arguments that it changes
    writes_names: frozenset[str]  # keyword arguments that it changes
    tensors: frozenset[int]  # positions of arguments that have to be tensors, for which torch may give a number
    random: str  # "argument" if it takes a generator, "default" if it has none and uses the host's, or ""
    waits: bool  # the shape or value of its result depends on data, for which the host must wait
    may_mix: bool
    lateness: str  # "in place", or "new" if its results' shapes follow from its arguments', or "" if it cannot be put off

    @property
    def resizes(self) -> bool:
        return bool(self.writes_names)  # out= tensors take the shape of the result


_plans: dict[Any, Plan] = {}


def plan_of(op: Any) -> Plan:
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _read_plan(op)
    return plan


def _read_plan(op: Any) -> Plan:
    arguments = op._schema.arguments
    changed = [
        (index, argument)
        for index, argument in enumerate(arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    tensors = frozenset(index for index, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType))
    takes_generator = any(argument.name == "generator" for argument in arguments)
    random = torch.Tag.nondeterministic_seeded in op.tags
    waits = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
    returns_arguments = all(result.alias_info and result.alias_info.is_write for result in op._schema.returns)
    if random or waits or op._schema.name in _RUN_AT_ONCE or any(argument.kwarg_only for _, argument in changed):
        lateness = ""
    elif changed:
        lateness = "in place" if returns_arguments and len(op._schema.returns) <= 1 else ""
    else:
        are_new = all(isinstance(result.type, torch.TensorType) and result.alias_info is None for result in op._schema.returns)
        lateness = "new" if tensors and are_new and torch_private.has_shapes(op.name()) else ""
    return Plan(
        name=op._schema.name,
        writes=frozenset(index for index, argument in changed if not argument.kwarg_only),
        writes_names=frozenset(argument.name for _, argument in changed),
        tensors=frozenset() if torch_private.takes_numbers(op.name()) else tensors,
        random="" if not random else "argument" if takes_generator else "default",
        waits=waits,
        may_mix=op._schema.name in _MAY_MIX,
        lateness=lateness,
    )
