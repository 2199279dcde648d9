"""Host: the machine that runs Python and launches kernels, by what its events and launches take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from itercast.capture.base.assumptions import assumed, is_among, left_out
from itercast.capture.base.close_names import unknown
from itercast.capture.base.yaml_text import made_of, read_mapping
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY

HERE = Path(__file__).parent / "hosts"
USUAL = "usual"  # the host of a GPU where none is named

# Of the reference host, whose ``slowdown`` is 1.
EVENT_US: Mapping[str, float] = assumed(__file__, "event_us")
EVENT_US_PER_TENSOR: Mapping[str, float] = assumed(__file__, "event_us_per_tensor")
LAUNCH_EVENT: float = assumed(__file__, "launch_event")
WARM_CALL: float = assumed(__file__, "warm_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMachine:
    """Speed of a host as two measured numbers, and what they were measured on.

    - ``slowdown``: time of a Python or autograd event over that of the reference host (assumption
      ``host.event_us``).
    - ``launch_us``: the host's time of one PyTorch call that launches one pointwise kernel,
      dispatcher and driver together.
    - ``source``: what was measured, and by which command the numbers were found.
    - ``gpus``: generations of the GPUs beside it, separated by commas; empty where it is no usual
      host, as under tests that wait for the GPU at every step.
    - ``fitted_on``: sources of measured rows, separated by commas.
    """

    name: str
    slowdown: float
    launch_us: float
    cpu: str = ""
    source: str
    gpus: str = ""
    fitted_on: str = ""

    def __post_init__(self) -> None:
        if min(self.slowdown, self.launch_us) <= 0:
            raise ValueError(
                f"{self.name}: slowdown and launch_us are above 0, got {self.slowdown:g} and "
                f"{self.launch_us:g}"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of the rows that its numbers were fitted on."""
        return _parts(self.fitted_on)

    @property
    def generations(self) -> tuple[str, ...]:
        """Generations of the GPUs beside it."""
        return _parts(self.gpus)

    def event_us(self, event: str, tensors: int = 1) -> float:
        """Host time in us of one event; ``tensors``: length of the list, for events over lists.

        slowdown * (EVENT_US + EVENT_US_PER_TENSOR * tensors); for "launch", ``launch_us``.
        """
        if event == "launch":
            return self.launch_us
        more_us = EVENT_US_PER_TENSOR.get(event, 0.0) * tensors
        return self.slowdown * (EVENT_US[event] + more_us)


REFERENCE = HostMachine(
    name="reference",
    slowdown=1.0,
    launch_us=EVENT_US["launch"],
    source="the host of the assumed table host.event_us",
)


def load_host(name_or_path: str = USUAL, generation: str = "") -> HostMachine:
    """Load a host by its name in microbench/hardware/hosts, or from a YAML file.

    "usual" is the median of the shipped hosts with GPUs of this generation, or of the nearest one
    to it: newer GPUs are sold with faster hosts. Of a GPU without CUDA it is the median of all.
    Hosts fitted on a source that an evaluation holds out do not count
    (``itercast.capture.base.assumptions.leaving_out``).
    """
    path = Path(name_or_path)
    if name_or_path == USUAL:
        out = left_out()
        hosts = [h for h in shipped_hosts() if h.gpus and not is_among(out, h.sources)]
        return usual_host(_beside(generation, hosts))
    if path.suffix not in {".yaml", ".yml"}:
        path = HERE / f"{name_or_path}.yaml"
        if name_or_path not in host_names():
            raise unknown("host", name_or_path, [USUAL, *host_names()])
    values = {"name": path.stem, **read_mapping(path, "host file")}
    values.pop("spread", None)  # of files that versions before 0.6 wrote; nothing uses it
    return made_of(HostMachine, values, str(path))


def _beside(generation: str, hosts: Sequence[HostMachine]) -> Sequence[HostMachine]:
    """The hosts whose GPUs are nearest in compute capability to a generation; all if unknown."""
    cuda = [h for h in hosts if set(h.generations) & set(COMPUTE_CAPABILITY)]
    if generation not in COMPUTE_CAPABILITY or not cuda:
        return hosts
    numbers = {name: 10 * major + minor for name, (major, minor) in COMPUTE_CAPABILITY.items()}

    def distance(host: HostMachine) -> int:
        """Difference of compute capability (80 for 8.0) to the nearest of the host's GPUs."""
        of_host = [numbers[name] for name in host.generations if name in numbers]
        return min(abs(numbers[generation] - number) for number in of_host)

    nearest = min(map(distance, cuda))
    return [h for h in cuda if distance(h) == nearest]


@cache
def shipped_hosts() -> tuple[HostMachine, ...]:
    """The hosts that ship with the project."""
    return tuple(load_host(name) for name in host_names())


def host_names() -> list[str]:
    """Names of the hosts that ship with the project."""
    return sorted(p.stem for p in HERE.glob("*.yaml"))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def usual_host(hosts: Sequence[HostMachine]) -> HostMachine:
    """The host of median speed; of an even number, the slower of the middle two.

    Speed is the time of as many events and launches as take the reference host equally long. The
    slower of the two fitted better on iterations of an H200 in datasets/gpu, a third machine.
    """
    if not hosts:
        return REFERENCE
    by_speed = sorted(hosts, key=lambda host: host.slowdown + host.launch_us / EVENT_US["launch"])
    return replace(
        by_speed[len(hosts) // 2],
        name=USUAL,
        cpu="",
        gpus="",
        source=f"median of the hosts {', '.join(host.name for host in hosts)}",
        fitted_on=", ".join(sorted({source for host in hosts for source in host.sources})),
    )
