"""Rounds: what leaves when, in which order, and what happens to whatever comes late, twice or not at all."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import accelerators
from tests import faults
from tests.zero.runtime.wires import Wire
from zero.memory.addresses import starts_where
from zero.memory.formats import ParamFormat
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.home import DeviceHome
from zero.memory.homes.registry import Homes
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.plan.layout import FlatLayout, ParamSpec
from zero.plan.scaling import Scaling
from zero.window import pace
from zero.window.agreement import Counts, agree
from zero.window.inflight import InflightReductions
from zero.window.rounds import Reducer

NUMEL = 16  # the elements of each parameter: one bucket each for one rank in fp32


class Bench:
    """A reducer of three parameters, a bucket each, whose wire notes what is sent. Bucket b holds parameter 2 - b."""

    def __init__(self, dtype="float32", size=2, per_bucket=1, accelerator=None):
        item = 4 if dtype == "float32" else 2
        self.numel = 64 // item
        specs = [ParamSpec(f"p{index}", (self.numel,), dtype) for index in range(3 * per_bucket)]
        self.layout_ref = LayoutRef(FlatLayout.build(specs, 1, 64 * per_bucket))
        self.wire = Wire(size)
        self.dtype = getattr(torch, dtype)
        accelerator = accelerator or accelerators.get("cpu")
        self.staging = Staging(accelerator, self.dirty)
        self.shard = GradientShard(self.layout_ref, Homes(accelerators.get("cpu"), torch.device("cpu")))
        self.scaling = Scaling()
        flight = InflightReductions(self.layout_ref, self.wire, self.staging, self.shard, self.scaling)
        forms = [ParamFormat((self.numel,), None) for _ in specs]
        self.reducer = Reducer(self.layout_ref, forms, accelerator, self.staging, flight)

    def dirty(self, numel, dtype):
        return torch.full((numel,), float("nan"), dtype=dtype)

    def give(self, param, value, multiplier=None, apart=False):
        self.reducer.collect(param, torch.full((self.numel,), float(value), dtype=self.dtype), multiplier, apart)
        self.reducer.advance()

    def settle(self, used=0, order=(), used_here=None, **counts):
        """As if every rank had done what this one did."""
        reducer = self.reducer
        mine = Counts(
            "step", 0, 0, bytes(8), sent=reducer.sent, contributed=True, used=used, open=reducer.open_buckets,
            wide=reducer.wide_buckets, order=order or reducer.arrival_order, **counts,
        )  # fmt: skip
        agreement = agree([mine], reducer.order, ["p0", "p1", "p2"], lambda *_: "")
        reducer.send_missing_rounds(agreement.rounds, counts=not agreement.discard)
        reducer.flush(agreement.rest, agreement.wide)
        reducer.update_order(agreement.order, agreement.used, used if used_here is None else used_here)

    def sent(self):
        """Which buckets went out since the last look, and the first value of each."""
        gone, self.wire.sent = self.wire.sent, []
        return [(self.bucket_of(tensor), tensor[0].item()) for tensor in gone]

    def bucket_of(self, tensor):
        return tensor.numel()

    def values(self):
        return {index: share[0].item() for index, share in sorted(self.shard.shares.items())}


def test_a_full_bucket_leaves_at_once_and_one_whose_turn_it_is_not_waits():
    bench = Bench()
    bench.give(2, 5)
    assert [value for _, value in bench.sent()] == [5.0]
    bench.give(0, 7)  # bucket 2, and bucket 1 has not been
    assert bench.sent() == []
    bench.give(1, 6)
    assert [value for _, value in bench.sent()] == [6.0, 7.0]
    assert bench.values() == {0: 5.0, 1: 6.0, 2: 7.0}


def test_a_bucket_of_two_waits_for_both():
    bench = Bench(per_bucket=2)
    bench.give(5, 1)
    assert bench.sent() == []
    bench.give(4, 2)
    assert [value for _, value in bench.sent()] == [1.0]


def test_every_further_backward_runs_through_the_order_again():
    bench = Bench()
    for value in (1, 10):
        for param in (2, 1, 0):
            bench.give(param, value)
    assert bench.reducer.sent == 6
    assert bench.values() == {0: 11.0, 1: 11.0, 2: 11.0}


def test_what_a_rank_never_touches_goes_out_as_zeros_without_waiting():
    bench = Bench()
    for param in (2, 0):
        bench.give(param, 1)
    bench.settle(used=0b111, used_here=0b101, order=(0, 1, 2))  # another rank used what lies in bucket 1, this one did not
    bench.sent()
    bench.give(2, 2)
    bench.give(0, 2)
    assert [value for _, value in bench.sent()] == [2.0, 0.0, 2.0]


def test_a_window_without_gradients_teaches_nothing():
    bench = Bench()
    for param in (2, 1, 0):
        bench.give(param, 1)
    bench.settle(used=0b111, order=(2, 1, 0))
    bench.settle(used=0)
    assert bench.reducer.order == (2, 1, 0)
    bench.give(0, 1)
    assert bench.reducer.sent == 1


def test_a_wrong_guess_of_what_will_come_costs_no_gradient():
    bench = Bench(per_bucket=2)
    bench.give(5, 1)
    bench.settle(used=0b100000)
    bench.give(5, 1)  # all that is expected
    bench.give(4, 1)  # the surprise
    bench.settle(used=0b110000)
    share = bench.shard.share(0)
    assert share[0].item() == 2.0
    assert share[bench.numel].item() == 1.0


def test_what_is_discarded_is_received_and_not_kept():
    bench = Bench()
    bench.wire.holds_back = True
    bench.give(2, 4)
    bench.reducer.send_missing_rounds(1, counts=False)
    assert bench.values() == {}
    assert len(bench.reducer.inflight) == 0
    assert bench.staging.borrowed == 0


def test_what_is_in_flight_is_kept_in_the_order_in_which_it_was_sent():
    bench = Bench()
    bench.wire.holds_back = True
    for param in (2, 1, 0):
        bench.give(param, 1)
    assert len(bench.reducer.inflight) == 3
    assert bench.values() == {}
    bench.settle(used=0b111)
    assert bench.values() == {0: 1.0, 1: 1.0, 2: 1.0}
    assert bench.staging.borrowed == 0


class HostBeside(DeviceHome):
    """A host, in the memory of the same machine."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.mirrors = []

    def mirror(self, tensor):
        self.mirrors.append(torch.empty_like(tensor))
        return self.mirrors[-1]

    def give_back(self, mirror):
        self.mirrors = [one for one in self.mirrors if one is not mirror]
        mirror.fill_(float("nan"))


@pytest.mark.promise("M04")
@pytest.mark.parametrize(
    ("room", "comes_after_s", "expected"),
    [(0, 0.5, [0, 0.5] * 3), (0, 1e9, [0, pace.LONGEST_S, 0, 0, 0, 0]), (1 << 20, 0.5, [0] * 6)],
)
def test_on_the_host_a_rank_that_is_ahead_waits_for_others_as_long_as_that_helps(monkeypatch, room, comes_after_s, expected):
    bench, now, waited = Bench(), [0.0], []

    def sleep(seconds):
        now[0] += seconds
        bench.wire.holds_back = now[0] - began < comes_after_s

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    bench.staging.room = lambda: room
    for param in (2, 1, 0, 2, 1, 0):
        bench.wire.holds_back, began = True, now[0]
        bench.give(param, 1)
        waited.append(now[0] - began)
    bench.settle(used=0b111)
    assert bench.values() == {0: 2.0, 1: 2.0, 2: 2.0}
    assert waited == pytest.approx(expected, abs=0.01)


@pytest.mark.promise("M04")
def test_waits_in_vain_get_shorter_and_windows_without_one_make_them_longer_again(monkeypatch):
    """Ranks that branch apart at every step would wait the longest time at each of them."""
    now, waited, waits = [0.0], [], pace.Patience()

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    for is_in_vain in (*[True] * 4, *[False] * 60, True):
        began = now[0]
        waits.wait(lambda: not is_in_vain)  # noqa: B023
        waited.append(now[0] - began)
        waits.one_came()
        waits.end_window()
    longest = pace.LONGEST_S
    assert waited == pytest.approx([longest, longest / 4, longest / 16, longest / 64, *[0] * 60, longest], abs=0.01)


@pytest.mark.promise("M04")
@pytest.mark.parametrize(("room", "at_once"), [(0, 2), (3 * 64, 3), (1 << 20, 12)])
def test_rounds_of_a_rank_that_is_ahead_wait_on_the_host_and_leave_in_their_order(room, at_once):
    bench = Bench()
    host = bench.shard.homes.host = HostBeside()
    bench.wire.holds_back, bench.staging.room = True, lambda: room
    for window in range(4):
        for param in (2, 1, 0):
            bench.give(param, 10 ** window)
    assert len(bench.reducer.inflight) == 12 and len(host.mirrors) == 12 - at_once
    assert bench.staging.borrowed == len(bench.wire.sent) == at_once
    bench.settle(used=0b111)
    assert bench.values() == {0: 1111.0, 1: 1111.0, 2: 1111.0}
    assert [value for _, value in bench.sent()] == [1.0] * 3 + [10.0] * 3 + [100.0] * 3 + [1000.0] * 3
    assert not host.mirrors and not bench.staging.borrowed


@pytest.mark.promise("M04")
def test_what_waits_on_the_host_is_let_go_with_what_is_abandoned():
    bench = Bench()
    host = bench.shard.homes.host = HostBeside()
    bench.wire.holds_back, bench.staging.room = True, lambda: 0
    for param in (2, 1, 0):
        bench.give(param, 1)
    assert len(host.mirrors) == 1
    bench.reducer.restart()
    assert not host.mirrors and not len(bench.reducer.inflight) and bench.values() == {}


class FarBehind:
    """The one stream of a device that does nothing before the host waits for it, and then as much as the host waits for."""

    is_synchronous = False

    def __init__(self):
        self.given = self.done = 0

    def current_stream(self, index=None):
        return self

    def record_event(self):
        self.given += 1
        return SimpleNamespace(synchronize=partial(self.go_on, self.given))

    def go_on(self, until):
        self.done = max(self.done, until)

    def wait_stream(self, other):
        assert other is self


@pytest.mark.promise("M04")
@pytest.mark.parametrize("others_are_late", [False, True])
def test_a_host_far_ahead_of_its_device_waits_for_that_and_not_for_other_ranks(others_are_late):
    device = FarBehind()
    bench = Bench(accelerator=device)
    send, most = bench.wire.reduce_scatter, []

    def over_when_the_device_is(bucket, sum_dtype):
        held, number = send(bucket, sum_dtype), device.given + 1  # the event of this round
        held.done = lambda: device.done > number and not others_are_late
        return held

    bench.reducer.inflight._narrowings[0]._reduce = over_when_the_device_is
    with faults.host_ahead_at_most(0):  # two buckets are allowed all the same
        for param in (2, 1, 0) * 4:
            bench.give(param, 1)
            most.append(len(bench.reducer.inflight))
    assert most == ([*range(1, 13)] if others_are_late else [1, 2, *[3] * 10])
    assert device.done == 10, "the device need not come to the last two"


class TwoStreams:
    """An accelerator whose current stream a test chooses; streams note whom they waited for."""

    is_synchronous = False

    def __init__(self):
        self.waits = []
        self.one, self.other = (SimpleNamespace(wait_stream=partial(self.note, name), name=name) for name in ("one", "other"))
        self.current = self.one

    def current_stream(self, index=None):
        return self.current

    def note(self, waiter, awaited):
        self.waits.append((waiter, awaited.name))


def test_a_bucket_leaves_after_the_streams_of_all_gradients_in_it():
    streams = TwoStreams()
    bench = Bench(per_bucket=2, accelerator=streams)
    bench.give(5, 1)
    streams.current = streams.other
    assert ("other", "one") not in streams.waits
    bench.give(4, 2)
    assert len(bench.wire.sent) == 1
    assert ("other", "one") in streams.waits


# Narrow -----------------------------------------------------------------------------------------------------------------


def test_several_that_travel_as_their_sum_are_sent_when_the_window_settles():
    bench = Bench("bfloat16")
    for value in (256, 1, 1):
        for param in range(3):
            bench.give(param, value, apart=True)
    assert bench.wire.sent == []
    assert bench.reducer.num_wide_bytes == 3 * bench.numel * 4
    bench.settle(used=0b111)
    assert bench.wire.sent[-1].dtype == torch.float32
    assert bench.values() == {0: 258.0, 1: 258.0, 2: 258.0}
    assert (len(bench.wire.sent), bench.staging.borrowed) == (3, 0)


def test_in_fp32_as_well_a_bucket_leaves_after_the_streams_of_all_gradients_in_it():
    streams = TwoStreams()
    bench = Bench("bfloat16", accelerator=streams)
    bench.give(0, 1, apart=True)
    streams.current = streams.other
    assert ("other", "one") not in streams.waits
    bench.settle(used=0b001)
    assert ("other", "one") in streams.waits


def test_what_is_absent_in_fp32_travels_as_zeros_and_of_several_multipliers_each_has_its_own():
    bench = Bench("bfloat16", per_bucket=2)
    bench.give(5, 3, multiplier=2.0, apart=True)
    bench.give(5, 5, multiplier=4.0, apart=True)
    bench.settle(used=0b100000)
    assert bench.wire.sent[-1].sum().item() == bench.numel * 26.0  # and no NaN of whoever had this memory


def test_what_is_weighted_travels_in_fp32():
    bench = Bench("bfloat16")
    bench.give(2, 3, multiplier=1.0 + 2.0**-12)
    assert bench.reducer.wide_buckets == 0b1
    bench.settle(used=0b100)
    assert bench.wire.sent[-1].dtype == torch.float32
    assert bench.values()[0] == pytest.approx(3 * (1.0 + 2.0**-12), rel=1e-7)


# Forgetting -------------------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_given_back_and_not_sent():
    bench = Bench("bfloat16")
    bench.give(0, 1)
    bench.give(0, 1)
    assert bench.staging.borrowed == 2
    bench.reducer.drop()
    assert bench.staging.borrowed == 0
    assert (bench.reducer.open_buckets, bench.reducer.wide_buckets) == (0, 0)


def test_a_parameter_that_is_dropped_leaves_the_others_of_its_bucket():
    bench = Bench("bfloat16", per_bucket=2)
    bench.give(4, 1)
    bench.give(4, 1)
    bench.give(0, 9)
    bench.reducer.drop_param(4)
    bench.settle(used=0b000001)
    assert bench.shard.share(2).max().item() == 9.0
    assert bench.shard.share(0).abs().sum().item() == 0.0
    bench.give(4, 3)
    bench.settle(used=0b010000)
    assert bench.shard.share(0).max().item() == 3.0


def test_bytes_on_the_wire_are_counted():
    bench = Bench()
    bench.give(2, 1)
    assert bench.reducer.inflight.num_bytes == 64




def test_a_buffer_keeps_its_views_for_the_same_bucket_and_never_for_another():
    staging = Bench().staging
    first, second = (staging.borrow(16, torch.float32, purpose=bucket) for bucket in (0, 1))
    staging.views_of(first)[7] = kept = first[:8]
    for buffer in (first, second):
        staging.give_back(buffer)
    again = staging.borrow(16, torch.float32, purpose=0)
    assert staging.views_of(again) == {7: kept} and starts_where(again, kept)
    staging.give_back(again)
    staging.release(keep=1)
    for bucket in (1, 0):  # the one buffer that is left was bucket 1's
        other = staging.borrow(16, torch.float32, purpose=bucket)
        assert staging.views_of(other) == {}
        staging.give_back(other)
