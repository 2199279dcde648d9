"""Lines of the public benchmark about single ops: their rows, splits and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from itercast.eval.public.benchmark import FOLDS, TAIL_BYTES, Line, Mask, Rows, Split

NVLINK = {"a100-sxm-80gb": 10.0, "b200-sxm": 10.0, "gb200": 10.0, "h100-sxm-80gb": 10.0}
Splits = Callable[[Rows], Iterator[Split]]


def _codes(rows: Rows, names: list[str]) -> np.ndarray:
    return rows.groupby(names, dropna=False).ngroup().to_numpy()


def _share(codes: np.ndarray, folds: int, seed: int = 0) -> Iterator[Mask]:
    """Masks that divide groups of rows into folds; every group is in exactly one."""
    names = np.random.default_rng(seed).permutation(np.unique(codes))
    for fold in range(folds):
        yield np.isin(codes, names[fold::folds])


def is_half_gemm(rows: Rows) -> Mask:
    """Mask of products in bf16 and fp16 (AIConfigurator's and Vidur's)."""
    return rows["dtype"].isin(["bf16", "fp16"]).to_numpy()


def _aic(rows: Rows) -> Mask:
    return (rows["source"] == "aiconfigurator").to_numpy()


def gemm_sites(rows: Rows) -> Iterator[Split]:
    """Splits that leave out a fifth of the weight shapes (n, k), on every GPU and stack at once."""
    held = next(_share(_codes(rows, ["n", "k"]), 5))
    for gpu in sorted(rows["gpu"][_aic(rows)].unique()):
        mine = (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held & mine, held=held & mine & _aic(rows))


def gpu_left_out(rows: Rows, among: Mask) -> Iterator[Split]:
    """Splits that leave out one GPU each, scored on its rows in the mask ``among``."""
    for gpu in sorted(rows["gpu"][among].unique()):
        mine = (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~mine, held=mine & among)


def gemm_left_out(rows: Rows) -> Iterator[Split]:
    """Splits that leave out one GPU each, Vidur's rows of it too; scored on AIConfigurator's."""
    return gpu_left_out(rows, _aic(rows))


def fp8_left_out(rows: Rows) -> Iterator[Split]:
    """Splits that leave out fp8 on one GPU each; its bf16 and fp8 on other GPUs are known."""
    fp8 = (rows["dtype"] == "fp8").to_numpy()
    for gpu in sorted(rows["gpu"][fp8].unique()):
        held = fp8 & (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held, held=held)


def evenly(rows: Rows, most: int = 3_000) -> Mask:
    """Selects at most ``most`` rows of every GPU, drawn at random; returns a mask."""
    mixed = rows["gpu"].sample(frac=1, random_state=0)
    return np.asarray((mixed.groupby(mixed).cumcount() < most).sort_index())


def nccl_cells(rows: Rows) -> Iterator[Split]:
    """Folds of cells (GPU, collective, ranks, size) with all dtypes and stacks of each cell."""
    cells = _codes(rows, ["gpu", "op", "world_size", "message_bytes"])
    for held in _share(cells, FOLDS):
        yield Split(part="all", known=~held, held=held)


def nccl_tail(rows: Rows) -> Iterator[Split]:
    """Splits that leave out all sizes above 16 MiB of one GPU each."""
    large = (rows["message_bytes"] > TAIL_BYTES).to_numpy()
    for gpu in sorted(rows["gpu"].unique()):
        held = large & (rows["gpu"] == gpu).to_numpy()
        yield Split(part=str(gpu), known=~held, held=held)


def nccl_ranks(rows: Rows) -> Iterator[Split]:
    """Splits that leave out one GPU count of one GPU each."""
    for (gpu, _), part in rows.groupby(["gpu", "world_size"]):
        held = np.zeros(len(rows), dtype=bool)
        held[part.index] = True
        yield Split(part=str(gpu), known=~held, held=held)


def each_left_out(rows: Rows) -> Iterator[Split]:
    """Splits that leave out one GPU each."""
    return gpu_left_out(rows, np.ones(len(rows), dtype=bool))


def shapes(names: list[str]) -> Callable[[Rows], Iterator[Split]]:
    """Splits that leave out one of FOLDS parts of the shapes, on every GPU at once."""

    def splits(rows: Rows) -> Iterator[Split]:
        held = next(_share(_codes(rows, names), FOLDS))
        yield Split(part="all", known=~held, held=held)

    return splits


def every_shape(names: list[str], ops: tuple[str, ...] = ()) -> Splits:
    """Splits shapes into parts and leaves out each in turn, so that every shape is held out once.

    Scored on ``ops``, on all where none is named.
    """

    def splits(rows: Rows) -> Iterator[Split]:
        scored = rows["op"].isin(ops).to_numpy() if ops else np.ones(len(rows), dtype=bool)
        for held in _share(_codes(rows, names), FOLDS):
            yield Split(part="all", known=~held, held=held & scored)

    return splits


def a100_80(rows: Rows) -> Iterator[Split]:
    """A split that leaves out NeuSight's A100-80GB; P4 to A100-40GB are known."""
    held = (rows["gpu"] == "a100-pcie-80gb").to_numpy()
    yield Split(part="a100-pcie-80gb", known=~held, held=held)


def clusters(rows: Rows) -> Iterator[Split]:
    """Splits that leave out one cluster each: all runs on a kind of node with its network.

    Scored on all_reduce and all_gather over the network above 1 MiB.
    """
    multi = (rows["source"] == "nccl-tests") & (rows["message_bytes"] > 2**20)
    multi &= (rows["link"] == "network") & rows["op"].isin(["all_reduce", "all_gather"])
    cluster = _codes(rows, ["gpu", "node", "network_bytes_per_s"])
    for code in np.unique(cluster[multi.to_numpy()]):
        mine = cluster == code
        yield Split(part="all", known=~mine, held=mine & multi.to_numpy())


def from_neusight(*ops: str) -> Callable[[Rows], Mask]:
    """Returns a filter that keeps NeuSight's rows of these ops; of all ops where none is named."""

    def choose(rows: Rows) -> Mask:
        named = rows["op"].isin(ops) if ops else np.ones(len(rows), dtype=bool)
        return np.asarray((rows["source"] == "NeuSight") & named)

    return choose


def thinned(rows: Rows) -> Mask:
    """Mask of all rows, but only every twentieth of Vidur's 900 message sizes."""
    sizes = rows["message_bytes"].rank(method="dense").to_numpy()
    return np.asarray((rows["source"] != "vidur") | (sizes % 20 == 0))


GEMM = ["m", "n", "k", "batch"]
FEW = (4, 8, 16)
CURVES = ("roofline", "alpha_beta", "interpolation", "nearest", "mlp")


def nccl(name: str, known_best: str, targets: dict[str, float], splits: Splits) -> Line:
    """Make a line about AIConfigurator's collectives."""
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
    """Make a line that leaves out one GPU each, about one op family."""
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
    """Make a line about NeuSight's fp32 ops."""
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
    """All lines about single ops, in the order of the table."""
    return [*gemm_lines(), *nccl_lines(), *fp32_lines(), network_line(), *library_lines()]


def gemm_lines() -> list[Line]:
    """Lines about products in bf16 and fp8."""
    left_out = {"b200-sxm": 5.0, "a100-sxm-80gb": 15.0, "rtx-pro-6000": 9.0}
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
    ]


def nccl_lines() -> list[Line]:
    """Lines about NCCL collectives inside a node."""
    systems = {"h100-sxm-80gb": 5.0, "b200-sxm": 4.5, "gb200": 3.0, "a100-sxm-80gb": 20.0}
    return [
        nccl("cells left out", "4.2", {"": 3.5}, nccl_cells),
        nccl("sizes > 16 MiB left out", "2.6-24 (tail fit 4.5)", {"": 4.0}, nccl_tail),
        nccl("a GPU count left out", "6.5-55", NVLINK, nccl_ranks),
        nccl("system left out", "6.1 / 5.2 / 3.1 / 26.9", systems, each_left_out),
    ]


def fp32_lines() -> list[Line]:
    """Lines about NeuSight's fp32 ops, and about families with a GPU left out."""
    random = "same GPU, random shapes"
    return [
        fp32(f"bmm, {random}", "gemm", ("bmm",), shapes(GEMM), 3.0, "3.8"),
        fp32(f"linear, {random}", "gemm", ("addmm",), shapes(GEMM), 3.0, "5.0"),
        fp32(f"elementwise, {random}", "elementwise", (), shapes(["numel", "inner"]), 1.2, "1.4"),
        fp32(f"layernorm, {random}", "norm", (), shapes(["rows", "cols"]), 1.5, "2.0"),
        fp32("bmm, A100-80GB left out", "gemm", ("bmm",), a100_80, 7.0, "9", "mape_pct"),
        fp32("linear, A100-80GB left out", "gemm", ("addmm",), a100_80, 6.0, "8", "mape_pct"),
        *(family_left_out(name) for name in ("attention", "reduction", "norm")),
    ]


def network_line() -> Line:
    """The line about collectives across nodes."""
    return Line(
        name="multi-node all_reduce, all_gather > 1 MiB, cluster left out",
        family="collective",
        metric="median_ape_pct",
        targets={"": 20.0},
        known_best="none published",
        choose=thinned,
        splits=clusters,
        baselines=CURVES,
    )


def library_lines() -> list[Line]:
    """Lines about norms, cross-entropy and attention backward of libraries, and about experts."""
    liger, cudnn = {"liger-kernel": "liger-kernel"}, {"cudnn-frontend": "cudnn-frontend"}
    sequences = ["batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"]

    def line(name: str, family: str, importers: dict[str, str], splits: Splits) -> Line:
        return Line(
            name=name,
            family=family,
            metric="median_ape_pct",
            targets={"": 20.0 if family == "experts" else 6.0},
            known_best="none published",
            choose=served if family == "experts" else lambda rows: np.ones(len(rows), dtype=bool),
            splits=splits,
            baselines=("roofline", "nearest"),
            importers=importers,
        )

    norms = every_shape(["rows", "cols", "channels", "groups"])
    return [
        line("norms of Liger and cuDNN, shapes left out", "norm", {**liger, **cudnn}, norms),
        line(
            "SDPA backward of cuDNN, shapes left out",
            "attention",
            cudnn,
            every_shape(sequences, ("backward",)),
        ),
        line(
            "experts under vLLM and SGLang, GPU left out",
            "experts",
            {"aiconfigurator-more": "aiconfigurator-more"},
            each_left_out,
        ),
    ]


def served(rows: Rows) -> Mask:
    """Selects at most 1,500 rows of every GPU that timed the experts of a whole layer."""
    layer = (rows["op"] == "layer").to_numpy()
    return np.asarray(layer & evenly(rows, 1_500))
