"""Traces of torch.profiler: kernels join the ops that launched them, steps become iterations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from itercast.extras.imports.base import Hints, Imported
from itercast.extras.kineto.ops import ATTENTION, describe
from itercast.extras.published.readers import read_source
from itercast.microbench.timing.traces import parse


def op(name: str, at: float, last: float, external: int, **args: Any) -> dict[str, Any]:
    """An op on the host."""
    args = {"External id": external, **args}
    common = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    return {**common, "name": name, "ts": at, "dur": last, "args": args}


def launched(
    correlation: int, at: float, last: float, external: int | None = None
) -> list[dict[str, Any]]:
    """A launch on the host at ``at`` and its kernel, which runs for ``last`` us later on."""
    ids = {"correlation": correlation} | ({} if external is None else {"External id": external})
    common = {"ph": "X", "args": ids}
    call = {**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
    kernel = {**common, "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": at + 1000}
    return [{**call, "ts": at, "dur": 1}, {**kernel, "dur": last}]


def trace(folder: Path, events: Sequence[Any], name: str = "trace.json") -> Imported:
    """Events as the trace of an H100, imported."""
    device = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    found = {"deviceProperties": device, "traceEvents": events}
    (folder / name).write_text(json.dumps(found))
    return read_source("kineto", folder, Hints())


MM = {"Input Dims": [[4, 8], [8, 16]], "Input type": ["float", "float"]}
MM |= {"Input Strides": [[8, 1], [16, 1]], "Concrete Inputs": ["", ""]}


def test_a_kernel_belongs_to_the_outermost_op_that_a_family_describes(tmp_path: Path) -> None:
    """matmul holds mm, mm holds fill_: both kernels are mm's, 7 + 5 us; the median of two calls."""
    #  matmul |=============|      matmul |=============|
    #    mm    |==========|          mm    |==========|
    #     launch 7  fill_ 5           launch 9  fill_ 5
    events = []
    for call, kernel in enumerate((7.0, 9.0)):
        at, ids = 100.0 * call, 10 * call
        events += [op("aten::matmul", at, 90, ids + 1), op("aten::mm", at + 5, 80, ids + 2, **MM)]
        events += [op("aten::fill_", at + 50, 10, ids + 3)]
        events += [*launched(ids + 1, at + 10, kernel), *launched(ids + 2, at + 55, 5.0)]
    found = trace(tmp_path, events)
    (row,) = found.rows["gemm"].to_dict("records")
    expected: dict[str, Any] = {"op": "mm", "m": 4, "n": 16, "k": 8, "layout": "nn"}
    expected |= {"time_us": 13.0, "samples": 2, "gpu": "h100-sxm-80gb", "timer": "device"}
    expected |= {"origin": "trace.json", "dtype": "fp32"}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {}


def test_ids_join_a_kernel_where_time_does_not(tmp_path: Path) -> None:
    """A launch far from its op names it by external id; one that nobody owns is counted."""
    events = [op("aten::mm", 0, 5, 2, **MM), *launched(1, 500, 7.0, external=2)]
    found = trace(tmp_path, [*events, *launched(2, 700, 3.0)])
    assert list(found.rows["gemm"]["time_us"]) == [7.0]
    assert found.dropped == {"kernel without an op": 1}


def test_an_op_of_no_family_and_an_op_without_shapes_are_counted_by_name(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 5, 1), *launched(1, 1, 7.0), op("my::op", 10, 5, 2)]
    found = trace(tmp_path, [*events, *launched(2, 11, 7.0)])
    assert found.rows == {}
    assert found.dropped == {
        "op without shapes, record_shapes was off: aten::mm": 1,
        "op not described by a family: my::op": 1,
    }


def test_steps_become_one_measured_iteration(tmp_path: Path) -> None:
    """Median of three steps; an op of a backward pass says that it trains."""
    steps = [(0, 100), (100, 120), (220, 110)]
    events = [op(f"ProfilerStep#{i}", at, last, i) for i, (at, last) in enumerate(steps, start=7)]
    events += [op("AddmmBackward0", 20, 10, 50)]
    (row,) = trace(tmp_path, events, "gpt.json").rows["iteration"].to_dict("records")
    expected: dict[str, Any] = {"op": "train_step", "time_us": 110.0, "samples": 3, "case": "gpt"}
    assert {name: row[name] for name in expected} == expected


def test_a_gpu_that_is_not_ours_needs_a_flag(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 5, 2, **MM), *launched(1, 1, 7.0)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [{"name": "Abacus"}], "traceEvents": events}))
    found = read_source("kineto", path, Hints())
    assert found.dropped == {"trace of an unknown GPU 'Abacus': pass the GPU": 1}
    assert set(read_source("kineto", path, Hints(gpu="t4")).rows["gemm"]["gpu"]) == {"t4"}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_real_trace_joins_and_names_what_models_call(tmp_path: Path) -> None:
    """A training step recorded here; every leaf op gets a kernel of 7 us, as a GPU would show."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16))
    path = tmp_path / "real.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            profiler.step()
    real = parse(json.loads(path.read_text()))
    kernels: list[dict[str, Any]] = []
    for span in real.ops:
        inner = (o.start_us for o in real.ops if o is not span and o.thread == span.thread)
        end = span.start_us + span.duration_us
        if span.name.startswith("aten::") and not any(span.start_us <= s < end for s in inner):
            kernels += launched(len(kernels) + 1, span.start_us, 7.0, span.external)
    found = trace(tmp_path, [*json.loads(path.read_text())["traceEvents"], *kernels])
    gemm = found.rows["gemm"]
    forward = gemm[gemm["op"] == "addmm"].to_dict("records")
    assert [(r["m"], r["n"], r["k"], r["layout"]) for r in forward] == [(4, 16, 8, "nt")]
    weight = gemm[(gemm["op"] == "mm") & (gemm["m"] == 16)].to_dict("records")
    assert [(r["n"], r["k"], r["layout"]) for r in weight] == [(8, 4, "tn")]
    assert {"layer", "layer_backward"} <= set(found.rows["norm"]["op"])
    assert {"relu", "threshold_backward"} <= set(found.rows["elementwise"]["op"])
    assert list(found.rows["iteration"]["samples"]) == [2]


@pytest.mark.parametrize("name", ATTENTION)
def test_arguments_of_fused_attention_stand_where_torch_says(name: str) -> None:
    """Positions against torch's own schema; (batch, length, heads, dim) in a trace."""
    names = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    query, bias, dropout, causal = ATTENTION[name]
    assert names[query : query + 3] == ["query", "key", "value"]
    assert (names[bias] == "bias") == (bias >= 0)
    assert names[dropout] == "dropout_p"
    assert names[causal] in ("is_causal", "custom_mask_type")
    shapes: list[list[int]] = [[] for _ in names]
    kinds, values = ["" for _ in names], ["" for _ in names]
    for at in (*range(query), *range(query, query + 3)):
        shapes[at], kinds[at] = [2, 128, 8, 64], "c10::BFloat16"
    values[dropout], values[causal] = "0.0", "True" if names[causal] == "is_causal" else "1"
    found = describe(
        f"aten::{name}", {"Input Dims": shapes, "Input type": kinds, "Concrete Inputs": values}
    )
    assert found is not None
    family, point = found
    assert (family, point.op) == ("attention", "backward" if query else "forward")
    assert (point.batch, point.q_len, point.heads, point.head_dim) == (2, 128, 8, 64)
    assert (point.causal, point.masked, point.dropout, point.dtype) == (True, False, False, "bf16")


def test_tables_of_ops_are_described_by_shapes(tmp_path: Path) -> None:
    """A product and a norm of one call each; copies from the host and unknown ops are counted."""
    head = "device,op,input_dims,input_types,calls,kernel_us_median,kernel_names,concrete\n"
    gpu, half = "NVIDIA H100 80GB HBM3", '""c10::BFloat16""'
    lines = [
        f'{gpu},aten::mm,"[[64, 32], [32, 16]]","[{half}, {half}]",48,4.5,xmma,',
        f'{gpu},aten::copy_,"[[64], [64]]","[{half}, {half}]",1,4.5,Memcpy HtoD,',
        f"{gpu},fbgemm::lookup,[],[],1,4.5,k,",
        f'{gpu},aten::mm,"[[64, 32], []]","[{half}, """"]",1,4.5,k,',
        f'Tesla Z9,aten::mm,"[[64, 32], [32, 16]]","[{half}, {half}]",1,4.5,k,',
    ]
    (tmp_path / "ops_x.csv").write_text(head + "\n".join(lines) + "\n")
    found = read_source("kineto-traces", tmp_path, Hints())
    (row,) = found.rows["gemm"].to_dict("records")
    assert (row["m"], row["n"], row["k"], row["dtype"]) == (64, 16, 32, "bf16")
    assert (row["time_us"], row["samples"], row["gpu"]) == (4.5, 48, "h100-sxm-80gb")
    assert found.dropped == {
        "copy between host and device": 1,
        "op not described by a family: fbgemm::lookup": 1,
        "op whose shapes or scalars are missing: aten::mm": 1,
        "unknown gpu: 'Tesla Z9'": 1,
    }


def test_kernels_say_whether_a_batch_norm_of_cudnn_trains(tmp_path: Path) -> None:
    """The flag is no tensor: without it a forward's kernel decides; a backward always trains."""
    head = "device,op,input_dims,input_types,calls,kernel_us_median,kernel_names,concrete\n"
    x, c, number = "[2, 4, 3, 3]", "[4]", '""float""'
    forward = f'"[{x}, {c}, {c}, {c}, {c}, []]","[{", ".join([number] * 5)}, ""Bool""]"'
    shapes = f"[{x}, {x}, {c}, {c}, {c}, {c}, {c}, [], [0]]"
    types = ", ".join([*[number] * 7, '""Double""', '""unsigned char""'])
    lines = [
        f"Tesla V100-SXM2-32GB,aten::cudnn_batch_norm,{forward},6,9.5,cudnn::bn_fw_tr_1C11,",
        f"Tesla V100-SXM2-32GB,aten::cudnn_batch_norm,{forward},6,4.5,cudnn::bn_fw_inf_1C11,",
        f'Tesla V100-SXM2-32GB,aten::cudnn_batch_norm_backward,"{shapes}","[{types}]",6,19,bn_bw,',
    ]
    (tmp_path / "ops_x.csv").write_text(head + "\n".join(lines) + "\n")
    rows = read_source("kineto-traces", tmp_path, Hints()).rows["norm"]
    assert list(rows["op"]) == ["batch", "batch_eval", "batch_backward"]
    assert (rows[["rows", "channels", "cols"]] == [2, 4, 9]).all(axis=None)


def test_kernels_say_whether_operands_are_contiguous(tmp_path: Path) -> None:
    """A transposed copy runs the kernel of strided operands; a sum with one row is broadcast."""
    head = "device,op,input_dims,input_types,calls,kernel_us_median,kernel_names,concrete\n"
    gpu, half = "NVIDIA H100 80GB HBM3", '""c10::BFloat16""'
    strided = "void at::native::elementwise_kernel<128, 4"
    two = f'"[{half}, {half}]",1,4.5'
    lines = [
        f'{gpu},aten::copy_,"[[64, 8], [64, 8]]",{two},"{strided}",',
        f'{gpu},aten::copy_,"[[64, 4], [64, 4]]",{two},"void at::native::vectorized_element",',
        f'{gpu},aten::add,"[[64, 8], [8]]",{two},"{strided}",',
    ]
    (tmp_path / "ops_x.csv").write_text(head + "\n".join(lines) + "\n")
    found = read_source("kineto-traces", tmp_path, Hints())
    rows = found.rows["elementwise"]
    assert [*zip(rows["op"], rows["form"], rows["numel"], strict=True)] == [
        ("copy_", "same", 256),
        ("add", "row", 512),
    ]
    assert found.dropped == {"kernel of operands in strides that the table does not state": 1}


def test_a_result_passed_as_out_is_no_input() -> None:
    """A ReLU written as clamp_min(x, 0, out=y) reads one tensor."""
    args = {"Input Dims": [[64, 8], [], [64, 8]], "Input type": ["float", "Int", "float"]}
    found = describe("aten::clamp_min", args)
    assert found is not None and (found[1].tensors, found[1].form) == (1, "scalar")


def test_a_sum_whose_axes_are_not_logged_is_left_out() -> None:
    """Over two arguments it is of the whole tensor; over four, axes are the second."""
    whole = {"Input Dims": [[64, 32], []], "Input type": ["float", ""]}
    found = describe("aten::sum", whole)
    assert found is not None and (found[1].outer, found[1].size) == (1, 2048)
    some = {"Input Dims": [[64, 32], [], [], []], "Input type": ["float", "", "", ""]}
    assert describe("aten::sum", some) is None
