"""Ranks of one host see one copy of their narrow weights: to the bit, after every edit and failure, as if each had its own."""

import copy
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.devices import needs_linux
from tests.zoo.case import filled, real_numbers
from zero.comm.torch_group import TorchGroup
from zero.memory.flatten import Flattener
from zero.parts import Parts
from zero.runtime.updater import Updater

pytestmark = needs_linux

WIDTH = 48  # a layer's weights are more than a page and no multiple of one
BUCKET_BYTES = 3 * 4096
STEPS = 4


def build():
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 3))
    return filled(nn.Sequential(*layers), real=True)


def sharded(**options):
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    given = {"stage": 2, "dtype": "bfloat16", "clip": 0.5, "on_nonfinite": "skip", "bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, inner, **given)


def begun(rank, **options):
    """After its first step."""
    model, optimizer = sharded(**options)
    send(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def send(model, rank, step):
    weight = model[0].weight
    model(real_numbers((2, WIDTH), "inputs", rank, step).to(weight.dtype)).float().square().mean().backward()


def bits(model):
    return {name: param.detach().view(torch.int16).tolist() for name, param in model.named_parameters()}


def nothing(model, optimizer, rank, step):
    """What every rank sees of the others' steps."""


def clamp_everywhere(model, optimizer, rank, step):
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


def one_element_on_every_rank(model, optimizer, rank, step):
    with torch.no_grad():
        model[2].weight[7, 5] = 3.0 + step


def another_element_on_each_rank(model, optimizer, rank, step):
    with torch.no_grad():
        model[2].weight[rank * 11 :: 31, 3].fill_(1.0 + rank + step)


def through_numpy(model, optimizer, rank, step):
    """By a way that torch knows nothing of."""
    view = model[0].weight.detach().view(torch.int16).numpy()
    view[3, :5] = 0x3F80 + rank


def assigned(model, optimizer, rank, step):
    model[4].weight.data = model[4].weight.data * 0.5


def to_shared_memory(model, optimizer, rank, step):
    model.share_memory()
    clamp_everywhere(model, optimizer, rank, step)


def older_state(model, optimizer, rank, step):
    """Masters that the weights do not come from: the weights are what counts."""
    kept = copy.deepcopy(optimizer.state_dict())
    send(model, rank, step + 40)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(kept)


def infinite_on_one_rank(model, optimizer, rank, step):
    clamp_everywhere(model, optimizer, rank, step)
    model(torch.full((2, WIDTH), float("inf") if rank else 1.0).bfloat16()).float().sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == step + 1
    optimizer.zero_grad()


def saved_before_an_edit(model, optimizer, rank, step):
    """What was looked for then says nothing of what is edited later."""
    optimizer.state_dict()
    another_element_on_each_rank(model, optimizer, rank, step)


def within_the_step(model, optimizer, rank, step):
    """An edit by who steps, too late to be adopted, is gone after the step, on all ranks."""
    inner = optimizer.inner
    if step == 0:
        own = inner.step

        def stepping():
            own()
            one_element_on_every_rank(model, optimizer, rank, step)

        inner.step = stepping


def where_the_table_cannot_be_read(model, optimizer, rank, step):
    def too_many(*_):
        raise OSError(24, "Too many open files")

    another_element_on_each_rank(model, optimizer, rank, step)
    if rank == 1:
        for chunk in optimizer.parts.gatherer._weights.pages.values():
            chunk._finder.find = too_many


def late_where_there_is_no_file(model, optimizer, rank, step):
    """One rank has no descriptor left when a parameter is laid."""
    def missing(_):
        raise OSError(24, "Too many open files")

    if step == 1 and rank == 1:
        mock.patch("zero.memory.weights.lay_out", lambda *_: missing(None)).start()
    a_parameter_that_comes_later(model, optimizer, rank, step)
    if step == 2:
        mock.patch.stopall()


def frozen_and_back(model, optimizer, rank, step):
    model[2].weight.requires_grad_(step % 2 == 0)
    another_element_on_each_rank(model, optimizer, rank, step)


def unused_layer_edited(model, optimizer, rank, step):
    """What is in no bucket of a step stays edited over it."""
    with torch.no_grad():
        model[0].weight[0, 0] = 2.0 + rank
    hidden = model[2:](real_numbers((2, WIDTH), "hidden", rank, step).bfloat16())
    hidden.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def failing_on_one_rank(model, optimizer, rank, step):
    """In the middle of an update, with edits that are adopted already and others that are not."""
    another_element_on_each_rank(model, optimizer, rank, step)
    send(model, rank, step + 60)
    calls, step_one = [], Updater.step

    def breaking(self, *args):
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError("nothing left")
        return step_one(self, *args)

    with mock.patch.object(Updater, "step", breaking if rank == 1 else step_one):
        if rank == 1:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
    with pytest.raises(zero.ZeroError):  # at the latest here everybody hears of it
        send(model, rank, step + 70)
        optimizer.step()
    optimizer.zero_grad()


def a_parameter_that_comes_later(model, optimizer, rank, step):
    if step == 1:
        model.append(nn.Linear(3, 700, dtype=torch.bfloat16))
        for param in filled(model[-1], real=True).parameters():
            param.data = param.data.bfloat16()
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    another_element_on_each_rank(model, optimizer, rank, step)


EVENTS = {
    event.__name__: event
    for event in (
        nothing, clamp_everywhere, one_element_on_every_rank, another_element_on_each_rank, through_numpy, assigned,
        to_shared_memory, older_state, saved_before_an_edit, within_the_step, where_the_table_cannot_be_read,
        late_where_there_is_no_file, infinite_on_one_rank, frozen_and_back, unused_layer_edited, failing_on_one_rank,
        a_parameter_that_comes_later,
    )
}  # fmt: skip


def trained(rank, world, name, tells, options):
    """All weights after every event and every step, and at last as those of a plain model."""
    with mock.patch("zero.memory.weights.pages_tell", lambda: tells[rank]):
        model, optimizer = sharded(**options)
        weights, seen = optimizer.parts.gatherer._weights, []
        for step in range(STEPS):
            EVENTS[name](model, optimizer, rank, step)
            seen.append(bits(model))
            send(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(bits(model))
        common = [weights.is_common(bucket) for bucket in range(len(optimizer.parts.line.layout.buckets))]
        is_whole = name != "failing_on_one_rank"  # else ranks have counted their steps differently
        masters = is_whole and {key: value.tolist() for key, value in optimizer.state_dict()["masters"].items()}
        optimizer.close()
    seen.append(bits(model))
    return seen, masters, common


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", EVENTS)
def test_weights_are_the_same_bits_with_a_file_for_all_one_for_each_and_none(name, stage):
    def run(tells, **options):
        given = {"stage": stage, "offload": "cpu" if stage == 1 else None, **options}
        return ranks.run(2, trained, name, tells, given)

    together, apart = run([True, True]), run([True, True], shared_memory=False)
    compared, mixed = run([False, False], shared_memory=False), run([True, False])
    for rank in range(2):
        assert together[rank][2][0] == (stage > 0)
        assert all(together[rank][2]) == (stage > 0 and name != "late_where_there_is_no_file")
        assert not any(apart[rank][2] + compared[rank][2] + mixed[rank][2])
        for other in (apart, compared, mixed):
            for place, (one, another) in enumerate(zip(together[rank][0], other[rank][0], strict=True)):
                assert one == another, f"rank {rank}, place {place}"
            assert together[rank][1] == other[rank][1]
    if stage > 0 and name not in ("unused_layer_edited", "frozen_and_back"):  # where some are in no step after an edit
        assert together[0][0][-1] == together[1][0][-1]


def watched(rank, world, folder):
    """What rank 1 sees between clipping and its own step, while rank 0 is in its step already."""
    model, optimizer = sharded()
    send(model, rank, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = bits(model)
    if rank == 1:
        while not Path(folder, "in the step").exists():
            pass
        for _ in range(200):
            assert bits(model) == before
    else:
        Path(folder, "in the step").touch()
    optimizer.step()
    after = bits(model)
    assert after != before
    for _ in range(20):
        assert bits(model) == after
    optimizer.close()
    return after


def test_nobody_sees_new_weights_before_its_own_step_nor_changing_ones_after(tmp_path):
    first, second = ranks.run(2, watched, str(tmp_path))
    assert first == second


def lost(rank, world):
    """Rank 1 ends in the middle of its update; what rank 0 has then stays what it is."""
    model, optimizer = begun(rank, timeout_s=2.0)
    send(model, rank, 1)
    if rank == 1:
        with mock.patch.object(Updater, "step", lambda self, *args: os._exit(0)):
            optimizer.step()
    with pytest.raises(zero.ZeroError):
        optimizer.step()
    weights, there = optimizer.parts.gatherer._weights, bits(model)
    for chunk in weights.pages.values():
        chunk.written.fill_(7.0)  # as a rank that is late may
    assert bits(model) == there
    optimizer.close()
    return all(bool(param.isfinite().all()) for param in model.parameters())


def test_what_a_rank_sees_after_another_was_lost_is_its_own():
    found = ranks.outcomes(2, lost)
    assert found[0].error is None, found[0].error
    assert found[0].value


def test_what_is_loaded_takes_the_place_of_edits_that_came_after_the_save(tmp_path):
    model, optimizer = begun(0, bucket_bytes=2**20)
    expected = bits(model)
    zero.save(tmp_path, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    zero.load(tmp_path, optimizer)
    assert bits(model) == expected
    send(model, 0, 1)
    optimizer.step()
    assert float(model[0].weight.abs().max()) < 5.0
    optimizer.close()


def interrupted(rank, world, folder):
    """Rank 0 is interrupted between the last message and its update."""
    model, optimizer = begun(rank, timeout_s=3.0)
    send(model, rank, 1)
    if rank == 1:
        with mock.patch.object(Updater, "step", slowly(Updater.step, folder)), pytest.raises(zero.ZeroError):
            optimizer.step()
        return None
    before = bits(model)
    with mock.patch.object(Parts, "update", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert bits(model) == before
    Path(folder, "interrupted").touch()
    while not Path(folder, "written").exists():
        time.sleep(0.01)
    assert bits(model) == before
    return None


def slowly(step, folder):
    def stepping(*args):
        while not Path(folder, "interrupted").exists():
            time.sleep(0.01)
        step(*args)
        Path(folder, "written").touch()

    return stepping


def test_who_is_interrupted_in_a_step_keeps_what_it_saw(tmp_path):
    found = ranks.outcomes(2, interrupted, str(tmp_path))
    assert found[0].error is None, found[0].error


def test_a_training_has_no_more_files_than_it_may():
    with mock.patch("zero.memory.weights._MOST_FILES", 1):
        model, optimizer = begun(0)
        a_parameter_that_comes_later(model, optimizer, 0, 1)
        before = bits(model)
        send(model, 0, 1)
        optimizer.step()
    assert all(bits(model)[name] != before[name] for name in before)
    parts = optimizer.parts
    late, first = (parts.line.layout.buckets_of(index) for index in (len(parts.params.names) - 1, 0))
    weights = parts.gatherer._weights
    assert [weights.is_in_file(bucket) for bucket in (*first, *late)] == [True] * len(first) + [False] * len(late)
    optimizer.close()


def resident(rank, world, shared_memory):
    """Bytes that this rank's part of the pages of its weights comes to, after a step."""
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters()), stage=2, dtype="bfloat16", shared_memory=shared_memory)
    model(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    begin, num_bytes, found, inside = model.weight.data_ptr(), model.weight.nbytes, 0, False
    optimizer.group.exchange(b"")  # both have read all of it
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(place, 16) for place in head.split("-"))
            inside = start < begin + num_bytes and begin < stop
        elif inside and head == "Pss:":
            found += int(line.split()[1]) * 1024
    optimizer.group.exchange(b"")
    optimizer.close()
    return found, num_bytes


def test_weights_of_two_ranks_take_the_memory_of_one():
    together, apart = (ranks.run(2, resident, shared) for shared in (True, False))
    for found, num_bytes in together:
        assert found < 0.55 * num_bytes
    for found, num_bytes in apart:
        assert found < 1.05 * num_bytes


def begun_narrow(rank, world, shared_memory, dtype, fails):
    """What is there after a beginning with other weights on each rank, by how many broadcasts, and what the masters are."""
    model, sent, broken = build().to(dtype), [], None
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)
    write, broadcast = Flattener.write, TorchGroup.broadcast

    def write_or_fail(*given):
        stays = write(*given)
        if fails and rank == 1:
            raise RuntimeError("not today")
        return stays

    with (
        mock.patch.object(TorchGroup, "broadcast", lambda *given: sent.append(1) or broadcast(*given)),
        mock.patch.object(Flattener, "write", write_or_fail),
    ):
        inner = torch.optim.AdamW(model.parameters())
        try:
            optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", shared_memory=shared_memory)
        except (RuntimeError, zero.ZeroError) as error:
            broken = str(error)
    if broken is not None:
        with torch.no_grad():
            model[0].weight.add_(rank)  # which is nobody else's any more
        return broken, model[0].weight.detach().clone(), len(sent), []
    parts = optimizer.parts
    pieces = [piece for param in range(6) for piece, _ in parts.masters.of(param)]
    masters = [(piece.param, parts.masters.shard.piece(piece).clone()) for piece in pieces]
    found = bits(model), [param.detach().clone() for param in model.parameters()], len(sent), masters
    optimizer.close()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_ranks_begin_with_the_weights_of_rank_0_which_no_message_carries_if_all_see_its_memory(shared_memory, dtype):
    expected = [param.detach() for param in build().to(dtype).parameters()]
    for _, weights, num_broadcasts, masters in ranks.run(2, begun_narrow, shared_memory, dtype, False):
        assert all(torch.equal(found, value.bfloat16()) for found, value in zip(weights, expected, strict=True))
        assert (num_broadcasts > 0) == (not shared_memory)
        assert masters
        for param, master in masters:
            assert torch.isin(master, expected[param].float()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_beginning_that_breaks_off_leaves_each_rank_weights_of_its_own(dtype):
    (said, one, *_), (broken, other, *_) = ranks.run(2, begun_narrow, True, dtype, True)
    assert "not today" in said and broken == "not today"
    assert one.dtype == other.dtype == dtype
    assert torch.equal(one + 1.0, other)
