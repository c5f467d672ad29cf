"""A step whose verdict hangs on no number asks the device nothing, and gives what one that asks gives."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import nccl_like, ranks
from tests.devices import needs_sim
from tests.promises.offloads import copied, place_of
from tests.zoo.case import filled, real_numbers
from zero.comm.levels import SoloGroup
from zero.sharding import update
from zero.sharding.optimizer import shard
from zero.window.grads import GradOps

HOST = "the host"
VALUES = (1.0, 1e30, 0.0, math.inf, math.nan)


def trainer(options, stage=2):
    torch.manual_seed(0)
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), real=True).to(place_of(0, "sim"))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, shard(model, inner, stage=stage, dtype="bfloat16", group=SoloGroup(), **options)


def batch_of(number):
    return real_numbers((2, 8), number).to("sim:0", torch.bfloat16)


def send(model, batch, factor=1.0):
    (model(batch).float().square().mean() * factor).backward()


def waits_of_steps(rank, world, options, stage):
    """How often the host waits for the device from a backward to the end of a step, and then to read the norm."""
    from accelerators_sim.waits import recorded_waits

    model, optimizer = trainer(options, stage)
    counted, read = [], []
    for batch in map(batch_of, range(4)):
        with recorded_waits() as waits:
            send(model, batch)
            optimizer.step()
            counted.append(sum(wait.waiter == HOST for wait in waits))
        with recorded_waits() as waits:
            assert optimizer.grad_norm > 0
        read.append(sum(wait.waiter == HOST for wait in waits))
        optimizer.zero_grad()
    return counted, read


@needs_sim
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("bucket_bytes", [256, 2**20])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_from_backward_to_the_end_of_a_step_the_host_waits_for_nothing(clip, bucket_bytes, stage):
    [(counted, read)] = ranks.run(1, waits_of_steps, {"clip": clip, "bucket_bytes": bucket_bytes}, stage, apart="sim")
    assert counted == [0, 0, 0, 0]
    assert max(read) <= 1


@needs_sim
def test_where_a_step_may_be_skipped_the_host_asks_for_edits_and_norm():
    [(counted, _)] = ranks.run(1, waits_of_steps, {"clip": 1.0, "on_nonfinite": "skip"}, 2, apart="sim")
    assert counted == [2, 2, 2, 2]


def judged(rank, world, options):
    """Trains with edits of weights, and gradients of all kinds. Returns norms, weights and masters after each step."""
    found = []
    for on_device in (True, False):
        with mock.patch.object(GradOps, "judges_on_device", on_device):
            model, optimizer = trainer({"bucket_bytes": 256, **options})
            steps = []
            for number, value in enumerate(VALUES):
                send(model, batch_of(number), value)
                with torch.no_grad():
                    model[2].weight[1, 1] = value
                    model[3].bias.data = model[3].bias.data * 0.5
                optimizer.step()
                optimizer.zero_grad()
                saved = optimizer.state_dict()
                steps.append((optimizer.grad_norm, copied([saved["masters"], list(model.parameters())])))
            found.append(steps)
    return found


@needs_sim
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_are_those_of_a_step_that_asks(clip):
    [(late, asked)] = ranks.run(1, judged, {"clip": clip}, apart="sim")
    for (norm, values), (expected_norm, expected) in zip(late, asked, strict=True):
        assert torch.equal(torch.tensor(norm), torch.tensor(expected_norm)) or (math.isnan(norm) and math.isnan(expected_norm))
        for one, other in zip(values[1], expected[1], strict=True):
            assert torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0))
        for name, master in values[0].items():
            assert torch.equal(master.nan_to_num(99.0), expected[0][name].nan_to_num(99.0)), name


def norm_after_a_failure(rank, world):
    model, optimizer = trainer({"clip": 0.1})
    send(model, batch_of(0))
    optimizer.step()
    optimizer.zero_grad()
    norm = optimizer.grad_norm
    send(model, batch_of(1), 1e3)
    with mock.patch.object(update, "step_without_hooks", side_effect=RuntimeError("no memory")), pytest.raises(RuntimeError):
        optimizer.step()
    return norm, optimizer.grad_norm


@needs_sim
def test_a_step_that_fails_leaves_the_norm_of_the_last_one():
    [(before, after)] = ranks.run(1, norm_after_a_failure, apart="sim")
    assert before == after > 0


def norms_of_ranks(rank, world):
    """Norms that ranks add up on their devices, and then by the hosts, from the same start. Says where the library had the host
    wait for its device, but for rounds that it is ahead with."""
    from accelerators_sim.waits import recorded_waits

    norms, asked = [], []
    for on_device in (True, False):
        torch.manual_seed(0)
        place = torch.device("sim", torch.sim.current_device())
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = zero.shard(model, inner, stage=2, clip=1.0, bucket_bytes=512, timeout_s=8.0)
        with mock.patch.object(GradOps, "judges_on_device", on_device):
            for number in range(3):
                batch = real_numbers((2, 8), 10 * number + rank).to(place)
                with recorded_waits() as waits:
                    model(batch).square().mean().backward()
                    optimizer.step()
                places = [wait.place for wait in waits if wait.waiter == HOST]
                asked.append([place for place in places if "/zero/" in place and "/zero/window/rounds.py" not in place])
                norms.append(torch.tensor(optimizer.grad_norm))
                optimizer.zero_grad()
        weights = [param.detach().cpu() for param in model.parameters()]
        optimizer.close()
    return norms, asked, weights


@needs_sim
def test_ranks_whose_devices_wait_for_each_other_add_the_norm_up_there():
    found = nccl_like.outcomes(2, norms_of_ranks)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    (norms, asked, weights), (norms_of_other, _, weights_of_other) = (outcome.value for outcome in found)
    assert norms[:3] == norms[3:] == norms_of_other[:3] and len(set(norms[:3])) == 3
    assert asked[:3] == [[], [], []] and all(asked[3:])
    assert all(torch.equal(one, other) for one, other in zip(weights, weights_of_other, strict=True))
