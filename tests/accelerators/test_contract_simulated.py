"""The simulated device keeps the contract that every accelerator keeps, whole and with each capability taken away."""

import os
from pathlib import Path

import pytest

from accelerators.testing import AcceleratorContract
from accelerators_sim import SimulatedAccelerator, bring_up, without
from tests import programs

MASKS = ("", "streams", "events", "pin", "bf16", "fp16", "fp64", "memory_figures", "rng", "synchronize", "record_stream")
ALL = ",".join(MASKS[1:])
INSIDE = "TEST_SIMULATED_CONTRACT"

# Once the device is up it is this process's accelerator to torch, so it comes up in a process of its own, started below.
if os.environ.get(INSIDE):

    class TestSimulated(AcceleratorContract):
        accelerator = SimulatedAccelerator  # the class: a new object a test, which remembers nothing of another mask

        @pytest.fixture(autouse=True, params=os.environ[INSIDE].split(";"))
        def mask(self, request):
            if SimulatedAccelerator().unavailable_reason() is None:
                bring_up()
                with without(*filter(None, request.param.split(","))):
                    yield
            else:
                yield


@pytest.mark.promise("D07", "D08", "M10", "X05", "X06", "X13", "X14", "X16", "X17")
@pytest.mark.parametrize(
    ("taken_away", "masks", "chosen"),
    [
        ("", ["", ALL], "not rank and not collective"),  # by day test_group.py has those of ranks
        pytest.param("", [*MASKS, ALL], "", marks=pytest.mark.full),
        pytest.param(ALL, [*MASKS, ALL], "fp64", marks=pytest.mark.full),  # one of the inner masks, which changes nothing
    ],
    ids=["all while it runs", "one after another while it runs", "all before it starts"],
)
def test_the_contract_holds_whatever_is_taken_away(taken_away, masks, chosen):
    words = ["-q", "-rsfE", "-p", "no:cacheprovider", f"{__file__}::TestSimulated", "-k", chosen]
    environment = {**os.environ, INSIDE: ";".join(masks), "SIM_WITHOUT": taken_away, "SIM_MEMORY": "1GiB", "SIM_DEVICES": "2"}
    root = Path(__file__).parents[2]
    result = programs.python("-m", "pytest", *words, cwd=root, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    if " passed" not in result.stdout:
        pytest.skip(result.stdout.partition("SKIPPED")[2].partition(": ")[2].partition("\n")[0])
