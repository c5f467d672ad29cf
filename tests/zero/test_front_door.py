"""The package's front door opens nothing before it is asked to."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zero


def test_importing_the_package_imports_nothing_but_itself():
    program = """
import sys, typing, importlib
before = {*sys.modules, *sys.builtin_module_names}
import zero
print(sorted({*sys.modules} - before))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip() == "['zero']"


def test_every_public_name_is_there_and_said():
    for name in zero.__all__:
        assert getattr(zero, name).__name__ == name
        assert name in dir(zero)
    with pytest.raises(AttributeError, match=r"no attribute 'shards'\. It has: Engine, "):
        zero.shards  # noqa: B018


def test_shard_names_what_people_ask_it_for():
    parameters = inspect.signature(zero.shard).parameters
    named = ["stage", "dtype", "group", "clip", "accumulation", "reduce", "offload", "bucket_bytes"]
    assert list(parameters) == ["model", "optimizer", *named, "options"]
    fields = zero.ZeroConfig.model_fields
    defaults = {name: parameters[name].default for name in named if name in fields and name != "stage"}
    assert defaults == {name: fields[name].default for name in defaults}


def test_the_words_that_are_explained_are_those_of_the_code():
    explained = [line.split(" ")[0] for line in zero.__doc__.splitlines() if re.match(r"\S+ {3,}\S", line)]
    assert len(explained) == len(set(explained)) >= 10
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(zero.__file__).parent.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    spoken = " ".join(names).lower().replace("_", "")
    assert [word for word in explained if word.replace("-", "") not in spoken] == []
