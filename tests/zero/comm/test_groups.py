"""Threads and processes for ranks do the same, in fp32, and say who is missing."""

import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typing_extensions import get_protocol_members

import accelerators
from tests import ranks
from tests.instruments import Ledger
from tests.loopback import LoopbackGroup, loopback, run_ranks, solo
from tests.parity import by_host, hybrid
from zero.comm import backwards, torch_group
from zero.comm.connect import connect
from zero.comm.group import Group, Levels, SharedHostMemory, TimeLimits
from zero.comm.levels import HostLevels, HybridGroup, SoloGroup, fake_group
from zero.comm.one_answer import exchange_about, exchange_texts, run_on_all
from zero.comm.results import sum_in_rank_order
from zero.comm.shared_memory import SharedMemoryGroup, through_shared_memory
from zero.comm.torch_group import TorchGroup, Wires, end_wires
from zero.errors import GroupLost, RankFailed, RanksDiffer

both_wires = pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbers(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(group):
    """Everything that a group does with tensors and messages, on data that follows from the rank."""
    found = []
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        bucket = numbers(group.rank, 8 * group.size, dtype)
        found.append(group.reduce_scatter(bucket.clone(), wide).wait().clone())
        found.append(group.all_reduce(bucket.clone(), wide).wait().clone())
        whole = torch.zeros(8 * group.size, dtype=dtype)
        whole[8 * group.rank : 8 * group.rank + 8] = numbers(group.rank, 8, dtype)
        found.append(group.all_gather(whole).wait().clone())
        found.append(group.broadcast(bucket.clone()).wait().clone())
    buckets = [numbers(group.rank + 10 * index, 2 * group.size, torch.float32) for index in range(5)]
    pending = [group.reduce_scatter(bucket, torch.float32) for bucket in buckets]
    found += [one.wait().clone() for one in pending]
    found += [group.all_to_all(numbers(group.rank, 8 * group.size, dtype)).wait().clone() for dtype in DTYPES]
    found.append(group.all_gather_bytes(bytes([group.rank]) * (group.rank + 1)))
    found.append(group.all_gather_bytes(bytes(torch_group._FRAME_BYTES - 8)))  # no more and no less than is sent first
    found.append(exchange_texts(group, "x" * 10 * group.rank))
    return found


def collectives_of_processes(rank, world, shared):
    return collectives(connect(accelerators.get("cpu"), None, TimeLimits(30.0, 30.0), shared_memory=shared))


IN_A_DAY = [(1, False), (2, False), (2, True), (3, False), (3, True)]
AT_NIGHT = [pytest.param(4, shared, marks=pytest.mark.full) for shared in (False, True)]


@pytest.mark.parametrize("world, shared", IN_A_DAY + AT_NIGHT)
def test_threads_and_processes_give_the_same(world, shared):
    threads = run_ranks(world, collectives, 30.0)
    processes = ranks.run(world, collectives_of_processes, shared)
    for one, other in zip(threads, processes, strict=True):
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if not isinstance(mine, torch.Tensor):
                assert mine == theirs
            elif position % 4 == 1 and world > 2 and not shared:  # gloo's all-reduce goes round a ring, in another order
                torch.testing.assert_close(mine, theirs)
            else:
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs), position


@both_wires
@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_all_reduce_gives_every_rank_the_same_bits(world, shared):
    for found in (run_ranks(world, collectives, 30.0), ranks.run(world, collectives_of_processes, shared)):
        for position in range(1, 4 * len(DTYPES), 4):
            assert all(torch.equal(each[position], found[0][position]) for each in found)


def test_collectives_give_what_the_example_of_group_says():
    names = "reduce_scatter", "all_to_all", "all_reduce", "all_gather", "broadcast"
    said = {name: re.search(rf"^ +{name} +(.*?)(?:  |$)", Group.__doc__, re.MULTILINE)[1] for name in names}

    def program(group):
        own = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])[group.rank]
        sums = [getattr(group, name)(own.clone(), torch.float32) for name in ("reduce_scatter", "all_reduce")]
        others = [getattr(group, name)(own.clone()) for name in ("all_to_all", "all_gather", "broadcast")]
        return [pending.wait().int().tolist() for pending in (sums[0], others[0], sums[1], *others[1:])]

    for name, *given in zip(names, *run_ranks(2, program), strict=True):
        shown = [[int(number) for number in row.split(", ")] for row in re.findall(r"\[(.*?)\]", said[name])]
        assert given == (shown * 2 if said[name].endswith("on both") else shown), name


def test_sums_are_taken_in_fp32_and_in_rank_order():
    pieces = torch.tensor([256.0, 1.0, -256.0, 2.0**-20], dtype=torch.bfloat16)
    assert sum_in_rank_order(pieces, 4, torch.float32).tolist() == [1.0 + 2.0**-20]
    assert sum_in_rank_order(torch.tensor([256.0, 1.0], dtype=torch.bfloat16), 2, torch.float32).tolist() == [257.0]
    # In fp32 the order shows, so there is one.
    assert sum_in_rank_order(torch.tensor([1.0, 2.0**-24, 2.0**-24]), 3, torch.float32).item() == 1.0
    assert sum_in_rank_order(torch.tensor([2.0**-24, 2.0**-24, 1.0]), 3, torch.float32).item() > 1.0


def add_in_bf16(group):
    bucket = torch.full((2 * group.size,), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
    reduced = group.reduce_scatter(bucket.clone(), torch.float32).wait(), group.all_reduce(bucket, torch.float32).wait()
    return [each.tolist() for each in reduced]


def add_in_bf16_in_processes(rank, world, shared):
    return add_in_bf16(connect(accelerators.get("cpu"), shared_memory=shared))


@both_wires
def test_256_and_1_make_257_over_every_wire(shared):
    expected = [[257.0, 257.0], [257.0] * 4]
    assert run_ranks(2, add_in_bf16) == ranks.run(2, add_in_bf16_in_processes, shared) == [expected, expected]


def test_what_is_sent_may_be_written_again_at_once():
    def program(group):
        bucket = torch.full((4,), float(group.rank))
        pending = group.all_reduce(bucket, torch.float32)
        bucket.fill_(99.0)
        return pending.wait().tolist()

    assert run_ranks(2, program) == [[1.0] * 4] * 2


def test_nothing_waits_before_it_is_waited_for():
    def program(group):
        if group.rank == 1:
            time.sleep(0.1)
        pending = group.reduce_scatter(torch.ones(2), torch.float32)
        early = pending.done()
        return early, pending.wait().item(), pending.done()

    (early, total, _), (late, _, _) = run_ranks(2, program)
    assert (early, late, total) == (False, True, 2.0)


def send_lists_of_different_lengths(rank, world):
    group = connect(accelerators.get("cpu"), None, TimeLimits(20.0, 20.0))
    return [len(message) for length in (0, 1000, 1100, 5000) for message in group.all_gather_bytes(b"x" * length * rank)]


@pytest.mark.promise("L04")
def test_what_ranks_tell_each_other_may_have_a_length_of_its_own_on_each():
    found = ranks.run(3, send_lists_of_different_lengths)
    assert found == [[0, 0, 0, 0, 1000, 2000, 0, 1100, 2200, 0, 5000, 10000]] * 3


# Failure ----------------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named_within_the_limit():
    groups = loopback(3, time_limit_s=0.2)
    pending = groups[0].all_reduce(torch.ones(3), torch.float32)
    groups[2].all_reduce(torch.ones(3), torch.float32)
    with pytest.raises(GroupLost, match=r"ranks \[1\] did not come to collective 0 within 0.2 s"):
        pending.wait()
    with pytest.raises(GroupLost, match=r"ranks \[1\] did not come to collective 0"):
        groups[0].all_reduce(torch.ones(3), torch.float32).wait()


def test_a_rank_that_left_is_no_reason_to_wait():
    groups = loopback(2, time_limit_s=30.0)
    failed = threading.Timer(0.05, groups[1].close)
    failed.start()
    with pytest.raises(GroupLost, match="rank 1 left the group"):
        groups[0].all_gather_bytes(b"x")
    failed.join()


def miss_a_collective(rank, world, shared):
    group = connect(accelerators.get("cpu"), None, TimeLimits(1.0, 1.0), shared_memory=shared)
    if rank == 1:
        time.sleep(6.0)
        return []
    said = []
    for _ in range(2):
        started = time.monotonic()
        try:
            group.reduce_scatter(torch.ones(world), torch.float32).wait()
        except GroupLost as error:
            said.append((str(error), time.monotonic() - started))
    return said


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sockets", "shared memory"])
def test_over_gloo_too_and_every_later_call_says_the_first_cause(shared):
    said, _ = ranks.run(2, miss_a_collective, shared, fresh=True)
    (first, took), (later, took_later) = said
    assert "on rank 0" in first
    assert "rank 1 was last seen before its first step, and did not come" in first, first
    assert took < 5.0
    assert "was lost before" in later
    assert first.split(": ", 1)[1] in later or later.split("before: ")[1] in first
    assert took_later < 0.1  # the time limit is not waited for once more


def miss_a_collective_of_a_later_group(rank, world):
    pair, cpu = dist.new_group([0, 1]), accelerators.get("cpu")
    if rank == 2:
        return None
    connect(cpu, pair, TimeLimits(30.0, 30.0)).close()
    group = connect(cpu, pair, TimeLimits(1.0, 1.0))
    if rank == 1:
        time.sleep(4.0)
        return None
    begun = time.monotonic()
    with pytest.raises(GroupLost):
        group.all_gather_bytes(b"x")
    return time.monotonic() - begun


def test_a_later_group_of_the_same_ranks_has_time_limits_of_its_own():
    took, _, _ = ranks.run(3, miss_a_collective_of_a_later_group, fresh=True)
    assert took < 4.0


def end_torch_distributed(rank, world, shared):
    group, said = connect(accelerators.get("cpu"), None, TimeLimits(5.0, 5.0), shared_memory=shared), []
    group.all_gather_bytes(b"x")
    dist.destroy_process_group()
    bucket = torch.ones(world)
    for call in (lambda: group.all_gather(bucket), lambda: group.broadcast(bucket), lambda: group.all_gather_bytes(b"x")):
        try:
            call()
        except GroupLost as error:
            said.append(str(error))
    group.close()
    return said


@both_wires
def test_a_group_whose_torch_distributed_was_ended_says_so(shared):
    for said in ranks.run(2, end_torch_distributed, shared, fresh=True):
        assert len(said) == 3
        assert all("torch.distributed was ended since the group was made" in text for text in said)
        assert ["was lost before" in text for text in said] == [False, True, True]


def test_errors_of_one_rank_are_all_ranks_errors():
    def program(group):
        def act():
            if group.rank == 1:
                raise KeyError("mine")
            return 3

        try:
            return run_on_all(group, act)
        except (KeyError, RankFailed) as error:
            return type(error).__name__, str(error)

    said = (
        "Cannot shard: rank 1 of 3 failed (KeyError: 'mine'). Nothing was changed on the other ranks. Fix the error there, "
        "and call zero.shard again on all ranks."
    )
    assert run_ranks(3, program) == [
        ("RankFailed", said),
        ("KeyError", "'mine'"),
        ("RankFailed", said),
    ]
    assert run_ranks(2, lambda group: run_on_all(group, lambda: group.rank)) == [0, 1]


def test_ranks_that_came_for_different_subjects_are_told():
    def program(group):
        with pytest.raises(RanksDiffer, match="rank 1 of 2 came to tea, rank 0 to step"):
            exchange_about(group, "step" if group.rank == 0 else "tea", b"")

    run_ranks(2, program)


def test_the_first_error_that_is_no_loss_of_the_others_is_raised():
    def program(group):
        if group.rank == 1:
            raise ValueError("the cause")
        group.all_gather_bytes(b"x")

    with pytest.raises(ValueError, match="the cause"):
        run_ranks(2, program)


# One rank ---------------------------------------------------------------------------------------------------------------


def test_one_rank_sends_nothing_and_gets_the_dtype_of_sums():
    group = solo()
    bucket = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert group.reduce_scatter(bucket, torch.float32).wait().dtype == torch.float32
    assert group.all_gather(bucket).wait() is group.all_to_all(bucket).wait() is group.broadcast(bucket).wait() is bucket
    assert group.all_gather_bytes(b"abc") == [b"abc"]
    group.set_phase("step")
    group.reconnect(None)
    assert group.phase == "step" and group.beside() is None and group.inner is group
    wire = group.new_wire()
    for act in (partial(wire.send, bucket, 0, 1), partial(wire.receive, bucket, 0, 1), partial(wire.receive_from_any, bucket)):
        with pytest.raises(ValueError, match=r"Cannot send or receive a message: there is one rank\."):
            act()
    wire.close()
    group.close()
    assert group.all_gather_bytes(b"abc") == [b"abc"]


def test_several_threads_serve_host_tensors_only():
    def program(group):
        with pytest.raises(ValueError, match="Cannot use a tensor on meta"):
            group.all_reduce(torch.ones(2, device="meta"), torch.float32)

    run_ranks(2, program)


def test_something_that_is_no_group_is_refused():
    expected = r"not a torch\.distributed process group, and to be a zero Group it lacks all_gather, "
    with pytest.raises(TypeError, match=expected):
        connect(accelerators.get("cpu"), "world")


def test_wires_that_were_given_up_before_end_no_world_of_the_users(monkeypatch):
    ended = []
    monkeypatch.setattr(torch_group.dist, "destroy_process_group", ended.append)
    end_wires([Wires(None, None, None), Wires("tensors", None, "tensors")])
    assert ended == ["tensors"]  # and not None, which means the world


# A group of the user's ---------------------------------------------------------------------------------------------------

PROTOCOLS = {  # the parts of a group that a training uses, by the name in an error
    "it": Group,
    "its shared_host_memory": SharedHostMemory,
    "its inner": Group,
    "its inner.shared_host_memory": SharedHostMemory,
    "its inner.levels": Levels,
    "its inner.levels.across": Group,
    "its outer": Group,
}
IN_IT = [(name, member) for name, protocol in PROTOCOLS.items() for member in sorted(get_protocol_members(protocol))]


def custom_group(without=(None, None)):
    """A group of groups, each with every member of its protocol but one."""

    def part(name, **parts):
        members = dict.fromkeys(get_protocol_members(PROTOCOLS[name])) | parts
        return SimpleNamespace(**{member: its for member, its in members.items() if (name, member) != without})

    levels = part("its inner.levels", across=part("its inner.levels.across"))
    inner = part("its inner", levels=levels, shared_host_memory=part("its inner.shared_host_memory"))
    return part("it", inner=inner, outer=part("its outer"), shared_host_memory=part("its shared_host_memory"))


@pytest.mark.parametrize(("name", "member"), IN_IT)
def test_a_custom_group_that_lacks_a_member_is_refused_with_its_name(name, member):
    group = custom_group((name, member))
    with pytest.raises(TypeError, match=rf"to be a zero Group {re.escape(name)} lacks {member}\. Pass what"):
        connect(accelerators.get("cpu"), group)


@pytest.mark.parametrize("absent", [(), ("outer", "shared_host_memory"), ("levels",)])
def test_a_custom_group_is_taken_as_it_is_without_what_may_be_none(absent):
    group = custom_group()
    for member in absent:
        setattr(group.inner if member == "levels" else group, member, None)
    assert connect(accelerators.get("cpu"), group) is group


def test_a_custom_group_always_has_an_inner_one():
    group = custom_group()
    group.inner = None
    with pytest.raises(TypeError, match="its inner lacks all_gather, "):
        connect(accelerators.get("cpu"), group)


def test_every_group_of_ours_may_be_passed_as_a_custom_one():
    def program(group):
        made = [group, by_host(group, 2), by_host(group, 2, shares_memory=False), hybrid(group, 2)]
        made += [through_shared_memory(group), fake_group(8, 4), solo()]
        assert all(connect(accelerators.get("cpu"), each) is each for each in (*made, *map(Ledger, made)))
        return [type(each) for each in made], [each.inner.levels is not None for each in made]

    ours = [LoopbackGroup, HostLevels, HostLevels, HybridGroup, SharedMemoryGroup, HybridGroup, SoloGroup]
    assert run_ranks(4, program) == [(ours, [False, True, *[False] * 5])] * 4
    assert get_protocol_members(Group) <= {*dir(TorchGroup), "rank", "size"}


class Noted(torch.autograd.Function):
    """Notes in its backward that it exchanges gradients, runs another backward inside of itself, and asks after it."""

    @staticmethod
    def forward(ctx, x, first, inside, seen):
        ctx.first, ctx.inside, ctx.seen = first, inside, seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        task = backwards.running()
        if ctx.first is not None:
            backwards.note_crossing(ctx.first)
        if ctx.inside is not None:
            with torch.enable_grad():
                ctx.inside().backward()
        ctx.seen.append((task, backwards.crossing_since(task)))
        return grad * 2, None, None, None


def test_a_backward_that_exchanges_is_known_while_it_runs_and_until_another_one_does(monkeypatch):
    monkeypatch.setattr(backwards, "_latest", backwards._Crossing())
    x, seen = torch.ones(1, requires_grad=True), []
    noted = lambda first, inside=None: Noted.apply(x, first, inside, seen)  # noqa: E731
    assert backwards.running() == -1
    noted(None).backward()
    noted(5).backward()
    noted(None).backward()
    assert [first for _, first in seen] == [-1, 5, -1]  # the third began later than the one that exchanged, which has ended
    assert backwards.crossing_since(seen[1][0]) == 5
    seen.clear()
    noted(None, lambda: noted(3)).backward()
    assert [first for _, first in seen] == [3, 3]  # the one around it began earlier
    seen.clear()
    noted(4, lambda: noted(None)).backward()
    assert [first for _, first in seen] == [4, 4]  # the one around it runs still


def test_a_backward_that_failed_runs_no_more_and_nothing_follows_its_end():
    x, ends = torch.ones(1, requires_grad=True), []

    def fail(grad):
        backwards.note_crossing(2)
        backwards.at_end(lambda: ends.append(backwards.running()))
        raise KeyError

    y = x * 2
    y.register_hook(fail)
    with pytest.raises(KeyError):
        y.backward()
    assert not ends and not backwards._running and backwards.running() == -1
