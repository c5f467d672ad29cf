"""Adam's step in one pass: with the fused kernel torch's own, compiled the same to a few ulp, built once and before the first
step, refused where it cannot be had."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import zero
from tests import programs, ranks
from tests.devices import needs_compiler
from tests.loopback import solo
from tests.promises.loops import same, weights
from tests.zoo.case import backward, real_numbers
from zero.plan.layout import Block, Piece, Span, round_up
from zero.runtime.kernels.adam_kernels import CompiledAdam, FusedAdam
from zero.runtime.kernels.adam_step import FusedStep, Gradient, StepDtypes, Stepped
from zero.runtime.kernels.native import passes
from zero.runtime.kernels.select import check_kernels

KINDS = (
    StepDtypes(torch.float32),
    *(StepDtypes(torch.float32, *pair) for pair in ((torch.bfloat16, None), (torch.bfloat16, torch.bfloat16))),
    *(StepDtypes(torch.float32, None, half) for half in (torch.bfloat16, torch.float16)),
    StepDtypes(torch.float32, torch.float32, torch.float32),  # copies in other memory of what needs no rounding
)
ADAMS = (
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {}),
)


LENGTHS = (1003, 1, 500)  # the elements of parameters that lie side by side, each in a slot of 16 elements or more


BOTH = pytest.mark.parametrize("kernels", ["fused", pytest.param("compiled", marks=needs_compiler)])


def in_one_pass(inner, kernels):
    return FusedStep(inner, FusedAdam() if kernels == "fused" else CompiledAdam())


def times_built():
    return passes.cache_info().misses


def pieces_of(lengths):
    """Where they lie in the share of a bucket, and its length."""
    pieces, start = [], 0
    for param, length in enumerate(lengths):
        pieces.append(Piece(param, 0, Span(start, start + length), Span(0, length)))
        start = round_up(start + length, 16)
    return pieces, start


@BOTH
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_torchs_own_to_a_few_ulp_of_the_masters_not_of_the_weights(kind, kernels):
    """Of the fused kernel to the bit."""
    dtype = kind.compared
    pieces, numel = pieces_of(LENGTHS)
    block, is_fused = Block(0, Span(0, numel), True), kernels == "fused"
    close = {"rtol": 0.0, "atol": 0.0} if is_fused else {"rtol": 1e-6, "atol": 1e-8}  # an ulp of the terms
    adams = (*ADAMS, (torch.optim.Adam, {"amsgrad": True})) if is_fused else ADAMS
    for (adam, options), (clip, unused) in itertools.product(adams, ((1.0, 1), (0.3, None), (0.3, 2))):
        share = torch.zeros(numel)
        for piece in pieces:
            share[piece.in_share.start : piece.in_share.stop] = real_numbers((piece.in_param.numel,), "value", piece.param)
        masters = [nn.Parameter(share[piece.in_share.start : piece.in_share.stop]) for piece in pieces]
        plain = [nn.Parameter(master.detach().clone()) for master in masters]
        ours, theirs = (
            adam([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], lr=1e-3, fused=is_fused, **options)
            for params in (masters, plain)
        )
        one_pass = in_one_pass(ours, kernels)
        weights = None if dtype is None else share.to(dtype, copy=True)
        for step in range(3):
            if weights is not None and step == 1:  # edits, beyond what rounding does
                for piece, other in zip(pieces, plain, strict=True):
                    weights[piece.in_share.start] = other.data[0] = 9.0
            grads = real_numbers((numel,), "grad", step)
            used = [param for param in range(len(pieces)) if param != unused or step == 2]
            for piece, other in zip(pieces, plain, strict=True):
                other.grad = grads[piece.in_share.start : piece.in_share.stop] * clip if piece.param in used else None
            rounded = weights if kind.rounded is None else torch.empty(numel, dtype=kind.rounded)
            groups = [ours.param_groups[0], ours.param_groups[0], ours.param_groups[1]]
            members = [
                (piece, master, group if piece.param in used else None)
                for piece, master, group in zip(pieces, masters, groups, strict=True)
            ]
            one_pass.adopt_state([(block, members, share)])
            one_pass.step([Stepped(block, members, share, Gradient([grads], [clip]), weights, rounded)])
            theirs.step()
            for master, other in zip(masters, plain, strict=True):
                torch.testing.assert_close(master, other, **close)
                assert set(ours.state[master]) == set(theirs.state[other])
                for key, moment in theirs.state[other].items():
                    torch.testing.assert_close(ours.state[master][key], moment, **close)
            if rounded is not None:
                assert torch.equal(rounded, share.to(rounded.dtype))
                weights = None if dtype is None else rounded


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
    built, grads = times_built(), []
    for step in range(6):
        inputs = real_numbers((3, 4), "inputs", step).to(model.first.weight.dtype)
        backward(optimizer, model(inputs, step).float().pow(2).mean())
        inner.param_groups[0]["lr"] *= 0.9
        optimizer.step()
        # The gradients after clipping.
        grads.append([optimizer.whole_grad(param) for param in (model.first.weight, model.scale)])
        if step == 4:
            backward(optimizer, model(inputs, step).float().pow(2).mean())  # on top of what was clipped
            grads.append(model.first.weight.grad.norm())
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                model.never.weight.fill_(0.3)
                model.second.weight[0, 0] = 0.7
    assert times_built() == built
    saved = optimizer.state_dict()
    return {name: param.detach().float() for name, param in model.named_parameters()}, saved["masters"], saved["state"], grads


@BOTH
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(("dtype", "clip"), [(None, 0.05), ("bfloat16", None), ("float16", 0.05)])
def test_a_training_is_that_of_torchs_kernels_and_nothing_is_built_after_construction(dtype, clip, offload, kernels):
    ours, theirs = (trained(kernels, dtype, offload, clip) for kernels in (kernels, "torch"))
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.0 if dtype else 1e-5, atol=0.01 if dtype else 1e-6)


def odd_model():
    """No parameter fills registers, and every one is cut by buckets of 64 bytes."""
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5, bias=False), nn.Linear(5, 3))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(real_numbers(tuple(param.shape), "weights", index))
    return model


def fused_trainings(rank, world, bucket_bytes, options):
    """Ours, and that of torch's own optimizer, on the same inputs on every rank."""
    found = []
    for is_sharded in (True, False):
        model = odd_model()
        optimizer = inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True, **options)
        if is_sharded:
            optimizer = zero.shard(model, inner, stage=2, kernels="fused", bucket_bytes=bucket_bytes)
        for step in range(5):
            model(real_numbers((3, 7), "inputs", step)).pow(2).mean().backward()
            inner.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                model[1].weight.data[0, 0] = 0.3
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
        if is_sharded:
            optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_a_fused_training_is_that_of_torchs_fused_optimizer_bit_by_bit(world, bucket_bytes, options):
    for ours, theirs in ranks.run(world, fused_trainings, bucket_bytes, options):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def exchanged(state, params):
    """Counters change places, and so do moments of one size, and both of one parameter; one is seen in another form."""
    first, second, third, fourth = (state[param] for param in params)
    fourth["exp_avg"], fourth["exp_avg_sq"] = fourth["exp_avg_sq"], fourth["exp_avg"]
    first["step"], second["step"] = second["step"], first["step"]
    first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
    third["exp_avg_sq"] = third["exp_avg_sq"].view(1000, 300)


@BOTH
def test_state_that_changed_places_or_form_is_taken_for_what_it_is(kernels):
    """Even though the places are those of others: torch's kernel looks at no sizes."""
    found = []
    for is_sharded in (True, False):
        params = [nn.Parameter(real_numbers((numel,), "weights", at)) for at, numel in enumerate((100, 100, 300_000, 50))]
        params[3].data.abs_().add_(1.0)  # its mean gradient is positive, as the mean of squares must be
        optimizer = inner = torch.optim.AdamW(params, lr=0.02, fused=True)
        if is_sharded:
            optimizer = zero.shard(nn.ParameterList(params), inner, stage=2, kernels=kernels, group=solo())
        for step in range(5):
            for at, param in enumerate(params):
                if at != 1 or step > 0:
                    (param * real_numbers(tuple(param.shape), "inputs", at, step)).square().sum().backward()
            if step == 3:
                exchanged(inner.state, [optimizer.sharding.masters.of(at)[0][1] for at in range(4)] if is_sharded else params)
            if step == 4 and not is_sharded:
                state = inner.state[params[2]]
                state["exp_avg_sq"] = state["exp_avg_sq"].view(-1)
            optimizer.step()
            optimizer.zero_grad()
        counts = [int(state["step"]) for state in inner.state.values()]
        found.append((sorted(counts), [param.detach().clone() for param in params]))
    (ours, our_weights), (theirs, their_weights) = found
    assert ours == theirs
    exactness = 0.0 if kernels == "fused" else 1e-5
    torch.testing.assert_close(our_weights, their_weights, rtol=exactness, atol=exactness)


@BOTH
def test_state_that_changed_places_between_buckets_is_read_before_any_of_them_is_stepped(kernels):
    def trained(is_sharded):
        params = [nn.Parameter(real_numbers((64,), "weights", at)) for at in range(4)]
        optimizer = inner = torch.optim.AdamW(params, lr=0.02, fused=True)
        if is_sharded:
            options = {"kernels": kernels, "bucket_bytes": params[0].nbytes}
            optimizer = zero.shard(nn.ParameterList(params), inner, stage=2, group=solo(), **options)
            assert len(optimizer.sharding.layout_ref.layout.buckets) == 4
        for step in range(4):
            for at, param in enumerate(params):
                (param * real_numbers((64,), "inputs", at, step)).square().sum().backward()
            if step == 2:
                owners = [optimizer.sharding.masters.of(at)[0][1] for at in range(4)] if is_sharded else params
                states = [inner.state[owner] for owner in owners]
                for name in ("exp_avg", "exp_avg_sq"):
                    moved = [state[name] for state in (*states[1:], states[0])]
                    for state, moment in zip(states, moved, strict=True):
                        state[name] = moment
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in params]

    exactness = 0.0 if kernels == "fused" else 1e-5
    torch.testing.assert_close(trained(True), trained(False), rtol=exactness, atol=exactness)


def test_a_stretch_that_ends_within_a_parameter_ends_where_a_register_does():
    sizes = (5, 140_000, 3, 400_000)  # these lie side by side, with gaps of up to four elements

    def trained(is_sharded):
        params = [nn.Parameter(real_numbers((size,), "value", size)) for size in sizes]
        optimizer = inner = torch.optim.AdamW(params, lr=0.01, fused=True)
        if is_sharded:
            optimizer = zero.shard(nn.ParameterList(params), inner, stage=2, kernels="fused", align_bytes=16, group=solo())
        for step in range(3):
            for index, param in enumerate(params):
                param.backward(real_numbers((sizes[index],), "grad", index, step))
            optimizer.step()
            optimizer.zero_grad()
        state = [optimizer.whole_state(param) if is_sharded else inner.state[param] for param in params]
        return [param.detach() for param in params], [(own["exp_avg"], own["exp_avg_sq"]) for own in state]

    torch.testing.assert_close(trained(True), trained(False), rtol=0.0, atol=0.0)


@BOTH
def test_state_that_is_loaded_takes_the_place_of_what_was_there(kernels):
    model = nn.Linear(64, 64)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, kernels=kernels, group=solo())
    for _ in range(2):
        backward(optimizer, model(torch.ones(1, 64)).sum())
        optimizer.step()
        moments = weakref.ref(optimizer.state[next(iter(optimizer.state))]["exp_avg"].untyped_storage())
        optimizer.load_state_dict(optimizer.state_dict())
        gc.collect()
        assert moments() is None


@BOTH
def test_steps_are_counted_where_they_are_and_in_fp32(kernels):
    model = nn.Linear(4, 3)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, kernels=kernels, group=solo())
    with in_float64():
        backward(optimizer, model(torch.ones(1, 4, dtype=torch.float32)).sum())
        optimizer.step()
    counts = [state["step"] for state in optimizer.state.values()]
    optimizer.step()
    assert [(count.item(), count.dtype) for count in counts] == [(2.0, torch.float32)] * 2
    for state in optimizer.state.values():
        state["step"] = 2
    optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [3.0, 3.0]


@BOTH
def test_what_was_trained_with_one_kernel_goes_on_with_another(kernels):
    def train(*phases):
        model, saved = nn.Linear(4, 3), None
        with torch.no_grad():
            model.weight.copy_(real_numbers((3, 4), "weights"))
            model.bias.zero_()
        for number, own in enumerate(phases):
            optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.02), stage=1, kernels=own)
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
    for phases in (("torch", kernels), (kernels, "torch")):
        torch.testing.assert_close(train(*phases), expected, rtol=1e-5, atol=1e-7)


@BOTH
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_length_is_stepped_as_part_of_a_longer_one(kind, kernels):
    numel = 4000

    def stepped(lengths):
        share, grads = (real_numbers((numel,), name) for name in ("value", "grad"))
        master = nn.Parameter(share)
        inner = torch.optim.AdamW([master], lr=1e-3)
        one_pass = in_one_pass(inner, kernels)
        weights, rounded = (None if dtype is None else share.to(dtype, copy=True) for dtype in (kind.compared, kind.rounded))
        rounded, start = weights if rounded is None else rounded, 0
        for bucket, length in enumerate(lengths):
            here, span = slice(start, start + length), Span(0, length)
            piece = Piece(0, bucket, span, span)
            old, new = (None if whole is None else whole[here] for whole in (weights, rounded))
            members = [(piece, nn.Parameter(share[here]), inner.param_groups[0])]
            block = Block(bucket, span, True)
            one_pass.adopt_state([(block, members, share[here])])
            one_pass.step([Stepped(block, members, share[here], Gradient([grads[here]], [0.5]), old, new)])
            start += length
        assert start == numel
        return share

    short = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 1, 63, 65, 127, 129, 1]
    torch.testing.assert_close(stepped([*short, numel - sum(short)]), stepped([numel]), rtol=0.0, atol=0.0)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def of_more_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def in_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a device": lambda: torch.device("cpu"),
    "another device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "threads": of_more_threads,
    "default dtype": in_float64,
}


@BOTH
def test_a_step_has_the_same_bits_in_any_mode(kernels):
    found = {}
    for mode in (None, *MODES):
        model = nn.Linear(4, 3).bfloat16()
        with torch.no_grad():
            model.weight.copy_(real_numbers((3, 4), "weights"))
            model.bias.zero_()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        optimizer = zero.shard(model, inner, stage=1, kernels=kernels, group=solo())
        built = times_built()
        backward(optimizer, model(real_numbers((2, 4), 0).bfloat16()).float().pow(2).sum())
        optimizer.step()
        with MODES[mode]() if mode else contextlib.nullcontext():
            optimizer.step()
        found[mode] = weights(model)
        assert times_built() == built, mode
        optimizer.close()
    assert [mode for mode in MODES if not same(found[mode], found[None])] == []


@BOTH
def test_a_dtype_that_comes_later_is_stepped_like_those_that_were_there(kernels):
    def trained(is_sharded):
        first, second = nn.Linear(4, 3), nn.Linear(3, 2).double()
        with torch.no_grad():
            for number, param in enumerate((*first.parameters(), *second.parameters())):
                param.copy_(real_numbers(tuple(param.shape), "weights", number))
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.02, fused=True)
        if is_sharded:
            optimizer = zero.shard(nn.ModuleList([first, second]), optimizer, stage=2, kernels=kernels, group=solo())
        optimizer.add_param_group({"params": list(second.parameters())})
        built = times_built()
        backward(optimizer, second(first(real_numbers((2, 4), 0)).double()).pow(2).sum())
        optimizer.step()
        assert times_built() == built
        return [param.detach().clone() for param in (*first.parameters(), *second.parameters())]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-6, atol=1e-9)


@needs_compiler
@pytest.mark.parametrize("name", ["amsgrad", "capturable"])
def test_a_setting_that_has_no_compiled_step_is_refused_however_it_comes(name):
    words = rf"Cannot use kernels='compiled': {name} has no compiled step.*Use kernels='torch'"
    model = nn.Linear(4, 3)
    inner = torch.optim.AdamW([model.weight], lr=0.02)
    optimizer = zero.shard(model, inner, stage=1, kernels="compiled", group=solo())
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [model.bias], name: True})
    assert len(inner.param_groups) == 1
    saved["param_groups"][0] = {**saved["param_groups"][0], name: True, "lr": 1.0}
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert inner.param_groups[0]["lr"] == 0.02 and not inner.param_groups[0][name]
    backward(optimizer, model(real_numbers((2, 4), 0)).pow(2).sum())
    before, inner.param_groups[0][name] = weights(model), True
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert same(weights(model), before) and not inner.state
    inner.param_groups[0][name] = False
    optimizer.step()
    assert not same(weights(model), before)


@needs_compiler
@pytest.mark.parametrize("bucket_bytes", [16, 2**20])
def test_a_step_of_the_users_own_is_called_and_not_the_compiled_one(bucket_bytes):
    model, calls = nn.Linear(4, 3), []
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = zero.shard(model, inner, stage=2, kernels="compiled", bucket_bytes=bucket_bytes, group=solo())
    inner.step = lambda *arguments: (calls.append(1), torch.optim.AdamW.step(inner, *arguments))[1]
    backward(optimizer, model(real_numbers((2, 4), 0)).pow(2).sum())
    optimizer.step()
    assert calls == [1]


@BOTH
def test_a_step_that_somebody_gave_the_class_is_called(kernels, monkeypatch):
    model, calls = nn.Linear(4, 3), []
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2, kernels=kernels, group=solo())
    step = torch.optim.AdamW.step

    def counted(*arguments, **options):
        calls.append(1)
        return step(*arguments, **options)

    for _ in range(2):
        backward(optimizer, model(real_numbers((2, 4), 0)).pow(2).sum())
        optimizer.step()
        monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    assert calls == [1]


def test_who_has_no_compiled_step_is_told_why():
    params = [nn.Parameter(torch.ones(3))]
    refused = (
        (torch.optim.SGD(params, lr=0.1), True, "only Adam and AdamW have a compiled step, and not SGD"),
        (torch.optim.AdamW(params, amsgrad=True), True, "amsgrad has no compiled step"),
        (torch.optim.AdamW(params), False, "nothing is offloaded"),
    )
    for optimizer, on_host, why in refused:
        with pytest.raises(ValueError, match=rf"Cannot use kernels='compiled': .*{why}.*Use kernels='torch'"):
            check_kernels(optimizer, "compiled", torch.device("cpu"), on_host)


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
    found = programs.with_torch(WITHOUT_COMPILER, environment)
    assert found.stdout.split() == ["refused"], found.stderr[-2000:]


@pytest.mark.parametrize("kernels", ["torch", "fused", pytest.param("compiled", marks=needs_compiler)])
def test_a_gradient_whose_square_overflows_alone_is_stepped_as_torch_steps_it(kernels):
    """torch multiplies by what a step takes of the square first."""
    model, plain = (nn.ParameterDict({"p": torch.linspace(-2, 2, 8)}) for _ in range(2))
    inner = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=1, group=solo(), kernels=kernels)
    for slope in (5e19, 1.0, 1.0):
        for each, stepped in ((model, optimizer), (plain, inner)):
            stepped.zero_grad()
            (each["p"] * slope).sum().backward()
            stepped.step()
    assert torch.allclose(model["p"], plain["p"], rtol=1e-6, atol=0.0)
    squares = optimizer.whole_state(model["p"])["exp_avg_sq"]
    assert squares.isfinite().all() and torch.allclose(squares, inner.state[plain["p"]]["exp_avg_sq"], rtol=1e-6, atol=0.0)
