"""Which files git calls changed, and whether a test file is among those that they concern.

Changed is what differs from where this branch left the main branch: what was committed since, what is not committed yet, and
files that git does not know. On the main branch itself it is what the last commit brought, which is a whole branch where that
was a merge. Where git cannot tell, as in a copy without its history, every file counts as changed.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The files that a test file reads, beside those of tests/ that it imports.
READ = {
    "tests/test_mutants.py": ("zero/",),
    "tests/test_nccl_like.py": ("simulated/",),
    "tests/test_source_edits.py": ("zero/",),
}


def concern(test_file: Path) -> bool:
    """Whether something changed that this file of tests tests: the file itself, or what it imports or reads."""
    changed = changed_files()
    if changed is None:
        return True
    concerned = {str(path.relative_to(ROOT)) for path in imported(test_file)}
    folders = READ.get(str(test_file.relative_to(ROOT)), ())
    return any(path in concerned or path.startswith(folders) for path in changed)


@cache
def changed_files(root: Path = ROOT) -> frozenset[str] | None:
    """Paths below `root`; None where git does not tell."""
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root:
            return None  # this is a copy inside of another project
        differ = _git(root, "diff", "--name-only", "--no-renames", "-z", _base(root))
        unknown = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(filter(None, (differ + unknown).split("\0")))


def _base(root: Path) -> str:
    """The commit to compare with."""
    head = _git(root, "rev-parse", "HEAD")
    main = _git(root, "for-each-ref", "--format=%(refname)", "refs/heads/main", "refs/remotes/origin/main").split()
    base = _git(root, "merge-base", "HEAD", main[-1] if main else "HEAD")  # the remote's branch comes last
    return (_git(root, "rev-parse", "--verify", "HEAD^") if base == head else base).strip()


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout


@cache
def imported(path: Path) -> frozenset[Path]:
    """The file and every file of tests/ that it imports, directly or through others."""
    found, waiting = {path}, [path]
    while waiting:
        new = set(_imports_of(waiting.pop())) - found
        found |= new
        waiting += new
    return frozenset(found)


@cache
def _imports_of(path: Path) -> tuple[Path, ...]:
    names = (name for node in _statements(ast.parse(path.read_text(encoding="utf-8"))) for name in _names(node))
    return tuple(file for name in names if name.partition(".")[0] == "tests" for file in _files(name))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All that may import, at any depth; a walk through expressions would take ten times as long."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        yield (node := waiting.pop())
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> Iterator[Path]:
    """The files that importing this name runs."""
    path = ROOT
    for part in name.split("."):
        path = path / part
        yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
