"""The program ``itercast``, ``python -m itercast``: Ctrl-C is one line also while it imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from itercast.command_line import app  # takes some tenths of a second
    except KeyboardInterrupt:
        print("itercast: stopped", file=sys.stderr)
        sys.exit(130)  # as of ``itercast.errors``
    app()


if __name__ == "__main__":
    main()
