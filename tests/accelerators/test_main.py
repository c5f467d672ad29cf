"""python -m accelerators: what people and programs read."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

import accelerators
from accelerators import __main__ as command
from accelerators import selection
from accelerators.backends.cpu import CpuAccelerator
from accelerators.memory import MemoryReading
from accelerators.selection import BUILT_IN, Registration, Registry, Selection
from tests import programs
from tests.accelerators.fakes import fake_device_module, give_torch, name_accelerator


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("ACCELERATOR", "DS_ACCELERATOR", "LOCAL_RANK")}
    return programs.python("-m", "accelerators", *arguments, env={**clean, **environment})


@pytest.fixture
def table(monkeypatch):
    for variable in ("ACCELERATOR", "DS_ACCELERATOR", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    registry = Registry(BUILT_IN, lambda group: [])
    monkeypatch.setattr(selection, "_choice", Selection(registry))
    return registry


def test_the_table_marks_the_chosen_one_and_says_why_not_for_the_rest():
    result = run(ACCELERATOR="cpu", TERM="xterm-256color")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout  # nobody sees colours in a pipe
    table, _, notes = result.stdout.partition("\n\n")
    lines = {line[2:].split()[0]: line for line in table.splitlines() if line.strip("* ")}
    assert lines["cpu"].startswith("*")
    assert "fp32 bf16" in lines["cpu"] and "gloo" in lines["cpu"] and "GiB" in lines["cpu"]
    assert "torch_npu is not installed" in lines["npu"]
    assert not lines["npu"].startswith("*")
    assert "cpu is used: ACCELERATOR=cpu." in notes


def test_a_choice_that_cannot_be_had_is_one_line_and_exit_status_2():
    result = run(ACCELERATOR="bogus")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Cannot use ACCELERATOR=bogus:" in result.stderr


@pytest.mark.parametrize("value", ["cuda:", "npu", "cpu:1"])
def test_whatever_is_wrong_with_the_choice_is_said_on_one_line(table, monkeypatch, capsys, value):
    monkeypatch.setenv("ACCELERATOR", value)
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"Cannot use ACCELERATOR={value}:")
    assert printed.err.count("\n") == 1


def test_an_unknown_option_is_exit_status_2(capsys):
    with pytest.raises(SystemExit) as leaving:
        command.main(["--jsn"])
    assert leaving.value.code == 2
    assert "--jsn" in capsys.readouterr().err


def test_json_is_the_same_for_programs(table, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATOR", " CPU ")
    assert command.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["chosen"], report["why"], report["device"]) == ("cpu", "ACCELERATOR= CPU ", "cpu")
    rows = {row["name"]: row for row in report["candidates"]}
    assert [row["name"] for row in report["candidates"] if row["chosen"]] == ["cpu"]
    assert rows["cpu"]["usable"] and rows["cpu"]["devices"] == 1
    assert set(rows["cpu"]["memory"][0]) == {"total", "available", "allocated", "peak", "peak_since"}
    assert "float32" in rows["cpu"]["dtypes"]
    assert rows["cpu"]["communication_backend"] == "gloo"
    assert rows["npu"] == {
        "name": "npu",
        "chosen": False,
        "usable": False,
        "reason": "torch_npu is not installed",
        "priority": 250,
        "origin": "built in",
    }
    assert isinstance(report["missing"], list)


def test_several_devices_have_a_line_of_memory_each_and_what_they_lack_is_said(table, monkeypatch, capsys):
    functions = {"mem_get_info": lambda index: ((index + 1) << 30, 8 << 30), "memory_allocated": lambda index: 0}
    give_torch(monkeypatch, dev=fake_device_module(2, synchronize=lambda index: None, **functions))
    table.add(Registration("dev", lambda: accelerators.Accelerator("dev"), priority=0))
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "1.00 GiB / 8.00 GiB" in out and "2.00 GiB / 8.00 GiB" in out
    assert command.main(["--json"]) == 0
    dev = next(row for row in json.loads(capsys.readouterr().out)["candidates"] if row["name"] == "dev")
    assert dev["missing"] == ["peak memory", "streams", "pinned host memory", "collectives of its own", "bf16", "fp64"]
    assert dev["communication_backend"] == "staged"


def test_a_device_that_only_torch_knows_is_shown_with_the_words_that_take_it(table, monkeypatch, capsys):
    give_torch(monkeypatch, acme=fake_device_module(1))
    name_accelerator(monkeypatch, "acme")
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "\nacme: known to torch; ACCELERATOR=acme takes it\n" in out
    [row] = [line.split() for line in out.splitlines() if line.strip().startswith("acme ")]
    assert "staged" in row


@pytest.mark.parametrize("error", [RuntimeError, TypeError, OSError])
def test_a_device_that_does_not_answer_is_a_reason_and_no_crash(table, monkeypatch, capsys, error):
    def mem_get_info(index):
        raise error("out of memory\nand more lines")

    give_torch(monkeypatch, dev=fake_device_module(1, mem_get_info=mem_get_info))
    table.add(Registration("dev", lambda: accelerators.Accelerator("dev"), priority=0))
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert command.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"it is there, but does not answer: {error.__name__}: out of memory and more lines" in out


def test_what_is_taken_on_request_only_is_not_tried_in_passing(table, monkeypatch, capsys):
    table.add(Registration("rare", lambda: pytest.fail("it was tried"), priority=-1))
    assert command.main(["--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out)["candidates"] if row["name"] == "rare")
    assert row["usable"] is None
    assert row["reason"] == "not tried: it is taken on request only, ACCELERATOR=rare"


@pytest.mark.full
def test_the_table_leaves_torch_without_an_accelerator_where_there_was_none():
    program = """
        import torch
        from accelerators.__main__ import main
        before = torch.accelerator.current_accelerator()
        assert main(["--json"]) == main([]) == 0
        assert torch.accelerator.current_accelerator() == before
    """
    result = programs.with_torch(program, {**os.environ, "ACCELERATOR": "cpu"})
    assert result.returncode == 0, result.stderr


def test_what_was_asked_for_is_shown_with_all_it_has():
    rows = json.loads(run("--json", ACCELERATOR="sim").stdout or "{}").get("candidates", [])
    if not rows:
        pytest.skip(run(ACCELERATOR="sim").stderr)
    assert [(row["chosen"], row["devices"]) for row in rows if row["name"] == "sim"] == [(True, 2)]


@pytest.mark.parametrize("where", ["| true", "> /dev/full", ">&-"])
@pytest.mark.parametrize(
    "words",
    [
        *("accelerators --json", "zero config", "zero plan --help"),
        *(pytest.param(words, marks=pytest.mark.full) for words in ("accelerators --help", "zero --help")),
    ],
)
def test_output_that_nobody_reads_or_that_has_no_room_is_an_exit_status_and_a_line_at_most(where, words):
    command = f"{sys.executable} -m {words} {where}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "ACCELERATOR": "cpu"}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    said = {"| true": (141, ""), "> /dev/full": (2, "No space left on device"), ">&-": (2, "Bad file descriptor")}
    status, words = said[where]
    line = f"Cannot write the answer to stdout: {words}. Send it to where there is room.\n" if words else ""
    assert (result.returncode, result.stdout, result.stderr) == (status, "", line)


class Panic(BaseException):
    """As a panic of Rust is in Python."""


FAILING = {
    "compile_backend": (Panic("at line 1"), "Panic: at line 1"),
    "device_count": (RuntimeError("no driver"), "RuntimeError: no driver"),
    "read_memory": (SystemExit("enough"), "SystemExit: enough"),
    "supported_dtypes": (KeyError("x"), "KeyError: 'x'"),
    "device": (OSError("gone"), "OSError: gone"),
}


@pytest.mark.parametrize("member", FAILING)
def test_the_table_is_shown_whatever_a_plug_in_does(member, table, monkeypatch, capsys):
    error, words = FAILING[member]

    def fail(*_):
        raise error

    value = property(fail) if member == "compile_backend" else fail
    made = type("Failing", (CpuAccelerator,), {"name": "dev", member: value})
    table.add(Registration("dev", made, priority=500))
    status = command.main([])
    told = capsys.readouterr()
    assert "npu" in told.out and words in " ".join(told.out.split()) + told.err
    assert status == (2 if "Cannot choose an accelerator" in told.err else 0)
    assert (status == 2) == (member in ("device_count", "device"))
    monkeypatch.setenv("ACCELERATOR", "cpu")
    monkeypatch.setattr(selection, "_choice", Selection(table))
    assert command.main([]) == 0


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Failing:
    """A property of a plug-in that ends as nothing should."""

    def __init__(self, error):
        self._error = error

    def __get__(self, *_):
        raise self._error


def answers(value):
    return lambda *_: value


def ends_early(*_):
    raise GeneratorExit("enough")


WRONG = {
    "a backend that is a number": ({"communication_backend": 7}, "communication_backend gave 7, which is no str"),
    "a backend that ends early": ({"communication_backend": Failing(GeneratorExit("no"))}, "GeneratorExit: no"),
    "a backend that has markup": ({"communication_backend": "[/b]"}, "[/b]"),
    "a backend that is no text of utf-8": ({"communication_backend": "x\ud800"}, "x\\ud800"),
    "no compiler": ({"compile_backend": None}, "compile_backend gave None, which is no str"),
    "a variable": ({"visible_devices_variable": 3}, "visible_devices_variable gave 3, which is no str or None"),
    "very many devices": ({"device_count": answers(10**12)}, "gave 1000000000000, which is not a number of devices"),
    "less than no device": ({"device_count": answers(-1)}, "device_count gave -1, which is not a number of devices"),
    "half a device": ({"device_count": answers(0.5)}, "device_count gave 0.5, which is not a number of devices"),
    "true devices": ({"device_count": answers(True)}, "device_count gave True, which is not a number of devices"),
    "a preference for nothing": ({"preferred_dtype": answers(object())}, "preferred_dtype gave <object object at"),
    "dtypes that are texts": ({"supported_dtypes": answers(("fp32",))}, "gave 'fp32', which is no dtype"),
    "dtypes without an end": ({"supported_dtypes": answers(itertools.repeat(torch.float32))}, "which is no tuple or list"),
    "no reading": ({"memory": answers({})}, "memory gave {}, which is no MemoryReading"),
    "figures that are texts": ({"memory": answers(MemoryReading("a", 1, 1, 1))}, "total gave 'a', which is no int or None"),
    "figures beyond all bounds": ({"memory": answers(MemoryReading(10**400, 1, 1, 1))}, "OverflowError: int too large"),
    "an end too early": ({"supports": ends_early}, "GeneratorExit: enough"),
    "an end when it is asked whether it works": ({"unavailable_reason": ends_early}, "GeneratorExit: enough"),
    "an error without a text": ({"supports": Failing(Wordless())}, "Wordless: <"),
    "no word on whether it works": ({"unavailable_reason": Failing(Wordless())}, "Wordless: <"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_table_is_shown_whatever_a_plug_in_answers(what, table, monkeypatch, capsys):
    members, words = WRONG[what]
    monkeypatch.setenv("ACCELERATOR", "cpu")
    table.add(Registration("dev", type("Wrong", (CpuAccelerator,), {"name": "dev", **members}), priority=500))
    assert command.main([]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert words in told and "npu" in told
    assert command.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "cpu"


def test_an_empty_reason_is_told_as_one_that_is_missing(table, monkeypatch, capsys):
    table.add(Registration("dev", type("Empty", (CpuAccelerator,), {"unavailable_reason": lambda self: ""})))
    monkeypatch.setenv("ACCELERATOR", "cpu")
    assert command.main([]) == 0
    assert "unavailable_reason gave an empty text" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("ACCELERATOR", "dev")
    with pytest.raises(ValueError, match=r"Cannot use ACCELERATOR=dev: .*gave an empty text"):
        Selection(table).current()


def test_a_memory_cap_that_is_no_size_is_said_once_and_not_for_each_device(table, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATOR_MEMORY", "lots")
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Cannot use ACCELERATOR_MEMORY=lots: ")


def test_what_a_platform_lacks_is_said(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing = command.missing_here()
    assert any("C++ compiler" in what for what in missing)
    assert any("containers" in what for what in missing)
    assert any("nccl" in what for what in missing)


def test_what_a_plug_in_says_is_one_line_and_what_it_prints_is_no_part_of_the_answer(table, capsys):
    class Noisy(CpuAccelerator):
        name, communication_backend = "noisy", "wide\x1b[2J\nlines"

        def device_count(self):
            print("a banner")
            return 1

    class Refused(CpuAccelerator):
        name = "refused"

        def unavailable_reason(self):
            return "no\x1b[31m\ndriver"

    table.add(Registration("noisy", Noisy, priority=500))
    table.add(Registration("refused", Refused, priority=400))
    assert command.main(["--json"]) == 0
    told = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(told.out)["candidates"]}
    assert "a banner" in told.err and rows["refused"]["reason"] == r"no\x1b[31m driver"
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"wide\x1b[2J lines" in shown
