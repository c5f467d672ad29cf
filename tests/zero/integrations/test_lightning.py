"""A LightningModule under our strategy, on two ranks as in one process on the joint batch."""

import re
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero
from tests.zero.integrations.on_ranks import (
    assert_runs_as_a_program,
    assert_same_training,
    both_ranks,
    means_of_pairs,
    one_process,
    plain_training,
)

HERE = "tests.zero.integrations.test_lightning"
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None and find_spec("pytorch_lightning") is None,
    reason="neither lightning nor pytorch_lightning is installed",
)


def fitted(folder, zero, resume_from=None, epochs=2):
    """Sharded, or by Lightning's own strategy for several ranks."""
    from examples.lightning_fit import fit
    from zero.integrations.lightning import ShardedStrategy

    strategy = "ddp" if zero is None else ShardedStrategy(zero=zero)
    module = fit(folder, epochs, resume_from=resume_from, accelerator="cpu", devices=2, strategy=strategy)
    if zero is not None:
        with pytest.raises(ValueError, match="was closed: its model is plain again"):
            strategy.sharded.settle()
        assert strategy.sharded.config.buffers == "broadcast", "as DDPStrategy has it"
    return [module.losses, module.state_dict()]


def joint_losses(model):
    """Lightning puts a DistributedSampler that shuffles into the loader; two batches of four on each rank make a step."""
    from examples.lightning_fit import make_loader

    data = make_loader().dataset
    for epoch in range(2):
        samplers = [DistributedSampler(data, num_replicas=2, rank=rank, seed=0) for rank in range(2)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = torch.tensor([list(sampler) for sampler in samplers])  # rank, sample
        for step in (order[:, :8].reshape(-1), order[:, 8:].reshape(-1)):
            x, y = (tensor[step] for tensor in data.tensors)
            yield nn.functional.mse_loss(model.net(x), y)


def plain_loop():
    from examples.lightning_fit import Regression

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # once an epoch, which has two steps

    return plain_training(Regression(), joint_losses, clip=0.1, schedule=schedule)


def test_a_deepspeed_configuration_shards_as_the_options_do(tmp_path):
    tree = {"gradient_clipping": "auto", "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    found = both_ranks(f"{HERE}:fitted", str(tmp_path), tree, epochs=1)
    assert len(found[0][0]) == 4 and all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_a_fit_accumulates_clips_schedules_and_saves_as_one_process_does_and_resumes_bit_by_bit(tmp_path):
    found = both_ranks(f"{HERE}:fitted", str(tmp_path / "all"), {"stage": 2})
    assert_same_training(means_of_pairs(found), *one_process(f"{HERE}:plain_loop"))

    both_ranks(f"{HERE}:fitted", str(tmp_path / "half"), {"stage": 2}, epochs=1)
    (saved,) = (tmp_path / "half").rglob("*.ckpt")
    (shares,) = (tmp_path / "half").rglob("*.ckpt.zero/state-*/manifest.json")
    assert saved.is_file() and shares.parents[1].name == f"{saved.name}.zero"
    again = both_ranks(f"{HERE}:fitted", str(tmp_path / "again"), {"stage": 2}, resume_from=str(saved))
    for rank in range(2):
        assert again[rank][0] == found[rank][0][4:]
        for name, weight in found[rank][1].items():
            assert torch.equal(again[rank][1][name], weight), name


def test_a_checkpoint_of_a_fit_that_did_not_shard_goes_on_at_any_stage(tmp_path):
    both_ranks(f"{HERE}:fitted", str(tmp_path / "plain"), None, epochs=1)
    (saved,) = (tmp_path / "plain").rglob("*.ckpt")
    assert saved.is_file()
    again = both_ranks(f"{HERE}:fitted", str(tmp_path / "again"), {"stage": 1}, resume_from=str(saved))
    losses, weights = one_process(f"{HERE}:plain_loop")
    assert_same_training(means_of_pairs(again), losses[2:], weights)


def best(folder):
    """A fit that keeps the best checkpoint and the last: what is there, and what the best one gives to Lightning itself."""
    from examples.lightning_fit import Regression, lightning, make_loader
    from zero.integrations.lightning import ShardedStrategy

    class Watched(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

    kept = lightning.callbacks.ModelCheckpoint(folder, monitor="loss", save_last=True)
    module = Watched()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ShardedStrategy(zero={"stage": 3}), callbacks=[kept], max_epochs=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, make_loader())
    names = sorted(path.name for path in Path(folder).iterdir())
    loaded = Watched.load_from_checkpoint(kept.best_model_path)
    is_same = all(torch.equal(loaded.state_dict()[name], weight) for name, weight in module.state_dict().items())
    return names, Path(kept.best_model_path).name, is_same


def test_the_best_checkpoint_is_loaded_as_lightning_does_it(tmp_path):
    for names, best_name, is_same in both_ranks(f"{HERE}:best", str(tmp_path)):
        assert names == [best_name, f"{best_name}.zero", "last.ckpt", "last.ckpt.zero"]
        assert is_same, "the loss falls, so that the best is the last one"


def without_its_shares(folder):
    (saved,) = Path(folder).rglob("*.ckpt")
    with pytest.raises(FileNotFoundError, match="Cannot resume: the optimizer's state of this checkpoint is not beside it"):
        fitted(folder, {"stage": 2}, resume_from=str(saved))


def test_a_file_without_its_folder_says_what_is_missing(tmp_path):
    both_ranks(f"{HERE}:fitted", str(tmp_path), {"stage": 2}, epochs=1)
    (shares,) = tmp_path.rglob("*.ckpt.zero")
    shutil.rmtree(shares)
    both_ranks(f"{HERE}:without_its_shares", str(tmp_path))


def write(trainer, file):
    trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), file)


def fit_two_steps(callback, file=None, **options):
    from examples.lightning_fit import Regression, lightning, make_loader
    from zero.integrations.lightning import ShardedStrategy

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ShardedStrategy(zero={"stage": 2}), callbacks=[callback], max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(Regression(), make_loader(), ckpt_path=file)


def broken_off(folder):
    """Writes one file twice, the second time only the shares, and resumes: the averages of gradients that each found. Then
    from the file as older versions wrote it, without the name of its shares."""
    from examples.lightning_fit import lightning

    file, found = f"{folder}/one.ckpt", []

    def fails(*_, **__):
        raise OSError("no space left")

    class Writes(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            found.append(trainer.strategy.sharded.whole_state(module.net[0].weight)["exp_avg"])
            if batch_idx == 0:
                write(trainer, file)
            elif trainer.is_global_zero:
                trainer.strategy.checkpoint_io.save_checkpoint = fails
                with pytest.raises(OSError, match="no space left"):
                    write(trainer, file)
            else:
                write(trainer, file)

    class Reads(lightning.Callback):
        def on_train_start(self, trainer, module):
            found.append(trainer.strategy.sharded.whole_state(module.net[0].weight)["exp_avg"])

    fit_two_steps(Writes())
    fit_two_steps(Reads(), file)
    older = torch.load(file, weights_only=False)
    assert older.pop("zero_shares")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.save(older, file)
    torch.distributed.barrier()
    fit_two_steps(Reads(), file)
    return found


def test_a_save_that_breaks_off_before_its_file_leaves_the_last_checkpoint_as_it_was(tmp_path):
    for first, second, loaded, latest in both_ranks(f"{HERE}:broken_off", str(tmp_path)):
        assert torch.equal(loaded, first) and not torch.equal(loaded, second)
        assert torch.equal(latest, second), "without a name the latest shares are taken"


def written_in_a_thread(folder):
    """Writes one file in each of two steps, the second time in a thread that waits: the shares that are there meanwhile, and
    those that are there in the end."""
    from examples.lightning_fit import lightning

    file, may_write, found = f"{folder}/one.ckpt", threading.Event(), []

    class Waits(lightning.plugins.TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            may_write.wait()
            super().save_checkpoint(*args, **kwargs)

    class Writes(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            write(trainer, file)

        def on_train_end(self, trainer, module):
            found.append(len(list(Path(f"{file}.zero").glob("state-*"))))
            may_write.set()

    fit_two_steps(Writes(), plugins=[lightning.plugins.AsyncCheckpointIO(Waits())])
    torch.distributed.barrier()  # rank 0 wrote it
    (shares,) = Path(f"{file}.zero").glob("state-*")
    return found, shares.name == torch.load(file, weights_only=False)["zero_shares"]


def test_shares_go_when_the_file_that_has_newer_ones_is_there(tmp_path):
    assert both_ranks(f"{HERE}:written_in_a_thread", str(tmp_path))[0] == ([2], True)


def fabric_loop(folder, sharded):
    """Fabric starts ranks, divides data, clips, saves and loads; the model is either its DistributedDataParallel or sharded."""
    try:
        from lightning.fabric import Fabric
    except ModuleNotFoundError:
        from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if sharded:
        optimizer = zero.shard(fabric.to_device(model), optimizer, stage=2)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x), batch_size=4))
    losses, file = [], f"{folder}/{sharded}.ckpt"

    def train():
        for (batch,) in loader:
            loss = (model(batch) - batch.square().mean(1, keepdim=True)).square().mean()
            fabric.backward(loss)
            losses.append(loss.item())
            losses.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()

    train()
    fabric.save(file, {"model": model, "optimizer": optimizer, "step": 4})
    train()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(file, state)
    train()
    assert state["step"] == 4 and losses[8:16] == losses[16:] != losses[:8]
    return losses


def test_a_loop_of_fabric_needs_no_setup_of_model_and_optimizer(tmp_path):
    plain, sharded = (both_ranks(f"{HERE}:fabric_loop", str(tmp_path), sharded) for sharded in (False, True))
    for one, other in zip(plain, sharded, strict=True):
        assert len(one) == 24 and one == pytest.approx(other, rel=1e-5)


def test_the_example_runs_as_a_program(tmp_path):
    assert_runs_as_a_program("lightning_fit", tmp_path)


def with_layers_cut(folder):
    """The losses of a rank whose layers lie over both."""
    from examples.lightning_fit import Regression, lightning, make_loader
    from zero.integrations.lightning import ShardedStrategy

    module, mesh = Regression(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module.net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    strategy = ShardedStrategy(zero={"stage": 2, "group": mesh["dp"]})
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, **quiet)
    trainer.fit(module, make_loader())
    return module.losses


def without_layers_cut():
    from examples.lightning_fit import Regression, make_loader

    module, data = Regression(), make_loader().dataset
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.01), []
    for batch in torch.tensor(list(DistributedSampler(data, num_replicas=1, rank=0, seed=0))).split(4):
        x, y = (tensor[batch] for tensor in data.tensors)
        loss = nn.functional.mse_loss(module.net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.promise("Q07")
def test_ranks_of_a_part_have_the_same_samples(tmp_path):
    expected = one_process(f"{HERE}:without_layers_cut")
    for losses in both_ranks(f"{HERE}:with_layers_cut", str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 8


def refused(folder):
    from examples.lightning_fit import Regression, lightning, make_loader
    from zero.integrations.lightning import ShardedStrategy

    with pytest.raises(ValueError) as dtype:
        ShardedStrategy(zero={"stage": 2, "dtype": "float16"})
    for arguments in ({"ddp_comm_hook": print}, {"ddp_comm_wrapper": print}, {"model_averaging_period": 4}):
        with pytest.raises(ValueError, match="model_averaging_period=4" if "model" in str(arguments) else "communication hook"):
            ShardedStrategy(zero={"stage": 2}, **arguments)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ShardedStrategy(zero={"stage": 2}), default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regression, "configure_optimizers", lambda self: [torch.optim.SGD(self.parameters(), lr=0.1)] * 2)
        patch.setattr(Regression, "automatic_optimization", False)
        with pytest.raises(ValueError) as optimizers:
            trainer.fit(Regression(), make_loader())
    return str(dtype.value), str(optimizers.value)


def test_what_lightning_cannot_have_is_refused(tmp_path):
    dtype, optimizers = both_ranks(f"{HERE}:refused", str(tmp_path))[0]
    assert re.fullmatch(r"Cannot shard under Lightning with dtype='float16': Lightning calls backward itself, .* Use .*", dtype)
    assert re.fullmatch(r"Cannot shard 2 optimizers of configure_optimizers: one is sharded for one model\. .*", optimizers)
