"""The program ``itercast``: Ctrl-C is one line also while it still imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from itercast.__main__ import app  # takes some tenths of a second
    except KeyboardInterrupt:
        print("itercast: stopped", file=sys.stderr)
        sys.exit(130)  # as of ``itercast.errors``
    app()
