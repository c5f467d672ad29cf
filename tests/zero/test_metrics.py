"""Every step leaves a record: what was computed, where the time went, what was sent and what is held."""

import json
import os
import sys
import threading
import types

import pytest
import torch

import zero
from tests import inside
from tests.loopback import run_ranks, solo
from tests.promises.loops import alone
from tests.zoo.case import backward, draw, real_loss, real_mlp
from zero import Engine, ShardedOptimizer, shard
from zero.config.deepspeed.reader import read_deepspeed
from zero.config.schema import LossScale
from zero.errors import CheckpointFailed
from zero.plan.budget import PlannedTraining, cost_of
from zero.profiling import STOPS

building = threading.Lock()  # ranks that are threads share torch's generators


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(group, path, **options):
    model = real_mlp()
    optimizer = shard(model, adamw(model), group=group, bucket_bytes=64, **{"stage": 2, **options})
    with zero.MetricsWriter(path, optimizer) as records:
        for step in range(3):
            with records.timing("forward"):
                loss = real_loss(model(draw(model, (3, 4), group.rank, step, real=True)))
            backward(optimizer, loss)
            optimizer.step()
            optimizer.zero_grad()
            records.write(loss=step + 0.5)
    found = optimizer.grad_norm, inside.bytes_in_flight(optimizer), inside.memory_in_use(optimizer)
    optimizer.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_record_says_what_the_step_did(stage, tmp_path):
    path = tmp_path / "run" / "records.jsonl"
    (norm, sent, now), _ = run_ranks(2, lambda group: train(group, path, stage=stage))
    records = read(path)
    assert [record["step"] for record in records] == [1, 2, 3], "of one rank"
    assert [record["loss"] for record in records] == [0.5, 1.5, 2.5]
    last = records[-1]
    assert (last["norm"], last["scale"], last["skipped_steps"], last["lr"]) == (norm, None, 0, 0.02)
    assert list(last["ms"]) == ["forward", *STOPS]
    assert sum(record["moved_bytes"]["reduced"] for record in records) == sent
    numel = sum(param.numel() for param in real_mlp().parameters())
    assert (last["moved_bytes"]["published"] > 0) == (stage > 0)
    assert last["live_bytes"]["weights"] == now.device.weights >= 4 * numel
    assert last["live_bytes"]["moments"] == now.device.moments
    assert last["live_bytes"]["gradients"] == 0 and last["live_bytes"]["allocated"] > 0


def test_an_engine_is_timed_from_forward_to_publish_and_its_loss_scale_is_told(tmp_path):
    model = real_mlp()
    scale = LossScale(initial=8.0)
    engine = Engine(shard(model, adamw(model), stage=2, group=solo(), dtype="float16", loss_scale=scale))
    with zero.MetricsWriter(tmp_path / "records.jsonl", engine) as records:
        engine.backward(real_loss(engine(draw(model, (3, 4), 0, 0, real=True))))
        engine.step()
        told = records.write()
    assert list(told["ms"]) == ["forward", "backward", *STOPS] and told["scale"] == 8.0
    assert read(tmp_path / "records.jsonl") == [told]


class Board:
    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, {}, False

    def add_scalar(self, name, value, step):
        self.scalars[name] = value, step

    def flush(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def boards(monkeypatch):
    made = []
    writer = types.SimpleNamespace(SummaryWriter=lambda folder: made.append(Board(folder)) or made[-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    return made


def test_a_deepspeed_file_has_each_step_of_the_engine_written_for_tensorboard_by_rank_0(boards):
    written = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
               "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "tuned"}}  # fmt: skip

    def program(group):
        with building:
            model = real_mlp()
            inner = adamw(model)
        engine, losses = Engine(ShardedOptimizer(model, inner, read_deepspeed(written), group)), []
        for micro in range(4):
            loss = real_loss(engine(draw(model, (3, 4), group.rank, micro, real=True)))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        engine.close()
        return losses

    losses = run_ranks(2, program)[0]
    [board] = boards
    assert board.folder == "logs/tuned" and board.closed
    assert board.scalars["loss"] == (pytest.approx(sum(losses[2:]) / 2), 2)
    assert board.scalars["ms/forward"][1] == board.scalars["norm"][1] == 2


def test_numbers_of_a_record_go_to_tensorboard_where_that_is_asked_for(tmp_path, boards):
    model, optimizer = alone(make=adamw)
    with zero.MetricsWriter(tmp_path / "records.jsonl", optimizer, tensorboard=tmp_path / "board") as records:
        backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 0, real=True))))
        optimizer.step()
        told = records.write(loss=0.25, note="no number", ranks=[1, 2])
    [board] = boards
    assert board.folder == str(tmp_path / "board") and board.closed
    assert board.scalars["loss"] == (0.25, 1) and board.scalars["ms/step"] == (told["ms"]["step"], 1)
    assert board.scalars["live_bytes/weights"] == (told["live_bytes"]["weights"], 1)
    assert not {"note", "ranks", "step", "scale"} & set(board.scalars)


def test_an_engine_that_cannot_write_its_record_has_stepped_as_the_others_have(boards, monkeypatch):
    """Rank 0 alone writes: what it does not do then, the others have done."""
    written = {"train_micro_batch_size_per_gpu": 1, "tensorboard": {"enabled": True},
               "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}  # fmt: skip

    def full(*_):
        raise OSError(28, "No space left on device")

    def program(group):
        with building:
            model = real_mlp()
            inner = adamw(model)
        engine, *_ = zero.initialize(model=model, optimizer=inner, config=written, group=group)
        for micro in range(3):
            engine.backward(real_loss(engine(draw(model, (3, 4), group.rank, micro, real=True))))
            if micro == 1 and group.rank == 0:
                with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
                    patched.setattr(Board, "add_scalar", full)
                    engine.step()
            else:
                engine.step()
        engine.check()
        engine.close()
        return engine.global_steps, engine.lr_scheduler.last_epoch, engine.get_lr()

    first, second = run_ranks(2, program)
    assert first == second and first[:2] == (3, 3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_record_for_which_there_is_no_room_is_told_with_its_file():
    model, optimizer = alone(make=adamw)
    backward(optimizer, real_loss(model(draw(model, (3, 4), 0, 0, real=True))))
    optimizer.step()
    records = zero.MetricsWriter("/dev/full", optimizer)
    for act in (records.write, records.close):
        with pytest.raises(CheckpointFailed, match=r"^Cannot write to /dev/full: No space left on device\. Make room there"):
            act()
    records.close()


def test_tensorboard_that_is_not_there_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    _, optimizer = alone(make=adamw)
    with pytest.raises(ValueError, match=r"pip install 'zero-accelerators\[tensorboard\]'"):
        zero.MetricsWriter(tmp_path / "records.jsonl", optimizer, tensorboard=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_held_is_what_was_predicted(stage, dtype):
    def program(group):
        model = real_mlp()
        optimizer = shard(model, adamw(model), stage=stage, dtype=dtype, group=group, bucket_bytes=64)
        for step in range(2):
            backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, step, real=True))))
            optimizer.settle()
            gradients = inside.memory_in_use(optimizer).device.gradients
            optimizer.step()
            optimizer.zero_grad()
        now = inside.memory_in_use(optimizer)
        cost = cost_of(inside.layout(optimizer), stage, group.rank, training=PlannedTraining(num_ranks=group.size))
        optimizer.close()
        return now.device.weights, gradients, now.device.masters, now.device.moments, now.buckets, cost

    for weights, gradients, masters, moments, buckets, cost in run_ranks(3, program):
        assert (weights, masters, moments) == (cost.device.weights, cost.device.masters, cost.device.moments)
        assert gradients == cost.device.gradients
        assert 0 < buckets <= cost.buckets, "a rank that is behind the others needs fewer"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_wait_for_the_last_backward_are_held_as_predicted(stage, dtype):
    def program(group):
        model = real_mlp()
        optimizer = shard(model, adamw(model), stage=stage, dtype=dtype, group=group, bucket_bytes=64, accumulation=3)
        found = []
        for micro in range(3):
            found.append(inside.memory_in_use(optimizer).device.gradients)
            backward(optimizer, real_loss(model(draw(model, (3, 4), group.rank, micro, real=True))))
        whole = sum(4 * param.numel() for param in model.parameters())
        cost = cost_of(inside.layout(optimizer), stage, group.rank, 3, PlannedTraining(num_ranks=group.size))
        optimizer.close()
        return found, whole, cost.device.gradients

    for found, whole, predicted in run_ranks(2, program):
        assert found[0] == 0
        assert whole <= found[1] <= predicted
        assert found[2] == found[1], "the second is added to the first"
