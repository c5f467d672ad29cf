"""H02, R13: copies between host and device come as late as they may, and every wait for one of them is needed."""

import ast
import contextlib
import gc
import inspect
import itertools
import textwrap
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
from accelerators.streams import Stream
from tests import inside, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.loops import weights
from tests.promises.offloads import SMALL, bits, difference, grads, on_sim, send
from tests.promises.test_offload_memory import Unknown
from tests.traces import copied
from tests.zoo.case import filled
from zero import shard
from zero.config.schema import LossScale
from zero.memory.gradient_shard import GradientShard
from zero.memory.homes.host import HostCopy, HostHome
from zero.memory.homes.registry import Homes
from zero.memory.masters import Masters
from zero.memory.staging import Staging
from zero.sharding.state_offload import StateOffloader


def in_random_orders(model, optimizer, rank, num_orders):
    """Put-off work of every window runs in another legal order; the detector raises where two accesses have none."""
    import accelerators_sim as simulated

    found = []
    for seed in range(num_orders):
        simulated.configure(order=f"random:{seed}")
        for micro in range(3 if seed % 10 == 2 else 1):
            send(model, optimizer, rank, seed, micro)
        if seed % 5 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if seed % 5 == 3:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        optimizer.step()
        if seed % 7:
            found.append(copied(weights(model)))
        optimizer.zero_grad()
    return found, bits(model, optimizer)


@pytest.mark.full
@needs_sim
@pytest.mark.promise("H02", "R13")
@pytest.mark.parametrize(
    ("stage", "dtype", "kernels", "num_orders"),
    [
        (2, "bfloat16", "torch", 15),
        *(
            pytest.param(*one, kernels, 50, marks=pytest.mark.full)
            for one in ((1, None), (2, "bfloat16"), (2, None))
            for kernels in ("torch", "fused")
        ),
    ],
)
def test_random_orders_of_late_copies_race_nowhere_and_give_the_bits_of_no_offload(stage, dtype, kernels, num_orders):
    options = {"stage": stage, "dtype": dtype, "kernels": kernels}
    program = partial(in_random_orders, num_orders=num_orders)
    for none, offloaded in on_sim(2, program, [options, {**options, "offload": "cpu"}]):
        assert difference(offloaded, none) is None


# every wait in turn -----------------------------------------------------------------------------------------------------

WAITS = {
    method.__name__
    for method in (
        *(Stream.wait_stream, Stream.wait_event, Stream.synchronize, HostCopy.finish, HostCopy.wait, HostCopy.release_source),
        *(HostHome._add_arrived, HostHome.catch_up, Masters._get_back, StateOffloader._finish),
    )
}
CLASSES = (HostCopy, HostHome, Homes, GradientShard, Masters, Staging, StateOffloader)


# Weights in shares alone need the first: test_sharded_weights_memory.py shows that, where nothing else has made the host wait.
# The second is of replicas, which the one rank here has none of. One waits for nothing; the last ones are of masters that are
# stepped in the backward, for which test_step_in_backward.py writes to weights behind it, and counts what is lent.
ELSEWHERE = {
    method.__name__
    for method in (
        *(HostHome.finish_reads, GradientShard.add_across, HostHome.has_added),
        *(Masters.hold_weights, Masters.take_back_sent),
    )
}


OF_WEIGHTS_IN_A_BACKWARD = "stream.wait_event(after)"  # in `HostHome._copy`: test_step_in_backward.py fails without it


def is_wait(owner, statement):
    """Of those for copies: that a borrower of staging waits for the stream of the one before it has nothing to do with them."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in WAITS:
        return False
    if ast.unparse(statement) == OF_WEIGHTS_IN_A_BACKWARD:
        return False
    return owner is not Staging or call.func.attr != Stream.wait_stream.__name__


def methods():
    for owner in CLASSES:
        for name, member in vars(owner).items():
            if inspect.isfunction(member) and name not in ELSEWHERE:
                yield owner, name, ast.parse(textwrap.dedent(inspect.getsource(member)))


def waits():
    """Each wait of the classes that copy: class, method, its number there and its source."""
    for owner, name, tree in methods():
        found = [statement for statement in ast.walk(tree) if is_wait(owner, statement)]
        yield from ((owner, name, number, ast.unparse(statement)) for number, statement in enumerate(found))


@contextlib.contextmanager
def without_wait(owner, name, number):
    """That method with a `pass` in place of that wait."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(owner)[name])))
    wait = [statement for statement in ast.walk(tree) if is_wait(owner, statement)][number]
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and wait in body:
                body[body.index(wait)] = ast.copy_location(ast.Pass(), wait)
    made = {}
    exec(compile(tree, f"<{owner.__name__}.{name} without a wait>", "exec"), vars(inspect.getmodule(owner)), made)
    with mock.patch.object(owner, name, made[name]):
        yield


def keeps_no_ends(transfer, accelerator, event, *ends):
    transfer._accelerator, transfer._event, transfer._ends = accelerator, event, ()


def forgets_the_transfer(staging, buffer, transfer=None, give_back=Staging.give_back):
    give_back(staging, buffer)


KEPT = {
    "a transfer keeps its ends": mock.patch.object(HostCopy, "__init__", keeps_no_ends),
    "staging keeps the transfer": mock.patch.object(Staging, "give_back", forgets_the_transfer),
}


class OnTwoStreams(nn.Module):
    """Six buckets of one size, of which three are computed, and so filled and emptied, on a stream of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.side = accelerators.get("sim").new_stream()

    def forward(self, x):
        device = accelerators.get("sim")
        main = device.current_stream()
        self.side.wait_stream(main)
        with device.in_stream(self.side):
            right = nn.Sequential(*self.layers[3:])(x)
        left = nn.Sequential(*self.layers[:3])(x)
        main.wait_stream(self.side)
        return left + right


def scenario(dtype, offload, make):
    """Everything that makes copies meet each other: what it gives."""
    with torch.device("sim:0"):
        model = filled(OnTwoStreams(), real=True)
    inner = make(model.parameters(), lr=0.02, eps=1e-2)
    scale = LossScale(initial=4.0, dynamic=False) if dtype == "float16" else None
    options = {"stage": 2, "bucket_bytes": SMALL, "clip": 0.5, "dtype": dtype, "loss_scale": scale, "elementwise": True}
    options["kernels"] = "fused" if scale and make is torch.optim.AdamW else "torch"
    optimizer, found = shard(model, inner, group=solo(), offload=offload, **options), []
    assert len(inside.buckets(optimizer)) >= 3
    for step, length in enumerate((1, 2, 3, 1)):
        for micro in range(length):
            send(model, optimizer, 0, step, micro)
        found.append(inside.num_copies_to_host(optimizer) <= 2)  # two of the six that were sent are on their way at a time
        if step in (1, 2):
            model.layers[0].weight.grad.mul_(0.5)  # looks at a share that is still coming
        if step == 2:
            with torch.no_grad():
                model.layers[5].weight.mul_(0.5)
        optimizer.step()
        found.append(copied(weights(model)))
        optimizer.zero_grad()
    for thrown_away in (1, 2):
        for micro in range(thrown_away):
            send(model, optimizer, 0, 7, micro)
        optimizer.zero_grad()
        send(model, optimizer, 0, 8)
        found.append(grads(model, optimizer))
        optimizer.zero_grad()
    found += [bits(model, optimizer), multiplied(offload)]
    found += moved(model, optimizer)
    lent = []
    for step in range(2):
        send(model, optimizer, 0, 9, step)
        optimizer.step()
        lent.append(inside.lent_host_bytes(optimizer))
        optimizer.zero_grad()
    found.append(lent[1] - lent[0])
    if make is Unknown:  # ends with gradients and weights on their way to the host, else with weights on their way back
        send(model, optimizer, 0, 10, 0)
        send(model, optimizer, 0, 10, 1)
        inside.fetch_masters(optimizer, 0)  # a step that fails leaves it in this way
    optimizer.close()
    found.append(inside.lent_host_bytes(optimizer))
    torch.empty(1 << 10, device="sim:0").zero_()  # takes over what was let go
    found.append(copied(weights(model)))
    return found


def multiplied(offload):
    """The one sum of a training is multiplied, while it comes to the host, by a number of another stream. The next backward is
    ordered behind that stream where the sum is on the device alone."""
    device = accelerators.get("sim")
    main, side = device.current_stream(), device.new_stream()
    with torch.device("sim:0"):
        model = filled(nn.Linear(4, 4, bias=False), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
    optimizer = shard(model, inner, group=solo(), stage=2, kernels="torch", offload=offload)
    for micro in range(3):
        send(model, optimizer, 0, 0, micro)
        side.wait_stream(main)
        with device.in_stream(side):
            model.weight.grad.mul_(torch.full((), 0.5, device="sim:0"))
        if offload is None:
            main.wait_stream(side)
    optimizer.step()
    found = bits(model, optimizer)
    optimizer.close()
    return found


def moved(model, optimizer):
    """States that leave and come back, waited for and not: what is read, what counts as free, and what is still held."""
    from accelerators_sim import pinned

    device, found = accelerators.get("sim"), []
    send(model, optimizer, 0, 6)
    optimizer.settle()
    on_host, main, side = pinned.num_alive(), device.current_stream(), device.new_stream()
    optimizer.offload_states(non_blocking=True)
    left = device.memory().allocated
    torch.empty(1 << 10, device="sim:0").zero_()  # takes over what went
    with device.in_stream(side):  # nothing orders this stream after what left
        optimizer.reload_states(non_blocking=True)
    main.wait_stream(side)
    found.append(bits(model, optimizer))  # now that they were read, all of them came
    optimizer.settle()
    found.append(pinned.num_alive() - on_host)
    optimizer.offload_states()
    found.append(device.memory().allocated - left)  # as much memory went although nobody waited for it
    pieces = [piece for _, those in sorted(inside.pieces_by_bucket(optimizer).items()) for piece in those]
    found.append(copied([value for _, master in pieces for value in optimizer.state.get(master, {}).values()]))
    optimizer.reload_states()
    found += [pinned.num_alive() - on_host, bits(model, optimizer)]
    optimizer.zero_grad()
    return found


@contextlib.contextmanager
def nothing_freed_in_flight():
    """Host memory that a copy may still use must not go: torch would keep it, and other owners of pinned memory would not."""
    from accelerators_sim import pinned
    from accelerators_sim.lanes import host

    freed, let_go = [], pinned._Mark.__del__

    def look(mark):
        if any(host.clock.get(access.number, 0) < access.count for access, _ in mark.history.accesses()):
            freed.append(mark.history.num_bytes)
        let_go(mark)

    with mock.patch.object(pinned._Mark, "__del__", look):
        yield freed


def noticed(expected):
    """What is seen to be wrong in the scenario; None for nothing."""
    found = None
    for (dtype, make), offload in itertools.product(expected, ("cpu", None)):
        if found is not None:
            break
        with nothing_freed_in_flight() as freed:
            try:
                wrong = difference(scenario(dtype, offload, make), expected[dtype, make])
            except Exception as error:  # noqa: BLE001 - a race, or whatever a wrong number leads to
                wrong = f"{type(error).__name__}: {error}"
            gc.collect()
            torch.accelerator.synchronize()  # what this scenario left undone must not meet the next one
        found = wrong or (f"{freed} bytes freed in flight" if freed else None)
    return found


def remove_waits(rank, world, every):
    import accelerators_sim as simulated

    simulated.bring_up()
    simulated.configure(order="late")
    given = [("float16", torch.optim.AdamW), (None, Unknown)]
    expected = {(dtype, make): scenario(dtype, None, make) for dtype, make in given}
    found = {}
    for owner, name, number, source in list(waits())[::every]:
        with without_wait(owner, name, number):
            found[f"{owner.__name__}.{name}: {source} ({number})"] = noticed(expected)
    for name, removed in list(KEPT.items())[::every]:
        with removed:
            found[name] = noticed(expected)
    found["nothing removed"] = noticed(expected)
    return found


@needs_sim
@pytest.mark.promise("H02", "R13")
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.full)])
def test_each_wait_and_each_reference_that_is_removed_is_noticed(every):
    [found] = ranks.run(1, remove_waits, every, fresh=True, timeout=200.0)
    assert found.pop("nothing removed") is None
    assert len(found) >= 24 // every
    assert [name for name, wrong in found.items() if wrong is None] == []
