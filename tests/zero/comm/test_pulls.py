"""Ranks that go different ways read the weights of one version, with no partner in their main thread."""

import math
import random

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from zero.comm import pulls
from zero.comm.pulls import Pulls
from zero.memory.versions import VersionedShares
from zero.plan.layout import Span

NUM_BUCKETS, SHARE = 5, 6


class GlooWire:
    """Over a process group of its own."""

    def __init__(self, rank, size):
        self.rank, self.size, self.limit_s = rank, size, 60.0
        self._group = dist.new_group()

    def send(self, values, rank, tag):
        return self._group.send([values], rank, tag)

    def receive(self, memory, rank, tag):
        return self._group.recv([memory], rank, tag)

    def receive_from_any(self, memory):
        return self._group.recv_anysource([memory], 0)

    def on_exit(self, end):
        pass

    def close(self):
        pass


def weights_at(bucket, rank, step, edits):
    return torch.full((SHARE,), float(1000 * bucket + 100 * rank + 10 * step + edits))


class Arrives:
    """A copy that arrives when somebody waits for it."""

    def __init__(self, memory, values):
        self.memory, self.values, self.num_waits = memory, values, 0

    def finish(self):
        self.num_waits += 1
        self.memory.copy_(self.values)


class Rank:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.shares = VersionedShares(world - 1)
        for bucket in range(NUM_BUCKETS):
            self.shares.add(bucket, weights_at(bucket, rank, 0, 0))
        self.pulls = Pulls(GlooWire(rank, world), self.shares.request, self.shares.reached)

    def read(self, bucket):
        step, edits = self.shares.version(bucket)
        memory = torch.full((self.world * SHARE,), float("nan"))
        memory.view(self.world, SHARE)[self.rank] = self.shares.newest(bucket)
        return memory, self.pulls.begin(bucket, memory, step, edits), (step, edits)

    def check(self, bucket, reading):
        memory, pull, (step, edits) = reading
        pull.wait()
        assert torch.equal(memory, torch.cat([weights_at(bucket, rank, step, edits) for rank in range(self.world)]))

    def edit(self, bucket):
        step, edits = self.shares.version(bucket)
        self.shares.edit(bucket, Span(0, SHARE), weights_at(bucket, self.rank, step, edits + 1))
        if self.rank or edits % 2:  # not all say it each time
            self.pulls.tell_reached(bucket, *self.shares.version(bucket))

    def step(self):
        dist.barrier()  # nobody reads any more, as after a window has settled
        self.shares.begin_step()
        copies = {}
        for bucket in range(NUM_BUCKETS):
            step, _ = self.shares.version(bucket)
            values = weights_at(bucket, self.rank, step + 1, 0)
            copies[bucket] = Arrives(self.shares.place(bucket).fill_(math.nan), values)
        self.shares.end_step(copies)


def diverge(rank, world, seed, num_windows):
    """Every rank reads what it likes, as often as it likes, ahead or at once; all edit the same, at times of their own."""
    torch.set_num_threads(1)
    own, common = random.Random(f"{seed} {rank}"), random.Random(seed)
    one = Rank(rank, world)
    num_reads = 0
    for _ in range(num_windows):
        edited = [common.randrange(NUM_BUCKETS) for _ in range(common.randrange(3))]
        collective = common.random() < 0.3
        for bucket in [*edited, None]:
            for _ in range(own.randrange(6)):
                wanted = [own.randrange(NUM_BUCKETS) for _ in range(own.randint(1, 3))]
                readings = [(bucket, one.read(bucket)) for bucket in wanted]
                for reading in readings:
                    one.check(*reading)
                num_reads += len(readings)
            if bucket is not None:
                one.edit(bucket)
        if collective:  # the collective is the user's
            dist.all_reduce(torch.ones(1))
        one.step()
    dist.barrier()
    one.pulls.close()
    return num_reads, one.pulls.num_pulled_bytes


@pytest.mark.parametrize("num_runs", [2, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_go_different_ways_read_the_weights_of_one_version(world, num_runs):
    for seed in range(num_runs):
        found = ranks.run(world, diverge, seed, 25)
        for num_reads, num_bytes in found:
            assert num_bytes == num_reads * (world - 1) * SHARE * 4


def read_while_the_owner_is_elsewhere(rank, world):
    one = Rank(rank, world)
    if rank == 0:
        for _ in range(20):
            one.check(0, one.read(0))
    dist.barrier()  # rank 1 waits there meanwhile
    one.pulls.close()


def test_a_rank_answers_while_its_main_thread_sits_in_a_collective():
    ranks.run(2, read_while_the_owner_is_elsewhere)


def one_is_ahead(rank, world):
    """Rank 0 reads what the others have not edited yet; until they do, rank 1 reads from all."""
    one = Rank(rank, world)
    if rank == 0:
        one.edit(0)
        ahead = one.read(0)
    dist.barrier()
    if rank == 1:
        one.check(1, one.read(1))
    dist.barrier()
    if rank == 0:
        one.check(0, ahead)
    else:
        one.edit(0)
    dist.barrier()
    one.pulls.close()


def test_a_request_for_what_is_to_come_holds_up_no_other():
    ranks.run(3, one_is_ahead)


def leave_twice(rank, world):
    one = Rank(rank, world)
    if rank == 0:
        assert not one.pulls.end(0.1) and not one.pulls.end(0.1)
    dist.barrier()
    if rank == 1:
        one.check(0, one.read(0))  # rank 0 answers still, and is counted once by rank 2
    dist.barrier()
    assert one.pulls.end(30.0)


def test_a_rank_that_leaves_twice_is_counted_once_and_answers_until_all_have_left():
    ranks.run(3, leave_twice)


def test_versions_are_kept_until_the_step_and_answered_when_they_are_reached():
    shares, answers = VersionedShares(1), []
    shares.request(0, 0, 0, lambda share, _: answers.append(("first", share.tolist())))
    assert answers == []
    shares.add(0, torch.zeros(2))
    shares.request(0, 0, 1, lambda share, _: answers.append(("edited", share.tolist())))
    shares.request(0, 1, 0, lambda share, _: answers.append(("stepped", share.tolist())))
    assert answers == [("first", [0.0, 0.0])]
    shares.edit(0, Span(0, 2), torch.ones(2))
    assert answers[1:] == [("edited", [1.0, 1.0])] and shares.version(0) == (0, 1)
    shares.request(0, 0, 0, lambda share, _: answers.append(("before", share.tolist())))
    assert answers[2:] == [("before", [0.0, 0.0])]
    shares.begin_step()
    shares.newest(0).add_(1.0)
    shares.end_step({})
    assert answers[3:] == [("stepped", [2.0, 2.0])] and shares.version(0) == (1, 0)


def test_what_edits_overwrote_is_kept_until_no_rank_can_ask_for_it():
    shares = VersionedShares(2)
    shares.add(0, torch.zeros(2))

    def kept():
        return len(shares._shares[0].overwritten)

    def at(edits):
        answers = []
        shares.request(0, 0, edits, lambda share, _: answers.append(share.tolist()))
        return answers

    for edit in range(1, 5):
        shares.edit(0, Span(0, 1), torch.full((1,), float(edit)))
    shares.reached(1, 0, 0, 3)
    assert kept() == 4 and at(0) == [[0.0, 0.0]]
    shares.reached(2, 0, 0, 2)
    assert kept() == 2 and at(2) == [[2.0, 0.0]] and at(3) == [[3.0, 0.0]]
    with pytest.raises(AssertionError, match="read as of edit 1, and all ranks were at 2"):
        at(1)
    shares.reached(1, 0, 0, 9)  # that rank is ahead
    shares.reached(2, 0, 0, 5)
    assert kept() == 0 and at(4) == [[4.0, 0.0]] and at(5) == []
    for _ in range(2):
        shares.edit(0, Span(1, 2), torch.ones(1))
    assert kept() == 1
    shares.begin_step()
    shares.end_step({})
    shares.edit(0, Span(0, 2), torch.ones(2))
    assert kept() == 1  # the message was about the last step
    shares.reached(1, 0, 2, 0)
    shares.reached(2, 0, 1, 1)
    assert kept() == 1  # and what is of one to come is not used yet


def test_of_what_had_no_values_nothing_is_kept_and_no_copy_is_made():
    shares, memory = VersionedShares(1), torch.zeros(4)
    shares.add(0, memory)
    shares.edit(0, Span(2, 4), torch.ones(2), is_first=True)
    assert shares.version(0) == (0, 1) and shares.newest(0) is memory and memory.tolist() == [0, 0, 1, 1]
    shares.edit(0, Span(0, 1), torch.full((1,), 5.0))
    answers = []
    for edits in range(3):
        shares.request(0, 0, edits, lambda share, _: answers.append(share.tolist()))
    assert answers == [[0, 0, 1, 1], [0, 0, 1, 1], [5, 0, 1, 1]]


def test_where_no_other_rank_reads_nothing_is_kept():
    shares = VersionedShares()
    shares.add(0, torch.zeros(2))
    for edit in range(3):
        shares.edit(0, Span(0, 2), torch.full((2,), float(edit)))
    assert shares.version(0) == (0, 3) and not shares._shares[0].overwritten


def test_what_a_step_left_is_waited_for_by_those_who_read_edit_or_send_it():
    shares, memory = VersionedShares(1), torch.zeros(2)
    shares.add(0, memory)
    answers = []
    shares.request(0, 1, 0, lambda share, wait: answers.append((share, wait)))
    shares.begin_step()
    copy = Arrives(memory, torch.ones(2))
    shares.end_step({0: copy})
    [(share, wait)] = answers
    assert shares.place(0) is share is memory and not copy.num_waits
    wait()
    assert share.tolist() == [1.0, 1.0] and copy.num_waits == 1
    for number, read in enumerate((shares.newest, shares.published), 2):
        copy.values = torch.full((2,), float(number))
        assert read(0).tolist() == [number, number]
    copy.values = torch.full((2,), 7.0)
    shares.edit(0, Span(0, 1), torch.zeros(1))
    assert shares.newest(0).tolist() == [0.0, 7.0]


def test_a_read_of_an_earlier_step_is_refused():
    shares = VersionedShares(1)
    shares.add(0, torch.zeros(2))
    shares.begin_step()
    shares.end_step({})
    with pytest.raises(RuntimeError, match="Cannot read weights as of step 0 after step 1: a thread of another rank"):
        shares.request(0, 0, 0, lambda share, _: None)


def closed_late(rank, world):
    """Rank 1 closes when rank 0 has told that it waits for that."""
    store, told, one = dist.distributed_c10d._get_default_store(), [], Rank(rank, world)
    if rank == 1:
        store.wait(["waits"])
        one.pulls.close()
        return told

    def tell(record):
        told.append(record.getMessage())
        store.set("waits", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "_LONG_S", 0.01)
        patch.setattr(pulls.logger, "filters", [tell])
        one.pulls.close()
    return told


def test_a_rank_that_waits_for_others_to_close_says_so():
    (told,), none = ranks.run(2, closed_late, timeout=60.0)
    assert none == [] and "waits up to 60 s for other ranks, which may still read its weights. Call close() on" in told
