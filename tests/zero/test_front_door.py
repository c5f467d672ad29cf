"""The package's front door opens nothing before it is asked to."""

import inspect
import subprocess
import sys

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


def test_every_word_of_the_house_is_explained():
    explained = {line.split(" ")[0] for line in zero.__doc__.splitlines() if "   " in line}
    assert {"whole", "share", "shard", "slot", "master", "staging", "window", "stand-in", "bucket", "settle"} <= explained
