"""Runs the campaign that the extras add."""

from collections.abc import Callable

from itercast.capture.base.extensions import with_added

with_added("programs", {}, Callable)["campaign"]()
