"""Times loading and writing a large model, with a rank's peak memory meanwhile, beside plain reading and writing.

    python benchmarks/loading.py --folder DIR

A Llama in bf16 of the given size lies in safetensors files. Each rank runs in a cgroup of its own with a limit on memory, where
the system lets this program make one. Timed are: the files read once, in large pieces, by one process; `from_pretrained` and
`zero.shard` at stage 3, until the last rank has its shares; as many bytes written once, with a sync; and `save_pretrained`.
Before each reading the system is told to forget the files. Peaks are beyond what a rank had after its imports, of its own
memory and its shares; that of others which it sees is theirs. By default the model is frozen but for one norm, as under
adapters; with --trained all of it has masters in fp32 too.

With --deepspeed, the interpreter of an environment that has DeepSpeed and transformers, plain `from_pretrained` under
`HfDeepSpeedConfig` with ZeRO-3 reads the same files on as many ranks, without a limit on memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

PIECE = 8 * 2**20
GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # version 1, version 2


def config_of(num_bytes: int) -> Any:
    from transformers import LlamaConfig

    width, vocab = (2048, 32000) if num_bytes >= GIB // 2 else (256, 2000)
    inside = 11 * width // 4
    layers = (num_bytes // 2 - 2 * vocab * width) // (4 * width * width + 3 * width * inside)
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inside, num_hidden_layers=max(1, layers), dtype="bfloat16",
        num_attention_heads=width // 64, num_key_value_heads=width // 64, tie_word_embeddings=False,
    )  # fmt: skip


def write_model(folder: Path, num_bytes: int, shard_bytes: int) -> None:
    """Writes a Llama of about this size to safetensors files, without having all of it in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from zero.checkpoint.progress import ProgressBar
    from zero.checkpoint.weight_files import write_files
    from zero.memory.values import Held

    config = config_of(num_bytes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: (torch.bfloat16, tuple(value.shape)) for name, value in model.state_dict().items()}
    line = torch.randn(max(value.numel() for value in model.parameters())).mul_(0.02).bfloat16()

    def values_of(name: str) -> Held:
        return Held(line[: torch.Size(sizes[name][1]).numel()].view(sizes[name][1]))

    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    write_files(folder, "model", sizes, values_of, {"format": "pt"}, ProgressBar("", 0), shard_bytes)


def forget(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_once(folder: Path) -> float:
    memory, begin = memoryview(bytearray(PIECE)), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - begin


def write_once(path: Path, num_bytes: int) -> float:
    memory, begin = memoryview(os.urandom(PIECE)), time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, num_bytes, PIECE):
            file.write(memory[: min(PIECE, num_bytes - start)])
        os.fsync(file.fileno())
    took = time.perf_counter() - begin
    path.unlink()
    return took


def status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Own:
    """The highest growth of this process's private memory since the object was made, sampled by a thread."""

    def __init__(self) -> None:
        self._before = self._most = status("RssAnon")
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._most = max(self._most, status("RssAnon"))
            time.sleep(0.02)

    def peak(self) -> int:
        return self._most - self._before


def run(options: argparse.Namespace) -> None:
    """Loads and writes as one rank, and prints its seconds and peak bytes as a line of JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    import zero
    from zero.integrations.transformers import from_pretrained, save_pretrained

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    # Imports what the first sharded optimizer brings in.
    zero.shard(torch.nn.Linear(2, 2), partial(torch.optim.SGD, lr=0.1), stage=3).close()
    torch.distributed.barrier()
    reset_peak()
    before, begin = status("VmRSS"), time.perf_counter()
    model = from_pretrained(AutoModelForCausalLM, options.model, stage=3)
    if not options.trained:
        model.requires_grad_(False).model.norm.requires_grad_(True)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = zero.shard(model, torch.optim.SGD(trained, lr=0.1), stage=3)
    torch.distributed.barrier()
    found = {"read_s": time.perf_counter() - begin, "read_peak": status("VmHWM") - before}
    own = Own()
    torch.distributed.barrier()
    begin = time.perf_counter()
    save_pretrained(model, options.out, max_shard_size="1GB")
    found |= {"write_s": time.perf_counter() - begin, "write_peak": own.peak()}
    print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    assert not optimizer.skipped_steps
    os._exit(0)  # otherwise the optimizer would close, and make the model plain on all ranks, with all of its memory


def run_deepspeed(options: argparse.Namespace) -> None:
    """Does what `run` does with transformers and DeepSpeed's ZeRO-3."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    zero3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    said = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero3}
    kept = HfDeepSpeedConfig(said)  # transformers looks for it while it lives
    torch.distributed.barrier()
    reset_peak()
    before, begin = status("VmRSS"), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    torch.distributed.barrier()
    found = {"read_s": time.perf_counter() - begin, "read_peak": status("VmHWM") - before}
    assert kept.is_zero3() and all(param.ds_tensor.numel() < param.ds_numel for param in model.parameters())
    print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_{os.environ['RANK']}"):
        path.unlink()  # transformers leaves it there
    os._exit(0)


def limited(rank: int, limit: int) -> Path | None:
    """A cgroup with so much memory; None where none can be made."""
    for root in CGROUPS:
        name = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        folder = root / f"zero-loading-{os.getpid()}-{rank}"
        try:
            folder.mkdir()
            (folder / name).write_text(str(limit))
            return folder
        except OSError:
            if folder.is_dir():
                folder.rmdir()
    return None


def join(folder: Path | None) -> None:
    if folder is not None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the model, in bf16")
    parser.add_argument("--limit-gib", type=float, default=1.5, help="of memory for each rank; 0 for none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trained", action="store_true", help="all of the model, with masters in fp32")
    parser.add_argument("--folder", help="a directory on the disk to be measured (default: the temporary one)")
    parser.add_argument("--deepspeed", help="a Python that has DeepSpeed and transformers, to be measured too")
    for name in ("make", "model", "out", "system"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        (run_deepspeed if options.system else run)(options)
        return
    if options.make:
        write_model(Path(options.make), int(options.gib * GIB), GIB)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder, out = Path(place) / "model", Path(place) / "out"
        folder.mkdir()
        make = [sys.executable, __file__, "--make", str(folder), "--gib", str(options.gib)]
        subprocess.run(make, check=True, env=environment())
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        groups = [limited(rank, int(options.limit_gib * GIB)) if options.limit_gib else None for rank in range(options.ranks)]
        held = f"in cgroups of {options.limit_gib} GiB" if all(groups) else "not limited, as no cgroup could be made here"
        print(f"{size:,} bytes, {options.ranks} ranks, {held if options.limit_gib else 'not limited'}")
        try:
            for _ in range(options.rounds):
                measure(options, folder, out, size, groups)
        finally:
            for group in filter(None, groups):
                group.rmdir()


def environment(**more: object) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in more.items()}


def measure(options: argparse.Namespace, folder: Path, out: Path, size: int, groups: list[Path | None]) -> None:
    forget(folder)
    plain_read, plain_write = read_once(folder), write_once(out.with_name("plain"), size)
    command = [sys.executable, __file__, "--model", str(folder), "--out", str(out)] + ["--trained"] * options.trained
    found = on_ranks(command, folder, groups)
    share, mib = size / options.ranks, 2**20
    read_s, write_s = (max(rank[key] for rank in found) for key in ("read_s", "write_s"))
    peak, write_peak = (max(rank[key] for rank in found) / mib for key in ("read_peak", "write_peak"))
    share_mib = share / mib
    print(f"in  {read_s:6.2f} s, {read_s / plain_read:5.2f} of {plain_read:.2f} s to read the files once; "
          f"a rank's peak is its share ({share_mib:.0f} MiB) and {peak - share_mib:.0f} MiB")  # fmt: skip
    print(f"out {write_s:6.2f} s, {write_s / plain_write:5.2f} of {plain_write:.2f} s to write as much once; "
          f"{write_peak:.0f} MiB more than before", flush=True)  # fmt: skip
    if options.deepspeed:
        command = [options.deepspeed, __file__, "--system", "deepspeed", "--model", str(folder)]
        theirs = on_ranks(command, folder, [None] * options.ranks)
        their_s, their_peak = (max(rank[key] for rank in theirs) for key in ("read_s", "read_peak"))
        print(f"in  {their_s:6.2f} s with DeepSpeed, of which ours is {read_s / their_s:.2f}; a rank's peak is its share "
              f"and {their_peak / mib - share_mib:.0f} MiB", flush=True)  # fmt: skip


def on_ranks(command: list[str], folder: Path, groups: list[Path | None]) -> list[dict[str, float]]:
    """Runs the command on ranks, once the system has forgotten the files, and returns what each rank printed."""
    forget(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank, group in enumerate(groups):
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(groups), "LOCAL_SIZE": len(groups)}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        how = {"env": environment(**launch), "stdout": subprocess.PIPE, "text": True, "preexec_fn": partial(join, group)}
        started.append(subprocess.Popen(command, **how))
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"A rank ended with {[process.returncode for process in started]}: -9: out of memory.")
    return [json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{"))) for text in said]


if __name__ == "__main__":
    main()
