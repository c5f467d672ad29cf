"""Edits of the library's source that find their place in the syntax tree, so that most renames leave them as they are.

    Mutant("no catch-up rounds", "Reducer.send_missing_rounds", Replace(the(While).test, "False"))
    Mutant("a share too far", "FlatBuffer.share", Replace(the(Call, "share").args[0], "max({it} - 1, 0)"))

A definition is a module, class or function. It is named by its qualified name, after as much of the module's name as no other
definition has, so files and folders can move. A place is described from the definition down: `the(kind, name)` is the node of
that kind, and the attributes of `ast` nodes lead on from there. What is missing, or is not the only one, is an error.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("accelerators", "simulated/accelerators_sim", "zero")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


# Definitions ------------------------------------------------------------------------------------------------------------


@cache
def module_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix().removeprefix("simulated/")
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def definitions(path: Path, tree: ast.Module) -> dict[str, list[ast.AST]]:
    """By full name, the module first. A getter and its setter have the same name."""
    found: dict[str, list[ast.AST]] = {module_of(path): [tree]}

    def collect(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # there is no definition in one
                continue
            is_definition = isinstance(child, _DEFINITIONS)
            name = f"{prefix}.{child.name}" if is_definition else prefix
            if is_definition:
                found.setdefault(name, []).append(child)
            collect(child, name)

    collect(tree, module_of(path))
    return found


@cache
def all_definitions() -> dict[str, Path]:
    """The file of each, by full name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {name: path for path in paths for name in definitions(path, ast.parse(path.read_text(encoding="utf-8")))}


@cache
def qualified(full: str) -> str:
    """The name inside the module; a module has no shorter one than its full name."""
    return full.removeprefix(f"{module_of(all_definitions()[full])}.")


def full_names(name: str) -> list[str]:
    """All definitions that may be called so."""
    ending_alike = _by_last_part().get(name.rpartition(".")[2], [])
    return [full for full in ending_alike if is_end_of(name, full) and is_end_of(qualified(full), name)]


@cache
def _by_last_part() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for full in all_definitions():
        found.setdefault(full.rpartition(".")[2], []).append(full)
    return found


def shortest_name(full: str) -> str:
    name = qualified(full)
    while len(full_names(name)) > 1:
        name = f"{full[: -len(name) - 1].rpartition('.')[2]}.{name}"
    return name


def is_end_of(name: str, dotted: str) -> bool:
    return f".{dotted}".endswith(f".{name}")


# Places -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A field of a node, or an item of it where it is a list."""

    owner: ast.AST
    field: str
    index: int | None = None

    @property
    def node(self) -> Any:
        value = getattr(self.owner, self.field)
        return value if self.index is None else value[self.index]

    def put(self, *nodes: ast.AST) -> None:
        if self.index is None:
            [node] = nodes
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index : self.index + 1] = nodes


Slots = tuple[Slot, ...]  # the last slot, and those that it lies in


def slots_below(node: ast.AST, above: Slots = ()) -> Iterator[Slots]:
    """Of all that lies in a node, from top to bottom, except in definitions inside it."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, _DEFINITIONS):
                slots = (*above, Slot(node, field, index))
                yield slots
                yield from slots_below(child, slots)


def names_of(node: ast.AST) -> Iterator[str]:
    """A call is named by what it calls, an assignment by its target, and any other node by each name and text in it."""
    if isinstance(node, ast.Call):
        yield ast.unparse(node.func)
    elif isinstance(node, ast.Assign):
        yield from map(ast.unparse, node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield ast.unparse(node.target)
    elif isinstance(node, ast.keyword):
        yield node.arg or ""
    else:
        for part in ast.walk(node):
            if isinstance(part, (ast.Name, ast.Attribute)):
                yield ast.unparse(part)
            elif isinstance(part, ast.Constant):
                yield str(part.value)


@dataclass(frozen=True)
class The:
    """A node of this kind; with a name, of those that have it, without those that contain another one of them."""

    kind: type[ast.AST]
    name: str | None
    n: int | None

    def find(self, nodes: list[ast.AST], above: Slots) -> Slots:
        found = [slots for node in nodes for slots in slots_below(node, above) if isinstance(slots[-1].node, self.kind)]
        if self.name is not None:
            found = [slots for slots in found if any(is_end_of(self.name, name) for name in names_of(slots[-1].node))]
            if not issubclass(self.kind, (ast.Call, ast.keyword)):
                found = [slots for slots in found if not any(slots == other[: len(slots)] for other in found if other != slots)]
        if not found or (self.n is None and len(found) > 1) or (self.n is not None and not -len(found) <= self.n < len(found)):
            named = "" if self.name is None else f" with {self.name!r}"
            raise LookupError(f"{len(found)} nodes {self.kind.__name__}{named} were found, and n={self.n} was asked for")
        return found[self.n or 0]


@dataclass(frozen=True)
class Place:
    steps: tuple[The | str | int, ...] = ()

    def the(self, kind: type[ast.AST], name: str | None = None, n: int | None = None) -> Place:
        """The only node of a kind, or the only one with a name, or the n-th of them."""
        return Place((*self.steps, The(kind, name, n)))

    def __getattr__(self, field: str) -> Place:
        if field.startswith("__"):
            raise AttributeError(field)
        return Place((*self.steps, field))

    def __getitem__(self, index: int) -> Place:
        return Place((*self.steps, index))

    def find(self, nodes: list[ast.AST]) -> Slots:
        slots: Slots = ()
        for step in self.steps:
            if isinstance(step, The):
                slots = step.find(nodes, slots)
            elif isinstance(step, str):
                slots = (*slots, Slot(slots[-1].node, step))
            else:
                slots = (*slots[:-1], Slot(slots[-1].owner, slots[-1].field, step))
            nodes = [slots[-1].node]
        # If a call is a whole statement, the statement stands for it.
        return slots[:-1] if isinstance(slots[-1].owner, ast.Expr) else slots


the = Place().the


# Edits ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drop:
    """A statement becomes `pass`; an operand, an argument or an item goes."""

    place: Place

    def apply(self, nodes: list[ast.AST]) -> None:
        slots = self.place.find(nodes)
        slot = slots[-1]
        if isinstance(slot.node, ast.stmt):
            slot.put(ast.Pass())
        elif isinstance(slot.owner, ast.BinOp):
            slots[-2].put(slot.owner.right if slot.field == "left" else slot.owner.left)
        elif slot.index is not None:
            slot.put()
        else:
            raise LookupError(f"{ast.unparse(slot.node)} cannot go without what it is in")


@dataclass(frozen=True)
class Replace:
    """By other source, in which `{it}` is what stood there, and `{it.args[0]}` a part of that. An operator is one too."""

    place: Place
    source: str

    def apply(self, nodes: list[ast.AST]) -> None:
        slot = self.place.find(nodes)[-1]
        if isinstance(slot.node, (ast.operator, ast.cmpop)):
            operation: Any = ast.parse(f"0 {self.source} 0", mode="eval").body
            slot.put(operation.op if isinstance(slot.node, ast.operator) else operation.ops[0])
            return
        it = _Source(slot.node.value if isinstance(slot.node, ast.Expr) else slot.node)
        new = ast.parse("\n".join(_filled(line, it) for line in self.source.splitlines()))
        slot.put(*new.body if isinstance(slot.node, ast.stmt) else [new.body[0].value])


@dataclass(frozen=True)
class Swap:
    """Two statements change places."""

    first: Place
    second: Place

    def apply(self, nodes: list[ast.AST]) -> None:
        first, second = (place.find(nodes)[-1] for place in (self.first, self.second))
        one, other = first.node, second.node
        first.put(other)
        second.put(one)


class _Source:
    """The source of a node, of its attributes and of their items, for `str.format`."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, field: str) -> _Source:
        return _Source(getattr(self._node, field))

    def __getitem__(self, index: int) -> _Source:
        return _Source(self._node[index])

    def __str__(self) -> str:
        if isinstance(self._node, list):
            return "\n".join(map(ast.unparse, self._node))
        text = ast.unparse(self._node)
        return f"({text})" if isinstance(self._node, ast.expr) else text


def _filled(line: str, it: _Source) -> str:
    text = line.lstrip()
    return textwrap.indent(text.format(it=it), line[: len(line) - len(text)])


@dataclass(frozen=True)
class Mutant:
    """A fault that is put into a definition by one edit, or by one after the other."""

    name: str
    definition: str
    edit: Drop | Replace | Swap
    then: Drop | Replace | Swap | None = None

    @property
    def full_name(self) -> str:
        found = full_names(self.definition)
        if len(found) != 1:
            raise LookupError(f"{self.name}: {len(found)} definitions are called {self.definition}: {found}")
        return found[0]

    @property
    def path(self) -> Path:
        """Of the file, from the root of the repository."""
        return all_definitions()[self.full_name].relative_to(ROOT)

    def applied(self, source: str) -> str:
        """The source of the file with the fault. Only what `edited` returns is written anew."""
        lines = source.splitlines(keepends=True)
        for (first, last, depth), _, new in reversed(self.edited(source)):
            text = ast.unparse(ast.fix_missing_locations(_inside(new, depth)))
            lines[first - 1 : last] = [*text.splitlines(keepends=True)[depth:], "\n"]
        return "".join(lines)

    def edited(self, source: str) -> list[tuple[Lines, ast.stmt, ast.stmt]]:
        """The places of the definition that the edits change, without the fault and with it; of a module, its statements."""
        places = _places(ROOT / self.path, source)[self.full_name]
        before, after = ([_statement(source, place) for place in places] for _ in range(2))
        is_module = self.full_name == module_of(ROOT / self.path)
        nodes: list[ast.AST] = [ast.Module(after, [])] if is_module else [*after]
        for edit in (self.edit, self.then):
            if edit is not None:
                try:
                    edit.apply(nodes)
                except (LookupError, AttributeError) as error:
                    raise LookupError(f"{self.name}: {self.definition} in {self.path}: {error}") from error
        return [each for each in zip(places, before, after, strict=True) if ast.dump(each[1]) != ast.dump(each[2])]


Lines = tuple[int, int, int]  # the first, the last, and how many statements these lie in


@cache
def _places(path: Path, source: str) -> dict[str, list[Lines]]:
    """By the full name of a definition; a module has those of its statements."""
    found = {}
    for name, nodes in definitions(path, ast.parse(source)).items():
        statements: Any = nodes[0].body if isinstance(nodes[0], ast.Module) else nodes
        found[name] = [(_first_line(each), each.end_lineno, each.col_offset // 4) for each in statements]
    return found


def _first_line(statement: ast.stmt) -> int:
    return min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))


def _statement(source: str, place: Lines) -> ast.stmt:
    first, last, depth = place
    above = [f"{' ' * 4 * each}if True:\n" for each in range(depth)]
    [statement] = ast.parse("".join([*above, *source.splitlines(keepends=True)[first - 1 : last]])).body
    for _ in range(depth):
        [statement] = statement.body  # type: ignore[attr-defined]
    return statement


def _inside(statement: ast.stmt, depth: int) -> ast.stmt:
    for _ in range(depth):
        statement = ast.If(ast.Constant(True), [statement], [])
    return statement
