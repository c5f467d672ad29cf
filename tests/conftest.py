"""What every test shares: the report on promises, and the end of the pool of rank processes."""

import gc

import pytest

from tests import ranks

pytest_plugins = ["tests.promises_plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: len(item.path.parents))  # the longest files lie highest, and none of those is to be the last


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests will never be garbage, and there are many


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # Here and not only at exit: the pool's processes must be gone before pytest removes the temporary folders they may use.
    ranks.close()
