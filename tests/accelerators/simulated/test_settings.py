"""How the simulated device comes up: from the environment, on first use, or not at all and why."""

import os
import subprocess
import sys

import pytest
import torch

from accelerators_sim import settings, torch_private
from accelerators_sim.settings import read_settings
from tests import programs

HERE = True

missing = torch_private.missing_names()
needs_the_device = pytest.mark.skipif(bool(missing), reason=f"torch {torch.__version__} lacks {', '.join(missing)}")


def python(code, **environment):
    """What it prints in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SIM_", "ACCELERATOR", "DS_ACC"))}
    result = programs.python("-c", code, env={**clean, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_what_is_unset_or_empty_has_its_default():
    assert read_settings({}) == read_settings({"SIM_MEMORY": " ", "SIM_ORDER": ""}) == settings.Settings()
    assert settings.Settings().memory_bytes == 16 << 30


def test_every_variable_is_read():
    found = read_settings(
        {
            "SIM_DEVICES": "3",
            "SIM_MEMORY": "5MiB",
            "SIM_WITHOUT": "pin, FP64",
            "SIM_ORDER": "random:7",
            "SIM_RACES": "0",
            "SIM_STRICT": "1",
        }
    )
    expected = settings.Settings(
        devices=3, memory_bytes=5 << 20, without=frozenset({"pin", "fp64"}), order="random", seed=7, races=False, strict=True
    )
    assert found == expected


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1,0", 2), ("2", 1), ("", 4), ("0,1,2,3", 4)])
def test_only_visible_devices_are_counted(visible, count):
    assert read_settings({"SIM_DEVICES": "4", "SIM_VISIBLE_DEVICES": visible}).devices == count


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SIM_DEVICES", "two"),
        ("SIM_VISIBLE_DEVICES", "0,0"),
        ("SIM_VISIBLE_DEVICES", "7"),
        ("SIM_WITHOUT", "teleport"),
        ("SIM_ORDER", "early"),
        ("SIM_ORDER", "late:3"),
        ("SIM_ORDER", "random:x"),
        ("SIM_RACES", "yes"),
        ("SIM_STRICT", "2"),
    ],
)
def test_a_value_that_means_nothing_is_refused_in_three_parts(variable, value):
    refused = f"Cannot set {variable}={value}:"
    with pytest.raises(ValueError, match=rf"{refused} .+\. (Write|List|Take|Set)"):
        read_settings({variable: value})


def test_importing_and_constructing_touch_nothing():
    code = "import sys, accelerators_sim; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
    code = """
import torch
before = torch.get_rng_state()
from accelerators_sim import SimulatedAccelerator
accelerator = SimulatedAccelerator()
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert not hasattr(torch, "sim")
assert torch.equal(torch.get_rng_state(), before)
print(repr(accelerator))
"""
    done = programs.with_torch(code)
    assert done.stdout == "SimulatedAccelerator('sim')\n", done.stderr


@needs_the_device
def test_another_plug_in_device_in_the_process_is_named():
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
from accelerators_sim import SimulatedAccelerator
print(SimulatedAccelerator().unavailable_reason())
"""
    assert python(code) == "torch has room for one plug-in device a process, and 'other' took it"


def test_a_torch_that_lacks_private_names_is_told_each_of_them(monkeypatch):
    monkeypatch.setattr(
        torch_private, "_NEEDED", ("torch._C._gone", "torch._C._get_privateuse1_backend_name", "torch.lost.too")
    )
    reason = torch_private.why_not()
    assert (
        reason
        == f"torch {torch.__version__} lacks torch._C._gone, torch.lost.too; the simulated device was written for torch 2.13"
    )


def test_the_guards_functions_are_counted_as_the_compiler_does():
    header = """
struct C10_API DeviceGuardImplInterface {
  // virtual void notThisOne() const;
  DeviceGuardImplInterface() = default;
  virtual DeviceType type() const = 0;
  virtual Stream getStream(Device /*unused*/, int priority = 0)
      const { return other(); }
  void plain() const {}
  virtual ~DeviceGuardImplInterface() = default;
  virtual void last() const {}
};
struct Other { virtual void no() {} };
"""
    destructor = "~DeviceGuardImplInterface"
    assert torch_private._virtual_functions(header) == ["type", "getStream", destructor, destructor, "last"]


@needs_the_device
def test_the_environment_decides_how_many_devices_come_up_and_how_large():
    code = """
import accelerators
it = accelerators.current()
import torch
print(it.name, it.device(), it.device_count(), it.memory().total, torch.accelerator.device_count(), it.communication_backend)
"""
    environment = {"ACCELERATOR": "sim:1", "SIM_DEVICES": "3", "SIM_VISIBLE_DEVICES": "0,2", "SIM_MEMORY": "3MiB"}
    assert python(code, **environment) == f"sim sim:1 2 {3 << 20} 2 simccl"


@needs_the_device
@pytest.mark.promise("X13")
def test_it_is_found_as_an_installed_plug_in_and_never_taken_unasked():
    code = """
import accelerators, torch
found = next(candidate for candidate in accelerators.candidates() if candidate.name == "sim")
print(found.origin)
print(accelerators.current().name, torch._C._get_privateuse1_backend_name())
from accelerators_sim import SimulatedAccelerator
with accelerators.using("sim") as it:
    print(type(it) is SimulatedAccelerator, (torch.ones(2, device=it.device()) * 2).tolist())
"""
    lines = python(code).splitlines()
    assert lines[0] == "entry point 'sim' of zero-accelerators-sim"
    assert lines[1].endswith(" privateuseone")
    assert lines[2] == "True [2.0, 2.0]"


@needs_the_device
def test_asking_whether_it_could_come_up_does_not_bring_it_up():
    code = """
import torch
import accelerators
assert accelerators.get("sim").unavailable_reason() is None and accelerators.get("sim").is_available()
assert not hasattr(torch, "sim")
print(accelerators.use("sim").device_count(), torch.sim.device_count())
"""
    assert python(code) == "2 2"
