"""Configurations of the mixture-of-experts models in published tables, and what they leave out.

Source: the config.json of each model at https://huggingface.co (Qwen, openai, deepseek-ai).
"""

from __future__ import annotations

from itercast.microbench.store import Row

COMMON = {"tie_word_embeddings": False, "hidden_act": "silu"}


def _qwen3(layers: int, width: int, heads: int, hidden: int) -> Row:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "moe_intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
    }


GPT_OSS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    **COMMON,
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": None,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **COMMON,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
}
EXPERTS: dict[str, tuple[Row, str]] = {
    "Qwen3_30B_a3B": (_qwen3(48, 2048, 32, 768), ""),
    "Qwen3_235B_a22B": (_qwen3(94, 4096, 64, 1536), ""),
    "GPT OSS 120B": (GPT_OSS, "as Mixtral: attention without sinks and windows, no biases"),
    "DeepSeekV3": (DEEPSEEK_V3, "without multi-token prediction"),
    "DeepSeekV3 (w/o MTP)": (DEEPSEEK_V3, ""),
}
