"""What the pages call ``train:loader``, ``train:make_env`` and ``train:policy``; and a script."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((16,), float(index))


loader = DataLoader(Numbers(), batch_size=32)


class Space:
    def sample(self):
        return 0


class Environment:
    action_space = Space()

    def reset(self, seed=None):
        return torch.zeros(8).numpy(), {}

    def step(self, action):
        return torch.zeros(8).numpy(), 0.0, False, False, {}


def make_env():
    return Environment()


def policy(batch=64):
    return nn.Linear(8, 4), torch.zeros(batch, 8), lambda out: out.sum()


if __name__ == "__main__":
    assert sys.argv[1:] in ([], ["--its", "--own", "--arguments"])
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
