"""Names of GPUs: as drivers and tables write them, and as hardware files are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of, read_mapping, typed
from itercast.microbench.hardware.node import load_node, node_named
from itercast.microbench.hardware.spec import gpu_names

FACTS = facts_of(__file__)
FORMS: Mapping[str, str] = FACTS["forms"]
MODELS: Mapping[str, str] = FACTS["models"]
SILENT = frozenset(FACTS["silent"].split())
USUAL: Mapping[str, str] = assumed(__file__, "usual_forms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A GPU's name in parts: model in one word, form (sxm, pcie, nvl), GB of memory if stated."""

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
def by_model() -> dict[str, dict[str, Name]]:
    """Hardware files and what their names state, by model; RTX cards also without that word."""
    files_by_model: dict[str, dict[str, Name]] = {}
    for file in gpu_names():
        name = parse(file)
        for model in {name.model, name.model.removeprefix("rtx")} - {""}:
            files_by_model.setdefault(model, {})[file] = name
    return files_by_model


def _agrees(stated: Name, file: Name) -> bool:
    """Whether no part (form, memory) that both names state differs."""
    pairs = ((stated.form, file.form), (stated.memory, file.memory))
    return all(not named or not filed or named == filed for named, filed in pairs)


def fitting(text: str) -> list[str]:
    """Hardware files that a name fits: only the file of exactly that name, else the usual first."""
    stated = parse(text)
    files = by_model().get(stated.model, {})
    fits = [file for file, name in files.items() if _agrees(stated, name)]
    exact = [file for file in fits if files[file] == stated]
    usual = [file for file in USUAL.get(stated.model, ()) if file in fits]
    return exact or [*usual, *(file for file in fits if file not in usual)]


def gpu_named(text: str) -> str | None:
    """The name of a device's hardware file, given any of its names; None without a file.

    Where a name fits several files, the usual form of the card is taken (``usual_forms``). The name
    of a node stands for its GPU.
    """
    if files := fitting(text):
        return files[0]
    is_known = parse(text).model in by_model()
    node = None if is_known else node_named(text)
    return load_node(node).gpu if node else None


def read_prices(path: Path) -> dict[str, float]:
    """USD per hour of one GPU by name, from a YAML file of names and prices."""
    prices = dict[str, float]()
    for name, price in read_mapping(path, "file of prices (GPU: USD per hour of one)").items():
        gpu = gpu_named(str(name)) or str(name)
        if gpu in prices:
            raise ValueError(f"prices {str(path)!r}: {gpu!r} has two prices, state one")
        prices[gpu] = typed(float, price, f"prices {str(path)!r}: the price of {name!r}")
    return prices
