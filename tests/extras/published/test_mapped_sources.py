"""What importers make of a few lines in each source's format; all numbers made up."""

import csv
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from itercast.capture.plan import ParallelPlan
from itercast.eval.compare import stated_rows, step_of
from itercast.extras.imports.base import Hints, Imported
from itercast.extras.published.readers import read_source

LIGER = "kernel_name,kernel_provider,kernel_operation_mode,metric_unit,x_name,x_value,y_value_50,"
LIGER += "y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,liger_version\n"
SDPA = "backend,data_type,attn_mask,batch_size,q_seqlen,kv_seqlen,num_q_heads,num_kv_heads,"
SDPA += "head_dim_qk,head_dim_vo,profile_pass,deterministic_bwd,num_iterations,success,gpu_name,"
SDPA += "cudnn_backend_version,"
MIOPEN = "c,h,w,fh,fw,k,oh,ow,n,pad_h,pad_w,stride_h,stride_w,dil_h,dil_w,bias,layout,dtype,"
MIOPEN += "direction,group,solver,time_ms\n"
AIC = {"framework": "VLLM", "version": "0.24.0", "kernel_source": "k", "latency": 0.25}
HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "mapped_sources.yaml").read_text())
REFUSED = yaml.safe_load((HERE / "refused_rows.yaml").read_text())
REASONS = [(case, reason) for case in REFUSED for reason in case["changes"]]


def liger(kernel: str, provider: str, mode: str, x: list[object], **sizes: object) -> str:
    """One line of Liger's table: 0.5 ms on an H100, the other sizes as JSON."""
    config = json.dumps(sizes).replace('"', '""')
    line = f'{kernel},{provider},{mode},ms,{x[0]},{x[1]},0.5,0.4,0.7,"{config}"'
    return f"{LIGER}{line},NVIDIA H100 80GB HBM3,0.6.0\n"


def parquet(**columns: object) -> bytes:
    """A table of one row as a Parquet file packed by zstd."""
    packed = io.BytesIO()
    pd.DataFrame({k: [v] for k, v in columns.items()}).to_parquet(packed, compression="zstd")
    return packed.getvalue()


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """Lines as CSV; a column that a line lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)))
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def content(case: Mapping[str, Any]) -> str | bytes:
    """The file of a case."""
    if "parquet" in case:
        return parquet(**case["parquet"])
    if "liger" in case:
        return liger(**case["liger"])
    if "lines" in case:
        return table(case["lines"])
    return str({"sdpa": SDPA, "miopen": MIOPEN}.get(case.get("head", ""), "") + case["text"])


def put(path: Path, content: str | bytes) -> None:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def imported(folder: Path, case: Mapping[str, Any]) -> Imported:
    """One file of a source, where upstream has it, with what upstream has beside it."""
    put(folder / case["file"], content(case))
    if "flags" in case:  # of Megatron, by the number of a line
        texts = {str(n): yaml.safe_dump({"MODEL_ARGS": one}) for n, one in enumerate(case["flags"])}
        put(folder / "model_configs.json.gz", json.dumps(texts))
    if "archive" in case:  # of KernelBench's problems
        with tarfile.open(folder / "problems-4299434ec7f5.tar.gz", "w:gz") as made:
            for name, text in case["archive"].items():
                member = tarfile.TarInfo(f"KernelBench/level1/{name}")
                member.size = len(text)
                made.addfile(member, io.BytesIO(text.encode()))
    return read_source(case["source"], folder, Hints())


def holds(row: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """A row has these values; ``parts`` are of its model's configuration."""
    for key, value in facts.items():
        if key == "parts":
            holds(json.loads(row["hf_config"]), value)
        else:
            assert row[key] == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case['source']}-{case['family']}-{at}" for at, case in enumerate(CASES)]
)
def test_lines_in_the_source_s_format(tmp_path: Path, case: dict[str, Any]) -> None:
    """``row``: the first row, of several rules the first rule's; ``rows``: all of them in order."""
    found = imported(tmp_path, case)
    rows = found.rows[case["family"]].to_dict("records")
    if "rows" in case:
        rows = sorted(rows, key=lambda row: int(row["origin"].rpartition(":")[2]))
        assert len(rows) == len(case["rows"])
    for row, facts in zip(rows, case.get("rows") or [case["row"]], strict=False):
        holds(row, facts)
        if "plan" in row:
            assert ParallelPlan.parse(row["plan"]).world_size == row["world_size"]
    assert case.get("dropped") in (None, found.dropped)


@pytest.mark.parametrize(
    ("case", "reason"), REASONS, ids=[f"{case['source']}-{reason}" for case, reason in REASONS]
)
def test_what_a_line_cannot_say_is_counted_by_its_word(
    tmp_path: Path, case: dict[str, Any], reason: str
) -> None:
    good, changed = case["good"], case["good"] | case["changes"][reason]
    if "line" in case:  # what changes is the flags
        both = {"flags": [good, changed], "lines": [case["line"] | {"cfg": n} for n in (0, 1)]}
    else:
        both = {"lines": [good, changed]}
    found = imported(tmp_path, {**case, **both})
    assert len(found.rows["iteration"]) == 1
    assert [(said[: len(reason)], count) for said, count in found.dropped.items()] == [(reason, 1)]


@pytest.mark.parametrize("archive", [b"", b"PK", b"\x1f\x8b\x08" + bytes(40)])
def test_a_broken_archive_is_counted(tmp_path: Path, archive: bytes) -> None:
    case = next(case for case in REFUSED if "archive" in case)
    imported(tmp_path, {**case, "lines": [case["good"]]})
    next(tmp_path.glob("problems-*")).write_bytes(archive)
    found = read_source("kernelbench", tmp_path, Hints())
    assert not found.rows and any("no readable file" in reason for reason in found.dropped)


@pytest.mark.parametrize("configs", ['{"0": "[not: yaml"}', '{"0": "a: 1"}', "{}"])
def test_a_run_without_its_flags_is_counted(tmp_path: Path, configs: str) -> None:
    case = next(case for case in CASES if case["source"] == "megatron-lm")
    imported(tmp_path, {**case, "lines": case["lines"][:1]})
    put(tmp_path / "model_configs.json.gz", configs)
    found = read_source("megatron-lm", tmp_path, Hints())
    assert not found.rows and found.dropped == {"number of layers is not stated": 1}
    put(tmp_path / "model_configs.json.gz", "[")
    found = read_source("megatron-lm", tmp_path, Hints())
    assert not found.rows and found.dropped == {"file unreadable: not JSON": 1}


def test_a_row_of_peft_is_captured_with_as_many_trained_numbers_as_stated(tmp_path: Path) -> None:
    """Three of 28 layers are captured: queries 3072 x 3072, values 3072 x 1024, rank 8."""
    pytest.importorskip("transformers")
    case = next(case for case in CASES if case["source"] == "peft")
    row, _ = stated_rows(imported(tmp_path, case).rows["iteration"]).to_dict("records")
    step = step_of({str(k): v for k, v in row.items()}, ParallelPlan())
    trained = sum(p.shape[0] * p.shape[1] for p in step.parameters if p.ready_after >= 0)
    assert trained == 3 * 8 * (3072 + 3072 + 3072 + 1024)
    assert trained // 3 * 28 == float(row["num_params_trained"])


def test_deepseek_s_attention_is_no_single_kernel(tmp_path: Path) -> None:
    """A module of unnamed kernels, 0.3 ms for one token, would teach attention a wrong floor."""
    path = tmp_path / "systems/data/b200_sxm/mla/sglang/0.5.9/context_mla_perf.parquet"
    put(path, parquet(**AIC, num_heads=4, batch_size=1, isl=64))
    other = "systems/data/h100_sxm/quantize/vllm/0.24.0/scale_matrix_perf.parquet"
    case = {"source": "aiconfigurator-more", "file": other}
    found = imported(tmp_path, {**case, "parquet": {**AIC, "m": 32, "k": 64, "quant_dtype": "fp8"}})
    assert list(found.rows) == ["elementwise"]
    assert any("several kernels" in reason for reason in found.dropped)
