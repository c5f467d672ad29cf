"""Benchmarks run where what they compare is there, and say so where it is not."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import hosts
from tests.devices import needs_sim

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.full


def run(name, accelerator, *options, limit=200):
    environment = {**os.environ, "ACCELERATOR": accelerator, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, f"benchmarks/{name}.py", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def test_on_the_host_alone_an_offloaded_step_has_nothing_to_be_compared_with():
    found = run("offload_step", "cpu")
    assert found.returncode == 1 and not found.stdout
    assert re.fullmatch(r"Cannot compare .*: .* is the host, .*\. Run it on a machine with another.*", found.stderr.strip())


@needs_sim
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_an_offloaded_step_is_timed_beside_one_on_the_device_and_what_bounds_it(kernels):
    found = run("offload_step", "sim", "--params", "20000", "--rounds", "1", "--kernels", kernels)
    assert found.returncode == 0, found.stderr
    for line in ("plain torch", "ours, on device", f"offloaded, {kernels}", "crossing takes", "memory takes"):
        assert line in found.stdout, found.stdout


@needs_sim
def test_sharding_on_an_accelerator_is_timed_beside_plain_torch_and_its_bytes_are_those_predicted():
    environment = {**os.environ, "ACCELERATOR": "sim", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu.py", "--size", "2M", "--length", "16", "--batch", "1", "--steps", "1"]
    command += ["--rounds", "1", "--ways", "plain", "stage 2"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    [ours] = [line.split() for line in found.stdout.splitlines() if line.startswith("stage 2")]
    states, predicted = map(int, ours[-3:-1])
    assert states == pytest.approx(predicted, rel=0.05), found.stdout


@needs_sim
def test_nine_minutes_on_an_accelerator_are_rehearsed_and_are_a_table_where_they_end_early_too(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text("")
    sizes = ["--sizes", "2M", "10M", "--length", "8", "--batch", "1", "--steps", "1", "--warm-up", "1", "--copied-mib", "1"]
    slowly = [f"{part}=300" for part in ("collectives", "waits", "throughput", "step on the device", "compiled", "offloaded")]
    limits = ["--limit", "profile=0.5", "machine=100", "plan=100", *slowly]  # the limits of a device that does not exist
    found = run("gpu", "sim", "--nine-minutes", str(file), *sizes, *limits, limit=1000)
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert found.stdout.splitlines() == file.read_text().splitlines()
    failed = {(line["part"], line["way"]): line["failed"] for line in lines if "failed" in line}
    assert {part for part, _ in failed} <= {"throughput", "compiled", "profile"}, failed
    assert all(way.startswith(("deepspeed", "fsdp2")) or part == "profile" for part, way in failed), failed
    assert failed["profile", "plain"].startswith("it was not done in")
    assert "deepspeed" in failed["throughput", "deepspeed 2"]
    by_part = {
        part: [line for line in lines if line["part"] == part and "failed" not in line]
        for part in ("machine", "collectives", "waits", "throughput", "step on the device", "compiled", "offloaded", "plan")
    }
    assert all(by_part.values()), by_part
    assert all(line["is_right"] for line in by_part["collectives"] if "kind" in line)
    assert {(line["size"], line["round"]) for line in by_part["throughput"]} == {
        (size, round_) for size in ("2M", "10M") for round_ in (0, 1)
    }
    for line in by_part["plan"]:
        assert line["states_mib"] == pytest.approx(line["planned_mib"], rel=0.05)

    with file.open("a") as half:
        half.write('{"part": "plan", "way"')  # the machine was taken away
    page = run("gpu", "sim", "--table", str(file))
    assert page.returncode == 0, page.stderr
    facts = by_part["machine"][0]
    assert all(fact in page.stdout for fact in (facts["date"], facts["card"], f"torch {torch.__version__}", "2.0 M and 1"))
    for part, answered in by_part.items():
        section = page.stdout.partition(f"### {part.capitalize()}\n")[2].partition("\n### ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        assert len({row.count("|") for row in rows}) == 1, section
        asked = {(line["size"], line["way"]) for line in answered}
        assert {way for _, way in asked} <= set(re.findall(r"[^|]+", section.replace(" | ", "|").replace("| ", "|")))
        assert len(rows) - 1 >= len(asked), section
    assert f"- plain, 2M: no answer, {failed['profile', 'plain']}" in page.stdout


def test_compiled_blocks_are_timed_beside_those_of_fsdp2():
    size = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "512", "--length", "16", "--rounds", "1"]
    found = run("compile_memory", "cpu", "--ways", "fsdp2 blocks", "stage 3 blocks", *size, limit=600)
    assert found.returncode == 0, found.stderr
    assert re.search(r"\nstage 3 blocks: [\d.]+ of the peak of fsdp2 blocks at [\d.]+ of its step time", found.stdout)


def test_a_step_on_the_host_is_timed_with_all_kernels():
    found = run("host_step", "cpu", "--params", "20000", "--rounds", "1", "--threads", "1")
    assert found.returncode == 0, found.stderr
    assert all(line in found.stdout for line in ("torch  ", "fused  ", "compiled  ", "bytes a parameter")), found.stdout


def test_a_step_with_states_on_disk_is_timed_beside_plain_threads(tmp_path):
    found = run("homes", "cpu", "--params", "5e6", "--rounds", "1", "--directory", str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert all(line in found.stdout for line in ("threads  ", "streamed  ", "in memory  ", "of the threads")), found.stdout


@needs_sim
def test_weights_on_the_host_come_while_others_are_computed_with():
    """The figures are those of a schedule, and the same on any machine."""
    found = run("host_weights", "sim", "--size", "2M", "--gathered", "0.6", "--bucket", "0.25", "--balance", "1.0", "2.0")
    assert found.returncode == 0, found.stderr
    together = [float(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("link")]
    assert len(together) == 2 and max(together) <= 1.15, found.stdout


@needs_sim
def test_a_timeline_shows_that_the_host_waits_where_it_reads_the_norm_and_only_there(tmp_path):
    plot = tmp_path / "out.svg"
    found = run("timeline", "sim", "--size", "2M", "--length", "8", "--plot", str(plot))
    assert found.returncode == 0, found.stderr
    waits = dict(re.findall(r"(.*): .*host waits ([\d.]+)", found.stdout))
    assert float(waits["the host reads the norm"]) > 0 and float(waits["the device decides"]) == 0
    assert all(f"{way}:" in plot.read_text() for way in waits)


@needs_sim
def test_on_a_timeline_a_step_in_the_backward_ends_earlier_than_one_after_it():
    """The times are those of a schedule, and the same on any machine."""
    found = run("timeline", "sim", "--offload", "--size", "2M", "--length", "8")
    assert found.returncode == 0, found.stderr
    ends = {way: float(end) for way, end in re.findall(r"masters are stepped (.*) the backward: ([\d.]+) ms", found.stdout)}
    assert ends["in"] < 0.95 * ends["after"], found.stdout


def test_a_checkpoint_is_timed_beside_plain_files(tmp_path):
    found = run("checkpoint", "cpu", "--params", "2000000", "--rounds", "1", "--folder", str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert "save" in found.stdout and "plain read" in found.stdout, found.stdout


def test_the_lines_that_ranks_write_for_each_other_are_timed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/watch.py", "--steps", "3"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    assert all(f"rank {rank}: 4 lines a step, " in found.stdout for rank in (0, 1)), found.stdout


def test_a_start_is_timed_beside_one_copy_of_the_weights():
    environment = {**os.environ, "ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/start.py", "--params", "5000000", "--rounds", "1"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    assert "4,194,304 parameters in float32, trained in bfloat16" in found.stdout, found.stdout
    assert "times as long" in found.stdout, found.stdout


def test_a_training_is_timed_beside_others_whose_losses_agree(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plot, numbers = tmp_path / "out.svg", tmp_path / "out.json"
    command = [sys.executable, "benchmarks/peers.py", "--size", "2M", "--length", "16", "--rounds", "1", "--steps", "3"]
    command += ["--systems", "bare", "ours-2", "ours-2-gloo", "--plot", str(plot), "--json", str(numbers)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    rows = json.loads(numbers.read_text())["rows"]
    assert list(rows) == ["bare", "ours-2", "ours-2-gloo"]
    assert rows["ours-2"]["received_bytes"] < rows["ours-2-gloo"]["received_bytes"] / 10
    assert rows["ours-2"]["last_loss"] == rows["ours-2-gloo"]["last_loss"]
    assert all(name in plot.read_text() and name in found.stdout for name in rows)


@pytest.mark.skipif(bool(hosts.reason()), reason=hosts.reason())
def test_a_training_on_two_hosts_is_timed_and_what_link_and_processor_do_is_drawn(tmp_path):
    plot = tmp_path / "step.svg"
    found = run("hosts", "cpu", "--size", "2M", "--gbit", "10", "--rounds", "1", "--steps", "1", "--systems", "bare", "ours-2",
                "--plot", str(plot))  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert {"bare", "ours-2"} <= {line.partition(" ")[0] for line in found.stdout.splitlines()}
    for what in ("sent", "came", "processor"):
        assert f">ours-2, {what}<" in plot.read_text()
    assert plot.read_text().count("<polygon") == 3


def test_on_the_host_there_is_no_training_on_an_accelerator_to_time():
    environment = {**os.environ, "ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/gpu.py"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 1 and not found.stdout
    assert re.fullmatch(r"Cannot train .*: .* is the host\. Run it on .*", found.stderr.strip())


def test_a_large_model_is_loaded_and_written_in_cgroups_that_do_not_hold_it(tmp_path):
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed (it needs Python 3.11)")
    environment = {**os.environ, "ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--gib", "0.5", "--limit-gib", "0.72", "--rounds", "1", "--folder", str(tmp_path)]
    command = [sys.executable, "benchmarks/loading.py", *options]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr
    if "no cgroup could be made" in found.stdout:
        pytest.skip("no cgroup can be made here: that takes root, and a memory controller that is delegated")
    [peak] = re.findall(r"its share \((\d+) MiB\) and (\d+) MiB", found.stdout)
    [more] = re.findall(r"; (\d+) MiB more than before", found.stdout)
    assert int(peak[0]) > 200 and int(peak[1]) < 256 and int(more) < 256, found.stdout


def test_long_sequences_are_measured_in_four_ways_with_one_loss():
    found = run("long", "cpu", "--lengths", "600", "1200", "--chunk", "256")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "fsdp2", "parts", "chunks"]
    losses = {float(line.split()[-1]) for line in lines}
    assert max(losses) - min(losses) < 1e-4, found.stdout


@pytest.mark.parametrize(
    ("ways", "lengths"), [(["plain", "fsdp2", "parts"], ["2048", "4096"]), (["chunks"], ["16384", "32768"])]
)
def test_bytes_a_token_of_long_sequences_are_those_planned(ways, lengths):
    found = run("long", "cpu", "--ways", *ways, "--lengths", *lengths, "--chunk", "512", limit=600)
    assert found.returncode == 0, found.stderr
    slopes = re.findall(r"^(\w+) .* (\d+) bytes a token, planned +(\d+) +loss (\S+)$", found.stdout, re.MULTILINE)
    assert [way for way, *_ in slopes] == ways and len({loss for *_, loss in slopes}) == 1, found.stdout
    for way, measured, planned, _ in slopes:
        assert int(measured) == pytest.approx(int(planned), rel=0.1), way
