"""V07: a step asks the device nothing where no act of the host hangs on the answer, and gives what one that asks gives."""

import contextlib
import itertools
import logging
import math

import pytest
import torch
from torch import nn

import zero
from tests import faults, inside, nccl_like, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.offloads import copied, place_of
from tests.zoo.case import filled, real_numbers
from zero import shard
from zero.errors import RanksDiffer

HOST = "the host"
ORDER_IS_KNOWN = {0: 0, 2: 0, 3: 2}  # by stage, the first window in which hosts ask each other for no weights
VALUES = (1.0, 1e30, 0.0, math.inf, math.nan)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def momentum(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)


def trainer(options, stage=2, make=adamw):
    torch.manual_seed(0)
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), real=True).to(place_of(0, "sim"))
    inner = make(model.parameters())
    return model, shard(model, inner, stage=stage, dtype="bfloat16", group=solo(), **options)


def batch_of(number):
    return real_numbers((2, 8), number).to("sim:0", torch.bfloat16)


def send(model, batch, factor=1.0):
    (model(batch).float().square().mean() * factor).backward()


def waits_of_steps(rank, world, options, stage, make=adamw):
    """Counts the waits of the host for the device from a backward to the end of a step, and then to read what became of it."""
    from accelerators_sim.waits import recorded_waits

    model, optimizer = trainer({**options, "clip": None if options["clip"] == "by torch" else options["clip"]}, stage, make)
    counted, read = [], []
    for batch in map(batch_of, range(4)):
        with recorded_waits() as waits:
            send(model, batch)
            if options["clip"] == "by torch":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counted.append(sum(wait.waiter == HOST for wait in waits))
        with recorded_waits() as waits:
            assert optimizer.grad_norm > 0 and optimizer.skipped_steps == 0
        read.append(sum(wait.waiter == HOST for wait in waits))
        optimizer.zero_grad()
    return counted, read


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("clip", [None, 1.0, "by torch"])
@pytest.mark.parametrize("bucket_bytes", [256, 2**20])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_from_backward_to_the_end_of_a_step_the_host_waits_for_nothing(policy, clip, bucket_bytes, stage):
    options = {"clip": clip, "bucket_bytes": bucket_bytes, "on_nonfinite": policy}
    [(counted, read)] = ranks.run(1, waits_of_steps, options, stage, apart="sim")
    assert counted == [0, 0, 0, 0]
    assert max(read) <= 1 + (policy == "skip")


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize(("policy", "make"), [("skip", momentum), ("raise", adamw)])
@pytest.mark.parametrize("stage", [0, 2])
def test_where_the_host_must_know_whether_a_step_is_applied_it_waits_once_for_norm_and_edits(policy, make, stage):
    [(counted, _)] = ranks.run(1, waits_of_steps, {"clip": 1.0, "on_nonfinite": policy}, stage, make, apart="sim")
    assert counted == [1, 1, 1, 1]


def waits_to_clip(rank, world, num_layers, homes):
    """Counts the waits of the host while torch's function clips what backward made."""
    from accelerators_sim.waits import recorded_waits

    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))), real=True).to(place_of(0, "sim"))
    optimizer = shard(model, adamw(model.parameters()), stage=2, dtype="bfloat16", group=solo(), homes=homes)
    counted = []
    for batch in map(batch_of, range(3)):
        send(model, batch)
        with recorded_waits() as waits:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        counted.append(sum(wait.waiter == HOST for wait in waits))
        norm.mul_(0.0)  # the caller's own
        assert model[0].weight.grad.norm() > 0
        optimizer.step()
        optimizer.zero_grad()
    return counted


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize(("home", "most"), [("device", 0), ("cpu", 2)])
def test_torchs_clipping_waits_for_a_device_as_often_whatever_the_number_of_parameters(home, most):
    homes = dict.fromkeys(("gradients", "masters", "moments"), home) if home == "cpu" else {}
    [few], [many] = (ranks.run(1, waits_to_clip, number, homes, apart="sim") for number in (2, 20))
    assert few == many == [most] * 3  # if sums are on the host: for norms, and to bring them back


def products_on_the_host(rank, world, clip):
    """Multiplies sums on the host by numbers on the device, which change behind their counts of versions, between other
    operators, backwards and steps: once when a sum is next read, and then at once. Returns all that is seen of it."""
    found = []
    for defers in (True, False):
        how = contextlib.nullcontext() if defers else faults.DEFERRING_PRODUCTS.replaced(lambda *_: False)
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), real=True).to(place_of(0, "sim"))
        homes = dict.fromkeys(("gradients", "masters", "moments"), "cpu")
        optimizer = shard(model, adamw(model.parameters()), stage=2, bucket_bytes=256, group=solo(), homes=homes, clip=clip)
        seen, params = [], list(model.parameters())
        with how:
            for step in range(4):
                factor = torch.full((), 0.3 + step / 7, device="sim:0")
                for micro in range(1 + step % 2):
                    model(real_numbers((2, 8), 10 * step + micro).to("sim:0")).square().mean().backward()
                    for index, param in enumerate(params):
                        param.grad.mul_(factor)
                        factor.data.mul_(0.9)
                        if index % 3 == 0:
                            param.grad.add_(0.25)
                        elif index % 3 == 1:
                            param.grad.mul_(factor)
                if step == 2:
                    seen += [optimizer.whole_grad(param) for param in params]
                seen.append(nn.utils.clip_grad_norm_(params, 0.2))
                optimizer.step()
                seen += [optimizer.grad_norm, *map(optimizer.whole_grad, params)]
                optimizer.zero_grad()
        found.append(copied([*seen, params]))
    return found


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_product_on_the_host_that_waits_for_its_number_has_the_bits_of_one_at_once(clip):
    [(late, at_once)] = ranks.run(1, products_on_the_host, clip, apart="sim")
    assert same(late, at_once)


def norms_of_all_orders(rank, world):
    """Norms of gradients on the device, of parameters in one bucket and in several, some not used and some not finite. Returns
    these, what torch finds of the whole gradients on the host, and how often the host waited for the first."""
    from accelerators_sim.waits import recorded_waits

    found = []
    for number, factor in enumerate((1.0, 1e9, math.inf, 0.0)):
        model = filled(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 2), nn.Linear(2, 2)), real=True).to(place_of(0, "sim"))
        optimizer = shard(model, adamw(model.parameters()), stage=2, bucket_bytes=256, group=solo())
        (model[:2](real_numbers((2, 8), number).to("sim:0")).sum() * factor).backward()
        optimizer.settle()
        for order in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf):
            with recorded_waits() as waits:
                there = [param.grad.norm(order) for param in model.parameters() if param.grad is not None]
            wholes = [optimizer.whole_grad(param) for param in model.parameters() if param.grad is not None]
            expected = torch.stack([torch.linalg.vector_norm(whole.cpu().double(), order) for whole in wholes])
            found.append((torch.stack(there).cpu(), expected.float(), len(waits)))
        optimizer.close()
    return found


@needs_sim
@pytest.mark.promise("V07")
def test_norms_that_a_device_joins_are_those_of_whole_gradients():
    [found] = ranks.run(1, norms_of_all_orders, apart="sim")
    for there, expected, num_waits in found:
        assert num_waits == 0 and torch.allclose(there, expected, rtol=1e-6, atol=0.0, equal_nan=True)


def changed_by_factors(rank, world, make, policy, on_device):
    """Trains ranks whose factors differ in the second window. Returns where each was told, how often the host waited from the
    first factor to the end of that step, and the weights before, after it, and at last."""
    from accelerators_sim.waits import recorded_waits

    torch.manual_seed(0)
    place = torch.device("sim", torch.sim.current_device())
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
    optimizer = zero.shard(model, make(model.parameters()), stage=2, bucket_bytes=512, on_nonfinite=policy)
    told, counted, seen = [], [], []

    def one_step(number, factor):
        send(model, real_numbers((2, 8), 10 * number + rank).to(place))
        optimizer.settle()
        factor = torch.full((), factor, dtype=torch.float64, device=place)  # in which it is compared
        with recorded_waits() as waits:
            for param in model.parameters():
                param.grad.mul_(factor)
            factor.fill_(float(rank))  # the caller's own
            optimizer.step()
        places = [wait.place for wait in waits if wait.waiter == HOST]
        counted.append(sum("/zero/" in place for place in places))
        optimizer.zero_grad()

    def weights():
        seen.append([param.detach().cpu() for param in model.parameters()])

    with faults.JUDGING_ON_DEVICE.replaced(on_device):
        for number, factor in enumerate((0.5, 0.5 + rank, math.nan if policy == "skip" else 0.25, 0.125)):
            weights()
            try:
                one_step(number, factor)
            except RanksDiffer as error:
                told.append((number, str(error)))
                optimizer.zero_grad()
        weights()
        send(model, real_numbers((2, 8), rank).to(place))
        optimizer.settle()
        model[0].weight.grad.mul_(torch.full((), 0.5 + rank, device=place))
        with pytest.raises(RanksDiffer, match="rank 1 came to whole_grad with gradients changed otherwise"):
            optimizer.whole_grad(model[0].weight)  # the host reads the factors to show the gradient
        optimizer.zero_grad()
    optimizer.close()
    return told, counted, seen


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize(
    ("make", "on_device"), [(adamw, False), (momentum, True), pytest.param(adamw, True, marks=pytest.mark.full)]
)
def test_ranks_compare_their_factors_where_they_judge_a_step_and_change_nothing_if_they_differ(make, policy, on_device):
    found = nccl_like.outcomes(2, changed_by_factors, make, policy, on_device)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    (told, counted, seen), (told_of_other, _, seen_of_other) = (outcome.value for outcome in found)
    assert told == told_of_other and same(seen, seen_of_other)
    [(number, error)] = told
    assert "rank 1 came to " in error and "changed otherwise than on rank 0" in error
    if make is adamw and on_device:
        assert number == 2 and counted == [0, 0, 0]  # the counts after the step tell
    else:
        assert number == 1 and counted[0] == 1  # with the norm
    moved = [not same(before, after) for before, after in itertools.pairwise(seen)]
    assert moved == [True, False, number == 1 and policy != "skip", True]


def changed_by_kinds(rank, world):
    """Trains ranks that multiply by equal numbers of other kinds, but for the last window, where one number is another. Returns
    the weights after each."""
    place = torch.device("sim", torch.sim.current_device())
    model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
    optimizer, seen = zero.shard(model, adamw(model.parameters()), stage=2, bucket_bytes=512), []

    def there(factor):
        return torch.full((), factor, dtype=torch.float64, device=place)

    def one(factor):
        return [there(factor)] * 8

    def several(factor):
        return [there(factor) for _ in range(8)]

    def on_host(factor):
        return [factor] * 8

    def counted(factor):
        return [int(factor) if number % 2 else torch.tensor(factor) for number in range(8)]

    kinds = [(one, several), (several, on_host), (on_host, one), (counted, one), (on_host, counted), (one, several)]
    for number, of_ranks in enumerate(kinds):
        send(model, real_numbers((2, 8), 10 * number + rank).to(place))
        optimizer.settle()
        factors = of_ranks[rank](2.0)
        if number == len(kinds) - 1:
            factors[-1] = factors[-1] + rank
        for param, factor in zip(model.parameters(), factors, strict=True):
            param.grad.mul_(factor)
        if number == len(kinds) - 1:
            with pytest.raises(RanksDiffer, match="rank 1 came to step with gradients changed otherwise"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        seen.append([param.detach().cpu() for param in model.parameters()])
    optimizer.close()
    return seen


@needs_sim
@pytest.mark.promise("V07")
def test_equal_factors_of_other_kinds_are_the_same_to_ranks():
    found = nccl_like.outcomes(2, changed_by_kinds)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    assert same(*(outcome.value for outcome in found))
    *stepped, last, refused = found[0].value
    assert same(last, refused) and not any(map(same, stepped, [*stepped[1:], last]))


def step_of_three(rank, world):
    """Returns the error of a step for which rank 2 multiplies by a float, and the others by numbers on their devices, of which
    rank 1's is another."""
    place = torch.device("sim", torch.sim.current_device())
    model = filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), real=True).to(place)
    optimizer = zero.shard(model, adamw(model.parameters()), stage=2, bucket_bytes=512)
    send(model, real_numbers((2, 8), rank).to(place))
    optimizer.settle()
    factor = 2.0 if rank == 2 else torch.full((), 3.0 if rank == 1 else 2.0, dtype=torch.float64, device=place)
    for param in model.parameters():
        param.grad.mul_(factor)
    with pytest.raises(RanksDiffer) as caught:
        optimizer.step()
    optimizer.close()
    return str(caught.value)


@needs_sim
@pytest.mark.full
@pytest.mark.promise("V07")
def test_another_number_on_a_device_is_found_where_a_third_rank_has_its_number_on_the_host():
    found = nccl_like.outcomes(3, step_of_three)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    assert all("rank 1 came to step with gradients changed otherwise" in outcome.value for outcome in found)


def saved_after_other_factors(rank, world, folder):
    """Steps with other factors than the other rank, and saves."""
    place = torch.device("sim", torch.sim.current_device())
    model = filled(nn.Sequential(nn.Linear(8, 8)), real=True).to(place)
    optimizer = zero.shard(model, adamw(model.parameters()), stage=2)
    for ask in (optimizer.state_dict, lambda: zero.save(folder, optimizer)):
        send(model, real_numbers((2, 8), rank).to(place))
        optimizer.settle()
        model[0].weight.grad.mul_(torch.full((), 0.5 + rank, device=place))
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RanksDiffer, match="rank 1 came to the last step, which changed nothing"):
            ask()
    zero.save(folder, optimizer)  # it was told once; nothing was applied
    optimizer.close()


@needs_sim
@pytest.mark.promise("V07")
def test_factors_that_differ_in_the_last_step_are_told_before_anything_is_saved(tmp_path):
    found = nccl_like.outcomes(2, saved_after_other_factors, str(tmp_path / "saved"))
    assert all(outcome.ok for outcome in found), ranks.describe(found)


def judged(rank, world, options, edits, stage):
    """Trains with edits of weights, and gradients of all kinds. Returns what there is after each step."""
    found = []
    for on_device in (True, False):
        with faults.JUDGING_ON_DEVICE.replaced(on_device):
            model, optimizer = trainer({"bucket_bytes": 256, **options}, stage)
            steps = []
            for number, value in enumerate(VALUES):
                send(model, batch_of(number), value)
                with torch.no_grad():
                    model[2].weight[1, 1] = edits[number]
                    model[3].bias.data = model[3].bias.data * 0.5
                optimizer.step()
                grads = [optimizer.whole_grad(param) for param in model.parameters()]
                optimizer.zero_grad()
                saved = optimizer.state_dict()
                values = [saved["masters"], saved["state"], grads, list(model.parameters())]
                steps.append((optimizer.grad_norm, optimizer.skipped_steps, copied(values)))
            found.append(steps)
    return found


def same(one, other):
    """Returns whether two nests hold the same numbers, of which NaN is one."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (math.isnan(one) and math.isnan(other))


@needs_sim
@pytest.mark.promise("V07", "N01")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_moments_and_gradients_are_those_of_a_step_that_asks(stage, policy, clip):
    edits = VALUES if policy == "propagate" else (1.0, 2.0, 0.0, 2.0, 3.0)
    [(late, asked)] = ranks.run(1, judged, {"clip": clip, "on_nonfinite": policy}, edits, stage, apart="sim")
    assert same(late, asked)
    expected = [0, 0, 0, 0, 0] if policy == "propagate" else [0, 1, 1, 2, 3]  # the square of 1e30 is beyond float32
    assert [skipped for _, skipped, _ in late] == expected


def skips(rank, world):
    """Skips the first step and the last. Returns what was logged, and what the optimizer had when."""
    said = logging.Handler()
    lines, states = [], []
    said.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zero").addHandler(said)
    logging.getLogger("zero").setLevel(logging.INFO)
    model, optimizer = trainer({"on_nonfinite": "skip"})
    before = copied(list(model.parameters()))
    for number, value in enumerate((math.nan, 1.0, 1.0, math.inf)):
        send(model, batch_of(number), value)
        optimizer.step()
        optimizer.zero_grad()
        torch.sim.synchronize()
        saved = optimizer.state_dict()
        states.append((saved["skipped_steps"], [float(state["step"]) for state in saved["state"].values()]))
        if number == 0:
            assert same(before, copied(list(model.parameters())))
    optimizer.load_state_dict(optimizer.state_dict())
    again = optimizer.skipped_steps
    send(model, batch_of(9))
    optimizer.step()
    return lines, states, again, optimizer.skipped_steps, hasattr(optimizer.inner, "found_inf")


@needs_sim
def test_steps_that_a_device_skipped_are_counted_and_told():
    [(lines, states, again, last, is_left)] = ranks.run(1, skips, apart="sim")
    assert [skipped for skipped, _ in states] == [1, 1, 1, 2] and again == last == 2 and not is_left
    assert [set(steps) for _, steps in states] == [{0.0}, {1.0}, {2.0}, {2.0}]
    told = [line for line in lines if line.startswith("Skipped")]
    assert told[0] == "Skipped 1 of the steps up to 1: gradients are not finite, or ranks changed them differently."


def trained_with_skips(rank, world, options):
    """Trains where one rank has no finite gradient twice, and returns the weights: once judged by devices, and then
    by the hosts."""
    trained = []
    for on_device in (True, False):
        torch.manual_seed(0)
        place = torch.device("sim", torch.sim.current_device())
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
        optimizer = zero.shard(model, adamw(model.parameters()), stage=2, bucket_bytes=512, on_nonfinite="skip", **options)
        with faults.JUDGING_ON_DEVICE.replaced(on_device):
            for number in range(6):
                factor = math.inf if number in (1, 4) and rank == 1 else 1.0
                send(model, real_numbers((2, 8), 10 * number + rank).to(place), factor)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(([param.detach().cpu() for param in model.parameters()], optimizer.skipped_steps))
        optimizer.close()
    return trained


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize(
    "options", [pytest.param({"clip": 1.0}, marks=pytest.mark.full), {"reduce_dtype": "int8"}], ids=["clip", "int8"]
)
def test_ranks_skip_alike_and_forget_what_rounding_left_of_a_skipped_step(options):
    found = nccl_like.outcomes(2, trained_with_skips, options)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    (late, asked), (of_other, _) = (outcome.value for outcome in found)
    assert same(late, asked) and same(late, of_other) and late[1] == 2


def norm_after_a_failure(rank, world):
    model, optimizer = trainer({"clip": 0.1})
    send(model, batch_of(0))
    optimizer.step()
    optimizer.zero_grad()
    norm = optimizer.grad_norm
    send(model, batch_of(1), 1e3)
    with faults.INNER_STEP.replaced(side_effect=RuntimeError("no memory")), pytest.raises(RuntimeError):
        optimizer.step()
    return norm, optimizer.grad_norm


@needs_sim
def test_a_step_that_fails_leaves_the_norm_of_the_last_one():
    [(before, after)] = ranks.run(1, norm_after_a_failure, apart="sim")
    assert before == after > 0


def norms_of_ranks(rank, world, stage):
    """Norms that ranks add up on their devices, and then by the hosts, from the same start. Says where the library had the host
    wait for its device, but for rounds that it is ahead with."""
    from accelerators_sim.waits import recorded_waits

    norms, asked = [], []
    for on_device in (True, False):
        torch.manual_seed(0)
        place = torch.device("sim", torch.sim.current_device())
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = zero.shard(model, inner, stage=stage, clip=1.0, bucket_bytes=512, timeout_s=8.0)
        with faults.JUDGING_ON_DEVICE.replaced(on_device):
            for number in range(4):
                batch = real_numbers((2, 8), 10 * number + rank).to(place)
                with recorded_waits() as waits:
                    model(batch).square().mean().backward()
                    optimizer.step()
                places = [wait.place for wait in waits if wait.waiter == HOST]
                asked.append([place for place in places if "/zero/" in place and not inside.keeps_pace(place)])
                norms.append(torch.tensor(optimizer.grad_norm))
                optimizer.zero_grad()
        weights = [param.detach().cpu() for param in model.parameters()]
        optimizer.close()
    return norms, asked, weights


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_whose_devices_wait_for_each_other_add_the_norm_up_there(stage):
    found = nccl_like.outcomes(2, norms_of_ranks, stage)
    assert all(outcome.ok for outcome in found), ranks.describe(found)
    (norms, asked, weights), (norms_of_other, _, weights_of_other) = (outcome.value for outcome in found)
    assert norms[:4] == norms[4:] == norms_of_other[:4] and len(set(norms[:4])) == 4
    first = ORDER_IS_KNOWN[stage]
    assert asked[first:4] == [[]] * (4 - first) and all(asked[4:])
    assert all(torch.equal(one, other) for one, other in zip(weights, weights_of_other, strict=True))


def clipped_by_torch(rank, world, stage):
    """Clips with torch's function, by norms that ranks exchange on their devices, and then by those that hosts exchange, from
    the same start. Says where the library had the host wait for its device, but for rounds that it is ahead with, and for what
    devices found in the step before: whether ranks had clipped alike."""
    from accelerators_sim.waits import recorded_waits

    seen = []
    for on_device in (True, False):
        torch.manual_seed(0)
        place = torch.device("sim", torch.sim.current_device())
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), real=True).to(place)
        unused = nn.Parameter(torch.ones(3, device=place))
        model.register_parameter("unused", unused)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = zero.shard(model, inner, stage=stage, bucket_bytes=192, timeout_s=8.0)
        norms, asked = [], []
        with faults.JUDGING_ON_DEVICE.replaced(on_device):
            for number, order in enumerate((2.0, 1.0, 3.0, math.inf)):
                batch = real_numbers((2, 8), 10 * number + rank).to(place)
                with recorded_waits() as waits:
                    model(batch).square().mean().backward()
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
                    optimizer.step()
                places = [wait.place for wait in waits if wait.waiter == HOST and "/zero/" in wait.place]
                asked.append([each for each in places if not (inside.keeps_pace(each) or inside.reads_what_came_late(each))])
                of_params = (param.grad.norm(order) for param in model.parameters() if param.grad is not None)
                norms.append([float(norm), *map(float, of_params)])
                optimizer.zero_grad()
        seen.append((norms, asked, [param.detach().cpu() for param in model.parameters()]))
        optimizer.close()
    return seen


@needs_sim
@pytest.mark.promise("V07")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2)), 3])
def test_ranks_exchange_the_norms_of_torchs_clipping_on_their_devices(stage):
    outcomes = nccl_like.outcomes(2, clipped_by_torch, stage)
    assert all(outcome.ok for outcome in outcomes), ranks.describe(outcomes)
    (on_device, on_host), (on_device_of_other, _) = (outcome.value for outcome in outcomes)
    norms, asked, weights = on_device
    first = ORDER_IS_KNOWN[stage]
    assert asked[first:] == [[]] * (4 - first) and all(on_host[1])
    assert norms == on_device_of_other[0] and all(map(torch.equal, weights, on_device_of_other[2]))
    for of_device, of_host in zip(norms, on_host[0], strict=True):
        assert len(of_device) == 9 and of_device == pytest.approx(of_host, rel=1e-5)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(weights, on_host[2], strict=True))


def norms_in_two_streams(rank, world):
    """Asks for a norm in a stream of its own, and in the caller's, which nothing orders behind that one. Then memory that was
    the norms' is used in the first stream."""
    model, optimizer = trainer({})
    expected = []
    for reads_there in (False, True):
        send(model, batch_of(0))
        if reads_there:
            there = torch.sim.Stream("sim:0")
            there.wait_stream(torch.sim.current_stream("sim:0"))
            with torch.sim.stream(there):
                model[0].weight.grad.norm()
        norms = [param.grad.norm() for param in model.parameters()]
        optimizer.zero_grad()
        if reads_there:
            with torch.sim.stream(there):
                torch.zeros(len(norms), device="sim:0")
        expected.append([float(norm) for norm in norms])
    return expected


@needs_sim
def test_a_norm_that_is_remembered_is_ready_in_any_stream():
    [(alone, after_another)] = ranks.run(1, norms_in_two_streams, apart="sim")
    assert alone == after_another and min(alone) > 0


def other_norms(rank, world):
    """Asks for another norm on each rank. Returns the error, and a norm that both ask for afterwards."""
    place = torch.device("sim", torch.sim.current_device())
    model = filled(nn.Linear(8, 8), real=True).to(place)
    optimizer = zero.shard(model, adamw(model.parameters()), stage=2, timeout_s=8.0)
    model(real_numbers((2, 8), rank).to(place)).square().mean().backward()
    with pytest.raises(RanksDiffer) as raised:
        model.weight.grad.norm(1.0 + rank)
    norm = float(model.weight.grad.norm())
    optimizer.close()
    return str(raised.value), norm


@needs_sim
def test_ranks_that_ask_for_other_norms_are_told_and_no_device_waits():
    outcomes = nccl_like.outcomes(2, other_norms)
    assert all(outcome.ok for outcome in outcomes), ranks.describe(outcomes)
    (error, norm), (error_of_other, norm_of_other) = (outcome.value for outcome in outcomes)
    assert error == error_of_other and norm == norm_of_other > 0
    assert "rank 1 of 2 came to the 2-norm of 2 gradients on the device" in error and "rank 0 to the 1-norm of 2" in error
