"""Holds forecasts of ten DataLoaders against loops that take their batches for a step on a GPU.

`python tests/endurance/loaders.py` takes two minutes. The GPU is a clock: a step begins when its
batch is there and the step before is done, and the loop runs at most two steps ahead of it.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from itercast.compose.input_pipeline import LATE, Consumer, fed
from itercast.microbench.input.measure import measure_lane

SECONDS = 5.0  # to measure a loader
STEPS = (0.5, 2.0)  # of the time that the loader takes for a batch


class Jpegs(Dataset[Any]):
    """Images of 500 x 400, decoded, resized and normalised."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(64):
            small = Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8))
            file = io.BytesIO()
            small.resize((500, 400), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.files[i % len(self.files)])).convert("RGB")
        pixels = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR)).copy()
        return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - 0.5) / 0.25


class Texts(Dataset[Any]):
    """Texts of 50 to 600 words, looked up in a dictionary that grows."""

    def __init__(self) -> None:
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
        self.texts = [" ".join(rng.choices(words, k=rng.randint(50, 600))) for _ in range(500)]
        self.vocabulary: dict[str, int] = {}

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, i: int) -> list[int]:
        known = self.vocabulary
        return [known.setdefault(word, len(known)) for word in self.texts[i % 500].split()]


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Rows of tokens, all as long as the longest."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


class SlowDisk(Dataset[Any]):
    """Items that wait for 2 ms."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(1000)


class Uneven(Dataset[Any]):
    """Every 40th item takes 50 times as long as others."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, i: int) -> float:
        size = 200_000 if i % 40 == 0 else 4000
        return float(np.sort(np.random.default_rng(i).random(size))[0])


class Weighted(Sampler[list[int]]):
    """Batches drawn by weights from 200,000 items, in the training process."""

    def __len__(self) -> int:
        return 3000

    def __iter__(self) -> Iterator[list[int]]:
        weights = torch.rand(200_000)
        for _ in range(len(self)):
            yield torch.multinomial(weights, 16).tolist()


class Stream(IterableDataset[Any]):
    """Random numbers without indices."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(50_000):
            yield torch.from_numpy(np.random.default_rng(i).random(20_000, dtype=np.float32))


def sampled() -> DataLoader[Any]:
    """Rows of a tensor by a slow sampler."""
    table = TensorDataset(torch.randn(200_000, 16))
    return DataLoader(table, batch_sampler=Weighted(), num_workers=1)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "jpegs": lambda: DataLoader(Jpegs(), 16),
    "jpegs1": lambda: DataLoader(Jpegs(), 16, num_workers=1, prefetch_factor=4),
    "jpegs2": lambda: DataLoader(Jpegs(), 16, num_workers=2),
    "texts": lambda: DataLoader(Texts(), 32, collate_fn=padded),
    "texts1": lambda: DataLoader(Texts(), 32, collate_fn=padded, num_workers=1),
    "disk": lambda: DataLoader(SlowDisk(), 8),
    "disk4": lambda: DataLoader(SlowDisk(), 8, num_workers=4),
    "stream1": lambda: DataLoader(Stream(), 64, num_workers=1),
    "uneven1": lambda: DataLoader(Uneven(), 32, num_workers=1),
    "sampled": sampled,
}
globals().update(LOADERS)  # as measure_lane finds them


def loop_us(loader: DataLoader[Any], step_us: float, batches: int = 60) -> float:
    """Measured time of an iteration whose step takes a GPU so long; the first ten do not count."""
    ends: list[float] = []
    while len(ends) <= batches:
        for _ in loader:
            now = time.perf_counter()
            ends.append(max(now, ends[-1] if ends else 0.0) + step_us * 1e-6)
            if len(ends) > 1:
                time.sleep(max(0.0, ends[-2] - now))
            if len(ends) > batches:
                break
    return (ends[-1] - ends[10]) / (len(ends) - 11) * 1e6


def main() -> None:
    """Print forecast and measured iterations, and how often the verdict was right."""
    sys.modules["loaders"] = sys.modules[__name__]
    errors, right = [], 0
    for name in LOADERS:
        lane = measure_lane(f"loaders:{name}", SECONDS)
        made = lane.worker if lane.workers else lane.alone
        for share in STEPS:
            step_us = share * made.mean_us / max(1, lane.workers)
            found = fed(lane, Consumer(device_us=step_us), lane.workers, lane.cores)
            measured_us = loop_us(LOADERS[name](), step_us)
            errors.append(abs(found.iteration_us / measured_us - 1))
            right += found.input_bound == (measured_us > LATE * step_us)
            print(
                f"{name:8} step {step_us:7.0f} us: forecast {found.iteration_us:7.0f}, measured "
                f"{measured_us:7.0f}, {100 * (found.iteration_us / measured_us - 1):+5.1f} %, "
                f"limited by {found.stage}",
                flush=True,
            )
    mean, median = 100 * np.mean(errors), 100 * np.median(errors)
    print(
        f"error {mean:.1f} % mean, {median:.1f} % median; {right} of {len(errors)} verdicts right"
    )


if __name__ == "__main__":
    main()
