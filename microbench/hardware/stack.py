"""Stack: the software that a step runs on, by name and release, and its attention kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from itercast.capture.base.close_names import unknown
from itercast.capture.base.extensions import with_added
from itercast.capture.base.yaml_text import facts_of, made_of, read_mapping
from itercast.microbench.hardware.spec import Gpu

FILE = Path(__file__).parent / "stacks" / "known.yaml"
NIGHTLY = re.compile(r"[^- ]+-(20\d\d(?:-\d\d){0,2})(?![\d.])")  # of a date
NEEDED, WHOLE = "what backward reads", "whole layers"  # see ``Stack.recomputes``
OTHER = "other"
USUAL = "torch-2.11"  # forecast where none is named


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSoftware:
    """How software looks up embedding tables that are spread over ranks.

    ``batched``: a rank looks up all of its tables in one kernel and updates them in another, and
    row numbers of the next step are sent meanwhile. ``weights``: dtype of tables and of vectors
    that are sent, empty for the model's; ``index``: dtype of row numbers; ``lengths``: whether
    lengths of bags are sent too.
    """

    batched: bool = False
    weights: str = ""
    index: str = "int64"
    lengths: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes per element of a parameter that a rank holds beside the parameter itself.

    ``gradient``: of the summed gradient, in a buffer that is allocated before the first step and
    that messages are sent from; ``copies``: of fp32 copies for the optimizer, whose states are in
    fp32, too.
    """

    gradient: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Software that is forecast, or that rows were measured with.

    ``attention``: its attention kernel by GPU name, architecture or ``other``, as pairs.
    ``similar``: software whose rows are taken where it has none; ``words``: other names of it.
    ``recomputes``: how much of a layer runs again under full recomputation, NEEDED or WHOLE.
    ``released``: the date of a release, YYYY-MM-DD. ``waits``: whether its host waits for each
    message of a pipeline that is not interleaved. ``held``: bytes that it holds beside a parameter,
    by the parameter's dtype. ``casts_experts``: under mixed precision products of experts are in
    half precision. ``reduces_half``: under mixed precision shards of gradients are reduced in half
    precision. ``reduces_late``: the stages of ZeRO, 0 for none, in which replicas reduce gradients
    once backward is done, in a message of each dtype. ``all_reduces``: with ZeRO gradients are
    summed by an all_reduce. ``one_stream``: scatters of gradients wait for sums among the groups
    that shard (HSDP). ``own_kernels``: whether it runs kernels fused by hand in place of a model's
    separate ops. ``one_by_one``: optimizers without a fused kernel loop over parameters, and
    zero_grad sets gradients to zero instead of dropping them. ``message_sms``: SMs that its
    products leave to messages, by architecture; elsewhere they are planned for all.
    """

    name: str
    attention: tuple[tuple[str, str], ...]
    similar: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    recomputes: str = NEEDED
    tables: TableSoftware = TableSoftware()
    source: str = ""
    released: str = ""
    waits: bool = False
    held: Mapping[str, Held] = field(default_factory=dict)
    casts_experts: bool = False
    reduces_half: bool = False
    reduces_late: tuple[int, ...] = ()
    all_reduces: bool = False
    one_stream: bool = False
    own_kernels: bool = False
    one_by_one: bool = False
    message_sms: Mapping[str, int] = field(default_factory=dict)

    def attention_on(self, gpu: Gpu, *, unequal: bool = False) -> str:
        """The attention kernel that it takes on a GPU in 16 bit.

        ``unequal``: values are of another width than queries, as in DeepSeek's latent attention.
        torch's flash-attention refuses those (``check_head_dim_size_flash`` in sdp_utils.cpp).
        """
        kernels = dict(self.attention)
        kernel = kernels.get(gpu.name) or kernels.get(gpu.architecture) or kernels[OTHER]
        refused = unequal and kernel.startswith("flash") and software_name(self.name) == "torch"
        return "memory-efficient" if refused else kernel


def software_name(stack: str) -> str:
    """The software of a stack without its version: torch of ``torch-2.11.0+cu130``."""
    return re.split(r"[- ]", stack, maxsplit=1)[0]


def has_dtensor(stack: str) -> bool:
    """Whether the software cuts tensors by torch's DTensor; all other cuts plain ones."""
    return software_name(stack) == "torch"


def software_version(stack: str) -> tuple[int, ...]:
    """The version of a stack as numbers; () where it states none."""
    match = re.match(r"[^- ]*-v?(\d+(?:\.\d+)*)", stack)
    return tuple(map(int, match[1].split("."))) if match else ()


def pick_version(stacks: Sequence[str], wanted: str) -> str:
    """Choose among releases of one software the newest that is not newer than ``wanted``.

    The oldest if all are newer; the newest if ``wanted`` has no version; '' if there are none.
    """
    version = software_version(wanted)
    older = [s for s in stacks if not version or software_version(s)[: len(version)] <= version]
    if older:
        return max(older, key=software_version)
    return min(stacks, key=software_version, default="")


@cache
def known_stacks() -> Mapping[str, Stack]:
    """All stacks by name: those of the file that ships, and one for each file that packages add."""
    shipped = facts_of(str(FILE))
    stacks = {str(name): _stack(str(name), entry) for name, entry in shipped.items()}
    files = with_added("stacks", dict.fromkeys(stacks, FILE))
    for name in files.keys() - stacks:
        stacks[name] = _stack(name, read_mapping(files[name], "stack file"), files[name])
    return stacks


def _stack(name: str, entry: Mapping[str, Any], file: Path = FILE) -> Stack:
    """A stack from its entry in a YAML file; ValueError where the entry lacks a fact."""
    where, kernels = f"{file}: {name}", entry.get("attention", {})
    if OTHER not in kernels or not entry.get("source"):
        raise ValueError(f"{where}: wants attention.{OTHER} and source")
    pairs = tuple((str(on), kernel) for on, kernel in kernels.items())
    stack = made_of(Stack, {"name": name, **entry, "attention": pairs}, where)
    if stack.recomputes not in (NEEDED, WHOLE):
        raise ValueError(
            f"{where}: recomputes is {stack.recomputes!r}, not {NEEDED!r} or {WHOLE!r}"
        )
    return stack


def load_stack(name: str) -> Stack:
    """The stack of this name or release; ValueError, naming the known ones, where there is none.

    ``torch-2.3`` is the newest known torch that is not newer; ``torch`` the newest of all;
    ``torch-2025-03-24``, a nightly build, the newest that was released by then. The major version
    is that of a known release.
    """
    stack = _find(name)
    releases = _releases(name)
    newest = next(map(software_version, releases), ()) or software_version(name)
    too_new = not NIGHTLY.match(name) and software_version(name)[:1] > newest[:1]
    if stack is None or too_new:
        raise unknown("stack", name, sorted(known_stacks()), like=releases[:3])
    return stack


def _releases(name: str) -> list[str]:
    """The known stacks of the software ``name``, the newest first."""
    releases = [s for s in known_stacks() if software_name(s) == software_name(name)]
    return sorted(releases, key=software_version, reverse=True)


def stack_of_row(stated: str) -> Stack:
    """The stack that a measured row states in its column ``stack``; the usual one if unknown."""
    return _find(stated) or known_stacks()[USUAL]


def asked_stack(stated: object) -> str:
    """What to forecast for a row with this column ``stack``: that; '', the usual, if unknown."""
    return stated if isinstance(stated, str) and _find(stated) else ""


def similar_software(name: str) -> tuple[str, ...]:
    """Software whose rows are taken where this stack has none; () for an unknown stack."""
    stack = _find(name)
    return stack.similar if stack else ()


def _find(name: str) -> Stack | None:
    """The stack of a stated name: exactly that, else by software and release, else by a word."""
    stacks = known_stacks()
    if name in stacks:
        return stacks[name]
    if not name.strip():
        return None
    software = software_name(name)
    releases = [known for known in stacks if software_name(known) == software]
    if releases and (nightly := NIGHTLY.match(name)):
        dates = {known: stacks[known].released[: len(nightly[1])] for known in releases}
        releases = [known for known in releases if "" < dates[known] <= nightly[1]] or releases[:1]
        name = software
    if releases:
        return stacks[pick_version(releases, name)]
    for stack in stacks.values():  # whole words: "megatron" is none of ``megatroncore``
        if any(re.search(rf"\b{re.escape(word)}\b", name, re.IGNORECASE) for word in stack.words):
            return stack
    return None
