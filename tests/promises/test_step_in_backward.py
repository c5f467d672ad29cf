"""H10: masters that are stepped on the host while backward goes on have the bits of those that are stepped after it."""

import contextlib
import copy
import tempfile
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests import faults, inside, ranks
from tests.devices import needs_compiler, needs_sim
from tests.loopback import run_ranks, solo
from tests.promises.offloads import bits, difference, on_sim, place_of
from tests.promises.test_offload_bits import different_bits
from tests.promises.trainings import options_of, train_one
from tests.traces import copied
from tests.zoo import CASES
from tests.zoo.case import backward, draw, filled, real_loss
from zero import shard
from zero.config.schema import Offload

pytestmark = needs_sim
AHEAD = Offload(step_in_backward=True)
REFUSED = r"step_in_backward has stepped masters of this window already\. Call step\(\) first"
WIDTH = 16


class Injected(Exception):
    """Raised where a test wants something to break off."""


class Deep(nn.Module):
    """Blocks that are recomputed, a weight that is used twice, one that is frozen, and one that some windows use."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.outputs = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outputs.weight = self.inputs.weight
        self.reentrant = False

    def forward(self, x, is_rare=False):
        x = self.inputs(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outputs(self.fixed(self.rare(x) if is_rare else x))


def layers(number):
    return filled(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number))), real=True)


def two_layers():
    return layers(2)


def four_layers():
    return layers(4)


def deep():
    return filled(Deep(), real=True)


def grouped(model, kind=torch.optim.AdamW, **options):
    """Two groups with settings of their own."""
    params = [param for param in model.parameters() if param.requires_grad]
    first = {"params": params[::2], "lr": 0.02, "weight_decay": 0.2}
    return kind([first, {"params": params[1::2], "betas": (0.8, 0.9)}], lr=0.01, eps=1e-2, **options)


def points(**options):
    """Returns the options of a training without the step in the backward, and of one with it."""
    given = {"stage": 2, "kernels": "fused", "bucket_bytes": 1024, "make": grouped, **options}
    return [{**given, "offload": offload} for offload in ("cpu", AHEAD)]


def send(model, optimizer, step, micro=0, **given):
    backward(optimizer, real_loss(model(draw(model, (3, WIDTH), 0, step, micro, real=True), **given)))


def compared(program, build=deep, order="late", **options):
    """Compares what a program gives with and without the option. Returns how many buckets each of its windows stepped ahead."""
    [((without, none), (with_it, ahead))] = on_sim(1, program, points(**options), build, order)
    assert difference(with_it, without) is None
    assert not any(none)
    return ahead


# bits -------------------------------------------------------------------------------------------------------------------


def trained(model, optimizer, rank, length=1):
    """Windows with a schedule; every third one uses all parameters, and between two of them all is saved and loaded."""
    found, ahead = [], []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(6):
        for micro in range(length):
            send(model, optimizer, step, micro, is_rare=step % 3 == 1)
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        schedule.step()
        found.append(bits(model, optimizer))
        optimizer.zero_grad()
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        if step == 3:
            with torch.no_grad():
                model.blocks[1][0].weight[0].mul_(2.0)  # taken over by the masters
    return found, ahead


@pytest.mark.promise("H10")
@pytest.mark.parametrize("length", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.full), "bfloat16"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_training_has_the_same_bits_and_masters_are_stepped_before_the_step(stage, dtype, length):
    accumulation = None if length == 1 else length
    ahead = compared(partial(trained, length=length), stage=stage, dtype=dtype, accumulation=accumulation)
    if stage == 2 or length == 1:  # a bucket that lacks what the last window had keeps those behind it back
        assert min(ahead[1], ahead[3], ahead[4]) > 0
    else:
        assert not any(ahead), "what several backwards add up on the device travels when the window settles"


@pytest.mark.full
@pytest.mark.promise("H10")
@pytest.mark.parametrize("order", ["eager", "random:1", "random:2", "random:3"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_so_it_does_in_whatever_order_a_device_works(dtype, order):
    assert max(compared(trained, dtype=dtype, order=order)) > 0


@pytest.mark.full
@needs_compiler
@pytest.mark.promise("H10")
@pytest.mark.parametrize("offload", [{}, {"ratio": 0.5}])
def test_so_it_does_with_the_compiled_step_and_with_half_of_the_states_on_the_device(offload):
    kernels = "compiled" if not offload else "fused"
    pair = [{**each, "offload": Offload(**offload, step_in_backward=bool(number))}
            for number, each in enumerate(points(kernels=kernels, dtype="bfloat16"))]  # fmt: skip
    [((without, _), (with_it, ahead))] = on_sim(1, trained, pair, deep)
    assert difference(with_it, without) is None and max(ahead) > 0


@pytest.mark.full
@pytest.mark.promise("H10")
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"kind": torch.optim.Adam}])
def test_so_it_does_with_any_adam(options):
    assert max(compared(trained, make=partial(grouped, **options))) > 0


def used_by_turns(model, optimizer, rank):
    """Two windows each use the same parameters, so that in the second one a bucket leaves without the others' gradients."""
    found, ahead = [], []
    for step in range(8):
        x = draw(model, (3, WIDTH), 0, step, real=True)
        for number in {step // 2 % 4, (step // 2 + 1) % 4, 2}:
            x = model.blocks[number](x)
        backward(optimizer, real_loss(x))
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        found.append(bits(model, optimizer))
        if step % 3:
            optimizer.zero_grad()
        else:
            model.zero_grad()
    return found, ahead


@pytest.mark.promise("H10")
@pytest.mark.parametrize(
    "bucket_bytes",
    [pytest.param(1500, id="some are not whole"), *(pytest.param(each, marks=pytest.mark.full) for each in (1024, 200))],
)
def test_a_bucket_that_lacks_a_gradient_waits_for_the_step(bucket_bytes):
    assert max(compared(used_by_turns, bucket_bytes=bucket_bytes)) > 0


def one_is_never_used(model, optimizer, rank):
    """It shares its bucket with one that is, which leaves without it."""
    found = []
    for step in range(3):
        backward(optimizer, real_loss(model[3](model[1](model[0](draw(model, (3, WIDTH), 0, step, real=True))))))
        optimizer.step()
        found.append(bits(model, optimizer))
        optimizer.zero_grad()
    return found, []


@pytest.mark.promise("H10")
def test_what_no_window_uses_is_not_stepped_with_its_bucket():
    compared(one_is_never_used, build=four_layers, bucket_bytes=2 * 4 * WIDTH**2)


def without_zero_grad(model, optimizer, rank):
    """Runs a backward after a step: its gradients are added to the sums, as in plain torch."""
    found, ahead = [], []
    send(model, optimizer, 9)
    optimizer.step()
    optimizer.zero_grad()
    for step in range(4):
        send(model, optimizer, step)
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        found.append(bits(model, optimizer))
    return found, ahead


@pytest.mark.promise("H10")
def test_gradients_that_are_added_to_those_of_the_last_step_wait_for_the_next():
    first, *others = compared(without_zero_grad)
    assert first > 0 and not any(others)


def windows_of_all_kinds(model, optimizer, rank):
    """Windows that something but backwards took part in, before their last backward."""
    found, ahead = [], []

    def end():
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        found.append(bits(model, optimizer))
        optimizer.zero_grad()

    with optimizer.no_sync():
        send(model, optimizer, 0)
    send(model, optimizer, 0, 1)
    end()
    optimizer.weight(2.0)
    send(model, optimizer, 1)
    end()
    optimizer.set_gradient_accumulation_boundary(False)
    send(model, optimizer, 2)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.set_gradient_accumulation_boundary(True)
    send(model, optimizer, 2, 1)
    end()
    model.inputs.weight.data = model.inputs.weight.data * 2
    send(model, optimizer, 3)
    end()
    optimizer.step()  # without a gradient
    send(model, optimizer, 4)
    end()
    return found, ahead


@pytest.mark.promise("H10")
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.full), "bfloat16"])
def test_a_window_that_something_else_took_part_in_is_left_to_the_step(dtype):
    ahead = compared(windows_of_all_kinds, dtype=dtype)
    assert ahead[:4] == [0, 0, 0, 0] and ahead[4] > 0


def with_a_group_on_a_disk(model, optimizer, rank):
    """A group that is added later, with homes of its own, beside one that is not."""
    added, folder, ahead, found = [], tempfile.mkdtemp(), [], []
    for homes in ({"masters": f"disk:{folder}", "moments": f"disk:{folder}"}, {}):
        torch.manual_seed(1)
        layer = nn.Linear(WIDTH, WIDTH).to(model.inputs.weight)
        optimizer.add_param_group({"params": layer.parameters(), **({"homes": homes, "offload": None} if homes else {})})
        added.append(layer)
    for step in range(4):
        x = model(draw(model, (3, WIDTH), 0, step, real=True))
        backward(optimizer, real_loss(added[1](added[0](x))))
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        params = [copied(param.detach()) for module in (model, *added) for param in module.parameters()]
        found.append(copied([saved["masters"], saved["state"], params]))
    return found, ahead


@pytest.mark.full
@pytest.mark.promise("H10")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_groups_that_are_added_are_stepped_where_their_states_live(dtype):
    assert max(compared(with_a_group_on_a_disk, dtype=dtype)) > 0


def edited_in_a_backward(model, optimizer, rank):
    """A hook that is reached before the first bucket is started writes to the weight of that, whose gradient is on its way."""
    found, ahead = [], []

    def edit(_):
        with torch.no_grad():
            model[3].weight.mul_(0.5)

    hook = model[2].weight.register_hook(edit)
    for step in range(4):
        backward(optimizer, real_loss(model(draw(model, (3, WIDTH), 0, step, real=True))))
        ahead.append(inside.num_ahead(optimizer))
        optimizer.step()
        found.append(bits(model, optimizer))
        optimizer.zero_grad()
    hook.remove()
    return found, ahead


@pytest.mark.promise("H10")
def test_what_a_hook_wrote_to_a_weight_before_its_bucket_is_started_is_taken_over():
    assert min(compared(edited_in_a_backward, build=four_layers)) > 0


def by_closure(model, optimizer, rank):
    found = []

    def closure():
        optimizer.zero_grad()
        loss = real_loss(model(draw(model, (3, WIDTH), 0, len(found), real=True)))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        found.append(bits(model, optimizer))
    return found, []


@pytest.mark.promise("H10")
def test_a_closure_sends_its_backward_in_the_step():
    compared(by_closure)


# Cases of the zoo are given AdamW. Those that do between backward and step what is refused are found by what they raise.
REFUSALS_OF_CASES = "step_in_backward has stepped masters of this window already", "Cannot use offload.step_in_backward=True"


def train_cases(rank, world, part, order):
    """Returns the cases that differ or fail otherwise, and the number of those that were trained."""
    place, wrong, trained_ahead = place_of(rank, "sim", order), [], 0
    for number, name in enumerate(sorted(CASES)[part::8]):
        case, stage = CASES[name], 1 + number % 2
        for dtype in case.dtypes if case.needs_world < 2 else ():
            found = []
            for offload in ("cpu", AHEAD):
                options = options_of(name, stage, dtype, "tiny", offload=offload, kernels="fused")
                torch.manual_seed(0)
                with place:
                    model = case.build()
                try:
                    trace = train_one(case, model, as_adamw(case.optimizer(model)), solo(), options)
                except (ValueError, RuntimeError) as error:
                    found.append(str(error))
                else:
                    trace.state = copied(trace.state)
                    for step in trace.steps:
                        step.masters = copied(step.masters)
                    found.append(trace)
            without, with_it = found
            if isinstance(without, str):  # plain AdamW cannot do it, or the case checks what another optimizer does
                continue
            if isinstance(with_it, str):
                wrong += [] if any(words in with_it for words in REFUSALS_OF_CASES) else [(name, stage, dtype, with_it)]
                continue
            different, trained_ahead = different_bits([with_it], [without]), trained_ahead + 1
            wrong += [] if different is None else [(name, stage, dtype, different)]
    return wrong, trained_ahead


def as_adamw(inner):
    groups = [{"params": group["params"], "lr": group.get("lr", 0.01)} for group in inner.param_groups]
    return torch.optim.AdamW(groups, eps=1e-2)


@pytest.mark.full
@pytest.mark.promise("H10")
@pytest.mark.parametrize("part", range(8))
def test_every_case_of_the_zoo_gives_the_same_bits_or_is_refused_by_name(part):
    order = ("late", "random:1")[part % 2]
    [(wrong, trained_ahead)] = ranks.run(1, train_cases, part, order, apart="sim", timeout=300.0)
    assert not wrong and trained_ahead > 5


# what is refused --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "weight": lambda model, optimizer: optimizer.weight(2.0),
    "no_contribution": lambda model, optimizer: optimizer.no_contribution(),
    "settle": lambda model, optimizer: optimizer.settle(),
    "clip_grad_norm_": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "mul_": lambda model, optimizer: model.inputs.weight.grad.mul_(2.0),
    "norm": lambda model, optimizer: model.inputs.weight.grad.norm(),
    "unscale_": lambda model, optimizer: scaler_of(model).unscale_(optimizer),
    "whole_grad": lambda model, optimizer: optimizer.whole_grad(model.inputs.weight),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "to_zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "discard": lambda model, optimizer: optimizer.discard(),
    "backward": lambda model, optimizer: send(model, optimizer, 9),
    "whole_state": lambda model, optimizer: optimizer.whole_state(model.inputs.weight),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
    "save": lambda model, optimizer: zero.save("/nowhere", optimizer),
    "load": lambda model, optimizer: zero.load("/nowhere", optimizer),
    "load_weights": lambda model, optimizer: zero.load_weights(model, "/nowhere"),
    "check": lambda model, optimizer: optimizer.check(),
    "gathered": lambda model, optimizer: optimizer.gathered(),
    "offload_states": lambda model, optimizer: optimizer.offload_states(),
    "add_param_group": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "rebuild": lambda model, optimizer: optimizer.rebuild(),
    "whole_master": lambda model, optimizer: inside.whole_master(optimizer, model.inputs.weight),
    "set_master": lambda model, optimizer: inside.set_master(optimizer, model.inputs.weight, torch.ones(WIDTH, WIDTH)),
}  # fmt: skip


def scaler_of(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))  # makes the scale
    return scaler


def refused_by_name(model, optimizer, rank):
    """All refusals of one window, none of which changes anything; and settings that are changed and set back."""
    found, ahead, is_on = [step_after(model, optimizer)], [], optimizer.config.offload.step_in_backward
    for step in range(2):
        send(model, optimizer, step)
        ahead.append(inside.num_ahead(optimizer))
        for name, act in REFUSALS.items() if is_on else ():
            with pytest.raises((ValueError, RuntimeError)) as caught:
                act(model, optimizer)
            assert REFUSED.replace("\\", "") in str(caught.value), name
        if is_on:
            optimizer.param_groups[1]["lr"] *= 2
            with pytest.raises(ValueError, match="Cannot step with these settings"):
                optimizer.step()
            optimizer.param_groups[1]["lr"] /= 2
        optimizer.step()
        optimizer.zero_grad()
        found.append(bits(model, optimizer))
    return found, ahead


@pytest.mark.promise("H10")
def test_until_the_step_all_else_is_refused_by_name_and_nothing_is_lost_by_it():
    assert min(compared(refused_by_name)) > 0


def late_in_another_backward(model, optimizer):
    real_loss(model(draw(model, (3, WIDTH), 0, 9, real=True))).backward()


def assign(model, optimizer):
    model.inputs.bias.grad = torch.ones_like(model.inputs.bias)


def remove(model, optimizer):
    model.inputs.bias.grad = None


def edit_in_place(model, optimizer):
    with torch.no_grad():
        model.blocks[3][0].weight[0, 0] += 1.0


def edit_data(model, optimizer):
    model.blocks[3][0].weight.data.neg_()


def assign_data(model, optimizer):
    model.blocks[3][0].weight.data = torch.ones_like(model.blocks[3][0].weight)


def swap_two(model, optimizer):
    line = model.blocks[3][0].weight.data.view(-1)
    line[:2] = line[:2].flip(0)


# Acts of a user between backward and step that cannot be undone: the step finds each of them, if nothing did before.
TEARING = {
    "another backward": (late_in_another_backward, "Cannot run another backward"),
    "a gradient is assigned": (assign, "Cannot change the gradient of inputs.bias"),
    "a gradient is removed": (remove, "Cannot change the gradient of inputs.bias"),
    "all are cleared": (lambda model, optimizer: model.zero_grad(), "Cannot clear every .grad"),
    "a weight is edited": (edit_in_place, "Cannot step: weights were changed"),
    "a weight is edited by .data": (edit_data, "Cannot step: weights were changed"),
    "a weight is assigned to .data": (assign_data, "Cannot step: weights were changed"),
    "two elements are exchanged": (swap_two, "Cannot step: weights were changed"),
    "a model is loaded": (lambda model, optimizer: model.load_state_dict(of_ones(model)), "Cannot step: weights were changed"),
}


def of_ones(model):
    return {name: torch.ones_like(value) for name, value in model.state_dict().items()}


# Places in which something fails: in the thread, on the way of weights, in the backward itself, and in each part of the step.
def in_the_thread(model, optimizer):
    return faults.step_ahead_of(optimizer).replaced(side_effect=Injected)


def in_the_kernel(model, optimizer):
    step, calls = faults.STEP_OF_BUCKETS.now, []

    def failing(*given):
        calls.append(step(*given))
        if len(calls) == 2:
            raise Injected

    return faults.STEP_OF_BUCKETS.replaced(failing)


@contextlib.contextmanager
def in_a_hook(model, optimizer):
    hook = model.inputs.bias.register_hook(mock.Mock(side_effect=Injected))  # reached last
    try:
        yield
    finally:
        hook.remove()


FAILURES = {
    "in the thread": in_the_thread,
    "in the middle of a bucket": in_the_kernel,
    "in a hook": in_a_hook,
    "in the decision": lambda model, optimizer: faults.decision_of(optimizer).replaced(side_effect=Injected),
    "in the update": lambda model, optimizer: faults.begin_of_step(optimizer).replaced(side_effect=Injected),
    **{
        f"at the {place} of the publishing":
            lambda model, optimizer, place=place: faults.parts_of_writers(optimizer)[place].replaced(side_effect=Injected)
        for place in ("beginning", "middle", "end")
    },
}  # fmt: skip


def step_after(model, optimizer):
    send(model, optimizer, 5)
    optimizer.step()
    optimizer.zero_grad()
    return bits(model, optimizer)


def disturbed(model, optimizer, rank, name):
    """Breaks a window off once masters are ahead, and loads what was saved. Returns what comes after."""
    send(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if not optimizer.config.offload.step_in_backward:
        return step_after(model, optimizer), []
    if name in TEARING:
        act, words = TEARING[name]
        send(model, optimizer, 1)
        assert inside.num_ahead(optimizer) > 0
        with pytest.raises(ValueError) as caught:
            act(model, optimizer)
            optimizer.step()
        assert words in str(caught.value)
    else:
        with FAILURES[name](model, optimizer), pytest.raises((Injected, RuntimeError)) as caught:
            send(model, optimizer, 1)
            assert inside.num_ahead(optimizer) > 0
            optimizer.step()
        assert Injected in (type(caught.value), type(caught.value.__cause__))
    is_recoverable = name == "in the decision"
    if is_recoverable:
        optimizer.step()  # nothing was lost
    else:
        with contextlib.suppress(RuntimeError, ValueError):  # it is told now, if it was not yet
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"broke off, so weights may be written in part\. Load"):
            optimizer.state_dict()
    model.zero_grad()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return step_after(model, optimizer), []


BY_DAY = "another backward", "in the thread"
BREAKS = [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.full) for name in (*TEARING, *FAILURES)]


@pytest.mark.promise("H10")
@pytest.mark.parametrize("name", BREAKS)
def test_a_window_that_cannot_go_on_is_torn_until_a_load_and_then_all_is_as_before(name):
    compared(partial(disturbed, name=name), dtype="bfloat16")


def edited_while_weights_come(model, optimizer, rank):
    """The thread has not waited for copies of weights when the user writes to them, so only the backward orders that."""
    may_go_on, step = threading.Event(), faults.step_ahead_of(optimizer).now

    def late(*given):
        may_go_on.wait()
        step(*given)

    with faults.step_ahead_of(optimizer).replaced(late):
        send(model, optimizer, 1)
        assert inside.num_ahead(optimizer) > 0
        try:
            with torch.no_grad():
                model[1].weight.add_(1.0)
        finally:
            may_go_on.set()
        with pytest.raises(ValueError, match="Cannot step: weights were changed"):
            optimizer.step()
    return inside.num_ahead(optimizer)


@pytest.mark.promise("H10")
def test_what_follows_the_backward_comes_after_the_copies_of_weights():
    assert on_sim(1, edited_while_weights_come, points()[1:], two_layers) == [[0]]


def changed_for_a_while(model, optimizer, rank):
    """A hook writes to weights whose gradient is there, and another one writes what was there, when all of them are stepped."""
    step_after(model, optimizer)
    kept, stepped, step = model[2].weight.detach().clone(), [], faults.step_ahead_of(optimizer).now

    def noted(*given):
        step(*given)
        stepped.append(given)

    def let_all_be_stepped(_):
        torch.sim.synchronize()
        deadline = time.monotonic() + 10.0
        while len(stepped) < inside.num_ahead(optimizer) and time.monotonic() < deadline:
            time.sleep(0.001)

    def edit(_):
        assert inside.num_ahead(optimizer) > 0
        model[2].weight.data.mul_(0.5)
        torch.sim.synchronize()

    def restore(grad):
        let_all_be_stepped(grad)
        assert len(stepped) > 2
        model[2].weight.data.copy_(kept)

    hooks = [each.weight.register_hook(let_all_be_stepped) for each in model]
    hooks += [model[2].weight.register_hook(edit), model[0].weight.register_hook(restore)]
    with faults.step_ahead_of(optimizer).replaced(noted):
        send(model, optimizer, 1)
        with pytest.raises(ValueError, match="Cannot step: weights were changed"):
            optimizer.step()
    return torch.equal(model[2].weight, kept)


@pytest.mark.promise("H10")
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.full), "bfloat16"])
def test_weights_that_differ_only_while_they_are_copied_are_found(dtype):
    assert on_sim(1, changed_for_a_while, points(dtype=dtype)[1:], partial(layers, 8)) == [[True]]


def late_in_the_same_backward(model, optimizer, rank):
    """A parameter's second gradient in one backward comes after its bucket was stepped, as with reentrant checkpoints."""
    step_after(model, optimizer)
    model.reentrant = True
    x = draw(model, (3, WIDTH), 0, 0, real=True).requires_grad_()
    with pytest.raises(ValueError, match=r"Cannot (run another backward|take another gradient)"):
        real_loss(model.blocks[0](model(model.blocks[0](model(x))))).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="broke off"):
        optimizer.state_dict()
    return None


@pytest.mark.promise("H10")
def test_a_second_gradient_of_a_parameter_that_is_stepped_is_refused_and_the_window_is_torn():
    assert on_sim(1, late_in_the_same_backward, points()[1:], deep) == [[None]]


def late_in_a_backward_that_nobody_declared(model, optimizer, rank):
    """The first backward sends a bucket, which the thread is given in the second one, before its gradient comes there."""
    first, second = model
    x = draw(model, (3, WIDTH), 0, 0, real=True)
    for window in range(2):
        backward(optimizer, real_loss(first(x)))
        assert inside.num_ahead(optimizer) == 0
        if window == 0:
            backward(optimizer, real_loss(second(x)))  # so that buckets leave in this order
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"Cannot take another gradient of 0\.weight: "):
        real_loss(second(first(x))).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    return None


@pytest.mark.promise("H10")
def test_a_gradient_of_a_later_backward_is_refused_once_its_bucket_is_stepped():
    assert on_sim(1, late_in_a_backward_that_nobody_declared, points()[1:], two_layers) == [[None]]


@pytest.mark.promise("H10")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": 1.0}, "clip=1.0 scales by the norm"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip'"),
        ({"on_nonfinite": "raise"}, "on_nonfinite='raise'"),
        ({"dtype": "float16"}, "with a loss scale"),
        ({"on_unused": "raise"}, "on_unused='raise'"),
        ({"stage": 3}, "stage 3"),
        ({"kernels": "torch"}, "kernels='torch'"),
        ({"homes": {"masters": "disk:.", "moments": "disk:."}}, "states are in other homes"),
    ],
)
def test_what_is_known_only_after_the_backward_is_refused_when_the_training_is_built(options, words):
    model = deep()
    given = {"stage": 2, "kernels": "fused", "offload": AHEAD, **options}
    with pytest.raises(ValueError, match=r"Cannot use offload\.step_in_backward=True: ") as caught:
        shard(model, grouped(model), **given)
    assert words in str(caught.value)
    shard(model, grouped(model), **{**given, "offload": None, "homes": {}}).close()  # nothing was changed


def refused_on_two(group):
    model = deep()
    with pytest.raises(ValueError, match="2 ranks"):
        shard(model, grouped(model), stage=2, kernels="fused", offload=AHEAD, group=group)


@pytest.mark.promise("H10")
def test_so_are_several_ranks_and_other_optimizers_and_a_group_of_its_own():
    run_ranks(2, refused_on_two)
    model = deep()
    with pytest.raises(ValueError, match="SGD with kernels='fused'"):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, kernels="fused", offload=AHEAD)
    groups = [{"params": model.parameters(), "offload": AHEAD}]
    with pytest.raises(ValueError, match="Cannot set step_in_backward for a group"):
        shard(model, torch.optim.AdamW(groups), stage=2, kernels="fused")


# threads and memory -----------------------------------------------------------------------------------------------------


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zero.ahead")]


def threads_of_a_training(model, optimizer, rank, ends):
    step_after(model, optimizer)
    before = threads()
    send(model, optimizer, 0)
    while_ahead = threads()
    weights = [param.detach().cpu().clone() for param in model.parameters()]
    if ends == "after a step":
        optimizer.step()
        weights = [param.detach().cpu().clone() for param in model.parameters()]
    optimizer.close()
    kept = all(torch.equal(param.detach().cpu(), weight) for param, weight in zip(model.parameters(), weights, strict=True))
    return before, [name.rpartition("_")[0] for name in while_ahead], threads(), kept


@pytest.mark.promise("H10")
@pytest.mark.parametrize("ends", ["after a step", "while it is ahead"])
def test_one_thread_begins_with_the_first_bucket_and_ends_with_the_training_whose_weights_are_whole(ends):
    [[found]] = on_sim(1, partial(threads_of_a_training, ends=ends), points()[1:], deep)
    assert found == ([], ["zero.ahead"], [], True)


def lent(model, optimizer, rank):
    for step in range(3):
        send(model, optimizer, step, 0)
        send(model, optimizer, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    on_host = sum(share.nbytes for share in inside.shares_of_masters(optimizer))
    return inside.lent_host_bytes(optimizer), inside.planned(optimizer, rank, num_backwards=2).in_transit, on_host


@pytest.mark.promise("H10")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_host_has_no_more_than_is_planned_without_it(dtype):
    [((before, planned, states), (lent_bytes, _, same_states))] = on_sim(1, lent, points(dtype=dtype, accumulation=2), deep)
    assert lent_bytes <= planned == before and states == same_states
