"""A small GPT under ``fully_shard``, as one would train it with torchrun."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

asked = argparse.ArgumentParser()
asked.add_argument("--steps", type=int, default=100)
steps = asked.parse_args().steps
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.0, batch_first=True, norm_first=True)
layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(2048, 192), layers, nn.Linear(192, 2048)).to(device)
for one in layers.layers:
    fully_shard(one, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(2048, (4, 97), device=device)
for _ in range(steps):
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
