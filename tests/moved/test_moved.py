"""Each script loses the same after it was moved as before, at every stage. docs/from-ddp.md has the lines that change."""

from importlib.util import find_spec

import pytest

from tests import ranks
from tests.devices import needs_accelerate
from tests.moved import KINDS, train
from tests.zero.integrations.on_ranks import both_ranks

OF_FRAMEWORKS = {
    "features": (needs_accelerate, pytest.mark.full),
    "best": (
        pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"),
        pytest.mark.full,
    ),
}


def trained(rank, world, kind, is_moved, stage):
    return train(kind, is_moved, stage)


def losses_of(kind, is_moved, stage):
    if kind in OF_FRAMEWORKS:
        return both_ranks("tests.moved:train", kind, is_moved, stage)
    return ranks.run(2, trained, kind, is_moved, stage, timeout=120.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=OF_FRAMEWORKS.get(kind, ())) for kind in KINDS])
def test_a_moved_script_has_the_losses_of_the_plain_one(kind, stage):
    plain, moved = (losses_of(kind, is_moved, stage) for is_moved in (False, True))
    for one, other in zip(plain, moved, strict=True):
        assert len(one) >= 6 and other == pytest.approx(one, rel=1e-4, abs=1e-6)
