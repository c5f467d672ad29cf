"""accelerate's loop on two ranks, sharded: as one process on the joint batch."""

import re
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests import ranks
from tests.devices import needs_accelerate, needs_muon
from tests.zero.integrations.on_ranks import (
    assert_runs_as_a_program,
    assert_same_training,
    both_ranks,
    means_of_pairs,
    one_process,
    plain_training,
)

HERE, EXAMPLE = "tests.zero.integrations.test_accelerate", "examples.accelerate_loop"
pytestmark = needs_accelerate


def joint_losses(model):
    """accelerate hands batches out in turns: at micro-step n rank r has batch 2 n + r; two micro-steps make a step."""
    data = import_module(EXAMPLE).make_data()
    for step in range(4):
        x, y = (tensor[16 * step : 16 * (step + 1)] for tensor in data.tensors)
        yield nn.functional.mse_loss(model(x), y)


def schedule(optimizer):
    """accelerate counts a schedule's steps in batches of one rank: two of them at each step here."""
    made = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    step = made.step
    made.step = lambda: [step() for _ in range(2)]
    return made


def plain_loop():
    example = import_module(EXAMPLE)
    return plain_training(example.make_model(), joint_losses, clip=example.CLIP, schedule=schedule)


def test_the_loop_accumulates_clips_schedules_and_saves_as_one_process_does_and_resumes_bit_by_bit(tmp_path):
    found = both_ranks(f"{EXAMPLE}:train", 4)
    assert_same_training(means_of_pairs(found), *one_process(f"{HERE}:plain_loop"))

    both_ranks(f"{EXAMPLE}:train", 2, save_to=str(tmp_path))
    assert (tmp_path / "zero" / "state" / "manifest.json").is_file()
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("optimizer*"))
    again = both_ranks(f"{EXAMPLE}:train", 2, resume_from=str(tmp_path))
    for rank in range(2):
        assert again[rank][0] == found[rank][0][4:]
        for name, weight in found[rank][1].items():
            assert torch.equal(again[rank][1][name], weight), name


def prepared_where_accelerate_sees_one_process():
    from zero.integrations.accelerate import ShardedAccelerator

    model = nn.Linear(2, 2)
    try:
        ShardedAccelerator(cpu=False, zero={"stage": 2}).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        assert model.weight.untyped_storage().nbytes() == model.weight.nbytes, "the model is plain again"
        return str(error)


def test_ranks_that_accelerate_does_not_see_are_refused_before_they_train_on_the_same_data():
    for said in both_ranks(f"{HERE}:prepared_where_accelerate_sees_one_process"):
        assert said.startswith("Cannot train 2 ranks under accelerate: it sees 1, so all would train on the same data.")


def saved_whole(folder):
    """What accelerate saves of weights that are in shares, and what they are."""
    from safetensors.torch import load_file

    from zero.integrations.accelerate import ShardedAccelerator

    accelerator = ShardedAccelerator(cpu=True, zero={"stage": 3})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = accelerator.get_state_dict(model)
    storages = [tensor.untyped_storage().nbytes() > 0 for tensor in state.values()]
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    return weights, state, storages, load_file(f"{folder}/model.safetensors")


def test_weights_in_shares_are_saved_whole(tmp_path):
    for weights, state, storages, saved in both_ranks(f"{HERE}:saved_whole", str(tmp_path)):
        assert weights.keys() == state.keys() == saved.keys() and all(storages)
        for name, weight in weights.items():
            assert torch.equal(state[name], weight) and torch.equal(saved[name], weight), name


def of_a_file(folder):
    from zero.integrations.accelerate import ShardedAccelerator

    tree = {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    found = ShardedAccelerator(zero=tree, cpu=True, gradient_accumulation_steps=4).zero
    with pytest.raises(ValueError, match="gradient_accumulation_steps makes it 4"):
        ShardedAccelerator(zero={"gradient_accumulation_steps": 2}, cpu=True, gradient_accumulation_steps=4)
    return found["stage"], found.get("dtype")


def of_ddp():
    """Returns what an Accelerator makes of the arguments of DistributedDataParallel."""
    from accelerate.utils import DistributedDataParallelKwargs

    from zero.integrations.accelerate import ShardedAccelerator

    def make(zero, **arguments):
        return ShardedAccelerator(zero=zero, cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**arguments)])

    for hook in ({"comm_hook": "bf16"}, {"comm_wrapper": "fp16"}):
        with pytest.raises(ValueError, match="reduce_dtype"):
            make({"stage": 1}, **hook)
    with pytest.MonkeyPatch.context() as patch:
        warned = []
        patch.setattr("zero.integrations.options.logger.warning", warned.append)
        make({"stage": 1}, find_unused_parameters=True, static_graph=True)
        assert not warned, "which ask for nothing that is not done"
        make({"stage": 1}, bucket_cap_mb=100)
        assert len(warned) == 1 and "bucket_cap_mb" in warned[0]
    found = []
    off = {"broadcast_buffers": False}
    for options, arguments in (({}, {}), ({}, off), ({"buffers": "local"}, {}), ({"buffers": "broadcast"}, off)):
        model = nn.Linear(2, 2)
        accelerator = make({"stage": 1, **options}, **arguments)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(accelerator.sharded.config.buffers)
        accelerator.sharded.close()
    return found


@pytest.mark.promise("T04")
def test_what_was_asked_of_ddp_is_done_refused_or_told():
    assert one_process(f"{HERE}:of_ddp") == ["broadcast", "local", "local", "broadcast"]


def test_a_deepspeed_configuration_gives_the_options(tmp_path):
    assert one_process(f"{HERE}:of_a_file", str(tmp_path)) == (1, None)


def saved_where_a_loop_may(folder):
    """Saves after `model.zero_grad()`, in an accumulation, and where one was cleared; what each is and what comes of it."""
    from zero.integrations.accelerate import ShardedAccelerator

    accelerator = ShardedAccelerator(cpu=True, zero={"stage": 2}, gradient_accumulation_steps=2)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def backward(times):
        for number in range(times):
            with accelerator.accumulate(model):
                x = torch.full((2, 4), 1.0 + number + accelerator.process_index)
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                model.zero_grad() if accelerator.sync_gradients else None

    def rest():
        model.zero_grad()
        optimizer.optimizer.zero_grad()
        backward(2)
        return [param.detach().clone() for param in model.parameters()]

    backward(2)
    accelerator.save_state(f"{folder}/stepped")
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    whole = [optimizer.whole_grad(model.weight), optimizer.optimizer.grad_norm == optimizer.grad_norm]
    accelerator.save_state(f"{folder}/accumulating")
    model.zero_grad()
    accelerator.save_state(f"{folder}/cleared")
    zero.save(f"{folder}/own", accelerator.sharded)
    zero.save(f"{folder}/prepared", optimizer)
    found = []
    for name in ("stepped", "accumulating", "cleared"):
        accelerator.load_state(f"{folder}/{name}")
        found.append(rest())
    return whole, found


def test_states_are_saved_after_clearing_the_model_and_in_an_accumulation_as_accelerate_saves_them(tmp_path):
    for (grad, is_asked), (stepped, accumulating, cleared) in both_ranks(f"{HERE}:saved_where_a_loop_may", str(tmp_path)):
        assert is_asked and grad.shape == (2, 4) and grad.any()
        assert all(map(torch.equal, stepped, accumulating)) and all(map(torch.equal, stepped, cleared))


def local_sgd():
    from accelerate.local_sgd import LocalSGD

    from zero.integrations.accelerate import ShardedAccelerator

    accelerator, model = ShardedAccelerator(cpu=True, zero={"stage": 2}), nn.Linear(4, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match=r"Cannot use LocalSGD: no rank can step alone.* Leave it out"):
        LocalSGD(accelerator, model, local_sgd_steps=4)


def test_local_sgd_is_refused_with_its_reason():
    both_ranks(f"{HERE}:local_sgd")


def uneven_inputs():
    from accelerate import Accelerator, DataLoaderConfiguration

    from zero.integrations.accelerate import ShardedAccelerator

    model, uneven = nn.Linear(4, 2), DataLoaderConfiguration(even_batches=False)
    accelerator, other = (ShardedAccelerator(cpu=True, zero={"stage": 2}, dataloader_config=each) for each in (None, uneven))
    # This stands for GPUs, where accelerate asks for modules of DistributedDataParallel even if there is nothing to join.
    with mock.patch.object(Accelerator, "multi_device", True):
        with accelerator.join_uneven_inputs([model]), accelerator.join_uneven_inputs([model], even_batches=True):
            pass
        for each, options in ((accelerator, {"even_batches": False}), (other, {}), (other, {"even_batches": True})):
            with pytest.raises(NotImplementedError, match=r"Cannot join uneven inputs: .*no_contribution\(\) and step\(\)"):
                each.join_uneven_inputs([model], **options)


def test_nothing_is_joined_if_batches_are_even_and_else_the_way_is_said():
    both_ranks(f"{HERE}:uneven_inputs")


def test_the_example_runs_as_a_program(tmp_path):
    assert_runs_as_a_program("accelerate_loop", tmp_path)


def refused():
    from accelerate import Accelerator, DistributedType, ParallelismConfig

    from zero.integrations.accelerate import ShardedAccelerator

    accelerator, said = ShardedAccelerator(cpu=True, zero={"stage": 2}), []
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def ask(call, *arguments):
        with pytest.raises(ValueError) as error:
            call(*arguments)
        said.append(str(error.value))

    ask(accelerator.prepare, model)
    ask(accelerator.prepare, optimizer)
    ask(accelerator.prepare_optimizer, optimizer)
    accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    accelerator.prepare(model, optimizer)
    ask(accelerator.prepare, other, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.sharded.close()
    for name, value in (("distributed_type", DistributedType.FSDP), ("parallelism_config", ParallelismConfig(cp_size=2))):
        found = Accelerator(cpu=True)
        with mock.patch.object(Accelerator, name, value):
            ask(ShardedAccelerator.of, found, {"stage": 2})
    return said


def test_what_is_not_one_plain_model_with_its_optimizer_is_refused():
    expected = (
        r"Cannot prepare a Linear without its optimizer: .* Pass both to one prepare, or freeze .*",
        r"Cannot prepare 1 optimizers and 0 models that are trained: .* or use zero\.shard .*",
        r"Cannot prepare a SGD alone: it is sharded for a model\. Pass both to one prepare\.",
        r"Cannot prepare 1 optimizers and 1 models that are trained, after an optimizer was prepared before: .*",
        r".* set up for FSDP, which distributes the model itself\. Configure it .*",
        r".* set up for cp_size, which distributes the model itself\. Configure it .*",
    )
    for pattern, words in zip(expected, one_process(f"{HERE}:refused"), strict=True):
        assert re.fullmatch(pattern, words), words


def several_as_one(rank, world):
    """Whether Muon and AdamW as one optimizer train, with clipping and a schedule, as they do apart in plain PyTorch."""
    from zero.integrations.accelerate import ShardedAccelerator
    from zero.optim.several import Optimizers

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        kinds = [torch.optim.Muon, torch.optim.AdamW]
        return model, [kind([p for p in model.parameters() if p.dim() == dims], lr=0.02)
                       for kind, dims in zip(kinds, (2, 1), strict=True)]  # fmt: skip

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    (plain, apart), (model, together) = make(), make()
    # These kernels have the bits of plain torch.
    accelerator = ShardedAccelerator(zero={"stage": 2, "kernels": "torch"}, cpu=True)
    prepared, optimizer = accelerator.prepare(model, Optimizers(together))
    steps, plain_steps = accelerator.prepare(schedule(optimizer)), [schedule(one) for one in apart]
    for _ in range(3):
        accelerator.backward(prepared(torch.ones(2, 6)).square().mean())
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        plain(torch.ones(2, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for one in (optimizer, steps, *apart, *plain_steps):
            one.step()
        for one in (optimizer, *apart):
            one.zero_grad()
    return all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


@needs_muon
def test_several_optimizers_made_one_train_as_they_do_apart():
    assert ranks.run(1, several_as_one) == [True]
