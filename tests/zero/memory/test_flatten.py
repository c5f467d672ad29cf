"""Parameters into flat memory: what the log says, what is detached, what is refused, what comes back after a failure."""

import logging

import pytest
import torch
from torch import nn

import accelerators
from accelerators.memory import MemoryReading
from tests import ranks
from tests.devices import needs_sim
from zero.memory.flat import Form, Line
from zero.memory.flatten import Flattener, Place, unflatten
from zero.memory.staging import Staging
from zero.memory.weights import FlatBuffer
from zero.optimizer import shard
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
    weights = FlatBuffer(Line(FlatLayout.build(specs, 2, 64)))
    forms = [Form.of(tensor) for tensor in tensors]
    return Flattener(weights, tensors, forms, place or Place(accelerators.get("cpu"), torch.device("cpu")))


def flatten(made):
    for chunk, _ in enumerate(made.weights.line.layout.chunks):
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
    chunks = {chunk.untyped_storage().data_ptr() for chunk in made.weights.chunks}
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.stride() == expected.stride() or not tensor.numel()
        assert not tensor.numel() or tensor.untyped_storage().data_ptr() in chunks
        assert tensor.grad_fn is None
        assert tensor.is_leaf
    with torch.no_grad():
        tensors[0].add_(1.0)  # a view of memory with a history would refuse this
    assert all(chunk.grad_fn is None and not chunk.requires_grad for chunk in made.weights.chunks)


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


def test_what_fails_while_a_chunk_is_written_is_put_back():
    tensors = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2))]
    before = [tensor.detach().clone() for tensor in tensors]
    made = flattener(tensors, dtype="bfloat16")
    source = made.read(0)
    with pytest.raises(RuntimeError, match="on the way"), made.putting_back([0], [source]):
        made.write(0, source, 0)
        raise RuntimeError("on the way")
    assert not made.weights.chunks
    first = [index for index, _ in enumerate(tensors) if index in made.weights.line.layout.chunks[0].params]
    for index in first:
        assert tensors[index].dtype == torch.float32
        assert torch.equal(tensors[index], before[index])


def test_out_of_flat_memory_every_parameter_has_its_own():
    tensors = parameters()
    flatten(flattener(tensors))
    values = [tensor.detach().clone() for tensor in tensors]
    unflatten(tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    assert len(storages) == 3
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))


# By way of the host, on a device with little memory -----------------------------------------------------------------------


def flatten_on_sim(rank, world, cap):
    import os

    from accelerators import simulated

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


# Scratch ----------------------------------------------------------------------------------------------------------------


class Streams:
    """An accelerator with streams, which notes what waits for what."""

    is_synchronous = False

    def __init__(self):
        self.current = "a"
        self.waits = []

    def current_stream(self):
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


def test_a_borrower_on_another_stream_waits_for_the_one_before():
    streams = Streams()
    staging = Staging(streams, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    staging.give_back(staging.borrow(4, torch.float32))
    staging.give_back(staging.borrow(4, torch.float32))
    assert streams.waits == []
    streams.current = "b"
    staging.borrow(4, torch.float32)
    assert streams.waits == [("b", "a")]
