"""Processes: children by fork and by spawn, groups that the user made, and what a backend may catch."""

import multiprocessing
import os
import textwrap
import threading

import pytest
import torch

import accelerators
from tests import programs, ranks


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        with accelerators.using("cpu") as accelerator:
            assert accelerator.memory().total > 0
            return torch.tensor(i * i, device=accelerator.device())


def load_with_workers(rank, world):
    with accelerators.using("cpu") as accelerator:
        assert accelerator.supports(torch.float32)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        return sorted(torch.cat(list(loader)).tolist())


def ask(queue):
    with accelerators.using("cpu") as accelerator:
        queue.put((str(accelerator.device()), accelerator.memory().total))


needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")


@needs_fork
@pytest.mark.promise("X12")
def test_two_ranks_with_two_forked_workers_each_load_their_data():
    expected = [i * i for i in range(8)]
    assert ranks.run(2, load_with_workers, timeout=60) == [expected, expected]


@pytest.mark.full
@pytest.mark.promise("X12")
@pytest.mark.parametrize("method", [pytest.param("fork", marks=needs_fork), "spawn"])
def test_a_daemon_child_can_ask_after_its_parent_did(method):
    with accelerators.using("cpu") as accelerator:
        total = accelerator.memory().total
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=ask, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=60) == ("cpu", total)
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.promise("X12")
def test_no_thread_runs_and_no_lock_is_kept_that_a_fork_could_break():
    program = """
        import gc, sys, threading
        import torch
        locks = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore)
        import accelerators, zero
        accelerators.current().memory()
        [candidate.reason for candidate in accelerators.candidates() if candidate.priority >= 0]
        assert threading.enumerate() == [threading.main_thread()]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ("accelerators", "zero"):
                continue
            reachable = [vars(module)] + [vars(v) for v in vars(module).values() if type(v).__module__ == name]
            found = [key for names in reachable for key, value in names.items() if isinstance(value, locks)]
            assert not found, (name, found)
    """
    result = programs.with_torch(program, {**os.environ, "ACCELERATOR": "cpu"})
    assert result.returncode == 0, result.stderr


@pytest.mark.promise("X07")
@pytest.mark.parametrize("local_rank", [pytest.param("0", marks=pytest.mark.full), "3"])
def test_every_rank_of_a_host_gets_the_one_cpu(local_rank):
    program = """
        import accelerators, torch
        accelerator = accelerators.current()
        print(accelerator.device(), accelerator.current_index(), torch.ones(1, device=accelerator.device()).device)
    """
    environment = {**os.environ, "ACCELERATOR": "cpu", "LOCAL_RANK": local_rank, "RANK": local_rank, "WORLD_SIZE": "4"}
    result = programs.python("-c", textwrap.dedent(program), env=environment)
    assert result.stdout.split() == ["cpu", "0", "cpu"], result.stderr


@pytest.mark.promise("X07")
@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [
        ("1", "0,1", "sim:1 1 sim:1"),
        ("1", "1", "sim:0 0 sim:0"),  # the launcher shows each rank a device of its own
        ("2", "0,1", "Cannot use LOCAL_RANK=2: only 2 devices are visible here. Start one rank a device"),
    ],
)
def test_a_rank_allocates_on_its_own_device_of_several_or_says_that_there_is_none(local_rank, visible, expected):
    program = """
        import accelerators, torch
        reason = accelerators.get("sim").unavailable_reason()
        if reason is None:
            accelerator = accelerators.use("sim")
            print(accelerator.device(), accelerator.current_index(), torch.ones(1, device=accelerator.name).device)
        else:
            print("skip", reason)
    """
    environment = {**os.environ, "SIM_DEVICES": "2", "SIM_VISIBLE_DEVICES": visible, "LOCAL_RANK": local_rank}
    result = programs.python("-c", textwrap.dedent(program), env=environment)
    if result.stdout.startswith("skip"):
        pytest.skip(result.stdout[5:])
    assert expected in (result.stdout if result.returncode == 0 else result.stderr)
    assert (result.returncode != 0) == expected.startswith("Cannot")


def test_a_thread_asks_like_the_main_thread():
    found = []
    with accelerators.using("cpu") as accelerator:
        thread = threading.Thread(target=lambda: found.append(accelerators.current()))
        thread.start()
        thread.join()
    assert found == [accelerator]
