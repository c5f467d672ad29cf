"""Lightning: a fit with accumulation that keeps its best checkpoint, which is loaded in the end."""

import tempfile

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero.integrations.lightning import ShardedStrategy


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(stage):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
    kept = lightning.callbacks.ModelCheckpoint(tempfile.mkdtemp(), monitor="loss")
    module = Regression()
    trainer = lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[kept], logger=False, accelerator="cpu",
        strategy=ShardedStrategy(zero={"stage": stage}), devices=2, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    loaded = Regression.load_from_checkpoint(trainer.strategy.broadcast(kept.best_model_path))
    return [*module.losses, nn.functional.mse_loss(loaded.net(x), x.square().sum(1, keepdim=True)).item()]
