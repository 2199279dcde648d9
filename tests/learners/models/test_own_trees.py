"""Trees: of one GPU's own, of all together, and from files."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from itercast.learners.bundle import (
    SHIPPED,
    Bundle,
    ShippedTrees,
    load_trees,
    save_trees,
    tree_names,
)
from itercast.learners.models import trees
from itercast.learners.models.training_table import Table, group_split
from itercast.learners.models.trees import Trees, default_options, fit

ONE, TWO, FEW = 1, 2, 3  # columns of x


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The log ratio is a step in the size, another step on each GPU."""
    monkeypatch.setattr("itercast.learners.models.trees.OWN_ROWS", 100)
    monkeypatch.setattr("itercast.learners.models.trees.OWN_TABLE", 200)
    monkeypatch.setattr("itercast.learners.models.trees.SHARED_ROUNDS", 5)
    monkeypatch.setattr("itercast.learners.models.trees.SEVERAL_GPUS_ROUNDS", 60)
    rng = np.random.default_rng(0)
    gpu = np.repeat([ONE, TWO, FEW], [200, 200, 40])
    x = np.zeros((len(gpu), 4), dtype=np.float32)
    x[:, 0] = rng.uniform(0, 1, len(gpu))
    x[np.arange(len(gpu)), gpu] = 1
    step = (x[:, 0] > 0.25 * gpu) * gpu
    return Table(
        x=x,
        roofline_us=np.ones(len(gpu)),
        time_us=np.exp(step.astype(float)),
        group=np.arange(len(gpu)),
        origin=(ONE, TWO, FEW),
        gpus=(ONE, TWO, FEW),
    )


def trees_of(table: Table) -> Trees:
    known, held = group_split(table.group, 0.2, seed=0)
    options = default_options(table)
    return fit(table.take(known), table.take(held), options)


def test_a_gpu_of_many_rows_has_trees_of_its_own(table: Table) -> None:
    """40 rows bear none; with all answers close to the steps."""
    trees = trees_of(table)
    assert sorted(trees.own) == [ONE, TWO]
    error = np.abs(trees.log_ratio(table.x) - table.log_ratio)
    assert np.median(error[:400]) < 0.05


def test_own_trees_answer_for_their_gpu_alone(table: Table) -> None:
    """Many rows: its own; few rows: all common rounds, the shared ones first."""
    trees = trees_of(table)
    assert trees.common is not None
    assert trees.common.num_boosted_rounds() > 5
    found = trees.log_ratio(table.x)
    own = trees.own[ONE].inplace_predict(table.x)
    assert found[:200] == pytest.approx(own[:200])
    assert found[400:] == pytest.approx(trees.common.inplace_predict(table.x[400:]))


def test_trees_are_saved_and_loaded(table: Table, tmp_path: Path) -> None:
    """The same answers from files, with common trees and without; no file but the family's."""
    for some in (table, table.take(np.arange(400))):
        trees = trees_of(some)
        save_trees(trees, tmp_path, "gemm")
        names = tree_names("gemm", trees)
        assert names == ["gemm"] * (trees.common is not None) + ["gemm.1", "gemm.2"]
        loaded = load_trees(tmp_path, "gemm", names, some.x.shape[1])
        assert loaded is not None
        assert loaded.log_ratio(some.x) == pytest.approx(trees.log_ratio(some.x))
    assert load_trees(tmp_path, "gemm", [], 4) is None
    for hostile in ("../gemm", "gemm.x", "norm"):
        with pytest.raises(KeyError):
            load_trees(tmp_path, "gemm", [hostile], 4)


def test_trees_that_ship_are_read_when_they_are_used(tmp_path: Path) -> None:
    """A copy elsewhere is checked and read whole; both hold the same trees."""
    trees = Bundle.load(SHIPPED).models["attention"].ensemble.trees
    shutil.copytree(SHIPPED, tmp_path / "copy")
    copy = Bundle.load(tmp_path / "copy").models["attention"].ensemble.trees
    assert trees is not None and copy is not None
    assert isinstance(trees.own, ShippedTrees) and not trees.own.loaded
    assert [*trees.own] == [*copy.own] and len(trees.own) == 5
    assert all(trees.own[c].save_raw() == copy.own[c].save_raw() for c in copy.own)
    assert len(trees.own.loaded) == 5


def test_first_rounds_do_not_see_the_gpu(table: Table) -> None:
    """Five shared trees forecast the sizes of one GPU alike on another; the next five do not."""
    rounds = trees.SHARED_ROUNDS + 5
    common = trees.refit(table, trees.DEFAULTS, trees.Rounds(common=rounds)).common
    assert common is not None and common.num_boosted_rounds() == rounds == 10
    elsewhere = table.x[:, [0, TWO, ONE, FEW]]
    for end, alike in ((5, True), (10, False)):
        one, other = (
            common.inplace_predict(x, iteration_range=(0, end)) for x in (table.x, elsewhere)
        )
        assert np.allclose(one, other) == alike
