"""One training on several hosts beside its peers: a GPT of `peers.py` on hosts that are namespaces of this machine.

    python benchmarks/hosts.py                              links of 1 and of 10 Gbit/s, two hosts with a rank each
    python benchmarks/hosts.py --deepspeed PYTHON           and DeepSpeed, in an environment that has it
    python benchmarks/hosts.py --plot FILE.svg --gbit 1     and what link and processor do in a step of rank 0
    python benchmarks/hosts.py --ranks 2 --systems ours-2 ours-2-host fsdp2 fsdp2-host
                                                            states in shares of all ranks, or of those of a host

It takes root on Linux. Each system runs in fresh processes, one after another in each round. *step* is the median over
rounds of the median step, which is as long as the slowest rank's; *to bare* is what it takes of forward and backward alone,
*to bound* of that plus what a rank must send of gradients and weights at the link's speed. *wire* is what the busiest host
sends in a step, read from its interface: headers and acknowledgements are in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from peer_models import SIZES, build  # noqa: E402
from peer_plot import steps  # noqa: E402

from tests import hosts  # noqa: E402

SYSTEMS = ("bare", "ddp", "fsdp2", "ours-1", "ours-2")
THEIRS = ("deepspeed-1", "deepspeed-2")
LIMIT_S = 600.0


def run(net: hosts.Hosts, system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one system once."""
    python = options.deepspeed if system in THEIRS else sys.executable
    net.port += 1
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps({**vars(options), "system": system, "result": folder, "plot": None, "watch": bool(options.plot)})
        env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        command = [python, str(HERE / "peer_systems.py"), given]
        programs = [net.execute(rank // net.ranks, command, env, rank % net.ranks) for rank in range(net.world)]
        codes = [program.wait(LIMIT_S) for program in programs]
        if any(codes):
            raise SystemExit(f"{system} ended with {codes}: {programs[0].output[-2000:]}")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(net.world)]
    return {
        "step": statistics.median(map(max, zip(*(each["seconds"] for each in found), strict=True))),
        "wire": max(each["sent_bytes"] for each in found),
        "loss": found[0]["losses"][-1],
        "samples": found[0]["samples"],
        "marks": found[0]["marks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter of an environment that has DeepSpeed")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--gbit", nargs="*", type=float, default=[1.0, 10.0], help="the links' speeds")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--size", choices=SIZES, default="29M")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed ones of each round")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--our-bucket", type=int, help="bytes; the default of zero.shard otherwise")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="of the first of the speeds")
    options = parser.parse_args()
    if reason := hosts.reason():
        raise SystemExit(f"Cannot start hosts: {reason}. Run this as root on Linux.")
    fixed = {"model": "gpt", "batch": 1, "accumulation": 1, "threads": 1, "kernels": "auto"}
    for name, value in {**fixed, "their_bucket": 5_000_000, "world": options.hosts * options.ranks}.items():
        setattr(options, name, value)
    numel = sum(param.numel() for param in build(options).parameters())
    # Two collectives, in each of which a rank sends what the others need of it: a reduce-scatter or half an all-reduce, and a
    # gather.
    must = 2 * numel * {"bf16": 2, "fp32": 4}[options.dtype] * (options.world - 1) / options.world
    print(f"{numel / 1e6:.1f} M parameters, {options.dtype}, {options.hosts} hosts of {options.ranks} rank(s)")
    for gbit in options.gbit:
        systems = [*options.systems, *(THEIRS if options.deepspeed else ())]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        with hosts.started(options.hosts, options.ranks, bits_per_s=gbit * 1e9) as net:
            for _ in range(options.rounds):
                for name in systems:
                    found[name].append(run(net, name, options))
        _print(gbit, found, must)
        if options.plot and gbit == options.gbit[0] and set(found) > {"bare"}:
            title = f"A step of rank 0: {numel / 1e6:.1f} M parameters, {options.dtype}, {options.hosts} hosts, {gbit:g} Gbit/s"
            watched = {name: (runs[-1]["samples"], runs[-1]["marks"]) for name, runs in found.items() if name != "bare"}
            options.plot.write_text(steps(title, watched, gbit), encoding="utf-8")


def _print(gbit: float, found: dict[str, list[dict[str, Any]]], must: float) -> None:
    rows = {name: statistics.median(each["step"] for each in runs) for name, runs in found.items()}
    bare = rows.get("bare", 0.0)
    bound = bare + must * 8 / (gbit * 1e9)
    print(f"{gbit:g} Gbit/s: must {must / 2**20:.1f} MiB, bound {bound * 1e3:.0f} ms")
    print(f"{'':14}{'step ms':>9}{'to bare':>9}{'to bound':>9}{'wire MiB':>10}{'last loss':>11}")
    for name, step in rows.items():
        wire = statistics.median(each["wire"] for each in found[name])
        ratios = f"{step / bare if bare else 0:9.2f}{step / bound:9.2f}"
        print(f"{name:14}{step * 1e3:9.0f}{ratios}{wire / 2**20:10.1f}{found[name][-1]['loss']:11.4f}", flush=True)


if __name__ == "__main__":
    main()
