"""Rows of a first GPU of one's own beside those of others: both are forecast, by one bundle.

An H100 has rows of all ops in torch 2.11, other GPUs of layer norms in torch 2.1 alone; what takes
how many times its roofline is stated, and 2 % noise added.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.compose.pricing.price_book import PriceBook
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.learners.bundle import COLUMNS, Bundle
from itercast.learners.features.host_calls import COLD_POINTWISE, HostCall
from itercast.learners.features.rooflines import roofline_us
from itercast.learners.features.table import columns
from itercast.learners.train import UNSEEN_GPU_OFFSETS, train
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.store import write_part

H100, A100, V100, P4 = map(load_gpu, ("h100-sxm-80gb", "a100-sxm-80gb", "v100-pcie-32gb", "p4"))
TORCH, OLD, VLLM = "torch-2.11.0+cu130", "torch-2.1.0+cu121 cudnn-8902", "vllm-0.24.0"
OWN, OTHERS, SERVED = 1.5, 3.0, 6.0  # times over the roofline


def layers(op: str, seed: int) -> Iterator[Norm]:
    rng = np.random.default_rng(seed)
    channels = 64 if op.startswith("batch") else 1
    while True:
        rows, cols = (int(2 ** rng.uniform(low, low + 6)) for low in (8, 4))
        yield Norm(op=op, rows=rows, cols=cols, channels=channels)


def products(seed: int) -> Iterator[Gemm]:
    rng = np.random.default_rng(seed)
    while True:
        m, n, k = (int(2 ** rng.uniform(9, 13)) for _ in range(3))
        yield Gemm(op="mm", m=m, n=n, k=k, dtype="bf16")


def bags(seed: int) -> Iterator[EmbeddingBag]:
    rng = np.random.default_rng(seed)
    while True:
        rows, count = (int(2 ** rng.uniform(10, 16)) for _ in range(2))
        yield EmbeddingBag(op="backward", rows=rows, dim=64, bags=count, lookups=2 * count)


def measured(
    points: Iterator[Any], count: int, family: str, gpu: Gpu, law: float, stack: str, **facts: Any
) -> pd.DataFrame:
    """Rows that take ``law`` times their roofline."""
    rows = pd.DataFrame([asdict(p) for p in islice(points, count)])
    roof = roofline_us(families()[family], columns(rows, families()[family]), gpu, np.zeros(count))
    noise = np.random.default_rng(count).lognormal(0, 0.02, count)
    common = {"family": family, "gpu": gpu.name, "stack": stack, "status": "ok"}
    return rows.assign(**common, timer="device", time_us=law * roof * noise, **facts)


def write(root: Path, rows: pd.DataFrame, name: str) -> None:
    write_part(root, rows["family"].iloc[0], rows["gpu"].iloc[0], rows, name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Part files of several sources, each with columns of its own."""
    folder = tmp_path_factory.mktemp("first")
    for gpu in (A100, V100, P4):
        write(folder, measured(layers("layer", 1), 60, "norm", gpu, OTHERS, OLD), "neusight")
    host = {"launch_us": 30.0, "cache": "warm", "empty_us": 2.0, "gap_us": 1.0, "starved": False}
    host["tiny_launch_us"] = 5.0 / COLD_POINTWISE
    for op in ("layer", "batch"):
        own = measured(layers(op, 2), 60, "norm", H100, OWN, TORCH, **host)
        write(folder, own, f"own-{op}")
    profiled = {"kernel_count": 6.0, "kernel_us": 9.0, "kernels": '["radix_sort"]'}
    for name, facts in (("plain", host), ("profiled", {**host, **profiled})):
        write(folder, measured(bags(3), 30, "embedding_bag", H100, OWN, TORCH, **facts), name)
    write(folder, measured(products(4), 80, "gemm", H100, SERVED, VLLM), "served")
    write(folder, measured(products(5), 40, "gemm", H100, OWN, TORCH, **host), "own")
    return folder


@pytest.fixture(scope="module")
def bundle(root: Path) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:  # a fraction of the work: these laws are simple
        patch.setattr("itercast.learners.models.trees.SEVERAL_GPUS_ROUNDS", 30)
        patch.setattr("itercast.learners.models.trees.SHARED_ROUNDS", 60)
        patch.setattr("itercast.learners.models.ensemble.steps_for", lambda rows: 150)
        train([root], root / "bundle")
    return Bundle.load(root / "bundle")


def times_over_roofline(bundle: Bundle, gpu: Gpu, point: Any, family: str) -> float:
    """What a forecast of torch says."""
    book = PriceBook(bundle, gpu, 0)
    us = book.points(family, [point])[point][0]["predicted_us"]
    rows = pd.DataFrame([asdict(point)])
    found = families()[family]
    return float(us / roofline_us(found, columns(rows, found), gpu, np.zeros(1))[0])


def row(bundle: Bundle, gpu: Gpu, point: Any, family: str) -> Any:
    """Its forecast as ``price`` writes it."""
    rows = pd.DataFrame([{**asdict(point), "gpu": gpu.name}])
    return bundle.price(family, rows, {gpu.name: gpu}).iloc[0]


LAYER = Norm(op="layer", rows=2048, cols=256)
BATCH = Norm(op="batch", rows=2048, cols=64, channels=64)
BAG = EmbeddingBag(op="backward", rows=8192, dim=64, bags=4096, lookups=8192)


def test_each_gpu_is_forecast_as_it_was_measured(bundle: Bundle) -> None:
    """Also an H100's products as torch ran them, though most of its rows are a server's."""
    for gpu, law in ((H100, OWN), (A100, OTHERS), (V100, OTHERS), (P4, OTHERS)):
        assert times_over_roofline(bundle, gpu, LAYER, "norm") == pytest.approx(law, rel=0.1)
        assert row(bundle, gpu, LAYER, "norm")["in_envelope"]
    product = Gemm(op="mm", m=2048, n=2048, k=2048, dtype="bf16")
    found = times_over_roofline(bundle, H100, product, "gemm")
    assert found == pytest.approx(OWN, rel=0.15)
    served = PriceBook(bundle, H100, 0, stack="vllm")
    us = served.points("gemm", [product])[product][0]["predicted_us"]
    own_us = PriceBook(bundle, H100, 0).points("gemm", [product])[product][0]["predicted_us"]
    assert us / own_us == pytest.approx(SERVED / OWN, rel=0.15)


def test_an_op_measured_on_one_gpu_alone_is_transferred_and_marked(bundle: Bundle) -> None:
    """A V100's own rows, of layer norms at twice the H100's time, say nothing of batch norms.

    What exceeds the roofline moves with the rate of SMs, which is nearer to an H100's than memory.
    """
    for gpu in (A100, V100):
        assert times_over_roofline(bundle, gpu, BATCH, "norm") == pytest.approx(OWN, rel=0.2)
        assert not row(bundle, gpu, BATCH, "norm")["in_envelope"]
    assert row(bundle, H100, BATCH, "norm")["in_envelope"]
    model = bundle.models["norm"]
    found = [model.covers(gpu, "batch", "fp32") for gpu in (H100, A100, V100, P4)]
    assert found == [True, True, False, False]  # the others keep their fallback


def test_a_family_of_one_gpu_is_transferred_with_a_wide_interval(bundle: Bundle) -> None:
    """At least as wide as errors of families known on several GPUs, one of them left out."""
    assert times_over_roofline(bundle, H100, BAG, "embedding_bag") == pytest.approx(OWN, rel=0.1)
    assert times_over_roofline(bundle, A100, BAG, "embedding_bag") == pytest.approx(OWN, rel=0.1)
    own, other = (row(bundle, gpu, BAG, "embedding_bag") for gpu in (H100, A100))
    assert own["in_envelope"] and not other["in_envelope"]
    low, high = (np.log(other[c] / other["predicted_us"]) for c in COLUMNS[1:3])
    known = bundle.models["norm"].unseen_offsets
    assert low <= min(known[0], UNSEEN_GPU_OFFSETS[0]) + 1e-9
    assert high >= max(known[1], UNSEEN_GPU_OFFSETS[1]) - 1e-9
    assert np.log(own["predicted_us_p90"] / own["predicted_us_p10"]) < 0.3


def test_what_calls_cost_the_host_is_in_the_bundle(bundle: Bundle) -> None:
    """Rows of others have no launches; half of the bags were profiled."""
    found = bundle.models["embedding_bag"].host_calls
    assert found == {H100.name: {"backward": HostCall(fixed=6.0, kernels=6.0, rows=60)}}
    assert bundle.models["norm"].host_calls[H100.name].keys() == {"layer", "batch"}
    assert bundle.models["norm"].host_calls.keys() == {H100.name}


def test_a_model_of_cpus_answers_for_no_gpu(bundle: Bundle) -> None:
    cpu = Gpu(name="cpu", kind="cpu", peak_flops_per_s={"fp32": 1e12})
    assert PriceBook(bundle, cpu, 1).models == {}
    assert PriceBook(bundle, A100, 0).models.keys() == bundle.models.keys()
