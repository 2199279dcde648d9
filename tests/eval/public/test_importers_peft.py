"""peft's comparison: plain LoRA is a row with its rank, other methods are counted by their name."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from itercast.eval.compare import stated_rows, step_of
from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.plan import ParallelPlan

RUN = {
    **{"exp": "lora/llama-3.2-3B-rank8", "model": "meta-llama/Llama-3.2-3B", "dtype": "bfloat16"},
    **{"batch": "4", "ms_per_step": "100.5", "tokens_per_s": "8000.0", "trainable": "2293760.0"},
    **{"compile": "False", "gc": "", "optimizer": "AdamW", "peft": "LORA", "r": "8.0"},
    **{"torch": "2.9.0+cu128", "device": "NVIDIA L40S"},
}


def imported(folder: Path, *runs: dict[str, str]) -> Imported:
    """The runs as a table, imported."""
    text = io.StringIO()
    writer = csv.DictWriter(text, sorted(RUN))
    writer.writeheader()
    writer.writerows(runs)
    (folder / "method_comparison.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    return read_source("peft", folder, Hints())


def test_a_run_is_a_step_at_the_mean_length_of_its_samples(tmp_path: Path) -> None:
    """8000 tokens a second for 0.1005 s are 804, 201 of each sample."""
    (row,) = imported(tmp_path, RUN).rows["iteration"].to_dict("records")
    expected = {"time_us": 100_500.0, "batch": 4, "seq": 201, "lora": 8, "gpu": "l40s", "plan": ""}
    expected |= {"stack": "torch-2.9.0+cu128", "dtype": "bf16", "optimizer": "adamw"}
    assert {name: row[name] for name in expected} == expected
    assert json.loads(row["hf_config"])["num_hidden_layers"] == 28


def test_checkpointing_is_recomputation_and_a_scale_is_plain(tmp_path: Path) -> None:
    scaled = RUN | {"exp": "lora/llama-3.2-3B-rank8-rslora", "gc": "True"}
    rows = imported(tmp_path, scaled).rows["iteration"]
    assert rows["plan"].tolist() == ["recompute=full"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft": "IA3"}, "method of fine-tuning is not LoRA: IA3"),
        ({"exp": "lora/rank8-dora"}, "variant of LoRA: lora/rank8-dora"),
        (
            {"exp": "lora/rank8-target-mlp"},
            "variant of LoRA: lora/rank8-target-mlp",
        ),
        ({"optimizer": "lora-fa"}, "unknown optimizer: lora-fa"),
        ({"model": "flux"}, "no configuration for the model flux"),
        ({"device": "Abacus"}, "unknown gpu: 'Abacus'"),
        ({"batch": "x"}, "batch is not a positive whole number"),
        ({"compile": "True"}, "base is not in bf16, or compiled"),
    ],
)
def test_other_runs_are_counted_by_their_word(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    found = imported(tmp_path, RUN, RUN | change)
    assert len(found.rows["iteration"]) == 1
    assert found.dropped == {reason: 1}


def test_a_row_is_captured_with_as_many_trained_numbers_as_stated(tmp_path: Path) -> None:
    """Three of 28 layers are captured: queries 3072 x 3072, values 3072 x 1024, rank 8."""
    pytest.importorskip("transformers")
    (row,) = stated_rows(imported(tmp_path, RUN).rows["iteration"]).to_dict("records")
    step = step_of({str(k): v for k, v in row.items()}, ParallelPlan())
    trained = sum(p.shape[0] * p.shape[1] for p in step.parameters if p.ready_after >= 0)
    assert trained == 3 * 8 * (3072 + 3072 + 3072 + 1024)
    assert trained // 3 * 28 == float(RUN["trainable"])
