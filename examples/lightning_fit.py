# SPDX-License-Identifier: Apache-2.0
"""Train with Lightning: the strategy "fastps" is its DDP over the backend.

torchrun --nproc-per-node 2 examples/lightning_fit.py
"""

import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Line(lightning.LightningModule):
    """Learn the sum of ten numbers."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Give the loss of one batch."""
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Step with plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
x = torch.randn(256, 10)
data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=SIZE,
    strategy="fastps" if SIZE > 1 else "auto",
    max_epochs=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Line(), data)  # Lightning gives each rank its part of the data
print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss'].item():.4f}")
