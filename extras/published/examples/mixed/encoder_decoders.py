"""Encoder-decoders of transformers with texts of other lengths at the decoder."""

from __future__ import annotations

from typing import Any

import torch

Sample = tuple[Any, dict[str, torch.Tensor]]


def encoder_decoder(
    kind: str, batch: int, read: int, written: int, vocab: int, **sizes: Any
) -> Sample:
    """A model with random weights; ``read`` tokens at its encoder, ``written`` labels."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, vocab_size=vocab, **sizes)
    tokens, labels = (torch.randint(0, vocab, (batch, length)) for length in (read, written))
    return AutoModelForSeq2SeqLM.from_config(config).train(), {
        "input_ids": tokens,
        "labels": labels,
    }


def t5(batch: int, written: int, **sizes: Any) -> Sample:
    """T5 1.1, with 512 tokens at the encoder and a head of its own."""
    shape = {"d_kv": 64, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, **sizes}
    model, inputs = encoder_decoder("t5", batch, 512, written, 32128, **shape)
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    return model, inputs


def nano_t5(batch: int) -> Sample:
    """google/t5-v1_1-base, spans of 15 % of the text masked: 114 labels; no dropout."""
    shape = {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0}
    return t5(batch, 114, **shape)


def flan_t5_xl(batch: int) -> Sample:
    """google/flan-t5-xl with summaries of 129 tokens, padded to a multiple of 8."""
    return t5(batch, 136, d_model=2048, d_ff=5120, num_layers=24, num_heads=32)


def flan_t5_xxl(batch: int) -> Sample:
    """google/flan-t5-xxl with the same."""
    return t5(batch, 136, d_model=4096, d_ff=10240, num_layers=24, num_heads=64)


def blenderbot_400m(batch: int) -> Sample:
    """facebook/blenderbot-400M-distill; 128 tokens in, 64 out."""
    layers = {"encoder_layers": 2, "decoder_layers": 12, "d_model": 1280}
    heads = {"encoder_attention_heads": 32, "decoder_attention_heads": 32}
    hidden = {"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "max_position_embeddings": 128}
    return encoder_decoder("blenderbot", batch, 128, 64, 8008, **layers, **heads, **hidden)
