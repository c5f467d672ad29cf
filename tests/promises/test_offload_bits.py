"""H01, H03, N01, N09: whatever a training does, it gives the same bits with offload as without."""

import itertools
import math
from functools import partial

import pytest
import torch

from tests import faults, inside, ranks
from tests.devices import needs_compiler, needs_sim
from tests.promises.loops import alone, one_step
from tests.promises.offloads import (
    DTYPES,
    DTYPES_IN_TURN,
    SHARDED,
    adamw,
    bits,
    difference,
    in_threes,
    on_sim,
    pairs,
    pairs_in_turn,
    send,
    train_windows,
)
from tests.promises.test_clipping import items, skips_of
from tests.promises.trainings import loopback_traces, options_of, train_one
from tests.traces import compare, copied
from tests.zoo import CASES
from tests.zoo.case import backward, draw, real_loss
from zero.config.schema import LossScale, Offload

# ratios and groups ------------------------------------------------------------------------------------------------------


def half_each(model):
    """Two groups with homes of their own, and one that takes the configuration's."""
    halves = [{"params": model[0].parameters(), "offload": {"ratio": 0.5}}, {"params": [model[2].weight], "offload": "cpu"}]
    return torch.optim.AdamW([*halves, {"params": [model[2].bias]}], lr=0.02, eps=1e-2)


def none_each(model):
    groups = [{"params": model[0].parameters()}, {"params": [model[2].weight]}, {"params": [model[2].bias]}]
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


def last_in_device(model):
    groups = [{"params": model[0].parameters()}, {"params": [model[2].weight], "offload": None}, {"params": [model[2].bias]}]
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


def train_and_say_where(model, optimizer, rank):
    found = train_windows(model, optimizer, rank, (1, 3))
    homes = [share.device.type for share in inside.shares_of_masters(optimizer)]
    saved = optimizer.state_dict()["param_groups"]
    assert all(
        group.get("offload", 0) == own.get("offload", 0) for group, own in zip(saved, optimizer.param_groups, strict=True)
    )
    return found, homes


@needs_sim
@pytest.mark.promise("H03")
@SHARDED
@DTYPES_IN_TURN
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_any_ratio_and_groups_with_homes_of_their_own_give_the_same_bits(world, stage, dtype):
    options = {"stage": stage, "dtype": dtype, "make": none_each}
    points = [options, *({**options, "offload": Offload(ratio=ratio)} for ratio in (0.0, 0.5, 1.0))]
    points += [{**options, "make": half_each}, {**options, "make": half_each, "offload": "cpu"}]
    points += [{**options, "make": last_in_device, "offload": "cpu"}]
    for (none, _), *others in on_sim(world, train_and_say_where, points):
        assert [difference(found, none) for found, _ in others] == [None] * 6
        nothing, half, everything, *mixed = [homes.count("cpu") / len(homes) for _, homes in others]
        assert (nothing, everything) == (0.0, 1.0) and 0.0 < half < 1.0
        assert 0.0 < mixed[0] < mixed[1] < 1.0 and 0.0 < mixed[2] < 1.0


# the step in one pass ---------------------------------------------------------------------------------------------------


def windows_with_edits(model, optimizer, rank):
    """Of one backward and of more, clipped, with weights edited and a part of the model unused between."""
    found = [train_windows(model, optimizer, rank, (1, 3))]
    with torch.no_grad():
        model[0].weight[0, 0] = 2.0
    backward(optimizer, real_loss(model[2](draw(model, (3, 6), rank, 5, real=True))))
    optimizer.step()
    optimizer.zero_grad()
    return [*found, bits(model, optimizer), train_windows(model, optimizer, rank, (2,))]


@needs_sim
@pytest.mark.promise("H01", "H03")
@SHARDED
@DTYPES_IN_TURN
def test_the_fused_step_gives_the_same_bits_wherever_shares_live(stage, dtype):
    for none, half, whole in in_threes(on_sim(2, windows_with_edits, pairs(stage, (dtype,), kernels="fused", clip=0.5))):
        assert difference(half, none) is None and difference(whole, none) is None


@pytest.mark.full
@needs_sim
@needs_compiler
@pytest.mark.promise("H01", "H03")
@SHARDED
def test_the_compiled_step_gives_what_torchs_gives_wherever_shares_live(stage):
    """Near it, as its operations are rounded in another order; a bf16 weight may then be the next one."""
    options = [{"stage": stage, "dtype": dtype, "clip": 0.5} for dtype in DTYPES]
    expected = on_sim(2, windows_with_edits, options)
    homes = [Offload(ratio=0.5), "cpu"]
    found = on_sim(2, windows_with_edits, [{**o, "offload": home, "kernels": "compiled"} for o in options for home in homes])
    for ours, theirs in zip(found, expected, strict=True):
        for number, point in enumerate(options):
            near = {"rtol": 1e-5, "atol": 1e-6} if point["dtype"] is None else {"rtol": 2**-7, "atol": 1e-4}
            for mine in ours[2 * number : 2 * number + 2]:
                assert difference(mine, theirs[number], **near) is None


# overflow and norms -----------------------------------------------------------------------------------------------------


def infinities(model, optimizer, rank):
    """In the last element of each parameter of each rank in turn."""
    elements = [(index, item.numel() - 1) for index, item in enumerate(model.items)]
    places = [(bad, index, place, (math.inf, math.nan)[(bad + index) % 2]) for bad in range(2) for index, place in elements]
    in_flight = []
    decide = faults.decision_of(optimizer).now

    def note(*given, **options):
        in_flight.append(inside.num_copies_to_host(optimizer))
        return decide(*given, **options)

    with faults.decision_of(optimizer).replaced(note):
        wrong, skipped, scale, after = skips_of(model, optimizer, rank, 2, places)
    return (wrong, skipped - len(places), scale, after), in_flight


@pytest.mark.full
@needs_sim
@pytest.mark.promise("N01")
@SHARDED
@pytest.mark.parametrize("dtype", ["float16", None, "bfloat16"])
def test_infinity_on_one_rank_in_any_tensor_even_one_in_flight_is_skipped_by_all_with_no_state_touched(stage, dtype):
    points = []
    for offload in (None, "cpu"):
        scale = LossScale(initial=64.0, hysteresis=1) if dtype == "float16" else None
        points.append({"stage": stage, "dtype": dtype, "offload": offload, "loss_scale": scale, "on_nonfinite": "skip"})
    first, second = on_sim(2, infinities, points, items)
    for number, ((one, in_flight), (other, _)) in enumerate(zip(first, second, strict=True)):
        assert one == other, "the ranks skip together"
        assert one[:2] == ([], 0)
        assert one == first[number - number % 2][0], "as without offload"
        if points[number]["offload"] == "cpu":
            assert min(in_flight) > 0, "every judgement found tensors that were still on their way"


def edited_then_clipped(model, optimizer, rank):
    found = []
    for step in range(3):
        send(model, optimizer, rank, step, 0)
        send(model, optimizer, rank, step, 1)
        if step == 1:
            optimizer.settle()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.25)
        model[0].weight.grad.mul_(1000.0)
        whole = [optimizer.whole_grad(parameter).double().cpu() for parameter in model.parameters()]
        true = torch.stack([grad.norm() for grad in whole]).norm().item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        clipped = torch.stack([optimizer.whole_grad(p).double().cpu().norm() for p in model.parameters()]).norm().item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((true, norm, clipped, bits(model, optimizer)))
    return found


@pytest.mark.full
@needs_sim
@pytest.mark.promise("N09")
@SHARDED
def test_clipping_takes_the_norm_of_the_very_gradients_after_a_shard_was_edited_on_the_host(stage):
    for none, half, whole in in_threes(on_sim(2, edited_then_clipped, pairs_in_turn(stage))):
        assert difference(half, none) is None and difference(whole, none) is None
        for true, norm, clipped, _ in whole:
            assert norm == pytest.approx(true, rel=4e-3) and true > 100
            assert clipped == pytest.approx(0.5, rel=4e-3)


# everything that a training may do --------------------------------------------------------------------------------------

# On the simulated device; the grid of tests/test_parity.py has all cases there, with and without offload.
CHOSEN = (
    "a_little_of_everything", "adam_with_amsgrad", "clipped_by_value", "gradient_of_one_layer_removed",
    "gradients_assigned_by_hand", "gradients_cleared_to_zeros", "group_added_while_training", "layer_frozen_and_thawed",
    "layer_frozen_from_the_start_is_thawed_later", "one_layer_initialised_again", "parameter_larger_than_a_bucket",
    "rate_that_is_a_tensor_edited_in_place", "sharpness_aware_by_hand", "weights_clamped_through_data",
)  # fmt: skip


def train_cases(rank, world, names, stage):
    """Each case without offload and with it."""
    import accelerators_sim as simulated

    simulated.bring_up()
    simulated.configure(order="late")
    found = []
    for number, name in enumerate(names):
        dtype = "bf16" if (number + stage) % 2 and "bf16" in CASES[name].dtypes else "fp32"
        group = inside.connected("sim", None, 20.0)
        for offload in (None, "cpu"):
            with torch.device("sim:0"):
                model = CASES[name].build()
            # By default a host and a device take other kernels; see docs/determinism.md.
            options = options_of(name, stage, dtype, "tiny", offload=offload, kernels="torch")
            found.append(train_one(CASES[name], model, CASES[name].optimizer(model), group, options))
            found[-1].state = copied(found[-1].state)
            for step in found[-1].steps:
                step.masters = copied(step.masters)
        group.close()
    return found


@pytest.mark.full
@needs_sim
@pytest.mark.promise("H01")
@SHARDED
def test_edits_clipping_freezing_and_growth_with_offload_give_the_bits_of_none(stage):
    found = ranks.run(2, train_cases, CHOSEN[stage % 2 :: 2], stage, apart="sim", timeout=120.0)
    for number, name in enumerate(CHOSEN[stage % 2 :: 2]):
        none, offloaded = ([traces[2 * number + offload] for traces in found] for offload in range(2))
        assert different_bits(offloaded, none) is None, f"{name} stage={stage}"


def different_bits(ours, theirs):
    """The first difference between two trainings; None where there is none."""
    try:
        compare(ours, theirs, exact=True, state=True)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.promise("H01", "H03")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 16))])
def test_on_the_cpu_every_case_of_the_zoo_gives_the_same_bits_with_offload_and_without(part):
    for number, name in enumerate(sorted(CASES)[part::16]):
        case = CASES[name]
        stage, dtype = 1 + number % 2, case.dtypes[number % len(case.dtypes)]
        offload = ("cpu", Offload(ratio=0.5), Offload(ratio=1.0, pinned=True))[number % 3]
        world = max(2, case.needs_world)
        none = loopback_traces(case, world, **options_of(name, stage, dtype, "tiny"))
        torch.autograd.set_detect_anomaly(False)  # threads that set it and put it back may leave it on
        with faults.MEMORY_ON_HOST.replaced(side_effect=AssertionError("a copy that goes nowhere")):
            found = loopback_traces(case, world, **options_of(name, stage, dtype, "tiny", offload=offload))
        torch.autograd.set_detect_anomaly(False)
        assert different_bits(found, none) is None, f"{name} stage={stage} {dtype} {offload}"


# state dicts ------------------------------------------------------------------------------------------------------------


def saved_halfway(model, optimizer, rank):
    train_windows(model, optimizer, rank, (1, 2))
    saved = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return saved, train_windows(model, optimizer, rank, (2,))


def loaded_halfway(model, optimizer, rank, saved):
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    entries = [(master, value) for master, state in optimizer.state.items() for value in state.values()]
    at_home = all(value.device == master.device for master, value in entries if torch.is_tensor(value) and value.dim())
    return at_home, train_windows(model, optimizer, rank, (2,))


def of_many_buckets():
    return torch.nn.Linear(16, 16, bias=False)


def is_unchanged_by_loading(model, optimizer, rank):
    for step in range(3):
        if step == 1:
            saved = copied(optimizer.state_dict())
        optimizer.backward(model(torch.ones(2, 16, device=model.weight.device)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    before = model.weight.detach().cpu()
    optimizer.load_state_dict(saved)
    return torch.equal(model.weight.detach().cpu(), before)


@needs_sim
@SHARDED
@pytest.mark.parametrize("world", [1, 2])
def test_to_load_the_optimizer_alone_changes_no_weight_wherever_parts_of_a_parameter_live(stage, world):
    points = [{"stage": stage, "offload": home, "bucket_bytes": 256} for home in (None, {"ratio": 0.5}, "cpu")]
    for found in on_sim(world, is_unchanged_by_loading, points, build=of_many_buckets):
        assert found == [True] * len(points)


@pytest.mark.full
@needs_sim
@pytest.mark.promise("H01")
@SHARDED
def test_state_saved_with_offload_goes_on_without_it_and_the_other_way_round(stage):
    points = list(pairs_in_turn(stage))
    found = on_sim(2, saved_halfway, points)[0]
    for number, (saved, after) in enumerate(found):
        other = points[number - number % 3 + (number + 1) % 3]
        for of_rank in on_sim(2, partial(loaded_halfway, saved=saved), [other]):
            at_home, again = of_rank[0]
            assert at_home and difference(again, after) is None


@pytest.mark.promise("H05")
def test_no_training_changes_how_many_threads_there_are(monkeypatch):
    """It is the launcher that knows how many ranks share a machine."""
    asked, before = [], torch.get_num_threads()
    for name in ("set_num_threads", "set_num_interop_threads"):
        monkeypatch.setattr(torch, name, asked.append)
    for kernels, offload in itertools.product(("torch", "fused"), (None, "cpu")):
        model, optimizer = alone(make=adamw, stage=1, kernels=kernels, offload=offload)
        one_step(model, optimizer)
        optimizer.close()
    assert torch.get_num_threads() == before and asked == []
