"""Hosts: files, times of events, and the usual host where none is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from itercast.microbench.assumptions import leaving_out
from itercast.microbench.hardware.host import (
    REFERENCE,
    HostMachine,
    call_launches,
    check_host_file,
    host_names,
    host_yaml,
    load_host,
    scaled_host,
    usual_host,
)


def host(name: str, slowdown: float, *sources: str) -> HostMachine:
    return scaled_host(name, slowdown, source="by hand", fitted_on=", ".join(sources))


def test_events_are_those_of_the_reference_times_the_slowdown() -> None:
    """A module call takes the reference 3 us, a launch 5; AdamW 100 us and 1.35 for each tensor."""
    slow = replace(host("slow", 2.0), launch_us=7.0)
    assert slow.event_us("module_call") == 6.0
    assert slow.event_us("adamw_step", 100) == pytest.approx(2 * (100 + 135))
    assert slow.event_us("launch") == 7.0  # measured by itself
    assert REFERENCE.event_us("launch") == 5.0


def test_a_call_that_chooses_a_kernel_costs_several_launches() -> None:
    assert call_launches("gemm", "mm") == 2.7
    assert call_launches("norm", "batch") == 4.0
    assert call_launches("norm", "layer") == 1.9
    assert call_launches("elementwise", "add") == 1.0


def test_the_usual_host_is_the_median() -> None:
    found = usual_host([host("a", 1.0, "x"), host("b", 2.0, "y"), host("c", 8.0, "z")])
    assert found.slowdown == pytest.approx(2.0)
    assert found.launch_us == pytest.approx(10.0)
    assert found.sources == ("x", "y", "z")
    assert usual_host([]) == REFERENCE


def test_shipped_hosts_say_what_they_were_fitted_on() -> None:
    assert len(host_names()) >= 6
    for name in host_names():
        found = load_host(name)
        assert found.sources, name
        assert "python -m itercast.eval.public.hosts" in found.source
    usual = load_host()
    slowdowns = sorted(load_host(name).slowdown for name in host_names())
    assert slowdowns[0] < usual.slowdown < slowdowns[-1]


def test_the_usual_host_rests_on_no_source_that_is_left_out() -> None:
    with leaving_out("KernelBench"):
        left = load_host()
    assert "kernelbench" in load_host().sources
    assert left.sources == tuple(s for s in load_host().sources if s != "kernelbench")
    known = [load_host(name) for name in host_names()]
    assert left == usual_host([h for h in known if "kernelbench" not in h.sources])


def test_a_host_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(host_yaml(host("whatever", 1.5, "x")) + "spread: 1.2\n")  # of older versions
    assert load_host(str(path)) == host("mine", 1.5, "x")
    assert check_host_file(path) == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slowdown: 0\nlaunch_us: 5\nsource: s", "above 0, got 0 and 5"),
        ("slowdown: 1\nlaunch_us: fast\nsource: s", "launch_us is a number of at least 0"),
        ("slowdown: 1\nsource: s", "missing keys"),
        ("slowdown: 1\nlaunch_us: 5\nsource: s\nghz: 3", "unknown keys"),
        ("- 1", "expected a mapping"),
    ],
)
def test_a_wrong_host_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_host(str(path))


def test_wrong_names_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown host 'nuc'; known: \['usual', "):
        load_host("nuc")
    for name in ("usual.yaml", "reference.yaml", "host.txt"):
        with pytest.raises(ValueError, match=r"allowed is NAME\.yaml"):
            check_host_file(tmp_path / name)
