"""A loop that a DataLoader feeds: workers, cores, queues, and a forecast that waits."""

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from plan_case import GPU, forecast_of
from public_data import PUBLIC, needs_public
from small_scripts import captured, written

from itercast.capture.input.files import FileGroup
from itercast.capture.input.lane import Batches, InputLane
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.simulate.rank import OFFLOAD_FRAC
from itercast.compose.target import find_target
from itercast.extras.input.pipeline import (
    HALF_WIDTH,
    MOVED_HALF_WIDTH,
    Consumer,
    advice,
    consumer,
    cores_of_a_rank,
    fed,
    fewest_workers,
    on_host,
    with_input,
)


def lane(wall: float, cpu: float = 0.0, workers: int = 2, **facts: Any) -> InputLane:
    """A loader whose batches all take ``wall`` us, ``cpu`` of them computing."""
    times = Batches(wall_us=(wall,), cpu_us=(cpu,))
    known = {"prefetch": 2, "batch_samples": 8, "batch_bytes": 0, "cores": 4, **facts}
    return InputLane(loader="toy", workers=workers, alone=times, worker=times, **known)  # type: ignore[arg-type]


SLOWED, WORKING = lane(10, 4, crowd=2, crowding=1.5), Consumer(device_us=10, host_us=3)
LOOPS = [  # a loader, what consumes it, workers, cores; us of a step, and the stage that decides
    (lane(10), Consumer(), 2, 4, 5, "workers"),  # two workers of 10 us a batch: one every 5
    (lane(10), Consumer(host_us=8), 2, 4, 8, "step"),  # which a step of 8 us hides
    (lane(10), Consumer(host_us=8), 1, 4, 10, "workers"),
    (lane(10), Consumer(host_us=8, batches=2), 2, 4, 10, "workers"),  # two batches a step
    (lane(1000), Consumer(), 1000, 4, 1, "workers"),
    # without workers the host loads while the GPU works: |4 load|3 launch| beside |====10====|
    (lane(4), WORKING, 0, 4, 10, "step"),
    (lane(9), WORKING, 0, 4, 12, "loading"),
    (lane(4), Consumer(host_us=10), 0, 4, 14, "loading"),  # a host that waits for its step
    # 8 us of computing a batch on 2 cores: 4 us, however many workers; waiting is free
    (lane(8, 8), Consumer(), 8, 2, 4, "cores"),
    (lane(8, 0), Consumer(), 8, 2, 1, "workers"),
    (lane(8, 8), Consumer(host_us=6), 8, 2, 7, "cores"),  # a step takes them too: (8 + 6) / 2
    # two workers measured at 1.5 times the computing of one: (10 + 0.5 * 4) / 2
    (SLOWED, Consumer(), 2, 8, 6, "workers"),
    (SLOWED, Consumer(), 1, 8, 10, "workers"),
    (lane(1, receive_us=3), Consumer(host_us=4), 8, 8, 7, "receiving"),  # the host's work
]


@pytest.mark.parametrize(("loader", "step", "workers", "cores", "us", "stage"), LOOPS)
def test_loops_by_hand(
    loader: InputLane, step: Consumer, workers: int, cores: int, us: float, stage: str
) -> None:
    found = fed(loader, step, workers, cores)
    assert found.iteration_us == pytest.approx(us)
    assert found.stage == stage if stage != "step" else not found.input_bound


def test_batches_copied_ahead_take_the_longer_of_copy_and_step() -> None:
    """20 MB over 20 GB/s are 1 ms: beside a step of 3 ms 3, in its own stream 4; of 0.5 ms 1."""
    gpu = replace(GPU, pcie_bytes_per_s=20e9 / OFFLOAD_FRAC["pcie"])
    target = replace(find_target("h100-sxm-80gb", ""), gpu=gpu)
    loader = lane(1, batch_bytes=20_000_000)
    for step_us, ahead, us in ((3000, False, 4000), (3000, True, 3000), (500, True, 1000)):
        found = forecast_of(iteration_us=step_us, world_size=1)
        step = consumer(found, replace(loader, copied_ahead=ahead), target, 8)
        made = fed(loader, step, 2, 4)
        assert made.iteration_us == pytest.approx(us)
        assert made.input_bound == (step_us < 1000) and (made.stage == "copying") == (us == 1000)


def test_files_on_a_fast_tier_and_decoded_items_in_memory() -> None:
    """Of 10 us a batch, 6 of them computing, 4 wait for files and 5 decode: 5 / 3 / 0.5 by two."""
    loader = lane(10, 6, stages_us={"waiting": 4, "decode": 5})
    stages: list[tuple[str, ...]] = [(), ("waiting",), ("waiting", "decode")]
    found = [fed(loader.without(*gone), Consumer(), 2, 4).iteration_us for gone in stages]
    assert found == pytest.approx([5, 3, 0.5])


def test_files_that_are_waited_for_most_by_byte_are_staged_first() -> None:
    """Of 10 us a batch, 4 are waits: 3 for 2 GB of small files, 1 for 8 GB of large ones.

    4 GB hold the small ones and a quarter of the large ones: 10 - 3 - 0.25 us by two workers.
    """
    small = FileGroup(kind="small", files=1000, nbytes=2 * 10**9, waiting_us=3)
    large = FileGroup(kind="large", files=8, nbytes=8 * 10**9, waiting_us=1)
    loader = lane(10, 6, stages_us={"waiting": 4}, files=(large, small))
    shares, staged = loader.staged(4e9)
    assert shares == {"small": 1, "large": 0.25}
    assert fed(staged, Consumer(), 2, 4).iteration_us == pytest.approx((10 - 3 - 0.25) / 2)


def test_ranks_share_the_cores_of_the_node_that_is_forecast() -> None:
    """A DGX H100 has 112 cores for 8 GPUs, a host of none that is named 12 a GPU, this CPU 4."""
    loader = lane(10)
    dgx = find_target("h100-sxm-80gb", "node=dgx-h100")
    assert cores_of_a_rank(loader, dgx, 64) == 14 and cores_of_a_rank(loader, dgx, 2) == 56
    assert cores_of_a_rank(loader, dgx, 64, cores=8) == 1
    assert cores_of_a_rank(loader, find_target("h100-sxm-80gb", ""), 64) == 12
    assert cores_of_a_rank(loader, find_target("cpu", ""), 2) == 2


def test_a_loader_is_as_fast_as_the_cpu_of_the_node() -> None:
    """Zen 4 decodes 537 images/s where Zen 2, as in a DGX A100, decodes 410: 10 us become 13.1.

    A lane that names no CPU, and a node of a CPU that nobody measured, leave it as it is.
    """
    zen_4 = replace(lane(10, 4), cpu="AMD EPYC 9B14")
    a100 = find_target("a100-sxm-80gb", "node=dgx-a100").node
    h100 = find_target("h100-sxm-80gb", "node=dgx-h100").node
    slower = on_host(zen_4, a100).worker
    assert slower.wall_us[0] == pytest.approx(10 * 537 / 410)
    assert slower.cpu_us[0] == pytest.approx(4 * 537 / 410)
    assert on_host(zen_4, h100) == zen_4 == on_host(zen_4, None)
    assert on_host(lane(10, 4), a100) == lane(10, 4)


def test_a_queue_of_two_batches_lets_a_slow_batch_pass() -> None:
    """One worker, batches of 1 and 9 us in turn, a step of 6 us: queued batches hide the 9."""
    deep = replace(lane(1), worker=Batches(wall_us=(1.0, 9.0), cpu_us=(0.0, 0.0)))
    shallow = replace(deep, prefetch=1)
    assert fed(deep, Consumer(host_us=6), 1, 2).iteration_us == pytest.approx(6)
    # without a queue the worker waits while the step runs: 6 + (9 - 6) every other batch
    assert fed(shallow, Consumer(host_us=6), 1, 2).iteration_us == pytest.approx(7.5)


def test_full_queues_last_for_a_burst() -> None:
    """4 batches queued, steps of 4 us, batches every 5: 4 / (1 - 4/5) iterations at 4 us."""
    found = fed(lane(10), Consumer(host_us=4), 2, 4)
    assert found.input_bound and found.burst == pytest.approx(20, rel=0.01)


def test_the_fewest_workers_that_hide_the_loader() -> None:
    assert fewest_workers(lane(10), Consumer(host_us=4), 8).workers == 3  # 10 / 3 < 4
    assert fewest_workers(lane(10), Consumer(device_us=12, host_us=1), 8).workers == 0
    best = fewest_workers(lane(10, 10), Consumer(host_us=1), 2)  # (10 + 1) / 2 at best
    assert best.input_bound and best.workers == 2 and best.iteration_us == pytest.approx(5.5)


def test_wrong_workers_are_named() -> None:
    with pytest.raises(ValueError, match="workers 1025; allowed are 0 to 1024"):
        fed(lane(1000), Consumer(), 1025, 4)
    with pytest.raises(ValueError, match="measured without workers only"):
        fed(replace(lane(1, workers=0), worker=Batches()), Consumer(), 2, 2)
    with pytest.raises(ValueError, match="measured without workers only"):
        fed(replace(lane(1, workers=0), worker=Batches()), Consumer(), 2, 2)


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


@pytest.mark.parametrize(
    ("batch_us", "low", "high"),
    [
        (1000, exp(-0.2), exp(0.2)),  # never waited for: the step's own interval
        (40_000, 2 * exp(-HALF_WIDTH), 2 * exp(HALF_WIDTH)),  # decides alone: the loader's
    ],
)
def test_the_interval_is_that_of_what_decides(batch_us: float, low: float, high: float) -> None:
    """A step of 10 ms, 80 % of which end within a factor of e^0.2, and two workers."""
    target = find_target("h100-sxm-80gb", "")
    zen_2 = find_target("a100-sxm-80gb", "node=dgx-a100")
    step = replace(
        forecast_of(iteration_us=10_000, world_size=1),
        iteration_us_p10=10_000 * exp(-0.2),
        iteration_us_p90=10_000 * exp(0.2),
    )
    found = with_input(step, lane(batch_us), target, 8)
    assert found.iteration_us_p10 == pytest.approx(10_000 * low, rel=0.01)
    assert found.iteration_us_p90 == pytest.approx(10_000 * high, rel=0.01)
    moved = with_input(step, replace(lane(100_000), cpu="EPYC 9B14"), zen_2, 8)
    assert moved.iteration_us == pytest.approx(50_000 * 537 / 410, rel=0.01)  # two workers, Zen 2
    assert moved.iteration_us_p90 / moved.iteration_us == pytest.approx(
        exp(MOVED_HALF_WIDTH), rel=0.05
    )
    slower = replace(lane(20_000), cpu="EPYC 9B14")  # 26.2 ms there: three workers make it 8.7
    pace = "2 workers, 1.3 times as slow on its host as on this machine"
    assert advice(step, slower, zen_2, 8) == f"{pace}; 3 would be enough on the 128 cores of a rank"
    # step and loader alike: the longer of the two decides, so that both have to be short
    both = with_input(step, lane(20_000), target, 8)
    assert 10_000 * exp(-0.11) < both.iteration_us_p10 < both.iteration_us < both.iteration_us_p90


LOADING = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in DataLoader([torch.zeros(4096)] * 64, batch_size=4):
    loss = model(x.cuda().repeat(4096, 1)).sum()
    loss.backward(); BEFORE; optimizer.step(); AFTER
"""


@pytest.mark.parametrize(
    ("before", "after"), [("0", "0"), ("loss.item()", "0"), ("0", "loss.item()")]
)
def test_a_host_that_waits_for_its_step_loads_after_it(
    tmp_path: Path, before: str, after: str
) -> None:
    """Without workers a batch is loaded while the GPU computes what it was given.

    |==load==|launch|             beside |==forward and backward==|==update==|
    |launch|wait for backward....|==load==| beside the update
    |launch|wait for the update..............|==load==|: the step and the load add up
    """
    program = captured(written(tmp_path, LOADING.replace("BEFORE", before).replace("AFTER", after)))
    target = find_target("h100-sxm-80gb")
    found = forecast_program(program, target)
    update_us = found.by_family_us["optimizer"]
    assert update_us > 100 and found.host_us < found.iteration_us / 4
    held_us = {"00": found.host_us, "loss.item()0": found.iteration_us - update_us}
    expected = held_us.get(before + after, found.iteration_us)
    assert consumer(found, lane(1), target, 4).host_us == pytest.approx(expected, rel=0.05)
