"""Which bundle answers for a device; changed files are refused before anything parses them."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from full_disk import full_disk
from toy_products import TOY, products, write_products

from itercast.learners.bundle import FACTS, SHIPPED, SHIPPED_CPU, Bundle, digests
from itercast.learners.known_bundles import find_bundle
from itercast.learners.models.tree_files import PER_NODE, read_trees
from itercast.learners.train import FamilyReport, TrainSettings, train
from itercast.learners.unfinished import resumed
from itercast.microbench.ops.memory import elementwise
from itercast.microbench.store import write_card, write_part

FLIPS = 200
FEATURES = 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families of the CPU bundle, saved: trees, a network or a process, near rows."""
    whole = Bundle.load(SHIPPED_CPU)
    models = {name: whole.models[name] for name in ("attention", "embedding")}
    folder = tmp_path_factory.mktemp("bundles") / "two"
    Bundle(models=models, gpus=whole.gpus, anchors=whole.anchors).save(folder)
    return folder


def one_line(load: Callable[[], object]) -> str:
    """The message of the ValueError that this raises, which is one line."""
    with pytest.raises(ValueError) as refused:
        load()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_folder_that_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    link, there = tmp_path / "link", tmp_path / "there"
    link.symlink_to(there)
    for gpus in ({}, Bundle.load(SHIPPED_CPU).gpus):
        Bundle(models={}, gpus=gpus).save(link)
        assert link.is_symlink() and not there.is_symlink()
        assert Bundle.load(there).gpus == gpus


def test_any_flipped_bit_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Positions all over every file; the last ones of bundle.json are digests themselves."""
    copy, rng = Path(shutil.copytree(bundle, tmp_path / "copy")), np.random.default_rng(0)
    files = sorted(p for p in copy.iterdir() if p.is_file())
    assert {p.suffix for p in files} >= {".json", ".gz", ".npz"}
    for path in files:
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, FLIPS // len(files)).astype(int):
            changed = bytearray(whole)
            changed[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            if path.name != FACTS or differs(whole, bytes(changed)):
                assert one_line(lambda: Bundle.load(copy)).startswith(f"bundle {str(copy)!r}")
        path.write_bytes(whole)
    assert Bundle.load(copy).models.keys() == {"attention", "embedding"}


def differs(before: bytes, after: bytes) -> bool:
    """Whether two texts of JSON mean different values; spaces between them mean none."""
    try:
        return bool(json.loads(before) != json.loads(after))
    except ValueError:
        return True


def test_a_file_that_was_not_written_with_the_bundle_is_refused(
    bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "gemm.npz").write_bytes(b"")
    assert "gemm.npz is not the file that was written" in one_line(lambda: Bundle.load(copy))
    (copy / "gemm.npz").unlink()
    (copy / "attention.ubj.gz").unlink()
    assert "its file attention.ubj.gz is missing" in one_line(lambda: Bundle.load(copy))


def test_a_full_disk_keeps_the_old_bundle_and_is_told_by_name(bundle: Path, tmp_path: Path) -> None:
    """Beside it no other folder is left; also where a family of a training is kept."""
    old, facts = tmp_path / "old", (bundle / FACTS).read_bytes()
    shutil.copytree(bundle, old)
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/old'"):
        Bundle.load(bundle).save(old)
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and (old / FACTS).read_bytes() == facts

    made = Bundle.load(bundle)
    report = FamilyReport(
        rows=0, parameters={}, seconds=0, retest_ape_pct=None, coverage_pct=0, learners={}
    )
    fit = resumed(tmp_path / "new", lambda *_: iter([("gemm", report, made)]))
    rows = {"gemm": products(3)}
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/.new.families/gemm/.*'"):
        list(fit(rows, {}, TrainSettings(roots=[]), None))
    assert not list((tmp_path / ".new.families" / "gemm").iterdir())


@pytest.mark.parametrize("folder", [SHIPPED, SHIPPED_CPU], ids=lambda folder: folder.name)
def test_shipped_bundles_are_what_was_written(folder: Path) -> None:
    """Their trees would also be read from elsewhere; those of one family are."""
    facts = json.loads((folder / FACTS).read_text())
    assert facts["digests"] == digests(folder, facts)
    model = Bundle.load(folder).models["norm"]
    columns = len(model.encoder.column_numbers(model.encoder.names))
    read_trees(folder / "norm.ubj.gz", columns)
    assert "num_feature" in one_line(lambda: read_trees(folder / "norm.ubj.gz", columns + 1))


@pytest.fixture(scope="module")
def booster() -> xgb.Booster:
    """Five trees of two features."""
    x = np.random.default_rng(0).normal(size=(200, FEATURES))
    return xgb.train({"nthread": 1, "max_depth": 3}, xgb.DMatrix(x, label=x.sum(1)), 5)


def text(value: str) -> bytes:
    """A key as UBJSON has it: its length and itself."""
    return b"L" + len(value).to_bytes(8) + value.encode()


def changed(raw: bytes, name: str, at: int, value: int | None) -> bytes:
    """The file with one number of the second tree's array changed, or taken out for None."""
    start = raw.index(text(name), raw.index(text(name)) + 1) + len(text(name))
    count, size = start + len(b"[$l#L"), PER_NODE[name].itemsize
    number = count + 8 + size * at
    if value is not None:
        return raw[:number] + value.to_bytes(size, signed=True) + raw[number + size :]
    fewer = int.from_bytes(raw[count : count + 8]) - 1
    return raw[:count] + fewer.to_bytes(8) + raw[count + 8 : number] + raw[number + size :]


def test_trees_as_xgboost_writes_them_are_read(booster: xgb.Booster, tmp_path: Path) -> None:
    raw = bytes(booster.save_raw("ubj"))
    (tmp_path / "x.ubj.gz").write_bytes(gzip.compress(raw))
    assert read_trees(tmp_path / "x.ubj.gz", FEATURES) == raw


HOSTILE = {
    "a child outside": ("left_children", 0, 10**6, "children"),
    "a negative child": ("right_children", 0, -7, "children"),
    "a circle": ("left_children", 1, 1, "two parents"),
    "back to the root": ("left_children", 1, 0, "children"),
    "one child": ("right_children", 0, -1, "one child"),
    "a feature outside": ("split_indices", 0, 2, "split_indices"),
    "a shorter array": ("split_conditions", 0, None, "arrays of tree 1"),
    "fewer nodes": ("left_children", 0, None, "sizes"),
    "a split by categories": ("split_type", 0, 1, "split_type"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_trees_that_would_lead_xgboost_astray_are_refused(
    booster: xgb.Booster, tmp_path: Path, name: str
) -> None:
    """Also in a bundle whose digests fit."""
    *where, reason = HOSTILE[name]
    path = tmp_path / "x.ubj.gz"
    path.write_bytes(gzip.compress(changed(bytes(booster.save_raw("ubj")), *where)))
    assert reason in one_line(lambda: read_trees(path, FEATURES))


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ubj.gz"
    path.write_bytes(gzip.compress(b"{" * 10**6)[:-9])
    assert "cut off" in one_line(lambda: read_trees(path, FEATURES))
    path.write_bytes(gzip.compress(b"[[$l#L" * 10**5))
    assert "no trees of XGBoost" in one_line(lambda: read_trees(path, FEATURES))


def test_a_name_leads_to_the_bundle_that_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the shipped CPU name it; ``cpu`` is whichever machine this is."""
    monkeypatch.chdir(tmp_path)
    cpu = next(iter(find_bundle("cpu")[1].gpus))
    assert find_bundle("cpu")[0] == find_bundle(cpu)[0] == SHIPPED_CPU
    assert find_bundle("h100-sxm-80gb")[0] == find_bundle("nobody")[0] == SHIPPED


def test_a_family_that_joins_a_bundle_leaves_forecasts_of_the_others(tmp_path: Path) -> None:
    """Its sweep found peaks of half the rate: a shared machine was slow, or hot."""
    first, second, bundle = (tmp_path / name for name in ("first", "second", "bundle"))
    train([write_products(first, 60)], bundle)
    slow = replace(TOY, peak_flops_per_s={"fp32": 5e12}, hbm_bytes_per_s=5e11)
    points = pd.DataFrame([asdict(p) for p in islice(elementwise.FAMILY.sweep(), 60)])
    facts = {"family": "elementwise", "gpu": "toy", "threads": 0, "cache": "warm", "status": "ok"}
    path = write_part(second, "elementwise", "toy", points.assign(**facts, time_us=5.0), "0")
    write_card(path.parent, {"hardware": slow.to_dict()})
    asked, before = products(20), Bundle.load(bundle)
    train([second], bundle, into=before)
    after = Bundle.load(bundle)
    assert set(after.models) == {"gemm", "elementwise"} and after.gpus == before.gpus
    us = [b.price("gemm", asked)["predicted_us"].tolist() for b in (before, after)]
    assert us[0] == us[1]
