"""The program ``itercast``, ``python -m itercast``: Ctrl-C is one line also while it starts."""

from __future__ import annotations

import atexit
import gc
import sys

from itercast.capture.base.garbage import without_garbage_collection


def main() -> None:
    """Run the command line."""
    atexit.register(_leave)  # is called last
    try:
        with without_garbage_collection():
            from itercast.command_line import app  # takes some tenths of a second

        asked = [c for c in app.registered_commands if [c.name] == sys.argv[1:2]]
        app.registered_commands = asked or app.registered_commands  # each takes milliseconds
        app()  # builds the command line first; a command that is stopped says so itself
    except KeyboardInterrupt:
        print("itercast: stopped", file=sys.stderr)
        sys.exit(130)  # as of ``itercast.errors``


def _leave() -> None:
    """Spare the last garbage collection, which takes long and which only databases need."""
    if "sqlalchemy" not in sys.modules:
        gc.freeze()


if __name__ == "__main__":
    main()
