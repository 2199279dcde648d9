"""Forecast a training step of your own module on a GPU you do not have, under data parallelism.

The module is neither run nor copied: its step is captured on tensors without data, once, and then
forecast for as many plans as you like.
"""

import torch
from torch import nn

from itercast.api import capture, predict

GPU = "h100-sxm-80gb"


class Classifier(nn.Module):
    """A small transformer encoder over 512 tokens of width 768."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(768, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(dim=1))


def main() -> None:
    """Print iteration time and throughput on 1, 8 and 64 GPUs."""
    labels = torch.zeros(32, dtype=torch.long)
    step = capture(
        Classifier(),
        torch.randn(32, 512, 768),
        lambda logits: nn.functional.cross_entropy(logits, labels),
        dtype="bf16",
    )
    for replicas in (1, 8, 64):
        found = predict(step, gpu=GPU, plan=f"dp={replicas}")
        print(
            f"{replicas:>3} x {GPU}: {found.iteration_us / 1e3:.2f} ms, "
            f"{found.samples_per_s:,.0f} samples/s, {found.memory_bytes / 1e9:.1f} GB"
        )


if __name__ == "__main__":
    main()
