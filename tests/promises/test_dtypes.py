"""D: dtypes, shapes and how parameters lie."""

import collections
import contextlib
import copy
import dataclasses
import math
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

import accelerators
from tests import inside, ranks
from tests.devices import needs_sim
from tests.promises.loops import TINY, adamw, alone, case_of, differs, on_ranks, one_step, same, weights
from tests.promises.trainings import gloo_group, what_differs
from tests.zoo.case import backward, draw, filled, finish, like, real_loss, real_mlp, sgd
from tests.zoo.steps import real_step
from zero import shard
from zero.config.schema import ZeroConfig
from zero.errors import RanksDiffer, ZeroError
from zero.plan.layout import FlatLayout, ParamSpec

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
BUCKETS = pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])


# D01: several dtypes in one group ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A bf16 base, an fp32 norm and adapter, and an fp64 head."""

    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4)
        self.adapter, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3).double()

    def forward(self, x):
        h = self.norm(self.base(x.bfloat16()).float())
        return self.head((h + self.adapter(x.float())).double())


def mixed_step(model, optimizer, rank, world, step):
    backward(optimizer, real_loss(model(draw(model, (3, 4), rank, step, real=True))))
    yield "settle"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    finish(optimizer)
    return norm.float(), [parameter.dtype for parameter in model.parameters()]


@pytest.mark.promise("D01")
@STAGES
@BUCKETS
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bf16_fp32_and_fp64_in_one_group_keep_their_dtypes_and_equal_plain_torch(stage, bucket_bytes, world):
    case = case_of(mixed_step, lambda: filled(Mixed(), real=True), adamw, steps=4)
    assert len(adamw(case.build()).param_groups) == 1
    assert differs(case, world, stage=stage, bucket_bytes=bucket_bytes) is None


class Islands(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x).float()).to(self.last.weight.dtype))


@pytest.mark.promise("D01")
@STAGES
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pattern", ["norm", "norm.*", "*norm*"])
def test_modules_named_in_keep_fp32_are_not_cast_and_equal_plain_torch(stage, dtype, pattern):
    def script(model, optimizer, rank, world, step):
        assert model.norm.weight.dtype == torch.float32 and model.first.weight.dtype != torch.float32
        return (yield from real_step(model, optimizer, rank, world, step))

    case = case_of(script, lambda: filled(Islands(), real=True), adamw, keep_fp32=("norm.*",))
    scale = 8.0 if dtype == "fp16" else None
    assert differs(case, 2, stage=stage, dtype=dtype, scale=scale, keep_fp32=(pattern,)) is None


# D02, D03: masters ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("D02")
@STAGES
@BUCKETS
def test_a_master_of_an_fp32_weight_is_the_weight_and_no_copy(stage, bucket_bytes):
    model, optimizer = alone(make=adamw, stage=stage, bucket_bytes=bucket_bytes)
    for index, parameter in enumerate(model.parameters()):
        address, stop = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        masters = [master for _, master in inside.masters_of(optimizer, index)]
        assert all(address <= master.data_ptr() and master.data_ptr() + master.nbytes <= stop for master in masters)
        assert sum(master.nbytes for master in masters) == parameter.nbytes
    one_step(model, optimizer)
    assert [p.data_ptr() for p in model.parameters()] == [inside.masters_of(optimizer, i)[0][1].data_ptr() for i in range(4)]


@pytest.mark.promise("D03")
@STAGES
@BUCKETS
@pytest.mark.parametrize(("world", "dtype"), [(1, "float16"), (2, "bfloat16"), (3, "bfloat16")])
def test_after_each_of_ten_steps_every_weight_is_its_masters_rounded_value(stage, bucket_bytes, dtype, world):
    def program(model, optimizer, group):
        for step in range(10):
            one_step(model, optimizer, group.rank, step)
            for bucket in range(len(inside.buckets(optimizer))):
                rank = group.rank if stage else 0
                share = inside.share_of_weights(optimizer, bucket, rank)
                assert torch.equal(share, inside.share_of_masters(optimizer, bucket).to(share.dtype))
            before = weights(model)
            masters = optimizer.state_dict()["masters"]
            assert same(before, {name: masters[name].to(weight.dtype) for name, weight in before.items()})
        return before

    found = on_ranks(world, program, make=adamw, stage=stage, dtype=dtype, bucket_bytes=bucket_bytes)
    assert all(same(found[0], other) for other in found)


# D04, D05, D12, D13: what is not trained, and agreement -----------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, rank=0):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.linspace(0, 1, 7) + rank)
        self.register_buffer("narrow", torch.tensor([1.0, 2.0, 0.1]).half())
        self.register_buffer("wide", torch.tensor([1 / 3], dtype=torch.float64) * (1 + rank))
        self.register_buffer("numbers", torch.arange(5) + rank)
        self.register_buffer("flags", torch.tensor([True, False, rank == 0]))
        self.register_buffer("hidden", torch.full((2, 3), 0.1 + rank), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("strided", (torch.arange(6.0) + rank).view(2, 3).t())

    def forward(self, x):
        return self.linear(x)


@pytest.mark.promise("D04")
@STAGES
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_buffers_of_any_dtype_keep_it_and_their_bits(stage, dtype):
    model, optimizer = alone(lambda: filled(Buffered()), adamw, stage=stage, dtype=dtype)
    for step in range(2):
        one_step(model, optimizer, step=step)
    for (name, buffer), (_, expected) in zip(model.named_buffers(), Buffered().named_buffers(), strict=True):
        assert buffer.dtype == expected.dtype and torch.equal(buffer, expected), name
    assert "hidden" not in model.state_dict()


@pytest.mark.promise("D04")
def test_buffers_of_every_dtype_and_form_come_from_rank_0():
    models = iter([filled(Buffered(rank)) for rank in range(3)])
    found = on_ranks(3, lambda model, *_: dict(model.named_buffers()), build=lambda: next(models))
    expected = dict(Buffered(0).named_buffers())
    assert all(same(dict(buffers), expected) for buffers in found)


def buffer_in_another_dtype(rank):
    model = real_mlp()
    model.register_buffer("table", torch.ones(4, dtype=torch.bfloat16 if rank else torch.float32))
    return model


def buffer_of_another_shape(rank):
    model = real_mlp()
    model.register_buffer("table", torch.ones(4 + rank))
    return model


def left_out_of_another_shape(rank):
    """Trainable, but not the optimizer's: it is made equal to rank 0's too."""
    model = real_mlp()
    model.extra = nn.Linear(3 + rank, 3)
    return model


def try_to_shard(rank, world, build):
    model = build(rank)
    inner = torch.optim.SGD([p for name, p in model.named_parameters() if "extra" not in name], lr=0.1)
    try:
        shard(model, inner, stage=2, group=gloo_group())
    except ZeroError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.promise("D05")
@pytest.mark.parametrize("build", [buffer_in_another_dtype, buffer_of_another_shape, left_out_of_another_shape])
def test_metadata_is_agreed_before_anything_is_sent(build):
    for text in ranks.run(2, try_to_shard, build, timeout=30.0):
        assert "rank 1 has" in text and ("table" in text or "extra.weight" in text)


@pytest.mark.promise("D12")
@STAGES
def test_integer_and_bool_parameters_are_left_alone_but_equal_on_all_ranks(stage):
    def build(rank=0):
        model = real_mlp()
        model.register_parameter("steps", nn.Parameter(torch.arange(5) + rank, requires_grad=False))
        model.register_parameter("mask", nn.Parameter(torch.tensor([True, rank == 0]), requires_grad=False))
        return model

    models = iter([build(rank) for rank in range(2)])

    def program(model, optimizer, group):
        kept = model.steps
        for step in range(3):
            one_step(model, optimizer, group.rank, step)
        assert model.steps is kept and model.steps.dtype == torch.int64
        assert not any("steps" in name for name in inside.names(optimizer))
        return dict(model.state_dict())

    for found in on_ranks(2, program, lambda: next(models), adamw, stage=stage, dtype="bfloat16"):
        assert torch.equal(found["steps"], torch.arange(5)) and torch.equal(found["mask"], torch.tensor([True, True]))


def seeded(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3).requires_grad_(False), nn.Linear(3, 2))


def start_apart(rank, world, stage, start):
    model = seeded(rank)
    model[1].running_mean.add_(rank)
    try:
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, group=gloo_group(), start=start)
    except RanksDiffer as error:
        return str(error)
    optimizer.check()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.promise("D13")
@STAGES
def test_ranks_with_different_seeds_start_with_rank_0s_bits(stage):
    found = ranks.run(2, start_apart, stage, "broadcast")
    expected = dict(seeded(0).state_dict())
    assert all(same(each, expected) for each in found)


@pytest.mark.promise("D13")
def test_ranks_with_different_seeds_are_refused_on_all_ranks_when_asked_to_verify():
    for text in ranks.run(2, start_apart, 2, "verify"):
        assert "rank 1 has weights of 0.weight" in text


# D06, D07, D08: what gradients and devices can be -----------------------------------------------------------------------


class Widened(torch.autograd.Function):
    """As a compiled backward does: its gradient is fp32 whatever the weight is."""

    @staticmethod
    def forward(ctx, weight):
        return weight.float()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, 257.0)


@pytest.mark.promise("D06")
@STAGES
@BUCKETS
@pytest.mark.parametrize("kept", ["as it is", torch.float32, None])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 has no wider .grad")
def test_a_gradient_in_fp32_for_a_bf16_weight_is_not_rounded_on_its_way(stage, bucket_bytes, kept, world):
    """257 does not fit bf16: it shows whether a gradient was rounded before it was added."""

    def program(model, optimizer, group):
        if kept != "as it is":
            model.weight.grad_dtype = kept
        found = []
        for _ in range(2):
            backward(optimizer, Widened.apply(model.weight).sum())
            optimizer.settle()
            found.append(torch.cat(inside.shares_of_gradients(optimizer)))
            optimizer.zero_grad()
            assert model.weight.grad_dtype == (torch.bfloat16 if kept == "as it is" else kept)
        return found

    # If `.grad` may not be wider, torch rounds it before anybody else sees it.
    true = 256.0 if kept == "as it is" else 257.0
    options = {"stage": stage, "dtype": "bfloat16", "bucket_bytes": bucket_bytes}
    for shares in zip(*on_ranks(world, program, lambda: nn.Linear(3, 5, bias=False), **options), strict=True):
        assert set(torch.cat(shares).tolist()) <= {0.0, true} and true in torch.cat(shares)


@pytest.mark.promise("D07")
def test_what_an_accelerator_supports_is_answered_by_true_or_false_and_holds():
    accelerator = accelerators.get("cpu")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        answer = accelerator.supports(dtype)
        assert answer is True or answer is False
        if answer:
            ones = torch.ones(2, 2, dtype=dtype)
            assert torch.equal(ones @ ones, 2 * ones)
        assert (dtype in accelerator.supported_dtypes()) == answer


@pytest.mark.promise("D07")
def test_an_unsupported_dtype_is_refused_with_the_supported_ones_before_anything_changes(monkeypatch):
    kind = type(accelerators.get("cpu"))
    monkeypatch.setattr(kind, "supports", lambda self, dtype: dtype is not torch.float16)
    monkeypatch.setattr(kind, "supported_dtypes", lambda self: (torch.float32, torch.bfloat16))
    model = real_mlp()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"Cannot use weights in torch.float16: .*Use one of float32, bfloat16"):
        shard(model, sgd()(model), stage=1, dtype=torch.float16)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def train_without_fp64(rank, world):
    import accelerators_sim as simulated

    simulated.bring_up()
    with simulated.without("fp64"):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            torch.ones(2, device="sim:0").double()
        model = real_mlp().to("sim:0")
        optimizer = shard(model, sgd()(model), stage=2, clip=0.1)
        norms = []
        for step in range(2):
            backward(optimizer, real_loss(model(like(model, draw(model, (3, 4), 0, step, real=True)))))
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
            finish(optimizer)
        torch.accelerator.synchronize()
        return norms, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.promise("D08")
@needs_sim
def test_norms_and_clipping_use_no_fp64_on_a_device_without_it():
    norms, found = ranks.run(1, train_without_fp64, fresh=True, timeout=60.0)[0]
    model, optimizer = alone(clip=0.1)
    for step, norm in enumerate(norms):
        backward(optimizer, real_loss(model(draw(model, (3, 4), 0, step, real=True))))
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item() == pytest.approx(norm, rel=1e-5)
        finish(optimizer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-5)


# D09, D10: where parameters lie -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.randn(numel)) for numel in (1, 3, 5, 7, 2, 13, 1, 31))

    def forward(self, x):
        return sum((item * x.sum()).sum() for item in self.items)


@pytest.mark.promise("D09")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("align_bytes", [16, 64, 256])
@pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
def test_parameters_of_odd_sizes_begin_at_a_multiple_of_the_alignment(dtype, align_bytes, bucket_bytes):
    model, optimizer = alone(Odd, adamw, dtype=dtype, align_bytes=align_bytes, bucket_bytes=bucket_bytes)
    layout = inside.layout(optimizer)
    for slot in layout.slots:
        item_bytes = model.items[slot.param].element_size()
        assert slot.span.start * item_bytes % align_bytes == 0
    assert all(item.data_ptr() % min(64, align_bytes) == 0 for item in model.items)
    assert all(master.data_ptr() % 16 == 0 for index in range(8) for _, master in inside.masters_of(optimizer, index))


@pytest.mark.promise("D09")
def test_an_alignment_that_is_no_power_of_two_or_below_16_is_refused():
    for align_bytes, words in ((48, "powers of two"), (8, "it must be at least 16")):
        with pytest.raises(ValueError, match=words):
            ZeroConfig(stage=1, align_bytes=align_bytes)


@pytest.mark.promise("D10")
@pytest.mark.parametrize("world", [1, 3, 8])
def test_three_billion_elements_are_planned_without_memory(world):
    specs = [ParamSpec("large", (3_000_000_000,), "bfloat16"), ParamSpec("small", (5,), "bfloat16")]
    layout = FlatLayout.build(specs, world, bucket_bytes=2**30)
    large = layout.slots[0]
    assert large.span.numel == 3_000_000_000 and max(bucket.span.stop for bucket in layout.buckets) >= 3_000_000_000
    pieces = [piece for rank in range(world) for piece in layout.pieces(0, rank)]
    pieces.sort(key=lambda piece: piece.in_param.start)
    assert [piece.in_param.start for piece in pieces] == [0, *(piece.in_param.stop for piece in pieces[:-1])]
    assert pieces[-1].in_param.stop == 3_000_000_000
    model = nn.Linear(60_000, 50_000, bias=False, device="meta")
    assert model.weight.numel() == 3_000_000_000
    with pytest.raises(ValueError, match="weight is on the meta device"):
        shard(model, torch.optim.SGD(model.parameters()), stage=2)


# D11: other people's tensors --------------------------------------------------------------------------------------------


class Quantised(torch.Tensor):
    pass


class Packed(nn.Parameter):
    """As bitsandbytes does: a Parameter of a class of its own."""


def try_distributed_tensor(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = real_mlp()
    mesh = init_device_mesh("cpu", (1, world))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Shard(1), Shard(1)]))
    with pytest.raises(ValueError, match=r"2\.weight: its placements are .*is cut along one dimension, or along its first and"):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=gloo_group())
    return True


@pytest.mark.promise("D11")
def test_a_tensor_that_is_cut_twice_along_one_dimension_is_refused_by_name():
    assert ranks.run(2, try_distributed_tensor) == [True, True]


@pytest.mark.promise("D11")
@pytest.mark.parametrize("kind", [Quantised, Packed])
def test_a_parameter_of_a_class_of_its_own_is_refused_by_name_and_the_model_is_as_it_was(kind):
    model = real_mlp()
    value = model[2].weight.detach()
    model[2].weight = Packed(value) if kind is Packed else nn.Parameter(value.as_subclass(Quantised))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=rf"2\.weight is a .*{kind.__name__}.*Leave it out of the optimizer"):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.mark.promise("D11")
@STAGES
def test_a_frozen_parameter_of_a_class_of_its_own_passes_through_untouched(stage):
    def build():
        model = real_mlp()
        model[2].weight = Packed(model[2].weight.detach(), requires_grad=False)
        return model

    def make(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def program(model, optimizer, group):
        kept, value = model[2].weight, model[2].weight.detach().clone()
        for step in range(2):
            one_step(model, optimizer, group.rank, step)
        assert model[2].weight is kept and type(kept) is Packed and torch.equal(kept, value)

    on_ranks(2, program, build, make, stage=stage)


REFUSED = {
    "complex": (lambda model: setattr(model[2], "bias", nn.Parameter(torch.zeros(3) * 1j)), "2.bias is complex"),
    "meta": (lambda model: model.to("meta"), "0.weight is on the meta device"),
    "partly meta": (lambda model: model[2].to("meta"), "several devices"),
    "fp8": (lambda model: setattr(model[2], "bias", nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))), "2.bias has dtype"),
    "overlapping": (lambda model: setattr(model[2], "bias", nn.Parameter(torch.zeros(1).expand(3))), "2.bias overlaps itself"),
    "sharing": (lambda model: setattr(model[2], "bias", nn.Parameter(model[0].bias.detach()[:3])), "share memory"),
}


@pytest.mark.promise("D11")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_lie_flat_is_refused_by_name(what):
    change, words = REFUSED[what]
    model = real_mlp()
    change(model)
    with pytest.raises(ValueError, match=words):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32"}], ids=str)
def test_weights_that_are_fp16_have_a_loss_scale_whoever_made_them_so(options):
    half, single = real_mlp().half(), real_mlp()
    for model in (half, single):
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, **options)
        is_half = model[0].weight.dtype == torch.float16
        assert (optimizer.loss_scale is not None) == is_half == ("loss_scale.dynamic = true" in said(optimizer))
        assert optimizer.config.on_nonfinite == ("skip" if is_half else "propagate")


@pytest.mark.promise("T02")
def test_fp16_weights_join_a_training_that_has_a_loss_scale_alone():
    for options, is_refused in (({}, True), ({"loss_scale": "dynamic"}, False)):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).half()])
        optimizer = shard(model, torch.optim.SGD(model[0].parameters(), lr=0.1), stage=2, **options)
        with pytest.raises(ValueError, match="Cannot add float16 weights") if is_refused else contextlib.nullcontext():
            optimizer.add_param_group({"params": list(model[1].parameters())})
        assert len(optimizer.param_groups) == 2 - is_refused
        before = model[1].weight.detach().clone()
        optimizer.backward(model[1](model[0](torch.ones(1, 4)).half()).float().sum() * math.inf)
        optimizer.step()
        assert torch.equal(model[1].weight, before) and optimizer.skipped_steps == 1 - is_refused


class Asked(nn.Module):
    """Notes what its forward is given; a dict with attributes and a named tuple are kinds that users have."""

    Pair = collections.namedtuple("Pair", "one other")

    def __init__(self):
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.seen = []

    def forward(self, x, ids=None, **more):
        self.seen = [x, *torch.utils._pytree.tree_leaves(more)]
        return self.norm(self.layer(x if ids is None else x + self.words(ids)).to(self.norm.weight.dtype))


@pytest.mark.promise("T05")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_floating_inputs_are_cast_where_weights_are_as_under_fsdp2(stage, half):
    model = Asked()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, dtype=half, keep_fp32=["norm"])
    wide, quantized, number = torch.ones(2, 4), torch.ones(2).to(torch.float8_e4m3fn), torch.tensor([1, 2])
    pair, table = Asked.Pair([wide.double(), number], (wide,)), collections.OrderedDict(a=wide, b={"c": wide, "d": "text"})
    wide.requires_grad_()
    out = model(wide, number, pair=pair, table=table, kept=quantized, none=None)
    found = [each.dtype for each in model.seen if isinstance(each, torch.Tensor)]
    assert found == [half, half, torch.int64, half, half, half, torch.float8_e4m3fn]
    optimizer.backward(out.sum())
    assert wide.grad.dtype == torch.float32, "the cast is part of the graph"
    assert table["a"].dtype == torch.float32, "what the caller has stays as it is"
    optimizer.step()
    optimizer.close()
    model.float()(torch.ones(2, 4))
    assert model.seen[0].dtype == torch.float32 and not model._forward_pre_hooks, "closed, the model is plain"


@dataclasses.dataclass(frozen=True)
class Sample:
    values: Any
    ids: Any = None
    about: Any = None


class Given(nn.Module):
    """Keeps what its forward is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, *given):
        self.given = given


def test_inputs_in_dataclasses_are_cast_as_under_fsdp2_and_containers_may_contain_themselves():
    model, wide, half = Given(), torch.ones(2), torch.bfloat16
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, dtype=half)
    around, table = [wide], {"values": wide}
    around.append(around)
    table["parent"] = Sample(around, torch.tensor([1]), table)
    model(around, table, [[wide]])
    (first, itself), cast, ((inner,),) = model.given
    assert first.dtype == inner.dtype == cast["values"].dtype == half and itself is model.given[0]
    assert cast["parent"].values is itself and cast["parent"].about is cast and cast["parent"].ids.dtype == torch.int64
    assert around[0] is wide and table["values"] is wide and table["parent"].values is around, "the caller's own are as before"
    optimizer.close()


def test_containers_without_floating_inputs_are_those_of_the_caller():
    """A forward may leave something in them."""
    model = Given()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, dtype="bfloat16")
    given = [], {}, {"ids": torch.ones(1).long()}, Sample(torch.ones(1).bfloat16()), ([], "text"), {"itself": []}
    given[-1]["itself"].append([torch.ones(1).bfloat16()])
    model(*given, torch.ones(1))
    assert all(found is each for found, each in zip(model.given, given, strict=False))
    optimizer.close()


def test_inputs_stay_as_they_are_where_that_is_said_or_weights_are_not_cast():
    for options in ({"dtype": "bfloat16", "cast_inputs": False}, {}):
        model = nn.Sequential(Asked())
        optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, **options)
        assert not model._forward_pre_hooks and optimizer.config.cast_inputs is False
        optimizer.close()
    with pytest.raises(ValueError, match="Give dtype"):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, cast_inputs=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_is_cast_back_or_given_other_weights_takes_inputs_as_they_are(stage):
    model, x = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), real=True), torch.ones(2, 4)
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, dtype="bfloat16")
    exact = {name: param.detach().float() for name, param in model.named_parameters()}
    averaged = copy.deepcopy(model).float()
    assert averaged(x).dtype == torch.float32
    assert torch.equal(torch.func.functional_call(model, exact, (x,)), averaged(x))
    assert model(x).dtype == torch.bfloat16
    optimizer.close()


def test_a_model_whose_inputs_are_cast_is_compiled_copied_pickled_and_scripted_as_before():
    make = lambda: filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), real=True)  # noqa: E731
    x, models = torch.ones(2, 4), [make(), torch.jit.script(make())]
    kept = [shard(each, torch.optim.SGD(each.parameters(), lr=0.1), stage=2, dtype="bfloat16") for each in models]
    model, scripted = models
    expected = model(x)
    assert torch.equal(scripted(x), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    for copied in (copy.deepcopy(model), pickle.loads(ForkingPickler.dumps(model))):
        assert torch.equal(copied(x), expected)
    filed = pickle.loads(pickle.dumps(model))
    assert torch.equal(filed(x.bfloat16()), expected)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        filed(x)  # the same as after close()
    for optimizer in kept:
        optimizer.close()


@pytest.mark.promise("T02")
@pytest.mark.parametrize("came_so", [True, False])
def test_fp16_weights_skip_what_is_not_finite_and_propagate_is_refused(came_so):
    model = real_mlp().half() if came_so else real_mlp()
    given = {"stage": 2} | ({} if came_so else {"dtype": torch.float16})
    for scale in ({}, {"loss_scale": "dynamic"}, {"loss_scale": 8.0}):
        with pytest.raises(ValueError, match="Cannot use on_nonfinite='propagate'"):
            shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **given, **scale, on_nonfinite="propagate")
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    before, scales = {name: param.detach().clone() for name, param in model.named_parameters()}, [optimizer.loss_scale.value]
    for _ in range(3):
        optimizer.backward(model(draw(model, (2, 4), 0, 0, real=True)).float().sum() * math.inf)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale.value)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters()) and optimizer.skipped_steps == 3
    assert scales == [65536.0, 65536.0, 32768.0, 16384.0]  # the first one is forgiven


def said(optimizer):
    text = optimizer.config.text()
    return text.replace("[loss_scale]\n", "loss_scale.")


def test_an_fp16_model_trains_on_gradients_that_would_underflow():
    model = real_mlp().half()
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=2.0**24), stage=2)
    before = model[2].bias.detach().clone()
    optimizer.backward(model(draw(model, (2, 4), 0, 0, real=True)).float().sum() * 2.0**-28)  # below the least fp16 number
    optimizer.step()
    torch.testing.assert_close(before - model[2].bias.detach(), torch.full((3,), 2.0**-3).half(), rtol=0.02, atol=0.0)


def test_the_zoo_in_every_dtype_equals_the_oracle():
    assert what_differs(["adamw_groups_edited_at_every_step"], dtypes=("fp32", "bf16", "fp16"), worlds=(1, 3)) == []
    assert inside.master_dtype(torch.bfloat16) == torch.float32
