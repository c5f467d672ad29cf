"""What DeepSpeed 0.19.8 and plain torch saved becomes a checkpoint that loads, and no code of theirs runs.

The files of DeepSpeed were written by its own engine, on two ranks at stages 1 and 3 and on three at stage 2, in bf16 with fp32
masters, from a model with a tied, two frozen and five other parameters in two groups, after three steps of AdamW. Its own
script made those of stages 2 and 3 universal. `expected.pt` is what DeepSpeed gathered at stage 3 then. Those of sub-groups
have the frozen parameters in a group of their own, before the others, and a `sub_group_size` of 5: each of the other groups has
two lines of parameters.
"""

import os
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from tests.loopback import run_ranks, solo
from zero import Engine, shard
from zero.__main__ import main
from zero.checkpoint.importers import import_checkpoint
from zero.config.schema import ScheduleSpec
from zero.errors import BadCheckpoint
from zero.optim.schedules import build_schedule

DATA = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
FOLDERS = ("stage1_two_ranks", "stage2_three_ranks")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.l, self.bn, self.frozen = nn.Embedding(11, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.frozen(self.bn(self.l(self.emb(tokens)))))


def sharded(group, frozen_first=False, **options):
    model = Tied()
    trained = [param for param in model.parameters() if param.requires_grad]
    wide, flat = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": [*model.frozen.parameters()]}] * frozen_first + [{"params": wide}, {"params": flat}]
    inner = torch.optim.AdamW(groups, lr=1.0)
    return model, shard(model, inner, group=group, **{"stage": 2, **options})


def as_saved(folder):
    """Masters and moments by name: the ranks' lines one behind the other, cut at the shapes, and the weights of the model."""
    files = sorted((DATA / folder / "global_step3").glob("*optim_states.pt"))
    ranks = [torch.load(file, weights_only=False, pickle_module=_tolerant())["optimizer_state_dict"] for file in files]
    model = torch.load(DATA / folder / "global_step3" / "mp_rank_00_model_states.pt", weights_only=True)
    found = {}
    for group, shapes in enumerate(model["param_shapes"]):
        state = [rank["base_optimizer_state"]["state"][group] for rank in ranks]
        lines = {
            "value": torch.cat([rank["single_partition_of_fp32_groups"][group] for rank in ranks]),
            "exp_avg": torch.cat([one["exp_avg"] for one in state]),
            "exp_avg_sq": torch.cat([one["exp_avg_sq"] for one in state]),
        }
        at = 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            found[name] = {key: line[at : at + numel].reshape(shape) for key, line in lines.items()}
            at += numel
    return found, model["module"]


def _tolerant():
    """A pickle module for which unknown classes are empty ones; these files are ours."""
    import pickle
    import types

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if module.startswith("deepspeed"):
                return type(name, (), {"__init__": lambda self, *_: None})
            return super().find_class(module, name)

    return types.SimpleNamespace(Unpickler=Unpickler, load=pickle.load, __name__="tolerant")


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_checkpoint_of_deepspeed_goes_on_on_any_number_of_ranks(folder, dtype, tmp_path):
    made = import_checkpoint(DATA / folder, tmp_path)
    assert made == tmp_path / "global_step3"
    expected, module = as_saved(folder)

    def program(group):
        model, optimizer = sharded(group, dtype=dtype)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.inner, 2)
        engine = Engine(optimizer, schedule)
        path, client = engine.load_checkpoint(tmp_path)
        assert (path, client) == (str(made), {"note": "mine"})
        assert (engine.global_steps, engine.global_samples, schedule.last_epoch) == (3, 18, 3)
        assert engine.get_lr() == pytest.approx([1e-3, 1e-3])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        state = optimizer.state_dict()
        for name, param in model.named_parameters():
            if name not in expected:
                assert torch.equal(param.bfloat16(), module[name]), name
                continue
            exact = state["masters"].get(name, param.detach())
            assert torch.equal(exact, expected[name]["value"]), name
            assert torch.equal(exact.bfloat16(), module[name]), name
            assert state["state"][name]["step"] == 3
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state["state"][name][key], expected[name][key]), (name, key)
        assert model.head.weight is model.emb.weight
        assert model.seen.tolist() == [0, 1, 2]
        engine.backward(model(torch.arange(11)).float().square().mean())
        engine.step()
        assert engine.global_steps == 4
        optimizer.close()

    run_ranks(4, program, 30.0)


@pytest.mark.parametrize(("folder", "stage"), [
    ("stage3_two_ranks", 2), ("stage3_two_ranks", 3), ("universal_of_stage2", 3), ("universal_of_stage3", 3),
    ("stage3_sub_groups", 2), ("stage3_sub_groups", 3), ("universal_of_sub_groups", 3),
])  # fmt: skip
def test_a_checkpoint_of_deepspeeds_zero3_or_a_universal_one_has_the_values_that_deepspeed_had(folder, stage, tmp_path):
    import_checkpoint(DATA / folder, tmp_path)
    in_lines = "sub_groups" in folder
    saved = "stage3_sub_groups" if in_lines else "stage3_two_ranks"
    expected = torch.load(DATA / saved / "expected.pt", weights_only=True)

    def program(group):
        model, optimizer = sharded(group, in_lines, dtype="bfloat16", stage=stage)
        engine = Engine(optimizer)
        _, client = engine.load_checkpoint(tmp_path)
        assert (client, engine.global_steps, engine.global_samples) == ({"note": "mine"}, 3, 18)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3] * in_lines + [0.1, 0.0]
        state = optimizer.state_dict()
        for name, param in model.named_parameters():
            its = expected[name]
            assert torch.equal(param.detach().clone().float(), its["value"].bfloat16().float()), name
            if param.requires_grad:
                assert torch.equal(state["masters"][name], its["value"]) and state["state"][name]["step"] == 3, name
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = its[key]
                    if folder == "universal_of_stage2":  # DeepSpeed summed its gradients in another order
                        file = torch.load(DATA / folder / "zero" / name / f"{key}.pt", weights_only=True)
                        moment = file["param"].view(param.shape)
                        torch.testing.assert_close(moment, its[key], rtol=1e-2, atol=1e-7)
                    assert torch.equal(state["state"][name][key], moment), (name, key)
        assert model.head.weight is model.emb.weight and model.seen.tolist() == [0, 1, 2]
        engine.backward(model(torch.arange(11)).float().square().mean())
        engine.step()
        optimizer.close()

    run_ranks(2, program, 30.0)


def test_a_schedule_of_deepspeeds_goes_on_where_it_was_and_another_kind_does_not_take_its_state(tmp_path):
    shutil.copytree(DATA / FOLDERS[0], tmp_path / "ds")
    path = tmp_path / "ds" / "global_step3" / "mp_rank_00_model_states.pt"
    loaded = torch.load(path, weights_only=True)
    loaded["lr_scheduler"] = {"last_batch_iteration": 2}  # all that DeepSpeed's schedules save, here after three steps
    torch.save(loaded, path)
    import_checkpoint(tmp_path / "ds", tmp_path / "out")
    spec = ScheduleSpec.of("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_type": "linear"})
    model, optimizer = sharded(solo(), dtype="bfloat16")
    with pytest.raises(ValueError, match="Cannot load into the schedule StepLR: Schedule was saved"):
        zero.load(tmp_path / "out", optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer.inner, 2))
    schedule, straight = (build_schedule(spec, each) for each in (optimizer.inner, torch.optim.SGD(model.parameters(), lr=1.0)))
    for _ in range(3):
        straight.optimizer.step()
        straight.step()
    zero.load(tmp_path / "out", optimizer, scheduler=schedule)
    assert (schedule.last_epoch, schedule.get_last_lr()) == (3, straight.get_last_lr() * 2)
    optimizer.close()


@pytest.mark.parametrize("folder", [*FOLDERS, "stage3_two_ranks", "universal_of_stage2"])
def test_a_checkpoint_of_deepspeed_without_frozen_parameters_leaves_those_of_the_model(folder, tmp_path, caplog):
    """A checkpoint without frozen parameters, which transformers has DeepSpeed write of a model with adapters."""
    shutil.copytree(DATA / folder, tmp_path / "ds")
    for path in (tmp_path / "ds").rglob("*model_states.pt"):
        loaded = torch.load(path, weights_only=True)
        loaded |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        for name in ("frozen.weight", "frozen.bias"):
            loaded["module"].pop(name, None)
        torch.save(loaded, path)
    import_checkpoint(tmp_path / "ds", tmp_path / "out")
    model, optimizer = sharded(solo(), dtype="bfloat16")
    frozen, trained = model.frozen.weight.clone(), model.l.weight.clone()
    zero.load(tmp_path / "out", optimizer)
    assert torch.equal(model.frozen.weight, frozen) and not torch.equal(model.l.weight, trained)
    assert "lacks these frozen parameters, which stay as they are: frozen.weight, frozen.bias." in caplog.text
    optimizer.close()
    other = Tied().requires_grad_(True)
    optimizer = shard(other, torch.optim.AdamW(other.parameters()), stage=2, group=solo())
    with pytest.raises(ValueError, match=r"Only in the model: frozen\.weight, frozen\.bias"):
        zero.load(tmp_path / "out", optimizer, optimizer_states=False)
    optimizer.close()


def test_a_part_of_deepspeeds_zero3_that_is_missing_is_named(tmp_path):

    shutil.copytree(DATA / "stage3_two_ranks", tmp_path / "ds")
    (tmp_path / "ds" / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(BadCheckpoint, match=r"it is of stage 3 and has the states of .* Put the files of all ranks there"):
        import_checkpoint(tmp_path / "ds", tmp_path / "out")
    shutil.copytree(DATA / "universal_of_stage3", tmp_path / "universal")
    shutil.rmtree(tmp_path / "universal" / "zero" / "l.bias")
    with pytest.raises(BadCheckpoint, match=r"Cannot read the universal checkpoint .* l\.bias is not in it"):
        import_checkpoint(tmp_path / "universal", tmp_path / "out")


def test_lines_of_parameters_that_no_group_of_deepspeeds_optimizer_has_are_refused(tmp_path):
    shutil.copytree(DATA / "stage3_sub_groups", tmp_path / "ds")
    for path in (tmp_path / "ds" / "global_step3").glob("*optim_states.pt"):
        loaded = torch.load(path, weights_only=False, pickle_module=_tolerant())
        del loaded["optimizer_state_dict"]["loss_scaler"]
        loaded["optimizer_state_dict"]["zero_stage"] = 3
        loaded["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][1]["params"].pop()
        torch.save(loaded, path)
    with pytest.raises(BadCheckpoint, match=r"it has 4 lines of parameters, and its 3 groups have the lines 0, 2, 3\. Convert"):
        import_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_of_deepspeed_that_is_missing_or_another_kind_of_training_is_named(tmp_path):
    shutil.copytree(DATA / FOLDERS[0], tmp_path / "ds")
    here = tmp_path / "ds" / "global_step3"
    (here / "expp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(BadCheckpoint, match=r"there is expp_rank_0_mp_rank_00_model_states\.pt, of another kind"):
        import_checkpoint(tmp_path / "ds", tmp_path / "out")
    (here / "expp_rank_0_mp_rank_00_model_states.pt").unlink()
    (here / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(BadCheckpoint, match="states of ranks 0 of 2"):
        import_checkpoint(tmp_path / "ds", tmp_path / "out")
    (here / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(BadCheckpoint, match=r"no mp_rank_00_model_states\.pt"):
        import_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Dangerous:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_file_that_needs_code_to_be_read_is_refused_by_name_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(OrderedDict(a=torch.ones(1), b=Dangerous()), "m.pt")
    with pytest.raises(BadCheckpoint, match=r"it needs posix\.mkdir"):
        import_checkpoint("m.pt", "out")
    assert os.listdir(tmp_path) == ["m.pt"]


def plain_training(folder):
    """Two steps in plain torch, saved as people save it; the model and the optimizer."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    torch.save(model.state_dict(), folder / "m.pt")
    torch.save(optimizer.state_dict(), folder / "o.pt")
    return model, optimizer


def step(model, optimizer, number):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_plain_state_dicts_of_a_model_and_its_optimizer_go_on_as_if_they_had_stayed(tmp_path, capsys, caplog):
    plain, optimizer = plain_training(tmp_path)
    assert main(["import", str(tmp_path / "m.pt"), str(tmp_path / "c"), "--optimizer", str(tmp_path / "o.pt")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "c" / "global_step0")
    assert "0 is 0.weight, 1 is 0.bias, 2 is 1.weight" in caplog.text
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 1))
    ours = shard(model, torch.optim.Adam(model.parameters(), lr=1.0), stage=2, kernels="torch", group=solo())
    zero.load(tmp_path / "c", ours)
    for number in (2, 3):
        step(plain, optimizer, number)
        step(model, ours, number)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    ours.close()


def test_a_state_of_other_parameters_is_refused_with_what_does_not_fit(tmp_path, capsys):
    plain_training(tmp_path)
    other = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    torch.save(other.state_dict(), tmp_path / "other.pt")
    assert main(["import", str(tmp_path / "m.pt"), str(tmp_path / "c"), "--optimizer", str(tmp_path / "other.pt")]) == 2
    assert "it has 1 parameters, and the model 8" in capsys.readouterr().err
    torch.save({"a": 3}, tmp_path / "no.pt")
    assert main(["import", str(tmp_path / "no.pt"), str(tmp_path / "c")]) == 2
    assert "a in it is a int" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nowhere.pt"), str(tmp_path / "c")]) == 2
    assert "nowhere.pt" in capsys.readouterr().err


def test_a_plain_state_dict_is_taken_by_position_with_a_warning_that_names_the_mapping(tmp_path, caplog):
    plain, optimizer = plain_training(tmp_path)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 1))
    model.load_state_dict(plain.state_dict())
    ours = shard(model, torch.optim.Adam(model.parameters(), lr=1.0), stage=2, kernels="torch", group=solo())
    ours.load_state_dict(optimizer.state_dict())
    assert "taken by position: 0 as 0.weight, 1 as 0.bias" in caplog.text
    step(plain, optimizer, 2)
    step(model, ours, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    ours.close()


def test_views_of_one_memory_are_parameters_of_their_own_and_what_is_no_number_of_elements_is_no_moment(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.scale = nn.Parameter(torch.arange(9.0).reshape(3, 3)), nn.Parameter(torch.tensor(2.0))
            self.t = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x):
            return (x @ self.w @ self.t).sum() * self.scale

    plain = Scaled()
    with torch.no_grad():
        plain.t.copy_(plain.w.t())
    inner = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 3)).backward()
    inner.step()
    inner.zero_grad()
    torch.save({**plain.state_dict(), "t": plain.w.detach().t()}, tmp_path / "m.pt")
    torch.save(inner.state_dict(), tmp_path / "o.pt")
    import_checkpoint(tmp_path / "m.pt", tmp_path / "c", optimizer=tmp_path / "o.pt")
    model = Scaled()
    ours = shard(model, torch.optim.AdamW(model.parameters(), lr=1.0), stage=2, group=solo())
    zero.load(tmp_path / "c", ours)
    assert torch.equal(model.t, plain.w.t())
    with torch.no_grad():
        plain.t.copy_(plain.w.t())
    for m, o in ((plain, inner), (model, ours)):
        m(torch.ones(1, 3)).backward()
        o.step()
        o.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    ours.close()


def test_groups_whose_numbers_say_nothing_of_names_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[0].parameters()}], lr=0.1)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    torch.save(inner.state_dict(), tmp_path / "o.pt")
    with pytest.raises(ValueError, match="2 groups, which say nothing of the model's order"):
        import_checkpoint(tmp_path / "m.pt", tmp_path / "c", optimizer=tmp_path / "o.pt")
    with pytest.raises(BadCheckpoint, match="no 'state' and 'param_groups'"):
        import_checkpoint(tmp_path / "m.pt", tmp_path / "c", optimizer=tmp_path / "m.pt")
    torch.save(torch.ones(1), tmp_path / "t.pt")
    with pytest.raises(BadCheckpoint, match="it is a Tensor"):
        import_checkpoint(tmp_path / "t.pt", tmp_path / "c")
