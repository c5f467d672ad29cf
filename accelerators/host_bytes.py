"""The bytes of a tensor of the host, for files and messages."""

from __future__ import annotations

import ctypes

import torch


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of the host, to read and to write; of a subclass, which may have its values
    elsewhere, that of a copy, to read. torch's own way to it needs NumPy, which may be missing."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return host_bytes(tensor.clone(memory_format=torch.contiguous_format).as_subclass(torch.Tensor)).toreadonly()
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"Cannot look at the bytes of a tensor on {tensor.device} with strides {tensor.stride()}: they are not one stretch "
            "of host memory. Copy it to the host, and call contiguous()."
        )
    tensor = tensor.resolve_conj().resolve_neg()  # as numpy() does; by these the simulated device sees that memory is read
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # which keeps it alive
    return memoryview(memory).cast("B")
