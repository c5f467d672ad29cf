"""One training beside its peers: the same model, data and optimizer through plain torch, DDP, FSDP2, DeepSpeed and through us.

    python benchmarks/peers.py                              what is installed here
    python benchmarks/peers.py --deepspeed PYTHON           and DeepSpeed, in an environment that has it (ci/setup --peers)
    python benchmarks/peers.py --world 4 --accumulation 4 --json out.json --plot out.svg
    python benchmarks/peers.py --systems bare fsdp2-3 ours-3 --warm-up 8 --compile

Rounds go over all systems in turn, each in fresh processes, a rank a process, with its fastest flags, and nothing is left in
shared memory from one to the next. *step* is the median over rounds of the median step, a step being as long as the slowest
rank's; *to bare* is what it takes of forward and backward alone, *to peer* of the fastest peer that also keeps fp32 masters.
*peak* is what is resident, and of memory that ranks share each one's part; *to plan* is what that is of the prediction of
`zero plan` and of what forward and backward alone need beside their own weights and gradients together; *wire* is what a rank
receives through sockets in a step. The losses must agree; a difference is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_models import SIZES
from peer_plot import bars

HERE = Path(__file__).parent
SHARED = Path("/dev/shm")
THEIR_FILES = ("deepspeed_", "torch_")  # the beginnings of the names of their files there
PEERS = ("bare", "ddp", "ddp-zero", "fsdp2", "fsdp2-3")
THEIRS = ("deepspeed-1", "deepspeed-2", "deepspeed-2-offload", "deepspeed-3")
OURS = ("ours-0", "ours-1", "ours-2", "ours-3", "ours-3-regions", "ours-2-offload", "ours-1-gloo", "ours-2-gloo", "ours-3-gloo")
WITHOUT_MASTERS = ("bare", "ddp", "ddp-zero")
# Of the first loss. Systems round at other places. Those without fp32 masters lose what is smaller than a weight's last bit,
# and learn the slower the longer it goes: after 20 steps of the GPT by 0.06.
TOLERANCE, TOLERANCE_WITHOUT_MASTERS = 0.01, 0.1
LIMIT_S = 600

Result = dict[str, Any]


def run(system: str, options: argparse.Namespace) -> Result:
    """Returns what the ranks of one system found, put together."""
    python = options.deepspeed if system in THEIRS else sys.executable
    found, left = found_by_ranks([python, str(HERE / "peer_systems.py")], system, options, options.threads)
    steps = list(map(max, zip(*(each["seconds"] for each in found), strict=True)))
    return {
        "step": statistics.median(steps),
        "steps": steps,
        "processor": statistics.median(map(max, zip(*(each["processor_seconds"] for each in found), strict=True))),
        "peak_bytes": max(each["peak_bytes"] for each in found),
        "predicted_bytes": max(each["predicted_bytes"] for each in found),
        "received_bytes": max(each["received_bytes"] for each in found),
        "losses": found[0]["losses"],
        "num_params": found[0]["num_params"],
        "torch": found[0]["torch"],
        "left_bytes": left,
    }


def found_by_ranks(command: list[str], system: str, options: argparse.Namespace, threads: int) -> tuple[list[Result], int]:
    """Returns what each rank of a system wrote, whose program gets all options as JSON, and the bytes left in shared memory."""
    before = _shared_files()
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps({**vars(options), "system": system, "result": folder})
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(options.world),
            "LOCAL_WORLD_SIZE": str(options.world), "OMP_NUM_THREADS": str(threads), "ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parent),
        }  # fmt: skip
        output = Path(folder, "output")
        with output.open("w") as words:
            ranks = [
                subprocess.Popen(
                    [*command, given], stdout=words, stderr=subprocess.STDOUT,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(options.world)
            ]  # fmt: skip
            try:
                codes = [rank.wait(LIMIT_S) for rank in ranks]
            except subprocess.TimeoutExpired:
                codes = [-1]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        left = _clean(before)
        if any(codes):
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"{system} was asked to train on {options.world} ranks, but ended with {codes}. It said:\n{tail}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.world)], left


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _clean(before: set[Path]) -> int:
    """Takes away what the last system left in shared memory, and says how many bytes that were."""
    left = 0
    for path in _shared_files() - before:
        left += path.stat().st_blocks * 512
        path.unlink()
    return left


def _shared_files() -> set[Path]:
    return {path for path in SHARED.iterdir() if path.name.startswith(THEIR_FILES)}


def check(found: dict[str, list[Result]]) -> list[str]:
    """Returns what disagrees: losses of two systems, or of two rounds of one system."""
    wrong = []
    reference = next((runs[0]["losses"] for name, runs in found.items() if name.startswith("ours")), None)
    for name, runs in found.items():
        if name == "bare" or reference is None:  # bare computing never steps
            continue
        limit = TOLERANCE_WITHOUT_MASTERS if name in WITHOUT_MASTERS else TOLERANCE
        apart = max(abs(a - b) / reference[0] for each in runs for a, b in zip(each["losses"], reference, strict=True))
        if not apart <= limit:
            wrong.append(f"{name}: its losses are up to {apart:.4f} of the first one away from ours, and {limit} is allowed")
    return wrong


def summary(found: dict[str, list[Result]]) -> dict[str, Result]:
    """A row a system: medians over its rounds, and what they are of others'; ratios are of one round, so that what the machine
    did meanwhile met both."""
    rows: dict[str, Result] = {}
    masters = [name for name in found if name not in (*WITHOUT_MASTERS, *OURS)]
    beside = statistics.median(each["peak_bytes"] - each["predicted_bytes"] for each in found["bare"]) if "bare" in found else 0
    for name, runs in found.items():
        bare = found.get("bare", [])
        best = [min(found[peer][number]["step"] for peer in masters) for number in range(len(runs))] if masters else []
        rows[name] = {
            "step": statistics.median(each["step"] for each in runs),
            "to_bare": _ratio(runs, [each["step"] for each in bare]),
            "to_peer": _ratio(runs, best),
            "to": {other: _ratio(runs, [each["step"] for each in theirs]) for other, theirs in found.items() if other != name},
            "peak_bytes": (peak := statistics.median(each["peak_bytes"] for each in runs)),
            "to_predicted": peak / (runs[0]["predicted_bytes"] + beside) if name in OURS and beside else None,
            "received_bytes": statistics.median(each["received_bytes"] for each in runs),
            "left_bytes": max(each["left_bytes"] for each in runs),
            "last_loss": runs[-1]["losses"][-1],
        }
    return rows


def _ratio(runs: list[Result], others: list[float]) -> float | None:
    return statistics.median(each["step"] / other for each, other in zip(runs, others, strict=True)) if others else None


def table(rows: dict[str, Result]) -> str:
    lines = [
        f"{'':20}{'step ms':>9}{'to bare':>9}{'to peer':>9}{'peak MiB':>10}{'to plan':>9}{'wire MiB':>10}{'last loss':>11}"
    ]
    for name, row in rows.items():
        to_bare, to_peer, to_plan = (
            f"{row[key]:9.2f}" if row[key] is not None else f"{'':9}" for key in ("to_bare", "to_peer", "to_predicted")
        )
        peak, wire = (f"{row[key] / 2**20:10.1f}" for key in ("peak_bytes", "received_bytes"))
        left = f"   left {row['left_bytes'] / 2**20:.0f} MiB in {SHARED}" if row["left_bytes"] else ""
        lines.append(f"{name:20}{row['step'] * 1e3:9.1f}{to_bare}{to_peer}{peak}{to_plan}{wire}{row['last_loss']:11.4f}{left}")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--systems", nargs="*", help=f"some of {', '.join((*PEERS, *THEIRS, *OURS))}; default: all there are")
    parser.add_argument("--model", choices=("gpt", "small", "huge"), default="gpt", help="many small parameters, a huge one")
    parser.add_argument("--size", choices=SIZES, default="29M", help="parameters of the GPT")
    parser.add_argument("--count", type=int, default=3000, help="parameters of the model of small ones")
    parser.add_argument("--numel", type=int, default=100, help="elements of each; the huge one has as many as all of them")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="timed ones of each round")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--kernels", choices=("auto", "torch", "fused", "compiled"), default="auto", help="ours")
    parser.add_argument("--compile", action="store_true", help="each block of the GPT, by inductor")
    parser.add_argument("--our-bucket", type=int, metavar="BYTES", help="default: what zero.shard takes")
    parser.add_argument("--their-bucket", type=int, metavar="ELEMENTS", default=5_000_000)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="an SVG")
    return parser.parse_args()


def main() -> int:
    options = _options()
    there = (*PEERS, *(THEIRS if options.deepspeed else ()), *OURS)
    systems = options.systems or there
    unknown = [name for name in systems if name not in there]
    if unknown:
        print(f"Cannot run {', '.join(unknown)}: there is {', '.join(there)}. (DeepSpeed's need --deepspeed PYTHON.)",
              file=sys.stderr)  # fmt: skip
        return 2
    if options.deepspeed and shutil.which(options.deepspeed) is None:
        print(f"Cannot use --deepspeed {options.deepspeed}: nothing can be run there. Give a python.", file=sys.stderr)
        return 2
    found: dict[str, list[Result]] = {name: [] for name in systems}
    for number in range(options.rounds):
        for name in systems:
            found[name].append(run(name, options))
            print(f"round {number + 1} {name}: {found[name][-1]['step'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    rows, wrong = summary(found), check(found)
    first = found[systems[0]][0]
    title = (
        f"{first['num_params'] / 1e6:.1f} M parameters, {options.dtype}, {options.batch} x {options.length} tokens a rank, "
        f"{options.world} ranks of {options.threads} thread(s), accumulation {options.accumulation}, torch {first['torch']}"
        f"{', blocks compiled' if options.compile else ''}"
    )
    print(f"{title}, {options.rounds} rounds of {options.steps} steps\n{table(rows)}")
    for line in wrong:
        print(line, file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": rows, "rounds": found}, indent=1))
    if options.plot:
        Path(options.plot).write_text(bars(title, {name: row["step"] * 1e3 for name, row in rows.items()}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
