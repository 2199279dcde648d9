"""The command line and the public API.

In a checkout the packages ``itercast.microbench``, ``itercast.compose``... are folders beside this
one; in an installed copy they lie inside it. The lines below make both work without an install.
"""

from pathlib import Path

if not (Path(__file__).parent / "microbench").is_dir():
    __path__.append(str(Path(__file__).parent.parent))
