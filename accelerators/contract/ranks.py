"""Two ranks on an accelerator's device, in processes of their own, and what each of them found."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelerators import selection
from accelerators.interface import Accelerator
from accelerators.staged.backend import is_staged

WORLD = 2
_LARGE = 3 << 20  # elements: several chunks of the staged group
_LIMIT = datetime.timedelta(seconds=60)
_SHORT_LIMIT = datetime.timedelta(seconds=1)
_END_S = 120.0


class Subject(NamedTuple):
    """A contract class by name, as another process cannot be given the accelerator itself if that is a function."""

    module: str
    file: str
    name: str


class Seen(NamedTuple):
    """What one rank found."""

    by_rank: list[dict[str, Any]]
    failure: str | None


def subject_of(contract: type) -> Subject:
    return Subject(contract.__module__, inspect.getfile(contract), contract.__qualname__)


def make(subject: Any) -> Accelerator:
    """The accelerator of a contract class: it may say a class, a function, an object or a registered name."""
    if isinstance(subject, str):
        subject = selection.get(subject)
    made = subject if isinstance(subject, Accelerator) else subject()
    assert isinstance(made, Accelerator), f"the contract's accelerator is a {type(made).__name__}"
    return made


def usable(subject: Any) -> Accelerator:
    """The same, or skips the test with the reason why it cannot be used. What is registered may not even be made."""
    reasons = [known.reason for known in selection.candidates() if known.name == subject] if isinstance(subject, str) else []
    made = None if any(reasons) else make(subject)
    if (reason := made.unavailable_reason() if made is not None else reasons[0]) is not None:
        assert str(reason).strip(), "unavailable_reason gave an empty text: give the reason, or None if the device works"
        pytest.skip(reason)
    assert made is not None
    return made


def why_not(it: Accelerator) -> str | None:
    """Why two ranks cannot meet here: backends of devices refuse two ranks on one device."""
    if not dist.is_available():
        return "torch is built without torch.distributed"
    backend = it.communication_backend
    may_share = backend == "gloo" or is_staged(backend) or not dist.is_backend_available(backend)
    if it.device_count() < WORLD and not may_share:
        return f"{backend} needs a device for each of {WORLD} ranks, and there is one"
    return None


@functools.cache  # two ranks meet once for all tests of a contract
def run(subject: Subject) -> Seen:
    """What each rank saw, or why one of them did not end."""
    try:
        return Seen(_run(subject), None)
    except AssertionError as error:
        return Seen([], str(error))


def _run(subject: Subject) -> list[dict[str, Any]]:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=_serve, args=(rank, path, subject, pipe[1]), daemon=True) for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
            stack.callback(_end, process)
        return [_received(rank, pipe[0]) for rank, pipe in enumerate(pipes)]


def _received(rank: int, connection: multiprocessing.connection.Connection) -> dict[str, Any]:
    assert connection.poll(_END_S), f"rank {rank} of {WORLD} did not end within {_END_S:g} s"
    try:
        seen, text = connection.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} of {WORLD} died") from None
    assert text is None, f"rank {rank} of {WORLD} failed:\n{text}"
    results: dict[str, Any] = seen
    return results


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()


def _serve(rank: int, path: str, subject: Subject, connection: Any) -> None:
    try:
        connection.send((_meet(rank, path, make(_contract(subject).accelerator)), None))
    except Exception:  # noqa: BLE001 - whatever it is, the test that waits for this rank shows it
        connection.send((None, traceback.format_exc()))


def _contract(subject: Subject) -> Any:
    if importlib.util.find_spec(subject.module) is None:
        spec = importlib.util.spec_from_file_location(subject.module, subject.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[subject.module] = module
        spec.loader.exec_module(module)
    target: Any = importlib.import_module(subject.module)
    for part in subject.name.split("."):
        target = getattr(target, part)
    return target


def _meet(rank: int, path: str, it: Accelerator) -> dict[str, Any]:
    it.set_index(rank % it.device_count())
    backend, store = it.communication_backend, FileStore(path, WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=_LIMIT)
    seen: dict[str, Any] = {"backend": backend}
    for check in (_sum, _gathered, _exchanged, _ordered):
        seen[check.__name__.strip("_")] = check(rank, it)
    it.synchronize()
    seen["alone"] = _alone(rank, it, store)
    dist.destroy_process_group()
    return seen


def _sum(rank: int, it: Accelerator) -> bool:
    """A sum over the ranks, small and large."""
    matches = []
    for numel in (1, 1000, _LARGE):
        numbers = (torch.arange(numel) % 1000).float()
        x = (numbers + rank).to(it.device())
        dist.all_reduce(x)
        matches.append(torch.equal(x.cpu(), numbers * WORLD + 1))
    return all(matches)


def _gathered(rank: int, it: Accelerator) -> list[float]:
    parts = [torch.empty(1000, device=it.device()) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((1000,), float(rank), device=it.device()))
    x = torch.full((1000,), float(rank), device=it.device())
    dist.broadcast(x, src=WORLD - 1)
    return [part.mean().item() for part in (*parts, x)]


def _exchanged(rank: int, it: Accelerator) -> list[float]:
    received = torch.empty(2 * WORLD, device=it.device())
    dist.all_to_all_single(received, torch.arange(2.0 * WORLD, device=it.device()) + 10 * rank)
    return received.tolist()


def _ordered(rank: int, it: Accelerator) -> float:
    """A collective on what a stream has still to compute, and work on its result, with no wait of the host in between."""
    stream, x = it.new_stream(), torch.ones(512, 512, device=it.device())
    stream.wait_stream(it.current_stream())
    with it.in_stream(stream):
        for _ in range(8):
            x = x @ x / 512
        x = x + rank
    it.current_stream().wait_stream(stream)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return (x * 2).mean().item()


def _alone(rank: int, it: Accelerator, store: Any) -> str | None:
    """Returns the error of a rank whose partner does not come within the group's time limit."""
    group = dist.new_group(list(range(WORLD)), timeout=_SHORT_LIMIT, backend=it.communication_backend)
    if rank:
        store.wait(["the first rank gave up"], _LIMIT)
        return None
    try:
        work = dist.all_reduce(torch.ones(4, device=it.device()), group=group, async_op=True)
        assert work is not None
        work.wait(_LIMIT / 2)
        it.synchronize()
        return None
    except RuntimeError as error:
        return str(error) or type(error).__name__
    finally:
        store.set("the first rank gave up", "1")
