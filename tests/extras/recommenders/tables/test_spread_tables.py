"""Sharded tables of a captured step: a rank's calls by hand, and laws over all ranks."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from law_case import outcome, rank_for, run_of
from plan_case import GPU, product_flops
from torch import nn

from itercast.capture.base import extensions
from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.graph.codecs import Codec
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.predict import predict
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.replicas import micro_batches
from itercast.extras.recommenders.tables.captured import captured_tables
from itercast.extras.recommenders.tables.elsewhere import VECTORS, compressed_vectors
from itercast.extras.recommenders.tables.known_streams import with_indices
from itercast.extras.recommenders.tables.placement import KINDS, Placement, Sharding
from itercast.extras.recommenders.tables.rank_step import rank_step
from itercast.microbench.ops import find_family

RANKS, PER_NODE = 4, 2
BATCH, BAG, DIM = 8, 3, 16
ROWS = (100, 60, 40)
ALL = tuple(range(RANKS))
PLACES = {
    "data_parallel": ALL,
    "table_wise": (2,),
    "column_wise": (3, 1),
    "row_wise": ALL,
    "table_row_wise": (2, 3),
    "grid_shard": ALL,
}


class Net(nn.Module):
    """Three tables, one of them by rows in two places, beside a linear layer of dense features."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bottom: nn.Module = nn.Linear(5, DIM)
        bags = [nn.EmbeddingBag(n, DIM, mode="sum", sparse=sparse) for n in ROWS[:2]]
        self.bags, self.items = nn.ModuleList(bags), nn.Embedding(ROWS[2], DIM, sparse=sparse)
        self.top = nn.Linear(DIM, 1)

    def forward(self, dense: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bottom(dense))
        for bag in self.bags:
            x = x + bag(index)
        history = self.items(index).sum(dim=1) + self.items(index[:, 0])
        loss: torch.Tensor = self.top(x * history).mean()
        return loss


def step(optimizer: str = "sgd", sparse: bool = False, mode: str = "train") -> StepCapture:
    """A step of ``Net``; the loss is its output."""
    inputs = (torch.zeros(BATCH, 5), torch.zeros(BATCH, BAG, dtype=torch.int64))
    return capture(Net(sparse), inputs, optimizer=optimizer, mode=mode)


def ranks_of(found: StepCapture, sharding: Sharding) -> list[StepCapture]:
    """The steps of all ranks."""
    tables = captured_tables(found)
    return [
        rank_step(found, tables, sharding, r, RANKS, PER_NODE, on_cpu=False) for r in range(RANKS)
    ]


def looked_up(found: StepCapture) -> Counter[str]:
    """Elements of rows that forward lookups read and update, by kind of lookup."""
    total: Counter[str] = Counter()
    for call in found.calls:
        family, p = find_family(call)
        if family is not None and family.name in ("embedding_bag", "embedding"):
            total[p.op] += p.lookups * p.dim
        elif family is not None and family.name == "sparse_update":
            total["update"] += p.lookups * p.dim
    return total


def table_bytes(found: StepCapture) -> int:
    return sum(p.nbytes for p in found.parameters if p.name.startswith("shard"))


def messages(found: StepCapture) -> list[tuple[str, int]]:
    """Phase and bytes of the exchanges."""
    return [(c.phase, c.args[0].nbytes) for c in found.calls if c.op == COLLECTIVE]


@pytest.mark.parametrize("text", ["int8", "dct:0.25"])
def test_pooled_vectors_travel_as_codes(text: str) -> None:
    """Two exchanges are encoded and decoded, row numbers are not; each ends where it is read.

    ``int8`` has 8 bits a number and a scale a block, ``dct:0.25`` a quarter of the coefficients.
    """
    codec = Codec.of(text)
    plain = ranks_of(step(), (Placement("table_wise", (0,)),) * 3)[0]
    coded = compressed_vectors(plain, codec)
    before, after = messages(plain), messages(coded)
    assert codec and [n for _, n in before[:2]] == [n for _, n in after[:2]]
    for (phase, whole), (same, codes) in zip(before[2:], after[2:], strict=True):
        assert phase == same and codes == pytest.approx(whole * codec.ratio("fp32"), rel=0.02)
    modules = [c.module for c in coded.calls]
    exchanges = [i for i, c in enumerate(coded.calls) if c.op == COLLECTIVE][2:]
    assert [modules[i - 1 : i + 1] for i in exchanges] == [[m, m] for m in VECTORS]
    bottom = next(i for i, c in enumerate(coded.calls) if c.op == "aten.addmm.default")
    decoded = max(i for i, m in enumerate(modules) if m == VECTORS[0])
    assert exchanges[0] < bottom < decoded  # the bottom layer runs beside the exchange
    pooled = {t.storage for c in plain.calls if c.module == VECTORS[0] for t in c.outputs}
    reads = [i for i, c in enumerate(coded.calls) if pooled & {t.storage for t in c.tensors()}]
    assert decoded < min(reads)


def test_tables_are_parameters_that_are_only_looked_up() -> None:
    """Eight samples with three lookups each; the items are not pooled, 24 and 8 of them."""
    found = captured_tables(step())
    assert [t.table.name for t in found] == ["bags.0", "bags.1", "items"]
    assert [[(x.samples, x.table.pooling, x.table.pooled) for x in t.lookups] for t in found] == [
        [(8, 3.0, True)],
        [(8, 3.0, True)],
        [(24, 1.0, False), (8, 1.0, False)],
    ]
    tied = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 30, bias=False))
    tied[1].weight = tied[0].weight
    model = nn.ModuleDict({"net": tied})
    model.forward = lambda i: tied(i).mean()  # type: ignore[method-assign,assignment]
    assert captured_tables(capture(model, (torch.zeros(3, dtype=torch.int64),))) == ()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "none"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_do_what_one_process_does(kind: str, sparse: bool, optimizer: str) -> None:
    """Tables and lookups once over all ranks, for the samples of all; the dense part on each."""
    if sparse and optimizer == "adamw":
        pytest.skip("Adam refuses sparse gradients")
    found = step(optimizer, sparse)
    parts = ranks_of(found, (Placement(kind, PLACES[kind]),) * 3)
    if kind == "data_parallel":
        assert all(part is found for part in parts)
        return
    whole = {t.parameter.storage for t in captured_tables(found)}
    assert sum(map(table_bytes, parts)) == sum(ROWS) * DIM * 4
    assert not any(p.storage in whole for part in parts for p in part.parameters)
    assert all(product_flops(part.calls) == product_flops(found.calls) for part in parts)
    over_ranks = sum(map(looked_up, parts), Counter())
    assert over_ranks["forward"] == pytest.approx(RANKS * looked_up(found)["forward"], rel=0.02)
    updated = over_ranks["forward"] if optimizer != "none" else 0
    assert over_ranks["update"] == pytest.approx(updated, rel=0.02)
    assert over_ranks["backward"] == 0  # no dense gradient of a table is left
    dense = {p.name for p in found.parameters if p.storage not in whole}
    for part in parts:
        assert {p.name for p in part.parameters if p.ready_after >= 0} == dense


def test_one_table_on_one_rank_by_hand() -> None:
    """bags.0 is on rank 2, the others stay copies.

    A rank sends 8 lengths and 24 row numbers, 64 and 192 bytes; rank 2 gets four times that. It
    sends 8 vectors of 16 floats to each of 4 ranks.
    """
    copies = Placement("data_parallel", ALL)
    parts = ranks_of(step(), (Placement("table_wise", (2,)), copies, copies))
    vectors = 4 * 8 * 16 * 4
    for part in parts:
        assert messages(part) == [
            ("forward", 4 * 64),
            ("forward", 4 * 192),
            ("forward", vectors),
            ("backward", vectors),
        ]
    held = [[p.name for p in part.parameters if p.name.startswith("shard")] for part in parts]
    assert held == [[], [], ["shard_0"], []]
    first = next(find_family(c)[1] for c in parts[2].calls if "embedding_bag" in c.op)
    assert (first.rows, first.dim, first.bags, first.lookups) == (100, 16, 32, 96)


def test_shards_look_up_the_rows_of_the_stream(tmp_path: Path) -> None:
    """Forward, gradient and update; a file needs the samples of all ranks."""
    places = (Placement("table_wise", (2,)),) * 3
    part = ranks_of(with_indices(step(), "zipf:1.1"), places)[2]
    pairs = [find_family(c) for c in part.calls]
    known = [(p.op, p.skew) for f, p in pairs if f is not None and hasattr(p, "skew")]
    bags = [("forward", 1.1)] * 2 + [("sparse_backward", 1.1), ("sgd", 1.1)] * 2
    assert sorted(known) == sorted([*bags, ("sgd", 0.0), ("sgd", 0.0)])  # the items are no bags
    rows = {"table": "t", "indices": [0] * 24, "offsets": list(range(0, 25, 3))}
    pd.DataFrame([rows, rows]).to_parquet(tmp_path / "stream.parquet")
    found = with_indices(step(), str(tmp_path / "stream.parquet"))
    with pytest.raises(ValueError, match="8 bags in the file, the batch has 32"):
        ranks_of(found, places)


def test_a_cpu_chooses_the_row_numbers_of_each_part_of_a_table() -> None:
    """Three calls of 8 x 3 row numbers, one of 8, look them up in 4 parts of a quarter each."""
    found = step()
    sharding = (Placement("row_wise", ALL),) * 3
    args = (found, captured_tables(found), sharding, 0, RANKS, PER_NODE)
    on_cpu, on_gpu = (rank_step(*args, on_cpu=cpu) for cpu in (True, False))
    points = [find_family(c)[1] for c in on_cpu.calls if c.op == "aten.nonzero.default"]
    chosen = Counter((p.source, p.size) for p in points)
    assert chosen == {(BATCH * BAG, 6): 3 * 4, (BATCH, 2): 4}
    assert not any(c.op == "aten.nonzero.default" for c in on_gpu.calls)  # kernels over all tables


def test_inference_sends_nothing_back() -> None:
    parts = ranks_of(step("none", mode="infer"), (Placement("row_wise", ALL),) * 3)
    assert [phase for phase, _ in messages(parts[0])] == ["forward"] * 3


def test_each_micro_batch_is_exchanged_and_updates_its_rows() -> None:
    """Two micro-batches send what one sends twice, but all_reduce once; tables change twice."""
    once, twice = (f"dp=4,shard=greedy{key}" for key in ("", ",accumulate=2"))
    reduced_us = sum(op.duration_us for op in run_of(rank_for(step(), once)).sent)
    sent_us = [outcome(step(), plan).tally.us["collective"] - reduced_us for plan in (once, twice)]
    assert sent_us[1] == pytest.approx(2 * sent_us[0]) and sent_us[0] > 0
    captures = [rank_for(step(), plan).model.graph.capture for plan in (once, twice)]
    updates = [sum(c.module == "update tables" for c in found.calls) for found in captures]
    assert updates[1] == 2 * updates[0] > 0


def plan_file(tmp_path: Path, kinds: dict[str, Any]) -> str:
    """A sharding file of these tables; the plan with it on four ranks."""
    entries = {
        name: {"sharding_type": kind, "ranks": list(ranks)} for name, (kind, ranks) in kinds.items()
    }
    (tmp_path / "plan.json").write_text(json.dumps(entries))
    return f"dp=4,shard={tmp_path / 'plan.json'}"


def forecast(plan: str, found: StepCapture | None = None) -> Any:
    return predict(found or step(), gpu="h100-sxm-80gb", plan=plan)


def test_tables_that_all_stay_copies_are_forecast_as_data_parallel(tmp_path: Path) -> None:
    names = ("bags.0", "bags.1", "items")
    plan = plan_file(tmp_path, dict.fromkeys(names, ("data_parallel", ALL)))
    found = step()
    sharded, plain = forecast(plan, found), forecast("dp=4", found)
    room = plain.memory_room_bytes  # plans with shard have another communicator
    assert replace(sharded, plan="dp=4", memory_room_bytes=room) == plain
    by_number = plan_file(tmp_path, dict.fromkeys("012", ("data_parallel", ALL)))
    assert forecast(by_number, found).iteration_us == plain.iteration_us


def test_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    """Rank 0 has the two bags, rank 1 the items: 160 rows of 16 floats are the most of a rank."""
    names = {"bags.0": ("table_wise", (0,)), "bags.1": ("table_wise", (0,))}
    plan = plan_file(tmp_path, {**names, "items": ("table_wise", (1,))})
    dense = sum(p.nbytes for p in step().parameters if p.name.startswith(("bottom", "top")))
    for optimizer, state in (("sgd", 0), ("adamw", 2)):
        memory = forecast(plan, step(optimizer)).memory_by_bytes
        assert memory["parameters"] == dense + 160 * DIM * 4
        assert memory["optimizer"] == state * (dense + 160 * DIM * 4)
        assert memory["gradients"] <= dense


class Deep(Net):
    """``Net`` with a pair of linear layers for dense features, which tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom: nn.Module = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, DIM))


@pytest.mark.parametrize("zero", ["", ",zero=3"])
def test_tensor_parallel_ranks_share_lookups_and_gather_vectors(tmp_path: Path, zero: str) -> None:
    """Each of four ranks asks for 4 of the 8 samples that it has in common with its neighbour.

    Rank 2 has the first bag: it gets 4 lengths and 12 row numbers, 32 and 96 bytes, of each rank,
    sends 4 vectors of 64 bytes to each, and looks 16 bags up. Copies of the other tables are looked
    up for all 8 samples. Two ranks gather 2 * 256 bytes; of gradients each sends its part.
    """
    copies = dict.fromkeys(("bags.1", "items"), ("data_parallel", ALL))
    plan = plan_file(tmp_path, {"bags.0": ("table_wise", (2,)), **copies})
    inputs = (torch.zeros(BATCH, 5), torch.zeros(BATCH, BAG, dtype=torch.int64))
    found = capture(Deep(), inputs, optimizer="sgd")
    made = rank_for(found, plan.replace("dp=4", "dp=2,tp=2") + zero).model.graph.capture
    sent = [c for c in made.calls if c.op == COLLECTIVE]
    assert [(c.kwargs["axis"], c.args[0].nbytes) for c in sent] == [
        ("tables", 4 * 32),
        ("tables", 4 * 96),
        ("tables", 4 * 256),
        ("tp", BATCH * DIM * 4),  # partial sums of the second bottom layer
        ("tp", 2 * 256),
        ("tables", 4 * 256),
    ]
    bags = [find_family(c)[1] for c in made.calls if c.op.startswith("aten._embedding_bag.")]
    assert [(p.rows, p.bags, p.lookups) for p in bags] == [(100, 16, 48), (60, 8, 24)]
    assert product_flops(found.calls) > 1.5 * product_flops(made.calls)  # layers are cut


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_shards_all_but_the_tables(tmp_path: Path, zero: int) -> None:
    """Of four ranks rank 0 has all tables, 200 rows of 16 floats; the dense part is cut by four.

    The linear layers are the root: 16 x 5 + 16 and 16 + 1 floats. FSDP2 pads the last layer's
    row and bias to four rows: it holds a fourth of 4 * (96 + 4 * 17) bytes and gathers all of them.
    """
    plan = plan_file(tmp_path, dict.fromkeys(("bags.0", "bags.1", "items"), ("table_wise", (0,))))
    rank = rank_for(step(), f"{plan},zero={zero}", GPU)
    assert memory(rank, "sgd")["parameters"] == 4 * 200 * DIM + 656 // 4
    sent = [op for op in micro_batches(rank, "sgd")[1].sent if op.op != "all_to_all"]
    found = [(op.op, round(1024 * op.duration_us)) for op in sent]
    assert found == [("all_gather", 656), ("reduce_scatter", 656)]


def test_groups_have_copies_of_all_tables(tmp_path: Path) -> None:
    """Two groups of two ranks: messages are among two, tables are averaged over the two groups.

    Rank 1 of each group has both bags and their averages and squares; the average of a fullest
    rank's 160 rows is sent once a step, with local=4 once in four.
    """
    names = {"bags.0": ("table_wise", (1,)), "bags.1": ("table_wise", (1,))}
    plan = plan_file(tmp_path, {**names, "items": ("table_wise", (0,))})
    rank = rank_for(step("adamw"), f"{plan}:2", GPU)
    sent = [op for op in micro_batches(rank, "adamw")[1].sent if op.op == "all_reduce"]
    assert round(1024 * sent[-1].duration_us) == 3 * 160 * DIM * 4
    rarely = micro_batches(rank_for(step("adamw"), f"{plan}:2,local=4", GPU), "adamw")[1].sent
    dense, tables = [op.duration_us for op in rarely if op.op == "all_reduce"]
    assert [dense, 4 * tables] == [op.duration_us for op in sent]
    two = rank_for(step("adamw"), plan.replace("dp=4", "dp=2"), GPU)
    messages_of = [
        [c.args[0].nbytes for c in r.model.graph.capture.calls if c.op == COLLECTIVE]
        for r in (rank, two)
    ]
    assert messages_of[0] == messages_of[1]
    assert rank.cluster.groups["tables"].size == 2 == rank.cluster.groups["table_replicas"].size


class Mixture(nn.Module):
    """A table before a block of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(100, DIM, mode="sum")
        self.blocks = nn.ModuleList([nn.ParameterDict({"up": torch.zeros(4, DIM, DIM)})])

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.items(index).view(4, -1, DIM)
        loss: torch.Tensor = torch.bmm(x, self.blocks[0]["up"]).square().mean()
        return loss


def test_tables_beside_experts() -> None:
    """Two ranks hold two experts each, and the table's 100 rows once; no step copies either."""
    found = capture(Mixture(), (torch.zeros(BATCH, BAG, dtype=torch.int64),), optimizer="sgd")
    rank = rank_for(found, "dp=2,ep=2,shard=greedy", GPU)
    made = rank.model.graph.capture
    assert [p.shape for p in made.parameters if not p.local] == [(2, DIM, DIM)]
    assert 0 < table_bytes(made) <= 100 * DIM * 4
    axes = Counter(c.kwargs["axis"] for c in made.calls if c.op == COLLECTIVE)
    assert axes == {"tables": 4, "ep": 4}  # the experts' replicas are one: nothing to reduce
    assert not [op for op in micro_batches(rank, "sgd")[1].sent if op.duration_us]


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_files_that_are_no_sharding_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"not JSON|expected a table's name"):
        forecast(f"dp=4,shard={tmp_path / 'plan.json'}")
    with pytest.raises(ValueError, match="shard is greedy or a file"):
        forecast(f"dp=4,shard={tmp_path / 'nowhere.json'}")


def test_models_without_tables_are_refused() -> None:
    plain = capture(nn.Linear(4, 4), (torch.zeros(2, 4),), loss="none")
    with pytest.raises(ValueError, match="the model has none"):
        forecast("dp=4,shard=greedy", plain)


def test_without_the_package_that_spreads_tables_a_plan_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extensions, "_added", lambda group: {})
    with pytest.raises(ValueError, match="no installed package spreads embedding tables"):
        rank_for(step(), "dp=4,shard=greedy", GPU)
