"""Files of hardware: each loads, numbers agree with each other, hosts and software are known."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from itercast.capture.base.assumptions import leaving_out
from itercast.capture.plan import ParallelPlan
from itercast.compose.target import find_node
from itercast.extras.calibration.host_fit import check_host_file, host_yaml, scaled_host
from itercast.extras.published.sources.device_names import (
    form_assumed,
    link_of,
    node_of,
    unknown_gpu,
)
from itercast.extras.schedulers.table import throughput_table
from itercast.microbench.hardware.host import (
    REFERENCE,
    HostMachine,
    host_names,
    load_host,
    usual_host,
)
from itercast.microbench.hardware.names import USUAL, gpu_named
from itercast.microbench.hardware.node import Node, load_node, node_named, node_names
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY, HERE, gpu_names, load_gpu

SHIPPED = [name for name in gpu_names() if name != "cpu"]
FACTS = [*(HERE / f"{name}.yaml" for name in SHIPPED), *HERE.glob("nodes/*.yaml")]
CORES_PER_SM = {
    "pascal": 128,
    "volta": 64,
    "turing": 64,
    "cdna": 128,
    "cdna2": 128,
    "cdna3": 128,
    "cdna4": 128,
}
CORES_PER_SM_OF = dict.fromkeys([n for n in SHIPPED if n.startswith(("a100", "a30", "p100"))], 64)
GOOD = "sm_count: 2\nclock_hz: 1e9\npeak_flops_per_s: {fp32: 1e12}\nhbm_bytes_per_s: 1e11\n"
GOOD_NODE = "gpu: t4\ngpus_per_node: 4\ntopology: pcie\n"
GOOD_HOST = "slowdown: 1\nlaunch_us: 5\nsource: s\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_numbers_of_a_gpu_agree_with_each_other(name: str) -> None:
    """fp32: 2 x cores per SM x SMs x clock, within 15 %; matrix cores double it on AMD.

    Narrower dtypes are never slower; sizes are in bytes and watts.
    """
    gpu = load_gpu(name)
    cores = CORES_PER_SM_OF.get(name) or CORES_PER_SM.get(gpu.architecture, 128)
    peaks = gpu.peak_flops_per_s
    assert peaks["fp32"] == pytest.approx(2 * cores * gpu.sm_count * gpu.clock_hz, rel=0.15)
    chain = [peaks[d] for d in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") if d in peaks]
    assert chain == sorted(chain)
    assert gpu.name == name
    assert 5e9 < gpu.hbm_bytes < 4e11
    assert 1e11 < gpu.hbm_bytes_per_s < 1e13
    assert 2e6 <= gpu.l2_bytes <= 2e8
    assert 50 < gpu.power_w <= 1400
    assert gpu.link_bytes_per_s == 0 or 5e10 <= gpu.link_bytes_per_s <= 9e11
    assert 1e10 < gpu.pcie_bytes_per_s < 2e11


@pytest.mark.parametrize("name", SHIPPED)
def test_achieved_rates_are_stated_of_both_dtypes_of_16_bits_or_of_none(name: str) -> None:
    """They run on the same cores: a rate of one alone would tell GPUs apart that are alike."""
    gpu = load_gpu(name)
    stated = set(gpu.achieved_flops_per_s)
    assert not stated or stated >= {"fp16", "bf16"} & set(gpu.peak_flops_per_s)


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
    gpu, *others = map(load_gpu, node.gpus)
    assert (node.link_bytes_per_s == 0) == (node.topology == "pcie")
    assert node.link_bytes_per_s <= gpu.link_bytes_per_s
    assert {one.link_bytes_per_s for one in others} <= {gpu.link_bytes_per_s}
    assert gpu.hbm_bytes not in {one.hbm_bytes for one in others}
    assert node.network_bytes_per_s <= 1e11
    assert node.domain in (1, 2, node.gpus_per_node, 72)


def test_a_node_takes_its_gpu_in_each_size_of_memory() -> None:
    """320 and 640 GB were sold as DGX A100, 128 and 256 GB as DGX-1; each cloud's has one."""
    for name, gpus in (
        ("dgx-a100", ("a100-sxm-80gb", "a100-sxm-40gb")),
        ("dgx-1-v100", ("v100-sxm-32gb", "v100-sxm-16gb")),
        ("aws-p4d", ("a100-sxm-40gb",)),
    ):
        assert load_node(name).gpus == gpus
        found = [find_node(ParallelPlan(dp=16, node=name), load_gpu(gpu)) for gpu in gpus]
        assert [node and node.gpu for node in found] == list(gpus)
    with pytest.raises(ValueError, match="holds a100-sxm-40gb, not a100-sxm-80gb"):
        find_node(ParallelPlan(dp=16, node="aws-p4d"), load_gpu("a100-sxm-80gb"))
    table = throughput_table(
        "mlp-s", ["a100-sxm-40gb", "a100-sxm-80gb"], [16], [4], nodes=["dgx-a100", "aws-p4d"]
    )
    assert [cell.plan for cell in table] == ["dp=16,node=aws-p4d", "dp=16,node=dgx-a100"]


def test_domains_count_gpus_behind_one_fast_link() -> None:
    """A bridge joins two: between four some hop goes over PCIe; a box may lack it."""
    domains = {"dgx-h100": 8, "gb200-nvl72": 72, "a100-pairwise": 2, "l40s-pcie": 1}
    assert {name: load_node(name).domain for name in domains} == domains
    assert load_node("aws-p4d").network_bytes_per_s == 400e9 / 8 / 8  # 400 Gb/s for 8 GPUs
    assert Node(name="x", gpu="t4", gpus_per_node=1, topology="pairwise").domain == 1
    asked = [("a100-pairwise", 2), ("a100-pairwise", 4), ("l40s-pcie", 2), ("dgx-h100", 2)]
    links = [load_node(name).link_among(ranks) for name, ranks in (*asked, ("gb200-nvl72", 72))]
    assert links == ["pairwise", "bridged", "pcie", "nvlink", "nvlink"]
    usual = {name: load_gpu(name).usual_link for name in ("a100-pcie-80gb", "gb200", "l4")}
    assert usual == {"a100-pcie-80gb": "pcie", "gb200": "nvlink", "l4": "pcie"}


def test_files_of_ones_own(tmp_path: Path) -> None:
    """Numbers without a sign are numbers too: YAML 1.1 reads 1e9 as text."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.clock_hz, gpu.sm_count, gpu.peak("fp32")) == ("mine", 1e9, 2, 1e12)
    path.write_text(host_yaml(host("whatever", 1.5, "x")) + "spread: 1.2\n")  # of older versions
    assert load_host(str(path)) == host("mine", 1.5, "x")
    assert check_host_file(path) == "mine"
    for name in ("usual.yaml", "reference.yaml", "host.txt"):
        with pytest.raises(ValueError, match=r"allowed is NAME\.yaml"):
            check_host_file(tmp_path / name)


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (load_gpu, "[1, 2]", "expected a mapping"),
        (load_gpu, "a: [", "not a readable hardware file"),
        (load_gpu, "\x00\x01", "not a readable hardware file"),
        (load_gpu, GOOD + "colour: green\n", "unknown keys ['colour']"),
        (load_gpu, GOOD + "1: 2\n", "unknown keys ['1']"),
        (load_gpu, GOOD + "power_w: lots\n", "power_w is a number"),
        (load_gpu, GOOD + "power_w: .nan\n", "power_w is a number"),
        (load_gpu, GOOD + "power_w: true\n", "power_w is a number"),
        (load_gpu, GOOD + "power_w: [1]\n", "power_w is a number"),
        (load_gpu, GOOD.replace("sm_count: 2", "sm_count: 2.5"), "sm_count is a whole number"),
        (load_gpu, GOOD.replace("{fp32: 1e12}", "fast"), "peak_flops_per_s maps names to numbers"),
        (load_gpu, GOOD.replace("1e12", "-1"), "peak_flops_per_s.fp32 is a number"),
        (load_gpu, GOOD.replace("{fp32: 1e12}", "{}"), "peak_flops_per_s needs a positive number"),
        (load_gpu, GOOD + "vendor: 3\n", "vendor is text"),
        (load_gpu, "[" * 5000, "not a readable hardware file"),
        (load_node, "gpu: t4\n", "missing keys ['gpus_per_node', 'topology']"),
        (load_node, GOOD_NODE.replace("pcie", "star"), "topology 'star'; allowed:"),
        (load_node, GOOD_NODE.replace("4\n", "0\n"), "gpus_per_node must be at least 1"),
        (load_node, GOOD_NODE + "nics: -1\n", "nics is a number of at least 0"),
        (load_node, "- 1", "expected a mapping"),
        (load_host, GOOD_HOST.replace("1", "0"), "above 0, got 0 and 5"),
        (load_host, GOOD_HOST.replace("5", "fast"), "launch_us is a number of at least 0"),
        (load_host, GOOD_HOST.replace("launch_us: 5\n", ""), "missing keys"),
        (load_host, GOOD_HOST + "ghz: 3", "unknown keys"),
        (load_host, "- 1", "expected a mapping"),
    ],
)
def test_a_malformed_file_is_one_line(
    tmp_path: Path, load: Callable[[str], object], text: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_names_list_the_known() -> None:
    every = "h100-nvl, h100-pcie-80gb, h100-sxm-80gb, h100-sxm-96gb"
    for load, message in (
        (lambda: load_gpu("h1000"), "unknown gpu 'h1000'; known: .*h100-nvl"),
        (lambda: load_gpu("h100"), rf"unknown gpu 'h100'; known: {every}; all \d+:"),
        (lambda: load_node("dgx-0"), r"unknown node 'dgx-0'; known: dgx-.*; all \d+: "),
        (lambda: load_host("nuc"), r"unknown host 'nuc'; known: [^,]+, [^,]+, [^,]+; all \d+: "),
    ):
        with pytest.raises(ValueError, match=message):
            load()
    assert unknown_gpu("NVIDIA L41") == "unknown gpu: 'NVIDIA L41'; known: l4, l40"
    assert unknown_gpu("Abacus") == "unknown gpu: 'Abacus'"


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
        ("NVIDIA H100-SXM5-80GB", "h100-sxm-80gb"),
        ("B300", "b300-sxm"),
        ("RTX_4090", "rtx-4090"),
        ("H100", "h100-sxm-80gb"),  # in three forms: the usual one
        ("A100 PCIe", "a100-pcie-80gb"),
        ("A6000", "rtx-a6000"),
        ("rtx3090", "rtx-3090"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200-sxm"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("gfx942130", "mi300x"),  # 304 compute units in hex
        ("a100_40", "a100-sxm-40gb"),
        ("h100_pairwise_nvlink", "h100-nvl"),  # a node names its GPU
        ("p4d.24xlarge", "a100-sxm-40gb"),
        ("NVIDIA H100-SXM5-64GB", None),  # no such memory in a file
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("RTX 4090 Laptop GPU", None),
        ("L40", "l40"),
        ("MI325X", "mi325x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("gfx950100", "mi355x"),  # 256 compute units in hex
        ("Quadro RTX 5000", None),
        ("", None),
    ],
)
def test_device_names_of_others_are_ours(theirs: str, ours: str | None) -> None:
    assert gpu_named(theirs) == ours


def test_nodes_are_found_in_any_spelling() -> None:
    ours = {"DGX-H100": "dgx-h100", "DGX B300": "dgx-b300", "dgx_a100": "dgx-a100"}
    ours |= {"DGX-GB200": "gb200-nvl72", "GB300-NVL72": "gb300-nvl72"}
    assert {name: node_named(name) for name in ours} == ours
    assert [node_named(name) for name in ("DGX-9", "")] == [None, None]


def test_a_name_that_several_files_fit_says_which_one_was_taken() -> None:
    assert {file for files in USUAL.values() for file in files} <= set(SHIPPED)
    assert form_assumed("A100 80GB") == "SXM assumed"
    assert form_assumed("A100 SXM") == "a100-sxm-80gb assumed"
    assert form_assumed("NVIDIA A100 80GB PCIe") == form_assumed("A40") == ""


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


def host(name: str, slowdown: float, *sources: str) -> HostMachine:
    return scaled_host(name, slowdown, source="by hand", fitted_on=", ".join(sources))


def test_events_are_those_of_the_reference_times_the_slowdown() -> None:
    """A module call takes the reference 3 us, a launch 5; AdamW 100 us and 1.35 for each tensor."""
    slow = replace(host("slow", 2.0), launch_us=7.0)
    assert slow.event_us("module_call") == 6.0
    assert slow.event_us("adamw_step", 100) == pytest.approx(2 * (100 + 135))
    assert slow.event_us("launch") == 7.0  # measured by itself
    assert REFERENCE.event_us("launch") == 5.0


def test_the_usual_host_is_the_median() -> None:
    """Of hosts in whole; of two, one with a fast Python and one with fast launches, the slower."""
    found = usual_host([host("a", 1.0, "x"), host("b", 2.0, "y"), host("c", 8.0, "z")])
    assert found.slowdown == pytest.approx(2.0)
    assert found.launch_us == pytest.approx(10.0)
    assert found.sources == ("x", "y", "z")
    two = [replace(host("d", 1.2, "x"), launch_us=6.0), replace(host("e", 0.8, "y"), launch_us=9.0)]
    assert (usual_host(two).slowdown, usual_host(two).launch_us) == (0.8, 9.0)
    assert usual_host([]) == REFERENCE


def test_the_usual_host_rests_on_no_source_that_is_left_out() -> None:
    """Hosts that ship say what they were fitted on."""
    known = [load_host(name) for name in host_names()]
    assert len(known) >= 6 and all(h.sources for h in known)
    commands = ("python -m itercast.extras.published.fits.hosts", "itercast calibrate")
    assert all(h.source.startswith(commands) for h in known)
    with leaving_out("KernelBench"):
        left = load_host()
    assert "kernelbench" in load_host().sources
    assert left.sources == tuple(s for s in load_host().sources if s != "kernelbench")
    assert left == usual_host([h for h in known if h.gpus and "kernelbench" not in h.sources])
    assert "megatron-lm" not in load_host().sources  # its tests wait for the GPU at every step


def test_the_usual_host_of_a_generation_of_gpus_is_the_median_of_those_beside_them() -> None:
    """Hosts of H100s are twice as fast as those of A100s; else the nearest generation counts."""
    with leaving_out("itercast"):
        assert load_host("usual", "hopper").slowdown == load_host("together-h100").slowdown
    assert load_host("usual", "ampere").slowdown > 2 * load_host("usual", "hopper").slowdown
    assert COMPUTE_CAPABILITY["blackwell-ultra"] == (10, 3)
    assert load_host("usual", "blackwell-ultra") == load_host("usual", "hopper")
    assert load_host("usual", "volta") == load_host("usual", "turing")
    assert load_host("usual", "cdna3") == load_host()
