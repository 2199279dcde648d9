"""Runs that are queued on a device, which runs asynchronously to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[], object]
Events = tuple[Any, Any]  # before a run and after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that was queued between two events.

    ``host_us``: host time of the call that queued it. ``starved``: the device had passed the first
    event before the host queued the second one, so it may have waited for the host in between.
    """

    events: Events
    host_us: float
    starved: bool
