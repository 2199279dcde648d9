"""The program ``itercast``, ``python -m itercast``: Ctrl-C is one line also while it starts."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from itercast.command_line import app  # takes some tenths of a second

        app()  # builds the command line first; a command that is stopped says so itself
    except KeyboardInterrupt:
        print("itercast: stopped", file=sys.stderr)
        sys.exit(130)  # as of ``itercast.errors``


if __name__ == "__main__":
    main()
