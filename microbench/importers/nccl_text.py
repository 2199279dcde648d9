"""Output of nccl-tests, text or JSON, as plain values: rows of times and what the header says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from microbench.importers.base import number, text_of, whole

PREFIX = re.compile(r"\s*(\[\d+,\d+\]<\w+>:|\d+:(?=[\s#]))?\s*")
RANK = re.compile(r"#\s*Rank\s+(\d+)\s.*\son\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+)")
DTYPES = {"float": "fp32", "half": "fp16", "double": "fp64", "bfloat16": "bf16", "int8": "int8"}
DTYPES |= {"uint8": "uint8", "int32": "int32", "int64": "int64", "char": "int8", "int": "int32"}
DTYPES |= {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "f8e4m3": "fp8", "f8e5m2": "fp8"}
# Words after the dtype -> where the times stand: redop, [root], then per direction time, algbw,
# busbw and [wrong]; some tables have one direction only, old ones no root.
LAYOUTS = {4: (1, None), 5: (1, None), 6: (2, None), 9: (1, 5), 10: (2, 6)}


@dataclass(slots=True, kw_only=True)
class Log:
    """One run: its rows as (line, message_bytes, dtype, in_place, time_us, wrong)."""

    collective: str = ""
    nccl: str = ""
    gpu: str = ""
    iters: int = 0
    ranks: dict[int, str] = field(default_factory=dict)  # rank -> host
    rows: list[tuple[int, int, str, bool, float, int]] = field(default_factory=list)
    empty: int = 0
    unknown: int = 0


def parse_text(text: str) -> Log:
    """A log as nccl-tests prints it, with or without a launcher's prefix on every line."""
    log = Log()
    wrong_is_count = True
    for at, line in enumerate(text.splitlines(), start=1):
        line = line[PREFIX.match(line).end() :]  # type: ignore[union-attr]  # matches nothing too
        words = line.split()
        kind = next((i for i in (1, 2) if len(words) > i and words[i] in DTYPES), None)
        if kind is not None and words[0].isdigit():
            _row(log, at, words, kind, wrong_is_count)
        elif "redop" in words:
            wrong_is_count = "error" not in words
        else:
            _header(log, line)
    return log


def _header(log: Log, line: str) -> None:
    if found := re.search(r"(\w+)_perf\b", line):
        log.collective = log.collective or found[1]
    if found := re.search(r"NCCL version (\S+)", line):
        log.nccl = log.nccl or found[1]
    if found := re.search(r"(?<!warmup )\biters: (\d{1,9})\b", line):
        log.iters = int(found[1])
    if found := RANK.match(line):
        log.ranks[int(found[1][:9])] = found[2]
        log.gpu = log.gpu or text_of(found[3])


def _row(log: Log, at: int, words: list[str], kind: int, wrong_is_count: bool) -> None:
    tail = words[kind + 1 :]
    if len(tail) not in LAYOUTS:
        log.unknown += 1
        return
    size = whole(words[0])
    if not size:
        log.empty += 1
        return
    for start, in_place in zip(LAYOUTS[len(tail)], (False, True), strict=True):
        if start is None:
            continue
        checked = wrong_is_count and start + 3 < len(tail)
        wrong = whole(tail[start + 3]) if checked else 0
        log.rows.append((at, size, DTYPES[words[kind]], in_place, number(tail[start]), wrong))


def parse_json(text: str) -> Log:
    """A report as nccl-tests writes it with -J; ValueError or RecursionError if it is none."""
    report = json.loads(text)
    results = report.get("results") if isinstance(report, Mapping) else None
    if not isinstance(results, list):
        raise ValueError("no list of results")
    log = Log(nccl=text_of(report.get("nccl_version")))
    log.collective = re.sub(r"_perf$", "", text_of(report.get("test") or report.get("collective")))
    for word in _strings(report.get("args")):
        if found := re.search(r"(\w+)_perf\b", word):
            log.collective = log.collective or found[1]
    devices = report.get("devices")
    for rank, device in enumerate(devices if isinstance(devices, list) else ()):
        if isinstance(device, Mapping):
            log.ranks[rank] = text_of(device.get("hostname") or device.get("host"))
            log.gpu = log.gpu or text_of(device.get("device_name") or device.get("name"))
    for at, result in enumerate(results, start=1):
        _result(log, at, result)
    return log


def _strings(value: Any) -> Iterator[str]:
    values = value if isinstance(value, list) else [value]
    return (text_of(v) for v in values)


def _result(log: Log, at: int, result: Any) -> None:
    dtype = DTYPES.get(text_of(result.get("type"))) if isinstance(result, Mapping) else None
    if dtype is None:
        log.unknown += 1
        return
    size = whole(result.get("size"))
    if not size:
        log.empty += 1
        return
    for key, in_place in (("out_of_place", False), ("in_place", True)):
        found = result.get(key)
        if isinstance(found, Mapping):
            wrong = whole(found.get("nwrong"))
            log.rows.append((at, size, dtype, in_place, number(found.get("time")), wrong))
