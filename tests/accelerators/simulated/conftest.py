"""Tests of the simulated device run in one process of their own.

Once the device is up it is this process's accelerator to torch, which tests of other things must not meet. So the tests that
were selected in this folder run once, together, in a pytest inside; here each one reports what became of it there. Where
pytest runs in several processes, the first that comes here starts it and the others wait. A module that says `HERE = True`
runs in this process and does not bring the device up.
"""

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests import programs

INSIDE = "TEST_SIMULATED_INSIDE"  # the variable with the file to which the process inside writes its reports
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
ENVIRONMENT = {"SIM_DEVICES": "2", "SIM_MEMORY": "1GiB", "OMP_NUM_THREADS": "1", "SIM_ORDER": "", "SIM_WITHOUT": ""}


def runs_here(item):
    return bool(os.environ.get(INSIDE)) or getattr(item.module, "HERE", False)


class Inside:
    """The reports of the process inside, by test, from a folder that all processes of this pytest share; it runs when the first
    one is asked for."""

    def __init__(self, nodeids, folder):
        self.nodeids, self.folder = nodeids, folder
        self.reports = None

    def of(self, nodeid):
        if self.reports is None:
            self.reports = self._run()
        return self.reports[nodeid]

    def _run(self):
        written = self.folder / "reports"
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not written.exists():
                (self.folder / "said").write_text(self._start(written))
        lines, said = written.read_text().splitlines(), (self.folder / "said").read_text()
        reports = {report["nodeid"]: report for report in map(json.loads, lines)}
        missing = {"outcome": "failed", "text": f"it did not run inside:\n{said}"}
        return {nodeid: reports.get(nodeid, missing) for nodeid in self.nodeids}

    def _start(self, written):
        written.touch()
        words = ["-q", "-p", "no:cacheprovider", "-m", "", *self.nodeids]  # they were selected outside
        environment = {**os.environ, **ENVIRONMENT, INSIDE: str(written)}
        result = programs.python("-m", "pytest", *words, cwd=ROOT, env=environment, timeout=300)
        return f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"


@pytest.fixture(scope="session")
def inside(request, tmp_path_factory):
    selected = [item for item in request.session.items if item.path.parent == FOLDER and not runs_here(item)]
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared) / "inside"
    shared.mkdir(exist_ok=True)
    return Inside([item.nodeid for item in selected], shared)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if runs_here(pyfuncitem):
        return None
    report = pyfuncitem._request.getfixturevalue("inside").of(pyfuncitem.nodeid)
    if report["outcome"] == "skipped":
        pytest.skip(report["text"])
    if report["outcome"] == "failed":
        pytest.fail(report["text"], pytrace=False)
    return True


def pytest_runtest_logreport(report):
    written = os.environ.get(INSIDE)
    if written and (report.when == "call" or report.outcome != "passed"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        with open(written, "a") as file:
            file.write(json.dumps({"nodeid": report.nodeid, "outcome": report.outcome, "text": text}) + "\n")


@pytest.fixture
def sim():
    """torch.sim with the settings it starts with, and nothing left to do before and after the test."""
    if not os.environ.get(INSIDE):
        yield None
        return
    import torch

    import accelerators_sim as simulated

    reason = simulated.SimulatedAccelerator().unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    simulated.bring_up()
    for index in range(2):
        torch.sim.synchronize(index)
    yield torch.sim
    torch.sim.set_device(0)
    simulated.configure(order="late", races=True, strict=False, memory_bytes=1 << 30)
    for index in range(2):
        torch.sim.synchronize(index)
