"""Modules of `accelerators` import each other in one direction only; so do those of the simulated device, by its table."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import accelerators_sim

ROOT = Path(__file__).parents[2]
SIMULATED = "accelerators_sim."


FOLDERS = (ROOT / "accelerators", ROOT / "simulated" / "accelerators_sim")


def module_of(folder, path):
    return ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(folder, path): path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))}


def imports_of(module):
    """The modules of these packages that this one imports, anywhere in it; `from a import b` is a.b where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports by a relative name"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


IMPORTS = {module: imports_of(module) for module in MODULES}


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(IMPORTS).prepare()  # raises for a circle, with the modules on it


def test_the_simulated_device_imports_down_the_levels_of_its_table():
    rows = re.findall(r"^\| (\d+) +\| (\w+)\.py +\|", accelerators_sim.__doc__, re.MULTILINE)
    level = {SIMULATED + name: int(number) for number, name in rows}
    assert level.keys() == {module for module in MODULES if module.startswith(SIMULATED)}
    ours = {module: IMPORTS[module] & level.keys() for module in level}
    assert not [(module, other) for module in ours for other in ours[module] if level[other] >= level[module]]
    assert list(level.values()) == sorted(level.values())
