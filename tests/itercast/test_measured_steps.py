"""Forecasts beside steps that a user wrote down, as ``itercast evaluate --measured`` shows them."""

import json
from pathlib import Path

import pytest
import yaml

from itercast.anchors import measured_steps
from itercast.capture.input.lane import Batches, InputLane, write_lane
from itercast.commands.shared import compared
from itercast.eval.compare import results_table
from itercast.eval.results import by_source, over_sources
from itercast.extras.anchors.infer_machine import sensitivity
from itercast.options import Question

LARGE_RUNS = Path(__file__).resolve().parents[2] / "datasets/large_runs"
PAGES = [LARGE_RUNS.parent / name for name in ("reported_runs", "user_runs", "mixed_runs")]
STEP = {"case": "mlp-l", "gpu": "a100-sxm-80gb", "batch": 64, "dtype": "bf16", "source": "a log"}


def written(path: Path, *steps: dict[str, object]) -> Path:
    path.write_text(yaml.safe_dump([STEP | step for step in steps]))
    return path


def test_steps_of_a_file_are_compared_with_their_forecasts(tmp_path: Path) -> None:
    """A time of half the forecast is an error of +100 %; plans and names are those stated."""
    _, (probe,) = compared(written(tmp_path / "a.yaml", {"step_ms": 1.0}), None, None)
    half_ms = probe.predicted_us / 2e3
    steps = written(tmp_path / "b.yaml", {"step_ms": half_ms}, {"step_ms": half_ms, "plan": "dp=2"})
    rows, (alone, two) = compared(steps, None, None)
    assert alone.error_pct == pytest.approx(100) and alone.label == "mlp-l"
    assert (two.plan, two.ranks, two.samples) == ("dp=2", 2, 128)
    assert list(rows["time_us"]) == [half_ms * 1e3] * 2
    with pytest.raises(ValueError, match="no step of gpt-m there"):
        compared(steps, ["gpt-m"], None)


def test_a_step_waits_for_the_loader_that_it_states(tmp_path: Path) -> None:
    """Two workers take 2 s for a batch of 32 each: 64 samples every 2 s, whatever the GPU.

    The file is named from the folder of the steps. As an anchor such a step tells of no GPU.
    """
    slow = Batches(wall_us=(2e6,), cpu_us=(0.0,))
    lane = InputLane(
        loader="slow", workers=2, prefetch=2, batch_samples=32, batch_bytes=0, cores=2, worker=slow
    )
    write_lane(lane, tmp_path / "lane.json")
    steps = written(tmp_path / "a.yaml", {"step_ms": 1000.0, "input": "lane.json"})
    _, (found,) = compared(steps, None, None)
    assert found.predicted_us == pytest.approx(2e6, rel=0.01)
    assert sum(found.parts_us.values()) == pytest.approx(found.predicted_us)
    (one,) = measured_steps(steps, Question)
    assert max(map(abs, sensitivity(one.forecast, one.target))) < 0.01


def test_a_folder_of_steps_is_summed_up_by_file(tmp_path: Path) -> None:
    """One source is 100 % too long, another right: a mean of 50 %, however many steps each has."""
    _, (probe,) = compared(written(tmp_path / "a.yaml", {"step_ms": 1.0}), None, None)
    right_ms = probe.predicted_us / 1e3
    written(tmp_path / "a.yaml", {"step_ms": right_ms})
    written(tmp_path / "b.yaml", *[{"step_ms": right_ms / 2}] * 3)
    _, results = compared(tmp_path, None, None)
    groups = by_source(results)
    assert {name: len(group) for name, group in groups.items()} == {"a": 1, "b": 3}
    assert over_sources(groups).startswith("mean over 2 sources: error 50.0 %, bias +50.0")
    assert over_sources(groups) in (results_table(results).caption or "")
    assert "sources" not in (results_table(results[1:]).caption or "")


def test_a_dataset_root_is_one_with_hardware_files_beside_its_rows(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("gpu: a100-sxm-80gb")
    (tmp_path / "iteration").mkdir()
    with pytest.raises(ValueError, match="no measured iteration"):
        compared(tmp_path, None, None)


def test_paths_are_from_the_file_that_states_them(tmp_path: Path) -> None:
    config = json.loads((LARGE_RUNS / "models/llama-2-7b.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    (tmp_path / "small.json").write_text(json.dumps({**config, **small}))
    step = {"hf_config": "small.json", "gpu": "a100-sxm-80gb", "batch": 1, "seq": 64, "step_ms": 1}
    (tmp_path / "steps.yaml").write_text(yaml.safe_dump([step]))
    (one,) = measured_steps(tmp_path / "steps.yaml", Question)
    assert one.label == "small"


@pytest.mark.parametrize("folder", [LARGE_RUNS, *PAGES], ids=lambda path: path.name)
def test_published_steps_are_as_many_as_their_page_says(folder: Path) -> None:
    """By file of the folder; each states its source and plan."""
    lines = [x.split("|") for x in (folder / "README.md").read_text().splitlines() if "`" in x]
    stated = {name.strip(" `"): int(n) for _, name, _, n, *_ in (x for x in lines if len(x) > 4)}
    read = {path: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert {path.stem: len(steps) for path, steps in read.items()} == stated
    assert all("# Source: " in path.read_text() for path in read)
    models = [step.get("hf_config", ".") for steps in read.values() for step in steps]
    assert all((folder / model).exists() for model in models)
