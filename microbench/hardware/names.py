"""Names of GPUs: as drivers and published tables write them, and as hardware files are named."""

from __future__ import annotations

import re

from itercast.microbench.hardware.spec import gpu_names

# By nvidia-smi, torch and published tables, where they differ from the file's name in more than
# punctuation, case and maker.
NAMES = {
    "Tesla V100-SXM2-16GB": "v100-sxm-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "Tesla V100-DGXS-32GB": "v100-sxm-32gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H100-SXM5-80GB": "h100-sxm-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA H800": "h800-sxm-80gb",
    "NVIDIA H200-SXM5-141GB": "h200-sxm-141gb",
    "NVIDIA GH200 120GB": "gh200",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA B300": "b300-sxm",
    "NVIDIA B300 SXM6 AC": "b300-sxm",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "AMD Instinct MI100": "mi100",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI250": "mi250",
    "AMD Instinct MI300X": "mi300x",
}


def _plain(text: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return " ".join(w for w in words if w not in ("nvidia", "tesla", "geforce", "amd"))


KNOWN = {_plain(name): ours for name, ours in NAMES.items()}
KNOWN |= {_plain(name): name for name in gpu_names()}


def gpu_named(text: str) -> str | None:
    """The name of a device's hardware file, given any of its names; None without a file."""
    return KNOWN.get(_plain(text))
