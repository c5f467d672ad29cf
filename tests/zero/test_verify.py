"""`zero.verify` says equal where training is, and otherwise which parameter differs first, at which step, and by how much."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero
from tests import programs, ranks
from tests.loopback import run_ranks, solo
from tests.zoo.case import real_mlp, real_numbers
from zero import Engine, ShardedOptimizer
from zero.config.schema import Batch, LossScale, OptimizerSpec, ZeroConfig
from zero.memory.masters import Masters
from zero.sharding import step
from zero.sharding.update import Updater
from zero.window.keeping import SumKeeper
from zero.window.records import Phase

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
building = threading.Lock()  # ranks that are threads share torch's generators


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def square(model, x):
    return model(x).float().square().mean()


def proof(group, optimizer=adamw, num_batches=4, **fields):
    with building:
        model = real_mlp()
    config = ZeroConfig(**{"stage": 2, "bucket_bytes": 64, "timeout_s": 20.0, **fields})
    dtype = getattr(torch, config.dtype or "float32")
    batches = [real_numbers((3, 4), group.rank, number).to(dtype) for number in range(num_batches)]
    return zero.verify(model, batches, square, optimizer, config, group=group)


SETTINGS = {
    "plain": {},
    "accumulating": {"accumulation": 2},
    "not counting": {"accumulation": 2, "count_micro_steps": False},
    "clipping": {"clip": 0.05},
    "summing": {"reduce": "sum"},
    "dividing": {"reduce": 8.0},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16", "loss_scale": LossScale(initial=8.0)},
    "fp16 that overflows": {"dtype": "float16", "loss_scale": LossScale(initial=2.0**24, hysteresis=1)},
    "autocast": {"autocast": "bfloat16"},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_trains_as_it_should_is_equal(name, stage):
    for world in (1, 3):
        for found in run_ranks(world, lambda group: proof(group, stage=stage, **SETTINGS[name])):
            assert found.equal and found.first is None, str(found)
            assert found.num_steps == (2 if "accumulation" in SETTINGS[name] else 4)
            assert (found.num_ranks, found.stage, found.num_parameters) == (world, stage, 4)
            assert str(found).startswith("equal (4 parameters") and "tolerance of " in str(found)


def test_an_optimizer_that_has_stepped_goes_on_from_its_state():
    model = real_mlp()
    inner = adamw(model.parameters())
    square(model, real_numbers((3, 4), "before")).backward()
    inner.step()
    inner.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    found = zero.verify(model, [real_numbers((3, 4), 0)], square, inner, ZeroConfig(stage=2))
    assert found.equal, str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(param.grad is None for param in model.parameters()) and inner.param_groups[0]["params"][0] is model[0].weight


class WithIsland(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.norm = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.frozen(self.first(x)).float())


def test_islands_stay_and_inputs_are_cast_in_both_runs():
    config = ZeroConfig(stage=2, dtype="bfloat16", keep_fp32=("norm",))
    found = zero.verify(WithIsland(), [real_numbers((3, 4), number) for number in range(3)], square, adamw, config)
    assert found.equal, str(found)
    assert [line.split(":")[0] for line in found.tolerance] == ["bfloat16", "float32"]


def test_both_runs_drop_out_the_same():
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    found = zero.verify(model, [real_numbers((3, 4), number) for number in range(3)], square, adamw, ZeroConfig(stage=2))
    assert found.equal, str(found)


def test_the_optimizer_may_be_written_in_a_deepspeed_configuration():
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"optimizer": adam, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.1}
    found = zero.verify(real_mlp(), [real_numbers((3, 4), number) for number in range(2)], square, None, config)
    assert found.equal and found.stage == 1


def on_each_rank(rank, world):
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.25), nn.Linear(5, 1))
    batches = [torch.randn(6, 4) for _ in range(3)]
    config = ZeroConfig(stage=2, bucket_bytes=64)
    return zero.verify(model, batches, square, adamw, config).as_dict()


def test_it_runs_on_the_ranks_that_are_there():
    one, other = ranks.run(2, on_each_rank)
    assert one == other and one["equal"] and one["num_ranks"] == 2


# faults -----------------------------------------------------------------------------------------------------------------


def test_a_model_whose_copies_train_itself_is_refused():
    model = real_mlp()
    forward, model[0].weight.grad = model.forward, torch.ones_like(model[0].weight)
    model.forward = lambda x: forward(x)  # a copy has the same function, which holds this model
    before = model[0].weight.grad
    with pytest.raises(ValueError, match=r"its copies compute with .* of the model itself"):
        zero.verify(model, [real_numbers((3, 4))], square, adamw, ZeroConfig(stage=2), group=solo())
    assert model[0].weight.grad is before and bool((before == 1).all()) and model[2].weight.grad is None


def change(monkeypatch, owner, name, changed):
    """Makes a method do `changed(original, *arguments)`."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **options: changed(original, *arguments, **options))


def keeping(change):
    """A sum is kept times what `change` makes of its bucket and factor."""

    def keep(really, keeper, bucket, *arguments, **options):
        scaling = keeper.scaling
        keeper.scaling = SimpleNamespace(accumulate_factor=change(bucket, scaling.accumulate_factor))
        really(keeper, bucket, *arguments, **options)
        keeper.scaling = scaling

    return keep


FAULTS = {
    "a round is lost": (SumKeeper, "keep", keeping(lambda bucket, factor: factor if bucket else 0.0)),
    "divided twice": (SumKeeper, "keep", keeping(lambda bucket, factor: factor / 2)),
    "the engine divides once more": (
        Engine, "backward", lambda backward, engine, loss, **options: backward(engine, loss / 2, **options),
    ),
    "nothing is published": (Masters, "publish", lambda publish, masters, *what: None),
    "no step is taken": (Updater, "step", lambda step, updater, batch, used, coefficient: None),
    "only some are stepped": (
        Updater, "step", lambda step, updater, batch, used, coefficient: step(updater, batch, used & 0b1011, coefficient),
    ),
    "cleared too early": (
        ShardedOptimizer, "backward", lambda backward, own, loss, **options: (own.zero_grad(), backward(own, loss, **options)),
    ),
}  # fmt: skip
NEEDS = {
    "nothing is published": {"dtype": "bfloat16"},  # fp32 weights of one rank are their own masters
    "cleared too early": {"accumulation": 2},
}


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name, world, optimizer, monkeypatch):
    """AdamW hides a wrong factor in its weights; its state shows it."""
    change(monkeypatch, *FAULTS[name])
    found = run_ranks(world, lambda group: proof(group, optimizer, **NEEDS.get(name, {})))
    assert len({str(one) for one in found}) == 1
    first = found[0].first
    assert first is not None and not found[0].equal
    assert first.step == 0 and found[0].num_steps == 1
    assert first.parameter in NAMES and first.largest > first.allowed
    assert f"step 0, parameter {first.parameter}: its {first.what} on rank {first.rank} differs by" in str(found[0])
    if name == "only some are stepped":
        assert first.parameter == "2.weight"


def test_a_fault_of_a_later_step_is_found_at_that_step(monkeypatch):
    steps = []

    def forgets(update, state, used, coefficient):
        steps.append(used)
        if len(steps) != 3:
            update(state, used, coefficient)
        else:
            state.window.move_to(Phase.STEPPED)

    change(monkeypatch, step, "update", forgets)
    first = proof(solo(), sgd).first
    assert first is not None and (first.step, first.parameter, first.what) == (2, "0.weight", "weight")


def test_a_master_that_is_stale_is_found_though_the_weight_hides_it(monkeypatch):
    """In bf16 a small step moves masters only: weights alone would be equal."""
    change(monkeypatch, Masters, "adopt", lambda adopt, masters, block: masters.shard.share(block.bucket).mul_(1.0 + 2.0**-12))
    first = proof(solo(), lambda params: torch.optim.SGD(params, lr=1e-6), num_batches=1, dtype="bfloat16").first
    assert first is not None and first.what == "master"


# what cannot be verified ------------------------------------------------------------------------------------------------


def test_batches_that_make_no_step_are_refused():
    with pytest.raises(ValueError, match="ranks 0 to 0 gave 1 batches, and a step takes 2"):
        proof(solo(), num_batches=1, accumulation=2)

    def uneven(group):
        return proof(group, num_batches=2 + group.rank)

    with pytest.raises(ValueError, match="gave 2, 3 batches"):
        run_ranks(2, uneven)


def test_an_optimizer_of_other_parameters_is_refused():
    model = real_mlp()
    with pytest.raises(ValueError, match="gave it 4 parameters that are not"):
        zero.verify(model, [real_numbers((3, 4), 0)], square, lambda params: sgd(model.parameters()), ZeroConfig(stage=2))


def test_a_configuration_for_other_ranks_is_refused():
    config = ZeroConfig(stage=2, batch=Batch.of(micro_samples=1, world_size=2), optimizer=OptimizerSpec.of("SGD"))
    with pytest.raises(ValueError, match="Cannot use a batch for 2 ranks"):
        zero.verify(real_mlp(), [real_numbers((3, 4), 0)], square, None, config)


# the command ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

def subject(rank, num_ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(2)]
    return dict(model=model, batches=batches, loss=lambda model, x: model(x).square().mean(),
                optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), config={"zero_optimization": {"stage": 2}})

def in_shares(rank, num_ranks):
    return {**subject(rank, num_ranks), "config": {"zero_optimization": {"stage": 3}}}

def broken():
    from types import SimpleNamespace
    from zero.window.keeping import SumKeeper
    keep = SumKeeper.keep
    def halved(keeper, *arguments, **options):
        scaling = keeper.scaling
        keeper.scaling = SimpleNamespace(accumulate_factor=scaling.accumulate_factor / 2)
        keep(keeper, *arguments, **options)
        keeper.scaling = scaling
    SumKeeper.keep = halved
    return subject(0, 1)

def careless(rank, num_ranks):
    if rank == num_ranks - 1:
        raise OSError("no data here")
    return subject(rank, num_ranks)

def forgetful():
    return [1]

def exits():
    raise SystemExit(0)

def vanishes(rank, num_ranks):
    if rank == num_ranks - 1:
        import os
        os._exit(0)
    return subject(rank, num_ranks)

def bare():
    return {}

def loses():
    return {**subject(0, 1), "loss": lambda model, batch: None}
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def command(*arguments):
    return programs.python("-m", "zero", "verify", *arguments)


# The command with ranks that have torch from the start; what they are given goes the way it always goes.
WITH_FORKED_RANKS = """
import functools, importlib, sys
from tests import programs
from zero.__main__ import main

programs.use_shared_servers(sys.argv.pop())
torch_starts = importlib.import_module("torch.multiprocessing.spawn")
torch_starts.spawn = functools.partial(torch_starts.start_processes, start_method=programs.START_METHOD)
sys.exit(main(["verify", *sys.argv[1:]]))
"""


def command_with_forked_ranks(*arguments):
    return programs.python("-c", WITH_FORKED_RANKS, *arguments, programs.share_servers())


@pytest.mark.parametrize(("run", "target", "stage"), [
    (command_with_forked_ranks, "subject", 2),
    pytest.param(command, "subject", 2, marks=pytest.mark.full),
    pytest.param(command, "in_shares", 3, marks=pytest.mark.full),
])  # fmt: skip
def test_the_command_says_equal_at_any_number_of_ranks(script, run, target, stage):
    done = run(f"{script}:{target}", "--ranks", 2, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] and found["num_ranks"] == 2 and found["num_steps"] == 2 and found["stage"] == stage


@pytest.mark.full
def test_the_command_names_the_difference(script):
    done = command(f"{script}:broken")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("different: step 0, parameter 0.weight: its exp_avg on rank 0 differs by")


@pytest.mark.parametrize("run", [command_with_forked_ranks, pytest.param(command, marks=pytest.mark.full)])
@pytest.mark.parametrize(("target", "words"), [
    ("exits", "exits: it ends the process ("),
    pytest.param("vanishes", "vanishes: it ends the process. Repair it.", marks=pytest.mark.full),
    pytest.param("bare", "does not fit zero.verify (missing a required argument: 'model')", marks=pytest.mark.full),
    pytest.param("loses", "loses: it fails with TypeError: unsupported operand", marks=pytest.mark.full),
    pytest.param("careless", "careless: it fails with OSError: no data here (", marks=pytest.mark.full),
    pytest.param("forgetful", "it returned a list", marks=pytest.mark.full),
    pytest.param("nothing", "there is no such function", marks=pytest.mark.full),
])  # fmt: skip
def test_the_command_says_when_it_cannot_find_out(script, run, target, words):
    done = run(f"{script}:{target}", *(["--ranks", 2] if target in ("careless", "vanishes") else []))
    assert done.returncode == 2 and words in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["script.py"], ["nowhere.py:f"], ["{script}:subject", "--ranks", "0"],
                                       ["{script}:subject", "--ranks", "10000000000"]])  # fmt: skip
def test_the_command_refuses_what_names_nothing(script, arguments, capsys):
    from zero.__main__ import main

    assert main(["verify", *(argument.format(script=script) for argument in arguments)]) == 2
    assert capsys.readouterr().err.rstrip().endswith(("script.", "function.", "number.", "fewer."))
