"""What every test shares: the report on promises, and the end of the pool of rank processes."""

import pytest

from tests import ranks

pytest_plugins = ["tests.promises_plugin"]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # Here and not only at exit: the pool's processes must be gone before pytest removes the temporary folders they may use.
    ranks.close()
