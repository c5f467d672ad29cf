"""Importing is free: no device is asked, nothing global changes, nothing heavy is loaded."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests import programs

HEAVY = ("pydantic", "rich", "psutil", "pytest", "matplotlib", "intel_extension_for_pytorch")


def run(program, **environment):
    result = programs.with_torch(program, {**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout


EVERYTHING = """
    import accelerators, zero
    for name in accelerators.__all__:
        getattr(accelerators, name)
    from accelerators.backends.cuda import CudaAccelerator
    from accelerators.backends.mps import MpsAccelerator
    from accelerators.backends.xpu import XpuAccelerator
    from accelerators.backends.cpu import CpuAccelerator
    made = [CudaAccelerator(), MpsAccelerator(), XpuAccelerator(), CpuAccelerator(), accelerators.Accelerator("mtia")]
"""


@pytest.mark.promise("X01")
def test_importing_asks_no_device_anything():
    program = """
        import torch

        def refuse(*arguments, **options):
            raise AssertionError("a device was asked at import")

        for module in (torch.cuda, torch.xpu, torch.mps, torch.accelerator):
            for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties", "current_device",
                         "set_device", "synchronize", "mem_get_info", "current_accelerator", "current_device_index"):
                if hasattr(module, name):
                    setattr(module, name, refuse)
        for name in ("_cuda_getDeviceCount", "_cuda_init", "_xpu_getDeviceCount", "_xpu_init"):
            setattr(torch._C, name, refuse)
    """
    run(textwrap.dedent(program) + textwrap.dedent(EVERYTHING))


@pytest.mark.promise("X01")
def test_importing_the_front_doors_imports_nothing_but_themselves():
    loaded = run("""
        import sys
        import torch
        before = set(sys.modules)
        import accelerators, zero
        print(*sorted(set(sys.modules) - before))
    """).split()
    assert {"accelerators", "zero"} <= set(loaded)
    ours = [name for name in loaded if name.partition(".")[0] in ("accelerators", "zero")]
    assert len(ours) <= 4, ours
    # Whatever else is there is of the standard library, and little of it: that is what keeps it far under 50 ms.
    others = [name for name in loaded if name not in ours and name.partition(".")[0] not in sys.stdlib_module_names]
    assert not [name for name in others if not name.startswith("__editable__")]
    assert len(loaded) <= 10


def test_importing_does_not_even_import_torch():
    program = "import sys, accelerators; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr


def test_choosing_loads_no_heavy_module():
    loaded = run("""
        import sys
        import torch
        before = set(sys.modules)
        import accelerators
        accelerator = accelerators.current()
        accelerator.memory(), accelerator.supported_dtypes(), accelerator.rng_state()
        print(*sorted(set(sys.modules) - before))
    """, ACCELERATOR="cpu").split()  # fmt: skip
    heavy = [name for name in loaded if name.startswith(HEAVY)]
    assert not heavy
    assert not [name for name in loaded if name.startswith("torch.")]


@pytest.mark.promise("X02")
def test_importing_and_choosing_compile_nothing_and_need_no_compiler():
    program = """
        import os, subprocess, sys
        import torch

        def refuse(*arguments, **options):
            raise AssertionError(f"a process was started: {arguments}")

        subprocess.Popen.__init__ = os.system = os.posix_spawn = os.fork = refuse
    """
    after = """
        accelerators.current().supported_dtypes()
        assert "torch.utils.cpp_extension" not in sys.modules
    """
    run(textwrap.dedent(program) + textwrap.dedent(EVERYTHING) + textwrap.dedent(after), PATH="", CC="false", CXX="false")


SNAPSHOT = """
    import json, logging, multiprocessing, os, random, signal, sys, threading, warnings
    import numpy, torch

    def snapshot():
        return {
            "torch rng": hash(torch.get_rng_state().numpy().tobytes()),
            "python rng": hash(random.getstate()),
            "numpy rng": hash(numpy.random.get_state()[1].tobytes()),
            "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "threads of python": threading.active_count(),
            "default dtype": str(torch.get_default_dtype()),
            "default device": str(torch.get_default_device()),
            "grad mode": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")],
            "current accelerator": str(torch.accelerator.current_accelerator()),
            "signal handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
            "log handlers": [str(logging.getLogger(name).handlers) for name in (None, "accelerators", "zero")],
            "log levels": [logging.getLogger(name).level for name in (None, "accelerators", "zero")],
            "start method": multiprocessing.get_start_method(allow_none=True),
            "warning filters": [str(entry) for entry in warnings.filters],
            "environment": dict(os.environ),
            "working directory": os.getcwd(),
            "import path": list(sys.path),
            "streams": [id(sys.stdin), id(sys.stdout), id(sys.stderr), id(sys.excepthook)],
            "recursion limit": sys.getrecursionlimit(),
            "umask": [os.umask(0o22), os.umask(0o22)],
        }

    before = snapshot()
"""


@pytest.mark.promise("X09")
@pytest.mark.parametrize(
    "choose", [pytest.param(False, id="imported", marks=pytest.mark.full), pytest.param(True, id="imported and chosen")]
)
def test_nothing_global_changes(choose):
    using = """
        accelerator = accelerators.current()
        accelerator.memory(), accelerator.reset_peak_memory(), accelerator.supported_dtypes(), accelerator.rng_state()
        accelerator.pin(torch.ones(3)), accelerator.new_event(timing=True).record(), accelerator.preferred_dtype()
        [candidate.reason for candidate in accelerators.candidates() if candidate.priority >= 0]
    """
    program = textwrap.dedent(SNAPSHOT) + textwrap.dedent(EVERYTHING) + (textwrap.dedent(using) if choose else "")
    before, after = json.loads(run(program + "\nprint(json.dumps([before, snapshot()]))", ACCELERATOR="cpu"))
    assert len(before) >= 12
    assert after == before
