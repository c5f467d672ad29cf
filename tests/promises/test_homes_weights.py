"""H07: weights on a disk, at stage 3: memory that is a file, which operators and other ranks read where it lies."""

import errno
import gc
import itertools
import os
import re
from unittest import mock

import pytest
import torch

import zero
from tests import faults, inside, ranks
from tests.devices import needs_linux, needs_sim
from tests.loopback import solo
from tests.promises.offloads import on_sim
from tests.promises.test_homes import (
    ALIGNED,
    EVERYTHING,
    SMALL,
    adamw,
    build,
    disk,
    edit,
    in_,
    same,
    send,
    sharded,
    told,
    train,
)  # fmt: skip
from tests.traces import copied
from zero.config.schema import ZeroConfig

ALL = {**EVERYTHING, **disk("weights")}
WEIGHTS, SOME = disk("weights"), disk("weights", ratio=0.5)


def train_ranks(rank, world, folder, dtype, shared, points):
    found = []
    for homes, gathered in (({}, 0), *points):
        model = build()
        options = {"bucket_bytes": SMALL, "align_bytes": ALIGNED, "clip": 0.1, "gathered_bytes": gathered}
        options |= {"stage": 3, "dtype": dtype, "homes": in_(folder, homes), "shared_memory": shared}
        optimizer = zero.shard(model, adamw(model), **options)
        assert bool(inside.bytes_of_weights_on_disk(optimizer)) is bool(homes)
        assert (inside.bytes_of_weights(optimizer) == 0) is (homes.get("weights", {}).get("ratio") == 1.0)
        found.append([train(model, optimizer, rank=rank), told(model, optimizer)])
        optimizer.close()
        found[-1].append(copied(list(model.parameters())))
    assert [same(each, found[0]) for each in found] == [True] * len(found)


@pytest.mark.promise("H07")
@pytest.mark.parametrize("world, dtype, shared, points", [(2, None, True, [(ALL, 0)]), (3, "bfloat16", False, [(SOME, "all")])])
def test_weights_on_disk_have_the_bits_of_those_in_memory(tmp_path, world, dtype, shared, points):
    ranks.run(world, train_ranks, str(tmp_path), dtype, shared, points)
    assert os.listdir(tmp_path) == []


@pytest.mark.full
@pytest.mark.promise("H07")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_same_with_any_number_of_ranks_dtype_and_transport(tmp_path, world, dtype, shared):
    points = list(itertools.product((ALL, WEIGHTS, SOME), (0, "all")))
    ranks.run(world, train_ranks, str(tmp_path), dtype, shared, points)


def train_on_sim(model, optimizer, rank):
    return [copied(each) for each in (*train(model, optimizer, rank=rank), *model.parameters())]


@needs_sim
@pytest.mark.promise("H07")
@pytest.mark.parametrize(
    ("world", "dtype"),
    [(1, "bfloat16"), *(pytest.param(*each, marks=pytest.mark.full) for each in [(1, None), (2, None), (2, "bfloat16")])],
)
def test_on_a_device_they_have_those_bits_too(tmp_path, world, dtype):
    half = {"home": "host", "ratio": 0.5}
    homes = [
        in_(tmp_path, ALL),
        {"masters": "cpu", "moments": "cpu", **in_(tmp_path, disk("weights"))},
        {"masters": half, "moments": half, **in_(tmp_path, disk("weights", ratio=0.5))},
        {"masters": "cpu", "moments": "cpu", **in_(tmp_path, disk("weights", ratio=0.3))},
    ]
    options = {"stage": 3, "gathered_bytes": 0}
    points = [{**options, "dtype": dtype, "homes": own} for own in ({}, *homes)]
    for in_memory, *elsewhere in on_sim(world, train_on_sim, points):
        assert [same(each, in_memory) for each in elsewhere] == [True] * len(homes)


def train_further(rank, world, folder, homes):
    """Frozen parameters, one that is trained later, one that joins, a checkpoint, and states that go away and come back."""
    model = build()
    for param in model[0].parameters():
        param.requires_grad_(False)
    late = torch.nn.Linear(3, 3)
    with torch.no_grad():
        late.weight.copy_(torch.eye(3))
    model.append(late)
    inner = torch.optim.AdamW(model[2].parameters(), lr=0.02, eps=1e-2)
    options = {"stage": 3, "dtype": "bfloat16", "bucket_bytes": SMALL, "align_bytes": ALIGNED, "homes": in_(folder, homes)}
    for param in late.parameters():
        param.requires_grad_(False)
    optimizer = zero.shard(model, inner, **options)
    seen = []
    for step in range(5):
        send(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        edit(model)  # edits what is frozen, at first
        if step == 1:
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})
            for param in (*late.parameters(), *model[0].parameters()):
                param.requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
        if step == 2:
            zero.save(f"{folder}/saved", optimizer)
            saved = copied(list(model.parameters()))
        if step == 3:
            zero.load(f"{folder}/saved", optimizer)
            assert all(map(torch.equal, saved, model.parameters()))
        seen.append(copied(list(model.parameters())))
    on_disk = inside.bytes_of_weights_on_disk(optimizer)
    optimizer.close()
    return seen, copied(list(model.parameters())), on_disk


@pytest.mark.promise("H07")
@pytest.mark.parametrize("world", [1, 2])
def test_frozen_late_and_joining_parameters_are_on_disk_too(tmp_path, world):
    for name in ("plain", "all"):
        (tmp_path / name).mkdir()
    plain = ranks.run(world, train_further, str(tmp_path / "plain"), {})
    apart = ranks.run(world, train_further, str(tmp_path / "all"), ALL)
    assert all(same(one[:2], other[:2]) for one, other in zip(plain, apart, strict=True))
    numel = sum(param.numel() for param in build().parameters()) + 12
    assert sum(each[2] for each in plain) == 0 and sum(each[2] for each in apart) >= 2 * numel
    assert os.listdir(tmp_path / "all") == ["saved"]


@pytest.mark.promise("H07")
def test_a_checkpoint_goes_to_weights_on_disk_and_from_there(tmp_path):
    (tmp_path / "disk").mkdir()
    homes = {"memory": {}, "disk": in_(tmp_path / "disk", ALL)}
    model, optimizer = sharded({}, stage=3)
    train(model, optimizer)
    after = train(model, optimizer, range(4, 6)), told(model, optimizer)
    for source, target in (("memory", "disk"), ("disk", "memory"), ("disk", "disk")):
        saved, folder = sharded(homes[source], stage=3), tmp_path / f"{source}-{target}"
        train(*saved)
        zero.save(folder, saved[1])
        loaded = sharded(homes[target], stage=3)
        train(*loaded, steps=range(1))
        zero.load(folder, loaded[1])
        assert same((train(*loaded, steps=range(4, 6)), told(*loaded)), after)


@pytest.mark.parametrize(
    "homes, stage, words",
    [
        ({"weights": "disk:/fast"}, 2, "Cannot keep weights on disk: they are whole on the device below stage 3."),
        ({"weights": "disk:/fast"}, 3, "Cannot keep weights on disk: masters are stepped on the device."),
        (
            {"masters": {"home": "cpu", "ratio": 0.5}, "weights": "disk:/fast"},
            3,
            "Cannot keep 100% of weights on disk: 50% of masters are stepped on the host",
        ),
    ],
)
def test_what_cannot_be_is_refused(homes, stage, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        inside.offloaded_ratio({}, ZeroConfig(stage=stage, homes=homes), torch.device("meta"))


def shard_where_one_rank_cannot_write(rank, world, folder, shared, failing):
    model = build()
    before = copied(list(model.parameters()))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    homes = in_(folder, disk("weights"))
    with mock.patch.object(os, "posix_fallocate", side_effect=error if rank == failing else os.posix_fallocate):
        with pytest.raises(zero.ZeroError) as failed:
            zero.shard(model, adamw(model), stage=3, dtype="bfloat16", homes=homes, shared_memory=shared, bucket_bytes=SMALL)
    assert all(map(torch.equal, before, model.parameters()))
    return str(failed.value)


@pytest.mark.promise("H08")
@pytest.mark.parametrize("shared, failing", [(False, 1), (True, 0)])
def test_a_disk_without_space_on_one_rank_is_named_on_all_and_nothing_is_changed(tmp_path, shared, failing):
    for text in ranks.run(2, shard_where_one_rank_cannot_write, str(tmp_path), shared, failing):
        assert re.search(rf"Cannot reserve \d+ bytes in {tmp_path} for weights: No space left on device", text), text
    assert os.listdir(tmp_path) == []


def lose_weights(rank, world, folder):
    """The file of rank 1 is cut short by another program."""
    descriptors, make = list[int](), faults.MAPPING_A_FILE.now

    def noted(descriptor, sizes):
        descriptors.append(os.dup(descriptor))
        return make(descriptor, sizes)

    with faults.MAPPING_A_FILE.replaced(noted):
        model, optimizer = sharded(in_(folder, disk("weights")), stage=3, group=None, timeout_s=20.0, shared_memory=False)
    train(model, optimizer, steps=range(2), rank=rank)
    zero.save(f"{folder}/saved", optimizer)
    if rank:
        os.ftruncate(descriptors[0], 0)
    with pytest.raises(zero.ZeroError) as failed:
        train(model, optimizer, steps=range(2, 4), rank=rank)
    return str(failed.value)


@pytest.mark.promise("H08")
def test_a_rank_whose_weights_cannot_be_read_is_named_and_a_checkpoint_loads(tmp_path):
    """What the system cannot read into memory ends the process."""
    first, other = ranks.outcomes(2, lose_weights, str(tmp_path))
    assert first.ok and "rank 1 was last seen" in first.value, first
    assert other.kind == "died", other
    model, optimizer = sharded(in_(tmp_path, ALL), stage=3)
    zero.load(tmp_path / "saved", optimizer)
    train(model, optimizer, steps=range(2, 3))
    assert os.listdir(tmp_path) == ["saved"]


def descriptors(folder):
    """Files of that folder that this process has open or mapped."""
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_there(number)]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(path.startswith(folder) for path in opened) + sum(folder in line for line in maps)


def _is_there(number):
    return os.path.lexists(f"/proc/self/fd/{number}")


def files_after(rank, world, folder, shared):
    """How many there are after one that was refused, with one open, and after close(), whose object is still there."""
    homes, found = in_(folder, disk("weights")), []
    options = {"stage": 3, "homes": homes, "shared_memory": shared, "bucket_bytes": SMALL}
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "posix_fallocate", side_effect=error if rank == 1 - shared else os.posix_fallocate):
        with pytest.raises(zero.ZeroError):
            model = build()
            zero.shard(model, adamw(model), **options)
    gc.collect()
    found.append(descriptors(folder))
    model = build()
    optimizer = zero.shard(model, adamw(model), **options)
    found.append(descriptors(folder))
    optimizer.close()
    gc.collect()
    return [*found, descriptors(folder)]


@needs_linux
@pytest.mark.promise("H08")
@pytest.mark.parametrize("shared", [False, True])
def test_files_go_with_what_is_refused_and_with_what_is_closed(tmp_path, shared):
    for refused, there, closed in ranks.run(2, files_after, str(tmp_path), shared):
        assert refused == closed == 0 < there


@pytest.mark.promise("H08")
def test_frozen_parameters_have_their_dtype_again_where_their_file_finds_no_space(tmp_path):
    model = build()
    for param in model[0].parameters():
        param.requires_grad_(False)
    given = iter([os.posix_fallocate])

    def second_fails(*args):
        act = next(given, None)
        if act is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        act(*args)

    homes = in_(tmp_path, disk("weights"))
    with mock.patch.object(os, "posix_fallocate", second_fails), pytest.raises(zero.ZeroError, match="No space left"):
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
        zero.shard(model, inner, stage=3, dtype="bfloat16", homes=homes, group=solo(), bucket_bytes=SMALL)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model(torch.ones(3, 4)).sum().backward()


@pytest.mark.promise("H08")
def test_so_they_have_where_what_comes_after_it_fails(tmp_path):
    model = build()
    for param in model[0].parameters():
        param.requires_grad_(False)
    failing = faults.ATTACHING_A_HOOK.replaced(side_effect=MemoryError("too much of it"))
    with failing, pytest.raises(MemoryError, match="too much of it"):
        inner, homes = torch.optim.SGD(model[2].parameters(), lr=0.1), in_(tmp_path, disk("weights"))
        zero.shard(model, inner, stage=3, dtype="bfloat16", homes=homes, group=solo(), bucket_bytes=SMALL)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model(torch.ones(3, 4)).sum().backward()


@pytest.mark.promise("H08")
def test_a_file_system_that_cannot_reserve_space_is_refused(tmp_path):
    error = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    with mock.patch.object(os, "posix_fallocate", side_effect=error):
        with pytest.raises(zero.ZeroError, match=r"Cannot reserve space in .* for weights: its file system cannot"):
            sharded(in_(tmp_path, disk("weights")), stage=3)


def load_into_meta(rank, world, folder, dtype):
    model = build()
    optimizer = zero.shard(model, adamw(model), stage=3, dtype=dtype, bucket_bytes=SMALL)
    train(model, optimizer, range(2), rank)
    zero.save(f"{folder}/saved", optimizer)
    train(model, optimizer, range(2, 4), rank)
    with torch.device("meta"):
        other = build()
    again = zero.shard(other, adamw(other), stage=3, dtype=dtype, bucket_bytes=SMALL)
    zero.load(f"{folder}/saved", again)
    train(other, again, range(2, 4), rank)
    assert same(told(model, optimizer), told(other, again))
    again.close()
    optimizer.close()
    return all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("world, dtype", [(1, "bfloat16"), (2, None)])
def test_a_checkpoint_gives_a_model_on_the_meta_device_its_values(tmp_path, world, dtype):
    assert all(ranks.run(world, load_into_meta, str(tmp_path), dtype))
