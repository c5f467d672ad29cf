"""Stage 3: unusual views of weights, and unusual ways to write to them, are those of plain PyTorch or refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

import zero
from tests.loopback import run_ranks

BUDGETS = pytest.mark.parametrize("gathered_bytes", [0, "all"])


class Complex(nn.Module):
    """Reads real parameters as complex ones, conjugated and negated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.pairs = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 2))
        self.more = nn.Parameter(torch.randn(3, 3, 2))

    def forward(self, x):
        h, c, matrix = self.layer(x), torch.view_as_complex(self.pairs), torch.view_as_complex(self.more)
        z = torch.complex(h, h * h)
        read = (z * c.conj()).abs().sum() + (z @ c).abs().sum() + (z @ matrix.mH @ matrix.adjoint()).abs().mean()
        read = read + (c.conj().imag * h).sum() + (c.conj().real * h).sum() + (torch._neg_view(self.layer.bias) * h).sum()
        return 0.01 * read


def trained(model, optimizer, rank=0, world=1, edit=None):
    for step in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))  # the same on all ranks, so that means are exact
        if edit is not None and step == 2:
            edit(model)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal_to_plain(build, edit=None, gathered_bytes=0, world=2, rtol=0.0):
    plain = build()
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01), edit=edit)
    expected = copy.deepcopy(plain).state_dict()

    def program(group):
        model = models[group.rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = zero.shard(model, inner, stage=3, group=group, gathered_bytes=gathered_bytes)
        trained(model, optimizer, edit=edit)
        optimizer.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    models = [build() for _ in range(world)]
    for found in run_ranks(world, program):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=0.1 * rtol)


@pytest.mark.promise("S01")
@BUDGETS
@pytest.mark.parametrize("world", [1, 2])
def test_conjugated_and_negated_views_train_as_in_plain_pytorch(world, gathered_bytes):
    equal_to_plain(Complex, None, gathered_bytes, world)


VIEWS = {
    "conj": lambda c: c.conj().clone(),
    "resolve_conj": lambda c: c.conj().resolve_conj() * 1,
    "imag": lambda c: c.conj().imag.clone(),
    "real": lambda c: c.conj().real.clone(),
    "negated": lambda c: torch._neg_view(c.imag) * 1,
    "adjoint": lambda c: c.reshape(3, 1).mH @ c.reshape(3, 1),
    "twice": lambda c: c.conj().conj().clone(),
}


@pytest.mark.parametrize("read", VIEWS.values(), ids=VIEWS)
def test_a_read_through_such_a_view_is_that_of_plain_pytorch(read):
    model = Complex()
    expected = read(torch.view_as_complex(model.pairs.detach().clone()))
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    c = torch.view_as_complex(model.pairs.detach())
    assert c.conj().is_conj() and torch._neg_view(c.imag).is_neg() and not c.is_conj()
    assert torch.equal(read(c).resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
    optimizer.close()


IN_PLACE = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "swapaxes_": lambda w: w.swapaxes_(0, 1),
    "swapdims_": lambda w: w.swapdims_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "squeeze_": lambda w: w.squeeze_(),
    "as_strided_": lambda w: w.as_strided_((2, 2), (1, 1)),
}


@pytest.mark.promise("S12")
@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operator_that_changes_a_shape_in_place_is_refused_by_name_and_changes_nothing(change):
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    refused = r"Cannot run aten\..* on weight: .* without the underscore, which returns a view"
    for view in (lambda: model.weight.data, lambda: model.weight.detach(), lambda: model.state_dict()["weight"]):
        with pytest.raises(RuntimeError, match=refused):
            change(view())
        assert torch.equal(view().clone(), before)
    optimizer.close()


def assigned(model):
    """Through the right inverse of the parametrization."""
    model[0].weight = torch.ones(3, 4)


def normed(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.promise("S03")
@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_value_that_is_assigned_to_a_parametrized_weight_trains_on(kind):
    def edit(model):
        if kind is parametrizations.weight_norm:
            assigned(model)
        else:
            model[0].weight = torch.linalg.qr(torch.arange(12.0).reshape(4, 3).sin())[0].T.contiguous()

    equal_to_plain(lambda: normed(kind), edit)


def set_to_ones(model):
    with torch.no_grad():
        model[2].weight.set_(torch.ones(2, 3))


def transposed(model):
    model[0].weight.data = model[0].weight.data.t()


def set_to_itself(model):
    with torch.no_grad():
        model[0].weight.set_(model[0].weight.t())


@pytest.mark.promise("S12")
def test_an_alias_cannot_be_set_to_other_memory():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    for alias in (model.weight.data, model.weight.detach()):
        with pytest.raises(RuntimeError, match=r"Cannot run aten.set_.* on weight"):
            alias.set_(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="Cannot run set_ on weight"):
        model.weight.set_(torch._neg_view(torch.ones(4, 4)))
    assert torch.equal(model.weight.detach().clone(), before)
    optimizer.close()


@pytest.mark.promise("S03")
@pytest.mark.parametrize(
    ("edit", "rtol"), [(set_to_ones, 0.0), (transposed, 1e-6), (set_to_itself, 1e-6)]
)  # the last two plain PyTorch lays out otherwise
def test_values_that_are_set_or_come_from_the_weight_itself_train_on(edit, rtol):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2))

    equal_to_plain(build, edit, rtol=rtol)


@pytest.mark.promise("S03")
def test_data_may_be_written_between_forward_and_backward():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            read = self.last(self.first(x).tanh())
            self.last.weight.data.clamp_(-0.2, 0.2)
            return read

    equal_to_plain(Clamped)


@pytest.mark.promise("S01")
def test_a_scripted_module_is_refused_and_one_that_is_scripted_later_trains():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="Cannot shard at stage 3: 1 is a ScriptModule, which holds parameters of its own"):
        zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    before = model[1].weight.clone()
    trained(model, optimizer)
    assert not torch.equal(model[1].weight, before)
    optimizer.close()


@pytest.mark.promise("S03")
def test_a_parameter_that_was_exchanged_for_another_tensor_is_refused_at_the_step():
    model = nn.Linear(4, 4)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    trained(model, optimizer)
    torch.utils.swap_tensors(model.bias, nn.Parameter(torch.ones(4)))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Cannot step: bias was exchanged for a tensor of its own, as by torch\."):
        optimizer.step()


def test_forward_derivatives_of_a_weight_are_refused_by_name():
    model = nn.Linear(4, 4)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="on weight: its weights are in shares"):
            forward_ad.make_dual(model.weight, torch.ones(4, 4))
        of_input = model(forward_ad.make_dual(torch.ones(1, 4), torch.ones(1, 4)))
        assert torch.equal(forward_ad.unpack_dual(of_input).tangent, torch.ones(1, 4) @ model.weight.detach().t())
    optimizer.close()


def test_what_gathered_cannot_take_back_is_named_and_the_others_are_taken_back():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(RuntimeError, match=r"Cannot keep what was assigned to weight within gathered\(\): it is \(3, 3\)"):
        with torch.no_grad(), optimizer.gathered(model):
            model.weight.data = torch.ones(3, 3)
            model.bias.fill_(7.0)
    assert torch.equal(model.weight.detach().clone(), before) and model.bias.tolist() == [7.0] * 4
    trained(model, optimizer)
    optimizer.close()
