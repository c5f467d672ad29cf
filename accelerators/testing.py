"""The contract that every accelerator keeps, as tests. A backend's author runs it with three lines:

    from accelerators.testing import AcceleratorContract
    class TestMine(AcceleratorContract):
        accelerator = MyAccelerator             # the class, a function that makes one, an object, or a registered name

A device may lack streams, pinning, bf16, fp64 or memory figures: the tests ask what it says of itself and hold it to that. The
last ones start two ranks on the device, also if it has no collectives of its own. If the device cannot be used at all, each
test is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelerators import selection
from accelerators.interface import FLOATING_DTYPES, Accelerator
from accelerators.memory import MemoryReading
from accelerators.staged import is_staged

Check = TypeVar("Check", bound=Callable[..., Any])

MIB = 1 << 20
WORLD = 2
LARGE = 3 << 20  # elements, which the staged group cuts into several chunks
LIMIT = datetime.timedelta(seconds=60)
SHORT_LIMIT = datetime.timedelta(seconds=1)
END_S = 120.0


def override(*members: str) -> Callable[[Check], Check]:
    """Marks a check with the members of the accelerator that decide it. The text of a failure ends with their names."""

    def mark(check: Check) -> Check:
        @functools.wraps(check)
        def advised(*arguments: Any, **options: Any) -> Any:
            try:
                return check(*arguments, **options)
            except (Exception, pytest.fail.Exception) as error:
                _advise(error, f"Override {' or '.join(members)} in your subclass of accelerators.Accelerator.")
                raise

        return advised  # type: ignore[return-value]

    return mark


def _advise(error: BaseException, advice: str) -> None:
    """Adds a sentence to the text of an error."""
    said = str(error)
    if isinstance(error, pytest.fail.Exception):
        error.msg = f"{error.msg}\n{advice}"
    error.args = (f"{said}\n{advice}", *error.args[1:])


class AcceleratorContract:
    """The tests that every accelerator passes. Subclass it, and set `accelerator`."""

    accelerator: Any = None

    @pytest.fixture
    def it(self) -> Iterator[Accelerator]:
        made = _usable(type(self).accelerator)  # read from the class, as a function would become a method of `self`
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
                assert _parameters(member) == _parameters(ours), (
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
            assert _in_thread(partial(_set_and_ask, it, index)) == index
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
        size = _size_for(it)
        before = _figure(it, "allocated")
        held = _hold(it, size)
        during = _figure(it, "allocated")
        del held
        after = _figure(it, "allocated")
        assert 0.9 * size <= during - before <= 1.1 * size + 8 * MIB
        assert abs(after - before) <= 0.1 * size + 8 * MIB

    @override("read_memory")
    def test_available_memory_falls_by_what_is_taken(self, it: Accelerator) -> None:
        if it.device().type == "cpu":
            pytest.skip("every process of the host shares its memory, so what one of them takes does not show")
        size = _size_for(it)
        before = _figure(it, "available")
        held = _hold(it, size)
        assert before - _figure(it, "available") >= 0.8 * held.nbytes

    @override("read_memory")
    def test_available_memory_under_a_cap_falls_by_what_is_taken(
        self, it: Accelerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = _size_for(it)
        monkeypatch.setenv("ACCELERATOR_MEMORY", str(_figure(it, "allocated") + 2 * size))
        before = _figure(it, "available")
        held = _hold(it, size)
        assert before - _figure(it, "available") >= 0.8 * held.nbytes

    @override("read_memory", "reset_peak_memory")
    def test_the_peak_is_the_high_water_mark_and_not_a_sample(self, it: Accelerator) -> None:
        size = _size_for(it)
        it.reset_peak_memory()
        if it.memory().peak_since != "last reset":
            assert it.memory().peak is None or it.memory().peak_since == "process start"
            pytest.skip(f"{it.name} has no resettable peak, and says so")
        before = _figure(it, "peak")
        _hold(it, size)  # freed at once, so that no reading is taken while it is held
        assert _figure(it, "peak") >= before + 0.9 * size
        it.reset_peak_memory()
        assert _figure(it, "peak") <= before + 0.5 * size

    @override("read_memory", "reset_peak_memory")
    def test_the_peak_of_a_function_is_what_it_took_beyond_the_rest(self, it: Accelerator) -> None:
        size = _size_for(it)
        result, peak = peak_of(it, lambda: _hold(it, size).sum().item())
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
        if stretch.untyped_storage().nbytes() != stretch.nbytes:  # this device has no way to a storage of its own
            assert stretch.untyped_storage().data_ptr() == line.untyped_storage().data_ptr()
        line[150] = -1.0
        stretch[0] = -2.0
        assert line[100].item() == -2.0 and stretch[50].item() == -1.0
        assert it.with_own_storage(line[5:5]).numel() == 0
        del line
        others = [torch.zeros(1000, device=it.device()) for _ in range(8)]  # these would be given the memory if it were free
        assert stretch[50].item() == -1.0 and stretch.sum().item() == sum(range(101, 200)) - 150 - 1 - 2
        assert all(not other.any().item() for other in others)

    # numbers -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", FLOATING_DTYPES, ids=str)
    @override("supports")
    def test_a_dtype_is_supported_exactly_when_it_computes(self, it: Accelerator, dtype: torch.dtype) -> None:
        assert type(it.supports(dtype)) is bool
        assert it.supports(dtype) == _computes_in(dtype, it.device())
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
        assert _drawn_after(it, lambda: it.manual_seed(7)) == _drawn_after(it, lambda: it.manual_seed(7))
        assert _drawn_after(it, lambda: it.manual_seed(7)) != _drawn_after(it, lambda: it.manual_seed(8))

    @override("rng_state", "set_rng_state")
    def test_the_random_state_comes_back_on_host_and_device(self, it: Accelerator) -> None:
        it.manual_seed(1)
        torch.rand(3, device=it.device())
        states = it.rng_state()
        assert all(type(name) is str and isinstance(state, torch.Tensor) for name, state in states.items())
        first = _drawn_after(it, lambda: None)
        assert _drawn_after(it, lambda: it.set_rng_state(states)) == first
        assert _drawn_after(it, lambda: it.set_rng_state({**states, "another": torch.zeros(1)})) == first

    # host memory -------------------------------------------------------------------------------------------------

    @override("can_pin", "pin")
    def test_pinned_memory_is_pinned_and_the_same_numbers(self, it: Accelerator) -> None:
        it.forget_answers()  # pinning that failed in an earlier test is turned off
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
        if (reason := _why_not(it)) is not None:
            pytest.skip(reason)
        seen = _seen_by_ranks(_subject_of(type(self)))
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


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(inspect.unwrap(function)).parameters.values()]


def _set_and_ask(it: Accelerator, index: int) -> int:
    it.set_index(index)
    return it.current_index()


def _in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def peak_of(accelerator: Accelerator, function: Callable[[], Any], index: int | None = None) -> tuple[Any, int | None]:
    """Runs `function`; returns its result and its peak memory above the level at entry, in bytes (None if it is unknown)."""
    accelerator.synchronize(index)
    accelerator.reset_peak_memory(index)
    before = accelerator.memory(index)
    result = function()
    accelerator.synchronize(index)
    after = accelerator.memory(index)
    if after.peak is None or before.allocated is None or after.peak_since != "last reset":
        return result, None
    return result, max(0, after.peak - before.allocated)


def _size_for(it: Accelerator) -> int:
    """Returns how many bytes to try with: enough to stand out, and at most a quarter of what is left."""
    available = it.memory().available
    return 64 * MIB if available is None else min(64 * MIB, available // 4 // MIB * MIB)


def _hold(it: Accelerator, num_bytes: int) -> torch.Tensor:
    held = torch.ones(num_bytes // 4, device=it.device())  # ones, as memory that nobody wrote may not be allocated yet
    it.synchronize()
    return held


def _figure(it: Accelerator, name: str) -> int:
    it.synchronize()
    value: int | None = getattr(it.memory(), name)
    if value is None:
        pytest.skip(f"{it.name} does not tell {name} memory")
    return value


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if a dtype works, by another sum than the accelerator's own probe; this one is exact in every dtype, too."""
    try:
        x = torch.arange(8, device=device).to(dtype)
        return bool((torch.outer(x, x).sum(0) - x).float().cpu().tolist() == [27.0 * i for i in range(8)])
    except (RuntimeError, TypeError):
        return False


def _drawn_after(it: Accelerator, prepare: Callable[[], object]) -> tuple[list[float], list[float]]:
    prepare()
    return torch.rand(4).tolist(), torch.rand(4, device=it.device()).cpu().tolist()


class _Subject(NamedTuple):
    """The name of a contract class. Its accelerator may be a function, which cannot be sent to another process."""

    module: str
    file: str
    name: str


class _Seen(NamedTuple):
    """The results of all ranks, or why there are none."""

    by_rank: list[dict[str, Any]]
    failure: str | None


def _subject_of(contract: type) -> _Subject:
    return _Subject(contract.__module__, inspect.getfile(contract), contract.__qualname__)


def _make(subject: Any) -> Accelerator:
    """Returns the accelerator of a contract class, which gives a class, a function, an object or a registered name."""
    if isinstance(subject, str):
        subject = selection.get(subject)
    made = subject if isinstance(subject, Accelerator) else subject()
    assert isinstance(made, Accelerator), f"the contract's accelerator is a {type(made).__name__}"
    return made


def _usable(subject: Any) -> Accelerator:
    """Returns the accelerator, or skips the test with the reason. If a registered name has a reason, its accelerator is not
    made, as that may fail."""
    reasons = [known.reason for known in selection.candidates() if known.name == subject] if isinstance(subject, str) else []
    made = None if any(reasons) else _make(subject)
    if (reason := made.unavailable_reason() if made is not None else reasons[0]) is not None:
        assert str(reason).strip(), "unavailable_reason gave an empty text: give the reason, or None if the device works"
        pytest.skip(reason)
    assert made is not None
    return made


def _why_not(it: Accelerator) -> str | None:
    """Returns why two ranks cannot meet here, or None: most backends of devices refuse two ranks on one device."""
    if not dist.is_available():
        return "torch is built without torch.distributed"
    backend = it.communication_backend
    may_share = backend == "gloo" or is_staged(backend) or not dist.is_backend_available(backend)
    if it.device_count() < WORLD and not may_share:
        return f"{backend} needs a device for each of {WORLD} ranks, and there is one"
    return None


@functools.cache  # the ranks start once for all tests of a contract
def _seen_by_ranks(subject: _Subject) -> _Seen:
    """Runs two ranks; returns what each of them saw, or why one did not end."""
    try:
        return _Seen(_run_ranks(subject), None)
    except AssertionError as error:
        return _Seen([], str(error))


def _run_ranks(subject: _Subject) -> list[dict[str, Any]]:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=_serve, args=(rank, path, subject, pipe[1]), daemon=True) for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
            stack.callback(_end, process)
        return [_received(rank, pipe[0]) for rank, pipe in enumerate(pipes)]


def _received(rank: int, connection: multiprocessing.connection.Connection) -> dict[str, Any]:
    assert connection.poll(END_S), f"rank {rank} of {WORLD} did not end within {END_S:g} s"
    try:
        seen, text = connection.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} of {WORLD} died") from None
    assert text is None, f"rank {rank} of {WORLD} failed:\n{text}"
    results: dict[str, Any] = seen
    return results


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()


def _serve(rank: int, path: str, subject: _Subject, connection: Any) -> None:
    try:
        connection.send((_meet(rank, path, _make(_contract(subject).accelerator)), None))
    except Exception:  # noqa: BLE001 - whatever it is, the test that waits for this rank shows it
        connection.send((None, traceback.format_exc()))


def _contract(subject: _Subject) -> Any:
    if importlib.util.find_spec(subject.module) is None:
        spec = importlib.util.spec_from_file_location(subject.module, subject.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[subject.module] = module
        spec.loader.exec_module(module)
    target: Any = importlib.import_module(subject.module)
    for part in subject.name.split("."):
        target = getattr(target, part)
    return target


def _meet(rank: int, path: str, it: Accelerator) -> dict[str, Any]:
    it.set_index(rank % it.device_count())
    backend, store = it.communication_backend, FileStore(path, WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=LIMIT)
    seen: dict[str, Any] = {"backend": backend}
    for check in (_sum, _gathered, _exchanged, _ordered):
        seen[check.__name__.strip("_")] = check(rank, it)
    it.synchronize()
    seen["alone"] = _alone(rank, it, store)
    dist.destroy_process_group()
    return seen


def _sum(rank: int, it: Accelerator) -> bool:
    """Returns whether sums over the ranks are right, small and large."""
    matches = []
    for numel in (1, 1000, LARGE):
        numbers = (torch.arange(numel) % 1000).float()
        x = (numbers + rank).to(it.device())
        dist.all_reduce(x)
        matches.append(torch.equal(x.cpu(), numbers * WORLD + 1))
    return all(matches)


def _gathered(rank: int, it: Accelerator) -> list[float]:
    parts = [torch.empty(1000, device=it.device()) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((1000,), float(rank), device=it.device()))
    x = torch.full((1000,), float(rank), device=it.device())
    dist.broadcast(x, src=WORLD - 1)
    return [part.mean().item() for part in (*parts, x)]


def _exchanged(rank: int, it: Accelerator) -> list[float]:
    received = torch.empty(2 * WORLD, device=it.device())
    dist.all_to_all_single(received, torch.arange(2.0 * WORLD, device=it.device()) + 10 * rank)
    return received.tolist()


def _ordered(rank: int, it: Accelerator) -> float:
    """Reduces what a stream has still to compute, and works on the result, while the host waits for nothing."""
    stream, x = it.new_stream(), torch.ones(512, 512, device=it.device())
    stream.wait_stream(it.current_stream())
    with it.in_stream(stream):
        for _ in range(8):
            x = x @ x / 512
        x = x + rank
    it.current_stream().wait_stream(stream)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return (x * 2).mean().item()


def _alone(rank: int, it: Accelerator, store: Any) -> str | None:
    """Returns the error of a rank whose partner does not come within the group's time limit."""
    group = dist.new_group(list(range(WORLD)), timeout=SHORT_LIMIT, backend=it.communication_backend)
    if rank:
        store.wait(["the first rank gave up"], LIMIT)
        return None
    try:
        work = dist.all_reduce(torch.ones(4, device=it.device()), group=group, async_op=True)
        assert work is not None
        work.wait(LIMIT / 2)
        it.synchronize()
        return None
    except RuntimeError as error:
        return str(error) or type(error).__name__
    finally:
        store.set("the first rank gave up", "1")
