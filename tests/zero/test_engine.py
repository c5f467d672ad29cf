"""DeepSpeed's loop gives what plain PyTorch gives on the global batch, whoever divides, counts, clears or clips."""

import contextlib
import copy
import re
import threading
import warnings

import pytest
import torch
from torch import nn

import zero
from tests.loopback import run_ranks, solo
from tests.zoo.case import filled, mlp, real_mlp, real_numbers, whole_loss, whole_numbers
from zero import Engine, ShardedOptimizer
from zero.config.schema import Batch, LossScale, Report, ZeroConfig
from zero.profiling import STOPS

STAGES = (0, 1, 2)
WORLDS = (1, 2)
building = threading.Lock()  # ranks that are threads share torch's generators


def sgd(model, lr=0.125):
    return torch.optim.SGD(model.parameters(), lr=lr)


def engine_of(group, stage=2, *, build=mlp, optimizer=sgd, schedule=None, **fields):
    """An engine of a fresh model, with buckets that are smaller than most parameters."""
    with building:
        model = build()
        inner = optimizer(model)
    config = ZeroConfig(stage=stage, bucket_bytes=64, timeout_s=20.0, **fields)
    sharded = ShardedOptimizer(model, inner, config, group)
    return Engine(sharded, None if schedule is None else schedule(sharded))


def whole_batch(rank, micro, rows=2):
    return whole_numbers((rows, 4), "batch", rank, micro, low=-1, high=1)


def linear_loss(model, rank, micro, world):
    """Whole numbers in and out, so that every sum is exact and every bit can be compared."""
    return whole_loss(model(whole_batch(rank, micro)), world, micro)


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class Plain:
    """Plain PyTorch over all ranks at once: the mean over ranks of a loss that the caller divides."""

    def __init__(self, world, build=mlp, optimizer=sgd):
        self.world = world
        self.model = build()
        self.optimizer = optimizer(self.model)

    def backward(self, micro, divisor=1.0):
        for rank in range(self.world):
            (linear_loss(self.model, rank, micro, self.world) / (divisor * self.world)).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


# who divides ------------------------------------------------------------------------------------------------------------


def norm_of_a_step(group, stage, accumulation, **backward):
    samples = real_numbers((16, 4), "samples").chunk(group.size)[group.rank].chunk(accumulation)
    engine = engine_of(group, stage, build=real_mlp, accumulation=accumulation, clip=1e9)
    for sample in samples:
        engine.backward(engine(sample).square().mean(), **backward)
        engine.step()
    assert engine.global_steps == 1 and engine.micro_steps == accumulation
    return engine.get_global_grad_norm(), weights(engine.module)


@pytest.mark.promise("A02")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", WORLDS)
def test_the_declared_count_divides_once_whatever_it_is(stage, world):
    plain = real_mlp()
    plain(real_numbers((16, 4), "samples")).square().mean().backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()]).norm().item()
    sgd(plain).step()
    for accumulation in (1, 2, 8):
        for norm, found in run_ranks(world, lambda group, count=accumulation: norm_of_a_step(group, stage, count)):
            assert norm == pytest.approx(expected, rel=1e-5)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.promise("A02")
def test_the_divisor_can_be_turned_off_and_stands_in_the_configuration():
    once, _ = norm_of_a_step(solo(), 2, 4)
    undivided, _ = norm_of_a_step(solo(), 2, 4, scale_wrt_gas=False)
    assert undivided == pytest.approx(4 * once, rel=1e-5)
    engine = engine_of(solo(), accumulation=4)
    assert "accumulation = 4" in engine.config.text()
    assert engine.gradient_accumulation_steps() == 4
    loss = engine(whole_batch(0, 0)).sum()
    assert torch.equal(engine.backward(loss), loss / 4)


def own_backward(group, stage, accumulation, how, **fields):
    """What the weights are when every micro-batch goes backward by `how`."""
    engine = engine_of(group, stage, accumulation=accumulation, **fields)
    for micro in range(2 * accumulation):
        x = whole_batch(group.rank, micro).to(next(engine.parameters()).dtype)
        loss = whole_loss(engine(x), group.size, micro)
        how(engine, loss)
        engine.step()
    assert engine.global_steps == 2
    return weights(engine.module)


HOWS = {
    "engine": lambda engine, loss: engine.backward(loss),
    "loss": lambda engine, loss: engine.scale(loss).backward(),  # it is the loss itself if nothing is scaled
    "gradient": lambda engine, loss: engine.scale(loss.expand(2)).backward(gradient=torch.full((2,), 0.5)),
}


SCALED = {"dtype": "float16", "loss_scale": LossScale(dynamic=False, initial=8.0)}


@pytest.mark.promise("K11")
@pytest.mark.parametrize("fields", [{}, SCALED], ids=["fp32", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_of_the_callers_own_gives_the_same_and_divides_as_the_engines_does(stage, fields):
    for accumulation in (1, 2):
        runs = [
            run_ranks(2, lambda group, how=HOWS[name], count=accumulation: own_backward(group, stage, count, how, **fields))
            for name in ("engine", "loss", "gradient")
        ]
        for run in runs[1:]:
            assert all(same_bits(one, other) for one, other in zip(run, runs[0], strict=True))
            assert not same_bits(run[0], weights(mlp()))


# windows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A07")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_first_window_is_like_every_other(stage, world):
    def train(group):
        engine, found = engine_of(group, stage, accumulation=2), []
        for micro in range(6):
            assert engine.is_gradient_accumulation_boundary() == (micro % 2 == 1)
            engine.backward(linear_loss(engine, group.rank, micro, world))
            engine.step()
            found.append((engine.was_step_applied(), weights(engine.module)))
        return found

    plain, expected = Plain(world), []
    for micro in range(6):
        plain.backward(micro, divisor=2)
        if micro % 2:
            plain.step()
        expected.append((micro % 2 == 1, weights(plain.model)))
    for found in run_ranks(world, train):
        for (applied, mine), (applies, theirs) in zip(found, expected, strict=True):
            assert applied == applies
            assert same_bits(mine, theirs)


class Speaking(nn.Linear):
    """A model with methods of its own, one of which gives the model."""

    length = 7

    def generate(self, *, times):
        return "la" * times

    def quietly(self):
        return self

    @property
    def wrong(self):
        raise AttributeError("nothing inside")


def test_what_an_engine_does_not_have_is_asked_of_the_model():
    engine = engine_of(solo(), build=lambda: Speaking(4, 3))
    assert engine.generate(times=2) == "lala" and engine.length == 7 and engine.in_features == 4
    assert list(engine.children()) == [] and engine.weight is not engine.module.weight  # a method of ours goes first
    assert engine.quietly() is engine and engine.eval() is engine and not engine.training
    assert engine.to(engine.device) is engine and engine.apply(lambda module: module.train()) is engine and engine.training
    assert engine.config is engine.optimizer.config
    assert not hasattr(engine, "no_such_thing") and not hasattr(engine, "__len__")
    for name in ("no_such_thing", "wrong"):
        with pytest.raises(AttributeError, match=f"Cannot find {name!r} in Engine: neither it nor its Speaking has it"):
            getattr(engine, name)
    assert not hasattr(engine.optimizer, "generate") and not hasattr(engine.optimizer, "in_features")
    assert copy.copy(engine).module is engine.module


def test_what_is_printed_says_where_a_training_is():
    engine = engine_of(solo())
    optimizer = engine.optimizer
    assert str(engine) == "Engine of Mlp, global step 0: ShardedOptimizer (SGD at stage 2, rank 0 of 1, step 0, window EMPTY)"
    engine.backward(linear_loss(engine.module, 0, 0, 1))
    assert "step 0, window OPEN" in str(engine)
    engine.step()
    first, *groups = str(optimizer).splitlines()
    assert first == "ShardedOptimizer (SGD at stage 2, rank 0 of 1, step 1, window EMPTY"
    assert groups == str(sgd(mlp())).splitlines()[1:]  # as torch writes them
    engine.close()
    assert str(engine).endswith("global step 1: ShardedOptimizer (SGD at stage 2, closed)")


def test_an_engine_says_which_rank_it_is(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    found = [(engine.global_rank, engine.world_size, engine.local_rank) for engine in run_ranks(3, engine_of)]
    assert found == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    engine = engine_of(solo())
    engine.close()
    assert (engine.global_rank, engine.world_size, engine.local_rank) == (0, 1, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_flush_of_a_window_that_reached_no_parameter_changes_none(stage):
    def train(group):
        engine, elsewhere = engine_of(group, stage, accumulation=4), nn.Linear(4, 1)
        before = weights(engine.module)
        engine.backward(elsewhere(whole_batch(group.rank, 0)).sum())
        engine.step()
        engine.flush()
        assert same_bits(weights(engine.module), before) and engine.global_steps == 1
        assert not engine.is_gradient_accumulation_boundary()

    run_ranks(2, train)


@pytest.mark.parametrize("stage", STAGES)
def test_off_the_boundary_a_step_only_counts(stage):
    def train(group):
        decays = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        engine = engine_of(group, stage, accumulation=3, schedule=decays)
        before = weights(engine.module)
        for micro in range(2):
            engine.backward(linear_loss(engine, group.rank, micro, group.size))
            engine.step()
        assert same_bits(weights(engine.module), before)
        assert (engine.micro_steps, engine.global_steps, engine.get_lr()) == (2, 0, [0.125])
        assert not engine.was_step_applied()
        engine.backward(linear_loss(engine, group.rank, 2, group.size))
        engine.step()
        assert not same_bits(weights(engine.module), before)
        assert (engine.micro_steps, engine.global_steps, engine.get_lr()) == (3, 1, [0.0625])
        assert all(param.grad is None for param in engine.parameters())

    run_ranks(2, train)


@pytest.mark.parametrize("stage", STAGES)
def test_the_callers_own_boundary_goes_before_the_count_until_the_next_step(stage):
    def train(group):
        engine = engine_of(group, stage, accumulation=4)
        engine.set_gradient_accumulation_boundary(False)
        for micro in range(5):
            engine.backward(linear_loss(engine, group.rank, micro, group.size))
            engine.step()
        assert engine.global_steps == 0
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(linear_loss(engine, group.rank, 5, group.size))
        engine.step()
        assert engine.global_steps == 1
        assert not engine.is_gradient_accumulation_boundary()  # the count holds again
        return weights(engine.module)

    plain = Plain(2)
    for micro in range(6):
        plain.backward(micro, divisor=4)
    plain.step()
    assert all(same_bits(found, weights(plain.model)) for found in run_ranks(2, train))


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_that_is_not_counted_ends_where_the_caller_steps(stage):
    def train(group):
        engine = engine_of(group, stage, accumulation=2, count_micro_steps=False)
        with pytest.raises(ValueError, match="every step ends a window"):
            engine.set_gradient_accumulation_boundary(True)
        for number, micros in enumerate(((0, 1, 2), (3,))):
            for micro in micros:
                engine.backward(linear_loss(engine, group.rank, micro, group.size))
            engine.step()
            assert engine.global_steps == number + 1
        return weights(engine.module)

    plain = Plain(2)
    for micros in ((0, 1, 2), (3,)):
        for micro in micros:
            plain.backward(micro, divisor=2)
        plain.step()
    assert all(same_bits(found, weights(plain.model)) for found in run_ranks(2, train))


def ten_of_four(group, stage, end):
    engine = engine_of(group, stage, accumulation=4)
    for micro in range(10):
        engine.backward(linear_loss(engine, group.rank, micro, group.size))
        engine.step()
    end(engine)
    for micro in range(10, 14):
        engine.backward(linear_loss(engine, group.rank, micro, group.size))
        engine.step()
    return engine.global_steps, weights(engine.module)


def step_by_hand(engine):
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


ENDS = {  # by name: the call for the two micro-batches that are left over, and the number that they are divided by
    "flush": (lambda engine: engine.flush(), 2),
    "discard": (lambda engine: engine.discard(), None),
    "a plain step": (step_by_hand, 4),
}


@pytest.mark.promise("A04")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_that_is_not_full_is_flushed_discarded_or_stepped(stage, end):
    act, divisor = ENDS[end]
    plain = Plain(2)
    for micros, divides in ((range(4), 4), (range(4, 8), 4), (range(8, 10), divisor), (range(10, 14), 4)):
        for micro in micros if divides else ():
            plain.backward(micro, divisor=divides)
        plain.step()
    for num_steps, found in run_ranks(2, lambda group: ten_of_four(group, stage, act)):
        assert num_steps == (3 if divisor is None else 4)
        assert same_bits(found, weights(plain.model))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_flush_divides_by_the_true_number_of_backwards_of_the_callers_own(num_micro_batches):
    engine, plain = engine_of(solo(), accumulation=4), Plain(1)
    for micro in range(num_micro_batches):
        linear_loss(engine.module, 0, micro, 1).backward()
        if micro + 1 < num_micro_batches:
            engine.step()
        plain.backward(micro, divisor=num_micro_batches)
    engine.flush()
    plain.step()
    assert same_bits(weights(engine.module), weights(plain.model))
    assert engine.global_steps == 1


def test_a_backward_of_the_callers_own_with_a_weight_is_divided_by_the_weights_alone():
    def train(how):
        engine = engine_of(solo(), accumulation=2)
        for micro in range(2):
            engine.weight(micro + 1)
            how(engine, linear_loss(engine, 0, micro, 1))
            engine.step()
        return weights(engine.module)

    assert same_bits(train(HOWS["engine"]), train(HOWS["loss"]))


def test_without_an_engine_a_declared_accumulation_divides_nothing():
    model, plain = mlp(), Plain(1)
    optimizer = zero.shard(model, sgd(model), stage=2, accumulation=2, group=solo())
    for micro in range(2):
        linear_loss(model, 0, micro, 1).backward()
        plain.backward(micro)
    optimizer.step()
    plain.step()
    assert same_bits(weights(model), weights(plain.model))


def test_a_backward_that_failed_is_followed_by_backwards_that_divide_as_ever():
    engine, plain = engine_of(solo(), accumulation=2), Plain(1)
    with pytest.raises(RuntimeError):
        engine.backward(torch.zeros(2, requires_grad=True).exp())  # no scalar
    for micro in range(2):
        linear_loss(engine, 0, micro, 1).backward()
        engine.step()
        plain.backward(micro, divisor=2)
    plain.step()
    assert same_bits(weights(engine.module), weights(plain.model))


@pytest.mark.parametrize("how", ["engine", "loss"])
def test_samples_are_counted_by_the_backwards_where_the_caller_ends_the_windows(how):
    batch = Batch.of(micro_samples=2, accumulation=4, world_size=1)
    engine, found = engine_of(solo(), batch=batch, count_micro_steps=False), []
    for num_backwards in (1, 3, 4):
        for micro in range(num_backwards):
            HOWS[how](engine, linear_loss(engine, 0, micro, 1))
        engine.step()
        found.append(engine.global_samples)
    assert found == [2, 8, 16]


def test_flush_counts_the_micro_batches_of_all_ranks_and_does_nothing_without_any():
    def train(group):
        engine = engine_of(group, 2, accumulation=4)
        engine.flush()
        assert engine.global_steps == 0
        for micro in range(1 if group.rank else 3):  # four micro-batches on two ranks, where eight make a step
            engine.backward(linear_loss(engine, group.rank, micro, 1))
            engine.step()
        engine.flush()
        assert engine.global_steps == 1
        return weights(engine.module)

    plain = Plain(1)
    for rank, micro in ((0, 0), (0, 1), (0, 2), (1, 0)):
        (linear_loss(plain.model, rank, micro, 1) / 4).backward()
    plain.step()
    assert all(same_bits(found, weights(plain.model)) for found in run_ranks(2, train))


CLEARS = {
    "engine": lambda engine, to_none: engine.zero_grad(set_to_none=to_none),
    "optimizer": lambda engine, to_none: engine.optimizer.zero_grad(set_to_none=to_none),
    "module": lambda engine, to_none: engine.module.zero_grad(set_to_none=to_none),
}


@pytest.mark.promise("A08")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zeros"])
@pytest.mark.parametrize("clear", CLEARS)
def test_every_way_to_clear_clears_everything_wherever_in_the_window(clear, to_none, stage):
    def train(group, point):
        engine = engine_of(group, stage, accumulation=4)
        for micro in range(8):
            if micro == point:
                CLEARS[clear](engine, to_none)
            engine.backward(linear_loss(engine, group.rank, micro, group.size))
            if micro + 0.5 == point:
                CLEARS[clear](engine, to_none)
            engine.step()
        assert engine.global_steps == 2
        return weights(engine.module)

    for point in (0, 0.5, 1, 2.5, 3, 3.5, 4):
        plain = Plain(2)
        for micro in range(8):
            if micro == point:
                plain.optimizer.zero_grad(to_none)
            plain.backward(micro, divisor=4)
            if micro + 0.5 == point:
                plain.optimizer.zero_grad(to_none)
            if micro % 4 == 3:
                plain.step()
        for found in run_ranks(2, lambda group, point=point: train(group, point)):
            assert same_bits(found, weights(plain.model)), point


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_and_whole_gradients_are_those_of_the_optimizer(stage):
    def train(group):
        engine = engine_of(group, stage, accumulation=2)
        with engine.no_sync():
            engine.backward(linear_loss(engine, group.rank, 0, group.size))
            engine.step()
        engine.backward(linear_loss(engine, group.rank, 1, group.size))
        engine.settle()
        grads = [engine.whole_grad(param) for param in engine.parameters()]
        engine.step()
        engine.check()
        assert engine.any_rank(group.rank == 1)
        assert not engine.any_rank(False)
        assert engine.whole_state(next(engine.parameters())) == {} or "momentum_buffer" in engine.whole_state(
            next(engine.parameters())
        )
        return grads

    plain = Plain(2)
    for micro in range(2):
        plain.backward(micro, divisor=2)
    for grads in run_ranks(2, train):
        assert all(torch.equal(grad, param.grad) for grad, param in zip(grads, plain.model.parameters(), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_takes_the_place_of_the_divisor(stage):
    """Tokens of unequal micro-batches: the mean over all of them, with nothing divided by the number of micro-batches."""
    tokens = {0: (7, 3, 0), 1: (1, 8, 2)}

    def train(group):
        engine = engine_of(group, stage, build=real_mlp, accumulation=3)
        for micro, count in enumerate(tokens[group.rank]):
            engine.weight(count)
            engine.backward(engine(real_numbers((max(count, 1), 4), group.rank, micro)).square().mean())
            engine.step()
        assert engine.global_steps == 1
        return weights(engine.module)

    plain, total = Plain(1, build=real_mlp), sum(map(sum, tokens.values()))
    for rank, counts in tokens.items():
        for micro, count in enumerate(counts):
            (plain.model(real_numbers((max(count, 1), 4), rank, micro)).square().mean() * count / total).backward()
    plain.step()
    for found in run_ranks(2, train):
        for name, expected in weights(plain.model).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


# skipped steps and schedules --------------------------------------------------------------------------------------------


@pytest.mark.promise("N15")
@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_leaves_the_schedule_where_it_is(stage):
    def train(group):
        decays = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        scale = LossScale(initial=8.0, hysteresis=1)
        engine = engine_of(group, stage, dtype="float16", loss_scale=scale, schedule=decays)
        found = []
        for step in range(4):
            bad = step == 1 and group.rank == 1
            x = whole_batch(group.rank, step).half()
            before = weights(engine.module)
            engine.backward(whole_loss(engine(x), group.size, step) * (float("inf") if bad else 1.0))
            engine.step()
            assert engine.was_step_applied() != same_bits(weights(engine.module), before)
            found.append((engine.was_step_applied(), engine.get_lr()[0], engine.loss_scale()))
        assert (engine.skipped_steps, engine.global_steps, engine.micro_steps) == (1, 4, 4)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = run_ranks(2, train)
    assert runs[0] == runs[1] == [(True, 0.0625, 8.0), (False, 0.0625, 4.0), (True, 0.03125, 4.0), (True, 0.015625, 4.0)]


def test_a_first_step_that_is_skipped_brings_no_warning_of_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decays = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        scale = LossScale(initial=8.0, hysteresis=1)
        engine = engine_of(solo(), dtype="float16", loss_scale=scale, schedule=decays)
        for factor in (float("inf"), 1.0):
            engine.backward(engine(whole_batch(0, 0).half()).sum() * factor)
            engine.step()
    assert engine.get_lr() == [0.0625]


class Stubborn:
    def step(self, **options):
        raise TypeError(f"told {sorted(options)}")


@pytest.mark.promise("O05")
def test_what_a_scheduler_raises_is_seen_and_without_one_nothing_is_scheduled():
    engine = engine_of(solo(), schedule=lambda optimizer: Stubborn())
    for options, told in (({}, r"told \[\]"), ({"lr_kwargs": {"metrics": 1.0}}, r"told \['metrics'\]")):
        engine.backward(linear_loss(engine, 0, 0, 1))
        with pytest.raises(TypeError, match=told):
            engine.step(**options)
    assert engine.global_steps == 2  # steps that were taken stay counted
    engine = engine_of(solo())
    schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    for _ in range(3):
        engine.backward(linear_loss(engine, 0, 0, 1))
        engine.step()
    assert engine.get_lr() == [0.125]  # not handed over, not stepped
    schedule.step()
    assert engine.get_lr() == [0.0625]


# as the plain model -----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.tied = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(self.norm(self.first(x)))


@pytest.mark.promise("E05")
def test_names_state_and_mode_are_those_of_the_plain_model():
    plain, engine = filled(Normed()), engine_of(solo(), build=lambda: filled(Normed()))
    for listing in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(engine, listing)()] == [name for name, _ in getattr(plain, listing)()]
    assert list(map(id, engine.parameters())) == list(map(id, engine.module.parameters()))
    assert list(map(id, engine.buffers())) == list(map(id, engine.module.buffers()))
    assert list(engine.modules()) == list(engine.module.modules())
    assert list(engine.state_dict()) == list(plain.state_dict()) == list(engine.module_state_dict())
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in engine.state_dict().items())
    assert engine.training and engine.eval() is engine
    assert not engine.training and not engine.module.norm.training
    assert engine.train().module.norm.training
    x = real_numbers((3, 4), "x")
    assert torch.equal(engine(x), plain(x)) and torch.equal(engine.forward(x), plain(x))
    changed = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
    assert not engine.load_state_dict(changed).missing_keys
    assert all(torch.equal(value, changed[name]) for name, value in engine.state_dict().items())
    assert engine.norm is engine.module.norm


def test_it_answers_under_the_names_that_deepspeed_has():
    from zero.config.schema import Batch

    batch = Batch.of(micro_samples=4, accumulation=2, world_size=1)
    engine = engine_of(solo(), 1, batch=batch, clip=0.5, dtype="bfloat16")
    assert engine.train_batch_size() == 8 and engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2 and engine.gradient_clipping() == 0.5
    assert engine.zero_optimization_stage() == 1 and engine.zero_optimization()
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.loss_scale() == 1.0 and engine.get_lr() == [0.125] and engine.get_mom() == [0]
    assert engine.get_global_grad_norm() is None and engine.device == torch.device("cpu")
    for micro in range(2):
        engine.backward(engine(whole_batch(0, micro).bfloat16()).sum())
        engine.step()
    assert engine.get_global_grad_norm() > 0 and engine.global_samples == 8
    with pytest.raises(ValueError, match="Write train_batch_size"):
        engine_of(solo()).train_batch_size()


def test_closed_it_leaves_a_plain_model():
    engine = engine_of(solo())
    engine.destroy()
    model = engine.module
    model(whole_batch(0, 0)).sum().backward()
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())


def test_inputs_are_cast_and_autocast_is_on_where_that_was_asked_for():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x, more=()):
            seen.append((x.dtype, torch.is_autocast_enabled("cpu"), [item.dtype for item in more]))
            return super().forward(x)

    build = lambda: filled(Watching(4, 4))  # noqa: E731
    x, more = torch.ones(2, 4), [torch.ones(1), torch.ones(1, dtype=torch.long)]
    engine_of(solo(), build=build, dtype="bfloat16")(x, more=more)
    assert seen.pop() == (torch.bfloat16, False, [torch.bfloat16, torch.long])
    assert engine_of(solo(), build=build, autocast="bfloat16")(x).dtype == torch.bfloat16
    assert seen.pop() == (torch.float32, True, [])
    assert engine_of(solo(), build=build)(x).dtype == torch.float32


def test_a_line_is_logged_every_so_many_steps(caplog):
    caplog.set_level("INFO", logger="zero")
    engine = engine_of(solo(), report=Report(every_steps=2, wall_clock=True, memory=True))
    for micro in range(4):
        engine.backward(linear_loss(engine, 0, micro, 1))
        engine.step()
    lines = [record.getMessage() for record in caplog.records if "rank 0: step" in record.getMessage()]
    assert [line.split(",")[0] for line in lines] == ["rank 0: step 2", "rank 0: step 4"]
    assert all(word in lines[0] for word in ("skipped 0", "lr [0.125]", "ms a step", "allocated"))
    timed = [part.split()[0] for part in lines[0].split(", ") if part.endswith("ms a step")]
    assert timed == ["forward", "backward", *STOPS]


# engines beside each other ----------------------------------------------------------------------------------------------

THREE = ({"stage": 0}, {"stage": 1, "dtype": "bfloat16"}, {"stage": 2, "dtype": "float16", "accumulation": 2})


def train_engines(group, settings, num_steps=4):
    engines = [engine_of(group, build=real_mlp, **fields) for fields in settings]
    for step in range(num_steps):
        for engine in engines:
            x = real_numbers((3, 4), group.rank, step).to(next(engine.parameters()).dtype)
            engine.backward(engine(x).float().square().mean())
        for engine in reversed(engines):
            engine.step()
    return [weights(engine.module) for engine in engines]


@pytest.mark.promise("E03")
def test_three_engines_of_one_process_train_as_each_alone():
    alone = [[run[0] for run in run_ranks(2, lambda group, one=one: train_engines(group, [one]))] for one in THREE]
    for rank, run_on_all in enumerate(run_ranks(2, lambda group: train_engines(group, THREE))):
        for found, single in zip(run_on_all, alone, strict=True):
            assert same_bits(found, single[rank])


@pytest.mark.promise("N13")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_losses_are_the_same_at_every_stage(dtype):
    def train(group, stage):
        engine, losses = engine_of(group, stage, build=real_mlp, dtype=dtype), []
        for step in range(20):
            x = real_numbers((3, 4), group.rank, step).to(next(engine.parameters()).dtype)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    runs = [run_ranks(2, lambda group, stage=stage: train(group, stage)) for stage in STAGES]
    assert all(run[0] == pytest.approx(runs[0][0], rel=1e-6) for run in runs[1:])
    assert runs[0][0][-1] < runs[0][0][0]


@pytest.mark.promise("L08")
def test_a_rank_that_saw_something_tells_all_others():
    """A loss that is not finite on one rank: every rank leaves the window out, and nobody waits for ever."""

    def train(group):
        engine = engine_of(group, 2)
        for step in range(3):
            loss = linear_loss(engine, group.rank, step, group.size)
            bad = group.rank == 2 and step == 1
            if engine.any_rank(bad):
                engine.discard()
                continue
            engine.backward(loss)
            engine.step()
        return engine.global_steps, weights(engine.module)

    plain = Plain(3)
    for step in (0, 2):
        plain.backward(step)
        plain.step()
    for num_steps, found in run_ranks(3, train):
        assert num_steps == 2
        for name, expected in weights(plain.model).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)


def test_an_engine_copies_nothing_of_the_callers():
    config = ZeroConfig(stage=2)
    before = copy.deepcopy(config.as_dict())
    model = mlp()
    inner = sgd(model)
    engine = Engine(ShardedOptimizer(model, inner, config, solo()))
    with contextlib.suppress(ValueError):
        engine.train_batch_size()
    assert engine.module is model and engine.optimizer.param_groups is inner.param_groups
    assert config.as_dict() == before


def test_with_a_dynamic_scale_too_a_gradient_that_is_not_finite_may_be_an_error_with_parameter_and_rank():
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_accelerators": {"on_nonfinite": "raise"},
        "optimizer": {"type": "AdamW", "params": {}},
    }
    model = nn.Linear(3, 2)
    engine, *_ = zero.initialize(model=model, config=file)
    before = model.weight.detach().clone()
    engine.backward(engine(torch.full((1, 3), torch.inf, dtype=torch.float16)).sum())
    with pytest.raises(zero.ZeroError, match=r"^Cannot step: .* in weight, bias, from rank 0"):
        engine.step()
    assert torch.equal(model.weight, before) and engine.skipped_steps == 0
    engine.destroy()


def test_records_are_written_of_the_optimizer_that_initialize_gives_too(tmp_path):
    adamw = {"type": "AdamW", "params": {}}
    file = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": adamw}
    engine, optimizer, *_ = zero.initialize(model=nn.Linear(3, 2), config=file)
    with zero.MetricsWriter(tmp_path / "records.jsonl", optimizer) as records:
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        records.write(loss=1.0)
    assert '"step": 1' in (tmp_path / "records.jsonl").read_text()
    engine.destroy()


def test_a_skipped_step_is_logged_once_with_its_number_the_norm_and_the_scale_from_then_on(caplog):
    caplog.set_level("INFO", logger="zero")
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {}},
    }
    engine, *_ = zero.initialize(model=nn.Linear(3, 2), config=file)
    for value in (1.0, torch.inf, 1.0):
        engine.backward(engine(torch.full((1, 3), value, dtype=torch.float16)).float().sum())
        engine.step()
    said = [record.getMessage() for record in caplog.records if "Skipped" in record.getMessage()]
    assert len(said) == engine.skipped_steps == 1
    words = r"Skipped step 2: the norm of the gradients is (inf|nan): in weight\. The loss scale is 8 from now on\."
    assert re.fullmatch(words, said[0])
    engine.destroy()
