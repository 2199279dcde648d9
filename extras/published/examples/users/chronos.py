"""T5 as https://github.com/amazon-science/chronos-forecasting trains it on time series."""

from __future__ import annotations

from typing import Any

from itercast.extras.published.examples.mixed.encoder_decoders import Sample, encoder_decoder

TOKENS = 4096  # kinds of values
CONTEXT, FORECAST = 512, 64  # values that are read and foretold, an end token behind each


def t5(batch: int, **sizes: Any) -> Sample:
    """A T5 with random weights, and values with labels."""
    sizes |= {"d_kv": 64, "feed_forward_proj": "relu", "decoder_start_token_id": 0}
    return encoder_decoder("t5", batch, CONTEXT + 1, FORECAST + 1, TOKENS, **sizes)


def base(batch: int) -> Sample:
    """google/t5-efficient-base."""
    return t5(batch, d_model=768, d_ff=3072, num_layers=12, num_heads=12)


def large(batch: int) -> Sample:
    """google/t5-efficient-large."""
    return t5(batch, d_model=1024, d_ff=4096, num_layers=24, num_heads=16)
