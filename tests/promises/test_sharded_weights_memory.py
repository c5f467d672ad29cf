"""Stage 3 trains what does not fit a device. The device is the simulated one, with a limit."""

import contextlib
import io
import json

import pytest
import torch

import accelerators
import zero
from examples.train.model import Gpt
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from tests.promises.test_offload_memory import in_pace
from zero import read_export
from zero.__main__ import main

LAYERS, WIDTH, CONTEXT, BUCKET = 14, 64, 2, 2**16
STEPS = 2


def gpt(layers):
    return Gpt(layers, WIDTH, 4, CONTEXT)


def begin(model):
    """Values that do not depend on where the model is."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.02)


def samples(rank, step):
    text = torch.randint(0, 256, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(10 * step + rank))
    return text.to(accelerators.current().device())


def train(rank, world, folder, layers, options):
    """On the device that the process is given. Returns losses, and the most bytes that any step had there."""
    place, device = place_of(rank, "sim"), accelerators.current()
    limit = device.memory().total
    with place:
        samples(rank, 0).float().sum().item()  # makes the device's libraries take their memory
        with torch.device("meta"):
            model = gpt(layers)
        if options["stage"] < 3:
            with torch.no_grad():  # otherwise a master may keep a value that rounds to the loaded weight
                for param in model.to_empty(device=place).parameters():
                    param.zero_()
        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_bytes=BUCKET, **options)
    begin(model)
    losses, peak = [], 0
    for step in range(STEPS):
        device.reset_peak_memory()
        loss = model(samples(rank, step))
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, device.memory().peak)
    zero.save(folder, optimizer)
    numel = sum(param.numel() for param in model.parameters())
    item = next(model.parameters()).dtype.itemsize
    return losses, numel, item, limit, peak


def trained(folder, world, limit, layers, pace=False, **options):
    env = {"ACCELERATOR": "sim", "SIM_MEMORY": str(limit)}
    where = str(folder / f"{options['stage']}")
    paced = train_in_pace if pace else train
    options = {"kernels": "torch", **options}
    found = ranks.run(world, paced, where, layers, options, env=env, apart="a device with a limit", timeout=240.0)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["export", where, f"{where}.safetensors"]) == 0
    return found, read_export(f"{where}.safetensors")


def train_in_pace(*args):
    with faults.REDUCE_SCATTER.replaced(in_pace):
        return train(*args)


def same(ones, others):
    assert ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


@needs_sim
@pytest.mark.parametrize(
    ("times", "layers", "world"),
    # A rank ahead of others has two rounds on their way beside what the plan says, and room for them. Two ranks under a limit
    # are below by day.
    [(2, LAYERS // 2, 1), *(pytest.param(4, LAYERS + 2, world, marks=pytest.mark.full) for world in (2, 4))],
)
def test_a_model_of_several_times_the_device_trains_with_its_states_on_the_host(tmp_path, times, layers, world):
    limit = sum(param.nbytes for param in gpt(layers).parameters()) // times
    found, values = trained(tmp_path, world, limit, layers, stage=3, offload="cpu", gathered_bytes=0)
    whole, expected = trained(tmp_path, world, 2**26, layers, stage=2)
    for (losses, numel, item, had, peak), (plain_losses, *_) in zip(found, whole, strict=True):
        assert had == limit and item * numel >= times * limit > times * peak > 0
        assert losses == plain_losses
    same(values, expected)


@needs_sim
@pytest.mark.full
def test_a_model_whose_states_are_one_and_a_half_times_the_device_trains_without_offload(tmp_path):
    layers = 4 * LAYERS
    limit = 14 * sum(param.numel() for param in gpt(layers).parameters()) * 2 // 3  # bf16 weights, fp32 masters and two moments
    found, values = trained(tmp_path, 2, limit, layers, stage=3, dtype="bfloat16", gathered_bytes=0)
    whole, expected = trained(tmp_path, 2, 2**28, layers, stage=2, dtype="bfloat16")
    for (losses, numel, _, had, peak), (plain_losses, *_) in zip(found, whole, strict=True):
        assert had == limit and 14 * numel >= 1.5 * limit > 1.5 * peak > 0
        assert losses == plain_losses
    same(values, expected)


@pytest.mark.full
@needs_sim
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param(None, marks=pytest.mark.full)])
def test_a_rank_alone_has_its_weights_once_on_the_device_and_nothing_of_them_on_the_host(tmp_path, dtype):
    options = {"gathered_bytes": 0, "dtype": dtype}
    [(losses, *_, peak)], values = trained(tmp_path, 1, 2**26, LAYERS, stage=3, **options)
    [(plain_losses, *_, most)], expected = trained(tmp_path, 1, 2**26, LAYERS, stage=2, dtype=dtype)
    assert losses == plain_losses
    assert peak <= most + BUCKET  # at stage 3 edits are looked for within the step, a part of a bucket at a time
    same(values, expected)
    assert ranks.run(1, moved_alone, dtype, env={"ACCELERATOR": "sim"}, apart="a device") == [[]]


def moved_alone(rank, world, dtype):
    """Returns what of a training that went to the host and back, and was edited meanwhile, differs from one that did not."""
    trained = []
    for away in (False, True):
        with place_of(rank, "sim"):
            model = gpt(2)
            begin(model)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer = zero.shard(model, adamw, stage=3, bucket_bytes=BUCKET, gathered_bytes=0, dtype=dtype)
        for step in range(STEPS):
            model(samples(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory = list(inside.memory_of_weights(optimizer))
            assert sum(tensor.nbytes for tensor in memory if tensor.is_cpu) == 0
            if away:
                optimizer.offload_states(["weights"])
                assert all(tensor.is_cpu for tensor in inside.memory_of_weights(optimizer))
                optimizer.reload_states()
                assert not any(tensor.is_cpu for tensor in inside.memory_of_weights(optimizer))
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        assert inside.num_fetches(optimizer) == 0
        trained.append({name: param.detach().cpu().clone() for name, param in model.named_parameters()})
    return [name for name, values in trained[0].items() if not torch.equal(values, trained[1][name])]


def masters_on_host(rank, world):
    """Whether masters on the host are the shares of weights that other ranks read there, after edits and steps too."""
    with place_of(rank, "sim"):
        model = gpt(2)
    begin(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = zero.shard(model, adamw, stage=3, offload="cpu", bucket_bytes=BUCKET, gathered_bytes=0)
    found = []
    for step in range(STEPS):
        model(samples(rank, step)).backward()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [
            share.data_ptr() == inside.share_of_weights(optimizer, bucket, rank).data_ptr() and share.is_cpu
            for bucket, share in inside.masters_by_bucket(optimizer).items()
        ]
    return all(found), inside.memory_in_use(optimizer).host.masters


@needs_sim
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_masters_on_the_host_that_are_as_wide_as_weights_are_the_weights(world):
    found = ranks.run(world, masters_on_host, env={"ACCELERATOR": "sim"}, apart="sim")
    assert found == [(True, 0)] * world


def read_late(rank, world, stage):
    """What a model gives of weights that the host steps before the device has come to read them."""
    place = place_of(rank, "sim", "late")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(place)
    sgd, options = torch.optim.SGD(model.parameters(), lr=0.5), {"gathered_bytes": 0} if stage == 3 else {}
    optimizer = zero.shard(model, sgd, stage=stage, offload="cpu", bucket_bytes=2**9, **options)
    batch, found = torch.ones(2, 16, device=place), []
    for _ in range(STEPS):
        model(batch).square().sum().backward()
        with torch.no_grad():
            found.append(model(batch))
        optimizer.step()
        optimizer.zero_grad()
    return [each.cpu() for each in (*found, model(batch).detach())]


@needs_sim
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_step_on_the_host_waits_until_the_device_has_read_the_weights(world):
    sharded, whole = (ranks.run(world, read_late, stage, apart="sim") for stage in (3, 2))
    for found, expected in zip(sharded, whole, strict=True):
        assert all(map(torch.equal, found, expected))


def trained_within(rank, world):
    """What a training gives of which all is within `torch.device`, and one of which nothing is."""
    found, place = [], place_of(rank, "sim")
    for context in (place, contextlib.nullcontext()):
        with place:
            model = gpt(2)
        begin(model)
        batches = [samples(rank, step) for step in range(STEPS)]
        with context:
            optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=3, gathered_bytes=0)
            for batch in batches:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
            found.append([param.detach().cpu().clone() for param in model.parameters()])
            optimizer.close()
    return found


@needs_sim
def test_a_training_within_a_device_as_context_is_the_same():
    for within, without in ranks.run(2, trained_within, env={"ACCELERATOR": "sim"}, apart="sim"):
        assert all(map(torch.equal, within, without))


def planned_gpt(batch=None):
    model = gpt(LAYERS)
    return model if batch is None else (model, lambda one: one(torch.zeros(batch, CONTEXT + 1, dtype=torch.long).to("sim")))


def plan_here(rank, world, words):
    place_of(rank, "sim")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", *map(str, words)]) == 0
    return json.loads(out.getvalue())


@needs_sim
@pytest.mark.full
@pytest.mark.parametrize(("offload", "world"), [("cpu", 2), ("cpu", 4), ("none", 2), ("none", 1)])
def test_the_peak_of_weights_in_shares_is_planned_within_5_percent(tmp_path, offload, world):
    found, _ = trained(tmp_path, world, 2**26, LAYERS, pace=True, stage=3, offload=offload, gathered_bytes=0)
    words = ["--ranks", world, "--memory", "64MiB", "--host-memory", "1GiB", "--bucket-bytes", BUCKET, "--batch", 1, "--json"]
    answer = ranks.run(1, plan_here, [f"{__name__}:planned_gpt", *words], apart="sim")[0]
    [row] = [row for row in answer["rows"] if (row["stage"], row["offload"]) == (3, offload)]
    for *_, peak in found:
        assert peak == pytest.approx(row["peak"], rel=0.05)


def closed(rank, world):
    with place_of(rank, "sim"):
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(10)))
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = zero.shard(model, adamw, stage=3, offload="cpu", bucket_bytes=2**14, gathered_bytes=0)
    begin(model)

    def step():
        model(torch.ones(2, 64, device=accelerators.current().device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [param.detach().cpu() for param in model.parameters()]
    with pytest.raises(MemoryError, match="Cannot close: the device has no room for the whole model"):
        optimizer.close()
    assert all(torch.equal(param.detach().cpu(), value) for param, value in zip(model.parameters(), before, strict=True))
    step()
    optimizer.check()
    assert not any(torch.equal(param.detach().cpu(), value) for param, value in zip(model.parameters(), before, strict=True))


@needs_sim
def test_a_model_that_does_not_fit_the_device_is_not_closed_and_trains_on():
    ranks.run(2, closed, env={"ACCELERATOR": "sim", "SIM_MEMORY": str(120 * 1024)}, apart="a device with a limit")
