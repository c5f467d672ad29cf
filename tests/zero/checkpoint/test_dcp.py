"""To FSDP2 and back: torch's distributed checkpoints are exported and imported, weights and the optimizer's state."""

import io
import pickle
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zero
from tests import ranks
from tests.devices import IS_TORCH_2_8
from tests.promises.loops import same
from zero.checkpoint.dcp import MetadataReader, model_and_optimizer, read_dcp, tied_again
from zero.checkpoint.importers import import_checkpoint
from zero.errors import BadCheckpoint


class Model(nn.Module):
    """With a tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.inside, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.inside(self.embed(tokens))))


def build(seed=0):
    torch.manual_seed(seed)
    return Model()


def step(model, optimizer, number):
    tokens = torch.randint(10, (8,), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def values_of(state):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in state.items()}


def saved_here(rank, world, folder):
    model = build()
    optimizer = zero.shard(model, adamw(model), stage=3, bucket_bytes=256, kernels="torch")
    for number in range(2):
        step(model, optimizer, number)
    zero.save(folder, optimizer)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    after = step(model, optimizer, 2)
    optimizer.close()
    return found, after, {name: value.clone() for name, value in model.state_dict().items()}


def test_plain_torch_loads_what_was_exported_and_goes_on_bit_by_bit(tmp_path):
    (expected, loss, after), _ = ranks.run(2, saved_here, tmp_path / "ours")
    zero.export(tmp_path / "ours", tmp_path / "dcp", format="dcp")
    model = build(seed=1)
    optimizer = adamw(model)
    step(model, optimizer, 9)  # makes a state to load into
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert same(dict(model.state_dict()), expected)
    assert torch.equal(step(model, optimizer, 2), loss) and same(dict(model.state_dict()), after)
    with pytest.raises(ValueError, match=r"Cannot export with format='pt': there are 'safetensors' and 'dcp'\."):
        zero.export(tmp_path / "ours", tmp_path / "other", format="pt")


def saved_by_fsdp2(rank, world, folder, as_app):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    model.norm = nn.LayerNorm(6)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = adamw(model)
    for number in range(2):
        step(model, optimizer, number)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optim": state}
    dcp.save({"app": saved} if as_app else saved, checkpoint_id=folder)
    found = values_of(weights)
    moments = {name: values_of(its) for name, its in state["state"].items()}
    after = step(model, optimizer, 2)
    return found, moments, after, values_of(get_state_dict(model, optimizer)[0])


def gone_on(rank, world, folder, stage):
    model = build(seed=1)
    model.norm = nn.LayerNorm(6)
    optimizer = zero.shard(model, adamw(model), stage=stage, bucket_bytes=256, kernels="torch")
    zero.load(folder, optimizer)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {name: optimizer.whole_state(param) for name, param in model.named_parameters()}
    after = step(model, optimizer, 2)
    optimizer.close()
    return found, moments, after, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.skipif(IS_TORCH_2_8, reason="FSDP2 of torch 2.8 takes the sum over gloo, not the mean")
@pytest.mark.parametrize(("as_app", "stage"), [(False, 3), pytest.param(True, 2, marks=pytest.mark.full)])
def test_what_fsdp2_saved_is_gone_on_from_in_shares(as_app, stage, tmp_path):
    weights, moments, loss, after = ranks.run(2, saved_by_fsdp2, tmp_path / "dcp", as_app, apart="fsdp2")[0]
    import_checkpoint(tmp_path / "dcp", tmp_path / "ours")
    for found, its, its_loss, its_after in ranks.run(2, gone_on, tmp_path / "ours", stage):
        assert same(found, weights)
        for name, state in its.items():
            assert all(torch.equal(state[key], moments[name][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
        assert torch.equal(its_loss, loss)
        for name, value in after.items():
            torch.testing.assert_close(its_after[name], value)


@pytest.mark.parametrize("names", [("model", "optim"), ("net", "opt")])
def test_model_and_optimizer_are_known_by_their_names_or_by_what_is_in_them(names):
    weights, groups = {"weight": torch.ones(2)}, [{"params": ["weight"], "lr": 0.1}]
    saved = dict(zip(names, (weights, {"state": {}, "param_groups": groups}), strict=True))
    assert model_and_optimizer({**saved, "step": torch.tensor(3)}) == (weights, {"state": {}, "param_groups": groups})
    assert model_and_optimizer({"weight": weights["weight"], "other": {"a": torch.ones(1)}}) == (weights, None)
    two = {**saved, "another": {"param_groups": groups}}
    assert model_and_optimizer(two)[1] == saved.get("optim")


class Placed(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("place", torch.ones(2))


def test_an_import_that_lacks_state_or_took_a_buffer_for_a_parameter_is_named_with_what_to_do(tmp_path):
    model = Placed()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_checkpoint(tmp_path / "dcp", tmp_path / "ours")
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(ValueError, match=r"place is a buffer of the model: import it with --buffer place\."):
        zero.load(tmp_path / "ours", optimizer, optimizer_states=False)
    import_checkpoint(tmp_path / "dcp", tmp_path / "again", buffers=["place"])
    model.place.zero_()
    with pytest.raises(ValueError, match=r"the checkpoint has no state of an optimizer\. Load with optimizer_states=False"):
        zero.load(tmp_path / "again", optimizer)
    zero.load(tmp_path / "again", optimizer, optimizer_states=False)
    assert model.place.tolist() == [1.0, 1.0]
    optimizer.close()


def test_what_is_tied_is_one_tensor_again_under_the_name_that_is_trained():
    values = torch.randn(2, 3)
    model = {"head": values, "embed": values.clone(), "zeros": torch.zeros(2, 3), "more": torch.zeros(2, 3), "bias": values[0]}
    tied = tied_again({**model, "other": values[0].clone()}, {"embed"})
    assert next(iter(tied)) == "embed" and tied["head"] is tied["embed"] and tied["zeros"] is not tied["more"]
    assert tied["bias"] is not tied["other"] and same(tied, {**model, "other": values[0]})
    assert tied_again(model, {"embed", "head"})["head"] is values


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_known_by_the_names_that_any_python_gives_them(module):
    assert MetadataReader(io.BytesIO(f"c{module}\nPosixPath\n.".encode())).load() is PosixPath


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_tensor_of_which_a_part_is_in_no_file_is_refused(tmp_path, chunks):
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    about = metadata.state_dict_metadata["model.weight"]
    about.size, about.chunks = torch.Size([4]), about.chunks * chunks
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadCheckpoint, match=r"its files lack model\.weight, or some of it"):
        read_dcp(tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("ran",)


def test_no_code_of_a_distributed_checkpoint_is_run(tmp_path, capsys):
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_dcp(tmp_path)["model"]["weight"], torch.ones(2))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(BadCheckpoint, match=r"without running code: it needs builtins\.print"):
        read_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match="as a distributed checkpoint of torch"):
        read_dcp(tmp_path)
    assert capsys.readouterr().out == ""
