"""docs/collectives.md says of every call what its docstring says."""

import inspect
import re
from pathlib import Path

import pytest

import zero

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
ROWS = re.findall(r"^\| `(\w+)`\s*\| (both|optimizer|engine)\s*\| (.*?)\s*\|$", PAGE.read_text(), re.MULTILINE)
CLASSES = {"optimizer": zero.ShardedOptimizer, "engine": zero.Engine}


def documented(kind):
    for part in (part for part in reversed(CLASSES[kind].__mro__) if part.__module__.startswith("zero.")):
        for name, member in vars(part).items():
            if not name.startswith("_") and inspect.isfunction(member):
                yield name, inspect.getdoc(member) or ""


@pytest.mark.parametrize("kind", CLASSES)
def test_every_call_that_says_whether_it_is_a_collective_is_in_the_table(kind):
    listed = {name for name, where, _ in ROWS if where in ("both", kind)}
    said = {name for name, text in documented(kind) if "collective" in text.lower()}
    assert said - listed == set()


@pytest.mark.parametrize(("name", "where", "answer"), ROWS)
def test_the_table_says_what_the_docstring_says(name, where, answer):
    for kind in CLASSES if where == "both" else (where,):
        text = dict(documented(kind))[name]
        says_no = "no collective" in text.lower() or "collective" not in text.lower()
        assert says_no == answer.startswith("no"), (kind, text)
