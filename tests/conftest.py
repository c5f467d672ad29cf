"""What every test shares: what runs in the day, the report on promises, and the end of the pool of rank processes."""

import gc

import pytest

from tests import changes, ranks

pytest_plugins = ["tests.promises_plugin"]


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: len(item.path.parents))  # the longest files lie highest, and none of those is to be the last
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    for item in items:
        if item.get_closest_marker("of_tests") and item.path not in named and not changes.concern(item.path):
            item.add_marker("full")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests will never be garbage, and there are many


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # Here and not only at exit: the pool's processes must be gone before pytest removes the temporary folders they may use.
    ranks.close()
