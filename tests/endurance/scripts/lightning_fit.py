"""A perceptron under Lightning's Trainer with DDP."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Perceptron(lightning.LightningModule):
    """Three products with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        ends = (nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.layers = nn.Sequential(*ends, nn.Linear(1024, 100))

    def training_step(self, batch, number):
        """Cross entropy of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


asked = argparse.ArgumentParser()
asked.add_argument("--steps", type=int, default=100)
steps = asked.parse_args().steps
rows = TensorDataset(torch.randn(65536, 512), torch.randint(100, (65536,)))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
on = "gpu" if torch.cuda.is_available() else "cpu"
trainer = lightning.Trainer(
    max_steps=steps, strategy="ddp", accelerator=on, devices=2, enable_model_summary=False, **quiet
)
trainer.fit(Perceptron(), DataLoader(rows, batch_size=128))
