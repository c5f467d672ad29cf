"""Y05: memory of long sequences does not grow with what is computed in between, and results are those of the plain way."""

from __future__ import annotations

import copy
import io
import itertools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import accelerators
import zero
from tests import ranks
from tests.devices import needs_sim


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_by_chunks_is_that_of_whole_logits(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 13, 8, dtype=dtype), nn.Linear(8, 31, bias=bias, dtype=dtype)
    targets = torch.randint(31, (2, 13))
    targets[0, 5:] = -100
    found = []
    for by_chunks in (True, False):
        x, own = hidden.clone().requires_grad_(), copy.deepcopy(head)
        if by_chunks:
            loss = zero.linear_cross_entropy(x, own.weight, targets, own.bias, tokens=4)
        else:
            logits = own(x).to(torch.promote_types(dtype, torch.float32))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / 7).backward()
        found.append([loss.detach(), x.grad, *(param.grad for param in own.parameters())])
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.01}  # the bounds of 8 bits
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **near)


def with_kept(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns what a model gives, and the elements of each tensor that is kept for its backward."""
    kept: list[int] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        return model(x), kept


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_by_chunks_trains_as_without(stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Mlp(), nn.Linear(8, 3)).double().eval()
    model = copy.deepcopy(plain)
    zero.in_chunks(model[1], tokens=4)
    options = {"keep_whole_numel": 0} if stage == 3 else {}
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **options)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        x, targets = torch.randn(2, 13, 8, dtype=torch.float64), torch.randint(3, (2, 13))
        y, kept = with_kept(model, x)
        assert max(kept) <= x.numel(), "nothing as wide as the inside of the MLP is kept"
        F.cross_entropy(y.flatten(0, 1), targets.flatten()).backward()
        F.cross_entropy(plain(x).flatten(0, 1), targets.flatten()).backward()
        optimizer.step(), optimizer.zero_grad(), oracle.step(), oracle.zero_grad()
    optimizer.close()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def sent(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("assigned", [False, True])
def test_a_module_by_chunks_is_copied_with_them_and_saved_without(assigned: bool) -> None:
    model, x = nn.Sequential(Mlp()).eval(), torch.randn(2, 9, 8)
    if assigned:
        model[0].forward = types.MethodType(nn.Sequential.forward, model[0])
    zero.in_chunks(model[0], tokens=4)
    zero.ulysses(None, model)
    for make, widest in ((copy.copy, 2 * 4 * 8), (copy.deepcopy, 2 * 4 * 8), (sent, 4 * x.numel())):
        copied = make(model)
        y, kept = with_kept(copied, x.clone().requires_grad_())
        assert max(kept) == widest, make
        torch.testing.assert_close(y, model(x))
    assert type(sent(model)) is nn.Sequential and type(sent(model)[0]) is Mlp, "it is loaded where zero is not installed"


class Router(nn.Linear):
    """A module that has no width left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze(-1)


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("samples", [2, 4])
def test_what_cannot_go_by_chunks_is_refused(samples: int) -> None:
    zero.in_chunks(router := Router(8, 1), tokens=4)
    with pytest.raises(ValueError, match=r"Cannot run a Router by chunks of tokens: it makes .* of .*4, 8\)"):
        router(torch.randn(samples, 8, 8))
    zero.in_chunks(pair := Pair(8, 8), tokens=4)
    with pytest.raises(ValueError, match=r"Cannot run a Pair by chunks of tokens: it makes a tuple of"):
        pair(torch.randn(samples, 8, 8))
    with pytest.raises(ValueError, match="Cannot use tokens=-1"):
        zero.linear_cross_entropy(torch.randn(2, 8), router.weight, torch.zeros(2, dtype=torch.int64), tokens=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x * scale)))


class Blocks(nn.Module):
    def __init__(self, recomputes: bool, depth: int) -> None:
        super().__init__()
        self.recomputes, self.blocks = recomputes, nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, scale, use_reentrant=False) if self.recomputes else block(x, scale)
        return x


SIZE = 600 * 64 * 4  # bytes of what a block is given


def kept_on(rank: int, world: int, stage: int, recomputes: bool) -> dict[Any, tuple[int, list[torch.Tensor]]]:
    """Returns bytes of the device between a forward and its backward, and the weights after two steps, by what is kept where
    and by the number of blocks."""
    found, accelerator = {}, accelerators.get("sim")
    place = accelerator.device(rank)
    for where, depth in itertools.product(("device", "host", "bounded"), (4, 12)):
        torch.manual_seed(0)
        model = Blocks(recomputes, depth).to(place)
        if where != "device":
            zero.activations_on_host(model, 6 * SIZE if where == "bounded" else None)
        options = {"keep_whole_numel": 0, "gathered_bytes": 0} if stage == 3 else {}
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **options)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, scale = (torch.randn(600, 64, generator=generator).to(place) for _ in range(2))
            before = accelerator.memory(rank).allocated
            y = model(x, scale)
            held = accelerator.memory(rank).allocated - before
            y.square().mean().backward()
            del y
            optimizer.step(), optimizer.zero_grad()
        optimizer.close()
        found[where, depth] = held, [param.detach().cpu() for param in model.parameters()]
    return found


@needs_sim
@pytest.mark.promise("Y05")
@pytest.mark.parametrize(
    ("stage", "recomputes"), [(3, True), *(pytest.param(2, each, marks=pytest.mark.full) for each in (True, False))]
)
def test_activations_on_the_host_give_the_same_bits_and_leave_the_device(stage: int, recomputes: bool) -> None:
    for found in ranks.run(2, kept_on, stage, recomputes, apart="sim"):
        for (where, depth), (_, weights) in found.items():
            assert all(map(torch.equal, weights, found["device", depth][1])), where
        grown = {where: (found[where, 12][0] - found[where, 4][0]) / SIZE for where in ("device", "host", "bounded")}
        gathered = 8 * 2 * 64 * 128 * 4 / SIZE if stage == 3 else 0.0  # weights of eight more blocks
        assert grown["device"] >= 8 + gathered and grown["host"] < 0.5 + gathered, grown
        assert found["bounded", 12][0] < found["device", 12][0] - SIZE


@pytest.mark.promise("Y05")
def test_a_loss_by_chunks_can_be_differentiated_twice() -> None:
    found = []
    for by_chunks in (True, False):
        torch.manual_seed(0)
        weight, targets = torch.randn(31, 8, dtype=torch.float64, requires_grad=True), torch.randint(31, (9,))
        targets[3] = -100
        hidden = F.embedding(targets.clamp(min=0), weight) * 2  # tied, so that one is made of the other
        if by_chunks:
            loss = zero.linear_cross_entropy(hidden, weight, targets, tokens=4)
        else:
            loss = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (loss + grad.square().sum()).backward()
        found.append((grad.detach(), weight.grad))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("case", ["float64", "one token"])
def test_a_loss_by_chunks_takes_what_the_plain_one_does(case: str) -> None:
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(8, dtype=torch.float64), torch.randn(31, 8, dtype=torch.float64), torch.tensor(5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "float64"):  # autocast leaves float64 as it is
        loss = zero.linear_cross_entropy(hidden, weight, target)
        expected = F.cross_entropy(F.linear(hidden, weight), target)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


class Scaled(nn.Linear):
    """A module whose input is passed by name."""

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(hidden) * scale


@pytest.mark.promise("Y05")
@pytest.mark.parametrize("shape", [(2, 13, 8), (8,)])
def test_a_module_by_chunks_is_called_as_before(shape: tuple[int, ...]) -> None:
    module, x = Scaled(8, 8), torch.randn(shape)
    expected = module(scale=2.0, hidden=x)
    zero.in_chunks(module, tokens=4)
    torch.testing.assert_close(module(scale=2.0, hidden=x), expected)


def left_or_edited(rank: int, world: int) -> tuple[int, str, str]:
    """Returns the bytes of the device that forwards without a backward leave there; and the errors of backwards whose weight or
    small result was edited since."""
    accelerator, errors = accelerators.get("sim"), []
    place = accelerator.device(rank)
    # The bytes come first: torch's thread of a device forgets a graph only some time after its backward has returned.
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(4))).to(place)
    zero.activations_on_host(model, 3 * 2**18)
    x = torch.ones(1024, 64, device=place)
    before = accelerator.memory(rank).allocated
    for _ in range(3):
        model(x), model(x[:4])
    left = accelerator.memory(rank).allocated - before
    results: list[torch.Tensor] = []
    for edited in ("weight", "result"):
        layer = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30)).to(place)
        zero.activations_on_host(layer)
        layer[1].register_forward_hook(lambda _module, _args, y: results.append(y.detach()))
        y = layer(torch.ones(4, 30, device=place))
        with torch.no_grad():
            (layer[2].weight if edited == "weight" else results[-1]).mul_(2)
        with pytest.raises(RuntimeError, match="edited in place") as caught:
            y.sum().backward()
        errors.append(str(caught.value))
    return left, *errors


@needs_sim
@pytest.mark.promise("Y05")
def test_what_stays_on_the_device_is_checked_and_freed_as_without() -> None:
    ((left, of_weight, of_result),) = ranks.run(1, left_or_edited, apart="sim")
    assert "shape (30, 30)" in of_weight and "shape (4, 30)" in of_result
    assert left == 0
