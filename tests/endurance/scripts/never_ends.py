"""A script that makes no step: ``never_ends.py sleep|workers|ranks``, each busy or asleep.

``workers``: a DataLoader's, which start sessions of their own and ignore SIGTERM.
"""

import os
import signal
import sys
import time

import torch
import torch.multiprocessing as mp


class Endless(torch.utils.data.Dataset):
    """Items that never come."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> torch.Tensor:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass


def wait(rank: int) -> None:
    """Take batches that never come, as each rank does."""
    if how == "sleep":
        time.sleep(600)
    for _ in torch.utils.data.DataLoader(Endless(), num_workers=8, persistent_workers=True):
        pass


how = sys.argv[1]
if __name__ == "__main__":
    if how == "ranks":
        mp.spawn(wait, nprocs=torch.cuda.device_count())
    wait(0)
