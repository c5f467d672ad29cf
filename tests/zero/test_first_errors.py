"""What somebody writes on the first day that cannot be, and the one sentence that says what to write."""

import re

import pytest
import torch

import accelerators
import zero
from tests import programs
from tests.zoo.case import mlp
from zero.errors import CheckpointFailed


def sharded(stage=2):
    model = mlp()
    return model, zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage)


def test_model_and_optimizer_that_are_swapped_are_told_apart():
    model = mlp()
    with pytest.raises(TypeError, match=r"the first argument is of type AdamW and not a module\. Call zero\.shard"):
        zero.shard(torch.optim.AdamW(model.parameters()), model, stage=2)


def test_a_device_by_the_name_that_it_has_elsewhere():
    words = "no device is called 'gpu'. Use 'cuda' (NVIDIA, AMD), 'xpu' (Intel) or 'mps' (Apple)."
    with pytest.raises(ValueError, match=re.escape(words)):
        accelerators.get("gpu")
    program = "import accelerators; accelerators.current()"
    result = programs.with_torch(program, env={"ACCELERATOR": "gpu"})
    assert f"Cannot use ACCELERATOR=gpu: {words}" in result.stderr


def test_a_place_that_is_no_directory_is_named(tmp_path):
    (tmp_path / "file").touch()
    _, optimizer = sharded()
    with pytest.raises(CheckpointFailed, match=rf"Cannot write to .*{tmp_path.name}/file/checkpoints.*Name another place"):
        zero.save(tmp_path / "file" / "checkpoints", optimizer)
    with pytest.raises(FileNotFoundError, match=r"Cannot find the latest checkpoint in .*nothing"):
        zero.load(tmp_path / "nothing", optimizer)


def test_a_directory_of_checkpoints_is_no_export_of_weights(tmp_path):
    _, optimizer = sharded()
    zero.save(tmp_path, optimizer, "first")
    for place in (tmp_path, tmp_path / "first"):
        with pytest.raises(FileNotFoundError, match=r"a checkpoint is there, in shares. Run `python -m zero export` first"):
            zero.read_export(place)


def test_a_whole_graph_of_weights_in_shares_is_refused():
    model, _optimizer = sharded(stage=3)
    with pytest.raises(ValueError, match=r"Cannot compile with fullgraph=True at stage 3: .* or use stage 2"):
        zero.compile(model, backend="eager", fullgraph=True)


def test_parameters_of_another_model_are_listed_by_where_they_are(tmp_path):
    _, optimizer = sharded()
    zero.save(tmp_path, optimizer)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(9, 3)))
    with pytest.raises(ValueError) as error:
        zero.load(tmp_path, zero.shard(other, torch.optim.AdamW(other.parameters(), lr=0.01), stage=2))
    assert str(error.value) == (
        "Cannot load: the checkpoint is of another model. Of other shapes: 0.weight ((6, 4) in the checkpoint, (9, 4) in the "
        "model), 0.bias ((6,) in the checkpoint, (9,) in the model). Only in the model: 2.0.weight, 2.0.bias. Only in the "
        "checkpoint: 2.bias, 2.weight. Build the model that was saved; nothing is matched by its position."
    )
