"""Published weights have the same bits through shared memory and over messages, after every edit and failure."""

import contextlib
import copy
import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from tests import faults, inside, programs, ranks
from tests.devices import needs_linux
from tests.zoo.case import filled, real_numbers

pytestmark = needs_linux

WIDTH = 48  # a layer's weights are more than a page and no multiple of one
BUCKET_BYTES = 3 * 4096
STEPS = 4


def build():
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 3))
    return filled(nn.Sequential(*layers), real=True)


def sharded(**options):
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    given = {"stage": 2, "dtype": "bfloat16", "clip": 0.5, "on_nonfinite": "skip", "bucket_bytes": BUCKET_BYTES, **options}
    return model, zero.shard(model, inner, **given)


def begun(rank, **options):
    """After its first step."""
    model, optimizer = sharded(**options)
    send(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def send(model, rank, step):
    weight = model[0].weight
    model(real_numbers((2, WIDTH), "inputs", rank, step).to(weight.dtype)).float().square().mean().backward()


def bits(model):
    return {name: param.detach().view(torch.int16).tolist() for name, param in model.named_parameters()}


def nothing(model, optimizer, rank, step):
    """What every rank sees of the others' steps."""


def clamp_everywhere(model, optimizer, rank, step):
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


def one_element_on_every_rank(model, optimizer, rank, step):
    with torch.no_grad():
        model[2].weight[7, 5] = 3.0 + step


def another_element_on_each_rank(model, optimizer, rank, step):
    with torch.no_grad():
        model[2].weight[rank * 11 :: 31, 3].fill_(1.0 + rank + step)


def through_numpy(model, optimizer, rank, step):
    """By a way that torch knows nothing of."""
    view = model[0].weight.detach().view(torch.int16).numpy()
    view[3, :5] = 0x3F80 + rank


def assigned(model, optimizer, rank, step):
    model[4].weight.data = model[4].weight.data * 0.5


def to_shared_memory(model, optimizer, rank, step):
    model.share_memory()
    clamp_everywhere(model, optimizer, rank, step)


def older_state(model, optimizer, rank, step):
    """Masters that the weights do not come from: the weights are what counts."""
    kept = copy.deepcopy(optimizer.state_dict())
    send(model, rank, step + 40)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(kept)


def infinite_on_one_rank(model, optimizer, rank, step):
    clamp_everywhere(model, optimizer, rank, step)
    model(torch.full((2, WIDTH), float("inf") if rank else 1.0).bfloat16()).float().sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == step + 1
    optimizer.zero_grad()


def saved_before_an_edit(model, optimizer, rank, step):
    """What was looked for then says nothing of what is edited later."""
    optimizer.state_dict()
    another_element_on_each_rank(model, optimizer, rank, step)


def within_the_step(model, optimizer, rank, step):
    """An edit by who steps, too late to be adopted, is gone after the step, on all ranks."""
    inner = optimizer.inner
    if step == 0:
        own = inner.step

        def stepping():
            own()
            one_element_on_every_rank(model, optimizer, rank, step)

        inner.step = stepping


def frozen_and_back(model, optimizer, rank, step):
    model[2].weight.requires_grad_(step % 2 == 0)
    another_element_on_each_rank(model, optimizer, rank, step)


def unused_layer_edited(model, optimizer, rank, step):
    """What is in no bucket of a step stays edited over it."""
    with torch.no_grad():
        model[0].weight[0, 0] = 2.0 + rank
    hidden = model[2:](real_numbers((2, WIDTH), "hidden", rank, step).bfloat16())
    hidden.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def failing_on_one_rank(model, optimizer, rank, step):
    """In the middle of an update, with edits that are adopted already and others that are not."""
    another_element_on_each_rank(model, optimizer, rank, step)
    send(model, rank, step + 60)
    calls, step_one = [], faults.STEP.now

    def breaking(self, *args):
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError("nothing left")
        return step_one(self, *args)

    # A block at a time: where all are stepped at once, an update has no middle.
    with faults.MOST_TOGETHER.replaced(return_value=0), faults.STEP.replaced(breaking if rank == 1 else step_one):
        if rank == 1:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
    with pytest.raises(zero.ZeroError):  # at the latest here everybody hears of it
        send(model, rank, step + 70)
        optimizer.step()
    optimizer.zero_grad()


def a_parameter_that_comes_later(model, optimizer, rank, step):
    if step == 1:
        model.append(nn.Linear(3, 700, dtype=torch.bfloat16))
        for param in filled(model[-1], real=True).parameters():
            param.data = param.data.bfloat16()
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    another_element_on_each_rank(model, optimizer, rank, step)


EVENTS = {
    event.__name__: event
    for event in (
        nothing, clamp_everywhere, one_element_on_every_rank, another_element_on_each_rank, through_numpy, assigned,
        to_shared_memory, older_state, saved_before_an_edit, within_the_step, infinite_on_one_rank, frozen_and_back,
        unused_layer_edited, failing_on_one_rank, a_parameter_that_comes_later,
    )
}  # fmt: skip
BY_DAY = ("another_element_on_each_rank", "to_shared_memory", "within_the_step", "failing_on_one_rank",
          "a_parameter_that_comes_later")  # fmt: skip


def trained(rank, world, name, options):
    """All weights after every event and every step and as those of a plain model at last, and the masters."""
    model, optimizer = sharded(**options)
    seen = []
    for step in range(STEPS):
        EVENTS[name](model, optimizer, rank, step)
        seen.append(bits(model))
        send(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits(model))
    is_whole = name != "failing_on_one_rank"  # otherwise ranks have counted their steps differently
    masters = is_whole and {key: value.tolist() for key, value in optimizer.state_dict()["masters"].items()}
    optimizer.close()
    seen.append(bits(model))
    return seen, masters


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.full) for name in EVENTS]
)
def test_weights_have_the_same_bits_through_shared_memory_and_over_messages(name, stage):
    def run(shared_memory):
        options = {"stage": stage, "offload": "cpu" if stage == 1 else None, "shared_memory": shared_memory}
        return ranks.run(2, trained, name, options)

    shared, sent = run(True), run(False)
    assert shared == sent
    if stage > 0 and name not in ("unused_layer_edited", "frozen_and_back"):  # in these cases some are in no step after an edit
        assert shared[0][0][-1] == shared[1][0][-1]


def watched(rank, world, folder):
    """What rank 1 sees between clipping and its own step, while rank 0 is in its step already."""
    model, optimizer = sharded()
    send(model, rank, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = bits(model)
    if rank == 1:
        while not Path(folder, "in the step").exists():
            pass
        for _ in range(200):
            assert bits(model) == before
    else:
        Path(folder, "in the step").touch()
    optimizer.step()
    after = bits(model)
    assert after != before
    for _ in range(20):
        assert bits(model) == after
    optimizer.close()
    return after


def test_nobody_sees_new_weights_before_its_own_step_nor_changing_ones_after(tmp_path):
    first, second = ranks.run(2, watched, str(tmp_path))
    assert first == second


def test_what_is_loaded_takes_the_place_of_edits_that_came_after_the_save(tmp_path):
    model, optimizer = begun(0, bucket_bytes=2**20)
    expected = bits(model)
    zero.save(tmp_path, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    zero.load(tmp_path, optimizer)
    assert bits(model) == expected
    send(model, 0, 1)
    optimizer.step()
    assert float(model[0].weight.abs().max()) < 5.0
    optimizer.close()


class Reading(torch.utils.data.Dataset):
    """Says which process reads."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


class Look(NamedTuple):
    """Bytes at one time. What several processes share counts once over all of them."""

    everything: int  # the bytes of all processes of both ranks, without files that others map too; 0 on rank 1
    weights: int  # the bytes of the memory that weights had on this rank before it forked, in it and its workers
    own: int  # the bytes that this rank shares with no other process
    workers: list[int]  # by worker: the bytes that it shares with no other process


def bytes_of(process, *kinds):
    with contextlib.suppress(OSError):  # it has ended
        fields = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines())
        return sum(int(field[1]) * 1024 for field in fields if field[0].rstrip(":") in kinds)
    return 0


def private_bytes(process):
    return bytes_of(process, "Private_Clean", "Private_Dirty")


def family_of(process):
    """A process, its children, theirs, and so on."""
    children, found = {}, [process]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    for each in found:
        found += children.get(each, [])
    return found


def marked(tensor):
    """How many bytes of whole pages of a tensor have a mark from now on, here and in what is forked: they are in no dump."""
    begin, end = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    place, num_bytes = ctypes.c_void_p(begin * mmap.PAGESIZE), (end - begin) * mmap.PAGESIZE
    assert ctypes.CDLL(None).madvise(place, ctypes.c_size_t(num_bytes), mmap.MADV_DONTDUMP) == 0
    return num_bytes


def marked_bytes(process):
    found = share = 0
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *values = line.split()
        if name == "Pss:":
            share = int(values[0]) * 1024
        elif name == "VmFlags:" and "dd" in values:
            found += share
    return found


def forking(rank, world, stage, kind):
    """What is held before and after four workers are forked between two steps, after one step more and another, and after the
    workers ended; and how many bytes of weights this rank keeps."""
    model = nn.Linear(4096, 4096, bias=False)
    inner = getattr(torch.optim, kind)(model.parameters())
    optimizer = zero.shard(model, inner, stage=stage, dtype="bfloat16", bucket_bytes=2**20)
    looks = []

    def step():
        model(torch.ones(1, 4096, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def look(*workers):
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # returns freed memory to the system
        torch.distributed.barrier()  # both ranks look at the same time, and nobody computes
        everything = sum(bytes_of(each, "Pss_Anon", "Pss_Shmem") for each in family_of(os.getppid())) if rank == 0 else 0
        weights = sum(map(marked_bytes, (os.getpid(), *workers)))
        looks.append(Look(everything, weights, private_bytes(os.getpid()), [private_bytes(each) for each in workers]))
        torch.distributed.barrier()

    for _ in range(3):
        step()
    kept = sum(map(marked, inside.memory_of_weights(optimizer)))
    look()
    batches = iter(torch.utils.data.DataLoader(Reading(), num_workers=4, multiprocessing_context="fork"))
    workers = [int(next(batches)) for _ in range(4)]
    look(*workers)
    for _ in range(2):
        step()
        look(*workers)
    del batches  # this waits for the workers
    look()
    optimizer.close()
    return looks, kept


@pytest.mark.full
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_workers_forked_in_the_middle_of_a_training_cost_no_copy_of_the_weights(stage, kind):
    """Until the next step, which writes the weights: then all workers of a rank hold the old ones together, in one copy however
    many steps follow, as in plain PyTorch. Not at stage 3 on one host: there shares are in memory that is no process's own."""
    with programs.forked_apart():  # all that the server has in memory counts
        found = ranks.run(2, forking, stage, kind, fresh=True)
    num_bytes, times = 4096 * 4096 * 2, range(5)
    before, forked, stepped, again, ended = times
    copies = [1, 1, 2, 2, 1] if stage < 3 else [0.5] * 5  # at stage 3 the other rank maps them too, and counts its half
    for looks, kept in found:
        assert kept > (0.9 * num_bytes if stage < 3 else 0.45 * num_bytes)
        assert all(abs(look.weights - number * kept) < kept / 16 for look, number in zip(looks, copies, strict=True))
        assert all(own < num_bytes / 2 for look in looks for own in look.workers)
        assert all(look.own - looks[before].own < num_bytes / 2 for look in looks)
    own = [sum(looks[at].own for looks, _ in found) for at in times]
    # Of both ranks together, but for what workers have of their own. A copy of the weights on one rank is 32 MiB, and one of
    # the shares of stage 3 is 16. After the fork each rank writes 5 MiB of its Python, which its workers keep as it was.
    shared = [found[0][0][at].everything - sum(sum(looks[at].workers) for looks, _ in found) for at in times]
    most = 0.75 * num_bytes
    assert shared[before] > 2 * num_bytes
    assert shared[forked] - shared[before] < most
    assert shared[stepped] - shared[forked] < own[stepped] - own[forked] + most  # the memory that workers hold was there before
    assert shared[again] - shared[stepped] < most
    assert shared[ended] - shared[before] < most


def begun_narrow(rank, world, shared_memory, dtype, fails):
    """What is there after a beginning with other weights on each rank, by how many broadcasts, and what the masters are."""
    model, sent, broken = build().to(dtype), [], None
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)
    write, broadcast = faults.WRITING_A_CHUNK.now, faults.BROADCAST.now

    def write_or_fail(*given):
        stays = write(*given)
        if fails and rank == 1:
            raise RuntimeError("not today")
        return stays

    with (
        faults.BROADCAST.replaced(lambda *given: sent.append(1) or broadcast(*given)),
        faults.WRITING_A_CHUNK.replaced(write_or_fail),
    ):
        inner = torch.optim.AdamW(model.parameters())
        try:
            optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", shared_memory=shared_memory)
        except (RuntimeError, zero.ZeroError) as error:
            broken = str(error)
    if broken is not None:
        with torch.no_grad():
            model[0].weight.add_(rank)  # by now, the memory is nobody else's
        return broken, model[0].weight.detach().clone(), len(sent), []
    pieces = [piece for param in range(6) for piece, _ in inside.masters_of(optimizer, param)]
    masters = [(piece.param, inside.piece_of_masters(optimizer, piece).clone()) for piece in pieces]
    found = bits(model), [param.detach().clone() for param in model.parameters()], len(sent), masters
    optimizer.close()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_ranks_begin_with_the_weights_of_rank_0_which_no_message_carries_if_all_see_its_memory(shared_memory, dtype):
    expected = [param.detach() for param in build().to(dtype).parameters()]
    for _, weights, num_broadcasts, masters in ranks.run(2, begun_narrow, shared_memory, dtype, False):
        assert all(torch.equal(found, value.bfloat16()) for found, value in zip(weights, expected, strict=True))
        assert (num_broadcasts > 0) == (not shared_memory)
        assert masters
        for param, master in masters:
            assert torch.isin(master, expected[param].float()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_beginning_that_breaks_off_leaves_each_rank_weights_of_its_own(dtype):
    (said, one, *_), (broken, other, *_) = ranks.run(2, begun_narrow, True, dtype, True)
    assert "not today" in said and broken == "not today"
    assert one.dtype == other.dtype == dtype
    assert torch.equal(one + 1.0, other)


class CopiesOntoThemselves(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() == args[1].data_ptr() and args[0].numel():
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def copies_of_a_step(rank, world, points):
    found = []
    for options in points:
        model, optimizer = begun(rank, **options)
        send(model, rank, 1)
        with CopiesOntoThemselves() as copies:
            optimizer.step()
        found.append(copies.numels)
        optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_copies_no_weight_onto_itself(world):
    points = [{"stage": stage, "kernels": kernels} for stage in (1, 2) for kernels in ("torch", "fused")]
    for found in ranks.run(world, copies_of_a_step, points):
        assert found == [[]] * len(points)


def small_buckets(rank, world, threads, alone):
    """Bits of a training whose buckets are small, and how many times weights were gathered in its last step."""
    torch.set_num_threads(threads[rank])  # more of them step more at a time
    torch.manual_seed(0)
    model = filled(nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))), real=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    with faults.publishes_every_bucket_alone() if alone else contextlib.nullcontext():
        optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", bucket_bytes=16384, kernels="fused")
        gathering, step_batch = faults.gathering_of(optimizer), faults.STEP.now
        for step in range(2):
            model(real_numbers((2, 64), "inputs", rank, step).bfloat16()).float().square().mean().backward()
            counted = gathering.replaced(wraps=gathering.now)
            with faults.STEP.replaced(autospec=True, side_effect=step_batch) as batches, counted as gathers:
                optimizer.step()
            optimizer.zero_grad()
    return bits(model), batches.call_count, gathers.call_count, len(inside.buckets(optimizer))


def test_small_buckets_are_gathered_as_one_though_ranks_step_other_numbers_of_them_at_a_time():
    found = ranks.run(2, small_buckets, (1, 2), False)
    [(expected, _, num_alone, num_buckets), _] = ranks.run(2, small_buckets, (1, 1), True)
    (_, one_thread, *_), (_, two_threads, *_) = found
    assert one_thread > two_threads
    assert num_alone == num_buckets
    for weights, _, num_gathers, _ in found:
        assert weights == expected
        assert 1 < num_gathers < num_buckets / 2
