"""What `python -m itercast.extras.benchmarks.peaks` compares."""

import weakref

import pandas as pd
import torch

from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings, make_step
from itercast.extras.benchmarks.peaks import errors_table, held_bytes


def token_loss(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, inputs["input"][:, 0].long())


def test_logits_are_what_a_loop_holds_that_keeps_its_output() -> None:
    """3 rows of 5 logits in fp32: log-softmax keeps its own result for backward."""
    step = capture_step(
        lambda: torch.nn.Linear(4, 5),
        lambda: {"input": torch.zeros(3, 4)},
        token_loss,
        StepSettings(),
        samples=3,
        tokens=3,
    )
    assert held_bytes(step) == 3 * 5 * 4


def test_a_step_frees_its_output_before_backward() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    freed: list[bool] = []

    def loss(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(weakref.ref(logits))
        return token_loss(logits, inputs)

    def on_phase(name: str) -> None:
        if name == "backward":
            freed.append(seen[-1]() is None)

    inputs = {"input": torch.zeros(3, 4)}
    make_step(torch.nn.Linear(4, 5), inputs, loss, StepSettings(), on_phase)()
    assert freed == [True]


def test_errors_of_peaks_are_by_size() -> None:
    found = pd.DataFrame({"error_pct": [-10.0, 2.0], "peak_memory_bytes": [1e9, 20e9]})
    columns = [list(column.cells) for column in errors_table(found).columns]
    assert columns[:3] == [["0 GB", "10 GB"], ["2", "1"], ["-4.0", "2.0"]]
    assert columns[-1] == ["10.0", "2.0"]
