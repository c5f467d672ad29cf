"""What is done to backward graphs, and what cannot be done together."""

import pytest
import torch
from torch import fx, nn

import zero
from tests.promises.loops import same, weights
from zero import shard
from zero.graph.backend import OPERATOR, PASSES, Backward, Pass, check, find_gradients, hand_over, number_of


def graph_of(*shapes):
    """One that makes tensors of these shapes and returns them."""
    graph = fx.Graph()
    made = []
    for shape in shapes:
        node = graph.call_function(torch.ones, (shape,))
        node.meta["val"] = torch.ones(shape, device="meta")
        made.append(node)
    graph.output(tuple(made))
    return graph


def test_passes_that_lack_what_they_need_or_exclude_each_other_are_refused_before_anything_runs():
    first, second = PASSES
    check(PASSES)
    with pytest.raises(ValueError, match="Cannot run pass 0, hand_over: it needs gradients, which none before it provides"):
        check([second])
    with pytest.raises(ValueError, match="Cannot run pass 2, hand_over: it cannot follow what provides gradients handed over"):
        check([first, second, second])
    check([second], given=["gradients"])


@pytest.mark.parametrize(("most_held", "lists"), [(12, [[0], [2]]), (15, [[0, 2]])])
def test_gradients_are_handed_over_where_they_are_made_and_not_returned(most_held, lists, monkeypatch):
    """Small ones wait for each other."""
    monkeypatch.setattr("zero.graph.backend.MOST_HELD", most_held)
    model = nn.Linear(4, 3)
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    graph = graph_of((3, 4), (5,), (3,))
    backward = Backward(graph, [lambda: model.weight, lambda: None, lambda: model.bias])
    find_gradients(backward)
    assert set(backward.gradients) == {0, 2}
    hand_over(backward)
    numbers = {number_of(param): number for number, param in backward.gradients.items()}
    assert [[numbers[given] for given in node.args[1]] for node in graph.nodes if node.target is OPERATOR] == lists
    assert [node is None for node in graph.output_node().args[0]] == [True, False, True]
    kinds = [node.target for node in graph.nodes if node.op == "call_function"]
    first = [OPERATOR] if [0] in lists else []
    assert kinds == [torch.ones, *first, torch.ones, torch.ones, OPERATOR]
    optimizer.close()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_tensor_that_is_the_gradient_of_several_parameters_is_handed_over_for_each(backend):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.full((2, 2), float(number))) for number in range(4))

        def forward(self, x):
            first, second, third, fourth = self.parts
            return (x * (first + second) + (third + fourth.view(4).view(2, 2))).square()

    def train(compile_it):
        model = Sum()
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
        called = zero.compile(model, backend) if compile_it else model
        for step in range(3):
            called(torch.tensor([[1.0, 2.0], [3.0, 4.0 + step]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    assert same(train(True), train(False))


@pytest.mark.parametrize("shapes", [((3, 4),), ((3, 4), (4,)), ((3, 4), (3,), (3,))])
def test_where_outputs_do_not_fit_the_inputs_nothing_is_touched(shapes):
    model = nn.Linear(4, 3)
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    backward = Backward(graph_of(*shapes), [lambda: model.weight, lambda: model.bias])
    find_gradients(backward)
    assert not backward.gradients
    optimizer.close()


def test_a_parameter_that_nobody_shards_or_that_has_a_hook_keeps_its_gradient_in_the_outputs():
    model, stranger = nn.Linear(4, 3), nn.Parameter(torch.ones(2))
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    model.bias.register_hook(lambda grad: grad)
    backward = Backward(graph_of((3, 4), (3,), (2,)), [lambda: model.weight, lambda: model.bias, lambda: stranger])
    find_gradients(backward)
    assert set(backward.gradients) == {0}
    optimizer.close()


def test_a_pass_says_what_it_is():
    assert Pass(find_gradients).provides == frozenset()
