"""How torch is asked: the device's module first, torch.accelerator next, a harmless answer last."""

import contextlib
import logging
import types

import pytest
import torch

from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading
from accelerators.streams import InOrderEvent, InOrderStream
from tests.accelerators.fakes import fake_device_module, give_torch


@pytest.fixture
def give(monkeypatch):
    def give(module, name="dev"):
        give_torch(monkeypatch, **{name: module})
        return Accelerator(name)

    return give


@pytest.fixture
def generic(monkeypatch):
    """torch.accelerator for a device called dev, with these functions only."""

    def generic(**functions):
        for name in [name for name, value in vars(torch.accelerator).items() if callable(value) and not name.startswith("_")]:
            monkeypatch.delattr(torch.accelerator, name)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="dev"), raising=False)
        for name, function in functions.items():
            monkeypatch.setattr(torch.accelerator, name, function, raising=False)

    return generic


def test_a_name_is_needed():
    with pytest.raises(TypeError, match=r"Cannot make a Accelerator: the class has no name\. Set"):
        Accelerator()


@pytest.mark.promise("X01")
def test_making_one_asks_the_device_nothing():
    class Untouchable(Accelerator):
        name = "dev"
        module = property(lambda self: pytest.fail("the device was asked"))

    assert repr(Untouchable()) == "Untouchable('dev')"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "torch has no device module torch.dev"),
        (fake_device_module(0), "torch.dev.is_available() is False"),
        (fake_device_module(0, is_available=lambda: True), "torch.dev has 0 devices"),
        (types.SimpleNamespace(is_available=lambda: True), "torch.dev has 0 devices"),
        (fake_device_module(1), None),
    ],
)
def test_a_module_is_not_a_device(give, module, reason):
    it = give(module)
    assert it.is_available() == (reason is None)
    assert it.unavailable_reason() is None if reason is None else it.unavailable_reason().startswith(reason)


@pytest.mark.promise("X12")
def test_a_device_that_was_in_use_before_a_fork_is_refused_with_a_clear_reason(give):
    it = give(fake_device_module(1, _is_in_bad_fork=lambda: True))
    assert it.unavailable_reason().startswith("torch.dev was in use before this process was forked, and")


def test_the_module_goes_before_torch_accelerator_and_that_before_the_default(give, generic):
    generic(memory_allocated=lambda index: 1, max_memory_allocated=lambda index: 2, get_memory_info=lambda index: (30, 40))
    it = give(fake_device_module(1, memory_allocated=lambda index: 10))
    assert it.memory() == MemoryReading(total=40, available=30, allocated=10, peak=2, peak_since="process start")


def test_memory_that_torch_keeps_for_later_is_available(give):
    functions = {"mem_get_info": lambda i: (100, 1000), "memory_allocated": lambda i: 300, "memory_reserved": lambda i: 500}
    assert give(fake_device_module(1, **functions)).memory().available == 300


def test_a_peak_that_the_module_cannot_reset_is_since_process_start(give):
    counters = {"memory_allocated": lambda i: 10, "max_memory_allocated": lambda i: 20}
    refused = {"reset_peak_memory_stats": refuse(RuntimeError)}
    for functions in (counters, counters | refused):
        it = give(fake_device_module(2, **functions))
        it.reset_peak_memory()
        assert it.memory().peak_since == "process start"
    it = give(fake_device_module(2, **counters, reset_peak_memory_stats=lambda i: None))
    it.reset_peak_memory(1)
    assert (it.memory(0).peak_since, it.memory(1).peak_since) == ("process start", "last reset")


def refuse(error):
    def function(*arguments):
        raise error("not on this device")

    return function


@pytest.mark.promise("X14")
@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_what_torch_accelerator_does_not_have_for_the_device_is_none_and_no_error(give, generic, error):
    generic(memory_allocated=refuse(error), get_memory_info=refuse(error), empty_cache=refuse(error))
    it = give(fake_device_module(1))
    assert it.memory() == MemoryReading(None, None, None, None, "process start")
    it.empty_cache()
    it.reset_peak_memory()
    it.synchronize()


def test_an_error_of_the_device_is_not_swallowed(give, generic):
    it = give(fake_device_module(1, synchronize=refuse(RuntimeError)))
    with pytest.raises(RuntimeError, match="not on this device"):
        it.synchronize()
    generic(synchronize=refuse(RuntimeError))
    with pytest.raises(RuntimeError, match="not on this device"):
        give(fake_device_module(1)).synchronize()
    generic(synchronize=refuse(NotImplementedError))
    give(fake_device_module(1)).synchronize()


@pytest.mark.promise("X14", "X17")
def test_without_streams_or_without_events_everything_is_in_order(give):
    waited = []
    for missing in ("Stream", "Event"):
        functions = {"Stream": object, "Event": object, "synchronize": waited.append}
        del functions[missing]
        it = give(fake_device_module(2, **functions))
        assert type(it.new_stream()) is type(it.current_stream(1)) is InOrderStream
        assert it.new_stream(1) is it.current_stream(1) is not it.current_stream(0)
        assert type(it.new_event(timing=True)) is InOrderEvent
        assert it.is_synchronous is False  # the host still has something to wait for
        waited.clear()
        it.current_stream(1).synchronize()
        start, end = it.new_event(timing=True), it.current_stream().record_event()
        start.record()
        assert waited == [1, 0, 0]
        assert end.elapsed_time(start) >= 0
        with it.in_stream(it.new_stream()):
            pass


@pytest.mark.promise("X14")
def test_streams_that_a_subclass_says_are_none_are_not_used(give, monkeypatch):
    functions = {"Stream": object, "Event": object, "current_stream": lambda index=None: object(), "stream": object}
    it = give(fake_device_module(1, **functions, synchronize=print))
    assert it.has_streams and type(it.current_stream()) is object
    monkeypatch.setattr(type(it), "has_streams", False)
    assert not it.has_streams and type(it.new_stream()) is type(it.current_stream()) is InOrderStream
    assert type(it.new_event()) is InOrderEvent and it.is_synchronous is False


MEMBERS = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "set_device": lambda index: None,
    "synchronize": lambda index=None: None,
    "mem_get_info": lambda index: (30, 40),
    "memory_allocated": lambda index: 5,
    "memory_reserved": lambda index: 6,
    "max_memory_allocated": lambda index: 7,
    "reset_peak_memory_stats": lambda index: None,
    "empty_cache": lambda: None,
    "Stream": lambda device: InOrderStream(lambda: None),
    "Event": lambda enable_timing: InOrderEvent(lambda: None),
    "current_stream": lambda index=None: InOrderStream(lambda: None),
    "stream": contextlib.nullcontext,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda index: torch.zeros(1),
    "set_rng_state": lambda state, index: None,
    "_is_in_bad_fork": lambda: False,
}


@pytest.mark.promise("X14")
@pytest.mark.parametrize("missing", [None, *MEMBERS])
def test_whichever_member_a_device_module_lacks_every_question_has_an_answer(give, monkeypatch, missing):
    monkeypatch.setattr(Accelerator, "device", lambda self, index=None: torch.device("cpu"))
    members = {name: function for name, function in MEMBERS.items() if name != missing}
    it = give(types.SimpleNamespace(device_count=lambda: 1, **members))
    assert it.unavailable_reason() is None
    it.set_index(it.current_index())
    it.reset_peak_memory()
    it.empty_cache()
    assert isinstance(it.memory(), MemoryReading)
    side, event, end = it.new_stream(), it.new_event(timing=True), it.new_event(timing=True)
    with it.in_stream(side):
        event.record(it.current_stream())
    it.current_stream().wait_stream(side)
    end.record()
    it.synchronize()
    assert event.elapsed_time(end) >= 0
    it.manual_seed(1)
    it.set_rng_state(it.rng_state())
    assert it.preferred_dtype() in it.supported_dtypes()
    assert it.pin(torch.ones(2)).tolist() == [1, 1]


def test_a_device_that_torch_was_not_built_with_supports_nothing(give):
    assert Accelerator("mtia").supports(torch.float32) is False


def test_a_device_that_can_neither_wait_nor_stream_is_synchronous(give):
    assert give(fake_device_module(1)).is_synchronous is True


def test_streams_of_torch_itself_serve_where_the_module_has_none(give, generic, monkeypatch):
    current = {"stream": "default"}
    generic(current_stream=lambda index=None: current["stream"], set_stream=lambda stream: current.update(stream=stream))
    monkeypatch.setattr(torch, "device", lambda name, index: f"{name}:{index}")
    monkeypatch.setattr(torch, "Stream", lambda device: types.SimpleNamespace(device_index=1, of=device))
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing=False: ("event", device, enable_timing))
    module = fake_device_module(2)
    it = give(module)
    stream = it.new_stream(1)
    assert stream.of == "dev:1"
    assert it.new_event(timing=True) == ("event", "dev:0", True)
    with pytest.raises(KeyError), it.in_stream(stream):
        assert it.current_stream() is stream
        module.set_device(1)  # torch does the same: a stream brings its device along
        raise KeyError
    assert it.current_stream() == "default"
    assert it.current_index() == 0


@pytest.mark.promise("X06")
def test_a_device_is_named_in_full(give):
    it = give(fake_device_module(2), "mtia")
    assert it.device() == torch.device("mtia:0")
    it.set_index(1)
    assert it.device() == torch.device("mtia", 1)


def test_an_index_of_no_devices_says_where_to_look(give):
    with pytest.raises(ValueError, match=r"^Cannot take device 0 of dev: 0 are visible\. python -m accelerators"):
        give(fake_device_module(0)).set_index(0)


@pytest.mark.promise("D07")
def test_a_dtype_is_probed_once_and_wrong_numbers_are_no_support(monkeypatch):
    class Wrong(Accelerator):
        def device(self, index=None):
            return torch.device("cpu")

    it, probes = Wrong("cpu"), []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: probes.append(a.dtype) or torch.zeros(2, 2))
    assert it.supports(torch.bfloat16) is it.supports(torch.bfloat16) is False
    assert probes == [torch.bfloat16]
    assert it.supported_dtypes() == ()
    assert it.preferred_dtype() == torch.float32


@pytest.mark.promise("D08")
def test_a_norm_is_summed_in_fp32_where_there_is_no_fp64():
    class NoDoubles(Accelerator):
        name = "cpu"

        def _probe_dtype(self, dtype):
            return dtype != torch.float64

    assert NoDoubles().norm_dtype() == torch.float32
    assert torch.float64 not in NoDoubles().supported_dtypes()


def pinned_memory_that(fails, monkeypatch):
    """torch.empty and Tensor.pin_memory of a machine whose pinning fails at that point, or never."""
    real_empty, tries = torch.empty, []

    def empty(*arguments, pin_memory=False, **options):
        tries.append("probe") if pin_memory else None
        if pin_memory and fails == "probe":
            raise RuntimeError("no pinned memory here")
        return types.SimpleNamespace(is_pinned=lambda: True) if pin_memory else real_empty(*arguments, **options)

    def pin_memory(tensor):
        tries.append("pin")
        if fails == "pin":
            raise RuntimeError("out of lockable memory")
        return tensor.clone()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tries


@pytest.mark.promise("M10")
@pytest.mark.parametrize(("fails", "tries"), [("probe", ["probe"]), ("pin", ["probe", "pin"])])
def test_pinning_that_fails_gives_pageable_memory_and_warns_once(give, monkeypatch, caplog, fails, tries):
    seen = pinned_memory_that(fails, monkeypatch)
    it, tensor = give(fake_device_module(1)), torch.ones(3)
    for _ in range(3):
        assert it.pin(tensor) is tensor
    assert it.can_pin is False
    assert seen == tries
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "pageable memory serves" in caplog.text


@pytest.mark.promise("M10")
def test_pinning_that_is_not_wanted_is_not_tried(give, monkeypatch, caplog):
    seen = pinned_memory_that("never", monkeypatch)
    it, tensor = give(fake_device_module(1)), torch.ones(3)
    it.can_pin = False
    assert it.pin(tensor) is tensor
    assert not seen
    assert not caplog.records


def test_nothing_is_pinned_for_an_empty_tensor_and_a_device_tensor_is_refused(give, monkeypatch):
    pinned_memory_that("never", monkeypatch)
    it = give(fake_device_module(1))
    assert it.pin(torch.zeros(3)) is not None
    empty = torch.zeros(0)
    assert it.pin(empty) is empty
    with pytest.raises(ValueError, match=r"^Cannot pin a tensor on meta: only host memory is pinned\. Pass"):
        it.pin(torch.zeros(3, device="meta"))
    assert it.can_pin


@pytest.mark.promise("X16")
def test_the_random_state_of_host_and_device_come_back_and_strangers_are_left_out(give):
    state = {"dev": torch.zeros(4)}
    functions = {"get_rng_state": lambda i: state["dev"], "set_rng_state": lambda s, i: state.update(dev=s)}
    it = give(fake_device_module(1, **functions))
    saved = it.rng_state()
    assert set(saved) == {"cpu", "dev"}
    drawn = torch.rand(3)
    state["dev"] = torch.ones(4)
    it.set_rng_state({**saved, "another": torch.ones(1)})
    assert torch.equal(torch.rand(3), drawn)
    assert state["dev"] is saved["dev"]
    give(fake_device_module(1)).set_rng_state({"cpu": saved["cpu"]})
    assert torch.equal(torch.rand(3), drawn)


def test_a_seed_reaches_host_and_every_device(give):
    seeds = []
    give(fake_device_module(2, manual_seed_all=seeds.append)).manual_seed(3)
    assert seeds == [3]
    assert torch.initial_seed() == 3


@pytest.mark.parametrize(
    ("variable", "properties", "identities"),
    [
        (None, None, ["0", "1"]),
        ("3,1", None, ["3", "1"]),
        ("GPU-8a1f, MIG-77", None, ["GPU-8a1f", "MIG-77"]),
        ("0,1", lambda index: types.SimpleNamespace(uuid=f"uuid {index}"), ["uuid 0", "uuid 1"]),
        ("7", lambda index: types.SimpleNamespace(name="without one"), ["7", "1"]),
    ],
)
def test_a_device_is_known_by_what_it_is_and_not_by_its_index(give, monkeypatch, variable, properties, identities):
    functions = {"device_count": lambda: 2, "current_device": lambda: 0}
    if properties is not None:
        functions["get_device_properties"] = properties
    made = give(fake_device_module(**functions))
    made.visible_devices_variable = "DEV_VISIBLE_DEVICES"
    if variable is not None:
        monkeypatch.setenv("DEV_VISIBLE_DEVICES", variable)
    assert [made.identity(index) for index in (0, 1)] == identities
