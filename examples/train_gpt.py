"""Trains a small GPT on random tokens, as one would under torchrun; it knows nothing of itercast.

torchrun --nproc-per-node=8 train_gpt.py --layers 12
itercast run --gpu h100-sxm-80gb --gpus 64 train_gpt.py --layers 12
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    """Windows of a long random text."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.text, self.length = torch.randint(vocabulary, (100_000,)), length

    def __len__(self) -> int:
        return len(self.text) - self.length - 1

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[at : at + self.length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and logits of the next token."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("vocabulary", 50304), ("length", 1024), ("width", 768), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("heads", 12), ("batch", 8), ("accumulate", 1), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = Gpt(asked.vocabulary, asked.length, asked.width, asked.layers, asked.heads).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = iter(DataLoader(Tokens(asked.vocabulary, asked.length), asked.batch, shuffle=True))
    started = time.perf_counter()
    for step in range(asked.steps):
        for micro in range(asked.accumulate):
            tokens, targets = (t.to(device, non_blocking=True) for t in next(batches))
            model.require_backward_grad_sync = micro == asked.accumulate - 1
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / asked.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
