"""zero.load_weights: files of other programs into models, of which no rank ever has the whole."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zero
from tests import ranks
from tests.promises.loops import same
from tests.weight_reads import counted_reads
from zero.checkpoint import disk
from zero.checkpoint.weight_files import WeightFiles
from zero.errors import BadCheckpoint, CheckpointFailed, RanksDiffer
from zero.plan.layout import Span


class Model(nn.Module):
    """With a tied weight, buffers of both kinds, a 0-dim parameter, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8))
        self.register_buffer("shift", torch.arange(8.0))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        inside = self.layers(self.embed(tokens))
        return self.head(self.frozen(inside + self.shift.to(inside.dtype)) * self.scale)


def made(seed=0, device=None):
    torch.manual_seed(seed)
    with torch.device(device or "cpu"):
        return Model()


def shard(model, stage, **options):
    options = {"bucket_bytes": 512, "gathered_bytes": 0, **options}
    return zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.05), stage=stage, **options)


def train(model, optimizer, rank, steps=2):
    for step in range(steps):
        tokens = torch.randint(16, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def write(model, folder, kind):
    """The model's weights in a folder, as others write them; what to load."""
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "head.weight"}
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif kind == "index":
        names = list(state)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, members in halves.items():
            save_file({name: state[name] for name in members}, folder / file)
        index = {"weight_map": {name: file for file, members in halves.items() for name in members}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "prefix":
        save_file({f"transformer.{name}": value for name, value in state.items()}, folder / "model.safetensors")
    else:
        state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
        torch.save({"state_dict": state, "step": 3}, folder / "checkpoint.pt", _use_new_zipfile_serialization=kind == "torch")
    return folder


def loaded(rank, world, folder, stage, dtype, meta, shared_memory):
    source, plain = made(seed=1), made(seed=1)
    model = made(seed=2, device="meta" if meta else None)
    options = {"dtype": dtype, "shared_memory": shared_memory}
    optimizer = shard(model, stage, **options)
    if meta:
        with pytest.raises(RuntimeError, match=r"Cannot step: nobody has written to .*embed\.weight.*meta device"):
            optimizer.step()
    assert zero.load_weights(model, folder) == ([], [])
    expected = made(seed=1) if dtype is None else made(seed=1).to(torch.bfloat16)
    expected.shift = expected.shift.float()
    assert same(values(model), values(expected))
    if stage == 3 and world > 1:
        whole = sum(tensor.nbytes for tensor in source.parameters())
        assert optimizer.sharding.placer.weights.exchange.cache.peak_bytes < whole / 2
    beside = shard(plain, 2, **options)
    train(model, optimizer, rank)
    train(plain, beside, rank)
    assert same(values(model), values(plain))
    zero.load_weights(model, folder)  # over a training
    assert torch.equal(model.scale.detach().float(), source.scale.detach())
    optimizer.close()
    beside.close()


@pytest.mark.parametrize(("stage", "world", "dtype", "meta", "shared_memory", "kind"), [
    (3, 1, None, True, True, "safetensors"), (3, 2, None, True, False, "index"), (3, 2, "bfloat16", True, True, "prefix"),
    (3, 3, "bfloat16", False, False, "torch"), (2, 2, "bfloat16", False, True, "legacy"), (0, 2, None, False, True, "index"),
])  # fmt: skip
def test_weights_from_a_file_are_those_of_the_plain_model(stage, world, dtype, meta, shared_memory, kind, tmp_path):
    write(made(seed=1), tmp_path, kind)
    ranks.run(world, loaded, tmp_path, stage, dtype, meta, shared_memory)


def read_by(rank, world, folder):
    model = made(device="meta")
    model.frozen.requires_grad_(True)
    optimizer = shard(model, 3)
    with counted_reads() as counted:
        zero.load_weights(model, folder)
    optimizer.close()
    return sum(counted)


def test_each_rank_reads_the_bytes_of_its_shares_only(tmp_path):
    source = made()
    write(source, tmp_path, "safetensors")
    whole, alike = sum(param.nbytes for param in source.parameters()), sum(buffer.nbytes for buffer in source.buffers())
    header = (tmp_path / "model.safetensors").stat().st_size - whole - alike
    found = [num_bytes - header for num_bytes in ranks.run(2, read_by, tmp_path)]
    assert sum(found) == whole + 2 * alike and max(found) < 0.7 * whole


def test_a_plain_model_is_loaded_too(tmp_path):
    model, source = made(seed=2), made(seed=1)
    zero.load_weights(model, write(source, tmp_path, "index") / "model.safetensors.index.json")
    assert same(values(model), values(source))
    with pytest.raises(ValueError, match=r"Cannot load scale: it is on the meta device, and the model is not sharded"):
        zero.load_weights(made(device="meta"), tmp_path)


def test_what_does_not_match_is_said_before_anything_is_changed(tmp_path):
    model, source = made(seed=2), made(seed=1)
    state = {name: value for name, value in source.state_dict().items() if name not in ("head.weight", "scale")}
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    before = values(model)
    with pytest.raises(ValueError, match=r"Cannot load weights .*: missing: scale; unexpected: extra\. Nothing was changed"):
        zero.load_weights(model, tmp_path)
    assert same(values(model), before)
    assert zero.load_weights(model, tmp_path, strict=False) == (["scale"], ["extra"])
    assert torch.equal(model.embed.weight, source.embed.weight) and torch.equal(model.scale, before["scale"])
    save_file({**state, "scale": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"of another shape: scale is \(\) here and \(3,\) there"):
        zero.load_weights(model, tmp_path, strict=False)


BAD = {
    "a truncated file": "bytes and should have",
    "a file that is not there": r"Cannot find .*b\.safetensors, which model\.safetensors\.index\.json lists",
    "an index of others": r"its index says that scale is in b\.safetensors, and it is in a\.safetensors",
    "a name in no file": r"its index says that more is in b\.safetensors, and it is in no file",
    "no index": r"it is not an index of weights \(it lacks 'weight_map'\)",
    "a name in two files": r"scale is in a\.safetensors and in b\.safetensors",
    "a name twice": r"of one name: scale and _orig_mod\.scale",
    "another dtype": r"of a dtype that cannot be held: scale is torch\.(float32|bfloat16) here and torch\.int8 there",
    "an unknown dtype": r"not a safetensors file that is known here \(scale has dtype F4, which cannot be held\)",
    "another architecture": r"missing: scale, embed\.weight, .*; unexpected: other\.weight",
}


def spoil(folder, what):
    """A folder with an index and two files in which one thing is wrong."""
    index = folder / "model.safetensors.index.json"
    if what == "another architecture":
        save_file({"other.weight": torch.ones(2)}, folder / "a.safetensors")
        save_file({}, folder / "b.safetensors")
        index.write_text(json.dumps({"weight_map": {"other.weight": "a.safetensors"}}))
        return
    write(made(seed=1), folder, "index")
    places, one, other = json.loads(index.read_text())["weight_map"], *(folder / f"{name}.safetensors" for name in "ab")
    with_scale = load_file(one)
    if what == "a truncated file":
        other.write_bytes(other.read_bytes()[:-4])
    elif what == "a file that is not there":
        other.unlink()
    elif what == "an index of others":
        places["scale"] = "b.safetensors"
    elif what == "a name in no file":
        places["more"] = "b.safetensors"
    elif what == "a name in two files":
        save_file({**load_file(other), "scale": with_scale["scale"]}, other)
    elif what == "a name twice":
        save_file({**with_scale, "_orig_mod.scale": with_scale["scale"].clone()}, one)
    elif what == "another dtype":
        save_file({**with_scale, "scale": torch.tensor(1, dtype=torch.int8)}, one)
    elif what == "an unknown dtype":
        size = int.from_bytes(one.read_bytes()[:8], "little")
        header = json.loads(one.read_bytes()[8 : 8 + size])
        header["scale"]["dtype"] = "F4"
        text = json.dumps(header, separators=(",", ":")).encode()
        one.write_bytes(len(text).to_bytes(8, "little") + text + one.read_bytes()[8 + size :])
    index.write_text(json.dumps({"weights": places} if what == "no index" else {"weight_map": places}))


def refuses(rank, world, folder, matches):
    model = made(seed=2)
    optimizer = shard(model, 3)
    before = values(model)
    for what, match in matches.items():
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            zero.load_weights(model, folder / what.replace(" ", "-"))
        assert same(values(model), before), what
    with pytest.raises(CheckpointFailed, match=r"failed on rank 1: FileNotFoundError: Cannot find weights at .* Nothing was"):
        zero.load_weights(model, folder / ("good" if rank == 0 else "elsewhere"))
    with pytest.raises(RanksDiffer, match="Cannot begin a load of weights: it was called by rank 0"):
        zero.load_weights(model, folder / ("good" if rank == 0 else "other"))
    assert same(values(model), before)
    train(model, optimizer, rank)
    optimizer.close()


def test_files_that_are_bad_are_named_on_all_ranks_and_nothing_is_changed(tmp_path):
    for what in BAD:
        folder = tmp_path / what.replace(" ", "-")
        folder.mkdir()
        spoil(folder, what)
    for name in ("good", "other"):
        (tmp_path / name).mkdir()
        write(made(seed=1), tmp_path / name, "safetensors")
    state = load_file(tmp_path / "other" / "model.safetensors")
    save_file({**state, "scale": state["scale"].double()}, tmp_path / "other" / "model.safetensors")
    ranks.run(2, refuses, tmp_path, BAD)


def fails_while_it_reads(rank, world, folder):
    model = made(seed=2, device="meta")
    optimizer = shard(model, 3)
    read, left = disk.OpenFile.read, [7]

    def breaking(file, start, num_bytes):
        left[0] -= 1
        if rank == 1 and left[0] < 0:
            raise OSError("the disk is gone")
        return read(file, start, num_bytes)

    disk.OpenFile.read = breaking
    try:
        with pytest.raises(CheckpointFailed, match=r"it failed on rank 1: OSError: the disk is gone\. .*Load again") as error:
            zero.load_weights(model, folder)
    finally:
        disk.OpenFile.read = read
    with pytest.raises(RuntimeError, match="nobody has written to"):
        optimizer.step()
    optimizer.zero_grad()
    zero.load_weights(model, folder)
    expected = made(seed=1)
    assert same(values(model), values(expected))
    train(model, optimizer, rank)
    optimizer.close()
    return str(error.value)


def test_a_read_that_fails_on_the_way_is_named_on_all_ranks_at_once_and_can_be_tried_again(tmp_path):
    write(made(seed=1), tmp_path, "safetensors")
    found = ranks.run(2, fails_while_it_reads, tmp_path)
    assert found[0] == found[1]


def test_files_that_are_none_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, problem in ((tmp_path / "empty", "it has no safetensors"), (tmp_path / "none", "there is no such file")):
        with pytest.raises(FileNotFoundError, match=f"Cannot find weights .*{problem}"):
            WeightFiles(path)
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    with pytest.raises(BadCheckpoint, match="it is not a safetensors file"):
        WeightFiles(tmp_path / "text.safetensors")
    save_file({"one": torch.arange(8.0)}, tmp_path / "short.safetensors")
    files = WeightFiles(tmp_path / "short.safetensors")
    assert torch.equal(files.tensors["one"].read(Span(2, 5)), torch.tensor([2.0, 3.0, 4.0]))
    files.close()
    (tmp_path / "short.safetensors").write_bytes((tmp_path / "short.safetensors").read_bytes()[:-4])
    with pytest.raises(BadCheckpoint, match="bytes and should have"):
        WeightFiles(tmp_path / "short.safetensors")
    for name in ("a", "b"):
        (tmp_path / "empty" / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="Cannot choose among the indices"):
        WeightFiles(tmp_path / "empty")
