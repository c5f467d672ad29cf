"""Small messages through pipes: each call gets its own, whoever is late, gone or forked."""

import datetime
import gc
import os
import signal
import threading
import time

import pytest

from tests.devices import needs_linux
from zero.comm.pipes import MOST_BYTES, ByPipes, Pipes, _write
from zero.errors import GroupLost

pytestmark = needs_linux


def connected(size, num_channels=2):
    made = [Pipes(rank, size, num_channels) for rank in range(size)]
    told = [pipes.handshake() for pipes in made]
    for pipes in made:
        pipes.meet(told)
    for pipes in made:
        pipes.introduced()
    return made


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def got(call):
    call.wait()
    return call.messages


def test_each_call_gets_the_messages_that_are_for_it_in_whatever_order_calls_and_ranks_are_asked():
    ranks = connected(3)
    calls = [
        [ranks[rank].call(channel, b"%d %d %d" % (rank, channel, number), 20.0) for number in range(4) for channel in (0, 1)]
        for rank in (2, 0, 1)
    ]
    expected = [[b"%d %d %d" % (rank, channel, number) for rank in range(3)] for number in range(4) for channel in (0, 1)]
    for mine in calls:
        for at in (5, 0, 7, 2, 1, 6, 3, 4):
            assert mine[at].is_completed()
            assert got(mine[at]) == expected[at]


def test_a_call_is_not_complete_before_all_have_sent_theirs():
    first, second = connected(2)
    call = first.call(0, b"here", 20.0)
    assert not call.is_completed()
    second.call(1, b"of another channel", 20.0)
    assert not call.is_completed()
    with pytest.raises(RuntimeError, match="nothing came from rank 1 so far"):
        call.wait(datetime.timedelta(seconds=0.01))
    second.call(0, b"here too", 20.0)
    assert call.is_completed()
    assert got(call) == [b"here", b"here too"]


def test_who_sends_never_waits_and_what_a_pipe_has_no_room_for_arrives_in_its_order():
    first, second = connected(2)
    sent = [bytes([number % 256]) * MOST_BYTES for number in range(500)]  # a megabyte
    mine = [first.call(0, message, 20.0) for message in sent]
    theirs = [second.call(0, b"", 20.0) for _ in sent]
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        while not other.is_completed():
            assert one.is_completed()  # this sends as much as there is room for now
        assert got(other) == [sent[number], b""]


def test_what_a_rank_has_sent_before_its_end_arrives_and_nothing_more_is_waited_for():
    first, second = connected(2)
    calls = [first.call(0, b"first", 60.0) for _ in range(2)]
    second.call(0, b"last words", 60.0)
    second.close()
    assert got(calls[0]) == [b"first", b"last words"]
    begin = time.monotonic()
    assert calls[1].is_completed()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        calls[1].wait()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        first.call(0, b"into nowhere", 60.0).wait()
    assert time.monotonic() - begin < 30.0


def test_who_does_not_come_in_time_is_named_and_who_came_before_anybody_looked_is_in_time():
    first, *others = connected(3)
    late = first.call(0, b"", 0.05)
    others[0].call(0, b"", 0.05)
    with pytest.raises(RuntimeError, match=r"nothing came from rank 2 within 0.05 s"):
        late.wait()
    assert late.is_completed()
    first, second = connected(2)
    call = first.call(0, b"one", 0.01)
    second.call(0, b"two", 0.01)
    time.sleep(0.05)
    assert got(call) == [b"one", b"two"]


def test_what_somebody_sent_who_gave_up_counts_no_more():
    first, second = connected(2)
    calls = [second.call(0, b"before", 20.0), second.call(0, b"in which it gives up", 20.0)]
    assert got(first.call(0, b"", 20.0)) == [b"", b"before"]
    second.give_up()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        first.call(0, b"too late", 20.0).wait()
    assert got(calls[0]) == [b"", b"before"]


def test_who_gave_up_after_it_had_all_messages_of_a_call_ends_that_for_nobody():
    first, *others = connected(3)
    theirs = [other.call(0, b"whole", 20.0) for other in others]
    mine = [first.call(channel, b"", 20.0) for channel in (0, 0, 1)]
    assert got(theirs[0]) == [b"", b"whole", b"whole"]
    others[0].give_up()
    assert got(mine[0]) == got(theirs[1]) == [b"", b"whole", b"whole"]
    for call in mine[1:]:
        with pytest.raises(RuntimeError, match="connection closed by rank 1"):
            call.wait()


def test_a_message_that_an_exception_tore_is_followed_by_no_other(monkeypatch):
    first, second = connected(2)
    before = first.call(1, b"", 20.0)
    second.call(0, b"torn", 20.0)
    torn = first.call(0, b"", 20.0)
    with monkeypatch.context() as patched:
        patched.setattr("zero.comm.pipes._Way._sort", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            torn.is_completed()
    with pytest.raises(RuntimeError, match="broke off in the midst of a message"):
        first.call(0, b"", 20.0)
    assert before.is_completed()
    with pytest.raises(RuntimeError, match="broke off in the midst of a message"):
        before.wait()


def test_who_writes_to_a_rank_that_is_gone_lives_whatever_the_program_does_with_signals():
    reads, writes = os.pipe()
    os.close(reads)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with pytest.raises(BrokenPipeError):
            _write(writes, b"last words")
        assert signal.SIGPIPE not in signal.sigpending() | signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(writes)


class Connection:
    """What is used of a group of processes."""

    def __init__(self, rank, size):
        self.rank, self.size, self.connection = rank, size, object()

    def begin(self, call):
        return call(20.0, self.connection)

    def wait_for(self, work):
        work.wait()


def messages_of(groups):
    messages = [ByPipes(group) for group in groups]
    told = [each.handshake() for each in messages]
    for each in messages:
        each.meet(told)
    return messages


def test_a_rank_whose_group_is_lost_ends_what_others_wait_for(monkeypatch):
    def lose(work):
        raise GroupLost("time is up")

    groups = [Connection(rank, 2) for rank in range(2)]
    first, second = messages_of(groups)
    mine, theirs = first.tell(7), second.tell(8)
    assert theirs.wait() == [7, 8]
    monkeypatch.setattr(groups[1], "wait_for", lose)
    with pytest.raises(GroupLost, match="time is up"):
        second.exchange(b"never whole")
    assert mine.wait() == [7, 8]  # the other rank had sent these before
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        first.exchange(b"")


class Meeting:
    """The messages of two ranks that are threads, by a way of its own."""

    def __init__(self):
        self.barrier, self.messages = threading.Barrier(2), {}

    def of(self, rank):
        def gather(message):
            self.messages[rank] = message
            self.barrier.wait(20.0)
            gathered = [self.messages[0], self.messages[1]]
            self.barrier.wait(20.0)
            return gathered

        return gather


def reconnect(groups, messages):
    meeting = Meeting()
    for rank, group in enumerate(groups):
        group.all_gather_bytes = meeting.of(rank)
    threads = [threading.Thread(target=each.reconnect) for each in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)


def test_what_was_sent_before_ranks_were_connected_again_counts_no_more():
    groups = [Connection(rank, 2) for rank in range(2)]
    first, second = messages_of(groups)
    for number in range(3):
        reconnect(groups, (first, second))
        second.tell(100 + number)  # rank 0 does not read it before the next connection
    numbers = first.tell(7), first.tell(8), second.tell(9)
    assert [each.wait() for each in numbers] == [[7, 102], [8, 9], [8, 9]]


@pytest.mark.parametrize("function", ["_Way._sort", "os.read", "_write", "_Channel.take"])
def test_whatever_an_exception_tore_ranks_that_are_connected_again_go_on(monkeypatch, function):
    groups = [Connection(rank, 2) for rank in range(2)]
    first, second = messages_of(groups)
    second.tell(1)
    with monkeypatch.context() as patched:
        patched.setattr(f"zero.comm.pipes.{function}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.tell(2).wait()
    with pytest.raises(RuntimeError, match="broke off in the midst of a message"):
        first.tell(3)
    for _ in range(2):
        reconnect(groups, (first, second))
        numbers = first.tell(7), second.tell(9)
        assert [each.wait() for each in numbers] == [[7, 9], [7, 9]]


def test_messages_over_a_connection_that_was_only_begun_are_refused():
    groups = [Connection(rank, 2) for rank in range(2)]
    messages = messages_of(groups)
    numbers = [each.tell(7 + rank) for rank, each in enumerate(messages)]
    assert [each.wait() for each in numbers] == [[7, 8], [7, 8]]
    messages[1].tell(3)  # stale
    groups[0].connection = object()
    for call in (lambda: messages[0].exchange(b""), lambda: messages[0].tell(1)):
        with pytest.raises(RuntimeError, match="connected again, but not all of the way"):
            call()


def test_a_thread_gets_what_another_one_has_read():
    first, second = connected(2)
    calls = [first.call(channel, b"", 20.0) for channel in (0, 1)]
    found = {}
    waiting = [threading.Thread(target=lambda at=at: found.update({at: got(calls[at])})) for at in (0, 1)]
    for thread in waiting:
        thread.start()
    second.call(1, b"one", 20.0)
    second.call(0, b"zero", 20.0)
    for thread in waiting:
        thread.join(20.0)
    assert found == {0: [b"", b"zero"], 1: [b"", b"one"]}


def test_a_forked_child_holds_no_pipe_open_beyond_the_end_of_its_parent():
    first, second = connected(2)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"1")
        signal.pause()
    try:
        os.read(told, 1)
        second.close()
        with pytest.raises(RuntimeError, match="connection closed by rank 1"):
            first.call(0, b"", 20.0).wait()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


@pytest.mark.parametrize("closes", [True, False])
def test_no_descriptor_is_left(closes):
    before = descriptors()
    ranks = connected(3)
    assert len(descriptors() - before) == 12  # both ends of six pipes
    if closes:
        for pipes in ranks:
            pipes.close()
            pipes.close()
    ranks = pipes = None
    gc.collect()
    assert descriptors() == before


def test_what_cannot_be_opened_is_an_error_that_leaves_nothing():
    before = descriptors()
    first, second = Pipes(0, 2, 1), Pipes(1, 2, 1)
    told = [first.handshake(), second.handshake()]
    second.close()
    with pytest.raises(OSError, match="/proc/"):
        first.meet(told)
    first.close()
    assert descriptors() == before
