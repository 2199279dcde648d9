"""Parses outputs of nccl-tests, text or JSON: rows of times, and facts in the header.

Sources: writeBenchmarkLineBody, writeDeviceReport and jsonRankInfo in src/util.cu of
https://github.com/NVIDIA/nccl-tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.extras.imports.base import Unreadable, number, parsed_json, text_of, whole
from itercast.microbench.store import Facts

START = re.compile(r"\w_perf\b|Collective test starting|\bnThread |nccl-tests version")
SPAN = re.compile(r"minBytes (\d{1,18}) maxBytes (\d{1,18}) ")
END = re.compile(r"Out of bounds values|Avg bus bandwidth")
WRAPPED = 2**31  # that old versions print for larger sizes
ROUNDED = 0.011  # GB/s between two numbers that are rounded to two digits
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
    counted: bool = True  # whether a count follows the size
    named: list[str] = field(default_factory=list)  # collectives in the header
    busbw: list[float] = field(default_factory=list)  # of each row, and its mean as printed
    redops: set[bool] = field(default_factory=set)  # whether rows name no reduction
    average: float | None = None
    span: tuple[int, int] | None = (
        None  # the smallest and the largest size, as the header states them
    )
    factors: list[tuple[float, float]] = field(default_factory=list)  # bus rates over rates
    ended: bool = False
    empty: int = 0
    host_times: int = 0
    unknown: int = 0


def parse_text(text: str) -> list[Log]:
    """Parse the runs in a text output, whatever a launcher or collector writes before its lines.

    A run begins at a command or header after rows of another, or where sizes stop growing; in the
    latter case, without a header of its own, its collective is unknown.
    """
    logs = [Log()]
    for at, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        kinds = [i for i, word in enumerate(words) if word in DTYPES and i and _size(words[i - 1])]
        if len(line) > MAX_LINE or len(kinds) > 1 or (kinds and "#" in words[: kinds[0]]):
            logs[-1].unknown += 1
            logs[-1].ended = True  # a part of the log is lost
        elif kinds:
            if logs[-1].ended or _shrinks(logs[-1], words, kinds[0]):
                logs.append(Log(nccl=logs[-1].nccl))
            unknown = logs[-1].unknown
            _row(logs[-1], at, words, kinds[0])
            logs[-1].ended = logs[-1].ended or logs[-1].unknown > unknown
        else:
            begins = START.search(line) or ("redop" in words and "type" in words)
            if begins and (logs[-1].rows or logs[-1].ended):
                logs.append(Log(nccl=logs[-1].nccl))
            _header(logs[-1], line)
            logs[-1].ended = logs[-1].ended or _is_broken(line, words)
            if "redop" in words and "type" in words:
                logs[-1].head = words[words.index("type") + 1 :]
                logs[-1].counted = "count" in words
                logs[-1].ended = "size" not in words
    for log in logs:
        _check(log)
    return logs


def _is_broken(line: str, words: Sequence[str]) -> bool:
    """Whether a line is a damaged row or header."""
    numbers = sum(word.replace(".", "", 1).isdecimal() for word in words[-4:])
    starting = "Collective test starting" in line and not re.search(r"starting: \w+_perf\b", line)
    thread = re.search(r"\bnThread \d+ nGpus", line) and not SPAN.search(line)
    return numbers > 2 or starting or bool(thread)


def _size(word: str) -> bool:
    return word.isdecimal() and word.isascii()


def _first(log: Log, words: Sequence[str], kind: int) -> int:
    """The place of a row's size among its words: what stands before it is a prefix."""
    both = kind > 1 and _size(words[kind - 2]) and log.counted
    return kind - 2 if both else kind - 1


def _shrinks(log: Log, words: Sequence[str], kind: int) -> bool:
    """Whether a row's size is not above the one before, as in no run of growing messages."""
    return bool(log.rows) and whole(words[_first(log, words, kind)]) <= log.rows[-1][1]


def _check(log: Log) -> None:
    """Remove a run's rows if its header, rates and average contradict each other."""
    listed = sorted(log.ranks) == list(range(len(log.ranks)))
    average = sum(log.busbw) / len(log.busbw) if log.busbw else 0.0
    whole_table = (
        not _is_whole(log) or abs((log.average or 0.0) - average) <= ROUNDED + 0.02 * average
    )
    no_head = bool(log.ranks or log.span) and not log.head
    low, high = log.span or (0, math.inf)
    high = math.inf if high == WRAPPED else high
    other = not all(low <= row[1] <= high for row in log.rows)
    if log.span and log.ranks and not log.empty:  # a whole header: its table begins as it says
        other = other or log.rows[:1] != [row for row in log.rows[:1] if row[1] == low]
    if (
        len(set(log.named)) > 1
        or no_head
        or other
        or not (listed and whole_table and _factor_fits(log))
    ):
        log.unknown += len(log.rows)
        log.rows = []


def _is_whole(log: Log) -> bool:
    """Whether a table has an average and all the sizes that its header states."""
    sizes = sorted({row[1] for row in log.rows})
    sums, ratios = {b - a for a, b in pairwise(sizes)}, {b / a for a, b in pairwise(sizes)}
    ends = (sizes[0], sizes[-1]) if sizes else ()
    return log.average is not None and ends == log.span and 1 in (len(sums), len(ratios))


def _factor_fits(log: Log) -> bool:
    """Whether bus rate over rate is the factor of the collective for the listed ranks."""
    if log.redops == {True} and log.collective in ("all_reduce", "reduce_scatter", "reduce"):
        return False
    if log.redops == {False} and log.collective in ("all_gather", "alltoall", "sendrecv"):
        return False
    ranks = len(log.ranks)
    ring = (ranks - 1) / ranks if ranks > 1 else None
    if log.collective == "all_reduce":
        low, high = (2 * ring, 2 * ring) if ring else (1.0, 2.0)
    elif log.collective in ("broadcast", "reduce", "sendrecv"):
        low, high = 1.0, 1.0
    elif log.collective in ("all_gather", "reduce_scatter", "alltoall"):
        low, high = (ring, ring) if ring else (0.5, 1.0)
    else:
        return True
    return all(low - 0.02 <= most and least <= high + 0.02 for least, most in log.factors)


def _header(log: Log, line: str) -> None:
    """Note what a line of the header or the footer states, if it is one."""
    if found := re.search(r"(\w{1,40})_perf\b", line):
        log.named.append(found[1])
        log.collective = found[1]
    if found := re.search(r"NCCL version (\S{1,40})", line):
        log.nccl = log.nccl or found[1]
    if found := re.search(r"nccl-library=(\d{4,6})\b", line):
        log.nccl = log.nccl or version(int(found[1]))
    if found := re.search(r"(?<!warmup )\biters: (\d{1,9})\b", line):
        log.iters = int(found[1])
    if found := RANK.search(line):
        log.ranks[int(found[1][:9])] = found[2]
        log.gpu = log.gpu or text_of(found[3])
    if found := SPAN.search(line):
        log.span = (int(found[1]), int(found[2]))
    if found := re.search(r"Avg bus bandwidth\s*:\s*([\d.]{1,20})", line):
        log.average = number(found[1])
    log.ended = log.ended or bool(log.rows and END.search(line))


def version(code: int) -> str:
    """NCCL's version from its number: 22907 is 2.29.7; before version 2.9, 2708 was 2.7.8."""
    wide = code >= 10000
    major, rest = divmod(code, 10000 if wide else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _row(log: Log, at: int, words: Sequence[str], kind: int) -> None:
    """Add the times of a line of the table, in the columns that its head names.

    ``at``: the line's number; ``kind``: the index of the dtype among its ``words``. A line is left
    out if its rates are not size / time, or if it has more words than the head: parts are lost.
    """
    tail = words[kind + 1 :]
    size = whole(words[_first(log, words, kind)])
    starts = [i for i, word in enumerate(log.head) if word in ("time", "cputime")]
    if not starts:
        starts = list(LAYOUTS.get(len(tail), ()))
    starts = [start for start in starts if start + 2 < len(tail)]
    fits = all(_rate_fits(size, *tail[start : start + 2]) for start in starts)
    counted = (
        not log.counted
        or not size
        or (whole(words[kind - 1]) and _count_fits(log, size, words, kind))
    )
    if not starts or (log.head and len(tail) > len(log.head)):
        log.unknown += 1
    elif not size:
        log.empty += 1
        log.busbw += [0.0] * len(starts)
    elif "cputime" in log.head:
        log.host_times += 1
    elif not fits or not counted:
        log.unknown += 1
    else:
        counts = "error" not in log.head  # old tables print the largest error there
        for i, start in enumerate(starts):
            wrong = whole(tail[start + 3]) if counts and start + 3 < len(tail) else 0
            log.redops.add(tail[0] == "none")
            log.rows.append((at, size, DTYPES[words[kind]], i == 1, number(tail[start]), wrong))
            algbw, busbw = number(tail[start + 1]), number(tail[start + 2])
            log.busbw.append(busbw)
            if algbw > ROUNDED:
                least = (busbw - ROUNDED / 2) / (algbw + ROUNDED / 2)
                log.factors.append((least, (busbw + ROUNDED / 2) / (algbw - ROUNDED / 2)))


def _rate_fits(size: int, time: str, algbw: str) -> bool:
    """Whether a printed rate in GB/s is the size over the time in us, up to its last digit."""
    if (time_us := number(time)) <= 0:
        return False
    rate = size / time_us * 1e-3
    return abs(number(algbw) - rate) <= ROUNDED + 0.02 * rate


def _count_fits(log: Log, size: int, words: Sequence[str], kind: int) -> bool:
    """Whether the size is that of the elements, of one rank or of all."""
    share = whole(words[kind - 1]) * ITEMSIZE_BYTES[DTYPES[words[kind]]]
    return size % share == 0 and size // share in {1, len(log.ranks) or size // share}


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
    """Add the rows of one message size in a JSON report, or count why there are none."""
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
