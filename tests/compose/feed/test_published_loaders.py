"""Published rates of DataLoaders with several workers, each CPU forecast from the other CPUs."""

from __future__ import annotations

import pandas as pd
from public_data import PUBLIC, needs_public

from itercast.compose.feed.input import Consumer, fed
from itercast.microbench.input.lane import Batches, InputLane

BATCH = 32


def rate(image_us: float, receive_us: float, workers: int) -> float:
    """Images per second with workers that take ``image_us`` for an image and its sending."""
    times = Batches(wall_us=(BATCH * image_us,), cpu_us=(BATCH * image_us,))
    lane = InputLane(
        loader="jpeg",
        workers=workers,
        prefetch=2,
        batch_samples=BATCH,
        batch_bytes=0,
        cores=16,
        worker=times,
        receive_us=BATCH * receive_us,
    )
    return BATCH / fed(lane, Consumer(), workers, 16).iteration_us * 1e6


@needs_public("imread-benchmark")
def test_decoders_on_five_cpus_by_workers() -> None:
    """55 decoders of JPEG: the rate in one process is known; sending an image takes what the other
    CPUs' median says. Receiving is a CPU's own: taken from Pillow on it, never from the decoder.
    """
    table = pd.read_csv(PUBLIC / "imread-benchmark/decode.csv")
    table = table[(table["kind"] == "dataloader") & ~table["cpu"].str.contains("Apple")]
    rates = table.pivot_table(index=["cpu", "library"], columns="workers", values="ips_mean")
    send_us = 2e6 / rates[2] - 1e6 / rates[0]
    receive_us = 1e6 / rates[[4, 8]].max(axis=1)
    errors: dict[int, list[float]] = {2: [], 4: [], 8: []}
    for (cpu, library), known in rates.iterrows():  # type: ignore[misc]
        others = send_us.index.get_level_values(0) != cpu
        image_us = 1e6 / known[0] + send_us[others].median()
        for workers, found in errors.items():
            if library != "pillow":
                forecast = rate(image_us, receive_us[cpu, "pillow"], workers)
                found.append(abs(forecast / known[workers] - 1))
    means = {workers: sum(found) / len(found) for workers, found in errors.items()}
    assert len(errors[2]) == 50 and max(means.values()) < 0.08, means
