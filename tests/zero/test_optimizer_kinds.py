"""Which optimizers are known, which are refused, and those that have modes."""

import re

import pytest
import torch
from torch import nn

from tests import inside, programs, ranks
from tests.devices import needs_sim
from tests.loopback import run_ranks, solo
from tests.schedule_free import ScheduleFree
from zero import shard
from zero.optim.traits import known_kind

OPTIM = torch.optim


def model():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def weights(made):
    return torch.cat([parameter.detach().flatten().clone() for parameter in made.parameters()])


def trajectory(made, optimizer, modes):
    """The weights after each step, in `eval` mode and back in `train` mode. Every rank has the same batch, so that sums of
    gradients and their halves are exact."""
    found = []
    modes.train()
    for step in range(4):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).to(next(made.parameters()).dtype)
        made(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            modes.eval()
            found.append(weights(made))
            modes.train()
        found.append(weights(made))
    return found


@pytest.mark.parametrize(
    ("stage", "called_on"),
    [(0, "the sharded one"), (1, "the one that was sharded"), (2, "the sharded one"), (3, "the sharded one")],
)
def test_the_weights_of_each_mode_are_published_as_in_plain_torch(stage, called_on):
    def program(group):
        made = models[group.rank]
        inner = ScheduleFree(made.parameters())
        optimizer = shard(made, inner, stage=stage, group=group, elementwise=True, bucket_bytes=64)
        found = trajectory(made, optimizer, optimizer if called_on == "the sharded one" else inner)
        optimizer.close()
        return found

    plain = model()
    optimizer = ScheduleFree(plain.parameters())
    expected = trajectory(plain, optimizer, optimizer)
    assert not torch.equal(expected[1], expected[2])  # modes are other weights
    models = [model() for _ in range(2)]
    for found in run_ranks(2, program, 20.0):
        assert all(map(torch.equal, found, expected))


def test_modes_of_weights_in_bf16_are_those_of_their_masters():
    def program(group):
        made = models[group.rank]
        optimizer = shard(made, ScheduleFree(made.parameters()), stage=2, dtype="bfloat16", group=group, elementwise=True)
        optimizer.train()
        made(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        masters = {name: entry["z"] for name, entry in optimizer.state_dict()["state"].items()}
        return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}, masters

    models = [model() for _ in range(2)]
    (one, masters), (other, _) = run_ranks(2, program, 20.0)
    for name, value in one.items():
        assert torch.equal(value, other[name])
        # after one step x is z
        assert torch.equal(value.float(), masters[name].to(torch.bfloat16).float())


def train_on_a_device(rank, world):
    import accelerators
    import accelerators_sim as simulated

    simulated.bring_up()
    found = []
    with accelerators.using("sim"):
        for offload in (None, "cpu"):
            made = model().to("sim")
            options = {"stage": 2, "elementwise": True, "offload": offload, "bucket_bytes": 64}
            optimizer = shard(made, ScheduleFree(made.parameters()), **options)
            optimizer.train()
            made(torch.ones(2, 5, device="sim")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(made).cpu())
            optimizer.eval()
            found.append(weights(made).cpu())
            optimizer.close()
    return found


@needs_sim
def test_modes_of_masters_on_the_host_reach_the_weights_on_the_device():
    for here, in_eval, offloaded, offloaded_in_eval in ranks.run(2, train_on_a_device, apart="sim"):
        assert torch.equal(here, offloaded) and torch.equal(in_eval, offloaded_in_eval)


def test_an_edit_of_the_weights_is_not_lost_when_the_mode_changes():
    made = model()
    optimizer = shard(made, ScheduleFree(made.parameters()), stage=2, dtype="bfloat16", group=solo(), elementwise=True)
    with torch.no_grad():
        made[0].weight.fill_(0.5)
    optimizer.eval()
    optimizer.train()
    assert (made[0].weight == 0.5).all()


def test_a_graph_from_before_a_mode_changed_is_refused_as_in_plain_torch():
    made = model()
    optimizer = shard(made, ScheduleFree(made.parameters()), stage=2, group=solo(), elementwise=True)
    optimizer.train()
    loss = made(torch.ones(2, 5)).sum()
    optimizer.eval()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_without_modes_gets_none_and_a_closed_one_is_plain():
    made = model()
    optimizer = shard(made, OPTIM.SGD(made.parameters(), lr=0.1), stage=2, group=solo())
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
    optimizer.close()
    made = model()
    inner = ScheduleFree(made.parameters())
    optimizer = shard(made, inner, stage=2, group=solo(), elementwise=True)
    optimizer.close()
    inner.train()
    assert inner.param_groups[0]["train_mode"] is True


# subclasses ---------------------------------------------------------------------------------------------------------------


class Empty(OPTIM.Adam):
    pass


class WithDefaults(OPTIM.AdamW):
    """Says more, and does the same."""

    def __init__(self, params):
        super().__init__(params, lr=0.05, weight_decay=0.3)


class FurtherDown(Empty):
    def describe(self):
        return "a method that no step calls"


class OwnStep(OPTIM.Adam):
    def step(self, closure=None):
        return super().step(closure)


class OwnGroups(OPTIM.Adam):
    def _init_group(self, *arguments):
        return super()._init_group(*arguments)


@pytest.mark.parametrize(("kind", "known"), [(Empty, OPTIM.Adam), (WithDefaults, OPTIM.AdamW), (FurtherDown, OPTIM.Adam)])
@pytest.mark.parametrize("is_first", [True, False], ids=["torch wraps the step of the class", "its parent's is wrapped"])
def test_a_subclass_that_changes_nothing_is_served_as_its_parent(kind, known, is_first):
    kind = type(kind.__name__, (kind,), {}) if is_first else kind
    made, plain = model(), model()
    optimizer, reference = kind(made.parameters()), known(plain.parameters(), **(LIKE_IT if known is OPTIM.AdamW else {}))
    assert known_kind(optimizer) is known
    sharded = shard(made, optimizer, stage=2, group=solo(), kernels="torch")
    for _ in range(2):
        for one, stepping in ((made, sharded), (plain, reference)):
            one(torch.ones(2, 5)).square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    assert torch.equal(weights(made), weights(plain))


LIKE_IT = {"lr": 0.05, "weight_decay": 0.3}


@pytest.mark.parametrize("kind", [OwnStep, OwnGroups])
def test_a_subclass_that_overrides_what_a_step_does_is_not(kind):
    made = model()
    optimizer = kind(made.parameters())
    assert known_kind(optimizer) is None
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: it is not known to treat every element by itself"
    ):
        shard(made, optimizer, stage=2, group=solo())


# refused ------------------------------------------------------------------------------------------------------------------


class Adam8bit(OPTIM.SGD):
    """Called as those are whose state is quantised."""


class WithBits(OPTIM.SGD):
    """As bitsandbytes says it of an optimizer that has both."""

    def __init__(self, params, bits):
        super().__init__(params)
        self.args = type("Args", (), {"optim_bits": bits})()


@pytest.mark.parametrize("make", [Adam8bit, lambda params: WithBits(params, 8)], ids=["by its name", "by its setting"])
def test_an_optimizer_whose_state_is_quantised_in_blocks_has_whole_tensors_and_nothing_else(make):
    made = model()
    with pytest.raises(ValueError, match=r"Cannot shard \w+ element by element: its state is quantised in blocks"):
        shard(made, make(made.parameters()), stage=2, group=solo(), elementwise=True)
    shard(made, WithBits(made.parameters(), 32), stage=2, group=solo(), elementwise=True).close()
    optimizer = shard(made, make(made.parameters()), stage=2, group=solo())
    assert all(bucket.has_owners for bucket in inside.buckets(optimizer))
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"differentiable": True}, "Cannot shard Adam with differentiable=True: a sharded step is not recorded by autograd."),
        (
            {"capturable": True},
            "Cannot shard Adam on the host: group 0 has capturable=True, which steps on an accelerator alone.",
        ),
    ],
    ids=["differentiable", "capturable"],
)
def test_settings_that_no_sharded_step_on_the_host_can_have_are_refused_before_anything_changes(options, text):
    made = model()
    before = [parameter.data_ptr() for parameter in made.parameters()]
    with pytest.raises(ValueError, match=re.escape(text)):
        shard(made, OPTIM.Adam(made.parameters(), **options), stage=2, group=solo())
    assert [parameter.data_ptr() for parameter in made.parameters()] == before


def of_a_package(name, module):
    """What a package would have: a class of that name, which steps by itself."""
    body = {"__module__": module, "step": lambda self, closure=None: OPTIM.SGD.step(self, closure)}
    return type(name, (OPTIM.SGD,), body)


@pytest.mark.parametrize(
    ("name", "module", "is_known"),
    [
        ("Lion", "lion_pytorch.lion_pytorch", True),
        ("AdamWScheduleFree", "schedulefree.adamw_schedulefree", True),
        ("Lion", "lion_pytorch.foreach", True),
        ("Lion", "lion_pytorch.cautious_lion", False),  # it divides by a mean over the tensor
        ("Lion", "somebody.elses", False),
        ("AdamWScheduleFreeClosure", "schedulefree.adamw_schedulefree_closure", False),
    ],
)
def test_element_wise_optimizers_of_other_packages_are_known_by_where_they_are_from(name, module, is_known):
    made, kind = model(), of_a_package(name, module)
    if not is_known:
        with pytest.raises(ValueError, match=rf"{module}.{name}: it is not known"):
            shard(made, kind(made.parameters(), lr=0.1), stage=2, group=solo())
        return
    for options in ({}, {"whole_tensors": True}):  # said of what nothing is known of
        optimizer = shard(made, kind(made.parameters(), lr=0.1), stage=2, group=solo(), **options)
        assert not any(bucket.has_owners for bucket in inside.buckets(optimizer))
        optimizer.close()


class Shampoo(OPTIM.SGD):
    """By its name one that looks at whole tensors."""

    def step(self, closure=None):
        return super().step(closure)


class Careful(Shampoo):
    def __init__(self, params):
        super().__init__(params, lr=0.1)


class SharedOut(Careful):
    def step(self, closure=None):
        def share_out(param):
            torch.distributed.all_gather([torch.empty_like(param)], param)

        for group in self.param_groups:
            list(map(share_out, group["params"]))


class OverAll(Careful):
    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["max_grad_norm"] = 1.0

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)


class Broadcasts(Careful):
    """By a function of its own, whose name says nothing."""

    def broadcast(self):
        return self.broadcast


def test_what_is_known_by_name_is_known_of_classes_that_inherit():
    made = model()
    for kind in (Careful, Broadcasts):
        optimizer = shard(made, kind(made.parameters()), stage=2, group=solo())
        assert all(bucket.has_owners for bucket in inside.buckets(optimizer))
        optimizer.close()
        with pytest.raises(ValueError, match=rf"Cannot shard {kind.__name__} element by element: Shampoo looks at whole"):
            shard(made, kind(made.parameters()), stage=2, group=solo(), elementwise=True)
    with pytest.raises(ValueError, match="OverAll: it divides by the norm of all gradients"):
        shard(made, OverAll(made.parameters()), stage=2, group=solo(), whole_tensors=True)


def test_one_that_shares_its_work_out_itself_is_refused_where_there_are_shares():
    made = model()
    for options in ({}, {"whole_tensors": True}, {"elementwise": True}):
        with pytest.raises(ValueError, match=r"SharedOut: it calls all_gather itself, .* Use stage=0, or"):
            shard(made, SharedOut(made.parameters()), stage=1, group=solo(), **options)
    shard(made, SharedOut(made.parameters()), stage=0, group=solo(), whole_tensors=True).close()
    by_torch = type("ZeroRedundancyOptimizer", (SharedOut,), {"optim": torch.optim.AdamW(made.parameters())})
    with pytest.raises(ValueError, match=r"Pass AdamW\(model.parameters\(\), ...\), which it wraps, with stage=1"):
        shard(made, by_torch(made.parameters()), stage=1, group=solo())


WITHOUT_MUON = """
import torch
from torch import nn
vars(torch.optim).pop("Muon", None)
import zero
model = nn.Linear(4, 4)
optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.close()
try:
    zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Muon"}})
except ValueError as error:
    print(error)
"""


@pytest.mark.full
def test_a_torch_without_muon_trains_and_says_so_where_muon_is_wanted():
    told = programs.with_torch(WITHOUT_MUON)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Cannot make Muon: torch ")
