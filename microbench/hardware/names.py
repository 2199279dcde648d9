"""Names of GPUs: as drivers and published tables write them, and as hardware files are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of, read_mapping, typed
from itercast.microbench.hardware.node import load_node, node_named, node_names
from itercast.microbench.hardware.spec import gpu_names, load_gpu

FACTS = facts_of(__file__)
FORMS: Mapping[str, str] = FACTS["forms"]
MODELS: Mapping[str, str] = FACTS["models"]
SILENT = frozenset(FACTS["silent"].split())
USUAL: Mapping[str, str] = assumed(__file__, "usual_forms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name taken apart: model in one word, form (sxm, pcie, nvl) and GB of memory if stated."""

    model: str
    form: str = ""
    memory: str = ""


def parse(text: str) -> Name:
    """Takes a name of a GPU apart; what it does not say stays empty."""
    words = re.sub(r"(\d) ?gb\b", r"\1gb", text.lower())
    words = re.sub(r"[^a-z0-9]+", " ", words).strip()
    model, form, memory = "", "", ""
    for word in words.split():
        if word in FORMS:
            form = FORMS[word] or word
        elif size := re.fullmatch(r"(\d+)gb", word) or (model and re.fullmatch(r"(\d{2,3})", word)):
            memory = size[1]
        elif word not in SILENT:
            model += MODELS.get(word, word)
    return Name(model=model, form=form, memory=memory)


@cache
def _by_model() -> dict[str, dict[str, Name]]:
    """Hardware files and what their names state, by model; RTX cards also without that word."""
    found: dict[str, dict[str, Name]] = {}
    for file in gpu_names():
        name = parse(file)
        for model in {name.model, name.model.removeprefix("rtx")} - {""}:
            found.setdefault(model, {})[file] = name
    return found


def _agrees(stated: Name, file: Name) -> bool:
    pairs = ((stated.form, file.form), (stated.memory, file.memory))
    return all(not theirs or not ours or theirs == ours for theirs, ours in pairs)


def _fitting(text: str) -> list[str]:
    """Hardware files that a name fits: one of exactly that name, else the usual ones first."""
    stated = parse(text)
    files = _by_model().get(stated.model, {})
    found = [file for file, name in files.items() if _agrees(stated, name)]
    exact = [file for file in found if files[file] == stated]
    usual = [file for file in USUAL.get(stated.model, ()) if file in found]
    return exact or [*usual, *(file for file in found if file not in usual)]


def gpu_named(text: str) -> str | None:
    """The name of a device's hardware file, given any of its names; None without a file.

    Where a name fits several files, the usual form of the card is taken (``usual_forms``). The name
    of a node stands for its GPU.
    """
    if found := _fitting(text):
        return found[0]
    known = parse(text).model in _by_model()
    node = None if known else node_named(text)
    return load_node(node).gpu if node else None


def form_assumed(text: str) -> str:
    """A note if several hardware files fit a name, and one was taken; empty if just one does."""
    found = _fitting(text)
    if len(found) < 2:
        return ""
    form = "" if parse(text).form else parse(found[0]).form.upper()
    return f"{form or found[0]} assumed"


def memory_is_open(text: str) -> bool:
    """Whether the usual form of a named GPU comes with several usual sizes of memory."""
    files = _fitting(text)
    usual = USUAL.get(parse(text).model, files)
    found = [parse(file) for file in files if file in usual]
    return len({name.memory for name in found if name.form == found[0].form}) > 1


def unknown_gpu(text: str) -> str:
    """Why a name is refused, with the hardware files whose names are like it."""
    models = _by_model()
    like = get_close_matches(parse(text).model[:40], models, n=3)
    known = ", ".join(sorted({file for model in like for file in models[model]}))
    return f"unknown gpu: {text[:40]!r}" + (f"; known: {known}" if known else "")


@cache
def node_of(text: str) -> str:
    """The node of a named system: itself, else the usual host of its GPU; empty without a file."""
    if named := node_named(text):
        return named
    gpu = gpu_named(text)
    ours = [name for name in node_names() if gpu and load_node(name).gpu == gpu]
    usual = [name for name in ours if re.match(r"dgx-|hgx-", name)]
    unbridged = [name for name in ours if load_node(name).topology != "pairwise"]
    return next(iter([*usual, *unbridged]), "")


@cache
def link_of(text: str, ranks: int = 2) -> str:
    """The kind of link among GPUs of a named system; empty where its GPU has no file."""
    if node := node_of(text):
        return load_node(node).link_among(ranks)
    gpu = gpu_named(text)
    return load_gpu(gpu).usual_link if gpu in gpu_names()[1:] else ""


def read_prices(path: Path) -> dict[str, float]:
    """USD per hour of one GPU by name, from a YAML file of names and prices."""
    prices = dict[str, float]()
    for name, price in read_mapping(path, "file of prices (GPU: USD per hour of one)").items():
        gpu = gpu_named(str(name)) or str(name)
        if gpu in prices:
            raise ValueError(f"prices {str(path)!r}: {gpu!r} has two prices, state one")
        prices[gpu] = typed(float, price, f"prices {str(path)!r}: the price of {name!r}")
    return prices
