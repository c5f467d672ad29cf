"""The names of `deepspeed.moe`: a layer of experts over ranks, and what tells their parameters from others.

Tokens go to the ranks of their experts and back by two exchanges of equal rows. A rank has rows for `capacity` tokens of each
expert, and those that are not needed are zeros, of which nothing is read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from zero.compat.deepspeed import comm
from zero.compat.deepspeed import ranks as groups
from zero.compat.deepspeed.parameters import warning_once
from zero.setup.parts import is_of_expert as is_moe_param
from zero.setup.parts import part

_POLICIES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2  # the factor that a gate's input is multiplied by lies at most this far from 1


@dataclass(frozen=True)
class _Rule:
    """The rule by which tokens are given to experts."""

    k: int  # the experts of a token
    capacity_factor: float
    eval_capacity_factor: float
    min_capacity: int
    noise: str | None
    drops: bool  # drops the tokens for which an expert has no row
    draws_kept: bool  # draws the tokens that an expert keeps, if a token has one expert; otherwise it keeps the first ones
    draws_second: bool  # draws the second expert of two


class _Routes(NamedTuple):
    """The experts of each token: `[k, token]` all but the last three."""

    experts: torch.Tensor
    places: torch.Tensor  # the place among the rows of the expert
    weights: torch.Tensor
    are_kept: torch.Tensor
    capacity: int
    l_aux: torch.Tensor
    counts: torch.Tensor  # the tokens of each expert, including those that were dropped


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    zero, one = like.new_zeros(()), like.new_ones(())
    return torch.distributions.Gumbel(zero, one, validate_args=False).rsample(like.shape)


def _chosen(logits: torch.Tensor, gates: torch.Tensor, rule: _Rule, is_training: bool) -> torch.Tensor:
    """Returns the experts of each token."""
    if rule.k > 2:
        return gates.topk(rule.k, dim=1).indices.T
    is_drawn = rule.k == 1 and rule.noise == "RSample" and is_training
    first = (logits + _gumbel(logits) if is_drawn else gates).argmax(1)
    if rule.k == 1:
        return first.unsqueeze(0)
    others = logits + _gumbel(logits) if rule.draws_second else logits
    return torch.stack([first, others.scatter(1, first.unsqueeze(1), -math.inf).argmax(1)])


def _places(taken: torch.Tensor) -> torch.Tensor:
    """Returns which row of an expert a token has: those come first whose first choice it is."""
    return (taken.flatten(0, 1).cumsum(0) - 1).view_as(taken)


def _routes(logits: torch.Tensor, rule: _Rule, is_training: bool, used_token: torch.Tensor | None) -> _Routes:
    (num_tokens, num_experts), k = logits.shape, rule.k
    gates = functional.softmax(logits, dim=1)
    experts = _chosen(logits, gates, rule, is_training)
    taken = functional.one_hot(experts, num_experts)
    if used_token is not None:
        taken = taken * used_token.reshape(1, -1, 1).bool()
    counts = taken.sum((0, 1))
    shares = taken[0] if k <= 2 else taken.sum(0) / k  # of two experts, the first counts
    per_token = 1 / max(num_tokens, 1)  # a rank may have no tokens
    l_aux = (gates.sum(0) * per_token * shares.to(gates.dtype).sum(0) * per_token).mean() * num_experts**2
    if rule.drops:
        factor = rule.capacity_factor if is_training else rule.eval_capacity_factor
        wanted = torch.ceil(num_tokens / num_experts * torch.tensor(float(factor * k)))
        capacity = max(int(wanted), rule.min_capacity)
        if k == 2 or (k == 1 and not rule.draws_kept):
            kept = taken * (_places(taken) < capacity)
        else:
            preferred = taken.sum(0) * (torch.rand_like(gates) if k == 1 else gates.detach())
            best = preferred.topk(min(capacity, num_tokens), dim=0).indices
            kept = taken * torch.zeros_like(taken[0]).scatter(0, best, 1)
    else:
        kept, capacity = taken, int(counts.max())
    weights = (gates * kept).sum(2)
    if k > 1:
        weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
    return _Routes(experts, (_places(kept) * kept).sum(2), weights, kept.any(2), capacity, l_aux, counts)


class _Exchanged(torch.autograd.Function):
    """Rows for the ranks of a group in their order, in exchange for those that they have for this one."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, rows = group, rows.contiguous()
        received = torch.empty_like(rows)
        comm.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchanged(grad, ctx.group), None


def _exchanged(rows: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return rows
    received: torch.Tensor = _Exchanged.apply(rows, group)  # type: ignore[no-untyped-call]
    return received


class _Gate(nn.Module):
    """The weights by which experts are chosen, in fp32 at least."""

    def __init__(self, hidden_size: int, num_experts: int, rule: _Rule) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.rule = rule

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> _Routes:
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        if self.rule.noise == "Jitter" and self.training:
            tokens = tokens * (1 - _JITTER + torch.rand_like(tokens) * 2 * _JITTER)
        return _routes(functional.linear(tokens, self.wg.weight.to(tokens.dtype)), self.rule, self.training, used_token)


class Experts(nn.Module):
    """The experts of a rank, copies of one to begin with, for rows of each of them along the second dimension."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.expert_group_name = expert_group_name
        self.mark()

    def mark(self) -> None:
        """Says of the parameters that they are of experts, which a copy of a model does not know of its own."""
        for param in self.parameters():
            param.allreduce, param.group_name = False, self.expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns what each expert makes of its rows; the first of what it returns if that is a tuple."""
        chunks = inputs.chunk(self.num_local_experts, dim=1)
        made = [expert(rows) for expert, rows in zip(self.deepspeed_experts, chunks, strict=True)]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in made], dim=1)


class _OverRanks(nn.Module):
    """Sends tokens to their experts, on whatever ranks those are, and brings back what they make of them."""

    def __init__(self, gate: _Gate, experts: Experts, ep_size: int) -> None:
        super().__init__()
        self.gate, self.experts, self.ep_size = gate, experts, ep_size
        self.l_aux: Any = None  # a tensor of the last forward
        self.exp_counts: Any = None  # a tensor of the last forward

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "l_aux": None, "exp_counts": None}  # the graph of a forward cannot be copied

    def forward(self, x: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = routes.l_aux, routes.counts
        group = None if self.ep_size == 1 else groups._get_expert_parallel_group(str(self.experts.expert_group_name))
        capacity = routes.capacity if group is None else _largest(routes.capacity, tokens.device, group)
        (k, num_tokens), width = routes.experts.shape, tokens.shape[1]
        num_rows = len(routes.counts) * capacity
        # The row behind the last one takes the tokens that are dropped.
        slots = torch.where(routes.are_kept, routes.experts * capacity + routes.places, num_rows).flatten()
        rows = tokens.new_zeros(num_rows + 1, width).index_copy(0, slots, tokens.repeat(k, 1))[:-1]
        rows = _exchanged(rows, group).view(self.ep_size, self.experts.num_local_experts, capacity, width)
        made = _exchanged(self.experts(rows).reshape(num_rows, width), group)
        made = torch.cat([made, made.new_zeros(1, width)])[slots].view(k, num_tokens, width)
        combined: torch.Tensor = (made * routes.weights.unsqueeze(-1)).sum(0)
        return combined.to(made.dtype).view(x.shape)


def _largest(capacity: int, device: torch.device, group: Any) -> int:
    """Returns the largest of the ranks' capacities: each sends as many rows as it receives."""
    both = torch.tensor(capacity, device=device)
    comm.all_reduce(both, op=comm.ReduceOp.MAX, group=group)
    return int(both)


class MoE(nn.Module):
    """A layer whose tokens go to `k` of `num_experts` experts, which lie over `ep_size` ranks; forward returns the output, the
    loss that balances experts, and how many tokens chose each of them.

    The arguments are those of DeepSpeed 0.19.8, of which `enable_expert_tensor_parallelism` has no effect. `initialize` of an
    engine makes the groups of ranks; a model that is trained without one calls `set_deepspeed_parallelism` on each layer before
    it is sharded.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if num_experts % ep_size:
            raise ValueError(
                f"Cannot make a MoE of {num_experts} experts over {ep_size} ranks: these cannot be divided so. Make ep_size a "
                "divisor of num_experts."
            )
        if noisy_gate_policy not in _POLICIES or not 1 <= k <= num_experts:
            raise ValueError(
                f"Cannot make a MoE with noisy_gate_policy={noisy_gate_policy!r} and k={k}: the policy is None, 'Jitter' or "
                f"'RSample', and k is from 1 to {num_experts}, the number of experts. Write one of these."
            )
        if use_tutel:
            warning_once("use_tutel of MoE has no effect: rows are sent by torch.")
        rule = _Rule(k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens, use_rts,
                     top2_2nd_expert_sampling)  # fmt: skip
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = _OverRanks(_Gate(hidden_size, num_experts, rule), experts, ep_size)
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Makes the groups of ranks, unless they are there, and marks the experts as parts along them. A collective."""
        order = {"use_data_before_expert_parallel_": use_data_before_expert_parallel_}
        groups._create_expert_and_data_parallel(self.ep_size, **order)
        experts = self.deepspeed_moe.experts
        experts.mark()
        group = groups._get_expert_parallel_group(self.expert_group_name)
        if group is not None:
            part(experts.deepspeed_experts, group, dim=None)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the output, the loss that balances experts and the number of tokens that chose each. `used_token` says which
        tokens count; with several experts a token it has no effect, as in DeepSpeed. A collective of the ranks of the layer."""
        if used_token is not None and self.deepspeed_moe.gate.rule.k > 1:
            warning_once("used_token of MoE has no effect where a token has several experts, as in DeepSpeed.")
            used_token = None
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            plain = self.mlp(hidden_states)
            share = functional.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + (plain[0] if isinstance(plain, tuple) else plain) * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns whether the model has such a layer, and how many experts the first one has."""
    numbers = [module.num_experts for module in m.modules() if isinstance(module, MoE)]
    return bool(numbers), numbers[0] if numbers else 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Returns whether a group says that it is of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the parameters that are of no expert, and those of experts."""
    params = list(params)
    return [param for param in params if not is_moe_param(param)], [param for param in params if is_moe_param(param)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients that there are of the one kind, and of the other."""
    shared, of_experts = split_params_into_shared_and_expert_params(group)
    kinds = [[param.grad for param in params if param.grad is not None] for params in (shared, of_experts)]
    return kinds[0], kinds[1]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = 178956971,
) -> list[dict[str, Any]]:
    """Returns the groups without experts, and behind them groups of experts alone, of so many elements at most where there are
    several, with the settings of the group that they were in."""
    groups_here = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    apart: list[dict[str, Any]] = []
    for group in groups_here:
        group["params"], of_experts = split_params_into_shared_and_expert_params(group["params"])
        for name in sorted({str(param.group_name) for param in of_experts}):  # type: ignore[attr-defined]
            members = [param for param in of_experts if str(param.group_name) == name]  # type: ignore[attr-defined]
            settings = {**group, "name": name, "moe": True}
            apart += [{**settings, "params": each} for each in _by_size(members, max_group_size)]
    return groups_here + apart


def _by_size(params: list[nn.Parameter], limit: float | None) -> list[list[nn.Parameter]]:
    runs: list[list[nn.Parameter]] = [[]]
    for param in params:
        if limit is not None and runs[-1] and sum(map(torch.Tensor.numel, runs[-1])) + param.numel() > limit:
            runs.append([])
        runs[-1].append(param)
    return runs


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Returns groups of a list of parameters or of groups, with those of experts apart."""
    first = model_parameters[0]
    if isinstance(first, nn.Parameter):
        return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
    has_moe = any("moe" in group for group in model_parameters)
    return model_parameters if has_moe else split_params_into_different_moe_groups_for_optimizer(model_parameters)
