import pytest

from accelerators.streams import InOrderEvent, InOrderStream


@pytest.fixture
def finished():
    return []


@pytest.fixture
def stream(finished):
    return InOrderStream(lambda: finished.append(True))


def test_waiting_for_another_stream_of_one_queue_costs_nothing(stream, finished):
    stream.wait_stream(InOrderStream(lambda: None))
    stream.wait_event(InOrderEvent(lambda: None))
    assert not finished


def test_the_host_waits_for_the_whole_device(stream, finished):
    stream.synchronize()
    assert stream.query() is True
    assert len(finished) == 2


@pytest.mark.promise("X17")
def test_an_event_is_recorded_after_the_device_is_done_so_its_time_is_that_of_finished_work(stream, finished):
    start, end = stream.record_event(), InOrderEvent(lambda: finished.append("end"))
    end.record()
    assert finished == [True, "end"]
    assert 0 <= start.elapsed_time(end) < 1000
    assert end.elapsed_time(start) <= 0
    end.wait()
    end.synchronize()
    assert end.query() is True


def test_an_event_that_was_not_recorded_has_no_time(stream):
    with pytest.raises(ValueError, match=r"^Cannot measure the time .*: one was not recorded\. Call record"):
        stream.record_event().elapsed_time(InOrderEvent(lambda: None))
