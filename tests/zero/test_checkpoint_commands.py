"""`python -m zero export` and `inspect`, without ranks and without the model."""

import json
import os
import resource

import pytest
import torch

import zero
from tests.loopback import solo
from tests.promises.checkpoints import build, sharded, train
from zero.__main__ import main


@pytest.fixture
def folder(tmp_path):
    optimizer = sharded(solo(), dtype=torch.bfloat16)
    train(optimizer, [0], 0, 1)
    zero.save(tmp_path / "c", optimizer, "a", {"note": 1})
    weights = {name: tensor.detach().clone() for name, tensor in optimizer.model.state_dict().items()}
    optimizer.close()
    return tmp_path / "c", weights


def test_inspect_shows_what_a_checkpoint_holds(folder, capsys):
    path, weights = folder
    assert main(["inspect", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["ranks_that_saved"], told["optimizer"], told["extra"]) == (1, 1, "AdamW", "yes")
    assert told["elements"] == sum(param.numel() for param in build().parameters())
    assert told["state"] == "exp_avg, exp_avg_sq"
    assert told["parameters"].keys() == weights.keys()
    assert told["parameters"]["first.weight"] == "bfloat16 [7, 5]"
    assert main(["inspect", str(path), "--parameters", "--tag", "a"]) == 0
    text = capsys.readouterr().out
    assert "1 files, 0 of them damaged" in text
    assert "shared.weight" in text
    assert "is second.weight" in text


def test_inspect_names_the_file_that_is_damaged(folder, capsys):
    path, _ = folder
    file = path / "a" / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert main(["inspect", str(path)]) == 1
    told = capsys.readouterr()
    assert "1 files, 1 of them damaged" in told.out
    assert "rank-00000.safetensors" in told.err
    assert main(["inspect", str(path), "--no-check"]) == 0
    assert "not checked" in capsys.readouterr().out
    assert main(["inspect", str(path / "nowhere")]) == 2
    assert "save one first" in capsys.readouterr().err


def test_export_writes_what_it_names(folder, tmp_path, capsys):
    path, weights = folder
    out, optimizer = tmp_path / "m.safetensors", tmp_path / "o.pt"
    assert main(["export", str(path), str(out), "--optimizer", str(optimizer)]) == 0
    assert capsys.readouterr().out.split() == [str(out), str(optimizer)]
    found = zero.read_export(out)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert main(["export", str(path), str(tmp_path / "s"), "--shard-size", "1.0 KiB", "--dtype", "float32"]) == 0
    exact = zero.read_export(tmp_path / "s")
    assert exact["first.weight"].dtype == torch.float32
    assert torch.equal(exact["first.weight"].bfloat16(), weights["first.weight"])
    assert not torch.equal(exact["first.weight"], weights["first.weight"].float())


def test_an_export_that_would_take_the_place_of_its_source_is_refused_behind_links_too(folder, tmp_path, monkeypatch):
    path, _ = folder
    (path / "a" / "sub").mkdir()
    (tmp_path / "inside").symlink_to(path / "a" / "sub")
    (path / "a" / "elsewhere").symlink_to(tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    file = path / "a" / "rank-00000.safetensors"
    before = file.read_bytes()
    for out in ("inside/../rank-00000.safetensors", "inside/m.safetensors", "c/a/elsewhere"):
        with pytest.raises(ValueError, match=f"Cannot write to {out}: .*/a is a checkpoint"):
            zero.export(path, out)
        with pytest.raises(ValueError, match=f"Cannot write to {out}: .*/a is a checkpoint"):
            zero.export(path, "w.safetensors", optimizer=out)
    with pytest.raises(ValueError, match=r"Cannot write to inside/\.\./\.\./latest: it names the latest checkpoint"):
        zero.export(path, "inside/../../latest")
    assert file.read_bytes() == before
    assert zero.export(path, "inside/../../../w.safetensors")[0].resolve() == tmp_path / "w.safetensors"


def test_weights_and_optimizer_go_to_two_files(folder, tmp_path, capsys):
    path, _ = folder
    (tmp_path / "s").mkdir()
    out = str(tmp_path / "w.safetensors")
    assert main(["export", str(path), out, "--optimizer", str(tmp_path / "s" / ".." / "w.safetensors")]) == 2
    told = capsys.readouterr().err
    assert f"Cannot export weights and optimizer to {out} both: " in told and told.count("\n") == 1
    assert not os.path.exists(out)
    in_files = ["export", str(path), str(tmp_path / "w"), "--shard-size", "100"]
    assert main(in_files) == 0
    for name in sorted(os.listdir(tmp_path / "w")):  # the index among them
        before = (tmp_path / "w" / name).read_bytes()
        assert main([*in_files, "--optimizer", str(tmp_path / "s" / ".." / "w" / name)]) == 2
        assert f"Cannot export weights and optimizer to {tmp_path / 'w' / name} both: " in capsys.readouterr().err
        assert (tmp_path / "w" / name).read_bytes() == before


def test_a_disk_without_room_for_the_optimizer_is_said_with_its_name(folder, tmp_path, capsys):
    """A limit on the size of a file is to a program what a full disk is."""
    path, _ = folder
    out, optimizer = tmp_path / "w.safetensors", tmp_path / "o" / "optimizer.pt"
    zero.export(path, out, optimizer=tmp_path / "o.pt")
    most = (tmp_path / "o.pt").stat().st_size - 100
    assert out.stat().st_size < most
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        status = main(["export", str(path), str(out), "--optimizer", str(optimizer)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    told = capsys.readouterr().err
    assert told == f"Cannot write to {optimizer}: File too large. Make room there, or name a place on another disk.\n"
    assert not optimizer.parent.exists()


@pytest.mark.parametrize("size", ["0", "-1", "five", "5X"])
def test_a_size_that_is_none_is_refused(size, folder, tmp_path, capsys):
    assert main(["export", str(folder[0]), str(tmp_path / "s"), f"--shard-size={size}"]) == 2
    assert ("Try 5GB" if size == "0" else "Write it like 4GiB") in capsys.readouterr().err
