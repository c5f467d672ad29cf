"""Every kind of wait that a program can forget: with it the program is right, without it the detector raises, every time.

Each function below is one program. `wait` says whether it makes its one wait; it returns ones when it is right.
"""

import pytest
import torch

from accelerators_sim import RaceError, configure

ORDERS = ("late", "eager", *(f"random:{seed}" for seed in range(5)))
NUMEL = 1024


def zeros(device="sim"):
    return torch.zeros(NUMEL, device=device)


def pinned(value=0.0):
    return torch.full((NUMEL,), value, pin_memory=True)


def a_producer_before_the_copy_to_the_host(sim, wait):
    side, x, buffer = sim.Stream(), zeros(), pinned()
    sim.synchronize()
    x.add_(1)
    if wait:
        side.wait_stream(sim.current_stream())
    with side:
        buffer.copy_(x, non_blocking=True)
    side.synchronize()
    return buffer


def a_copy_to_the_host_before_the_device_buffer_is_used_again(sim, wait):
    side, x, buffer = sim.Stream(), zeros().add_(1), pinned()
    side.wait_stream(sim.current_stream())
    with side:
        buffer.copy_(x, non_blocking=True)
        copied = side.record_event()
    if wait:
        copied.wait()
    x.fill_(5)
    sim.synchronize()
    return buffer


def a_copy_to_the_device_before_its_use(sim, wait):
    side, x, buffer = sim.Stream(), zeros(), pinned(1)
    side.wait_stream(sim.current_stream())
    with side:
        x.copy_(buffer, non_blocking=True)
        copied = side.record_event()
    if wait:
        sim.current_stream().wait_event(copied)
    return x * 1


def the_host_reads_before_the_copy_is_done(sim, wait):
    x, buffer = zeros().add_(1), pinned()
    buffer.copy_(x, non_blocking=True)
    copied = sim.current_stream().record_event()
    if wait:
        copied.synchronize()
    return buffer * 1


def memory_is_freed_before_its_use_is_done(sim, wait):
    side, x, buffer = sim.Stream(), zeros().add_(1), pinned()
    side.wait_stream(sim.current_stream())
    with side:
        buffer.copy_(x, non_blocking=True)
    if wait:
        x.record_stream(side)
    del x
    zeros()  # the allocator may give it the same memory
    sim.synchronize()
    return buffer


def a_copy_across_devices(sim, wait):
    side, x, y = sim.Stream(device="sim:0"), zeros("sim:0"), zeros("sim:1")
    side.wait_stream(sim.current_stream("sim:0"))
    with side:
        x.add_(1)
    if wait:
        sim.current_stream("sim:0").wait_stream(side)
    y.copy_(x)
    return y


def a_copy_in_the_thread_of_a_hook(sim, wait):
    side, buffer, w = sim.Stream(), pinned(), zeros().requires_grad_()

    def hook(p):
        if wait:
            side.wait_stream(sim.current_stream())
        with side:
            buffer.copy_(p.grad, non_blocking=True)

    w.register_post_accumulate_grad_hook(hook)
    w.sum().backward()
    side.synchronize()
    return buffer


def the_step_on_the_host_reads_a_gradient_before_its_copy_is_done(sim, wait):
    side, w = sim.Stream(), zeros().requires_grad_()
    master = torch.nn.Parameter(torch.full((NUMEL,), 2.0))
    master.grad = pinned()

    def hook(p):
        side.wait_stream(sim.current_stream())
        with side:
            master.grad.copy_(p.grad, non_blocking=True)
        p.grad.record_stream(side)
        p.grad = None

    w.register_post_accumulate_grad_hook(hook)
    w.sum().backward()
    if wait:
        side.synchronize()
    torch.optim.SGD([master], lr=1.0).step()
    return master.detach()


def a_host_buffer_is_filled_again_while_it_is_sent(sim, wait):
    x, buffer = zeros(), pinned(1)
    x.copy_(buffer, non_blocking=True)
    sent = sim.current_stream().record_event()
    if wait:
        sent.synchronize()
    buffer.fill_(7)
    return x


def an_event_is_recorded_before_the_work(sim, wait):
    side, x, done = sim.Stream(), zeros(), sim.Event()
    if not wait:
        done.record()
    x.add_(1)
    if wait:
        done.record()
    side.wait_event(done)
    with side:
        return x * 1


def a_wait_for_the_wrong_stream(sim, wait):
    right, wrong, x = sim.Stream(), sim.Stream(), zeros()
    right.wait_stream(sim.current_stream())
    wrong.wait_stream(sim.current_stream())
    with right:
        x.add_(1)
    sim.current_stream().wait_stream(right if wait else wrong)
    return x * 1


def a_buffer_travels_back_before_it_came(sim, wait):
    up, down, x, buffer = sim.Stream(), sim.Stream(), zeros(), pinned(1)
    up.wait_stream(sim.current_stream())
    with up:
        x.copy_(buffer, non_blocking=True)
    if wait:
        down.wait_stream(up)
    result = pinned()
    with down:
        result.copy_(x, non_blocking=True)
    down.synchronize()
    up.synchronize()
    return result


PROGRAMS = [
    a_producer_before_the_copy_to_the_host,
    a_copy_to_the_host_before_the_device_buffer_is_used_again,
    a_copy_to_the_device_before_its_use,
    the_host_reads_before_the_copy_is_done,
    memory_is_freed_before_its_use_is_done,
    a_copy_across_devices,
    a_copy_in_the_thread_of_a_hook,
    the_step_on_the_host_reads_a_gradient_before_its_copy_is_done,
    a_host_buffer_is_filled_again_while_it_is_sent,
    an_event_is_recorded_before_the_work,
    a_wait_for_the_wrong_stream,
    a_buffer_travels_back_before_it_came,
]


def settled(sim, program, wait):
    result = program(sim, wait)
    for index in range(2):
        sim.synchronize(index)
    return result.cpu()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_forgotten_wait_raises_and_the_wait_makes_it_right(sim, program, order):
    configure(order=order)
    for _ in range(3):
        assert settled(sim, program, wait=True).eq(1).all()
        with pytest.raises(RaceError):
            settled(sim, program, wait=False)
        for index in range(2):
            sim.synchronize(index)


@pytest.mark.parametrize(
    "program",
    [
        a_copy_to_the_host_before_the_device_buffer_is_used_again,
        a_copy_to_the_device_before_its_use,
        the_host_reads_before_the_copy_is_done,
        a_copy_across_devices,
        the_step_on_the_host_reads_a_gradient_before_its_copy_is_done,
        a_host_buffer_is_filled_again_while_it_is_sent,
        a_wait_for_the_wrong_stream,
        a_buffer_travels_back_before_it_came,
    ],
    ids=lambda program: program.__name__,
)
def test_without_the_detector_the_forgotten_wait_shows_as_wrong_numbers(sim, program):
    configure(order="late", races=False)
    assert settled(sim, program, wait=True).eq(1).all()
    assert not settled(sim, program, wait=False).eq(1).all()


@pytest.mark.parametrize("program", [a_producer_before_the_copy_to_the_host, an_event_is_recorded_before_the_work])
def test_without_the_detector_random_orders_show_what_late_ones_hide(sim, program):
    wrong = 0
    for seed in range(40):
        configure(order=f"random:{seed}", races=False)
        assert settled(sim, program, wait=True).eq(1).all()
        wrong += not settled(sim, program, wait=False).eq(1).all()
    assert wrong > 0


def test_the_same_seed_gives_the_same_order(sim):
    def outcomes():
        results = []
        for seed in range(20):
            configure(order=f"random:{seed}", races=False)
            results.append(bool(settled(sim, a_producer_before_the_copy_to_the_host, wait=False).eq(1).all()))
        return results

    first = outcomes()
    assert first == outcomes()
    assert len(set(first)) == 2
