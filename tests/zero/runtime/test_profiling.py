"""What a profiler and a clock show of the way of a gradient."""

import gc
from unittest import mock

import pytest
import torch

import accelerators
from tests import ranks
from tests.devices import needs_sim
from tests.promises.loops import alone, one_step
from tests.promises.offloads import adamw, place_of
from tests.zoo.case import real_mlp
from zero import shard
from zero.profiling import STOPS, Clock, during


def test_a_profiler_shows_the_seven_stops_by_their_names():
    model, optimizer = alone()
    one_step(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(model, optimizer, step=1)
    shown = {event.key: event.count for event in profile.key_averages() if event.key.startswith("zero.")}
    assert set(shown) == {f"zero.{name}" for name in STOPS}
    assert shown["zero.ready"] == shown["zero.collect"] == len(list(model.parameters()))


def profiled(rank, world, stage, shared):
    model = real_mlp()
    optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=stage, shared_memory=shared)
    for step in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            one_step(model, optimizer, step=step, rank=rank)
        names = {event.name for event in profile.events()}
    optimizer.close()  # ends the receive that was begun under the last profiler
    del profile
    gc.collect()
    return names


@pytest.mark.parametrize(("stage", "shared"), [(3, True), (3, False), pytest.param(2, False, marks=pytest.mark.full)])
def test_what_is_on_its_way_when_a_profiler_stops_is_none_of_its_works(stage, shared):
    """Else its end is noted in memory that is freed by then, and the process crashes at any time after."""
    for names in ranks.run(2, profiled, stage, shared, fresh=True):
        assert "zero.publish" in names and not any(name.startswith("gloo:") for name in names)


class Moments:
    """An accelerator whose events are recorded one millisecond after the other."""

    def __init__(self):
        self.made = 0

    def new_event(self, timing):
        assert timing
        self.made += 1
        at = self.made
        event = mock.Mock(at=at)
        event.elapsed_time = lambda other: float(other.at - at)
        return event

    def synchronize(self):
        pass


def test_every_moment_belongs_to_the_innermost_of_what_goes_on():
    clock = Clock(Moments())
    with during("backward", clock):  # from the first moment
        with during("collect", clock):  # the second
            with during("reduce", clock):  # the third
                pass  # the fourth
        with during("collect", clock):  # the fifth was the end of the first collect
            pass
    assert clock.read() == {"backward": 3.0, "collect": 3.0, "reduce": 1.0}
    with pytest.raises(KeyError), during("step", clock):
        raise KeyError
    assert clock.read() == {"backward": 3.0, "collect": 3.0, "reduce": 1.0, "step": 1.0}


def test_reading_in_the_middle_loses_nothing_and_what_waits_is_added_up_by_itself():
    clock = Clock(Moments())
    with during("forward", clock):
        assert clock.read() == {"forward": 1.0}
        assert clock.read() == {"forward": 2.0}
    assert clock.read() == {"forward": 3.0}
    with mock.patch("zero.profiling._MANY", 10):
        for _ in range(100):
            with during("keep", clock):
                pass
            assert len(clock._marks) <= 12
    assert clock.read()["keep"] == 100.0


def test_nothing_is_marked_where_nobody_asks():
    model, optimizer = alone()
    with mock.patch.object(Clock, "begin", side_effect=AssertionError("a mark")):
        one_step(model, optimizer)
    clock = optimizer.sharding.clock()
    assert clock is optimizer.sharding.clock()
    one_step(model, optimizer, step=1)
    assert set(clock.read()) == set(STOPS)


def time_on_sim(rank, world):
    place = place_of(rank, "sim")
    with place:
        model = real_mlp()
        optimizer = shard(model, adamw(model), stage=2, bucket_bytes=64, timeout_s=20.0)
        clock = optimizer.sharding.clock()
        for step in range(2):
            optimizer.backward(model(torch.ones(3, 4) + step).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerators.get("sim").synchronize()
    times = clock.read()
    optimizer.close()
    return times


@needs_sim
def test_a_device_with_streams_is_timed_by_its_own_events():
    for times in ranks.run(2, time_on_sim, apart="sim"):
        assert set(times) == set(STOPS) and all(ms >= 0.0 for ms in times.values())
        assert times["settle"] > 0.0
