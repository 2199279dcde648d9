"""What ``--lora`` says: ``16``, or ``rank=16,layers=all-linear,weights=nf4``."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.base.close_names import unknown

KEYS = ("rank", "layers", "weights", "dtype")
ALL_LINEAR = "all-linear"  # as peft names them: all linear layers but the output head
QUANTISED = ("nf4", "nf4-dq")  # dq: double quantisation, the scales are in 8 bits
DTYPES = ("fp32", "bf16", "fp16")
MAX_RANK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA adapters: their rank, and ``layers``: names, ``all-linear``, or () as peft chooses.

    ``weights``: the format in which frozen linear layers of blocks are stored, "" for the model's
    dtype. ``dtype``: that of the adapters.
    """

    rank: int
    layers: tuple[str, ...] = ()
    weights: str = ""
    dtype: str = "fp32"

    @classmethod
    def parse(cls, text: str | int) -> Adapters | None:
        """Read the text of ``--lora``; None for "" and 0. ValueError names what is not allowed."""
        text = str(text).strip()
        if text in ("", "0", "0.0"):
            return None
        pairs = [part.partition("=") for part in text.split(",")]
        if len(pairs) == 1 and not pairs[0][1]:
            pairs = [("rank", "=", text)]
        stated = {key.strip(): value.strip() for key, _, value in pairs}
        for key in stated:
            if key not in KEYS:
                raise unknown("key of lora", key, KEYS)
        rank = stated.get("rank", "").removesuffix(".0")  # pandas reads 16 so in a column with gaps
        if not (rank.isascii() and rank.isdigit() and 0 < int(rank[:9]) <= MAX_RANK):
            raise ValueError(f"lora {text[:80]!r}: rank is a whole number above 0, as in rank=16")
        adapters = cls(
            rank=int(rank),
            layers=tuple(filter(None, stated.get("layers", "").split("+"))),
            weights=stated.get("weights", ""),
            dtype=stated.get("dtype", "fp32"),
        )
        for key, value, allowed in (
            ("weights", adapters.weights, ("", *QUANTISED)),
            ("dtype", adapters.dtype, DTYPES),
        ):
            if value not in allowed:
                known = ", ".join(filter(None, allowed))
                raise ValueError(f"lora {text[:80]!r}: {key} is one of {known}, got {value[:20]!r}")
        return adapters
