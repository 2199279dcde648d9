"""Which elements of a step's tensors are zero, against real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from itercast.microbench.capture.log import capture_step
from itercast.microbench.capture.zeros import mark_zeros
from itercast.microbench.cases.registry import case
from itercast.microbench.opcall import OpCall, TensorSpec
from itercast.microbench.step import StepSettings


@pytest.mark.parametrize("name", ["dlrm-s", "gpt-s"])
def test_zeros_of_adams_squares_are_foreseen(name: str) -> None:
    """Rows of tables that the batch leaves out, against a real optimizer after two steps."""
    chosen = case(name)
    model, inputs = chosen.build(), chosen.inputs(chosen.batch, chosen.seq)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        chosen.loss(model(**inputs), inputs).backward()
        optimizer.step()
    squares = [state["exp_avg_sq"] for state in optimizer.state.values()]
    zeros = sum(int((x == 0).sum()) for x in squares) / sum(x.numel() for x in squares)
    captured = capture_step(
        chosen.build,
        lambda: chosen.inputs(chosen.batch, chosen.seq),
        chosen.loss,
        StepSettings(),
    )
    [root] = [c for c in captured.calls if c.op.startswith("aten._foreach_sqrt")]
    foreseen = sum(t.zero_frac * t.numel for t in root.args[0]) / sum(t.numel for t in root.args[0])
    assert zeros > 0.2
    assert foreseen == pytest.approx(zeros, abs=0.06)


def test_tied_gradients_are_zero_where_both_parts_are() -> None:
    """An embedding's gradient added to another one, then squared and rooted by hand."""
    table = TensorSpec(shape=(4, 2), dtype="fp32", storage=1)
    dense, square = replace(table, storage=2), replace(table, storage=3)
    indices = TensorSpec(shape=(2,), dtype="int64", storage=4)
    gradient = OpCall(
        op="aten.embedding_dense_backward.default", args=(dense, indices, 4), outputs=(table,)
    )
    tie = OpCall(op="aten.add_.Tensor", args=(table, dense), outputs=(table,))
    adam = [
        OpCall(op="aten._foreach_addcmul_.Scalar", args=((square,), (table,), (table,), 0.1)),
        OpCall(op="aten._foreach_sqrt.default", args=((square,),)),
    ]
    assert mark_zeros([gradient, *adam])[-1].args[0][0].zero_frac == 0.75**2  # two draws of four
    assert mark_zeros([gradient, tie, *adam])[-1].args[0][0].zero_frac == 0.0
