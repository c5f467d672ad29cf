"""Weights in shares come by collectives that ranks issue in one order, whatever each of them does."""

import collections
import contextlib
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero
from tests import faults, ranks
from zero.errors import GroupLost
from zero.runtime.unshard import gathers, schedule
from zero.runtime.unshard.exchange import ShareExchange
from zero.runtime.unshard.gathers import Gathers
from zero.runtime.unshard.schedule import Schedule, in_common

WIDTH = 16


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


class Training:
    """At stage 3, every layer in a chunk of its own."""

    def __init__(self, rank, gathered_bytes=0, **options):
        self.rank, self.model = rank, build()
        options = {"bucket_bytes": 4 * WIDTH * WIDTH, "keep_whole_numel": 0, "gathered_bytes": gathered_bytes, **options}
        self.optimizer = zero.shard(
            self.model, torch.optim.SGD(self.model.parameters(), 0.1), stage=3, shared_memory=False, **options
        )
        self.exchange = self.optimizer.sharding.placer.weights.exchange
        self.schedule = self.exchange._schedule

    def window(self, step=0, times=1):
        for number in range(times):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * number + self.rank))
            self.model(x).square().mean().backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps, times=1, first=0):
        for step in range(first, first + steps):
            self.window(step, times)
            self.step()

    def bytes(self):
        """That came by messages, and by collectives."""
        return self.exchange.pulls.num_pulled_bytes, 0 if self.schedule is None else self.schedule.num_bytes

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


def alike(rank, world, gathered_bytes, times):
    by_messages = Training(rank, gathered_bytes)
    assert by_messages.schedule is None
    by_messages.train(4, times)
    # Otherwise a rank of a busy machine is told that it is late.
    with faults.collectives_beside(), mock.patch.object(gathers, "_GRACE_S", 20.0):
        training = Training(rank, gathered_bytes)
        training.train(2, times)
        messages, none = training.bytes()
        assert messages > 0 == none
        training.train(2, times, first=2)
        of_two_windows = training.bytes()
    whole = sum(4 * chunk.numel for chunk in training.optimizer.sharding.layout_ref.layout.chunks)
    most = 2 * (1 if gathered_bytes == "all" else 2 * times) * whole * (world - 1) / world
    assert of_two_windows[0] == messages
    assert most / 2 < of_two_windows[1] <= most  # backward needs no bias, and has the last weight
    training.optimizer.close()
    by_messages.optimizer.close()
    assert all(map(torch.equal, training.weights(), by_messages.weights()))


@pytest.mark.promise("S02")
@pytest.mark.parametrize("gathered_bytes", [0, "all"])
@pytest.mark.parametrize(("world", "times"), [(2, 1), (3, 2)])
def test_what_all_ranks_fetched_in_two_windows_comes_by_collectives_in_the_next(world, gathered_bytes, times):
    ranks.run(world, alike, gathered_bytes, times)


def closed_after_fetching_ahead(rank, world):
    """Closes where what was fetched ahead has come, is looked after by nobody any more, and was never read."""
    with faults.collectives_beside():
        training = Training(rank)
    params = list(training.model.parameters())
    for _ in range(4):
        # Close() reads them in this order; the first one comes once more.
        sum(param.sum() for param in [*params, params[0]]).backward()
        training.step()
    cache, pulls, were_fetched = training.exchange.cache, training.exchange.pulls, []
    close, outstanding = pulls.close, training.schedule._gathers._outstanding

    def close_late():
        close()
        were_fetched.extend(chunk.arrival is not None for chunk in cache._gathered)
        deadline = time.monotonic() + 20.0
        while outstanding and time.monotonic() < deadline:
            time.sleep(0.01)

    with mock.patch.object(pulls, "close", close_late):
        training.optimizer.close()
    return any(were_fetched), training.weights()


@pytest.mark.promise("S02")
def test_close_ends_well_where_what_was_fetched_ahead_was_never_read():
    (was_fetched, one), (_, other) = ranks.run(2, closed_after_fetching_ahead)
    assert was_fetched and all(map(torch.equal, one, other))


def tell(sender, receiver):
    """One rank waits for another one, in its main thread."""
    if dist.get_rank() == sender:
        dist.send(torch.zeros(1), receiver)
    else:
        dist.recv(torch.zeros(1), sender)


def one_after_the_other(training):
    """Rank 1 comes to no weight before rank 0 has read all, by collectives alone."""
    if training.rank == 0:
        pulled = training.bytes()[0]
        training.window(4)
        assert training.bytes()[0] == pulled
    tell(0, 1)
    if training.rank == 1:
        training.window(4)
    training.step()


def apart(rank, world, wait_s):
    """`wait_s`: for so long rank 1 has not ended its step when rank 0 is in the next window, and waits there."""
    end_step = ShareExchange.end_step

    def late(self, written):
        time.sleep(wait_s * rank)
        end_step(self, written)

    with faults.collectives_beside():
        training = Training(rank)
        training.train(3)
        training.window(3)
        with mock.patch.object(ShareExchange, "end_step", late):
            training.step()
        one_after_the_other(training)
        training.optimizer.close()
    return training.weights()


@pytest.mark.promise("S02")
@pytest.mark.parametrize("wait_s", [0.0, 0.6], ids=["in the same window", "before the step has ended"])
def test_a_rank_that_waits_elsewhere_is_no_reason_to_wait(wait_s):
    one, other = ranks.run(2, apart, wait_s)
    assert all(map(torch.equal, one, other))


@contextlib.contextmanager
def fetched_by_collectives():
    """By number of a chunk, of each of its fetches."""
    found, fetch = collections.defaultdict(list), Schedule.fetch

    def noted(self, chunk, memory, is_edited):
        gather = fetch(self, chunk, memory, is_edited)
        found[chunk.number].append(gather is not None)
        return gather

    with mock.patch.object(Schedule, "fetch", noted):
        yield found


def edited(rank, world, by_collectives, in_main_thread=False):
    """Rank 1 has edited a weight before rank 0 reads what was there, for the second time in the window; and has issued its part
    `in_main_thread`, or not yet."""
    with faults.collectives_beside() if by_collectives else contextlib.nullcontext(), contextlib.ExitStack() as quiet:
        training = Training(rank)
        training.train(3)
        weight, other = training.model[2].weight, training.model[0].weight
        read = []
        if rank == 1:
            before = weight.detach().clone()
            with torch.no_grad():
                weight.mul_(0.5)
            if by_collectives and in_main_thread:
                # Or rank 0 is told of all of them, and issues them before it reads for the second time. The thread that tells
                # it may still be there from the read before, with the short grace time.
                quiet.enter_context(mock.patch.object(training.schedule._gathers, "_late", lambda turn: None))
                with training.schedule._lock:  # stands for a thread that uses a weight that comes last
                    training.schedule._issue_before(len(training.schedule._window.order))
        tell(1, 0)
        if rank == 0:
            with fetched_by_collectives() as found:
                for _ in range(2):
                    read.append(weight.detach().clone())
                    other.detach().clone()  # nothing else stays gathered
            if by_collectives:
                assert found[weight.in_chunk.number] == [False, True]  # the first was issued for the other rank
            with torch.no_grad():
                weight.mul_(0.5)
        else:
            other.detach().clone()
            assert torch.equal(weight.detach(), 0.5 * before)
        tell(0, 1)
        quiet.close()
        for step in (3, 4):
            training.window(step)
            training.step()
        training.optimizer.close()
    return read, training.weights()


@pytest.fixture(scope="module")
def edited_by_messages():
    return ranks.run(2, edited, False)[0]


@pytest.mark.promise("S02")
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_a_rank_that_edited_takes_part_with_what_was_there_before(edited_by_messages, in_main_thread):
    (read, weights), (_, others) = ranks.run(2, edited, True, in_main_thread)
    wanted, expected = edited_by_messages
    assert all(map(torch.equal, read, wanted)) and torch.equal(*read)
    assert all(map(torch.equal, weights, others)) and all(map(torch.equal, weights, expected))


def left(rank, world, steps):
    """Rank 0 comes to a step, or to the end, with weights on their way that rank 1 has not come to."""
    with faults.collectives_beside(), mock.patch.object(schedule, "_MORE", 1), mock.patch.object(gathers, "_GRACE_S", 1.0):
        training = Training(rank, "all", timeout_s=10.0)  # rank 1 is told after a second, or a busy rank 0 is late
        training.train(3)
        if rank == 0:
            training.model[0](torch.ones(1, WIDTH)).square().mean().backward()  # the next weights come meanwhile
            assert training.schedule._gathers._outstanding
        elif steps:
            training.optimizer.no_contribution()
        tell(0, 1)  # closing reads all weights, which would end these
        if steps:
            training.step()
        beside = training.schedule._gathers._beside
        training.optimizer.close()
        assert beside._lost == "it was closed"  # and not before


@pytest.mark.parametrize("steps", [True, False])
def test_what_is_on_its_way_at_a_step_or_at_the_end_is_waited_for(steps):
    ranks.run(2, left, steps)


def settled(rank, world):
    """Rank 1 takes part late in what rank 0 has on its way."""

    def issue_late(*arguments, issue=Gathers.issue_for_others):
        time.sleep(0.5)
        issue(*arguments)

    with faults.collectives_beside(), mock.patch.object(schedule, "_MORE", 1), mock.patch.object(gathers, "_GRACE_S", 1.0):
        training = Training(rank, "all")  # rank 1 is told after a second, and of one gather at a time
        training.train(3)
        if rank == 0:
            training.model[0](torch.ones(1, WIDTH)).square().mean().backward()  # the next weights come meanwhile
            on_the_way = [*training.schedule._gathers._outstanding]
            assert on_the_way and not all(gather.done() for gather in on_the_way)
            tell(0, 1)
            training.schedule.settle()
            assert all(gather.done() for gather in on_the_way)
        else:
            tell(0, 1)
            with mock.patch.object(Gathers, "issue_for_others", issue_late):
                training.schedule.settle()
        training.optimizer.close()


def test_once_settled_nothing_is_on_its_way():
    ranks.run(2, settled)


class Counted:
    """A collective that has come. It counts the waits for it, and calls `meanwhile` in the first one."""

    def __init__(self):
        self.num_waits, self.meanwhile = 0, lambda: None

    def done(self):
        return True

    def wait(self):
        self.num_waits += 1
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_stream_waits_for_a_gather_that_another_thread_has_finished(when):
    """Nothing else orders it after the collective, for which the streams of that thread alone have waited."""
    collective, waits = Counted(), []
    gather = gathers.Gather(schedule.Turn(0, 0), (), [collective], [contextlib.nullcontext])

    def wait():
        before = collective.num_waits
        gather.wait()
        waits.append(collective.num_waits - before)

    if when == "meanwhile":
        collective.meanwhile = wait
    gather.finish()
    if when == "before":
        wait()
    assert waits and waits[0] >= 1


def short_of_memory(rank, world):
    """Rank 0 has no memory for a moment, for what it does not need itself, and reads again."""
    with faults.collectives_beside():
        training = Training(rank)
        training.train(3)
        weights = [layer.weight for layer in training.model]
        failing = mock.patch.object(Gathers, "_room", side_effect=torch.OutOfMemoryError("none"))
        with failing if rank == 0 else contextlib.nullcontext(), contextlib.suppress(torch.OutOfMemoryError):
            weights[3].detach().clone()
            assert rank == 1, "there was room"
        read = [weight.detach().clone() for weight in weights]
        training.window(3)
        training.step()
        training.optimizer.close()
    return read, training.weights()


@pytest.mark.promise("S02")
def test_a_gather_that_found_no_memory_shifts_no_other():
    (read, weights), (other_read, others) = ranks.run(2, short_of_memory)
    assert all(map(torch.equal, read, other_read)) and all(map(torch.equal, weights, others))


def killed(rank, world, shard_ranks):
    with faults.collectives_beside():
        training = Training(rank, timeout_s=5.0, shard_ranks=shard_ranks)
        training.train(3)
        if rank == world - 1:
            os._exit(3)
        if rank == world - 2:
            with pytest.raises(GroupLost, match=f"rank {world - 1} was last seen .*, and is gone"):
                training.window(2)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_that_is_gone_is_named(world):
    outcomes = ranks.outcomes(world, killed, 2)
    assert outcomes[world - 2].ok, ranks.describe(outcomes)


def rebuilt(rank, world, by_collectives):
    """Rank 1 is stopped until rank 0 has given it up, with weights on their way."""
    with faults.collectives_beside() if by_collectives else contextlib.nullcontext():
        training = Training(rank, "all", timeout_s=4.0)
        training.train(3)
        processes = [None] * world
        dist.all_gather_object(processes, os.getpid())
        if rank == 0:
            os.kill(processes[1], signal.SIGSTOP)
            with pytest.raises(GroupLost):
                training.window(3)
            os.kill(processes[1], signal.SIGCONT)
        training.optimizer.rebuild()
        training.optimizer.zero_grad()
        training.train(3, first=3)
        training.optimizer.close()
    return training.weights()


@pytest.mark.parametrize("by_collectives", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ranks_go_on_after_one_was_given_up_with_weights_on_their_way(by_collectives):
    one, other = ranks.run(2, rebuilt, by_collectives)
    assert all(map(torch.equal, one, other))


def test_what_lists_have_in_common_keeps_their_order():
    assert in_common([[3, 1, 2]] * 3) == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert in_common([[1, 7, 2, 3, 2], [1, 2, 8, 2, 3], [9, 1, 2, 2]]) == [(0, 0, 1), (2, 1, 2), (4, 3, 3)]
    assert in_common([[1, 2], [2, 1]]) == [(0, 1)]
    assert in_common([[1], [0] * 16 + [1]]) == []  # too far
