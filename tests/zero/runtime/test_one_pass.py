"""Adam's compiled step: torch's own to a few ulp, built once and before the first step, refused where it cannot be had."""

import itertools
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zero
from tests.zoo.case import backward, real_numbers
from zero.checks import check_kernels
from zero.runtime.one_pass import OnePass

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler here, which the compiled step needs"
)
HALVES = (torch.bfloat16, torch.float16)
KINDS = (
    (torch.float32, None, False),
    *((torch.float32, dtype, apart) for dtype, apart in itertools.product(HALVES, (False, True))),
)
ADAMS = (
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {}),
)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_torchs_own_to_a_few_ulp_of_the_masters_not_of_the_weights(kind):
    _, dtype, apart = kind
    for (adam, options), clip in itertools.product(ADAMS, (1.0, 0.5)):
        value, grad = real_numbers((1003,), "value"), real_numbers((1003,), "grad")
        ours, theirs = nn.Parameter(value.clone()), nn.Parameter(value.clone())
        inner, plain = adam([ours], lr=1e-3, **options), adam([theirs], lr=1e-3, **options)
        one_pass = OnePass(inner)
        one_pass.build([kind], clips=True)
        weights = None if dtype is None else value.to(dtype)
        for step in range(3):
            if weights is not None and step == 1:  # an edit, beyond what rounding does
                weights[5] = 9.0
                theirs.data[5] = 9.0
            rounded = torch.empty_like(weights) if apart else weights
            mine, theirs.grad = grad.clone(), grad * clip
            one_pass.step(inner.param_groups[0], ours, mine, weights, rounded, clip)
            plain.step()
            assert torch.equal(mine, theirs.grad)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
            for key, moment in plain.state[theirs].items():
                torch.testing.assert_close(inner.state[ours][key], moment, rtol=1e-6, atol=1e-8)  # an ulp of the terms
            if rounded is not None:
                assert torch.equal(rounded, ours.detach().to(dtype))
                weights = rounded


class Awkward(nn.Module):
    """A single element, one that is used every other time, one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.second, self.never = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(3, 3)

    def forward(self, inputs, step):
        hidden = self.first(inputs) * self.scale
        return self.second(hidden.tanh()) if step % 2 == 0 else hidden


def trained(kernels, dtype, offload, clip):
    model = Awkward()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(real_numbers(tuple(param.shape), "weights", index))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    optimizer = zero.shard(model, inner, stage=2, dtype=dtype, offload=offload, clip=clip, kernels=kernels, bucket_bytes=64)
    built = counters["stats"]["unique_graphs"]
    for step in range(6):
        inputs = real_numbers((3, 4), "inputs", step).to(model.first.weight.dtype)
        backward(optimizer, model(inputs, step).float().pow(2).mean())
        inner.param_groups[0]["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                model.never.weight.fill_(0.3)
                model.second.weight[0, 0] = 0.7
    assert counters["stats"]["unique_graphs"] == built
    saved = optimizer.state_dict()
    return {name: param.detach().float() for name, param in model.named_parameters()}, saved["masters"], saved["state"]


@needs_compiler
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(("dtype", "clip"), [(None, 0.05), ("bfloat16", None), ("float16", 0.05)])
def test_a_training_is_that_of_torchs_kernels_and_nothing_is_built_after_construction(dtype, clip, offload):
    ours, theirs = (trained(kernels, dtype, offload, clip) for kernels in ("compiled", "torch"))
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.0 if dtype else 1e-5, atol=0.01 if dtype else 1e-6)


@needs_compiler
def test_what_was_trained_with_one_kernel_goes_on_with_another():
    def train(*phases):
        model, saved = nn.Linear(4, 3), None
        with torch.no_grad():
            model.weight.copy_(real_numbers((3, 4), "weights"))
            model.bias.zero_()
        for number, kernels in enumerate(phases):
            optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.02), stage=1, kernels=kernels)
            if saved is not None:
                optimizer.load_state_dict(saved)
            for step in range(2):
                backward(optimizer, model(real_numbers((2, 4), number, step)).pow(2).sum())
                optimizer.step()
                optimizer.zero_grad()
            saved = optimizer.state_dict()
            optimizer.close()
        return dict(model.named_parameters()), saved["state"]

    expected = train("torch", "torch")
    for phases in (("torch", "compiled"), ("compiled", "torch")):
        torch.testing.assert_close(train(*phases), expected, rtol=1e-5, atol=1e-7)


def test_who_has_no_compiled_step_is_told_why():
    params = [nn.Parameter(torch.ones(3))]
    kinds = [(torch.float32, None, False)]
    refused = (
        (torch.optim.SGD(params, lr=0.1), kinds, "only Adam and AdamW have a compiled step, and not SGD"),
        (torch.optim.AdamW(params, amsgrad=True), kinds, "amsgrad has no compiled step"),
        (torch.optim.AdamW(params), [], "nothing is offloaded"),
    )
    for optimizer, there, why in refused:
        with pytest.raises(ValueError, match=rf"kernels='compiled' was asked for, but .*{why}.*Use kernels='torch'"):
            check_kernels(optimizer, "compiled", torch.device("cpu"), there)


WITHOUT_COMPILER = """
import sys, torch, zero
from torch import nn

model = nn.Linear(4, 2)
assert not any(name.startswith(("torch._inductor", "triton")) for name in sys.modules), "something compiles at import"
optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload="cpu")
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
optimizer.close()
try:
    zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload="cpu", kernels="compiled")
except ValueError as error:
    assert "could not be compiled" in str(error) and "Use kernels='torch'" in str(error), error
    assert not hasattr(model.weight, "grad_fn") or model.weight.grad_fn is None
    print("refused")
"""


@pytest.mark.promise("H04")
def test_without_a_compiler_everything_but_the_compiled_step_is_there(tmp_path):
    environment = {
        "PATH": str(tmp_path),
        "CC": "false",
        "CXX": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == ["refused"], found.stderr[-2000:]
