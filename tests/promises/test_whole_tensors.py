"""W, and O11 and O12: optimizers that look at whole tensors."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero
from tests import inside, parity
from tests.devices import needs_sim
from tests.grid import APART, Point, can_be
from tests.loopback import run_ranks
from tests.promises.loops import TINY, differs, on_ranks, one_step, same, weights
from tests.promises.offloads import difference, on_sim
from tests.promises.test_offload_states import train
from tests.zoo import CASES
from tests.zoo.case import backward, draw, filled, finish, real_loss, real_mlp, whole_loss
from tests.zoo.whole_tensors import Apart, Orthogonal, apart, given, matrices_and_others, muon_and_adamw
from zero import shard
from zero.config.schema import Offload

OPTIM, HALF = torch.optim, Offload(ratio=0.5)
OURS = [name for name, case in CASES.items() if "whole" in case.tags]


def test_there_are_cases_of_whole_tensors():
    assert len(OURS) == 4


# W01, O11: equal to plain PyTorch ---------------------------------------------------------------------------------------


def points(full):
    every = itertools.product((1, 2, 3, 4), OURS, (0, 1, 2, 3), ("fp32", "bf16", "fp16"), ("tiny", "huge"), ("cpu", APART))
    found = [Point(stage, world, dtype, bucket, "plain", at, case) for world, case, stage, dtype, bucket, at in every]
    found = [point for point in found if can_be(point)]
    return found if full else found[::59]


@pytest.mark.promise("O11")
@pytest.mark.promise("W01")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_optimizers_of_whole_tensors_equal_plain_pytorch_on_the_joint_batch(full):
    some = points(full)
    assert {point.world for point in some} == {1, 2, 3, 4} and {point.stage for point in some} == {0, 1, 2, 3}
    assert parity.run(some, loopback=True) == {}


@pytest.mark.full
@pytest.mark.promise("W01")
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_they_do_so_with_all_or_half_of_what_is_sharded_on_the_host(full):
    every = itertools.product(OURS, (2, 3, 1), (1, 2, 3), ("fp32", "bf16", "fp16"), ("half", "all"), ("tiny", "huge"))
    some = [Point(stage, world, dtype, bucket, "plain", "sim", case, home) for case, world, stage, dtype, home, bucket in every]
    assert parity.run(some if full else some[::61]) == {}


@pytest.mark.promise("W01")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_declared_accumulation_and_clipping_of_the_configuration_equal_plain_pytorch(stage):
    case = CASES["whole_tensors_of_an_unknown_optimizer_clipped"]

    def script(model, optimizer, rank, world, step):
        for micro in range(3):
            backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, micro, real=True))))
        yield "settle"
        if not hasattr(optimizer, "sharding"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        finish(optimizer)

    own = replace(case, script=script, name="declared")
    assert differs(own, 2, stage=stage, accumulation=3, clip=0.1, whole_tensors=True, bucket_bytes=TINY) is None
    assert differs(own, 2, dtype="bf16", stage=stage, accumulation=3, clip=0.1, whole_tensors=True) is None


# W02: one owner ---------------------------------------------------------------------------------------------------------


class Counting(Orthogonal):
    """Notes what it was given."""

    def step(self, closure=None):
        self.seen = [(p.shape, p.stride()) for group in self.param_groups for p in group["params"]]
        super().step(closure)


@pytest.mark.promise("W02")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_tensor_is_updated_by_one_rank_which_sees_it_in_its_own_shape_and_memory_format(stage):
    def program(model, optimizer, group):
        loss = real_loss(model(draw(model, (3, 4), group.rank, 0, real=True)))
        backward(optimizer, loss)
        finish(optimizer)
        return optimizer.inner.seen

    found = on_ranks(3, program, apart, lambda model: Counting(model.parameters()), stage=stage, whole_tensors=True)
    plain = Apart()
    used = [p for name, p in plain.named_parameters() if not name.startswith(("frozen", "unused"))]
    assert sorted(itertools.chain(*found)) == sorted((p.shape, p.stride()) for p in used)


def test_more_ranks_than_tensors_and_tensors_without_elements_train():
    def build():
        model = nn.Linear(4, 3)
        model.empty = nn.Parameter(torch.empty(0, 4))
        with torch.no_grad():
            model.weight.copy_(torch.arange(12.0).view(3, 4) / 12)
            model.bias.zero_()
        return model

    def program(model, optimizer, group):
        backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 0, real=True)) + model.empty.sum()))
        finish(optimizer)
        return weights(model)

    one, *others = on_ranks(4, program, build, lambda model: Orthogonal(model.parameters()), whole_tensors=True)
    [plain] = on_ranks(1, program, build, lambda model: Orthogonal(model.parameters()), whole_tensors=True)
    assert all(same(one, other) for other in [*others, plain])
    assert not torch.equal(one["weight"], weights(build())["weight"])


# resume -----------------------------------------------------------------------------------------------------------------


def train_some(model, optimizer, steps):
    """Every rank has the same batch, so that all numbers of ranks train alike, to the bit."""
    for step in steps:
        loss = whole_loss(model(draw(model, (3, 4), 0, step)), 1, step)
        backward(optimizer, loss)
        finish(optimizer)


MAKES = {
    "muon and adamw": lambda model: given(muon_and_adamw(model)),
    "adafactor": lambda model: OPTIM.Adafactor(model.parameters(), lr=0.05),
    "a norm beside its moment": lambda model: Orthogonal(model.parameters()),
}


@pytest.mark.promise("O11")
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((4, 3), (1, 2)), ((1, 1), (2, 3))])
def test_a_checkpoint_goes_on_at_another_number_of_ranks_and_another_stage(tmp_path, name, before, after):
    options = {"whole_tensors": True}

    def first(model, optimizer, group):
        train_some(model, optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")
        return optimizer.state_dict()

    def second(model, optimizer, group):
        zero.load(tmp_path, optimizer)
        loaded = optimizer.state_dict()
        train_some(model, optimizer, range(2, 4))
        return loaded, weights(model), optimizer.state_dict()["state"]

    def straight(model, optimizer, group):
        train_some(model, optimizer, range(4))
        return weights(model), optimizer.state_dict()["state"]

    saved = on_ranks(before[0], first, apart, MAKES[name], stage=before[1], **options)[0]
    found = on_ranks(after[0], second, apart, MAKES[name], stage=after[1], **options)
    [(expected, state)] = on_ranks(1, straight, apart, MAKES[name], stage=0, **options)
    for loaded, now, state_now in found:
        assert loaded["state"].keys() == saved["state"].keys() != set()
        for one, entries in saved["state"].items():
            assert same(entries, loaded["state"][one])
        assert same(now, expected)
        assert all(same(entries, state_now[one]) for one, entries in state.items())


def adamw(whole):
    return lambda model: OPTIM.AdamW([{"params": list(model.parameters()), "whole": whole}], lr=0.02, eps=1e-2)


@pytest.mark.parametrize("way", ["a checkpoint", "a state_dict"])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_state_goes_from_whole_tensors_to_shares_of_elements_and_back(tmp_path, before, after, way):
    def first(model, optimizer, group):
        train_some(model, optimizer, range(2))
        zero.save(tmp_path, optimizer, "there")
        return optimizer.state_dict(), weights(model)

    def second(model, optimizer, group):
        if way == "a checkpoint":
            zero.load(tmp_path, optimizer)
        else:
            model.load_state_dict(trained)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["whole"] = after
        train_some(model, optimizer, range(2, 4))
        return weights(model)

    state, trained = on_ranks(2, first, apart, adamw(before))[0]
    found = on_ranks(4, second, apart, adamw(after), stage=1)
    [expected] = on_ranks(1, lambda model, optimizer, _: (train_some(model, optimizer, range(4)), weights(model))[1],
                          apart, adamw(False), stage=0)  # fmt: skip
    assert all(same(now, expected) for now in found)


# O12, W03: states of eight bits -----------------------------------------------------------------------------------------

BLOCK = 8


class Momentum8bit(OPTIM.Optimizer):
    """A momentum in whole numbers up to 127, with a scale for each block of a tensor's elements."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            number = -(-p.numel() // BLOCK)
            codes = state.setdefault("codes", torch.zeros(p.shape, dtype=torch.int8))
            scales = state.setdefault("scales", torch.zeros(number))
            blocks = torch.zeros(number * BLOCK)
            blocks[: p.numel()] = codes.reshape(-1).float() * scales.repeat_interleave(BLOCK)[: p.numel()]
            blocks[: p.numel()].mul_(0.9).add_(p.grad.reshape(-1))
            scales.copy_(blocks.view(number, BLOCK).abs().amax(1) / 127)
            rounded = (blocks.view(number, BLOCK) / scales.clamp(min=1e-12)[:, None]).round().view(-1)[: p.numel()]
            codes.copy_(rounded.view(p.shape))
            p.sub_(blocks[: p.numel()].view(p.shape), alpha=self.param_groups[0]["lr"])


@pytest.mark.promise("O12")
@pytest.mark.promise("W03")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_are_quantised_in_blocks_do_not_depend_on_the_number_of_ranks(stage, tmp_path):
    def program(model, optimizer, group):
        train_some(model, optimizer, range(3))
        state = optimizer.state_dict()["state"]
        zero.save(tmp_path / f"{group.size}", optimizer, "there")
        return weights(model), state

    def resumed(model, optimizer, group):
        zero.load(tmp_path / "2", optimizer)
        train_some(model, optimizer, range(3, 5))
        return weights(model), optimizer.state_dict()["state"]

    def make(model):
        return Momentum8bit(model.parameters())

    plain = apart()
    optimizer = make(plain)
    for step in range(5):
        if step == 3:
            early = weights(plain)
        whole_loss(plain(draw(plain, (3, 4), 0, step)), 1, step).backward()
        finish(optimizer)
    for world in (1, 2, 4):
        for found, state in on_ranks(world, program, apart, make, stage=stage, bucket_bytes=TINY):
            assert same(found, early) and state["tall.weight"]["codes"].dtype == torch.int8
            assert state["tall.weight"]["scales"].shape == (3,)
    for found, state in on_ranks(4, resumed, apart, make, stage=stage):
        assert same(found, weights(plain))
        for name, p in plain.named_parameters():
            assert p not in optimizer.state or same(optimizer.state[p], state[name])


class Coded(torch.Tensor):
    """A tensor whose bits are not what its elements show, as states of few bits may be."""


class OfCodedState(Orthogonal):
    def _update(self, p, group):
        self.state[p].setdefault("codes", torch.zeros_like(p).as_subclass(Coded))
        return p.grad


@pytest.mark.promise("O12")
def test_a_state_of_tensors_of_another_class_trains_and_is_refused_where_it_is_to_be_saved(tmp_path):
    def program(model, optimizer, group):
        train_some(model, optimizer, range(2))
        with pytest.raises(zero.ZeroError, match=r"Cannot gather codes of "):
            optimizer.state_dict()
        with pytest.raises((ValueError, zero.ZeroError), match=r"Cannot save state codes of .* cannot be stored"):
            zero.save(tmp_path, optimizer, "there")
        train_some(model, optimizer, range(2, 3))
        return weights(model)

    found = on_ranks(2, program, apart, lambda model: OfCodedState(model.parameters()), whole_tensors=True)
    plain = apart()
    optimizer = OfCodedState(plain.parameters())
    for step in range(3):
        whole_loss(plain(draw(plain, (3, 4), 0, step)), 1, step).backward()
        finish(optimizer)
    assert all(same(one, weights(plain)) for one in found)


# several optimizers -----------------------------------------------------------------------------------------------------


def test_each_of_several_optimizers_has_its_hooks_and_its_schedule():
    model, seen = real_mlp(), []
    matrices, others = matrices_and_others(model)
    muon, adam = OPTIM.Muon(matrices, lr=0.1), OPTIM.AdamW(others, lr=0.1)
    early = LambdaLR(muon, lambda step: 0.5**step)
    muon.register_step_pre_hook(lambda which, *_: seen.append(("before", which)))
    optimizer = shard(model, [muon, adam], stage=2)
    late = LambdaLR(adam, lambda step: 0.1**step)
    adam.register_step_post_hook(lambda which, *_: seen.append(("after", which)))
    for step in range(2):
        one_step(model, optimizer, step=step)
        early.step()
        late.step()
    assert seen == [("before", muon), ("after", adam)] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, pytest.approx(0.001)]
    both = LambdaLR(optimizer, lambda step: 2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2] and both.get_last_lr() == [0.2, 0.2]
    optimizer.close()


def two(model):
    matrices, others = matrices_and_others(model)
    return OPTIM.Muon(matrices), OPTIM.AdamW(others)


def moded(model):
    matrices, others = matrices_and_others(model)
    return OPTIM.Muon(matrices), type("Moded", (OPTIM.AdamW,), {"train": lambda self: None})(others)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model: [two(model)[0], 3], TypeError, "Cannot shard a list with a int in it"),
        (lambda model: [two(model)[0], two(model)[0]], ValueError, "more than one parameter group"),
        (moded, ValueError, "Cannot shard Moded beside others: it has modes"),
        (lambda model: [*two(model), OPTIM.LBFGS([nn.Parameter(torch.zeros(1))])], ValueError, "Cannot shard LBFGS"),
    ],
)
def test_a_list_that_cannot_be_sharded_is_refused_and_changes_nothing(make, error, message):
    model = real_mlp()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        shard(model, make(model), stage=2)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_what_is_done_to_one_of_several_optimizers_and_would_be_without_effect_is_refused():
    model = real_mlp()
    muon, adam = two(model)
    optimizer = shard(model, [muon, adam], stage=2)
    one_step(model, optimizer)
    with pytest.raises(ValueError, match=r"several optimizers: its .optimizer. is none"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="Cannot shard"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))], "optimizer": adam})
    with pytest.raises(ValueError, match="Cannot add this group: a parameter of it is in a group already"):
        optimizer.add_param_group({"params": [model[0].weight], "optimizer": adam})
    one_step(model, optimizer, step=1)  # all of it is as it was
    adam.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 1, real=True))))
    with pytest.raises(ValueError, match="Cannot step: the AdamW that was sharded has got other state or other groups"):
        optimizer.step()
    optimizer.close()


def test_a_group_of_a_list_is_added_to_the_optimizer_that_it_names():
    def build():
        model = real_mlp()
        more = {"matrix": nn.Parameter(torch.eye(3)), "vector": nn.Parameter(torch.ones(3))}
        for name, param in more.items():
            object.__setattr__(model, name, param)
        return model, more

    def forward(model, more, rank, step):
        return real_loss(model(draw(model, (3, 4), rank, step, real=True)) @ more["matrix"] + more["vector"])

    def add(optimizer, muon, adam, more):
        for group, to in (({"params": [more["matrix"]], "lr": 0.3}, muon), ({"params": [more["vector"]]}, adam)):
            if optimizer is None:
                to.add_param_group(group)
            else:
                optimizer.add_param_group({**group, "optimizer": to})

    def one(group):
        model, more = built[group.rank]
        muon, adam = two(model)
        optimizer = shard(model, [muon, adam], stage=2, group=group)
        one_step(model, optimizer)
        add(optimizer, muon, adam, more)
        for step in range(1, 3):
            backward(optimizer, forward(model, more, 0, step))
            finish(optimizer)
        return weights(model), {name: param.detach().clone() for name, param in more.items()}

    plain, extra = build()
    optimizers = two(plain)
    for step in range(3):
        if step == 1:
            add(None, *optimizers, extra)
        loss = forward(plain, extra, 0, step) if step else real_loss(plain(draw(plain, (3, 4), 0, 0, real=True)))
        loss.backward()
        for optimizer in optimizers:
            finish(optimizer)
    built = [build() for _ in range(2)]
    for found, more in run_ranks(2, one, 20.0):
        assert same(found, weights(plain))
        assert all(torch.equal(more[name], extra[name]) for name in more)


def test_a_group_that_does_not_say_what_an_unknown_optimizer_is_is_refused_also_when_it_comes_later():
    model = real_mlp()
    matrices, others = matrices_and_others(model)
    groups = [{"params": matrices, "whole": True}, {"params": others, "whole": False}]
    optimizer = shard(model, Orthogonal(groups), stage=2)
    with pytest.raises(ValueError, match="Orthogonal: it is not known"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "whole": True})
    optimizer.close()


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_whole_tensors_step_as_their_optimizer_has_it_and_with_no_other_kernel(kernels):
    model = real_mlp()
    with pytest.raises(ValueError, match=rf"Cannot use kernels='{kernels}': a group says that its tensors are whole"):
        shard(model, adamw(True)(model), stage=2, kernels=kernels)


def test_several_optimizers_that_stepped_before_go_on_with_their_state():
    plain, model = real_mlp(), real_mlp()
    pairs = [two(plain), two(model)]
    for one, optimizers in zip((plain, model), pairs, strict=True):
        real_loss(one(draw(one, (3, 4), 0, 0, real=True))).backward()
        for optimizer in optimizers:
            finish(optimizer)
    sharded = shard(model, list(pairs[1]), stage=2)
    real_loss(plain(draw(plain, (3, 4), 0, 1, real=True))).backward()
    backward(sharded, real_loss(model(draw(model, (3, 4), 0, 1, real=True))))
    for optimizer in (*pairs[0], sharded):
        finish(optimizer)
    assert same(weights(plain), weights(model))
    sharded.close()


def test_a_parameter_trained_later_gets_an_owner_and_new_groups_of_whole_tensors_too():
    def build():
        model = real_mlp()
        model[0].weight.requires_grad_(False)
        return model

    def program(model, optimizer, group):
        one_step(model, optimizer, rank=group.rank)
        model[0].weight.requires_grad_(True)
        one_step(model, optimizer, rank=group.rank, step=1)
        more = nn.Parameter(torch.ones(3, 3))
        object.__setattr__(model, "more", more)
        optimizer.add_param_group({"params": [more]})
        backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, 2, real=True)) @ more))
        finish(optimizer)
        layout = inside.layout(optimizer)
        return [layout.owner(param) for param in range(5)], weights(model), more.detach().clone()

    ours = on_ranks(2, program, build, lambda model: Orthogonal(model.parameters()), whole_tensors=True)
    [plain] = on_ranks(1, program, build, lambda model: Orthogonal(model.parameters()), whole_tensors=True, reduce="sum")
    assert ours[0][0] == ours[1][0] and set(ours[0][0]) == {0, 1}
    assert same(ours[0][1], ours[1][1]) and torch.equal(ours[0][2], ours[1][2])
    assert plain[0] == [0] * 5


def test_verify_proves_which_of_the_two_an_unknown_optimizer_is():
    model = real_mlp()
    batches = [draw(model, (3, 4), 0, step, real=True) for step in range(2)]

    def found(**options):
        def one(group):
            inner = Orthogonal(models[group.rank].parameters())
            return zero.verify(models[group.rank], batches, lambda m, b: real_loss(m(b)), inner,
                               zero.ZeroConfig(stage=2, **options), group=group)  # fmt: skip

        models = [real_mlp(), real_mlp()]
        return run_ranks(2, one, 20.0)[0]

    assert found(whole_tensors=True).equal
    assert found(elementwise=True).first.what == "weight"


@pytest.mark.parametrize("made", [True, False], ids=["a list", "a function that makes one"])
def test_verify_tries_several_optimizers_and_changes_none(made):
    def one(group):
        model = models[group.rank]
        before, optimizers = weights(model), list(two(model))
        batches = [draw(model, (3, 4), group.rank, step, real=True) for step in range(3)]
        given = optimizers if made else lambda params: list(two(nn.ParameterList(params)))
        found = zero.verify(model, batches, lambda m, b: real_loss(m(b)), given, zero.ZeroConfig(stage=2), group=group)
        assert same(before, weights(model)) and not any(optimizer.state for optimizer in optimizers)
        return found

    models = [real_mlp(), real_mlp()]
    for found in run_ranks(2, one, 20.0):
        assert found.equal and found.num_steps == 3


def test_verify_allows_for_what_muon_rounds_on_its_way_and_for_nothing_else():
    """The mean of three ranks is rounded otherwise here and there, and Newton-Schulz in bfloat16 shows the last bit."""
    shapes = [(64, 96), (96, 96), (96, 32)]

    def layers():
        return filled(nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)), real=True)

    def found(kind):
        models = [layers() for _ in range(3)]

        def one(group):
            model = models[group.rank]
            batches = [draw(model, (8, 64), group.rank, step, real=True) for step in range(3)]
            inner = kind(model.parameters(), lr=0.02)
            return zero.verify(model, batches, lambda m, b: real_loss(m(b)), inner, zero.ZeroConfig(stage=2), group=group)

        return run_ranks(3, one, 20.0)[0]

    assert found(OPTIM.Muon).equal
    assert "of what Muon moved 0.05" in str(found(OPTIM.Muon)) and "Muon" not in str(found(OPTIM.AdamW))


def muon_and_adamw_as_a_list(model):
    return given(muon_and_adamw(model))


@pytest.mark.full
@needs_sim
@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_whole_tensors_leave_the_device_and_come_back_with_the_same_bits(stage):
    points = [{"stage": stage, "dtype": "bfloat16", "offload": home, "make": muon_and_adamw_as_a_list} for home in (None, HALF)]
    expected = on_sim(2, partial(train, include=None, move=False), points)
    for include in (None, ["masters"], ["moments", "gradients"]):
        assert difference(on_sim(2, partial(train, include=include, move=True), points), expected) is None
