"""W01, O11 and O12: optimizers of other packages, in shares as in plain PyTorch (pip install zero-accelerators[optimizers])."""

import importlib

import pytest
import torch
from torch import nn

import zero
from tests.devices import has_package
from tests.promises.loops import same, weights
from tests.zoo.case import filled
from zero.comm.loopback import run_ranks

FREE, SOAP, BITS, AO = "schedulefree", "pytorch_optimizer", "bitsandbytes.optim", "torchao.optim"
LR = {"lr": 1e-2}
KINDS = {
    "AdamWScheduleFree": (FREE, LR), "SGDScheduleFree": (FREE, LR), "RAdamScheduleFree": (FREE, LR),
    "Lion": ("lion_pytorch", LR),
    "SOAP": (SOAP, LR), "Shampoo": (SOAP, LR), "AdaFactor": (SOAP, LR), "Lamb": (SOAP, {**LR, "max_grad_norm": 0.0}),
    "AdamW8bit": (BITS, LR), "Lion8bit": (BITS, LR), "AdamW4bit": (AO, LR), "Adam8bit": (AO, LR),
}  # fmt: skip
OF_ALL = {"Prodigy": ("prodigyopt", {}), "LambOfAll": (SOAP, {**LR, "max_grad_norm": 1.0})}


def made(name, model):
    package, settings = (KINDS | OF_ALL)[name]
    if not has_package(package):
        pytest.skip(f"{package} is not installed (pip install zero-accelerators[optimizers])")
    kind = getattr(importlib.import_module(package), name.removesuffix("OfAll"))
    return kind(list(model.parameters()), **settings)


def layers():
    """Large enough for blocks of 256 elements and for what some packages quantise at all, which is 4096 of them."""
    return filled(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 32)), real=True)


def train(model, optimizer, steps):
    """Every rank has the same batch, so that means over ranks are exact."""
    getattr(optimizer, "train", lambda: None)()  # of those that have modes
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def sharded(name, world, stage, program):
    models = [layers() for _ in range(world)]
    inner = [made(name, model) for model in models]

    def one(group):
        optimizer = zero.shard(models[group.rank], inner[group.rank], stage=stage, group=group, bucket_bytes=16 << 10)
        return program(models[group.rank], optimizer)

    return run_ranks(world, one, 60.0)


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


@pytest.mark.promise("W03")
@pytest.mark.parametrize("name", [name for name, (package, _) in KINDS.items() if package == BITS])
def test_states_of_eight_bits_are_saved_and_go_on_at_another_number_of_ranks(name, tmp_path):
    def first(model, optimizer):
        train(model, optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")

    def second(model, optimizer):
        zero.load(tmp_path, optimizer)
        return train(model, optimizer, range(2, 4))

    model = layers()
    expected = train(model, made(name, model), range(4))
    sharded(name, 2, 2, first)
    for found in sharded(name, 4, 3, second):
        assert same(found, expected)


@pytest.mark.promise("O11")
@pytest.mark.parametrize("name", OF_ALL)
def test_one_that_adds_up_over_all_parameters_trains_at_stage_0_and_is_refused_at_others(name):
    model = layers()
    expected = train(model, made(name, model), range(7))
    for found in sharded(name, 2, 0, lambda model, optimizer: train(model, optimizer, range(7))):
        assert same(found, expected)
    with pytest.raises(ValueError, match=r"Cannot shard (Prodigy: it finds|Lamb: it divides by) .*Use stage=0"):
        sharded(name, 2, 1, train)
