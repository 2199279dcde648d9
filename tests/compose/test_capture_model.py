"""Cached captures depend on the code that made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from itercast.compose.capture_model import MICROBENCH, capture, code_digest, code_files
from itercast.compose.target import find_target, forecast_step
from itercast.learners.bundle import SHIPPED

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 512,
}


def test_the_digest_covers_every_file_that_captures_depend_on(tmp_path: Path) -> None:
    """Changing any file of a copy of the code changes the digest, and undoing it restores it."""
    copy = tmp_path / "microbench"
    for path in code_files(MICROBENCH):
        (copy / path.relative_to(MICROBENCH)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy / path.relative_to(MICROBENCH))
    before = code_digest(copy)
    assert before == code_digest(MICROBENCH)
    for path in code_files(copy):
        text = path.read_bytes()
        path.write_bytes(text + b"\n# changed\n")
        assert code_digest(copy) != before, path
        path.write_bytes(text)
    assert code_digest(copy) == before


def test_the_digest_finds_the_rooms_of_the_capture() -> None:
    """A moved folder would leave the digest without files, and old captures in use."""
    names = {path.relative_to(MICROBENCH).as_posix() for path in code_files(MICROBENCH)}
    assert len(names) > 20
    assert {p.relative_to(MICROBENCH).as_posix() for p in MICROBENCH.glob("capture/*.py")} < names
    assert {"step.py", "opcall.py", "cases/models/transformers.py", "capture/log.py"} < names


def test_all_tables_of_a_recommender_are_captured() -> None:
    """Equal tables stand side by side: two of them would be another model."""
    step = capture("dlrm-rm2")
    lookups = [
        c for c in step.calls if c.op.startswith("aten._embedding_bag") and "back" not in c.op
    ]
    tables = [p for p in step.parameters if p.name.startswith("tables.")]
    assert len(lookups) == len(tables) > 2
    assert "tables" not in step.repeats


@pytest.mark.parametrize("plan", ["dp=1", "dp=4,zero=3"])
def test_layers_left_out_cost_the_host_what_they_cost_in_a_whole_capture(
    tmp_path: Path, plan: str
) -> None:
    """What a step does once before its first layer or after its last is not done by every layer."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    target = find_target("h100-sxm-80gb", plan, SHIPPED)
    short, whole = (
        forecast_step(capture(config, batch=1, seq=64, dtype="bf16", whole=whole), target)
        for whole in (False, True)
    )
    assert short.host_us == pytest.approx(whole.host_us, rel=0.02)
    assert short.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.02)
