"""`python examples/train` goes on where it was interrupted, wherever its ranks come from, and shows what it did."""

import io
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from examples.train.command import main
from examples.train.display import Display
from examples.train.loop import Wish, check_same, read_records, train
from examples.train.model import Gpt
from examples.train.options import Options
from examples.train.plots import ticks
from examples.train.report import write_report
from examples.train.text import Text, read_text
from tests import inside, ranks
from zero import Engine
from zero import __main__ as zero_command
from zero.profiling import STOPS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
TEXT = b"".join(b"%d squared is %d\n" % (number, number**2) for number in range(400))
TINY = {"data": None, "batch": 5, "layers": 1, "width": 32, "context": 16, "dropout": 0.1, "lr": 1e-2, "seed": 3, "stage": 2,
        "dtype": "float32", "offload": "none", "homes": (), "accumulation": 1, "compile": False, "save_every": 100,
        "log_every": 10, "tensorboard": False, "json": True}  # fmt: skip
SAID = ["--layers", "1", "--width", "32", "--context", "16", "--batch", "4", "--json"]


def options(directory, **changes):
    return Options(**{**TINY, "directory": str(directory), "steps": 6, **changes})


def losses(directory):
    records = read_records(Path(directory) / "records.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


# resumed -----------------------------------------------------------------------------------------------------------------


def train_here(rank, world, directory, changes, signalled_at=None):
    """Trains as one rank of those that are here; one of them may be sent a signal while it takes a step."""
    asked = options(directory, **changes)

    def show(record):
        if record["step"] == signalled_at:
            os.kill(os.getpid(), signal.SIGTERM)

    found = train(asked, Text(TEXT, asked.context, asked.seed), show)
    memory = inside.group(found.engine.optimizer).size
    found.engine.close()
    return found.begun_at, found.stopped_by, memory


@pytest.mark.parametrize(
    "changes",
    [{}, {"stage": 1, "dtype": "bfloat16", "accumulation": 2}, {"stage": 3, "dtype": "bfloat16"}],
    ids=["plain", "accumulating", "weights in shares"],
)
def test_what_was_interrupted_goes_on_as_if_it_had_not_been(changes, tmp_path):
    assert ranks.run(2, train_here, tmp_path / "whole", changes) == [(0, None, 2)] * 2
    stopped = ranks.run(2, train_here, tmp_path / "twice", changes, 3)
    assert stopped == [(0, "SIGTERM", 2)] * 2, "all ranks stop after the same step, and save it"
    assert len(losses(tmp_path / "twice")) in (3, 4)
    [(begun_at, why, _), _] = ranks.run(2, train_here, tmp_path / "twice", changes)
    assert begun_at in (3, 4) and why is None
    assert losses(tmp_path / "twice") == losses(tmp_path / "whole")


@pytest.mark.parametrize("stage", [1, 3])
def test_fewer_ranks_go_on_along_the_same_curve_at_another_stage(stage, tmp_path):
    smooth = {"dropout": 0.0}
    ranks.run(3, train_here, tmp_path / "whole", smooth)
    ranks.run(3, train_here, tmp_path / "fewer", smooth, 3)
    assert ranks.run(2, train_here, tmp_path / "fewer", {**smooth, "stage": stage})[0][1:] == (None, 2)
    assert losses(tmp_path / "fewer") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_records_of_steps_that_are_taken_again_are_written_again(tmp_path):
    changes = {"save_every": 2}
    ranks.run(1, train_here, tmp_path, {**changes, "steps": 4})
    path, before = tmp_path / "records.jsonl", losses(tmp_path)
    more = json.dumps({**json.loads(path.read_text().splitlines()[-1]), "step": 5, "loss": 99.0})
    path.write_text(path.read_text() + more + '\n{"step": 6, "lo')
    assert ranks.run(1, train_here, tmp_path, {**changes, "steps": 6})[0][0] == 4
    assert losses(tmp_path)[:4] == before and len(losses(tmp_path)) == 6


def test_a_directory_of_another_training_is_refused_and_one_that_is_done_says_so(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    words = ["--ranks", "1", "--directory", str(tmp_path / "run"), "--data", str(tmp_path / "text"), *SAID]
    assert main([*words, "--steps", "2"]) == 0
    capsys.readouterr()
    assert main([*words, "--steps", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["steps"], answer["begun_at"], answer["report"]) == (2, 2, str(tmp_path / "run" / "report.html"))
    assert main([word for word in words if word != "--json"] + ["--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert "complete, at step 2" in told and str(tmp_path / "run" / "report.html") in told and "raise --steps" in told
    (tmp_path / "run" / "report.html").unlink()  # stands for a program that was killed before it wrote one
    assert main([*words, "--steps", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["begun_at"] == 2 and (tmp_path / "run" / "report.html").is_file()
    assert main([*words, "--steps", "4", "--width", "16"]) == 2
    assert "with width 16: what was saved there has width 32" in capsys.readouterr().err
    other = options(tmp_path / "run", dropout=0.0, batch=4, seed=0)
    assert check_same(other, other.identity(Text(TEXT, 16, 0).digest)) == 2
    with pytest.raises(ValueError, match="with text"):
        check_same(other, other.identity(Text(TEXT + b"!", 16, 0).digest))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "Cannot train with --ranks 0 --restarts 3:"),
        (["--steps", "0"], "--steps 0: it is at least 1"),
        (["--dropout", "1"], "it is a probability"),
        (["--lr", "nan"], "--lr nan: a learning rate is finite"),
        (["--width", "100"], "heads are 64 wide"),
        (["--batch", "1", "--accumulation", "2"], "--batch 1: 1 ranks of 2 micro-batches need 2 samples"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--context", "100000"], "and one more. Give more"),
        (["--directory", ""], "Cannot train with --directory '': it names none"),
        (["--homes", "masters"], "--homes masters: it has another form. Give KIND=PLACE"),
        (["--homes", "everything=cpu"], "of weights, gradients, masters, moments"),
        (["--tensorboard"], "pip install 'zero-accelerators[tensorboard]'"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (tmp_path / "text").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    assert main(["--ranks", "1", "--data", "text", "--steps", "1", *SAID, *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out


@pytest.mark.parametrize("taken", ["run", "run/checkpoints", "run/records.jsonl"])
def test_a_directory_that_holds_something_else_is_named_before_ranks_are_started(taken, tmp_path, capsys, monkeypatch):
    line = '{"step": 1, "loss": 1.0, "tokens_per_second": 1.0, "ranks": 1, "memory_by_rank": [], "ms": {"step": 1.0}}\n'
    (tmp_path / "text").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    Path(taken).parent.mkdir(exist_ok=True)
    Path(taken).write_text(line)
    monkeypatch.setattr("examples.train.command.launch", lambda *_: pytest.fail("ranks were started"))
    assert main(["--ranks", "2", "--data", "text", "--directory", "run", "--steps", "1", *SAID]) == 2
    told = capsys.readouterr()
    assert taken in told.err and "give another" in told.err.lower() and not told.out
    assert Path(taken).read_text() == line


@pytest.mark.parametrize("lacking", ["step", "loss", "tokens_per_second", "ranks", "memory_by_rank", "ms"])
def test_a_record_that_lacks_a_value_is_named_before_the_report_needs_it(lacking, tmp_path):
    record = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0, "ranks": 1, "memory_by_rank": [8], "ms": {"step": 1.0}}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert read_records(path) == [record]
    for wrong in ({name: value for name, value in record.items() if name != lacking}, {**record, lacking: "x"}):
        path.write_text(json.dumps(wrong) + "\n")
        with pytest.raises(ValueError, match=r"Cannot go on with .*records\.jsonl: it has a line that is not a record"):
            read_records(path)


def test_a_training_that_diverges_has_its_report_too(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    words = ["--ranks", "1", "--directory", str(tmp_path / "run"), "--data", str(tmp_path / "text"), *SAID]
    assert main([*words, "--steps", "4", "--lr", "1e30"]) == 0
    assert math.isnan(json.loads(capsys.readouterr().out)["loss"])
    assert "nan" not in re.sub(r"<p>.*</p>", "", (tmp_path / "run" / "report.html").read_text())


def test_a_rank_whose_launcher_is_gone_stops_and_another_process_does_not_care_for_its_parent(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 7)
    monkeypatch.delenv("RANK", raising=False)
    alone = Wish()
    monkeypatch.setenv("RANK", "0")
    launched = Wish()
    assert launched.look() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launched.look() == "its launcher is gone" and alone.look() is None


def test_what_is_not_there_and_what_no_option_is_called_are_mistakes_of_the_caller(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--data", "nowhere", "--json"]) == 2
    told = capsys.readouterr()
    assert "nowhere" in told.err and "Traceback" not in told.err and not told.out and list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="2"):
        main(["--nonsense"])
    assert capsys.readouterr().err.startswith("usage: python examples/train ")


def test_a_training_without_room_says_where_and_what_to_do(tmp_path, monkeypatch, capsys):
    def no_room(descriptor, content):
        raise OSError(28, "No space left on device")

    (tmp_path / "text").write_bytes(TEXT)
    words = ["--data", str(tmp_path / "text"), "--directory", str(tmp_path / "run"), "--ranks", "1", "--steps", "1", *SAID]
    monkeypatch.setattr("zero.checkpoint.disk.os.write", no_room)
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"Cannot write to {tmp_path}/run/checkpoints: No space left on device. Make room")


# shown -------------------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_launcher_and_the_answer_is_one_object(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    words = ["--ranks", "1", "--directory", str(tmp_path / "run"), "--data", str(tmp_path / "text"), "--steps", "3",
             "--accumulation", "2", "--dtype", "bfloat16", *SAID]  # fmt: skip
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["steps"], answer["begun_at"], answer["loss"]) == (3, 0, losses(tmp_path / "run")[-1])
    assert answer["parameters"] == sum(param.numel() for param in Gpt(1, 32, 1, 16).parameters())
    assert [both["stage"] for both in answer["stages"]] == [0, 1, 2, 3]
    for both in answer["stages"]:
        assert both["counted"] == both["predicted"] and both["counted"]["moments"] == 8 * answer["parameters"]
    assert answer["sample"].startswith("def ") and len(answer["sample"]) > 100
    page = (tmp_path / "run" / "report.html").read_text()
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert [len(drawing.findall("{*}path")) for drawing in drawings] == [1, 5, 1, 1]
    assert page.count("<svg") == 4 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for name in ("forward", "backward", "reduce", "step", "publish", "rank 0", "loss", *STOPS):
        assert name in page


def test_a_model_is_compiled_where_that_is_asked_for(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(Engine, "compile", lambda engine: compiled.append(engine))
    asked = options(tmp_path, steps=1, compile=True)
    found = train(asked, Text(TEXT, asked.context, asked.seed), lambda record: None)
    assert compiled == [found.engine]
    found.engine.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


RECORD = {"loss": 2.5, "tokens_per_second": 1234.5, "norm": 0.5, "memory_by_rank": [2**30, 2**30 + 2**20]}


@pytest.mark.parametrize(("stream", "lines"), [(io.StringIO(), 2), (Terminal(), None)], ids=["file", "terminal"])
def test_there_is_a_bar_at_a_terminal_and_a_line_now_and_then_elsewhere(stream, lines, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    display = Display(steps=25, log_every=20, quiet=False)
    for step in range(1, 26):
        display.show({**RECORD, "step": step})
    display.close()
    shown = stream.getvalue()
    assert "loss 2.5000" in shown
    if lines is None:
        assert "\x1b" in shown and "25/25" in shown
    else:
        assert "\x1b" not in shown
        assert shown.splitlines()[0] == "step 20/25  loss 2.5000  1,234 tok/s  norm 0.500  1.0 GiB"
        assert len(shown.splitlines()) == lines


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_the_bar_keeps_its_count_and_its_line_in_a_narrow_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal to be 80 columns wide
    monkeypatch.setattr(sys, "stdout", Terminal())
    display = Display(steps=160, log_every=20, quiet=False)
    display.show({**RECORD, "step": 7})
    display.close()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sys.stdout.getvalue())
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    assert re.match(r"  7/160 .* loss 2\.5000", last) and len(last) <= columns
    assert last.endswith("…") == (columns < 100)


def test_a_large_training_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    large = {**RECORD, "step": 9999, "loss": 10.123456, "tokens_per_second": 987654.3, "norm": 12.3456}
    large["memory_by_rank"] = [2**29, 2**30 - 1]
    monkeypatch.setattr(sys, "stdout", Terminal())
    display = Display(steps=99999, log_every=20, quiet=False)
    display.show(large)
    display.close()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sys.stdout.getvalue())
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    assert last.endswith("loss 10.1235  987,654 tok/s  norm 12.346  1024 MiB") and len(last) <= 80
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Display(steps=99999, log_every=1, quiet=False).show(large)
    assert len(sys.stdout.getvalue().rstrip()) <= 80


def test_ticks_are_round_and_between_the_ends():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1, 400) == [100, 200, 300, 400]
    assert ticks(2.31, 5.56) == [3, 4, 5]
    assert ticks(0, 0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(0, 350 * 2**20, unit=2**20) == [number * 100 * 2**20 for number in range(4)]


def test_states_on_disk_train_alike_and_the_report_shows_what_went_there(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    homes = [word for kind in ("masters", "moments") for word in ("--homes", f"{kind}=disk:{tmp_path}")]
    for name, more in (("memory", []), ("disk", homes)):
        words = [*SAID, "--ranks", "1", "--steps", "3", "--dtype", "bfloat16", "--data", str(tmp_path / "text")]
        assert main([*words, "--directory", str(tmp_path / name), *more]) == 0
    assert losses(tmp_path / "disk") == losses(tmp_path / "memory")
    pages = [(tmp_path / name / "report.html").read_text() for name in ("memory", "disk")]
    assert ["disk, written" in page for page in pages] == ["waiting for the disk" in page for page in pages] == [False, True]


def test_the_memory_axis_of_the_report_has_round_numbers_of_one_unit(tmp_path):
    records = [{"step": step, "loss": 1.0, "ms": {}, "memory_by_rank": [300 * 2**20 + step, 2**20]} for step in (1, 2)]
    write_report(tmp_path / "report.html", records, "", "", "")
    memory = (tmp_path / "report.html").read_text().partition("<h2>Memory of each rank</h2>")[2].partition("<h2>")[0]
    assert re.findall(r">(\d+ \w+)</text>", memory) == ["0 MiB", "100 MiB", "200 MiB", "300 MiB"]


def test_the_exported_model_is_loaded_and_writes_as_the_page_says(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    assert main(["--ranks", "1", "--data", "text", *SAID, "--steps", "2"]) == 0
    wrote = json.loads(capsys.readouterr().out)["sample"]
    [export] = commands(PAGE, "python -m zero export")
    assert zero_command.main(export.split()[3:]) == 0
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    capsys.readouterr()
    exec(compile(program, "page", "exec"), {})
    shown = capsys.readouterr().out
    assert len(shown) > 10 and wrote.startswith(shown.rstrip("\n")[:20])


def test_text_is_a_file_a_folder_or_the_standard_library_and_a_step_sees_the_same_of_it_every_time(tmp_path):
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c").write_bytes(b"first")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "nothing").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "trained" / "checkpoints").mkdir(parents=True)
    (tmp_path / "trained" / "records.jsonl").write_bytes(b"what this training itself wrote")
    assert read_text(str(tmp_path), but=str(tmp_path / "trained")) == b"first\nsecond"
    (tmp_path / "trained" / "records.jsonl").unlink()
    assert read_text(str(tmp_path)) == b"first\nsecond" and read_text(str(tmp_path / "b")) == b"second"
    assert b"def join(" in read_text(None)
    text = Text(TEXT, 8, 0)
    assert text.samples(7, 3).equal(Text(TEXT, 8, 0).samples(7, 3)) and not text.samples(7, 3).equal(text.samples(8, 3))
    assert bytes(text.samples(0, 1)[0].tolist()) in TEXT


# launched ----------------------------------------------------------------------------------------------------------------


def commands(page, program):
    """The lines of the only block of commands that begins with this program."""
    [block] = re.findall(rf"^```bash\n({program} .*?)^```", page, re.DOTALL | re.MULTILINE)
    return re.sub(r" \\\n +", " ", block).splitlines()


def launches():
    """The command of each of the page's two machines."""
    first, second, last = commands(PAGE, "torchrun")
    assert first == f"{second} &" and last == "wait"
    return [second, second]


def started(line, folder):
    """A command as the page prints it, in a process of its own; the checkout is elsewhere."""
    program, *words = shlex.split(line.replace("examples/train", f"{ROOT}/examples/train"))
    begin = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **ranks.DEFAULT_ENV}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "ACCELERATOR"):
        environment.pop(name, None)
    return subprocess.Popen([*begin, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


def rank_processes(launcher):
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            found[process.environ().get("RANK")] = process
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of the page's training."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    asked = options(folder, layers=2, width=64, context=32, batch=8, steps=40, dropout=0.0, seed=0, lr=1e-3)
    ranks.run(2, train_from_library, asked)
    return losses(folder)


def train_from_library(rank, world, asked):
    train(replace(asked), Text(read_text(None), asked.context, asked.seed), lambda record: None).engine.close()


@pytest.mark.full
def test_a_rank_that_is_killed_starts_the_job_again_from_the_latest_checkpoint(uninterrupted, tmp_path):
    [line] = commands(PAGE, "python examples/train")
    launcher = started(line, tmp_path)
    deadline = time.monotonic() + 60
    while len(read_records(tmp_path / "trained" / "records.jsonl")) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    rank_processes(launcher)["1"].kill()
    out, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, out
    assert losses(tmp_path / "trained") == uninterrupted
    assert "exitcode: -9" in out and re.search(r"^0 +counted ", out, re.MULTILINE) and "It writes:\ndef " in out
    assert (tmp_path / "trained" / "report.html").is_file()


@pytest.mark.full
def test_the_command_trains_two_ranks_with_weights_in_shares_as_with_whole_ones(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    for stage in (2, 3):
        launcher = started(
            f"python examples/train --ranks 2 --stage {stage} --steps 4 --directory stage{stage} --data text "
            "--layers 1 --width 32 --context 16 --batch 4 --dropout 0 --seed 0",
            tmp_path,
        )
        out, _ = launcher.communicate(timeout=90)
        assert launcher.returncode == 0 and f"parameters at stage {stage} on 2 ranks" in out, out
    assert len(losses(tmp_path / "stage3")) == 4 and losses(tmp_path / "stage3") == losses(tmp_path / "stage2")


@pytest.mark.full
def test_the_first_command_trains_ten_million_parameters_and_its_loss_falls(tmp_path):
    launcher = started("python examples/train", tmp_path)  # the command of ci/train; see tests/test_setup.py
    out, _ = launcher.communicate(timeout=1200)
    assert launcher.returncode == 0, out
    numel = re.search(r"^([\d,]+) parameters at stage 2 on 2 ranks", out, re.MULTILINE)[1]
    assert 9_000_000 < int(numel.replace(",", "")) < 12_000_000
    found = losses(tmp_path / "trained")
    assert len(found) == 160 and sum(found[-10:]) / 10 < 2.7 < 5 < found[0]


@pytest.mark.full
def test_ranks_train_to_the_end_though_nobody_reads_and_the_status_says_so(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    words = f"--data {tmp_path}/text --directory {tmp_path}/run --ranks 2 --steps 3 --log-every 1 {' '.join(SAID[:-1])}"
    command = f"{sys.executable} {ROOT}/examples/train {words} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (141, ""), done.stderr
    assert len(losses(tmp_path / "run")) == 3 and (tmp_path / "run" / "report.html").is_file()


def test_the_page_on_machines_has_the_same_line_for_two():
    [said] = re.findall(r"`(torchrun --nnodes [^`]* examples/train [^`]*)`", (ROOT / "docs" / "multi-node.md").read_text())
    for there, here in {"first": "localhost", "node 8": "node 1", " --directory /shared/trained": ""}.items():
        said = said.replace(there, here)
    assert [line.partition(" --layers")[0] for line in launches()] == [said] * 2


@pytest.mark.full
def test_two_agents_of_torchrun_train_together_as_two_machines_would(uninterrupted, tmp_path):
    lines = launches()
    assert len(lines) == 2
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    agents = [started(line.replace("29431", str(port)), tmp_path) for line in lines]
    outs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outs
    assert losses(tmp_path / "trained") == uninterrupted
    assert sum("It writes:" in out for out in outs) == 1
