"""What is done to backward graphs, and what cannot be done together."""

import pytest
import torch
from torch import fx, nn

from zero import shard
from zero.graph.backend import OPERATOR, PASSES, Backward, Pass, check, find_gradients, hand_over


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


def test_gradients_are_handed_over_where_they_are_made_and_not_returned():
    model = nn.Linear(4, 3)
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    graph = graph_of((3, 4), (5,), (3,))
    backward = Backward(graph, [lambda: model.weight, lambda: None, lambda: model.bias])
    find_gradients(backward)
    assert set(backward.gradients) == {0, 2}
    hand_over(backward)
    assert sum(node.target is OPERATOR for node in graph.nodes) == 2
    assert [node is None for node in graph.output_node().args[0]] == [True, False, True]
    kinds = [node.target for node in graph.nodes if node.op == "call_function"]
    assert kinds == [torch.ones, OPERATOR, torch.ones, torch.ones, OPERATOR]
    optimizer.close()


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
