"""W01, O11 and O12: optimizers of other packages, in shares as in plain PyTorch (pip install zero-accelerators[optimizers])."""

import importlib
import io
from functools import partial

import pytest
import torch
from torch import nn

import zero
from tests import inside, ranks
from tests.devices import has_package, needs_sim
from tests.loopback import run_ranks, solo
from tests.promises.loops import same, weights
from tests.promises.offloads import place_of
from tests.zoo.case import filled

FREE, SOAP, BITS, AO = "schedulefree", "pytorch_optimizer", "bitsandbytes.optim", "torchao.optim"
LR = {"lr": 1e-2}
KINDS = {
    "AdamWScheduleFree": (FREE, LR), "SGDScheduleFree": (FREE, LR), "RAdamScheduleFree": (FREE, LR),
    "Lion": ("lion_pytorch", LR),
    "Adafactor": ("torch.optim", LR), "SOAP": (SOAP, LR), "Shampoo": (SOAP, LR), "AdaFactor": (SOAP, LR), "Lamb": (SOAP, LR),
    "AdamW8bit": (BITS, LR), "Lion8bit": (BITS, LR), "AdamW4bit": (AO, LR), "Adam8bit": (AO, LR),
}  # fmt: skip
OF_EACH = ("AdamWScheduleFree", "SOAP", "AdamW8bit")  # kind of state: of two series, of a matrix, and in blocks
OF_ALL = {"Prodigy": ("prodigyopt", {}), "LambOfAll": (SOAP, {**LR, "pre_norm": True})}


def made(name, model):
    package, settings = (KINDS | OF_ALL)[name]
    if not has_package(package):
        pytest.skip(f"{package} is not installed (pip install zero-accelerators[optimizers])")
    kind = getattr(importlib.import_module(package), name.removesuffix("OfAll"))
    return kind(list(model.parameters()), **settings)


def layers():
    """Large enough for blocks of 256 elements and for what some packages quantise at all, which is 4096 of them."""
    widths = ((64, 96), (96, 64), (64, 1))  # a factor of the last has its shape
    linear = [nn.Linear(inputs, outputs) for inputs, outputs in widths]
    return filled(nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2]), real=True)


def train(model, optimizer, steps):
    """Every rank has the same batch, so that means over ranks are exact."""
    getattr(optimizer, "train", lambda: None)()  # some of these have modes
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def sharded(name, world, stage, program, **options):
    models = [layers() for _ in range(world)]
    inner = [made(name, model) for model in models]

    def one(group):
        optimizer = zero.shard(
            models[group.rank], inner[group.rank], stage=stage, group=group, bucket_bytes=16 << 10, **options
        )
        return program(models[group.rank], optimizer)

    return run_ranks(world, one, 60.0)


def written_and_read(value):
    """A copy; not all tensors can be cloned."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


NIGHT = pytest.mark.full  # torchao compiles its step, which takes minutes


@pytest.mark.promise("O11")
@pytest.mark.promise("O12")
@pytest.mark.promise("W01")
@pytest.mark.parametrize(
    ("world", "stage"), [(2, 2), *(pytest.param(*at, marks=NIGHT) for at in ((4, 1), (2, 3), (4, 3), (1, 2)))]
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[NIGHT] if at == AO else []) for name, (at, _) in KINDS.items()])
def test_an_optimizer_of_a_package_trains_in_shares_to_the_bits_of_plain_torch(name, world, stage):
    model = layers()
    expected = train(model, made(name, model), range(7))
    assert not same(expected, weights(layers()))
    for found in sharded(name, world, stage, lambda model, optimizer: train(model, optimizer, range(7))):
        assert same(found, expected)


@pytest.mark.promise("W02")
@pytest.mark.promise("W03")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OF_EACH else [NIGHT]) for name in KINDS])
def test_what_is_saved_goes_on_at_another_number_of_ranks(name, tmp_path):
    def first(model, optimizer):
        train(model, optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")
        return written_and_read((model.state_dict(), optimizer.state_dict()))

    def from_files(model, optimizer):
        zero.load(tmp_path, optimizer)
        return train(model, optimizer, range(2, 4))

    def from_dicts(model, optimizer, dicts=None):
        model.load_state_dict(dicts[0])
        optimizer.load_state_dict(dicts[1])
        return train(model, optimizer, range(2, 4))

    plain = layers()
    inner = made(name, plain)
    train(plain, inner, range(2))
    of_plain = written_and_read((plain.state_dict(), inner.state_dict()))
    expected = train(plain, inner, range(2, 4))
    own, _ = sharded(name, 2, 2, first)
    for second in (from_files, partial(from_dicts, dicts=own), partial(from_dicts, dicts=of_plain)):
        for found in sharded(name, 4, 3, second):
            assert same(found, expected)


@pytest.mark.promise("W03")
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=NIGHT)])
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "Lion"])
def test_states_on_disk_have_the_bits_of_those_in_memory(name, world, tmp_path):
    def program(model, optimizer):
        found, held = train(model, optimizer, range(4)), inside.memory_in_use(optimizer)
        return found, held.disk.moments / (held.disk.moments + held.device.moments)

    homes = dict.fromkeys(("masters", "moments"), f"disk:{tmp_path}")
    model = layers()
    expected = train(model, made(name, model), range(4))
    for found, on_disk in sharded(name, world, 2, program, homes=homes):
        assert same(found, expected) and on_disk > 0.8  # the scales of blocks are not on disk


def on_a_device(rank, world, name):
    model = layers().to(place_of(rank, "sim"))
    optimizer = zero.shard(model, made(name, model), stage=3, offload="cpu", bucket_bytes=16 << 10)
    return {key: value.cpu() for key, value in train(model, optimizer, range(4)).items()}


@pytest.mark.promise("W03")
@needs_sim
@pytest.mark.parametrize("name", ["AdamW8bit", pytest.param("Lion8bit", marks=NIGHT)])
def test_states_on_the_host_beside_a_device_have_the_bits_of_plain_torch_there(name):
    model = layers()
    expected = train(model, made(name, model), range(4))
    for found in ranks.run(2, on_a_device, name, apart="sim"):
        assert same(found, expected)


@pytest.mark.promise("W03")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[NIGHT] if at == AO else []) for name, (at, _) in KINDS.items()
                                  if name.endswith("bit")])  # fmt: skip
def test_states_of_few_bits_are_counted_as_such(name):
    def program(model, optimizer):
        train(model, optimizer, range(1))
        [moments] = inside.moments_of(optimizer)
        large = [tensor for tensor in inside.tensors(optimizer) if tensor.numel() >= 4096]  # they leave others alone
        planned = sum(4 * moments * tensor.numel() for tensor in large)
        return planned, inside.memory_in_use(optimizer).device.moments - sum(
            value.nbytes
            for tensor, state in optimizer.state.items()
            if tensor.numel() < 4096
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )

    [(planned, held)] = sharded(name, 1, 2, program)
    tables = 2 * 1024  # a table of the values that codes stand for, for each moment
    assert planned <= held <= planned + 2 * tables


@pytest.mark.promise("W03")
@pytest.mark.parametrize("way", ["an embedding", "a word"])
def test_settings_of_bitsandbytes_for_single_parameters_are_refused(way):
    optim, modules = (importlib.import_module(f"bitsandbytes.{name}") for name in ("optim", "nn"))
    manager = optim.GlobalOptimManager.get_instance()
    try:
        model = nn.Sequential(modules.StableEmbedding(300, 64) if way == "an embedding" else nn.Embedding(300, 64))
        manager.register_parameters(model.parameters())
        if way == "a word":
            manager.override_config(model[0].weight, "optim_bits", 32)
        inner = optim.Adam8bit(model.parameters())
        with pytest.raises(ValueError, match=r"Adam8bit: GlobalOptimManager has settings .* Use stage=0; or"):
            zero.shard(model, inner, stage=2, group=solo())
        manager.initialize()
        zero.shard(model, inner, stage=2, group=solo()).close()
    finally:
        manager.initialize()


@pytest.mark.promise("O11")
@pytest.mark.parametrize("name", OF_ALL)
def test_one_that_adds_up_over_all_parameters_trains_at_stage_0_and_is_refused_at_others(name):
    model = layers()
    expected = train(model, made(name, model), range(7))
    for found in sharded(name, 2, 0, lambda model, optimizer: train(model, optimizer, range(7))):
        assert same(found, expected)
    with pytest.raises(ValueError, match=r"Cannot shard (Prodigy: it finds|Lamb: it divides by) .*Use stage=0"):
        sharded(name, 2, 1, train)
