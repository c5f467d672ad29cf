"""States in shares inside groups of ranks and replicated across them: what travels where, and the same numbers everywhere.

That trainings equal the oracle is in tests/test_parity.py.
"""

import itertools
import os
import socket
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.instruments import Ledger
from tests.loopback import run_ranks, solo
from tests.parity import hybrid
from tests.promises.checkpoints import adamw, build, everything, first_difference, train, without_dropout
from tests.zoo.case import filled
from zero import shard
from zero.errors import GroupLost, RanksDiffer

TIME_LIMIT_S = 20.0
SMALL = 256  # bytes of a bucket


def mlp():
    return filled(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)), real=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def backward(model, rank, step, micro=0, whole_numbers=False):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    dtype = next(model.parameters()).dtype
    if whole_numbers:  # every sum of whole numbers is exact
        batch = torch.randint(-2, 3, (4, 16), generator=generator).to(dtype)
        return model[0](batch).sum().backward()
    return model(torch.randn(4, 16, generator=generator).to(dtype)).float().square().mean().backward()


def bits(model):
    return [parameter.detach().view(torch.uint8).tolist() for parameter in model.parameters()]


def on_threads(world, shard_ranks, program):
    return run_ranks(world, lambda group: program(hybrid(group, shard_ranks)), TIME_LIMIT_S)


# What travels -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("R15")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_across_groups_travels_each_share_of_the_gradients_once_a_window(stage, dtype):
    """Whatever the number of backwards, and nothing else."""

    def program(group):
        across, within = Ledger(group.outer), Ledger(group.inner)
        model, group = mlp(), inside.hybrid_of(within, across, group)
        optimizer = shard(model, sgd(model), stage=stage, dtype=dtype, accumulation=3, bucket_bytes=SMALL, group=group)
        assert across.entries == []
        for step in range(2):
            across.section = within.section = f"window {step}"
            for micro in range(3):
                backward(model, group.rank, step, micro)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.check()
        shares = sorted(bucket.share_numel for bucket in inside.buckets(optimizer))
        optimizer.close()
        return shares, across.entries, len(within.of("window 1", "reduce_scatter")), bits(model)

    found = on_threads(4, 2, program)
    for shares, sent, num_inside, _ in found:
        assert len(shares) > 3 and num_inside == len(shares) * (1 if stage == 1 else 3)
        assert {(entry.operation, entry.dtype) for entry in sent} == {("all_reduce", "float32")}
        for window in ("window 0", "window 1"):
            assert sorted(entry.numel for entry in sent if entry.phase == window) == shares
    assert all(weights == found[0][-1] for *_, weights in found)


@pytest.mark.parametrize("accumulation", [None, 3])
def test_on_the_host_shares_leave_in_the_last_declared_backward(accumulation):
    """While it goes on. Those of further ones wait for the settling."""

    def program(group):
        across = Ledger(group.outer)
        model = mlp()
        optimizer = shard(
            model, sgd(model), stage=2, accumulation=accumulation, bucket_bytes=SMALL,
            group=inside.hybrid_of(group.inner, across, group),
        )  # fmt: skip
        num_buckets, found = len(inside.buckets(optimizer)), []
        for step in range(2):
            for micro in range(1 + (accumulation or 1)):
                backward(model, group.rank, step, micro)
                found.append(len(across.entries))
            optimizer.step()
            optimizer.zero_grad()
            found.append(len(across.entries))
            across.entries.clear()
        optimizer.close()
        return num_buckets, found

    for num_buckets, found in on_threads(2, 1, program):  # inside there is nobody to wait for
        waiting = [0] * ((accumulation or 1) - 1)
        assert found == 2 * [*waiting, num_buckets, num_buckets, 2 * num_buckets]


# The same numbers -------------------------------------------------------------------------------------------------------


def trained(rank, group, options, whole_numbers):
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01) if not whole_numbers else sgd(model)
    clip = None if whole_numbers else 0.25
    optimizer = zero.shard(model, inner, accumulation=2, bucket_bytes=SMALL, group=group, clip=clip, **options)
    norms = []
    for step in range(2):
        for micro in range(2):
            backward(model, rank, step, micro, whole_numbers)
        norms.append(0.0 if whole_numbers else float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        norms.append(optimizer.grad_norm or 0.0)
        optimizer.zero_grad()
    kind = inside.kind_of_group(optimizer)
    optimizer.close()
    return kind, norms, bits(model)


def layouts(rank, world, stages, dtypes, shared):
    """Trainings in shares of all ranks, and by each way to have them in shares of two."""
    from torch.distributed.device_mesh import init_device_mesh

    flat, found = None, []
    ways = [(None, {"shard_ranks": 2}), (None, {"shard_ranks": 1}), (init_device_mesh("cpu", (2, world // 2)), {})]
    for stage, dtype, way in itertools.product(stages, dtypes, shared):
        options = {"stage": stage, "dtype": dtype, "shared_memory": way}
        for whole_numbers in (True, False):
            flat = trained(rank, None, options, whole_numbers)
            found.append((whole_numbers, flat, [trained(rank, g, {**options, **more}, whole_numbers) for g, more in ways]))
        again = trained(rank, None, {**options, **ways[0][1]}, whole_numbers=False)
        assert again == found[-1][2][0], "the same once more"
    return found


def equal_the_flat_one(found):
    for each in zip(*found, strict=True):
        whole_numbers, (_, norms, flat), others = each[0]
        assert all(one == each[0] for one in each), "all ranks have the same bits"
        for kind, its_norms, weights in others:
            assert kind == "HybridGroup"
            torch.testing.assert_close(its_norms, norms, rtol=1e-5, atol=0)
            if whole_numbers:
                assert weights == flat


@pytest.mark.promise("R02")
@pytest.mark.promise("R15")
def test_two_groups_of_two_have_the_bits_of_one_group_of_four_where_sums_are_exact_and_the_same_on_all_ranks_anyway():
    equal_the_flat_one(ranks.run(4, layouts, [3], [None], [True]))


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_same_at_each_stage_in_each_dtype_and_over_each_transport(dtype, shared):
    equal_the_flat_one(ranks.run(4, layouts, [1, 2, 3], [dtype], [shared]))


@pytest.mark.parametrize(
    "options",
    [
        {"reduce_dtype": "bfloat16"},
        {"reduce_dtype": "int8", "dtype": "bfloat16"},
        {"kernels": "fused"},
        {"kernels": "fused", "dtype": "bfloat16"},
        {"masters": "rounded", "dtype": "bfloat16", "offload": "cpu"},
        {"stage": 3, "keep_whole_numel": 30},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_replicas_have_the_same_bits_with_other_options_too(options):
    def program(group):
        _, norms, weights = trained(group.rank, group, {"stage": 2, **options}, whole_numbers=False)
        return norms, weights

    found = on_threads(4, 2, program)
    assert all(each == found[0] for each in found)


def settled_and_added_to(group):
    model = mlp()
    optimizer = shard(model, sgd(model), stage=2, bucket_bytes=SMALL, group=group)
    for step in range(3):
        backward(model, group.rank, step, 0, whole_numbers=True)
        found = model[0].bias.grad.norm()  # reading the norm settles
        for micro in (1, 2):  # one goes across at once, and one waits
            backward(model, group.rank, step, micro, whole_numbers=True)
        if step == 1:
            model[0].bias.grad = None
            backward(model, group.rank, step, 3, whole_numbers=True)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return float(found), bits(model)


def test_a_settled_window_that_is_added_to_has_the_bits_of_one_group():
    """Also where a gradient is cleared of which a part was settled, a part went across since, and a part did not."""
    expected = run_ranks(4, settled_and_added_to, TIME_LIMIT_S)
    for shard_ranks in (2, 1):
        assert on_threads(4, shard_ranks, settled_and_added_to) == expected


def test_states_on_disk_are_those_in_memory(tmp_path):
    """Sums that wait for the settling too, and those that a settled window has already."""
    homes = dict.fromkeys(("gradients", "masters", "moments"), f"disk:{tmp_path}")

    def program(group, homes):
        model = mlp()
        optimizer = shard(
            model, sgd(model), stage=2, dtype="bfloat16", bucket_bytes=SMALL, group=group, **({"homes": homes} if homes else {})
        )
        for step in range(2):
            for micro in range(4):
                backward(model, group.rank, step, micro)
                if micro == 1:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return bits(model)

    expected = on_threads(4, 2, lambda group: program(group, {}))
    assert on_threads(4, 2, lambda group: program(group, homes)) == expected


# Checkpoints ------------------------------------------------------------------------------------------------------------


def saved_and_loaded(folder, before, after):
    """Everything of a training before its save, and of another one after the load; and who wrote how many bytes."""
    (world, shard_ranks, stage), (new_world, new_shard_ranks, new_stage) = before, after
    options = {"dtype": "bfloat16", "bucket_bytes": SMALL}

    def first(group):
        optimizer = shard(model := build(), without_dropout(model), stage=stage, group=group, **options)
        train(optimizer, range(2), group.rank, group.size)
        path = zero.save(folder, optimizer).path
        found = everything(optimizer)
        optimizer.close()
        return found, path

    def second(group):
        optimizer = shard(model := build(), without_dropout(model), stage=new_stage, group=group, **options)
        zero.load(folder, optimizer)
        found = everything(optimizer)
        optimizer.close()
        return found

    (found, path), *_ = on_threads(world, shard_ranks, first)
    sizes = [each.stat().st_size for each in sorted(path.glob("*.safetensors"))]
    return found, on_threads(new_world, new_shard_ranks, second)[0], sizes


FROM_AND_TO = [
    ((4, 2, 2), (3, 3, 1)),
    pytest.param((3, 3, 3), (4, 2, 2), marks=pytest.mark.full),
    ((4, 2, 3), (4, 1, 1)),
    ((2, 1, 1), (4, 2, 3)),
    pytest.param((4, 2, 1), (2, 2, 0), marks=pytest.mark.full),
    ((1, 1, 0), (4, 2, 3)),
]


@pytest.mark.parametrize(("before", "after"), FROM_AND_TO, ids=str)
def test_a_checkpoint_goes_to_any_other_layout(tmp_path, before, after):
    found, loaded, _ = saved_and_loaded(tmp_path, before, after)
    for each in (found, loaded):
        del each["param_groups"]
    assert first_difference(found, loaded, "checkpoint") is None


def test_replicas_share_the_writing_of_a_checkpoint(tmp_path):
    _, _, sizes = saved_and_loaded(tmp_path, (4, 2, 2), (1, 1, 2))
    _, _, whole = saved_and_loaded(tmp_path / "flat", (4, 4, 2), (1, 1, 2))
    assert len(sizes) == 4 and max(sizes) < 2 * min(sizes)
    assert sum(sizes) < 1.2 * sum(whole), "nothing is written twice"


# What is refused, and what is lost --------------------------------------------------------------------------------------


def refused(rank, world):
    model, said = mlp(), []
    before = bits(model)
    hosts = ["node0", "node0", "node0", "node1"]
    for options, host in (
        ({"shard_ranks": 3}, "node"),
        ({"shard_ranks": 8}, "node"),
        ({"shard_ranks": 1 + rank // 2}, "node"),
        ({"shard_ranks": "host"}, hosts[rank]),
        ({"shard_ranks": "host"}, ("node0", "node1")[rank % 2]),
    ):
        with mock.patch.object(socket, "gethostname", return_value=host), pytest.raises((ValueError, RanksDiffer)) as raised:
            zero.shard(model, sgd(model), stage=2, **options)
        said.append(str(raised.value))
    assert bits(model) == before
    with mock.patch.object(socket, "gethostname", return_value=f"node{rank // 2}"):
        optimizer = zero.shard(model, sgd(model), stage=2, shard_ranks="host")
    backward(model, rank, 0)
    optimizer.step()
    said.append(inside.ranks_of_a_share(optimizer))
    optimizer.close()
    return said


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_changes():
    found = ranks.run(4, refused)
    assert all(said == found[0] for said in found)
    three, eight, differing, uneven, mixed, size = found[0]
    assert three == (
        "Cannot shard with shard_ranks=3: 4 ranks are not a multiple of it. Choose a divisor of 4, or leave shard_ranks out."
    )
    assert "shard_ranks=8" in eight
    assert "rank 2 of 4 has shard_ranks=2 where rank 0 has 1" in differing
    assert "there are 3 on node0, 1 on node1" in uneven and "1 on node0, 1 on node1, 1 on node0" in mixed
    assert size == 2


def meshes(rank, world):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    said = []
    model = mlp()
    of_three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    for mesh, options in (
        (of_three, {}),
        (DeviceMesh("cpu", [[3, 1], [2, 0]]), {}),
        (init_device_mesh("cpu", (2, 2)), {"shard_ranks": 4}),
    ):
        with pytest.raises(ValueError, match="Cannot use") as raised:
            zero.shard(model, sgd(model), stage=2, group=mesh, **options)
        said.append(str(raised.value))
    sizes = []
    for mesh in (of_three["replicate", "shard"], of_three["tensor"], init_device_mesh("cpu", (4,))):
        optimizer = zero.shard(model, sgd(model), stage=2, group=mesh)
        sizes.append(inside.sizes_of_groups(optimizer)[:2])
        backward(model, rank, 0)
        optimizer.step()
        optimizer.close()
    return said, sizes


def test_a_mesh_says_which_ranks_replicate_and_which_shard():
    for said, sizes in ranks.run(4, meshes):
        assert ["3 dimensions" in said[0], "ranks [3, 1, 2, 0]" in said[1], "inner dimension has 2" in said[2]] == [True] * 3
        assert sizes == [(2, 1), (2, 2), (4, 4)]


def test_a_group_of_ones_own_says_itself_which_ranks_share():
    model = mlp()
    with pytest.raises(ValueError, match="Leave shard_ranks out"):
        shard(model, sgd(model), stage=2, shard_ranks=2, group=solo())
    with pytest.raises(ValueError, match="shard_ranks=2: 1 ranks are not a multiple"):
        shard(model, sgd(model), stage=2, shard_ranks=2)
    shard(model, sgd(model), stage=2, shard_ranks=1).close()


def at_stage_0(rank, world):
    model = mlp()
    optimizer = zero.shard(model, sgd(model), stage=0, shard_ranks=2)
    backward(model, rank, 0)
    optimizer.step()
    optimizer.close()
    plain = mlp()
    for each in range(world):
        backward(plain, each, 0)
    for parameter in plain.parameters():
        parameter.grad /= world
    sgd(plain).step()
    return [torch.allclose(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True)]


def test_at_stage_0_everything_is_replicated_anyway():
    assert all(all(each) for each in ranks.run(2, at_stage_0))


def edits(group, stage):
    model = mlp()
    optimizer = shard(model, sgd(model), stage=stage, group=group)
    with torch.no_grad():
        model[0].bias[0] += 1.0 if group.rank < 2 else 2.0
    backward(model, group.rank, 0)
    try:
        with pytest.raises(RanksDiffer, match="rank 2 of 4 edited weights that rank 0 did not edit so"):
            optimizer.step()
    finally:
        optimizer.close()


def test_an_edit_in_one_group_that_another_did_not_make_is_found():
    on_threads(4, 2, lambda group: edits(group, 3))


def one_leaves(rank, world):
    model = mlp()
    optimizer = zero.shard(model, sgd(model), stage=2, shard_ranks=2, timeout_s=3.0)
    for step in range(3):
        backward(model, rank, step)
        if rank == 3 and step == 2:
            os._exit(7)
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_is_lost_is_named_by_its_number_among_all_ranks():
    found = ranks.outcomes(4, one_leaves, fresh=True, timeout=60.0)
    for outcome in found[:3]:
        assert isinstance(outcome.error, GroupLost), outcome
        assert "rank 3" in str(outcome.error) and f"on rank {outcome.rank}" in str(outcome.error)


def rebuilt(rank, world, stage):
    model = mlp()
    optimizer = zero.shard(model, sgd(model), stage=stage, shard_ranks=2, bucket_bytes=SMALL)
    for step in range(4):
        backward(model, rank, step)
        if step == 2:
            optimizer.rebuild()  # it drops the gradients of this window
            backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.check()
    return bits(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_that_are_connected_anew_train_on(stage):
    found = ranks.run(4, rebuilt, stage)
    assert all(each == found[0] for each in found)


def proven(rank, world):
    model = mlp()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_accelerators": {"shard_ranks": 2}}
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + step)) for step in range(3)]
    return zero.verify(model, batches, lambda model, x: model(x).square().mean(), adamw(model), config)


def test_verify_proves_it_too():
    for found in ranks.run(4, proven):
        assert found.equal and found.num_steps == 3, found


def through_a_file(rank, world):
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
    }  # fmt: skip
    engine, *_ = zero.initialize(model=mlp(), config=config)
    for step in range(2):
        loss = engine(torch.full((4, 16), float(rank + step))).square().mean()
        engine.backward(loss)
        engine.step()
    sizes = engine.group.size, engine.group.inner.size
    weights = [parameter.detach().clone().view(torch.uint8).tolist() for parameter in engine.module.parameters()]
    engine.close()
    return sizes, weights


def test_an_engine_trains_so_by_the_keys_of_deepspeed():
    found = ranks.run(4, through_a_file)
    assert all(each == found[0] for each in found)
    assert found[0][0] == (4, 2)


def test_the_keys_of_deepspeed_say_how_many_ranks_share():
    def meant(**keys):
        own = {"shard_ranks": keys.pop("own")} if "own" in keys else {}
        tree = {"zero_optimization": {"stage": 3, **keys}, "zero_accelerators": own}
        return inside.read_deepspeed_config({"train_micro_batch_size_per_gpu": 1, **tree}).shard_ranks

    assert meant() is meant(zero_hpz_partition_size=1) is meant(mics_shard_size=-1) is None
    assert meant(zero_hpz_partition_size=8) == meant(mics_shard_size=8) == meant(own=8) == 8
    assert meant(zero_hpz_partition_size=8, mics_shard_size=8) == 8
    assert (meant(mics_shard_size=1), meant(own=1), meant(own="host")) == (1, 1, "host")
    assert meant(stage=2, zero_hpz_partition_size=8) is None and meant(stage=2, own=8) == 8
    with pytest.raises(ValueError, match="they say how many ranks share the states, and differ"):
        meant(zero_hpz_partition_size=8, mics_shard_size=4)
    with pytest.raises(ValueError, match="it has to be at least 1"):
        meant(own=0)
