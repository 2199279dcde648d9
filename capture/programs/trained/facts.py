"""Facts of the model that a script trains, and names of files by which captures are asked for."""

from __future__ import annotations

from dataclasses import dataclass

STOPS = 3  # exit code of a process whose script does not go on
FACTS = "trained.json"
ASKED, ANSWER, REFUSED = ".asked", ".step", ".refused"  # how the names of files end


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Facts of the model that a script trains, in plain values.

    ``batch`` samples and ``seq`` tokens of each (0: not of tokens) are those of a micro-batch, of
    which a step of one process has ``micro``. ``dtype`` is autocast's with ``amp``, else that of
    its parameters; ``parameters``: their number. ``recompute``: "full" where its backward runs
    layers again. ``notes``: what a forecast under a plan leaves out.
    """

    model: str
    batch: int
    seq: int
    micro: int
    dtype: str
    amp: bool
    optimizer: str
    parameters: int
    recompute: str = ""
    notes: tuple[str, ...] = ()
