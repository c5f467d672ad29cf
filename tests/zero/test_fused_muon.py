"""The step of Muon that kernels="fused" takes: what it computes, and where its bits are torch's."""

import itertools

import pytest
import torch
from torch import nn

import zero
from tests.devices import needs_muon
from tests.loopback import run_ranks
from tests.promises.loops import same, weights
from tests.zoo.case import backward, draw, filled, finish, real_loss
from tests.zoo.whole_tensors import matrices_and_others
from zero.optim import muon

pytestmark = needs_muon

OPTIM = torch.optim
SETTINGS = [
    {"lr": 0.02},
    {"lr": torch.tensor(0.02), "nesterov": False, "momentum": 0.5},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    {"lr": 0.02, "adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (3.0, -3.0, 1.0), "eps": 1e-3},
]


def layers():
    return filled(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)), real=True)


def exact(matrix, coefficients=(3.4445, -4.775, 2.0315), num_steps=5, eps=1e-7):
    """Newton-Schulz without rounding to speak of."""
    x, (a, b, c) = matrix.double() / matrix.double().norm().clamp(min=eps), coefficients
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", SETTINGS)
def test_all_but_the_products_has_the_bits_of_torchs(monkeypatch, settings):
    """With torch's own Newton-Schulz in place of ours every weight and moment is torch's."""
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    def as_torch(matrices, coefficients, num_steps, eps):
        return [of_torch(matrix, coefficients, num_steps, eps) for matrix in matrices]

    monkeypatch.setattr(muon, "orthogonal", as_torch)
    models = [layers(), layers()]
    one, other = (OPTIM.Muon(matrices_and_others(model)[0], **settings) for model in models)
    for step in range(3):
        for model in models:
            model.zero_grad()
            real_loss(model(draw(model, (3, 8), 0, step, real=True))).backward()
        one.step()
        muon.fused_step(other)
    assert same(*map(weights, models))
    assert all(torch.equal(one.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])
               for p, q in zip(one.state, other.state, strict=True))  # fmt: skip


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (70, 70), (1, 5), (5, 1)])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_it_is_as_near_to_what_is_meant_as_torchs_is(monkeypatch, shape, has_instructions):
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    monkeypatch.setattr(muon, "has_bfloat16", lambda: has_instructions)
    matrices = [drawn(*shape, seed=seed) for seed in range(3)]
    before = [matrix.clone() for matrix in matrices]
    found = list(muon.orthogonal(matrices, (3.4445, -4.775, 2.0315), 5, 1e-7))
    assert all(map(torch.equal, matrices, before))
    for matrix, ours in zip(matrices, found, strict=True):
        theirs, meant = of_torch(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7), exact(matrix)
        assert ours.dtype == torch.bfloat16 and ours.shape == matrix.shape
        assert (ours - meant).norm() <= 1.1 * (theirs - meant).norm() + 1e-6


@pytest.mark.parametrize("shape", [(40, 50), (50, 40), (43, 43)])
def test_half_of_a_symmetric_product_in_blocks_is_the_whole_of_it(monkeypatch, shape):
    monkeypatch.setattr(muon, "ROUNDED_TO", torch.float64)
    monkeypatch.setattr(muon, "_LEAST_ROWS", 4)
    for rows, fewest in itertools.product((8, 16, 64), (1, 4)):
        monkeypatch.setattr(muon, "_ROWS", rows)
        monkeypatch.setattr(muon, "_FEWEST", fewest)
        [found] = muon.orthogonal([drawn(*shape)], (3.4445, -4.775, 2.0315), 5, 1e-7)
        assert torch.allclose(found, exact(drawn(*shape)), rtol=0, atol=1e-12)


def trained(world, stage=2, **options):
    """The weights after three steps with the same batch on every rank, and the settings of the user's groups after closing."""
    models = [layers() for _ in range(world)]

    def one(group):
        model = models[group.rank]
        matrices, others = matrices_and_others(model)
        made = [OPTIM.Muon(matrices, lr=0.02), OPTIM.AdamW(others, lr=0.02, eps=1e-2)]
        before = [dict(settings) for optimizer in made for settings in optimizer.param_groups]
        optimizer = zero.shard(model, made, stage=stage, kernels="fused", group=group, **options)
        for step in range(3):
            backward(optimizer, real_loss(model(draw(model, (3, 8), 0, step, real=True))))
            finish(optimizer)
        optimizer.close()
        assert [dict(settings) for optimizer in made for settings in optimizer.param_groups] == before
        return weights(model)

    return run_ranks(world, one, 20.0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_number_of_ranks_has_the_same_bits_and_settings_are_given_back(stage):
    [expected] = trained(1)
    assert not same(expected, weights(layers()))
    assert all(same(found, expected) for world in (2, 4) for found in trained(world, stage))


def test_an_optimizer_beside_it_that_has_no_fused_kernel_is_named():
    model = layers()
    matrices, others = matrices_and_others(model)
    with pytest.raises(ValueError, match="Cannot use kernels='fused': Adadelta has no fused kernel"):
        zero.shard(model, [OPTIM.Muon(matrices), OPTIM.Adadelta(others)], stage=2, kernels="fused")


def test_muon_of_somebodys_own_is_not_taken_for_torchs():
    model = layers()
    own = type("Own", (OPTIM.Muon,), {})(matrices_and_others(model)[0])
    with pytest.raises(ValueError, match="Cannot use kernels='fused': Own has no fused kernel"):
        zero.shard(model, own, stage=2, kernels="fused")
