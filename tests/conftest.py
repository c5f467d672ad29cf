"""What every test shares: what runs in the day, the report on promises, and the end of the pool of rank processes."""

import contextlib
import gc
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests import changes, programs, ranks

pytest_plugins = ["tests.promises_plugin"]
gc.disable()  # off until tests are collected: what imports make stays, and collections would walk through it again and again


@pytest.hookimpl(optionalhook=True)  # xdist calls it in the process that starts the workers
def pytest_configure_node(node: Any) -> None:
    if programs.START_METHOD == "forkserver":
        node.workerinput["servers"] = programs.share_servers()


def pytest_configure(config: pytest.Config) -> None:
    if "servers" in (given := getattr(config, "workerinput", {})):
        programs.use_shared_servers(given["servers"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Imports a part of the files first, where processes collect beside each other: each would compile all that are new."""
    config = session.config
    if hasattr(config, "workerinput"):
        files = [file for argument in config.args for file in sorted(Path(argument.partition("::")[0]).rglob("test_*.py"))]
        for file in files[int(config.workerinput["workerid"][2:]) :: config.workerinput["workercount"]]:
            # A file that cannot be imported, or that leaves all of its tests out, says so when it is collected.
            with contextlib.suppress(pytest.skip.Exception, ImportError):
                importlib.import_module(".".join(file.resolve().relative_to(changes.ROOT).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # runs before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: len(item.path.parents))  # the longest files lie highest, and none of them should run last
    concern = cache(changes.concern)
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    for item in items:
        if item.get_closest_marker("of_tests") and item.path not in named and not concern(item.path):
            item.add_marker("full")
    for item in _beyond_a_day(items):
        item.add_marker("product")


# Values that differ little from each other: by day a test has one of them, and the next test another one.
_IN_TURN: dict[str, tuple[object, ...]] = {
    "stage": (0, 1, 2), "world": (2, 3, 4), "dtype": (None, "bfloat16"), "shared_memory": (False, True),
    "kernels": ("compiled", "fused"),
}  # fmt: skip


def _beyond_a_day(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test whose parameters are a product, what brings no value of any of them that the day's others do not have."""
    by_test: dict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            by_test[item.path, item.cls, item.originalname].append(item)
    found: list[pytest.Item] = []
    for variants in by_test.values():
        left = {item: _values_of(item) for item in sorted(variants, key=lambda item: crc32(item.nodeid.encode()))}
        # The test comes first that brings most of what the day does not have yet.
        while new := max(left.values(), key=len, default=set()):
            left = {item: values - new for item, values in left.items() if values is not new}
        found += left
    return found


def _values_of(item: pytest.Function) -> set[tuple[tuple[str, object], ...]]:
    """Returns those of its parameters, of which one mark may give several at a time. Those of `_IN_TURN` count as one value."""
    given = item.callspec.params
    axes = [_names_of(mark) for mark in item.iter_markers("parametrize")]
    axes += [[name] for name in given if not any(name in axis for axis in axes)]  # the names of fixtures
    return {tuple((name, _kind_of(axis, given[name])) for name in axis if name in given) for axis in axes}


def _kind_of(axis: list[str], value: object) -> object:
    in_turn = _IN_TURN.get(axis[0], ()) if len(axis) == 1 else ()
    return "in turn" if any(type(value) is type(each) and value == each for each in in_turn) else id(value)


def _names_of(parametrize: pytest.Mark) -> list[str]:
    names = parametrize.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    """Keeps the collector off in a file that parses all sources: nodes are in no circle, and it would walk through millions."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests will never be garbage, and there are many of them
    gc.enable()


@pytest.hookimpl(trylast=True)  # runs once the fixtures of a file are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # What a file's tests imported and cached stays, too. Otherwise each collection of a later test would walk through all of
    # it.
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # Done here and not only at exit, as the pool's processes must be gone before pytest removes the temporary folders that they
    # may use.
    ranks.close()
