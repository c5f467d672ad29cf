"""What README.md prints runs as printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


ALL = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# Each block by a text that no other one of its language has. The two commands of the first screen are run whole by ci and by
# `ci/test --full`, and those for two machines, with the names of this one, by tests/zero/tools/test_train.py.
BLOCKS = {
    "setup": ("bash", "ci/test"),
    "first program": ("python", "zero.shard("),
    "backend": ("python", "@accelerators.register("),
    "contract": ("python", "AcceleratorContract"),
    "entry point": ("toml", "entry-points"),
    "two machines": ("bash", "torchrun"),
    "whole state": ("python", "whole_state("),
    "offload": ("python", "offload_states("),
    "compile": ("python", "zero.compile("),
    "checkpoint": ("python", "zero.save("),
    "checkpoint commands": ("bash", "zero export"),
}


def block(name):
    language, text = BLOCKS[name]
    [found] = [block for its, block in ALL if its == language and text in block]
    return found


def run(*arguments, cwd, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.endswith("ACCELERATOR") and key != "ACCELERATOR_MEMORY"}
    whole = {**clean, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, *arguments], cwd=cwd, env=whole, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_first_screen_has_two_commands_that_exist_and_a_program_of_15_lines_that_runs(tmp_path):
    commands, program = block("setup"), block("first program")
    assert README.index(commands) < README.index(program) < README.index("\n## ")
    for line in commands.splitlines():
        assert os.access(ROOT / line.split()[0], os.X_OK), line
    assert len(commands.splitlines()) == 2
    assert len(program.splitlines()) <= 15
    assert "zero.shard(" in program
    (tmp_path / "train.py").write_text(program)
    name, loss = re.match(r"(\w+) loss ([\d.]+) allocated ", run("train.py", cwd=tmp_path)).groups()
    assert name
    assert float(loss) < 0.5


def test_what_is_in_shares_is_asked_for_as_it_says(tmp_path):
    checks = """
import os
assert average.shape == model.weight.shape and average.abs().sum() > 0
saved = torch.load("weight.pt")["weight"]
assert saved.untyped_storage().nbytes() == saved.nbytes == model.weight.untyped_storage().nbytes()
"""
    before = 'assert not optimizer.state[model.weight]\nassert model.weight.untyped_storage().nbytes() > model.weight.nbytes\n'
    (tmp_path / "train.py").write_text(block("first program") + before + block("whole state") + checks)
    run("train.py", cwd=tmp_path)


def test_a_checkpoint_is_saved_loaded_inspected_and_exported_as_it_says(tmp_path):
    (tmp_path / "train.py").write_text(block("first program") + block("checkpoint") + 'assert extra == {"epoch": 1}\n')
    run("train.py", cwd=tmp_path)
    for line in block("checkpoint commands").splitlines():  # the first ends with 0 only if no file is damaged
        assert run(*line.partition("#")[0].split()[1:], cwd=tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_states_leave_and_come_back_as_it_says(tmp_path):
    program = block("first program")
    offloaded = program.replace("stage=2)", 'stage=2, offload="cpu")')
    assert offloaded != program
    after = "model(x).sum().backward()\noptimizer.step()\nprint('went on')\n"
    (tmp_path / "train.py").write_text(offloaded + block("offload") + after)
    assert "went on" in run("train.py", cwd=tmp_path)


@pytest.mark.full
def test_a_model_is_compiled_as_it_says(tmp_path):
    program, show = block("first program"), "print('compiled by', type(model._compiled_call_impl).__module__)\n"
    loop = program.index("for _ in range")
    (tmp_path / "train.py").write_text(program[:loop] + block("compile") + program[loop:] + show)
    out = run("train.py", cwd=tmp_path)
    assert "compiled by zero." in out
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 0.5


def test_the_backend_of_at_most_30_lines_runs_and_keeps_the_contract(tmp_path):
    assert len(block("backend").splitlines()) <= 30
    for code in (block("backend"), block("contract")):
        (tmp_path / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    assert "available" in run("quiet_cpu.py", cwd=tmp_path)
    report = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "test_quiet_cpu.py", cwd=tmp_path)
    assert " passed" in report and " failed" not in report


def test_an_installed_package_offers_it_as_it_says(tmp_path):
    alone = re.sub(r"^@accelerators\.register.*\n", "", block("backend"), flags=re.MULTILINE)
    assert alone != block("backend")
    (tmp_path / "quiet_cpu.py").write_text(alone)
    heading, line = block("entry point").splitlines()
    group = re.fullmatch(r"\[project\.entry-points\.(\w+)\]", heading)[1]
    installed = tmp_path / "quiet_cpu-1.0.dist-info"  # as pip leaves it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet-cpu\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n" + line.replace('"', "") + "\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = json.loads(run("-m", "accelerators", "--json", cwd=tmp_path, ACCELERATOR="quiet", PYTHONPATH=path))
    assert found["chosen"] == "quiet" and "quiet-cpu" in json.dumps(found)


def test_every_block_is_one_that_a_test_runs():
    assert sorted(map(block, BLOCKS)) == sorted(code for _, code in ALL), "run the new one here"
    assert len(re.findall(r"^ *```", README, re.MULTILINE)) == 2 * len(ALL)


def test_the_first_program_runs_on_two_ranks_as_it_says(tmp_path):
    said = re.search(r"`\.venv/bin/torchrun (--nproc-per-node 2 train\.py)`", README)[1]
    (tmp_path / "train.py").write_text(block("first program"))
    out = run("-m", "torch.distributed.run", *said.split(), cwd=tmp_path)
    assert len(re.findall(r"loss 0\.[0-4]\d+ allocated ", out)) == 2


def test_the_plan_that_it_mentions_is_made(tmp_path):
    (said,) = re.findall(r"`python (-m zero plan .*?)`", README)
    assert any(row["recommended"] for row in json.loads(run(*said.split(), "--json", cwd=tmp_path))["rows"])


def test_the_bytes_of_each_stage_are_those_that_the_plan_predicts(tmp_path):
    plan = json.loads(run("-m", "zero", "plan", "1B", "--ranks", "8", "--memory", "80GiB", "--json", cwd=tmp_path))
    rows = re.findall(r"^\| (\d.*) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    for stage, *cells, run_on_all in ([cell.strip() for cell in row.split("|")] for row in rows):
        numbers = [{"on the host": 0.0, "4 / W": 0.5, "8 / W": 1.0}[cell] if " " in cell else float(cell) for cell in cells]
        asked = int(stage[0]), "cpu" if "offload" in stage else "none"
        (row,) = (row for row in plan["rows"] if (row["stage"], row["offload"]) == asked)
        assert [row[kind] / plan["parameters"] for kind in ("weights", "gradients", "masters", "moments")] == numbers
        assert sum(numbers) == float(run_on_all)


def test_every_file_and_variable_that_is_named_exists():
    for path in re.findall(r"`((?:accelerators|zero|ci|examples)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path
    source = "".join(path.read_text() for path in (ROOT / "accelerators").rglob("*.py"))
    section = README.partition("## Environment variables")[2].partition("\n## ")[0]
    variables = re.findall(r"`([A-Z_]{4,})`", section)
    assert len(variables) >= 8
    for variable in variables:
        assert variable in source, variable
