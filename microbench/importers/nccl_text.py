"""Parses outputs of nccl-tests, text or JSON: rows of times, and facts in the header.

Sources: writeBenchmarkLineBody, writeDeviceReport and jsonRankInfo in src/util.cu of
https://github.com/NVIDIA/nccl-tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from itercast.capture.base.yaml_text import facts_of
from itercast.microbench.importers.base import Unreadable, number, parsed_json, text_of, whole
from itercast.microbench.store import Facts

PREFIX = re.compile(r"\s*(\[\d+,\d+\]<\w+>:|\[?\d+\]?:(?=[\s#]))?\s*")
RANK = re.compile(r"#\s*Rank\s+(\d+)\s.*\son\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+)")
MAX_LINE = 4000
DTYPES: Mapping[str, str] = facts_of(__file__)["dtypes"]
# For tables without a head: number of words after the dtype -> positions of the times. The words
# are redop, [root], then per direction time, algbw, busbw, [wrong]; some tables have one direction,
# old ones no root.
LAYOUTS: dict[int, tuple[int, ...]] = {4: (1,), 5: (1,), 6: (2,), 9: (1, 5), 10: (2, 6)}


@dataclass(slots=True, kw_only=True)
class Log:
    """One run of nccl-tests; rows are (line, message_bytes, dtype, in_place, time_us, wrong)."""

    collective: str = ""
    nccl: str = ""
    gpu: str = ""
    iters: int = 0
    ranks: dict[int, str] = field(default_factory=dict)  # rank -> host
    rows: list[tuple[int, int, str, bool, float, int]] = field(default_factory=list)
    head: list[str] = field(default_factory=list)  # words of the table's head
    empty: int = 0
    host_times: int = 0
    unknown: int = 0


def parse_text(text: str) -> list[Log]:
    """Parse the runs in a text output; lines may have a prefix by mpirun or torchrun."""
    logs = [Log()]
    for at, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_LINE:
            logs[-1].unknown += 1
            continue
        line = line[PREFIX.match(line).end() :]  # type: ignore[union-attr]  # matches nothing too
        words = line.split()
        kind = next((i for i in (1, 2) if len(words) > i and words[i] in DTYPES), None)
        if kind is not None and words[0].isdecimal():
            _row(logs[-1], at, words, kind)
        elif "redop" in words and "type" in words:
            logs[-1].head = words[words.index("type") + 1 :]
        else:
            if logs[-1].rows and re.search(r"Collective test starting|\bnThread ", line):
                logs.append(Log(nccl=logs[-1].nccl))
            _header(logs[-1], line)
    return logs


def _header(log: Log, line: str) -> None:
    if found := re.search(r"(\w{1,40})_perf\b", line):
        log.collective = log.collective or found[1]
    if found := re.search(r"NCCL version (\S{1,40})", line):
        log.nccl = log.nccl or found[1]
    if found := re.search(r"nccl-library=(\d{4,6})\b", line):
        log.nccl = log.nccl or version(int(found[1]))
    if found := re.search(r"(?<!warmup )\biters: (\d{1,9})\b", line):
        log.iters = int(found[1])
    if found := RANK.match(line):
        log.ranks[int(found[1][:9])] = found[2]
        log.gpu = log.gpu or text_of(found[3])


def version(code: int) -> str:
    """NCCL's version from its number: 22907 is 2.29.7; before version 2.9, 2708 was 2.7.8."""
    wide = code >= 10000
    major, rest = divmod(code, 10000 if wide else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _row(log: Log, at: int, words: Sequence[str], kind: int) -> None:
    """Add the times of one line, at the positions that the table's head states."""
    tail = words[kind + 1 :]
    size = whole(words[0])
    starts = [i for i, word in enumerate(log.head) if word in ("time", "cputime")]
    if not starts:
        starts = list(LAYOUTS.get(len(tail), ()))
    starts = [start for start in starts if start + 2 < len(tail)]
    if not starts:
        log.unknown += 1
    elif not size:
        log.empty += 1
    elif "cputime" in log.head:
        log.host_times += 1
    else:
        counted = "error" not in log.head  # old tables print the largest error there
        for i, start in enumerate(starts):
            wrong = whole(tail[start + 3]) if counted and start + 3 < len(tail) else 0
            log.rows.append((at, size, DTYPES[words[kind]], i == 1, number(tail[start]), wrong))


def parse_json(text: str) -> Log:
    """Parse a JSON report (nccl-tests -J); raises Unreadable for other text.

    nccl-tests writes infinite rates as inf, which is not JSON.
    """
    report = parsed_json(re.sub(r":-?inf\b", ":null", text))
    results = report.get("results") if isinstance(report, Mapping) else None
    if not isinstance(results, list):
        raise Unreadable("not an nccl-tests report")
    code = whole(report.get("nccl_version"))
    log = Log(nccl=version(code) if code else text_of(report.get("nccl_version")))
    args = report.get("args")
    for word in args if isinstance(args, list) else ():
        if found := re.search(r"(\w{1,40})_perf\b", text_of(word)):
            log.collective = log.collective or found[1]
    config = report.get("config")
    config = config if isinstance(config, Mapping) else {}
    log.iters = whole(config.get("iterations"))
    devices = config.get("devices")
    for at, device in enumerate(devices if isinstance(devices, list) else ()):
        if isinstance(device, Mapping):
            log.ranks[at] = text_of(device.get("hostname"))
            log.gpu = log.gpu or text_of(device.get("device_info"))
    for at, result in enumerate(results, start=1):
        _result(log, at, result if isinstance(result, Mapping) else {})
    return log


def _result(log: Log, at: int, result: Facts) -> None:
    dtype, size = DTYPES.get(text_of(result.get("type"))), whole(result.get("size"))
    both = (result.get("out_of_place"), result.get("in_place"))
    found = [(i == 1, part) for i, part in enumerate(both) if isinstance(part, Mapping)]
    if dtype is None or not found:
        log.unknown += 1
    elif not size:
        log.empty += 1
    elif "cpu_time" in found[0][1]:
        log.host_times += 1
    else:
        for in_place, part in found:
            wrong = whole(part.get("nwrong"))
            log.rows.append((at, size, dtype, in_place, number(part.get("time")), wrong))
