"""A timm model under DDP with a DataLoader, in the manner of timm's own train.py."""

import argparse
import os

import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

asked = argparse.ArgumentParser()
asked.add_argument("--steps", type=int, default=100)
steps = asked.parse_args().steps
on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
model = timm.create_model("resnet18", num_classes=100).to(device)
model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
images = TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(100, (256,)))
sampler = DistributedSampler(images)
loader = DataLoader(images, batch_size=8, sampler=sampler)
done = 0
while done < steps:
    for pixels, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(pixels.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
dist.destroy_process_group()
