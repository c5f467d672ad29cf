"""Starts ranks of this machine with torchrun's own code."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator, Sequence

from accelerators.output import complain, silence
from zero.tools.commands import DONE, IMPOSSIBLE, INTERRUPTED


def is_rank() -> bool:
    """Returns True if a launcher started this process as a rank."""
    return bool(os.environ.get("RANK"))


@contextlib.contextmanager
def unless_nobody_reads() -> Iterator[None]:
    """Lets one rank of several go on when nobody reads what it writes: if it ended, all would be started again."""
    try:
        yield
    except BrokenPipeError:
        if not is_rank():
            raise
        silence()


def launch(command: Sequence[str], num_ranks: int, restarts: int) -> int:
    """Runs `python command...` as so many ranks of this machine. Where one of them ends by an error, all are started again, up
    to the given number of times. Returns the exit status."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # All ranks are on this machine, the own name of which may resolve to nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # With torch 2.13, ranks that are started again would get the store of those that died, with their addresses in it.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=uuid.uuid4().hex, max_restarts=restarts,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        died = ", ".join(f"rank {rank} with exit status {failure.exitcode}" for rank, failure in sorted(error.failures.items()))
        complain(
            f"{num_ranks} ranks were started, and again {restarts} times, but died: {died}. What each said is above; the same "
            "command goes on from the latest checkpoint."
        )
        return IMPOSSIBLE
    return DONE


def num_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
