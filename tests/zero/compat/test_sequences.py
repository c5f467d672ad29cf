"""A script of DeepSpeed's Ulysses trains on parts of sequences as one process does on whole ones."""

import pytest
import torch
import torch.distributed.nn.functional

from tests import ranks
from tests.devices import needs_transformers
from tests.zero.integrations.test_sequences import batch_of, make_model

pytestmark = needs_transformers


def trained(rank, world, stage):
    import zero.compat.deepspeed as deepspeed
    from zero.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    plain, model = make_model("llama", 2).float(), make_model("llama", 2).float()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, sequence_parallel_size=world, micro_batch_size=2)
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": world, "zero_optimization": {"stage": stage},
              "gradient_clipping": 1e6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    group, oracle = mpu.get_sequence_parallel_group(), torch.optim.SGD(plain.parameters(), lr=0.1)
    case = {"packed": True, "length": 12}
    own = [batch_of(case, 10 * step + rank) for step in range(2)]  # each rank loads samples of its own
    loader = UlyssesSPDataLoaderAdapter(own, mpu.get_sequence_parallel_rank(), group, world, engine.device)
    assert len(loader) == 2 * world
    for number, batch in enumerate(loader):
        targets = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = model.loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=model.config.vocab_size)
        losses = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather((targets != -100).sum(), group=group)
        total = sum(one * count for one, count in zip(losses, counts, strict=True)) / sum(counts)
        engine.backward(total)
        engine.step()
        expected = plain(**batch_of(case, 10 * (number // world) + number % world), use_cache=False).loss
        assert float(total) == pytest.approx(float(expected), rel=1e-5)
        oracle.zero_grad()
        expected.backward()
        oracle.step()
    engine.close()
    return max(float((one - other).detach().abs().max())
               for one, other in zip(model.parameters(), plain.parameters(), strict=True))  # fmt: skip


@pytest.mark.promise("Y01")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_script_of_deepspeeds_ulysses_trains_as_in_one_process(stage):
    assert max(ranks.run(2, trained, stage, apart="frameworks")) < 1e-5


class Summed(torch.autograd.Function):
    """A sum over the ranks of a sequence, as a script may have it."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group, total = group, value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def accumulated(rank, world, stage):
    """Two rows of two ranks, which accumulate, and evaluate in between."""
    import zero.compat.deepspeed as deepspeed
    from zero.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    plain, model = make_model("llama", 2).float(), make_model("llama", 2).float()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, sequence_parallel_size=2)
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "gradient_accumulation_steps": 2,
              "zero_optimization": {"stage": stage}, "gradient_clipping": 1e6,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    group, oracle, case = mpu.get_sequence_parallel_group(), torch.optim.SGD(plain.parameters(), lr=0.1), {"packed": True}
    own = [batch_of(case, 10 * step + rank) for step in range(2)]
    loader = UlyssesSPDataLoaderAdapter(own, mpu.get_sequence_parallel_rank(), group, 2, engine.device)
    for number, batch in enumerate(loader):
        targets = batch.pop("shift_labels")
        with torch.no_grad():
            engine(**batch)
        logits = engine(**batch).logits
        loss = model.loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=model.config.vocab_size)
        count = (targets != -100).sum()
        engine.backward(Summed.apply(loss * count, group) / Summed.apply(count, group))
        engine.step()
        step, turn = divmod(number, 2)
        for row in range(world // 2):
            (plain(**batch_of(case, 10 * step + 2 * row + turn), use_cache=False).loss / world).backward()
        if turn:
            oracle.step()
            oracle.zero_grad()
    engine.close()
    return max(float((one - other).detach().abs().max())
               for one, other in zip(model.parameters(), plain.parameters(), strict=True))  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_rows_of_deepspeeds_ulysses_accumulate_and_evaluate(stage):
    assert max(ranks.run(4, accumulated, stage, apart="frameworks")) < 1e-6


def test_a_model_that_is_not_loaded_yet_is_refused():
    from zero.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    assert UlyssesSPAttentionHF.register_with_transformers("some/model", sequence_parallel_size=1) is None
    with pytest.raises(ValueError, match="Load it first, and pass the model itself"):
        UlyssesSPAttentionHF.register_with_transformers("some/model", sequence_parallel_size=2)
