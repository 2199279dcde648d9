"""Stacks: names and releases of software, and the attention kernels they take."""

import pytest

from itercast.compose.graph.attention_kernels import KERNELS
from itercast.learners.transfer.source_gpus import pick_stack
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.hardware.stack import (
    USUAL,
    asked_stack,
    known_stacks,
    load_stack,
    pick_version,
    stack_of_row,
)

H100, A100 = load_gpu("h100-sxm-80gb"), load_gpu("a100-sxm-80gb")


@pytest.mark.parametrize(
    ("stated", "known"),
    [
        ("torch-2.1.0+cu121 cudnn-8902", "torch-2.1"),  # the newest that is not newer
        ("torch-2.5.0+cu124", "torch-2.5.0"),
        ("torch-2.5.1", "torch-2.5.1"),
        ("torch-2.13", "torch-2.11"),
        ("torch-1.10", "torch-1.13"),  # all are newer
        ("torch", "torch-2.11"),
        ("torch-2025-03-24", "torch-2.5.1"),  # a nightly build: what was out by then
        ("torch-2024 nightly", "torch-2.5.1"),
        ("torch-2023-12-31", "torch-2.1"),
        ("torch-2021-01-01", "torch-1.13"),
        ("vllm-0.24.0", "vllm"),
        ("Megatron Bridge / Megatron-Core", "megatron-core"),
        ("trt-llm", "trtllm"),
    ],
)
def test_a_release_is_the_newest_known_one_that_is_not_newer(stated: str, known: str) -> None:
    assert load_stack(stated).name == known
    assert asked_stack(stated) == stated


def test_unknown_software_is_refused_when_asked_and_usual_in_a_row() -> None:
    with pytest.raises(ValueError, match=r"unknown stack .tensorflow-2.1.; known: .*torch-2\.11"):
        load_stack("tensorflow-2.1")
    assert stack_of_row("tensorflow-2.1").name == USUAL
    assert [asked_stack(row) for row in ("tensorflow-2.1", "", None, float("nan"))] == [""] * 4


def test_every_stack_names_a_known_kernel_on_every_gpu() -> None:
    gpus = [load_gpu(name) for name in gpu_names() if name != "cpu"]
    for stack in known_stacks().values():
        assert {stack.attention_on(gpu) for gpu in gpus} <= set(KERNELS), stack.name
        assert stack.source


def test_the_release_decides_the_attention_kernel() -> None:
    """On Hopper flash 2 from torch 2.2 on, cuDNN today; on Ampere flash 2 in both."""
    kernels = {name: load_stack(name).attention_on(H100) for name in ("torch-2.2", USUAL, "vllm")}
    assert kernels == {"torch-2.2": "flash-2", USUAL: "cudnn", "vllm": "flash-3"}
    assert {load_stack(name).attention_on(A100) for name in kernels} == {"flash-2"}


def test_rows_of_the_wanted_release_else_of_similar_software() -> None:
    rows = ["torch-2.1.0", "torch-2.9.1", "vllm-0.14.0", "sglang-0.5.10"]
    assert pick_version(rows[:2], "torch-2.4") == "torch-2.1.0"
    assert pick_version(rows[:2], "torch-1.13") == "torch-2.1.0"
    assert pick_stack(rows, "torch-2.11") == "torch-2.9.1"
    assert pick_stack(rows, "torch") == "torch-2.9.1"
    assert pick_stack(rows, "sglang") == "sglang-0.5.10"
    assert pick_stack(rows, "trtllm") == "vllm-0.14.0"  # similar to it
    assert pick_stack(rows, "megatron-core") == "torch-2.9.1"
    assert pick_stack(rows[2:], "torch-2.11") == ""
    assert pick_stack(rows, "") == ""
