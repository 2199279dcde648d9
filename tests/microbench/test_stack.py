"""Rules that are switched off, YAML that is read in C, releases of software."""

from pathlib import Path

import pytest
import yaml

from itercast.capture.base import yaml_text
from itercast.capture.base.assumptions import FILE, assumed
from itercast.capture.base.switches import is_on, switching_off
from itercast.capture.base.yaml_text import load_yaml
from itercast.compose.graph.attention_kernels import KERNELS, kernel_ratio
from itercast.compose.pricing.power_limit import sustained_flops_per_s
from itercast.learners.transfer.source_gpus import pick_stack
from itercast.microbench.hardware.spec import HERE, gpu_names, load_gpu
from itercast.microbench.hardware.stack import (
    USUAL,
    asked_stack,
    known_stacks,
    load_stack,
    pick_version,
    stack_of_row,
)
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.attention import Attention

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
        ("Megatron Bridge / Megatron-Core", "nemo"),
        ("Megatron-Core", "megatron-core"),
        ("deepspeed", "deepspeed-0.12.4"),
        ("deepspeed-0.12.3", "deepspeed-0.10"),
        ("deepspeed-0.3.15", "deepspeed-0.3"),
        ("trt-llm", "trtllm"),
    ],
)
def test_a_release_is_the_newest_known_one_that_is_not_newer(stated: str, known: str) -> None:
    assert load_stack(stated).name == known
    assert asked_stack(stated) == stated


def test_unknown_software_is_refused_when_asked_and_usual_in_a_row() -> None:
    with pytest.raises(ValueError, match=r"unknown stack .tensorflow-2.1.; known: .*torch-2\.11"):
        load_stack("tensorflow-2.1")
    with pytest.raises(
        ValueError, match=r"unknown stack .torch-9\.9.; known: torch-2\.11, torch-2\."
    ):
        load_stack("torch-9.9")  # the newest ones
    with pytest.raises(ValueError, match=r"unknown stack .megatroncore.; known: megatron-core"):
        load_stack("megatroncore")  # holds Megatron, as a part of a word
    assert stack_of_row("tensorflow-2.1").name == USUAL
    assert [asked_stack(row) for row in ("tensorflow-2.1", "", None, float("nan"))] == [""] * 4


def test_every_stack_names_a_known_kernel_on_every_gpu() -> None:
    gpus = [load_gpu(name) for name in gpu_names() if name != "cpu"]
    for stack in known_stacks().values():
        assert {stack.attention_on(gpu) for gpu in gpus} <= set(KERNELS), stack.name
        assert stack.source


def test_the_file_of_stacks_is_read_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "SlowLoader", None)
    assert "torch-2.11" in known_stacks.__wrapped__()


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


def test_a_rule_is_off_inside_alone() -> None:
    found = [is_on("power_limit")]
    with switching_off("power_limit"):
        found += [is_on("power_limit"), is_on("cache_reuse")]
    assert [*found, is_on("power_limit")] == [True, False, True, True]
    with pytest.raises(ValueError, match=r"unknown rule 'latency'; known: \['attention_kernels'"):
        is_on("latency")


def test_rules_of_whole_steps_are_switched_off() -> None:
    """No power limit: no rate is too high; every attention kernel as fast as the measured one."""
    h100, family = load_gpu("h100-pcie-80gb"), families()["attention"]
    heads = {"batch": 8, "heads": 32, "kv_heads": 32, "head_dim": 128, "causal": True}
    p = Attention(op="forward", q_len=4096, kv_len=4096, dtype="bf16", **heads)
    rows = {("h100-sxm-80gb", "torch-2.9"): 1.0}
    gpus = {"h100-sxm-80gb": load_gpu("h100-sxm-80gb"), h100.name: h100}
    assert sustained_flops_per_s(h100, "bf16") < 1e15
    assert kernel_ratio("flash-1", family, p, h100, rows, gpus) != 1.0
    with switching_off("power_limit"):
        assert sustained_flops_per_s(h100, "bf16") == float("inf")
    with switching_off("attention_kernels"):
        assert kernel_ratio("flash-1", family, p, h100, rows, gpus) == 1.0


def test_a_number_switched_off_takes_its_value_without(tmp_path: Path) -> None:
    """4, or 2 where it is switched off, or left out as checked on a source."""
    entry = "{value: 4, unit: us, source: a test, holds: here, checked_on: [timm], without: 2}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    found = []
    for name in ("host.launch_us", "host.other", ""):
        with switching_off(name):
            found.append(assumed(str(tmp_path / "host.py"), "launch_us"))
    assert found == [2, 4, 4]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "-\t", "? "])
@pytest.mark.parametrize("depth", [1_000, 1_000_000])
def test_a_text_nested_too_deep_is_an_exception(opening: str, depth: int) -> None:
    with pytest.raises((RecursionError, yaml.YAMLError)):
        load_yaml(opening * depth)


def test_values_are_those_of_safe_load() -> None:
    texts = [path.read_text() for path in sorted(HERE.rglob("*.yaml"))]
    texts += [
        "a: [1, 2.5, null, no, '1e3', 1.0e3, 2026-01-01, 0x10]",
        "",
        "&x [1]",
        "- é\n- |\n  b\n",
    ]
    for text in texts:
        assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.getcwd []",
        "- !!bool x\n",
        "!!timestamp x",
        "!!int ''",
        "!!float x4",
    ],
)
def test_a_tag_makes_no_object_and_fits_its_value_or_is_an_error_of_yaml(text: str) -> None:
    """PyYAML itself raises KeyError, AttributeError, IndexError and ValueError."""
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


@pytest.mark.parametrize("filler", [0, 100])  # nested values of the second are read in Python
def test_a_key_written_twice_is_named(filler: int) -> None:
    more = "".join(f"x{i}: {{}}\n" for i in range(filler))
    with pytest.raises(yaml.YAMLError, match="key 'b' is written twice, again in line 3"):
        load_yaml(f"a:\n  b: 1\n  b: 2\n{more}")
    assert load_yaml(f"a: {{b: 1}}\nc: {{b: 2}}\n{more}")["c"] == {"b": 2}
    merged = load_yaml("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n")["b"]
    assert merged == {"x": 3, "y": 2}  # a merged key may be overridden
