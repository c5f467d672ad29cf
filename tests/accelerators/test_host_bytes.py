"""Bytes of a tensor, without NumPy."""

import gc

import pytest
import torch

from accelerators.tensor_bytes import as_bytes, bytes_of, from_bytes, host_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_they_are_those_of_its_memory_and_can_be_written(dtype):
    tensor = torch.tensor([[1, 0], [1, 1]], dtype=dtype)
    view = host_bytes(tensor)
    assert view.nbytes == tensor.nbytes
    assert torch.equal(torch.frombuffer(bytearray(view), dtype=dtype), tensor.flatten())
    view[:] = bytes(tensor.nbytes)
    assert not tensor.any()


def test_they_keep_the_memory_alive():
    view = host_bytes(torch.full((1000,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(1000, dtype=torch.uint8) for _ in range(100)]
    assert set(view) == {7} and len(others) == 100


class Elsewhere(torch.Tensor):
    """As a tensor may be that has its values in other memory."""


def test_what_is_written_to_a_copy_cannot_be_lost_without_a_word():
    tensor = torch.arange(3, dtype=torch.uint8).as_subclass(Elsewhere)
    view = host_bytes(tensor)
    assert bytes(view) == bytes([0, 1, 2])
    with pytest.raises(TypeError):
        view[0] = 7


def test_of_nothing_there_are_none():
    assert bytes(host_bytes(torch.empty(0, 3))) == b""


def test_what_is_not_in_one_stretch_of_host_memory_is_refused():
    with pytest.raises(ValueError, match="Cannot look at the bytes of a tensor on cpu"):
        host_bytes(torch.ones(3, 3).t()[:2])
    with pytest.raises(ValueError, match="on meta"):
        host_bytes(torch.ones(3, device="meta"))


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_row_of_bytes_is_the_memory_itself(shape):
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    row = as_bytes(tensor)
    assert row.shape == (tensor.nbytes,) and row.data_ptr() == tensor.data_ptr()
    row.zero_()
    assert not tensor.any()


def test_what_is_no_stretch_of_memory_has_no_row_of_bytes():
    with pytest.raises(RuntimeError, match="view"):
        as_bytes(torch.ones(3, 3).t())


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_copy_of_values_comes_back_as_the_tensor_that_it_was(shape):
    tensor = torch.arange(6.0)[: torch.Size(shape).numel()].reshape(shape).bfloat16().t()
    again = from_bytes(bytes_of(tensor), tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor) and again.shape == tensor.shape
    again.zero_()  # the memory is of its own
    assert from_bytes(bytes_of(tensor), tensor.dtype).shape == (tensor.numel(),)


def test_bytes_are_not_taken_for_a_tensor_of_another_size():
    for content in (b"", bytes(4)):
        with pytest.raises(RuntimeError, match="shape"):
            from_bytes(content, torch.float32, (5,))
