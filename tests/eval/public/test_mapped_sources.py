"""What the mappings that ship make of a few lines in each source's format; all numbers made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints, Imported

LIGER = "kernel_name,kernel_provider,kernel_operation_mode,metric_unit,x_name,x_value,y_value_50,"
LIGER += "y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,liger_version\n"
SDPA = "backend,data_type,attn_mask,batch_size,q_seqlen,kv_seqlen,num_q_heads,num_kv_heads,"
SDPA += "head_dim_qk,head_dim_vo,profile_pass,deterministic_bwd,num_iterations,success,gpu_name,"
SDPA += "cudnn_backend_version,"
MIOPEN = "c,h,w,fh,fw,k,oh,ow,n,pad_h,pad_w,stride_h,stride_w,dil_h,dil_w,bias,layout,dtype,"
MIOPEN += "direction,group,solver,time_ms\n"
BENCH = "DeepBench_NV_V100__Results_FP16_ip_Mixed_math.csv"
SHEET = """Precision,Float

Dense Matrix Multiplication,,M,N,K,A Transpose,B Transpose,,Time (msec),TERAFLOPS
,DeepSpeech,64,16,32,T,N,,0.02,1.5

Convolution
,,W,H,C,N,K ,S (Filter width),R (Filter height),pad_w,pad_h,Horizontal stride,Vertical stride,\
Forward (msec),wrt Inputs (msec),wrt Parameters (msec),,P,Q
,Vision,14,7,3,2,8,5,3,1,0,2,2,0.5,N/A*,0.75,,7,3
Recurrent Layers - LSTM,Source,Hidden Units
,DeepSpeech,512
"""


def liger(kernel: str, provider: str, mode: str, x: tuple[str, object], **sizes: object) -> str:
    """One line of Liger's table: 0.5 ms on an H100, the other sizes as JSON."""
    config = json.dumps(sizes).replace('"', '""')
    line = f'{kernel},{provider},{mode},ms,{x[0]},{x[1]},0.5,0.4,0.7,"{config}"'
    return f"{LIGER}{line},NVIDIA H100 80GB HBM3,0.6.0\n"


def imported(folder: Path, source: str, name: str, content: str | bytes) -> Imported:
    """One file of a source, where upstream has it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_source(source, folder, Hints())


def parquet(**columns: object) -> bytes:
    """A table of one row as a Parquet file packed by zstd."""
    packed = io.BytesIO()
    pd.DataFrame({k: [v] for k, v in columns.items()}).to_parquet(packed, compression="zstd")
    return packed.getvalue()


AIC = {"framework": "VLLM", "version": "0.24.0", "kernel_source": "k", "latency": 0.25}
CASES: list[tuple[str, str, str | bytes, str, dict[str, Any]]] = [
    # ms with its unit as text
    (
        "llmcompass",
        "matmul_A100.csv",
        "64, 128, 32, 0.1900ms, 101.7Tflops\n",
        "gemm",
        {"m": 64, "k": 128, "n": 32, "dtype": "fp16", "time_us": 190.0},
    ),
    # 4096 * 32 elements at 8.192e9/s: 16 us
    (
        "llmcompass",
        "softmax_MI210.csv",
        "4096, 32, 8.192\n",
        "reduction",
        {"op": "_softmax", "outer": 4096, "size": 32, "gpu": "mi210", "time_us": 16.0},
    ),
    (
        "llmcompass",
        "layernorm_A100.csv",
        "4096, 32, 8.192\n",
        "norm",
        {"op": "layer", "rows": 4096, "cols": 32, "time_us": 16.0},
    ),
    ("llmcompass", "gelu_A100.csv", "2048, 0.0512\n", "elementwise", {"time_us": 40.0}),
    # 2 * 64 * 100 * 50 * 4 groups at 2e12/s: 1.28 us
    (
        "deepgemm",
        "gemm.csv",
        "M,N,K,Computation,table,#Groups,M per group,gpu\n"
        ",100,50,2 TFLOPS,(masked layout),4,64,H800\n",
        "gemm",
        {"op": "scaled_mm", "m": 64, "batch": 4, "gpu": "h800-sxm-80gb", "time_us": 1.28},
    ),
    (
        "pipeweave",
        "dataset/gemm_fp8_test.csv",
        "M,N,K,avg_duration,hardware\n96,64,32,11.5,NVIDIA H100\n",
        "gemm",
        {"m": 96, "n": 64, "k": 32, "gpu": "h100-sxm-80gb", "dtype": "fp8", "time_us": 11.5},
    ),
    (
        "pipeweave",
        "dataset/collective/H800/all_reduce.csv",
        "time_stats.all_reduce.median,rank,num_workers,size,collective,devices_per_node\n"
        "0.5,0,8,2048,all_reduce,8\n0.4,1,8,2048,all_reduce,8\n",
        "collective",
        {"op": "all_reduce", "message_bytes": 2048, "time_us": 500.0, "stack": "pipeweave"},
    ),
    # the faster of two tile configurations
    (
        "pipeweave",
        "moe_dse_A40_top3.csv",
        "weight_type,M,E,topk,H,N,avg_duration,sample_count\n"
        "w13,4,8,2,1024,512,7.5,3\nw13,4,8,2,1024,512,7.25,3\n",
        "experts",
        {"op": "gate_up", "tokens": 4, "experts": 8, "hidden": 1024, "time_us": 7.25},
    ),
    # 256 experts by 8 ranks, width 2048 by 2
    (
        "aiconfigurator-more",
        "systems/data/h100_sxm/moe/vllm/0.24.0/moe_perf.parquet",
        parquet(
            **AIC,
            moe_dtype="fp8_block",
            num_tokens=64,
            hidden_size=512,
            inter_size=2048,
            topk=8,
            num_experts=256,
            moe_tp_size=2,
            moe_ep_size=8,
            distribution="power_law_1.2",
        ),
        "experts",
        {"dtype": "fp8", "inner": 1024, "local": 32, "skew": 1.2, "time_us": 250.0}
        | {"stack": "vllm-0.24.0"},
    ),
    (
        "aiconfigurator-more",
        "systems/data/gb200/encoder_attention/vllm/0.24.0/encoder_attention_perf.parquet",
        parquet(**AIC, attn_dtype="bfloat16", batch_size=2, num_heads=4, isl=64, head_dim=72),
        "attention",
        {"causal": False, "heads": 4, "kv_heads": 4, "q_len": 64, "kv_len": 64, "gpu": "gb200"},
    ),
    (
        "aiconfigurator-more",
        "systems/data/h100_sxm/quantize/vllm/0.24.0/scale_matrix_perf.parquet",
        parquet(**AIC, m=32, k=64, quant_dtype="fp8"),
        "elementwise",
        {"op": "fp8_cast", "dtype": "bf16", "numel": 2048, "inner": 2048},
    ),
    # 10 tokens to 8 experts each, 512 numbers of a byte
    (
        "aiconfigurator-more",
        "systems/data/h100_sxm/comm/sglang/0.5/wideep_deepep_normal_perf.parquet",
        parquet(
            kernel_source="deepep",
            node_num=2,
            hidden_size=512,
            num_token=10,
            num_topk=8,
            dispatch_sms=20,
            combine_sms=20,
            dispatch_transmit_us=30.0,
            dispatch_notify_us=2.0,
            combine_transmit_us=50.0,
            combine_notify_us=1.0,
        ),
        "collective",
        {"op": "moe_dispatch", "message_bytes": 40960, "world_size": 16, "time_us": 32.0},
    ),
    (
        "cudnn-frontend",
        "norms/results/gb200/all.csv",
        "norm_type,backend,data_type,N,C,num_iterations,success,fwd_time_ms,bwd_time_ms\n"
        "rms_norm,pytorch,bfloat16,128,64,20,True,0.05,0.125\n",
        "norm",
        {"op": "rms", "rows": 128, "cols": 64, "stack": "torch", "time_us": 50.0},
    ),
    (
        "cudnn-frontend",
        "results/gb200_919_only_cudnn/dsv3.csv",
        f"{SDPA}fwd_time_ms,bwd_time_ms\ncudnn,fp8,top_left,1,64,64,8,8,192,128,both,True,10,True,"
        "NVIDIA GB200,91901.000,0.25,0.5\n",
        "attention",
        {"op": "forward", "head_dim": 160, "causal": True, "stack": "cudnn-9.19.1"},
    ),
    (
        "cudnn-frontend",
        "results/llama3.1/gb200/llama.csv",
        f"{SDPA}time_ms\ncudnn,bfloat16,no_mask,2,64,32,8,2,128,128,bwd,False,10,True,"
        "NVIDIA GB200,92200.000,0.25\n",
        "attention",
        {"op": "backward", "causal": False, "kv_len": 32, "kv_heads": 2, "time_us": 250.0},
    ),
    (
        "cudnn-frontend",
        "artifacts/sdpa_bf16_benchmark_results_NVIDIA_GB200.csv",
        "batch_size,q_seqlen,kv_seqlen,num_q_heads,num_kv_heads,head_dim,is_causal,backend,"
        "forward_time,backward_time\n1,64,64,8,8,128,True,pyt_flash_attention,0.5,0.75\n",
        "attention",
        {"dtype": "bf16", "stack": "flash-attn", "time_us": 500.0},
    ),
    (
        "liger-kernel",
        "all_history.csv",
        liger("layer_norm", "huggingface", "backward", ("N", 64), M=128, dtype="torch.float32"),
        "norm",
        {"op": "layer_backward", "rows": 128, "cols": 64, "stack": "torch", "cache": "cold"}
        | {"time_us": 500.0, "time_us_p20": 400.0, "time_us_p80": 700.0},
    ),
    (
        "liger-kernel",
        "all_history.csv",
        liger(
            "group_norm",
            "liger",
            "forward",
            ("C", 32),
            M=128,
            H=16,
            channels_per_group=4,
            dtype="torch.float32",
        ),
        "norm",
        {"op": "group", "rows": 128, "channels": 32, "cols": 16, "groups": 8, "stack": "liger"},
    ),
    (
        "liger-kernel",
        "all_history.csv",
        liger("cross_entropy", "torchcompile", "full", ("V", 1000), B=8, T=16),
        "iteration",
        {"case": "cross_entropy", "mode": "train", "rows": 128, "cols": 1000, "dtype": "fp32"}
        | {"stack": "inductor", "engine": "compile", "direction": "step"},
    ),
    # heads of 64 / 8 numbers, 8 of queries and 2 of keys
    (
        "liger-kernel",
        "all_history.csv",
        liger(
            "rope",
            "huggingface",
            "forward",
            ("T", 32),
            hidden_size=64,
            num_q_heads=8,
            num_kv_heads=2,
            dtype="torch.bfloat16",
        ),
        "iteration",
        {"case": "rope", "rows": 32, "cols": 80, "mode": "infer", "engine": "eager"},
    ),
    (
        "liger-kernel",
        "all_history.csv",
        liger(
            "geglu",
            "huggingface",
            "forward",
            ("T", 32),
            bsz=2,
            hidden_size=64,
            intermediate_size=96,
            dtype="torch.bfloat16",
        ),
        "iteration",
        {"case": "geglu_mlp", "rows": 64, "cols": 64},
    ),
    (
        "liger-kernel",
        "all_history.csv",
        liger(
            "fused_moe",
            "liger",
            "forward",
            ("T", 32),
            T=None,
            E=8,
            H=64,
            I=96,
            K=2,
            dtype="torch.bfloat16",
        ),
        "experts",
        {"tokens": 32, "experts": 8, "local": 8, "hidden": 64, "inner": 96, "topk": 2},
    ),
    # 16 bytes of 4096 elements at 64e9/s: 1.024 us; many launches queued ahead hold none
    (
        "gpu-benches",
        "small_kernels.csv",
        "gpu,launch,elements,bytes,threads_per_block,gb_per_s\na40,stream,4096,65536,256,64\n",
        "elementwise",
        {"numel": 4096, "timer": "device", "stack": "gpu-benches", "time_us": 1.024},
    ),
    (
        "gpu-benches",
        "small_kernels.csv",
        "gpu,launch,elements,bytes,threads_per_block,gb_per_s\na40,graph,4096,65536,256,64\n"
        "a40,stream,4096,65536,128,64\na40,stream,4096,65536,256,15\na40,pt,4096,65536,256,64\n",
        "elementwise",
        {"op": "mul", "dtype": "fp64", "numel": 4096, "timer": "device", "time_us": 1.024}
        | {"stack": "gpu-benches-graph"},
    ),
    (
        "torchao",
        "grouped_mm_fwd_bwd.csv",
        '"M,N,K,G",bf16_fwd_bwd_us,gpu\n"(1280, 64, 32, 4)",99.5,B200\n',
        "experts",
        {"op": "down_full", "tokens": 1280, "hidden": 64, "inner": 32, "local": 4},
    ),
    # gradient of 8 weights (N, K): sums over the 128 tokens of each expert
    (
        "torchao",
        "blockwise_fp8_kernels.csv",
        "kernel,us,M,N,K,E,shape,kernel_us\nbwd: deepgemm_grouped_mm_wgrad,21,1024,64,32,8,,\n",
        "gemm",
        {"m": 64, "n": 32, "k": 128, "batch": 8, "layout": "tn", "time_us": 21.0},
    ),
    (
        "torchao",
        "blockwise_fp8_kernels.csv",
        "kernel,us,M,N,K,E,shape,kernel_us\nact_quant_lhs,,,,,,128x64,154.5\n",
        "elementwise",
        {"op": "fp8_cast", "numel": 8192, "time_us": 154.5},
    ),
    (
        "miopen",
        "gfx90a68-MI210.csv",
        f"{MIOPEN}3,64,32,5,7,16,64,32,2,2,3,1,1,1,1,0,NCHW,FP16,F,,Fast,0.25\n",
        "conv",
        {"op": "forward", "in_channels": 3, "h": 64, "kernel_h": 5, "kernel_w": 7, "groups": 1}
        | {"out_channels": 16, "padding_w": 3, "gpu": "mi210", "time_us": 250.0},
    ),
    # the output comes first: 16 channels of 32 x 32 from 8 of 63 x 63, in 4 groups
    (
        "miopen",
        "gfx90878-MI100.csv",
        f"{MIOPEN}16,32,32,3,3,8,63,63,2,1,1,2,2,1,1,0,NCHW,FP32,W,_g4,Fast,0.25\n",
        "conv",
        {"op": "backward", "in_channels": 8, "h": 63, "out_channels": 16, "groups": 4, "stride": 2}
        | {"need_input_grad": False, "need_weight_grad": True, "gpu": "mi100"},
    ),
    (
        "aiter",
        "gemm.csv",
        "cu_num,kind,batch,m,n,k,us,lib\n304,a8w8_blockscale,1,64,32,16,7.5,ck\n"
        "304,a8w8,1,64,32,16,7.5,ck\n80,bf16,1,64,32,16,7.5,ck\n",
        "gemm",
        {"op": "scaled_mm", "dtype": "fp8", "gpu": "mi300x", "stack": "aiter-tuned"},
    ),
    (
        "aiter",
        "fused_moe.csv",
        "cu_num,tokens,model_dim,inter_dim,experts,topk,q_dtype_a,q_dtype_w,q_type,us\n"
        "304,4,64,32,9,3,torch.bfloat16,torch.bfloat16,QuantType.No,70.5\n",
        "experts",
        {"op": "layer", "dtype": "bf16", "hidden": 64, "inner": 32, "experts": 9, "time_us": 70.5},
    ),
    # two ranks: half of 14336 columns
    (
        "llmservingsim",
        "perf_models/H100/meta-llama/Llama-3.1-8B/tp2/layers.csv",
        "layer_name,input,kv_cache,tp_size,latency(ns)\nup_proj,5,0,2,2500\nattn,5,0,2,2500\n",
        "gemm",
        {"m": 5, "n": 7168, "k": 4096, "layout": "nt", "time_us": 2.5, "module": "up_proj"},
    ),
    (
        "llmservingsim",
        "perf_models/RTX3090/microsoft/Phi-mini-MoE-instruct/tp1/layers.csv",
        "layer_name,input,kv_cache,tp_size,latency(ns)\ninput_layernorm,5,0,1,2500\n",
        "norm",
        {"op": "layer", "rows": 5, "cols": 4096, "gpu": "rtx-3090", "stack": "torch"},
    ),
    # kernels of eager torch one after the other
    (
        "llmservingsim",
        "perf_models/H100/meta-llama/Llama-3.1-8B/tp2/layers.csv",
        "layer_name,input,kv_cache,tp_size,latency(ns)\nact_fn,5,0,2,4500\n",
        "iteration",
        {"case": "swiglu", "rows": 5, "cols": 7168, "stack": "torch", "engine": "eager"},
    ),
    # column-major C (M, N) = A^T B is row-major (N, M) = B (A^T) with A as a transposed view
    (
        "deepbench",
        BENCH,
        SHEET,
        "gemm",
        {"m": 16, "n": 64, "k": 32, "layout": "nt", "dtype": "fp16", "time_us": 20.0},
    ),
    (
        "deepbench",
        BENCH,
        SHEET,
        "conv",
        {"op": "forward", "h": 7, "w": 14, "kernel_h": 3, "kernel_w": 5, "padding_w": 1}
        | {"batch": 2, "in_channels": 3, "out_channels": 8, "stride": 2, "time_us": 500.0},
    ),
]


@pytest.mark.parametrize(
    ("source", "name", "content", "family", "expected"),
    CASES,
    ids=[f"{case[0]}-{case[3]}-{at}" for at, case in enumerate(CASES)],
)
def test_a_line_in_the_source_s_format(
    tmp_path: Path,
    source: str,
    name: str,
    content: str | bytes,
    family: str,
    expected: dict[str, Any],
) -> None:
    """The first row; where several rules take a line, the first rule's."""
    found = imported(tmp_path, source, name, content)
    row = found.rows[family].iloc[0].to_dict()
    for key, value in expected.items():
        assert row[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_deepseek_s_attention_is_no_single_kernel(tmp_path: Path) -> None:
    """A module of unnamed kernels, 0.3 ms for one token, would teach attention a wrong floor."""
    path = tmp_path / "systems/data/b200_sxm/mla/sglang/0.5.9/context_mla_perf.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(parquet(**AIC, num_heads=4, batch_size=1, isl=64))
    other = "systems/data/h100_sxm/quantize/vllm/0.24.0/scale_matrix_perf.parquet"
    content = parquet(**AIC, m=32, k=64, quant_dtype="fp8")
    found = imported(tmp_path, "aiconfigurator-more", other, content)
    assert list(found.rows) == ["elementwise"]
    assert any("several kernels" in reason for reason in found.dropped)
