"""The process's one choice, and the front door to it."""

import logging
import re
import threading

import pytest

import accelerators
from accelerators import selection
from accelerators.backends.cpu import CpuAccelerator
from accelerators.selection import Registration, Registry, Selection
from tests.accelerators.fakes import fake_device_module, give_torch, name_accelerator


class Other(CpuAccelerator):
    pass


CANDIDATES = (
    Registration("cpu", "accelerators.backends.cpu:CpuAccelerator", priority=0),
    Registration("other", Other, priority=-1),
    Registration("dev", lambda: accelerators.Accelerator("dev"), priority=-1),
)


@pytest.fixture
def table(monkeypatch):
    for variable in ("ACCELERATOR", "DS_ACCELERATOR", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    give_torch(monkeypatch, dev=fake_device_module(2))
    return Selection(Registry(CANDIDATES, lambda group: []))


@pytest.fixture
def front_door(table, monkeypatch):
    monkeypatch.setattr(selection, "_choice", table)
    return accelerators


def test_the_choice_is_made_once(front_door, monkeypatch):
    first = front_door.current()
    monkeypatch.setenv("ACCELERATOR", "other")
    assert front_door.current() is first


def test_the_log_says_what_was_chosen_and_why(front_door, caplog):
    with caplog.at_level(logging.INFO, "accelerators"):
        front_door.current()
    assert "Accelerator cpu: the usable one of highest priority" in caplog.text
    assert selection.chosen().why == "the usable one of highest priority"


def test_use_chooses_by_name_or_object(front_door):
    assert type(front_door.use(" OTHER ")) is Other
    assert front_door.current() is front_door.get("other")


def test_use_of_the_same_again_is_harmless_and_of_another_an_error(front_door):
    front_door.use("dev:1")
    for same in ("dev", "DEV:1", front_door.current()):
        assert front_door.use(same) is front_door.current()
    for other in ("dev:0", "cpu", "nonsense", CpuAccelerator()):
        with pytest.raises(ValueError, match=r"this process already uses dev \(.*'dev:1'.*\)\. Call accelerators.use"):
            front_door.use(other)


def test_a_name_may_differ_from_the_device_type(front_door):
    front_door.use("other")
    assert front_door.use("other").name == "cpu"
    with pytest.raises(ValueError, match="already uses other"):
        front_door.use("cpu")


@pytest.mark.parametrize("wanted", ["", " ", ":", "nonsense", "cpu:1", "dev:2"])
def test_what_cannot_be_used_leaves_no_choice_behind(table, wanted):
    with pytest.raises(ValueError, match=r"^Cannot use "):
        table.use(wanted)
    assert table.chosen is None


def test_an_object_is_used_as_it_is_if_it_works(front_door):
    with pytest.raises(ValueError, match=r"^Cannot use .*: torch has no device module"):
        front_door.use(accelerators.Accelerator("nodev"))
    with pytest.raises(TypeError, match=r"^Cannot use .*: it is a int\. Pass the name"):
        front_door.use(1)
    mine = CpuAccelerator()
    assert front_door.use(mine) is mine


def test_using_puts_the_choice_and_the_device_back(front_door):
    device = front_door.get("dev")
    device.set_index(0)
    before = front_door.current()
    with pytest.raises(KeyError), front_door.using("dev:1") as inside:
        assert front_door.current() is inside is device
        assert device.current_index() == 1
        with front_door.using("other"):
            assert front_door.current() is front_door.get("other")
        assert front_door.current() is device
        raise KeyError
    assert front_door.current() is before
    assert device.current_index() == 0


def test_using_something_impossible_changes_nothing(front_door):
    before = front_door.current()
    with pytest.raises(ValueError), front_door.using("nonsense"):
        pass
    assert front_door.current() is before


def test_using_before_any_choice_makes_none(table):
    with table.using("other"):
        pass
    assert table.chosen is None


def test_all_threads_get_the_same_object(front_door):
    found = []
    threads = [threading.Thread(target=lambda: found.append(front_door.current())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(accelerator) for accelerator in found}) == 1


def test_get_gives_one_object_and_chooses_nothing(front_door, table):
    assert front_door.get("Other ") is front_door.get("other")
    assert table.chosen is None


@pytest.mark.promise("X13")
def test_register_takes_a_class_a_path_or_decorates(front_door):
    front_door.register("one", Other)
    front_door.register("two", "accelerators.backends.cpu:CpuAccelerator", priority=60)

    @front_door.register("three", priority=70)
    class Three(CpuAccelerator):
        pass

    assert isinstance(Three, type)
    assert [c.name for c in front_door.candidates()] == ["three", "two", "one", "cpu", "dev", "other"]
    assert {c.name: c.origin for c in front_door.candidates()}["one"] == f"accelerators.register ({__name__}.Other)"
    assert type(front_door.current()) is Three


@pytest.mark.parametrize(
    ("name", "factory", "priority", "error"),
    [
        ("my-dev", Other, 50, ValueError),
        ("dev:1", Other, 50, ValueError),
        ("", Other, 50, ValueError),
        (None, Other, 50, TypeError),
        ("dev2", 5, 50, TypeError),
        ("dev2", Other, "high", TypeError),
        ("dev2", Other, None, TypeError),
    ],
)
def test_a_registration_that_cannot_work_is_refused_at_once(front_door, name, factory, priority, error):
    with pytest.raises(error, match=r"^Cannot .*: .*\. (Pass|Use|Choose)"):
        front_door.register(name, factory, priority=priority)
    assert [candidate.name for candidate in front_door.candidates()] == ["cpu", "dev", "other"]


@pytest.mark.parametrize(
    ("name", "error"), [("dev:1", ValueError), ("", ValueError), ("cpu:", ValueError), (None, TypeError), (1, TypeError)]
)
def test_get_takes_a_plain_name_and_remembers_no_other(front_door, name, error):
    with pytest.raises(error, match=r"^Cannot (get accelerator|use|call) .*: .*\. (Pass|Write)"):
        front_door.get(name)
    assert [candidate.name for candidate in front_door.candidates()] == ["cpu", "dev", "other"]


def test_the_front_door_names_what_it_has():
    assert accelerators.__all__ == sorted(accelerators.__all__)
    assert set(accelerators.__all__) <= set(dir(accelerators))
    for name in accelerators.__all__:
        assert getattr(accelerators, name).__name__ == name
    with pytest.raises(AttributeError, match=r"has no attribute 'curent'\. It has: Accelerator,"):
        _ = accelerators.curent


def test_a_device_that_only_torch_knows_is_chosen_where_torch_names_it(front_door, monkeypatch, caplog):
    give_torch(monkeypatch, acme=fake_device_module(1))
    name_accelerator(monkeypatch, "acme")
    with caplog.at_level(logging.INFO, "accelerators"):
        assert type(front_door.current()) is accelerators.Accelerator
    assert (front_door.current().name, selection.chosen().why) == ("acme", "the accelerator that torch names")
    assert "Accelerator acme: the accelerator that torch names" in caplog.text


def test_what_is_registered_goes_before_the_row_that_torch_gives(front_door, monkeypatch):
    give_torch(monkeypatch, acme=fake_device_module(1))
    name_accelerator(monkeypatch, "acme")
    assert {row.name: row.origin for row in front_door.candidates()}["acme"] == "torch"

    class Acme(accelerators.Accelerator):
        name = "acme"

    front_door.register("acme", Acme)
    assert type(front_door.current()) is Acme


@pytest.mark.parametrize(
    ("module", "named", "reason"),
    [
        (fake_device_module(2), "dev", "it is taken on request only"),
        (fake_device_module(0, is_available=lambda: True), "acme", r"torch\.acme has 0 devices \(torch .*\)"),
    ],
    ids=["on request", "without devices"],
)
def test_the_host_is_not_taken_in_silence_where_torch_names_another(front_door, monkeypatch, caplog, module, named, reason):
    give_torch(monkeypatch, **{named: module})
    name_accelerator(monkeypatch, named)
    assert front_door.current().name == "cpu"
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = f"Accelerator cpu is used although torch names {named}: {reason}. Set ACCELERATOR={named} to use that one, or .*cpu"
    assert re.fullmatch(text + r"\.", warning.getMessage())


@pytest.mark.parametrize("named", [None, "acme"])
def test_nothing_is_said_where_torch_names_no_accelerator_that_is_there(front_door, monkeypatch, caplog, named):
    give_torch(monkeypatch, acme=fake_device_module(0))
    name_accelerator(monkeypatch, named)
    assert front_door.current().name == "cpu"
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_for_the_host_is_not_questioned(front_door, monkeypatch, caplog):
    name_accelerator(monkeypatch, "dev")
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert front_door.current().name == "cpu"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
