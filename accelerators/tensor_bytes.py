"""The bytes of a tensor are those of its elements, one after the other, whatever its dtype; nothing here needs NumPy.

    as_bytes(tensor)                        the same memory as a tensor of bytes, on its device
    host_bytes(tensor)                      the same memory on the host, to read, to write, and to give to a file or a digest
    bytes_of(tensor)                        a copy of its values, wherever and however they lie
    from_bytes(content, dtype, shape)       the tensor of such a copy

A tensor of no elements has no bytes, which torch's own `frombuffer` refuses and these four do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor as a row of bytes, to move its values or to compare its bits.

    Backends lack some dtypes, and what is only moved needs none. Compared as numbers, NaN differs from itself and 0.0 is -0.0.
    """
    return tensor.view(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous host tensor, to read and to write, without NumPy, which torch's own way needs.

    The view keeps the tensor alive, and no version counter notes what is written through it. A subclass of Tensor may have its
    values elsewhere: of one, the memory of a copy is returned, read-only.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return host_bytes(tensor.clone(memory_format=torch.contiguous_format).as_subclass(torch.Tensor)).toreadonly()
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"Cannot look at the bytes of a tensor on {tensor.device} with strides {tensor.stride()}: they are not one stretch "
            "of host memory. Copy it to the host, and call contiguous()."
        )
    tensor = tensor.resolve_conj().resolve_neg()  # numpy() does the same; the simulated device sees the read by these two
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # the view keeps the tensor alive
    return memoryview(memory).cast("B")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns a copy of the values of a tensor, in the order of its elements. A tensor that is conjugated or negated only when
    it is read, as a view of a complex one, has its values computed first."""
    return bytes(host_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))


def from_bytes(content: bytes, dtype: torch.dtype, shape: Sequence[int] = (-1,)) -> torch.Tensor:
    """Returns a host tensor with the values that `bytes_of` took of one of this dtype and shape; a row, if no shape is given.

    The memory is the tensor's own: it may be written, and `content` need not stay. Bytes of another size raise RuntimeError.
    """
    row = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
    return row.reshape(tuple(shape))
