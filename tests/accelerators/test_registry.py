"""The table of candidates: what is registered, when it is imported, and what a broken one does to the rest."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.metadata import EntryPoint

import pytest

from accelerators.backends.cpu import CpuAccelerator
from accelerators.selection import BUILT_IN, Candidate, Registration, Registry, Selection
from tests import programs

CPU = Registration("cpu", "accelerators.backends.cpu:CpuAccelerator", priority=0)


def no_entry_points(group):
    return []


class Mine(CpuAccelerator):
    pass


def candidate(factory, **options):
    return Candidate(Registration("mine", factory, **options))


@pytest.mark.promise("X13")
def test_nothing_of_a_registration_is_imported_before_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "my_lazy_plugin.py").write_text(
        "from accelerators.backends.cpu import CpuAccelerator\nclass Mine(CpuAccelerator):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry([CPU, Registration("mine", "my_lazy_plugin:Mine")], no_entry_points)
    assert [candidate.name for candidate in registry] == ["mine", "cpu"]
    assert "my_lazy_plugin" not in sys.modules
    assert type(registry.find("mine").accelerator).__name__ == "Mine"
    assert sys.modules.pop("my_lazy_plugin")


def test_an_accelerator_is_made_once():
    mine = candidate(Mine)
    assert mine.accelerator is mine.accelerator


def test_candidates_come_by_priority_and_then_by_name():
    registry = Registry([CPU], no_entry_points)
    for name, priority in (("b", 50), ("a", 50), ("c", 60), ("never", -1)):
        registry.add(Registration(name, Mine, priority))
    assert [candidate.name for candidate in registry] == ["c", "a", "b", "cpu", "never"]


def raises(error):
    def factory():
        raise error

    return factory


class AsksAndFails(CpuAccelerator):
    def unavailable_reason(self):
        raise OSError("driver not loaded\n  (libdev.so)")


@pytest.mark.promise("X13")
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_such_module_at_all:Mine", "it failed to load: ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("accelerators.memory:Mine", "it failed to load: AttributeError: .*'Mine'"),
        ("accelerators.memory:MemoryReading", "it failed to load: TypeError: .*"),
        ("accelerators.memory:memory_cap", "it failed to load: TypeError: its factory gave a NoneType, not an .*"),
        (raises(KeyError("x")), "it failed to load: KeyError: 'x'"),
        (raises(SystemExit(127)), "it failed to load: SystemExit: 127"),
        (AsksAndFails, r"it failed when asked whether it is available: OSError: driver not loaded \(libdev.so\)"),
    ],
)
def test_a_broken_plug_in_is_named_with_its_error_and_breaks_nothing_else(factory, reason, monkeypatch):
    monkeypatch.delenv("ACCELERATOR", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    registry = Registry([CPU, Registration("mine", factory, priority=99)], no_entry_points)
    choice = Selection(registry)
    assert choice.current().name == "cpu"
    assert not registry.find("mine").usable
    with pytest.raises(ValueError, match=f"^Cannot use .*mine.*: {reason}. Install") as error:
        Selection(registry).use("mine")
    assert error.value.__cause__ is not None


class GivesNoReason(CpuAccelerator):
    def unavailable_reason(self):
        return False


def test_a_reason_of_another_type_is_a_plug_in_that_failed():
    expected = "it failed when asked whether it is available: TypeError: unavailable_reason gave a bool, not a str or None"
    assert candidate(GivesNoReason).reason == expected


def test_a_plug_in_that_asks_for_the_accelerator_while_it_is_made_is_told_so_and_does_not_recurse(monkeypatch):
    for variable in ("ACCELERATOR", "DS_ACCELERATOR"):
        monkeypatch.delenv(variable, raising=False)
    registry = Registry([CPU], no_entry_points)
    choice = Selection(registry)
    registry.add(Registration("mine", lambda: choice.current().accelerator, priority=99))
    assert choice.current().name == "cpu"
    assert "Cannot choose the accelerator: whether mine works is being tried" in registry.find("mine").reason


def test_looking_at_candidates_tries_none():
    registry = Registry([CPU, Registration("mine", raises(AssertionError("it was tried")))], no_entry_points)
    assert [repr(each) for each in registry] == [
        "Candidate('mine', priority=50, not tried yet)",
        "Candidate('cpu', priority=0, not tried yet)",
    ]
    assert registry.find("cpu").usable
    assert repr(registry.find("cpu")) == "Candidate('cpu', priority=0, usable)"


@pytest.mark.promise("X12")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_loads_a_plug_in_leaves_nothing_locked():
    loading, go_on = threading.Event(), threading.Event()

    def slow():
        loading.set()
        go_on.wait(30)
        return Mine()

    registry = Registry([CPU, Registration("slow", slow)], no_entry_points)
    thread = threading.Thread(target=lambda: registry.find("slow").usable)
    thread.start()
    loading.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if registry.find("cpu").usable else 1)
    try:
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
    finally:
        go_on.set()
        thread.join()
    assert registry.find("slow").usable


def test_threads_that_ask_at_once_all_see_every_entry_point_and_get_one_object(monkeypatch):
    for variable in ("ACCELERATOR", "DS_ACCELERATOR", "ACCELERATOR_AUTOLOAD"):
        monkeypatch.delenv(variable, raising=False)
    barrier = threading.Barrier(8)

    def slow_entry_points(group):
        time.sleep(0.02)
        return [EntryPoint("mine", f"{__name__}:Mine", group)] if group == "accelerators" else []

    choice, found = Selection(Registry([CPU], slow_entry_points)), []

    def ask():
        barrier.wait()
        found.append(choice.current().accelerator)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert {type(accelerator) for accelerator in found} == {Mine}
    assert len({id(accelerator) for accelerator in found}) == 1


def test_registering_while_candidates_are_gone_through_disturbs_nobody():
    registry = Registry([CPU], no_entry_points)
    names = []
    for number, each in enumerate(registry):
        registry.add(Registration(f"more{number}", Mine))
        names.append(each.name)
    assert names == ["cpu"]
    assert [each.name for each in registry] == ["more0", "cpu"]


@pytest.mark.promise("X15")
def test_ctrl_c_while_a_plug_in_loads_is_no_failure_of_the_plug_in():
    with pytest.raises(KeyboardInterrupt):
        _ = candidate(raises(KeyboardInterrupt())).usable


@pytest.mark.full
@pytest.mark.promise("X15")
def test_sigint_during_the_choice_ends_the_process():
    program = """
        import os, signal, time
        import accelerators
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
        @accelerators.register("slow", priority=999)
        def slow():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        accelerators.current()
        print("went on")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr
    assert "went on" not in result.stdout


def test_a_missing_module_is_looked_for_and_not_imported(monkeypatch):
    assert candidate(Mine, needs="no_such_module_at_all").reason == "no_such_module_at_all is not installed"
    assert candidate(Mine, needs="antigravity").usable
    assert "antigravity" not in sys.modules


def test_the_same_registration_twice_is_harmless_and_another_one_is_an_error():
    registry = Registry([CPU], no_entry_points)
    for factory in (Mine, Mine, f"{__name__}:Mine"):
        registry.add(Registration("mine", factory, origin="a test"))
    for other in (Registration("mine", CpuAccelerator), Registration("mine", Mine, priority=51), Registration("cpu", Mine)):
        with pytest.raises(ValueError, match=r"^Cannot register .*: that name is taken \(.*\)\. Choose another"):
            registry.add(other)
    assert registry.find("mine").registration.factory is Mine


@pytest.mark.promise("X13")
def test_entry_points_are_candidates_and_their_group_says_whether_unasked(monkeypatch, caplog):
    monkeypatch.delenv("ACCELERATOR_AUTOLOAD", raising=False)
    points = {
        "accelerators": [
            EntryPoint(" Mine", f"{__name__}:Mine", "accelerators"),
            EntryPoint(" Mine", f"{__name__}:Mine", "accelerators"),  # a package that is installed and lies on the path as well
            EntryPoint("cpu", "x:Y", "accelerators"),
            EntryPoint("my-dev", "x:Y", "accelerators"),
        ],
        "accelerators.on_request": [EntryPoint("other", f"{__name__}:Mine", "accelerators.on_request")],
    }
    registry = Registry([CPU], lambda group: points[group])
    assert [(c.name, c.priority) for c in registry] == [("mine", 40), ("cpu", 0), ("other", -1)]
    assert registry.find("mine").usable
    assert "entry point 'cpu' of an unknown package: that name is taken" in caplog.text
    assert "'my-dev' from entry point 'my-dev' of an unknown package: a name is one word" in caplog.text
    assert len(caplog.records) == 2


def test_autoload_off_skips_entry_points(monkeypatch):
    monkeypatch.setenv("ACCELERATOR_AUTOLOAD", "0")
    registry = Registry([CPU], lambda group: [EntryPoint("mine", f"{__name__}:Mine", group)])
    assert [candidate.name for candidate in registry] == ["cpu"]
    with pytest.raises(ValueError, match="Cannot use mine: no accelerator is named 'mine'"):
        registry.find("mine")


@pytest.mark.promise("X13")
def test_an_installed_package_offers_its_accelerator_without_an_edit_of_ours(tmp_path):
    (tmp_path / "vendor_device.py").write_text(
        "from accelerators.backends.cpu import CpuAccelerator\nclass VendorAccelerator(CpuAccelerator):\n    pass\n"
    )
    info = tmp_path / "vendor_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accelerators]\nvendor = vendor_device:VendorAccelerator\n")
    program = f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import accelerators
        found = {{c.name: c for c in accelerators.candidates()}}["vendor"]
        print(type(accelerators.current()).__name__, "|", found.origin)
    """
    result = programs.python("-c", textwrap.dedent(program))
    assert result.stdout.strip() == "VendorAccelerator | entry point 'vendor' of vendor-device", result.stderr


@pytest.mark.promise("X13")
def test_the_simulated_device_comes_in_through_the_same_door(monkeypatch):
    monkeypatch.delenv("ACCELERATOR_AUTOLOAD", raising=False)
    assert "sim" not in [registration.name for registration in BUILT_IN]
    assert Registry(BUILT_IN).find("sim").origin == "entry point 'sim' of zero-accelerators-sim"


def test_who_leaves_packages_out_is_not_told_to_install_the_simulated_device(monkeypatch):
    monkeypatch.setenv("ACCELERATOR_AUTOLOAD", "0")
    with pytest.raises(ValueError, match="Cannot use sim: no accelerator is named 'sim'"):
        Registry(BUILT_IN).find("sim")


def test_a_device_that_torch_knows_by_now_is_served_by_the_generic_class():
    registry = Registry([CPU], no_entry_points)
    found = registry.find("mtia")
    assert found.origin == "torch"
    assert found.accelerator.name == "mtia"


def test_what_went_wrong_is_in_the_debug_log_with_its_traceback(caplog):
    with caplog.at_level(logging.DEBUG, "accelerators"):
        assert not candidate(raises(KeyError("x"))).usable
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("name", "meant"), [("gpu", "'cuda' .NVIDIA, AMD., 'xpu' .Intel. or 'mps'"), ("rocm", "'cuda', by")])
def test_a_kind_of_device_is_told_the_names_that_torch_has_for_it(name, meant):
    with pytest.raises(ValueError, match=f"Cannot use {name}: no device is called '{name}'. Use {meant}"):
        Registry(BUILT_IN).find(name)
