"""XPU, Intel's GPUs: torch's own support, or Intel's extension for a torch that has none."""

from __future__ import annotations

from importlib import import_module, metadata, util
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from accelerators.interface import Accelerator
from accelerators.memory import MemoryReading

EXTENSION = "intel_extension_for_pytorch"


class XpuAccelerator(Accelerator):
    """Intel's GPUs."""

    name = "xpu"
    visible_devices_variable = "ZE_AFFINITY_MASK"
    compile_backend = "inductor"
    has_dlpack = True

    def unavailable_reason(self) -> str | None:
        reason = super().unavailable_reason()
        if reason is None or torch.version.xpu is not None:
            return reason
        spec = util.find_spec(EXTENSION)
        if spec is None:
            return f"this torch is built without XPU (torch {torch.__version__}), and {EXTENSION} is not installed"
        # The extension overrides kernels of torch, and fails with another torch: so it is imported only if it can help.
        version = metadata.version(EXTENSION)
        problem = extension_problem(version, torch.__version__, is_gpu_build=has_gpu_library(spec))
        if problem is not None:
            return problem
        import_module(EXTENSION)  # adds its devices to torch.xpu
        if super().unavailable_reason() is None:
            return None
        return f"neither torch {torch.__version__} nor {EXTENSION} {version} finds an XPU here"

    def read_memory(self, index: int) -> MemoryReading:
        try:
            return super().read_memory(index)
        except RuntimeError:
            # The drivers of some integrated GPUs do not say how much is free.
            total = torch.xpu.get_device_properties(index).total_memory
            allocated, peak = torch.xpu.memory_allocated(index), torch.xpu.max_memory_allocated(index)
            return MemoryReading(total, None, allocated, peak, self._peak_since(index))


def extension_problem(extension_version: str, torch_version: str, is_gpu_build: bool) -> str | None:
    """Returns why that version of the extension cannot give that torch an XPU, or None if it can."""
    needed = _minor(extension_version)
    if needed != _minor(torch_version):
        return (
            f"{EXTENSION} {extension_version} needs torch {needed[0]}.{needed[1]}, and this is {torch_version}; it ended with "
            "torch 2.8, and torch has builds with XPU of its own"
        )
    if not is_gpu_build:
        return f"torch {torch_version} and {EXTENSION} {extension_version} are both built without XPU"
    return None


def has_gpu_library(spec: ModuleSpec) -> bool:
    """Returns True if the extension is the build for XPUs. The one for CPUs has the same name, and not this library."""
    return any(next(Path(folder).glob("*/*intel-ext-pt-gpu*"), None) for folder in spec.submodule_search_locations or ())


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
