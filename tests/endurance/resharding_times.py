"""Times 30 random reshardings over gloo among four ranks, beside their forecasts.

``python tests/endurance/resharding_times.py [BUNDLE]`` (a minute; measures twice). Prints each pair
and the median error, with that of measuring again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

PROGRAMS = Path(__file__).parents[1] / "capture" / "programs"
sys.path.insert(0, str(PROGRAMS))

from reshardings import LARGE, RANKS, pairs, reshard  # noqa: E402

from itercast.capture.programs.capture import capture_program  # noqa: E402
from itercast.compose.programs.forecast import forecast_program  # noqa: E402
from itercast.compose.target import find_target  # noqa: E402


def measured_us() -> list[float]:
    """Time of each resharding on the slowest of four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, str(PROGRAMS / "reshardings.py"), str(out), "times"]
        subprocess.run(command, check=True, capture_output=True)
        return [float(us) for us in json.loads(out.read_text())]


def forecast_us(mesh: tuple[int, ...], before: Any, after: Any, target: Any) -> float:
    """The forecast of one resharding."""

    def program() -> Any:
        dist.init_process_group("gloo")
        return reshard(init_device_mesh("cpu", mesh), before, after, shape=LARGE)

    return forecast_program(capture_program(program, RANKS, [0]), target).iteration_us


def main(bundle: str = "") -> None:
    """Print the table."""
    target = find_target("cpu", "", Path(bundle) if bundle else None)
    first, again = measured_us(), measured_us()
    errors, retests = [], []
    for pair, one, other in zip(pairs(), first, again, strict=True):
        forecast, real = forecast_us(*pair, target), (one * other) ** 0.5
        errors.append(100 * (forecast / real - 1))
        retests.append(100 * abs(other / one - 1))
        told = " -> ".join(",".join(map(str, ends)) for ends in pair[1:])
        print(f"{told}: {real:.0f} us, forecast {forecast:.0f} us, {errors[-1]:+.1f} %", flush=True)
    error, bias = statistics.median(map(abs, errors)), statistics.mean(errors)
    print(
        f"median error {error:.1f} %, bias {bias:+.1f}, retest {statistics.median(retests):.1f} %"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
