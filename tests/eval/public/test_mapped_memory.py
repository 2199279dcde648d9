"""Mappings of sources that timed training's memory-bound ops; all numbers are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints

SAILOR = "gpu,dtype,model,micro_batch,tp,algo,op,fwd_us,bwd_us\n"
TRIOSIM = "model,stage,op,input_shapes,output_shapes,cuda_us\n"
NSYS = "gpu,op,sizes,kernel,us_median\n"
STEPS = "repo,plan,mode,ms,optimizer\n"
TRINIX = "page,gpu,section,config,parameters,what,implementation,ms\n"
FACTS = "op,pass,dtype,shape,gpu,us,how,url\n"
A100 = "NVIDIA A100-SXM4-40GB"
CASES: list[tuple[str, str, str, str, list[dict[str, Any]]]] = [
    # 2 * 2048 tokens; the forward of 90 us waits for the host
    (
        "sailor",
        "ops.csv",
        SAILOR + "A100-40,fp16,OPT-30,2,4,0,enc-1st-layernorm,90,500\n",
        "norm",
        [{"op": "layer_backward", "rows": 4096, "cols": 7168, "time_us": 500.0}],
    ),
    # 2 * 16 / 4 heads of 2048 * 2048 scores
    (
        "sailor",
        "ops.csv",
        SAILOR + "V100-16,fp32,OPT-350,2,4,1,enc-attention-dropout,300,200\n",
        "random",
        [
            {"op": "native_dropout", "size": 8 * 2048**2, "gpu": "v100-sxm-16gb"},
            {"op": "native_dropout_backward", "dtype": "fp32", "time_us": 200.0},
        ],
    ),
    (
        "triosim",
        "ops.csv",
        TRIOSIM + 'vgg13,backward,ReluBackward0,"x","[2, 3, 4, 5]",40\n',
        "elementwise",
        [{"op": "threshold_backward", "numel": 120, "tensors": 2, "gpu": "h100-sxm-80gb"}],
    ),
    (
        "triosim",
        "ops.csv",
        TRIOSIM + "vgg13,optimizer,aten::_foreach_sqrt,x,x,400\n",
        "optimizer",
        [{"op": "_foreach_sqrt", "tensors": 26, "numel": 133_047_848}],
    ),
    # rows of a softmax written out: 4 * 12 * 512 maxima of 512 scores
    (
        "cs336",
        "nsys_kernels.csv",
        NSYS + f'{A100},aten::max,"[[4, 12, 512, 512], [], []]",reduce,60\n',
        "reduction",
        [{"op": "max", "outer": 4 * 12 * 512, "size": 512, "gpu": "a100-sxm-40gb"}],
    ),
    (
        "cs336",
        "nsys_kernels.csv",
        NSYS + f'{A100},aten::div,"[[4, 12, 512, 512], [4, 12, 512, 1]]",k,80\n',
        "elementwise",
        [{"op": "div", "form": "col", "inner": 512, "numel": 48 * 512 * 512, "tensors": 2}],
    ),
    (
        "cs336",
        "steps.csv",
        STEPS + 'duoan,standard,optimizer,170,"torch.optim.AdamW, foreach default"\n',
        "optimizer",
        [{"op": "foreach_adamw", "numel": 3_406_809_600, "tensors": 291, "time_us": 170e3}],
    ),
    # 16 * 2048 rows
    (
        "trinix",
        "ops.csv",
        TRINIX
        + 'NORMALIZATION,A100-SXM4-80GB,x,"Batch=16, SeqLen=2048, Hidden=64",'
        + ",LayerNorm,PyTorch,0.2\n",
        "norm",
        [{"op": "layer", "rows": 32768, "cols": 64, "dtype": "fp32", "stack": "torch"}],
    ),
    (
        "trinix",
        "ops.csv",
        TRINIX + "OPTIMIZER,A100-SXM4-80GB,Adam Optimizer,x,1B,,Triton,20\n",
        "optimizer",
        [{"op": "_fused_adam_", "numel": 10**9, "stack": "trinix", "time_us": 20e3}],
    ),
    (
        "issue-facts",
        "ops.csv",
        FACTS + 'gelu,backward,fp16,"[64, 512, 512]",H100,50,x,y\n',
        "elementwise",
        [{"op": "gelu_backward", "numel": 2**24, "cache": "cold", "gpu": "h100-sxm-80gb"}],
    ),
    (
        "issue-facts",
        "ops.csv",
        FACTS + 'log_softmax,backward,fp32,"[64, 1000]",H20,50,x,y\n',
        "reduction",
        [{"op": "_log_softmax_backward_data", "outer": 64, "size": 1000, "gpu": "h20"}],
    ),
]


@pytest.mark.parametrize(
    ("source", "name", "content", "family", "expected"),
    CASES,
    ids=[f"{case[0]}-{case[3]}" for case in CASES],
)
def test_a_line_in_the_source_s_format(
    tmp_path: Path,
    source: str,
    name: str,
    content: str,
    family: str,
    expected: list[dict[str, Any]],
) -> None:
    """All rows that a line makes, in the order of the mapping's rules."""
    (tmp_path / name).write_text(content)
    rows = read_source(source, tmp_path, Hints()).rows[family].to_dict("records")
    assert len(rows) == len(expected)
    for row, facts in zip(rows, expected, strict=True):
        assert {key: row[key] for key in facts} == facts
        assert row["timer"] == "device"
