"""What a profiler shows of the way of a gradient."""

import torch

from tests.promises.loops import alone, one_step


def test_a_profiler_shows_the_seven_stops_by_their_names():
    model, optimizer = alone()
    one_step(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(model, optimizer, step=1)
    shown = {event.key: event.count for event in profile.key_averages() if event.key.startswith("zero.")}
    assert set(shown) == {f"zero.{name}" for name in ("ready", "collect", "reduce", "keep", "settle", "step", "publish")}
    assert shown["zero.ready"] == shown["zero.collect"] == len(list(model.parameters()))
