"""The promises by id, the file that says what proves each, and what the source of a test says about itself. No torch.

A line of promises.txt is one of

    X03 | tests/accelerators/test_selection.py::test_name
    X03 | not yet | one honest sentence

Lines that start with `#` say what the promise is.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMISES = ROOT / "tests" / "promises.txt"

# The number of promises of each area; their numbers run without a gap.
AREAS = {
    "R": ("reduction and conventions", 15),
    "G": ("shape of the graph", 17),
    "K": ("autograd features", 19),
    "A": ("accumulation, several backwards, zero_grad", 15),
    "F": ("frozen, late and changing parameters", 9),
    "D": ("dtype, shape, layout", 13),
    "N": ("overflow, scaling, clipping; N17 on: several hosts, 8 bits", 20),
    "O": ("optimizers, groups, schedulers", 16),
    "U": ("user edits of weights", 8),
    "C": ("checkpoints, resume, export", 22),
    "M": ("memory", 10),
    "H": ("homes: host and disk", 10),
    "X": ("accelerator layer, environment, processes", 17),
    "L": ("agreement, hangs, failure", 9),
    "E": ("lifecycle and configuration", 7),
    "P": ("torch.compile", 12),
    "S": ("weights in shares", 14),
    "W": ("whole tensors", 3),
    "T": ("traps met by trying", 8),
    "V": ("collectives that a stream waits for, a step on a device", 9),
    "Q": ("parts of parameters: experts, tensor parallelism", 12),
    "Y": ("sequences over ranks", 5),
    "I": ("large models in and out", 5),
}
IDS = tuple(f"{area}{number:02d}" for area, (_, count) in AREAS.items() for number in range(1, count + 1))


@dataclass(frozen=True)
class Promise:
    id: str
    node: str | None  # the test that proves it; None if it is not proven yet
    reason: str = ""  # the reason for which there is none


def read_promises(path: Path = PROMISES) -> list[Promise]:
    promises = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match [field.strip() for field in line.split("|")]:
            case [id_, "not yet", reason] if id_ and reason:
                promises.append(Promise(id_, None, reason))
            case [id_, node] if id_ and node not in ("", "not yet"):
                promises.append(Promise(id_, node))
            case _:
                raise ValueError(f"{path.name}:{number} is {line!r}. Write 'ID | test node' or 'ID | not yet | reason'.")
    return promises


# What a test's source says ----------------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def marked_ids(node: ast.AST) -> set[str]:
    """The ids in every `pytest.mark.promise(...)` below this piece of source, however it is spelled around it."""
    ids = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.promise"):
            ids.update(arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return ids


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Whatever a module or a class names at its top level, conditional or not."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update({name.id: statement for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)})
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            found.update(_definitions(statement.body))
            found.update(_definitions(getattr(statement, "orelse", [])))
    return found


@cache
def _find(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """What a name of a module stands for, and the file of ours that it is in."""
    if name in (found := _definitions(parsed(path).body)):
        return path, found[name]
    for module, original in _imports(path).get(name, ()):
        base = ROOT.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return _find(file, original)
    return None


@cache
def _imports(path: Path) -> dict[str, list[tuple[str, str]]]:
    """By the name in this file: the module that something is imported from, and what it is called there."""
    found: dict[str, list[tuple[str, str]]] = {}
    for statement in ast.walk(parsed(path)):
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.level == 0:
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name, []).append((statement.module, alias.name))
    return found


@dataclass(frozen=True)
class TestSource:
    ids: frozenset[str]  # the promises that mark the test itself, its class or its module
    asserts: bool  # the test itself asserts something, or something of the tests that it uses does
    by_day: bool = True  # it runs without `ci/test --full`


def _asserts(path: Path, start: ast.stmt) -> bool:
    waiting, seen = [(path, start)], {start}
    while waiting:
        path, statement = waiting.pop()
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("pytest.raises", "pytest.warns"):
                return True
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
            found = name and _find(path, name)
            if found and found[1] not in seen and found[0].is_relative_to(ROOT / "tests"):
                seen.add(found[1])
                waiting.append(found)
    return False


def _find_method(path: Path, owner: ast.ClassDef, name: str) -> tuple[Path, ast.stmt, set[str]] | None:
    """A method of a class or of a base class that this project wrote, with the ids marked on the bases on the way."""
    inside = _definitions(owner.body)
    if name in inside:
        return path, inside[name], set()
    for base in owner.bases:
        where = _find(path, ast.unparse(base).split(".")[-1])
        if where and isinstance(where[1], ast.ClassDef) and (found := _find_method(*where, name)):
            on_base = set().union(*(marked_ids(decorator) for decorator in where[1].decorator_list))
            return found[0], found[1], found[2] | on_base
    return None


def read_test(node: str) -> TestSource:
    """What stands in the source for `path::test` or `path::Class::test`. Raises LookupError with the part that is missing."""
    file, *names = node.split("::")
    path = ROOT / file
    if not path.is_file():
        raise LookupError(f"{node}: there is no file {file}")
    tree = parsed(path)
    if len(names) not in (1, 2) or "[" in node:
        raise LookupError(f"{node}: write path::test or path::Class::test, without parameters")
    statement = _definitions(tree.body).get(names[0])
    if statement is None:
        raise LookupError(f"{node}: {file} defines no {names[0]}")
    marks: list[ast.AST] = [mark for mark in _definitions(tree.body).values() if _is_pytestmark(mark)]
    ids: set[str] = set()
    if len(names) == 2:
        if not isinstance(statement, ast.ClassDef) or (found := _find_method(path, statement, names[1])) is None:
            raise LookupError(f"{node}: {names[0]} in {file} has no {names[1]}")
        marks += statement.decorator_list + [mark for mark in statement.body if _is_pytestmark(mark)]
        path, statement, ids = found
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) or not statement.name.startswith("test"):
        raise LookupError(f"{node}: {names[-1]} is not a test function")
    marks += statement.decorator_list
    ids = ids.union(*map(marked_ids, marks))
    return TestSource(frozenset(ids), _asserts(path, statement), not any(map(_is_of_the_night, marks)))


def _is_of_the_night(mark: ast.AST) -> bool:
    """A mark on all of a test, a class or a module; one of a few parameters leaves the others to the day."""
    return any(ast.unparse(node) in ("pytest.mark.full", "pytest.mark.of_tests") for node in _marks_in(mark))


def _marks_in(mark: ast.AST) -> list[ast.AST]:
    return list(ast.walk(mark)) if _is_pytestmark(mark) else [mark]


def _is_pytestmark(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Assign) and "pytestmark" in [ast.unparse(target) for target in statement.targets]
