"""Groups of the optimizer: homes of their own, those that come later or are refused, and the kernel that none changes."""

import dataclasses
import enum
import itertools
import logging
from unittest import mock

import pytest
import torch
from torch import nn

import accelerators
from tests import faults, inside, ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.loops import alone, on_ranks, one_step, same, weights
from tests.promises.offloads import SMALL, adamw, bits, difference
from tests.zoo.case import backward, draw, filled, real_loss, real_mlp, real_numbers
from zero import shard
from zero.config.schema import Offload, ZeroConfig

# homes of their own -----------------------------------------------------------------------------------------------------

HOMES = (("cpu", "-", "-"), ("-", {"ratio": 0.5}, "cpu"), ("cpu", None, {"device": "cpu", "pin_memory": True}))


def wide_mlp():
    return filled(nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 10)), real=True)


def with_homes(homes):
    def make(model):
        params = list(model.parameters())
        groups = [{"params": params[at : at + 2]} for at in (0, 2, 4)]
        for group, home in zip(groups, homes, strict=True):
            group.update({} if home == "-" else {"offload": home})
        return torch.optim.AdamW(groups, lr=0.01)

    return make


def clipped(model, optimizer, group):
    found = []
    for step in range(4):
        inputs = real_numbers((8, 64), step, group.rank).to(model[0].weight.dtype)
        backward(optimizer, model(inputs).float().pow(2).sum())
        optimizer.step()
        found.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return weights(model), found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_where_host_and_device_are_one_no_home_of_a_group_changes_a_bit(world, dtype):
    """Nor the layout, by which the sums of a norm are ordered."""
    options = {"clip": 0.1, "dtype": dtype}
    expected = on_ranks(world, clipped, wide_mlp, with_homes("---"), **options)
    for homes, offload in itertools.product((*HOMES, "---"), (None, {"ratio": 0.5})):
        found = on_ranks(world, clipped, wide_mlp, with_homes(homes), offload=offload, **options)
        assert difference(found, expected) is None, (homes, offload)


def test_on_the_host_nothing_is_refused_that_trains_without_offload():
    model = nn.Linear(500, 500)
    reading = accelerators.get("cpu").memory()
    little = dataclasses.replace(reading, available=2 * model.weight.nbytes)
    for offload in (None, "cpu", {"ratio": 0.01}):
        with mock.patch.object(type(accelerators.get("cpu")), "memory", return_value=little):
            shard(model, adamw(model), stage=2, group=solo(), offload=offload).close()


class Theirs(str, enum.Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def test_a_home_is_said_in_any_of_the_words_that_are_in_use():
    whole = Offload()
    for given in ("cpu", "CPU", "host", Theirs.cpu, torch.device("cpu"), {"device": "cpu"}, {"home": "host"}, {}, whole,
                  {"device": Theirs.cpu, "ratio": 1.0}):  # fmt: skip
        assert ZeroConfig(stage=1, offload=given).offload == Offload.of(given) == whole
    for given in (None, "none", Theirs.none, {"device": "none"}):
        assert ZeroConfig(stage=1, offload=given).offload is Offload.of(given) is None
    for pinned in (True, False):
        assert Offload.of({"device": "cpu", "pin_memory": pinned, "ratio": 0.5}) == Offload(pinned=pinned, ratio=0.5)
    unknown = (("gpu", "'gpu'"), ("nvme", "'nvme'"), ({"device": "disk"}, "'disk'"), ({"home": ""}, "''"))
    for given, said in unknown:
        for ask in (lambda given=given: ZeroConfig(stage=1, offload=given), lambda given=given: Offload.of(given)):
            with pytest.raises(ValueError, match=rf"Cannot use offload={said}: .* host memory\. Use offload='cpu'"):
                ask()
    with pytest.raises(ValueError, match=r"Cannot use offload=True: name the place\. Use offload='cpu'"):
        Offload.of(True)


# later, or refused ------------------------------------------------------------------------------------------------------


def test_a_group_that_is_refused_leaves_everything_as_it_was():
    model, optimizer = alone(make=adamw)
    inner = optimizer.inner
    one_step(model, optimizer)
    extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    other = real_mlp()
    its_own = shard(other, adamw(other), stage=1, group=solo())
    refused = [
        ({"params": extra, "offload": "disk"}, ValueError, r"Cannot use offload='disk': .*Use offload='cpu'"),
        ({"params": [*extra, model[0].weight]}, ValueError, "more than one parameter group"),
        ({"params": [extra[0], nn.Parameter(torch.ones(2, dtype=torch.complex64))]}, ValueError, "is complex"),
        ({"params": [extra[0], nn.Parameter(torch.ones(2, device="meta"))]}, ValueError, "on several devices"),
        ({"params": [nn.Parameter(torch.ones(2, device="meta"))]}, ValueError, "is on the meta device"),
        ({"params": [extra[0], nn.Parameter(extra[1].data[:1]), extra[1]]}, ValueError, "share memory"),
        ({"params": [extra[0], other[0].weight]}, ValueError, "is sharded already"),
    ]
    for group, kind, words in refused:
        names, layout = list(inside.names(optimizer)), inside.layout(optimizer)
        with pytest.raises(kind, match=words):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(inner.param_groups) == 1
        assert inside.names(optimizer) == names and inside.layout(optimizer) is layout
    one_step(model, optimizer, step=1)
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    before = extra[0].detach().clone()
    backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 2, real=True))) + extra[0].sum())
    optimizer.step()
    assert not torch.equal(extra[0], before)
    its_own.close()


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def grow(first_home, second_home, **group):
    """A model of which the second half comes later, into a home of its own."""
    with torch.device("sim:0"):
        model = filled(Grown(), real=True)
    inner = torch.optim.AdamW([{"params": model.first.parameters(), "offload": first_home}], lr=0.02, eps=1e-2)
    optimizer = shard(model, inner, stage=2, bucket_bytes=SMALL, group=solo(), kernels="torch")
    optimizer.add_param_group({"params": list(model.second.parameters()), "offload": second_home, **group})
    for step in range(3):
        for micro in range(1 + step):
            backward(optimizer, real_loss(model(draw(model, (3, 4), 0, step, micro, real=True))))
        optimizer.step()
        optimizer.zero_grad()
    layout, shares = inside.layout(optimizer), inside.masters_by_bucket(optimizer)
    homes = [{shares[bucket].device.type for bucket in layout.buckets_of(index)} for index in (0, 2)]
    return model, optimizer, homes


def later(rank, world):
    import accelerators_sim as simulated

    simulated.bring_up()
    simulated.configure(order="late")
    found = {}
    for first, second in itertools.product((None, "cpu"), repeat=2):
        model, optimizer, homes = grow(first, second)
        found[first, second] = homes, bits(model, optimizer)
        moments = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
        assert moments == set.union(*homes)
        optimizer.close()
    return found


@needs_sim
def test_a_group_that_comes_later_goes_where_it_says_with_the_bits_of_going_nowhere():
    [found] = ranks.run(1, later, apart="sim")
    expected = found[None, None][1]
    for (first, second), (homes, has) in found.items():
        assert homes == [{"cpu" if home else "sim"} for home in (first, second)]
        assert difference(has, expected) is None


def refused_later(rank, world):
    """What is said, by what is lacking, and that nothing was made."""
    import accelerators_sim as simulated

    simulated.bring_up()
    said, host, pin = {}, accelerators.get("cpu"), type(accelerators.get("sim")).pin
    little = dataclasses.replace(host.memory(), available=100)

    def note(name, first, second):
        with torch.device("sim:0"):
            model = filled(Grown(), real=True)
        inner = torch.optim.AdamW([{"params": model.first.parameters(), "offload": first}])
        allocates = AssertionError("allocated")
        with faults.MEMORY_ON_HOST.replaced(side_effect=allocates) if first is None else mock.MagicMock():
            optimizer = shard(model, inner, stage=2, bucket_bytes=SMALL, group=solo(), kernels="torch")
            with lacking.get(name, mock.MagicMock()), pytest.raises((ValueError, MemoryError)) as caught:
                optimizer.add_param_group({"params": list(model.second.parameters()), "offload": second})
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
        assert len(inner.param_groups) == 1 and len(inside.names(optimizer)) == 2
        optimizer.close()

    def pins_little(device, tensor):
        return tensor if tensor.nbytes > 32 else pin(device, tensor)

    lacking = {
        "room": mock.patch.object(type(host), "memory", return_value=little),
        "pins": mock.patch.object(type(accelerators.get("sim")), "pin", pins_little),
    }
    note("room", None, "cpu")
    note("room", "cpu", "cpu")
    note("pins", None, {"pinned": True})
    note("one kind", {"pinned": False}, {"pinned": True})
    note("the other kind", {"pinned": True}, {"pinned": False})
    return said


@needs_sim
def test_a_group_that_comes_later_is_asked_the_same_questions():
    [said] = ranks.run(1, refused_later, apart="sim")
    assert said["room"].startswith("MemoryError: Cannot keep ") and "machine: 100 bytes" in said["room"]
    assert "no piece of 64 bytes can be pinned for sim" in said["pins"]
    for name in ("one kind", "the other kind"):
        assert "some groups and pageable memory for others" in said[name]


# pinned memory ----------------------------------------------------------------------------------------------------------


def kinds_of_memory(rank, world):
    """Whether shares are pinned, by what the configuration and the group say of it; None where that is refused."""
    import accelerators_sim as simulated

    simulated.bring_up()
    found, sim = {}, accelerators.get("sim")
    for works, config, own in itertools.product((True, False), (None, True, False), (None, True, False)):
        with torch.device("sim:0"):
            model = real_mlp()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "offload": {"pinned": own}}]
        pin = sim.pin if works else lambda tensor: tensor
        with mock.patch.object(sim, "pin", pin), mock.patch.object(sim, "can_pin", True):
            try:
                optimizer = shard(model, torch.optim.AdamW(groups), stage=2, offload={"pinned": config}, group=solo())
                found[works, config, own] = {share.is_pinned() for share in inside.shares_of_masters(optimizer)}
                optimizer.close()
            except ValueError as error:
                found[works, config, own] = str(error)
    return found


@needs_sim
@pytest.mark.promise("H01")
def test_pinned_memory_is_had_where_it_is_asked_for_in_any_group_or_refused_with_what_is_lacking():
    [found] = ranks.run(1, kinds_of_memory, apart="sim")
    for (works, config, own), kinds in found.items():
        asked = {config, own} - {None}
        if len(asked) == 2:
            assert "Say the same for all" in kinds
        elif True in asked and not works:
            assert "bytes can be pinned for sim" in kinds and "Leave pinned out" in kinds
        else:
            assert kinds == {works and False not in asked}


def runs_out_of_pinned_memory(rank, world):
    """A probe succeeds and the memory itself is not to be had: what is said, and whether the model is as it was."""
    import accelerators_sim as simulated

    simulated.bring_up()
    with torch.device("sim:0"):
        model = real_mlp()
    before, sim, calls = weights(model), accelerators.get("sim"), itertools.count()
    with mock.patch.object(sim, "pin", lambda tensor, pin=sim.pin: pin(tensor) if next(calls) < 2 else tensor):
        with pytest.raises(MemoryError) as caught:
            shard(model, adamw(model), stage=2, offload={"pinned": True}, bucket_bytes=SMALL, group=solo())
    optimizer = shard(model, adamw(model), stage=2, offload={"pinned": True}, group=solo())
    pinned = all(share.is_pinned() for share in inside.shares_of_masters(optimizer))
    return str(caught.value), same(before, weights(model)), pinned


@needs_sim
@pytest.mark.promise("H01")
def test_pinned_memory_that_runs_out_in_the_middle_is_an_error_that_leaves_the_model_plain():
    [(said, unchanged, works_later)] = ranks.run(1, runs_out_of_pinned_memory, apart="sim")
    assert said.startswith("Cannot offload with pinned=True: 64 bytes of host memory could not be pinned.")
    assert unchanged and works_later


# the kernel -------------------------------------------------------------------------------------------------------------


def kernels_of(optimizer):
    return [(group["fused"], group["foreach"]) for group in (*optimizer.param_groups, optimizer.defaults)]


def test_loading_changes_no_kernel_and_says_so_in_one_line(caplog):
    saved = {}
    for kernels in ("torch", "fused"):
        model, optimizer = alone(make=adamw, kernels=kernels)
        one_step(model, optimizer)
        saved[kernels] = optimizer.state_dict()
        assert saved[kernels]["kernels"] == kernels
    plain = real_mlp()
    inner = torch.optim.AdamW(plain.parameters(), foreach=True)
    one_step(plain, inner)
    saved["plain torch"] = inner.state_dict()
    for kernels, source in itertools.product(("torch", "fused"), saved):
        model, optimizer = alone(make=adamw, kernels=kernels)
        before = kernels_of(optimizer)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="zero"):
            optimizer.load_state_dict(saved[source])
        lines = [record.message for record in caplog.records if "kernels" in record.message]
        assert kernels_of(optimizer) == before
        assert len(lines) == (source in ("torch", "fused") and source != kernels)
        assert all(f"kernels={source!r}" in line and f"kernels={kernels!r}" in line for line in lines)
        one_step(model, optimizer, step=1)


def test_a_closed_optimizer_has_the_kernels_that_it_came_with():
    model, other = real_mlp(), nn.Linear(2, 2)
    inner = torch.optim.AdamW([{"params": [model[0].weight], "foreach": True}, {"params": [model[0].bias]}])
    before = kernels_of(inner)
    optimizer = shard(model, inner, stage=1, kernels="fused", group=solo())
    optimizer.add_param_group({"params": list(other.parameters())})
    assert kernels_of(inner) == [(True, False)] * 4
    optimizer.close()
    assert kernels_of(inner) == [*before[:2], before[-1], before[-1]]
    assert kernels_of(inner)[0] == (None, True) and before[-1] == (None, None)
