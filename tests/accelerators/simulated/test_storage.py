"""Memory of the simulated device: real storages, counted to the byte, on devices with an end."""

import gc

import pytest
import torch

from accelerators_sim import configure


@pytest.fixture
def held(sim):
    """The bytes that a device holds more than before the test."""
    if sim is None:
        return None
    gc.collect()
    before = [sim.memory_allocated(index) for index in range(2)]
    return lambda index=0: sim.memory_allocated(index) - before[index]


def test_an_allocation_counts_its_bytes_until_its_last_reference_goes(held):
    x = torch.empty(1000, dtype=torch.float32, device="sim")
    y = x[10:20]
    assert held() == 4000
    del x
    assert held() == 4000
    del y
    assert held() == 0


def test_views_and_aliases_are_counted_once(held):
    x = torch.empty(6, 4, device="sim")
    aliases = [x.t(), x.view(-1), x[1:], x.detach(), x.data, x.view(torch.int32), x.unsqueeze(0).expand(5, 6, 4)]
    assert held() == 96
    assert {alias.untyped_storage().data_ptr() for alias in aliases} == {x.untyped_storage().data_ptr()}


def test_each_device_counts_for_itself(held):
    x = torch.empty(10, device="sim:0")
    y = torch.empty(20, dtype=torch.bfloat16, device="sim:1")
    assert (held(0), held(1)) == (40, 40)
    assert (x.device.index, y.device.index) == (0, 1)


def test_the_peak_is_the_most_that_was_held_since_the_last_reset(sim, held):
    sim.reset_peak_memory_stats()
    start = sim.max_memory_allocated()
    x = torch.empty(1000, device="sim")
    del x
    torch.empty(10, device="sim")
    assert sim.max_memory_allocated() - start == 4000
    sim.reset_peak_memory_stats()
    assert sim.max_memory_allocated() == sim.memory_allocated()


def test_an_operator_holds_its_result_and_nothing_else(held):
    x = torch.ones(256, device="sim")
    y = (x * 2 + 1).sum()
    assert held() == 1024 + 4
    assert y.item() == 768


def test_a_device_with_too_little_memory_raises_as_a_real_one_does(sim):
    sim.synchronize()
    configure(memory_bytes=sim.memory_allocated() + 4096)
    x = torch.empty(512, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=r"4096 bytes\) on sim:0: 2048 bytes of its"):
        torch.empty(1024, device="sim")
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.cat([x, x, x])
    del x
    torch.empty(1024, device="sim")


def test_what_did_not_fit_costs_nothing(sim, held):
    configure(memory_bytes=sim.memory_allocated() + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10**12, device="sim")
    assert held() == 0


def test_a_parameter_is_freed_and_put_back_through_its_data(held):
    flat = torch.arange(12.0, device="sim")
    p = torch.nn.Parameter(torch.zeros(3, 4, device="sim"))
    assert held() == 96
    p.data = torch.empty(0, device="sim")
    assert held() == 48
    p.data = flat.view(3, 4)
    flat.mul_(2)
    assert p.tolist() == (torch.arange(12.0).view(3, 4) * 2).tolist()
    assert p.data_ptr() == flat.data_ptr()
    assert held() == 48


def test_sizes_strides_and_offsets_are_those_of_the_host(sim):
    host = torch.arange(60.0).view(3, 4, 5)
    device = host.to("sim")
    for view in (lambda t: t[1], lambda t: t.transpose(0, 2)[2:], lambda t: t[:, ::2, 1:3], lambda t: t.unfold(2, 2, 2)):
        ours, theirs = view(device), view(host)
        assert (ours.size(), ours.stride(), ours.storage_offset()) == (theirs.size(), theirs.stride(), theirs.storage_offset())
        assert ours.data_ptr() - device.data_ptr() == theirs.data_ptr() - host.data_ptr()
        assert torch.equal(ours.cpu(), theirs)


def test_tensors_of_different_devices_do_not_mix(sim):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim") + torch.ones(2)
    assert (torch.ones(2, device="sim") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_a_device_that_is_not_there_is_refused(sim):
    with pytest.raises(RuntimeError, match="Cannot use device sim:2:"):
        torch.empty(1, device="sim:2")
    with pytest.raises(RuntimeError, match="Cannot use device sim:5:"):
        sim.set_device(5)


def test_torch_itself_knows_how_many_devices_there_are_and_which_is_current(sim):
    assert torch.accelerator.device_count() == 2
    sim.set_device(1)
    assert torch.accelerator.current_device_index() == 1
    assert torch.ones(1).to("sim").device == torch.empty(1, device="sim").device == torch.device("sim:1")
    torch.accelerator.set_device_index(0)
    assert sim.current_device() == 0
