"""Which tests run which functions of the library, in whatever process: one run of the tests over a copy that notes it.

    watch(home, paths)                              these files of the copy note which of their functions run, and in which test
    pytest -p tests.reach ...                       with REACH set to a folder
    Reach.read(folder).of(full_names)               what ran any of them, the quickest first

A rank process serves one test after the other and outlives them all, so the number of the test that runs is in memory which all
processes see.
"""

from __future__ import annotations

import ast
import contextlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.source_edits import ROOT, definitions

_IMPORT = "from tests.reach import note as _note_for_tests"
_NOTE = "_note_for_tests({!r})"
# A function that a compiler traces notes nothing, as the graph would break there.
_TRACED = "from torch.compiler import is_compiling as _is_compiling_for_tests"
_NOTE_UNLESS_TRACED = f"if not _is_compiling_for_tests(): {_NOTE}"
_NUM_BYTES = 8


def watch(home: Path, paths: Collection[Path]) -> None:
    for path in paths:
        text = (home / path).read_text(encoding="utf-8")
        tree, has_torch = ast.parse(text), "import torch" in text
        call, imports = (_NOTE_UNLESS_TRACED, f"{_IMPORT}\n{_TRACED}") if has_torch else (_NOTE, _IMPORT)
        for name, nodes in definitions(ROOT / path, tree).items():
            for node in nodes:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    node.body[_after_texts(node.body) : 0] = ast.parse(call.format(name)).body
        tree.body[_after_texts(tree.body) : 0] = ast.parse(imports).body
        (home / path).write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def _after_texts(body: Sequence[ast.stmt]) -> int:
    """After a docstring, and after imports from the future."""
    is_text = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    future = [i for i, each in enumerate(body) if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    return max([int(is_text), *(i + 1 for i in future)])


# In the processes that run the library ----------------------------------------------------------------------------------

_open, _write, _close = os.open, os.write, os.close  # tests replace these functions
_noted: set[tuple[bytes, str]] = set()
_current: mmap.mmap | None = None


def note(function: str) -> None:
    """This function runs in the test that runs now."""
    global _current
    if "REACH" not in os.environ:
        return  # this process was given nothing to note
    if _current is None:
        with (_folder() / "current").open("rb") as current:
            _current = mmap.mmap(current.fileno(), _NUM_BYTES, access=mmap.ACCESS_READ)
    at = _current[:], function
    if at not in _noted:
        _noted.add(at)
        line = f"{int.from_bytes(at[0], 'little')} {function}\n"
        with contextlib.suppress(OSError):  # a test may have taken from its process what this needs
            file = _open(_folder() / "noted", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            _write(file, line.encode())  # a short line is written whole, even if other processes write, too
            _close(file)


# In pytest --------------------------------------------------------------------------------------------------------------

_names: list[str] = []  # by number, from 1 on: the names of tests, and of files for what many tests share


def pytest_configure() -> None:
    (_folder() / "current").write_bytes(bytes(_NUM_BYTES))


def pytest_runtest_logstart(nodeid: str) -> None:
    _begin(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    before = _names[-1]
    if fixturedef.scope != "function":
        _begin(before.partition("::")[0])
    try:
        return (yield)
    finally:
        if _names[-1] != before:
            _begin(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _say("seconds", [report.nodeid, report.duration])


def _begin(name: str) -> None:
    _names.append(name)
    _say("names", name)
    with (_folder() / "current").open("r+b") as file:
        file.write(len(_names).to_bytes(_NUM_BYTES, "little"))


def _say(what: str, value: object) -> None:
    with (_folder() / what).open("a", encoding="utf-8") as file:
        print(json.dumps(value), file=file)


def _folder() -> Path:
    return Path(os.environ["REACH"])


# And of what they left --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reach:
    seconds: dict[str, float]  # by test
    ran: dict[str, set[str]]  # by the full name of a function: the tests

    @classmethod
    def read(cls, folder: Path) -> Reach:
        seconds = Counter[str]()
        for test, duration in _said(folder / "seconds"):
            seconds[test] += duration
        names = list(_said(folder / "names"))
        ran: dict[str, set[str]] = {}
        for line in (folder / "noted").read_text(encoding="utf-8").splitlines():
            number, _, function = line.partition(" ")
            if int(number):  # otherwise it ran while tests were collected
                name = names[int(number) - 1]
                tests = [name] if "::" in name else [test for test in seconds if test.startswith(f"{name}::")]
                ran.setdefault(function, set()).update(tests)
        return cls(dict(seconds), ran)

    def of(self, definition: str, module: str) -> list[str]:
        """The tests that run a function or anything of a class or a module, the quickest first. What no function of a class
        stands for is run by all that run anything of its module."""
        for name in (definition, module):
            found = {test for function, tests in self.ran.items() if f"{function}.".startswith(f"{name}.") for test in tests}
            if found or definition in self.ran:
                break
        return sorted(found, key=lambda test: (self.seconds[test], test))


def _said(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())
