"""The lines of issue 4's table that are about single ops: rows, splits, targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from eval.public.benchmark import FOLDS, TAIL_BYTES, Line, Mask, Rows, Split

NVLINK = {"a100-sxm-80gb": 10.0, "b200-sxm": 10.0, "gb200": 10.0, "h100-sxm-80gb": 10.0}
Splits = Callable[[Rows], Iterator[Split]]


def _codes(rows: Rows, names: list[str]) -> np.ndarray:
    return rows.groupby(names, dropna=False).ngroup().to_numpy()


def _share(codes: np.ndarray, folds: int, seed: int = 0) -> Iterator[Mask]:
    """Masks of groups; every group is in one of them."""
    names = np.random.default_rng(seed).permutation(np.unique(codes))
    for fold in range(folds):
        yield np.isin(codes, names[fold::folds])


def is_half_gemm(rows: Rows) -> Mask:
    """bf16 and fp16 products: AIConfigurator's and Vidur's."""
    return rows["dtype"].isin(["bf16", "fp16"]).to_numpy()


def _aic(rows: Rows) -> Mask:
    return (rows["source"] == "aiconfigurator").to_numpy()


def gemm_sites(rows: Rows) -> Iterator[Split]:
    """A fifth of the (n, k) sites is left out, on every GPU and stack at once."""
    held = next(_share(_codes(rows, ["n", "k"]), 5))
    for gpu in sorted(rows["gpu"][_aic(rows)].unique()):
        mine = (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held & mine, held=held & mine & _aic(rows))


def gpu_left_out(rows: Rows, among: Mask) -> Iterator[Split]:
    """Every GPU in turn; judged on the rows ``among``."""
    for gpu in sorted(rows["gpu"][among].unique()):
        mine = (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~mine, held=mine & among)


def gemm_left_out(rows: Rows) -> Iterator[Split]:
    """Every AIConfigurator GPU in turn; Vidur's rows of the same GPU go with it."""
    return gpu_left_out(rows, _aic(rows))


def fp8_left_out(rows: Rows) -> Iterator[Split]:
    """fp8 on every GPU in turn, whose bf16 is known, as is fp8 on others."""
    fp8 = (rows["dtype"] == "fp8").to_numpy()
    for gpu in sorted(rows["gpu"][fp8].unique()):
        held = fp8 & (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held, held=held)


def evenly(rows: Rows, most: int = 3_000) -> Mask:
    """At most so many rows of every GPU, at random."""
    mixed = rows["gpu"].sample(frac=1, random_state=0)
    return np.asarray((mixed.groupby(mixed).cumcount() < most).sort_index())


def nccl_cells(rows: Rows) -> Iterator[Split]:
    """Ten folds of cells (system, kind, ranks, size); both dtypes and stacks of a cell go."""
    cells = _codes(rows, ["gpu", "op", "world_size", "message_bytes"])
    for held in _share(cells, FOLDS):
        yield Split(part="all", known=~held, held=held)


def nccl_tail(rows: Rows) -> Iterator[Split]:
    """Of one system at a time, all sizes above 16 MiB."""
    large = (rows["message_bytes"] > TAIL_BYTES).to_numpy()
    for gpu in sorted(rows["gpu"].unique()):
        held = large & (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held, held=held)


def nccl_ranks(rows: Rows) -> Iterator[Split]:
    """Of one system at a time, every GPU count in turn."""
    for (gpu, _), part in rows.groupby(["gpu", "world_size"]):
        held = np.zeros(len(rows), dtype=bool)
        held[part.index] = True
        yield Split(part=str(gpu), known=~held, held=held)


def each_left_out(rows: Rows) -> Iterator[Split]:
    """Every GPU in turn."""
    return gpu_left_out(rows, np.ones(len(rows), dtype=bool))


def shapes(names: list[str]) -> Callable[[Rows], Iterator[Split]]:
    """Splits that leave out a tenth of the shapes, on every GPU at once."""

    def splits(rows: Rows) -> Iterator[Split]:
        held = next(_share(_codes(rows, names), FOLDS))
        yield Split(part="all", known=~held, held=held)

    return splits


def a100_80(rows: Rows) -> Iterator[Split]:
    """NeuSight's A100-80GB rows; P4 to A100-40GB are known."""
    held = (rows["gpu"] == "a100-pcie-80gb").to_numpy()
    yield Split(part="a100-pcie-80gb", known=~held, held=held)


def clusters(rows: Rows) -> Iterator[Split]:
    """One cluster of nccl-tests at a time: a machine and its network, however many runs of it."""
    multi = (rows["source"] == "nccl-tests") & (rows["message_bytes"] > 2**20)
    multi &= (rows["link"] == "network") & rows["op"].isin(["all_reduce", "all_gather"])
    cluster = _codes(rows, ["gpu", "node", "network_bytes_per_s"])
    for code in np.unique(cluster[multi.to_numpy()]):
        mine = cluster == code
        yield Split(part="all", known=~mine, held=mine & multi.to_numpy())


def from_neusight(*ops: str) -> Callable[[Rows], Mask]:
    """NeuSight's rows of these ops; of all where none is named."""

    def choose(rows: Rows) -> Mask:
        named = rows["op"].isin(ops) if ops else np.ones(len(rows), dtype=bool)
        return np.asarray((rows["source"] == "NeuSight") & named)

    return choose


def thinned(rows: Rows) -> Mask:
    """All rows, but of Vidur's 900 sizes a curve every twentieth."""
    sizes = rows["message_bytes"].rank(method="dense").to_numpy()
    return np.asarray((rows["source"] != "vidur") | (sizes % 20 == 0))


GEMM = ["m", "n", "k", "batch"]
FEW = (4, 8, 16)
CURVES = ("roofline", "alpha_beta", "interpolation", "nearest", "mlp")


def nccl(name: str, known_best: str, targets: dict[str, float], splits: Splits) -> Line:
    """A line about AIConfigurator's collectives."""
    return Line(
        name=f"NCCL, {name}",
        family="collective",
        metric="mape_pct",
        targets=targets,
        known_best=known_best,
        choose=_aic,
        splits=splits,
        baselines=CURVES,
    )


def family_left_out(family: str) -> Line:
    """A line about a family none of whose ops was measured on a GPU."""
    return Line(
        name=f"{family}, GPU left out",
        family=family,
        metric="mape_pct",
        targets={},
        known_best="none published",
        choose=evenly,
        splits=each_left_out,
        baselines=("roofline", "nearest"),
    )


def fp32(
    name: str,
    family: str,
    ops: tuple[str, ...],
    splits: Splits,
    target: float,
    known_best: str,
    metric: str = "median_ape_pct",
) -> Line:
    """A line about NeuSight's fp32 ops."""
    return Line(
        name=f"fp32 {name}",
        family=family,
        metric=metric,
        targets={"": target},
        known_best=known_best,
        choose=from_neusight(*ops),
        splits=splits,
        few=FEW if splits is a100_80 else (),
    )


def lines() -> list[Line]:
    """The table, in the issue's order."""
    left_out = {"b200-sxm": 5.0, "a100-sxm-80gb": 15.0, "rtx-pro-6000": 9.0}
    systems = {"h100-sxm-80gb": 5.0, "b200-sxm": 4.5, "gb200": 3.0, "a100-sxm-80gb": 20.0}
    random = "same GPU, random shapes"
    return [
        Line(
            name="GEMM bf16, unseen (n,k) sites",
            family="gemm",
            metric="mape_pct",
            targets={"a100-sxm-80gb": 3.5, "b200-sxm": 3.0},
            known_best="4.4 / 3.9 (A100 / B200)",
            choose=is_half_gemm,
            splits=gemm_sites,
        ),
        Line(
            name="GEMM bf16, GPU left out",
            family="gemm",
            metric="mape_pct",
            targets=left_out,
            known_best="5.9 / 25.5 / 13.1 (B200 / A100 / RTX PRO 6000)",
            choose=is_half_gemm,
            splits=gemm_left_out,
            few=FEW,
        ),
        Line(
            name="GEMM fp8, left out where bf16 is known",
            family="gemm",
            metric="mape_pct",
            targets={},
            known_best="none published",
            choose=lambda rows: _aic(rows) & evenly(rows, 15_000),
            splits=fp8_left_out,
            baselines=("roofline", "nearest"),
        ),
        nccl("cells left out", "4.2", {"": 3.5}, nccl_cells),
        nccl("sizes > 16 MiB left out", "2.6-24 (tail fit 4.5)", {"": 4.0}, nccl_tail),
        nccl("a GPU count left out", "6.5-55", NVLINK, nccl_ranks),
        nccl("system left out", "6.1 / 5.2 / 3.1 / 26.9", systems, each_left_out),
        fp32(f"bmm, {random}", "gemm", ("bmm",), shapes(GEMM), 3.0, "3.8"),
        fp32(f"linear, {random}", "gemm", ("addmm",), shapes(GEMM), 3.0, "5.0"),
        fp32(f"elementwise, {random}", "elementwise", (), shapes(["numel", "inner"]), 1.2, "1.4"),
        fp32(f"layernorm, {random}", "norm", (), shapes(["rows", "cols"]), 1.5, "2.0"),
        fp32("bmm, A100-80GB left out", "gemm", ("bmm",), a100_80, 7.0, "9", "mape_pct"),
        fp32("linear, A100-80GB left out", "gemm", ("addmm",), a100_80, 6.0, "8", "mape_pct"),
        *(family_left_out(name) for name in ("attention", "reduction", "norm")),
        Line(
            name="multi-node all_reduce, all_gather > 1 MiB, cluster left out",
            family="collective",
            metric="median_ape_pct",
            targets={"": 20.0},
            known_best="none published",
            choose=thinned,
            splits=clusters,
            baselines=CURVES,
        ),
    ]
