"""Moments that are on disk may be edited like those in memory; what was lost on its way there is never used or saved."""

import gc
import os

import pytest
import torch

import zero
from tests import ranks
from tests.loopback import solo
from tests.promises.test_homes import EVERYTHING, edit, fail_to, in_, same, send, sharded, told, train


def replaced(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def replaced_in_part(optimizer):
    state = min(optimizer.state.values(), key=lambda state: state["exp_avg_sq"].numel())  # their order is that of steps
    state["exp_avg_sq"] = torch.full(state["exp_avg_sq"].shape, 0.5)


def cleared(optimizer):
    optimizer.state.clear()


def in_place_where_it_came_to_memory(optimizer):
    optimizer.state_dict()
    for state in optimizer.state.values():
        if state["exp_avg"].stride() != (0,):  # otherwise the state is on disk again
            state["exp_avg"].mul_(0.5)


def replaced_where_it_came_to_memory(optimizer):
    optimizer.state_dict()
    replaced(optimizer)


EDITS = (replaced, replaced_in_part, cleared, replaced_where_it_came_to_memory)


@pytest.mark.promise("H07")
@pytest.mark.parametrize("edits", EDITS, ids=lambda edits: edits.__name__)
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_what_is_put_in_the_place_of_a_moment_is_its_value(tmp_path, edits, kernels):
    plain, apart = sharded({}, kernels=kernels), sharded(in_(tmp_path, EVERYTHING), kernels=kernels)
    for model, optimizer in (plain, apart):
        train(model, optimizer, steps=range(2))
        edits(optimizer)
    assert same(train(*plain, steps=range(2, 4)), train(*apart, steps=range(2, 4)))
    for _, optimizer in (plain, apart):
        edits(optimizer)
    assert same(told(*plain), told(*apart))


@pytest.mark.promise("H07")
def test_what_is_written_in_place_where_it_came_to_memory_is_kept(tmp_path):
    model, optimizer = sharded(in_(tmp_path, EVERYTHING))
    train(model, optimizer, steps=range(2))
    before = optimizer.state_dict()["state"]
    in_place_where_it_came_to_memory(optimizer)
    after = optimizer.state_dict()["state"]
    halved = [name for name in before if torch.equal(after[name]["exp_avg"], 0.5 * before[name]["exp_avg"])]
    others = [name for name in before if torch.equal(after[name]["exp_avg"], before[name]["exp_avg"])]
    assert halved and others and sorted((*halved, *others)) == sorted(before)


@pytest.mark.promise("H07")
def test_what_lies_behind_what_stands_for_a_moment_is_not_taken_for_it(tmp_path):
    """Of the length of a line it has memory for one number alone, and others lie behind it."""
    for _ in range(5):
        model, optimizer = sharded(in_(tmp_path, EVERYTHING), bucket_bytes=2**20)
        train(model, optimizer, steps=range(1))
        kept = []
        for state in optimizer.state.values():
            place = state["exp_avg"].untyped_storage().data_ptr()
            behind = [torch.zeros(1) for _ in range(50)]  # malloc places these behind it
            kept += behind
            near = min(behind, key=lambda each: abs(each.data_ptr() - place))
            state["exp_avg"] = near.expand(state["exp_avg"].shape)
        found = optimizer.state_dict()["state"]
        assert not any(state["exp_avg"].any() for state in found.values())
        optimizer.close()


@pytest.mark.promise("H07")
def test_what_is_read_in_inference_mode_is_trained_on(tmp_path):
    plain, apart = sharded({}), sharded(in_(tmp_path, EVERYTHING))
    for model, optimizer in (plain, apart):
        train(model, optimizer, steps=range(2))
    with torch.inference_mode():
        found = [optimizer.state_dict()["state"] for _, optimizer in (plain, apart)]
        zero.save(str(tmp_path / "saved"), apart[1])
    assert same(*found)
    assert same(train(*plain, steps=range(2, 4)), train(*apart, steps=range(2, 4)))


@pytest.mark.promise("H07")
def test_what_was_told_of_one_moment_is_not_told_of_those_that_come_after_it(tmp_path):
    """As when a setting does without it for a while."""
    model, optimizer = sharded(
        in_(tmp_path, EVERYTHING), lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    )
    train(model, optimizer, steps=range(2))
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    with pytest.raises(ValueError, match="Cannot change momentum_buffer in place"):
        optimizer.state_dict()
    for momentum in (0.0, 0.9):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["momentum"] = momentum
        train(model, optimizer, steps=range(2))
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def write_on_one(rank, world, folder):
    plain, (model, optimizer) = (sharded(homes, group=None) for homes in ({}, in_(folder, EVERYTHING)))
    for each in (plain, (model, optimizer)):
        train(*each, steps=range(2), rank=rank)
    if rank:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    for act in (optimizer.step, optimizer.state_dict):
        send(model, 20, rank)
        with pytest.raises((ValueError, zero.ZeroError), match=r"(?s)Cannot change exp_avg in place: .* Put another"):
            act()
        optimizer.zero_grad()
        if rank and act == optimizer.step:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
    found, expected = (train(*each, steps=range(2, 4), rank=rank) for each in ((model, optimizer), plain))
    assert same(found, expected)


@pytest.mark.promise("H07")
def test_what_only_stands_for_a_moment_is_not_to_be_written_to(tmp_path):
    """All ranks raise where one did so, before anything is stepped, and go on."""
    ranks.run(2, write_on_one, str(tmp_path))


def saves(optimizer, folder):
    zero.save(folder, optimizer, tag="next", keep_last=1)


LOSES = {
    "a save": lambda model, optimizer, folder: saves(optimizer, folder),
    "a state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "a step": lambda model, optimizer, folder: (send(model, 7), optimizer.step()),
}


@pytest.mark.promise("H08")
@pytest.mark.parametrize("loses", LOSES)
@pytest.mark.parametrize("kind", ["masters", "moments"])
def test_what_could_not_be_written_is_never_used_or_saved(tmp_path, loses, kind):
    plain, (model, optimizer) = sharded({}), sharded(in_(tmp_path, EVERYTHING))
    for each in (plain, (model, optimizer)):
        train(*each, steps=range(2))
    folder = str(tmp_path / "saved")
    zero.save(folder, optimizer, tag="good", keep_last=1)
    edit(model)  # the edit has masters written anew
    if kind == "moments":
        replaced(optimizer)
    with fail_to("pwritev", kind)(optimizer), pytest.raises(zero.ZeroError, match=rf"Cannot write to .* for {kind}"):
        LOSES[loses](model, optimizer, folder)
    optimizer.zero_grad()
    for act in LOSES.values():
        with pytest.raises(zero.ZeroError, match=r"(values are lost\. L|Check the disk, and l)oad the last checkpoint"):
            act(model, optimizer, folder)
        optimizer.zero_grad()
    assert zero.latest(folder) == "good"
    zero.load(folder, optimizer)
    assert same(told(*plain), told(model, optimizer))
    assert same(train(*plain, steps=range(2, 4)), train(model, optimizer, steps=range(2, 4)))


@pytest.mark.promise("H09")
@pytest.mark.parametrize("include", [None, ["moments"]])
def test_what_cannot_be_read_back_comes_from_a_checkpoint(tmp_path, include):
    plain, (model, optimizer) = sharded({}), sharded({})
    for each in (plain, (model, optimizer)):
        train(*each, steps=range(2))
    zero.save(str(tmp_path / "saved"), optimizer)
    optimizer.offload_states(include, device=f"disk:{tmp_path}")
    with fail_to("preadv", "states")(optimizer):
        with pytest.raises(zero.ZeroError, match=r"Cannot read from .* for states: .*load the last checkpoint"):
            optimizer.reload_states()
        with pytest.raises(ValueError, match="are away since offload_states"):
            optimizer.load_state_dict({})
        with pytest.raises(ValueError, match="are away since offload_states"):
            zero.load(str(tmp_path / "saved"), optimizer, optimizer_states=False)
        other = torch.nn.Linear(2, 2)
        zero.save(str(tmp_path / "other"), zero.shard(other, torch.optim.SGD(other.parameters()), stage=1, group=solo()))
        with pytest.raises(ValueError, match="the checkpoint is of another model"):
            zero.load(str(tmp_path / "other"), optimizer)
        with pytest.raises(ValueError, match="are away since offload_states"):
            optimizer.step()
        zero.load(str(tmp_path / "saved"), optimizer)
    assert same(told(*plain), told(model, optimizer))
    assert same(train(*plain, steps=range(2, 4)), train(model, optimizer, steps=range(2, 4)))


@pytest.mark.promise("H09")
def test_an_optimizer_whose_weights_cannot_be_read_back_can_be_let_go_of(tmp_path):
    model, optimizer = sharded({})
    train(model, optimizer, steps=range(1))
    optimizer.offload_states(device=f"disk:{tmp_path}")
    before = set(os.listdir("/proc/self/fd"))
    with fail_to("preadv", "states")(optimizer):
        with pytest.raises(zero.ZeroError, match=r"Cannot read from .* for states"):
            optimizer.close()
        del optimizer
        gc.collect()
    assert all(param.isnan().all() for param in model.parameters())
    assert len(set(os.listdir("/proc/self/fd"))) < len(before)


def test_how_disks_are_read_is_said_once_for_all_groups(tmp_path):
    homes = in_(tmp_path, EVERYTHING)

    def grouped(**more):
        def make(model):
            whole, *rest = model.parameters()
            return torch.optim.AdamW([{"params": [whole], "homes": {**homes, **more}}, {"params": rest}])

        return make

    _, optimizer = sharded({}, grouped())
    assert isinstance(optimizer.config.homes.threads, int) and isinstance(optimizer.config.homes.piece_bytes, int)
    with pytest.raises(ValueError, match=r"Cannot set threads or piece_bytes for a group: .* Say them in homes="):
        sharded({}, grouped(threads=2))
