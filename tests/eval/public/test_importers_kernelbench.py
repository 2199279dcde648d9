"""Timings of small modules with the modules' texts, which are read and never executed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from public_data import PUBLIC, needs_public

from itercast.eval.public.readers import read_source
from itercast.eval.public.sources import kernelbench
from itercast.eval.public.sources.kernelbench import OTHER_SHAPES, dtype_of
from itercast.eval.public.sources.problem import problem
from itercast.microbench.importers.base import Hints, Imported

RELU = """class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.rand(4, 4)]
"""
LINE = "H/baseline_time_torch.json,19_ReLU.py,0.025,Tesla T4,abc\n"


def imported(folder: Path, *lines: str, archive: bytes | None = None) -> Imported:
    """Timings with an archive of one problem, imported."""
    head = "file,problem,mean_ms,hardware,problems_tree\n"
    (folder / "timing_all_history.csv.gz").write_text(head + "".join(lines))
    path = folder / "problems-abc.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        member = tarfile.TarInfo("KernelBench/level1/19_ReLU.py")
        member.size = len(RELU)
        made.addfile(member, io.BytesIO(RELU.encode()))
    if archive is not None:
        path.write_bytes(archive)
    return read_source("kernelbench", folder, Hints())


def test_a_timing_is_a_forward_of_a_problem(tmp_path: Path) -> None:
    (row,) = imported(tmp_path, LINE).rows["iteration"].to_dict("records")
    expected = {"time_us": 25.0, "gpu": "t4", "engine": "eager", "mode": "infer", "dtype": "fp32"}
    assert {name: row[name] for name in expected} == expected
    assert row["problem_source"] == RELU


@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        ("cudagraphs", "eager+graph"),
        ("inductor_default", "compile"),
        ("inductor_max-autotune-no-cudagraphs", "compile"),
        ("inductor_max-autotune", "compile+graph"),
        ("inductor_reduce-overhead", "compile+graph"),
    ],
)
def test_modes_of_compilation_are_engines(tmp_path: Path, mode: str, engine: str) -> None:
    line = LINE.replace("time_torch.json", f"time_torch_compile_{mode}.json")
    assert imported(tmp_path, line).rows["iteration"]["engine"].tolist() == [engine]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("Tesla T4", "Abacus"), "unknown gpu"),
        (("torch.json", "torch_compile_tvm.json"), "compiled in a way that"),
        (("H/baseline_time_torch.json", OTHER_SHAPES[0]), "timed with other shapes"),
        (("19_ReLU", "20_ReLU"), "problem is not in its archive"),
        ((",abc", ",abd"), "problem is not in its archive"),
        (("0.025", "-1"), "time is not a positive number"),
    ],
)
def test_other_rows_are_counted(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    found = imported(tmp_path, LINE, LINE.replace(*change))
    assert len(found.rows["iteration"]) == 1
    ((said, count),) = found.dropped.items()
    assert said.startswith(reason)
    assert count == 1


@pytest.mark.parametrize("archive", [b"", b"PK", b"\x1f\x8b\x08" + bytes(40)])
def test_a_broken_archive_is_counted(tmp_path: Path, archive: bytes) -> None:
    found = imported(tmp_path, LINE, archive=archive)
    assert not found.rows
    assert any("not an archive" in reason for reason in found.dropped)


def test_convolutions_are_in_tf32_and_products_are_not() -> None:
    assert dtype_of("self.a = nn.ConvTranspose2d(1, 1)") == "tf32"
    assert dtype_of("torch.matmul(a, b)") == "fp32"
    assert dtype_of("torch.rand(2, dtype=torch.float16)") == "fp16"


@needs_public("kernelbench")
def test_every_published_problem_can_be_read() -> None:
    """Each has a module and inputs; on fake tensors, as some inputs take gigabytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    texts = set(kernelbench.read(PUBLIC / "kernelbench").rows["iteration"]["problem_source"])
    assert len(texts) >= 100
    with FakeTensorMode():
        for text in sorted(texts):
            module, inputs = problem(text)
            assert module.forward(*inputs) is not None
