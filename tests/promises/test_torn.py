"""Whatever writes weights and breaks off, on one rank or on all, leaves them torn by name until everything is loaded."""

import contextlib
import copy
import itertools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero
from tests import faults
from tests.loopback import run_ranks, solo
from tests.promises.loops import weights
from tests.zoo.case import filled
from zero.errors import CheckpointFailed, RankFailed

TIME_LIMIT_S = 30.0


class Injected(Exception):
    """Raised where a test wants a writer to break off."""


class InModes(torch.optim.SGD):
    """An optimizer whose weights change when it is told to evaluate."""

    def train(self):
        pass

    def eval(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)


def begin(group, folder, stage):
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)
    inner = InModes(model.parameters(), lr=0.125, momentum=0.5)
    options = {"dtype": "bfloat16", "bucket_bytes": 32, "timeout_s": TIME_LIMIT_S, "kernels": "torch"}
    optimizer = zero.shard(model, inner, stage=stage, group=group, **options)
    one_step(model, optimizer, group.rank)
    zero.save(folder / "saved", optimizer)
    return model, optimizer


def one_step(model, optimizer, rank):
    model(torch.full((1, 4), float(rank + 1), dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step(model, optimizer, group, folder):
    one_step(model, optimizer, group.rank)


def load(model, optimizer, group, folder):
    zero.load(folder / "saved", optimizer)


def load_weights(model, optimizer, group, folder):
    zero.load_weights(model, folder / "weights.safetensors")


def evaluate(model, optimizer, group, folder):
    optimizer.eval()


def breaks_off(optimizer, place):
    """A context in which the next writer fails before it writes, after its first bucket, or when all is written."""
    part, at_call = faults.parts_of_writers(optimizer)[place], {"beginning": 1, "middle": 2, "end": 1}[place]
    act, calls = part.now, []

    def failing(*arguments):
        result = act(*arguments)
        calls.append(part.name)
        if len(calls) == at_call:
            raise Injected
        return result

    return part.replaced(failing)


def refused(optimizer, folder):
    """Returns True if a save, a state_dict and a check refuse, and False if none does; each refuses by name."""
    said = []
    for act in (lambda: zero.save(folder / "torn", optimizer), optimizer.state_dict, optimizer.check):
        try:
            act()
            said.append(None)
        except (ValueError, CheckpointFailed) as error:
            said.append(str(error))
            assert "broke off, so weights may be written in part. Load a checkpoint" in said[-1]
    assert len({text is None for text in said}) == 1
    return said[0] is not None


def disturbed(group, folder, stage, write, place, failing):
    """Breaks a writer off; ranks hear of it, clear, and step whole. Returns whether that is refused, and the weights after a
    load and a step."""
    model, optimizer = begin(group, folder, stage)
    if group.rank in failing:
        with breaks_off(optimizer, place), pytest.raises((Injected, RankFailed, CheckpointFailed)):
            write(model, optimizer, group, folder)
    else:
        with contextlib.suppress(RankFailed, CheckpointFailed):
            write(model, optimizer, group, folder)
    model.zero_grad()
    for _ in range(2):  # the first one hears of an update that broke off
        try:
            one_step(model, optimizer, group.rank)
        except RankFailed:
            optimizer.zero_grad()
    is_refused = refused(optimizer, folder)
    zero.load(folder / "saved", optimizer)
    assert not refused(optimizer, folder)
    return is_refused, weights_after_a_step(model, optimizer, group)


def undisturbed(group, folder, stage):
    return weights_after_a_step(*begin(group, folder, stage), group)


def weights_after_a_step(model, optimizer, group):
    one_step(model, optimizer, group.rank)
    return weights_of(model, optimizer)


def weights_of(model, optimizer):
    with optimizer.gathered():
        values = weights(model)
    optimizer.any_rank(False)  # no rank ends while another reads
    return values


@pytest.mark.promise("T01")
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model"), ("model",), ("optimizer",)])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_load_state_dict_of_model_and_optimizer_together_make_torn_weights_whole(tmp_path, order, dtype):
    model = filled(nn.Linear(4, 4), real=True)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), stage=2, dtype=dtype, group=solo())
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
    ema = copy.deepcopy(model)
    model(torch.ones(1, 4, dtype=model.weight.dtype)).float().sum().backward()
    with breaks_off(optimizer, "end"), pytest.raises(Injected):
        optimizer.step()
    optimizer.zero_grad()
    ema.load_state_dict(model.state_dict())  # loads into a copy, whose hooks know nothing of this training
    assert refused(optimizer, tmp_path)
    for name in order:
        {"model": model, "optimizer": optimizer}[name].load_state_dict(saved[name])
    assert refused(optimizer, tmp_path) == (len(order) == 1)


@pytest.mark.promise("T01")
def test_a_load_state_dict_that_fails_makes_nothing_whole(tmp_path):
    """torch calls the hooks behind a load before it raises."""
    model = filled(nn.Linear(4, 4), real=True)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, group=solo())
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
    model(torch.ones(1, 4)).sum().backward()
    with breaks_off(optimizer, "end"), pytest.raises(Injected):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**saved["model"], "weight": torch.zeros(5, 5)})
    optimizer.load_state_dict(saved["optimizer"])
    assert refused(optimizer, tmp_path)
    model.load_state_dict(saved["model"])
    assert not refused(optimizer, tmp_path)


def test_a_step_of_one_rank_that_raises_before_it_writes_leaves_a_training_that_is_saved(tmp_path):
    model = filled(nn.Linear(4, 4), real=True)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.5), stage=2, group=solo())
    model(torch.ones(1, 4)).sum().backward()
    with faults.begin_of_step(optimizer).replaced(side_effect=MemoryError), pytest.raises(MemoryError):
        optimizer.step()
    optimizer.zero_grad()
    assert not refused(optimizer, tmp_path)


def test_close_says_that_weights_are_torn_and_an_engine_does_not_write_them(caplog, tmp_path):
    model = filled(nn.Linear(4, 4), real=True)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, group=solo())
    model(torch.ones(1, 4)).sum().backward()
    with breaks_off(optimizer, "end"), pytest.raises(Injected):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"Cannot write weights\.pt: step 1 broke off"):
        zero.Engine(optimizer).save_16bit_model(tmp_path, "weights.pt")
    optimizer.close()
    assert "The model is plain again, but step 1 broke off" in caplog.text
    assert not model._load_state_dict_post_hooks


@pytest.fixture
def each_bucket_alone():
    """Has each bucket stepped and sent by itself, however small, so that an update has a middle."""
    with faults.MOST_TOGETHER.replaced(return_value=0):
        yield


WRITERS = {"step": step, "load": load, "load_weights": load_weights, "eval": evaluate}


PLACES = "beginning", "middle", "end"
WHO_FAILS = (1, {0}), (2, {1}), (2, {0, 1}), (3, {0})


def breaks():
    """Yields each writer with each failure, as values of one axis: the day has every value of an axis, each at some stage.

    There every writer fails at every place alone, and at one place beside another rank, with all ranks and beside two."""
    axes = itertools.product(enumerate(WRITERS), enumerate(PLACES), enumerate(WHO_FAILS))
    for (of_writer, writer), (of_place, place), (of_ranks, (world, failing)) in axes:
        is_by_day = of_ranks == 0 or (of_writer + of_place + of_ranks) % len(PLACES) == 0
        yield pytest.param(writer, place, world, failing, marks=() if is_by_day else pytest.mark.full)


def is_torn(writer, place, world):
    """A rank alone has written nothing if a step or a change of modes fails at its beginning; with others, those write."""
    return world > 1 or place != "beginning" or writer not in ("step", "eval")


@pytest.mark.promise("T01")
@pytest.mark.parametrize(("writer", "place", "world", "failing"), list(breaks()))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.usefixtures("each_bucket_alone")
def test_a_writer_that_breaks_off_leaves_weights_torn_until_a_load(tmp_path, writer, place, world, failing, stage):
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)
    save_file({name: param.detach() * 3 for name, param in model.named_parameters()}, tmp_path / "weights.safetensors")
    expected = run_ranks(world, lambda group: undisturbed(group, tmp_path, stage), TIME_LIMIT_S)
    found = run_ranks(
        world, lambda group: disturbed(group, tmp_path, stage, WRITERS[writer], place, failing), TIME_LIMIT_S
    )
    assert [is_refused for is_refused, _ in found] == [is_torn(writer, place, world)] * world
    for (_, one), other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


# one rank's exception, wherever states live ---------------------------------------------------------------------------------


def fails(model, rank, moment):
    """A window in which rank 1 raises in its forward, in its backward, or after that."""
    output = model(torch.full((1, 4), float(rank + 1)))
    if rank == 1 and moment == "forward":
        raise Injected
    if rank == 1 and moment == "backward":
        output.register_hook(raises)
    output.square().mean().backward()
    if rank == 1:
        raise Injected


def raises(_):
    raise Injected


KINDS = "masters", "moments", "gradients"
HOMES = {"cpu": dict.fromkeys(KINDS, "cpu")}
HOMES |= {kind: {kind: "disk:{}"} for kind in KINDS}
HOMES["all on disk"] = dict.fromkeys(KINDS, "disk:{}")


@pytest.mark.promise("T08")
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("moment", ["forward", "backward", "after it"])
@pytest.mark.parametrize("then", ["step", "clip", "whole_grad", "flush"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_s_exception_is_heard_on_all_and_they_go_on_together(tmp_path, homes, moment, then, stage):
    """Whatever the other ranks do meanwhile begins with the settling, which hears of it."""
    places = {kind: home.format(tmp_path) for kind, home in HOMES[homes].items()}

    def program(group):
        model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)
        inner = torch.optim.Adam(model.parameters(), lr=0.125)
        config = zero.ZeroConfig(stage=stage, bucket_bytes=64, timeout_s=TIME_LIMIT_S, homes=places, kernels="torch")
        optimizer = zero.ShardedOptimizer(model, inner, config, group)
        engine = zero.Engine(optimizer) if then == "flush" else None
        act = {
            "step": optimizer.step,
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "whole_grad": lambda: optimizer.whole_grad(model[0].weight),
            "flush": lambda: engine.flush(),
        }[then]
        for window in range(3):
            try:
                if window == 1:
                    fails(model, group.rank, moment)
                    act()
                else:
                    model(torch.full((1, 4), float(group.rank + 1))).square().mean().backward()
                    optimizer.step()
            except Injected:
                assert group.rank == 1
            except RankFailed:
                assert group.rank == 0 and window == 1
            else:
                assert window != 1
            optimizer.zero_grad()
        return weights_of(model, optimizer)

    plain = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)
    inner = torch.optim.Adam(plain.parameters(), lr=0.125)
    for _ in range(2):
        for rank in range(2):
            (plain(torch.full((1, 4), float(rank + 1))).square().mean() / 2).backward()
        inner.step()
        inner.zero_grad()
    for values in run_ranks(2, program, TIME_LIMIT_S):
        assert all(torch.allclose(values[name], value, atol=1e-6) for name, value in weights(plain).items())


@pytest.mark.promise("T01")
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize("act", ["read", "write"])
def test_a_load_makes_whole_what_an_interrupt_between_two_transfers_to_a_disk_left(tmp_path, act, stage):
    """An interrupt comes anywhere, also where memory is lent to a transfer that has no owner yet."""
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)
    homes = dict.fromkeys(KINDS, f"disk:{tmp_path}")
    options = {"dtype": "bfloat16", "bucket_bytes": 32, "homes": homes, "kernels": "torch"}
    optimizer = zero.shard(model, torch.optim.Adam(model.parameters(), lr=0.125), stage=stage, group=solo(), **options)
    one_step(model, optimizer, 0)
    zero.save(tmp_path / "saved", optimizer)
    one_step(model, optimizer, 0)
    expected, calls = weights_of(model, optimizer), []
    with interrupted(act, None, calls):
        one_step(model, optimizer, 0)
    for number in range(1, len(calls) + 1):
        with interrupted(act, number, []), pytest.raises(KeyboardInterrupt):
            one_step(model, optimizer, 0)
        optimizer.zero_grad()
        zero.load(tmp_path / "saved", optimizer)
        one_step(model, optimizer, 0)
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(model, optimizer).items())


def interrupted(act, number, calls):
    """A context in which the transfer of this number to a disk, or from it, is interrupted before it begins."""
    part = faults.transfer_of_a_disk(act)
    transfer = part.now

    def begin(*arguments):
        calls.append(act)
        if len(calls) == number:
            raise KeyboardInterrupt
        return transfer(*arguments)

    return part.replaced(begin)
