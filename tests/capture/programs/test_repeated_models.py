"""A law: models of transformers launch with repeated layers what they launch without."""

from functools import partial
from typing import Any

import pytest
import torch
from test_repeated_layers import Step, captured, launches

from itercast.capture.programs.repeated.passes import Repetition

transformers: Any = pytest.importorskip("transformers")

LAYERS = 12
TINY: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 64, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "max_position_embeddings": 64},
}


def training(config: Any, recompute: bool) -> Step:
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.zeros(2, 16, dtype=torch.long)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LlamaConfig", {}),
        ("Gemma3TextConfig", {"sliding_window": 8}),  # every sixth layer sees all tokens
        ("SmolLM3Config", {}),  # every fourth layer has no rotary embedding
        ("Olmo3Config", {"sliding_window": 8}),  # every fourth layer sees all tokens
    ],
)
def test_models_launch_the_same(
    kind: str, more: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ops on the same memory in the same order, by as much host work, in as much memory.

    Layers differ by kind of attention or rotary embedding.
    """
    config = getattr(transformers, kind)(**{**TINY, **more})
    repeat, repeated = Repetition.output, []

    def counted(layer: Repetition) -> Any:
        repeated.append(layer)
        return repeat(layer)

    monkeypatch.setattr(Repetition, "output", counted)
    found, whole = (captured(partial(training, config, recompute), r) for r in (True, False))
    assert repeated
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)
