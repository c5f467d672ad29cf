"""What every test of compiled models begins with."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from zero.window.window import Window


@pytest.fixture(autouse=True)
def _forgotten():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _regions_stay_regions(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test whose blocks were called without a region, unless it is about that: it would prove nothing of regions."""
    with caplog.at_level(logging.WARNING, "zero"):
        yield
    told = [record.getMessage() for record in caplog.get_records("call") if "are no regions" in record.getMessage()]
    assert not told or "falls_back" in request.fixturenames, told


@pytest.fixture
def falls_back():
    """Lets blocks of a test be called without a region."""


@pytest.fixture
def handed_over(monkeypatch):
    """The parameters whose gradients came from inside a graph."""
    found = []

    def hand_over(window, lent, original=Window.hand_over):
        found.extend(window.params.names[index] for index, _ in lent)
        original(window, lent)

    monkeypatch.setattr(Window, "hand_over", hand_over)
    return found
