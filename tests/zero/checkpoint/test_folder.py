"""A directory of checkpoints: how one appears in it, is found, and goes."""

import hashlib
import json
import os
import random
import shutil
import zlib
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zero
from tests import ranks
from zero.checkpoint import disk, manifest
from zero.checkpoint.folder import LATEST, MANIFEST, Folder, _being_written, check_tag, read_manifest
from zero.checkpoint.manifest import File, Manifest, Outline, Part, Stored, Stretch, merged
from zero.checkpoint.reader import CheckpointReader
from zero.errors import BadCheckpoint

NOTHING = Manifest((), {}, {})


def saved(folder, tag, manifest=NOTHING, **options):
    return folder.commit(folder.begin(tag), tag, manifest, **options)


def test_a_checkpoint_is_found_by_its_tag_and_the_newest_without_one(tmp_path):
    folder = Folder(tmp_path / "new" / "one")
    assert folder.latest() is None
    with pytest.raises(FileNotFoundError, match="or save one first"):
        folder.find(None)
    first, second = saved(folder, "a"), saved(folder, "b")
    assert (folder.find(None), folder.find("a"), folder.find("b")) == (second, first, second)
    assert read_manifest(first) == replace(NOTHING, number=1)
    with pytest.raises(FileNotFoundError, match=r"no folder of that name has a manifest\.json\. Use one of those there: a, b"):
        folder.find("c")


def test_one_that_is_not_to_be_the_latest_is_found_by_its_tag_only(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, "a")
    saved(folder, "best", is_latest=False)
    assert folder.latest() == "a"
    assert folder.find("best").name == "best"


def test_a_tag_may_be_saved_again_and_leaves_one_folder(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, "a")
    saved(folder, "a", Manifest((), {}, {}, training={"x": "y"}))
    assert read_manifest(folder.find(None)).training == {"x": "y"}
    assert sorted(os.listdir(tmp_path)) == ["a", LATEST]


@pytest.mark.parametrize("stopped_before", ["the new one took its place", "the one before went"])
def test_who_was_stopped_while_one_takes_the_place_of_another_leaves_one_of_the_two(tmp_path, stopped_before):
    folder = Folder(tmp_path)
    old = saved(folder, "a")
    written = folder.begin("a")
    disk.write(written / MANIFEST, [Manifest((), {}, {}, training={"x": "y"}).text().encode()])
    os.rename(old, tmp_path / ".a.replaced")
    if stopped_before == "the one before went":
        os.rename(written, tmp_path / "a")
    _being_written.pop(written).release()  # the system does so for a process that was stopped
    found = None if stopped_before == "the new one took its place" else {"x": "y"}
    assert read_manifest(folder.find(None)).training == found
    saved(folder, "b")
    assert read_manifest(folder.find("a")).training == found
    assert sorted(os.listdir(tmp_path)) == ["a", "b", LATEST]


def test_what_the_dead_left_of_the_same_tag_fails_no_save_that_had_begun(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, "a")
    saved(folder, "b")
    written = folder.begin("a")
    for name in (".a.replaced", ".b.saving-removed"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    folder.commit(written, "a", Manifest((), {}, {}, training={"x": "y"}))
    assert read_manifest(folder.find(None)).training == {"x": "y"}
    assert not (tmp_path / ".a.replaced").exists()
    folder.prune(1)
    assert folder.tags() == ["a"]
    os.rename(saved(folder, "b"), tmp_path / ".b.replaced")
    (tmp_path / "b").mkdir()  # by somebody else
    saved(folder, "a")
    assert sorted(os.listdir(tmp_path)) == [".b.replaced", "a", "b", LATEST]


@pytest.mark.parametrize("what", ["rmtree", "rename"])
def test_a_checkpoint_that_cannot_be_removed_fails_no_save_and_the_next_one_removes_it(what, tmp_path, monkeypatch, caplog):
    folder = Folder(tmp_path)
    saved(folder, "older")
    saved(folder, "a")
    rename = os.rename

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    def refuse(source, target):
        if source.name in (".a.replaced", "older"):
            raise OSError(16, "Device or resource busy")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(*((shutil, "rmtree", rmtree) if what == "rmtree" else (os, "rename", refuse)))
        saved(folder, "a", Manifest((), {}, {}, training={"x": "y"}))
        folder.prune(1)
    assert read_manifest(folder.find(None)).training == {"x": "y"}
    assert (f"Cannot remove {tmp_path / 'older'}: Device or resource busy" in caplog.text) == (what == "rename")
    assert len(os.listdir(tmp_path)) == 4
    saved(folder, "b")
    folder.prune(2)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", LATEST]


def test_something_of_another_kind_is_never_taken_away(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="something else has that name"):
        Folder(tmp_path).begin("a")
    (tmp_path / "a" / MANIFEST).write_text('{"name": "a web page"}')
    with pytest.raises(FileExistsError, match="something else has that name"):
        Folder(tmp_path).begin("a")
    os.symlink(tmp_path / "a", tmp_path / "link")
    with pytest.raises(FileExistsError, match="something else has that name"):
        Folder(tmp_path).begin("link")
    folder = Folder(tmp_path)
    saved(folder, "b")
    saved(folder, "c")
    folder.prune(1)
    assert sorted(os.listdir(tmp_path)) == ["a", "c", LATEST, "link"]


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_pointer_that_cannot_be_written_leaves_all_as_it_was(tag, tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    saved(folder, "a")
    written = folder.begin(tag)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        folder.commit(written, tag, Manifest((), {}, {}, training={"x": "y"}))
    folder.give_up(written)
    assert sorted(os.listdir(tmp_path)) == ["a", LATEST]
    assert read_manifest(folder.find(None)) == replace(NOTHING, number=1)


@pytest.mark.parametrize("tag", ["a", "b"])
def test_whichever_sync_of_a_commit_fails_the_pointer_names_a_checkpoint(tag, tmp_path, monkeypatch):
    class Countdown:
        left = 0

    def fsync(descriptor):
        Countdown.left -= 1
        if Countdown.left == 0:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    for failing in range(1, 6):  # the manifest, its folder, the new name, the pointer's file and its name
        directory = tmp_path / str(failing)
        folder = Folder(directory)
        saved(folder, "a")
        written = folder.begin(tag)
        Countdown.left = failing
        with pytest.raises(OSError, match="Input/output"):
            folder.commit(written, tag, Manifest((), {}, {}, training={"x": "y"}))
        folder.give_up(written)
        assert read_manifest(folder.find(None)).training == ({"x": "y"} if failing == 5 else None)
        saved(folder, tag)
        assert sorted(os.listdir(directory)) == sorted({"a", tag, LATEST})


def test_pruning_keeps_the_newest_and_the_one_that_the_pointer_names(tmp_path):
    folder = Folder(tmp_path)
    for tag in "abcd":
        saved(folder, tag, is_latest=tag == "a")
    folder.prune(2)
    assert sorted(os.listdir(tmp_path)) == ["a", "c", "d", LATEST]


def test_the_newest_is_what_was_written_last_whatever_the_clock_and_the_names_say(tmp_path):
    folder = Folder(tmp_path)
    for hours, tag in enumerate(["z", "y", "x10", "x9", "z"]):  # a clock that is set back before every save
        os.utime(saved(folder, tag) / MANIFEST, (10**9 - 3600 * hours,) * 2)
    assert folder.tags() == ["y", "x10", "x9", "z"]
    (tmp_path / "x9" / MANIFEST).write_bytes(b"")  # an empty manifest makes it no checkpoint, and no folder to remove
    folder.prune(1)
    assert saved(folder, "x8").name == "x8"
    assert folder.tags() == ["z", "x8"]
    assert [read_manifest(folder.find(tag)).number for tag in folder.tags()] == [5, 6]


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", "latest", "a\n", None, 3, "x" * 300])
def test_what_cannot_name_a_folder_is_no_tag(tag):
    with pytest.raises(ValueError, match="a tag names a folder"):
        check_tag(tag)


def test_a_pointer_that_names_no_tag_is_a_bad_checkpoint(tmp_path):
    (tmp_path / LATEST).write_text("../elsewhere")
    with pytest.raises(BadCheckpoint, match="names no checkpoint"):
        Folder(tmp_path).latest()


def test_a_pipe_in_the_place_of_a_file_is_named_and_never_waited_for(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, "a")
    for path in (tmp_path / "a" / MANIFEST, tmp_path / LATEST):
        path.unlink()
        os.mkfifo(path)
    assert folder.tags() == []
    with pytest.raises(BadCheckpoint, match=r"manifest\.json: .*not a regular file"):
        read_manifest(tmp_path / "a")
    with pytest.raises(OSError, match=r"not a regular file: .*latest"):
        folder.latest()


@pytest.mark.parametrize("pointer", ["a folder", "../elsewhere"])
def test_one_whose_pointer_cannot_be_read_any_more_is_not_current(pointer, tmp_path):
    saved(Folder(tmp_path), "a")
    opened = Folder(tmp_path).open()
    assert opened.is_current()
    (tmp_path / LATEST).unlink()
    if pointer == "a folder":
        (tmp_path / LATEST).mkdir()
    else:
        (tmp_path / LATEST).write_text(pointer)
    assert not opened.is_current()


STORED = Stored((2, 3), None, "bfloat16", "float32", {"exp_avg": "float32"}, {"step": 3}, (Stretch(0, 0, 4), Stretch(1, 4, 6)))
FULL = Manifest((File("a", 10, "ab"), File("b", 0, "cd")), {"w": STORED}, {}, {"x": "w"}, {"t": [1]}, None)


def test_a_manifest_is_read_as_it_was_written():
    assert Manifest.read(FULL.text().encode(), "it") == FULL
    assert STORED.covers()


def test_any_bit_of_a_manifest_that_flips_is_noticed():
    text = FULL.text().encode()
    for at in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(BadCheckpoint, match="it"):
            Manifest.read(bytes(flipped), "it")


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"format": "another"}', b"\xff\xfe"])
def test_what_is_no_manifest_of_ours_is_told_so(text):
    with pytest.raises(BadCheckpoint, match="Cannot read it"):
        Manifest.read(text, "it")


def test_the_checksum_of_a_file_does_not_hang_on_how_its_bytes_came(tmp_path):
    content = random.Random(0).randbytes(3 * 2**20 + 5)
    parts = [content[:7], b"", content[7 : 2**20 + 9], content[2**20 + 9 :]]
    written = disk.write(tmp_path / "a", map(memoryview, parts))
    assert written == (len(content), disk.OpenFile(tmp_path / "a").checksum())
    assert (tmp_path / "a").read_bytes() == content
    sums = b"".join(zlib.crc32(content[at : at + 2**20]).to_bytes(4, "little") for at in range(0, len(content), 2**20))
    assert written[1] == hashlib.sha256(sums).hexdigest()


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, 2**21 + 4])
def test_a_bit_that_flips_anywhere_gives_another_checksum(at, tmp_path):
    content = bytearray(2**21 + 5)
    one = disk.write(tmp_path / "a", [content])[1]
    content[at] ^= 1
    assert disk.write(tmp_path / "b", [content])[1] != one


def test_a_file_of_another_size_is_told_so_before_it_is_read(tmp_path):
    folder = Folder(tmp_path)
    written = folder.begin("a")
    told = File("f", *disk.write(written / "f", [b"abc"]))
    folder.commit(written, "a", Manifest((told,), {}, {}))
    os.truncate(tmp_path / "a" / "f", 2)
    with pytest.raises(BadCheckpoint, match="f: it has 2 bytes and had 3"):
        CheckpointReader(tmp_path).check_file(0, read=pytest.fail)


def test_a_read_that_fails_names_the_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    opened = disk.OpenFile(tmp_path / "a")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / 'a'}'"):
        opened.read(0, 3)


@pytest.mark.parametrize("name", ["../a", "/a", "b\\a"])
def test_files_lie_in_the_checkpoint_and_nowhere_else(name):
    with pytest.raises(BadCheckpoint, match="cannot be"):
        Manifest.read(Manifest((File(name, 3, "ab"),), {}, {}).text().encode(), "it")


def test_stretches_that_overlap_or_leave_a_gap_do_not_cover():
    for stretches in ((Stretch(0, 0, 4),), (Stretch(0, 0, 4), Stretch(1, 3, 6)), (Stretch(0, 1, 6),)):
        assert not Stored((6,), None, "float32", "float32", {}, {}, stretches).covers()


def test_twelve_parts_are_put_together_by_their_numbers():
    """Files of rank 10 and 11 come before that of rank 2 in the order of their names."""
    outline = Outline((24,), None, "float32", "float32")
    parts = [Part(None, {"w": [(2 * rank, 2 * rank + 2)]}, {"w": {}}, {"w": {"step": 1}}) for rank in range(12)]
    found = merged({"w": outline}, parts)["w"]
    assert [stretch.file for stretch in found.stretches] == list(range(12))
    assert found.covers()


def saved_by(rank, world, folder):
    model = nn.Linear(4, 2)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    zero.save(folder, optimizer, "a")
    optimizer.close()


def test_the_example_of_a_manifest_is_what_two_ranks_write(tmp_path):
    ranks.run(2, saved_by, str(tmp_path))
    found = json.loads((tmp_path / "a" / "manifest.json").read_text())
    shown = manifest.__doc__.partition('"weight": ')[2].partition(", ...}")[0]
    assert json.loads(shown) == found["parameters"]["weight"]
    file = found["files"][found["parameters"]["weight"]["stretches"][0]["file"]]["name"]
    with safe_open(tmp_path / "a" / file, "pt") as tensors:
        assert {manifest.key_of("weight", what, 0) for what in ("value", "momentum_buffer")} <= set(tensors.keys())
