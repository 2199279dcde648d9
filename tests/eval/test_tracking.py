"""What a training leaves in MLflow, in a real SQLite store: runs, datasets, models, champions."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from report_facts import RESULTS
from toy_products import products

from itercast.eval.results import logged_groups
from itercast.eval.tracking.fits import log_fit
from itercast.eval.tracking.logs import log_evaluation
from itercast.eval.tracking.open_run import open_run
from itercast.eval.tracking.registry import PINNED, judge
from itercast.eval.tracking.store import NEWEST, NOTE, now_ms
from itercast.extras.pages.write import family_page
from itercast.learners.features.table import shape_places
from itercast.learners.held_out import load_held_out, median_retest_pct
from itercast.learners.models.compared import NAMES
from itercast.learners.models.training_table import frozen_split
from itercast.learners.train import SCORES
from itercast.microbench.ops.matrix import gemm

TRIALS = 2


@pytest.fixture(scope="module")
def trained(learned: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with a bundle of products, and its scores."""
    return learned, json.loads((learned / "bundle" / SCORES).read_text())


@pytest.fixture(scope="module")
def logged(
    trained: tuple[Path, dict[str, Any]],
    empty_mlflow_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A client of a store that holds this training."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        yield log(trained, folder, patch)


def log(trained: tuple[Path, dict[str, Any]], folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Log the training to the store of a folder; its client."""
    from mlflow import MlflowClient

    root, report = trained
    patch.setenv("ITERCAST_CACHE", str(root / ".cache"))
    log_fit(report, "toy", root / "bundle", [root], family_page)
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def runs_of(client: Any, name: str, where: str = "") -> list[Any]:
    """The runs of an experiment, as the page lists them: by family, the latest first."""
    place = client.get_experiment_by_name(name).experiment_id
    return list(client.search_runs([place], where, order_by=["tags.`family` ASC"]))


def test_every_learner_is_a_run_with_parameters_duration_and_commit(
    logged: Any, trained: tuple[Path, dict[str, Any]]
) -> None:
    found = runs_of(logged, "ops/toy", "metrics.rank > 0")
    assert {run.data.tags["learner"] for run in found} == set(NAMES)
    assert not any("mlflow.parentRunId" in run.data.tags for run in found)
    seconds = trained[1]["gemm"]["learner_seconds"]
    assert set(seconds) == set(NAMES)
    for run in found:
        took_ms = max(1, round(1000 * seconds[run.data.tags["learner"]]))
        assert run.info.end_time - run.info.start_time == took_ms
        assert {"family", "learner", "device"} <= set(run.data.params)
        assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    (blend,) = (run for run in found if run.data.tags["learner"] == "blend")
    assert {"max_depth", "eta", "share_of_smooth_model"} <= set(blend.data.params)
    (prices,) = (run for run in found if "prices" in run.data.tags)
    assert prices.data.tags["learner"] == "blend"


def test_a_second_training_takes_the_place_of_the_first(
    trained: tuple[Path, dict[str, Any]],
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bundle again: each learner is newest once, and the champion stays."""
    log(trained, tmp_path, monkeypatch)
    logged = log(trained, tmp_path, monkeypatch)
    newest = runs_of(logged, "ops/toy", NEWEST)
    assert sorted(run.data.tags["learner"] for run in newest) == sorted(NAMES)
    metrics = [set(run.data.metrics) for run in newest]
    assert all(one == metrics[0] for one in metrics)  # what MLflow compares, all have
    versions = logged.search_model_versions("name = 'toy.gemm'")
    assert len(versions) == 2
    assert logged.get_model_version_by_alias("toy.gemm", "champion").version == 1
    reasons = {str(v.version): v.tags["champion_reason"] for v in versions}
    assert reasons["1"] == "the first model of this device and family"
    assert reasons["2"].startswith("no difference beyond the noise: median error")
    (own,) = (run.data.tags for run in newest if "verdict" in run.data.tags)
    assert own["champion_version"] == "1" and own["champion_reason"] == reasons["2"]
    assert float(own["champion_pct"]) > 0


def test_a_training_s_own_run_tells_what_it_learned_from_and_what_it_changed(
    trained: tuple[Path, dict[str, Any]],
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the same rows: one digest; the first is the champion, the second no better."""
    root, report = trained
    for _ in range(2):
        with open_run(str(root / "bundle"), {"trials": TRIALS}):
            pass
        logged = log(trained, tmp_path, monkeypatch)
    second, first = runs_of(logged, "trainings")
    assert first.data.tags["verdict"] == "gemm: first"
    assert second.data.tags["verdict"] == "gemm: no difference beyond the noise"
    assert [run.data.metrics["verdicts/first"] for run in (first, second)] == [1, 0]
    assert set(first.data.metrics) == set(second.data.metrics)  # a gap is "NaN" side by side
    for run in (first, second):
        error = report["gemm"]["learners"]["blend"]["median_ape_pct"]
        assert run.data.metrics["median_ape_pct/gemm"] == pytest.approx(error, abs=0.005)
        assert run.data.metrics["median_ape_pct"] == run.data.metrics["median_ape_pct/gemm"]
        assert run.data.metrics["rows"] == 160
        assert run.data.params["families"] == "gemm" and run.data.params["gpus"] == "toy"
        assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    rows = [run.inputs.dataset_inputs[0].dataset for run in (first, second)]
    assert rows[0].digest == rows[1].digest == first.data.params["digest"]
    assert json.loads(rows[0].profile) == {"num_rows": 160}


def test_datasets_have_our_digest_and_metrics_are_tied_to_model_and_dataset(logged: Any) -> None:
    (best, *_) = runs_of(logged, "ops/toy", "tags.learner = 'blend'")
    names = {d.dataset.name: d.dataset for d in best.inputs.dataset_inputs}
    assert set(names) == {"gemm-rows", "gemm-held-out"}
    assert json.loads(names["gemm-rows"].profile) == {"num_rows": 160}
    assert len({d.digest for d in names.values()}) == 2
    place = logged.get_experiment_by_name("ops/toy").experiment_id
    models = logged.search_logged_models([place])
    assert {m.name for m in models} == {f"gemm-{name}" for name in NAMES}
    (own,) = (m for m in models if m.name == "gemm-blend")
    assert own.source_run_id == best.info.run_id
    tied = {m.key: m for m in own.metrics}["median_ape_pct"]
    assert tied.value == best.data.metrics["median_ape_pct"]
    assert tied.dataset_digest == names["gemm-held-out"].digest


def test_pyfunc_loads_the_champion_and_prices_a_table(logged: Any) -> None:
    """Parameters without GPU, dtype and layout are enough; a wrong type is refused."""
    import mlflow

    mlflow.set_tracking_uri(logged.tracking_uri)
    model = mlflow.pyfunc.load_model("models:/toy.gemm@champion")
    asked = pd.DataFrame({"m": [256, 512], "n": [256, 512], "k": [256, 512]})
    found = model.predict(asked)
    assert list(found["predicted_us"]) == sorted(found["predicted_us"])
    assert (found["predicted_us_p10"] < found["predicted_us_p90"]).all()
    with pytest.raises(Exception, match=r"Incompatible input types|Failed to enforce schema"):
        model.predict(asked.assign(m="many"))
    needed = mlflow.pyfunc.get_model_dependencies("models:/toy.gemm@champion")
    pinned = Path(needed).read_text().split()
    assert len(pinned) == len(PINNED) and all("==" in line for line in pinned)
    for_conda = mlflow.pyfunc.get_model_dependencies("models:/toy.gemm@champion", format="conda")
    assert yaml.safe_load(Path(for_conda).read_text())["dependencies"][-1] == {"pip": pinned}


def test_trials_are_child_runs(logged: Any) -> None:
    (blend,) = runs_of(logged, "ops/toy", "tags.learner = 'blend'")
    trials = runs_of(logged, "ops/toy", f"tags.`mlflow.parentRunId` = '{blend.info.run_id}'")
    assert {run.data.tags["trial"] for run in trials} == {str(n) for n in range(TRIALS)}
    assert all(run.data.metrics["mean_log_error_pct"] > 0 for run in trials)
    assert {"eta", "max_depth"} <= set(trials[0].data.params)


def test_a_comparison_is_a_run_per_group_and_its_report(logged: Any, tmp_path: Path) -> None:
    """Each with its errors, parameters, dataset, duration, warning and a row per case."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "report.html").write_text("a page")
    facts = {"bundle": "b", "data": "d", "digest": "0123", "stack": "torch", "learner": "blend"}
    groups = logged_groups(RESULTS, {("toy", "DDP"): "too short"})
    for _ in range(2):
        begin_ms = now_ms() - 5000
        asked = ("demo", groups, {**facts, "source": "itercast evaluate"}, {"kendall_tau": 0.5})
        log_evaluation(*asked, tmp_path / "demo", begin_ms)
    every = runs_of(logged, "iterations")
    assert len(every) == 2 * 3 and len(runs_of(logged, "iterations", NEWEST)) == 2
    by_kind = {run.data.tags["kind"]: run for run in runs_of(logged, "iterations", NEWEST)}
    ddp, report = by_kind["DDP"], logged.get_run(by_kind["DDP"].data.tags["report"])
    assert ddp.data.metrics["geomean_ape_pct"] == pytest.approx(20)
    assert by_kind["one process"].data.metrics["coverage_pct"] == 50
    assert ddp.data.params | {"bundle": "b", "gpu": "toy", "cases": "1"} == ddp.data.params
    assert ddp.data.tags["warning"] == "too short" and "too short" in ddp.data.tags[NOTE]
    assert ddp.data.tags["mlflow.source.name"] == "itercast evaluate"
    assert ddp.info.end_time - ddp.info.start_time >= 5000
    (given,) = ddp.inputs.dataset_inputs
    assert given.dataset.digest == "0123"
    path = logged.download_artifacts(ddp.info.run_id, "cases.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["error_pct"] == -20
    assert [f.path for f in logged.list_artifacts(report.info.run_id)] == ["report.html"]
    note = logged.get_experiment_by_name("iterations").tags[NOTE]
    assert f"/runs/{report.info.run_id}/artifacts?workflowType=machine_learning)" in note


def test_the_family_that_prices_has_a_page_of_its_forecasts(logged: Any) -> None:
    (run,) = runs_of(logged, "ops/toy", "tags.prices = 'yes'")
    assert [f.path for f in logged.list_artifacts(run.info.run_id)] == ["held_out.html"]
    assert all(
        not logged.list_artifacts(other.info.run_id)
        for other in runs_of(logged, "ops/toy", "metrics.rank > 0")
        if other.info.run_id != run.info.run_id
    )


def test_artifacts_survive_a_moved_folder(logged: Any, tmp_path: Path) -> None:
    """A store in the working folder names them by a relative place."""
    place = logged.get_experiment_by_name("ops/toy").artifact_location
    assert place == "mlartifacts"
    moved = tmp_path / "moved"
    shutil.copytree(Path.cwd(), moved)
    (run,) = runs_of(logged, "ops/toy", "tags.prices = 'yes'")
    assert (moved / run.info.artifact_uri / "held_out.html").is_file()


def forecasts(errors_pct: np.ndarray) -> pd.DataFrame:
    """Held-out rows whose forecasts are off by so many per cent."""
    points = pd.DataFrame({"params": [f"m={i}" for i in range(len(errors_pct))], "op": "mm"})
    facts = {"gpu": "toy", "dtype": "fp32", "measured_us": 100.0}
    return points.assign(**facts, predicted_us=100.0 + errors_pct)


def test_a_champion_is_replaced_only_by_more_than_the_noise() -> None:
    """Half the error on 100 rows is; 0.1 % less is not, nor is anything on 10 common rows."""
    errors = np.random.default_rng(0).uniform(5, 15, 100)
    old = forecasts(errors)
    assert judge(old, None).promote
    assert judge(forecasts(errors / 2), old).promote
    assert not judge(forecasts(errors * 0.999 * np.tile([1.05, 0.95], 50)), old).promote
    assert not judge(forecasts(errors * 2), old).promote
    few = judge(forecasts(errors[:10] / 2), old)
    assert not few.promote and few.reason.startswith("10 rows held out by both, 20 of 10 shapes")
    worse, same = (judge(forecasts(e), old) for e in (errors * 2, errors))
    assert (worse.word, same.word) == ("worse", "no difference beyond the noise")
    assert "on 100 rows held out by both" in worse.reason and worse.gain_pct[1] < 0


def test_models_are_compared_where_no_point_was_measured_twice() -> None:
    """Of one training, or of both: the noise is then that of the points that were drawn alone."""
    errors = np.random.default_rng(0).uniform(5, 15, 100)
    once, twice = np.full(100, np.nan), np.where(np.arange(100) < 50, 4.0, np.nan)
    for new, old in ((once, once), (once, twice), (twice, once)):
        better = judge(
            forecasts(errors / 4).assign(retest_pct=new), forecasts(errors).assign(retest_pct=old)
        )
        assert better.promote and np.isfinite(better.gain_pct).all()


def test_points_of_four_shapes_are_too_few_to_replace_a_champion() -> None:
    """25 conditions of each shape err alike: they are no 100 draws."""
    errors = np.repeat([5.0, 8.0, 11.0, 14.0], 25)
    shapes = {"params": [f"m={i // 25}" for i in range(100)], "threads": np.arange(100) % 25}
    better = judge(forecasts(errors / 2).assign(**shapes), forecasts(errors).assign(**shapes))
    assert better.points == 100 and not better.promote


def test_two_trainings_have_one_retest_in_either_order() -> None:
    """The median of 2, 4 and 6 %: points measured once say nothing."""
    one = pd.DataFrame({"retest_pct": [2.0, np.nan, 4.0]})
    other = pd.DataFrame({"retest_pct": [6.0, np.nan]})
    assert median_retest_pct(one, other) == median_retest_pct(other, one) == 4.0
    assert median_retest_pct(one.iloc[1:2], pd.DataFrame({"op": ["mm"]})) is None


def test_a_shape_stays_held_out_when_rows_are_added() -> None:
    """Of 100 shapes and of 200, and of these rows in another order."""
    many = products(200)

    def held(some: pd.DataFrame) -> set[tuple[Any, ...]]:
        index = frozen_split(shape_places(some, gemm.FAMILY), 0.15, some["op"].to_numpy(str))[1]
        return set(some.iloc[index][["m", "n", "k", "op"]].itertuples(index=False, name=None))

    first = held(many[:100])
    assert 5 < len(first) < 30
    assert first <= held(many)
    assert held(many.sample(frac=1.0, random_state=0)) == held(many)


def test_held_out_forecasts_are_kept_with_the_champion(
    logged: Any, trained: tuple[Path, dict[str, Any]]
) -> None:
    from itercast.eval.tracking.registry import champion_held_out

    kept = champion_held_out(logged, "toy.gemm")
    assert kept is not None and len(kept) == len(load_held_out(trained[0] / "bundle"))
    assert champion_held_out(logged, "toy.norm") is None
