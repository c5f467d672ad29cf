"""Files that nobody wrote by accident: every one is named or harmless, and none is read as other values than it has."""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import resource
import stat
import tempfile
import traceback
import zipfile

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zero
import zero.checkpoint.manifest as manifest_module
from accelerators.tensor_bytes import host_bytes
from tests.loopback import run_ranks, solo
from tests.promises.loops import same
from zero.__main__ import main
from zero.checkpoint.disk import OpenFile
from zero.checkpoint.importers import import_checkpoint
from zero.errors import BadCheckpoint, CheckpointFailed, RanksDiffer

NAMED = ValueError, FileNotFoundError, CheckpointFailed  # BadCheckpoint is a ValueError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2, bias=False)
        self.norm = nn.BatchNorm1d(6)


def made(seed):
    torch.manual_seed(seed)
    return Model()


def state_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# headers ----------------------------------------------------------------------------------------------------------------


def header_of(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path, text, data):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_entry(**changes):
    def change(header):
        return {**header, "b": {**header["b"], **changes}}

    return change


DEEP = b'{"a":' * 10**5
HEADERS = {
    "negative offsets": with_entry(data_offsets=[-8, 0]),
    "offsets that overlap": with_entry(data_offsets=[0, 8]),
    "a gap": with_entry(data_offsets=[16, 24]),
    "offsets that are no whole numbers": with_entry(data_offsets=[8.0, 16.0]),
    "offsets that are truth values": with_entry(data_offsets=[True, 9]),
    "three offsets": with_entry(data_offsets=[8, 12, 16]),
    "offsets that are a text": with_entry(data_offsets="ab"),
    "a shape that is none": with_entry(shape=None),
    "a negative shape": with_entry(shape=[-2, -1]),
    "a shape beyond memory": with_entry(shape=[2**40, 2**40]),
    "a shape of nothing in much": with_entry(shape=[0, 2**62, 2**62], data_offsets=[8, 8]),
    "a dtype that is a list": with_entry(dtype=["F32"]),
    "no dtype": lambda header: {**header, "b": {"shape": [2], "data_offsets": [8, 16]}},
    "an entry that is a number": lambda header: {**header, "b": 7},
    "a header that is a number": lambda header: 7,
    "a header that is null": lambda header: None,
    "a header that is a list": lambda header: [header],
    "a header of many levels": lambda header: DEEP,
    "a header with NaN": lambda header: b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}',
    "a name twice": lambda header: b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' * 2 + b"}",
    "half a letter": lambda header: {**header, "b\ud800": header["b"]},
    "half a letter in its metadata": lambda header: {**header, "__metadata__": {"format": "\udfff"}},
    "many levels in a field that is not known": with_entry(more=json.loads("[" * 126 + "]" * 126)),
    "metadata that are no texts": lambda header: {**header, "__metadata__": {"format": 3}},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_the_library_refuses_is_named_and_nothing_is_changed(what, tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2), "b": torch.full((2,), 2.0)}, path)
    header, data = header_of(path)
    write_header(path, HEADERS[what](header), data)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt").__enter__()
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(BadCheckpoint, match=r"Cannot read .*m\.safetensors: .*\. Fetch it again\."):
        zero.load_weights(model, path)
    assert same(state_of(model), {"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(BadCheckpoint, match=r"Cannot read .*m\.safetensors"):
        zero.read_export(path)


INDEXES = {
    "a file outside": {"weight_map": {"a": "../outside.safetensors"}},
    "a file of the root": {"weight_map": {"a": "/outside.safetensors"}},
    "a file that is a number": {"weight_map": {"a": 3}},
    "a file that has no name": {"weight_map": {"a": ""}},
    "a file with NUL": {"weight_map": {"a": "a\0.safetensors"}},
    "half a letter": {"weight_map": {"a": "\ud800.safetensors"}},
    "a list": {"weight_map": ["a"]},
    "a number": 7,
    "nothing": None,
    "many levels": DEEP.decode(),
    "entries without tensors": {"weight_map": {"a": "a.safetensors", "more": "a.safetensors"}},
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_is_none_or_leads_elsewhere_is_named_by_every_reader(what, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folder / "a.safetensors", tmp_path / "outside.safetensors"):
        save_file({"a": torch.ones(2)}, path)
    index, body = folder / "model.safetensors.index.json", INDEXES[what]
    index.write_text(body if isinstance(body, str) else json.dumps(body))
    model = nn.ParameterDict({"a": torch.zeros(2)})
    for read in (lambda: zero.load_weights(model, folder), lambda: zero.read_export(folder)):
        with pytest.raises(BadCheckpoint, match=r"Cannot read .*(it is not an index of weights|its index says)"):
            read()
    assert torch.equal(model["a"], torch.zeros(2))


def test_a_folder_that_has_the_name_of_an_index_is_none(tmp_path):
    inner = tmp_path / "folder" / "model.safetensors.index.json"
    inner.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, inner / "a.safetensors")
    model = nn.ParameterDict({"a": torch.zeros(2)})
    for read in (lambda: zero.load_weights(model, tmp_path / "folder"), lambda: zero.read_export(tmp_path / "folder")):
        with pytest.raises(FileNotFoundError, match=r"Cannot find weights at .*index\.json: there is no such file"):
            read()
    zero.load_weights(model, inner)  # a folder may have any name
    assert torch.equal(model["a"], torch.ones(2))


# torch files ------------------------------------------------------------------------------------------------------------


_PROOF = os.path.join(tempfile.gettempdir(), "code of a pickle was run")


class Code:
    def __reduce__(self):
        return os.mkdir, (_PROOF,)


def compressed(path):
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def longer(path):
    """Names a length for the first tensor that only all bytes of the file behind it have."""
    torch.save({"a": torch.zeros(2), "b": torch.full((64,), 3.0)}, path)
    edit_pickle(path, lambda content: content.replace(b"K\x02tq", b"K\x08tq").replace(b"K\x02\x85", b"K\x08\x85"))


def leaves_out(path):
    """Writes the format before zip files, with a list of values that lacks the last tensor: torch would not fill it."""
    torch.save({"a": torch.ones(2), "b": torch.ones(2, 2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    listed = content.rindex(b"]q\x00")  # the list of names, each a text with its length
    stop = content.index(b"e.", listed)
    first = content.index(b"X", listed)
    second = content.index(b"X", first + 5 + int.from_bytes(content[first + 1 : first + 5], "little"))
    path.write_bytes(content[:second] + content[stop:])


def edit_pickle(path, edit):
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, edit(content) if name.endswith("data.pkl") else content)


TORCH_FILES = {
    "code": (lambda path: torch.save({"a": Code()}, path), r"without running code: it needs posix\.mkdir"),
    "code of old": (
        lambda path: torch.save({"a": Code()}, path, _use_new_zipfile_serialization=False),
        r"without running code: it needs posix\.mkdir",
    ),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"a": Code()})), "it is no file that torch.save wrote"),
    "a text": (lambda path: path.write_text("no tensors at all"), "it is no file that torch.save wrote"),
    "nothing": (lambda path: path.write_bytes(b""), "it is no file that torch.save wrote"),
    "another archive": (
        lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"), "it is no file that torch.save wrote"
    ),
    "what is compressed": (compressed, "is compressed"),
    "a length beyond its bytes": (longer, r"not as long as the bytes|it is no file that torch\.save wrote"),
    "values that are left out": (leaves_out, "it has values that are of no tensor"),
    "names that are numbers": (lambda path: torch.save({0: torch.ones(2)}, path), "has the name 0, not a text"),
    "a sparse tensor at the end": (
        lambda path: torch.save({"a": torch.ones(2), "b": torch.eye(2).to_sparse()}, path), "it is sparse_coo"
    ),
    "a tensor without values": (lambda path: torch.save({"a": torch.ones(2, device="meta")}, path), "it is on the meta device"),
    "a tensor that is repeated": (
        lambda path: torch.save({"a": torch.ones(1).expand(2**40)}, path), "has more elements than the file has bytes"
    ),
    "a list": (lambda path: torch.save([torch.ones(2)], path), "is? a list"),
}  # fmt: skip


@pytest.mark.parametrize("what", TORCH_FILES)
def test_a_torch_file_that_is_none_is_named_by_both_readers_and_nothing_is_changed(what, tmp_path):
    make, reason = TORCH_FILES[what]
    path = tmp_path / "m.pt"
    make(path)
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2, 2)})
    for read in (lambda: zero.load_weights(model, path, strict=False), lambda: import_checkpoint(path, tmp_path / "c")):
        with pytest.raises(BadCheckpoint, match=r"Cannot read .*m\.pt") as error:
            read()
        assert "weights_only" not in "".join(traceback.format_exception(error.value))
        if what != "a length beyond its bytes":  # by whether the file is mapped
            assert error.match(reason.replace("is? a list", "a list"))
    assert not model["a"].any() and not model["b"].any()
    assert not os.path.exists(_PROOF)


def test_a_torch_file_is_read_by_its_own_bytes(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3).t(), "c": torch.ones(0), "d": torch.ones(())}
    state["e"] = state["a"][1]
    torch.save(state, tmp_path / "m.pt")
    model = nn.ParameterDict({name: torch.zeros_like(value) for name, value in state.items()})
    zero.load_weights(model, tmp_path / "m.pt")
    assert same(state_of(model), {name: value.contiguous() for name, value in state.items()})


# failures while reading -------------------------------------------------------------------------------------------------


def fails_at(monkeypatch, number):
    read, counted = OpenFile.read, []

    def breaking(file, start, num_bytes):
        counted.append(num_bytes)
        if len(counted) == number:
            raise OSError(5, "Input/output error")
        return read(file, start, num_bytes)

    monkeypatch.setattr(OpenFile, "read", breaking)


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_read_that_fails_leaves_a_model_that_is_not_saved_until_it_is_loaded(stage, tmp_path, monkeypatch):
    save_file(made(1).state_dict(), tmp_path / "m.safetensors")
    model, optimizer = made(2), None
    if stage is not None:
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, group=solo())
    with monkeypatch.context() as patched:
        fails_at(patched, 5)
        with pytest.raises(CheckpointFailed, match=r"Cannot read weights: .*Input/output error.* Load again before you go"):
            zero.load_weights(model, tmp_path / "m.safetensors")
    if optimizer is not None:
        with pytest.raises(ValueError, match="Cannot save: a load of weights broke off"):
            zero.save(tmp_path / "c", optimizer)
    zero.load_weights(model, tmp_path / "m.safetensors")
    assert same(state_of(model), state_of(made(1)))
    if optimizer is not None:
        zero.save(tmp_path / "c", optimizer)
        with monkeypatch.context() as patched:
            fails_at(patched, 5)
            with pytest.raises(CheckpointFailed):
                zero.load_weights(model, tmp_path / "m.safetensors")
        zero.load(tmp_path / "c", optimizer)  # this model has all of them, too
        zero.save(tmp_path / "c", optimizer)
        optimizer.close()


OTHERS = {
    "a group of the same sizes before it": ["ema", "model"],
    "and behind it": ["model", "ema"],
    "momentum before it": ["optimizer", "state_dict"],
}


@pytest.mark.parametrize("what", OTHERS)
def test_of_a_torch_file_with_several_groups_of_tensors_the_state_dict_is_read(what, tmp_path):
    good = made(1).state_dict()
    other = {name: torch.full_like(value, 7.0) for name, value in good.items()}
    torch.save({name: good if name in ("model", "state_dict") else other for name in OTHERS[what]}, tmp_path / "m.pt")
    model = made(2)
    zero.load_weights(model, tmp_path / "m.pt")
    assert same(state_of(model), state_of(made(1)))


def test_tensors_of_a_torch_file_whose_values_are_not_its_bytes_are_read_as_torch_reads_them(tmp_path):
    line = torch.arange(16.0)
    saved = {
        "negated": torch._neg_view(torch.ones(2, 2)),
        "slice": line[4:8],
        "transposed": line[:4].view(2, 2).t(),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3.0),
    }
    torch.save(saved, tmp_path / "m.pt")
    model = nn.ParameterDict({name: torch.zeros(value.shape) for name, value in saved.items()})
    zero.load_weights(model, tmp_path / "m.pt")
    assert all(torch.equal(model[name], value) for name, value in saved.items())


@pytest.mark.parametrize("num_bytes", [64, 16])
def test_a_torch_file_of_the_other_byte_order_is_read_and_one_that_is_too_short_named(num_bytes, tmp_path):
    line = torch.arange(16.0)
    torch.save({"w": line}, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for name in source.namelist():
            content = b"big" if name.endswith("/byteorder") else source.read(name)
            if "/data/" in name:
                content = bytes(host_bytes(line.view(torch.uint8).view(16, 4).flip(1).contiguous()))[:num_bytes]
            target.writestr(zipfile.ZipInfo(name), content)
    model = nn.ParameterDict({"w": torch.zeros(16)})
    if num_bytes == line.nbytes:
        zero.load_weights(model, tmp_path / "big.pt")
        assert torch.equal(model["w"], line)
    else:
        with pytest.raises(BadCheckpoint, match="it is damaged"):
            zero.load_weights(model, tmp_path / "big.pt")


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.safetensors").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "link.safetensors")
    with pytest.raises(BadCheckpoint, match=r"pipe\.pt: it is not a regular file"):
        import_checkpoint(tmp_path / "pipe.pt", tmp_path / "c")
    for name in ("pipe.pt", "folder.safetensors", "link.safetensors"):
        with pytest.raises((BadCheckpoint, FileNotFoundError), match=r"^Cannot .*" + name.partition(".")[0]):
            zero.load_weights(made(1), tmp_path / name)
    with pytest.raises((BadCheckpoint, FileNotFoundError), match=r"^Cannot .*(folder|link)"):
        zero.load_weights(made(1), tmp_path)


def test_a_load_of_weights_that_changed_nothing_leaves_the_training_as_it_was(tmp_path):
    """Ranks that ask for different loads are told so before anything is written."""
    save_file(made(1).state_dict(), tmp_path / "m.safetensors")

    def program(group):
        model = models[group.rank]
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, group=group)
        with pytest.raises(RanksDiffer):
            zero.load_weights(model, tmp_path / "m.safetensors", strict=group.rank == 0)
        zero.save(tmp_path / "c", optimizer)
        optimizer.close()

    models = [made(2), made(2)]
    run_ranks(2, program, 20.0)


# exports ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    model = made(1)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=1, group=solo())
    model.first(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = tmp_path / "c"
    zero.save(path, optimizer, "a", {"note": (1, 2), "tensor": torch.arange(3.0)})
    optimizer.close()
    return path


@pytest.mark.parametrize("target", ["a/rank-00000.safetensors", "a/new.safetensors", "a/manifest.json", "a", "latest"])
def test_an_export_does_not_overwrite_what_it_reads(target, checkpoint, tmp_path, capsys):
    before = {path: path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    os.symlink(checkpoint, tmp_path / "link")
    for folder in (checkpoint, tmp_path / "link"):
        ways = [["--format", "dcp"], ["--shard-size", "100"]] if target == "a" else [[]]
        for way in ways:
            assert main(["export", str(checkpoint), str(folder / target), *way]) == 2
            assert "Cannot write to" in capsys.readouterr().err
        if target != "a":
            assert main(["export", str(checkpoint), str(tmp_path / "m"), "--optimizer", str(folder / target)]) == 2
    assert before == {path: path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("options", [[], ["--optimizer"], ["--shard-size", "100"], ["--format", "dcp"]])
def test_an_export_takes_the_place_of_no_device_or_pipe(options, checkpoint, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    out, *more = [str(tmp_path / "m"), *options, str(tmp_path / "pipe")] if "--optimizer" in options else ["", *options]
    assert main(["export", str(checkpoint), out or str(tmp_path / "pipe"), *more]) == 2
    assert "Cannot export to" in capsys.readouterr().err and sorted(os.listdir(tmp_path)) == ["c", "pipe"]
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_an_import_without_room_says_where_and_what_to_do(tmp_path, capsys):
    torch.save({"a": torch.ones(1000)}, tmp_path / "m.pt")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        assert main(["import", str(tmp_path / "m.pt"), str(tmp_path / "c")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    told = f"Cannot write to {tmp_path}/c: File too large. Make room there, or name a place on another disk.\n"
    assert capsys.readouterr().err == told and os.listdir(tmp_path / "c") == []


def test_names_that_no_file_can_have_are_not_saved(tmp_path):
    torch.save({"a\ud800": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"Cannot save 'a\\ud800': this name cannot be written as UTF-8"):
        import_checkpoint(tmp_path / "m.pt", tmp_path / "c")
    assert os.listdir(tmp_path / "c") == []


@pytest.mark.parametrize("options", [{"shard_bytes": 100}, {"format": "dcp"}, {}])
def test_an_export_that_fails_leaves_what_was_there(options, checkpoint, tmp_path, monkeypatch):
    """A limit on the size of a file is to a program what a full disk is."""
    is_folder, stems = bool(options), ("shard_bytes" in options) * 100
    name = "m" if is_folder else "m.safetensors"
    zero.export(checkpoint, tmp_path / "old" / name, **options)
    before = {path: path.read_bytes() for path in sorted((tmp_path / "old").rglob("*")) if path.is_file()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out in ("new/er", "old"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 + stems, limit[1]))
        try:
            with pytest.raises(CheckpointFailed, match=r"Cannot write to .*/m(\.safetensors)?: "):
                zero.export(checkpoint, tmp_path / out / name, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (tmp_path / "new").exists()
    assert before == {path: path.read_bytes() for path in sorted((tmp_path / "old").rglob("*")) if path.is_file()}


@pytest.mark.parametrize("out", ["", "inside"])
def test_an_import_does_not_write_into_what_it_reads(out, checkpoint, tmp_path, capsys):
    assert main(["export", str(checkpoint), str(tmp_path / "theirs"), "--format", "dcp"]) == 0
    before = sorted(os.listdir(tmp_path / "theirs"))
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "theirs" / out)]) == 2
    assert "Cannot import into" in capsys.readouterr().err and before == sorted(os.listdir(tmp_path / "theirs"))
    torch.save({"a": torch.ones(2)}, tmp_path / "latest")
    apart = ["--optimizer", str(tmp_path / "theirs")]
    for words in ([str(tmp_path / "latest"), str(tmp_path)], [str(tmp_path / "m.pt"), str(tmp_path / "theirs" / out), *apart]):
        assert main(["import", *words]) == 2
        assert "Cannot import into" in capsys.readouterr().err
    assert torch.equal(torch.load(tmp_path / "latest")["a"], torch.ones(2))


# manifests --------------------------------------------------------------------------------------------------------------


def forge(path, body):
    """Writes a manifest that has its hash, as far as what is in it has one."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        text = manifest_module._dumped({**body, "sha256": manifest_module._hash_of(body)})
    path.write_text(text)


def nested(levels):
    body = []
    for _ in range(levels):
        body = [body]
    return body


def weight(body):
    return body["parameters"]["first.weight"]


def pair(body, name):
    """The value of a part of what is typed."""
    return next(pair for pair in body["training"]["v"] if pair[0] == name)


MANIFESTS = {
    "a file with NUL": lambda body: body["files"][0].update(name="rank\0"),
    "a file with half a letter": lambda body: body["files"][0].update(name="\ud800"),
    "a file that is a folder": lambda body: body["files"][0].update(name=".."),
    "a name with half a letter": lambda body: body["parameters"].update({"\udfff": weight(body)}),
    "a dtype that is none": lambda body: weight(body).update(dtype="nn"),
    "a buffer of a dtype that is none": lambda body: body["buffers"]["norm.running_mean"].update(dtype="load"),
    "no parameters": lambda body: body.pop("parameters"),
    "no files": lambda body: body.update(files=[]),
    "no training": lambda body: body.update(training=None),
    "no groups": lambda body: body["training"]["v"].remove(pair(body, "groups")),
    "groups that are none": lambda body: pair(body, "groups").__setitem__(1, [7]),
    "ranks that are a text": lambda body: pair(body, "ranks").__setitem__(1, "x"),
    "a step before the first": lambda body: pair(body, "step").__setitem__(1, -1),
    "a step beyond what counts": lambda body: pair(body, "step").__setitem__(1, 2**63),
    "an engine that counts nothing": lambda body: pair(body, "loss_scale").__setitem__(1, {"value": "x"}),
    "a shape beyond memory": lambda body: weight(body).update(
        shape=[2**40], stretches=[{"file": 0, "start": 0, "stop": 2**40}]
    ),
    "a buffer beyond memory": lambda body: body["buffers"]["norm.running_mean"].update(shape=[2**40]),
    "a shape whose product is": lambda body: weight(body).update(shape=[2**40] * 1000),
    "NaN": lambda body: pair(body, "step").__setitem__(1, float("nan")),
    "many levels": lambda body: body.update(extra=nested(500)),
    "a value of no type": lambda body: body.update(extra={"$": "tuple"}),
    "a tensor of no bytes": lambda body: body.update(extra={"$": "tensor", "v": ["float32", [2**40], ""]}),
    "a tensor that is in no file": lambda body: body.update(extra={"$": "tensor in a file", "v": ["float32", [3], "no"]}),
}  # fmt: skip


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_forged_manifest_with_its_hash_is_named_and_takes_no_memory(what, checkpoint, tmp_path, monkeypatch):
    path = checkpoint / "a" / "manifest.json"
    body = json.loads(path.read_text())
    MANIFESTS[what](body)
    forge(path, body)
    watch_memory(monkeypatch)
    model = made(2)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=1, group=solo())
    before = state_of(model)
    with pytest.raises(NAMED, match="Cannot"):
        zero.load(checkpoint, optimizer)
    assert same(state_of(model), before)
    optimizer.close()
    only_of_a_load = "a step", "ranks that", "an engine", "a value", "a tensor"
    if not what.startswith(only_of_a_load):
        with pytest.raises(NAMED, match="Cannot"):
            zero.export(checkpoint, tmp_path / "m.safetensors")
    assert main(["inspect", str(checkpoint), "--parameters"]) in (0, 1, 2)


def watch_memory(monkeypatch, most=2**20):
    """Fails where a tensor of more bytes is made: the files of these tests are all smaller."""
    empty = torch.empty

    def small(*shape, **options):
        made = empty(*shape, **{**options, "device": "meta"})
        assert made.nbytes <= most, f"{made.nbytes} bytes"
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", small)


# mutants of all of them -------------------------------------------------------------------------------------------------

JUNK = [
    None, True, -8, 0, 1, 7, 2**31, 2**40, 2**63, 2**70, -0.5, 1e300, "", "a", "\0", "\ud800", "..", "../a", "F32", "float32",
    "load", "$", [], {}, [0, 0], [-8, 0], [2**40], {"$": "tuple", "v": 3}, {"$": "range", "v": [0, 2**40]}, nested(90),
]  # fmt: skip


def mutate(body, rng):
    """Changes one or two places of something that JSON holds."""
    for _ in range(rng.choice((1, 1, 2))):
        places = []

        def collect(node, places=places):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], (dict, list)):
                    collect(node[key])

        collect(body)
        node, key = rng.choice(places)
        how = rng.randrange(5)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[rng.choice(["", "a", "$", "\ud800", "first.weight", "dtype"])] = node.pop(key)
        elif how == 2 and type(node[key]) is int:
            node[key] += rng.choice((-1, 1, 8, -8))
        elif how == 3:
            other, place = rng.choice(places)
            if type(other) is type(node) and (place in other if isinstance(other, dict) else place < len(other)):
                node[key] = json.loads(json.dumps(other[place]))
        else:
            node[key] = copy.deepcopy(rng.choice(JUNK))
    return body


def scramble(content, rng):
    """Changes some bytes: another, fewer, more, or a part twice."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        start = rng.randrange(len(content) or 1)
        stop = min(len(content), start + rng.choice((1, 1, 4, 40)))
        how = rng.randrange(4)
        if how == 0 and content:
            content[start] = rng.randrange(256)
        elif how == 1:
            del content[start:stop]
        elif how == 2:
            content[start:start] = rng.randbytes(rng.choice((1, 8)))
        else:
            content[start:start] = content[start:stop]
    return bytes(content)


class Fuzz:
    """Mutants of each kind of file, and what may become of them."""

    def __init__(self, folder, checkpoint):
        self.folder, self.checkpoint = folder, checkpoint
        self.right, self.model = state_of(made(1)), made(2)
        self.before = state_of(self.model)
        self.file = folder / "m.safetensors"
        save_file(self.right, self.file)
        self.header, self.data = header_of(self.file)
        halves = {"a.safetensors": list(self.right)[::2], "b.safetensors": list(self.right)[1::2]}
        self.shards = folder / "shards"
        self.shards.mkdir()
        for name, members in halves.items():
            save_file({member: self.right[member] for member in members}, self.shards / name)
        self.places = {member: name for name, members in halves.items() for member in members}
        torch.save(self.right, folder / "m.pt")
        torch.save(self.right, folder / "old.pt", _use_new_zipfile_serialization=False)
        self.torch = {name: (folder / name).read_bytes() for name in ("m.pt", "old.pt")}
        self.manifest = (checkpoint / "a" / "manifest.json").read_text()
        self.rank_file = (checkpoint / "a" / "rank-00000.safetensors").read_bytes()
        model = made(2)
        self.optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=1, group=solo())
        self.trained = {}
        zero.load(checkpoint, self.optimizer)
        self.saved = state_of(model)
        self.refused = self.read = 0

    def attempt(self, act):
        """Returns what `act` does, or None if that is refused by name."""
        try:
            result = act()
        except NAMED as error:
            assert str(error).startswith("Cannot "), error
            assert "weights_only" not in str(error)
            self.refused += 1
            return None
        self.read += 1
        return result if result is not None else ()

    def weights(self, source):
        """Loads weights and returns them; if that is refused, the model is what it was."""
        if self.attempt(lambda: zero.load_weights(self.model, source, strict=False)) is None:
            assert same(state_of(self.model), self.before)
            return None
        loaded = state_of(self.model)
        self.model.load_state_dict(self.before)
        return loaded

    def headers(self, rng):
        header = json.loads(json.dumps(self.header))
        if rng.randrange(2):
            write_header(self.file, mutate(header, rng), self.data)
        else:
            write_header(self.file, scramble(json.dumps(header).encode(), rng), self.data)
        loaded, exported = self.weights(self.file), self.attempt(lambda: zero.read_export(self.file))
        if exported is not None:
            assert same(exported, load_file(self.file))  # the library refuses a file that is wrong
        if loaded is not None:
            found = load_file(self.file)
            assert all(torch.equal(loaded[name], found.get(name, self.before[name])) for name in loaded)

    def indexes(self, rng):
        index = self.shards / "model.safetensors.index.json"
        body = {"metadata": {"total_size": 1}, "weight_map": dict(self.places)}
        if rng.randrange(2):
            index.write_text(json.dumps(mutate(body, rng)))
        else:
            index.write_bytes(scramble(json.dumps(body).encode(), rng))
        for loaded in (self.weights(self.shards), self.attempt(lambda: zero.read_export(self.shards))):
            assert loaded is None or all(
                torch.equal(value, self.right[name]) or torch.equal(value, self.before[name]) for name, value in loaded.items()
            )

    def torch_files(self, rng):
        name = rng.choice(list(self.torch))
        path = self.folder / name
        path.write_bytes(self.torch[name])
        if name == "m.pt" and rng.randrange(3):
            edit_pickle(path, lambda content: scramble(content, rng))
        else:
            path.write_bytes(scramble(self.torch[name], rng))
        loaded = self.weights(path)
        if loaded is not None:  # and its own bytes are no others than torch reads without mapping it
            found = torch.load(path, map_location="cpu", weights_only=True)
            found = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
            assert all(torch.equal(loaded[name], found.get(name, self.before[name])) for name in loaded)
        self.attempt(lambda: import_checkpoint(path, self.folder / "imported"))

    def manifests(self, rng):
        body, content = json.loads(self.manifest), self.rank_file
        if rng.randrange(3):
            body = mutate(body, rng)
        else:
            length = int.from_bytes(content[:8], "little")
            header = mutate(json.loads(content[8 : 8 + length]), rng)
            write_header(self.checkpoint / "a" / "rank-00000.safetensors", header, content[8 + length :])
            file = OpenFile(self.checkpoint / "a" / "rank-00000.safetensors")
            body["files"][0].update(num_bytes=file.size(), checksum=file.checksum())
            file.close()
        forge(self.checkpoint / "a" / "manifest.json", body)
        model = self.optimizer.model
        if self.attempt(lambda: zero.load(self.checkpoint, self.optimizer)) is None:
            assert same(state_of(model), self.saved)
        else:
            assert all(torch.equal(value, self.saved[name]) for name, value in state_of(model).items())
        self.attempt(lambda: zero.export(self.checkpoint, self.folder / "e.safetensors", optimizer=self.folder / "o.pt"))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["inspect", str(self.checkpoint), "--parameters"]) in (0, 1, 2)
        (self.checkpoint / "a" / "rank-00000.safetensors").write_bytes(self.rank_file)


@pytest.mark.parametrize("num", [200, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")  # torch warns about pickles and storages
def test_mutants_of_files_are_named_or_read_as_what_they_have(num, checkpoint, tmp_path, monkeypatch):
    fuzz = Fuzz(tmp_path, checkpoint)
    watch_memory(monkeypatch)
    kinds = fuzz.headers, fuzz.indexes, fuzz.torch_files, fuzz.manifests
    for number in range(num):
        try:
            kinds[number % len(kinds)](random.Random(number))
        except BaseException as error:
            error.add_note(f"mutant {number} of {kinds[number % len(kinds)].__name__}") if hasattr(error, "add_note") else None
            raise
    assert fuzz.refused > num / 2 and fuzz.read > num / 20
    fuzz.optimizer.close()
