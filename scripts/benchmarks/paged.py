"""Attention over paged caches: what is served, FlashAttention-3's serving build, the dense kernel.

``scripts/bench paged`` times decoding, chunks of prompts and batches of both as an engine has them.
Each call stands behind a kernel that writes its queries. Caches are rotated, so that none is in the
L2. Contenders of a case:

- ``tuner``: `tuner.paged_attention`, with the kernel and the number of splits that it selects
- ``flash3``: FlashAttention-3's serving build with its scheduler's metadata, made before
- ``dense``: `tuner.attention` over a dense cache, where all sequences are alike and have one query
- ``in order``: as ``tuner``, over pages that lie in their order, beside ``dense``
- ``read``: PyTorch's sum of as many bytes in their order, beside ``dense``
- ``pytorch``: of heads wider than 256, PyTorch's operator over gathered pages
- ``best``: with ``--schedules``, the fastest schedule of the kernels that are built
- ``own length``: of a captured graph that is made for longer caches, one made for this length

The preset ``step`` times attention between the products of a layer: the time of a step less that
of one without attention. ``mla`` times `tuner.mla_decode` beside FlashMLA and PyTorch's operations.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks import harness, paged_batches, paged_mla, paged_step, rows
from benchmarks.call_times import CONTROL
from benchmarks.harness import Bench, Preset, Row
from benchmarks.own_plans import compile_specs
from benchmarks.paged_batches import Case
from benchmarks.paged_calls import PEER, Batch, answer, specs_of, timed
from tuner.cli import Parser
from tuner.families.peers import installed
from tuner.problem import E4M3
from tuner.problem.attention import NARROW_HEAD_DIM

#: Microseconds of replays of a pass, and its part that the pass over all schedules takes.
BUDGET_US, QUICK = 4e5, 0.25
#: Peers of a table.
OVER = {
    "flash3": "FlashAttention-3",
    "pytorch": "PyTorch over gathered pages",
    "dense": "the dense call",
    "own length": "a graph of that length",
}


def measure(case: Case, args: Namespace) -> Row:
    """Times of one case; with ``--schedules`` of every schedule too, for `tuner fit paged`."""
    import tuner

    batch = Batch(case)
    own = dict(batch.schedules()) if args.schedules else {}
    _, quick, failed = timed(batch, own, QUICK * args.us)
    quick.pop(CONTROL, None)  # a schedule's second time is none of its own
    best = min(quick, key=lambda name: quick[name], default="")
    own_call = partial(batch.tuner, longest=case.longest)
    calls = {"tuner": own_call(batch.tables), **({"best": own[best]} if best else {})}
    if case.room:
        calls["own length"] = batch.tuner(batch.tables, max(case.keys))
    module = installed.module_of(PEER)
    if case.problem.is_wide:
        module = f"flash3 has no head dimension above {NARROW_HEAD_DIM}"
        calls |= {"pytorch": batch.pytorch()} if case.has_dense else {}
    if isinstance(module, str):
        failed["flash3"] = module
    else:
        calls["flash3"] = batch.flash3(module)
    if case.has_dense:
        calls |= {"dense": batch.dense(), "in order": own_call(batch.ordered)}
        calls["read"] = batch.read()
    tuner.stats(reset=True)
    outs, us, missing = timed(batch, calls, args.us)
    problem = {"problem": case.problem.to_json()}
    lengths = {**problem, "queries": case.queries, "keys": case.keys} if args.schedules else {}
    answers = {name: stats for name, (_, stats) in outs.items() if name in ("tuner", "dense")}
    return {
        "bytes": case.bytes,
        "flops": case.flops,
        "us": us,
        "answered": {name: answer(stats) for name, stats in answers.items()},
        "chosen": batch.selected(),
        "best": best,
        "schedules": quick,
        **lengths,
        "errors": {
            name: harness.distance(outs[name][0].flatten(), outs[peer][0].flatten())
            for name in ("tuner", "best")
            for peer in ("flash3", "pytorch")
            if name in outs and peer in outs
        },
        "failed": failed | missing,
    }


def line(row: Row) -> str:
    """Rates of one case, times over the tuner's, and the schedules."""
    us = row["us"]
    own = us.get("tuner", math.nan)
    others = "".join(
        f" | {name} {us[name]:.1f} {us[name] / own:.3f}" for name in us if name != "tuner"
    )
    text = (
        f"{row['case']:56} {own:8.1f} us {row['bytes'] / own / 1e6:5.2f} TB/s "
        f"{row['flops'] / own / 1e6:5.0f} TFLOP/s{others} | {row['chosen']}"
    )
    text += f", best {row['best']}" if row["best"] not in ("", row["chosen"]) else ""
    slow = {name: by for name, by in row["answered"].items() if by != "own"}
    return text + "".join(f" | {name}: {by}" for name, by in {**slow, **row["failed"]}.items())


def table(every: Sequence[Row]) -> list[str]:
    """By group: other times over the tuner's, mean and least, as far as a group has them; and the
    best schedule's, where schedules were timed.
    """
    peers = {name: text for name, text in OVER.items() if any(name in row["us"] for row in every)}
    heads = [head for text in peers.values() for head in (f"over {text}", "least")]
    lines = [("batches", "cases", *heads, "of the best schedule", "control")]
    for group in dict.fromkeys(row["group"] for row in every):
        mine = [row for row in every if row["group"] == group]
        columns = {
            name: rows.figures(rows.values(mine, partial(rows.over, name=name)))
            for name in (*peers, "best", "control")
        }
        cells = [cell for name in peers for cell in columns[name]]
        last = columns["best"][0], columns["control"][0]
        lines.append((group, str(len(mine)), *cells, *last))
    return rows.markdown(lines)


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--schedules", action="store_true", help="also every schedule of the kernels")
    add(
        "--us", type=float, default=BUDGET_US, help="microseconds of a case's replays (default 4e5)"
    )


def _preset(text: str, cases: Callable[[], list[Case]], smoke: Case) -> Preset:
    def compile_all(_: Namespace) -> None:
        compile_specs(spec for case in cases() for spec in specs_of(case).values())

    return Preset(text, lambda _: cases(), measure, line, table, smoke=smoke, compile=compile_all)


BENCH = Bench(
    "paged",
    __doc__,
    {
        "served": _preset(
            "batches as engines have them",
            paged_batches.served,
            Case("decode", (1, 1), (48, 48), 16, 4, 2, 64),
        ),
        "engines": _preset(
            "prompts, chunks and decoding beside an engine's kernel, for `tuner fit engines`",
            paged_batches.engines,
            Case("engine", (1, 1), (48, 48), 16, 4, 2, 64),
        ),
        "ratios": _preset(
            "200 draws of every ratio of heads",
            paged_batches.ratios,
            Case("ratios", (4, 4), (40, 33), 16, 4, 2, 64, is_halved=True),
        ),
        "quantised": _preset(
            "100 draws of every ratio of heads up to 32, in e4m3",
            paged_batches.quantised,
            Case("ratios of e4m3", (4, 4), (40, 33), 16, 24, 2, 64, dtype=E4M3),
        ),
        "graphs": _preset(
            "captured graphs for 4K and 32K keys, replayed at all lengths",
            paged_batches.graphs,
            Case("graph for 96, alike", (1, 1), (48, 48), 16, 4, 2, 64, room=96),
        ),
        "wide": _preset(
            "heads of 320 and 512 columns",
            paged_batches.wide,
            Case("wide", (1, 1), (64, 64), 64, 4, 2, 264),
        ),
        "step": replace(
            _preset(
                "attention between the products of a layer, in captured graphs",
                paged_step.cases,
                Case("step", (1, 1), (48, 40), 16, 4, 2, 64, room=96),
            ),
            measure=paged_step.measure,
        ),
        "mla": Preset(
            "decoding of latent attention",
            lambda _: paged_mla.CASES,
            paged_mla.measure,
            rows.rates_line,
            smoke=paged_mla.Case(2, 70, 4),
        ),
    },
    _options,
)
