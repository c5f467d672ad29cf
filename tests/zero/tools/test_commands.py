"""All commands of `python -m zero` have one help, one set of exit statuses and --json, and say what they refuse in one line."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import zero
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.zero.tools.test_plan import plan_here
from tests.zoo.case import backward, real_loss, real_mlp, real_numbers
from zero import shard
from zero.__main__ import COMMANDS, main
from zero.errors import CheckpointFailed
from zero.tools.commands import pairs, table

DOCS = Path(__file__).parents[3] / "docs"
NAMES = list(COMMANDS)


def asked(*words):
    """The exit status, argparse's own included."""
    try:
        return main([str(word) for word in words])
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def checkpoint(tmp_path):
    model = real_mlp()
    optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=2, group=solo())
    backward(optimizer, real_loss(model(real_numbers((3, 4), 0))))
    optimizer.step()
    optimizer.zero_grad()
    zero.save(tmp_path / "saved", optimizer)
    optimizer.close()
    return tmp_path / "saved"


def test_the_help_names_every_command(capsys):
    assert asked("--help") == 0
    told = capsys.readouterr().out
    assert [name for name in NAMES if re.search(rf"^    {name} ", told, re.MULTILINE)] == NAMES


def test_without_a_word_the_help_is_told_and_nothing_is_done(capsys):
    assert asked() == 2
    told = capsys.readouterr()
    assert "Sharded training on any torch device." in told.err and not told.out


@pytest.mark.parametrize("words", [[], ["--steps", "3"], ["--help"]])
def test_a_command_that_is_gone_says_what_is_typed_now(words, capsys):
    assert asked("train", *words) == 2
    told = capsys.readouterr()
    assert re.fullmatch(r"Cannot run `zero train`: .*\. Run `python examples/train` .*\.\n", told.err) and not told.out
    assert (DOCS.parent / "examples" / "train" / "__main__.py").is_file()


def test_an_interruption_is_a_line_and_an_exit_status_of_its_own(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("zero.config.deepspeed.reader.translate", interrupted)
    assert asked("config", "some.json") == 130
    assert capsys.readouterr().err == "Interrupted at once: what was begun is not finished.\n"


def test_the_configuration_of_no_file_is_that_of_the_defaults(capsys):
    assert asked("config") == 0
    assert capsys.readouterr().out == (DOCS / "defaults" / "shard.txt").read_text(encoding="utf-8")
    assert asked("config", "--implied", "lr=1") == 2
    assert "no file that they could fill in" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_each_says_what_it_exits_with_and_that_it_can_answer_in_json(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # the width of the terminal that this runs in must not matter
    assert asked(name, "--help") == 0
    told = capsys.readouterr().out
    assert "--json" in told and "print one JSON object instead of lines" in told
    assert re.search(r"Exit status: 0 .+, 1 .+, 2 it could not be done or found out, and the reason is on stderr\.", told)
    assert max(map(len, told.splitlines())) <= 128


REFUSED = {
    "plan": ["nowhere.json"],
    "verify": ["nowhere.py:f"],
    "config": ["nowhere.json"],
    "inspect": ["nowhere"],
    "export": ["nowhere", "out"],
    "import": ["nowhere", "out"],
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_there_is_a_mistake_of_the_caller_said_on_stderr_alone(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert asked(name, *REFUSED[name], "--json") == 2
    told = capsys.readouterr()
    assert "nowhere" in told.err and "Traceback" not in told.err and not told.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_no_command_knows_is_one_too(name, capsys):
    assert asked(name, "--nonsense") == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_each_answers_in_one_json_object(checkpoint, tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}))
    torch.save(real_mlp().state_dict(), tmp_path / "model.pt")
    said = {
        "plan": ["1M", "--memory", "1GiB"],
        "config": [config],
        "inspect": [checkpoint],
        "export": [checkpoint, tmp_path / "out.safetensors"],
        "import": [tmp_path / "model.pt", tmp_path / "imported"],
    }
    assert {*said, "verify"} == set(NAMES), "that one starts ranks, and answers in test_verify.py"
    for name, words in said.items():
        assert asked(name, *words, "--json") == 0, name
        told = capsys.readouterr()
        assert isinstance(json.loads(told.out), dict), name


def test_no_is_an_answer_of_its_own(checkpoint, tmp_path, capsys):
    refused = tmp_path / "ds.json"
    refused.write_text(json.dumps({"zero_optimization": {"stage": 4}}))
    assert asked("config", refused) == 1
    (checkpoint / "global_step1" / "manifest.json").write_text("{")
    assert asked("inspect", checkpoint) == 1
    assert asked("plan", "7B", "--memory", "1GiB", "--host-memory", "1GiB", "--bucket-bytes", "1GiB") == 1
    assert capsys.readouterr().out.rstrip().endswith("or a narrower dtype.")


def test_tables_have_names_on_the_left_and_numbers_on_the_right():
    assert table(("name", "bytes"), [("a", "5"), ("long", "1234567")]) == "name    bytes\na           5\nlong  1234567"
    assert pairs({"one_word": 1, "two": "x"}) == "one word  1\ntwo       x"


@needs_sim
def test_what_the_page_on_planning_prints_runs_as_printed(tmp_path):
    page = (DOCS / "plan.md").read_text(encoding="utf-8").replace("tiny.py", f"{tmp_path}/tiny.py")
    (program,) = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (tmp_path / "tiny.py").write_text(program)
    assert all(shlex.split(line)[:4] == ["python", "-m", "zero", "plan"] for line in lines)
    found = [ranks.run(1, plan_here, shlex.split(line)[4:], apart="sim")[0] for line in lines]
    assert found[0] == shown
    assert "activations come on top" in found[1] and "activations of 512 a micro-batch are included" in found[2]


def test_the_loop_that_the_page_on_metrics_prints_writes_its_records(tmp_path, monkeypatch, capsys):
    [program] = re.findall(r"```python\n(.*?)```", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert list(records[2]["ms"])[:3] == ["forward", "backward", "ready"]
    assert capsys.readouterr().out.startswith("3 ")


def no_room(descriptor, content):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("words", [["out/m.safetensors"], ["out", "--shard-size", "1K"]])
def test_an_export_without_room_says_where_and_what_to_do(words, checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("zero.checkpoint.disk.os.write", no_room)
        assert asked("export", checkpoint, *words) == 2
    told = capsys.readouterr()
    told_room = "No space left on device. Make room there, or name a place on another disk."
    assert told.err == f"Cannot write to {words[0]}: {told_room}\n"
    assert not told.out and list((tmp_path / "out").iterdir()) == []
    name = "x" * 300
    assert asked("export", checkpoint, f"out/{name}", *words[1:]) == 2
    assert capsys.readouterr().err == f"Cannot write to out/{name}: File name too long. Give a shorter name.\n"


def test_a_save_without_room_says_where_and_what_to_do(tmp_path, monkeypatch):
    model = real_mlp()
    optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=2, group=solo())
    with monkeypatch.context() as patched:
        patched.setattr("zero.checkpoint.disk.os.write", no_room)
        with pytest.raises(CheckpointFailed, match=rf"Cannot write to {tmp_path}/c: No space left on device\. Make room"):
            zero.save(tmp_path / "c", optimizer)
    with pytest.raises(CheckpointFailed, match=r"Cannot write to .*/x+: File name too long\. Give a shorter name\."):
        zero.save(tmp_path / ("x" * 300), optimizer)
    zero.save(tmp_path / "c", optimizer)
    optimizer.close()
