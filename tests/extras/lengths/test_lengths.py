"""`--lengths`: padding, packing and unlike replicas, counted by hand and as commands answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_case import GPU
from typed_commands import answer_to

from itercast.api import predict
from itercast.capture.cases.registry import case
from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.extras.lengths.sequences import lengths_of, with_lengths
from itercast.learners.bundle import Bundle
from itercast.microbench.ops.matrix.attention import flops, from_call

SEQ = case("gpt-s").seq


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    slow = replace(GPU, peak_flops_per_s={"fp32": 1e10})  # where flops decide
    Bundle(models={}, gpus={GPU.name: slow}).save(folder)
    return folder


def answer(bundle: Path, *words: str) -> Any:
    command = ["predict", "gpt-s", "--gpu", GPU.name, "--bundle", str(bundle), "--json", *words]
    return answer_to(*command)


def listed(tmp_path: Path, *numbers: int) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, numbers)))
    return str(path)


def test_packed_rows_cost_their_squares(tmp_path: Path) -> None:
    """Rows of 8 tokens with two sequences of 3: 2 tokens of 8 are padding, squares 18 for 64."""
    spec, plan = listed(tmp_path, 3), ParallelPlan()
    found = lengths_of(spec, plan, rows=4, context=8, packed=True)
    assert (found.row_tokens, found.real_tokens, found.squares) == (8, 6, 4 * 18)
    assert found.padding_frac == 0.25 and found.imbalance == 1
    assert found.attention == (8, 3)  # of four rows


def test_padded_batches_are_as_long_as_their_longest(tmp_path: Path) -> None:
    """Half the sequences have 2 tokens, half 6. A micro-batch of one is 4 long on average.

    The longest of n is 6 with probability 1 - 1/2^n; the slowest of many replicas always.
    """
    spec = listed(tmp_path, 2, 6)
    one = lengths_of(spec, ParallelPlan(), rows=1, context=8)
    pair = lengths_of(spec, ParallelPlan(dp=2), rows=1, context=8)
    many = lengths_of(spec, ParallelPlan(dp=64), rows=1, context=8)
    assert one.row_tokens == pytest.approx(4, abs=0.8) and one.imbalance == 1
    assert pair.row_tokens == pytest.approx(5, abs=0.8)
    assert many.row_tokens == 6 and many.squares == 36 and many.attention == (1, 6)
    assert many.imbalance == pytest.approx(1.5, rel=0.1)  # 6 for a mean of 4
    batch = lengths_of(spec, ParallelPlan(), rows=64, context=8)
    assert batch.row_tokens == 6 and batch.padding_frac == pytest.approx(1 / 3, abs=0.05)
    even = lengths_of(spec, ParallelPlan(accumulate=512), rows=1, context=8)
    assert even.row_tokens == pytest.approx(4, rel=0.02)  # micro-batches even out


def test_attention_is_priced_by_the_sum_of_squares() -> None:
    """Eight sequences of 3 tokens in 4 rows of 8: 4 heads x 16 wide x 2 products x 2 x 8 x 9."""
    q = TensorSpec(shape=(4, 4, 8, 16), dtype="fp32")
    call = OpCall(op="itercast.sdpa", args=(q, q, q))
    one_token = OpCall(
        op="itercast.sdpa", args=(TensorSpec(shape=(4, 4, 1, 16), dtype="fp32"), q, q)
    )
    capture = StepCapture(calls=(call, one_token))
    lengths = lengths_of("uniform:3:3", ParallelPlan(), rows=4, context=8, packed=True)
    first, other = with_lengths(capture, lengths, packed=True).calls
    p = from_call(first)
    assert p is not None and (p.batch, p.q_len, p.kv_len) == (8, 3, 3)
    assert flops(p) == 4 * 16 * 2 * 2 * 8 * 9
    assert other == one_token  # no self-attention over a sequence


def test_sequences_of_one_length_change_nothing(bundle: Path) -> None:
    plain = answer(bundle, "--plan", "dp=2")
    assert plain["lengths"] == {}
    for more in ([], ["--packed"]):
        found = answer(bundle, "--plan", "dp=2", "--lengths", f"uniform:{SEQ}:{SEQ}", *more)
        assert found["iteration_us"] == plain["iteration_us"]
        assert found["tokens_per_s"] == plain["tokens_per_s"]


def test_short_sequences_are_faster_padded_and_packed(bundle: Path) -> None:
    """Half the length: padded rows are half as long, packed rows as long with less attention."""
    half = ["--lengths", f"uniform:{SEQ // 2}:{SEQ // 2}"]
    whole, padded = answer(bundle), answer(bundle, *half)
    packed = answer(bundle, *half, "--packed")
    assert padded["compute_us"] < packed["compute_us"] < whole["compute_us"]
    short = predict("gpt-s", gpu=GPU.name, bundle=bundle, seq=SEQ // 2)
    assert padded["iteration_us"] == short.iteration_us


def test_plans_are_ranked_with_lengths(bundle: Path, mlflow_store: str) -> None:
    words = ["plan", "gpt-s", "--gpu", GPU.name, "--gpus", "2", "--bundle", str(bundle), "--json"]
    plans = answer_to(*words, "--lengths", f"uniform:1:{SEQ}")["plans"]
    assert len(plans) > 1 and all(0 < p["lengths"]["padding_frac"] < 1 for p in plans)
    times = [p["iteration_us"] for p in plans]
    assert times == sorted(times)
