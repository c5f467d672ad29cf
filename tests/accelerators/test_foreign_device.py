"""A device that nobody here wrote, from a C++ extension of the tests: chosen, shown, and trained on by two ranks as it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerators import Accelerator
from accelerators.testing import AcceleratorContract
from tests import acme
from tests.devices import needs_compiler, needs_linux

pytestmark = [pytest.mark.full, needs_linux, needs_compiler]
ROOT = Path(__file__).parents[2]
INSIDE = "TEST_ACME_INSIDE"


def bring_up():
    acme.bring_up()
    return Accelerator("acme")


# Once the device is up it is this process's accelerator to torch, so the contract runs in a process of its own.
if os.environ.get(INSIDE):

    class TestAcme(AcceleratorContract):
        accelerator = bring_up


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where the extension is built once for all processes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(acme.FOLDER, str(tmp_path_factory.mktemp("acme")))
        for name in ("ACCELERATOR", "DS_ACCELERATOR"):
            patched.delenv(name, raising=False)
        acme.build()
        yield


def run(*arguments, **environment):
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=whole, capture_output=True, text=True, timeout=300)


def test_the_host_cannot_read_its_memory():
    program = """
import ctypes, torch
from tests import acme
acme.bring_up()
x = torch.ones(4, device="acme")
assert (x * 2).tolist() == [2.0] * 4
ctypes.c_float.from_address(x.data_ptr()).value
"""
    assert run("-c", program).returncode == -signal.SIGSEGV


def test_it_keeps_the_contract_two_ranks_included():
    result = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", f"{__file__}::TestAcme", **{INSIDE: "1"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_is_shown_and_chosen_by_itself():
    program = "from tests import acme; acme.bring_up()\nfrom accelerators.__main__ import main; main([])"
    result = run("-c", program)
    assert result.returncode == 0, result.stderr
    rows = {tuple(line.split()[:2]): line for line in result.stdout.partition("\n\n")[0].splitlines()}
    assert " staged " in rows["*", "acme"]
    assert "acme: known to torch; ACCELERATOR=acme takes it" in result.stdout
    assert "* acme is used: the accelerator that torch names." in result.stdout


def test_two_ranks_train_on_it_as_plain_pytorch_does_at_every_stage_and_go_on_from_checkpoints(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run(*torchrun, "-m", "tests.acme.training", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "acme staged staged" in result.stdout
