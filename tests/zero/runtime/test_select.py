"""Which kernels "auto" is: the fastest that all ranks have and that compute what the optimizer does."""

import logging
from unittest import mock

import pytest
import torch

import zero
from tests.devices import needs_compiler, needs_muon, needs_sim
from tests.promises.loops import alone, on_ranks, one_step
from tests.promises.offloads import on_device
from tests.zoo.case import real_mlp
from zero.optim.optimizers import Lion
from zero.runtime.kernels import select

OPTIM = torch.optim


class Changed(OPTIM.AdamW):
    def step(self, closure=None):
        return super().step(closure)


CHOSEN = {
    "adamw": (lambda params: OPTIM.AdamW(params), "compiled"),
    "adam": (lambda params: OPTIM.Adam(params), "compiled"),
    "amsgrad": (lambda params: OPTIM.AdamW(params, amsgrad=True), "fused"),
    "fused by its own word": (lambda params: OPTIM.AdamW(params, fused=True), "fused"),
    "not fused by its own word": (lambda params: OPTIM.AdamW(params, fused=False), "torch"),
    "foreach by its own word": (lambda params: OPTIM.AdamW(params, foreach=False), "torch"),
    "one group by its own word": (lambda params: OPTIM.AdamW([{"params": params, "foreach": True}]), "torch"),
    "sgd": (lambda params: OPTIM.SGD(params, lr=0.1, momentum=0.9), "torch"),
    "lion": (lambda params: Lion(params), "torch"),
    "adamax": (lambda params: OPTIM.Adamax(params), "torch"),
    "a class of the user's": (lambda params: Changed(params), "torch"),
    "a whole group": (lambda params: OPTIM.AdamW([{"params": params, "whole": True}]), "torch"),
}


@needs_compiler
@pytest.mark.parametrize("kind", CHOSEN)
def test_the_fastest_kernel_is_chosen_that_is_the_optimizers(kind):
    make, expected = CHOSEN[kind]
    options = {"elementwise": True} if kind == "a class of the user's" else {}
    model, optimizer = alone(make=lambda model: make(list(model.parameters())), kernels="auto", **options)
    assert optimizer.config.kernels == expected and f"kernels = {expected}" in optimizer.config.text()
    assert optimizer.state_dict()["kernels"] == expected
    one_step(model, optimizer)
    before = [dict(group) for group in make(list(model.parameters())).param_groups]
    optimizer.close()
    for group, known in zip(optimizer.param_groups, before, strict=True):
        for name in ("fused", "foreach"):
            assert group.get(name) == known.get(name), "closed, it is as it was"


@needs_muon
def test_muon_beside_adamw_is_fused():
    model = real_mlp()
    matrices, rest = ([param for param in model.parameters() if (param.dim() == 2) == is_one] for is_one in (True, False))
    optimizer = zero.shard(model, [OPTIM.Muon(matrices), OPTIM.AdamW(rest)], stage=1)
    assert optimizer.config.kernels == "fused"
    optimizer.close()


@needs_compiler
def test_where_one_rank_has_no_compiler_all_do_without_and_are_told_why(caplog):
    refusals, calls = select._refusals, []

    def on_one(optimizer, device, on_host):
        found = refusals(optimizer, device, on_host)
        calls.append(0)
        return {**found, "compiled": "there is no c++"} if len(calls) == 1 else found

    with caplog.at_level(logging.WARNING, logger="zero"), mock.patch.object(select, "_refusals", on_one):
        kernels = on_ranks(2, lambda model, optimizer, group: optimizer.config.kernels, make=adamw, kernels="auto")
    assert kernels == ["fused", "fused"]
    (record,) = caplog.records
    assert "does without 'compiled' on all ranks, as rank" in record.getMessage() and "there is no c++" in record.getMessage()


def adamw(model):
    return OPTIM.AdamW(model.parameters())


def chosen(model, optimizer, rank):
    return optimizer.config.kernels


@needs_compiler
@needs_sim
def test_a_device_steps_with_its_own_kernels_and_what_is_offloaded_with_the_hosts():
    homes = ({}, {"offload": "cpu"}, {"offload": {"ratio": 0.5}})
    points = [{"make": adamw, "kernels": "auto", **home} for home in homes]
    assert on_device("sim", 2, chosen, points) == [["fused", "compiled", "fused"]] * 2
