"""CUDA and ROCm: what can be said without one."""

import pytest
import torch

from accelerators.backends.cuda import CudaAccelerator
from tests.accelerators.fakes import fake_device_module, give_torch


def test_a_torch_without_cuda_says_that_it_is_built_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    reason = CudaAccelerator().unavailable_reason()
    assert reason == f"this torch is built without CUDA and ROCm (torch {torch.__version__})"


def test_a_cuda_torch_without_a_device_says_what_torch_says(monkeypatch):
    give_torch(monkeypatch, cuda=fake_device_module(0))
    assert CudaAccelerator().unavailable_reason().startswith("torch.cuda.is_available() is False")


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_preferred_only_where_the_hardware_has_it(monkeypatch, native):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert CudaAccelerator().preferred_dtype() == (torch.bfloat16 if native else torch.float16)


def test_what_torch_cannot_tell_is_said_in_the_class():
    it = CudaAccelerator()
    assert it.communication_backend in ("nccl", "gloo")
    assert it.visible_devices_variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    assert it.compile_backend == "inductor"
