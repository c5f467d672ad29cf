"""What README.md prints runs as printed, top to bottom in one process and one shell."""

import json
import os
import re
import shutil

import pytest

from tests import programs
from tests.pasted import ROOT, Block, blocks_of, paste, without_choices

README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL = blocks_of(README)
# Each block by a text that no other one of its language has.
BLOCKS = {
    "setup": ("bash", "ci/test"),
    "first program": ("python", "zero.shard("),
    "first commands": ("bash", "activate"),
    "backend": ("python", "@accelerators.register("),
    "contract": ("python", "AcceleratorContract"),
    "contract commands": ("bash", "pytest"),
    "entry point": ("toml", "entry-points"),
    "whole state": ("python", "whole_state("),
    "offload": ("python", "offload_states("),
    "compile": ("python", "zero.compile("),
    "checkpoint": ("python", "zero.save("),
    "checkpoint commands": ("bash", "zero export"),
    "end": ("python", "optimizer.close("),
}
STEP = "model(x).sum().backward()\noptimizer.step()\noptimizer.zero_grad()\n"
# What holds after a block, in the process that it was pasted into.
CHECKS = {
    "first program": """
assert not optimizer.state[model.weight]
assert model.weight.untyped_storage().nbytes() > model.weight.nbytes
""",
    "whole state": """
assert average.shape == model.weight.shape and average.abs().sum() > 0
saved = torch.load("weight.pt")["weight"]
assert saved.untyped_storage().nbytes() == saved.nbytes
""",
    "offload": STEP,
    "compile": f"{STEP}assert type(model._compiled_call_impl).__module__.startswith('zero.')\n",
    "checkpoint": 'assert extra == {"epoch": 1}\n',
    "end": """
import os
assert model.weight.untyped_storage().nbytes() == model.weight.nbytes
assert torch.equal(torch.load("model.pt")["weight"], model.weight)
""",
}


def block(name):
    language, text = BLOCKS[name]
    [found] = [block.code for block in ALL if block.language == language and text in block.code]
    return found


def run(*arguments, cwd, **environment):
    whole = {**without_choices(), **environment}
    # The limit is for a program that hangs: to compile takes a busy machine minutes.
    result = programs.python(*arguments, cwd=cwd, env=whole, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pasted(tmp_path, but):
    """What each block printed, in a copy of the tree. The two commands that set up are run whole by CI, and by
    tests/test_setup.py and tests/zero/tools/test_train.py; here the environment is there by then."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "trained"))
    [program] = re.findall(r"save it as `(\w+\.py)`:", README)
    blocks, names = [], []
    for name in sorted(set(BLOCKS) - but, key=lambda name: README.index(block(name))):
        found = ALL[[other.code for other in ALL].index(block(name))]
        saved = [found._replace(name=program)] if name == "first program" else []
        checks = [Block("python", "", CHECKS[name])] if name in CHECKS else []
        blocks += [*saved, found, *checks]
        names += [None] * len(saved) + [name] + [None] * len(checks)
    return dict(zip(names, paste(blocks, folder), strict=True)), folder


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return pasted(tmp_path_factory.mktemp("readme"), {"setup", "compile"})  # to compile takes half a minute


def test_every_block_but_the_compiled_one_runs_in_one_process_and_one_shell(printed):
    shown, folder = printed
    assert set(shown) - {None} == set(BLOCKS) - {"setup", "compile"}
    assert README.index(block("setup")) < README.index(block("first commands"))
    assert README.count("activate") == 1 and ".venv/bin/" not in README.replace(". .venv/bin/activate", "")
    assert (folder / "model.pt").is_file()


@pytest.mark.full
def test_every_block_runs_in_one_process_and_one_shell(tmp_path):
    assert set(pasted(tmp_path, {"setup"})[0]) - {None} == set(BLOCKS) - {"setup"}


def test_the_first_screen_has_two_commands_that_exist_and_a_program_of_15_lines_that_runs(printed):
    commands, program = block("setup"), block("first program")
    assert README.index(commands) < README.index(program) < README.index("\n## ")
    for line in commands.splitlines():
        assert os.access(ROOT / line.split()[0], os.X_OK), line
    assert len(commands.splitlines()) == 2
    assert len(program.splitlines()) <= 15
    losses = re.findall(r" loss ([\d.]+) allocated ", printed[0]["first program"] + printed[0]["first commands"])
    assert len(losses) == 4, "in the process, by python, and on each of two ranks"
    assert all(float(loss) < 0.5 for loss in losses)


def test_a_checkpoint_is_inspected_and_exported_as_it_says(printed):
    shown, folder = printed
    assert re.search(r"^step +\d+$", shown["checkpoint commands"], re.MULTILINE)
    assert (folder / "model.safetensors").is_file()


@pytest.mark.full
def test_a_model_is_compiled_as_it_says(tmp_path):
    program, show = block("first program"), "print('compiled by', type(model._compiled_call_impl).__module__)\n"
    loop = program.index("for _ in range")
    (tmp_path / "train.py").write_text(program[:loop] + block("compile") + program[loop:] + show)
    out = run("train.py", cwd=tmp_path)
    assert "compiled by zero." in out
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 0.5


def test_the_backend_of_at_most_30_lines_runs_and_keeps_the_contract(printed):
    assert len(block("backend").splitlines()) <= 30
    told = printed[0]["contract commands"]
    assert told.startswith("allocated ")
    assert " passed" in told and " failed" not in told


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
    assert sorted(map(block, BLOCKS)) == sorted(found.code for found in ALL), "run the new one here"
    assert len(re.findall(r"^ *```", README, re.MULTILINE)) == 2 * len(ALL)
    for _, name, code in ALL:
        assert bool(name) == bool(re.match(r"# \w+\.py\n", code)) and code.startswith(f"# {name}\n" if name else "")


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
