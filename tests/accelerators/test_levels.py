"""Modules of the simulated device import each other in one direction only, by the table that says what they are."""

import ast
import re
from pathlib import Path

import accelerators_sim

FOLDER = Path(accelerators_sim.__file__).parent
MODULES = {f"accelerators_sim.{path.stem}": path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}


def imports_of(module):
    """The modules of the device that this one imports, anywhere in it; `from a import b` is a.b where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def test_the_simulated_device_imports_down_the_levels_of_its_table():
    rows = re.findall(r"^\| (\d+) +\| (\w+)\.py +\|", accelerators_sim.__doc__, re.MULTILINE)
    level = {f"accelerators_sim.{name}": int(number) for number, name in rows}
    assert level.keys() == MODULES.keys()
    assert not [(module, other) for module in MODULES for other in imports_of(module) if level[other] >= level[module]]
    assert list(level.values()) == sorted(level.values())
