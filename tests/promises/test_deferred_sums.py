"""What ranks sent stays unsummed until somebody needs the sum: the same gradients, less memory, and none written too early."""

import contextlib
import time

import pytest
import torch
from torch import nn

import zero
from tests import faults, inside, ranks
from tests.devices import needs_compiler
from tests.zoo.case import filled, real_numbers

LAYERS, WIDTH, BUCKET_BYTES = 3, 64, 4096


def sharded(stage, dtype, kernels, **options):
    model = filled(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"clip": 0.01, "bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, inner, stage=stage, dtype=dtype, kernels=kernels, **given)


def send(model, rank, step):
    inputs = real_numbers((2, WIDTH), "inputs", rank, step).to(model[0].weight.dtype)
    model(inputs).float().square().mean().backward()


def twice(model, optimizer, rank, step):
    send(model, rank, step + 10)


def clip(model, optimizer, rank, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.005)


def edit(model, optimizer, rank, step):
    model[1].weight.grad.mul_(3.0)


def remove(model, optimizer, rank, step):
    model[0].bias.grad = None


def look(model, optimizer, rank, step):
    optimizer.whole_grad(model[2].weight)


def settle_and_send(model, optimizer, rank, step):
    optimizer.settle()
    send(model, rank, step + 20)


def to_zeros_and_send(model, optimizer, rank, step):
    optimizer.zero_grad(set_to_none=False)
    send(model, rank, step + 30)


def fail(model, optimizer, rank, step):
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward"):
        loss = model(torch.ones(1, WIDTH, dtype=model[0].weight.dtype))
        loss.register_hook(_raise)
        loss.sum().backward()
    optimizer.zero_grad()
    send(model, rank, step + 40)


def _raise(grad):
    raise RuntimeError("in backward")


def step_twice(model, optimizer, rank, step):
    optimizer.step()


KERNELS = pytest.mark.parametrize("kernels", ["fused", pytest.param("compiled", marks=needs_compiler)])
FUSED_BY_DAY = pytest.mark.parametrize("kernels", ["fused", pytest.param("compiled", marks=[needs_compiler, pytest.mark.full])])
BETWEEN = (None, twice, clip, edit, remove, look, settle_and_send, to_zeros_and_send, fail, step_twice)


def gradients_of(model, optimizer):
    """Without their being wanted, which would change the next window."""
    with inside.sums_count_as_unread(optimizer):
        return [optimizer.whole_grad(param) for param in model.parameters()]


def train(rank, world, stage, dtype, kernels, between, **options):
    """What a training gave, and how many buckets waited just before each step."""
    model, optimizer = sharded(stage, dtype, kernels, **options)
    grads, waiting = [], []
    for step in range(3):
        send(model, rank, step)
        if between is not None:
            between(model, optimizer, rank, step)
        optimizer.settle()
        waiting.append(inside.num_deferred_sums(optimizer))
        optimizer.step()
        grads.append((optimizer.grad_norm, gradients_of(model, optimizer)))
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    optimizer.close()
    return (grads, saved["masters"], saved["state"]), waiting


def assert_same(ours, theirs, between, rtol=0.0, atol=0.0):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{between}: {text}")


def compare(rank, world, kernels, stage, dtype, options):
    """How often buckets waited, by what was done between backward and step; the trainings are compared here."""
    waited = {}
    for between in BETWEEN:
        ours, waiting = train(rank, world, stage, dtype, kernels, between, **options)
        with faults.sums_at_once():
            theirs, never = train(rank, world, stage, dtype, kernels, between, **options)
            if kernels == "compiled":
                torchs, _ = train(rank, world, stage, dtype, "torch", between, **options)
                assert_same(ours[0][0], torchs[0][0], between, 1e-5, 1e-7)
                # A master an ulp away may round to another weight, and its gradients are as far away as weights are coarse.
                assert_same(ours, torchs, between, *((1e-5, 1e-6) if dtype is None else (5e-3, 1e-4)))
        assert_same(ours, theirs, between)
        assert never == [0, 0, 0]
        waited["" if between is None else between.__name__] = waiting
    return waited


@pytest.mark.parametrize(
    ("kernels", "stage", "world", "dtype"),
    [
        pytest.param("fused", 0, 2, "bfloat16", marks=pytest.mark.full),
        pytest.param("fused", 1, 2, "bfloat16", marks=pytest.mark.full),
        ("fused", 2, 1, "bfloat16"),
        pytest.param("fused", 1, 1, None, marks=pytest.mark.full),
        pytest.param("fused", 2, 2, "bfloat16", marks=pytest.mark.full),
        pytest.param("compiled", 1, 1, None, marks=[needs_compiler, pytest.mark.full]),
        pytest.param("compiled", 2, 2, "bfloat16", marks=[needs_compiler, pytest.mark.full]),
    ],
)
def test_a_training_is_the_same_whatever_comes_between_backward_and_step(kernels, stage, world, dtype):
    for waited in ranks.run(world, compare, kernels, stage, dtype, {"shared_memory": True}):
        first, *later = waited[""]
        assert first == 0 and all(later)  # otherwise this shows nothing
        assert waited["look"] == [0, 0, 0]  # whoever read a sum may read it again


@pytest.mark.full
@FUSED_BY_DAY
def test_they_wait_also_where_ranks_share_no_memory(kernels):
    for waited in ranks.run(2, compare, kernels, 2, "bfloat16", {"shared_memory": False}):
        assert all(waited[""][1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernels", "stage", "world", "shared_memory"),
    [
        ("fused", 0, 2, True),
        pytest.param("fused", 1, 2, False, marks=pytest.mark.full),
        pytest.param("fused", 1, 1, True, marks=pytest.mark.full),
        pytest.param("fused", 1, 3, True, marks=pytest.mark.full),
        pytest.param("compiled", 1, 2, True, marks=[needs_compiler, pytest.mark.full]),
        pytest.param("compiled", 1, 3, False, marks=[needs_compiler, pytest.mark.full]),
    ],
)
def test_so_it_is_where_sums_take_the_place_of_what_was_added_up_in_their_dtype(kernels, stage, world, shared_memory):
    options = {"shared_memory": shared_memory, "accumulation": 3}
    for waited in ranks.run(world, compare, kernels, stage, "bfloat16", options, timeout=120.0):
        assert not any(waited["look"])
        # At stage 0 the others read all of what a rank sent.
        assert all(waited[""][1:]) if stage else not any(waited[""])


class Expanded(nn.Module):
    """The gradient of its parameter has one number, expanded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, factor):
        return self.weight.sum() * factor


def add_up_expanded(rank, world, kernels):
    model = Expanded()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=1, dtype="bfloat16", kernels=kernels, accumulation=3)
    for factor in (1.0, 2.0):
        model(factor).backward()
    model.weight.grad = torch.full((1,), 4.0, dtype=torch.bfloat16).expand(8)
    model(8.0).backward()
    found = optimizer.whole_grad(model.weight)
    optimizer.close()
    return found


@KERNELS
def test_a_gradient_that_is_not_dense_is_added_up(kernels):
    for found in ranks.run(2, add_up_expanded, kernels):
        assert found.tolist() == [12.0] * 8  # the user's values replace those that were there


def sharded_later(*arguments, **options):
    """After a first window, in which nothing waits."""
    model, optimizer = sharded(*arguments, **options)
    send(model, 0, 100)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def hold(rank, world, kernels, dtype):
    model, optimizer = sharded_later(2, dtype, kernels)
    send(model, rank, 0)
    optimizer.settle()
    held = inside.num_deferred_sums(optimizer), inside.bytes_of_gradients(optimizer), inside.buffer_bytes(optimizer)
    optimizer.close()
    return held, inside.borrowed_buffers(optimizer)


@KERNELS
def test_rows_wait_only_where_they_take_no_more_memory_than_their_sum(kernels):
    less, more = ((1, None), (1, "bfloat16"), (2, "bfloat16")), ((2, None), (3, "bfloat16"))
    for (world, dtype), is_less in ((given, given in less) for given in (*less, *more)):
        sums = 4 * LAYERS * WIDTH * (WIDTH + 1) // world
        for (waiting, gradients, staging), borrowed in ranks.run(world, hold, kernels, dtype):
            assert borrowed == 0  # everything was given back
            assert (waiting > 0) == is_less
            assert gradients <= 1.25 * sums and staging <= 4 * BUCKET_BYTES


def be_late(rank, world, stage, kernels, accumulation):
    """Rank 1 reads what it was sent only when rank 0 is far into its next backward."""
    model, optimizer = sharded(stage, "bfloat16", kernels, clip=None, accumulation=accumulation)
    update = faults.step_of(optimizer)
    step_of_one = update.now

    def step(*arguments):
        time.sleep(0.03 * rank)
        step_of_one(*arguments)

    update.put(step)
    for number in range(3):
        send(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return found


@KERNELS
@pytest.mark.parametrize(
    ("stage", "accumulation"), [(1, 2), *(pytest.param(stage, 1, marks=pytest.mark.full) for stage in (0, 1, 2))]
)
def test_what_a_slow_rank_still_has_to_read_is_not_written_over(stage, accumulation, kernels):
    fast, slow = ranks.run(2, be_late, stage, kernels, accumulation)
    expected, _ = ranks.run(2, be_late, stage, "torch", accumulation)
    assert all(map(torch.equal, fast, slow))
    torch.testing.assert_close(fast, expected, rtol=0.02, atol=1e-3)


def go_on(rank, world, kernels):
    """Rows of a window that is thrown away with its connections, and what becomes of their memory then."""
    model, optimizer = sharded_later(2, "bfloat16", kernels)
    for number in range(2):
        send(model, rank, number)
        optimizer.settle()
        waiting = inside.num_deferred_sums(optimizer)
        optimizer.rebuild()
        for step in range(3):
            send(model, rank, 10 * number + step)
            optimizer.step()
            optimizer.zero_grad()
    borrowed = inside.borrowed_buffers(optimizer)
    found = waiting, borrowed, [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.full
@FUSED_BY_DAY
def test_a_rebuild_lets_go_of_what_waits(kernels):
    (waiting, borrowed, first), (*_, second) = ranks.run(2, go_on, kernels, fresh=True)
    assert waiting > 0 and borrowed == 0
    assert all(map(torch.equal, first, second))


def send_often(rank, world, kernels, often):
    """The most bytes of gradients and buffers in each window of so many backwards that nobody declared."""
    model, optimizer = sharded(2, "bfloat16", kernels)
    most = []
    for step, number in enumerate(often):
        most.append(0)
        for micro in range(number):
            send(model, rank, 2 * step + micro)
            most[-1] = max(most[-1], inside.bytes_for_gradients(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return most


@KERNELS
def test_several_backwards_take_memory_for_waiting_only_after_a_single_one(kernels):
    sums = 4 * LAYERS * WIDTH * (WIDTH + 1)
    (found,) = ranks.run(1, send_often, kernels, (2, 2, 2))  # one rank, as of several ranks the one that is ahead needs more
    assert max(found) <= sums + 5 * BUCKET_BYTES
    ((*before, surprised, after),) = ranks.run(1, send_often, kernels, (1, 1, 2, 2))
    assert max(*before, after) <= sums + 5 * BUCKET_BYTES and surprised <= 2 * sums


def add_after_settling(rank, world, kernels):
    """The most bytes of gradients and buffers by window: the last of four goes on after it was settled."""
    model, optimizer = sharded(1, "bfloat16", kernels, accumulation=2)
    most, borrowing = [], faults.borrowing_of(optimizer)
    borrow = borrowing.now

    def counted(*arguments, **options):
        buffer = borrow(*arguments, **options)
        most[-1] = max(most[-1], inside.bytes_for_gradients(optimizer))
        return buffer

    borrowing.put(counted)
    for window in range(4):
        most.append(0)
        for micro in range(2):
            send(model, rank, 2 * window + micro)
        if window == 3:
            optimizer.settle()
            waiting = inside.num_deferred_sums(optimizer)
            with optimizer.no_sync():
                send(model, rank, 20)
            send(model, rank, 21)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return waiting, most


@KERNELS
def test_what_is_added_to_sums_that_wait_finds_their_memory(kernels):
    shares = 4 * LAYERS * WIDTH * (WIDTH + 1) // 2
    for waiting, (*_, usual, surprised) in ranks.run(2, add_after_settling, kernels):
        assert waiting > 0
        assert surprised <= usual + shares + 4 * BUCKET_BYTES  # the other rank may still read some of them


def run_out_of_memory(rank, world, kernels):
    """Of rank 0, once, as the rows of a bucket are added up; then a window in which nothing is wrong."""
    model, optimizer = sharded_later(2, "bfloat16", kernels)
    send(model, rank, 0)
    optimizer.settle()
    with faults.no_memory_for_sums(optimizer), pytest.raises(MemoryError):
        inside.add_up_one_bucket(optimizer)
    found = [optimizer.whole_grad(model[2].weight)]
    optimizer.zero_grad()
    borrowed = inside.borrowed_buffers(optimizer)
    optimizer.close()
    return found, borrowed



@KERNELS
def test_a_sum_that_there_is_no_memory_for_is_there_when_there_is(kernels):
    (found, borrowed), _ = ranks.run(2, run_out_of_memory, kernels)
    assert found[0].float().norm() > 0.0 and borrowed == 0


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, inputs):
        return self.narrow(self.wide(inputs).bfloat16())


def step_mixed(rank, world, kernels):
    model = filled(Mixed(), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=2, kernels=kernels, reduce_dtype="bfloat16", bucket_bytes=BUCKET_BYTES)
    for step in range(2):
        model(real_numbers((2, WIDTH), "inputs", rank, step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.check()
    masters = optimizer.state_dict()["masters"]
    optimizer.close()
    return masters


@needs_compiler
def test_what_is_rounded_on_its_way_is_stepped_as_by_torch():
    ours, theirs = ranks.run(2, step_mixed, "compiled"), ranks.run(2, step_mixed, "torch")
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=1e-4)


def clip_with_threads(rank, world, kernels):
    torch.set_num_threads(1 + rank)
    model = filled(nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, inner, stage=0, dtype="bfloat16", clip=1e-3, kernels=kernels)
    model(real_numbers((2, 512), "inputs", rank).bfloat16()).float().square().mean().backward()
    optimizer.step()
    found = optimizer.grad_norm, [param.detach().clone() for param in model.parameters()], optimizer.state_dict()["masters"]
    optimizer.close()
    torch.set_num_threads(1)
    return found


@pytest.mark.parametrize(
    "kernels",
    [
        *(pytest.param(kernels, marks=pytest.mark.full) for kernels in ("torch", "fused")),
        pytest.param("compiled", marks=needs_compiler),
    ],
)
@pytest.mark.full
def test_ranks_of_different_threads_clip_alike(kernels):
    one, other = ranks.run(2, clip_with_threads, kernels, fresh=True)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_for_a_step_that_wants_sums_nothing_waits(inner):
    model = nn.Linear(WIDTH, WIDTH)
    kernels = "fused" if inner is torch.optim.SGD else "torch"
    optimizer = zero.shard(model, inner(model.parameters(), lr=0.1), stage=2, kernels=kernels)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.settle()
        assert inside.num_deferred_sums(optimizer) == 0
        optimizer.step()
        optimizer.zero_grad()


@KERNELS
def test_a_weight_of_the_micro_batch_is_taken_off_what_waits_too(kernels):
    found = []
    for waits in (contextlib.nullcontext(), faults.sums_at_once()):
        with waits:
            model, optimizer = sharded_later(2, None, kernels)
            optimizer.weight(3.0)
            send(model, 0, 0)
            optimizer.settle()
            waited = inside.num_deferred_sums(optimizer) > 0
            optimizer.step()
            found.append((waited, gradients_of(model, optimizer), optimizer.state_dict()["masters"]))
            optimizer.close()
    (waited, *ours), (never, *theirs) = found
    assert waited and not never
    assert_same(ours, theirs, "weighted")


@KERNELS
@pytest.mark.parametrize("asks", ["norm", "all of it"])
def test_who_looks_at_what_waits_in_inference_mode_changes_nothing(kernels, asks):
    model, optimizer = sharded_later(2, None, kernels)
    send(model, 0, 0)
    with torch.inference_mode():
        model[0].weight.grad.norm() if asks == "norm" else optimizer.whole_grad(model[0].weight)
    for step in (1, 2):
        optimizer.step()
        optimizer.zero_grad()
        send(model, 0, step)
    optimizer.close()


@KERNELS
def test_what_is_finite_only_with_its_factor_is_finite_also_where_it_waits(kernels):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = zero.shard(model, inner, stage=2, kernels=kernels, reduce=2.0**40, on_nonfinite="skip")
    found = []
    for _ in range(3):
        model.weight.backward(torch.full_like(model.weight, 2.0**70))
        optimizer.settle()
        found.append(inside.num_deferred_sums(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.grad_norm == WIDTH * 2.0**30
    assert found == [0, 1, 1]
