"""The host as the simulated device's partner: pinned memory, and how its own uses of it are seen."""

import threading

import pytest
import torch

from accelerators_sim import RaceError, SimulatedAccelerator, pinned, without


@pytest.fixture
def in_flight(sim):
    """Pinned memory that a copy still writes."""
    if sim is None:
        return None
    host = torch.zeros(4, 4, pin_memory=True)
    host.copy_(torch.ones(4, 4, device="sim"), non_blocking=True)
    return host


def test_memory_that_was_pinned_says_so(sim):
    for tensor in (torch.empty(3, pin_memory=True), torch.zeros(3).pin_memory(), torch.ones(2, 3, pin_memory=True)[1]):
        assert tensor.is_pinned()
    for tensor in (torch.empty(3), torch.zeros(3).pin_memory().clone(), torch.empty(0).pin_memory()):
        assert not tensor.is_pinned()
    assert torch.arange(6.0).view(2, 3).t().pin_memory().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_non_blocking_move_to_the_host_gives_pinned_memory(sim):
    x = torch.ones(4, device="sim")
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    with pytest.raises(RaceError):
        host.sum()
    sim.synchronize()
    assert host.sum().item() == 4


def test_a_device_cannot_hold_pinned_memory(sim):
    with pytest.raises(RuntimeError, match="only host memory is pinned"):
        torch.empty(3, device="sim", pin_memory=True)


READS = {
    "an operator": lambda host: host + 1,
    "a view of it": lambda host: host[1:].t().sum(),
    "a copy": lambda host: host.clone(),
    "a change of dtype": lambda host: host.to(torch.float64),
    "a reshape that copies": lambda host: host.t().reshape(-1),
    "an item": lambda host: host[0, 0].item(),
    "a list": lambda host: host.tolist(),
    "an array": lambda host: host.numpy(),
    "a print": str,
    "an out argument": lambda host: torch.add(torch.ones(4, 4), 1, out=host),
    "a list of tensors": lambda host: torch._foreach_add_([torch.ones(4, 4)], [host]),
    "a blocking copy to the device": lambda host: torch.zeros(4, 4, device="sim").copy_(host),
    "a scalar for a kernel": lambda host: torch.zeros(4, device="sim") + host[0, 0],
}


@pytest.mark.parametrize("name", READS)
def test_the_host_may_not_use_what_a_copy_still_writes(sim, in_flight, name):
    with pytest.raises(RaceError, match="the host"):
        READS[name](in_flight)
    sim.synchronize()
    READS[name](in_flight)


NO_USES = {
    "its shape": lambda host: (host.shape, host.stride(), host.numel(), host.dtype, host.is_pinned(), host.data_ptr()),
    "views": lambda host: (
        host[1:],
        host.t(),
        host.view(-1),
        host.reshape(2, 8),
        host.unsqueeze(0).expand(3, 4, 4),
        host.detach(),
    ),
    "others like it": lambda host: (torch.empty_like(host), torch.zeros_like(host), host.new_ones(3)),
    "a conversion to what it is": lambda host: (host.to(torch.float32), host.contiguous(), host.cpu(), host.float()),
    "other memory": lambda host: torch.ones(4) + 1,
}


@pytest.mark.parametrize("name", NO_USES)
def test_what_does_not_touch_the_memory_is_no_use_of_it(sim, in_flight, name):
    NO_USES[name](in_flight)
    sim.synchronize()
    assert in_flight.sum().item() == 16


def test_autograd_on_the_host_is_seen(sim):
    w = torch.ones(4, requires_grad=True)
    host = torch.ones(4, pin_memory=True)
    loss = (w * host).sum()
    host.data.copy_(torch.ones(4, device="sim"), non_blocking=True)
    with pytest.raises(RaceError):
        loss.backward()
    sim.synchronize()


def test_a_thread_that_used_the_device_is_seen(sim, in_flight):
    caught = []

    def read():
        torch.ones(1, pin_memory=True)
        try:
            in_flight.sum()
        except RaceError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert len(caught) == 1
    sim.synchronize()


def test_pinned_memory_that_went_is_not_looked_for_at_its_address(sim):
    for _ in range(20):
        host = torch.zeros(64, pin_memory=True)
        host.copy_(torch.ones(64, device="sim"), non_blocking=True)
        del host
        sim.current_stream().query()  # runs the copy, which kept the memory; the host has not waited for it
        torch.zeros(64).sum()
    sim.synchronize()


@pytest.mark.promise("M10")
def test_where_pinning_fails_pageable_memory_serves_with_one_warning(sim, caplog):
    with without("pin"):
        with pytest.raises(RuntimeError):
            torch.empty(1, pin_memory=True)
        it = SimulatedAccelerator()
        host = torch.arange(4.0)
        assert it.pin(host) is host and it.pin(host) is host
        assert not host.is_pinned()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        x = torch.ones(4, device="sim")
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [1.0] * 4
    assert SimulatedAccelerator().pin(torch.arange(4.0)).is_pinned()


def test_memory_that_goes_while_the_host_looks_for_what_is_done_is_no_error(monkeypatch):
    """Another thread, or garbage that is collected meanwhile, may take an entry away or put another one in its place."""
    in_flight = {}

    class Done:
        def __init__(self, address, meanwhile):
            self.address, self.meanwhile = address, meanwhile

        def accesses(self):
            self.meanwhile(self.address)
            return []

    successor = object()
    in_flight[1] = Done(1, lambda address: in_flight.pop(address))
    in_flight[2] = Done(2, lambda address: in_flight.update({address: successor}))
    in_flight[3] = Done(3, lambda address: None)
    monkeypatch.setattr(pinned._watched, "in_flight", in_flight)
    pinned._forget_done()
    assert in_flight == {2: successor}
