"""What README.md prints runs as printed: at night top to bottom in one process and one shell, by day its programs by themselves
in processes that have torch."""

import json
import os
import re
import shutil
import sys
import sysconfig

import pytest

import zero
from tests import programs
from tests.pasted import ROOT, Block, blocks_of, paste, without_choices

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("guide", "accelerators", "sharding")
GUIDE, ACCELERATORS, SHARDING = ((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
ALL = blocks_of(README)
[PROGRAM] = re.findall(r"Save this as `(\w+\.py)`:", README)
# Each block by a text that no other one of its language has.
BLOCKS = {
    "first lines": ("python", "lr=3e-4"),
    "install": ("bash", "pip install ."),
    "first program": ("python", "zero.save("),
    "first commands": ("bash", "torchrun"),
    "setup": ("bash", "ci/test"),
    "from DeepSpeed": ("python", "zero.compat.deepspeed"),
    "from FSDP": ("python", "fully_shard"),
}
# By block: what holds after it, in the process that it was pasted into.
CHECKS = {
    "first lines": "assert model.weight.dtype == torch.bfloat16 and optimizer.config.stage == 3\n",
    "first program": """
assert loss.item() < 0.5 and model.weight.dtype == torch.bfloat16
assert zero.load("checkpoints", optimizer) == {"step": start + 299}
""",
    "from DeepSpeed": "assert engine.global_steps == 1 and engine.was_step_applied()\n",
    "from FSDP": "assert sharded.grad_norm > 0 and net.weight.dtype == torch.bfloat16\n",
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


def pasted(tmp_path):
    """What each block printed, in a copy of the tree. What pip would download it finds in the environment of these tests. The
    commands of a checkout are run whole by CI, and by tests/test_setup.py and tests/test_train.py."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "trained", "build"))
    blocks, names = [], []
    for name in sorted(set(BLOCKS) - {"setup"}, key=lambda name: README.index(block(name))):
        found = ALL[[other.code for other in ALL].index(block(name))]
        saved = [found._replace(name=PROGRAM)] if name == "first program" else []
        checks = [Block("python", "", CHECKS[name])] if name in CHECKS else []
        blocks += [*saved, found, *checks]
        names += [None] * len(saved) + [name] + [None] * len(checks)
    # torchrun is in the last one, as pip installs nothing here that is there.
    folders = [os.path.join(sys.base_prefix, "bin"), without_choices()["PATH"], os.path.join(sys.prefix, "bin")]
    variables = {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that it builds with the setuptools that is there
    }
    return dict(zip(names, paste(blocks, folder, **variables), strict=True)), folder


@pytest.mark.full
def test_every_block_runs_in_one_process_and_one_shell(tmp_path):
    shown, folder = pasted(tmp_path)
    assert set(shown) - {None} == set(BLOCKS) - {"setup"}
    [installed] = (folder / ".venv-zero").glob("lib/python*/site-packages/zero")
    assert (installed / "runtime" / "kernels" / "native.cpp").is_file() and (installed.parent / "accelerators").is_dir()
    assert not [*installed.parent.glob("accelerators*/**/*simulated*"), *installed.parent.glob("accelerators_sim*")]
    assert README.count("activate") == 1 and README.index(block("install")) < README.index(block("first commands"))
    assert_trained(shown["first program"] + shown["first commands"], 4)  # in the process, by python, and on two ranks


def test_blocks_of_python_run_one_after_another(tmp_path):
    names = ["first lines", "first program", "from DeepSpeed", "from FSDP"]
    (tmp_path / PROGRAM).write_text("".join(block(name) + CHECKS[name] for name in names))
    assert_trained(run(PROGRAM, cwd=tmp_path), 1)


@pytest.mark.full  # by day tests/test_house.py sees that nothing asks for NumPy
def test_the_first_program_runs_without_numpy(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('it is not installed', name='numpy')")
    (tmp_path / PROGRAM).write_text(block("first program") + CHECKS["first program"])
    assert_trained(run(PROGRAM, cwd=tmp_path), 1)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert_trained(run(*launch, PROGRAM, cwd=tmp_path, OMP_NUM_THREADS="1"), 2)
    assert zero.latest(tmp_path / "checkpoints") == "global_step600"  # two ranks went on from 300 to it


@pytest.mark.full  # by day examples/custom_accelerator.py is such a backend, and test_contract_cpu.py meets the contract
def test_the_backend_of_fifteen_lines_runs_and_keeps_the_contract(tmp_path):
    [backend, contract] = [block for block in blocks_of(ACCELERATORS) if block.name in ("quiet_cpu.py", "test_quiet_cpu.py")]
    assert len(backend.code.splitlines()) <= 15
    for found in (backend, contract):
        (tmp_path / found.name).write_text(found.code)
    [command] = re.findall(r"`python (-m pytest [^`]*)`", ACCELERATORS)
    printed = run(backend.name, cwd=tmp_path) + run(*command.split(), cwd=tmp_path)
    assert re.search("^allocated ", printed, re.MULTILINE)
    assert " passed" in printed and " failed" not in printed


def assert_trained(printed, times):
    losses = re.findall(r"step \d+ loss ([\d.]+) on ", printed)  # two ranks may print into one line
    assert len(losses) == times and all(float(loss) < 0.5 for loss in losses)


def test_the_example_has_20_lines():
    assert len([line for line in block("first program").splitlines() if line]) <= 20


def test_those_who_move_see_six_lines():
    assert [len(block(name).splitlines()) for name in ("from DeepSpeed", "from FSDP")] == [6, 6]


def test_the_commands_of_a_checkout_exist():
    commands = block("setup").splitlines()
    assert len(commands) == 2
    for line in commands:
        assert os.access(ROOT / line.split()[0], os.X_OK), line


def test_readme_is_in_the_order_of_a_reader_who_has_ten_minutes():
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == [
        "Install", "Train", "Which stage?", "Coming from DeepSpeed", "Coming from FSDP2", "Hugging Face", "Devices",
        "Documentation", "Contributing",
    ]  # fmt: skip
    assert len(README.split()) <= 700
    assert all(len(line) <= 88 for found in ALL for line in found.code.splitlines())


def test_readme_links_to_nothing_that_is_not_there():
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", README)
    assert len(links) >= 15
    for path, anchor in ((path or "README.md", anchor) for path, anchor in links):
        if not anchor:
            assert (ROOT / path).exists(), path
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, (path, anchor)


@pytest.mark.full
def test_a_compiled_model_hands_its_gradients_over_as_the_guide_says(tmp_path):
    guide = [code for language, _, code in blocks_of(GUIDE) if language == "python"]
    [first] = [code for code in guide if "def step():" in code]
    [compiled] = [code for code in guide if "zero.compile(" in code]
    show = "step()\nprint('compiled by', type(model._compiled_call_impl).__module__)\n"
    (tmp_path / "train.py").write_text(f"{first}\noptimizer.close()\n{compiled}\n{show}")
    assert "compiled by zero." in run("train.py", cwd=tmp_path)


def test_an_installed_package_offers_it_as_it_says(tmp_path):
    [backend] = [block.code for block in blocks_of(ACCELERATORS) if block.name == "quiet_cpu.py"]
    alone = re.sub(r"^@accelerators\.register.*\n", "", backend, flags=re.MULTILINE)
    assert alone != backend
    (tmp_path / "quiet_cpu.py").write_text(alone)
    [entry] = [code for language, _, code in blocks_of(ACCELERATORS) if language == "toml"]
    heading, line = entry.splitlines()
    group = re.fullmatch(r"\[project\.entry-points\.(\w+)\]", heading)[1]
    installed = tmp_path / "quiet_cpu-1.0.dist-info"  # pip leaves the same
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
    table = SHARDING.partition("| stage  ")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d.*) \|$", table, re.MULTILINE)
    assert len(rows) == 6
    for stage, *cells, run_on_all in ([cell.strip() for cell in row.split("|")] for row in rows):
        in_words = {"on the host": 0.0, "2 / W": 0.25, "4 / W": 0.5, "8 / W": 1.0}
        numbers = [in_words[cell] if " " in cell else float(cell) for cell in cells]
        asked = int(stage[0]), "cpu" if "offload" in stage else "none"
        (row,) = (row for row in plan["rows"] if (row["stage"], row["offload"]) == asked)
        assert [row[kind] / plan["parameters"] for kind in ("weights", "gradients", "masters", "moments")] == numbers
        assert sum(numbers) == float(run_on_all)


def test_every_file_and_variable_that_is_named_exists():
    for path in re.findall(r"`((?:accelerators|zero|ci|examples|benchmarks)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path
    folders = (ROOT / package for package in ("accelerators", "simulated", "zero"))
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    section = ACCELERATORS.partition("## Environment variables")[2].partition("\n## ")[0]
    variables = re.findall(r"`([A-Z_]{4,})`", section)
    assert len(variables) >= 8
    for variable in variables:
        assert variable in source, variable
