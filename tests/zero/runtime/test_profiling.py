"""What a profiler and a clock show of the way of a gradient."""

import gc
import logging
import re
from unittest import mock

import pytest
import torch

import accelerators
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.loops import alone, one_step
from tests.promises.offloads import adamw, place_of
from tests.zoo.case import real_mlp
from zero import shard
from zero.profiling import STOPS, Clock, during, first_of


def test_a_profiler_shows_the_seven_stops_by_their_names():
    model, optimizer = alone()
    one_step(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(model, optimizer, step=1)
    shown = [event.name for event in profile.events() if event.name.startswith("zero.")]
    assert {name.split()[0] for name in shown} == {f"zero.{name}" for name in STOPS}
    for stop in ("zero.ready", "zero.collect"):  # each gradient by its parameter's name
        assert sorted(name for name in shown if name.split()[0] == stop) == sorted(
            f"{stop} {name}" for name, _ in model.named_parameters()
        )
    assert {"zero.reduce bucket 0", "zero.keep bucket 0", "zero.step bucket 0", "zero.publish bucket 0"} <= {*shown}


def test_a_name_of_several_says_the_first_and_how_many_others_there_are():
    assert first_of(["bucket 3"]) == first_of(["bucket 3", "bucket 3"]) == "bucket 3"
    assert first_of(["bucket 3", "bucket 4", "bucket 3", "bucket 9"]) == "bucket 3 and 2 more"
    assert first_of([]) == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_no_name_is_made_where_nobody_looks(stage):
    model = real_mlp()
    optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=stage, keep_whole_numel=0, group=solo())
    with mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError("a name")):
        for step in range(2):
            one_step(model, optimizer, step=step)
    optimizer.close()


def names_of_rounds(rank, world):
    """Returns what a profiler shows, and the log of rounds, in a step at stage 3 whose weights no rank keeps."""
    model = real_mlp()
    optimizer = shard(
        model, torch.optim.AdamW(model.parameters()), stage=3, keep_whole_numel=0, gathered_bytes=0, bucket_bytes=64
    )
    one_step(model, optimizer, rank=rank)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("zero")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(model, optimizer, step=1, rank=rank)
    optimizer.close()
    return [event.name for event in profile.events()], [text for text in records if text.startswith("Round ")]


@pytest.mark.full
def test_weights_that_are_waited_for_and_rounds_have_their_names():
    everyone = ranks.run(2, names_of_rounds, fresh=True)
    for names, rounds in everyone:
        gathered = {name for name in names if name.startswith("zero.gather ")}
        assert gathered == {"zero.gather 0.bias and 1 more", "zero.gather 2.bias and 1 more"}
        sent = [name for name in names if re.fullmatch(r"zero.reduce bucket \d+", name)]
        assert sorted(int(name.split()[-1]) for name in sent) == sorted(int(text.split()[-1]) for text in rounds)
    assert everyone[0][1] == everyone[1][1]


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
