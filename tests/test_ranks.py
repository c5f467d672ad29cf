"""The pool of rank processes does what every other test relies on: it runs, it reports, it never hangs and leaves nothing."""

import atexit
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests import programs, ranks
from tests.promise_list import ROOT

pytestmark = pytest.mark.of_tests


def sum_of_ranks(rank, world, scale):
    total = torch.tensor(float(rank * scale))
    dist.all_reduce(total)
    return rank, os.getpid(), total.item(), torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_runs_and_they_can_talk(world):
    results = ranks.run(world, sum_of_ranks, 10)
    assert [rank for rank, *_ in results] == list(range(world))
    assert [total for _, _, total, _ in results] == [10 * sum(range(world))] * world
    assert {threads for *_, threads in results} == {1}


def test_processes_are_reused():
    first = ranks.run(2, sum_of_ranks, 1)
    second = ranks.run(2, sum_of_ranks, 1)
    assert [pid for _, pid, *_ in first] == [pid for _, pid, *_ in second]


def double(rank, world, tensor):
    tensor.mul_(2)
    return tensor


def test_arguments_are_copies_and_results_are_tensors():
    tensor = torch.arange(3.0)
    for result in ranks.run(2, double, tensor):
        assert torch.equal(result, torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(tensor, torch.arange(3.0))


AS_THEY_ARE = {
    "a slice": lambda: torch.arange(6.0)[::3][:1],
    "one of a column": lambda: torch.randn(1, 4).t()[:1],
    "no elements": lambda: torch.empty(0, 3),
    "no dimension": lambda: torch.tensor(2.0),
    "transposed": lambda: torch.randn(2, 3).t(),
    "channels last": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "bits": lambda: torch.tensor([True, False]),
    "narrow": lambda: torch.tensor([1.5, float("nan")]).bfloat16(),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
}


def back(rank, world, tensors):
    return tensors


def test_a_tensor_comes_as_it_was():
    sent = {name: make() for name, make in AS_THEY_ARE.items()}
    sent["twice"], sent["named"] = sent["narrow"], torch.ones(2)
    sent["named"].tag = "a tag"
    [found] = ranks.run(1, back, sent)
    for name, tensor in sent.items():
        came = found[name]
        assert (type(came), came.dtype, came.stride()) == (type(tensor), tensor.dtype, tensor.stride()), name
        assert torch.equal(came.nan_to_num(7), tensor.nan_to_num(7)), name
    assert found["twice"] is found["narrow"] and found["named"].tag == "a tag" and found["a parameter"].requires_grad


def leave_a_mess(rank, world):
    dist.new_group([0])
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(())


def what_is_left(rank, world):
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, os.environ.get("LEFT_BEHIND"), torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item()


def test_nothing_of_one_call_is_left_for_the_next():
    clean = ranks.run(2, what_is_left)
    ranks.run(2, leave_a_mess)
    assert ranks.run(2, what_is_left) == clean
    assert clean[0][:4] == (1, None, torch.float32, True)


def fail_on_rank_one(rank, world):
    if rank == 1:
        raise KeyError("the second rank's own words")
    dist.barrier()


def test_what_a_rank_raised_is_raised_with_its_number_and_traceback():
    with pytest.raises(KeyError, match="the second rank's own words") as caught:
        ranks.run(2, fail_on_rank_one)
    report = str(caught.value.__cause__)
    assert "rank 1 of 2: KeyError" in report
    assert "in fail_on_rank_one" in report
    assert "rank 0 of 2: killed" in report


def test_a_failure_is_followed_by_fresh_processes():
    before = ranks.run(2, sum_of_ranks, 1)
    with pytest.raises(KeyError):
        ranks.run(2, fail_on_rank_one)
    after = ranks.run(2, sum_of_ranks, 1)
    assert not {pid for _, pid, *_ in before} & {pid for _, pid, *_ in after}


def raise_or_return(rank, world):
    if rank == 2:
        raise ValueError(f"rank {rank}")
    return rank


def test_outcomes_tell_what_each_rank_did():
    found = ranks.outcomes(3, raise_or_return)
    assert [outcome.kind for outcome in found] == ["returned", "returned", "ValueError"]
    assert [outcome.value for outcome in found] == [0, 1, None]
    assert isinstance(found[2].error, ValueError)
    assert str(found[2].error) == "rank 2"
    assert "in raise_or_return" in found[2].text


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.file = sys.stdout


def raise_unpicklable(rank, world):
    raise Unpicklable("this", "that")


def return_unpicklable(rank, world):
    return sys.stdout


def test_what_cannot_be_pickled_is_told_as_text():
    found = ranks.outcomes(1, raise_unpicklable)
    assert found[0].kind == "Unpicklable"
    assert "this and that" in str(found[0].error)
    assert ranks.outcomes(1, return_unpicklable)[0].kind == "TypeError"


def sleep_on_rank_one(rank, world):
    while rank == 1:  # whoever waits for it to end never does
        time.sleep(600)
    return rank


def test_a_rank_that_hangs_is_named_with_the_place_and_killed():
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(2, sleep_on_rank_one, timeout=1.0)
    assert "Still running when time was up: rank 1." in str(caught.value)
    assert "in sleep_on_rank_one" in str(caught.value)
    assert caught.value.outcomes[0].value == 0


def wait_for_nobody(rank, world):
    if rank == 0:
        dist.barrier()


def test_a_rank_that_waits_in_a_collective_is_named_with_the_place():
    found = ranks.outcomes(2, wait_for_nobody, timeout=1.0)
    assert [outcome.kind for outcome in found] == ["hung", "returned"]
    assert "in wait_for_nobody" in found[0].text


def die_on_rank_one(rank, world):
    print("last words", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_is_named_with_the_signal_and_its_last_words():
    dead = ranks.outcomes(2, die_on_rank_one)[1]
    assert dead.kind == "died"
    assert "SIGKILL" in dead.text
    assert dead.output.endswith("last words\n")  # the gloo of some torch versions has said something before


def exit_quietly(rank, world):
    os._exit(3)


def test_a_rank_that_exits_is_named_with_its_status():
    found = ranks.outcomes(1, exit_quietly)
    assert (found[0].kind, found[0].text) == ("died", "its process ended with exit status 3")


def leave_something_to_wait_for(rank, world, error):
    if rank == 1:
        atexit.register(time.sleep, 600)
    if error:
        raise KeyError("what it raised")


@pytest.mark.parametrize(("error", "fresh"), [(False, True), (True, True), (True, False)])
def test_a_rank_whose_process_does_not_end_is_named_with_the_place(error, fresh, monkeypatch):
    monkeypatch.setattr(ranks, "END_S", 1.0)
    one, other = ranks.outcomes(2, leave_something_to_wait_for, error, fresh=fresh)
    assert (one.kind, other.kind) == ("KeyError" if error else "returned", "did not end")
    assert "its process did not end within 1 s, here" in other.text and not other.ok


def environment(rank, world):
    return os.environ.get("MARK"), os.environ.get("OMP_NUM_THREADS"), dist.is_initialized(), os.getpid()


def test_an_environment_is_given_to_processes_of_their_own():
    shared = ranks.run(2, environment)
    own = ranks.run(2, environment, env=[{"MARK": "a"}, {"MARK": "b", "OMP_NUM_THREADS": None}], group=False)
    assert [result[:3] for result in own] == [("a", "1", False), ("b", None, False)]
    assert [result[:3] for result in shared] == [(None, "1", True)] * 2
    assert [pid for *_, pid in ranks.run(2, environment)] == [pid for *_, pid in shared]


def test_a_function_that_cannot_be_imported_is_refused():
    with pytest.raises(ValueError, match="top of a module"):
        ranks.run(1, lambda rank, world: None)


PATIENCE_S = 300.0  # until something that does not end is taken for hung: no busy machine comes near that
PROGRAM = """
import os, sys
from tests import programs, ranks

def pid(rank, world):
    return os.getpid()

if __name__ == "__main__":
    import program  # by the name by which ranks find it
    ending, *servers = sys.argv[1:]
    for address in servers:
        programs.use_shared_servers(address)
    print(*ranks.run(2, program.pid), flush=True)
    if ending == "killed":
        input()
"""


def is_gone(pid):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shared", "own"])
@pytest.mark.parametrize("ending", ["exit", pytest.param("killed", marks=pytest.mark.full)])
def test_no_rank_outlives_the_process_that_started_it(tmp_path, ending, shares):
    """The process has a fork server of its own, or uses that of another one, as processes do that run tests."""
    servers = [programs.share_servers()] if shares and programs.START_METHOD == "forkserver" else []
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, str(file), ending, *servers]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=env, **pipes) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        if ending == "killed":
            parent.kill()
        _, errors = parent.communicate(timeout=PATIENCE_S)
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)
    if ending == "exit":
        assert (parent.returncode, errors) == (0, "")
