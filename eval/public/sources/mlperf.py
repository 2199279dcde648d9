"""Imports step times of MLPerf Training's results: those whose model and plan can be stated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from itercast.eval.public.sources.models import (
    BERT,
    BERT_VOCABULARY,
    RESNET50,
    model_of,
    transformer,
)
from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.names import gpu_named, unknown_gpu
from itercast.microbench.hardware.node import USUAL_GPUS_PER_NODE, node_named
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    number,
    refuse,
    text_of,
    whole,
)
from itercast.microbench.store import Row
from itercast.microbench.yaml_text import facts_of

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
CELLS = "cells.csv.gz"
COLUMNS = ("benchmark", "accelerator", "nodes", "per_node", "global_batch", "grad_accum", "system")
REFUSED: Mapping[str, str] = FACTS["refused"]
OTHER_SOFTWARE = re.compile("tinygrad|paddle", re.IGNORECASE)  # kernels and precision of its own
RECOMMENDERS = {"dlrm": "dlrm-mlperf", "dlrm_dcnv2": "dlrm-dcnv2"}  # cases, by benchmark
IMAGES = 1281167  # of ImageNet's training set, an epoch of ResNet
BERT_LENGTH = assumed(__file__, "bert_length")
PRECISION = assumed(__file__, "precision")
SYSTEMS = assumed(__file__, "systems")
DLRM_SOFTWARE = assumed(__file__, "dlrm_software")
ENGINE = assumed(__file__, "engine")


MODELS: Mapping[str, Mapping[str, str | int]] = {
    "bert": {  # for pre-training, every sample at the mean length
        "hf_config": transformer(
            "BertForPreTraining", "bert", BERT["large"], BERT_VOCABULARY, positions=512
        ),
        "optimizer": "lamb",
        "attn": "sdpa",
        "seq": BERT_LENGTH,
    },
    "resnet": {
        "hf_config": RESNET50,
        "optimizer": "sgd",
        "attn": "eager",
        "memory_format": "nhwc",
    },
    "llama31_8b": {
        "hf_config": str(model_of({"model": "llama31_8b", "seq_len_tokens": "8192"}).hf_config),
        "optimizer": "adamw_fused",
        "attn": "sdpa",
        "seq": 8192,
    },
    **{
        name: {"case": case, "builder": "case", "optimizer": "sgd", "attn": "sdpa"}
        for name, case in RECOMMENDERS.items()
    },
}


def read(path: Path) -> Imported:
    """Read the table of medians by system and benchmark."""
    file = path / CELLS if path.is_dir() else path
    if not file.is_file():
        raise refuse(path, "a folder of MLPerf results", CELLS)
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(file, (*COLUMNS, "step_ms_from_throughput", "epoch_ms_median"))
    collector.iterations(file, frame, _row)
    return collector.done()


def _row(given: Mapping[str, str]) -> Row:
    """Builds one row of the dataset; ValueError says what a row cannot express."""
    benchmark = _benchmark(given)
    gpu, doubts = _gpu(given["accelerator"])
    plan, dp = _plan(given)
    batch = whole(given["global_batch"])
    if not batch or batch % dp:
        raise ValueError("global batch is not a multiple of dp")
    kinds = PRECISION[benchmark]
    if benchmark in RECOMMENDERS:
        doubts = [*doubts, "sharding of tables not stated, greedy assumed"]
        plan = f"{plan},shard=greedy" if dp > 1 else plan
    if dp > whole(given["per_node"]) and "node=" not in plan:
        doubts = [*doubts, "network not known, the default of forecasts assumed"]
    return {
        "op": "train_step",
        "gpu": gpu,
        "timer": "with_launch",
        # A framework is often a list of all containers of a submission: no stack of one row.
        "stack": DLRM_SOFTWARE if benchmark in RECOMMENDERS else "",
        "framework": given.get("framework", ""),
        "dtype": kinds.get(load_gpu(gpu).architecture, kinds["other"]),
        "amp": False,
        "time_us": _step_ms(given, batch) * 1e3,
        "case": benchmark,
        "builder": "hf",
        **MODELS[benchmark],
        "mode": "train",
        "plan": plan,
        "batch": batch // dp,
        "loss": "default",
        "engine": ENGINE,
        "compile": False,
        "source": ABOUT.source,
        "system": f"{given.get('submitter', '')} {given['system']}",
        "version": given.get("version", ""),
        "world_size": dp,
        "ranks_per_node": whole(given["per_node"]),
        "doubts": "; ".join(doubts),
    }


def _benchmark(given: Mapping[str, str]) -> str:
    """The benchmark of a row; ValueError where its model or its software cannot be said."""
    benchmark = given["benchmark"]
    if benchmark in REFUSED:
        raise ValueError(f"{benchmark}: {REFUSED[benchmark]}")
    if benchmark not in PRECISION:
        raise ValueError(f"unknown benchmark: {text_of(benchmark)[:40]!r}")
    if found := OTHER_SOFTWARE.search(given.get("framework", "")):
        raise ValueError(f"software is not known: {found[0]}")
    return benchmark


def _step_ms(given: Mapping[str, str], batch: int) -> float:
    """A step by the logged throughput, or by the time of an epoch of ImageNet."""
    if stated := number(given["step_ms_from_throughput"]):
        return stated
    epoch_ms = number(given["epoch_ms_median"]) if given["benchmark"] == "resnet" else 0.0
    if not epoch_ms:
        raise ValueError(f"{given['benchmark']}: throughput is not logged")
    return epoch_ms * batch / IMAGES


def _gpu(accelerator: str) -> tuple[str, list[str]]:
    """Returns a GPU's name, and a note where its power limit is not the usual one."""
    plain = re.sub(r" *(CTS|\(\d+W\))$", "", accelerator)
    found = gpu_named(plain)
    if found is None:
        raise ValueError(unknown_gpu(text_of(accelerator)))
    return found, ["custom cooling and power limit"] if accelerator.endswith("CTS") else []


def _plan(given: Mapping[str, str]) -> tuple[str, int]:
    """Return a submission's plan as text, and its dp: data parallelism over all of its GPUs.

    ValueError where the number of GPUs is not stated, or the links between them are not known.
    """
    nodes, each = (whole(given[name]) for name in ("nodes", "per_node"))
    if not nodes or not each:
        raise ValueError("number of GPUs is not stated")
    dp, accumulate = nodes * each, whole(given["grad_accum"]) or 1
    parts = [f"dp={dp}"] if dp > 1 else []
    if accumulate > 1:
        parts.append(f"accumulate={accumulate}")
    dgx = re.search(r"dgx[-_ ]?([a-z]\d+)", given["system"].lower())
    named = next((known for name, known in SYSTEMS.items() if name in given["system"]), "")
    node = node_named(f"dgx-{dgx[1]}") if dgx else named
    if node and each == USUAL_GPUS_PER_NODE:
        parts.append(f"node={node}")
    elif each > USUAL_GPUS_PER_NODE or (nodes > 1 and each < USUAL_GPUS_PER_NODE):
        raise ValueError(f"hosts of {each} GPUs, whose links are not known")
    return ",".join(parts), dp
