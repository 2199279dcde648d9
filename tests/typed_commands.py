"""Commands as users type them, run in the process of a test."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from itercast.command_line import app


def typed(*words: str | Path, rc: int = 0, **options: Any) -> Result:
    """What the command ``itercast`` with these words prints; ``rc``: the exit code it must have."""
    done = CliRunner().invoke(app, [*map(str, words)], **options)
    assert done.exit_code == rc, (done.stdout, done.stderr)
    return done


def answer_to(*words: str | Path) -> Any:
    """The JSON object that a command prints last."""
    return json.loads(typed(*words).stdout.splitlines()[-1])
