"""Unseen GPUs are forecast by source GPUs, weighted by distance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.learners.features.table import Encoder, feature_table, origins
from itercast.learners.transfer.query_rows import QueryRows, RowGroup, measured_in
from itercast.learners.transfer.source_gpus import SourceGpus, _moved_us
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.ops.memory import norm


def gpu(name: str, bandwidth: float = 1e12, peak: float = 1e13, architecture: str = "") -> Gpu:
    peaks = {"fp32": peak}
    return Gpu(
        name=name, architecture=architecture, hbm_bytes_per_s=bandwidth, peak_flops_per_s=peaks
    )


def query(
    *rows: tuple[str, str, str], ops: Sequence[str] = (), gpus: Mapping[str, Gpu] | None = None
) -> QueryRows:
    """Rows of a GPU, in a dtype, under a stack; products, or these ops."""
    columns = (np.array(values, dtype=object) for values in zip(*rows, strict=True))
    whose = dict(zip(("gpu", "dtype", "stack"), columns, strict=True))
    whose |= {
        "op": np.array(ops or ["mm"] * len(rows), dtype=object),
        "wanted": np.full(len(rows), "", dtype=object),
    }
    frame = pd.DataFrame(whose)
    return QueryRows(**whose, gpus=gpus or GPUS, rows=frame, family=gemm.FAMILY, launch={})


def source_gpus(
    *rows: tuple[str, str, str], ops: Sequence[str] = (), gpus: Mapping[str, Gpu] | None = None
) -> SourceGpus:
    """Source GPUs with these training rows."""
    measured = measured_in(query(*rows, ops=ops))
    return SourceGpus(encoder=Encoder([], {}), measured=measured, gpus=gpus or GPUS)


def shares(
    found: SourceGpus, dtype: str, stack: str, op: str = "mm", wanted: str = ""
) -> dict[tuple[str, str], float]:
    """Weights of the source GPUs of the GPU called new."""
    who = RowGroup(gpu="new", dtype=dtype, op=op, stack=stack, wanted=wanted)
    return found.weights(who, found.gpus["new"], gemm.FAMILY)


GPUS = {"new": gpu("new"), "twin": gpu("twin"), "slow": gpu("slow", bandwidth=5e11)}
GPUS |= {name: gpu(name) for name in ("one", "two")}


def test_what_exceeds_the_roofline_moves_with_the_rate_of_sms() -> None:
    """A kernel of 4 us over a roofline of 1, on a GPU of twice the bandwidth.

    4 ** 1.5 = 8 is 1.11 ** 1.5 = 1.17 in memory and 6.83 of SMs. Half the bytes' time leaves
    (0.41 + 6.83) ** (2 / 3) = 3.74 us; half the SMs' time, too, 2 us. A kernel at the roofline
    halves.
    """

    def moved_us(ratio: float, slower: float) -> float:
        numbers = (np.array([x]) for x in (ratio, 1.0, 0.5, slower))
        return float(_moved_us(*numbers)[0])

    assert moved_us(4.0, 1.0) == pytest.approx(3.74, abs=0.01)
    assert moved_us(4.0, 0.5) == pytest.approx(2.0)
    assert moved_us(1.0, 1.0) == moved_us(1.0, 0.5) == 0.5


def test_wanted_software_is_lent_where_it_is_and_makes_nobody_farther() -> None:
    rows = [("twin", "fp32", stack) for stack in ("vllm-1", "vllm-1", "torch-2.9", "torch-2.11")]
    found = source_gpus(*rows, ("slow", "fp32", "vllm-1"))
    assert shares(found, "fp32", "", wanted="torch") == {
        ("twin", "torch-2.11"): pytest.approx(0.8),  # the newest
        ("slow", "vllm-1"): pytest.approx(0.2),
    }
    assert ("twin", "torch-2.9") in shares(found, "fp32", "", wanted="torch-2.9")


def test_other_dtypes_are_lent_only_where_nobody_has_the_right_one() -> None:
    """Not even a GPU's own: its half precision ran on other units."""
    found = source_gpus(("twin", "fp16", "a"), ("slow", "fp32", "b"), ("new", "fp16", "a"))
    assert shares(found, "fp32", "a") == {("slow", "b"): 1.0}
    assert shares(found, "fp8", "a").keys() == {("new", "a"), ("twin", "a")}


def test_gpus_with_other_ops_are_sources_only_where_none_has_the_op_or_an_alias() -> None:
    """A linear layer is as good as a plain product; one in fp8 is neither."""
    rows = (("twin", "fp32", "a"), ("slow", "fp32", "b"))
    found = source_gpus(*rows, ops=("scaled_mm", "addmm"))
    assert shares(found, "fp32", "", op="mm") == {("slow", "b"): 1.0}
    assert shares(found, "fp32", "", op="scaled_mm") == {("twin", "a"): 1.0}
    assert shares(found, "fp32", "", op="unheard of").keys() == {("twin", "a"), ("slow", "b")}


def test_another_vendor_s_gpus_do_not_cover_what_they_do_not_lend() -> None:
    """Two architectures of AMD have bmm, one of NVIDIA, two generations away.

    NVIDIA's lend mm of two architectures, so that AMD's lend it nothing: bmm is not covered. Where
    NVIDIA's own rows are of one architecture alone, all GPUs lend.
    """
    kinds = {"new": "volta", "one": "hopper", "two": "ampere", "mi1": "cdna", "mi2": "cdna2"}
    gpus = {name: gpu(name, architecture=kind) for name, kind in kinds.items()}
    gpus |= {name: replace(gpus[name], vendor="amd") for name in ("mi1", "mi2")}
    rows = [(name, "fp32", "a") for name in ("one", "one", "two", "mi1", "mi2")]
    ops = ("mm", "bmm", "mm", "bmm", "bmm")
    found = source_gpus(*rows, ops=ops, gpus=gpus)
    assert found.covers(gpus["new"], "mm", "fp32")
    assert not found.covers(gpus["new"], "bmm", "fp32")
    assert found.covers(gpus["mi1"], "bmm", "fp32")
    few = source_gpus(
        *(row for row in rows if row[0] != "two"), ops=("mm", "bmm", "bmm", "bmm"), gpus=gpus
    )
    assert few.covers(gpus["new"], "bmm", "fp32")


def test_a_cpu_is_no_source_of_a_gpu() -> None:
    gpus = GPUS | {"twin": replace(gpu("twin"), kind="cpu")}
    found = source_gpus(("twin", "fp32", "a"), ("slow", "fp32", "b"), gpus=gpus)
    assert shares(found, "fp32", "") == {("slow", "b"): 1.0}


def test_unseen_rows_are_of_a_new_gpu_or_of_a_dtype_that_only_others_have() -> None:
    found = source_gpus(("one", "fp32", "a"), ("two", "fp16", "a"))
    rows = (("one", "fp32"), ("one", "fp16"), ("one", "fp8"), ("new", "fp32"))
    assert found.unseen(query(*((*row, "a") for row in rows))).tolist() == [0, 1, 0, 1]


def test_an_op_that_only_others_were_measured_with_is_unseen_and_outside_the_envelope() -> None:
    """One that nobody was measured with is priced as what the GPU itself was."""
    found = source_gpus(("one", "fp32", "a"), ("two", "fp32", "a"), ops=("mm", "scaled_mm"))
    rows = query(*[("one", "fp32", "a")] * 3, ops=("mm", "scaled_mm", "bmm"))
    assert found.unseen(rows).tolist() == found.unseen_gpu_or_op(rows).tolist() == [0, 1, 0]


def test_the_usual_stack_of_a_gpu_is_lent_first() -> None:
    rows = [("twin", "fp32", "b"), ("twin", "fp32", "a"), ("twin", "fp32", "b")]
    assert measured_in(query(*rows)) == {"twin": {"fp32": {"mm": ["b", "a"]}}}
    assert list(shares(source_gpus(*rows), "fp32", "")) == [("twin", "b")]
    assert list(shares(source_gpus(*rows), "fp32", "a")) == [("twin", "a")]


def test_wanted_software_is_resolved_by_op_and_dtype() -> None:
    """Torch where it was measured, in its newest version; else what was, in that dtype."""
    rows = [("one", "fp32", "torch-2.9"), ("one", "fp32", "torch-2.11"), ("one", "fp8", "vllm-1")]
    found = source_gpus(*rows, *[("one", "fp32", "vllm-1")] * 3)
    want = [("one", "fp32", ""), ("one", "fp8", ""), ("one", "int8", "")]
    wanted = replace(query(*want), wanted=np.array(["torch"] * 3, dtype=object))
    usual = found.stacks_of(wanted, {"one": "vllm-1"}).tolist()
    assert usual == ["torch-2.11", "vllm-1", "torch-2.11"]
    assert found.stacks_of(query(*want), {"one": "vllm-1"}).tolist() == ["vllm-1"] * 3


class Echo:
    """A learner whose log ratio is its first input."""

    def predict(self, x: np.ndarray, roofline_us: np.ndarray) -> np.ndarray:
        return np.asarray(roofline_us * np.exp(x[:, 0]))


@pytest.mark.parametrize("other", ["hopper", "ampere"])
@pytest.mark.parametrize("family", [gemm.FAMILY, norm.FAMILY])
def test_tiled_kernels_of_another_architecture_keep_their_own_features(
    family: Family, other: str
) -> None:
    """32 MiB read and written fill a cache of 64 MiB, and four times one of 16 MiB."""
    gpus = {
        "new": replace(gpu("new", architecture="hopper"), l2_bytes=2**26),
        "twin": replace(gpu("twin", architecture=other), l2_bytes=2**24),
    }
    p = (
        family.params(m=2048, n=2048, k=2048)
        if family.tiled
        else norm.Norm(op="layer", rows=8192, cols=1024)
    )
    rows = pd.DataFrame([{**asdict(p), "gpu": "new"}])
    features, roofline_us = feature_table(rows, family, gpus)
    features |= origins(rows, family, {})
    found = QueryRows.of(rows, features, gpus, family, {})
    sources = SourceGpus(
        encoder=Encoder(["log_cache_fill", "gpu"], {"gpu": ["twin"]}),
        measured={"twin": {"fp32": {"layer": ["a"], "mm": ["a"]}}},
        gpus=gpus,
    )
    x = sources.encoder.encode(features)
    learner: Any = Echo()
    ratio = sources.predict(learner, x, roofline_us, found) / roofline_us
    own_fill = float(features["log_cache_fill"][0])
    keeps_own = family.tiled and other == "ampere"
    assert np.log(ratio[0]) == pytest.approx(own_fill + 2 * (not keeps_own), rel=1e-5)


def test_tf32_takes_rows_of_the_tensor_cores_it_runs_on() -> None:
    """Not those of CUDA cores; its own where there are any; nothing where there are no such cores.

    A GPU with rows in half precision of its own needs no other GPU's.
    """
    cores = replace(gpu("new"), peak_flops_per_s={"fp32": 1e13, "tf32": 5e13, "fp16": 1e14})
    gpus = GPUS | {"new": cores, "one": replace(cores, name="one")}
    half = source_gpus(("twin", "fp32", "a"), ("one", "fp16", "a"), gpus=gpus)
    own = source_gpus(("twin", "tf32", "a"), ("one", "fp16", "a"), gpus=gpus)
    fp32 = source_gpus(("twin", "fp32", "a"), gpus=gpus)
    assert half.stand_in_dtype(cores, "tf32") == "fp16"
    assert half.stand_in_dtype(GPUS["new"], "tf32") == "tf32"  # states no rate of its own
    assert [found.stand_in_dtype(cores, "tf32") for found in (own, fp32)] == ["tf32", "tf32"]
    assert half.stand_in_dtype(cores, "fp32") == "fp32"
    rows = pd.DataFrame({"gpu": ["one", "twin", "one"], "dtype": ["tf32", "tf32", "fp32"]})
    assert half.with_stand_in_dtypes(rows, gpus)["dtype"].tolist() == ["fp16", "tf32", "fp32"]
