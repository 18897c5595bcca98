"""Table of a result of ``scripts/bench engines``."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.selection.describe import table

VLLM, TUNER, FEW = "vllm", "tuner", "tuner-few"
WAYS = (VLLM, TUNER, FEW)
PROMPTS = 4
"""Prompts of the pass that measures them."""
FIGURES = ("first_token_ms", "token_ms", "tokens_per_s")
HEADING = ("shape", "requests", "figure", "way", "runs", "median", "best", "worst", "speed")


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians of the runs, each way's speed over vLLM's own, and what the tokens agree in."""
    lines: list[tuple[str, ...]] = [HEADING]
    said: list[str] = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape and "lost" not in row]
        counts = list(dict.fromkeys(c for row in of_shape for c in row["concurrency"]))
        ways = list(dict.fromkeys(row["way"] for row in of_shape))
        ways.sort(key=WAYS.index)
        for count, figure in (("", "prompt_tokens_per_s"), *itertools.product(counts, FIGURES)):
            values = {
                way: [_figure(row, count, figure) for row in of_shape if row["way"] == way]
                for way in ways
            }
            lines.extend(_lines((shape, count or str(PROMPTS), figure), values))
        said.extend(_agreements(shape, of_shape, counts, ways))
        for way in ways:
            if way != VLLM:
                said.append(_answered(shape, way, of_shape))
    for row in rows:
        if "lost" in row:
            said.append(f"run {row['run']}, {row['shape']}, {row['way']}: lost: {row['lost']}")
    return "\n".join([table(lines, frozenset(range(4, 9))), *said])


def _figure(row: Mapping[str, Any], count: str, figure: str) -> float:
    return float(row["concurrency"][count][figure] if count else row[figure])


def _lines(what: tuple[str, str, str], values: Mapping[str, Sequence[float]]) -> Iterator[Any]:
    is_rate = what[2].endswith("per_s")
    shown = "{:.0f}" if is_rate else "{:.2f}"
    for way, found in values.items():
        ordered = sorted(found, reverse=is_rate)
        median, speed = statistics.median(found), ""
        if way != VLLM and (own := values.get(VLLM)):
            ratio = median / statistics.median(own)
            speed = f"{ratio if is_rate else 1 / ratio:.3f}"
        cells = (shown.format(value) for value in (median, ordered[0], ordered[-1]))
        yield *what, way, str(len(found)), *cells, speed


def _agreements(
    shape: str, rows: Sequence[Mapping[str, Any]], counts: Sequence[str], ways: Sequence[str]
) -> Iterator[str]:
    for count, way in itertools.product(counts, ways):
        tokens = {
            one: [row["concurrency"][count]["tokens"] for row in rows if row["way"] == one]
            for one in (VLLM, way)
        }
        wanted = tokens[VLLM][:1]
        others = tokens[way][1:] if way == VLLM else tokens[way]
        if wanted and others:
            same, every = agreement(wanted[0], others[0])
            yield f"{shape}, {count} requests: {way} has {same} of {every} tokens of {VLLM}'s"


def agreement(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens of all sequences up to the first that differs in each, and all tokens."""
    same = sum(
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*one, strict=True)))
        for one in zip(wanted, found, strict=True)
    )
    return same, sum(map(len, wanted))


def _answered(shape: str, way: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Calls of attention by what answered them, in the last run of a way."""
    row = [row for row in rows if row["way"] == way][-1]
    parts = []
    for part in ("captured", "eager"):
        counts = row[part]
        refused = [f"{number} {kind}" for kind, number in counts["fallbacks"].items()]
        parts.append(f"{part} {counts['hits']} tuned, {'; '.join(refused) or 'none refused'}")
    return f"{shape}, {way}: {row['attention']}; {'; '.join(parts)}"
