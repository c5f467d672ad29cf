"""An optimizer that nobody closes is freed when nobody has it, also where the model or the plain optimizer leads back to it."""

import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests import faults, inside, programs, ranks
from tests.devices import needs_sim
from tests.promises.loops import TINY, adamw, same, weights
from tests.promises.offloads import place_of
from tests.promises.test_recovery import meeting
from tests.traces import leads_to
from tests.zoo.case import real_mlp
from zero import shard

FOR_THREADS = "threading", "concurrent.futures.thread", "concurrent.futures._base"
HOLD_LOCKS = "_maintain_shutdown_locks", "_adjust_thread_count"  # Python 3.13 has the second one alone
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def by_a_hook_of_a_module(model, inner, optimizer):
    model[0].register_forward_hook(lambda *_, held=optimizer: None)


def by_a_hook_of_the_plain_optimizer(model, inner, optimizer):
    inner.register_step_post_hook(lambda *_, held=optimizer: None)


def by_an_attribute_of_the_plain_optimizer(model, inner, optimizer):
    inner.held = optimizer


def by_an_attribute_of_the_model(model, inner, optimizer):
    model.held = optimizer


def by_an_attribute_of_a_layer(model, inner, optimizer):
    model[2].held = optimizer


def by_itself(model, inner, optimizer):
    optimizer.held = optimizer


WAYS = [
    by_a_hook_of_a_module,
    by_a_hook_of_the_plain_optimizer,
    by_an_attribute_of_the_plain_optimizer,
    by_an_attribute_of_the_model,
    by_an_attribute_of_a_layer,
    by_itself,
]
WAYS_BACK = pytest.mark.parametrize("lead", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(autouse=True)
def nothing_unraisable(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: unraisable.append((about.exc_value, about.object)))
    yield
    gc.collect()
    assert unraisable == []


@pytest.fixture
def no_collector():
    trained(real_mlp(), 0)  # the first of a process leaves frames behind, in what libraries try as they are first used
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Left:
    """What is left of a training: the names of the optimizer, its parts, and the memory of weights, masters and gradients."""

    def __init__(self, optimizer):
        tensors = [*inside.shares_of_masters(optimizer), *inside.shares_of_gradients(optimizer)]
        tensors += [master for _, master in inside.pieces_and_masters(optimizer)]
        storages = [tensor.untyped_storage() for tensor in (*tensors, *inside.memory_of_weights(optimizer))]
        assert len(storages) > 4
        self.refs, self.parts = [weakref.ref(thing) for thing in (optimizer, *storages)], inside.parts_alive(optimizer)
        self.at_first = self()

    def __call__(self):
        return [type(ref()).__name__ for ref in self.refs if ref() is not None] + self.parts()


def backward(model, optimizer):
    batch = torch.ones(3, model[0].in_features, dtype=model[0].weight.dtype, device=model[0].weight.device)
    optimizer.backward(model(batch).float().square().sum())


def trained(model, stage, lead=None, end=None, **options):
    """Returns what is left of a training that nobody has any more, unless by its model."""
    inner = adamw(model)
    optimizer = shard(model, inner, stage=stage, bucket_bytes=TINY, **options)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, optimizer)  # makes gradients
    optimizer.settle()
    if lead is not None:
        lead(model, inner, optimizer)
    left = Left(optimizer)
    assert left() == left.at_first
    if end is not None:
        end(optimizer)
    return left


def close(optimizer):
    optimizer.close()


@pytest.mark.promise("M07")
@STAGES
@WAYS_BACK
@pytest.mark.parametrize("end", [None, close])
def test_what_leads_from_a_training_back_to_its_optimizer_keeps_neither(stage, lead, end):
    left = trained(real_mlp(), stage, lead, end)
    gc.collect()
    assert left() == []


@pytest.mark.promise("M07")
@STAGES
@pytest.mark.parametrize("end", [None, close])
def test_without_such_a_way_nothing_waits_for_the_collector(no_collector, stage, end):
    assert trained(real_mlp(), stage, None, end)() == []


@pytest.mark.promise("M07")
@STAGES
def test_a_model_that_stays_is_plain_when_the_collector_has_its_optimizer(stage):
    model, before = real_mlp(), {}
    left = trained(model, stage, by_itself, lambda optimizer: before.update(whole(optimizer)))
    gc.collect()
    assert left() == []
    assert same(before, weights(model))
    model(torch.ones(3, model[0].in_features, dtype=model[0].weight.dtype)).sum().backward()
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())


def whole(optimizer):
    with optimizer.gathered():
        return {name: value.clone() for name, value in weights(optimizer.model).items()}


@pytest.mark.promise("M07")
@pytest.mark.parametrize("stage", [2, 3])
def test_nor_does_it_where_states_are_away(no_collector, tmp_path, stage):
    def end(optimizer):
        optimizer.offload_states(device=f"disk:{tmp_path}")

    assert trained(real_mlp(), stage, None, end, dtype="bfloat16")() == []


@pytest.mark.promise("M07")
@pytest.mark.parametrize("lead", [by_itself, by_a_hook_of_a_module], ids=lambda way: way.__name__)
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_on_disk_is_read_and_its_files_are_closed(tmp_path, stage, moves, lead):
    """The collector would close a file, or end its threads, before a release that it runs itself."""
    model, before = real_mlp(), {}

    def end(optimizer):
        before.update(whole(optimizer))
        if moves:
            optimizer.offload_states(device=f"disk:{tmp_path}")

    kinds = ("masters", "moments", *(["weights"] if stage == 3 else []))
    homes = {} if moves else {"homes": dict.fromkeys(kinds, f"disk:{tmp_path}")}
    left = trained(model, stage, lead, end, dtype="bfloat16", align_bytes=4096, **homes)
    if lead is by_itself:
        gc.collect()
        assert same(before, weights(model))
    del model
    gc.collect()
    assert left() == []


def collect_on_a_device(rank, world, stage, options):
    unraisable = []
    sys.unraisablehook = lambda about: unraisable.append(repr(about.exc_value))
    try:
        with place_of(rank, "sim"):
            model = real_mlp()
        left = trained(model, stage, by_a_hook_of_a_module, **options)
        del model
        gc.collect()
        return left(), unraisable
    finally:
        sys.unraisablehook = sys.__unraisablehook__


@needs_sim
@pytest.mark.promise("M07")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_on_a_device_whose_states_are_on_the_host(stage, world):
    assert ranks.run(world, collect_on_a_device, stage, {"offload": "cpu"}, apart="sim") == [([], [])] * world


def collect_while_another_rank_asks(rank, world):
    """Rank 0 has let a training go, and its collector comes to that in the thread which answers requests for weights."""
    unraisable, asked, done = [], threading.Event(), threading.Event()
    sys.unraisablehook = lambda about: unraisable.append(repr(about.exc_value))
    request = faults.ANSWERING_A_REQUEST.now

    def collecting(*about):
        request(*about)
        if asked.is_set():
            asked.clear()
            gc.collect()
            done.set()

    gc.disable()
    try:
        with faults.ANSWERING_A_REQUEST.replaced(collecting):
            model, options = real_mlp(), {"shared_memory": False, "gathered_bytes": 0, "timeout_s": 20.0}
            optimizer = shard(model, adamw(model), stage=3, bucket_bytes=TINY, **options)
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        asked.set()
        left = Left(optimizer)
        if rank == 0:
            by_a_hook_of_a_module(model, None, optimizer)
            del model, optimizer
            assert done.wait(20.0)
        else:
            whole(optimizer)
            optimizer.close()
            del model, optimizer
        last = time.monotonic() + 20.0
        while left() and time.monotonic() < last:
            time.sleep(0.01)
        return left(), unraisable
    finally:
        gc.enable()
        sys.unraisablehook = sys.__unraisablehook__


@pytest.mark.promise("M07")
def test_the_collector_may_come_to_it_in_the_thread_that_answers_other_ranks():
    assert ranks.run(2, collect_while_another_rank_asks, timeout=60.0) == [([], [])] * 2


def collect_in_code_for_threads(rank, world, folder, only):
    """The collector comes to a training in each function that Python begins, uses and ends threads with, one after another; or
    in `only` those of these names."""
    unraisable, places, lefts = [], set(), []
    sys.unraisablehook = lambda about: unraisable.append(repr(about.exc_value))

    def collect_there(frame, event, _):
        place = frame.f_code
        is_one = event == "call" and frame.f_globals["__name__"] in FOR_THREADS and (only is None or place.co_name in only)
        if is_one and place not in places and len(places) < len(lefts):
            places.add(place)
            gc.collect()

    gc.disable()
    gc.freeze()  # a collection looks at what is made from here on
    try:
        while len(places) == len(lefts):
            options = {"dtype": "bfloat16", "align_bytes": 4096, "homes": {"moments": f"disk:{folder}"}}
            lefts.append(trained(real_mlp(), 2, by_itself, **options))
            pool = ThreadPoolExecutor()
            sys.setprofile(collect_there)
            thread = threading.Thread(target=pool.submit, args=(int,))
            thread.start()
            thread.join()
            pool.submit(int).result()
            pool.shutdown()
            sys.setprofile(None)
        gc.collect()
        last = time.monotonic() + 20.0
        while any(left() for left in lefts) and time.monotonic() < last:
            time.sleep(0.01)
        return len(places), [left() for left in lefts if left()], unraisable
    finally:
        sys.setprofile(None)
        gc.unfreeze()
        gc.enable()
        sys.unraisablehook = sys.__unraisablehook__


@pytest.mark.promise("M07")
@pytest.mark.parametrize("only", [HOLD_LOCKS, pytest.param(None, marks=pytest.mark.full)], ids=["under a lock", "anywhere"])
def test_the_collector_may_come_to_it_where_python_begins_or_ends_a_thread(tmp_path, only):
    [(places, *left)] = ranks.run(1, collect_in_code_for_threads, str(tmp_path), only, timeout=60.0)
    assert left == [[], []]
    assert places > (0 if only else 20)


def collect_at_other_times(rank, world):
    """Rank 0's collector comes to a training that was let go while a second one trains, and rank 1 later."""

    def trained(timeout_s):
        model = real_mlp()
        optimizer = shard(model, adamw(model), stage=3, bucket_bytes=TINY, shared_memory=False, timeout_s=timeout_s)
        for _ in range(2):
            step(model, optimizer)
        return model, optimizer

    def step(model, optimizer):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    gc.disable()
    try:
        first, of_first = trained(12.0)
        left = Left(of_first)
        by_a_hook_of_a_module(first, None, of_first)
        del first, of_first
        second, of_second = trained(3.0)
        if rank == 0:
            gc.collect()
        step(second, of_second)
        of_second.close()
        gc.collect()
        last = time.monotonic() + 20.0
        while left() and time.monotonic() < last:
            time.sleep(0.01)
        return left()
    finally:
        gc.enable()


@pytest.mark.promise("M07")
def test_ranks_may_come_to_it_at_other_times_and_train_on_meanwhile():
    assert ranks.run(2, collect_at_other_times, timeout=60.0) == [[], []]


@pytest.mark.promise("M07")
@pytest.mark.parametrize(
    "options",
    [{}, {"kernels": "fused"}, {"buffers": "broadcast", "clip": 1.0, "accumulation": 2}, {"dtype": "float16", "clip": 1.0}],
    ids=lambda options: " ".join(options) or "none",
)
@STAGES
def test_no_part_leads_to_the_model_or_to_an_optimizer(stage, options):
    model = real_mlp()
    optimizer = shard(model, adamw(model), stage=stage, bucket_bytes=TINY, **options)
    backward(model, optimizer)
    optimizer.step()
    owned = {"the sharded optimizer": optimizer, "the plain one": optimizer.inner}
    owned |= {f"module {name!r}": module for name, module in model.named_modules()}
    assert leads_to(optimizer, owned) is not None
    assert inside.parts_lead_to(optimizer, owned) is None
    optimizer.close()


PROGRAM = """
import torch, zero
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage={stage}, bucket_bytes=64)
model[0].register_forward_hook(lambda *_, held=optimizer: None)
for _ in range(2):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if "{how}" == "collected":
    import gc
    del model, optimizer
    gc.collect()
print("done")
"""


@pytest.mark.full  # by day tests/promises/test_recovery.py has a program that leaves one
@pytest.mark.promise("M07")
@pytest.mark.parametrize("how", ["left", "collected"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_program_that_leaves_one_in_a_cycle_ends_without_a_word(stage, world, how):
    found = programs.ranks_with_torch(world, PROGRAM.format(stage=stage, how=how), meeting())
    assert [(done.returncode, done.stdout, done.stderr) for done in found] == [(0, "done\n", "")] * world
