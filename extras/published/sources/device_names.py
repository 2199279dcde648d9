"""What published names of GPUs and systems leave open: form, memory, node and links."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache

from itercast.microbench.hardware.names import USUAL, by_model, fitting, gpu_named, parse
from itercast.microbench.hardware.node import load_node, node_named, node_names
from itercast.microbench.hardware.spec import gpu_names, load_gpu


def form_assumed(text: str) -> str:
    """A note if several hardware files fit a name, and one was taken; empty if just one does."""
    found = fitting(text)
    if len(found) < 2:
        return ""
    form = "" if parse(text).form else parse(found[0]).form.upper()
    return f"{form or found[0]} assumed"


def memory_is_open(text: str) -> bool:
    """Whether the usual form of a named GPU comes with several usual sizes of memory."""
    files = fitting(text)
    usual = USUAL.get(parse(text).model, files)
    found = [parse(file) for file in files if file in usual]
    return len({name.memory for name in found if name.form == found[0].form}) > 1


def unknown_gpu(text: str) -> str:
    """Why a name is refused, with the hardware files whose names are like it."""
    models = by_model()
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
