"""A device is given small gradients of a bucket in one copy, and as much in a step whatever the buckets are."""

import pytest
import torch
from torch import nn

import accelerators
import zero
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.offloads import copied, place_of
from tests.zoo.case import filled, real_numbers

LAYERS = 24


def sharded(device, options, stage=2):
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))), real=True).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, zero.shard(model, inner, stage=stage, dtype="bfloat16", **options)


def send(model, number, device):
    model(real_numbers((2, 8), number).to(device, torch.bfloat16)).float().square().mean().backward()


def launches_of_steps(rank, world, bucket_bytes, stage):
    """Returns the copies that ours launches in the last of three backwards, what the step launches but for edits, and the
    number of buckets."""
    from accelerators_sim.waits import recorded_launches

    device = place_of(rank, "sim")
    options = {"bucket_bytes": bucket_bytes, "clip": 1.0} | ({"group": solo()} if world == 1 else {"timeout_s": 20.0})
    model, optimizer = sharded(device, options, stage)
    for number in range(3):
        with recorded_launches() as in_backward:
            send(model, number, device)
        with recorded_launches() as in_step:
            optimizer.step()
        optimizer.zero_grad()
    of_gradients = [launch for launch in in_backward if inside.collects_gradients(launch.place)]
    copies = [launch for launch in of_gradients if "copy_" in launch.operator or "cat" in launch.operator]
    # Transfers are those of rounds that a backward sent, and at stage 3 of what other ranks of the host read.
    in_step = [launch for launch in in_step if not inside.is_for_edits_or_transfers(launch.place)]
    return copies, in_step, len(inside.buckets(optimizer))


@needs_sim
@pytest.mark.promise("V08")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_launches_grow_with_buckets_in_a_backward_and_with_nothing_in_a_step(stage):
    small, middle, one = (ranks.run(1, counted, num_bytes, stage, apart="sim")[0] for num_bytes in (256, 1024, 2**20))
    assert small[0] > middle[0] > one[0] == 1
    for num_buckets, num_copies, _ in (small, middle, one):  # on one rank gradients stay where they are, and go together
        assert num_copies == num_buckets
    assert small[2] == middle[2] == one[2]


def counted(rank, world, bucket_bytes, stage):
    copies, in_step, num_buckets = launches_of_steps(rank, world, bucket_bytes, stage)
    return num_buckets, len(copies), len(in_step)


def changed_through_a_view(rank, world, of_tensors=False):
    """Trains with a hook of the user's that keeps a view of a gradient and changes it when the next one comes, and without.
    Returns the weights of both."""
    found, device = [], place_of(rank, "sim")
    for watches in (True, False):
        model, optimizer = sharded(device, {"bucket_bytes": 2**20} | ({"group": solo()} if world == 1 else {"timeout_s": 20.0}))
        seen = []

        def change(value, seen=seen):
            if seen:
                seen.pop().zero_()
            seen.append((value if of_tensors else value.grad).detach())

        for layer in model if watches else ():
            (layer.weight.register_hook if of_tensors else layer.weight.register_post_accumulate_grad_hook)(change)
        for number in range(3):
            send(model, number, device)
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied(list(model.parameters())))
    return found


@needs_sim
@pytest.mark.parametrize("of_tensors", [True, pytest.param(False, marks=pytest.mark.full)])
def test_on_two_ranks_a_gradient_that_a_hook_has_seen_is_copied_before_the_hook_can_change_it(of_tensors):
    for watched, plain in ranks.run(2, changed_through_a_view, of_tensors, apart="sim"):
        assert all(map(torch.equal, watched, plain))


class WithoutOne(nn.Module):
    """Leaves another layer of each four out in each step, so that no bucket is full before the window settles."""

    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(num_layers))

    def forward(self, x, step):
        for number, layer in enumerate(self.layers):
            x = x if number % 4 == step % 4 else layer(x)
        return x


def peaks_without_one(rank, world, num_layers, most):
    """Returns the most bytes in a backward whose buckets all stay open, with lists of gradients and without."""
    peaks, device, accelerator = [], place_of(rank, "sim"), accelerators.get("sim")
    for numel in (most, 0):
        with faults.keeps_for_a_list(numel):
            model = filled(WithoutOne(num_layers), real=True).to(device)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = zero.shard(model, inner, stage=2, bucket_bytes=2**18, timeout_s=20.0)
            for step in range(4):
                before = accelerator.memory().allocated
                accelerator.reset_peak_memory()
                model(real_numbers((1, 64), step).to(device), step).square().mean().backward()
                peak = accelerator.memory().peak - before
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(peak)
            optimizer.close()
    return peaks


@needs_sim
def test_gradients_of_buckets_that_stay_open_take_no_more_memory_than_one_list_does():
    numel = 2**15  # eight layers
    for with_lists, without in ranks.run(2, peaks_without_one, 48, numel, apart="sim"):
        assert with_lists <= without + 4 * numel


def dropped(rank, world):
    """Drops a gradient that waits for those of layers that are not used, where it is kept and where it was copied. Returns the
    weights of both."""
    found, device = [], place_of(rank, "sim")
    for numel in (10**9, 0):
        with faults.keeps_for_a_list(numel):
            model, optimizer = sharded(device, {"bucket_bytes": 2**20, "group": solo()})
            send(model[: LAYERS // 2], 0, device)
            model[0].bias.grad = None
            optimizer.step()
            found.append(copied(list(model.parameters())))
    return found


@needs_sim
@pytest.mark.promise("V08")
@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_on_two_ranks_one_list_fills_a_bucket_and_a_step_sends_by_the_bucket_alone(stage):
    small, one = (ranks.run(2, counted, num_bytes, stage, apart="sim") for num_bytes in (256, 2**20))
    for num_buckets, num_copies, _ in (*small, *one):
        assert num_copies == num_buckets + 1  # the first gradient of a backward takes the long path, and is copied by itself
    assert small[0][0] > one[0][0] == 1
    assert max(num for *_, num in small) <= min(num for *_, num in one) + 2  # weights of small buckets are gathered as one


@needs_sim
@pytest.mark.parametrize("trained", [changed_through_a_view, dropped])
def test_what_happens_to_a_gradient_after_it_was_taken_counts_as_if_it_had_been_copied(trained):
    [(one, other)] = ranks.run(1, trained, apart="sim")
    assert all(map(torch.equal, one, other))


def on_streams(rank, world):
    """Trains layers whose gradients come on two streams in turn. Returns the weights, and those of one stream."""
    import accelerators

    found, device = [], place_of(rank, "sim")
    accelerator = accelerators.get("sim")
    for several in (True, False):
        model, optimizer = sharded(device, {"bucket_bytes": 2**20, "group": solo()})
        other = accelerator.new_stream()
        for number in range(3):
            x = real_numbers((2, 8), number).to(device, torch.bfloat16)
            for layer, module in enumerate(model):
                if several and layer % 2:
                    other.wait_stream(accelerator.current_stream())
                    with accelerator.in_stream(other):
                        x = module(x)
                    accelerator.current_stream().wait_stream(other)
                else:
                    x = module(x)
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied(list(model.parameters())))
    return found


@needs_sim
def test_gradients_of_several_streams_are_copied_when_all_are_there():
    [(several, one)] = ranks.run(1, on_streams, apart="sim")
    assert all(map(torch.equal, several, one))
