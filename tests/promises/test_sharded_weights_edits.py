"""Stage 3: what users write to weights between two steps, also differently on each rank, and how it is mended."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.promises.test_sharded_weights import mlp, same, shard, train, values
from zero.errors import RanksDiffer

TRANSPORTS = pytest.mark.parametrize("shared_memory", [True, False])


def with_base():
    """A frozen layer before trained ones."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8).requires_grad_(False), *mlp())


def edit_apart(model, rank):
    """Other values, and other places in another order, on each rank."""
    with torch.no_grad():
        for param in list(model.parameters())[:: 1 - 2 * rank]:
            param.add_(rank + 1.0)
        model[1].weight[rank].zero_()
        model[3].bias.data = torch.full_like(model[3].bias.data, float(rank))


def mended(rank, world, folder, how, dtype, shared_memory):
    model = with_base()
    optimizer = shard(model, 3, dtype=dtype, shared_memory=shared_memory)
    train(model, optimizer, rank)
    zero.save(folder, optimizer)
    weights = copy.deepcopy(model).state_dict()
    if rank == 0:
        torch.save(weights, f"{folder}/weights.pt")
    optimizer.any_rank(False)
    expected = values(model)
    train(model, optimizer, rank)
    after = values(model)
    edit_apart(model, rank)
    with pytest.raises(RanksDiffer, match=r"Cannot step: rank 1 of 2 .* load a checkpoint or weights"):
        train(model, optimizer, rank, 1)
    optimizer.zero_grad()
    if how == "checkpoint":
        zero.load(folder, optimizer)
    else:
        zero.load_weights(model, f"{folder}/weights.pt")
    assert same(values(model), expected)
    optimizer.check()
    train(model, optimizer, rank)
    if how == "checkpoint":
        assert same(values(model), after)
    optimizer.check()
    optimizer.close()


@TRANSPORTS
@pytest.mark.parametrize(("how", "dtype"), [("checkpoint", None), ("checkpoint", "bfloat16"), ("weights", None)])
def test_a_load_mends_weights_that_ranks_edited_differently(how, dtype, shared_memory, tmp_path):
    ranks.run(2, mended, str(tmp_path), how, dtype, shared_memory)


def loaded_in_part(rank, world, folder, shared_memory):
    model = with_base()
    optimizer = shard(model, 3, shared_memory=shared_memory)
    train(model, optimizer, rank)
    trained = {name: value for name, value in copy.deepcopy(model).state_dict().items() if not name.startswith("0.")}
    if rank == 0:
        torch.save(trained, f"{folder}/weights.pt")
    optimizer.any_rank(False)
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # alike, and not in the file
        model[3].weight.fill_(rank)
    zero.load_weights(model, f"{folder}/weights.pt", strict=False)
    assert torch.equal(model[0].weight, torch.ones(8, 8)) and torch.equal(model[3].weight, trained["3.weight"])
    train(model, optimizer, rank)
    with torch.no_grad():
        model[0].bias[2:4].fill_(rank)
    kept = model[3].bias.detach().clone()
    with pytest.raises(RanksDiffer, match=r"Cannot load: rank 1 of 2 .* Nothing was changed. Load all weights."):
        zero.load_weights(model, f"{folder}/weights.pt", strict=False)
    assert torch.equal(model[3].bias, kept)
    optimizer.close()


@TRANSPORTS
def test_a_load_of_some_weights_mends_those_and_refuses_others_that_differ(shared_memory, tmp_path):
    ranks.run(2, loaded_in_part, str(tmp_path), shared_memory)


def wait_until_let_go(optimizer):
    """Other ranks have come as far, and their word of it comes."""
    end = time.monotonic() + 20.0
    while inside.edits_of_weights(optimizer)[0] > 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert inside.edits_of_weights(optimizer)[0] <= 20


def swapped(rank, world, gathered, shared_memory):
    """Averaged weights are swapped in and out for evaluation."""
    model, plain = mlp(), mlp()
    options = {"shared_memory": shared_memory, "gathered_bytes": gathered}
    optimizer, beside = shard(model, 3, **options), shard(plain, 2, shared_memory=shared_memory)
    most_noted = 0
    for one, its in ((model, optimizer), (plain, beside)):
        train(one, its, rank, 1)
        averaged = [torch.full_like(param, 0.5) for param in one.parameters()]
        for swap in range(200):
            with torch.no_grad():
                for param, mean in zip(one.parameters(), averaged, strict=True):
                    held = param.detach().clone()
                    param.copy_(mean)
                    mean.copy_(held)
            one(torch.ones(1, 8))
            if one is model:
                most_noted = max(most_noted, inside.edits_of_weights(optimizer)[1])
                if swap % 20 == 19:  # a rank that is ahead keeps what others may ask for
                    optimizer.any_rank(False)
                    wait_until_let_go(optimizer)
                assert world > 1 or inside.edits_of_weights(optimizer) == (0, 0)
        train(one, its, rank, 1)
    assert same(values(model), values(plain))
    assert most_noted <= len(values(plain))
    optimizer.any_rank(False)
    optimizer.close()
    beside.close()


@pytest.mark.parametrize(("world", "gathered", "shared_memory"), [
    (1, 0, True), (2, "all", False),
    *(pytest.param(2, *each, marks=pytest.mark.full) for each in ((0, False), ("all", True))),
])  # fmt: skip
def test_weights_swapped_in_and_out_without_a_step_take_no_more_and_more_memory(world, gathered, shared_memory):
    ranks.run(world, swapped, gathered, shared_memory)


def edited_by_threads(rank, world, gathered):
    """Three threads edit a bias each, beside a fourth that reads all weights; what they left."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, bucket_bytes=576, align_bytes=16, gathered_bytes=gathered
    )

    @torch.no_grad()
    def edit(layer):
        layer.bias.zero_()
        for _ in range(100):
            layer.bias.add_(1.0)

    @torch.no_grad()
    def read():
        for _ in range(20):
            model(torch.ones(1, 8))

    threads = [threading.Thread(target=edit, args=(layer,)) for layer in list(model)[:3]] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [layer.bias.tolist() for layer in list(model)[:3]]
    optimizer.close()
    return found


@pytest.mark.parametrize("gathered", [0, "all"])
def test_threads_edit_different_weights_at_one_time(gathered):
    assert ranks.run(1, edited_by_threads, gathered, timeout=60.0) == [[[100.0] * 8] * 3]
