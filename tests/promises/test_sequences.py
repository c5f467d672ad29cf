"""Y01 to Y04: models train on parts of sequences as one process does on whole ones."""

from __future__ import annotations

import contextlib
import copy
import random
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zero
from examples import experts
from tests import ranks

HEADS, WIDTH, VOCABULARY, SAMPLES, NUM_STEPS = 4, 16, 19, 2, 3
LARGEST = 1e-10  # in float64, after AdamW whose eps keeps the last bit of a sum from becoming a sign


class Attention(nn.Module):
    def __init__(self, grouped: int) -> None:
        super().__init__()
        size = grouped * WIDTH // HEADS
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, size), nn.Linear(WIDTH, size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        projected = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value))
        query, key, value = projected
        gqa = key.shape[1] < query.shape[1]
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, grouped: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(grouped)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, grouped: int = HEADS, recomputes: str = "") -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(grouped) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            again = {"use_reentrant": self.recomputes == "reentrant"}
            x = checkpoint(block, x, mask, **again) if self.recomputes else block(x, mask)
        return self.head(x)


def make_model(grouped: int = HEADS, recomputes: str = "") -> Model:
    torch.manual_seed(0)
    return Model(grouped, recomputes).double()


def batch_of(case: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
    """The samples of one row of ranks, with labels beside their own tokens, of which some count for nothing."""
    generator, length = torch.Generator().manual_seed(number), case.get("length", 12)
    tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(SAMPLES, length, generator=generator) < 0.3, -100)
    if case.get("masked"):  # all targets are in the first half
        labels[:, length // 2 + 1 :] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if case.get("packed"):  # in documents that end elsewhere in each sample
        starts = torch.tensor([[0, 5, 9], [0, 2, 10]])
        number_of = (torch.arange(length)[None, None] >= starts[:, :, None]).sum(1) - 1
        batch["position_ids"] = torch.arange(length) - starts.gather(1, number_of)
    return batch


def mask_of(case: dict[str, Any], batch: dict[str, torch.Tensor], size: int) -> torch.Tensor | None:
    """The mask of whole sequences, padded to a multiple of so many ranks: of documents, of a window, or one for each head."""
    length = -(-batch["input_ids"].shape[1] // size) * size
    places = torch.arange(length)
    mask = places[:, None] >= places
    if case.get("packed"):
        documents = F.pad((batch["position_ids"] == 0).cumsum(1), (0, length - batch["input_ids"].shape[1]))
        return (documents[:, :, None] == documents[:, None, :])[:, None] & mask
    if case.get("window"):
        return mask & (places[:, None] - places < case["window"])
    if case.get("biased"):
        slopes = torch.arange(1, HEADS + 1, dtype=torch.float64)[:, None, None] / 8
        return torch.where(mask, slopes * (places - places[:, None]), -torch.inf)
    return None


def sum_of(model: nn.Module, batch: dict[str, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["position_ids"], mask)
    return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")


# Layers that are cut over ranks, if they are.
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "attention.out": RowwiseParallel(),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}}  # fmt: skip


def whole_of(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.1)


def trained_alone(case: dict[str, Any], rows: int) -> tuple[nn.Module, list[float]]:
    """Trains on the samples of all rows, and returns the model and the norm at each step."""
    model, norms, micro_steps = make_model(case.get("grouped", HEADS)), [], case.get("micro_steps", 1)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        batches = [batch_of(case, 100 * step + each) for each in range(rows * micro_steps)]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        for batch in batches:
            targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            positions = batch.get("position_ids", torch.arange(targets.shape[1]).expand_as(targets))
            whole = {"input_ids": batch["input_ids"], "position_ids": positions, "shift_labels": targets}
            (sum_of(model, whole, mask_of(case, batch, 1)) / total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.get("clip") or 1e9)))
        optimizer.step()
    return model, norms


def differences(rank: int, world: int, cases: list[dict[str, Any]]) -> list[float]:
    """Returns how far weights and norms are from those of one process, for each case."""
    worst = []
    for case in cases:
        size, micro_steps = case.get("sp", world), case.get("micro_steps", 1)
        tp, rows = case.get("tp", 1), world // (size * case.get("tp", 1))
        mesh = init_device_mesh("cpu", (rows, size, tp), mesh_dim_names=("dp", "sp", "tp"))
        expected, norms = trained_alone(case, rows)
        model = make_model(case.get("grouped", HEADS), case.get("recomputes", ""))
        options = {"reduce": "sum", "clip": case.get("clip"), **case["options"]}
        if tp > 1:
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], PLAN)
            options["group"] = mesh["sp"]
        zero.ulysses(mesh["sp"], model)
        optimizer = zero.shard(model, adamw(model), **options)
        if case.get("compiled"):
            zero.compile(model, backend="aot_eager", fullgraph=True)
        apart = 0.0
        for step in range(NUM_STEPS):
            first = 100 * step + mesh["dp"].get_local_rank() * micro_steps
            batches = [batch_of(case, first + each) for each in range(micro_steps)]
            cut = [zero.sequence_batch(batch, mesh["sp"], options.get("group")) for batch in batches]
            total = sum(number for _, number in cut)
            for batch, (part, _) in zip(batches, cut, strict=True):
                (sum_of(model, part, mask_of(case, batch, size)) / total).backward()
            optimizer.step()
            apart = max(apart, abs(optimizer.grad_norm / norms[step] - 1))
            optimizer.zero_grad()
        optimizer.check()
        optimizer.close()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            apart = max(apart, float((whole_of(one) - other).detach().abs().max()))
        worst.append(apart)
    return worst


AT_3 = {"stage": 3, "keep_whole_numel": 0}
CASES: dict[str, dict[str, Any]] = {
    "causal": {"options": {"stage": 0}},
    "a window, one head of keys": {"window": 3, "grouped": 1, "micro_steps": 2, "options": {"stage": 1, "bucket_bytes": 512}},
    "packed, a rank without targets": {"packed": True, "masked": True, "clip": 0.05, "options": {"stage": 2}},
    "padded, recomputed": {"length": 11, "recomputes": "yes", "clip": 0.05, "options": {**AT_3, "shared_memory": False}},
    "packed, padded, two heads of keys": {"packed": True, "length": 13, "grouped": 2, "options": AT_3},
    "a mask for each head, recomputed by a reentrant checkpoint": {
        "biased": True, "recomputes": "reentrant", "options": {"stage": 2}},
    "compiled blocks": {"grouped": 2, "compiled": True, "options": AT_3},
}  # fmt: skip


@pytest.mark.promise("Y01", "Y02", "Y03")
def test_parts_of_sequences_train_as_whole_ones_in_one_process() -> None:
    """Leaves out the compiled case, which takes as long as all others and is trained at night."""
    cases = {name: case for name, case in CASES.items() if not case.get("compiled")}
    for worst in ranks.run(2, differences, list(cases.values())):
        assert max(worst) < LARGEST, list(zip(cases, worst, strict=True))


@pytest.mark.full
def test_compiled_blocks_train_on_parts_of_sequences_as_in_one_process() -> None:
    assert max(max(worst) for worst in ranks.run(2, differences, [CASES["compiled blocks"]])) < LARGEST


@pytest.mark.full
def test_blocks_whose_attention_is_exchanged_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(grouped=2)
    zero.ulysses(None, model)
    optimizer = zero.shard(model, adamw(model), **AT_3)
    zero.compile(model, backend="aot_eager", fullgraph=True)
    part, _ = zero.sequence_batch(batch_of({}, 0), None)
    sum_of(model, part, None).backward()
    optimizer.close()
    assert "are no regions" not in caplog.text


def drawn(seed: int) -> dict[str, Any]:
    """Returns a training that is drawn by a seed."""
    draw = random.Random(seed)
    case: dict[str, Any] = {
        "sp": draw.choice((2, 4)), "grouped": draw.choice((1, 2, 4)), "length": draw.choice((11, 12, 13, 16)),
        "micro_steps": draw.choice((1, 1, 2, 3)), "recomputes": draw.choice(("", "", "yes", "reentrant")),
        "masked": draw.random() < 0.3, "clip": draw.choice((None, 0.02, 0.3)),
    }  # fmt: skip
    case |= draw.choice(({}, {"packed": True}, {"window": draw.choice((1, 3, 9))}, {"biased": True}))
    options = {"stage": draw.choice((0, 1, 2, 3)), "bucket_bytes": draw.choice((128, 2048, 2**20))}
    options |= {"shared_memory": False} if draw.random() < 0.5 else {}
    options |= {"shard_ranks": draw.choice((1, 2))} if draw.random() < 0.2 else {}
    if options["stage"] == 3:
        options |= {"keep_whole_numel": draw.choice((0, 20)), "gathered_bytes": draw.choice((0, 1000, 10**9))}
    return {**case, "options": options}


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_trainings_on_parts_of_sequences_are_as_in_one_process(first: int) -> None:
    cases = [drawn(seed) for seed in range(first, first + 10)]
    for worst in ranks.run(4, differences, cases, timeout=600.0):
        assert max(worst) < LARGEST, list(zip(cases, worst, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_sequences_and_of_layers_train_as_whole_ones(stage: int) -> None:
    options = {"stage": stage, "keep_whole_numel": 0} if stage == 3 else {"stage": stage}
    cases: list[dict[str, Any]] = [{"sp": 2, "tp": 2, "length": 11, "grouped": 2, "options": options}]
    cases += [{"sp": 2, "tp": 2, "packed": True, "recomputes": "yes", "clip": 0.05, "options": options}]
    for worst in ranks.run(4, differences, cases, timeout=600.0):
        assert max(worst) < LARGEST, worst


class WithExperts(nn.Module):
    """Attention before experts, which lie over ranks if there is a mesh."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.embed, self.attention, self.mixture = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 96), experts.Mixture(mesh)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(tokens) + positions.unsqueeze(-1) / 16
        query, key, value = self.attention(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.mixture(x + y.transpose(1, 2).flatten(2)))


def apart_with_experts(rank: int, world: int, stage: int) -> float:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    torch.manual_seed(0)
    plain = WithExperts(None).double()
    model = WithExperts(mesh).double()
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        param.data.copy_(whole.chunk(world)[rank] if "experts" in name else whole)
    zero.ulysses(mesh, model)
    optimizer, oracle = zero.shard(model, adamw(model), stage=stage, reduce="sum"), adamw(plain)
    for step in range(NUM_STEPS):
        batch = batch_of({}, step)
        part, number = zero.sequence_batch(batch, mesh)
        (sum_of(model, part, None) / number).backward()
        whole, _ = zero.sequence_batch(batch, None)
        (sum_of(plain, whole, None) / number).backward()
        optimizer.step(), optimizer.zero_grad(), oracle.step(), oracle.zero_grad()
    optimizer.close()
    return max(float((param - (whole.chunk(world)[rank] if "experts" in name else whole)).detach().abs().max())
               for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True))  # fmt: skip


@pytest.mark.promise("Y01")
@pytest.mark.parametrize("stage", [2, 3])
def test_experts_over_the_ranks_of_a_sequence_train_as_in_one_process(stage: int) -> None:
    assert max(ranks.run(2, apart_with_experts, stage)) < LARGEST


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_sequences_over_four_ranks_train_as_whole_ones_in_one_process(size: int) -> None:
    cases = [{**case, "sp": size} for case in CASES.values()]
    cases += [{**case, "sp": size, "options": options} for case in CASES.values() if not case.get("compiled")
              for options in ({"stage": 1}, {"stage": 2, "shared_memory": False}, AT_3)]  # fmt: skip
    for worst in ranks.run(4, differences, cases, timeout=600.0):
        assert max(worst) < LARGEST, list(zip(cases, worst, strict=True))


def called(way: str, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if way == "torch's layers":
        return model(x, torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), is_causal=True)
    if way.startswith("torch's layers"):  # with a window, or one for each head, and padding
        window = torch.ones(6, 6).tril(-3).bool()
        if way.endswith("heads"):
            window = torch.stack([torch.ones(6, 6).tril(-2 - head).bool() for head in range(2 * HEADS)])
        return model(x, window, src_key_padding_mask=torch.arange(6) >= torch.tensor([[5], [4]]))
    return model(x)


def apart_in_gradients(model: nn.Module, plain: nn.Module) -> float:
    """Returns how far the gradients of all ranks together are from those of one process."""
    worst = 0.0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.distributed.all_reduce(one.grad)
        worst = max(worst, float((one.grad - other.grad).abs().max()))
    return worst


def apart_by(rank: int, world: int, way: str) -> float:
    """Returns how far results and gradients of a model are from those of one that has whole sequences."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    torch.manual_seed(0)
    if way.startswith("torch's layers"):
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        plain: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    else:
        plain = Block(2).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    if not way.startswith("a block"):
        zero.ulysses(mesh, model)
    if way == "copied":
        model = copy.deepcopy(model)
    expected, part = called(way, plain, x), slice(rank * 6 // world, (rank + 1) * 6 // world)
    around = zero.ulysses(mesh) if way.startswith("a block") else contextlib.nullcontext()
    with around, torch.set_grad_enabled(way != "evaluated"):
        y = called(way, model, x[:, part])
        worst = float((y - expected[:, part]).abs().max())
        if way == "evaluated":
            return worst
        y.square().sum().backward()
    expected.square().sum().backward()
    return max(worst, apart_in_gradients(model, plain))


@pytest.mark.promise("Y01")
@pytest.mark.parametrize("way", [
    "a block", "a module", "copied", "evaluated", "torch's layers", "torch's layers, masked",
    pytest.param("torch's layers, masked by heads", marks=pytest.mark.full),
])  # fmt: skip
def test_attention_is_exchanged_wherever_it_is_called(way: str) -> None:
    assert max(ranks.run(2, apart_by, way)) < 1e-12


class ByHand(nn.Module):
    """Attention that is written out, which cannot be exchanged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def told(rank: int, world: int, case: str) -> str:
    """Returns the error of a rank that does what cannot be right."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    batch = batch_of({}, 0 if case != "other samples" else rank)
    model = make_model()
    is_alone = case.startswith("in a block") or case in ("masks", "grouped", "heads")
    attention = zero.ulysses(mesh) if is_alone else zero.ulysses(mesh, model)
    x = torch.randn(1, HEADS, 3, 4)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        if case == "in a block: torch's attention":
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0)
            with attention:
                checkpoint(layer, torch.randn(3, 1, WIDTH, requires_grad=True), use_reentrant=True)
        elif case.startswith("in a block"):
            model = make_model(recomputes=case.partition(": ")[2])
            with attention:
                model(batch["input_ids"], torch.zeros_like(batch["input_ids"]))
        elif case == "masks":
            attention(x, x, x, attn_mask=torch.ones(3, 3, dtype=torch.bool))
        elif case == "grouped":
            attention(x, x[:, :2], x[:, :2])
        elif case == "heads":
            x = torch.randn(1, 3, 3, 4)
            attention(x, x, x)
        elif case == "weights of attention":
            zero.ulysses(mesh, module := nn.MultiheadAttention(WIDTH, HEADS))
            module(*[torch.randn(3, 1, WIDTH)] * 3)
        elif case.startswith("one more token"):
            zero.ulysses(mesh, module := nn.MultiheadAttention(WIDTH, HEADS, **{case.partition(": ")[2]: True}))
            module(*[torch.randn(3, 1, WIDTH)] * 3, need_weights=False)
        elif case == "a mesh in another order":
            zero.ulysses(DeviceMesh("cpu", [1, 0]))
        elif case == "two products and a softmax":
            zero.ulysses(mesh, module := ByHand())
            module(x)
        elif case == "labels of samples":
            zero.sequence_batch({**batch, "labels": torch.tensor([0, 1])}, mesh)
        elif case == "pairs of tokens":
            zero.sequence_batch({**batch, "attention_mask": torch.ones(2, 1, 12, 12)}, mesh)
        elif case == "no tokens":
            zero.sequence_batch({"labels": batch["labels"]}, mesh)
        else:
            part, _ = zero.sequence_batch(batch, mesh)
            optimizer = zero.shard(model, adamw(model), stage=2)
            for portion in (1.0, 2.0) if case == "portions" else (1.0,):
                optimizer.weight(3.0 - portion if case == "portions" and rank else portion + rank * (case == "weights"))
                (sum_of(model, part, None) / 9).backward()
            if case == "one weight":
                optimizer.step()
                raise ValueError("stepped")
            optimizer.step()
    if case in ("weights", "portions", "one weight"):
        optimizer.close()
    return str(caught.value)


@pytest.mark.promise("Y03", "Y04")
@pytest.mark.parametrize(("case", "expected"), {
    "other samples": "rank 1 of 2 has other samples than rank 0",
    "weights": "rank 1 weighs its micro-batches 2 and rank 0 1, and each holds a part of the same sequences",
    "portions": "rank 1 weighs its micro-batches 3 and rank 0 3, in other portions",
    "one weight": "stepped",
    "heads": "Cannot exchange 3 heads of attention between 2 ranks",
    "grouped": "Cannot attend with 4 heads to 2: each query has keys of its own. Pass enable_gqa=True",
    "masks": "a sequence has 6 tokens on all ranks",
    "in a block: yes": "Cannot recompute attention that is exchanged inside a block",
    "in a block: reentrant": "Cannot recompute attention that is exchanged inside a block",
    "in a block: torch's attention": "Cannot recompute attention that is exchanged inside a block",
    "weights of attention": "Call it with need_weights=False",
    "one more token: add_bias_kv": "attends to a token which is not in the sequence",
    "one more token: add_zero_attn": "attends to a token which is not in the sequence",
    "a mesh in another order": "Cannot take ranks [1, 0] for the parts of sequences in this order",
    "two products and a softmax": "its forward exchanged no attention, so tokens saw those of this rank alone",
    "labels of samples": "Cannot cut labels of shape (2,): there is not one beside each of 12 tokens of 2 samples",
    "pairs of tokens": "one of pairs of tokens is not cut",
    "no tokens": "it has no input_ids",
}.items())  # fmt: skip
def test_what_would_train_wrongly_is_refused_on_all_ranks(case: str, expected: str) -> None:
    for said in ranks.run(2, told, case):
        assert expected in said, said


def apart_by_assigned(rank: int, world: int, way: str) -> float:
    """Returns how far a result and gradients are where a forward was assigned to the module."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    torch.manual_seed(0)
    plain = Attention(2).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    model.forward = types.MethodType(Attention.forward, model)  # type: ignore[method-assign]
    zero.ulysses(mesh, model)
    if way == "copied":
        model = copy.deepcopy(model)
    part = slice(rank * 6 // world, (rank + 1) * 6 // world)
    expected, y = plain(x, None), model(x[:, part], None)
    expected.square().sum().backward(), y.square().sum().backward()
    worst = float((y - expected[:, part]).abs().max())
    return max(worst, apart_in_gradients(model, plain))


@pytest.mark.promise("Y01")
@pytest.mark.parametrize("way", ["as it is", "copied"])
def test_attention_in_a_forward_that_was_assigned_to_a_module_is_exchanged(way: str) -> None:
    assert max(ranks.run(2, apart_by_assigned, way)) < 1e-12


def padding_of(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    part, _ = zero.sequence_batch({"input_ids": torch.ones(1, 5, dtype=torch.int64), "attention_mask": None}, mesh)
    return part["attention_mask"][0].tolist()


@pytest.mark.promise("Y02")
def test_a_batch_whose_mask_is_none_says_which_tokens_are_padding() -> None:
    assert ranks.run(2, padding_of) == [[1, 1, 1], [1, 1, 0]]


class AfterBlock(nn.Module):
    """Attention without weights, of what a block makes that is recomputed by a backward inside of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 3 * 20)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        projected = checkpoint(self.project, self.embed(tokens).requires_grad_(), use_reentrant=True)
        heads = projected.unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


def stepped_beside(rank: int, world: int, case: str) -> str:
    """Returns what becomes of a step with other weights on both ranks: of the optimizer of a model without parts of sequences
    that trains between, or of that of the model whose blocks are recomputed."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    model: nn.Module = AfterBlock() if case == "after a block" else make_model(recomputes="" if case == "between" else case)
    other = nn.Linear(3, 1)
    zero.ulysses(mesh, model)
    if case == "reentrant":  # parameters get their gradients in the backward around that of the blocks
        model.blocks.requires_grad_(False)
    optimizer, beside = zero.shard(model, adamw(model), stage=2), zero.shard(other, adamw(other), stage=2)
    weighted = beside if case == "between" else optimizer
    part, number = zero.sequence_batch(batch_of({}, 0), mesh)
    try:
        weighted.weight(1.0 + rank)
        if case != "between":
            beside.weight(1.0)
        (sum_of(model, part, None) / number).backward()
        other(torch.ones(2, 3)).mean().backward()
        weighted.step()
    except zero.ZeroError as error:
        return str(error)
    return "stepped"


@pytest.mark.promise("Y01")
@pytest.mark.parametrize(("case", "expected"), [
    ("between", "stepped"),
    pytest.param("yes", "each holds a part of the same sequences", marks=pytest.mark.full),
    pytest.param("reentrant", "each holds a part of the same sequences", marks=pytest.mark.full),
    ("after a block", "each holds a part of the same sequences"),
])  # fmt: skip
def test_weights_are_those_of_the_training_whose_backward_crosses_ranks(case: str, expected: str) -> None:
    for said in ranks.run(2, stepped_beside, case):
        assert expected in said, said


def refused_mask(rank: int, world: int) -> str:
    """Returns the error of a layer that gets which of the tokens of its part are padding, where a part has one."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    zero.ulysses(mesh, layer := nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    with pytest.raises(ValueError, match="Cannot attend with a mask") as caught:
        layer(*[torch.randn(1, 1, WIDTH)] * 3, key_padding_mask=torch.tensor([[rank == 1]]), need_weights=False)
    return str(caught.value)


@pytest.mark.promise("Y02")
def test_a_mask_of_a_part_is_refused_where_a_part_has_one_token() -> None:
    for said in ranks.run(2, refused_mask):
        assert "a sequence has 2 tokens on all ranks" in said, said


def attended_to_nothing(rank: int, world: int) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the shapes of results and gradients of attention over no samples, and of values of no width."""
    attention, shapes = zero.ulysses(init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]), []
    for samples, width in ((0, 8), (2, 0)):
        query, key = (torch.randn(samples, HEADS, 3, 8, requires_grad=True) for _ in range(2))
        value = torch.randn(samples, HEADS, 3, width, requires_grad=True)
        result = attention(query, key, value, is_causal=True)
        result.sum().backward()
        shapes.append(tuple(tuple(each.shape) for each in (result, query.grad, value.grad)))
    return shapes


@pytest.mark.promise("Y01")
def test_attention_over_nothing_is_exchanged() -> None:
    expected = [tuple((n, HEADS, 3, d) for d in (w, 8, w)) for n, w in ((0, 8), (2, 0))]
    assert ranks.run(2, attended_to_nothing) == [expected, expected]
