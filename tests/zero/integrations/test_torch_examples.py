"""What people use of torch beside us: each program in examples/ trains on two ranks as plain torch does on the joint batch."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from examples import experts, long_context, mixed_precision, muon, recomputation, sampler_and_schedule
from tests import ranks
from tests.devices import needs_muon
from tests.zero.integrations.on_ranks import assert_runs_as_a_program, assert_same_training, both_ranks, plain_training


def test_a_distributed_sampler_and_a_schedule_of_schedules_train_as_one_process_does():
    found = both_ranks("examples.sampler_and_schedule:train")
    data, rates = sampler_and_schedule.make_data(), []

    def losses(model):
        for epoch in range(sampler_and_schedule.EPOCHS):
            samplers = [DistributedSampler(data, num_replicas=2, rank=rank, seed=5) for rank in range(2)]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            for batches in zip(*(DataLoader(data, sampler_and_schedule.BATCH, sampler=one) for one in samplers), strict=True):
                x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
                yield nn.functional.mse_loss(model(x), y)

    def schedule(optimizer):
        made = sampler_and_schedule.make_schedule(optimizer)
        step = made.step
        made.step = lambda: (step(), rates.append(optimizer.param_groups[0]["lr"]))
        return made

    assert_same_training(found, *plain_training(sampler_and_schedule.make_model(), losses, schedule=schedule))
    assert found[0][1] == found[1][1] == rates and len(set(rates)) > 4


def joint(batch_of, step):
    return tuple(torch.cat(tensors) for tensors in zip(*(batch_of(step, rank) for rank in range(2)), strict=True))


def test_a_grad_scaler_unscales_clips_and_skips_on_both_ranks_as_in_one_process():
    found = both_ranks("examples.mixed_precision:train", 5, False)

    def losses(model):
        for step in range(5):
            if step != mixed_precision.OVERFLOWS_AT:
                x, y = joint(mixed_precision.batch_of, step)
                yield nn.functional.mse_loss(model(x), y)

    plain, weights = plain_training(mixed_precision.make_model(), losses, clip=mixed_precision.CLIP)
    plain.insert(mixed_precision.OVERFLOWS_AT, torch.inf)
    assert_same_training(found, plain, weights)
    assert found[0][1] == found[1][1] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


def test_autocast_trains_to_the_rounding_of_its_dtype():
    found = both_ranks("examples.mixed_precision:train", 2)

    def losses(model):
        for step in range(2):
            x, y = joint(mixed_precision.batch_of, step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
            yield nn.functional.mse_loss(output.float(), y)

    plain, weights = plain_training(mixed_precision.make_model(), losses, clip=mixed_precision.CLIP)
    rounding = torch.finfo(torch.bfloat16).eps
    for name, weight in weights.items():
        first, second = (rank[-1][name] for rank in found)
        assert first.dtype == torch.float32 and torch.equal(first, second), name
        # Relative to the most that two steps moved a weight.
        torch.testing.assert_close(first, weight, rtol=rounding, atol=2 * 0.01 * rounding)
    means = [sum(step) / 2 for step in zip(found[0][0], found[1][0], strict=True)]
    assert means == pytest.approx(plain, rel=rounding)


@pytest.mark.promise("Q06")
def test_experts_over_ranks_go_on_from_a_checkpoint_as_experts_on_one(tmp_path):
    ranks.run(2, train_experts, 2, tmp_path / "first")
    for name in ("over ranks", "on one"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    over_ranks = ranks.run(2, train_experts, 2, tmp_path / "over ranks")
    on_one = ranks.run(2, train_experts, 1, tmp_path / "on one")
    for losses, expected in zip(over_ranks, on_one, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]


def train_experts(rank, world, ranks_of_experts, folder):
    return experts.train(6, ranks_of_experts, folder=str(folder))


@pytest.mark.promise("Y01")
def test_long_sequences_over_two_ranks_train_as_on_one():
    (alone,), over_ranks = ranks.run(1, train_long, group=False), ranks.run(2, train_long)
    for losses in over_ranks:
        assert losses == pytest.approx(alone, rel=1e-5) and losses[-1] < losses[0]


def train_long(rank, world):
    return long_context.train(4)


@pytest.mark.parametrize(
    "name",
    ["tensor_parallel",  # the tests around these train all others
     *(pytest.param(name, marks=pytest.mark.full)
       for name in ("experts", "long_context", "mixed_precision", "recomputation", "sampler_and_schedule")),
     pytest.param("muon", marks=(pytest.mark.full, needs_muon))],
)  # fmt: skip
def test_the_example_runs_as_a_program(name, tmp_path):
    assert_runs_as_a_program(name, tmp_path)


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_what_is_recomputed_trains_as_what_is_kept(use_reentrant):
    found = both_ranks("examples.recomputation:train", use_reentrant)

    def losses(model):
        for step in range(4):
            yield model(torch.cat([recomputation.batch_of(step, rank) for rank in range(2)])).square().mean()

    assert_same_training(found, *plain_training(recomputation.Blocks(None), losses))


@pytest.fixture
def one_thread():
    """The process has one thread, as each rank has: the order of some sums depends on it."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.mark.promise("W01")
@pytest.mark.usefixtures("one_thread")
@needs_muon
def test_muon_and_adamw_train_a_gpt_on_two_ranks_to_the_bit_as_in_one_process():
    found = both_ranks("examples.muon:train", 6, "torch")
    model = muon.make_model()
    optimizers = muon.make_optimizers(model)
    for step in range(6):
        for rank, batch in enumerate(muon.batch_of(step).chunk(2)):
            loss = model(batch)
            (loss / 2).backward()
            assert found[rank][0][step] == loss.item(), (step, rank)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for rank in found:
        assert all(torch.equal(rank[1][name], value) for name, value in model.state_dict().items())
    assert found[0][0][-1] < found[0][0][0]
