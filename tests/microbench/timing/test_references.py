"""Reference times of a chunk, on a device whose host needs 30 us to queue a sample."""

from itercast.microbench.timing.cuda_device import Launched
from itercast.microbench.timing.references import SAMPLES, _median_us


class SlowHost:
    """A sample starves unless the device sleeps for 30 us; it then seems to take 9 us, not 1."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def sample(self, run: object, cold: bool, host_us: float) -> Launched:
        self.asked.append(host_us)
        return Launched(events=(None, host_us < 30), host_us=1.0, starved=host_us < 30)

    def elapsed_us(self, launched: Launched) -> float:
        return 9.0 if launched.events[1] else 1.0

    def wait(self) -> None:
        pass


def test_event_overhead_is_not_timed_while_the_device_waits() -> None:
    """Sleeps of 0, 10, 20, then 40 us: three samples starve and do not count."""
    device = SlowHost()
    assert _median_us(device, lambda: None, 0.0) == 1.0  # type: ignore[arg-type]
    assert device.asked == [0.0, 10.0, 20.0, *[40.0] * SAMPLES]
