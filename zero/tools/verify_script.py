"""`python -m zero verify script.py:function` compares sharded training of a model of yours with plain PyTorch, on any ranks.

    def case(rank, num_ranks):  # in proof.py; returns the arguments of zero.verify (zero/tools/verify.py)
        return {"model": ..., "batches": ..., "loss": ..., "optimizer": ..., "config": ...}

    $ python -m zero verify proof.py:case --ranks 2

Each rank calls both. The ranks are processes that are started here; without `--ranks`, those that a launcher started, or one.
torch is imported when the command runs, not for its help.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from accelerators.output import complain
from zero.errors import is_ours
from zero.tools.commands import DONE, IMPOSSIBLE, NO, Subparsers, add_command, code_of, tell

_MOST_RANKS = 1024
_DESCRIPTION = """Trains a model of yours for a few steps twice, sharded and in plain PyTorch.
Says that both are equal, or names the first parameter that differs, and by how much.

The function returns the arguments of zero.verify as a dict: model, batches (this rank's), loss, optimizer, config.
It is called with the rank and the number of ranks if it takes two arguments, else with none."""


def add_verify(subparsers: Subparsers) -> None:
    """Adds `python -m zero verify`."""
    parser = add_command(
        subparsers, "verify", "compare sharded with plain training of a model of yours", _DESCRIPTION, _verify,
        "equal", "different",
    )  # fmt: skip
    parser.add_argument("target", metavar="script.py:function", help="the function that returns the arguments of zero.verify")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks here (default: as a launcher started, or 1)")


def _verify(args: argparse.Namespace) -> int:
    """Compares on the ranks that a launcher started, of which this process is one, or starts them here and waits for them."""
    from torch.multiprocessing.spawn import ProcessException

    launched = args.ranks is None and bool(os.environ.get("RANK"))
    path, name = _target(args.target)
    if args.ranks is not None and args.ranks < 1:
        raise ValueError(f"Cannot verify with --ranks {args.ranks}: it must be at least 1. Give a positive number.")
    if args.ranks is not None and args.ranks > _MOST_RANKS:
        raise ValueError(
            f"Cannot verify with --ranks {args.ranks}: each is a process of this machine. Give {_MOST_RANKS} or fewer."
        )
    try:
        result = _verified_here(path, name, *_place_of_rank()) if launched else _verified_by_ranks(path, name, args.ranks or 1)
    except ProcessException as error:
        text = _words_at_end(str(error))
        complain(text if is_ours(text) else error)  # one of ours says everything without the stack
        return IMPOSSIBLE
    if not launched or _place_of_rank()[0] == 0:
        tell(args.json, result["dict"], result["text"])
    return DONE if result["dict"]["equal"] else NO


def _words_at_end(report: str) -> str:
    """Returns the words of the exception that ended a rank, without its type, from what torch reports of that rank. Of

        -- Process 1 terminated with the following error:
        Traceback (most recent call last):
          ...
        ValueError: Cannot use prove.py:case: there is no such function. Define it at the top of the script.

    it returns the last line from "Cannot" on.
    """
    last_line = report.rstrip().rpartition("\n")[2]
    return last_line.partition(": ")[2]


def _place_of_rank() -> tuple[int, int]:
    """Returns the rank and the number of ranks, as a launcher says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _target(text: str) -> tuple[str, str]:
    """Reads `script.py:function`."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"Cannot use {text!r}: it names no function of a script. Write it like script.py:function.")
    if not Path(path).is_file():
        raise ValueError(f"Cannot use {text!r}: there is no file {path!r}. Give the path of a Python script.")
    return path, name


def _verified_here(path: str, name: str, rank: int, num_ranks: int) -> dict[str, Any]:
    """Returns the result of zero.verify in this process, as text and as a dict."""
    from zero.tools.verify import verify

    sys.path.insert(0, str(Path(path).resolve().parent))  # a script that is started finds its own folder there
    with code_of(path):
        function = runpy.run_path(path, run_name="verified_script").get(name)
    if not callable(function):
        raise ValueError(f"Cannot use {path}:{name}: there is no such function. Define it at the top of the script.")
    with code_of(f"{path}:{name}"):
        arguments = function(rank, num_ranks) if len(inspect.signature(function).parameters) == 2 else function()
    if not isinstance(arguments, dict):
        raise TypeError(
            f"Cannot verify with {name}(): it returned a {type(arguments).__name__}, and zero.verify takes arguments by name. "
            "Return a dict."
        )
    try:
        inspect.signature(verify).bind(**arguments)
    except TypeError as error:
        what = f"what it returned does not fit zero.verify ({error})"
        raise TypeError(f"Cannot verify with {name}(): {what}. Return its arguments by name.") from error
    with code_of(f"{path}:{name}"):
        verification = verify(**arguments)
    return {"text": str(verification), "dict": verification.as_dict()}


def _verified_by_ranks(path: str, name: str, num_ranks: int) -> dict[str, Any]:
    """Compares in as many processes, which torch starts. The answer comes by a file, so that output of the script cannot be
    taken for it."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{rank}.json" for rank in range(num_ranks)]
        given = path, name, num_ranks, _free_port(), answers
        ranks: Any = spawn(_as_rank, given, nprocs=num_ranks, join=False)  # type: ignore[no-untyped-call]
        are_done = False
        while not are_done:
            are_done = ranks.join()  # raises what a rank raised; else returns each time one ends, True after the last
            for process, answer in zip(ranks.processes, answers, strict=True):
                if process.exitcode == 0 and not answer.exists():  # it called exit(0), and the others would wait for it
                    for other in ranks.processes:
                        other.terminate()
                    raise ValueError(f"Cannot use {path}:{name}: it ends the process. Repair it.")
        result: dict[str, Any] = json.loads(answers[0].read_text(encoding="utf-8"))
        return result


def _as_rank(rank: int, path: str, name: str, num_ranks: int, port: int, answers: list[Path]) -> None:
    """Runs in each process that `_verified_by_ranks` started: sets what a launcher would, compares, and writes the answer."""
    os.dup2(2, 1)  # scripts and libraries may print, and stdout is for the answer, which the parent alone prints
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    if num_ranks > 1:
        os.environ.update({variable: str(value) for variable, value in place.items()}, MASTER_ADDR="127.0.0.1")
    # All ranks are on this host, the own name of which may resolve to nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    result = _verified_here(path, name, rank, num_ranks)
    answers[rank].write_text(json.dumps(result), encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
