"""What tests need of this machine and this torch, as marks that skip with the reason."""

import os
import shutil
import sys
from importlib.util import find_spec

import pytest
import torch

from accelerators import staged
from accelerators.backends.cuda import CudaAccelerator
from accelerators_sim import SimulatedAccelerator

_lacking = SimulatedAccelerator().unavailable_reason()
needs_sim = pytest.mark.skipif(_lacking is not None, reason=str(_lacking))

_lacking = CudaAccelerator().unavailable_reason()
needs_cuda = (pytest.mark.cuda, pytest.mark.skipif(_lacking is not None, reason=str(_lacking)))

_has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not _has_compiler, reason="there is no C++ compiler here, which the compiled step needs")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files and /proc")
IS_TORCH_2_8 = torch.__version__.startswith("2.8.")
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or IS_TORCH_2_8,
    reason="transformers is not installed (it needs Python 3.11), or the pinned one does not import with torch 2.8",
)
needs_muon = pytest.mark.skipif("Muon" not in vars(torch.optim), reason="torch has a Muon from 2.9 on")


class CudaThroughHost(CudaAccelerator):
    """CUDA with collectives through the host: NCCL refuses two ranks on one device."""

    @property
    def communication_backend(self):
        staged.serve(self)
        return staged.NAME


def has_package(name):
    """Whether a test may use it; in CI, where all are installed, always, so that what is missing there fails."""
    return find_spec(name.partition(".")[0]) is not None or bool(os.environ.get("CI"))


needs_accelerate = pytest.mark.skipif(not has_package("accelerate"), reason="accelerate is not installed")
