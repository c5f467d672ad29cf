"""Places in source are found by structure, and only where exactly one is meant."""

import ast
from ast import Assign, BoolOp, Call, Compare, Constant, For, If, Return, Try, keyword

import pytest

from tests.source_edits import ROOT, Drop, Mutant, Replace, Swap, definitions, full_names, shortest_name, the

pytestmark = pytest.mark.of_tests

SOURCE = """
def f(self, x):
    total = x + 1
    for item in self.items:
        self.first.add(item)
        self.second.add(item, at=total)
    if total and self.ready() and not x:
        while x < 3:
            x += 1
    elif total:
        x = 2

    def inner():
        return self.ready()
    return total
"""


def edited(edit):
    tree = ast.parse(SOURCE)
    edit.apply([tree.body[0]])
    before, after = (ast.unparse(one).splitlines() for one in (ast.parse(SOURCE), tree))
    return [line.strip() for line in before if line not in after], [line.strip() for line in after if line not in before]


@pytest.mark.parametrize(
    ("edit", "removed", "added"),
    [
        (Drop(the(Call, "first.add")), ["self.first.add(item)"], ["pass"]),
        (Drop(the(Call, "add", n=1)), ["self.second.add(item, at=total)"], ["pass"]),
        (Drop(the(keyword, "at")), ["self.second.add(item, at=total)"], ["self.second.add(item)"]),
        (Drop(the(Assign, "total").value.right), ["total = x + 1"], ["total = x"]),
        (Drop(the(BoolOp).values[1]), ["if total and self.ready() and (not x):"], ["if total and (not x):"]),
        (Replace(the(Compare).ops[0], "<="), ["while x < 3:"], ["while x <= 3:"]),
        (Replace(the(Assign, "total").value.op, "-"), ["total = x + 1"], ["total = x - 1"]),
        (Replace(the(For).iter, "{it}[:{it.value}.n]"), ["for item in self.items:"], ["for item in self.items[:self.n]:"]),
        (Replace(the(Call, "first.add"), "{it.args[0]}.f({it})"), ["self.first.add(item)"], ["item.f(self.first.add(item))"]),
        (Replace(the(Return), "x = 7\n{it}"), [], ["x = 7"]),
    ],
    ids=lambda value: "",
)
def test_an_edit_changes_one_place(edit, removed, added):
    assert edited(edit) == (removed, added)


def test_two_statements_change_places():
    tree = ast.parse(SOURCE)
    Swap(the(Call, "first.add"), the(Call, "second.add")).apply([tree.body[0]])
    text = ast.unparse(tree)
    assert text.index("second.add") < text.index("first.add")


@pytest.mark.parametrize(
    "place",
    [the(Try), the(Call, "third.add"), the(Call, "add"), the(Call, "add", n=2), the(Constant), the(Return).value.the(Call)],
    ids=["kind", "name", "two", "n", "many", "below"],
)
def test_a_place_that_is_missing_or_not_the_only_one_is_an_error(place):
    with pytest.raises(LookupError, match="nodes"):
        edited(Drop(place))


def test_what_is_in_a_definition_inside_is_not_in_the_definition():
    assert edited(Drop(the(Call, "ready")))[1] == ["if total and (not x):"]


def test_a_definition_is_named_by_as_much_as_makes_it_the_only_one():
    [full] = full_names("Window.settle")
    assert shortest_name(full) == "Window.settle"
    assert full_names("settle") != [full]
    with pytest.raises(LookupError, match="a fault: 0 definitions"):
        Mutant("a fault", "Window.no_such_method", Drop(the(If))).path  # noqa: B018
    with pytest.raises(LookupError, match=f"a fault: {len(full_names('__main__.main'))} definitions"):
        Mutant("a fault", "__main__.main", Drop(the(If))).path  # noqa: B018


def test_all_but_the_edited_statement_of_a_file_stays_as_it_is():
    mutant = Mutant("a fault", "Window.settle", Drop(the(Call, "forget_norms")))
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    assert "#" in source.partition("\nclass Window")[0]
    assert changed.startswith(source.partition("\nclass Window")[0])
    before, after = (definitions(ROOT / mutant.path, ast.parse(text)) for text in (source, changed))
    assert before.keys() == after.keys()
