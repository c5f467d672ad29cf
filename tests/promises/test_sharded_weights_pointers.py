"""Every way to the memory of a weight that is in shares gives the right value or an error that says why, and never a crash.

Each probe runs in a process of its own, forked from one that has sharded a model. It is run on a plain weight too, without a
fork, which says what the right value is.
"""

from __future__ import annotations

import array
import copy
import ctypes
import io
import json
import multiprocessing.reduction
import os
import pickle
import re
import signal
import traceback
from multiprocessing import resource_sharer

import numpy
import pytest
import torch
from torch import nn

import zero
from tests import ranks

LIMIT_S = 30  # the seconds of a probe, on a machine that does other things too

SAME = "the same value"
NO_MEMORY = r"its weights are in shares, and it has no memory of its own"
# By torch, to C++ code that takes a pointer.
NO_POINTER = "Cannot access data pointer of Tensor|access the data pointer on an invalid python storage"


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file)


def with_out(weight):
    """Written by an operator that is given a place for its result."""
    with torch.no_grad():
        torch.add(torch.ones(6, 4), 1.0, out=weight.detach())
    return weight.detach().clone()


def with_grad(weight):
    (weight * 2).sum().backward()
    return weight.grad.clone()


@torch.inference_mode()
def under_inference(weight):
    views = [weight.t(), weight[1], weight.view(-1)[3:], weight.detach(), weight.data, *weight.unbind()]
    weight.mul_(2.0)
    read = [(weight @ weight.t()).sum(), *(view + 1 for view in views)]
    return [*read, weight.tolist(), weight[0, 0].item(), copy.deepcopy(weight), [view.is_inference() for view in views]]


def sent(weight):
    made = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(weight.detach()))
    resource_sharer.stop()  # its thread, which a fork does not take along
    return made


def sparse_of(weight):
    """Against its schema such an operator keeps the memory that it is given."""
    made = torch.sparse_coo_tensor(torch.arange(6)[None], weight.detach(), (6, 4), check_invariants=False)
    return [made.to_dense(), torch.sparse_csr_tensor([0, 4], [0, 1, 2, 3], weight.detach()[0], (1, 4)).to_dense()]


def sparse_read_later(weight):
    """When its chunk is another's, or has other values."""
    made = torch.sparse_coo_tensor(torch.arange(6)[None], weight.detach(), (6, 4), check_invariants=False)
    before = weight.detach().clone()
    if type(weight) is not nn.Parameter:
        weight.in_chunk.memory.fill_(float("nan"))
    return [torch.equal(made.to_dense(), before)]


def foreach(weight):
    with torch.no_grad():
        torch._foreach_mul_([weight, weight.t()], 2.0)
        return [*torch._foreach_add([weight], 1.0), *torch._foreach_norm([weight]), torch.stack([weight, weight])]


def compiled(weight):
    return torch.compile(lambda x: (x @ weight).sum(), backend="eager")(torch.ones(2, 6)).detach()


def assigned(weight):
    weight.data = torch.full((6, 4), 0.25)
    return weight.data


def numpy_writes(weight):
    """To a plain weight. What is written to a copy would be lost."""
    weight.detach().numpy()[0] = 1.0


def asarray_writes(weight):
    numpy.asarray(weight.detach())[0] = 1.0


def array_writes(weight):
    made = numpy.array(weight.detach())
    made[0] = 1.0
    return [made.tolist(), weight.tolist()]


def native_address(weight):
    return ctypes.string_at(weight.data_ptr(), 4)


# Name, probe, expected: the value that a plain weight gives, or what the error says.
PROBES = (
    ("data_ptr", lambda w: w.data_ptr(), NO_MEMORY),
    ("data_ptr of detach()", lambda w: w.detach().data_ptr(), NO_MEMORY),
    ("data_ptr of .data", lambda w: w.data.data_ptr(), NO_MEMORY),
    ("data_ptr of a view", lambda w: w.view(-1)[3:].data_ptr(), NO_MEMORY),
    ("data_ptr as C++ has it", lambda w: torch.Tensor.data_ptr(w), NO_POINTER),
    ("untyped_storage", lambda w: w.untyped_storage().data_ptr(), NO_MEMORY),
    ("untyped_storage as C++ has it", lambda w: torch.Tensor.untyped_storage(w).data_ptr(), NO_POINTER),
    ("storage", lambda w: w.storage(), NO_MEMORY),
    ("ctypes", native_address, NO_MEMORY),
    ("share_memory_", lambda w: w.share_memory_(), NO_MEMORY),
    ("is_shared", lambda w: w.is_shared(), SAME),  # it has no memory that could be
    ("pin_memory", lambda w: w.is_pinned(), SAME),
    ("storage_offset", lambda w: [w.storage_offset(), w.detach()[2].storage_offset()], SAME),
    ("stride", lambda w: [w.stride(), w.t().stride(), w.is_contiguous(), w.t().is_contiguous()], SAME),
    ("dlpack of torch.utils", lambda w: torch.utils.dlpack.to_dlpack(w.detach()), NO_POINTER),
    ("__dlpack__", lambda w: w.detach().__dlpack__(), NO_MEMORY),
    ("torch.from_dlpack", lambda w: torch.from_dlpack(w.detach()), NO_MEMORY),
    ("numpy.from_dlpack", lambda w: numpy.from_dlpack(w.detach()), NO_MEMORY),
    ("__cuda_array_interface__", lambda w: w.detach().__cuda_array_interface__, "Can't get __cuda_array_interface__"),
    ("memoryview", lambda w: memoryview(w.detach()), "bytes-like object is required"),
    ("torch.frombuffer", lambda w: torch.frombuffer(w.detach(), dtype=torch.float32), "buffer"),
    ("bytes of array", lambda w: array.array("f", w.detach().view(-1).tolist()).tobytes().hex(), SAME),
    ("set_ to another shape", lambda w: w.detach().set_(torch.zeros(2)), NO_MEMORY),
    ("set_ to a storage", lambda w: w.detach().set_(torch.zeros(24).untyped_storage()), NO_MEMORY),
    ("set_ of a plain one to it", lambda w: torch.zeros(2).set_(w.detach()), NO_MEMORY),
    ("resize_", lambda w: w.detach().resize_(2), NO_MEMORY),
    ("resize_as_", lambda w: w.detach().resize_as_(torch.zeros(2)), NO_MEMORY),
    (".data of another shape", lambda w: setattr(w, "data", torch.zeros(2)), NO_MEMORY),
    (".data of another dtype", lambda w: setattr(w, "data", torch.zeros(6, 4).double()), NO_MEMORY),
    (".data assigned", assigned, SAME),
    ("numpy", lambda w: w.detach().numpy().tolist(), SAME),
    ("writing through numpy", numpy_writes, "read-only"),
    ("writing through numpy.asarray", asarray_writes, "read-only"),
    ("writing to numpy.array", array_writes, SAME),
    ("numpy of what requires a gradient", lambda w: w.numpy(force=True).tolist(), SAME),
    ("__array__", lambda w: w.detach().__array__().tolist(), SAME),
    ("numpy.asarray", lambda w: numpy.asarray(w.detach()).tolist(), SAME),
    ("numpy.array", lambda w: numpy.array(w.detach(), dtype="float64").tolist(), SAME),
    ("numpy of a list", lambda w: numpy.array([row.detach() for row in w]).tolist(), SAME),
    ("tolist", lambda w: w.tolist(), SAME),
    ("item", lambda w: [w[1, 2].item(), float(w[0, 0]), w.detach().view(-1)[5].item(), bool(w[0, 0] > 100)], SAME),
    ("printing", lambda w: bool(str(w) and repr(w.detach()) and f"{w}"), SAME),
    ("formatting an element", lambda w: [f"{w.detach()[0, 0]:.6f}", f"{w[0, 0]:.3f}", f"{w.detach()[0, 0]}"], SAME),
    ("formatting a weight", lambda w: f"{w.detach():.3f}", "unsupported format string"),
    ("pickle", lambda w: pickle.loads(pickle.dumps(w)), SAME),
    ("pickle of a view", lambda w: pickle.loads(pickle.dumps(w.detach().t())), SAME),
    ("deepcopy", lambda w: copy.deepcopy(w), SAME),
    ("copy", lambda w: copy.copy(w).detach().clone(), SAME),
    ("torch.save", saved, SAME),
    ("to another process", sent, SAME),  # by value, as pickle does
    ("torch.as_tensor", lambda w: torch.as_tensor(w).detach().clone(), SAME),
    ("torch.tensor", lambda w: torch.tensor(w.detach()), SAME),
    ("torch.tensor of a list", lambda w: torch.tensor([row.detach().tolist() for row in w]), SAME),
    ("torch.asarray", lambda w: torch.asarray(w.detach()).clone(), SAME),
    ("nn.Parameter of it", lambda w: nn.Parameter(w.detach()).detach().clone(), SAME),
    ("torch.Tensor of it", lambda w: w.detach().as_subclass(torch.Tensor).clone(), SAME),
    ("to_sparse", lambda w: w.detach().to_sparse().to_dense(), SAME),
    ("to_sparse_csr", lambda w: w.detach().to_sparse_csr().to_dense(), SAME),
    ("to_mkldnn", lambda w: w.detach().to_mkldnn().to_dense(), SAME),
    ("sparse of it", sparse_of, SAME),
    ("sparse of it, read later", sparse_read_later, SAME),
    ("to meta", lambda w: [*w.to("meta").shape], SAME),
    ("to double", lambda w: w.detach().to(torch.float64), SAME),
    ("view of dtype", lambda w: w.detach().view(torch.int32), SAME),
    ("contiguous of t()", lambda w: w.detach().t().contiguous(), SAME),
    ("as_strided", lambda w: w.detach().as_strided((3, 2), (1, 2)), SAME),
    ("as_strided at an offset", lambda w: w.detach().as_strided((3, 2), (1, 2), 5), SAME),
    ("as_strided of a view", lambda w: w.detach()[2].as_strided((3,), (2,), 1), SAME),
    ("as_strided beyond it", lambda w: w.detach().as_strided((2,), (1,), w.numel() - 1), "it ends beyond the weight"),
    ("as_strided_copy", lambda w: torch.as_strided_copy(w.detach(), (2,), (1,), 5), NO_MEMORY),
    ("sparse.mm with amax", lambda w: torch.sparse.mm(torch.eye(6).to_sparse_csr(), w.detach(), "amax"), NO_MEMORY),
    ("as_strided_scatter", lambda w: torch.as_strided_scatter(w.detach(), torch.ones(2), (2,), (1,), 5), NO_MEMORY),
    ("unbind and chunk", lambda w: [*w.detach().unbind(), *w.detach().chunk(3)], SAME),
    ("iteration", lambda w: [row.detach() for row in w], SAME),
    ("in an operator of numpy", lambda w: (numpy.ones((2, 6)) @ w.detach().numpy()).tolist(), SAME),
    ("out=", with_out, SAME),
    ("its gradient", with_grad, "every rank holds only its share"),
    ("foreach", foreach, SAME),
    ("equal and hash", lambda w: [torch.equal(w, w), hash(w) == hash(w), w in {w}], SAME),
    ("inference", under_inference, SAME),
)  # fmt: skip


def plain_value(result):
    """As JSON has it."""
    if isinstance(result, torch.Tensor):
        return [str(result.dtype), list(result.shape), result.detach().tolist()]
    if isinstance(result, (list, tuple)):
        return [plain_value(member) for member in result]
    return result if isinstance(result, (bool, int, float, str)) else type(result).__name__


def said(probe, weight):
    """A value, or an error."""
    try:
        return ["value", plain_value(probe(weight))]
    except Exception as error:  # noqa: BLE001 - whatever it is, the test says it
        return ["error", f"{type(error).__name__}: {error}", traceback.format_exc()]


def forked(probe, weight):
    """What a child says of this probe, or how it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(LIMIT_S)
            with os.fdopen(writing, "w") as pipe:
                json.dump(said(probe, weight), pipe)
        finally:
            os._exit(0)  # the child must not go on as its parent
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 and text else ["died", f"status {status}"]


def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def answers(rank, world, probes):
    """Of a plain weight and of an absent one."""
    model = layer()
    options = {"bucket_bytes": 1024, "gathered_bytes": 0}  # the weight lies behind another one in its chunk
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **options)
    found = [(said(probe, layer()[0].weight), forked(probe, model[0].weight)) for probe in probes]
    assert torch.equal(model[0].weight, layer()[0].weight)  # no probe reached the memory of this process
    optimizer.close()
    return json.loads(json.dumps(found))


def every_answer(rank, world):
    return answers(rank, world, [probe for _, probe, _ in PROBES])


def answers_of_compiled(rank, world):
    return answers(rank, world, [compiled])


@pytest.fixture(scope="module")
def found():
    [found] = ranks.run(1, every_answer, timeout=240.0)
    return dict(zip((name for name, *_ in PROBES), found, strict=True))


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="each probe runs in a forked process")


@pytest.mark.promise("S12")
@needs_fork
@pytest.mark.parametrize(("name", "expected"), [pytest.param(name, expected, id=name) for name, _, expected in PROBES])
def test_a_way_to_the_memory_of_a_weight_in_shares_gives_its_value_or_an_error(name, expected, found):
    plain, absent = found[name]
    if expected is SAME:
        assert plain[0] == "value", plain
        assert absent == plain
    else:
        assert absent[0] == "error", absent
        assert re.search(expected, absent[1]), absent


@needs_fork
@pytest.mark.full  # compiling takes seconds
def test_a_compiled_function_that_reads_a_weight_in_shares_gives_its_value():
    [[(plain, absent)]] = ranks.run(1, answers_of_compiled, timeout=120.0)
    assert absent == plain and plain[0] == "value", absent
