"""Blocks that are one operator at stage 3, compiled or not, train as they do without, bit by bit where kernels are the same."""

from __future__ import annotations

import contextlib
import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import zero
from tests import faults, inside, ranks
from tests.loopback import solo
from tests.promises.trainings import gloo_group
from tests.zoo.case import filled, real_numbers

WIDTH, STEPS = 8, 3


class Block(nn.Module):
    """A block with a norm, two matrices of which one is transposed, a number, and a buffer that no step changes."""

    def __init__(self, factor=0.5):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = factor
        self.register_buffer("shift", torch.full((WIDTH,), factor))

    def forward(self, x, *, scale=None):
        x = x + self.factor * self.down(torch.relu(self.up(self.norm(x)))) + self.shift
        return x if scale is None else x * scale


class Blocks(nn.Module):
    """Blocks side by side between two layers that are no blocks."""

    def __init__(self, *blocks):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = self.call(block, x, number)
        return self.last(x)

    def call(self, block, x, number):
        return block(x)


class Checkpointed(Blocks):
    def call(self, block, x, number):
        return checkpoint(block, x, use_reentrant=number == 2)


class CheckpointsWithin(Block):
    """A block whose forward checkpoints, and that sets an attribute which the backward reads."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        self.scale = x.detach().mean()
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return super().forward(x, scale=1 + self.scale)


class ByKeyword(Blocks):
    def call(self, block, x, number):
        return block(x, scale=x.new_tensor(1.5)) if number % 2 else block(x)


class TwoOutputs(Block):
    def forward(self, x):
        x = super().forward(x)
        return {"x": x, "more": (x.sum(-1, keepdim=True), None)}


class OfTwoOutputs(Blocks):
    def call(self, block, x, number):
        result = block(x)
        return result["x"] + result["more"][0]


class Batches(Block):
    """A block whose forward changes its buffers."""

    def __init__(self):
        super().__init__()
        self.batches = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.batches(super().forward(x))


class Tied(Block):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(WIDTH, 2 * WIDTH)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.down(self.again(x))


class ShowsWeights(Block):
    """A block that returns a part of a weight and keeps another one."""

    def forward(self, x):
        self.kept = self.up.weight[0]
        return super().forward(x), [self.norm.weight, x]


class OfShownWeights(Blocks):
    def forward(self, x):
        x, more = self.first(x), 0.0
        for block in self.blocks:
            x, (shown, _) = block(x)
            more = more + shown.sum()
        return self.last(x) * (more + sum(block.kept.sum() for block in self.blocks))


def adapters():
    """Blocks of frozen weights with adapters, and one that is frozen as a whole."""
    model = Blocks(*(Tied() for _ in range(3)))
    for block in model.blocks:
        block.requires_grad_(False)
        block.again = nn.Linear(WIDTH, 2 * WIDTH)
    model.blocks[1].requires_grad_(False)
    return model


# By name: what builds the model, and of how many kinds its blocks are.
MODELS = {
    "of two kinds": (lambda: Blocks(Block(), Block(0.25), Block()), 2),
    "checkpointed": (lambda: Checkpointed(*(Block() for _ in range(3))), 1),
    "checkpoints within": (lambda: Blocks(*(CheckpointsWithin() for _ in range(3))), 1),
    "keywords": (lambda: ByKeyword(*(Block() for _ in range(3))), 1),
    "several outputs": (lambda: OfTwoOutputs(*(TwoOutputs() for _ in range(2))), 1),
    "buffers": (lambda: Blocks(*(Batches() for _ in range(2))), 1),
    "tied": (lambda: Blocks(*(Tied() for _ in range(2))), 1),
    "adapters": (adapters, 1),
    "weights in results": (lambda: OfShownWeights(*(ShowsWeights() for _ in range(2))), 1),
}


# Others like these run by day: blocks that change buffers (Remembers) or have several outputs ("weights in results"), and
# "checkpoints within" on ranks. A keyword that comes and goes makes another graph, as a change of the block does.
AT_NIGHT = ("checkpoints within", "keywords", "several outputs", "buffers", "adapters", "of two kinds")

# By name: what makes regions of a model's blocks.
WAYS = {"compiled": lambda model: zero.compile(model, "aot_eager"), "operator by operator": zero.as_regions}


def train(name, way=None, rank=0, **options):
    """Trains some steps, with an evaluation and a second backward between; returns losses, weights and buffers."""
    torch.manual_seed(rank)
    model = filled(MODELS[name][0](), real=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    inner = torch.optim.AdamW(trained, lr=0.05)
    optimizer = zero.shard(model, inner, stage=3, kernels="torch", **{"gathered_bytes": 0, "bucket_bytes": 512} | options)
    with faults.freed_weights_are_poison():
        if way is not None:
            WAYS[way](model)
        found = []
        for step in range(STEPS):
            x = real_numbers((4, WIDTH), 10 * step + rank)
            loss = model(x).square().mean()
            model.eval()
            with torch.no_grad():
                found.append(model(x).sum())
            model.train()
            loss.backward()
            if step == 1:
                model(-x).square().mean().backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.gathered():
            found += [value.detach().clone() for value in model.state_dict().values()]
    optimizer.close()
    return found


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.promise("V09")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in AT_NIGHT else name for name in MODELS]
)
def test_a_training_in_regions_has_the_bits_of_the_eager_one(name):
    expected = train(name, group=solo())
    assert same(train(name, "operator by operator", group=solo()), expected)
    assert not counters["stats"]["unique_graphs"]
    assert same(train(name, "compiled", group=solo()), expected)
    modes = {"adapters": 3, "keywords": 2}.get(name, 1)  # graphs of a kind: where other inputs or gradients are wanted
    assert counters["stats"]["unique_graphs"] >= MODELS[name][1] * modes


def train_on_ranks(rank, world, names):
    options = {"group": gloo_group(), "shared_memory": False}
    expected = {name: train(name, None, rank, **options) for name in names}
    return [(name, way) for name in names for way in WAYS if not same(train(name, way, rank, **options), expected[name])]


BY_DAY = ["checkpoints within"]


@pytest.mark.parametrize(
    "names", [BY_DAY, pytest.param([name for name in MODELS if name not in BY_DAY], marks=pytest.mark.full)]
)
def test_on_ranks_that_gather_weights_for_each_region_the_bits_are_those_of_the_eager_training(names):
    for wrong in ranks.run(2, train_on_ranks, names, timeout=240.0):
        assert not wrong


def region_training(model, way="compiled", **options):
    optimizer = zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, **{"gathered_bytes": 0, "bucket_bytes": 512} | options
    )
    WAYS[way](model)
    return optimizer


@torch._functorch.config.patch(donated_buffer=False)  # otherwise a compiled graph can be sent backward only once
def fail_in_the_middle(rank, world, way):
    """Runs backwards of which some break off in the middle, and steps; returns what stays gathered after each forward."""
    model = filled(Blocks(*(Block() for _ in range(6))), real=True)
    optimizer = region_training(model, way, group=gloo_group(), shared_memory=False)
    cache, kept = inside.gathered_weights(optimizer), []
    for step in range(4):
        fails = step == 1

        def broken(grad, fails=fails):
            if fails:
                raise KeyError("in a backward")

        x = model.first(real_numbers((4, WIDTH), step))
        for number, block in enumerate(model.blocks):
            x = block(x)
            if number == 2:
                x.register_hook(broken)
        loss = model.last(x).square().mean()
        kept.append(cache.num_bytes)
        if step == 2:  # stale weights are found before anything is computed with them
            with torch.no_grad():
                model.blocks[4].up.weight.mul_(0.5)
            with pytest.raises(RuntimeError, match=r"Cannot run a backward: one of the weights .* was stepped"):
                loss.backward()
            optimizer.zero_grad()
            continue
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            loss.backward(retain_graph=step == 3)
        if fails:
            del loss, x
            gc.collect()
        assert all(not chunk.num_users for chunk in cache._gathered)
        optimizer.zero_grad() if fails else optimizer.step()
    return kept, cache.total_bytes


@pytest.mark.parametrize("way", ["operator by operator", pytest.param("compiled", marks=pytest.mark.full)])
def test_a_backward_that_breaks_off_or_comes_too_late_keeps_nothing_and_a_forward_two_blocks_at_most(way):
    for kept, total in ranks.run(2, fail_in_the_middle, way, timeout=120.0):
        assert max(kept) <= total / 2


def test_blocks_of_a_kind_have_one_graph_and_none_is_made_again_in_a_training_that_goes_its_way():
    model = filled(Blocks(*(Block() for _ in range(4))), real=True)
    optimizer = region_training(model, group=solo())
    for step in range(3):
        model(real_numbers((4, WIDTH), step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert counters["stats"]["unique_graphs"] == 1
    model.blocks[1].eval()
    model(real_numbers((4, WIDTH), 9)).sum().backward()
    optimizer.close()
    graphs = counters["stats"]["unique_graphs"]
    model(real_numbers((4, WIDTH), 9)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs, "a closed optimizer leaves a plain model"


class Writes(Block):
    def forward(self, x):
        with torch.no_grad():
            self.down.weight.mul_(0.5)
        return super().forward(x)


class WritesData(Block):
    """A block whose write no version counter counts."""

    def forward(self, x):
        self.down.weight.data[0].clamp_(-0.01, 0.01)
        return super().forward(x)


class TurnsData(Block):
    """A block whose write only moves values, so that their sum stays."""

    def forward(self, x):
        self.down.weight.data.copy_(self.down.weight.data.flip(0))
        return super().forward(x)


class AssignsData(Block):
    def forward(self, x):
        self.down.weight.data = 0.5 * self.down.weight.data
        return super().forward(x)


class ReadsOutside(Block):
    def __init__(self, outside):
        super().__init__()
        self.outside = [outside]

    def forward(self, x):
        return super().forward(x) + self.outside[0].weight.sum()


class Adds(Block):
    def forward(self, x):
        self.more = nn.Parameter(x[0].detach())
        return super().forward(x) + self.more


class Hooks(Block):
    """Without a region, each further forward multiplies once more."""

    def forward(self, x):
        self.down.weight.register_hook(lambda grad: 2 * grad)
        return super().forward(x)


class Exchanges(Block):
    def forward(self, x):
        self.down.weight = nn.Parameter(0.5 * self.down.weight)
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "way", "why"),
    [
        (Writes, "compiled", "writes to its weights"),
        (Writes, "operator by operator", "writes to its weights"),
        (WritesData, "operator by operator", "writes to its weights"),
        (TurnsData, "operator by operator", "writes to its weights"),
        (AssignsData, "operator by operator", "writes to its weights"),
        (Hooks, "compiled", "registers a hook on its weights"),
        (Hooks, "operator by operator", "registers a hook on its weights"),
        (Adds, "operator by operator", "exchanges or adds"),
        (Exchanges, "operator by operator", "exchanges or adds"),
    ],
)
def test_a_block_that_changes_its_weights_or_parts_is_named(block, way, why):
    model = filled(Blocks(*(block() for _ in range(2))), real=True)
    optimizer = region_training(model, way, group=solo())
    with pytest.raises(RuntimeError, match=rf"Cannot run blocks\.0 as a region: its forward {why}"):
        model(torch.ones(4, WIDTH))
    optimizer.close()


@pytest.mark.parametrize("why", ["reads a weight outside", "has a hook"])
@pytest.mark.usefixtures("falls_back")
def test_a_block_that_is_no_region_is_called_as_without_and_named(why, caplog):
    def build():
        outside = nn.Linear(WIDTH, 1)
        blocks = (ReadsOutside(outside) if why == "reads a weight outside" else Block() for _ in range(2))
        model = Blocks(*blocks)
        model.outside = outside
        return filled(model, real=True)

    called, losses = [], []
    for compiles in (False, True):
        model = build()
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, group=solo())
        if why == "has a hook":
            model.blocks[1].up.register_forward_hook(lambda *_, compiles=compiles: called.append(compiles))
        with caplog.at_level(logging.WARNING, "zero"):
            if compiles:
                zero.compile(model, "aot_eager")
            for step in range(3):
                losses.append(model(real_numbers((4, WIDTH), step)).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
    assert losses[:3] == losses[3:]
    if why == "has a hook":
        assert called == [False] * 3 + [True] * 3
        assert "blocks.1 and blocks like it are no regions from now on" in caplog.text
        assert "weight by weight: up has hooks" in caplog.text
    else:
        assert "blocks.0 and blocks like it are no regions from now on" in caplog.text
    assert caplog.text.count("no regions from now on") == 1


@pytest.mark.parametrize("blocks", [Block, "two of them"])
def test_blocks_may_be_named(blocks):
    model = nn.Module()
    model.one, model.two, model.three = (filled(Block(), real=True) for _ in range(3))
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, group=solo())
    with pytest.raises(ValueError, match=r"has no blocks that repeat\. Name them with blocks="):
        zero.compile(model, "aot_eager", fullgraph=True)
    zero.compile(model, "aot_eager", blocks=blocks if blocks is Block else [model.one, model.two])
    model.three(model.two(model.one(torch.ones(4, WIDTH, requires_grad=True)))).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()


@pytest.mark.usefixtures("falls_back")
def test_blocks_whose_weights_two_optimizers_train_are_no_regions():
    found = []
    for make in (lambda model: model, *WAYS.values()):
        model = filled(Blocks(*(Block() for _ in range(2))), real=True)
        norms = [block.norm.weight for block in model.blocks]
        others = [param for param in model.parameters() if not any(param is norm for norm in norms)]
        options = {"stage": 3, "group": solo(), "kernels": "torch", "gathered_bytes": 0}
        optimizers = [zero.shard(model, torch.optim.SGD(params, lr=0.25), **options) for params in (norms, others)]
        make(model)
        found.append([])
        for step in range(3):
            loss = model(real_numbers((4, WIDTH), step)).square().mean()
            loss.backward()
            found[-1].append(loss.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.close()
    assert same(found[0], found[1]) and same(found[0], found[2])
    assert not counters["stats"]["unique_graphs"]


class Remembers(Block):
    """A block whose forward sets attributes."""

    def __init__(self):
        super().__init__()
        self.drop, self.loss, self.numbers = nn.Dropout(0.0), None, [1.0]

    def forward(self, x):
        x = self.drop(super().forward(x)) * getattr(self, "numbers", [2.0])[0]
        self.loss = x.square().mean()
        self.shift = 0.5 * self.shift  # a buffer that is exchanged
        self.seen = x.detach().sum()  # an attribute that is new at the first call
        return x


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def exchange(block):
    del block.numbers
    block.other = 1.0


CHANGES = [
    lambda block: setattr(block, "factor", 0.125),
    lambda block: setattr(block.norm, "eps", 0.5),
    lambda block: block.numbers.__setitem__(0, 3.0),
    lambda block: setattr(block.drop, "p", 1.0),
    lambda block: setattr(block.drop, "p", 0.0),
    lambda block: setattr(type(block), "forward", lambda self, x: 0.5 * Remembers.forward(self, x)),
    exchange,
    lambda block: setattr(block, "up", Twice(block.up)),
    lambda block: block.down.register_forward_hook(lambda module, args, result: 3 * result),
]


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_what_changes_in_a_block_after_its_first_call_counts_as_it_does_without_a_region(every):
    found, changes = [], CHANGES[::every]
    for make in (lambda model: model, *WAYS.values()):
        kind = type("Remembering", (Remembers,), {})  # a class whose forward may be exchanged
        model = filled(Blocks(*(kind() for _ in range(2))), real=True)
        inner = torch.optim.SGD(model.parameters(), lr=0.125)
        optimizer = zero.shard(model, inner, stage=3, group=solo(), kernels="torch", gathered_bytes=0, bucket_bytes=512)
        make(model)
        values = list[torch.Tensor]()
        found.append(values)
        for step, change in enumerate([lambda block: None, *changes]):
            change(model.blocks[1])
            loss = model(real_numbers((4, WIDTH), step)).square().mean() + sum(block.loss for block in model.blocks)
            values += [loss.detach(), *(block.seen for block in model.blocks), *(block.shift.sum() for block in model.blocks)]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert same(found[1], found[0]) and same(found[2], found[0])
    losses = found[0][::5]
    assert len(set(map(float, losses))) == len(changes) + 1, "each change is seen"
    assert counters["stats"]["unique_graphs"] > 1


class SetsItself(Block):
    """A block with a method that was bound before there was a copy, and that deletes an attribute."""

    def __init__(self):
        super().__init__()
        self.calls, self.once, self.note = 0, 2.0, self._note
        self.register_buffer("sum", torch.zeros(()))

    def _note(self, x):
        self.calls += 1
        self.sum = self.sum + x.detach().sum()

    def forward(self, x):
        self.note(x)
        if hasattr(self, "once"):
            x = self.once * x
            del self.once
        return super().forward(x)


def test_what_a_block_sets_on_itself_by_other_ways_than_its_copy_stays():
    found = []
    for make in (lambda model: model, *WAYS.values()):
        model = filled(Blocks(*(SetsItself() for _ in range(2))), real=True)
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, group=solo(), kernels="torch")
        make(model)
        for step in range(3):
            model(real_numbers((4, WIDTH), step)).sum().backward()
        assert [block.calls for block in model.blocks] == [3, 3]
        assert not any(hasattr(block, "once") for block in model.blocks)
        found.append([*(block.sum for block in model.blocks), *(param.grad.norm() for param in model.parameters())])
        optimizer.close()
    assert same(found[1], found[0]) and same(found[2], found[0])


class Fails(Block):
    def forward(self, x):
        if x.shape[0] == 1:
            raise KeyError("a batch of one")
        return super().forward(x)


def test_a_forward_that_raises_ends_no_graph(caplog):
    model = filled(Blocks(*(Fails() for _ in range(2))), real=True)
    optimizer = region_training(model, group=solo())
    with caplog.at_level(logging.WARNING, "zero"):
        for step in range(3):
            with pytest.raises(KeyError, match="a batch of one"):
                model(real_numbers((1, WIDTH), step))
            model(real_numbers((4 + step, WIDTH), step)).square().mean().backward()
            assert counters["stats"]["unique_graphs"]
            optimizer.step()
            optimizer.zero_grad()
    assert not caplog.text
    optimizer.close()


def test_transforms_of_torch_func_give_what_they_give_without_regions():
    found = []
    for make in (lambda model: model, *WAYS.values()):
        model = filled(Blocks(*(Block() for _ in range(2))), real=True)
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, group=solo())
        make(model)
        x = real_numbers((4, WIDTH), 0)
        found.append([torch.func.grad(lambda x, model=model: model(x).square().sum())(x), torch.func.vmap(model)(x)])
        optimizer.close()
    assert same(found[0], found[1]) and same(found[0], found[2])


class Unused(Block):
    """A block that does not use a weight at some widths, and of whose weights one is frozen."""

    def __init__(self):
        super().__init__()
        self.unused, self.up.bias.requires_grad = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        return super().forward(torch.tanh(x)) if x.shape[0] > 4 else super().forward(x) + self.unused(x)


def in_odd_ways(rank, way):
    """Returns what a training gives whose backwards make graphs, and whose blocks run in threads."""
    options = {"group": gloo_group(), "shared_memory": False, "gathered_bytes": 0, "bucket_bytes": 512, "kernels": "torch"}
    model = filled(Blocks(*(Unused() for _ in range(4))), real=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = zero.shard(model, torch.optim.SGD(trained, lr=0.5), stage=3, **options)
    cache = inside.gathered_weights(optimizer)
    if way is not None:
        WAYS[way](model)
    found = []
    with faults.freed_weights_are_poison():
        for step in range(2):  # a penalty of gradients
            x = real_numbers((4, WIDTH), 10 * step + rank).requires_grad_()
            [slope] = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
            (slope.square().sum() / 2**20).backward()
            found.append(slope.detach())
            assert not any(chunk.num_users for chunk in cache._gathered)
            optimizer.step()
            optimizer.zero_grad()
        loss = model(real_numbers((5, WIDTH), rank)).square().mean()
        assert all(param.grad is None for block in model.blocks for param in block.unused.parameters())
        loss.backward(retain_graph=True)
        assert not any(chunk.num_users for chunk in cache._gathered)
        loss.backward()
        grads = [optimizer.whole_grad(param) for param in trained]
        assert {param for param, grad in zip(trained, grads, strict=True) if grad is None} == {
            param for block in model.blocks for param in block.unused.parameters()
        }
        found += [loss.detach(), *(grad for grad in grads if grad is not None)]
        optimizer.zero_grad()

        with torch.no_grad(), ThreadPoolExecutor(4) as pool:  # calls of blocks of a kind at the same time
            xs = [real_numbers((4, WIDTH), number) for number in range(4)]
            for _ in range(8):
                called = [pool.submit(block, x) for block, x in zip(model.blocks, xs, strict=True)]
                found += [each.result() for each in called]
    optimizer.close()
    return found


class KeepsWeight(torch.autograd.Function):
    """A product whose backward uses a weight that it keeps without saving it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight, None


class Keeps(Block):
    """A block of which a weight, and a view of one, are kept for the backward and until the next forward."""

    def forward(self, x):
        x = KeepsWeight.apply(super().forward(x), self.norm.weight.detach())
        row = self.up.weight[0].detach()
        x.register_hook(lambda grad: grad + row)
        return x


def keep_weights(rank, way):
    """Returns the gradients of a training that keeps weights. Without it, memory of chunks is used again."""
    found = []
    for block in (Keeps, Block):
        model = filled(Blocks(*(block() for _ in range(4))), real=True)
        options = {"group": gloo_group(), "shared_memory": False, "gathered_bytes": 0, "bucket_bytes": 512}
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, kernels="torch", **options)
        if way is not None and (way != "compiled" or block is Block):
            WAYS[way](model)
        with faults.freed_weights_are_poison():
            for step in range(2):
                loss = model(real_numbers((4, WIDTH), step)).square().mean()
                if block is Block:
                    assert not inside.are_left_to_others(optimizer)
                loss.backward()
                found += [loss.detach(), *map(optimizer.whole_grad, model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
    return found


def unlike(rank, world):
    """Returns the programs that give something else in regions."""
    different = []
    for program, ways in ((in_odd_ways, ["operator by operator"]), (keep_weights, WAYS)):
        expected = program(rank, None)
        different += [(program.__name__, way) for way in ways if not same(program(rank, way), expected)]
    return different


@pytest.mark.full
def test_on_ranks_penalties_unused_and_kept_weights_and_threads_give_what_they_give_without_regions():
    for programs in ranks.run(2, unlike, timeout=120.0):
        assert not programs


class Calls(Block):
    """A block that calls another one, within its own forward."""

    def __init__(self):
        super().__init__()
        self.others = []

    def forward(self, x):
        for other in self.others:
            x = 0.5 * other(x)
        return super().forward(x)


def test_blocks_of_a_kind_call_each_other():
    found = []
    for make in (lambda model: model, zero.as_regions):
        model = filled(Blocks(*(Calls() for _ in range(3))), real=True)
        shared = []
        for block in model.blocks:
            block.others = shared
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, group=solo(), kernels="torch")
        make(model)
        shared.append(Inner(model.blocks[0]))  # in the attributes of all blocks, which are of one kind
        x = model.first(real_numbers((4, WIDTH), 0))
        loss = model.last(model.blocks[2](model.blocks[1](x))).square().mean()  # two uses of the first one: sums of more differ
        loss.backward()
        found.append([loss.detach(), *(optimizer.whole_grad(param) for param in model.parameters())])
        optimizer.close()
    assert same(*found)


class Inner:
    """A call of a block, but none within that."""

    def __init__(self, block):
        self.block, self.is_running = block, False

    def __call__(self, x):
        if self.is_running:
            return x
        self.is_running = True
        x = self.block(x)
        self.is_running = False
        return x


def frozen_backward(rank, world):
    """Returns the most bytes that are gathered in a backward through frozen blocks with adapters, and all bytes; and whether a
    weight that autograd has saved is what the model has."""
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(8)))
    for number, block in enumerate(model):
        block.requires_grad_(False)
        block[2].requires_grad_(number % 3 == 0)
    trained = [param for param in model.parameters() if param.requires_grad]
    options = {"group": gloo_group(), "shared_memory": False, "gathered_bytes": 0, "bucket_bytes": 512}
    optimizer = zero.shard(model, torch.optim.SGD(trained, lr=0.5), stage=3, **options)
    zero.as_regions(model)
    cache, kept = inside.gathered_weights(optimizer), []
    x = real_numbers((4, WIDTH), rank).requires_grad_()
    for block in model:
        x = block(x)
        x.register_hook(lambda _: kept.append(sum(chunk.num_bytes for chunk in cache._gathered if chunk.num_users)))
    is_whole = torch.equal(x.grad_fn._saved_mat2, model[-1][-1].weight.t().clone())
    x.sum().backward()
    optimizer.close()
    return kept, cache.total_bytes, is_whole


def test_a_backward_leaves_a_block_before_it_needs_the_next_one_though_weights_are_frozen():
    for kept, total, is_whole in ranks.run(2, frozen_backward, timeout=60.0):
        assert len(kept) == 8 and max(kept) <= total / 8
        assert is_whole


def test_a_backward_after_the_step_is_refused():
    model = filled(Blocks(*(Block() for _ in range(3))), real=True)
    optimizer = region_training(model, "operator by operator", group=solo())
    loss = model(real_numbers((4, WIDTH), 0)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was stepped|modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()


def train_in_a_compiled_model(rank, world):
    """Trains a model that torch.compile compiles as a whole, with regions and without; returns losses and graphs."""
    found = []
    for regions in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = filled(Blocks(*(Block() for _ in range(3))), real=True)
        options = {"group": gloo_group(), "shared_memory": False, "gathered_bytes": 0, "bucket_bytes": 512}
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, **options)
        if regions:
            zero.compile(model, "aot_eager")
        compiled = torch.compile(model, backend="aot_eager")
        losses = []
        for step in range(2):
            losses.append(compiled(real_numbers((4, WIDTH), step)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((list(map(float, losses)), counters["stats"]["unique_graphs"]))
        optimizer.close()
    return found


def test_a_compiler_of_the_whole_model_leaves_regions_alone():
    for (losses, _), (in_regions, graphs) in ranks.run(2, train_in_a_compiled_model, timeout=120.0):
        assert losses == in_regions and graphs
