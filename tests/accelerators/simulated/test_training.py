"""What programs do with a device works on the simulated one, and gives the host's numbers."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from accelerators_sim import SimulatedAccelerator, configure

torch.manual_seed(0)


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Conv1d(4, 6, 3, padding=1), nn.GELU(), nn.LayerNorm(8), nn.Flatten(), nn.Linear(48, 5)
    )


def train(device, make_optimizer, steps=3):
    m = model().to(device)
    optimizer = make_optimizer(m.parameters())
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (7, 4), generator=generator).to(device)
        target = torch.randint(0, 5, (7,), generator=generator).to(device)
        loss = functional.cross_entropy(m(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in m.parameters()]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adamw, single": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_training_gives_the_hosts_numbers(sim, name, device):
    losses, parameters = train(device, OPTIMIZERS[name])
    host_losses, host_parameters = train("cpu", OPTIMIZERS[name])
    assert losses == pytest.approx(host_losses, rel=1e-6)
    for ours, theirs in zip(parameters, host_parameters, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_run_on_a_thread_a_device_and_find_that_device_current(sim):
    seen = {}
    parameters = [nn.Parameter(torch.ones(3, device=f"sim:{index}")) for index in range(2)]
    for index, p in enumerate(parameters):

        def hook(p, index=index):
            seen[index] = threading.get_ident(), sim.current_device(), torch.empty(1, device="sim").device.index

        p.register_post_accumulate_grad_hook(hook)
    (parameters[0] * 2).to("sim:1").mul(parameters[1]).sum().backward()
    assert [seen[index][1:] for index in range(2)] == [(0, 0), (1, 1)]
    assert len({threading.get_ident(), seen[0][0], seen[1][0]}) == 3
    assert [p.grad.tolist() for p in parameters] == [[2.0] * 3, [2.0] * 3]


def test_a_hook_may_use_another_device_for_a_while(sim):
    seen = []

    def hook(p):
        with sim.device(0):
            seen.append(sim.current_device())
        seen.append(sim.current_device())

    p = nn.Parameter(torch.ones(3, device="sim:1"))
    p.register_post_accumulate_grad_hook(hook)
    p.sum().backward()
    assert seen == [0, 1]


def test_an_error_in_a_hook_comes_out_of_backward_as_it_was(sim):
    def hook(p):
        raise KeyError("the user's own")

    p = nn.Parameter(torch.ones(3, device="sim"))
    p.register_post_accumulate_grad_hook(hook)
    with pytest.raises(KeyError, match="the user's own"):
        p.sum().backward()


def test_a_checkpoint_goes_out_and_comes_in_on_any_device(sim):
    m = model().to("sim:1")
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    for location, expected in ((None, "sim:1"), ("sim:0", "sim:0"), ("cpu", "cpu")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert {str(tensor.device) for tensor in loaded.values()} == {expected}
        assert all(torch.equal(loaded[name].cpu(), tensor.cpu()) for name, tensor in m.state_dict().items())


def test_a_deep_copy_has_memory_of_its_own(sim):
    m = nn.Linear(3, 3).to("sim:1")
    other = copy.deepcopy(m)
    assert other.weight.device == m.weight.device
    with torch.no_grad():
        other.weight.zero_()
    assert m.weight.abs().sum().item() > 0


def test_pickled_tensors_and_bare_storages_keep_their_bytes(sim):
    x = torch.arange(4.0, device="sim:1")
    stretch = SimulatedAccelerator().with_own_storage(x[1:3])
    for tensor in (x, stretch, stretch[1:], x):
        assert pickle.loads(pickle.dumps(tensor)).tolist() == tensor.tolist()
    storage = torch.UntypedStorage(16, device="sim:1")
    assert (storage.device, storage.nbytes()) == (x.device, 16)
    storage.copy_(x.untyped_storage())
    assert torch.empty(0, device="sim:1").set_(storage).tolist() == x.tolist()
    assert torch.empty(0).set_(storage.cpu()).tolist() == x.tolist()
    assert torch.empty(0, device="sim").set_(torch.ones(2).untyped_storage().to(device="sim")).tolist() == [1.0, 1.0]
    assert torch.UntypedStorage(8).device.type == "cpu"


def test_autocast_multiplies_in_bf16_and_adds_up_in_fp32(sim):
    m, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    with torch.autocast("sim"):
        y = m(x)
        assert y.dtype == torch.bfloat16
        assert torch.softmax(y, -1).dtype == functional.cross_entropy(y, torch.zeros(2, dtype=torch.long, device="sim")).dtype
        assert torch.softmax(y, -1).dtype == torch.float32
        assert (x + x).dtype == torch.float32
    assert m(x).dtype == torch.float32
    y.float().sum().backward()
    assert m.weight.grad.dtype == torch.float32


def test_attention_dropout_and_checkpointing_work(sim):
    q = torch.randn(2, 2, 5, 8, device="sim", requires_grad=True)
    y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    expected = functional.scaled_dot_product_attention(*(q.detach().cpu(),) * 3, is_causal=True)
    torch.testing.assert_close(y.detach().cpu(), expected)

    def block(t):
        return functional.dropout(t.sin(), 0.5)

    torch.utils.checkpoint.checkpoint(block, q, use_reentrant=False).sum().backward()
    # If dropout kept an element, its gradient is cos * 2, and otherwise 0: the second forward drew the same numbers.
    kept = q.grad != 0
    torch.testing.assert_close(q.grad[kept], (q.detach().cos() * 2)[kept])


def test_each_device_draws_its_own_random_numbers_from_its_seed(sim):
    torch.manual_seed(3)
    a, b = torch.randn(4, device="sim:0"), torch.randn(4, device="sim:1")
    host = torch.rand(1)
    assert torch.equal(a.cpu(), b.cpu())
    state = sim.get_rng_state(0)
    first = functional.dropout(torch.ones(50, device="sim")), torch.rand(2, device="sim")
    sim.set_rng_state(state, 0)
    second = functional.dropout(torch.ones(50, device="sim")), torch.rand(2, device="sim")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), host)


def test_a_compiled_function_gives_the_same_numbers(sim):
    x = torch.randn(4, 4, device="sim")
    compiled = torch.compile(lambda t: (t @ t).relu().sum(), backend="aot_eager")
    torch.testing.assert_close(compiled(x), (x @ x).relu().sum())
    pinned = torch.ones(4).pin_memory()  # from here on the host's operators are watched
    torch.compiler.reset()
    torch.testing.assert_close(compiled(x), (x @ x).relu().sum())
    assert torch.compile(lambda t: t * 2, backend="eager")(pinned).tolist() == [2.0] * 4


@pytest.mark.parametrize("order", ["late", "random:1", "eager"])
def test_statistics_of_a_batch_are_those_of_the_host_in_whatever_order_a_device_works(sim, order):
    import torch._meta_registrations  # as torch's compiler does: from then on shapes of many more operators are known ahead

    configure(order=order)
    found = []
    for device in ("cpu", "sim:0"):
        norm, x = nn.BatchNorm1d(6).to(device), torch.arange(24.0).view(4, 6).to(device)
        seen = []
        for _ in range(2):
            y = norm.train()(x)
            seen.append(norm.running_mean.tolist())
            with torch.no_grad():
                seen.append(norm.eval()(x[:2]).cpu())
            y.square().sum().backward()
        found.append([*seen, norm.running_var.cpu(), norm.weight.grad.cpu()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_channels_that_come_last_have_the_strides_of_the_host_in_whatever_order_a_device_works(sim):
    """A kernel chooses the order of its sums by the strides of what it is given."""
    import torch._meta_registrations  # as above

    configure(order="random:1")
    found = set()
    for device in ("cpu", *["sim:0"] * 12):
        conv, norm = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last).to(device), nn.BatchNorm2d(4).to(device)
        y = conv(torch.ones(4, 8).to(device).unflatten(1, (2, 2, 2)))
        y.retain_grad()
        norm(y).square().sum().backward()
        found.add((y.stride(), y.grad.stride()))
    assert len(found) == 1


def test_weights_in_fp16_are_normalised_in_whatever_order_a_device_works(sim):
    """Kernels give norms in fp32, where torch works out fp16."""
    configure(order="random:1")
    grads = []
    for device in ("cpu", *["sim:0"] * 4):
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)).half().to(device)
        layer(torch.ones(2, 4, dtype=torch.float16, device=device)).float().sum().backward()
        grads.append(torch.cat([param.grad.cpu().flatten() for param in layer.parameters()]))
    assert all(torch.allclose(grad, grads[0], rtol=1e-2, atol=1e-2) for grad in grads)
