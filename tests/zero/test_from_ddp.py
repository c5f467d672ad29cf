"""docs/from-ddp.md and from-fsdp.md: their scripts print the same with and without us, and what is left of DDP is named."""

import contextlib
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zero
from tests import ranks
from tests.moved import changed_lines, num_lines
from tests.pasted import ROOT, blocks_of
from tests.zoo.case import mlp, real_mlp, real_numbers

SCRIPTS = {"from-ddp": "ddp.py", "from-fsdp": "fsdp.py"}
PAGES = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in SCRIPTS}


def scripts_of(page):
    """Before and after."""
    files = {block.name: block.code for block in blocks_of(PAGES[page]) if block.name}
    return files[SCRIPTS[page]], files["sharded.py"]


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


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_script_of_a_page_prints_the_same_after_it_was_moved(page, tmp_path):
    printed = []
    for name, program in zip(("plain", "moved"), scripts_of(page), strict=True):
        (tmp_path / name).mkdir()
        printed.append(ranks.run(2, printed_by, str(tmp_path / name), program, timeout=120.0)[0])
    assert printed[0].count("loss") >= 3 and printed[0] == printed[1]


def test_a_moved_script_goes_on_from_the_checkpoint_of_ddp(tmp_path):
    plain, moved = scripts_of("from-ddp")
    one_epoch = plain.replace("range(first_epoch, EPOCHS)", "range(first_epoch, 1)")
    (tmp_path / "plain").mkdir()
    expected, _ = ranks.run(2, printed_by, str(tmp_path / "plain"), plain, timeout=120.0)
    assert ranks.run(2, printed_by, str(tmp_path), one_epoch, moved, timeout=120.0)[0] == expected


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_page_counts_the_lines_that_change(page):
    plain, moved = scripts_of(page)
    assert f"{changed_lines(plain, moved)} of its {num_lines(plain)} lines change" in PAGES[page]


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
    model, optimizer = trained(rank, 2)
    model(real_numbers((2, 4), rank)).square().mean().backward()
    with pytest.raises(ValueError, match=r"step with the optimizer that zero\.shard returned\."):
        optimizer.inner.step()
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


# what is left of FSDP2 --------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """Its buffer makes fp32 of what it touches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x) * self.scale)


def test_a_buffer_in_fp32_meets_weights_in_bf16_unless_buffers_are_cast():
    for buffer_dtype in (None, "bfloat16"):
        model = Scaled()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = zero.shard(model, inner, stage=3, dtype="bfloat16", buffer_dtype=buffer_dtype)
        if buffer_dtype is None:
            with pytest.raises(RuntimeError, match="dtype"):
                model(torch.ones(2, 4))
        else:
            assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        optimizer.close()
