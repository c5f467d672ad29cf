"""ci/setup, ci/lint, ci/test and .ci/run, with a python that only writes down what it was asked."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PYTHON = """#!/usr/bin/env bash
# Writes down what it is asked; `-m venv FOLDER` makes an environment with the same python in it. What $FAILS names fails.
[ "$1" = -VV ] || echo "$(basename "$(dirname "$(dirname "$0")")") $*" >> "$PYTHON_LOG"
case "$*" in
  -VV) echo "Python 3.99" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m ${FAILS:-nothing}"*) exit 3 ;;
esac
"""

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


class Tree:
    def __init__(self, root):
        self.root, self.log = root, root / "python.log"
        (root / "simulated").mkdir()
        for path in ("ci", ".ci", "pyproject.toml", "simulated/pyproject.toml"):
            source = ROOT / path
            (shutil.copytree if source.is_dir() else shutil.copy)(source, root / path)
        self.python = root / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, *command):
        """What python was asked, line by line."""
        self.log.write_text("")
        environment = {**os.environ, "PYTHON": str(self.python), "PYTHON_LOG": str(self.log)}
        environment.pop("OMP_NUM_THREADS", None)
        whole = [str(self.root / command[0]), *command[1:]]
        subprocess.run(whole, env=environment, check=True, timeout=60, capture_output=True)
        return self.log.read_text().splitlines()


@pytest.fixture
def project(tmp_path):
    return Tree(tmp_path)


@needs_bash
def test_a_second_setup_in_an_unchanged_tree_does_nothing(project):
    first = project.run("ci/setup")
    assert any("-m venv .venv" in line for line in first)
    assert any("pip install" in line and "--editable" in line for line in first)
    assert project.run("ci/setup") == []


@needs_bash
@pytest.mark.parametrize("path", ["pyproject.toml", "simulated/pyproject.toml", "ci/constraints.txt", "ci/setup"])
def test_a_change_of_what_goes_in_sets_up_anew(project, path):
    project.run("ci/setup")
    with (project.root / path).open("a") as file:
        file.write("\n# changed\n")
    assert any("pip install" in line for line in project.run("ci/setup"))
    assert project.run("ci/setup") == []


@needs_bash
def test_an_unfinished_setup_is_not_taken_for_a_finished_one(project):
    project.run("ci/setup")
    (project.root / ".venv" / "stamp").unlink()
    assert any("pip install" in line for line in project.run("ci/setup"))


@needs_bash
@pytest.mark.parametrize(
    ("options", "folder", "installs"),
    [
        (("--torch", "2.8.0"), ".venv-torch-2.8.0", "torch==2.8.0"),
        (("--ipex",), ".venv-ipex", "intel-extension-for-pytorch==2.8.0"),
    ],
)
def test_another_torch_gets_an_environment_of_its_own(project, options, folder, installs):
    project.run("ci/setup")
    lines = project.run("ci/setup", *options)
    assert any(f"-m venv {folder}" in line for line in lines)
    assert any(installs in line for line in lines)
    assert not any(line.startswith(".venv ") for line in lines)
    assert project.run("ci/setup") == project.run("ci/setup", *options) == []
    assert project.run("ci/test", *options, "-k", "x")[-1] == f"{folder} -m pytest -k x"


@needs_bash
def test_peers_get_an_environment_of_their_own_with_torch_first_and_without_this_project(project):
    lines = project.run("ci/setup", "--peers")
    assert all(line.startswith(".venv-peers ") for line in lines if "pip install" in line)
    installed = [line.split()[-1] for line in lines if "pip install" in line]
    assert installed.index(next(name for name in installed if name.startswith("torch=="))) < installed.index("deepspeed")
    assert not any("--editable" in line for line in lines)
    assert project.run("ci/setup", "--peers") == []
    assert re.search(r"^deepspeed==\d+\.\d+\.\d+$", (ROOT / "ci" / "constraints.txt").read_text(), re.MULTILINE)


@needs_bash
def test_an_unknown_option_is_refused(project):
    with pytest.raises(subprocess.CalledProcessError) as error:
        project.run("ci/setup", "--tortch", "2.8.0")
    assert error.value.returncode == 2
    assert b"--tortch" in error.value.stderr


PYTEST = ".venv -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0"
LINT = [".venv -m ruff check --quiet .", ".venv -m mypy"]
COMPILE = ".venv -m pytest --collect-only -q"
ASKED = {
    "ci/lint": LINT,
    "ci/test": [PYTEST],
    "ci/test --full": [PYTEST.replace("pytest", "pytest -m "), ".venv -m tests.parity"],
    ".ci/run": [*LINT, PYTEST],
}


def in_order(command, lines):
    """Without what goes on beside the others and ends before the last."""
    if command == ".ci/run":
        assert lines.index(COMPILE) < lines.index(PYTEST)
        lines.remove(COMPILE)
    return lines


@needs_bash
@pytest.mark.parametrize("command", ASKED)
def test_one_command_sets_up_and_does_what_it_is_for(project, command):
    lines = in_order(command, project.run(*command.split()))
    assert any("-m venv .venv" in line for line in lines)
    assert lines[-len(ASKED[command]) :] == ASKED[command]
    assert in_order(command, project.run(*command.split())) == ASKED[command]


@needs_bash
@pytest.mark.parametrize(
    ("command", "fails"),
    [
        *(("ci/test --full", part) for part in ("pytest", "tests.parity")),
        *((".ci/run", part) for part in ("ruff", "mypy", "pytest")),
    ],
)
def test_a_command_fails_where_a_part_of_it_does_and_the_other_parts_run_all_the_same(project, command, fails, monkeypatch):
    project.run("ci/setup")
    monkeypatch.setenv("FAILS", fails)
    with pytest.raises(subprocess.CalledProcessError):
        project.run(*command.split())
    assert in_order(command, project.log.read_text().splitlines()) == ASKED[command]


@needs_bash
def test_one_command_sets_up_and_trains_with_what_follows_it(project):
    lines = project.run("ci/train", "--steps", "3")
    assert any("-m venv .venv" in line for line in lines)
    assert lines[-1] == ".venv examples/train --steps 3"
    assert project.run("ci/train") == [".venv examples/train"]


@needs_bash
def test_the_site_is_made_in_an_environment_without_torch_and_a_warning_is_an_error(project):
    lines = project.run("ci/docs")
    assert any("-m venv .venv-docs" in line for line in lines)
    [installs] = [line for line in lines if "pip install" in line]
    assert "--constraint ci/constraints.txt" in installs and "--editable" not in installs
    assert lines[-1] == ".venv-docs -m mkdocs build --quiet --strict --clean"
    assert project.run("ci/docs") == lines[-1:]


def test_torch_is_pinned_exactly():
    pins = [line for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert len(pins) == 1
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", pins[0])


def test_ci_runs_the_same_for_every_python_and_names_no_index_of_its_own():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"run: ci/\w+$", workflow, re.MULTILINE) == ["run: ci/test", "run: ci/lint"]
    assert "examples/cpu_training_in_ci.py" in workflow
    for python in ("3.10", "3.11", "3.12", "3.13"):
        assert f'"{python}"' in workflow
    assert "PIP_EXTRA_INDEX_URL: ${{ vars.CPU_WHEEL_INDEX }}" in workflow
    assert "http" not in workflow


def test_everything_runs_every_night():
    workflow = (ROOT / ".github" / "workflows" / "night.yml").read_text()
    assert re.search(r"^    - cron: ", workflow, re.MULTILINE) and "workflow_dispatch:" in workflow
    assert re.findall(r"run: (ci.*)", workflow) == ["ci/test --full", "ci/setup", "ci/docs"]
    programs = re.search(r"program: \[(.*)\]", workflow)[1]
    assert [program.split()[0] for program in programs.replace('"', "").split(", ")] == ["mutants", "soak", "divergence"]


@pytest.mark.promise("P10")
def test_ci_runs_an_older_and_a_newer_torch_beside_the_pinned_one():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    constraints = (ROOT / "ci" / "constraints.txt").read_text()
    pinned = version(re.search(r"^torch==([\d.]+)", constraints, re.MULTILINE)[1])
    others = [version(text) for text in re.findall(r'"([\d.]+)"', re.search(r"torch: \[(.*)\]", workflow)[1])]
    assert min(others) < pinned < max(others)
    assert "run: ci/test --torch ${{ matrix.torch }} " in workflow


def version(text):
    return tuple(map(int, text.split(".")))


@needs_bash
def test_setup_says_what_it_downloads_before_it_does_and_then_each_part(project):
    environment = {**os.environ, "PYTHON": str(project.python), "PYTHON_LOG": str(project.log)}
    result = subprocess.run([project.root / "ci" / "setup"], env=environment, capture_output=True, text=True, timeout=60)
    first, *others = result.stderr.splitlines()
    assert re.search(r"making \.venv: torch==\S+ .*MB to download.*GB", first)
    assert [line for line in others if "installing" in line][-1].endswith("--editable .[dev] --editable ./simulated")
    assert not result.stdout
