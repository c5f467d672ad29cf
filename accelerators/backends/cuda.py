"""CUDA, and ROCm, which torch also calls cuda: the answers that torch does not give."""

from __future__ import annotations

import sys

import torch

from accelerators.interface import Accelerator


class CudaAccelerator(Accelerator):
    """GPUs of NVIDIA and AMD."""

    name = "cuda"
    communication_backend = "gloo" if sys.platform == "win32" else "nccl"  # torch calls RCCL nccl, too; Windows has neither
    visible_devices_variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    compile_backend = "inductor"
    has_dlpack = True

    def unavailable_reason(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this torch is built without CUDA and ROCm (torch {torch.__version__})"
        return super().unavailable_reason()

    def preferred_dtype(self) -> torch.dtype:
        # GPUs before Ampere emulate bf16: its numbers are right, but their hardware computes in fp16.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
