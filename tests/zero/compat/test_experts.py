"""Layers of experts of DeepSpeed's kind: what they compute is what DeepSpeed's do, and they train as in one process."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accelerators
import zero
import zero.compat.deepspeed as deepspeed
from tests import moe_cases, ranks
from tests.devices import needs_sim
from zero.compat.deepspeed.moe.experts import Experts
from zero.compat.deepspeed.moe.layer import MoE
from zero.compat.deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from zero.compat.deepspeed.utils import groups

WIDTH, NUM_EXPERTS, NUM_STEPS, VOCABULARY = 6, 4, 3, 11


@pytest.mark.promise("Q12")
def test_a_layer_computes_what_deepspeeds_does():
    recorded = json.loads(moe_cases.RECORDED.read_text())
    assert recorded.keys() == moe_cases.CASES.keys()
    for name, expected in recorded.items():
        found = moe_cases.outputs(MoE, moe_cases.CASES[name])
        assert found["counts"] == expected["counts"] and found["grads"].keys() == expected["grads"].keys(), name
        for key in ("output", "loss", "input", "grads"):
            assert found[key] == pytest.approx(expected[key], rel=2e-5, abs=1e-6), (name, key)


class Marked(MoE):
    """A layer of somebody else, that makes its groups and says of parameters only that they are of experts."""

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_=False):
        groups._create_expert_and_data_parallel(self.ep_size)


class Model(nn.Module):
    def __init__(self, layer, ep_size, k):
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        options = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.layers = nn.ModuleList(layer(WIDTH, expert, NUM_EXPERTS, ep_size, k, use_residual=number == 1, **options)
                                    for number in range(2))  # fmt: skip

    def forward(self, tokens):
        x, loss = self.embed(tokens), 0.0
        for layer in self.layers:
            y, balance, _ = layer(x)
            x, loss = x + y, loss + balance
        return self.head(x), loss


def whole_model(k):
    torch.manual_seed(0)
    model = Model(MoE, 1, k).double()
    with torch.no_grad():  # experts are copies of one
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.4)
    return model


def own_values(model, part, parts):
    """The values of a whole model that a rank has, by its names."""
    values = {}
    for name, param in model.named_parameters():
        before, is_of_expert, after = name.partition("deepspeed_experts.")
        if is_of_expert:
            number, _, rest = after.partition(".")
            number = int(number) - part * (NUM_EXPERTS // parts)
            if not 0 <= number < NUM_EXPERTS // parts:
                continue
            name = f"{before}{is_of_expert}{number}.{rest}"
        values[name] = param.detach()
    return values


def batch_of(step, rank):
    """Tokens and targets; the third rank has none in the second step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    number = 0 if step == 1 and rank == 2 else 8
    return torch.randint(0, VOCABULARY, (2, 2, number), generator=generator)


def loss_of(engine, batch):
    output, balance = engine(batch[0])
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum") / 16 + 0.1 * balance


def adamw(model):
    named = {"params": [param for param in model.parameters() if param.requires_grad], "name": "all of them"}
    return torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(named), lr=0.02)


def trained(rank, world, layer, ep_size, k, stage, folder):
    """Returns the largest difference from one process, of norms, weights and a checkpoint that one rank's model loads."""
    expected = whole_model(k)
    start = copy.deepcopy(expected)
    plain, norms = adamw(expected), []
    for step in range(NUM_STEPS):
        plain.zero_grad()
        for each in range(world):
            (loss_of(expected, batch_of(step, each)) / world).backward()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.1)))
        plain.step()
    model, part = Model(layer, ep_size, k).double(), rank % ep_size
    with torch.no_grad():
        for name, value in own_values(start, part, ep_size).items():
            model.get_parameter(name).copy_(value)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage}}
    optimizer = adamw(model)
    assert [group.get("moe", False) for group in optimizer.param_groups] == [False, True]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert engine.has_moe_layers and groups._get_expert_parallel_world_size(f"ep_size_{ep_size}") == ep_size
    worst = 0.0
    for step in range(NUM_STEPS):
        engine.backward(loss_of(engine, batch_of(step, rank)))
        engine.step()
        worst = max(worst, abs(engine.get_global_grad_norm() / norms[step] - 1))
    copy.deepcopy(model.layers[0].deepspeed_moe.experts)
    engine.save_checkpoint(folder)
    engine.destroy()
    values = own_values(expected, part, ep_size)
    assert values.keys() == dict(model.named_parameters()).keys()
    worst = max(worst, *(float((param - values[name]).abs().max()) for name, param in model.named_parameters()))
    saved = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    return max(worst, *(float((saved[name] - param.float()).abs().max()) for name, param in expected.named_parameters()))


@pytest.mark.promise("Q12")
@pytest.mark.parametrize(("layer", "ep_size", "k", "stage"), [
    (MoE, 2, 2, 3), (Marked, 2, 1, 2), pytest.param(Marked, 2, 1, 3, marks=pytest.mark.full),
    *(pytest.param(MoE, ep_size, k, stage, marks=pytest.mark.full)
      for ep_size, k in ((2, 2), (2, 1), (2, 3), (4, 2), (1, 2)) for stage in range(4) if (ep_size, k, stage) != (2, 2, 3)),
])  # fmt: skip
def test_a_script_with_deepspeeds_experts_trains_as_in_one_process(layer, ep_size, k, stage, tmp_path):
    assert max(ranks.run(4, trained, layer, ep_size, k, stage, str(tmp_path))) < 1e-6


def trained_on(rank, world, device, stage, options, folder):
    """Returns norms and weights of a training on a device."""
    accelerator = accelerators.use(device)
    store = torch.distributed.FileStore(f"{folder}/{device}", world)
    torch.distributed.init_process_group(accelerator.communication_backend, store=store, rank=rank, world_size=world)
    model = Model(MoE, world, 2)
    with torch.no_grad():
        for name, value in own_values(whole_model(2), rank, world).items():
            model.get_parameter(name).copy_(value)
    model.to(accelerator.device())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage, **options}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    norms = []
    for step in range(NUM_STEPS):
        engine.backward(loss_of(engine, batch_of(step, rank).to(accelerator.device())))
        engine.step()
        norms.append(torch.tensor(engine.get_global_grad_norm()))
    return [*norms, *(param.detach().cpu().clone() for param in model.parameters())]


@pytest.mark.full
@needs_sim
@pytest.mark.promise("Q12")
@pytest.mark.parametrize(("stage", "options"), [
    (1, {}), (3, {}), *((stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (2, 3)),
])  # fmt: skip
def test_deepspeeds_experts_train_on_a_device_as_on_the_host(stage, options, tmp_path):
    of_ranks = [ranks.run(2, trained_on, device, stage, options, str(tmp_path), fresh=True, group=False)
                for device in ("cpu", "sim")]  # fmt: skip
    for expected, values in zip(*of_ranks, strict=True):
        for one, other in zip(expected, values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def order_of_ranks(rank, world):
    groups._create_expert_and_data_parallel(2)
    near = groups._get_expert_parallel_group_ranks("ep_size_2"), groups._get_expert_data_parallel_group_ranks("ep_size_2")
    places = groups._get_expert_parallel_rank("ep_size_2"), groups._get_expert_data_parallel_rank("ep_size_2")
    firsts = groups._get_expert_parallel_src_rank("ep_size_2"), groups._get_expert_broadcast_src_rank("ep_size_2")
    assert groups._get_max_expert_size_name() == "ep_size_2" and groups._get_expert_data_parallel_world_size("ep_size_2") == 2
    assert groups._get_max_expert_parallel_group() is groups._get_expert_parallel_group_dict()["ep_size_2"]
    groups._create_expert_and_data_parallel(4, use_data_before_expert_parallel_=True)
    return near, places, firsts, groups._get_expert_parallel_group_ranks("ep_size_4")


def test_groups_of_experts_are_of_neighbours():
    for rank, found in enumerate(ranks.run(4, order_of_ranks)):
        part, first = rank % 2, rank - rank % 2
        assert found == (([first, first + 1], [part, part + 2]), (part, rank // 2), (first, part), [0, 1, 2, 3])


def test_parameters_of_experts_are_told_from_others():
    model = Model(MoE, 1, 1)
    of_experts = [param for name, param in model.named_parameters() if "deepspeed_experts" in name]
    assert has_moe_layers(model) == (True, NUM_EXPERTS) and all(map(is_moe_param, of_experts))
    shared, apart = split_params_into_shared_and_expert_params(list(model.parameters()))
    assert list(map(id, apart)) == list(map(id, of_experts)) and len(shared) + len(apart) == len(list(model.parameters()))
    apart[0].grad = torch.zeros_like(apart[0])
    assert [len(grads) for grads in split_params_grads_into_shared_and_expert_params(model.parameters())] == [0, 1]
    found = configure_moe_param_groups(list(model.parameters()))
    assert [group["name"] for group in found] == ["dense-params", "ep_size_1"] and configure_moe_param_groups(found) is found
    small = split_params_into_different_moe_groups_for_optimizer({"params": apart, "name": "all", "lr": 2.0}, 100)
    assert len(small) > 2 and {group["lr"] for group in small} == {2.0} and not small[0]["params"]
    assert all(sum(param.numel() for param in group["params"]) <= 100 for group in small)


@pytest.mark.parametrize(("options", "words"), [
    ({"num_experts": 3, "ep_size": 2}, "MoE of 3 experts over 2 ranks"),
    ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy='Loud'"),
    ({"k": 2}, "k=2"),
])  # fmt: skip
def test_a_layer_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MoE(4, nn.Linear(4, 4), **options)


def test_experts_over_ranks_that_are_not_there_are_refused():
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with pytest.raises(ValueError, match="Cannot have experts over 2 ranks: 1 ranks cannot be divided so"):
        deepspeed.initialize(model=MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2), config=config)
    with pytest.raises(KeyError, match="Cannot find the group 'ep_size_2'"):
        MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"Cannot initialize: deepspeed_experts\.0\.weight is of an expert .* 'of nobody'"):
        deepspeed.initialize(model=Experts(nn.Linear(4, 4), 2, "of nobody"), config=config)


def test_tokens_that_are_not_used_go_to_no_expert():
    torch.manual_seed(0)
    layer, x = MoE(4, nn.Linear(4, 4), num_experts=2, min_capacity=8), torch.randn(6, 4)
    used = torch.tensor([1, 0, 1, 1, 0, 1])
    output, _, counts = layer(x, used)
    assert counts.sum() == 4 and not output[used == 0].any() and output[used == 1].all()


def sharded_without_an_engine(rank, world):
    """Returns what is said of a layer that nobody called."""
    model = Model(MoE, 1, 1)
    with pytest.raises(ValueError) as caught:
        zero.shard(model, adamw(model), stage=2)
    for layer in model.layers:
        layer.set_deepspeed_parallelism()
    optimizer = zero.shard(model, adamw(model), stage=2)
    loss_of(model, batch_of(0, rank)).backward()
    optimizer.step()
    optimizer.check()
    return str(caught.value)


def test_without_an_engine_a_layer_is_called_first():
    for said in ranks.run(2, sharded_without_an_engine):
        assert "layers.0.deepspeed_moe.experts.deepspeed_experts.0.0.weight" in said and "set_deepspeed_parallelism()" in said
