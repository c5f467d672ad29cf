"""The programs in examples/ run, as a user runs them."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import accelerators
from tests import programs, ranks

ROOT = Path(__file__).parents[2]


def run(name, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.endswith("ACCELERATOR") and key != "ACCELERATOR_MEMORY"}
    whole = {**clean, "OMP_NUM_THREADS": "1", **environment}
    result = programs.python(ROOT / "examples" / name, env=whole)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here_or_on_two_ranks_beside_plain_training():
    beside = "".join(path.read_text() for path in (ROOT / "tests" / "zero" / "integrations").glob("test_*.py"))
    for path in (ROOT / "examples").glob("*.py"):
        here = f'run("{path.name}"' in Path(__file__).read_text()
        here |= f'"examples" / "{path.name}"' in (ROOT / "tests" / "promises" / "test_recovery.py").read_text()
        here |= f'"{path.stem}"' in beside
        assert here or re.search(rf"\bexamples(?:\.| import (?:\w+, )*){path.stem}\b", beside), path.name


def test_select_backend_says_what_is_used_and_why_not_the_rest():
    out = run("select_backend.py", ACCELERATOR="cpu")
    assert re.search(r"^\* cpu +usable$", out, re.MULTILINE)
    assert re.search(r"^  npu +torch_npu is not installed$", out, re.MULTILINE)
    assert "on cpu; torch.distributed should use gloo" in out


@pytest.mark.full
def test_two_ranks_train_on_the_cpu_and_the_loss_falls():
    source = (ROOT / "examples" / "cpu_training_in_ci.py").read_text()
    assert "zero.shard(" in source and "stage=2" in source
    out = run("cpu_training_in_ci.py", ACCELERATOR="cpu")
    first, last = map(float, re.search(r"2 ranks on cpu: loss ([\d.]+), after 40 steps ([\d.]+)", out).groups())
    assert last < first / 2


def test_a_custom_accelerator_is_registered_and_used():
    assert run("custom_accelerator.py") == "6.0 {'in_stream': 1, 'synchronize': 2}\n"


def train_in_a_group_of_the_users(rank, world, meeting_point):
    """The user's group, with a timeout of its own; the library is used in it; the user takes it down."""
    from examples.cpu_training_in_ci import train

    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world, timeout=timedelta(seconds=17)
    )
    group = dist.group.WORLD
    with accelerators.using("cpu"):
        losses = train(3)
    assert dist.group.WORLD is group
    assert dist.is_initialized() and dist.get_backend() == "gloo" and dist.get_world_size() == world
    dist.barrier()
    dist.destroy_process_group()
    return losses


@pytest.mark.promise("X11")
def test_a_group_that_the_user_made_is_used_and_left_to_the_user(tmp_path):
    first, second = ranks.run(2, train_in_a_group_of_the_users, str(tmp_path / "meet"), group=False)
    assert first == second
