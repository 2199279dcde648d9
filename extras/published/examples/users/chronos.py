"""T5 as https://github.com/amazon-science/chronos-forecasting trains it on time series."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 4096  # kinds of values
CONTEXT, FORECAST = 512, 64  # values that are read and foretold, an end token behind each


def t5(batch: int, **sizes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A T5 with random weights, and values with labels."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

    shape = {"vocab_size": TOKENS, "d_kv": 64, "feed_forward_proj": "relu", **sizes}
    config = AutoConfig.for_model("t5", **shape, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    read = torch.randint(0, TOKENS, (batch, CONTEXT + 1))
    labels = torch.randint(0, TOKENS, (batch, FORECAST + 1))
    return model.train(), {"input_ids": read, "labels": labels}


def base(batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """google/t5-efficient-base."""
    return t5(batch, d_model=768, d_ff=3072, num_layers=12, num_heads=12)


def large(batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """google/t5-efficient-large."""
    return t5(batch, d_model=1024, d_ff=4096, num_layers=24, num_heads=16)
