"""Gradients handed over inside the compiled backward give what the ordinary way gives, and nothing outlives its use."""

from __future__ import annotations

import math
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero
from tests import ranks
from tests.loopback import run_ranks
from tests.promises.loops import same
from tests.promises.trainings import gloo_group
from tests.zero.graph.models import STEPS, WIDTH, adamw, batch, build, compiled, train
from zero import shard
from zero.graph import backend, torch_private
from zero.memory.leaves import local_of
from zero.window.window import Window


def backward(model, step=0):
    model(batch("mlp", 0, step)).square().mean().backward()


def twins(**options):
    """A model that is compiled, and one that is not, with their optimizers."""
    both = []
    for compile_it in (True, False):
        model = build("mlp")
        optimizer = shard(model, adamw(model), **{"stage": 2, "bucket_bytes": 256, **options})
        both.append((zero.compile(model, "aot_eager") if compile_it else model, optimizer))
    return both


def are_equal(both):
    (one, _), (other, _) = both
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_windows_that_are_read_skipped_and_not_synchronised_are_those_of_the_eager_model(offload):
    both = twins(stage=1, offload=offload)
    norms = []
    for model, optimizer in both:
        norms.append([])
        for step in range(3):
            with optimizer.no_sync():
                backward(model, 3 * step)
            backward(model, 3 * step + 1)
            norms[-1].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            backward(model, 3 * step + 2)
            norms[-1].append(model.layers[0].weight.grad.norm())
            assert torch.isfinite(optimizer.whole_grad(model.layers[2].bias)).all()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    assert norms[0] == norms[1]
    assert are_equal(both)


def test_models_of_other_classes_count_neither_as_calls_of_each_other_nor_as_those_of_the_trial(monkeypatch):
    """Torch compiles one code for few sizes only, and from the second on for sizes that change."""
    backend._loses_gradients.cache_clear()
    assert not backend._loses_gradients("aot_eager")
    given, compiles = [], backend.HandingOver.__call__

    def noted(compiler, graph, inputs, mode=None):
        given.append(inputs)
        return compiles(compiler, graph, inputs, mode)

    monkeypatch.setattr(backend.HandingOver, "__call__", noted)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(3):
            kind = type(f"Model{number}", (nn.Sequential,), {})
            model = zero.compile(kind(nn.Linear(2 + number, 3)), "aot_eager")
            model(torch.ones(3 + number, 2 + number)).sum().backward()
    assert len(given) == 3 and all(isinstance(each, torch.Tensor) for inputs in given for each in inputs)


def test_a_weight_of_zero_drops_even_a_nan():
    both = twins()
    for one, its in both:
        its.weight(0.0)
        (one(batch("mlp", 0, 0)).square().mean() * float("nan")).backward()
        its.weight(2.0)
        backward(one, 1)
        its.step()
    assert are_equal(both)
    assert all(torch.isfinite(param).all() for param in both[0][0].parameters())


# hooks, gradients of the user's own, and other ways to ask for gradients ------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_the_users_sees_the_gradient_whenever_it_was_registered(when, kind):
    both, seen = twins(), []
    for model, optimizer in both:
        if when == "after":
            backward(model)
            optimizer.zero_grad()
        weight, own = model.layers[0].weight, []
        hook = (lambda grad: grad * 2) if kind == "register_hook" else (lambda param, own=own: own.append(param.grad.clone()))
        getattr(weight, kind)(hook)
        backward(model, 1)
        optimizer.step()
        seen.append(own)
    assert are_equal(both)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*seen, strict=True))


@pytest.mark.parametrize("kind", ["register_prehook", "register_hook"])
def test_a_hook_of_a_parameters_node_sees_the_gradient(kind):
    both, seen = twins(), []
    for model, optimizer in both:
        backward(model)
        node = get_gradient_edge(model.layers[0].weight).node
        if kind == "register_prehook":
            handle = node.register_prehook(lambda grads: (grads[0] * 2,))
        else:
            handle = node.register_hook(lambda _, grads: seen.append(grads[0].clone()))
        backward(model, 1)
        handle.remove()
        backward(model, 2)
        optimizer.step()
    assert are_equal(both)
    assert kind == "register_prehook" or torch.equal(*seen)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient(stage):
    both = twins(stage=stage)
    for model, optimizer in both:
        frozen = (model.layers[0].weight, model.layers[4].bias)
        loss = model(batch("mlp", 0, 0)).square().mean()
        for param in frozen:
            param.requires_grad_(False)
        loss.backward()
        assert all((param.grad is None) == any(param is each for each in frozen) for param in model.parameters())
        for param in frozen:
            param.requires_grad_(True)
        optimizer.step()
        backward(model, 1)
        optimizer.step()
    assert are_equal(both)


@pytest.mark.parametrize("kind", ["register_hook", "of its node"])
def test_a_hook_that_comes_between_forward_and_backward_is_refused(kind):
    (model, optimizer), _ = twins()
    backward(model)
    optimizer.step()
    loss = model(batch("mlp", 0, 1)).square().mean()
    weight = model.layers[0].weight
    if kind == "register_hook":
        weight.register_hook(lambda grad: grad)
    else:
        get_gradient_edge(weight).node.register_prehook(lambda grads: grads)
    with pytest.raises(RuntimeError, match="registered after the forward"):
        loss.backward()


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("set_to", [torch.ones_like, lambda param: None], ids=["ones", "none"])
def test_a_gradient_that_the_user_has_set_is_kept_whichever_it_is(set_to, between):
    """Before the first backward of a window, or between two of them."""
    both = twins()
    for model, optimizer in both:
        for step, param in enumerate(model.parameters()):
            if between:
                backward(model, step)
            param.grad = set_to(param)
            backward(model, step + 1)
            optimizer.step()
            optimizer.zero_grad()
    assert are_equal(both)


def called_twice(models, group, stage, compile_it):
    model = models[group.rank]
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, bucket_bytes=256, group=group)
    if compile_it:
        zero.compile(model, "aot_eager")
    for step in range(3):
        x = batch("mlp", group.rank, step).double()
        model(torch.cat([model(x), x[:, 3:]], 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_a_graph_that_is_called_twice_are_added_up(world, stage):
    """Each call hands its own over: the second comes for a parameter that has one already, in the same backward."""
    compiled, eager = (
        # Built before, as threads have one generator of random numbers.
        run_ranks(world, partial(called_twice, [build("mlp").double() for _ in range(world)], stage=stage, compile_it=each))
        for each in (True, False)
    )
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [1, 2])
def test_what_the_user_clears_after_a_backward_that_broke_off_is_gone_though_the_next_one_begins_elsewhere(world):
    def program(group):
        model = nn.Linear(2, 2)
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2, group=group)
        window, weight, bias = optimizer.sharding.window, (0, torch.ones(2, 2)), (1, torch.ones(2))

        class Lends(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, lists, breaks):
                ctx.given = lists, breaks
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                lists, breaks = ctx.given
                for lent in lists:
                    window.hand_over(lent)
                if breaks:
                    raise KeyError("broken off")
                return grad, None, None

        def backward(*lists, breaks=False):
            Lends.apply(torch.ones(1, requires_grad=True), lists, breaks).sum().backward()

        backward([weight, bias])
        optimizer.zero_grad()
        with pytest.raises(KeyError):
            backward([weight], breaks=True)
        model.zero_grad()
        backward([bias, weight])
        assert torch.equal(optimizer.whole_grad(model.weight), torch.ones(2, 2))
        assert torch.equal(optimizer.whole_grad(model.bias), torch.ones(2))

    run_ranks(world, program)


@pytest.mark.parametrize("world", [1, 2])
def test_two_gradients_of_one_parameter_that_are_handed_over_together_are_added_up(world):
    def program(group):
        model = nn.Linear(2, 2)  # the bucket waits for the bias, which never comes
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=2, group=group)
        window = optimizer.sharding.window

        class Lends(torch.autograd.Function):
            """Makes three gradients in its backward: the first finds out whether the next ones may take the short path."""

            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                for _ in range(2):
                    window.hand_over([(0, torch.full((2, 2), number)) for number in (1.0, 2.0, 3.0)])
                return grad

        for _ in range(2):  # the second time, the parameter has a place
            Lends.apply(torch.ones(1, requires_grad=True)).sum().backward()
            assert torch.equal(optimizer.whole_grad(model.weight), torch.full((2, 2), 12.0))
            optimizer.zero_grad()

    run_ranks(world, program)


def test_what_is_asked_of_autograd_is_not_collected_and_a_parameters_gradient_is_refused():
    (model, optimizer), _ = twins()
    x = batch("mlp", 0, 0).requires_grad_()
    (inputs_gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert inputs_gradient.shape == x.shape
    model(x).sum().backward(inputs=[x])
    assert not optimizer.sharding.window.needs_sync
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match="returns none"):
        torch.autograd.grad(model(x).sum(), list(model.parameters()))


def test_gradients_of_inputs_are_batched():
    found = []
    for model, optimizer in twins():
        x = batch("mlp", 0, 0).requires_grad_()
        y = model(x)
        found.append(torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)[0])
        assert not optimizer.sharding.window.needs_sync
    assert torch.equal(*found)


@pytest.mark.promise("D06", "P06")
def test_a_gradient_that_comes_in_fp32_for_a_bf16_parameter_is_rounded_as_autograd_rounds_it():
    class Widened(torch.autograd.Function):
        @staticmethod
        def forward(context, weight, x):
            context.save_for_backward(weight, x)
            return x @ weight

        @staticmethod
        def backward(context, grad):
            weight, x = context.saved_tensors
            return x.float().t() @ grad.float(), grad @ weight.t()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(0)))

        def forward(self, x):
            return Widened.apply(self.weight, x)

    found = []
    for compile_it in (True, False):
        model = Model()
        optimizer = shard(model, adamw(model), stage=2, dtype="bfloat16")
        if compile_it:
            zero.compile(model, "aot_eager")
        for step in range(5):
            model(batch("mlp", 0, step).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.state_dict()["masters"]["weight"])
    assert torch.equal(*found)


def test_a_closed_optimizer_leaves_a_compiled_model_that_trains_on_as_a_plain_one():
    both, plain = twins(), []
    for model, optimizer in both:
        backward(model)
        optimizer.step()
        optimizer.close()
        inner = adamw(model)
        backward(model, 1)
        plain.append([param.grad.clone() for param in model.parameters()])
        inner.step()
    assert are_equal(both)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*plain, strict=True))


def test_a_model_sharded_anew_hands_over_to_whom_it_belongs_by_then():
    both = twins()
    for model, optimizer in both:
        backward(model)
        optimizer.close()
        model.zero_grad()
        again = shard(model, adamw(model), stage=1)
        backward(model, 1)
        assert all(isinstance(param.grad, zero.window.grads.ShardedGrad) for param in model.parameters())
        again.step()
    assert are_equal(both)


class Broken(nn.Module):
    """A block in which the graph breaks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(y.tanh())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_blocks_whose_graphs_break_keep_their_gradients_apart(backend, handed_over):
    both = []
    for compile_it in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Broken() for _ in range(3))).double()
        optimizer = shard(model, adamw(model), stage=2)
        both.append((zero.compile(model, backend) if compile_it else model, optimizer))
    x, grads = torch.randn(3, WIDTH, dtype=torch.float64), []
    for step in range(2):
        for model, optimizer in both:
            if step:
                model[2].up.weight = replaced = nn.Parameter(model[2].up.weight.detach().clone())
                optimizer.add_param_group({"params": [replaced]})
            model(x).square().mean().backward()
            grads.append([optimizer.whole_grad(param) for param in model.parameters()])
            optimizer.zero_grad()
    for ours, eager in zip(grads[::2], grads[1::2], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-14)
    assert "0.up.weight" in handed_over


class BesideADTensor(nn.Module):
    """Weights of one shape; the one of which the graph has more than one output comes before the others."""

    def __init__(self, mesh):
        super().__init__()
        first, *others = (torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.first = nn.Parameter(distribute_tensor(first, mesh, [Replicate()]))
        self.second, self.third = map(nn.Parameter, others)

    def forward(self, x):
        return ((x @ self.first.to_local().sin()).tanh() @ self.second).tanh() @ self.third


def grads_beside_a_dtensor(rank: int, world: int) -> list[list[torch.Tensor]]:
    mesh, grads = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), []
    for compile_it in (True, False):
        torch.manual_seed(0)
        model = BesideADTensor(mesh["tp"])
        optimizer = shard(model, adamw(model), stage=2, group=mesh["dp"])
        (zero.compile(model, "aot_eager") if compile_it else model)(torch.ones(3, WIDTH).double()).sum().backward()
        grads.append([local_of(optimizer.whole_grad(param)) for param in model.parameters()])
        optimizer.zero_grad()
        optimizer.close()
    return grads


def grads_of_dtensors_in_shares(rank: int, world: int) -> list[list[torch.Tensor]]:
    mesh, grads = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), []
    for compile_it in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel()})
        optimizer = shard(model, adamw(model), stage=3, group=mesh["dp"])
        (zero.compile(model, "aot_eager") if compile_it else model)(torch.ones(3, WIDTH)).sum().backward()
        grads.append([local_of(optimizer.whole_grad(param)) for param in model.parameters()])
        optimizer.zero_grad()
        optimizer.close()
    return grads


@pytest.mark.full
def test_blocks_of_nothing_but_dtensors_in_shares_are_called_as_they_are():
    [grads] = ranks.run(1, grads_of_dtensors_in_shares)
    torch.testing.assert_close(*grads, rtol=0.0, atol=0.0)


@pytest.mark.full
def test_a_parameter_with_several_outputs_shifts_no_gradient_to_another_one():
    [grads] = ranks.run(1, grads_beside_a_dtensor)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


# compilations -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("P02")
def test_nothing_is_compiled_again_in_a_training_that_goes_its_way():
    (model, optimizer), _ = twins(accumulation=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(number):
        for micro_step in range(2):
            optimizer.set_gradient_accumulation_boundary(number % 3 == 0 or micro_step == 1)
            model.train(number % 2 == 0)
            backward(model, 2 * number + micro_step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 4 != 0)
        schedule.step()

    for number in range(2):
        step(number)
    compilations = dict(counters["stats"])
    for number in range(2, 22):
        step(number)
    assert dict(counters["stats"]) == compilations


@pytest.mark.promise("P03")
def test_nothing_of_ours_breaks_a_graph():
    model = build("mlp")
    optimizer = shard(model, adamw(model), stage=2)
    zero.compile(model, "aot_eager", fullgraph=True)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not counters["graph_break"]
    assert torch._dynamo.explain(build("mlp"))(batch("mlp", 0, 0)).graph_break_count == 0


@pytest.mark.promise("P04")
def test_edits_show_at_once_and_parameters_stay_where_they_are():
    (model, optimizer), _ = twins()
    places = [(param, param.data_ptr()) for param in model.parameters()]
    for step in range(10):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert [(id(param), param.data_ptr()) for param in model.parameters()] == [(id(param), place) for param, place in places]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert (model(batch("mlp", 0, 0)) == 0).all()


@pytest.mark.full
def test_a_thousand_steps_of_a_compiled_gpt_have_finite_losses():
    losses = []
    train("gpt", compiled("aot_eager"), stage=2, steps=1000, watch=losses.append)
    assert len(losses) == 1000
    assert all(map(math.isfinite, losses))


@pytest.mark.promise("P12")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_no_setting_of_the_compiler_is_left_changed(backend):
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    def settings():
        return [
            {name: value for name, value in config.get_config_copy().items() if "dynamic_shapes" not in name}
            for config in (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
        ]

    before = settings()
    train("mlp", compiled(backend), stage=2, steps=2)
    assert settings() == before


# lifetimes --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("P05")
@pytest.mark.parametrize(("name", "backend"), [
    ("gpt", "aot_eager"), ("broken", "aot_eager"), pytest.param("gpt", "inductor", marks=pytest.mark.full),
])  # fmt: skip
def test_a_gradient_is_gone_when_the_next_one_comes_and_nothing_is_kept_into_the_step(name, backend, monkeypatch):
    """Also where one of several graphs needs a backward and has no parameter."""
    alive, most = [], []

    def hand_over(window, lent, original=Window.hand_over):
        original(window, lent)
        alive.extend(weakref.ref(grad) for _, grad in lent)
        most.append(sum(ref() is not None for ref in alive))

    monkeypatch.setattr(Window, "hand_over", hand_over)
    monkeypatch.setattr("zero.graph.backend.MOST_HELD", 0)  # lists of one, as of large gradients
    model = build(name)
    optimizer = shard(model, adamw(model), stage=2, bucket_bytes=256)
    zero.compile(model, backend)
    for step in range(3):
        backward(model, step)
        assert not any(ref() is not None for ref in alive)
        reducer = optimizer.sharding.window.reducer
        if step:  # the order in which buckets become full is known, so all have left before the backward ends
            assert not reducer.open_buckets
        optimizer.settle()
        assert not reducer.open_buckets and not len(reducer.inflight)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.sharding.window.grad_ops.shard.num_bytes == 0
    assert max(most) <= 8  # one operator makes at most this many of the 14 together


@pytest.mark.promise("P05")
def test_what_a_graph_does_with_its_memory_afterwards_does_not_reach_a_gradient(monkeypatch):
    def poisoned(window, lent, original=Window.hand_over):
        original(window, lent)
        for _, grad in lent:
            grad.fill_(float("nan"))

    expected = train("mlp", None, stage=2, micro_steps=2)
    monkeypatch.setattr(Window, "hand_over", poisoned)
    for stage in (0, 1, 2):
        assert same(train("mlp", compiled("aot_eager"), stage=stage, micro_steps=2), expected)


def test_a_graph_keeps_no_parameter_and_no_optimizer_alive():
    model = build("mlp")
    optimizer = shard(model, adamw(model), stage=2)
    zero.compile(model, "aot_eager")
    backward(model)
    gone = [weakref.ref(optimizer), weakref.ref(optimizer.sharding.window), weakref.ref(model.layers[0].weight)]
    optimizer.close()
    del optimizer, model
    torch.compiler.reset()
    import gc

    gc.collect()
    assert not any(ref() for ref in gone)


# what cannot be ---------------------------------------------------------------------------------------------------------


def test_a_backend_that_does_not_let_us_in_compiles_in_the_ordinary_way_with_one_warning(caplog, handed_over):
    model = build("mlp")
    optimizer = shard(model, adamw(model), stage=2, clip=0.5, bucket_bytes=256)
    zero.compile(model, "eager")
    assert [record.message.startswith("Gradients are reduced after each") for record in caplog.records].count(True) == 1
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not handed_over
    assert same({name: param.detach() for name, param in model.named_parameters()}, train("mlp", None, stage=2))


@pytest.mark.full
def test_options_of_the_compiler_are_its_own_and_gradients_are_returned(caplog, handed_over):
    model = build("mlp")
    optimizer = shard(model, adamw(model), stage=2)
    zero.compile(model, "inductor", options={"max_autotune": False})
    assert "not during it: torch takes options= for its own backends only" in caplog.text
    backward(model)
    assert optimizer.whole_grad(model.layers[0].weight) is not None
    assert not handed_over


def test_a_torch_that_lacks_what_is_needed_compiles_in_the_ordinary_way(monkeypatch, caplog, handed_over):
    import torch._dynamo.backends.debugging as debugging

    original = debugging.aot_eager
    monkeypatch.setattr(debugging, "aot_eager", lambda graph, inputs, **options: original(graph, inputs))
    found = train("mlp", compiled("aot_eager"), stage=2)
    assert "does not take a compiler of ours" in caplog.text
    assert not handed_over
    assert same(found, train("mlp", None, stage=2))


def test_a_compiler_that_drops_the_operator_is_found_out_before_a_gradient_is_lost(monkeypatch, caplog, handed_over):
    found, argument, compile_graph = torch_private._COMPILERS["aot_eager"]

    def dropping(compiler, mode, graph, inputs, rewrite):
        def rewrite_and_drop(module):
            rewrite(module)
            for node in [node for node in module.graph.nodes if node.target is backend.OPERATOR]:
                module.graph.erase_node(node)
            module.recompile()

        return compile_graph(compiler, mode, graph, inputs, rewrite_and_drop)

    monkeypatch.setitem(torch_private._COMPILERS, "aot_eager", (found, argument, dropping))
    backend._loses_gradients.cache_clear()
    weights = train("mlp", compiled("aot_eager"), stage=2)
    backend._loses_gradients.cache_clear()
    assert "leaves out what hands them over" in caplog.text
    assert not handed_over
    assert same(weights, train("mlp", None, stage=2))


def test_recorded_replays_are_refused_where_the_operator_cannot_be_kept_out_of_them(monkeypatch):
    assert torch.Tag.cudagraph_unsafe in backend.OPERATOR.tags
    monkeypatch.setattr("zero.graph.backend.cudagraph_unsafe", tuple)
    monkeypatch.setattr("zero.graph.backend._loses_gradients", lambda backend: False)  # it compiles to find that out
    with pytest.raises(ValueError, match="mode='reduce-overhead': torch"):
        zero.compile(build("mlp"), "inductor", mode="reduce-overhead")


# ranks, and the engine --------------------------------------------------------------------------------------------------


def compile_late(rank: int, world: int) -> list[torch.Tensor]:
    model = build("mlp")
    optimizer = shard(model, adamw(model), stage=2, group=gloo_group())
    zero.compile(model, "aot_eager")
    if rank == 1:
        time.sleep(3.0)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.check()
    return [param.detach() for param in model.parameters()]


@pytest.mark.full
def test_ranks_that_compile_at_different_speeds_wait_for_each_other():
    ranks.run(2, compile_late, timeout=60.0)


def test_an_engine_compiles_its_model_in_place(handed_over):
    engine, *_ = zero.initialize(
        model=build("mlp"), config={"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2},
                                    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
    )  # fmt: skip
    assert not engine.is_compiled
    engine.compile("aot_eager")
    assert engine.is_compiled
    names = list(engine.module.state_dict())
    for step in range(3):
        engine.backward(engine(batch("mlp", 0, step)).square().mean())
        engine.step()
    assert engine.global_steps == 3
    assert len(handed_over) == 18
    assert list(engine.module.state_dict()) == names
