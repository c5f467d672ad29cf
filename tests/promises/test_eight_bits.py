"""Gradients that travel in 8 bits: fewer bytes, the same bits on all ranks, and as good a training."""

import copy
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

import accelerators
import zero
from examples.train.model import Gpt
from examples.train.text import Text, read_text
from tests import faults, inside, ranks
from tests.devices import needs_cuda, needs_sim
from tests.instruments import Ledger
from tests.loopback import run_ranks
from tests.parity import by_host
from tests.promises.offloads import place_of
from zero import shard
from zero.config.schema import Coded, LossScale

IN_EIGHT_BITS = {"reduce_dtype": "int8"}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


def train(model, optimizer, rank, num_steps, device="cpu", backwards=1):
    losses = []
    for step in range(num_steps):
        for micro in range(backwards):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            batch = torch.randn(8, 24, generator=generator).to(device, next(model.parameters()).dtype)
            loss = (model(batch) - batch.flip(1)).float().square().mean()
            (loss / backwards).backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model):
    return [param.detach().float().cpu() for param in model.parameters()]


@pytest.mark.promise("N20")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (2, None)])
def test_they_travel_in_a_half_or_a_quarter_of_the_bytes_and_all_ranks_have_the_same_weights(stage, dtype, world):
    def program(group):
        model, ledger = mlp(), Ledger(group)
        optimizer = shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, dtype=dtype, group=ledger, **IN_EIGHT_BITS
        )
        ledger.section = "training"
        train(model, optimizer, group.rank, 2)
        shares = [bucket.share_numel for bucket in inside.buckets(optimizer)]
        return weights(model), shares, ledger.of("training", "all_to_all", "all_gather")

    of_ranks = run_ranks(world, program)
    for found, shares, sent in of_ranks:
        assert all(torch.equal(one, other) for one, other in zip(found, of_ranks[0][0], strict=True))
        gradients = [entry.num_bytes for entry in sent if entry.operation == "all_to_all"]
        assert sorted(gradients) == sorted(2 * [world * inside.bytes_in_code(numel) for numel in shares])


@pytest.mark.promise("N20")
@pytest.mark.parametrize("num_local", [None, 2], ids=["one level", "two hosts of two"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_rounding_took_away_comes_with_the_next_gradient(stage, num_local):
    """With a step of plain SGD and the same gradient each time, what is missing after any number of steps is one rounding."""
    world, numel = 2 if num_local is None else 4, 3 * inside.NUMBERS_IN_A_CODED_BLOCK
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]

    def program(group):
        group = group if num_local is None else Ledger(by_host(group, num_local))  # it need not be one of ours
        model = nn.Linear(numel, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shard(model, inner, stage=stage, reduce="sum", group=group, reduce_dtype="int8")
        assert inside.sends_bytes(optimizer, across=num_local is not None)
        errors = []
        for step in range(1, 26):
            model(gradients[group.rank].view(1, -1)).sum().backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()  # once more, which throws nothing away
            errors.append((model.weight.detach().view(-1) + step * sum(gradients)).abs().max().item())
        return errors

    largest = sum(gradient.abs().max().item() / 127 for gradient in gradients)  # a step of each rank's largest block
    for errors in run_ranks(world, program):
        assert 0 < max(errors) < 2 * largest and max(errors[20:]) < 2 * max(errors[:5])


def on_processes(rank, world, device, stage, shared):
    place = place_of(rank, device)
    options = {"stage": stage, "dtype": "bfloat16", "shared_memory": shared, "bucket_bytes": 1024, "reduce_dtype": "int8"}
    model = mlp().to(place)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    losses = train(model, optimizer, rank, 5, place, backwards=2)
    found = losses, weights(model)
    optimizer.close()
    return found


def near(found):
    for losses, values in found:
        assert losses[-1] < losses[0]
        assert all(torch.equal(one, other) for one, other in zip(values, found[0][1], strict=True))
    return found


@pytest.mark.promise("N20")
@pytest.mark.parametrize(("stage", "shared"), [pytest.param(2, True, marks=pytest.mark.full), (2, False), (3, True)])
def test_so_they_do_over_gloo_and_shared_memory_with_the_same_bits(stage, shared):
    found = near(ranks.run(2, on_processes, "cpu", stage, shared))
    assert found[0][0] == ranks.run(2, on_processes, "cpu", stage, shared)[0][0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "device",
    [pytest.param("sim", marks=(needs_sim, pytest.mark.full)), pytest.param("cuda:staged", marks=needs_cuda)],
)
def test_so_they_do_on_a_device_with_late_copies(device, stage):
    near(ranks.run(2, on_processes, device, stage, True, apart=device))
    assert accelerators.current().name != "sim"


def a_million_parameters(rank, world, stage, options):
    torch.manual_seed(0)
    text = Text(read_text(None), 32, seed=0)
    model = Gpt(layers=4, width=144, heads=4, context=32)
    assert sum(param.numel() for param in model.parameters()) > 1_000_000
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = zero.shard(model, adamw, stage=stage, dtype="bfloat16", bucket_bytes=2**18, **options)
    for step in range(500):
        model(text.samples(step, 8)[4 * rank : 4 * rank + 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(text.samples(500, 256)).item()


@pytest.fixture(scope="module")
def plain_loss():
    return ranks.run(2, a_million_parameters, 2, {}, timeout=900.0)[0]


@pytest.mark.full
@pytest.mark.parametrize("options", [IN_EIGHT_BITS, {"reduce_dtype": "int8"}], ids=["both", "gradients"])
def test_a_gpt_of_a_million_parameters_ends_at_most_1_percent_above_the_loss_without(options, plain_loss):
    found = ranks.run(2, a_million_parameters, 2, options, timeout=900.0)
    assert plain_loss < 3.0 and found[0] == found[1] <= 1.01 * plain_loss


class Float8:
    """A code as somebody may add it. The largest number of its dtype is 448."""

    def __init__(self, seed):
        """It draws no random numbers."""

    def num_bytes(self, numel):
        return numel

    def encode(self, rows, messages):
        finite = torch.where(rows.isfinite(), rows.clamp(-448.0, 448.0), torch.nan)
        messages.copy_(finite.to(torch.float8_e4m3fn).view(torch.uint8))

    def decode(self, messages, numel):
        return messages.view(torch.float8_e4m3fn).float()


def test_every_name_has_a_code():
    assert set(get_args(Coded)) == set(inside.codes())


ALL_CODES = pytest.mark.parametrize("code", [*inside.codes().values(), Float8])


@ALL_CODES
def test_a_code_keeps_its_sizes_and_what_is_not_finite(code):
    code = code(0)
    for numel in (1, 2, 255, 256, 1000):
        rows = torch.linspace(-1e30, 1e30, 3 * numel).view(3, numel)
        rows[1, numel // 2] = torch.inf
        rows[2, numel // 3] = torch.nan
        size = code.num_bytes(numel)
        memory = torch.full((4, size), 255, dtype=torch.uint8)
        code.encode(rows, memory[1:])  # they begin after another message
        numbers = code.decode(memory[1:], numel)
        assert numbers.dtype == torch.float32 and numbers.shape == rows.shape
        assert numbers[0].isfinite().all()
        assert not numbers[1, numel // 2].isfinite() and not numbers[2, numel // 3].isfinite()


@ALL_CODES
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_code_needs_nothing_but_its_name(stage, code):
    begun = mlp()

    def program(group, reduce_dtype):
        model, ledger = copy.deepcopy(begun), Ledger(group)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shard(model, sgd, stage=stage, group=ledger, reduce_dtype=reduce_dtype)
        ledger.section = "training"
        losses = train(model, optimizer, group.rank, 5)
        sent = [entry.num_bytes for entry in ledger.of("training", "all_to_all")]
        shares = [bucket.share_numel for bucket in inside.buckets(optimizer)]
        is_sent = sent == 5 * [code(0).num_bytes(numel) * group.size for numel in shares]
        return losses, [weight.clone() for weight in weights(model)], is_sent

    with faults.sends_in_code("int8", code):
        coded, exact = (run_ranks(2, partial(program, reduce_dtype=dtype)) for dtype in ("int8", None))
    for (losses, found, is_sent), (expected, _, _) in zip(coded, exact, strict=True):
        assert is_sent and losses == pytest.approx(expected, rel=1e-3) and losses != expected
        assert all(torch.equal(one, other) for one, other in zip(found, coded[0][1], strict=True))


def test_one_rank_sends_nothing_and_is_plain_torch():
    models = [mlp(), mlp()]
    adamw = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    optimizer = zero.shard(models[0], adamw, stage=2, kernels="torch", **IN_EIGHT_BITS)
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    assert train(models[0], optimizer, 0, 3) == train(models[1], plain, 0, 3)
    assert all(torch.equal(one, other) for one, other in zip(*map(weights, models), strict=True))


@ALL_CODES
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_and_forgotten(value, code):
    def program(group):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shard(model, inner, stage=2, group=group, on_nonfinite="skip", reduce_dtype="int8")
        before = weights(model)
        batch = torch.full((1, 24), value if group.rank else 1.0)
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        unchanged = all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
        train(model, optimizer, group.rank, 2)
        return unchanged, all(bool(value.isfinite().all()) for value in weights(model))

    with faults.sends_in_code("int8", code):
        assert run_ranks(2, program) == [(True, True)] * 2


class Scaled(nn.Module):
    """Its gradients do not depend on its weights, and are 0 for those of `idle`."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(700, generator=generator))
        self.idle = nn.Parameter(torch.randn(90, generator=generator))

    def forward(self, factors):
        return (self.weight * factors).sum()


def steps(model, optimizer, first, last):
    for step in range(first, last):
        factors = torch.randn(700, generator=torch.Generator().manual_seed(step)).to(model.weight)
        model(factors).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("way", "num_local"),
    [("zero_grad", None), ("model", None), ("skipped", None), ("load", None), ("skipped", 2), ("load", 2)],
)
def test_nothing_of_gradients_that_were_thrown_away_comes_with_the_next_ones(way, num_local, tmp_path):
    world = 2 if num_local is None else 4

    def program(group):
        group = group if num_local is None else by_host(group, num_local)
        model = Scaled()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shard(model, inner, stage=2, group=group, on_nonfinite="skip", reduce_dtype="int8")
        if way == "load":
            zero.save(tmp_path, optimizer, "start")
        for step in range(3):
            factors = 1e6 * torch.randn(700, generator=torch.Generator().manual_seed(10 * step + group.rank))
            if way == "skipped" and group.rank:
                factors[3] = float("inf")
            model(factors).backward()
            if way == "zero_grad":
                optimizer.zero_grad()
            elif way == "model":
                model.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
        if way == "load":
            zero.load(tmp_path, optimizer)
        model(torch.zeros(700)).backward()
        optimizer.step()
        norm = optimizer.grad_norm
        optimizer.close()
        return norm, inside.rounding_errors(optimizer)

    assert run_ranks(world, program) == [(0.0, {})] * world


def test_finite_halves_stay_finite_with_what_the_rounding_took_away():
    def program(group):
        model = Scaled()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        scale = {"loss_scale": LossScale(dynamic=False, initial=1.0)}
        optimizer = shard(model, inner, stage=2, group=group, dtype="float16", reduce_dtype="int8", **scale)
        norms = []
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            model((65_000 + 500 * torch.rand(700, generator=generator)).half()).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        return norms

    for norms in run_ranks(2, program):
        assert all(norm == pytest.approx(65_250 * 700**0.5, rel=0.02) for norm in norms)


def test_where_nothing_could_travel_in_8_bits_it_is_refused():
    with pytest.raises(ValueError, match="Cannot use reduce_dtype='int8' at stage 0"):
        zero.ZeroConfig(stage=0, reduce_dtype="int8")
