"""States that leave the device between two phases and come back: the bits of never having moved, and bytes that really go."""

import enum
import gc
import itertools
from functools import partial

import pytest
import torch

import accelerators
import zero
from tests.devices import needs_sim
from tests.promises.loops import alone, one_step, same, weights
from tests.promises.offloads import SHARDED, bits, difference, grads, on_sim, send
from zero.config import Offload

DEEPSPEEDS = {
    "masters": "hp_params",
    "moments": "optim_states",
    "gradients": "lp_grads",
    "weights": "lp_params",
    "buffers": "contiguous_grad_buffer",
}
Theirs = enum.Enum("Theirs", DEEPSPEEDS)
CHOICES = (None, *([name] for name in DEEPSPEEDS), ["hp_params", "optim_states"], [Theirs.weights, Theirs.gradients])


def identities(model, optimizer):
    masters = [id(master) for pieces in optimizer.parts.masters.pieces.values() for _, master in pieces]
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
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_moved_and_brought_back_at_any_time_everything_has_the_bits_of_never_having_moved(stage, dtype):
    for offload in (None, Offload(ratio=0.5)):
        point = {"stage": stage, "dtype": dtype, "offload": offload}
        expected = on_sim(2, partial(train, include=None, move=False), [point])
        for include in CHOICES if offload is None and stage == 2 else (None,):
            assert difference(on_sim(2, partial(train, include=include, move=True), [point]), expected) is None, (
                include,
                offload,
            )


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
    shares, state = optimizer.parts.masters.shard, optimizer.state.values()
    expected = {
        "masters": sum(share.nbytes for bucket, share in shares.shares.items() if optimizer.parts.masters.is_copy(bucket)),
        "moments": sum(value.nbytes for entries in state for value in entries.values() if value.dim()),
        "gradients": optimizer.parts.window.shares.shard.num_bytes,
        "weights": sum(chunk.nbytes for chunk in optimizer.parts.gatherer._weights.chunks),
        "buffers": sum(b.nbytes for free in optimizer.parts.window.reducer._staging._free.values() for b, _, _ in free),
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
            assert found[name, True] == (0 if name == "buffers" else num_bytes), name  # which went the first time
        assert gone == sum(expected.values()) - expected["buffers"]
        assert drift == after == 0


def used_while_away(model, optimizer, rank):
    said = {}

    def note(name, call):
        with pytest.raises(
            ValueError, match=r"(?s)asked for, but .* on the host since offload_states\. Call reload_states\(\)"
        ):
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
    return len(said), difference({name: weight.cpu() for name, weight in weights(model).items()}, last)


@needs_sim
def test_whoever_needs_what_is_away_is_told_to_reload_it_and_close_brings_the_weights_back():
    assert on_sim(2, used_while_away, [{"dtype": dtype} for dtype in (None, "bfloat16")]) == [[(9, None)] * 2] * 2


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
