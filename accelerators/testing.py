"""The contract that every accelerator keeps, as tests. A backend's author runs it with three lines:

    from accelerators.testing import AcceleratorContract
    class TestMine(AcceleratorContract):
        accelerator = MyAccelerator             # the class, a function that makes one, an object, or a registered name

What a device may lack (streams, pinning, bf16, fp64, memory figures) it may lack here too: the tests ask what it says of itself
and hold it to that. Those at the end start two ranks on the device; where it has no collectives of its own, nothing has to be
brought for them. Where a device cannot be used at all, each test is skipped with its reason.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from accelerators.contract import probes, ranks
from accelerators.contract.advice import override
from accelerators.contract.probes import MIB
from accelerators.interface import FLOATING_DTYPES, Accelerator, peak_of
from accelerators.memory import MemoryReading


class AcceleratorContract:
    """The tests that every accelerator passes. Subclass it, and set `accelerator`."""

    accelerator: Any = None

    @pytest.fixture
    def it(self) -> Iterator[Accelerator]:
        made = ranks.usable(type(self).accelerator)  # from the class, so that a function is not taken for a method
        index = made.current_index()
        yield made
        made.set_index(index)

    # types -------------------------------------------------------------------------------------------------------

    def test_every_answer_has_exactly_the_type_that_the_interface_names(self, it: Accelerator) -> None:
        answers: dict[type, list[Any]] = {
            str: [it.name, it.communication_backend, it.compile_backend],
            bool: [it.is_available(), it.is_synchronous, it.can_pin, it.supports(torch.float32)],
            int: [it.device_count(), it.current_index()],
            torch.device: [it.device(), it.device(it.current_index())],
            torch.dtype: [it.preferred_dtype(), it.norm_dtype()],
            tuple: [it.supported_dtypes()],
            MemoryReading: [it.memory(), it.memory(it.current_index())],
        }
        for kind, values in answers.items():
            wrong = f"Override what gives one of {values}, so that each is a {kind.__name__} and of no subclass"
            assert [type(value) for value in values] == [kind] * len(values), wrong
        assert it.visible_devices_variable is None or type(it.visible_devices_variable) is str
        for figure in ("total", "available", "allocated", "peak"):
            assert type(getattr(it.memory(), figure)) in (int, type(None)), figure

    def test_no_member_of_the_interface_is_called_differently(self, it: Accelerator) -> None:
        for name, ours in vars(Accelerator).items():
            member = inspect.getattr_static(type(it), name)
            if inspect.isfunction(ours) and not name.startswith("_"):
                assert probes.parameters(member) == probes.parameters(ours), (
                    f"{type(it).__name__}.{name} differs from Accelerator.{name}"
                )

    @override("unavailable_reason")
    def test_what_is_available_gives_no_reason_against_it(self, it: Accelerator) -> None:
        assert it.is_available() and it.unavailable_reason() is None

    # devices -----------------------------------------------------------------------------------------------------

    @override("device_count", "current_index")
    def test_there_is_a_device_and_one_is_current(self, it: Accelerator) -> None:
        assert 0 <= it.current_index() < it.device_count()

    @override("device", "device_count")
    def test_a_tensor_lies_on_the_device_that_was_named(self, it: Accelerator) -> None:
        for index in range(it.device_count()):
            device = it.device(index)
            assert device.type == it.name
            assert torch.ones(2, device=device).device == device == torch.device(str(device))
            assert torch.ones(2).to(device).device == device

    @override("identity")
    def test_devices_are_told_apart(self, it: Accelerator) -> None:
        identities = [it.identity(index) for index in range(it.device_count())]
        assert all(type(identity) is str and identity for identity in identities)
        assert len(set(identities)) == len(identities) and it.identity() == identities[it.current_index()]

    @override("set_index", "current_index")
    def test_the_current_device_is_the_one_that_was_set(self, it: Accelerator) -> None:
        for index in reversed(range(it.device_count())):
            it.set_index(index)
            assert it.current_index() == index
            assert it.device() == it.device(index) == torch.ones(1, device=it.device()).device

    @override("set_index", "current_index")
    def test_setting_a_device_in_a_thread_leaves_the_others_alone(self, it: Accelerator) -> None:
        it.set_index(0)
        for index in range(it.device_count()):
            assert probes.in_thread(partial(probes.set_and_ask, it, index)) == index
            assert it.current_index() == 0

    @pytest.mark.parametrize("index", ["0", True, 1.0])
    @override("_check_index")
    def test_an_index_of_another_type_is_refused(self, it: Accelerator, index: Any) -> None:
        for ask in (it.set_index, it.device, it.memory, it.synchronize):
            with pytest.raises(TypeError, match=r"^Cannot .+: .+\. Pass"):
                ask(index)

    @override("device_count")
    def test_an_index_beyond_the_devices_is_refused_in_three_parts(self, it: Accelerator) -> None:
        count = it.device_count()
        for index in (count, -1):
            for ask in (it.set_index, it.device, it.memory):
                with pytest.raises(ValueError, match=rf"^Cannot .*{index} .*: .*{count}.*\. Pass"):
                    ask(index)

    # memory ------------------------------------------------------------------------------------------------------

    @override("read_memory")
    def test_a_reading_agrees_with_itself(self, it: Accelerator) -> None:
        held = torch.ones(MIB, device=it.device())
        reading = it.memory()
        it.synchronize()
        figures = (reading.total, reading.available, reading.allocated, reading.peak)
        assert all(figure is None or figure >= 0 for figure in figures)
        if reading.total is not None and reading.available is not None:
            assert reading.available <= reading.total
        if reading.peak is not None and reading.allocated is not None:
            assert reading.peak >= reading.allocated >= held.nbytes // 2

    @override("read_memory")
    def test_allocated_memory_rises_and_falls_with_what_is_held(self, it: Accelerator) -> None:
        size = probes.size_for(it)
        before = probes.figure(it, "allocated")
        held = probes.hold(it, size)
        during = probes.figure(it, "allocated")
        del held
        after = probes.figure(it, "allocated")
        assert 0.9 * size <= during - before <= 1.1 * size + 8 * MIB
        assert abs(after - before) <= 0.1 * size + 8 * MIB

    @override("read_memory")
    def test_available_memory_falls_by_what_is_taken(self, it: Accelerator) -> None:
        if it.device().type == "cpu":
            pytest.skip("every process of the host shares its memory, so what one of them takes does not show")
        size = probes.size_for(it)
        before = probes.figure(it, "available")
        held = probes.hold(it, size)
        assert before - probes.figure(it, "available") >= 0.8 * held.nbytes

    @override("read_memory")
    def test_available_memory_under_a_cap_falls_by_what_is_taken(
        self, it: Accelerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = probes.size_for(it)
        monkeypatch.setenv("ACCELERATOR_MEMORY", str(probes.figure(it, "allocated") + 2 * size))
        before = probes.figure(it, "available")
        held = probes.hold(it, size)
        assert before - probes.figure(it, "available") >= 0.8 * held.nbytes

    @override("read_memory", "reset_peak_memory")
    def test_the_peak_is_the_high_water_mark_and_not_a_sample(self, it: Accelerator) -> None:
        size = probes.size_for(it)
        it.reset_peak_memory()
        if it.memory().peak_since != "last reset":
            assert it.memory().peak is None or it.memory().peak_since == "process start"
            pytest.skip(f"{it.name} has no resettable peak, and says so")
        before = probes.figure(it, "peak")
        probes.hold(it, size)  # and frees it: no question is asked while it is held
        assert probes.figure(it, "peak") >= before + 0.9 * size
        it.reset_peak_memory()
        assert probes.figure(it, "peak") <= before + 0.5 * size

    @override("read_memory", "reset_peak_memory")
    def test_the_peak_of_a_function_is_what_it_took_beyond_the_rest(self, it: Accelerator) -> None:
        size = probes.size_for(it)
        result, peak = peak_of(it, lambda: probes.hold(it, size).sum().item())
        assert result == size // 4
        if peak is not None:
            assert 0.9 * size <= peak <= 1.5 * size + 16 * MIB

    @override("read_memory")
    def test_accelerator_memory_caps_what_is_reported(self, it: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        real = it.memory()
        monkeypatch.setenv("ACCELERATOR_MEMORY", "96MiB")
        capped = it.memory()
        assert capped.total == 96 * MIB
        assert capped.available is not None
        assert capped.available <= max(0, 96 * MIB - (capped.allocated or 0) + MIB)
        monkeypatch.setenv("ACCELERATOR_MEMORY", "1024TiB")
        assert it.memory().total == (real.total if real.total is not None else 1024 << 40)

    @override("empty_cache")
    def test_emptying_the_cache_harms_nothing(self, it: Accelerator) -> None:
        held = torch.ones(1000, device=it.device())
        it.empty_cache()
        assert held.sum().item() == 1000

    # order -------------------------------------------------------------------------------------------------------

    @override("has_streams", "new_stream", "new_event", "in_stream", "synchronize")
    def test_work_in_a_stream_is_there_after_waiting_for_it_in_every_way(self, it: Accelerator) -> None:
        def by_event(stream: Any) -> None:
            event = it.new_event()
            event.record(stream)
            event.synchronize()
            assert event.query() is True

        def by_current_stream(stream: Any) -> None:
            it.current_stream().wait_stream(stream)
            it.current_stream().wait_event(stream.record_event())

        waits: list[Callable[[Any], None]] = [
            by_event, by_current_stream, lambda stream: stream.synchronize(), lambda stream: it.synchronize()
        ]  # fmt: skip
        for wait in waits:
            stream, x = it.new_stream(), torch.full((256, 256), 2.0, device=it.device())
            stream.wait_stream(it.current_stream())
            with it.in_stream(stream):
                y = (x @ x).sum()
            wait(stream)
            assert y.item() == 4.0 * 256**3

    @override("is_synchronous")
    def test_work_is_done_when_a_call_returns_on_the_cpu_and_not_where_streams_order_it(self, it: Accelerator) -> None:
        assert it.is_synchronous if it.device().type == "cpu" else not (it.is_synchronous and it.has_streams)

    @override("in_stream", "current_stream")
    def test_in_stream_makes_a_stream_current_and_puts_the_old_one_back(self, it: Accelerator) -> None:
        for index in range(it.device_count()):
            before, stream = it.current_stream(), it.new_stream(index)
            with pytest.raises(KeyError), it.in_stream(stream) as entered:
                assert entered is stream and it.current_stream(index) == stream
                raise KeyError
            assert it.current_stream() == before
            assert it.current_index() == 0 or it.device_count() == 1

    @override("new_event")
    def test_the_time_between_two_events_is_in_milliseconds_and_within_the_hosts(self, it: Accelerator) -> None:
        it.synchronize()
        began = time.perf_counter()
        start, end = it.new_event(timing=True), it.new_event(timing=True)
        start.record()
        x = torch.ones(512, 512, device=it.device())
        for _ in range(4):
            x = x @ x / 512
        time.sleep(0.01)
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        assert type(elapsed) is float
        assert 0 < elapsed <= (time.perf_counter() - began) * 1e3 + 1
        assert x[0, 0].item() == 1

    @override("synchronize", "can_pin")
    def test_a_copy_to_the_host_and_back_is_whole_once_waited_for(self, it: Accelerator) -> None:
        source = torch.arange(100_000, dtype=torch.float32)
        on_device = it.pin(source).to(it.device(), non_blocking=True)
        back = it.pin(torch.zeros_like(source))
        back.copy_(on_device, non_blocking=True)
        it.synchronize()
        assert torch.equal(back, source)

    @override("with_own_storage", "has_dlpack")
    def test_a_stretch_with_a_storage_of_its_own_is_the_same_memory_and_keeps_it(self, it: Accelerator) -> None:
        line = torch.arange(1000, dtype=torch.float32).to(it.device())
        stretch = it.with_own_storage(line[100:200])
        assert torch.equal(stretch.cpu(), torch.arange(100.0, 200.0))
        if stretch.untyped_storage().nbytes() != stretch.nbytes:  # there is no way to that here
            assert stretch.untyped_storage().data_ptr() == line.untyped_storage().data_ptr()
        line[150] = -1.0
        stretch[0] = -2.0
        assert line[100].item() == -2.0 and stretch[50].item() == -1.0
        assert it.with_own_storage(line[5:5]).numel() == 0
        del line
        others = [torch.zeros(1000, device=it.device()) for _ in range(8)]  # which would take memory that is free
        assert stretch[50].item() == -1.0 and stretch.sum().item() == sum(range(101, 200)) - 150 - 1 - 2
        assert all(not other.any().item() for other in others)

    # numbers -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", FLOATING_DTYPES, ids=str)
    @override("supports")
    def test_a_dtype_is_supported_exactly_when_it_computes(self, it: Accelerator, dtype: torch.dtype) -> None:
        assert type(it.supports(dtype)) is bool
        assert it.supports(dtype) == probes.computes_in(dtype, it.device())
        assert (dtype in it.supported_dtypes()) == it.supports(dtype)

    @override("supports")
    def test_a_dtype_without_arithmetic_is_not_supported(self, it: Accelerator) -> None:
        assert it.supports(torch.bool) is False

    @override("preferred_dtype", "norm_dtype")
    def test_the_preferred_dtypes_are_supported_ones(self, it: Accelerator) -> None:
        assert it.supports(it.preferred_dtype())
        assert it.norm_dtype() == (torch.float64 if it.supports(torch.float64) else torch.float32)
        x = torch.full((64,), 3.0, device=it.device())
        assert x.to(it.norm_dtype()).square().sum().item() == 64 * 9

    @override("manual_seed")
    def test_a_seed_decides_the_numbers_of_host_and_device(self, it: Accelerator) -> None:
        assert probes.drawn_after(it, lambda: it.manual_seed(7)) == probes.drawn_after(it, lambda: it.manual_seed(7))
        assert probes.drawn_after(it, lambda: it.manual_seed(7)) != probes.drawn_after(it, lambda: it.manual_seed(8))

    @override("rng_state", "set_rng_state")
    def test_the_random_state_comes_back_on_host_and_device(self, it: Accelerator) -> None:
        it.manual_seed(1)
        torch.rand(3, device=it.device())
        states = it.rng_state()
        assert all(type(name) is str and isinstance(state, torch.Tensor) for name, state in states.items())
        first = probes.drawn_after(it, lambda: None)
        assert probes.drawn_after(it, lambda: it.set_rng_state(states)) == first
        assert probes.drawn_after(it, lambda: it.set_rng_state({**states, "another": torch.zeros(1)})) == first

    # host memory -------------------------------------------------------------------------------------------------

    @override("can_pin", "pin")
    def test_pinned_memory_is_pinned_and_the_same_numbers(self, it: Accelerator) -> None:
        it.forget_answers()  # a try that failed before may have turned it off
        tensor, said = torch.arange(1000.0), it.can_pin
        pinned = it.pin(tensor)
        assert torch.equal(pinned, tensor)
        assert pinned.is_pinned() == said == it.can_pin
        assert (pinned is tensor) == (not said)
        assert it.pin(pinned) is pinned
        assert it.pin(torch.empty(0)).numel() == 0

    @override("pin")
    def test_pinning_can_be_turned_off(self, it: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(it, "can_pin", False)
        tensor = torch.ones(10)
        assert it.pin(tensor) is tensor

    @override("pin")
    def test_a_device_tensor_is_not_taken_for_host_memory(self, it: Accelerator) -> None:
        tensor = torch.ones(2, device=it.device())
        if tensor.device.type == "cpu":
            assert it.pin(tensor) is tensor
        else:
            with pytest.raises(ValueError, match=r"^Cannot .+: "):
                it.pin(tensor)

    # ranks -------------------------------------------------------------------------------------------------------

    @pytest.fixture
    def two_ranks(self, it: Accelerator) -> list[dict[str, Any]]:
        if (reason := ranks.why_not(it)) is not None:
            pytest.skip(reason)
        seen = ranks.run(ranks.subject_of(type(self)))
        assert seen.failure is None, seen.failure
        return seen.by_rank

    @override("communication_backend")
    def test_two_ranks_add_gather_and_exchange(self, request: pytest.FixtureRequest) -> None:
        for rank, seen in enumerate(request.getfixturevalue("two_ranks")):
            assert seen["sum"] is True
            assert seen["gathered"] == [0.0, 1.0, 1.0]
            assert seen["exchanged"] == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]

    @override("communication_backend", "has_streams", "new_stream", "current_stream", "in_stream", "new_event")
    def test_a_collective_comes_between_what_it_reads_and_what_reads_its_result(self, request: pytest.FixtureRequest) -> None:
        assert [seen["ordered"] for seen in request.getfixturevalue("two_ranks")] == [6.0, 6.0]

    @override("communication_backend")
    def test_a_rank_that_does_not_come_is_an_error_within_the_time_limit(self, request: pytest.FixtureRequest) -> None:
        alone, absent = request.getfixturevalue("two_ranks")
        assert alone["alone"] and absent["alone"] is None
