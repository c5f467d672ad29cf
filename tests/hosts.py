"""Several hosts on this machine, with ranks on each and links between them.

    with hosts.started(2, ranks=2, bits_per_s=1e9) as net:
        results = net.run(function, *args)      # function(rank, world, *args) on each rank; the list of what they returned
        call = net.begin(function, *args)       # the same, and meanwhile
        call.wait_for("backward")               # until every rank has come to reached("backward")
        net.cut(1)                              # or slow, pause, resume, kill
        outcomes = call.go_on().outcomes()

A host is a process with network, pid, mount, ipc and uts namespaces of its own: its own addresses, process ids, /dev/shm, host
name and list of hosts. A further one has the bridge that joins them. Nothing of it has a name outside, and all of it ends with
the process that began it, however that ends: a process outside each host waits for that and kills the first one inside, with
which the kernel kills all others, and it takes interfaces away with the last process that is in their namespace.

This takes root and the programs of iproute2 and util-linux; where `reason` says why not, tests are skipped and say so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from tests.programs import START_METHOD, start_context
from tests.rank_process import dumps
from tests.ranks import END_S, Outcome, RanksFailed, describe

MASTER_PORT = 29500
_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC, _NEW_PIDS, _NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_SET_SIGNAL_AT_PARENTS_END = 1
_PROGRAMS = ("ip", "tc", "nsenter", "mount", "unshare")
_LOOK_S = 0.01
_BURST_S = 0.005  # the seconds of a link's burst: twice the time between two ticks of the kernel's clock
_SEGMENT_BYTES = 2**17  # the least burst, as what is sent at once must pass as a whole


@functools.cache
def reason() -> str:
    """Why there can be no hosts here; empty where there can."""
    if sys.platform != "linux" or START_METHOD != "forkserver":
        return "hosts are namespaces of Linux"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"hosts take the programs {', '.join(missing)}, which are not installed"
    script = "ip link add try0 type veth peer name try1 && ip link add try2 type bridge && "
    script += "tc qdisc add dev try0 root tbf rate 1gbit burst 1m latency 50ms"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "sh", "-c", script], capture_output=True, text=True
    )
    return f"namespaces and links are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


def name_of(host: int) -> str:
    return f"node{host}"


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def started(count: int, ranks: int = 1, bits_per_s: float | None = None) -> Iterator[Hosts]:
    """So many hosts with so many ranks each, that end with this; None: links are as fast as the machine."""
    net = Hosts(count, ranks)
    try:
        net.connect()
        if bits_per_s is not None:
            for host in range(count):
                net.slow(host, bits_per_s)
        yield net
    finally:
        net.close()


class Hosts:
    def __init__(self, count: int, ranks: int) -> None:
        self.count, self.ranks, self.world, self.port = count, ranks, count * ranks, MASTER_PORT
        self._context = start_context()
        self._switch = _Process(self._context, _switch, ())
        self.hosts: list[_Host] = []

    def connect(self) -> None:
        for host in range(self.count):  # started one after the other, so that `close` ends those that began if one does not
            self.hosts.append(_Host(self._context, host, self.ranks))
        switch = self._switch.receive()
        pids = [host.process.receive() for host in self.hosts]
        commands = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        for host, pid in enumerate(pids):
            commands += [
                f"link add port{host} type veth peer name eth0 netns {pid}", f"link set port{host} master br0",
                f"link set port{host} up",
            ]  # fmt: skip
        self._ip(switch, commands)
        for host, pid in enumerate(pids):
            self.hosts[host].pid = pid
            self._ip(pid, ["link set lo up", f"addr add {address_of(host)}/24 dev eth0", "link set eth0 up"])
        self._switch_pid = switch

    # links and hosts ---------------------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Nothing passes any more, and nobody is told."""
        self._ip(self._switch_pid, [f"link set port{host} down"])

    def mend(self, host: int) -> None:
        self._ip(self._switch_pid, [f"link set port{host} up"])

    def slow(self, host: int, bits_per_s: float) -> None:
        """The link's speed from now on, either way."""
        burst = max(_SEGMENT_BYTES, int(bits_per_s / 8 * _BURST_S))
        for pid, device in ((self._switch_pid, f"port{host}"), (self.hosts[host].pid, "eth0")):
            _in_net(pid, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{int(bits_per_s)}bit",
                    "burst", str(burst), "latency", "50ms")  # fmt: skip

    def pause(self, host: int) -> None:
        self._signal(host, signal.SIGSTOP)

    def resume(self, host: int) -> None:
        self._signal(host, signal.SIGCONT)

    def kill(self, host: int) -> None:
        """As where its power fails: no connection is closed."""
        self.cut(host)
        os.kill(self.hosts[host].pid, signal.SIGKILL)
        self.hosts[host].is_killed = True

    def num_bytes(self, host: int) -> tuple[int, int]:
        """How many bytes it has sent and received, headers included."""
        told = _in_net(self._switch_pid, "ip", "-json", "-statistics", "link", "show", f"port{host}")
        counted = json.loads(told)[0]["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]

    def _signal(self, host: int, number: signal.Signals) -> None:
        space, told = os.readlink(f"/proc/{self.hosts[host].pid}/ns/pid"), set[int]()
        while found := set(_processes_in(space)) - told:  # looked for again, as processes may have been forked meanwhile
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= found

    def _ip(self, pid: int, commands: Sequence[str]) -> None:
        _in_net(pid, "ip", "-batch", "-", given="\n".join(commands))

    # ranks -------------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **options: Any) -> list[Any]:
        """As `ranks.run`."""
        found = self.begin(function, *args, **options).outcomes(timeout)
        failed = sorted((outcome for outcome in found if not outcome.ok), key=lambda outcome: outcome.seconds)
        if not failed:
            return [outcome.value for outcome in found]
        report = RanksFailed(describe(found), found)
        first = next((outcome for outcome in failed if outcome.error is not None), failed[0])
        if first.error is not None:
            raise first.error from report
        raise report

    def begin(
        self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, group_timeout: float | None = 30.0
    ) -> Call:
        """`function(rank, world, *args)` on each rank, in a process of its own. `group_timeout`: of its process group, in
        seconds; None: it makes its own."""
        name = f"{function.__module__}:{function.__qualname__}"
        self.port += 1  # the port of the call before may still be in use
        numbers = []
        for rank in range(self.world):
            host, local = divmod(rank, self.ranks)
            told = {**self.environment(host, local), **(env or {})}
            numbers.append(self.hosts[host].start("run", local, name, dumps(args), told, group_timeout, list(sys.path)))
        return Call(self, numbers)

    def execute(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, slot: int = 0, folder: str = "."
    ) -> Program:
        """A program on a host, in place of the rank `slot` there, in that folder."""
        told = {**self.environment(host, slot), "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
        number = self.hosts[host].start("execute", slot, list(command), told, os.path.abspath(folder))
        return Program(self.hosts[host], slot, number)

    def environment(self, host: int, local: int) -> dict[str, str]:
        """What a launcher tells a rank."""
        return {
            "RANK": str(host * self.ranks + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": name_of(0), "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "ACCELERATOR": "cpu",
        }  # fmt: skip

    @property
    def namespaces(self) -> list[str]:
        """The networks of all hosts and of what joins them, as the kernel names them."""
        return [os.readlink(f"/proc/{pid}/ns/net") for pid in (self._switch_pid, *(host.pid for host in self.hosts))]

    def close(self) -> None:
        for host in self.hosts:
            host.end()
        self._switch.kill()


class Call:
    """A function that runs on all ranks of all hosts."""

    def __init__(self, net: Hosts, numbers: Sequence[int]) -> None:
        self._net, self._numbers = net, numbers
        self._begun = time.monotonic()
        self._found: dict[int, Outcome] = {}
        self._at: dict[int, str] = {}

    def wait_for(self, place: str, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> Call:
        """Until these ranks, or all, have come to `reached(place)`, where they wait for `go_on`."""
        wanted = set(range(self._net.world) if ranks is None else ranks)
        deadline = time.monotonic() + timeout
        while {rank for rank, at in self._at.items() if at == place} < wanted:
            self._look(deadline)
            if ended := wanted & self._found.keys():
                raise RanksFailed(describe([self._found[rank] for rank in ended]), list(self._found.values()))
            assert time.monotonic() < deadline, f"ranks {wanted - self._at.keys()} have not come to {place!r}"
        return self

    def go_on(self, ranks: Sequence[int] | None = None) -> Call:
        for rank in list(self._at) if ranks is None else ranks:
            self._at.pop(rank)
            self._line(rank).send("go on")
        return self

    def outcomes(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """What these ranks did, or all; a rank of a host that was killed is "killed"."""
        wanted = list(range(self._net.world) if ranks is None else ranks)
        deadline = time.monotonic() + timeout
        while not self._found.keys() >= set(wanted) and time.monotonic() < deadline:
            self._look(deadline)
        ends_by = time.monotonic() + END_S
        for rank in wanted:
            if rank not in self._found:
                self._found[rank] = Outcome(rank, kind="hung", text=self._stacks(rank), seconds=timeout)
            while (still := self._ends(rank)) and time.monotonic() < ends_by:
                time.sleep(_LOOK_S)
            if still:
                self._found[rank].kind, self._found[rank].text = "did not end", self._stacks(rank)
            self._found[rank].output = self._host(rank).output(rank % self._net.ranks)
        return [self._found[rank] for rank in wanted]

    def _ends(self, rank: int) -> bool:
        """Whether its process is on its way to its end."""
        has_ended = self._host(rank).ended(self._numbers[rank]) is not None
        return not (has_ended or self._host(rank).is_killed or self._found[rank].kind == "hung")

    def _host(self, rank: int) -> _Host:
        return self._net.hosts[rank // self._net.ranks]

    def _line(self, rank: int) -> Any:
        return self._host(rank).lines[rank % self._net.ranks]

    def _look(self, deadline: float) -> None:
        lines = {self._line(rank): rank for rank in range(self._net.world) if rank not in self._found}
        ready = multiprocessing.connection.wait(list(lines), max(0.0, min(0.2, deadline - time.monotonic())))
        for line in ready:
            rank = lines[line]  # type: ignore[index]
            try:
                what, *told = line.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._found[rank] = self._death(rank)
            else:
                if what == "reached":
                    self._at[rank] = told[0]
                else:
                    self._found[rank] = _outcome(rank, (what, *told), time.monotonic() - self._begun)
        for line, rank in lines.items():
            has_ended = self._host(rank).ended(self._numbers[rank]) is not None or self._host(rank).is_killed
            if has_ended and rank not in self._found and not line.poll():
                self._found[rank] = self._death(rank)

    def _death(self, rank: int) -> Outcome:
        host, seconds = self._host(rank), time.monotonic() - self._begun
        kind = "killed" if host.is_killed else "died"
        return Outcome(rank, kind=kind, text=f"exit status {host.ended(self._numbers[rank])}", seconds=seconds)

    def _stacks(self, rank: int) -> str:
        self._host(rank).process.send(("signal", self._numbers[rank], signal.SIGUSR1))
        time.sleep(0.5)
        return "still running when time was up; its output ends with its stacks"


class Program:
    """One that runs on a host."""

    def __init__(self, host: _Host, slot: int, number: int) -> None:
        self._host, self._slot, self._number = host, slot, number

    def wait(self, timeout: float = 60.0) -> int | None:
        """Its exit status; None where it still runs then."""
        deadline = time.monotonic() + timeout
        while (code := self._host.ended(self._number)) is None and time.monotonic() < deadline and not self._host.is_killed:
            time.sleep(_LOOK_S)
        return code

    @property
    def output(self) -> str:
        return self._host.output(self._slot)


def _outcome(rank: int, message: tuple[str, bytes | None, str], seconds: float) -> Outcome:
    kind, payload, text = message
    if kind == "returned":
        assert payload is not None
        return Outcome(rank, value=pickle.loads(payload), seconds=seconds)
    error: BaseException = RuntimeError(text)
    with contextlib.suppress(Exception):
        error = pickle.loads(payload or b"")
    return Outcome(rank, error=error, kind=kind, text=text, seconds=seconds)


class _Process:
    """A child of the fork server."""

    def __init__(self, context: Any, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.connection, child = multiprocessing.Pipe()
        self._process = context.Process(target=target, args=(child, *args))
        self._process.start()
        child.close()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        assert self.connection.poll(60.0), "a host does not start"
        return self.connection.recv()

    def join(self) -> None:
        self._process.join(10.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()


class _Host:
    """One, as the test sees it."""

    def __init__(self, context: Any, number: int, ranks: int) -> None:
        self.pid = 0
        self.is_killed = False
        pipes = [multiprocessing.Pipe() for _ in range(ranks)]
        self.lines = [ours for ours, _ in pipes]  # by rank: the pipe to it
        self._outputs = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - closed with this object
        self._num_started, self._codes = 0, dict[int, int]()
        theirs = [line for _, line in pipes]
        self.process = _Process(context, _host, (number, theirs, [DupFd(file.fileno()) for file in self._outputs]))
        for line in theirs:
            line.close()

    def end(self) -> None:
        """The process outside waits for the first one inside, and with that all others have ended."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.join()
        self.process.kill()

    def start(self, what: str, slot: int, *rest: Any) -> int:
        """A process in that slot; its number."""
        self._num_started += 1
        self.process.send((what, self._num_started, slot, *rest))
        return self._num_started

    def ended(self, number: int) -> int | None:
        """The exit status of a process that has ended."""
        with contextlib.suppress(EOFError, OSError):
            while self.process.connection.poll():
                ended, code = self.process.connection.recv()
                self._codes[ended] = code
        return self._codes.get(number)

    def output(self, slot: int) -> str:
        file = self._outputs[slot]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _processes_in(space: str) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == space:
                    yield int(name)


def _in_net(pid: int, *command: str, given: str = "") -> str:
    """What a program prints that runs with the network of a process."""
    done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], input=given, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(command)} {given}: {done.stderr}"
    return done.stdout


# In the hosts ---------------------------------------------------------------------------------------------------------------

_line: Any = None  # the connection from this rank to the test
_libc = ctypes.CDLL(None, use_errno=True)


def reached(place: str) -> None:
    """On a rank: tells the test, and waits until it lets this rank go on."""
    _line.send(("reached", place))
    _line.recv()


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def _wait_for_end_of_test(*others: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel, *others])


def _switch(connection: Any) -> None:
    """Has the bridge."""
    _unshare(_NEW_NET)
    connection.send(os.getpid())
    _wait_for_end_of_test()


def _host(connection: Any, number: int, lines: Sequence[Any], outputs: Sequence[Any]) -> None:
    _unshare(_NEW_NET | _NEW_MOUNTS | _NEW_IPC | _NEW_NAMES | _NEW_PIDS)
    descriptors = [output.detach() for output in outputs]
    first = os.fork()
    if first:
        connection.send(first)
        connection.close()
        _wait_for_end_of_test(os.pidfd_open(first))
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os._exit(0)
    try:
        _First(number, connection, lines, descriptors).serve()
    except EOFError:  # the test has ended
        pass
    except BaseException:  # noqa: BLE001 - also in a child that could not become a program, whose output has it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


class _First:
    """The first process of a host, which starts all others; when it ends, they end."""

    def __init__(self, number: int, connection: Any, lines: Sequence[Any], outputs: Sequence[int]) -> None:
        _libc.prctl(_SET_SIGNAL_AT_PARENTS_END, signal.SIGKILL)
        socket.sethostname(name_of(number))
        script = "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm"
        subprocess.run(["sh", "-c", script], check=True)
        with open("/dev/shm/hosts", "w") as file:
            file.write("127.0.0.1 localhost\n" + "".join(f"{address_of(host)} {name_of(host)}\n" for host in range(16)))
        subprocess.run(["mount", "--bind", "/dev/shm/hosts", "/etc/hosts"], check=True)
        self._connection, self._lines, self._outputs = connection, lines, outputs
        self._numbers: dict[int, int] = {}  # by process

    def serve(self) -> None:
        while True:
            if self._connection.poll(_LOOK_S):
                what, number, *rest = self._connection.recv()
                if what == "signal":
                    for pid in [pid for pid, started in self._numbers.items() if started == number]:
                        os.kill(pid, rest[0])
                else:
                    self._numbers[self._start(what, *rest)] = number
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] in self._numbers:
                        self._connection.send((self._numbers.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])))

    def _start(self, what: str, slot: int, *rest: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.dup2(self._outputs[slot], 1)
        os.dup2(self._outputs[slot], 2)
        if what == "execute":
            os.chdir(rest[2])
            os.execvpe(rest[0][0], rest[0], {**os.environ, **rest[1]})
        _run(self._lines[slot], *rest)
        raise AssertionError


def _run(line: Any, name: str, payload: bytes, env: Mapping[str, str], group_timeout: float | None, path: list[str]) -> None:
    global _line
    _line = line
    code = 0
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        sys.path[:] = path
        os.environ.update(env)
        line.send(_called(name, payload, group_timeout))
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the test reads it in the output
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def _called(name: str, payload: bytes, group_timeout: float | None) -> tuple[str, bytes | None, str]:
    import datetime

    import torch

    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if group_timeout is not None:
            torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=group_timeout))
        module, qualname = name.split(":")
        function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        value = function(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *pickle.loads(payload))  # type: ignore[operator]
        return "returned", dumps(value), ""
    except BaseException as error:  # noqa: BLE001 - a test's SystemExit is an outcome like any other
        sys.last_value = error  # the interpreter sets it when it ends by an error
        text = traceback.format_exc()
        with contextlib.suppress(Exception):
            return type(error).__name__, pickle.dumps(error), text
        return type(error).__name__, None, text
