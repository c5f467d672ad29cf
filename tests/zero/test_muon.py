"""Muon as a DeepSpeed file writes it, and optimizers that are passed as a list."""

import logging

import pytest
import torch
from torch import nn

import zero
from tests.devices import needs_muon
from tests.loopback import run_ranks
from tests.promises.loops import one_step, same, weights
from tests.zoo.case import draw, filled, real_loss
from tests.zoo.whole_tensors import matrices_and_others
from zero.optim.muon import Muon
from zero.plan.layout import ParamSpec
from zero.tools.plan import for_muon

OPTIM = torch.optim
pytestmark = needs_muon


class Net(nn.Module):
    """What Muon is for, and what it is not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.lm_head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.lm_head(self.layers(x + self.embedding.weight.sum(0)))


def net():
    return filled(Net(), real=True)


OWN_BITS = {"gradient_clipping": 0, "zero_accelerators": {"kernels": "torch"}}


def config(**params):
    return {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Muon", "params": params},
            "zero_optimization": {"stage": 2}, **OWN_BITS}  # fmt: skip


SETTINGS = {"lr": 0.03, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-2}


def by_hand(model, lr=0.03):
    rest = [model.embedding.weight, model.layers[0].bias, model.layers[2].bias, model.lm_head.weight]
    return [
        OPTIM.Muon([model.layers[0].weight, model.layers[2].weight], lr=lr, momentum=0.9, weight_decay=0.1),
        OPTIM.AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1),
    ]


def trained(world, **options):
    """The weights after three steps of an engine, of each rank."""
    models = [net() for _ in range(world)]
    made = [{name: value(model) if callable(value) else value for name, value in options.items()} for model in models]

    def one(group):
        model = models[group.rank]
        engine, *_ = zero.initialize(model=model, mesh_param=None, **made[group.rank], mpu=None)
        for step in range(3):
            engine.backward(real_loss(engine(draw(model, (3, 4), group.rank, step, real=True))))
            engine.step()
        return weights(model)

    return one(type("Alone", (), {"rank": 0})) if world == 1 else run_ranks(world, one, 20.0)


def test_a_plan_gives_muon_what_the_configuration_gives_it():
    model = nn.ModuleDict({"wte": nn.Embedding(8, 4), "embed_tokens": nn.Embedding(8, 4), "conv": nn.Conv1d(2, 3, 3)})
    model["experts"] = nn.ParameterList([nn.Parameter(torch.ones(2, 4, 6)), nn.Parameter(torch.ones(4))])
    model["lm_head"] = nn.Linear(4, 8)
    engine, optimizer, *_ = zero.initialize(model=model, config=config())
    muon = {id(param) for group in optimizer.param_groups if "ns_steps" in group for param in group["params"]}
    specs = [ParamSpec(name, tuple(param.shape), "float32") for name, param in model.named_parameters()]
    works = {spec.name: spec.work for spec in for_muon(specs) if spec.work}
    assert works == {"wte.weight": 8 * 4 * 4, "conv.weight": 3 * 2 * 3 * 2, "experts.0": 2 * 4 * 6 * 4}
    assert works.keys() == {name for name, param in model.named_parameters() if id(param) in muon}
    engine.close()


def plain():
    model = net()
    optimizers = by_hand(model)
    for step in range(3):
        real_loss(model(draw(model, (3, 4), 0, step, real=True))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_muon_of_a_deepspeed_file_trains_matrices_and_adamw_the_rest():
    assert same(trained(1, config=config(**SETTINGS)), plain())


def test_optimizers_passed_as_a_list_train_under_an_engine():
    file = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            **OWN_BITS}  # fmt: skip
    assert same(trained(1, config=file, optimizer=by_hand), plain())


def groups_of(engine):
    names = {id(param): name for name, param in engine.module.named_parameters()}
    return [([names[id(param)] for param in group["params"]], group["lr"]) for group in engine.optimizer.param_groups]


def test_rates_defaults_and_settings_of_groups_are_deepspeeds():
    engine, *_ = zero.initialize(model=net(), config=config())
    assert groups_of(engine) == [
        (["layers.0.weight", "layers.2.weight"], 0.02),
        (["embedding.weight", "layers.0.bias", "layers.2.bias", "lm_head.weight"], 3e-4),
    ]
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.0 and engine.optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    engine.destroy()
    model = net()
    first = {"params": list(model.layers.parameters()), "lr": 0.5}
    second = {"params": [model.embedding.weight, model.lm_head.weight], "weight_decay": 0.25}
    engine, *_ = zero.initialize(model=model, model_parameters=[first, second], config=config(lr=0.1, muon_lr=0.2))
    assert groups_of(engine) == [
        (["layers.0.weight", "layers.2.weight"], 0.5),
        (["layers.0.bias", "layers.2.bias"], 0.5),
        (["embedding.weight", "lm_head.weight"], 0.1),
    ]
    assert engine.optimizer.param_groups[2]["weight_decay"] == 0.25
    engine.destroy()


def test_a_parameter_may_say_itself_whether_muon_is_for_it():
    model = net()
    model.lm_head.weight.use_muon, model.layers[0].weight.use_muon = True, False
    engine, *_ = zero.initialize(model=model, config=config())
    assert groups_of(engine)[0][0] == ["layers.2.weight", "lm_head.weight"]
    engine.destroy()


class Experts(nn.Module):
    """Matrices one above the other, of each head, and one behind the other, of each expert."""

    def __init__(self, apart=False):
        super().__init__()
        shapes = [(6, 4)] * 2 + [(4, 6)] * 3
        parts = [filled(nn.Linear(*reversed(shape), bias=False), real=True).weight.detach() * (1 + 0.1 * at)
                 for at, shape in enumerate(shapes)]  # fmt: skip
        self.heads = nn.ParameterList(parts[:2] if apart else [torch.cat(parts[:2])])
        self.experts = nn.ParameterList(parts[2:] if apart else [torch.stack(parts[2:])])
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        experts = [matrix for param in self.experts for matrix in (param if param.dim() == 3 else [param])]
        heads = [matrix for param in self.heads for matrix in param.split(6)]
        return sum((x @ head.T) @ expert.T for head in heads for expert in experts) + self.bias

    def matrices(self):
        return [m.detach() for param in (*self.heads, *self.experts) for m in (param if param.dim() == 3 else param.split(6))]


def groups_of_experts(model, num_heads):
    return [{"params": list(model.heads), "num_heads": num_heads}, {"params": list(model.experts), "lr": 0.1}]


def trained_experts(group, stage, **options):
    model = Experts()
    made = [Muon(groups_of_experts(model, 2), lr=0.05), OPTIM.SGD([model.bias], lr=0.1)]
    optimizer = zero.shard(model, made, stage=stage, group=group, **options)
    for step in range(3):
        optimizer.backward(real_loss(model(draw(model, (3, 4), 0, step, real=True).to(model.bias.dtype))))
        optimizer.step()
        optimizer.zero_grad()
    found = weights(model)
    optimizer.close()
    return found


def trained_by(model, optimizers):
    for step in range(3):
        real_loss(model(draw(model, (3, 4), 0, step, real=True))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.promise("W01")
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_head_and_each_expert_is_a_matrix_of_its_own_on_any_number_of_ranks(stage, world):
    model = Experts()
    plain = weights(trained_by(model, [Muon(groups_of_experts(model, 2), lr=0.05), OPTIM.SGD([model.bias], lr=0.1)]))
    for found in run_ranks(world, lambda group: trained_experts(group, stage, bucket_bytes=64), 20.0):
        assert same(found, plain)


def test_they_step_as_torchs_muon_steps_them_one_by_one():
    together, apart = Experts(), Experts(apart=True)
    trained_by(together, [Muon(groups_of_experts(together, 2), lr=0.05), OPTIM.SGD([together.bias], lr=0.1)])
    heads, experts = groups_of_experts(apart, 1)
    del heads["num_heads"]
    trained_by(apart, [OPTIM.Muon([heads, experts], lr=0.05), OPTIM.SGD([apart.bias], lr=0.1)])
    before = Experts().matrices()
    for one, other, start in zip(together.matrices(), apart.matrices(), before, strict=True):
        assert (one - other).norm() <= 0.05 * (one - start).norm() != 0


def test_a_deepspeed_file_takes_experts_and_heads_that_a_parameter_says_itself():
    model = net()
    model.experts = nn.Parameter(torch.ones(2, 4, 4))
    model.layers[0].weight.muon_num_heads = 3
    engine, *_ = zero.initialize(model=model, config=config())
    assert [names for names, _ in groups_of(engine)][:2] == [["experts", "layers.2.weight"], ["layers.0.weight"]]
    assert [group.get("num_heads") for group in engine.optimizer.param_groups] == [1, 3, None]
    engine.destroy()


@pytest.mark.parametrize(
    ("shape", "heads", "said"),
    [((2, 2, 4, 4), None, r"its shape is \(2, 2, 4, 4\)"), ((6, 4), 4, "with 4 heads"), ((2, 4, 4), 2, "with 2 heads")],
)
def test_what_is_made_of_no_matrices_is_named_and_may_be_left_to_adamw(shape, heads, said):
    model = net()
    model.experts = nn.Parameter(torch.ones(shape))
    if heads is not None:
        model.experts.muon_num_heads = heads
        with pytest.raises(ValueError, match=f"num_heads={heads}: it is not made of matrices"):
            Muon([model.experts], num_heads=heads)
    with pytest.raises(ValueError, match=f"Cannot make Muon for experts: .*{said}.* Set use_muon = False"):
        zero.initialize(model=model, config=config())
    model.experts.use_muon = False
    engine, *_ = zero.initialize(model=model, config=config())
    assert "experts" in groups_of(engine)[-1][0]
    engine.destroy()


@pytest.mark.parametrize(
    ("params", "message"),
    [({"per_head_muon": True}, "per_head_muon"), ({"momentum": 1.0}, "momentum"), ({"ns_method": "svd"}, "ns_method")],
)
def test_settings_of_muon_that_are_not_served_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        zero.initialize(model=net(), config=config(**params))


@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -0.1}, {"adjust_lr_fn": "match_rms_adam"}], ids=str
)
@pytest.mark.parametrize("in_group", [True, False])
def test_settings_that_torchs_muon_refuses_are_refused_in_groups_too(setting, in_group):
    params = [nn.Parameter(torch.ones(4, 4))]
    [(name, value)] = setting.items()
    with pytest.raises(ValueError, match=f"Cannot make Muon with {name}={value!r}"):
        Muon([{"params": params, **setting}]) if in_group else Muon(params, **setting)
    with pytest.raises(ValueError, match=f"{value}"):
        OPTIM.Muon(params, **setting)


def test_state_of_torchs_muon_leaves_the_number_of_heads_as_it_is():
    model = nn.Linear(4, 6, bias=False)
    before = OPTIM.Muon(model.parameters(), lr=0.02)
    one_step(model, before)
    after = Muon([{"params": [model.weight], "num_heads": 3}])
    after.load_state_dict(before.state_dict())
    assert [(group["num_heads"], group["lr"]) for group in after.param_groups] == [(3, 0.02)]
    assert after.state[model.weight]["momentum_buffer"].equal(before.state[model.weight]["momentum_buffer"])


def test_a_schedule_of_one_of_the_optimizers_drives_it_and_another_ones_is_refused(caplog):
    model = net()
    optimizers = by_hand(model)
    schedule = OPTIM.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.5**step)
    file = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}, "gradient_clipping": 0}
    engine, *_ = zero.initialize(model=model, optimizer=optimizers, lr_scheduler=schedule, config=file)
    with caplog.at_level(logging.WARNING):
        engine.backward(real_loss(engine(draw(model, (3, 4), 0, 0, real=True))))
        engine.step()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.015, 0.01]
    engine.destroy()
    stranger = OPTIM.lr_scheduler.LambdaLR(by_hand(net())[0], lambda step: 1.0)
    other = net()
    with pytest.raises(ValueError, match="drives another optimizer"):
        zero.initialize(model=other, optimizer=by_hand(other), lr_scheduler=stranger, config=file)


def test_a_list_of_one_is_that_one():
    model = net()
    muon = OPTIM.Muon(matrices_and_others(model)[0])
    optimizer = zero.shard(model, [muon], stage=2)
    one_step(model, optimizer)
    assert optimizer.inner is muon
    optimizer.close()
