"""Large models in and out: what a rank reads and keeps meanwhile, and a chain of stages and numbers of ranks."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero
from tests import ranks
from tests.promises.test_checkpoint_memory import let_go_at_once, most_beside
from tests.promises.test_checkpoints import go_on_threads, without_dropout
from tests.weight_reads import counted_reads

MIB = 2**20
NUM_LAYERS, WIDTH, LAYER_MIB = 8, 1024, 4  # in fp32
NUM_ROWS = 8192  # rows of 4 KiB each


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def reads(rank, world, path, dtype):
    """How many bytes each read of this rank takes, and whether the values are right."""
    with torch.device("meta"):
        model = nn.Embedding(NUM_ROWS, WIDTH)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, dtype=dtype)
    with counted_reads() as counted:
        zero.load_weights(model, path)
    right = torch.equal(model.weight[:, 0].float(), torch.arange(NUM_ROWS) % 100.0)
    optimizer.close()
    return counted[2:], right  # after the header and its length


@pytest.mark.promise("I01")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_rank_reads_its_shares_and_no_more_than_a_few_mib_at_a_time(dtype, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": (torch.arange(NUM_ROWS) % 100.0).view(-1, 1).expand(-1, WIDTH).contiguous()}, path)
    found = ranks.run(2, reads, str(path), dtype)
    for counted, right in found:
        assert right and max(counted) <= 4 * MIB
        assert sum(counted) == NUM_ROWS * WIDTH * 4 // 2 > 16 * MIB - 1


def written(rank, world, folder):
    """The most memory beside the training while it is written in each way."""
    let_go_at_once()
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine, *_ = zero.initialize(model=build(), config=config)
    engine.save_checkpoint(folder)
    zero.export(folder, f"{folder}/first-{rank}.safetensors")  # makes what is made only once
    patch = pytest.MonkeyPatch()
    options = {"shard_bytes": 2 * LAYER_MIB * MIB}
    found = [
        most_beside(lambda: zero.export(folder, f"{folder}/out-{rank}", **options), patch),
        most_beside(lambda: engine.save_16bit_model(folder, "model.safetensors", max_shard_bytes=2 * LAYER_MIB * MIB), patch),
    ]
    engine.destroy()
    return found


@pytest.mark.promise("I03")
def test_an_export_at_stage_3_keeps_no_more_than_one_file_of_it(tmp_path):
    # in processes of its own: what an earlier test let go stays in a process's heap, and pages of it would come back here
    for found in ranks.run(2, written, str(tmp_path), fresh=True, timeout=120.0):
        assert max(found) <= 2 * LAYER_MIB < NUM_LAYERS * LAYER_MIB / 2, found
    assert len(list(tmp_path.glob("out-0/*.safetensors"))) == len(list(tmp_path.glob("model-*.safetensors"))) == 4


@pytest.mark.promise("I04")
def test_a_chain_of_stages_3_and_1_and_of_2_3_and_1_ranks_is_one_run_on_one(tmp_path):
    straight = go_on_threads(1, tmp_path / "straight", 0, 8, {"make": without_dropout, "stage": 2})
    for number, (world, stage) in enumerate(((2, 3), (3, 1), (1, 3), (3, 3))):
        options = {"make": without_dropout, "stage": stage}
        chain = go_on_threads(world, tmp_path / "chain", 2 * number, 2 * number + 2, options)
    assert chain["exact"].keys() == straight["exact"].keys()
    for name, exact in straight["exact"].items():
        torch.testing.assert_close(chain["exact"][name], exact, rtol=1e-5, atol=1e-6)
    for name, entries in straight["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(chain["state"][name][key], value, rtol=1e-4, atol=1e-6)
