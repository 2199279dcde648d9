"""Checks files of boosted trees before XGBoost reads them: it trusts their sizes and indices.

A file is gzipped UBJSON (https://ubjson.org), as XGBoost writes it. What is accepted here ends
neither its reader nor its predictions in a crash: lengths agree, children and features exist, no
node has two parents.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 2**29  # of an unpacked file
MAX_DEPTH = 12  # of nested values; XGBoost writes 6
NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
DTYPES = {ord(marker): np.dtype(code) for marker, code in NUMBERS.items()}
FORMATS = {ord(marker): struct.Struct(code) for marker, code in NUMBERS.items()}
KEYWORDS = {ord("T"): True, ord("F"): False, ord("Z"): None}
OPEN, CLOSE, LIST, TYPE, COUNT, LENGTH, TEXT = b"{}[$#LS"
WHOLE, UINT8, FLOAT = DTYPES[ord("l")], DTYPES[ord("U")], DTYPES[ord("d")]
PER_NODE: Mapping[str, np.dtype[Any]] = {
    **dict.fromkeys(("left_children", "right_children", "parents", "split_indices"), WHOLE),
    **dict.fromkeys(("base_weights", "loss_changes", "split_conditions", "sum_hessian"), FLOAT),
    **dict.fromkeys(("default_left", "split_type"), UINT8),
}
STATISTICS = re.compile(rb"L.{8}(?:base_weights|loss_changes|sum_hessian)\[\$d#L", re.DOTALL)
CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")


def without_statistics(raw: bytes) -> bytes:
    """Trees in UBJSON with zeros for the statistics of training, which are half of a packed file.

    Predictions use neither the gain and the sum of second derivatives of a node, nor the weight it
    would have as a leaf: that of a leaf is among the split conditions too.
    """
    zeroed = bytearray(raw)
    for header in STATISTICS.finditer(raw):
        (count,) = FORMATS[LENGTH].unpack_from(raw, header.end())
        begin = header.end() + FORMATS[LENGTH].size
        size = count * FLOAT.itemsize
        zeroed[begin : begin + size] = bytes(size)
    return bytes(zeroed)


def read_trees(path: Path, features: int) -> bytes:
    """The unpacked file, checked; ValueError unless its trees have this number of features."""
    unpacker = zlib.decompressobj(wbits=31)
    raw = unpacker.decompress(path.read_bytes(), MAX_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"{path.name}: cut off, or larger than {MAX_BYTES} bytes")
    check_trees(raw, features, path.name)
    return raw


def check_trees(raw: bytes, features: int, file: str) -> None:
    """ValueError, which names the file, unless these bytes are trees with ``features`` features."""
    try:
        _check_model(_Reader(raw).whole(), features)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as exc:
        raise ValueError(f"{file}: no trees of XGBoost ({exc!r:.80})") from exc


class _Reader:
    """Reads UBJSON from its start; every step stays within the file."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def whole(self) -> Any:
        """The value that the file consists of."""
        value = self._value(0)
        _require(self.at == len(self.raw), "more follows its end")
        return value

    def _value(self, depth: int) -> Any:
        """The value that begins here; ``depth``: how many other values it is inside of."""
        _require(depth < MAX_DEPTH, "nested too deep")
        marker = self.raw[self.at]
        self.at += 1
        if marker == OPEN:
            return self._object(depth)
        if marker == LIST:
            return self._list(depth)
        if marker == TEXT:
            return self._text()
        if marker in KEYWORDS:
            return KEYWORDS[marker]
        (number,) = FORMATS[marker].unpack_from(self.raw, self.at)
        self.at += FORMATS[marker].size
        return number

    def _object(self, depth: int) -> dict[str, Any]:
        """Names and values up to the closing brace."""
        values: dict[str, Any] = {}
        while self.raw[self.at] != CLOSE:
            name = self._text()
            _require(name not in values, "a key twice")
            values[name] = self._value(depth + 1)
        self.at += 1
        return values

    def _list(self, depth: int) -> Any:
        """A list whose length is stated; an array if it holds numbers of one type."""
        kind = None
        if self.raw[self.at] == TYPE:
            kind = DTYPES[self.raw[self.at + 1]]
            self.at += 2
        _require(self.raw[self.at] == COUNT, "a list without length")
        self.at += 1
        count = self._length()
        if kind is not None:
            return np.frombuffer(self._bytes(count * kind.itemsize), kind)
        _require(count <= len(self.raw) - self.at, "a list longer than the file")
        return [self._value(depth + 1) for _ in range(count)]

    def _text(self) -> str:
        return self._bytes(self._length()).decode("ascii")

    def _length(self) -> int:
        """A count as XGBoost writes it: a marker and a 64-bit integer."""
        _require(self.raw[self.at] == LENGTH, "a length that is no 64-bit integer")
        (count,) = FORMATS[LENGTH].unpack_from(self.raw, self.at + 1)
        _require(count >= 0, "a negative length")
        self.at += 9
        return int(count)

    def _bytes(self, count: int) -> bytes:
        """The next bytes of the file."""
        _require(count <= len(self.raw) - self.at, "longer than the file")
        self.at += count
        return self.raw[self.at - count : self.at]


def _require(condition: Any, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _check_model(model: Any, features: int) -> None:
    """Numbers of trees and features agree; outputs are single numbers."""
    learner = model["learner"]
    sizes, booster = learner["learner_model_param"], learner["gradient_booster"]
    stated = {key: sizes[key] for key in ("num_feature", "num_class", "num_target")}
    wanted = {"num_feature": str(features), "num_class": "0", "num_target": "1"}
    _require(stated == wanted, f"{stated}, wanted {wanted}")
    _require(np.isfinite(float(sizes["base_score"].strip("[]"))), "base_score")
    _require(booster["name"] == "gbtree", "booster")
    _require(learner["objective"]["name"] == "reg:squarederror", "objective")
    names = [learner["feature_names"], learner["feature_types"]]
    _require(all(len(some) == 0 for some in names), "names of features")
    boosted = booster["model"]
    _require(all(len(some) == 0 for some in boosted.get("cats", {}).values()), "categories")
    trees, counts = boosted["trees"], boosted["gbtree_model_param"]
    _require(counts["num_trees"] == str(len(trees)), "num_trees")
    _require(counts["num_parallel_tree"] == "1", "num_parallel_tree")
    _require(list(boosted["iteration_indptr"]) == list(range(len(trees) + 1)), "iteration_indptr")
    _require(list(boosted["tree_info"]) == [0] * len(trees), "tree_info")
    _check_sizes(trees, features)
    if trees:
        _check_nodes(trees, features)


def _check_sizes(trees: list[dict[str, Any]], features: int) -> None:
    """Every array of a tree has as many entries as the tree has nodes."""
    for number, tree in enumerate(trees):
        stated = tree["tree_param"]
        nodes = len(tree["left_children"])
        sizes = (stated["num_nodes"], stated["num_feature"], stated["num_deleted"])
        _require(sizes == (str(nodes), str(features), "0") and nodes, f"sizes {sizes}")
        _require(stated["size_leaf_vector"] in ("0", "1"), "size_leaf_vector")
        _require(tree["id"] == number, "id")
        kinds = all(tree[k].dtype == kind and len(tree[k]) == nodes for k, kind in PER_NODE.items())
        _require(kinds, f"arrays of tree {number}")
        _require(all(len(tree[name]) == 0 for name in CATEGORIES), "categories")


def _check_nodes(trees: list[dict[str, Any]], features: int) -> None:
    """All trees at once: node 0 of each is its root, every other node has at most one parent."""
    arrays = {name: np.concatenate([tree[name] for tree in trees]) for name in PER_NODE}
    counts = np.array([len(tree["left_children"]) for tree in trees])
    nodes, first = np.repeat(counts, counts), np.repeat(np.cumsum(counts) - counts, counts)
    left, right = (
        arrays["left_children"].astype(np.int64),
        arrays["right_children"].astype(np.int64),
    )
    inner = left != -1
    _require(((right != -1) == inner).all(), "a node with one child")
    child = np.concatenate([left[inner], right[inner]])
    _require((child >= 1).all() and (child < np.tile(nodes[inner], 2)).all(), "children")
    _require(np.bincount(child + np.tile(first[inner], 2), minlength=1).max() <= 1, "two parents")
    split = arrays["split_indices"][inner]
    _require((split >= 0).all() and (split < features).all(), "split_indices")
    _require(
        (arrays["split_type"] == 0).all() and (arrays["default_left"] <= 1).all(),
        "split_type",
    )
    valid = (arrays["parents"] >= -1) & (arrays["parents"] < nodes)
    _require((valid | (arrays["parents"] == np.iinfo(np.int32).max)).all(), "parents")
    finite = np.isfinite(arrays["split_conditions"]) & np.isfinite(arrays["base_weights"])
    _require(finite.all(), "numbers that are not finite")
