"""States that leave the device between two phases and come back: the bits of never having moved, and bytes that really go."""

import copy
import enum
import gc
import itertools
import pickle
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

import accelerators
import zero
from tests import faults, inside
from tests.devices import needs_sim
from tests.promises.loops import alone, one_step, same, weights
from tests.promises.offloads import DTYPES, DTYPES_IN_TURN, SHARDED, bits, difference, grads, on_sim, send
from tests.zoo.case import draw, real_loss
from zero.config.schema import Offload

DEEPSPEEDS = {
    "masters": "hp_params",
    "moments": "optim_states",
    "gradients": "lp_grads",
    "weights": "lp_params",
    "buffers": "contiguous_grad_buffer",
}
Theirs = enum.Enum("Theirs", DEEPSPEEDS)
MOVED = [name for name in DEEPSPEEDS if name != "buffers"]
IS_AWAY = r"(?s)Cannot .* away since offload_states\. Call reload_states\(\)"
CHOICES = (None, *([name] for name in DEEPSPEEDS), ["hp_params", "optim_states"], [Theirs.weights, Theirs.gradients])
BY_DAY = CHOICES[-1:]


def identities(model, optimizer):
    masters = [id(master) for _, master in inside.pieces_and_masters(optimizer)]
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    return [id(parameter) for parameter in model.parameters()], held, masters


def train(model, optimizer, rank, include, move):
    """Between windows, in the middle of one, twice in a row, and after an edit."""
    before, found = identities(model, optimizer), []

    def travel(**options):
        if move:
            optimizer.offload_states(include, **options)
            optimizer.offload_states(include)
            optimizer.reload_states(**{name: value for name, value in options.items() if name == "non_blocking"})

    travel()
    for step in range(3):
        send(model, optimizer, rank, step, 0)
        if step == 1:
            travel(pin_memory=False)
        send(model, optimizer, rank, step, 1)
        if step == 2:
            optimizer.settle()
            travel(non_blocking=True)
        found.append(grads(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            model[2].bias.data.clamp_(-0.1, 0.1)
        travel(non_blocking=step == 0)
        found.append(bits(model, optimizer))
    assert identities(model, optimizer) == before
    return found


@needs_sim
@SHARDED
@pytest.mark.parametrize(
    ("dtype", "choices"),
    [("bfloat16", BY_DAY), *(pytest.param(dtype, CHOICES, marks=pytest.mark.full) for dtype in DTYPES)],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_moved_and_brought_back_at_any_time_everything_has_the_bits_of_never_having_moved(stage, dtype, choices):
    for offload in (None, Offload(ratio=0.5)):
        point = {"stage": stage, "dtype": dtype, "offload": offload}
        expected = on_sim(2, partial(train, include=None, move=False), [point])
        for include in choices if offload is None and stage == 2 else (None,):
            assert difference(on_sim(2, partial(train, include=include, move=True), [point]), expected) is None, (
                include,
                offload,
            )


@needs_sim
@pytest.mark.promise("H09")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param(None, marks=pytest.mark.full)])
def test_weights_in_shares_that_were_moved_are_what_operators_are_given(dtype):
    """Of a rank alone too, which gives them as they lie in its share."""
    for world, stages in ((1, (2, 3)), (2, (3,))):
        points = [{"stage": stage, "dtype": dtype} for stage in stages]
        stay, moved = (on_sim(world, partial(train, include=None, move=move), points) for move in (False, True))
        assert difference(moved, stay) is None


def bytes_by_state(model, optimizer, rank):
    device = accelerators.get("sim")
    gc.collect()

    def allocated():
        device.synchronize()
        return device.memory().allocated

    for step in range(2):
        send(model, optimizer, rank, step)
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.settle()
    shares, state = inside.masters_by_bucket(optimizer), optimizer.state.values()
    expected = {
        "masters": sum(share.nbytes for bucket, share in shares.items() if inside.has_copies(optimizer, bucket)),
        "moments": sum(value.nbytes for entries in state for value in entries.values() if value.dim()),
        "gradients": inside.bytes_of_gradients(optimizer),
        "weights": sum(chunk.nbytes for chunk in inside.published_chunks(optimizer).values()),
        "buffers": inside.free_staging_bytes(optimizer),
    }
    start, found = allocated(), {}
    for name, non_blocking in itertools.product(expected, (False, True)):
        before = allocated()
        optimizer.offload_states([name], non_blocking=non_blocking)
        found[name, non_blocking] = before - allocated()
        optimizer.reload_states(non_blocking)
    full = allocated()
    optimizer.offload_states()
    left = allocated()
    optimizer.reload_states()
    return expected, found, start - expected["buffers"] - full, full - left, allocated() - full


@needs_sim
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_bytes_of_each_state_really_leave_the_device(dtype):
    by_rank = [found for [found] in on_sim(2, bytes_by_state, [{"dtype": dtype}])]
    for name in DEEPSPEEDS:  # in fp32 the masters are the weights
        assert any(expected[name] for expected, *_ in by_rank) != (name == "masters" and dtype is None), name
    for expected, found, drift, gone, after in by_rank:
        for name, num_bytes in expected.items():
            assert found[name, False] == num_bytes, name
            assert found[name, True] == (0 if name == "buffers" else num_bytes), name  # buffers went the first time
        assert gone == sum(expected.values()) - expected["buffers"]
        assert drift == after == 0


def used_while_away(model, optimizer, rank):
    said = {}

    def note(name, call):
        with faults.synchronizing(optimizer).replaced(side_effect=AssertionError("something was sent")):
            with pytest.raises(ValueError, match=IS_AWAY):
                call()
        said[name] = True

    send(model, optimizer, rank, 0)
    optimizer.step()
    before = weights(model)
    optimizer.offload_states(["masters", "moments"])
    note("step without masters", optimizer.step)
    note("state_dict", optimizer.state_dict)
    assert same(before, weights(model))  # a model may generate meanwhile
    model(torch.ones(2, 4).to(model[0].weight))
    optimizer.reload_states()
    optimizer.offload_states(["gradients"])
    loss = model(torch.ones(2, 4).to(model[0].weight)).float().sum()
    note("a backward without the gradients of its window", loss.backward)
    note("a norm", lambda: model[0].weight.grad.norm())
    note("step without gradients", optimizer.step)
    optimizer.reload_states()
    optimizer.zero_grad()
    send(model, optimizer, rank, 1)
    loss = model(torch.ones(2, 4).to(model[0].weight)).float().sum()
    optimizer.offload_states(["weights"])
    note("a backward from before", loss.backward)
    note("a backward of the optimizer's", lambda: optimizer.backward(loss))
    note("settle without weights", optimizer.settle)
    note("a norm without weights", lambda: model[0].weight.grad.norm())
    note("a whole gradient without weights", lambda: optimizer.whole_grad(model[0].weight))
    note("no_contribution without weights", optimizer.no_contribution)
    note("zeros without weights", lambda: optimizer.zero_grad(set_to_none=False))
    note("state_dict of a module inside", model[0].state_dict)
    note("load_state_dict of a module inside", lambda: model[0].load_state_dict({}))
    note("forward of a module inside", lambda: model[0](torch.ones(2, 4, device="sim:0")))
    note("a copy", lambda: copy.deepcopy(model))
    note("a copy of a module inside", lambda: copy.deepcopy(model[0]))
    note("pickling", lambda: pickle.dumps(model))
    optimizer.reload_states()
    optimizer.zero_grad()
    optimizer.offload_states()
    note("forward", lambda: model(torch.ones(2, 4, device="sim:0")))
    note("state_dict of the model", model.state_dict)
    note("check", optimizer.check)
    note("step", optimizer.step)
    optimizer.zero_grad()
    optimizer.reload_states()
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name])
    found = train(model, optimizer, rank, None, False)
    optimizer.offload_states()
    last = found[-1]["weights"]
    optimizer.close()  # while everything is away
    real_loss(model(draw(model, (3, 4), rank, 9, real=True))).backward()
    copy.deepcopy(model).state_dict()
    return len(said), difference({name: weight.cpu() for name, weight in weights(model).items()}, last)


@needs_sim
@DTYPES_IN_TURN
def test_a_call_that_needs_what_is_away_says_to_reload_it_and_close_brings_the_weights_back(dtype):
    assert on_sim(2, used_while_away, [{"dtype": dtype}]) == [[(22, None)]] * 2


def test_on_the_cpu_nothing_moves_and_training_goes_on():
    model, optimizer = alone()
    engine = zero.Engine(optimizer)
    one_step(model, optimizer)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    engine.offload_states()
    one_step(model, optimizer, step=1)
    engine.reload_states()
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"no state 'moment'.*masters, moments, gradients, weights, buffers"):
        engine.offload_states(["moment"])
    with pytest.raises(ValueError, match="Pass device='cpu'"):
        engine.offload_states(device="nvme")
    engine.offload_states(device=enum.Enum("OffloadDeviceEnum", {"cpu": "cpu"}).cpu)  # DeepSpeed's own default
    engine.reload_states()


def thrown_away(model, optimizer, rank, states):
    """Windows that end while something of them is away, settled or with rounds on their way."""
    found = []
    for settles in (True, False):
        send(model, optimizer, rank, 0)
        if settles:
            optimizer.settle()
        if states:
            optimizer.offload_states(states)
        optimizer.zero_grad()
        if states:
            optimizer.reload_states()
        send(model, optimizer, rank, 1)
        found.append(grads(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return found, bits(model, optimizer)


@needs_sim
@SHARDED
@pytest.mark.parametrize(
    "states", [*(pytest.param([name], marks=pytest.mark.full) for name in ("gradients", "weights")), inside.ALL_STATES], ids=str
)
def test_a_window_may_end_while_its_gradients_or_the_weights_are_away(stage, states):
    points = [{"stage": stage, "offload": offload} for offload in (None, Offload(ratio=0.5))]
    stay, away = (on_sim(2, partial(thrown_away, states=each), points) for each in ((), states))
    assert difference(away, stay) is None


def ends_kept(model, optimizer, rank):
    """Pinned buffers, and bytes of the device, that are there after two steps, beyond those of a move that is waited for."""
    device, found = accelerators.get("sim"), []
    for non_blocking in (False, True):
        send(model, optimizer, rank, 0)
        optimizer.settle()
        optimizer.offload_states(non_blocking=non_blocking)
        optimizer.reload_states(non_blocking)
        for step in range(2):
            optimizer.step()
            optimizer.zero_grad()
            send(model, optimizer, rank, step)
        optimizer.zero_grad()
        gc.collect()
        device.synchronize()
        found.append((device.memory().allocated, simulated_pinned()))
    return found


def simulated_pinned():
    from accelerators_sim import pinned

    return pinned.num_alive()


@needs_sim
def test_a_move_that_nobody_waits_for_lets_go_of_both_ends_when_it_is_done():
    for [(waited, later)] in on_sim(1, ends_kept, [{"dtype": "bfloat16"}]):
        assert later == waited


# memory that does not suffice -------------------------------------------------------------------------------------------


def fail_at(part, number):
    """Makes the call of that number of a part raise, as where there is no memory."""
    calls, real = itertools.count(1), part.now

    def call(*arguments, **options):
        if next(calls) == number:
            raise torch.OutOfMemoryError("full")
        return real(*arguments, **options)

    return part.replaced(call)


def fail_half_way(model, optimizer, rank, fails):
    """Each state fails to leave, and then to come back, after its first part moved; twice the second."""
    for state in (*([name] for name in MOVED), None):
        send(model, optimizer, rank, 0, 0)
        optimizer.settle()
        before = bits(model, optimizer)
        if fails:
            try:
                with fail_at(faults.MEMORY_ON_HOST, 2):
                    optimizer.offload_states(state)
            except torch.OutOfMemoryError:
                assert not inside.is_away(optimizer)
                assert difference(bits(model, optimizer), before) is None
            optimizer.offload_states(state)
            for number in (2, 1):
                try:
                    with fail_at(faults.MEMORY_ON_DEVICE, number):
                        optimizer.reload_states()
                except torch.OutOfMemoryError:
                    assert inside.is_away(optimizer)
                    with pytest.raises(ValueError, match=IS_AWAY):
                        optimizer.step()
            optimizer.reload_states()
        assert difference(bits(model, optimizer), before) is None
        optimizer.step()
        optimizer.zero_grad()
    return bits(model, optimizer)


@needs_sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offload", [None, Offload(ratio=0.5)], ids=["", "half"])
def test_what_finds_no_memory_on_its_way_out_comes_back_and_what_finds_none_on_its_way_in_can_be_brought_later(dtype, offload):
    points = [{"dtype": dtype, "offload": offload}]
    expected = on_sim(1, partial(fail_half_way, fails=False), points)
    assert difference(on_sim(1, partial(fail_half_way, fails=True), points), expected) is None


def fills_the_device(model, optimizer, rank):
    """What another user of the device took while the weights were away is not there for them."""
    import accelerators_sim as simulated

    device = accelerators.get("sim")
    before = weights(model)
    used, total = device.memory().allocated, device.memory().total
    optimizer.offload_states(["weights"])
    cache = torch.empty(40, device="sim:0")
    simulated.configure(memory_bytes=used)
    try:
        for call in (optimizer.reload_states, optimizer.close):
            with pytest.raises(torch.OutOfMemoryError):
                call()
        with pytest.raises(ValueError, match=IS_AWAY):
            model.state_dict()
        del cache
        optimizer.reload_states()
    finally:
        simulated.configure(memory_bytes=total)
    return same(before, weights(model))


@needs_sim
def test_a_device_that_is_full_when_the_weights_come_back_loses_none_of_them():
    assert on_sim(1, fills_the_device, [{"dtype": None}]) == [[True]]


def exchange(model, given):
    for parameter, values in zip(model.parameters(), given, strict=True):
        parameter.data = values


def assigned(model, optimizer, rank, moves):
    """By a loader of weights, by who swaps averaged ones in to generate and back again, and by who loads while all is away."""
    found, states = [], (None, ["weights"], ["masters", "moments"])

    def travel(states=None, meanwhile=lambda: None):
        if moves:
            optimizer.offload_states(states)
        meanwhile()
        if moves:
            optimizer.reload_states()
        found.append({name: weight.cpu() for name, weight in weights(model).items()})

    def assign(amount):
        model[0].weight.data = torch.full_like(model[0].weight, amount)
        model[2].bias.data = torch.full_like(model[2].bias, amount)

    for step, include in enumerate(states):
        own = [parameter.data for parameter in model.parameters()]
        exchange(model, [values * 0.5 for values in own])
        travel(include)
        exchange(model, own)
        one_step(model, optimizer, step=3 * step)
        found.append(bits(model, optimizer))
        assign(0.25 + step)
        travel(include)
        one_step(model, optimizer, step=3 * step + 1)
        found.append(bits(model, optimizer))
        loaded = [torch.full_like(parameter, 0.5 + step) for parameter in model.parameters()]
        travel(include, partial(exchange, model, loaded))
        one_step(model, optimizer, step=3 * step + 2)
        found.append(bits(model, optimizer))
    return found


@needs_sim
@SHARDED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_what_was_assigned_to_data_travels_as_it_is_and_is_an_edit_as_if_nothing_had_moved(stage, dtype, offload):
    points = [{"stage": stage, "dtype": dtype, "offload": offload}]
    expected = on_sim(1, partial(assigned, moves=False), points)
    assert difference(on_sim(1, partial(assigned, moves=True), points), expected) is None


def does_not_suffice(model, optimizer, rank):
    one_step(model, optimizer)
    device, host, states = accelerators.get("sim"), accelerators.get("cpu"), ["masters", "moments"]
    before, needed, reading = device.memory().allocated, inside.bytes_of_states(optimizer, states), host.memory()
    with mock.patch.object(type(host), "memory", return_value=replace(reading, available=needed - 1)):
        with pytest.raises(MemoryError, match=rf"offload_states.* needs {needed} bytes.* and {needed - 1} .*Include fewer"):
            optimizer.offload_states(states)
        assert not inside.is_away(optimizer)
    with mock.patch.object(type(host), "memory", return_value=replace(reading, available=needed)):
        optimizer.offload_states(states)
    return before - device.memory().allocated == needed > 0


@needs_sim
def test_host_memory_that_will_not_suffice_is_an_error_before_anything_moves():
    assert on_sim(1, does_not_suffice, [{"dtype": "bfloat16"}, {"dtype": None}]) == [[True, True]]
