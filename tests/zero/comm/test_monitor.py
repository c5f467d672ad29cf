"""What ranks find out about each other, with a store and no network."""

import datetime
import re
import threading

import pytest
import torch.distributed as dist

from zero.comm import health
from zero.comm import health as stores
from zero.comm.health import RankMonitor, StoreClient
from zero.errors import GroupLost


def watches(size=3, is_cheap=True):
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=5))
    return [RankMonitor(StoreClient(store), rank, size, is_cheap) for rank in range(size)]


def nobody(rank):
    return ""


def error():
    try:
        raise LookupError("no such batch")
    except LookupError as caught:
        return caught


class Place:
    def of(self):
        return ", at parameter 'w'"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """As little patience as a test needs."""
    monkeypatch.setattr(health, "_MEETING_S", 0.6)
    monkeypatch.setattr(health, "_LAST_WORDS_S", 0.1)
    yield
    for left in list(health._watching):
        left.close()


def test_who_left_word_is_told_with_its_error_and_its_place_before_anybody_is_looked_for():
    first, second, third = watches()
    place = Place()
    second.note("in a backward of step 3", place.of)
    assert not first.is_alarmed()
    second.report_exit(error())
    assert first.is_alarmed() and third.is_alarmed()  # without anybody's time limit
    third.note("somewhere")
    said = first.diagnose("noticed", lambda rank: False)
    words = r"rank 1 raised LookupError: no such batch \(.*test_monitor\.py:\d+\), in a backward of step 3, at parameter 'w'"
    assert re.fullmatch(words, said), said


def test_a_rank_of_which_a_thread_failed_says_so_itself_if_it_notices_first():
    """What that thread broke off, the main thread of the same rank may notice before any other rank."""
    first, second, _ = watches()
    first.report_exit(error())
    for who in (first, second):
        assert who.diagnose("noticed", lambda rank: False).startswith("rank 0 raised LookupError: no such batch")


def test_a_place_that_nobody_is_in_any_more_is_not_told():
    first, second = watches(2)
    place = Place()
    second.note("in a backward of step 3", place.of)
    second.note("in the update of step 3")
    second.report_exit(error())
    assert first.diagnose("noticed", lambda rank: False).endswith(", in the update of step 3")
    first, second = watches(2)
    second.note("in a backward of step 3", Place().of)  # the place is gone already
    second.report_exit(error())
    assert first.diagnose("noticed", lambda rank: False).endswith(", in a backward of step 3")


def test_a_rank_that_answers_the_alarm_is_there_and_the_one_that_does_not_is_named_with_what_it_was_doing():
    first, second, third = watches()
    for one in (first, second, third):
        one.note(f"doing {one._rank}")
    answering = threading.Thread(target=second.diagnose, args=("it failed (late)", lambda rank: False))
    answering.start()
    touched = []
    said = first.diagnose("it failed (late)", lambda rank: bool(touched.append(rank)))
    answering.join()
    assert touched.count(2) == 1  # in all that time
    assert said == "rank 2 was last seen doing 2, and did not come (it failed (late))"


def test_a_rank_whose_connection_is_closed_is_gone_and_that_is_known_before_the_meeting_is_over(monkeypatch):
    monkeypatch.setattr(health, "_MEETING_S", 600.0)
    first, second = watches(2)
    second.note("in the update of step 7")
    touched = []
    said = first.diagnose("noticed", lambda rank: touched.append(rank) or True)
    assert said == "rank 1 was last seen in the update of step 7, and is gone: its program ended or was killed"
    assert touched == [1]  # once, as a touch spoils the connection


@pytest.mark.parametrize("how", ["close", "report_rebuild"])
def test_a_rank_that_is_gone_is_told_before_those_that_went_their_way(how):
    first, second, third = watches()
    third.note("in the update of step 7")
    getattr(second, how)()
    said = first.diagnose("noticed", lambda rank: rank == 2)
    gone = "rank 2 was last seen in the update of step 7, and is gone: its program ended or was killed"
    words = {"close": "closed its group", "report_rebuild": "called rebuild()"}[how]
    assert said == f"{gone}; rank 1 {words}, before its first step"


def test_a_rank_that_is_gone_after_an_error_of_another_is_not_told():
    first, second, _ = watches()
    second.report_exit(error())
    said = first.diagnose("noticed", lambda rank: rank == 2)
    assert said.startswith("rank 1 raised LookupError: no such batch") and "is gone" not in said


def test_where_all_are_there_what_was_noticed_is_told():
    first, second = watches(2)
    answering = threading.Thread(target=second.diagnose, args=("seen", lambda rank: False))
    first.note("in a backward of step 3")
    second.note("in a save")
    answering.start()
    told = first.diagnose("it failed", lambda rank: False)
    answering.join()
    places = "rank 0 was last seen in a backward of step 3 and rank 1 was last seen in a save"
    assert told.endswith(f", though all ranks are there: {places}")  # by whichever was first


def test_what_the_first_found_is_what_all_say():
    first, second, _ = watches()
    said = []

    def look_while_the_first_is_faster(rank):
        said[:] = said or [first.diagnose("noticed", lambda rank: True)]
        return True

    assert second.diagnose("something else", look_while_the_first_is_faster) == said[0]
    assert said[0].startswith("rank 2 was last seen")


def test_lines_of_an_expensive_store_are_written_once():
    first, second = watches(2, is_cheap=False)
    second.note("first")
    second.note("second")
    assert first.diagnose("x", lambda rank: True).startswith("rank 1 was last seen first")


def test_all_meet_and_who_is_late_or_ended_before_is_named():
    first, second = watches(2)
    meeting = threading.Thread(target=second.wait_for_start, args=(5.0, nobody))
    meeting.start()
    first.wait_for_start(5.0, nobody)
    meeting.join()
    first, _, third = watches()
    third.note("there")
    with pytest.raises(GroupLost, match=r"Cannot connect 3 ranks: nothing was seen of rank 1 within 0.4 s"):
        first.wait_for_start(0.4, nobody)
    first, _ = watches(2)
    with pytest.raises(GroupLost, match=r"2 ranks: rank 1 raised it, before it sharded\. Start all"):
        first.wait_for_start(600.0, lambda rank: f"raised it, before it sharded{'!' * (rank != 1)}")


def test_a_rank_that_waits_for_others_to_start_asks_the_store_now_and_then():
    first, second = watches(2)
    asked, ask = [], first._store.ask
    first._store.ask = lambda call: asked.append(call) or ask(call)
    late = threading.Timer(0.5, second.note, args=("there",))
    late.start()
    first.wait_for_start(20.0, nobody)
    late.join()
    assert 2 < len(asked) < 50  # pauses of up to 50 ms; a loop without them asks thousands of times


def test_waiting_for_a_rank_that_is_late_prints_no_warning_of_the_store(capfd):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (RankMonitor(StoreClient(store), rank, 2, True) for rank in range(2))
    late = threading.Timer(0.8, second.note, args=("there",))
    late.start()
    first.wait_for_start(20.0, nobody)
    late.join()
    assert "waitForInput" not in capfd.readouterr().err


class Silent:
    """A store whose host does not answer."""

    def __init__(self):
        self.asked, self.told, self.answers = 0, 0, threading.Event()

    def check(self, keys):
        self.asked += 1
        self.answers.wait()
        return True

    def set(self, key, value):
        self.told += 1


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(stores, "_ANSWER_S", 0.05)
    store = Silent()
    yield store
    store.answers.set()


def test_a_store_that_does_not_answer_is_given_up_and_not_asked_again(silent):
    client = StoreClient(silent)
    alone, again = (RankMonitor(client, 0, 2, True) for _ in range(2))
    assert not alone.is_alarmed() and not alone.is_alarmed()
    assert silent.asked == 1
    assert "at a place that is not known" in alone.diagnose("x", lambda rank: True)
    others = "the process that holds the ranks' store, which is rank 0 or the launcher, does not answer (x)"
    assert again.diagnose("x", lambda rank: False) == others  # a rank that cannot be heard is not called late


def test_who_found_that_the_store_does_not_answer_found_it_for_all_that_use_its_connection(silent):
    """They would wait for the thread that waits for the answer."""
    whole = StoreClient(silent)
    first, second = (RankMonitor(StoreClient(silent, whole), 0, 2, True) for _ in range(2))
    second.note("in a backward of step 3")
    assert silent.told == 1
    assert not first.is_alarmed()
    second.note("in the update of step 3")
    second.report_exit(error())
    whole.tell("key", "value")
    assert not second.is_alarmed() and whole.line("key") is None
    with pytest.raises(GroupLost, match=r"Cannot connect the ranks: the process that holds their store, .* does not answer"):
        whole.count("groups", 60.0)
    assert (silent.asked, silent.told) == (1, 1)


def test_who_cannot_write_to_the_store_does_not_try_again(silent, monkeypatch):
    def refuse(key, value):
        silent.told += 1
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(silent, "set", refuse)
    client = StoreClient(silent)
    client.tell("key", "value")
    client.tell("key", "value")
    assert silent.told == 1 and client.is_lost


def test_no_thread_is_left_behind_by_a_question():
    answers = threading.Event()

    class Late:
        def check(self, keys):
            threading.Timer(0.1, answers.set).start()
            return answers.wait()

    assert RankMonitor(StoreClient(Late()), 0, 2, True).is_alarmed()
    assert not [thread for thread in threading.enumerate() if thread.name == "zero-call"]


def test_an_error_is_told_for_every_group_of_this_process_that_is_still_open():
    first, second = watches(2)
    second.close()
    health.leave(error())  # the error of the first one
    assert second.is_alarmed()
    first.close()
    health.leave(error())  # nobody is there to be told


def test_threads_of_a_rank_touch_the_connection_to_another_one_once():
    """A touch that finds nothing spoils the connection, which a second one would take for closed."""
    first, _ = watches(2)
    touched, said = [], []

    def is_gone(rank):
        touched.append(rank)
        return len(touched) > 1

    threads = [threading.Thread(target=lambda: said.append(first.diagnose("noticed", is_gone))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert touched == [1] and said[0] == said[1] and "did not come" in said[0]
