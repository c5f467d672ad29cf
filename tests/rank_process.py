"""The life of one process of the pool in tests.ranks: set up once, then one call after another, left clean after each.

Torch is imported late: a variable that it reads as it is loaded may be set first, and the parent may have no use for it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any


def serve(rank: int, connection: Any, output: str, stacks: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, args=(os.path.dirname(output),), daemon=True).start()
    # What C++ prints goes to the same place, so that the parent can quote it.
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    # A plain descriptor that is never closed, as the handler runs at the signal, whatever the interpreter waits for.
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND), all_threads=True)

    try:
        rank_process = _RankProcess(rank)
    except Exception:  # noqa: BLE001 - whatever it is, the parent says it
        connection.send(traceback.format_exc())
        return
    connection.send(rank_process.store_port)
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if message[0] == "exit":
            return
        if message[0] == "end":
            if message[1]:
                atexit._run_exitfuncs()
            return
        if message[0] == "meet":
            rank_process.meet(message[1])
        elif message[0] == "call":
            connection.send(rank_process.call(*message[1:]))
            sys.stdout.flush()
            sys.stderr.flush()
        elif message[0] == "clean":
            connection.send(rank_process.clean())
            _end_connections()


def dumps(value: Any) -> bytes:
    """Plain pickle, by which whoever loads it has copies; multiprocessing's own would share the memory of tensors."""
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Tensors by their bytes: torch writes an archive for each, which takes a small one twenty times as long."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided or not value.is_contiguous():
            return NotImplemented
        is_plain = value.is_cpu and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
        if not is_plain or value.numel() == 0 or value.__dict__:
            return NotImplemented
        content = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, tuple(value.shape), value.stride())


def _tensor(content: bytes, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(shape, stride)


def _forget_meshes() -> None:
    """DTensors keep plans by meshes that are equal, and with them the names of groups that are gone: others get these names.
    What is known of a mesh keeps its groups, and each of their threads looks a hundred times a second whether it has to do."""
    if "torch.distributed.tensor._redistribute" in sys.modules:
        redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
        redistribute._gen_transform_infos.cache_clear()
        debug = importlib.import_module("torch.distributed.tensor.debug")
        for module, name in ((redistribute, "clear_redistribute_planner_cache"), (debug, "_clear_sharding_prop_cache")):
            getattr(module, name, lambda: None)()  # torch 2.8 has neither
    if (collectives := sys.modules.get("torch.distributed.tensor._collective_utils")) is not None:
        collectives.MeshTopoInfo.build_from_mesh.cache_clear()
    if (world := sys.modules.get("zero.comm.torch_world")) is not None:
        world.free_groups.end_process()


def _end_connections() -> None:
    """Ends the thread that looks a hundred times a second after this process's connections, as the next call may come late or
    never. The parent does not wait for it."""
    if (forked_with := sys.modules.get("tests.forked_with")) is not None:
        forked_with.device_of.cache_clear()


def _end_with_parent(folder: str) -> None:
    """A parent that was killed can neither end its ranks nor clear away their files."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


class _RankProcess:
    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self._rank = rank
        self._store: Any = None
        self.store_port = 0
        if rank == 0:
            self._store = torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            self.store_port = self._store.port
        torch.set_num_threads(1)
        self._environment = dict(os.environ)
        # What importing torch made will never be garbage. Without this, a collection after each call takes a millisecond.
        gc.freeze()

    def meet(self, port: int) -> None:
        if self._store is None:
            self._store = self._torch.distributed.TCPStore("127.0.0.1", port, None, is_master=False)

    def call(
        self, name: str, payload: bytes, world: int, number: int, group_timeout: float | None, path: list[str]
    ) -> tuple[str, bytes | None, str]:
        try:
            sys.path[:] = path
            if group_timeout is not None:
                self._make_group(world, number, group_timeout)
            module, qualname = name.split(":")
            function = importlib.import_module(module)
            for part in qualname.split("."):
                function = getattr(function, part)
            self._torch.manual_seed(0)
            return "returned", dumps(function(self._rank, world, *pickle.loads(payload))), ""
        except BaseException as error:  # noqa: BLE001 - a test's SystemExit or skip is an outcome like any other
            text = traceback.format_exc()
            with contextlib.suppress(Exception):
                return type(error).__name__, pickle.dumps(error), text
            return type(error).__name__, None, text

    def _make_group(self, world: int, number: int, timeout: float) -> None:
        distributed = self._torch.distributed
        store = distributed.PrefixStore(f"call {number}", self._store)
        distributed.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=world, timeout=timedelta(seconds=timeout)
        )

    def clean(self) -> str | None:
        """Take away what a test may have left. Says what it could not, and then this process is not used again."""
        torch = self._torch
        try:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
                _forget_meshes()
            os.environ.clear()
            os.environ.update(self._environment)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            torch.set_num_threads(1)
            if torch.are_deterministic_algorithms_enabled():  # asked first, as switching it imports all of inductor
                torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
            simulated = sys.modules.get("accelerators_sim.start")
            # It may have been asked for its capabilities while a test had spoilt that.
            if simulated is not None and simulated.is_up():
                sys.modules["accelerators"].get("sim").forget_answers()
                sys.modules["accelerators_sim"].configure(order=os.environ.get("SIM_ORDER", "late"))
            gc.collect()
            gc.freeze()  # somebody holds what is left, which is mostly modules
        except Exception:  # noqa: BLE001 - whatever it is, the parent says it
            return traceback.format_exc()
        return None
