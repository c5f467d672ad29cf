"""A pool of rank processes that is started once and serves every test that needs several ranks.

    results = ranks.run(2, function, *args)         # function(rank, world, *args) on each rank; the list of what they returned
    outcomes = ranks.outcomes(2, function, *args)   # the same for tests of failure: what each rank returned or raised

Each call gets a default process group of its own (gloo), which costs some 25 ms; the processes, and with them the seconds that
importing torch takes, are reused. After any failure they are replaced, since nobody knows what the failure left behind.
Then, and after a call in processes of its own, every process must end by itself, exit functions included.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs import START_METHOD, forked_with, start_context
from tests.rank_process import dumps, serve

# A rank that failed reports it at once. The others may wait for it in a collective, and have this long to come back alone.
GRACE_S = 1.0
# The time in which a process writes its stacks before it is killed.
STACKS_S = 2.0
# A rank process that has nothing to do leaves when it is told to, and is killed if it does not.
EXIT_S = 2.0
# The time in which a process ends by itself after a failure, or after a call of its own. One that does not is a failure.
END_S = 15.0
START_S = 120.0
OUTPUT_CHARS = 4000

# One thread a rank, as ranks share the cores; loopback, as a test machine's own name may resolve to nothing.
DEFAULT_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

Env = Mapping[str, "str | None"]


class RanksFailed(Exception):
    """One or more ranks did not return. `outcomes` has what each of them did."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


@dataclass
class Outcome:
    """What one rank did with one call: it returned `value`, or `error` says why it did not."""

    rank: int
    value: Any = None
    error: BaseException | None = None  # the error that it raised; a RuntimeError with the same text if that cannot be pickled
    kind: str = "returned"  # "returned", the name of the error, or "died", "hung", "killed", "did not end"
    text: str = ""  # the traceback, the way in which it died, or the place where it hung
    seconds: float = 0.0
    output: str = ""  # what it printed, C++ included

    @property
    def ok(self) -> bool:
        return self.kind == "returned"


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **options: Any) -> list[Any]:
    """`function(rank, world, *args)` on each of `world` ranks; the list of their results.

    What the first failing rank raised is raised here, with every rank's fate as its cause. Options as for `outcomes`.
    """
    found = _call(world, function, args, timeout=timeout, wait_for_all=False, **options)
    failed = sorted((outcome for outcome in found if not outcome.ok), key=lambda outcome: outcome.seconds)
    if not failed:
        return [outcome.value for outcome in found]
    # A rank that hung or was killed did so because of a rank that raised or died first.
    first = next((o for o in failed if o.error is not None), next((o for o in failed if o.kind == "died"), failed[0]))
    report = RanksFailed(describe(found), found)
    if first.error is not None:
        raise first.error from report
    raise report


def outcomes(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **options: Any) -> list[Outcome]:
    """As `run`, but every rank may take the whole time and what it did is returned, whether it succeeded or not.

    fresh=True            processes of their own, which end with the call
    env={...}             environment variables of such fresh processes, None to remove one; a list has one dict a rank
    apart="sim"           a second pool, by name, that stays like the first: for what cannot be undone in a process;
                          processes "frameworks" have those imported, fresh ones too
    group=False           no default process group: the test makes its own
    group_timeout=30.0    of the default process group, in seconds
    """
    return _call(world, function, args, timeout=timeout, wait_for_all=True, **options)


def describe(found: Sequence[Outcome]) -> str:
    still = [str(outcome.rank) for outcome in found if outcome.kind in ("hung", "killed")]
    lines = [f"{sum(not outcome.ok for outcome in found)} of {len(found)} ranks did not return."]
    if still:
        lines.append(f"Still running when time was up: rank{'s' * (len(still) > 1)} {', '.join(still)}.")
    for outcome in sorted(found, key=lambda outcome: outcome.seconds):
        lines.append(f"--- rank {outcome.rank} of {len(found)}: {outcome.kind} after {outcome.seconds:.2f} s")
        if outcome.text:
            lines.append(outcome.text.rstrip())
        if not outcome.ok and outcome.output.strip():
            lines.append(f"--- rank {outcome.rank} printed:\n{outcome.output.rstrip()}")
    return "\n".join(lines)


def close(*names: str) -> None:
    """End the shared pools, or those of these names. The next call starts another."""
    with _lock:
        for name in names or tuple(_shared):
            if name in _shared:
                _shared.pop(name).close()


# The parent's side ------------------------------------------------------------------------------------------------------

_shared: dict[str, Pool] = {}  # by name; the usual pool has none
_lock = threading.RLock()
_ENVIRONMENT = dict(os.environ)  # the environment of a shared pool, whichever test starts it


def _end_servers() -> None:
    """Multiprocessing lets its servers end after us, as orphans, and in a container there may be nobody to reap those."""
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver, resource_tracker

        for server in (forkserver._forkserver, resource_tracker._resource_tracker):
            with contextlib.suppress(Exception):  # these two are not public, and nothing is lost without them
                server._stop()


# Exit functions run from the last to the first: the pool ends, then the servers, then what multiprocessing registered when it
# was imported, which would otherwise wait for our processes for ever.
atexit.register(_end_servers)
atexit.register(close)


def _call(
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    timeout: float,
    wait_for_all: bool,
    fresh: bool = False,
    env: Env | Sequence[Env] | None = None,
    apart: str = "",
    group: bool = True,
    group_timeout: float = 30.0,
) -> list[Outcome]:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise ValueError(f"Ranks import what they run, and {name} cannot be imported. Write it at the top of a module.")
    call = _Call(name, args, world, timeout, wait_for_all, group_timeout if group else None)
    with _lock:
        module = "tests.forked_with_frameworks" if apart == "frameworks" else None
        if fresh or env is not None:
            pool = Pool(env or {}, module=module)
            try:
                found = pool.call(call)
                pool.end(found)
                return found
            finally:
                pool.close()
        if apart not in _shared:
            _shared[apart] = Pool({}, _ENVIRONMENT, module)
        pool = _shared[apart]
        is_whole = False
        try:
            found = pool.call(call)
            is_whole = all(outcome.ok for outcome in found)
            if not is_whole:
                pool.end(found)
        finally:  # an interrupt, too, leaves ranks in the middle of something
            if not is_whole:
                _shared.pop(apart).close()
        return found


@dataclass
class _Call:
    function: str
    args: tuple[Any, ...]
    world: int
    timeout: float
    wait_for_all: bool
    group_timeout: float | None


class Pool:
    """Rank processes, started as they are first needed. Rank r of every call is the same process."""

    def __init__(self, env: Env | Sequence[Env], base: Mapping[str, str] = os.environ, module: str | None = None) -> None:
        self._env = env
        self._module = module
        self._base = base
        self._members: list[_Member] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store_port: int | None = None
        self._num_calls = 0

    def call(self, call: _Call) -> list[Outcome]:
        self._grow(call.world)
        self._num_calls += 1
        payload = dumps(call.args)
        members = self._members[: call.world]
        started = time.monotonic()
        for member in members:
            member.begin(("call", call.function, payload, call.world, self._num_calls, call.group_timeout, list(sys.path)))
        found = self._collect(members, call, started)
        if all(outcome.ok for outcome in found):
            # A rank may take its process group down only now, when every rank is done.
            for member in members:
                member.send(("clean",))
            for member in members:
                if (problem := member.receive(START_S)) is not None:
                    found[member.rank] = Outcome(member.rank, kind="unclean", text=problem, seconds=time.monotonic() - started)
        return found

    def end(self, found: Sequence[Outcome]) -> None:
        """Lets the processes end as the interpreter does, and notes which do not."""
        for member in self._members:
            # The fork server ends its processes without exit functions, so they call these themselves.
            member.send(("end", START_METHOD == "forkserver"))
        deadline = time.monotonic() + END_S
        for member in self._members[: len(found)]:
            if not member.ends_by(deadline):
                outcome = found[member.rank]
                member.ask_for_stacks()
                outcome.text = f"{outcome.kind}, and its process did not end within {END_S:g} s, here:\n{member.stacks()}"
                outcome.kind = "did not end"

    def close(self) -> None:
        for member in self._members:
            member.send(("exit",))
        deadline = time.monotonic() + EXIT_S
        for member in self._members:
            member.end(max(0.0, deadline - time.monotonic()))
        self._members.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, world: int) -> None:
        new = []
        for rank in range(len(self._members), world):
            env = self._env if isinstance(self._env, Mapping) else self._env[rank] if rank < len(self._env) else {}
            with forked_with(self._module):
                new.append(_Member(rank, {**self._base, **DEFAULT_ENV, **env}, self._folder))
        self._members += new
        # Started side by side, waited for one by one. The first one has the store where process groups meet.
        for member in new:
            ready = member.receive(START_S)
            if not isinstance(ready, int):
                raise RuntimeError(f"Rank process {member.rank} did not start: {ready or 'no answer'}\n{member.output()}")
            if self._store_port is None:
                self._store_port = ready
            member.send(("meet", self._store_port))

    def _collect(self, members: Sequence[_Member], call: _Call, started: float) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        deadline = started + call.timeout
        while len(found) < len(members):
            waiting = [member for member in members if member.rank not in found]
            handles = {handle: member for member in waiting for handle in member.handles()}
            ready = multiprocessing.connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            now = time.monotonic() - started
            for member in {handles[handle].rank: handles[handle] for handle in ready}.values():
                found[member.rank] = member.outcome(now)
                if not found[member.rank].ok and not call.wait_for_all:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        late = [member for member in members if member.rank not in found]
        raised = any(not outcome.ok for outcome in found.values())
        for member in late:
            member.ask_for_stacks()
        for member in late:
            where = member.stacks()
            if raised and not call.wait_for_all:
                kind, when = "killed", f"{GRACE_S:g} s after another rank failed"
            else:
                kind, when = "hung", f"after {call.timeout:g} s"
            seconds = time.monotonic() - started
            found[member.rank] = Outcome(member.rank, kind=kind, text=f"still running {when}, here:\n{where}", seconds=seconds)
            member.kill()
        for member in members:
            found[member.rank].output = member.output()
        return [found[member.rank] for member in members]


class _Member:
    """One process of the pool as its parent sees it."""

    def __init__(self, rank: int, env: Env, folder: Path) -> None:
        self.rank = rank
        self._output = folder / f"output-{rank}"
        self._stacks = folder / f"stacks-{rank}"
        self._output_from = 0
        self._connection, child = multiprocessing.Pipe()
        # Set around the start, as some variables are read when a library is loaded. A forked process sets them itself.
        with _environment(env):
            # Not a daemon, as daemons may not have children, and a test may want a DataLoader with workers.
            args = (rank, child, str(self._output), str(self._stacks), dict(os.environ))
            self._process = start_context().Process(target=serve, args=args, name=f"rank {rank}")
            self._process.start()
        child.close()

    def handles(self) -> tuple[Any, ...]:
        return self._connection, self._process.sentinel

    def begin(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):
            self._output_from = self._output.stat().st_size
        self.send(message)

    def send(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # a dead process is noticed when its answer is awaited
            self._connection.send(message)

    def receive(self, timeout: float) -> Any:
        if not multiprocessing.connection.wait(self.handles(), timeout):
            return f"no answer within {timeout:g} s"
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return self._death()

    def outcome(self, seconds: float) -> Outcome:
        try:
            if not self._connection.poll():  # only the end of the connection was seen
                raise EOFError
            kind, payload, text = self._connection.recv()
        except (EOFError, OSError):
            return Outcome(self.rank, kind="died", text=self._death(), seconds=seconds)
        if kind == "returned":
            return Outcome(self.rank, value=pickle.loads(payload), seconds=seconds)
        error = RuntimeError(text)
        if payload is not None:
            # An exception may be pickled and still not be made again from its arguments; its text is there all the same.
            with contextlib.suppress(Exception):
                error = pickle.loads(payload)
        return Outcome(self.rank, error=error, kind=kind, text=text, seconds=seconds)

    def _death(self) -> str:
        self._process.join(STACKS_S)
        code = self._process.exitcode
        if code is None:
            return "its connection closed while it was running"
        if code < 0:
            return f"its process died of signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit status {code}"

    def ask_for_stacks(self) -> None:
        if hasattr(signal, "SIGUSR1") and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        if not hasattr(signal, "SIGUSR1"):
            return "(this system has no signal to ask for stacks)"
        deadline = time.monotonic() + STACKS_S
        text = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                latest = self._stacks.read_text(errors="replace")
                if latest and latest == text:
                    break
                text = latest
            time.sleep(0.02)
        return text.strip() or "(it wrote no stacks)"

    def output(self) -> str:
        try:
            text = self._output.read_bytes()[self._output_from :].decode(errors="replace")
        except OSError:
            return ""
        return text if len(text) <= OUTPUT_CHARS else "..." + text[-OUTPUT_CHARS:]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ends_by(self, deadline: float) -> bool:
        self._process.join(max(0.0, deadline - time.monotonic()))
        return not self._process.is_alive()

    def end(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._connection.close()


@contextlib.contextmanager
def _environment(changes: Env) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Env) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
