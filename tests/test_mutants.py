"""The faults that `python -m tests.mutants` puts back still find their places."""

import ast
import builtins
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import mutants, programs, reach
from tests.mutant_list import HARMLESS
from tests.mutants import NAMED
from tests.source_edits import all_definitions

pytestmark = pytest.mark.of_tests
NAMES = (ast.Name, ast.Attribute)


def identifiers(tree):
    return {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(tree) if isinstance(node, NAMES)}


@cache
def is_known(name):
    sources = (path.read_text(encoding="utf-8") for path in set(all_definitions().values()))
    return name in dir(builtins) or any(name in identifiers(ast.parse(source)) for source in sources if name in source)


def changed_by(mutant):
    source = (mutants.ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutant.applied(source)  # only a statement that the fault changes is written anew
    assert changed != source
    return changed


def test_each_mutant_finds_its_place_and_names_nothing_that_the_library_does_not_have():
    problems = []
    for mutant in NAMED:
        try:
            edited = mutant.edited((mutants.ROOT / mutant.path).read_text(encoding="utf-8"))
        except LookupError as error:
            problems.append(str(error))
        else:
            new = {name for _, before, after in edited for name in identifiers(after) - identifiers(before)}
            problems += [f"{mutant.name}: there is no {name}" for name in sorted(new) if not is_known(name)]
            problems += [] if edited else [f"{mutant.name}: nothing changes"]
    assert not problems, "\n".join(problems)


def test_mechanical_mutants_are_python_and_follow_from_their_seed():
    made = mutants.mechanical()
    assert made == mutants.mechanical()
    assert len(made) == len({mutant.name for mutant in made}) == mutants.NUM_MECHANICAL
    assert {mutant.name.partition(" in ")[0] for mutant in made} == {"swap", "boundary", "wait", "call", "off by one"}
    for mutant in made:
        changed_by(mutant)


def test_more_are_drawn_without_losing_the_first():
    few, many = mutants.mechanical(20), mutants.mechanical(60)
    assert {mutant.name for mutant in few} < {mutant.name for mutant in many}


def test_there_are_as_many_as_were_promised_and_names_are_used_once():
    names = [mutant.name for mutant in NAMED]
    assert len(names) == len(set(names)) >= 25
    assert all(reason.endswith(".") for reason in HARMLESS.values())
    assert HARMLESS.keys() <= {mutant.name for mutant in (*NAMED, *mutants.mechanical(10**6))}


@pytest.mark.full
def test_no_mutant_that_has_a_name_is_one_that_is_made_mechanically():
    made = {mutant.definition: list[mutants.Mutant]() for mutant in NAMED}
    for mutant in mutants.mechanical(10**6):
        if mutant.definition in made:
            made[mutant.definition].append(mutant)
    for named in NAMED:
        changed = ast.dump(ast.parse(changed_by(named)))
        for mutant in made[named.definition]:
            same = mutant.path == named.path and ast.dump(ast.parse(changed_by(mutant))) == changed
            assert not same, f"{named.name!r} is {mutant.name!r}"


def test_the_tests_that_survivors_meet_are_there():
    assert [test for test in mutants.TESTS if not (mutants.ROOT / test).exists()] == []
    assert [floor for floor in mutants.FLOORS if not (mutants.ROOT / "zero" / floor).is_dir()] == []


def test_no_library_is_loaded_before_a_changed_one_can_be():
    program = "import sys, tests.mutants, tests.grid, tests.ranks; print([name for name in sys.modules if name[:4] == 'zero'])"
    done = programs.with_torch(program, {**os.environ, "PYTHONPATH": str(mutants.ROOT)})
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


LIBRARY = '''"""A module."""

from __future__ import annotations

from functools import cache


class Counter:
    """A class."""

    number: int = 3

    @property
    def half(self):
        """A half."""
        return self.number / 2


@cache
def called(number):
    def inside():
        return number

    return inside()
'''
OF_IT = """
import multiprocessing
import pytest
import watched

@pytest.fixture(scope="module")
def shared():
    return watched.Counter().half

def test_in_a_process():
    process = multiprocessing.get_context("fork").Process(target=watched.called, args=(1,))
    process.start()
    process.join()
    assert process.exitcode == 0

def test_with_a_fixture(shared): ...
def test_with_what_was_made_before(shared): ...
def test_nothing(): ...
"""


def test_which_tests_run_which_functions_is_noted_in_whatever_process(tmp_path):
    home, path = tmp_path / "home", Path("watched.py")
    home.mkdir()
    (home / path).write_text(LIBRARY)
    reach.watch(home, {path})
    (home / "test_it.py").write_text(OF_IT)
    environment = {**os.environ, "REACH": str(tmp_path), "PYTHONPATH": f"{home}:{mutants.ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.reach", "test_it.py"]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found, module = reach.Reach.read(tmp_path), "watched"

    def of(name):
        return sorted(test.partition("::")[2] for test in found.of(f"{module}.{name}", module))

    everything = ["test_in_a_process", "test_nothing", "test_with_a_fixture", "test_with_what_was_made_before"]
    assert of("called") == of("called.inside") == ["test_in_a_process"]
    assert of("Counter") == of("Counter.half") == everything == of("nothing that a function stands for")
