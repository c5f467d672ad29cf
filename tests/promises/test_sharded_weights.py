"""Stage 3: weights in shares. That they train as plain PyTorch does is shown by tests/test_parity.py."""

import copy
import io

import pytest
import torch
from torch import nn

import accelerators
import zero
from tests import inside, ranks
from tests.devices import needs_sim
from tests.promises.offloads import place_of
from zero.errors import RanksDiffer


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def shard(model, stage, **options):
    options = {"bucket_bytes": 1024, "gathered_bytes": 0, **options}
    return zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.05), stage=stage, **options)


def train(model, optimizer, rank, steps=2):
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def checkpointed(rank, world, folder, saved_at, loaded_at, dtype, shared_memory):
    options = {"dtype": dtype, "shared_memory": shared_memory}
    model, other = mlp(), mlp()
    optimizer = shard(model, saved_at, **options)
    train(model, optimizer, rank)
    zero.save(folder, optimizer)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    continued = shard(other, loaded_at, **options)
    train(other, continued, rank, 1)
    zero.load(folder, continued)
    assert same(values(model), values(other))
    train(model, optimizer, rank)
    train(other, continued, rank)
    assert same(values(model), values(other))
    optimizer.check()
    continued.check()
    optimizer.close()
    continued.close()


@pytest.mark.parametrize(("saved_at", "loaded_at", "dtype", "shared_memory"), [
    (2, 3, None, True), (3, 2, "bfloat16", False), (3, 3, None, False), (3, 1, "bfloat16", True),
])  # fmt: skip
def test_a_checkpoint_goes_from_any_stage_to_any(saved_at, loaded_at, dtype, shared_memory, tmp_path):
    ranks.run(2, checkpointed, str(tmp_path), saved_at, loaded_at, dtype, shared_memory)


def edited(rank, world, dtype, shared_memory, differs):
    model, plain = mlp(), mlp()
    optimizer, beside = (shard(one, stage, dtype=dtype, shared_memory=shared_memory) for one, stage in ((model, 3), (plain, 2)))
    for one in (model, plain):
        with torch.no_grad():
            one[0].weight.mul_(2.0)
            one[2].bias.data = one[2].bias.data + 1.0
            one[0].weight[3:5, ::2].fill_(rank if differs and one is model else 0.25)
            nn.init.ones_(one[4].bias)
    if differs:
        with pytest.raises(RanksDiffer, match="Cannot step: rank 1 of 2 edited weights"):
            train(model, optimizer, rank, 1)
        optimizer.close()
        return
    assert same(values(model), values(plain))
    train(model, optimizer, rank)
    train(plain, beside, rank)
    assert same(values(model), values(plain))
    masters = [[inside.whole_master(one, param) for param in one.model.parameters()] for one in (optimizer, beside)]
    assert same(*masters)
    for one in (optimizer, beside):
        one.close()


@pytest.mark.promise("S03")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_edits_between_steps_are_trained_on_like_edits_of_whole_weights(dtype, shared_memory):
    ranks.run(2, edited, dtype, shared_memory, False)


@pytest.mark.promise("S03")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_that_edit_differently_are_told_before_the_step(shared_memory):
    ranks.run(2, edited, None, shared_memory, True)


def closed(rank, world):
    model = mlp()
    hooked, kept = [], [id(param) for param in model.parameters()]
    model[0].weight.register_post_accumulate_grad_hook(lambda param: hooked.append(param.grad is not None))
    optimizer = shard(model, 3)
    assert all(isinstance(param, nn.Parameter) and inside.is_absent(param) for param in model.parameters())
    train(model, optimizer, rank)
    trained, twin, file = values(model), copy.deepcopy(model), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    optimizer.close()
    assert [id(param) for param in model.parameters()] == kept and hooked
    for plain in (model, twin):
        assert all(type(param) is nn.Parameter and param.data_ptr() for param in plain.parameters())
        assert same(values(plain), trained)
    assert same(list(torch.load(file).values()), trained)
    model(torch.ones(1, 8)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("world", [1, 2])
def test_closing_gives_the_plain_model_back(world):
    ranks.run(world, closed)



def counted(rank, world, shared_memory):
    model = mlp()
    whole = sum(param.nbytes for param in model.parameters())
    optimizer = shard(model, 3, shared_memory=shared_memory, bucket_bytes=2048)
    layout = inside.layout(optimizer)
    assert whole / world <= inside.bytes_of_weights(optimizer) == 4 * layout.owned_numel < 1.2 * whole / world
    largest = sorted((4 * chunk.numel for chunk in layout.chunks), reverse=True)
    train(model, optimizer, rank)
    before = inside.pulled_bytes(optimizer)
    train(model, optimizer, rank, 1)
    pulled = inside.pulled_bytes(optimizer) - before
    if shared_memory:
        assert inside.num_fetches(optimizer) == 0 and pulled <= 4 * world  # whether the others have ended their step
    else:
        assert inside.peak_of_whole_chunks(optimizer) <= sum(largest[:2])
        assert 0 < pulled <= inside.planned_traffic(optimizer, 3, world).weights
    optimizer.close()


@pytest.mark.promise("S07")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_keeps_its_share_and_gathers_for_forward_and_backward(shared_memory):
    ranks.run(2, counted, shared_memory)


class Adapted(nn.Module):
    """A frozen base of several chunks, with an adapter for each of its layers, and frozen memory that is nobody's alone."""

    def __init__(self):
        super().__init__()
        self.base = mlp().requires_grad_(False)
        sizes = (8, 32), (32, 32), (32, 4)
        self.added = nn.ModuleList(nn.Sequential(nn.Linear(size, 2), nn.Linear(2, out)) for size, out in sizes)
        self.view = nn.Parameter(self.base[0].weight.detach()[:2], requires_grad=False)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        for index in range(3):
            x = self.base[2 * index](x) + self.added[index](x)
            x = nn.functional.gelu(x) if index < 2 else x
        return x


def adapted():
    torch.manual_seed(1)
    return Adapted()


def with_frozen(rank, world, folder, dtype, shared_memory):
    model, plain = adapted(), adapted()
    if rank:
        with torch.no_grad():
            model.base[2].weight.zero_()  # rank 0's counts
    options = {"dtype": dtype, "shared_memory": shared_memory, "bucket_bytes": 1024, "gathered_bytes": 0}
    optimizer, beside = (
        zero.shard(one, torch.optim.AdamW([*one.base[1:].parameters(), *one.added.parameters()]), stage=stage, **options)
        for one, stage in ((model, 3), (plain, 2))
    )
    base = [*model.base[1:].parameters()]
    assert all(inside.is_absent(param) and not param.requires_grad for param in base)
    assert type(model.counts) is nn.Parameter
    for one in (model.view, model.base[0].weight):
        assert inside.is_absent(one) == (dtype is not None)  # a cast gives each memory of its own
    trained = inside.bytes_of_weights(optimizer) - sum(param.nbytes for param in base) / world
    assert 0 < trained < 2 * sum(param.nbytes for param in model.parameters() if param.requires_grad) / world + 1000
    for one, its in ((model, optimizer), (plain, beside)):
        train(one, its, rank)
        with torch.no_grad():
            one.base[2].bias.add_(1.0)
        train(one, its, rank)
    assert same(values(model), values(plain))
    if not shared_memory and world > 1:
        assert inside.peak_of_whole_chunks(optimizer) <= sum(inside.sizes_of_chunks(optimizer)[:3])
    for one, its in ((model, optimizer), (plain, beside)):
        one.base[4].requires_grad_(True)  # is in the optimizer
        train(one, its, rank)
    assert same(values(model), values(plain))
    zero.save(folder, optimizer)
    saved = values(model)
    train(model, optimizer, rank)
    with torch.no_grad():
        model.base[2].weight.zero_()
    zero.load(folder, optimizer)
    assert same(values(model), saved)
    twin = copy.deepcopy(model)
    optimizer.check()
    optimizer.close()
    beside.close()
    for one in (model, twin):
        assert all(type(param) is nn.Parameter for param in one.parameters()) and same(values(one), saved)


@pytest.mark.parametrize(("world", "dtype", "shared_memory"), [
    (1, None, True), (2, "bfloat16", False),
    *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, None, True), (3, None, False))),
])  # fmt: skip
def test_frozen_weights_are_in_shares_too(world, dtype, shared_memory, tmp_path):
    ranks.run(world, with_frozen, str(tmp_path), dtype, shared_memory)


def grown(rank, world):
    """Parameters that were frozen, and in no group, join the optimizer."""
    model, plain = adapted(), adapted()
    trained = []
    for one, stage in ((model, 3), (plain, 2)):
        inner = torch.optim.AdamW([param for param in one.parameters() if param.requires_grad], lr=0.05)
        trained.append(zero.shard(one, inner, stage=stage, bucket_bytes=1024, gathered_bytes=0))
        train(one, trained[-1], rank)
        one.base[2].requires_grad_(True)
        trained[-1].add_param_group({"params": list(one.base[2].parameters())})
        train(one, trained[-1], rank)
    assert same(values(model), values(plain))
    for optimizer in trained:
        optimizer.close()
    assert same(values(model), values(plain)) and type(model.base[2].weight) is nn.Parameter


def test_frozen_weights_can_be_given_to_the_optimizer_later():
    ranks.run(2, grown)


def lent(rank, world, shared_memory):
    model, plain = adapted(), adapted()
    options = {"bucket_bytes": 1024, "gathered_bytes": 0, "shared_memory": shared_memory}
    optimizer, beside = (
        zero.shard(one, torch.optim.AdamW(one.added.parameters(), lr=0.05), stage=stage, **options)
        for one, stage in ((model, 3), (plain, 2))
    )
    before, kept = values(model), [id(param) for param in model.parameters()]
    with optimizer.gathered():
        assert all(type(param) is nn.Parameter and param.data_ptr() for param in model.parameters())
        assert same(before, values(model)) and not model(torch.ones(1, 8)).requires_grad
    for one, its in ((model, optimizer), (plain, beside)):
        train(one, its, rank)
        with its.gathered([one.base[2].weight, one.added[0]]):
            one.base[2].weight.numpy()[:] = 0.5
            one.added[0][1].bias.numpy()[1] = 2.0
            if one is model:
                assert inside.is_absent(model.base[4].weight) and inside.is_absent(model.added[2][0].weight)
        train(one, its, rank)
    assert same(values(model), values(plain)) and kept == [id(param) for param in model.parameters()]
    reached = model(torch.ones(2, 8)).sum()
    with optimizer.gathered(model.added):  # between a forward and its backward
        pass
    with optimizer.gathered(), pytest.raises(RuntimeError, match=r"within gathered\(\) through a graph that was made outside"):
        reached.backward(retain_graph=True)
    optimizer.zero_grad()
    reached.backward()
    with pytest.raises(RuntimeError, match=r"Cannot step or load within gathered"), optimizer.gathered(model.added[0]):
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.gathered(), torch.enable_grad():
        reached = model(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match=r"through a graph that was made within gathered\(\)"):
        reached.backward()
    with pytest.raises(TypeError, match="Cannot gather a int"):
        optimizer.gathered(3)
    with optimizer.gathered():
        optimizer.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    beside.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_weights_are_lent_as_ordinary_tensors_and_taken_back_with_what_was_written_to_them(shared_memory):
    ranks.run(2, lent, shared_memory)


def lent_of_no_dimension(rank, world):
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = shard(model, 3)
    with optimizer.gathered():
        model.scale.numpy()[...] = 2.0
    assert model.scale.item() == 2.0 and inside.is_absent(model.scale)
    optimizer.close()


def test_a_parameter_of_no_dimension_is_lent_too():
    ranks.run(1, lent_of_no_dimension)


def frozen_while_lent(rank, world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    optimizer = shard(model, 3)
    with optimizer.gathered():
        model[0].requires_grad_(False)
        model[1].requires_grad_(True)
    assert [param.requires_grad for param in model.parameters()] == [False, False, True, True]
    model(torch.ones(1, 2)).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [False, False, True, True]
    optimizer.close()


def test_a_parameter_that_is_frozen_or_thawed_while_it_is_lent_stays_so():
    ranks.run(1, frozen_while_lent)


def begun_on_meta(rank, world, shared_memory):
    """A model on the meta device, initialised after it was sharded."""

    def build():
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4), nn.Linear(4, 4).requires_grad_(False))

    torch.manual_seed(5)
    plain = build()
    with torch.device("meta"):
        model = build()
    optimizer, beside = shard(model, 3, shared_memory=shared_memory), shard(plain, 2)
    for part, name in ((model, "0.weight"), (model[2], "2.weight")):
        with pytest.raises(RuntimeError, match=rf"^Cannot run to_empty\(\) on {name}: .* Leave to_empty out: "):
            part.to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    with pytest.raises(RuntimeError, match=r"Cannot step: nobody has written to .*3\.bias.*1\.running_mean"):
        optimizer.step()
    model[1].reset_parameters()
    model[3].reset_parameters()
    train(model, optimizer, rank)
    train(plain, beside, rank)
    assert same(values(model), values(plain)) and same(list(model.buffers()), list(plain.buffers()))
    beside.close()
    optimizer.close()
    assert same(values(model), values(plain))
    with torch.device("meta"):
        model = build()
    shard(model, 3).close()
    assert all(type(param) is nn.Parameter and param.is_meta for param in model.parameters())


@pytest.mark.parametrize(("world", "shared_memory"), [(1, True), (2, False)])
def test_a_model_on_the_meta_device_is_initialised_in_its_shares(world, shared_memory):
    ranks.run(world, begun_on_meta, shared_memory)


def with_memory_first(rank, world, stage):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in model:
        layer.reset_parameters()
    optimizer = shard(model, stage)
    train(model, optimizer, rank)
    trained = values(model)
    optimizer.close()
    return trained


def test_a_model_that_to_empty_gave_memory_before_it_was_sharded_trains_at_each_stage():
    expected, *others = (ranks.run(2, with_memory_first, stage) for stage in (0, 2, 3))
    assert all(same(mine, expected[0]) for found in (expected, *others) for mine in found)


def from_a_file(rank, world):
    model = mlp()
    file = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}  # fmt: skip
    engine, *_ = zero.initialize(model=model, config=file)
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
    assert engine.zero_optimization_stage() == 3
    engine.destroy()


def compiled(rank, world):
    from torch._dynamo.utils import counters

    model, plain = mlp(), mlp()
    optimizer, beside = shard(model, 3), shard(plain, 2)
    counters.clear()
    zero.compile(model, backend="aot_eager")
    train(model, optimizer, rank)
    assert counters["frames"]["total"] < 5, "the compiler leaves alone what operators of weights come to"
    train(plain, beside, rank)
    assert same(values(model), values(plain))
    for one in (optimizer, beside):
        one.close()


def test_a_compiled_model_gathers_between_its_graphs():
    ranks.run(1, compiled)


def test_a_deepspeed_file_asks_for_it():
    ranks.run(2, from_a_file)


@pytest.mark.parametrize(("given", "is_"), [("auto", "auto"), ("all", "all"), (0, 0), ("4 KiB", 4096), ("2MB", 2_000_000)])
def test_gathered_bytes_are_a_number_of_bytes_auto_or_all(given, is_):
    assert zero.ZeroConfig(stage=3, gathered_bytes=given).gathered_bytes == is_


@pytest.mark.parametrize("given", [-1, "some", "4 parsecs", 1.5])
def test_other_gathered_bytes_are_refused(given):
    with pytest.raises(ValueError, match="gathered_bytes"):
        zero.ZeroConfig(stage=3, gathered_bytes=given)


def sent_to_the_host(rank, world, dtype, frozen):
    """Weights leave the device and come back between steps: the same training, and nothing of them on the device meanwhile."""
    place, device = place_of(rank, "sim"), accelerators.current()
    trained = []
    for away in (True, False):
        with place:
            model = adapted().to(place) if frozen else mlp().to(place)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = zero.shard(
            model, torch.optim.AdamW(params, lr=0.05), stage=3, dtype=dtype, bucket_bytes=1024, gathered_bytes="all"
        )
        for _ in range(2):
            train_on(place, model, optimizer, rank)
            if away:
                before, memory = device.memory().allocated, [*inside.memory_of_weights(optimizer)]
                kept = sum(tensor.nbytes for tensor in memory if tensor.device == place)
                on_host = sum(tensor.nbytes for tensor in memory if tensor.is_cpu)
                del memory
                assert kept > 0 and on_host == (kept if world > 1 else 0)  # other ranks read the copy on the host
                optimizer.offload_states(["weights"])
                assert device.memory().allocated <= before - kept
                assert all(tensor.is_cpu for tensor in inside.memory_of_weights(optimizer))
                with pytest.raises(ValueError, match="weights are away since offload_states"):
                    model(torch.ones(1, 8, device=place, dtype=params[0].dtype))
                optimizer.reload_states()
                assert kept == sum(each.nbytes for each in inside.memory_of_weights(optimizer) if each.device == place)
        train_on(place, model, optimizer, rank)
        optimizer.check()
        trained.append([value.cpu() for value in values(model)])
        optimizer.close()
    assert same(*trained)


def train_on(place, model, optimizer, rank):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(place)
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@needs_sim
@pytest.mark.parametrize(
    ("world", "dtype", "frozen"),
    [(2, None, True), *(pytest.param(*one, False, marks=pytest.mark.full) for one in [(1, None), (2, "bfloat16")])],
)
def test_weights_in_shares_leave_the_device_for_a_while(world, dtype, frozen):
    ranks.run(world, sent_to_the_host, dtype, frozen, env={"ACCELERATOR": "sim"}, apart="sim")
