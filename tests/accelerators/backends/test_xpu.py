"""XPU: torch's own support first, and Intel's extension where torch has none."""

import ast
import inspect
import subprocess
import sys
import textwrap
from importlib import metadata, util
from pathlib import Path

import pytest
import torch

import accelerators.interface
from accelerators.backends import xpu
from accelerators.backends.xpu import EXTENSION, XpuAccelerator, extension_problem
from accelerators.memory import MemoryReading
from tests.accelerators.fakes import fake_device_module, give_torch, install_plugin

HAS_EXTENSION = util.find_spec(EXTENSION) is not None


def asked_of_torch_xpu():
    """Every name that the interface asks a device module for, and every torch.xpu.NAME that the backend spells out."""
    names, asks = set(), f"self.{accelerators.interface.Accelerator._ask.__name__}"
    for file in (accelerators.interface.__file__, xpu.__file__):
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == asks and isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.xpu":
                names.add(node.attr)
    return sorted(names | {"Stream", "Event", "stream"})


# With how many arguments each is called. What is not here takes none.
ARGUMENTS = {
    "current_stream": 1,
    "get_device_properties": 1,
    "get_rng_state": 1,
    "manual_seed_all": 1,
    "max_memory_allocated": 1,
    "mem_get_info": 1,
    "memory_allocated": 1,
    "memory_reserved": 1,
    "reset_peak_memory_stats": 1,
    "set_device": 1,
    "set_rng_state": 2,
    "stream": 1,
    "synchronize": 1,
}


@pytest.mark.parametrize("name", asked_of_torch_xpu())
def test_every_function_of_torch_xpu_that_is_called_exists_and_takes_what_it_is_given(name):
    function = getattr(torch.xpu, name, None)
    if function is None and torch.__version__ < "2.8":
        pytest.skip(f"torch {torch.__version__} has no torch.xpu.{name}; a harmless answer serves")
    assert callable(function), f"torch {torch.__version__} has no torch.xpu.{name}"
    if inspect.isfunction(function):
        inspect.signature(function).bind(*range(ARGUMENTS.get(name, 0)))


def test_torchs_own_support_goes_first(monkeypatch):
    give_torch(monkeypatch, xpu=fake_device_module(1))
    install_plugin(monkeypatch, EXTENSION)
    monkeypatch.setattr(xpu, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert XpuAccelerator().unavailable_reason() is None
    give_torch(monkeypatch, xpu=fake_device_module(0))
    assert XpuAccelerator().unavailable_reason().startswith("torch.xpu.is_available() is False")


@pytest.fixture
def torch_without_xpu(monkeypatch):
    give_torch(monkeypatch, xpu=fake_device_module(0))
    monkeypatch.setattr(torch.version, "xpu", None)


def test_without_either_the_reason_names_both(torch_without_xpu, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    reason = XpuAccelerator().unavailable_reason()
    assert reason == f"this torch is built without XPU (torch {torch.__version__}), and {EXTENSION} is not installed"


@pytest.mark.parametrize(
    ("extension", "torch_version", "is_gpu_build", "problem"),
    [
        ("2.8.10+xpu", "2.8.0+cpu", True, None),
        ("2.8.0", "2.8.0+cpu", False, "are both built without XPU"),
        ("2.8.0", "2.13.0+cpu", True, f"{EXTENSION} 2.8.0 needs torch 2.8, and this is 2.13.0+cpu"),
        ("2.8.0", "2.8.1", True, None),
        ("2.1.0", "2.10.0", True, "needs torch 2.1, and this is 2.10.0"),
    ],
)
def test_the_extension_goes_with_one_torch_only(extension, torch_version, is_gpu_build, problem):
    found = extension_problem(extension, torch_version, is_gpu_build)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize("adds_devices", [True, False])
def test_the_extension_is_imported_where_it_may_help(torch_without_xpu, monkeypatch, tmp_path, adds_devices):
    spec = install_plugin(monkeypatch, EXTENSION).__spec__
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libintel-ext-pt-gpu.so").touch()
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(metadata, "version", lambda name: torch.__version__)
    imported = []

    def import_module(name):
        imported.append(name)
        if adds_devices:
            give_torch(monkeypatch, xpu=fake_device_module(1))

    monkeypatch.setattr(xpu, "import_module", import_module)
    reason = XpuAccelerator().unavailable_reason()
    assert imported == [EXTENSION]
    assert reason is None if adds_devices else reason.startswith(f"neither torch {torch.__version__} nor {EXTENSION}")


@pytest.mark.skipif(not HAS_EXTENSION, reason=f"{EXTENSION} is not installed; ci/test --ipex has it")
def test_the_real_extension_is_judged_by_its_version_and_build_without_being_imported():
    program = f"""
        import sys, accelerators
        print(accelerators.get("xpu").unavailable_reason())
        assert {EXTENSION!r} not in sys.modules
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    expected = "are both built without XPU" if metadata.version(EXTENSION)[:3] == torch.__version__[:3] else "needs torch"
    assert expected in result.stdout, result.stderr


@pytest.mark.skipif(not HAS_EXTENSION, reason=f"{EXTENSION} is not installed; ci/test --ipex has it")
def test_the_real_extension_is_imported_and_says_that_there_is_no_xpu():
    program = f"""
        import sys, accelerators
        from accelerators.backends import xpu
        xpu.has_gpu_library = lambda spec: True     # as if this were the build for XPUs
        print(accelerators.get("xpu").unavailable_reason())
        assert {EXTENSION!r} in sys.modules
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"neither torch {torch.__version__} nor {EXTENSION} {metadata.version(EXTENSION)} finds an XPU here" in result.stdout


def test_a_driver_that_does_not_tell_free_memory_is_no_error(monkeypatch):
    def mem_get_info(index):
        raise RuntimeError("The device doesn't support querying the available free memory.")

    functions = {
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda index: 10,
        "max_memory_allocated": lambda index: 20,
        "get_device_properties": lambda index: type("Properties", (), {"total_memory": 100}),
    }
    give_torch(monkeypatch, xpu=fake_device_module(1, **functions))
    for name, function in functions.items():
        monkeypatch.setattr(torch.xpu, name, function, raising=False)
    assert XpuAccelerator().memory() == MemoryReading(
        total=100, available=None, allocated=10, peak=20, peak_since="process start"
    )
