"""CUDA, and ROCm, which torch also calls cuda: what differs from other torch devices."""

from __future__ import annotations

import sys

import torch

from accelerators.interface import Accelerator


class CudaAccelerator(Accelerator):
    """GPUs of NVIDIA and AMD."""

    name = "cuda"
    communication_backend = "gloo" if sys.platform == "win32" else "nccl"  # what ROCm has is called nccl too; Windows has none
    visible_devices_variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    compile_backend = "inductor"
    has_dlpack = True

    def unavailable_reason(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this torch is built without CUDA and ROCm (torch {torch.__version__})"
        return super().unavailable_reason()

    def preferred_dtype(self) -> torch.dtype:
        # Before Ampere bf16 is right but emulated, and fp16 is what the hardware computes in.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
