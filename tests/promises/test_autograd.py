"""K: what autograd can do beside one plain backward, and what users hang on it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests import inside, ranks
from tests.instruments import Ledger
from tests.promises.trainings import STAGES, gloo_group, on_loopback, sgd, what_differs, what_differs_over_gloo, with_tag
from tests.traces import weights_of
from tests.zoo import CASES
from tests.zoo.case import draw, filled, mlp, real_loss, real_mlp, whole_loss, whole_numbers
from zero import shard
from zero.errors import RankFailed, ZeroError


def micro_step(model: Any, rank: int, world: int, *key: int) -> torch.Tensor:
    loss = whole_loss(model(draw(model, (2, 4), rank, *key)), world, *key)
    loss.backward()
    return loss


# K01 to K03 -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("K01")
@pytest.mark.parametrize("name", with_tag("frozen", "checkpoint"))
def test_adapters_beside_frozen_weights_in_checkpointed_blocks_equal_the_oracle(name):
    assert what_differs(name) == []


@pytest.mark.promise("K02")
def test_reentrant_checkpointing_of_shared_tied_and_repeated_modules_equals_the_oracle():
    names = with_tag("reentrant")
    assert len(names) >= 5
    assert all(CASES[name].steps >= 2 for name in names)  # the second iteration is where a stale bucket shows
    for stage, world in ((1, 3), (2, 2)):
        assert what_differs(names, dtypes=("fp32",), stages=(stage,), worlds=(world,)) == []
    assert what_differs_over_gloo(names[:3], stages=(2,)) == []


def calls_in_one_backward(num_params: int, stage: int) -> int:
    """Python functions of ours that one backward calls; after the windows in which the order of buckets is learned."""
    model = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(num_params))
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, bucket_bytes=256)
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "/zero/" in frame.f_code.co_filename

    for step in range(3):
        loss = sum((p * p).sum() for p in model)
        if step == 2:
            sys.setprofile(note)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    return count


@pytest.mark.promise("K03")
@pytest.mark.parametrize("stage", STAGES)
def test_the_work_of_hooks_grows_with_the_number_of_parameters_and_not_faster(stage):
    few, many = calls_in_one_backward(50, stage), calls_in_one_backward(500, stage)
    assert few >= 100  # two hooks a parameter at least, so it was counted
    assert many <= 15 * few


# K04 to K08: kinds of backward ------------------------------------------------------------------------------------------


@pytest.mark.promise("K04")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("cleared", [False, True])
def test_the_second_backward_of_a_graph_reduces_again(stage, accumulation, cleared):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model), stage=stage, accumulation=accumulation, group=ledger)
        for _ in range(2):
            loss = whole_loss(model(draw(model, (2, 4), group.rank, 0)), group.size)
            loss.backward(retain_graph=True)
            if cleared:
                optimizer.zero_grad()
            ledger.section = "second"
            loss.backward()
            optimizer.settle()
            grads = [optimizer.whole_grad(p) for p in model.parameters()]
            optimizer.zero_grad()
            assert len(ledger.rounds("second")) >= 1
            ledger.entries.clear()
        return grads

    plain = mlp()
    for rank in range(2):
        (whole_loss(plain(draw(plain, (2, 4), rank, 0)), 2) * (1 if cleared else 2) / 2).backward()
    for grads in on_loopback(2, mlp, program):
        assert all(torch.equal(mine, p.grad) for mine, p in zip(grads, plain.parameters(), strict=True))


@pytest.mark.promise("K05", "K06")
@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_sends_nothing_marks_nothing_and_leaves_grad_alone(stage):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model), stage=stage, group=ledger)
        ledger.section = "grad"
        for create_graph in (True, False):
            loss = real_loss(model(draw(model, (2, 4), group.rank, 0, real=True)))
            torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
        assert ledger.of("grad") == []
        assert all(p.grad is None for p in model.parameters())
        assert not inside.must_tell_others(optimizer)
        micro_step(model, group.rank, group.size, 0)
        proxies = [p.grad for p in model.parameters()]
        before = len(ledger.entries)
        torch.autograd.grad(real_loss(model(draw(model, (2, 4), 7, 0, real=True))), list(model.parameters()))
        assert len(ledger.entries) == before
        assert all(p.grad is proxy for p, proxy in zip(model.parameters(), proxies, strict=True))
        return [optimizer.whole_grad(p) for p in model.parameters()]

    plain = mlp()
    for rank in range(2):
        (whole_loss(plain(draw(plain, (2, 4), rank, 0)), 2, 0) / 2).backward()
    for grads in on_loopback(2, mlp, program):
        assert all(torch.equal(mine, p.grad) for mine, p in zip(grads, plain.parameters(), strict=True))


@pytest.mark.promise("K06")
def test_partial_backwards_and_full_ones_in_turn_leave_no_residue():
    assert what_differs(with_tag("partial")) == []


@pytest.mark.promise("K07")
def test_backwards_inside_forward_and_backward_equal_the_oracle():
    assert what_differs(with_tag("nested")) == []
    assert what_differs_over_gloo(with_tag("nested")) == []


class OddlyLaidOut(torch.autograd.Function):
    """Passes its input through; the gradient comes back in channels-last memory, or with strides of zero."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.kind == "channels last":
            return grad.to(memory_format=torch.channels_last), None
        return grad.sum().expand_as(grad), None


@pytest.mark.promise("K08")
@pytest.mark.parametrize("kind", ["channels last", "stride zero"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_flattened_in_their_logical_order_whatever_their_memory(kind, stage):
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(whole_numbers((2, 3, 4, 5), "K08"))

        def forward(self, x):
            return (OddlyLaidOut.apply(self.weight, kind) * x).sum()

    xs = [whole_numbers((2, 3, 4, 5), "x of K08", rank) for rank in range(2)]
    plain = Picture()
    for x in xs:
        plain(x).backward()

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=100, group=group)
        model(xs[group.rank]).backward()
        return optimizer.whole_grad(model.weight)

    for grad in on_loopback(2, Picture, program):
        assert torch.equal(grad, plain.weight.grad / 2)


# K09, K10: hooks of the user --------------------------------------------------------------------------------------------


@pytest.mark.promise("K09")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_fire_once_a_micro_step_and_their_change_is_reduced(stage, when):
    micro_steps, world = 3, 2

    def hooks_on(model, seen):
        def double(grad):
            seen.append(("tensor", grad.detach().clone()))
            return grad * 2

        def accumulated(param):
            seen.append(("accumulated", param.grad.detach().clone()))
            param.grad.mul_(4)

        model[0].weight.register_hook(double)
        model[2].bias.register_post_accumulate_grad_hook(accumulated)

    def program(group, model):
        seen: list[Any] = []
        if when == "before":
            hooks_on(model, seen)
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        if when == "after":
            hooks_on(model, seen)
        local = []
        for micro in range(micro_steps):
            micro_step(model, group.rank, world, 0, micro)
            alone = mlp()
            micro_step(alone, group.rank, world, 0, micro)
            local.append((alone[0].weight.grad, alone[2].bias.grad))
        for kind, position in (("tensor", 0), ("accumulated", 1)):
            given = [grad for what, grad in seen if what == kind]
            assert len(given) == micro_steps
            # Each is this rank's own gradient of that micro-batch.
            assert all(torch.equal(mine, grads[position]) for mine, grads in zip(given, local, strict=True))
        return {name: optimizer.whole_grad(p) for name, p in model.named_parameters()}

    plain = mlp()
    for rank in range(world):
        for micro in range(micro_steps):
            micro_step(plain, rank, 1, 0, micro)
    factor = {"0.weight": 2.0, "2.bias": 4.0}
    for grads in on_loopback(world, mlp, program):
        for name, p in plain.named_parameters():
            assert torch.equal(grads[name], p.grad * factor.get(name, 1.0))


class Keyworded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return self.layer(x) * scale


@pytest.mark.promise("K10")
@pytest.mark.parametrize("stage", STAGES)
def test_forward_hooks_with_keywords_and_full_backward_hooks_coexist(stage):
    def steps(model, optimizer, rank):
        seen = []
        handles = [
            model.register_forward_pre_hook(lambda m, args, kw: (args, {"scale": 2 * kw.get("scale", 1.0)}), with_kwargs=True),
            model.register_forward_hook(lambda m, args, kw, out: out + 1, with_kwargs=True),
            model.layer.register_full_backward_pre_hook(lambda m, grads: tuple(2 * g for g in grads)),
            model.layer.register_full_backward_hook(lambda m, gi, go: seen.append("backward")),
        ]
        for step in range(4):
            if step == 2:
                handles[2].remove()
                handles[0].remove()
            (model(draw(model, (2, 4), rank, step).requires_grad_(), scale=3.0).sum() * 2).backward()
            yield
            optimizer.step()
            optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
        yield seen

    def program(group, model):
        *_, seen = steps(model, shard(model, sgd(model), stage=stage, group=group), group.rank)
        return seen

    plains = [filled(Keyworded()) for _ in range(2)]
    runs = [steps(model, sgd(model), rank) for rank, model in enumerate(plains)]
    for _ in range(4):
        for run in runs:
            next(run)
        for pair in zip(*(model.parameters() for model in plains), strict=True):
            pair[0].grad = pair[1].grad = (pair[0].grad + pair[1].grad) / 2
    expected = [next(run) for run in runs]
    for ours, theirs in zip(on_loopback(2, lambda: filled(Keyworded()), program), expected, strict=True):
        assert ours[:-1] == theirs[:-1] == ["backward"] * 4
        assert all(torch.equal(mine, p) for mine, p in zip(ours[-1], theirs[-1], strict=True))


# K11, K12: entries and failures -----------------------------------------------------------------------------------------


@pytest.mark.promise("K11")
@pytest.mark.parametrize("stage", STAGES)
def test_every_way_into_backward_gives_the_same(stage):
    """The loss's own, the optimizer's, torch's function, and of an output with a gradient of its own; mixed in one window."""

    def of_loss(optimizer, out, coefficients):
        (out * coefficients).sum().backward()

    def of_optimizer(optimizer, out, coefficients):
        optimizer.backward((out * coefficients).sum())

    def of_torch(optimizer, out, coefficients):
        torch.autograd.backward([(out * coefficients).sum()])

    def of_output(optimizer, out, coefficients):
        out.backward(gradient=coefficients)

    ways = (of_loss, of_optimizer, of_torch, of_output)

    def train(chosen):
        def program(group, model):
            optimizer = shard(model, sgd(model), stage=stage, group=group)
            for step in range(4):
                coefficients = whole_numbers((2, 3), "K11", group.rank, step) * group.size
                chosen(step)(optimizer, model(draw(model, (2, 4), group.rank, step)), coefficients)
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

        return on_loopback(2, mlp, program)

    results = [train(lambda _, way=way: way) for way in ways] + [train(lambda step: ways[step])]
    first = results[0][0]
    for by_rank in results:
        for weights in by_rank:
            assert all(torch.equal(mine, p) for mine, p in zip(weights, first, strict=True))


class Boom(Exception):
    pass


def explode(*_: Any) -> None:
    raise Boom


def train_with_a_failure(group: Any, model: nn.Module, stage: int, place: Any, ranks_that_fail: Any, clear: str) -> Any:
    """Step 1 raises in the hook of parameter `place`, or in forward; then all clear, and go on."""
    optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, bucket_bytes=64, group=group, timeout_s=10.0)
    fates = []
    for step in range(3):
        handle = None
        fails = step == 1 and group.rank in ranks_that_fail
        if fails and place != "forward":
            handle = list(model.parameters())[place].register_post_accumulate_grad_hook(explode)
        try:
            if fails and place == "forward":
                raise Boom
            micro_step(model, group.rank, group.size, step)
            optimizer.step()
        except (Boom, ZeroError) as error:
            fates.append((step, type(error).__name__, str(error)))
        if handle is not None:
            handle.remove()
        model.zero_grad() if clear == "model" else optimizer.zero_grad(set_to_none=clear == "none")
    return fates, [p.detach().clone() for p in model.parameters()]


def without_step_1(stage: int, world: int, clear: str) -> list[torch.Tensor]:
    """What is left when step 1 was never tried, or tried and cleared to zeros, which leaves momentum and nothing else."""

    def program(group, model):
        optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, group=group)
        for step in (0, 2):
            micro_step(model, group.rank, group.size, step)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return on_loopback(world, mlp, program)[0]


@pytest.mark.promise("K12", "L07")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", 0, 1, 2, 3])
@pytest.mark.parametrize("clear", ["none", "zeros"])
def test_after_an_exception_on_one_rank_the_others_raise_and_the_next_step_is_as_if_it_never_was(stage, place, clear):
    expected = without_step_1(stage, 3, clear)
    found = on_loopback(3, mlp, lambda g, m: train_with_a_failure(g, m, stage, place, (1,), clear))
    for rank, (fates, weights) in enumerate(found):
        assert [(step, kind) for step, kind, _ in fates] == [(1, "Boom" if rank == 1 else "RankFailed")]
        assert rank == 1 or "rank 1" in fates[0][2]
        if rank != 1 and place != "forward":
            assert f"at step 2, at parameter {[name for name, _ in mlp().named_parameters()][place]!r}, where" in fates[0][2]
        assert all(torch.equal(mine, p) for mine, p in zip(weights, expected, strict=True))


@pytest.mark.promise("K12")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["forward", 0, 1, 2, 3])
@pytest.mark.parametrize("clear", ["none", "model"])
def test_after_the_same_exception_on_all_ranks_the_next_step_is_as_if_it_never_was(stage, place, clear):
    expected = without_step_1(stage, 2, clear)
    found = on_loopback(2, mlp, lambda g, m: train_with_a_failure(g, m, stage, place, (0, 1), clear))
    for fates, weights in found:
        assert [(step, kind) for step, kind, _ in fates] == [(1, "Boom")]
        assert all(torch.equal(mine, p) for mine, p in zip(weights, expected, strict=True))


@pytest.mark.promise("K12")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", [0, 2])
def test_after_an_exception_and_a_clear_a_backward_of_other_parameters_counts(world, stage, place):
    """It does not begin at a parameter that the one that failed has reached."""
    build = lambda: filled(nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), high=1)  # noqa: E731
    x = torch.ones(2, 4)

    def program(group: Any, model: nn.Module) -> Any:
        optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, bucket_bytes=64, group=group, timeout_s=10.0)
        for _ in range(2):
            handle = model[place].weight.register_hook(explode)
            with pytest.raises(Boom):
                model[2](model[1](model[0](x))).sum().backward()
            handle.remove()
            model.zero_grad()
            model[3](x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = build()
    optimizer = sgd(plain, momentum=0.5)
    for _ in range(2):
        plain[3](x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in on_loopback(world, build, program):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, plain.parameters(), strict=True))


def fail_over_gloo(rank: int, world: int, stage: int, place: Any) -> Any:
    return train_with_a_failure(gloo_group(time_limit_s=10.0), mlp(), stage, place, (1,), "none")


@pytest.mark.promise("K12")
@pytest.mark.parametrize("place", ["forward", 0, 3])
def test_after_an_exception_on_one_process_all_go_on(place):
    for rank, (fates, weights) in enumerate(ranks.run(3, fail_over_gloo, 2, place, timeout=40.0)):
        assert [(step, kind) for step, kind, _ in fates] == [(1, "Boom" if rank == 1 else "RankFailed")]
        assert all(torch.equal(mine, p) for mine, p in zip(weights, without_step_1(2, 3, "none"), strict=True))


# K13, K14: without gradients, and functional ----------------------------------------------------------------------------


@pytest.mark.promise("K13")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_at_every_point_of_a_window_changes_no_bit(stage, mode):
    """A window of three micro-steps has seven points: around each forward and each backward."""

    def program(group, model):
        results = []
        start = {name: p.clone() for name, p in model.state_dict().items()}
        for evaluated in (None, *range(8)):
            model.load_state_dict(start)
            optimizer = shard(model, sgd(model), stage=stage, accumulation=3, group=group)
            point = 0

            def pause(evaluated=evaluated):
                nonlocal point
                if point == evaluated:
                    model.eval()
                    with mode():
                        model(draw(model, (5, 4), group.rank, 9))
                    model.train()
                point += 1

            for micro in range(3):
                pause()
                loss = whole_loss(model(draw(model, (2, 4), group.rank, 0, micro)), group.size, micro)
                pause()
                loss.backward()
            pause()
            optimizer.step()
            pause()
            optimizer.zero_grad()
            assert not any(p.is_inference() for p in model.parameters())
            results.append(weights_of(model))
            optimizer.close()
        return results

    for first, *others in on_loopback(2, mlp, program):
        assert all(torch.equal(other[name], weight) for other in others for name, weight in first.items())


@pytest.mark.promise("K14")
@pytest.mark.parametrize("stage", STAGES)
def test_func_grad_and_vmap_over_the_model_send_nothing_and_agree_with_backward(stage):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model), stage=stage, group=ledger)
        ledger.section = "functional"
        weights = {name: p.detach() for name, p in model.named_parameters()}
        x = draw(model, (3, 4), group.rank, 0)

        def loss_of(weights, row):
            return torch.func.functional_call(model, weights, (row,)).sum()

        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(weights, x)
        assert ledger.of("functional") == []
        assert all(p.grad is None for p in model.parameters())
        model(x).sum().backward()
        return [(each[name].sum(0), optimizer.whole_grad(p)) for name, p in model.named_parameters()]

    found = on_loopback(2, mlp, program)
    for pairs in zip(*found, strict=True):
        assert torch.equal(pairs[0][1], (pairs[0][0] + pairs[1][0]) / 2)
        assert torch.equal(pairs[1][1], pairs[0][1])


# K15 to K17: kinds of tensors -------------------------------------------------------------------------------------------


@pytest.mark.promise("K15")
@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_embedding_is_refused_by_name_before_anything_changes(stage):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    before = model[0].weight.data_ptr()
    with pytest.raises(ValueError, match=r"0 is an embedding with sparse=True"):
        shard(model, sgd(model), stage=stage)
    assert model[0].weight.data_ptr() == before


class SparselyUsed(nn.Module):
    """An embedding whose sparse gradient nobody can see at construction."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.ones(5, 4)), nn.Linear(4, 3)

    def forward(self, tokens, sparse):
        return self.layer(nn.functional.embedding(tokens, self.table, sparse=sparse)).sum()


@pytest.mark.promise("K15")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tokens", [[1, 2], []])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks_and_they_go_on(stage, tokens):
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        words = ""
        for step in range(2):
            try:
                sparse = step == 0 and group.rank == 1
                model(torch.tensor(tokens if sparse else [0, 3], dtype=torch.long), sparse).backward()
                optimizer.step()
            except (ValueError, RankFailed) as error:
                words = str(error)
            optimizer.zero_grad()
        return words, [p.detach().clone() for p in model.parameters()]

    found = on_loopback(2, lambda: filled(SparselyUsed()), program)
    assert "rank 1" in found[0][0]
    assert "gradient of table: it is sparse" in found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.promise("K16")
@pytest.mark.parametrize("stage", STAGES)
def test_a_complex_parameter_is_refused_by_name_and_its_real_view_trains(stage):
    model = nn.Linear(3, 2, dtype=torch.complex64)
    before = model.weight.data_ptr()
    with pytest.raises(ValueError, match="weight is complex"):
        shard(model, sgd(model), stage=stage)
    assert model.weight.data_ptr() == before

    class AsReal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(whole_numbers((3, 2, 2), "K16"))

        def forward(self, x):
            return (torch.view_as_complex(self.weight) @ x).abs().square().sum()

    x = torch.complex(*whole_numbers((2, 2, 4), "x of K16").unbind())
    plain = nn.Parameter(torch.view_as_complex(whole_numbers((3, 2, 2), "K16")))
    torchs = torch.optim.SGD([plain], lr=2.0**-7)
    norms = []
    for _ in range(5):
        (plain @ x).abs().square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_([plain], 10.0).item())
        torchs.step()
        torchs.zero_grad()

    def program(group, model):
        optimizer, found = shard(model, sgd(model, 2.0**-7), stage=stage, group=group), []
        for _ in range(5):
            model(x).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return torch.view_as_complex(model.weight.detach()).clone(), found

    for weight, found in on_loopback(2, AsReal, program):
        assert torch.allclose(weight, plain, atol=1e-6)
        assert found == pytest.approx(norms, rel=1e-6)


@pytest.mark.promise("K17")
@pytest.mark.parametrize("name", [name for name in with_tag("strided") if "many" not in CASES[name].tags])
def test_strided_parameters_train_and_keep_their_strides(name):
    assert what_differs(name) == []
    model = CASES[name].build()
    before = {name: strides_that_matter(p) for name, p in model.named_parameters()}
    optimizer = shard(model, CASES[name].optimizer(model), stage=2)
    assert {name: strides_that_matter(p) for name, p in model.named_parameters()} == before
    optimizer.close()
    assert {name: strides_that_matter(p) for name, p in model.named_parameters()} == before


def strides_that_matter(param: nn.Parameter) -> tuple[int, ...]:
    """Of dimensions with more than one element, and contiguous ones for memory with holes, which is documented to close up."""
    order = sorted(range(param.dim()), key=lambda dim: -param.stride(dim))
    dense = param.permute(order).is_contiguous()
    strides = param.stride() if dense else param.contiguous().stride()
    return tuple(stride for stride, size in zip(strides, param.shape, strict=True) if size > 1)


# K18, K19: threads and modes --------------------------------------------------------------------------------------------


@pytest.mark.promise("K18")
@pytest.mark.parametrize("stage", STAGES)
def test_two_threads_may_send_backward_on_two_models_at_once(stage):
    """Two trainings, in lockstep so that their backwards overlap, each equal to itself alone."""
    turn = threading.Barrier(2)

    def train(model, rank, wait):
        optimizer = shard(model, sgd(model, 2.0**-8), stage=stage, bucket_bytes=64)
        for step in range(10):
            loss = whole_loss(model(draw(model, (2, 4), rank, step)), 1, step)
            wait()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    alone = [train(mlp(), rank, lambda: None) for rank in range(2)]
    models = [mlp() for _ in range(2)]
    found: list[Any] = [None, None]

    def run(rank):
        found[rank] = train(models[rank], rank, turn.wait)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for ours, theirs in zip(found, alone, strict=True):
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


@pytest.mark.promise("K18")
@pytest.mark.parametrize("stage", STAGES)
def test_threads_may_run_the_hooks_of_different_parameters_of_one_model_at_once(stage):
    """As autograd does with a thread for each device."""
    build = lambda: nn.ModuleList(filled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), high=1) for _ in range(2))  # noqa: E731
    model, plain = build(), build()
    optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=200)
    turn = threading.Barrier(2)
    for window in range(3):

        def run(half, window=window):
            for number in range(5):
                loss = whole_loss(model[half](draw(model, (2, 4), half, window, number)), 1, number)
                turn.wait()
                loss.backward()

        threads = [threading.Thread(target=run, args=(half,)) for half in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for half in range(2):
            for number in range(5):
                whole_loss(plain[half](draw(plain, (2, 4), half, window, number)), 1, number).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(optimizer.whole_grad(mine), theirs.grad)
        optimizer.zero_grad()
        plain.zero_grad()


@pytest.mark.promise("K18")
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_one_thread_is_about_to_write_is_left_alone_by_another_that_begins_the_window(stage):
    """Between our hook before the write and the write itself, the other thread's first gradient comes."""
    build = lambda: nn.ModuleList(filled(nn.Linear(4, 4, bias=False), high=1) for _ in range(2))  # noqa: E731
    model, plain = build(), build()
    optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=200)
    is_writing, has_begun, found = threading.Event(), threading.Event(), []

    def wait(_):
        is_writing.set()
        assert has_begun.wait(30)
        found.append(model[0].weight.grad)

    def run(half):
        whole_loss(model[half](draw(model, (2, 4), half, 0)), 1, 0).backward()

    torch.autograd.graph.get_gradient_edge(model[0].weight).node.register_prehook(wait)  # behind ours
    thread = threading.Thread(target=run, args=(0,))
    thread.start()
    assert is_writing.wait(30)
    run(1)
    has_begun.set()
    thread.join(30)
    assert found == [None]  # autograd adds to what it finds
    for half in range(2):
        whole_loss(plain[half](draw(plain, (2, 4), half, 0)), 1, 0).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.whole_grad(mine), theirs.grad)


@pytest.mark.promise("K18")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("others", [0, 1])
def test_a_backward_that_comes_to_a_gradient_that_another_thread_is_writing_raises(stage, others):
    """Each would take away what the other has written. `others`: layers that the first one has been through by then."""
    model = filled(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(1 + others))), high=1)
    optimizer = shard(model, sgd(model), stage=stage, bucket_bytes=200)
    is_writing, has_come = threading.Event(), threading.Event()

    def wait(_):
        if not is_writing.is_set():
            is_writing.set()
            assert has_come.wait(30)

    def run():
        whole_loss(model(draw(model, (2, 4), 0, 0)), 1, 0).backward()

    torch.autograd.graph.get_gradient_edge(model[0].weight).node.register_prehook(wait)  # behind ours
    thread = threading.Thread(target=run)
    thread.start()
    assert is_writing.wait(30)
    with pytest.raises(ValueError, match=r"of 0\.weight: a backward in another thread"):
        model[0](draw(model, (2, 4), 0, 0)).sum().backward()
    has_come.set()
    thread.join(30)
    with pytest.raises(ZeroError):
        optimizer.step()
    optimizer.zero_grad()
    run()
    assert optimizer.whole_grad(model[0].weight).any()


def train_in_mode(rank: int, world: int, mode: str, stage: int) -> Any:
    """Both modes belong to the process, so this needs one of its own."""
    if mode == "deterministic":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    elif mode == "anomaly":
        torch.autograd.set_detect_anomaly(True, check_nan=True)
    model = real_mlp()
    optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, bucket_bytes=64, group=gloo_group())
    for step in range(3):
        for micro in range(2):
            real_loss(model(draw(model, (2, 4), rank, step, micro, real=True))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norm, weights_of(model)


@pytest.mark.promise("K19")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["anomaly", "deterministic"])
def test_anomaly_detection_and_deterministic_algorithms_change_nothing(mode, stage):
    plain = ranks.run(2, train_in_mode, "plain", stage)
    for (norm, weights), (other_norm, other) in zip(ranks.run(2, train_in_mode, mode, stage), plain, strict=True):
        assert torch.equal(norm, other_norm)
        assert all(torch.equal(weights[name], weight) for name, weight in other.items())
