"""docs/collectives.md says of every call what its docstring says."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
# By the second column: the object that has the calls.
OWNERS = {
    "zero": ("zero", ""),
    "optimizer": ("zero", "ShardedOptimizer"),
    "engine": ("zero", "Engine"),
    "transformers": ("zero.integrations.transformers", ""),
    "ShardedAccelerator": ("zero.integrations.accelerate", "ShardedAccelerator"),
    "ShardedStrategy": ("zero.integrations.lightning", "ShardedStrategy"),
    "deepspeed.utils": ("zero.compat.deepspeed.utils", ""),
}
CELLS = [
    [cell.strip(" `") if number == 1 else cell.strip() for number, cell in enumerate(line.split("|")[1:-1])]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
ROWS = [
    (name, owner, answer)
    for names, column, answer in CELLS
    for owner in (("optimizer", "engine") if column == "both" else (column,))
    if owner in OWNERS
    for name in re.findall(r"`(\w+)`", names)
]


def documented(owner):
    """Each public call with its docstring: methods of a class, or functions of a module and the classes of its package."""
    module, member = OWNERS[owner]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed")
    if member:
        parts = [part for part in reversed(getattr(found, member).__mro__) if part.__module__.startswith("zero.")]
        calls = [item for part in parts for item in vars(part).items() if inspect.isfunction(item[1])]
    else:
        package = module.rpartition(".")[0] or module
        calls = [(name, getattr(found, name)) for name in getattr(found, "__all__", dir(found))]
        calls = [(name, call) for name, call in calls if (getattr(call, "__module__", None) or "").startswith(package)]
        calls = [(name, call) for name, call in calls if inspect.isfunction(call) or name == "loading"]
    return {name: inspect.getdoc(call) or "" for name, call in calls if not name.startswith("_")}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_call_that_says_whether_it_is_a_collective_is_in_the_table(owner):
    said = {name for name, text in documented(owner).items() if "collective" in text.lower()}
    assert said and said - {name for name, where, _ in ROWS if where == owner} == set()


@pytest.mark.parametrize(("name", "owner", "answer"), ROWS)
def test_the_table_says_what_the_docstring_says(name, owner, answer):
    text = " ".join(documented(owner)[name].lower().split())
    assert ("not a collective" in text or "collective" not in text) == answer.startswith("no"), text
