"""`python -m zero plan` says what will be held: numbers that are known, and numbers that are measured."""

import contextlib
import gc
import io
import itertools
import json
import math
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import accelerators
import zero
from tests import inside, ranks
from tests.devices import needs_linux, needs_sim, needs_transformers
from tests.experts import Uneven, mixture, parted
from tests.promise_list import ROOT
from tests.promises.offloads import adamw, place_of
from tests.promises.test_offload_memory import in_pace
from tests.zoo.case import filled
from zero import shard
from zero.__main__ import main
from zero.comm.torch_group import TorchGroup
from zero.plan.budget import PlannedTraining, cost_of, default_bucket_bytes
from zero.plan.known_models import FAMILIES, parameters_of
from zero.plan.layout import ParamSpec
from zero.tools.plan import of_one_rank, recommended

WIDTH, LAYERS = 256, 12
BUCKET = 4 * WIDTH * WIDTH * 4  # enough that a comparison of weights, which is made in parts of no less than 2**16, needs less


def planned(capsys, *words):
    status = main(["plan", *map(str, words), "--json"])
    told = capsys.readouterr()
    return status, json.loads(told.out) if told.out else told.err


def row_of(answer, stage, offload="none"):
    [row] = [row for row in answer["rows"] if (row["stage"], row["offload"]) == (stage, offload)]
    return row


# counted -----------------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
GROUPED = {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
NEOX = {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 50304}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 30522,
        "max_position_embeddings": 512, "type_vocab_size": 2}  # fmt: skip
# The published numbers of Llama 2 7B, Mistral 7B, Mixtral 8x7B, Llama 3 8B, Qwen2 0.5B, Qwen3 0.6B, GPT-2, Pythia 70M and BERT
# base.
PUBLISHED = [
    (LLAMA, 6_738_415_616),
    ({**GROUPED, "model_type": "mistral"}, 7_241_732_096),
    ({**GROUPED, "model_type": "mixtral", "num_local_experts": 8}, 46_702_792_704),
    ({**GROUPED, "vocab_size": 128256}, 8_030_261_248),
    ({**QWEN, "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
      "num_attention_heads": 14, "num_key_value_heads": 2}, 494_032_768),
    ({**QWEN, "model_type": "qwen3"}, 596_049_920),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
    (NEOX, 70_426_624),
    (BERT, 109_482_240),
]  # fmt: skip


def test_parameters_are_counted_as_they_were_published():
    assert {config["model_type"] for config, _ in PUBLISHED} == set(FAMILIES)
    for config, numel in PUBLISHED:
        assert sum(math.prod(shape) for _, shape in parameters_of(config)) == numel, config["model_type"]


def test_a_configuration_file_is_planned_for_and_another_is_refused_by_name(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**NEOX, "torch_dtype": "float16"}))
    status, answer = planned(capsys, file, "--ranks", 4, "--memory", "1GiB")
    assert (status, answer["parameters"], answer["dtype"]) == (0, 70_426_624, "float16")
    assert answer["includes_activations"] is False
    file.write_text(json.dumps({"model_type": "mamba"}))
    status, said = planned(capsys, file)
    assert status == 2 and "Cannot plan a model of type 'mamba': those known here are bert, gpt2, gpt_neox, llama" in said
    file.write_text(json.dumps({"model_type": "llama"}))
    assert "its configuration has no 'hidden_size'" in planned(capsys, file)[1]
    file.write_text("{")
    assert "it is not JSON" in planned(capsys, file)[1]


def test_what_fits_is_marked_and_one_is_recommended(capsys):
    status, answer = planned(capsys, "700M", "--ranks", 8, "--memory", "8GiB", "--host-memory", "100GiB")
    assert status == 0 and answer["parameters"] == 7 * 10**8
    assert [row["fits"] for row in answer["rows"]] == ["no", *["yes"] * 7]
    assert [(row["stage"], row["offload"]) for row in answer["rows"] if row["recommended"]] == [(2, "none")]
    whole, sharded = row_of(answer, 0), row_of(answer, 2)
    assert whole["weights"] == sharded["weights"] == 14 * 10**8
    assert whole["moments"] == 2 * whole["masters"] == 56 * 10**8
    assert sharded["moments"] == pytest.approx(whole["moments"] / 8, rel=1e-2)
    status, answer = planned(capsys, "700M", "--ranks", 8, "--memory", "2GiB", "--host-memory", "100GiB")
    assert status == 0 and row_of(answer, 2)["fits"] == "no" and row_of(answer, 3)["recommended"]
    status, answer = planned(capsys, "700M", "--ranks", 8, "--memory", "1500MiB", "--host-memory", "100GiB")
    assert status == 0 and row_of(answer, 3)["fits"] == "no" and row_of(answer, 2, "cpu")["recommended"]
    status, answer = planned(capsys, "700M", "--ranks", 8, "--memory", "1500MiB", "--host-memory", "6GiB")
    assert status == 1 and row_of(answer, 2, "cpu")["fits"] == "not the host"
    status, answer = planned(capsys, "700M", "--ranks", 8, "--memory", "200MiB", "--host-memory", "100GiB")
    assert status == 0 and row_of(answer, 3, "cpu")["recommended"]
    assert planned(capsys, "700M", "--ranks", 8, "--memory", "100MiB")[0] == 1
    assert main(["plan", "700M", "--memory", "100MiB"]) == 1
    assert "Nothing fits. Take more ranks" in capsys.readouterr().out


def test_where_gradients_are_sent_once_for_several_micro_batches_stage_1_is_recommended_and_keeps_them_whole(capsys):
    _, answer = planned(capsys, "100M", "--ranks", 4, "--accumulation", 8, "--memory", "80GiB")
    [best] = [row for row in answer["rows"] if row["recommended"]]
    assert (best["stage"], best["gradients"]) == (1, 4 * 10**8)
    assert row_of(answer, 2)["gradients"] == pytest.approx(10**8, rel=0.03)
    _, answer = planned(capsys, "100M", "--memory", "80GiB")
    assert [row["stage"] for row in answer["rows"] if row["recommended"]] == [0]
    assert recommended([], 1, 1) is None


def test_a_plan_does_not_grow_with_the_micro_batches(capsys):
    few, many = (planned(capsys, "7B", "--ranks", 8, "--memory", "80GiB", "--accumulation", n)[1]["rows"] for n in (4, 10**14))
    assert [row["peak"] for row in few] == [row["peak"] for row in many]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "it is not a number of parameters, a .json file or a function"),
        (["nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["tests.zero.tools.test_plan:missing"], "there is no such function"),
        (["tests.zero.tools.test_plan:planned_for", "--batch", "0"], "--batch 0: it is at least 1"),
        (["7B", "--batch", "1"], "makes no model. Give a function that does"),
        (["7B", "--memory", "much"], "Write it like 4GiB"),
        (["0"], "it has at least one"),
        (["7B", "--bucket-bytes", "1"], "a bucket needs more. Give 64KiB"),
        (["math:floor"], "argument"),
        (["7B", "--ranks", 8, "--ep", 2], "no parameter has `experts` in its name"),
        (["7B", "--ranks", 8, "--tp", 2], "no layer of the model is one of q_proj"),
        (["7B", "--ranks", 8, "--tp", 3], "8 ranks are not a multiple of it"),
        (["7B", "--ranks", 8, "--tp", 2, "--ep", 8], "4 ranks have samples of their own, which is no multiple"),
    ],
)
def test_what_cannot_be_planned_for_is_said(words, said, capsys):
    status, told = planned(capsys, *words)
    assert status == 2 and said in told


# Of so few layers that planning is quick.
FEW = 4
FEW_MIXTRAL = {**GROUPED, "model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": FEW}
FEW_LLAMA = {**LLAMA, "num_hidden_layers": FEW}


@pytest.mark.promise("Q11")
def test_experts_and_layers_of_several_ranks_are_counted_as_they_are_shared(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(FEW_MIXTRAL))
    words = [tmp_path / "config.json", "--memory", "80GiB", "--host-memory", "1TiB", "--ranks", 64]
    whole = sum(math.prod(shape) for _, shape in parameters_of(FEW_MIXTRAL))
    experts = FEW * 8 * 3 * 4096 * 14336
    for ep in (1, 4, 8):
        _, answer = planned(capsys, *words, "--ep", ep)
        row = row_of(answer, 2)
        assert answer["parameters"] == whole
        assert row["weights"] == pytest.approx(2 * (whole - experts + experts // ep), rel=1e-4)
        assert row["masters"] == pytest.approx(4 * whole / 64, rel=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(FEW_LLAMA))
    numel_of_all, norms = sum(math.prod(shape) for _, shape in parameters_of(FEW_LLAMA)), (2 * FEW + 1) * 4096
    for tp in (1, 2, 8):
        _, answer = planned(capsys, *words, "--tp", tp)
        row, numel = row_of(answer, 3), (numel_of_all - norms) // tp + norms
        assert answer["parameters_of_a_rank"] == numel and answer["shard_ranks"] == 64 // tp
        assert row["weights"] == pytest.approx(2 * numel / (64 // tp), rel=1e-4)


def layout_of_experts(rank, world, ep):
    model = parted(mixture(Uneven), init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("same", "ep"))["ep"])
    optimizer = shard(model, adamw(model), stage=2, bucket_bytes=2048)
    layout = inside.layout(optimizer)
    optimizer.close()
    return [(spec.name, spec.shape, spec.family) for spec in layout.params], [each.num_shares for each in layout.families]


@pytest.mark.promise("Q11")
def test_a_plan_with_experts_has_the_layout_of_the_training():
    specs = [ParamSpec(name, tuple(param.shape), "float64") for name, param in mixture(Uneven).named_parameters()]
    planned_for_ranks = [(spec.name, spec.shape, spec.family) for spec in of_one_rank(specs, 2, 1)]
    assert ranks.run(4, layout_of_experts, 2) == [(planned_for_ranks, [4, 2])] * 4


@pytest.mark.promise("W02")
def test_with_muon_it_is_told_who_owns_how_many_matrices_and_how_even_that_is(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = [tmp_path / "config.json", "--memory", "80GiB", "--host-memory", "1TiB", "--optimizer", "muon", "--ranks"]
    for number in (1, 2, 8, 64):
        status, answer = planned(capsys, *words, number)
        owners = answer["owners"]
        assert sum(owners["tensors"]) == 7 * 32 and len(owners["tensors"]) == number
        assert sum(owners["num_bytes"]) == 2 * 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
        assert owners["balance"] <= 1.1 and owners["padding"] < 0.1 and status == 0
        moments = row_of(answer, 2)["moments"]
        assert moments == 2 * max(owners["num_bytes"]) + 8 * (answer["parameters"] - sum(owners["num_bytes"]) // 2) // number
    assert main(["plan", *map(str, words), "8"]) == 0
    told = capsys.readouterr().out
    assert "Muon steps 224 matrices, each on the rank that owns it: 28 a rank, 1.51 GiB of weights." in told
    assert "The busiest rank has 1.00 of the mean work, padding takes 0.0%" in told
    status, answer = planned(capsys, tmp_path / "config.json", "--memory", "80GiB", "--host-memory", "1TiB")
    assert answer["owners"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["7B"], "Cannot plan for Muon: there is no matrix"),
        ([f"{__name__}:planned_for", "--batch", 4], "Cannot rehearse with Muon"),
    ],
)
def test_what_cannot_be_planned_for_muon_is_said(words, said, capsys):
    status, told = planned(capsys, *words, "--optimizer", "muon")
    assert status not in (0, 1) and said in told


# measured ----------------------------------------------------------------------------------------------------------------


def layers(batch):
    return filled(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), real=True)


def loss(model, batch):
    weight = model[0].weight
    return model(torch.ones(batch, WIDTH, device=weight.device, dtype=weight.dtype)).float().square().mean()


def planned_for(batch=None):
    return layers(batch) if batch is None else (layers(batch), lambda model: loss(model, batch))


def plan_here(rank, world, words):
    """What the command prints, in a process where the simulated device may come up."""
    place_of(rank, "sim")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", *map(str, words)]) == 0
    return out.getvalue()


def all_in_pace(group, bucket, sum_dtype, reduce=TorchGroup.all_reduce):
    return in_pace(group, bucket, sum_dtype, reduce)


def measure(rank, world, points, batch, make=adamw, shard_ranks=None):
    """The most that a rank of a real group holds in a window, by point."""
    device, place, found = accelerators.get("sim"), place_of(rank, "sim"), []
    with place:
        loss(layers(1), 1).backward()  # makes the device's libraries take their memory
    for stage, dtype, offload, accumulation in points:
        gc.collect()
        device.synchronize()
        before, peak = device.memory().allocated, 0
        with place:
            model = layers(batch)
        asked = {"stage": stage, "dtype": dtype, "offload": offload, "accumulation": accumulation, "bucket_bytes": BUCKET}
        with mock.patch.object(TorchGroup, "reduce_scatter", in_pace), mock.patch.object(TorchGroup, "all_reduce", all_in_pace):
            optimizer = shard(model, make(model), timeout_s=20.0, shard_ranks=shard_ranks, **asked)
        for _ in range(3):
            for _ in range(accumulation):
                device.reset_peak_memory()
                optimizer.backward(loss(model, batch))
                peak = max(peak, device.memory().peak - before)
            device.reset_peak_memory()
            optimizer.step()
            optimizer.zero_grad()
            peak = max(peak, device.memory().peak - before)
        found.append(peak)
        optimizer.close()
        del optimizer, model
    return found


STATES = [(0, None, "none", 3), (1, "bfloat16", "cpu", 3), (2, "bfloat16", "none", 1)]
MORE_STATES = [
    (0, None, "none", 1), (1, "bfloat16", "none", 1), (2, None, "cpu", 1), (1, None, "none", 3), (2, "bfloat16", "none", 3)
]
WITH_ACTIVATIONS = [(1, None, "none", 3), (2, "bfloat16", "cpu", 1)]


@needs_sim
@pytest.mark.parametrize(
    ("points", "batch"),
    [
        pytest.param(STATES, 1, id="model states"),
        pytest.param(MORE_STATES, 1, id="more model states", marks=pytest.mark.full),
        pytest.param(WITH_ACTIVATIONS, 256, id="activations too", marks=pytest.mark.full),
    ],
)
def test_the_peak_is_within_5_percent_of_what_a_rank_of_two_holds(points, batch):
    measured = ranks.run(2, measure, points, batch, apart="sim", timeout=120.0)[0]
    check_peaks(points, measured, "--ranks", 2, *(["--batch", batch] if batch > 1 else []))


def check_peaks(points, measured, *given):
    """The peaks that were measured are those of plans."""
    for (stage, dtype, offload, accumulation), peak in zip(points, measured, strict=True):
        words = [*given, "--memory", "80GiB", "--accumulation", accumulation, "--bucket-bytes", BUCKET, "--json"]
        words += ["--dtype", dtype] if dtype else []
        answer = json.loads(ranks.run(1, plan_here, [f"{__name__}:planned_for", *words], apart="sim")[0])
        assert answer["includes_activations"] == ("--batch" in given)
        assert row_of(answer, stage, offload)["peak"] == pytest.approx(peak, rel=0.05), (stage, dtype, offload, accumulation)


@pytest.mark.full
@needs_sim
@pytest.mark.parametrize(
    "points",
    [
        [(2, None, "none", 3), (3, "bfloat16", "none", 1)],
        pytest.param(
            [
                (1, "bfloat16", "none", 1),
                (2, "bfloat16", "cpu", 3),
                (1, None, "none", 3),
                (2, None, "none", 1),
                (1, None, "cpu", 1),
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=["day", "night"],
)
def test_the_peak_of_a_rank_in_groups_of_two_is_told_too(points):
    measured = ranks.run(4, measure, points, 1, adamw, 2, apart="sim", timeout=120.0)[0]
    check_peaks(points, measured, "--ranks", 4, "--shard-ranks", 2)


def test_what_is_suggested_has_the_groups_and_what_cannot_be_is_refused(capsys):
    assert main(["plan", "700M", "--ranks", "8", "--shard-ranks", "4", "--memory", "8GiB", "--suggest"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks in groups of 4" in out and "zero.shard(..., stage=2, shard_ranks=4)" in out
    assert main(["plan", "700M", "--ranks", "8", "--shard-ranks", "3", "--memory", "8GiB"]) == 2
    assert "8 ranks are not a multiple" in capsys.readouterr().err


def muon(model):
    return torch.optim.Muon(model.parameters())


@needs_sim
@pytest.mark.full
def test_the_peak_is_that_for_muon_too():
    points = [(2, None, "none", 1), (1, "bfloat16", "none", 1), (1, None, "none", 3)]
    measured = ranks.run(2, measure, points, 1, muon, apart="sim", timeout=120.0)[0]
    check_peaks(points, measured, "--ranks", 2, "--optimizer", "muon")


# on one host -------------------------------------------------------------------------------------------------------------


def shared_bytes():
    """Of this process's memory files, its part where others have them too."""
    parts = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(parts["Pss_Shmem"].split()[0]) * 1024


def kept_on_the_host(rank, world):
    """After a backward: what this rank has of memory files and of the optimizer's state, and what was predicted of gradients
    and buckets, and of that."""
    before = shared_bytes()
    model = filled(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))))
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = shard(model, inner, stage=2, dtype="bfloat16", kernels="fused", bucket_bytes=2**22)
    for _ in range(8):
        model(torch.ones(2, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.any_rank(False)  # they keep pace: who is ahead takes other memory than what may still be looked at
    model(torch.ones(2, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.settle()
    assert not optimizer.sharding.window.grad_ops.shard.shares  # they wait for the step as they came
    kept = [*optimizer.sharding.masters.shard.present(), *(v for s in inner.state.values() for v in s.values() if v.dim())]
    optimizer.any_rank(False)
    files = shared_bytes() - before
    optimizer.any_rank(False)
    training = PlannedTraining(num_ranks=world, one_host=True, fused_step=True)
    cost = cost_of(optimizer.sharding.layout_ref.layout, 2, rank, training=training)
    planned = cost.device.gradients, cost.buckets, cost.device.masters + cost.device.moments
    return files, sum(tensor.nbytes for tensor in kept), *planned


@needs_linux
def test_ranks_of_one_host_share_gradients_as_they_came_and_two_shares_of_new_weights():
    found = ranks.run(2, kept_on_the_host, apart="plan on one host")
    files, states, gradients, buckets, planned_states = (sum(of_kind) for of_kind in zip(*found, strict=True))
    assert states == planned_states
    # A rank that is ahead within a step has written one share more than the two that are planned.
    assert 0.95 * gradients < files < 1.05 * (gradients + 1.5 * buckets)


def test_with_a_disk_it_is_said_what_goes_there_how_much_is_written_and_what_to_pass(capsys):
    words = ["700M", "--ranks", "1", "--memory", "2400MiB", "--host", "6400MiB", "--optimizer", "adamw"]
    status, _ = planned(capsys, *words)
    assert status == 1
    status, answer = planned(capsys, *words, "--disk", "1TiB")
    assert status == 0
    row = row_of(answer, 3, "disk")
    assert row["fits"] == "yes" and row["masters"] == row["moments"] == row["gradients"] == 0
    assert 0 <= row["on_disk"] - 700_000_000 * 16 < 2**20 and row["written"] == row["on_disk"]  # 4 B + 4 B + 8 B
    assert row_of(planned(capsys, *words, "--disk", "10GiB")[1], 3, "disk")["fits"] == "not the disk"
    assert main(["plan", *words, "--disk", "1TiB", "--suggest", "--step-seconds", "100"]) == 0
    said = capsys.readouterr().out
    assert "homes={'gradients': 'disk:/directory', 'masters': 'disk:/directory', 'moments': 'disk:/directory'}" in said
    assert re.search(r"writes at most 10\.4\d GiB to its disk in a step, and 8\.8\d+ TiB a day where a step takes 100 s", said)


def test_the_pages_on_sharding_and_offload_give_the_bytes_that_are_planned(capsys):
    """Compares the bytes of 7 billion parameters on 8 ranks, and on one; beside them are two buckets."""
    of_stages = {"0": (0, "none"), "1": (1, "none"), "2": (2, "none"), "3": (3, "none")}
    of_stages |= {'1 or 2, `offload="cpu"`': (2, "cpu"), '3, `offload="cpu"`': (3, "cpu")}
    page = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    said = {row[0]: float(row[-1]) for row in rows if len(row) == 6 and row[0] in of_stages}
    _, answer = planned(capsys, "7B", "--ranks", 8, "--memory", "200GiB", "--kernels", "torch")
    for stage, number in said.items():
        row = row_of(answer, *of_stages[stage])
        kept = sum(row[kind] for kind in ("weights", "gradients", "masters", "moments"))
        assert kept / 7e9 == pytest.approx(number, rel=0.01, abs=0.01), stage
    assert len(said) == 6 and row_of(answer, 2)["buckets"] == 2 * default_bucket_bytes(14 * 10**9, 8, False)
    assert "two buckets, of 16 to 64 MiB each" in page
    _, answer = planned(capsys, "7B", "--ranks", 1, "--memory", "200GiB", "--kernels", "torch")
    assert sum(row_of(answer, 2)[kind] for kind in ("weights", "gradients", "masters", "moments")) == 18 * 7 * 10**9
    assert "| 18 B a parameter fit the device | nothing" in (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")


# activations -------------------------------------------------------------------------------------------------------------

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "dtype": "float32"}  # fmt: skip


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.up, self.down = nn.Linear(64, 192), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (12, 16)).transpose(1, 2).chunk(3, 1)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def attending(tokens):
    x = torch.ones(1, tokens, 64)
    return Attending(), lambda model: model(x).square().mean()


def expanding(tokens):
    model, x = nn.Linear(1, 1), torch.ones(tokens, 64).expand(32, tokens, 64)
    return model, lambda model: (model.weight * x).sum()


def allocated(train):
    """Returns the most bytes that torch's allocator had given at one time while this ran."""
    with torch.profiler.profile(profile_memory=True) as profiled:
        train()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


def slope_of(build, fewer, more):
    """Returns the bytes that a token takes in a forward and backward."""
    most = []
    for tokens in (fewer, fewer, more):  # the first run makes what is made only once
        model, loss_of = build(tokens)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        most.append(allocated(lambda model=model, loss_of=loss_of: loss_of(model).backward()))
    return (most[2] - most[1]) / (more - fewer)


def test_activations_are_counted_by_tokens_and_are_those_of_a_training(capsys):
    words = (f"{__name__}:attending", "--tokens", 2048, "--memory", "1GiB", "--ranks", 2)
    _, answer = planned(capsys, *words)
    assert answer["includes_activations"] and answer["activations"]["host"] == 0
    assert answer["activations"]["slope"] == pytest.approx(slope_of(attending, 1024, 2048), rel=0.1)
    _, parts = planned(capsys, *words, "--sequence-ranks", 2, "--activations-on-host")
    inputs = 1024 * 4 * (64 + 192 + 64 + 64 + 256)  # the bytes that a backward needs of a rank's tokens, at least
    assert parts["activations"]["host"] >= inputs and parts["activations"]["device"] < 0.6 * answer["activations"]["device"]


def test_what_is_expanded_is_not_copied_to_the_host(capsys):
    _, answer = planned(capsys, f"{__name__}:expanding", "--tokens", 2048, "--memory", "1GiB", "--activations-on-host")
    assert answer["activations"]["host"] == 0


WAYS = {
    "as it is": {}, "recomputed": {"--recompute": True}, "loss by chunks": {"--recompute": True, "--loss-chunk": 64},
    "all by chunks": {"--recompute": True, "--loss-chunk": 64, "--mlp-chunk": 64},
}  # fmt: skip


def model_as(way):
    """Returns what builds the model that is planned, with what was chosen done by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(tokens):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), attn_implementation="sdpa").train()
        if way:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        zero.ulysses(None, model)
        if "--loss-chunk" in way:
            zero.in_chunks(model, 64)
        for layer in model.model.layers if "--mlp-chunk" in way else ():
            zero.in_chunks(layer.mlp, 64)
        ids = torch.ones(1, tokens, dtype=torch.int64)
        return model, lambda model: model(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=tokens).loss

    return build


@pytest.mark.full
@needs_transformers
@pytest.mark.parametrize("name", WAYS)
def test_activations_of_a_configuration_are_those_of_its_model(name, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = [word for option, value in WAYS[name].items() for word in ((option,) if value is True else (option, value))]
    _, answer = planned(capsys, tmp_path, "--tokens", 2048, "--memory", "1GiB", *words)
    assert answer["activations"]["slope"] == pytest.approx(slope_of(model_as(WAYS[name]), 1024, 2048), rel=0.1)


@pytest.mark.full
@needs_transformers
def test_a_folder_is_planned_by_its_sequences_and_what_keeps_their_memory_small(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    found, words = [], [tmp_path, "--ranks", 2, "--memory", "1GiB", "--tokens", 4096]
    more = ["--sequence-ranks", 2], ["--recompute"], ["--loss-chunk", 64], ["--mlp-chunk", 64], ["--activations-on-host"]
    for option in ([], *more):
        _, answer = planned(capsys, *(words := [*words, *option]))
        found.append(row_of(answer, 2)["peak"])
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found), found
    assert row_of(answer, 2)["on_host"] == answer["activations"]["host"] > 4 * 2048 * 64 * 4, "inputs of blocks are there"
    assert main(["plan", *map(str, words)]) == 0
    said = re.search(r"activations of 4,096 tokens are included: .* of a rank, .* for each of its tokens, and .* on the host", (
        capsys.readouterr().out))
    assert said


HASTY = {
    "no unit": (["7B", "--memory", "80"], r"Cannot plan with --memory 80: that is 80 bytes. Write it like 80GiB."),
    "seconds": (["1M", "--step-seconds", "0"], "Cannot plan with --step-seconds 0.0: a step takes some time"),
    "negative seconds": (["1M", "--step-seconds", "-1"], "Cannot plan with --step-seconds -1.0"),
    "no number": (["1M", "--step-seconds", "nan"], "Cannot plan with --step-seconds nan"),
    "seconds that no step takes": (["1M", "--step-seconds", "1e-320", "--disk", "1GiB"], "--step-seconds 1e-320: a step takes"),
    "a model beyond all": (["1e30B"], "Cannot plan a model of 1e30B parameters: that is more than 262,144 buckets"),
    "a model that takes hours": (["100T"], "Cannot plan a model of 100T parameters: that is more than 262,144 buckets"),
    "a model beyond numbers": (["1e999"], "Cannot plan a model of 1e999 parameters"),
    "a module that is not there": (["nowhere.at_all:f"], "Cannot use 'nowhere.at_all:f': there is no module 'nowhere' here"),
    "a function that exits": (["{script}:exits"], "exits: it ends the process ("),
    "a function that ends otherwise": (["{script}:ends"], "ends: it fails with GeneratorExit: x ("),
    "a function whose error has no words": (["{script}:mute"], "mute: it fails with Mute: <exception str() failed> ("),
    "a loss that is none": (["{script}:no_loss", "--batch", "2"], "no_loss: it fails with TypeError: 'int' object is not"),
    "a file of other bytes": (["{folder}/bytes.json"], "bytes.json: it is not JSON ("),
    "a file of many levels": (["{folder}/deep.json"], "deep.json: it is not JSON ("),
    "numbers that divide by zero": (["{folder}/heads.json"], "Cannot plan a llama model: its configuration has other values"),
    "sizes below zero": (["{folder}/size.json"], "by its configuration embed_tokens.weight has the shape (-8, 8)"),
    "layers without end": (["{folder}/layers.json"], "Cannot plan a llama model of more than 1,000,000 parameters"),
    "a function that fails": (["{script}:fails"], "fails: it fails with KeyError: 'x' ("),
    "a script that exits": (["{ending}:f"], "it ends the process ("),
    "no pair": (["{script}:one", "--batch", "2"], "one: it returned a Linear for --batch 2. Return the model, and"),
    "chunks of nothing": (["1M", "--loss-chunk", "8"], "Cannot plan with --loss-chunk alone: activations are counted of a"),
    "activations of a number": (["1M", "--tokens", "8"], "Cannot count activations of 1M: it is a number. Give"),
    "activations, and a rehearsal": (["1M", "--tokens", "8", "--batch", "2"], "with --tokens and --batch: they are"),
    "activations of cut layers": (["1M", "--tokens", "8", "--ranks", "2", "--tp", "2"], "with --tokens and --ep or --tp"),
    "parts that do not divide": (["1M", "--tokens", "8", "--ranks", "4", "--sequence-ranks", "3"], "--sequence-ranks 3: 4"),
    "no pair for tokens": (["{script}:one", "--tokens", "2"], "one: it returned a Linear for --tokens 2. Return the model"),
    "a function, recomputed": (["{script}:no_loss", "--tokens", "2", "--recompute"], "a function makes its model as it is"),
    "a loss that is none, by tokens": (["{script}:no_loss", "--tokens", "2"], "no_loss: it fails with TypeError: 'int' object"),
    "too many owners": (["1M", "--optimizer", "muon", "--ranks", "100000"], "each is given its matrices"),
}


HASTY_SCRIPT = """
import sys
from torch import nn
class Mute(Exception):
    def __str__(self): raise RuntimeError
def exits(): sys.exit(0)
def ends(): raise GeneratorExit("x")
def mute(): raise Mute
def fails(): {}["x"]
def one(n): return nn.Linear(2, 2)
def no_loss(n): return nn.Linear(2, 2), 7
"""


@pytest.mark.parametrize("what", HASTY)
def test_what_cannot_be_planned_is_said_in_a_line(what, tmp_path, capsys):
    words, said = HASTY[what]
    script, ending = tmp_path / "script.py", tmp_path / "ending.py"
    script.write_text(HASTY_SCRIPT)
    ending.write_text("raise SystemExit(0)")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.json").write_text("[" * 10**5)
    numbers = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8, "num_hidden_layers": 1}
    wrong = {"heads": {"num_attention_heads": 0}, "size": {"vocab_size": -8}, "layers": {"num_hidden_layers": 10**12}}
    for name, changes in wrong.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "llama", **numbers, **changes}))
    assert main(["plan", *(word.format(script=script, ending=ending, folder=tmp_path) for word in words)]) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if "has no effect here" not in line]
    assert len(lines) == 1 and said in lines[0] and not told.out


def test_a_rehearsal_without_the_simulated_device_says_what_to_install_and_a_plan_does_without(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerators_sim", None)  # imports fail as if it were not installed
    words = ["plan", f"{__name__}:planned_for", "--ranks", "2", "--memory", "1GiB"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--batch", "2"]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.startswith("Cannot rehearse with --batch: ")
    assert re.search(r" is not installed\. Do: pip install zero-accelerators-sim \(", told.err)


def test_a_plan_does_not_grow_with_the_ranks(capsys, monkeypatch):
    """The work of a rank is asked for at most for some of them."""
    monkeypatch.setattr("zero.plan.layout.FlatLayout.work_of", lambda *_: pytest.fail("asked for a rank"))
    for num_ranks, fits in ((10**5, 0), (10**10, 1)):  # with so many ranks, padding alone is too much
        status, answer = planned(capsys, "700M", "--ranks", num_ranks, "--memory", "8GiB")
        assert status == fits and row_of(answer, 3)["weights"] > 0


def fitting():
    """Yields the cells of the first table of docs/plan.md."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    table = page.partition("| parameters, device")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        model, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name, _, memory = model.partition(", ")
        for number, cell in zip((1, 8, 64), cells, strict=True):
            marks = () if (name, number) == ("7B", 8) else pytest.mark.full
            for gib in re.findall(r"\d+", memory):
                yield pytest.param(name, f"{gib}GiB", number, cell, marks=marks)


@pytest.mark.parametrize(("model", "memory", "number", "cell"), list(fitting()))
def test_the_page_says_what_fits(model, memory, number, cell, capsys):
    status, answer = planned(capsys, model, "--ranks", number, "--memory", memory, "--host-memory", "1TiB")
    best = [row for row in answer["rows"] if row["recommended"]]
    assert (status == 0) == bool(best) == (cell != "no")
    for row in best:
        is_away = row["offload"] != "none"
        kind = "offload" if is_away and not row["stage"] else f"stage {row['stage']}{', offload' * is_away}"
        gib = row["peak"] / 2**30
        assert cell == f"{kind}: {gib:.{int(gib < 1)}f}"


FIGURES = runpy.run_path(str(ROOT / "docs" / "figures.py"))
BARS = [(gib, words) for gib in (24, 40, 80) for words in FIGURES["FITTING"]]


@pytest.mark.parametrize(
    ("gib", "words"), [pytest.param(*bar, marks=() if bar == (24, "stage 2") else pytest.mark.full) for bar in BARS]
)
def test_the_chart_of_what_fits_has_the_largest_model_that_a_plan_calls_fitting(gib, words, capsys):
    stage, is_away = FIGURES["FITTING"][words]
    billions = FIGURES["largest"](stage, is_away, gib)
    larger = 1.03 * (billions + (1 if billions >= 10 else 0.1))  # it was rounded down, and its largest operator varies
    memory = ("--ranks", 8, "--memory", f"{gib}GiB", "--host-memory", "1TiB")
    answers = [planned(capsys, f"{most}B", *memory)[1] for most in (billions, larger)]
    fits = [row_of(answer, stage, "cpu" if is_away else "none")["fits"] for answer in answers]
    assert fits[0] == "yes" and fits[1] != "yes"
