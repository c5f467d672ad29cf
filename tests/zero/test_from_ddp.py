"""docs/from-ddp.md: its script prints the same with and without us, and what is left of DDP in a script is named."""

import contextlib
import io
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zero
from tests import ranks
from tests.moved import changed_lines
from tests.pasted import ROOT, blocks_of
from tests.zoo.case import mlp, real_mlp, real_numbers

PAGE = (ROOT / "docs" / "from-ddp.md").read_text(encoding="utf-8")
FILES = {block.name: block.code for block in blocks_of(PAGE) if block.name}


def printed_by(rank, world, folder, *programs):
    """What rank 0 prints. The group of the tests stands for the one that a script makes."""
    os.chdir(folder)
    out = io.StringIO()
    for program in programs:
        for line in ("dist.init_process_group()\n", "dist.destroy_process_group()\n"):
            assert line in program
            program = program.replace(line, "")
        with contextlib.redirect_stdout(out):
            exec(compile(program, "script.py", "exec"), {"__name__": "script"})
    return out.getvalue()


def test_the_script_of_the_page_prints_the_same_and_goes_on_from_the_other_ones_checkpoint(tmp_path):
    plain, moved = FILES["ddp.py"], FILES["sharded.py"]
    one_epoch = plain.replace("range(first_epoch, EPOCHS)", "range(first_epoch, 1)")
    runs = {"plain": (plain,), "moved": (moved,), "taken over": (one_epoch, moved)}
    printed = {}
    for name, programs in runs.items():
        (tmp_path / name).mkdir()
        printed[name], _ = ranks.run(2, printed_by, str(tmp_path / name), *programs, timeout=120.0)
    assert printed["plain"].count("epoch") == 3
    assert printed["moved"] == printed["taken over"] == printed["plain"]


def test_the_page_counts_the_lines_that_change():
    changed, number = map(int, re.search(r"(\d+) of its (\d+) lines change", PAGE).groups())
    plain, moved = FILES["ddp.py"], FILES["sharded.py"]
    assert (changed, number) == (changed_lines(plain, moved), len([line for line in plain.splitlines() if line.strip()]))


# what is left of DDP ----------------------------------------------------------------------------------------------------


def trained(rank, stage, **options):
    model = real_mlp()
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, **options)
    one_step(model, optimizer, rank)
    return model, optimizer


def one_step(model, optimizer, rank):
    model(real_numbers((2, 4), rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states_on_rank_0_alone(rank, world, stage):
    model, optimizer = trained(rank, stage)
    if rank == 0:
        alone = optimizer.state_dict(), model.state_dict(), optimizer.whole_state(model[0].weight)
    one_step(model, optimizer, rank)
    optimizer.check()
    return rank or (alone[0]["state"]["0.weight"]["step"] == 1.0 and alone[2].keys() >= {"exp_avg"})


def test_at_stage_0_one_rank_alone_may_ask_for_states():
    assert ranks.run(2, states_on_rank_0_alone, 0, timeout=60.0) == [True, 1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_dict_on_one_rank_says_that_all_call_it(stage):
    for outcome in ranks.outcomes(2, states_on_rank_0_alone, stage, timeout=60.0):
        assert outcome.kind == "RanksDiffer"
        assert "rank 0 to a state_dict (in a state_dict, which all ranks call, though one alone may write it)" in outcome.text


def state_before_a_barrier(rank, world):
    _, optimizer = trained(rank, 2, timeout_s=2.0)
    if rank == 0:
        optimizer.state_dict()
    dist.barrier()


def test_a_state_dict_that_others_wait_for_in_a_barrier_says_so_too():
    outcome, _ = ranks.outcomes(2, state_before_a_barrier, timeout=60.0, group_timeout=4.0)
    assert (
        outcome.kind == "GroupLost" and "in a state_dict, which all ranks call, though one alone may write it" in outcome.text
    )


def collectives_on_gradients(rank, world):
    model, _ = trained(rank, 2)
    model(real_numbers((2, 4), rank)).square().mean().backward()
    for call in (dist.all_reduce, lambda grad: dist.reduce(grad, 0), lambda grad: dist.broadcast(grad.data, 0)):
        with pytest.raises(NotImplementedError, match=r"0.weight: it is averaged over all ranks already.* Delete this call"):
            call(model[0].weight.grad)
    with pytest.raises(NotImplementedError, match="Delete what averages gradients over ranks, such as DistributedDataParallel"):
        torch.cat([param.grad.view(-1) for param in model.parameters()])


def test_a_reduction_of_gradients_by_hand_is_to_be_deleted():
    ranks.run(2, collectives_on_gradients, timeout=60.0)


def wrapped(rank, world):
    model = DistributedDataParallel(mlp())
    with pytest.raises(ValueError, match=r"Cannot shard DistributedDataParallel: .* Leave the wrapper out"):
        zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    model, _ = trained(rank, 2)
    model = DistributedDataParallel(model)
    with pytest.raises(NotImplementedError, match="Delete what averages gradients over ranks, such as DistributedDataParallel"):
        model(real_numbers((2, 4), rank)).square().mean().backward()


def test_a_wrapper_before_and_after_sharding_is_refused():
    ranks.run(2, wrapped, timeout=60.0)


def test_the_optimizer_names_the_call_that_stands_for_another_librarys():
    model = mlp()
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    with pytest.raises(AttributeError, match=r"'consolidate_state_dict', but state_dict.. is whole on every rank: call it on"):
        optimizer.consolidate_state_dict(to=0)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        optimizer.no_such_name()
