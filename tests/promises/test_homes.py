"""H06 to H09: whatever home a state has, the device, the host or a disk, a training gives the same bits."""

import contextlib
import errno
import fcntl
import gc
import itertools
import mmap
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.devices import needs_sim
from tests.faults import end_as_the_interpreter_does
from tests.loopback import solo
from tests.programs import start_context
from tests.promises.loops import adamw
from tests.promises.offloads import on_sim
from tests.traces import copied
from tests.zoo.case import filled, real_loss, real_mlp
from zero.config.schema import StateHomes, ZeroConfig

SMALL = 32  # bytes of a bucket
ALIGNED = 16  # bytes: so that every rank has some of each parameter


def disk(*kinds, ratio=1.0, path="{}"):
    return {kind: {"home": "disk", "path": path, "ratio": ratio} for kind in kinds}


EVERYTHING = disk("masters", "moments", "gradients")
PLACES = {
    "masters": disk("masters"),
    "moments": disk("moments"),
    "gradients": disk("gradients"),
    "all": EVERYTHING,
    "half": disk("masters", "moments", "gradients", ratio=0.5),
    "mixed": {**disk("masters", ratio=0.3), **disk("moments", ratio=0.7)},
}


def in_(folder, homes):
    """The homes, with that folder for their directories."""
    return {kind: {**home, "path": home["path"].format(folder)} if "path" in home else home for kind, home in homes.items()}


def build(dtype=torch.float32):
    torch.manual_seed(7)
    return real_mlp().to(dtype)


def sharded(homes, make=adamw, **options):
    model = build()
    options = {"stage": 2, "dtype": "bfloat16", "bucket_bytes": SMALL, "align_bytes": ALIGNED, "group": solo(), **options}
    return model, zero.shard(model, make(model), homes=homes, **options)


def send(model, step, rank=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(3, 4, generator=generator).to(model[0].weight)
    real_loss(model(batch).float()).backward()


def edit(model):
    with torch.no_grad():
        model[0].weight.mul_(1.25)


def train(model, optimizer, steps=range(4), rank=0):
    """Windows of one and of two backwards, edits in between, gradients that are read before and after a step."""
    seen = []
    for step in steps:
        for part in range(1 + step % 2):
            send(model, 10 * step + part, rank)
        if step == 1:
            seen.append(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())
        optimizer.step()
        seen.append(optimizer.whole_grad(model[2].weight))
        optimizer.zero_grad()
        if step == 2:
            edit(model)
    return seen


def told(model, optimizer):
    """Everything that a training has."""
    state = optimizer.state_dict()
    return [*(param.detach().clone() for param in model.parameters()), state["state"], state["masters"]]


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


OPTIMIZERS = {
    "adamw": adamw,
    "fused": adamw,
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "muon": lambda model: [
        torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02),
        torch.optim.AdamW([param for param in model.parameters() if param.dim() != 2], lr=0.02),
    ],
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02),
}


@pytest.mark.promise("H07")
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_with_states_on_disk_has_the_bits_of_one_in_memory(tmp_path, places, kind):
    options = {"make": OPTIMIZERS[kind], "kernels": "fused" if kind == "fused" else "torch", "clip": 0.1}
    plain, apart = sharded({}, **options), sharded(in_(tmp_path, PLACES[places]), **options)
    assert same(train(*plain), train(*apart))
    assert same(told(*plain), told(*apart))
    assert os.listdir(tmp_path) == []  # files have no names
    for _, optimizer in (plain, apart):
        optimizer.close()
    assert all(map(torch.equal, plain[0].parameters(), apart[0].parameters()))


def test_what_is_on_disk_takes_no_memory_between_steps(tmp_path):
    model, optimizer = sharded(in_(tmp_path, EVERYTHING))
    send(model, 0)
    optimizer.step()
    masters = [master for _, master in inside.pieces_and_masters(optimizer)]
    moments = [value for state in optimizer.inner.state.values() for value in state.values() if value.dim()]
    assert masters and moments and all(inside.lies_on_disk(each) or each.numel() == 1 for each in (*masters, *moments))
    assert all(torch.isnan(each).all() for each in masters)  # NaN, so that nobody takes it for the values
    with pytest.raises(RuntimeError):
        next(each for each in masters if each.numel() > 1).data.add_(1.0)


def train_ranks(rank, world, homes, stage, dtype):
    found = []
    for own in ({}, homes):
        model = build()
        options = {"stage": stage, "dtype": dtype, "bucket_bytes": SMALL, "align_bytes": ALIGNED, "clip": 0.1}
        optimizer = zero.shard(model, adamw(model), homes=own, **options)
        found.append((train(model, optimizer, rank=rank), told(model, optimizer)))
        optimizer.close()
        found[-1] += ([param.detach().clone() for param in model.parameters()],)
    assert same(*found)


@pytest.mark.promise("H07")
@pytest.mark.parametrize(
    "world, stage, dtype",
    [
        pytest.param(*each, marks=[] if each in ((2, 2, "bfloat16"), (2, 3, None)) else pytest.mark.full)
        for each in itertools.product((1, 2, 3), (0, 1, 2, 3), ("bfloat16", None))
    ],
)
def test_at_any_stage_and_number_of_ranks_states_on_disk_change_no_bit(tmp_path, world, stage, dtype):
    ranks.run(world, train_ranks, in_(tmp_path, EVERYTHING), stage, dtype)
    assert os.listdir(tmp_path) == []


def train_on_sim(model, optimizer, rank):
    return [copied(each) for each in (*train(model, optimizer, rank=rank), *model.parameters())]


@needs_sim
@pytest.mark.promise("H06")
@pytest.mark.parametrize(
    "world, stage, dtype",
    [
        (1, 3, "bfloat16"),
        *(pytest.param(2, *each, marks=pytest.mark.full) for each in itertools.product((1, 2, 3), (None, "bfloat16"))),
    ],
)
def test_on_a_device_states_in_any_homes_have_the_bits_of_those_on_it(tmp_path, world, stage, dtype):
    host = {"masters": "cpu", "moments": "cpu"}
    homes = [
        {**host, "weights": "cpu"} if stage == 3 else {"moments": "cpu"},
        in_(tmp_path, EVERYTHING),
        {"masters": {"home": "host", "ratio": 0.5}, "moments": {"home": "host", "ratio": 0.5}},
        in_(tmp_path, disk("moments", "gradients", ratio=0.5)),
    ]
    points = [{"stage": stage, "dtype": dtype, "homes": own} for own in ({}, *homes)]
    for on_it, *elsewhere in on_sim(world, train_on_sim, points):
        assert [same(each, on_it) for each in elsewhere] == [True] * len(homes)


@needs_sim
@pytest.mark.promise("H06")
def test_what_is_on_its_way_to_a_sum_of_a_disk_is_multiplied_with_it(tmp_path):
    points = [{"stage": 2, "reduce": 0.3, "homes": homes} for homes in ({}, in_(tmp_path, EVERYTHING))]  # no power of two
    for on_it, apart in on_sim(1, train_on_sim, points):
        assert same(apart, on_it)


@pytest.mark.promise("H07")
def test_a_checkpoint_goes_from_any_homes_to_any_others(tmp_path):
    (tmp_path / "disk").mkdir()
    homes = {"memory": {}, "disk": in_(tmp_path / "disk", EVERYTHING), "half": in_(tmp_path / "disk", PLACES["half"])}
    model, optimizer = sharded({})
    train(model, optimizer)
    after = train(model, optimizer, range(4, 6)), told(model, optimizer)
    for source in homes:
        saved, folder = sharded(homes[source]), tmp_path / source
        train(*saved)
        zero.save(folder, saved[1])
        for target in homes:
            loaded = sharded(homes[target])
            train(*loaded, steps=range(1))
            zero.load(folder, loaded[1])
            assert same((train(*loaded, steps=range(4, 6)), told(*loaded)), after)
            fresh = sharded(homes[target])
            fresh[1].load_state_dict(saved[1].state_dict())
            fresh[0].load_state_dict(saved[0].state_dict())
            assert same((train(*fresh, steps=range(4, 6)), told(*fresh)), after)
    exported = zero.export(folder, tmp_path / "model.safetensors")
    assert exported and all(
        torch.equal(value, saved[0].state_dict()[name])
        for name, value in zero.read_export(tmp_path / "model.safetensors").items()
    )


def moved_by(optimizer, act):
    """Bytes of masters and moments that are read and written meanwhile, in parts of what they take."""
    def moved():
        of_kinds = [moved for kind, moved in inside.disk_traffic(optimizer).items() if kind != "gradients"]
        return tuple(map(sum, zip(*of_kinds, strict=True)))

    inside.finish_reads(optimizer)  # ends reads that were begun before
    layout, before = inside.layout(optimizer), moved()
    whole = sum(bytes_ for (kind, _), bytes_ in inside.planned_of_disks(layout).items() if kind != "gradients")
    act()
    return [(now - then) / whole for now, then in zip(moved(), before, strict=True)]


@pytest.mark.promise("H07")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_checkpoint_is_saved_and_loaded_with_no_byte_of_a_disk_read_or_written_twice(tmp_path, dtype):
    plain, apart = sharded({}, dtype=dtype), sharded(in_(tmp_path, EVERYTHING), dtype=dtype)
    for model, optimizer in (plain, apart):
        train(model, optimizer)
        edit(model)
    model, optimizer = apart
    assert len(inside.buckets(optimizer)) > 3, "more than are in memory at one time"
    read, written = moved_by(optimizer, lambda: zero.save(tmp_path / "saved", optimizer))
    assert read == 1.0 and (0.0 < written < 1.0) is (dtype is not None), "of masters what was edited goes to its home"
    assert moved_by(optimizer, lambda: zero.save(tmp_path / "again", optimizer)) == [1.0, 0.0]
    assert moved_by(optimizer, lambda: zero.load(tmp_path / "saved", optimizer)) == [0.0, 1.0]
    assert same(told(*plain), told(*apart))
    assert moved_by(optimizer, lambda: zero.load(tmp_path / "saved", optimizer, optimizer_states=False)) == [1.0, 1.0]
    assert same(told(*plain), told(*apart))
    assert same(train(*plain, steps=range(4, 6)), train(*apart, steps=range(4, 6)))
    assert same(told(*plain), told(*apart))


def test_a_save_in_the_background_is_refused_where_it_would_copy_what_is_on_disk(tmp_path):
    _, optimizer = sharded(in_(tmp_path, EVERYTHING))
    with pytest.raises(ValueError, match=r"^Cannot save with async_save=True: masters or moments are on disk"):
        zero.save(tmp_path / "saved", optimizer, async_save=True)


@pytest.mark.promise("H09")
@pytest.mark.parametrize("include", [None, ["moments"], ["masters", "gradients"]])
@pytest.mark.parametrize("stage", [2, 3])
def test_states_go_to_disk_for_a_while_and_come_back(tmp_path, include, stage):
    plain, away = sharded({}, stage=stage), sharded({}, stage=stage)
    train(*plain, steps=range(2))
    train(*away, steps=range(2))
    away[1].offload_states(include, device=f"disk:{tmp_path}")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="are away since offload_states"):
        away[1].step()
    away[1].reload_states()
    assert same(train(*plain, steps=range(2, 4)), train(*away, steps=range(2, 4)))
    assert same(told(*plain), told(*away))


@pytest.mark.promise("H09")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_that_are_their_own_masters_go_to_disk_and_come_back(tmp_path, kind):
    plain, away = (sharded({}, OPTIMIZERS[kind], dtype=None) for _ in range(2))
    train(*plain, steps=range(2))
    train(*away, steps=range(2))
    away[1].offload_states(device=f"disk:{tmp_path}")
    assert sum(param.numel() for param in away[0].parameters()) == 0
    away[1].reload_states()
    assert same(train(*plain, steps=range(2, 4)), train(*away, steps=range(2, 4)))
    assert same(told(*plain), told(*away))


# refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "homes, words",
    [
        ({"masters": "tape"}, "Cannot keep state in 'tape': homes are 'device', 'cpu' and 'disk:/directory'."),
        ({"masters": "disk"}, "Cannot keep state on disk: no directory is given."),
        ("cpu", "Cannot use homes='cpu': each kind of state has its own."),
        ({"weights": "disk:/tmp"}, "Cannot keep weights on disk: they are whole on the device below stage 3. Use stage=3."),
        ({"weigths": "cpu"}, "Did you mean 'weights'?"),
    ],
)
def test_homes_that_cannot_be_are_refused(homes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sharded(homes)


@pytest.mark.parametrize("kind", ["weights", "gradients", "moments"])
def test_another_ratio_than_that_of_masters_which_cannot_be_is_refused_and_not_ignored(kind):
    half = {"home": "cpu", "ratio": 0.5}
    for masters, other in (("cpu", half), (half, "cpu"), ({"home": "disk", "path": "/fast"}, half)):
        with pytest.raises(ValueError, match=rf"^Cannot keep \d+% of {kind} on the host: \d+% of masters are stepped there"):
            inside.offloaded_ratio({}, ZeroConfig(stage=3, homes={"masters": masters, kind: other}), torch.device("meta"))
    assert inside.offloaded_ratio({}, ZeroConfig(stage=3, homes={"masters": half, kind: half}), torch.device("meta")) == 0.5
    assert inside.offloaded_ratio({}, ZeroConfig(stage=3, homes={"masters": "cpu", kind: half}), torch.device("cpu")) == 0.0


def test_an_optimizer_that_wants_all_at_one_time_is_refused(tmp_path):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def own(model):
        return Own(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"^Cannot keep moments apart from where they are stepped: Own is not known"):
        sharded(in_(tmp_path, disk("moments")), own, elementwise=True)


def test_groups_have_homes_of_their_own(tmp_path):
    def make(model):
        groups = [{"params": model[0].parameters(), "homes": in_(tmp_path, EVERYTHING)}, {"params": model[2].parameters()}]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)

    plain, apart = sharded({}), sharded({}, make)
    assert same(train(*plain), train(*apart))
    places = {bool(bucket.away) for bucket in inside.buckets(apart[1])}
    assert places == {True, False}


def test_homes_are_part_of_the_configuration():
    assert StateHomes(masters="disk:/a").masters.place == "disk:/a"
    nvme = {"device": "nvme", "nvme_path": "/a", "pin_memory": True, "ratio": 0.5}
    assert StateHomes(masters=nvme).masters.model_dump() == {"home": "disk", "path": "/a", "ratio": 0.5, "pinned": True}


# faults -----------------------------------------------------------------------------------------------------------------


def fails_on_rank_1(rank, world, folder):
    error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch.object(tempfile, "mkstemp", side_effect=error if rank else tempfile.mkstemp):
        with pytest.raises(zero.ZeroError) as failed:
            sharded(in_(folder, EVERYTHING), group=None)
    return str(failed.value)


@pytest.mark.promise("H08")
def test_a_directory_that_one_rank_cannot_write_to_is_named_on_all(tmp_path):
    for text in ranks.run(2, fails_on_rank_1, str(tmp_path)):
        assert re.search(f"Cannot make a file in {tmp_path} for gradients: Permission denied", text)
    assert os.listdir(tmp_path) == []
    with pytest.raises(zero.ZeroError, match="No such file or directory"):
        sharded(in_(tmp_path / "nowhere", EVERYTHING))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    gc.collect()  # files of what was refused
    subprocess.run(["umount", str(folder)], check=True)


def wide(*_):
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 30))


@pytest.mark.promise("H08")
def test_a_disk_without_space_is_said_before_anything_is_allocated(small_disk):
    model = wide()
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(zero.ZeroError, match=r"Cannot reserve \d+ bytes in .*small for m.*: No space left on device"):
        zero.shard(model, adamw(model), stage=2, dtype="bfloat16", homes=in_(small_disk, EVERYTHING), group=solo())
    assert [param.data_ptr() for param in model.parameters()] == before
    assert os.listdir(small_disk) == [] and shutil.disk_usage(small_disk).used == 0


def test_a_disk_of_another_that_fills_meanwhile_takes_nothing_away(small_disk):
    model, optimizer = sharded(in_(small_disk, EVERYTHING))
    with open(small_disk / "other", "wb") as other, pytest.raises(OSError, match="No space left"):
        while True:
            other.write(b"0" * 2**16)
            other.flush()
    plain = sharded({})
    assert same(train(model, optimizer), train(*plain)) and same(told(model, optimizer), told(*plain))


def truncate(optimizer):
    os.ftruncate(inside.descriptors_of_disks(optimizer)["moments"], 0)
    return contextlib.nullcontext()


def overwrite(optimizer):
    with mmap.mmap(-1, 4096) as page:
        page.write(b"foreign!" * 512)
        os.pwritev(inside.descriptors_of_disks(optimizer)["masters"], [page], 0)
    return contextlib.nullcontext()


def fail_to(name, kind):
    def failing(optimizer):
        move, number = getattr(os, name), inside.descriptors_of_disks(optimizer)[kind]

        def act(descriptor, *rest):
            if descriptor == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return move(descriptor, *rest)

        return mock.patch.object(os, name, act)

    return failing


FAULTS = {
    "truncated": (truncate, "Cannot read from .* for moments: .*the file ends at"),
    "foreign": (overwrite, "Cannot read from .* for masters: the values are not those that were written"),
    "read": (fail_to("preadv", "masters"), "Cannot read from .* for masters: .*Input/output error"),
    "write": (fail_to("pwritev", "moments"), "Cannot write to .* for moments: .*Input/output error"),
}


def survive(rank, world, folder, name):
    make_fault, words = FAULTS[name]
    model, optimizer = sharded(in_(folder, EVERYTHING), group=None, timeout_s=20.0)
    train(model, optimizer, steps=range(2), rank=rank)
    zero.save(f"{folder}/saved", optimizer)
    plain_model, plain = sharded({}, group=None, timeout_s=20.0)
    zero.load(f"{folder}/saved", plain)
    with make_fault(optimizer) if rank else contextlib.nullcontext():
        with pytest.raises(zero.ZeroError) as failed:
            for step in range(2, 5):
                send(model, step, rank)
                optimizer.step()
                optimizer.zero_grad()
    if rank:
        assert re.search(words, str(failed.value))
    with contextlib.suppress(zero.ZeroError):
        optimizer.discard()
    zero.load(f"{folder}/saved", optimizer)
    assert same(train(model, optimizer, range(2, 4), rank), train(plain_model, plain, range(2, 4), rank))
    assert same(told(model, optimizer), told(plain_model, plain))
    for each in (optimizer, plain):
        each.close()
    return str(failed.value)


@pytest.mark.promise("H08")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name == "read" else name for name in FAULTS])
def test_what_fails_in_the_middle_of_a_step_is_named_on_all_ranks_and_a_checkpoint_loads(tmp_path, name):
    first, _ = ranks.run(2, survive, str(tmp_path), name)
    assert re.search(f"Cannot complete the step: it failed on rank 1: .*{FAULTS[name][1]}", first, re.DOTALL)
    assert os.listdir(tmp_path) == ["saved"]


def train_beside_a_slow_disk(rank, world, folder):
    """Each piece that rank 1 reads or writes takes its time, all of them together more than ranks wait for each other."""
    found = []
    for homes in ({}, in_(folder, EVERYTHING)):
        model, optimizer = sharded(homes, group=None, timeout_s=1.0)
        files = {*inside.descriptors_of_disks(optimizer).values()}
        num_slow = 0

        def slow(move, files=files):
            def act(descriptor, *rest):
                nonlocal num_slow
                if descriptor in files:
                    num_slow += 1
                    time.sleep(0.01)
                return move(descriptor, *rest)

            return act

        with mock.patch.multiple(os, preadv=slow(os.preadv), pwritev=slow(os.pwritev)) if rank else contextlib.nullcontext():
            found.append((train(model, optimizer, rank=rank), told(model, optimizer)))
        optimizer.close()
    return same(*found), num_slow


@pytest.mark.promise("H08")
def test_a_disk_that_is_slow_on_one_rank_fails_nothing(tmp_path):
    (alike, _), (also, num_slow) = ranks.run(2, train_beside_a_slow_disk, str(tmp_path))
    assert alike and also and num_slow * 0.01 > 1.0


def fail_in_backward(rank, world, folder):
    try:
        model, optimizer = sharded(in_(folder, EVERYTHING), group=None, timeout_s=20.0)
        send(model, 0, rank)
        with fail_to("pwritev", "gradients")(optimizer) if rank else contextlib.nullcontext():
            for step in range(1, 9):
                send(model, step, rank)
            optimizer.step()
    except zero.ZeroError as error:
        end_as_the_interpreter_does(error)


@pytest.mark.promise("H08")
def test_what_fails_in_a_backward_is_told_to_all_ranks_with_its_reason(tmp_path):
    first, other = (outcome.output for outcome in ranks.outcomes(2, fail_in_backward, str(tmp_path)))
    words = f"Cannot write to {tmp_path} for gradients: .*Input/output error"
    assert re.search(words, other) and re.search(f"rank 1 .*{words}", first, re.DOTALL), first


def survive_apart_from_steps(rank, world, folder, stage):
    """What rank 1 cannot read or write outside of steps is named on all ranks, which go on together."""
    plain, (model, optimizer) = (sharded(homes, group=None, stage=stage) for homes in ({}, in_(folder, EVERYTHING)))
    for each in (plain, (model, optimizer)):
        train(*each, steps=range(2), rank=rank)
    zero.save(f"{folder}/saved", optimizer)

    def window():
        for part in range(2):
            send(model, 20 + part, rank)

    def whole_grads():
        return [optimizer.whole_grad(param) for param in model.parameters()]

    calls = {
        "load": ("pwritev", "moments", lambda: zero.load(f"{folder}/saved", optimizer), "Cannot complete a load"),
        "masters": ("preadv", "masters", optimizer.state_dict, "Cannot read state"),
        "moments": ("preadv", "moments", optimizer.state_dict, "Cannot read state"),
        "gradients": ("preadv", "gradients", whole_grads, "Cannot read state"),
    }
    for name, (call, kind, act, words) in calls.items():
        if name == "gradients":
            window()
            optimizer.settle()
        with fail_to(call, kind)(optimizer) if rank else contextlib.nullcontext():
            with pytest.raises(zero.ZeroError) as failed:
                act()
        told_by = kind if rank else f"^{words}: it failed on rank 1: DiskFailed: Cannot .* for {kind}"
        assert re.search(told_by, str(failed.value))
        if name == "load":
            zero.load(f"{folder}/saved", optimizer)
        elif name == "gradients":
            optimizer.discard()
        assert same(told(*plain), told(model, optimizer)), name
    assert same(train(*plain, steps=range(2, 4), rank=rank), train(model, optimizer, range(2, 4), rank))
    assert same(told(*plain), told(model, optimizer))
    for each in (plain[1], optimizer):
        each.close()


@pytest.mark.promise("H08")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_what_fails_outside_of_a_step_is_named_on_all_ranks_and_may_be_tried_again(tmp_path, stage):
    ranks.run(2, survive_apart_from_steps, str(tmp_path), stage)


@pytest.mark.promise("H08")
@pytest.mark.parametrize("kind", ["masters", "moments"])
def test_what_could_not_be_read_is_read_again_when_it_is_used_again(tmp_path, kind):
    """And what came to memory in its place is not taken for it."""
    plain, apart = sharded({}), sharded(in_(tmp_path, EVERYTHING))
    train(*plain, steps=range(2))
    train(*apart, steps=range(2))
    for _ in range(2):
        with fail_to("preadv", kind)(apart[1]), pytest.raises(zero.ZeroError, match=f"Cannot read from .* for {kind}"):
            apart[1].state_dict()
    assert same(told(*plain), told(*apart))
    assert same(train(*plain, steps=range(2, 4)), train(*apart, steps=range(2, 4)))
    assert same(told(*plain), told(*apart))


def test_short_reads_and_writes_go_on_where_they_ended(tmp_path):
    def short(move):
        return lambda descriptor, buffers, start: move(descriptor, [buffers[0][:4096]], start)

    with mock.patch.multiple(os, preadv=short(os.preadv), pwritev=short(os.pwritev)):
        apart = sharded(in_(tmp_path, EVERYTHING), bucket_bytes=2**14)
        model = apart[0]
        found = train(*apart), told(*apart)
    plain = sharded({}, bucket_bytes=2**14)
    assert same(found, (train(*plain), told(*plain))) and model is not plain[0]


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_access_serves_in_the_ordinary_way_and_that_is_said_once(tmp_path, refused, caplog):
    opened, written = os.open, os.pwritev

    def act(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest, **options)

    def write(descriptor, *rest):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return written(descriptor, *rest)

    with mock.patch.object(os, *(("open", act) if refused == "open" else ("pwritev", write))):
        apart = sharded(in_(tmp_path, EVERYTHING))
        found = train(*apart), told(*apart)
    plain = sharded({})
    assert same(found, (train(*plain), told(*plain)))
    assert [record.message for record in caplog.records if "no direct access" in record.message] == [
        f"The file system of {tmp_path} has no direct access: states go through its memory."
    ]


def test_records_say_what_went_to_disk_and_came_from_there(tmp_path):
    model, optimizer = sharded(in_(tmp_path, EVERYTHING))
    with zero.MetricsWriter(tmp_path / "records.jsonl", optimizer) as records:
        for step in range(3):
            train(model, optimizer, steps=[step])
            record = records.write()
    disk = record["disk"]
    assert disk["read_bytes"] > 0 and disk["written_bytes"] > 0 and disk["waited_ms"] >= 0 and disk["bytes_per_s"] > 0
    assert record["live_bytes"]["masters"] == record["live_bytes"]["moments"] == 0
    assert "disk" not in zero.MetricsWriter(None, sharded({})[1]).write()


def train_for_ever(folder, has_begun):
    made = sharded(in_(folder, EVERYTHING))
    for step in itertools.count():
        train(*made, steps=[step])
        has_begun.set()


@pytest.mark.promise("H08")
def test_of_a_process_that_is_killed_in_a_step_nothing_is_left_on_disk(tmp_path):
    context = start_context()
    has_begun = context.Event()
    process = context.Process(target=train_for_ever, args=(tmp_path, has_begun), daemon=True)
    process.start()
    assert has_begun.wait(60.0), process.exitcode
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def lines_in_memory(num_bytes):
    """The storages of fp32 tensors that have memory for a line of so many bytes."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and each.dtype == torch.float32]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if not each.is_meta}
    return sum(size == num_bytes for size in storages.values())


@pytest.mark.promise("H07")
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_a_step_leaves_no_lines_in_memory_but_those_of_three_buckets(tmp_path, kernels):
    width, num_layers = 72, 12  # no other tensor has the bytes of a layer
    model = filled(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))), real=True).bfloat16()
    options = {"stage": 2, "bucket_bytes": 2 * width**2, "kernels": kernels, "homes": in_(tmp_path, EVERYTHING)}
    optimizer = zero.shard(model, adamw(model), group=solo(), **options)
    assert len(inside.layout(optimizer).buckets) == num_layers
    for _ in range(3):
        real_loss(model(torch.ones(1, width, dtype=torch.bfloat16))).backward()
        optimizer.step()
        assert lines_in_memory(4 * width**2) <= 3 * 3  # a master and two moments
        optimizer.zero_grad()
