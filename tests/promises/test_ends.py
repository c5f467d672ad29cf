"""After a failure every process ends by itself, also when the process that holds the store is stopped.

A stopped process closes no connection and answers nothing, and neither does one whose host is gone from the network.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.devices import needs_linux
from tests.promises.test_recovery import meeting

ENDS_S = 15.0  # from the error to the end of the process
RAISES_S = 60.0  # from the start to the error, importing torch included


PROGRAM = """
import os, signal, sys, time
import torch, zero
from tests import faults

faults.SECONDS_FOR_THE_STORE.put(1.0)  # as the test waits for it
rank, world, holder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["HOLDER"]
os.write(1, f"rank {rank} is {os.getpid()}\\n".encode())  # a line at once: ranks share the output
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
limits = {"timeout_s": 1.0, "first_step_timeout_s": 60.0}
optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, bucket_bytes=64, **limits)
for step in range(3):
    if step == 2 and rank == 0:
        if holder == "agent":
            os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    except zero.ZeroError as error:
        os.write(1, f"rank {rank} raised {type(error).__name__}\\n".encode())
        if os.environ["LAST"] == "close":
            optimizer.close()
        raise
"""


class Running:
    """The processes of a program, which are all killed at the end."""

    def __init__(self, folder, world, holder, launcher, last):
        self.world = world
        self._output = folder / "output"
        environment = {**meeting(), "HOLDER": holder, "LAST": last, "PYTHONPATH": os.pathsep.join(sys.path)}
        if launcher == "torchrun" and holder == "rank 0":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        path = folder / "program.py"
        path.write_text(PROGRAM)
        command, of_ranks = [sys.executable, str(path)], [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]
        if launcher == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(world)]
            command[-1:-1] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
            of_ranks = [{}]
        with self._output.open("w") as output:
            self._started = [
                subprocess.Popen(
                    command, env={**environment, "WORLD_SIZE": str(world), **own}, stdout=output, stderr=subprocess.STDOUT
                )
                for own in of_ranks
            ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        children = {process for process in self.processes().values() if not self.has_ended(process)}
        for process in self._started:
            with contextlib.suppress(OSError):  # those that have not said yet who they are
                children |= set(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
            process.kill()
        for process in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._started:
            process.wait()

    def output(self):
        return self._output.read_text(errors="replace")

    def processes(self):
        return {int(rank): int(process) for rank, process in re.findall(r"^rank (\d) is (\d+)$", self.output(), re.MULTILINE)}

    def raised(self):
        return {int(rank): kind for rank, kind in re.findall(r"^rank (\d) raised (\w+)$", self.output(), re.MULTILINE)}

    def exit_statuses(self):
        """Of those that have ended; a process is seen to end a moment before its threads have."""
        return [started.wait(ENDS_S) for started in self._started[1:]]

    def has_ended(self, process):
        """Also where nobody has asked for its exit status yet, as a launcher that is stopped does not."""
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return True


def until(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# The process that holds the store, by the program that starts the ranks.
HOLDERS = [("rank 0", "environment"), ("rank 0", "torchrun"), ("agent", "torchrun")]
BY_DAY = ("rank 0", "environment", 2, "raise")
ALL = [(*holder, world, last) for holder in HOLDERS for world in (2, 3) for last in ("raise", "close")]


@pytest.mark.full
@pytest.mark.promise("L01", "X12")
@needs_linux
@pytest.mark.parametrize(
    ("holder", "launcher", "world", "last"),
    [one if one == BY_DAY else pytest.param(*one, marks=pytest.mark.full) for one in ALL],
)
def test_where_who_holds_the_store_is_stopped_the_others_raise_and_then_end(holder, launcher, world, last, tmp_path):
    with Running(tmp_path, world, holder, launcher, last) as running:
        others = set(range(1, world))
        assert until(lambda: running.raised().keys() >= others, RAISES_S), running.output()
        processes = [running.processes()[rank] for rank in others]
        ended = until(lambda: all(map(running.has_ended, processes)), ENDS_S)
        assert ended, f"{[running.has_ended(process) for process in processes]}\n{running.output()}"
        assert running.raised() == dict.fromkeys(others, "GroupLost")
        assert not running.has_ended(running.processes()[0])  # it is stopped, so that nobody ended as it did
        if launcher == "environment":
            assert running.exit_statuses() == [1] * (world - 1), running.output()
