"""A LightningModule trained with a sharded optimizer: one more strategy, and the Trainer's own clipping and checkpoints.

    torchrun --nproc-per-node 2 examples/lightning_fit.py
"""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as lightning
except ModuleNotFoundError:
    import pytorch_lightning as lightning

from zero.integrations.lightning import ShardedStrategy


class Regression(lightning.LightningModule):
    """Makes the model, with the same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def make_loader() -> DataLoader:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=4)


def fit(folder: str, epochs: int = 2, resume_from: str | None = None, **options: Any) -> Regression:
    """The module after its epochs; Lightning gives each rank its part of the data."""
    module = Regression()
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, make_loader(), ckpt_path=resume_from)
    return module


if __name__ == "__main__":
    num_ranks, strategy = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), ShardedStrategy(zero={"stage": 2})
    module = fit("lightning_output", devices=num_ranks, strategy=strategy)  # a folder that all ranks see
    print("loss " + " ".join(f"{loss:.3f}" for loss in module.losses))
