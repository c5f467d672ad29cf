"""Devices that a plug-in adds to torch."""

import sys

import pytest

from accelerators.selection import BUILT_IN, KNOWN_PLUGINS, Candidate, PluginAccelerator, Registry, Selection
from tests.accelerators.fakes import fake_device_module, give_torch, install_plugin


def packages_of(plugin):
    parts = plugin.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


@pytest.mark.promise("X03")
@pytest.mark.parametrize("known", KNOWN_PLUGINS, ids=lambda known: known.name)
def test_asked_for_by_name_a_plug_in_is_imported_and_serves_if_torch_then_has_devices(known, monkeypatch):
    for package in packages_of(known.plugin):
        install_plugin(monkeypatch, package)
    monkeypatch.setenv("ACCELERATOR", known.name.upper())
    for count in (0, 2):
        give_torch(monkeypatch, **{known.name: fake_device_module(count)})
        choice = Selection(Registry(BUILT_IN, lambda group: []))
        if count == 0:
            with pytest.raises(ValueError, match=rf"={known.name.upper()}: torch.{known.name}\.is_available"):
                choice.current()
            continue
        it = choice.current().accelerator
        assert type(it) is PluginAccelerator
        assert (it.name, it.device_count()) == (known.name, 2)
        assert it.communication_backend == known.communication_backend
        assert it.visible_devices_variable == known.visible_devices_variable
        assert it.compile_backend == known.compile_backend


@pytest.mark.parametrize("known", KNOWN_PLUGINS, ids=lambda known: known.name)
def test_a_plug_in_that_is_not_installed_is_the_reason(known, monkeypatch):
    package = packages_of(known.plugin)[0]
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert Candidate(known.registration()).reason == f"{package} is not installed"


def test_a_plug_in_that_cannot_load_its_driver_is_named_with_the_error(monkeypatch, tmp_path):
    (tmp_path / "torch_npu.py").write_text('raise OSError("libascend_hal.so: cannot open shared object file")\n')
    monkeypatch.syspath_prepend(tmp_path)
    npu = Candidate(next(known for known in KNOWN_PLUGINS if known.name == "npu").registration())
    assert npu.reason == "it failed to load: OSError: libascend_hal.so: cannot open shared object file"


def test_the_table_names_each_device_once():
    names = [registration.name for registration in BUILT_IN]
    assert len(names) == len(set(names))
    assert {"npu", "hpu", "mlu", "musa", "gcu", "sdaa", "supa"} <= set(names)
