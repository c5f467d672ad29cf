"""What every test of compiled models begins with."""

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


@pytest.fixture
def handed_over(monkeypatch):
    """The parameters whose gradients came from inside a graph."""
    found = []

    def hand_over(window, index, grad, original=Window.hand_over):
        found.append(window.params.names[index])
        original(window, index, grad)

    monkeypatch.setattr(Window, "hand_over", hand_over)
    return found
