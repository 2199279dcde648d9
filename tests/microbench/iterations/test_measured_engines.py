"""How a measured step is run: attention written out, a CUDA graph, torch.compile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from itercast.microbench.capture.attention import attention_as, eager_attention
from itercast.microbench.cases.registry import case
from itercast.microbench.iterations.engines import captured_in_graph
from itercast.microbench.iterations.measure import Iteration, measure_iteration
from itercast.microbench.ops.memory.fused import Fused, build


def test_attention_written_out_computes_the_same() -> None:
    """Causal, four heads over two of keys and values."""
    q, k, v = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    options = {"is_causal": True, "enable_gqa": True}
    whole = functional.scaled_dot_product_attention(q, k, v, **options)
    with attention_as("eager"):
        written = functional.scaled_dot_product_attention(q, k, v, **options)
    assert functional.scaled_dot_product_attention is not eager_attention
    torch.testing.assert_close(written, whole)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_iteration_is_measured_with_the_attention_asked_for(attn: str) -> None:
    chosen, seen = case("gpt-s"), set()

    def loss(logits: Any, given: dict[str, Any]) -> Any:
        seen.add(functional.scaled_dot_product_attention is eager_attention)
        return chosen.loss(logits, given)

    asked = Iteration(case="gpt-s", batch=1, seq=8, attn=attn)
    row = measure_iteration(replace(chosen, loss=loss), asked, "cpu", repetitions=1)
    assert row["status"] == "ok"
    assert seen == {attn == "eager"}


def test_a_graph_keeps_what_its_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's graphs own what they allocate, not the parameters and inputs made before."""
    replays: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda chosen: nullcontext(),
        "graph": lambda chosen: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: replays.append("replay")),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def make_step() -> tuple[Callable[[], None], weakref.ref[torch.nn.Module]]:
        model = torch.nn.Linear(2, 2)

        def step() -> None:
            model(torch.ones(1, 2))

        return step, weakref.ref(model)

    step, model = make_step()
    replay = captured_in_graph(step, "cuda", warmup=1)
    del step
    gc.collect()
    replay()
    assert replays == ["replay"]
    assert model() is not None


def test_model_and_loss_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``itercast.compose.graph.launch_modes`` fuses both."""
    chosen, compiled = case("mlp-s"), []

    def note(what: Any) -> Any:
        compiled.append(what)
        return what

    monkeypatch.setattr(torch, "compile", note)
    asked = Iteration(case="mlp-s", batch=2, engine="compile")
    assert measure_iteration(chosen, asked, "cpu", repetitions=1)["status"] == "ok"
    assert len(compiled) == 2
    assert isinstance(compiled[0], torch.nn.Module) and compiled[1] is chosen.loss


def test_every_fused_point_of_a_chunk_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are built before the first runs; of one code object torch compiles only eight."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    one = {"numel": 64, "read_bytes": 256, "written_bytes": 256}
    for workload in [build(Fused(ops=n, **one), "cpu") for n in range(1, 11)]:
        workload.run()
    assert len(graphs) == 10
