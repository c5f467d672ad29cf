"""G: what a graph may look like: shared, tied, unused, divergent, empty, odd outputs, odd modules, odd groups."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import inside, ranks
from tests.instruments import Ledger
from tests.oracle import reference
from tests.promises.trainings import (
    STAGES,
    gloo_group,
    loopback_traces,
    on_loopback,
    sgd,
    what_differs,
    what_differs_over_gloo,
)
from tests.traces import compare
from tests.zoo import CASES
from tests.zoo.branches import Branches, adamw
from tests.zoo.case import Case, choice, draw, filled, mlp, real_loss, real_mlp, real_numbers, whole_loss, whole_numbers
from tests.zoo.sharing import Tied
from zero import shard
from zero.errors import ZeroError


def real_branches(num: int) -> Any:
    return lambda: filled(Branches(num), real=True)


# G01 to G03: uses and forwards ------------------------------------------------------------------------------------------


class UsedOften(nn.Module):
    def __init__(self, times: int, kind: str) -> None:
        super().__init__()
        self.times, self.kind = times, kind
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(self.times):
            if self.kind == "none":
                x = torch.tanh(self.shared(x))
            else:
                x = checkpoint(lambda h: torch.tanh(self.shared(h)), x, use_reentrant=self.kind == "reentrant")
        return x


@pytest.mark.promise("G01", "K02")
@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("times", [2, 5])
def test_two_and_five_uses_with_each_kind_of_checkpointing(times, kind):
    """Three iterations, since the second is where a stale bucket of the first shows."""
    build = lambda: filled(UsedOften(times, kind), real=True)  # noqa: E731

    def script(model, optimizer, rank, world, step):
        loss = real_loss(model(draw(model, (3, 4), rank, step, real=True).requires_grad_()))
        loss.backward()
        yield "settle"
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert not differences_from_reference(Case("uses", build, script, sgd, steps=3), stages=(1, 2), worlds=(1, 3))


def differences_from_reference(case: Any, stages: Any = STAGES, worlds: Any = (1, 2, 3), bucket_bytes: int = 28) -> list[str]:
    found = []
    for stage, world in itertools.product(stages, worlds):
        ours = loopback_traces(case, world, stage=stage, dtype=None, bucket_bytes=bucket_bytes)
        try:
            compare(ours, reference(case, world), exact=False, state=True, name=f"{case.name} stage={stage} world={world}")
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.promise("G02")
def test_two_forwards_and_one_backward_of_their_sum():
    assert what_differs(["two_forwards_one_backward", "two_forwards_through_reentrant_checkpoint"]) == []


@pytest.mark.promise("G02")
@pytest.mark.parametrize("forwards", [2, 3])
def test_several_forwards_of_different_shapes_and_one_backward(forwards):
    def script(model, optimizer, rank, world, step):
        shapes = [(2, 4), (5, 4), (2, 3, 4)][:forwards]
        loss = sum(whole_loss(model(draw(model, shape, rank, step, n)), world, n) for n, shape in enumerate(shapes))
        loss.backward()
        yield "settle"
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert not differences_from_reference(Case("forwards", mlp, script, sgd, steps=2))


@pytest.mark.promise("G03")
@pytest.mark.parametrize(("stage", "local"), [(0, True), (1, True), (2, True), (2, False)])
def test_three_backwards_reduce_once_when_asked_and_each_time_otherwise(stage, local):
    def program(group, model):
        ledger = Ledger(group)
        declared = 3 if local and stage < 2 else None
        optimizer = shard(model, sgd(model), stage=stage, accumulation=declared, group=ledger)
        counts = []
        for step in range(2):
            losses = [whole_loss(model(draw(model, (2, 4), group.rank, step, k)), group.size, step) for k in range(3)]
            ledger.section = f"step {step}"
            for k, loss in enumerate(losses):
                if local and stage == 2 and k < 2:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(ledger.rounds(f"step {step}")))
        return counts

    for counts in on_loopback(2, mlp, program):
        assert counts == ([1, 1] if local else [3, 3])


# G04 to G06: tied -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("G04")
@pytest.mark.parametrize("stage", STAGES)
def test_a_tie_has_one_slot_one_state_and_one_term_in_the_norm_and_survives_save_and_load(stage):
    build = lambda: filled(Tied(), real=True)  # noqa: E731
    tokens = [whole_numbers((3, 2), "tokens of G04", rank, low=0, high=6).long() for rank in range(2)]

    def steps(model, optimizer, rank, number):
        norms = []
        for _ in range(number):
            real_loss(model(tokens[rank])).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def program(group, model):
        optimizer = shard(model, sgd(model, momentum=0.5), stage=stage, group=group)
        norms = steps(model, optimizer, group.rank, 3)
        assert model.head.weight is model.embedding.weight
        assert [name for name, _ in model.named_parameters()] == inside.names(optimizer)
        saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
        assert torch.equal(saved[0]["head.weight"], saved[0]["embedding.weight"])
        assert set(saved[1]["state"]) == {"embedding.weight", "middle.weight"}
        optimizer.close()
        again = shard(model, sgd(model, momentum=0.5), stage=stage, group=group)
        model.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        norms += steps(model, again, group.rank, 1)
        assert model.head.weight is model.embedding.weight
        return norms, [p.detach().clone() for p in model.parameters()]

    plain = build()
    optimizer = sgd(plain, momentum=0.5)
    norms = []
    for _ in range(4):
        (sum(real_loss(plain(part)) for part in tokens) / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        optimizer.step()
        optimizer.zero_grad()
    for our_norms, weights in on_loopback(2, build, program):
        assert torch.allclose(torch.stack(our_norms), torch.stack(norms), rtol=1e-6)
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(weights, plain.parameters(), strict=True))


@pytest.mark.promise("G05")
def test_a_parameter_in_two_groups_is_the_same_error_as_in_torch_and_nothing_is_sent():
    model = mlp()
    with pytest.raises(ValueError, match="more than one parameter group") as torchs:
        torch.optim.SGD([{"params": model[0].parameters()}, {"params": [model[0].weight]}], lr=0.1)

    def program(group, model):
        ledger = Ledger(group)
        twice = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
        twice.param_groups[1]["params"].append(model[0].weight)  # by hand, past torch's own check
        with pytest.raises(type(torchs.value), match=r"0\.weight"):
            shard(model, twice, stage=2, group=ledger)
        assert all(entry.is_message for entry in ledger.entries)  # they told each other, and sent no tensor
        del twice.param_groups[1]["params"][-1]
        optimizer = shard(model, twice, stage=2, group=ledger)
        with pytest.raises(type(torchs.value), match="more than one parameter group"):
            optimizer.add_param_group({"params": [model[0].weight]})
        return len(optimizer.param_groups)

    assert on_loopback(2, mlp, program) == [2, 2]


@pytest.mark.promise("G05")
def test_a_parameter_twice_in_one_group_is_refused_where_torch_warns():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = torch.optim.SGD([model[0].weight, model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"0\.weight"):
        shard(model, twice, stage=1)


def with_shared_data() -> nn.Module:
    model = nn.Module()
    model.one, model.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    model.other.data = model.one.data
    return model


def with_overlapping_views() -> nn.Module:
    model, memory = nn.Module(), torch.zeros(10)
    model.one = nn.Parameter(memory.as_strided((2, 3), (3, 1)))
    model.other = nn.Parameter(memory.as_strided((4,), (1,), 5))
    return model


def with_an_expanded_one() -> nn.Module:
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(4))
    model.other = nn.Parameter(torch.zeros(1, 3).expand(4, 3))
    return model


@pytest.mark.promise("G06")
@pytest.mark.parametrize("build", [with_shared_data, with_overlapping_views, with_an_expanded_one])
def test_parameters_that_share_memory_without_being_one_are_refused_by_name(build):
    model = build()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match="other"):
        shard(model, sgd(model), stage=2)
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.promise("G06")
def test_neighbours_in_one_storage_share_nothing_and_are_welcome():
    """Interleaved columns lie within each other's reach, and no element is common."""
    model, memory = nn.Module(), torch.zeros(12)
    model.one, model.other = nn.Parameter(memory[:5]), nn.Parameter(memory[5:])
    optimizer = shard(model, sgd(model, 1.0), stage=2)
    (model.one.sum() + 2 * model.other.sum()).backward()
    optimizer.step()
    assert (model.one == -1).all()
    assert (model.other == -2).all()


# G07 to G10: unused and divergent ---------------------------------------------------------------------------------------


@pytest.mark.promise("G07")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_branch_that_no_rank_uses_keeps_every_bit_of_itself_and_its_state(stage, world):
    """AdamW with decay: after warm steps both the momentum and the decay would move it."""

    def program(group, model):
        optimizer = shard(model, adamw(model), stage=stage, bucket_bytes=200, group=group)
        kept = None
        for step in range(6):
            which = (0, 1) if step < 3 else (0,)
            real_loss(model(draw(model, (3, 4), group.rank, step, real=True), which)).backward()
            optimizer.settle()
            is_none = [p.grad is None for p in model.branches[1].parameters()]
            assert is_none == [step >= 3] * 2
            optimizer.step()
            optimizer.zero_grad()
            weight = model.branches[1].weight
            state = {name: torch.as_tensor(value).clone() for name, value in optimizer.whole_state(weight).items()}
            now = {"weight": weight.detach().clone(), **state}
            if step >= 3:
                assert all(torch.equal(now[key], value) for key, value in kept.items())
            kept = now
        return kept

    for kept in on_loopback(world, real_branches(2), program):
        assert kept["step"].item() == 3
        assert kept["exp_avg"].abs().max() > 0


@pytest.mark.promise("G08", "G09", "G12")
def test_ranks_whose_graphs_differ_over_processes_neither_hang_nor_differ():
    """Within the wall limit of `ranks.run`, which counts a hang as a failure."""
    names = (
        "branch_chosen_by_rank_and_step",
        "branch_used_by_one_rank_only",
        "module_that_runs_never_once_or_thrice_by_rank",
        "stochastic_depth",
    )
    assert what_differs_over_gloo(names, world=3) == []


@pytest.mark.promise("G08", "G09")
@pytest.mark.parametrize("stage", STAGES)
def test_divergent_ranks_issue_the_same_collectives(stage):
    def program(group, model):
        ledger = Ledger(group)
        optimizer = shard(model, sgd(model, 0.05), stage=stage, bucket_bytes=60, group=ledger)
        for step in range(4):
            times = (0, 1, 3)[(group.rank + step) % 3]
            real_loss(model(draw(model, (2, 4), group.rank, step, real=True), (1, *([0] * times)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return ledger

    ledgers = on_loopback(3, real_branches(2), program)
    assert ledgers[0].wires() == ledgers[1].wires() == ledgers[2].wires()


def forgetful(group: Any, model: nn.Module, stage: int, how: str) -> list[Any]:
    """At step 1 rank 1 has nothing to send backward and does not say so; afterwards all go on."""
    optimizer = shard(model, sgd(model), stage=stage, group=group)
    fate: list[Any] = []
    for step in range(3):
        loss = whole_loss(model(draw(model, (2, 4), group.rank, step)), group.size, step)
        try:
            if not (step == 1 and group.rank == 1):
                loss.backward()
            if how == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
        except ZeroError as error:
            fate.append((type(error).__name__, str(error)))
        optimizer.zero_grad()
    return [fate, [p.detach().clone() for p in model.parameters()]]


def without_step_1(stage: int, world: int) -> list[torch.Tensor]:
    def program(group, model):
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        for step in (0, 2):
            whole_loss(model(draw(model, (2, 4), group.rank, step)), group.size, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return on_loopback(world, mlp, program)[0]


def assert_all_ranks_were_told(found: list[Any], stage: int, world: int) -> None:
    expected = without_step_1(stage, world)
    for fate, weights in found:
        assert len(fate) == 1
        kind, words = fate[0]
        assert kind == "RanksDiffer"
        assert "rank 1" in words
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected, strict=True))


@pytest.mark.promise("G10")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["step", "clip"])
def test_a_rank_that_forgets_to_say_it_has_nothing_is_named_on_all_ranks_and_all_go_on(stage, how):
    found = on_loopback(3, mlp, lambda group, model: forgetful(group, model, stage, how))
    assert_all_ranks_were_told(found, stage, 3)


def forgetful_process(rank: int, world: int, stage: int) -> list[Any]:
    return forgetful(gloo_group(time_limit_s=10.0), mlp(), stage, "step")


@pytest.mark.promise("G10")
def test_a_forgetful_rank_over_processes_is_an_error_within_seconds_and_no_hang():
    assert_all_ranks_were_told(ranks.run(3, forgetful_process, 2, timeout=30.0), 2, 3)


@pytest.mark.promise("G10")
@pytest.mark.parametrize("stage", STAGES)
def test_an_idle_rank_clips_by_the_same_norm_as_the_others(stage):
    """It had no backward, yet its gradients are the global ones, like everybody's."""

    def program(group, model):
        optimizer = shard(model, sgd(model, 0.5), stage=stage, group=group)
        norms = []
        for step in range(2):
            if group.rank == step:
                optimizer.no_contribution()
            else:
                real_loss(model(draw(model, (2, 4), group.rank, step, real=True))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, [p.detach().clone() for p in model.parameters()]

    plain = real_mlp()
    optimizer = sgd(plain, 0.5)
    norms = []
    for step in range(2):
        others = [rank for rank in range(3) if rank != step]
        (sum(real_loss(plain(draw(plain, (2, 4), rank, step, real=True))) for rank in others) / 3).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    found = on_loopback(3, real_mlp, program)
    for our_norms, weights in found:
        assert our_norms == found[0][0]
        assert our_norms == pytest.approx(norms, rel=1e-5)
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(weights, plain.parameters(), strict=True))


@pytest.mark.promise("G12")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in STAGES[:-1]), STAGES[-1]])
def test_stochastic_depth_with_twenty_seeds_equals_the_oracle(stage):
    for seed in range(20):

        def script(model, optimizer, rank, world, step, seed=seed):
            which = [index for index in range(4) if choice(2, "G12", seed, rank, step, index)]
            loss = real_loss(model(draw(model, (2, 4), rank, step, real=True), which))
            loss.backward()
            yield "settle"
            optimizer.step()
            optimizer.zero_grad()
            return loss

        case = Case(f"depth with seed {seed}", real_branches(4), script, lambda m: sgd(m, 0.1), steps=2)
        assert not differences_from_reference(case, stages=(stage,), worlds=(3,), bucket_bytes=80)


# G11: outputs -----------------------------------------------------------------------------------------------------------


class Anything(nn.Module):
    """Gives back whatever it is told to make of its hidden activations."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.used(x), self.unused(x))


class Bag:
    def __init__(self, used: torch.Tensor, rest: Any) -> None:
        self.used, self.rest = used, rest


class Named(tuple):
    __slots__ = ()


# By name: what the model makes of a used and an unused activation, and where in it the used one is.
OUTPUTS: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda used, unused: used, lambda out: out),
    "a tuple with None": (lambda used, unused: (used, None, unused), lambda out: out[0]),
    "nested lists": (lambda used, unused: [[used], [[unused], 3]], lambda out: out[0][0]),
    "a dict of dicts": (lambda used, unused: {"a": {"used": used}, "b": unused, "n": 5}, lambda out: out["a"]["used"]),
    "an object": (lambda used, unused: Bag(used, unused), lambda out: out.used),
    "a tuple of its own class": (lambda used, unused: Named((unused, used)), lambda out: out[1]),
    "a zero-dim tensor": (lambda used, unused: (used.sum(), unused.sum()), lambda out: out[0]),
    "integers beside it": (lambda used, unused: (unused.argmax(), used, True, "word"), lambda out: out[1]),
}


def shape_of(out: Any) -> Any:
    if isinstance(out, dict):
        return {key: shape_of(value) for key, value in out.items()}
    if isinstance(out, (list, tuple)):
        return type(out), [shape_of(value) for value in out]
    return type(out)


@pytest.mark.promise("G11")
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_structure_come_out_as_they_are_and_gradients_are_right(kind):
    make, used_of = OUTPUTS[kind]
    plain = filled(Anything(make), high=1)
    x = [whole_numbers((2, 4), "G11", rank) for rank in range(2)]
    used_of(plain(x[0])).sum().backward()
    used_of(plain(x[1])).sum().backward()

    def program(group, model):
        optimizer = shard(model, sgd(model), stage=2, group=group)
        out = model(x[group.rank])
        used_of(out).sum().backward()
        assert shape_of(out) == shape_of(plain(x[0]))
        assert type(out) is type(plain(x[0]))
        return [optimizer.whole_grad(p) for p in model.parameters()]

    for grads in on_loopback(2, lambda: filled(Anything(make), high=1), program):
        for grad, p in zip(grads, plain.parameters(), strict=True):
            assert (grad is None) == (p.grad is None)
            assert grad is None or torch.equal(grad, p.grad / 2)


# G13 to G17: sizes, groups, modules -------------------------------------------------------------------------------------


class WithEmpty(nn.Module):
    """Two real layers with an empty one first, in the middle or last; or the empty one alone."""

    def __init__(self, kind: str, position: str) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialising no elements warns
            empty = {"out": lambda: nn.Linear(8, 0), "in": lambda: nn.Linear(0, 4), "rows": lambda: nn.Embedding(0, 4)}[kind]()
        real = [] if position == "only" else [nn.Linear(4, 4), nn.Linear(4, 4)]
        real.insert({"first": 0, "middle": 1, "last": 2, "only": 0}[position], empty)
        self.layers = nn.ModuleList(real)
        self.empty = empty

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if layer is not self.empty else x
        width = {"Embedding": None}.get(type(self.empty).__name__, getattr(self.empty, "in_features", 0))
        nothing = self.empty(torch.zeros(0, dtype=torch.long) if width is None else x.new_zeros(2, width))
        return x.sum() + nothing.sum()


@pytest.mark.promise("G13")
@pytest.mark.parametrize("kind", ["out", "in", "rows"])
@pytest.mark.parametrize("position", ["first", "middle", "last", "only"])
def test_parameters_without_elements_keep_their_shape_and_round_trip_anywhere(kind, position):
    build = lambda: filled(WithEmpty(kind, position), real=True)  # noqa: E731
    shapes = [tuple(p.shape) for p in build().parameters()]

    def program(group, model, stage):
        optimizer = shard(model, sgd(model, 0.1, momentum=0.5), stage=stage, bucket_bytes=64, group=group)
        for step in range(3):
            model(real_numbers((2, 4), "G13", group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = model.state_dict(), optimizer.state_dict()
            model.load_state_dict({name: value.clone() for name, value in saved[0].items()})
            optimizer.load_state_dict(saved[1])
        return [p.detach().clone() for p in model.parameters()]

    for stage, world in ((0, 1), (1, 3), (2, 2)):
        plain = build()
        theirs = sgd(plain, 0.1, momentum=0.5)
        for step in range(3):
            (sum(plain(real_numbers((2, 4), "G13", rank, step)) for rank in range(world)) / world).backward()
            theirs.step()
            theirs.zero_grad()
        for weights in on_loopback(world, build, partial(program, stage=stage)):
            assert [tuple(weight.shape) for weight in weights] == shapes
            assert all(torch.allclose(mine, p, atol=1e-6) for mine, p in zip(weights, plain.parameters(), strict=True))


@pytest.mark.promise("G14")
def test_a_learnable_temperature_without_dimensions_trains_and_its_state_round_trips():
    assert what_differs("learnable_temperature", dtypes=("fp32", "bf16", "fp16"), worlds=(1, 2, 3, 4)) == []

    def program(group, model):
        optimizer = shard(model, torch.optim.Adam(model.parameters(), lr=0.1), stage=2, group=group)
        real_loss(model(draw(model, (3, 4), group.rank, 0, real=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()
        return saved["state"]["temperature"], again["state"]["temperature"]

    for saved, again in on_loopback(3, CASES["learnable_temperature"].build, program):
        assert saved["exp_avg"].shape == ()
        assert all(torch.equal(saved[key], again[key]) for key in saved)


@pytest.mark.promise("G15")
@pytest.mark.parametrize("stage", STAGES)
def test_groups_keep_number_order_and_rates_with_an_empty_one_among_them(stage):
    def program(group, model):
        groups = [{"params": [model[0].weight]}, {"params": []}, {"params": [model[2].weight, model[2].bias]}]
        names = ("decay", "empty", "lora")
        inner = torch.optim.SGD([{**g, "name": name} for g, name in zip(groups, names, strict=True)], lr=1.0)
        optimizer = shard(model, inner, stage=stage, group=group)
        rates = [lambda epoch: 0.5**epoch, lambda epoch: 1.0 + epoch, lambda epoch: 0.25**epoch]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        for step in range(3):
            whole_loss(model(draw(model, (2, 4), group.rank, step)), group.size, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return [(g["name"], g["lr"], len(g["params"])) for g in optimizer.param_groups]

    for groups in on_loopback(2, mlp, program):
        assert groups == [("decay", 0.5**3, 1), ("empty", 4.0, 0), ("lora", 0.25**3, 2)]


@pytest.mark.promise("G15")
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_model_and_one_without_parameters_step_and_change_nothing(stage):
    def program(group, model):
        model.requires_grad_(False)
        before = [p.clone() for p in model.parameters()]
        optimizer = shard(model, sgd(model), stage=stage, group=group)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), before, strict=True))
        empty = torch.optim.SGD([{"params": []}], lr=0.1)
        bare = nn.ReLU()
        sharded = shard(bare, empty, stage=stage, group=group)
        sharded.step()
        sharded.zero_grad()
        return len(sharded.param_groups), sharded.state_dict()["state"]

    assert on_loopback(2, mlp, program) == [(1, {})] * 2


@pytest.mark.promise("G16")
def test_modules_that_delegate_unknown_attributes_train_and_keep_their_namespace():
    names = [name for name, case in CASES.items() if "wrappers" in case.tags]
    assert what_differs(names) == []
    model = CASES[names[0]].build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = shard(model, CASES[names[0]].optimizer(model), stage=2)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


class Slotted(nn.Module):
    """Slots, a property that must not be asked, and parameters in a plain dict."""

    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self._parameters = dict(self._parameters)
        self.weight = nn.Parameter(torch.ones(3))
        self.extra = "mine"

    @property
    def forbidden(self):
        raise RuntimeError("nobody may ask for this")

    def __getattr__(self, name):
        if name.startswith(("zero", "_zero", "ds_")):
            raise RuntimeError(f"somebody looked for {name}")
        return super().__getattr__(name)

    def forward(self, x):
        return (x * self.weight).sum()


@pytest.mark.promise("G16")
def test_a_module_with_slots_and_a_plain_dict_of_parameters_is_left_as_it_is():
    model = Slotted()
    optimizer = shard(model, sgd(model, 1.0), stage=2)
    for _ in range(2):
        model(torch.ones(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.weight == -1).all()
    assert type(model._parameters) is dict
    assert model.extra == "mine"


def shuffled(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """Three groups that interleave the parameters in an order of the seed's."""
    params = list(model.parameters())
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(seed)).tolist()
    groups = [{"params": [params[index] for index in order[start::3]], "lr": 0.01 * (start + 1)} for start in range(3)]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-2)


@pytest.mark.promise("G17")
@pytest.mark.parametrize("stage", STAGES)
def test_shuffled_groups_save_at_three_ranks_and_load_at_two_by_name(stage):
    data = [real_numbers((6, 4), "G17", step) for step in range(6)]

    def steps(group, model, optimizer, numbers):
        for step in numbers:
            rows = data[step].chunk(group.size)[group.rank]
            real_loss(model(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def first(group, model):
        optimizer = shard(model, shuffled(model, 1), stage=stage, bucket_bytes=40, group=group)
        steps(group, model, optimizer, range(3))
        return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()

    saved = on_loopback(3, real_mlp, first)[0]

    def second(group, model):
        optimizer = shard(model, shuffled(model, 1), stage=stage, bucket_bytes=1000, group=group)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        steps(group, model, optimizer, range(3, 6))
        return [p.detach().clone() for p in model.parameters()]

    plain = real_mlp()
    theirs = shuffled(plain, 1)
    for step in range(6):
        real_loss(plain(data[step])).backward()
        theirs.step()
        theirs.zero_grad()
    for weights in on_loopback(2, real_mlp, second):
        assert all(torch.allclose(mine, p, atol=2e-6) for mine, p in zip(weights, plain.parameters(), strict=True))
