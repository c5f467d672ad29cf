"""Programs in processes of their own, forked from a server that has torch: a new interpreter takes two seconds to import it.

    done = programs.python("-m", "zero", "plan", env={...})      # as subprocess.run([sys.executable, ...]), captured as text
    done = programs.with_torch(code, env={...})                  # as `python -c code`, with torch imported and nothing of ours
    found = programs.ranks_with_torch(2, code, env={...})        # as many at once, each with its RANK; `zero` is imported, too

What a process of the first kind has imported is what tests.forked_with lists; the second is for tests of what our packages
import and do as they are imported, and of how an interpreter ends. A test that torch is not imported, or of a variable that
torch reads while it is loaded, starts an interpreter itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Iterator, Mapping
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

# If there is a fork server, one process imports torch, and others are forked from it in some ten milliseconds. That is safe, as
# the server itself never runs an operator and so has no threads.
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() and sys.platform == "linux" else "spawn"

USUAL = "tests.forked_with"  # the module of the server that forks all processes that ask for no other one


def start_context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        context.set_forkserver_preload([USUAL])
    return context


@cache
def _server_with(module: str) -> Any:
    from multiprocessing import forkserver

    server = forkserver.ForkServer() if _shared_at is None else _shared_server(_shared_at)
    server.set_forkserver_preload([module])
    atexit.register(server._stop)  # not public; tests.ranks uses it, too
    return server


_shared_at: str | None = None
_MET_BY = {"_forkserver_address", "_forkserver_authkey"}  # the authkey exists since Python 3.14


@cache
def share_servers() -> str:
    """Returns an address for `use_shared_servers`: that which this process uses, or one at which it says from now on where its
    fork servers are, each of which starts when it is first asked for."""
    if _shared_at is not None:
        return _shared_at
    listener = Listener(family="AF_UNIX")

    def say_where() -> None:
        while True:
            with contextlib.suppress(EOFError, OSError), listener.accept() as asking:  # who asked may be gone
                module = asking.recv()
                if module is None:
                    asking.send(_interpreter_with_torch())
                    continue
                server = _server_with(module)
                server.ensure_running()
                asking.send({name: value for name, value in vars(server).items() if name in _MET_BY})

    threading.Thread(target=say_where, daemon=True).start()
    return str(listener.address)


def use_shared_servers(address: str) -> None:
    """Has what this process starts forked from servers of the one that gave this address, which outlives it."""
    from multiprocessing import forkserver

    global _shared_at
    _shared_at = address
    forkserver.connect_to_new_process = _server_with(USUAL).connect_to_new_process


def _ask(address: str, module: str | None) -> Any:
    """Returns what is needed to reach the fork server with this module, or where the interpreter with torch listens."""
    with Client(address) as asking:
        asking.send(module)
        return asking.recv()


def _shared_server(address: str) -> Any:
    from multiprocessing import forkserver, resource_tracker

    class Shared(forkserver.ForkServer):
        def ensure_running(self) -> None:
            resource_tracker.ensure_running()
            vars(self).update(_ask(address, *self._preload_modules))  # asked each time, as a server that died is started again

    server = Shared()
    read_end, server._forkserver_alive_fd = os.pipe()  # handed on with each request; who started the server ends it by another
    os.close(read_end)
    return server


@contextlib.contextmanager
def forked_with(module: str | None) -> Iterator[None]:
    """Processes that are started inside are forked from the server that has imported this module, or from the usual one."""
    if module is None or START_METHOD != "forkserver":
        yield
        return
    with _forked_by(_server_with(module)):
        yield


@contextlib.contextmanager
def forked_apart() -> Iterator[None]:
    """Processes that are started inside are forked from a server that has no others, and must have ended when it is left."""
    if START_METHOD != "forkserver":
        yield
        return
    from multiprocessing import forkserver

    server = forkserver.ForkServer()
    server.set_forkserver_preload([USUAL])
    try:
        with _forked_by(server):
            yield
    finally:
        server._stop()


@contextlib.contextmanager
def _forked_by(server: Any) -> Iterator[None]:
    from multiprocessing import forkserver

    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


def python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: str | Path | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does and prints, for `-c code`, `-m module` or a file, each with arguments of its own."""
    words = [str(word) for word in arguments]
    environment = dict(os.environ if env is None else env)
    if START_METHOD != "forkserver":
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start_context().Process(
            target=_be_python, args=(words, environment, str(cwd or Path.cwd()), *map(str, written))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(path.read_bytes() for path in written))
        # A file that it never wrote to, because it died before, is empty.
        said = [path.read_text(errors="replace") if path.exists() else "" for path in written]
        return subprocess.CompletedProcess(words, process.exitcode, *said)


# It ends with its input. A fork answers: it waits for one of its own, which goes on below and ends as an interpreter does. An
# alarm ends one that hangs.
_WITH_TORCH = """
import json, os, selectors, signal, socket, sys, tempfile, types
import torch
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.socket(fileno={fd}) as listener, selectors.DefaultSelector() as selector:
    for each in (listener, 0):
        selector.register(each, selectors.EVENT_READ)
    while all(key.fd for key, _ in selector.select()):
        asking, _ = listener.accept()
        if not os.fork():
            break
        asking.close()
    else:
        sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
with asking, asking.makefile("rw") as conversation:
    code, environment, timeout, *written = json.loads(conversation.readline())
    if child := os.fork():
        conversation.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        conversation.flush()
        os._exit(0)
signal.alarm(timeout)
for target, path in enumerate(("/dev/null", *written)):
    os.dup2(os.open(path, os.O_RDONLY if target == 0 else os.O_WRONLY), target)
os.environ.clear()
os.environ.update(environment)
tempfile.tempdir = None
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
"""


@cache
def _interpreter_with_torch() -> str:
    """Returns where the interpreter of `with_torch` listens."""
    if _shared_at is not None:
        return str(_ask(_shared_at, None))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # how many threads there are is decided as torch is loaded
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := os.path.join(tempfile.mkdtemp(prefix="with-torch-"), "socket"))
        listener.listen()
        command = [sys.executable, "-c", _WITH_TORCH.format(fd=listener.fileno())]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    atexit.register(shutil.rmtree, os.path.dirname(address))
    atexit.register(server.communicate)
    return address


def with_torch(code: str, env: Mapping[str, str] | None = None, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """What `python -c code` does and prints, after `import torch`. The code may be indented."""
    code, environment = textwrap.dedent(code), dict(os.environ if env is None else env)
    if START_METHOD != "forkserver":
        command = [sys.executable, "-c", f"import torch\n{code}"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as error:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(_interpreter_with_torch())
            with asking.makefile("rw") as conversation:
                print(json.dumps([code, environment, timeout, out.name, error.name]), file=conversation, flush=True)
                status = int(conversation.read())
        said = [Path(file.name).read_text(errors="replace") for file in (out, error)]
    return subprocess.CompletedProcess(["-c", code], status, *said)


_AS_RANKS = """
import os, signal, sys, warnings
import torch._dynamo, zero.sharding.optimizer
ranks = []
for rank in range({world}):
    ranks.append(os.fork())
    if not ranks[-1]:
        break
else:
    sys.exit(print(*(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in ranks)))
signal.alarm({timeout})
for target in (1, 2):
    os.dup2(os.open(f"{folder}/{{rank}}-{{target}}", os.O_WRONLY | os.O_CREAT), target)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="{world}")
warnings.simplefilter("error")
"""


def ranks_with_torch(
    world: int, code: str, env: Mapping[str, str], timeout: int = 120
) -> list[subprocess.CompletedProcess[str]]:
    """Returns what so many interpreters do that run `python -W error -c code` as ranks, each to its own end."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        prelude = _AS_RANKS.format(world=world, timeout=timeout, folder=folder)
        done = with_torch(prelude + textwrap.dedent(code), env, timeout + 10)
        assert done.returncode == 0, done.stderr
        said = [[Path(folder, f"{rank}-{target}").read_text() for target in (1, 2)] for rank in range(world)]
        statuses = map(int, done.stdout.split())
        return [subprocess.CompletedProcess(["-c", code], end, *texts) for end, texts in zip(statuses, said, strict=True)]


def _be_python(words: list[str], environment: dict[str, str], folder: str, *written: str) -> None:
    for target, path in enumerate(("/dev/null", *written)):
        source = os.open(path, os.O_RDONLY if target == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing gave the server's away
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # Variables that a new interpreter would read from the environment.
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdigit():
        import torch

        torch.set_num_threads(int(threads))
    try:
        kind, rest = words[0], words[1:]
        if kind == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.path.insert(0, folder)
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            main.__file__ = kind
            sys.path.insert(0, str(Path(kind).resolve().parent))
            exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    except Exception:  # noqa: BLE001 - whatever it is, it is told as an interpreter tells it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a fork server's processes end without them
