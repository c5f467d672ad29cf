"""Published weights have the same bits through shared memory and over messages, after every edit and failure."""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from tests import ranks
from tests.devices import needs_linux
from tests.zoo.case import filled, real_numbers
from zero.comm.torch_group import TorchGroup
from zero.memory.flatten import Flattener
from zero.runtime.step.updater import Updater

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
    calls, step_one = [], Updater.step

    def breaking(self, *args):
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError("nothing left")
        return step_one(self, *args)

    with mock.patch.object(Updater, "step", breaking if rank == 1 else step_one):
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
    is_whole = name != "failing_on_one_rank"  # else ranks have counted their steps differently
    masters = is_whole and {key: value.tolist() for key, value in optimizer.state_dict()["masters"].items()}
    optimizer.close()
    seen.append(bits(model))
    return seen, masters


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
@pytest.mark.parametrize(
    "name", [name if at % 2 == 0 else pytest.param(name, marks=pytest.mark.full) for at, name in enumerate(EVENTS)]
)
def test_weights_have_the_same_bits_through_shared_memory_and_over_messages(name, stage):
    def run(shared_memory):
        options = {"stage": stage, "offload": "cpu" if stage == 1 else None, "shared_memory": shared_memory}
        return ranks.run(2, trained, name, options)

    shared, sent = run(True), run(False)
    assert shared == sent
    if stage > 0 and name not in ("unused_layer_edited", "frozen_and_back"):  # where some are in no step after an edit
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
    """Says how many bytes of private memory its worker process has of its own."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return private_bytes()


def private_bytes():
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(field[1]) * 1024 for field in fields if field[0] in ("Private_Clean:", "Private_Dirty:"))


def forking(rank, world):
    """Private bytes of this process before, while and after four workers read, forked between two steps, and of theirs."""
    model = nn.Linear(4096, 4096, bias=False)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters()), stage=2, dtype="bfloat16")

    def step():
        model(torch.ones(1, 4096, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    before = private_bytes()
    batches = iter(torch.utils.data.DataLoader(Reading(), num_workers=4, multiprocessing_context="fork"))
    of_workers = [int(next(batches)) for _ in range(4)]
    step()
    after_a_step = private_bytes()
    del batches
    found = before, after_a_step, max(of_workers), model.weight.nbytes
    optimizer.close()
    return found


def test_workers_forked_in_the_middle_of_a_training_cost_no_copy_of_the_weights():
    for before, after, of_workers, num_bytes in ranks.run(2, forking, fresh=True):
        assert of_workers < num_bytes / 2
        assert after - before < num_bytes / 2


def begun_narrow(rank, world, shared_memory, dtype, fails):
    """What is there after a beginning with other weights on each rank, by how many broadcasts, and what the masters are."""
    model, sent, broken = build().to(dtype), [], None
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)
    write, broadcast = Flattener.write, TorchGroup.broadcast

    def write_or_fail(*given):
        stays = write(*given)
        if fails and rank == 1:
            raise RuntimeError("not today")
        return stays

    with (
        mock.patch.object(TorchGroup, "broadcast", lambda *given: sent.append(1) or broadcast(*given)),
        mock.patch.object(Flattener, "write", write_or_fail),
    ):
        inner = torch.optim.AdamW(model.parameters())
        try:
            optimizer = zero.shard(model, inner, stage=2, dtype="bfloat16", shared_memory=shared_memory)
        except (RuntimeError, zero.ZeroError) as error:
            broken = str(error)
    if broken is not None:
        with torch.no_grad():
            model[0].weight.add_(rank)  # which is nobody else's any more
        return broken, model[0].weight.detach().clone(), len(sent), []
    sharding = optimizer.sharding
    pieces = [piece for param in range(6) for piece, _ in sharding.masters.of(param)]
    masters = [(piece.param, sharding.masters.shard.piece(piece).clone()) for piece in pieces]
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
