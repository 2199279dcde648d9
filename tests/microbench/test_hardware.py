"""Hardware files: each loads, the numbers agree with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from itercast.microbench.hardware.names import (
    USUAL,
    form_assumed,
    gpu_named,
    link_of,
    node_of,
    unknown_gpu,
)
from itercast.microbench.hardware.node import Node, load_node, node_named, node_names
from itercast.microbench.hardware.spec import HERE, gpu_names, load_gpu

FACTS = [
    *(HERE / f"{name}.yaml" for name in gpu_names() if name != "cpu"),
    *HERE.glob("nodes/*.yaml"),
]
SHIPPED = [name for name in gpu_names() if name != "cpu"]
CORES_PER_SM = {"pascal": 128, "volta": 64, "turing": 64, "cdna": 128, "cdna2": 128, "cdna3": 128}
CORES_PER_SM_OF = dict.fromkeys([n for n in SHIPPED if n.startswith(("a100", "a30", "p100"))], 64)
GOOD = "sm_count: 2\nclock_hz: 1e9\npeak_flops_per_s: {fp32: 1e12}\nhbm_bytes_per_s: 1e11\n"
GOOD_NODE = "gpu: t4\ngpus_per_node: 4\ntopology: pcie\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_fp32_peak_is_two_flops_per_core_and_clock(name: str) -> None:
    """2 x cores per SM x SMs x clock, within 15 %; matrix cores double it on AMD."""
    gpu = load_gpu(name)
    cores = CORES_PER_SM_OF.get(name) or CORES_PER_SM.get(gpu.architecture, 128)
    assert gpu.peak_flops_per_s["fp32"] == pytest.approx(
        2 * cores * gpu.sm_count * gpu.clock_hz, rel=0.15
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_narrower_dtypes_are_never_slower(name: str) -> None:
    peaks = load_gpu(name).peak_flops_per_s
    chain = [peaks[d] for d in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") if d in peaks]
    assert chain == sorted(chain)


@pytest.mark.parametrize("name", SHIPPED)
def test_sizes_are_in_bytes_and_watts(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert 5e9 < gpu.hbm_bytes < 4e11
    assert 1e11 < gpu.hbm_bytes_per_s < 1e13
    assert 2e6 <= gpu.l2_bytes <= 2e8
    assert 50 < gpu.power_w <= 1400
    assert gpu.link_bytes_per_s == 0 or 5e10 <= gpu.link_bytes_per_s <= 9e11
    assert 1e10 < gpu.pcie_bytes_per_s < 2e11


def test_numbers_that_tables_often_get_wrong() -> None:
    assert load_gpu("p4").sm_count == 20
    assert load_gpu("l4").sm_count == 58
    h100 = load_gpu("h100-sxm-80gb")
    assert (h100.sm_count, h100.peak("bf16"), h100.link_bytes_per_s) == (132, 989.4e12, 450e9)
    assert load_gpu("a100-sxm-80gb").l2_bytes == 40 * 2**20
    assert load_gpu("rtx-pro-6000").sm_count == 188
    assert load_gpu("mi250").sm_count == 104  # one of two dies


NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?")


def numbers(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Every number below a node of a YAML file; 3e9 counts, which YAML 1.1 reads as text."""
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from numbers(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from numbers(value)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and NUMBER.fullmatch(node.value):
        yield node


@pytest.mark.parametrize("path", FACTS, ids=lambda path: path.stem)
def test_every_number_names_its_source_on_its_line(path: Path) -> None:
    """One of at least six letters: a document, a link, or "assumed:" and as what."""
    text = path.read_text()
    found = list(numbers(yaml.compose(text)))
    assert len(found) >= 4
    for number in found:
        line = text.splitlines()[number.start_mark.line]
        _, _, source = line[number.end_mark.column :].partition("# ")
        assert re.search(r"[A-Za-z].{5}", source), line


@pytest.mark.parametrize("name", node_names())
def test_every_node_loads_and_its_link_fits_its_gpu(name: str) -> None:
    node = load_node(name)
    gpu = load_gpu(node.gpu)
    assert (node.link_bytes_per_s == 0) == (node.topology == "pcie")
    assert node.link_bytes_per_s <= gpu.link_bytes_per_s
    assert node.network_bytes_per_s <= 1e11
    assert node.domain in (1, 2, node.gpus_per_node, 72)


def test_domains_count_gpus_behind_one_fast_link() -> None:
    assert load_node("dgx-h100").domain == 8
    assert load_node("gb200-nvl72").domain == 72
    assert load_node("a100-pairwise").domain == 2
    assert load_node("l40s-pcie").domain == 1
    assert load_node("aws-p4d").network_bytes_per_s == 400e9 / 8 / 8  # 400 Gb/s for 8 GPUs
    single = Node(name="x", gpu="t4", gpus_per_node=1, topology="pairwise")
    assert single.domain == 1


def test_a_bridge_joins_two_gpus_and_a_box_may_lack_it() -> None:
    """Between four of them some hop goes over PCIe; without a node's file so does every hop."""
    pairs = load_node("a100-pairwise")
    assert [pairs.link_among(ranks) for ranks in (2, 4)] == ["pairwise", "bridged"]
    assert [load_node(name).link_among(2) for name in ("l40s-pcie", "dgx-h100")] == [
        "pcie",
        "nvlink",
    ]
    assert load_node("gb200-nvl72").link_among(72) == "nvlink"
    usual = {name: load_gpu(name).usual_link for name in ("a100-pcie-80gb", "gb200", "l4")}
    assert usual == {"a100-pcie-80gb": "pcie", "gb200": "nvlink", "l4": "pcie"}


def test_numbers_without_sign_are_numbers_too(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e9 as text."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.clock_hz, gpu.sm_count, gpu.peak("fp32")) == ("mine", 1e9, 2, 1e12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not a readable hardware file"),
        ("\x00\x01", "not a readable hardware file"),
        (GOOD + "colour: green\n", "unknown keys ['colour']"),
        (GOOD + "1: 2\n", "unknown keys ['1']"),
        (GOOD + "power_w: lots\n", "power_w is a number"),
        (GOOD + "power_w: .nan\n", "power_w is a number"),
        (GOOD + "power_w: true\n", "power_w is a number"),
        (GOOD + "power_w: [1]\n", "power_w is a number"),
        (GOOD.replace("sm_count: 2", "sm_count: 2.5"), "sm_count is a whole number"),
        (GOOD.replace("{fp32: 1e12}", "fast"), "peak_flops_per_s maps names to numbers"),
        (GOOD.replace("1e12", "-1"), "peak_flops_per_s.fp32 is a number"),
        (GOOD.replace("{fp32: 1e12}", "{}"), "peak_flops_per_s needs a positive number"),
        (GOOD + "vendor: 3\n", "vendor is text"),
        ("[" * 5000, "not a readable hardware file"),
    ],
)
def test_a_malformed_gpu_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_gpu(str(path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: t4\n", "missing keys ['gpus_per_node', 'topology']"),
        (GOOD_NODE.replace("pcie", "star"), "topology 'star'; allowed:"),
        (GOOD_NODE.replace("4\n", "0\n"), "gpus_per_node must be at least 1"),
        (GOOD_NODE + "nics: -1\n", "nics is a number of at least 0"),
        ("- 1", "expected a mapping"),
    ],
)
def test_a_malformed_node_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_node(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown gpu 'h1000'; known: .*h100-nvl"):
        load_gpu("h1000")
    every = "h100-nvl, h100-pcie-80gb, h100-sxm-80gb, h100-sxm-96gb"
    with pytest.raises(ValueError, match=rf"unknown gpu 'h100'; known: {every}; all \d+:"):
        load_gpu("h100")
    with pytest.raises(ValueError, match=r"unknown node 'dgx-0'; known: .*dgx-a100"):
        load_node("dgx-0")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA_A100_80GB_PCIe", "a100-pcie-80gb"),
        ("Tesla_V100-PCIE-32GB", "v100-pcie-32gb"),
        ("AMD_Instinct_MI250", "mi250"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("h100-nvl", "h100-nvl"),
        ("H200 NVL", "h200-nvl"),
        ("NVIDIA H100-SXM5-80GB", "h100-sxm-80gb"),
        ("B300", "b300-sxm"),
        ("GB300", "gb300"),
        ("RTX_4090", "rtx-4090"),
        ("H100", "h100-sxm-80gb"),  # in three forms: the usual one
        ("A100 PCIe", "a100-pcie-80gb"),
        ("A6000", "rtx-a6000"),
        ("rtx3090", "rtx-3090"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("h200_sxm", "h200-sxm-141gb"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200-sxm"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("gfx942130", "mi300x"),  # 304 compute units in hex
        ("a100_40", "a100-sxm-40gb"),
        ("h100_pairwise_nvlink", "h100-nvl"),  # a node names its GPU
        ("p4d.24xlarge", "a100-sxm-40gb"),
        ("NVIDIA H100-SXM5-64GB", None),  # no such memory in a file
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("RTX 4090 Laptop GPU", None),
        ("L40", None),
        ("Quadro RTX 5000", None),
        ("", None),
    ],
)
def test_device_names_of_others_are_ours(theirs: str, ours: str | None) -> None:
    assert gpu_named(theirs) == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("DGX-H100", "dgx-h100"),
        ("DGX B300", "dgx-b300"),
        ("dgx_a100", "dgx-a100"),
        ("DGX-GB200", "gb200-nvl72"),
        ("DGX-GB300", "gb300-nvl72"),
        ("GB300-NVL72", "gb300-nvl72"),
        ("DGX-9", None),
        ("", None),
    ],
)
def test_nodes_are_found_in_any_spelling(theirs: str, ours: str | None) -> None:
    assert node_named(theirs) == ours


def test_usual_forms_are_files() -> None:
    assert {file for files in USUAL.values() for file in files} <= set(SHIPPED)


def test_a_name_that_several_files_fit_says_which_one_was_taken() -> None:
    assert form_assumed("A100 80GB") == "SXM assumed"
    assert form_assumed("A100 SXM") == "a100-sxm-80gb assumed"
    assert form_assumed("NVIDIA A100 80GB PCIe") == form_assumed("A40") == ""


def test_a_refused_name_comes_with_those_like_it() -> None:
    assert unknown_gpu("NVIDIA L40") == "unknown gpu: 'NVIDIA L40'; known: a40, l4, l40s"
    assert unknown_gpu("Abacus") == "unknown gpu: 'Abacus'"


@pytest.mark.parametrize(
    ("system", "ranks", "node", "link"),
    [
        ("h200_sxm", 8, "dgx-h200", "nvlink"),
        ("NVIDIA H800", 8, "hgx-h800", "nvlink"),
        ("a40_pairwise_nvlink", 2, "a40-pairwise", "pairwise"),
        ("a40_pairwise_nvlink", 4, "a40-pairwise", "bridged"),
        ("rtx_pro_6000_server", 2, "rtx-pro-6000-pcie", "pcie"),
        ("AMD Instinct MI300X", 2, "", "nvlink"),  # no file of a node
        ("Abacus", 2, "", ""),
    ],
)
def test_systems_have_the_usual_node_of_their_gpu(
    system: str, ranks: int, node: str, link: str
) -> None:
    assert (node_of(system), link_of(system, ranks)) == (node, link)
