"""Parameters into flat memory: what the log says, what is detached, what is refused, what comes back after a failure."""

import contextlib
import gc
import itertools
import logging
import threading
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
from accelerators.memory import MemoryReading
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import run_ranks, solo
from zero import shard
from zero.errors import RankFailed
from zero.memory.flatten import Flattener
from zero.memory.formats import ParamFormat
from zero.memory.shard import LayoutRef
from zero.memory.staging import Staging
from zero.memory.weights import FlatBuffer, Place
from zero.plan.layout import FlatLayout, ParamSpec


class Roomy:
    """An accelerator as flattening sees it: a memory reading, which a test sets."""

    name = "cpu"

    def __init__(self, available):
        self.available = available

    def memory(self, index=None):
        return MemoryReading(None, self.available, None, None)


def flattener(tensors, dtype=None, place=None):
    names = [dtype or str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    specs = [ParamSpec(str(i), tuple(t.shape), names[i], i % 2) for i, t in enumerate(tensors)]
    weights = FlatBuffer(LayoutRef(FlatLayout.build(specs, 2, 64)))
    forms = [ParamFormat.of(tensor) for tensor in tensors]
    return Flattener(weights, tensors, forms, place or Place(accelerators.get("cpu"), torch.device("cpu")))


def flatten(made):
    for chunk, _ in enumerate(made.weights.layout_ref.layout.chunks):
        made.write(chunk, made.read(chunk), 0)


def parameters():
    torch.manual_seed(0)
    strided = nn.Parameter(torch.randn(4, 6).t())
    return [nn.Parameter(torch.randn(3, 5)), strided, nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0, 3))]


def test_every_parameter_has_its_values_and_strides_in_flat_memory():
    tensors = parameters()
    before = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in tensors]
    made = flattener(tensors)
    flatten(made)
    chunks = {chunk.untyped_storage().data_ptr() for chunk in made.weights.chunks.values()}
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.stride() == expected.stride() or not tensor.numel()
        assert not tensor.numel() or tensor.untyped_storage().data_ptr() in chunks
        assert tensor.grad_fn is None
        assert tensor.is_leaf
    with torch.no_grad():
        tensors[0].add_(1.0)  # a view of memory with a history would refuse this
    assert all(chunk.grad_fn is None and not chunk.requires_grad for chunk in made.weights.chunks.values())


def test_what_is_cast_is_read_before_it_is_rounded():
    tensors = [nn.Parameter(torch.tensor([1.0 + 2.0**-12, 3.0]))]
    made = flattener(tensors, dtype="bfloat16")
    source = made.read(0)
    assert source.dtype == torch.float32
    assert source[0].item() == 1.0 + 2.0**-12
    made.write(0, source, 0)
    assert tensors[0].dtype == torch.bfloat16
    assert tensors[0].tolist() == [1.0, 3.0]


def test_memory_that_is_not_of_a_parameter_is_zero():
    tensors = [nn.Parameter(torch.full((3,), float("nan")))]
    made = flattener(tensors)
    assert made.read(0)[3:].abs().sum().item() == 0.0


def test_a_host_without_room_refuses_and_changes_nothing():
    tensors = parameters()
    addresses = [tensor.data_ptr() for tensor in tensors]
    made = flattener(tensors, place=Place(Roomy(100), torch.device("cpu")))
    with pytest.raises(MemoryError, match="Give smaller bucket_bytes, or more memory"):
        flatten(made)
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_memory_is_divided_among_the_ranks_that_share_it():
    place = Place(Roomy(1000), torch.device("cpu"), num_ranks=4)
    assert place.has_room_for(250)
    assert not place.has_room_for(251)
    assert Place(Roomy(None), torch.device("cpu"), 4).has_room_for(10**12)


def test_the_log_says_for_each_group_how_it_was_flattened(caplog):
    made = flattener(parameters())
    flatten(made)
    made.by_host = {1}
    with caplog.at_level(logging.INFO, logger="zero"):
        made.log(range(4))
    assert [record.getMessage() for record in caplog.records] == [
        "Flattening param group 0 on cpu (sufficient memory)",
        "Flattening param group 1 on CPU (insufficient memory)",
    ]


def test_what_was_moved_is_put_back_with_its_values_and_dtype():
    tensors = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2))]
    before = [tensor.detach().clone() for tensor in tensors]
    made = flattener(tensors, dtype="bfloat16")
    source = made.read(0)
    made.write(0, source, 0)
    made.rollback()
    first = [index for index, _ in enumerate(tensors) if index in made.weights.layout_ref.layout.chunks[0].params]
    for index in first:
        assert tensors[index].dtype == torch.float32
        assert torch.equal(tensors[index], before[index])
    made.write(0, source, 0)
    made.commit()
    made.rollback()
    assert all(tensors[index].dtype == torch.bfloat16 for index in first)


def test_out_of_flat_memory_every_parameter_has_its_own():
    tensors = parameters()
    made = flattener(tensors)
    flatten(made)
    values = [tensor.detach().clone() for tensor in tensors]
    for tensor, value in zip(tensors, values, strict=True):
        made.weights.detach(tensor, value)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    assert len(storages) == 3
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))


# By way of the host, on a device with little memory -----------------------------------------------------------------------


def flatten_on_sim(rank, world, cap):
    import os

    import accelerators_sim as simulated

    os.environ["ACCELERATOR_MEMORY"] = cap
    simulated.bring_up()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    logging.getLogger("zero").setLevel(logging.INFO)
    with torch.device("sim:0"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    expected = [p.detach().cpu() for p in model.parameters()]
    optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2, bucket_bytes=1 << 14)
    equal = [torch.equal(p.detach().cpu(), e) for p, e in zip(model.parameters(), expected, strict=True)]
    device = {str(p.device) for p in model.parameters()}
    model(torch.ones(2, 64, device="sim:0")).sum().backward()
    optimizer.step()
    moved = [not torch.equal(p.detach().cpu(), e) for p, e in zip(model.parameters(), expected, strict=True)]
    return lines, equal, device, moved


@pytest.mark.parametrize(("cap", "said"), [("1GiB", "on sim (sufficient memory)"), ("40KiB", "on CPU (insufficient memory)")])
@needs_sim
def test_a_device_is_flattened_by_way_of_the_host_where_its_memory_does_not_suffice(cap, said):
    ((lines, equal, device, moved),) = ranks.run(1, flatten_on_sim, cap, apart="sim")
    assert [line for line in lines if "Flattening" in line] == [f"Flattening param group 0 {said}"]
    assert all(equal)
    assert all(moved)
    assert device == {"sim:0"}


def fail_beside_parameters(rank, world):
    """Whether every parameter has its values where one of two ranks cannot read one chunk; threads on one full device."""
    import accelerators_sim as simulated

    simulated.bring_up()
    found, here = [], threading.local()
    read = Flattener.read

    def reads(flattener, chunk, *given):
        if here.fails == chunk:
            raise MemoryError("nothing left")
        return read(flattener, chunk, *given)

    with (
        torch.device("sim:0"),
        mock.patch.object(Place, "has_room_for", lambda *_: False),
        mock.patch.object(Flattener, "read", reads),
    ):
        for last, fails in itertools.product((0, 1), range(3)):
            models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
            models[1].load_state_dict(models[0].state_dict())
            inner = [torch.optim.SGD(model.parameters()) for model in models]
            expected = [parameter.detach().cpu() for parameter in models[0].parameters()]

            def one(group, models=models, inner=inner, last=last, fails=fails):
                here.fails = fails if group.rank == last else None
                with pytest.raises((MemoryError, RankFailed), match="nothing left"):
                    shard(models[group.rank], inner[group.rank], group=group, stage=2, bucket_bytes=64)

            run_ranks(2, one, 20.0)
            found += [torch.equal(p.detach().cpu(), e) for m in models for p, e in zip(m.parameters(), expected, strict=True)]
    return found


@needs_sim
def test_no_value_is_lost_where_a_rank_fails_while_others_have_moved_theirs_to_the_host():
    [found] = ranks.run(1, fail_beside_parameters, apart="sim")
    assert len(found) == 6 * 2 * 4 and all(found)


WIDTH = 128
LAYER = 4 * WIDTH**2  # bytes, in fp32


def layers(count):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def fill_a_device(rank, world):
    """Trainings on a device of 2 MiB, on which layers thaw while there is no room for them: for each whether that was so, and
    whether what is laid out is what lies there, with the values of before, and training goes on."""
    import accelerators_sim as simulated

    simulated.bring_up()
    found = []
    for count, num_bytes in itertools.product((10, 12, 14), (0, LAYER, 4 * LAYER, 6 * LAYER)):
        model = layers(count).to("sim:0")
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device="sim:0")
        model[:-1].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shard(model, inner, group=solo(), stage=0, dtype="bfloat16", bucket_bytes=1 << 15)

        def step(model=model, optimizer=optimizer, x=x):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        before, parts = [parameter.detach().cpu() for parameter in model.parameters()], optimizer.sharding
        model.requires_grad_(True)
        held = torch.empty(num_bytes, dtype=torch.uint8, device="sim:0")
        with contextlib.suppress(torch.OutOfMemoryError):
            step()
        del held
        gc.collect()
        failed = len(parts.layout_ref.layout.chunks) == 1
        same = all(torch.equal(p.detach().cpu(), b) for p, b in zip(model.parameters(), before, strict=True))
        lie = len(parts.placer.weights.chunks) == len(parts.layout_ref.layout.chunks)
        model[:-1].requires_grad_(False)
        optimizer.zero_grad()
        step()
        found.append((failed, lie and same))
        optimizer.close()
        del model, optimizer, inner, step, parts
        gc.collect()
    return found


@needs_sim
def test_what_thaws_on_a_full_device_is_where_it_was():
    [found] = ranks.run(1, fill_a_device, env={"SIM_MEMORY": "2MiB"}, group=False, timeout=120.0)
    assert sum(failed for failed, _ in found) >= 4 and all(right for _, right in found), found


# Scratch ----------------------------------------------------------------------------------------------------------------


class Streams:
    """An accelerator with streams, which notes what waits for what."""

    is_synchronous = False

    def __init__(self):
        self.current = "a"
        self.waits = []

    def current_stream(self, index=None):
        owner, name = self, self.current

        class Stream:
            def __init__(self):
                self.name = name

            def __eq__(self, other):
                return self.name == other.name

            def wait_stream(self, other):
                owner.waits.append((self.name, other.name))

            def record_event(self):
                raise AssertionError("recording an event makes the host wait where there are no streams")

        return Stream()


def test_what_is_given_back_is_lent_again_and_counted():
    staging = Staging(accelerators.get("cpu"), lambda numel, dtype: torch.empty(numel, dtype=dtype))
    one, two = staging.borrow(8, torch.float32), staging.borrow(8, torch.float32)
    assert (staging.borrowed, staging.most_borrowed) == (2, 2)
    staging.give_back(one)
    assert staging.borrow(8, torch.bfloat16).dtype == torch.bfloat16
    assert staging.borrow(8, torch.float32).data_ptr() == one.data_ptr()
    assert (staging.borrowed, staging.most_borrowed) == (3, 3)
    staging.give_back(two)
    staging.release()
    assert staging.borrow(8, torch.float32).data_ptr() != two.data_ptr()


def test_what_is_larger_than_usual_has_a_size_of_its_own():
    staging = Staging(accelerators.get("cpu"), lambda numel, dtype: torch.empty(numel, dtype=dtype), usual_numel=8)
    large, usual = staging.borrow(100, torch.float32), staging.borrow(8, torch.float32)
    assert staging.num_bytes() == 4 * 108
    staging.give_back(large)
    staging.give_back(usual)
    assert staging.borrow(7, torch.float32).data_ptr() == usual.data_ptr()
    assert staging.borrow(90, torch.float32).data_ptr() == large.data_ptr()
    assert staging.num_bytes() == 4 * 108


def test_a_borrower_on_another_stream_waits_for_the_one_before():
    streams = Streams()
    staging = Staging(streams, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    staging.give_back(staging.borrow(4, torch.float32))
    staging.give_back(staging.borrow(4, torch.float32))
    assert streams.waits == []
    streams.current = "b"
    staging.borrow(4, torch.float32)
    assert streams.waits == [("b", "a")]
