"""Where memory lies, by its address."""

import numpy as np
import torch

from zero.memory.addresses import KnownMemory, address_of, overlapping, share_memory, starts_where, storage_of


def test_overlapping_memory_is_found():
    base = torch.zeros(20)
    assert overlapping([base[:10], torch.zeros(3), base[9:]]) == (0, 2)
    assert overlapping([base[:10], base[10:]]) is None
    assert overlapping([torch.zeros(3).expand(4, 3)]) == (0, 0)
    assert overlapping([base[:0], base]) is None


def test_two_stretches_share_memory_from_the_first_byte_that_both_have():
    base = torch.zeros(20)
    assert share_memory(base[:10], base[9:]) and share_memory(base[9:], base[:10]) and share_memory(base, base[3:4])
    assert not share_memory(base[:10], base[10:]) and not share_memory(base[10:], base[:10])


def test_all_views_of_one_memory_have_its_storage():
    """Two tensors of one array have storages of their own, which begin at one address."""
    array = np.zeros(8, dtype=np.float32)
    one, other = torch.from_numpy(array), torch.from_numpy(array)
    assert storage_of(one[3:]) == storage_of(one.view(2, 4).t()) == storage_of(other) != storage_of(one.clone())


def test_what_starts_at_the_same_byte_is_told_from_what_lies_behind():
    base = torch.zeros(8)
    assert starts_where(base[2:4], base[2:]) and not starts_where(base[2:], base)
    assert address_of(base[2:]) == address_of(base) + 8 and address_of(base[:0]) == 0 == address_of(torch.empty(0))


def test_a_parameter_that_has_other_memory_than_was_noted_is_known_by_its_number():
    tensors, memory = [torch.zeros(4) for _ in range(4)], KnownMemory()
    for index in (3, 1, 0):
        memory.note(index, tensors[index])
    memory.note(2, None)  # it may lie anywhere
    assert memory.changed(tensors) == [] == memory.unknown(4) and memory.unknown(6) == [4, 5]
    tensors = [torch.zeros(4), tensors[1], torch.zeros(4), tensors[3].clone()]
    assert memory.changed(tensors) == [3, 0]
    memory.note(3, tensors[3])
    memory.forget(3)
    assert memory.changed(tensors) == [0] and memory.unknown(4) == [3]
    memory.forget()
    assert memory.unknown(2) == [0, 1]
