"""A mixture of experts, whole in one process and with its experts over several ranks: the oracle of parts, and what it judges.

Experts are batched weights, or a list of modules. Tokens go to two of them, to other ranks and back by all-to-all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero

WIDTH, NUM_EXPERTS, NUM_TOKENS = 6, 4, 11
VOCABULARY = 13


class Batched(nn.Module):
    """Experts in two weights, `[expert, in, out]`."""

    dim: int | None = 0
    number = NUM_EXPERTS

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, WIDTH, 2 * WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(number, 2 * WIDTH, WIDTH) * 0.3)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([F.gelu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(parts)])

    def cut(self, part: int, parts: int) -> None:
        for name in ("up", "down"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().chunk(parts)[part].clone()))


class Distributed(Batched):
    """Batched experts whose weights are DTensors."""

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        up, down = local_of(self.up), local_of(self.down)
        return torch.cat([F.gelu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])

    def distribute(self, mesh: Any) -> None:
        for name in ("up", "down"):
            local = getattr(self, name).detach()
            shape = torch.Size((self.number, *local.shape[1:]))
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride())
            setattr(self, name, nn.Parameter(whole))


class Uneven(Batched):
    """Batched experts of which the last rank has less than the others."""

    number = 7


class UnevenDistributed(Distributed):
    """The same as DTensors."""

    number = 7


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Listed(nn.Module):
    """Experts that are a module each. One that gets no row is not called."""

    dim: int | None = None
    number = NUM_EXPERTS

    def __init__(self, number: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) if len(part) else part for expert, part in zip(self.each, parts, strict=True)])

    def cut(self, part: int, parts: int) -> None:
        number = len(self.each) // parts
        self.each = nn.ModuleList(self.each[part * number + index] for index in range(number))


KINDS = {"batched": Batched, "listed": Listed, "DTensors": Distributed}
UNEVEN = {"uneven": Uneven, "uneven DTensors": UnevenDistributed}
ALL_KINDS = KINDS | UNEVEN


class Mixture(nn.Module):
    """An embedding, experts behind a router beside a shared one, and a head."""

    def __init__(self, kind: type[Any], never: int | None = None) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, kind.number)
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.experts, self.number = kind(kind.number), kind.number
        self.never = never  # the expert that gets no token
        self.chosen: list[int] | None = None  # the experts that get all tokens
        self.ranks: Any = None  # the ranks that have the experts together

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        scores = self.router(x)
        if self.never is not None:
            scores = scores.index_fill(-1, torch.tensor([self.never], device=x.device), -torch.inf)
        weight, choice = scores.softmax(-1).topk(2, -1)
        if self.chosen is not None:
            choice = torch.tensor(self.chosen, device=x.device).expand_as(choice)
            weight = scores.softmax(-1).gather(-1, choice)
        choice = choice.flatten()
        order, counts = choice.argsort(stable=True), torch.bincount(choice, minlength=self.number)
        rows = x.repeat_interleave(2, 0)[order]
        done = self.experts.compute(rows, counts) if self.ranks is None else self._elsewhere(rows, counts)
        back = torch.zeros_like(done).index_copy(0, order, done).view(-1, 2, WIDTH)
        return self.head(x + self.shared(x) + (back * weight.unsqueeze(-1)).sum(1))

    def _elsewhere(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size(self.ranks)
        lengths = [len(each) for each in counts.chunk(size)]
        here = lengths[dist.get_rank(self.ranks)]
        local = counts.new_empty(size * here)
        dist.all_to_all_single(local, counts, [here] * size, lengths, group=self.ranks)
        send, receive = [int(each.sum()) for each in counts.chunk(size)], local.view(size, -1).sum(1).tolist()
        come = all_to_all_single_autograd(rows, receive, send, self.ranks)
        expert_of = torch.arange(here, device=rows.device).repeat(size).repeat_interleave(local).argsort(stable=True)
        done = self.experts.compute(come[expert_of], local.view(size, -1).sum(0))
        return all_to_all_single_autograd(torch.zeros_like(done).index_copy(0, expert_of, done), send, receive, self.ranks)


class Enter(torch.autograd.Function):
    """Gives ranks with the same values a part of the work each: gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Any) -> torch.Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.peers)
        return grad, None


class Leave(torch.autograd.Function):
    """Sums what such ranks have: all get the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=peers)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


COPIED, CUT, SPREAD = "copied", "cut", "spread"


class BesideLayers(Mixture):
    """A mixture whose shared layer and head are cut over `peers`, ranks with the same tokens. Its experts are copied by these,
    or cut over them too, or spread over all ranks."""

    way, peers = COPIED, None

    def _elsewhere(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.way == COPIED:
            return super()._elsewhere(rows, counts)
        rows = Enter.apply(rows, self.peers)
        if self.way == CUT:
            return Leave.apply(super()._elsewhere(rows, counts), self.peers)
        mine = torch.arange(len(rows), device=rows.device)[dist.get_rank(self.peers) :: dist.get_world_size(self.peers)]
        expert_of = torch.arange(self.number, device=rows.device).repeat_interleave(counts)
        done = super()._elsewhere(rows[mine], torch.bincount(expert_of[mine], minlength=self.number))
        return Leave.apply(torch.zeros_like(rows).index_copy(0, mine, done), self.peers)


def beside_layers(model: Mixture, mesh: Any, way: str, over: int = 2) -> Mixture:
    """A copy of it with its layers cut along "tp" of a mesh of two dimensions, and its experts in one of these ways; whole over
    one rank."""
    of_experts = DeviceMesh(mesh.device_type, list(range(dist.get_world_size()))) if way == SPREAD else mesh["ep"]
    own: Any = parted(model, of_experts) if over > 1 else copy.deepcopy(model)
    own.__class__, own.way, own.peers = BesideLayers, way, mesh.get_group("tp")
    for name, dim in (("up", 2), ("down", 1)) if way != SPREAD and over > 1 and isinstance(own.experts, Distributed) else ():
        local = local_of(getattr(own.experts, name).detach())
        if way == CUT:
            local = local.chunk(mesh["tp"].size(), dim)[mesh.get_local_rank("tp")].contiguous()
        shape = torch.Size((own.number, *model.get_parameter(f"experts.{name}").shape[1:]))
        layout = {"run_check": False, "shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        along = {"ep": Shard(0), "tp": Shard(dim) if way == CUT else Replicate()}
        placements = [along[each] for each in mesh.mesh_dim_names]
        setattr(own.experts, name, nn.Parameter(DTensor.from_local(local, mesh, placements, **layout)))
    layer = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(own, mesh["tp"], {"shared": layer, "head": layer})


def mixture(kind: type[Any], never: int | None = None, dtype: torch.dtype = torch.float64) -> Mixture:
    torch.manual_seed(0)
    return Mixture(kind, never).to(dtype)


def parted(model: Mixture, mesh: Any) -> Mixture:
    """A copy of it with this rank's experts."""
    own = copy.deepcopy(model)
    own.experts.cut(mesh.get_local_rank(), mesh.size())
    own.ranks = mesh.get_group()
    if isinstance(own.experts, Distributed):
        own.experts.distribute(mesh)
    else:
        zero.part(own.experts, mesh, dim=own.experts.dim)
    return own


def group_of(model: Mixture) -> dict[str, Any]:
    """Returns the option that says that ranks which have experts together have tokens of their own."""
    return {"group": dist.group.WORLD} if isinstance(model.experts, Distributed) else {}


def own_part(model: Mixture, mesh: Any) -> dict[str, torch.Tensor]:
    """Returns the weights of a whole one that a rank is to have, by name."""
    own = copy.deepcopy(model)
    own.experts.cut(mesh.get_local_rank(), mesh.size())
    return {name: param.detach() for name, param in own.named_parameters()}


def as_held(whole: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of a whole one that a model is to have on this rank, by name: of DTensors all."""
    own: Any = copy.deepcopy(whole)
    ranks = getattr(model, "ranks", None)
    if ranks is not None and not isinstance(own.experts, Distributed):
        own.experts.cut(dist.get_rank(ranks), dist.get_world_size(ranks))
    return {name: param.detach() for name, param in own.named_parameters()}


def batches(world: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of each rank."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (world, 2, NUM_TOKENS), generator=generator)
    return [(both[0], both[1]) for both in tokens]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
