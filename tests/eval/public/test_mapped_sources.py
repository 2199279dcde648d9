"""What the mappings that ship make of a few lines in each source's format; all numbers made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints, Imported

LIGER = "kernel_name,kernel_provider,kernel_operation_mode,metric_unit,x_name,x_value,y_value_50,"
LIGER += "y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,liger_version\n"
SDPA = "backend,data_type,attn_mask,batch_size,q_seqlen,kv_seqlen,num_q_heads,num_kv_heads,"
SDPA += "head_dim_qk,head_dim_vo,profile_pass,deterministic_bwd,num_iterations,success,gpu_name,"
SDPA += "cudnn_backend_version,"
MIOPEN = "c,h,w,fh,fw,k,oh,ow,n,pad_h,pad_w,stride_h,stride_w,dil_h,dil_w,bias,layout,dtype,"
MIOPEN += "direction,group,solver,time_ms\n"


def liger(kernel: str, provider: str, mode: str, x: list[object], **sizes: object) -> str:
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
CASES = yaml.safe_load(Path(__file__).with_name("mapped_sources.yaml").read_text())


def content(case: dict[str, Any]) -> str | bytes:
    """The file of a case."""
    if "parquet" in case:
        return parquet(**case["parquet"])
    if "liger" in case:
        return liger(**case["liger"])
    return str({"sdpa": SDPA, "miopen": MIOPEN}.get(case.get("head", ""), "") + case["text"])


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case['source']}-{case['family']}-{at}" for at, case in enumerate(CASES)]
)
def test_a_line_in_the_source_s_format(tmp_path: Path, case: dict[str, Any]) -> None:
    """The first row; where several rules take a line, the first rule's."""
    found = imported(tmp_path, case["source"], case["file"], content(case))
    row = found.rows[case["family"]].iloc[0].to_dict()
    for key, value in case["row"].items():
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
