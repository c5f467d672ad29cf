"""The faults that `python -m tests.mutants` puts back can still be put where it says."""

import ast

import pytest

from tests import mutants
from tests.mutant_list import HARMLESS
from tests.mutants import NAMED


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_there_once_and_what_it_becomes_is_python(mutant):
    source = (mutants.ROOT / mutant.path).read_text()
    changed = mutant.applied(source)
    assert changed != source
    ast.parse(changed)


def test_mechanical_mutants_are_python_and_follow_from_their_seed():
    made = mutants.mechanical()
    assert made == mutants.mechanical()
    assert len(made) == len({mutant.name for mutant in made}) == mutants.NUM_MECHANICAL
    assert {mutant.name.split()[0] for mutant in made} == {"swap", "boundary", "wait", "call", "off"}
    for mutant in made:
        source = (mutants.ROOT / mutant.path).read_text()
        changed = mutant.applied(source)
        assert changed != source
        ast.parse(changed)


def test_more_are_drawn_without_losing_the_first():
    few, many = mutants.mechanical(20), mutants.mechanical(60)
    assert {mutant.name for mutant in few} < {mutant.name for mutant in many}


def test_there_are_as_many_as_were_promised_and_names_are_used_once():
    names = [mutant.name for mutant in NAMED]
    assert len(names) == len(set(names)) >= 25
    assert all(reason.endswith(".") for reason in HARMLESS.values())


def test_the_tests_that_survivors_meet_are_there():
    assert [test for test in mutants.TESTS if not (mutants.ROOT / test).exists()] == []
