"""``scripts/bench tuner``: how good this tuner is, by five figures, on one list of problems.

Problems are drawn from models that made no selection (`tuner_problems`). Each choice is timed
beside every built kernel of every family in one interleaved pass (`tuner_truth`).
``docs/pages/figures.md`` defines the figures.

``untuned`` judges what a call gets without tuning. ``quick`` and ``full`` sweep each problem first,
by ``tuner sweep`` into an empty store. Rows of two runs of one preset show flips and fidelity:
``--table FIRST SECOND``. ``kernels`` times what is built at problems of the models that selections
are made from. ``rivals`` replays recorded sweeps by other tuners (`tuner_rivals`), ``recorded`` by
the own samplers (`tuner_recorded`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    harness,
    tuner_figures,
    tuner_problems,
    tuner_recorded,
    tuner_rivals,
    tuner_sweeps,
    tuner_truth,
)
from benchmarks.harness import Bench, Preset, Row
from benchmarks.own_plans import compile_specs
from benchmarks.tuner_problems import COUNT, Judged
from tuner.cli import Parser
from tuner.config import Config
from tuner.problem import AttentionProblem, GemmProblem
from tuner.runners import recording_archive
from tuner.selection.reader import find_gpu

SWEEP_S = 1500.0
SWEEP_FACTS = (
    *("first_answer_s", "first_own_s", "best_s", "elapsed_s", "process_s", "said"),
    *("cpu_s", "compile_cpu_s", "cpu_s_a_kernel", "cores", "compiled", "given_up"),
    *("expected_loss", "replayed"),
)
"""Facts of a sweep that a row repeats."""


def cases(args: Namespace, models: str = "held-out") -> list[Judged]:
    """The seed's problems of some models, or those of ``--file``."""
    if args.file is not None:
        return tuner_problems.of_file(args.file)
    return tuner_problems.drawn(args.seed, args.problems, models)


def seeded(args: Namespace) -> list[Judged]:
    """The seed's problems, each swept with every seed of ``--seeds``."""
    return [replace(case, seed=seed) for case in cases(args) for seed in range(args.seeds)]


def compile_untuned(args: Namespace) -> None:
    """Compile what the selection ranks first at the problems and their neighbours."""
    gpu = find_gpu(args.gpu)
    specs = [spec for case in cases(args) for spec in tuner_truth.wanted(case, gpu)]
    compile_specs(specs, serves=True)


def untuned(case: Judged, _: Namespace) -> Row:
    """The untuned call beside all built kernels."""
    return tuner_truth.untuned(case)


def surveyed(case: Judged, _: Namespace) -> Row:
    """All built kernels of a problem."""
    return tuner_truth.surveyed(case)


def products(args: Namespace) -> list[Judged]:
    """The seed's products without factors."""
    return [case for case in cases(args) if case.group == tuner_problems.PRODUCTS]


def beside(name: str) -> Callable[[Judged, Namespace], Row]:
    """Measures the untuned call beside another tuner's choice."""
    return lambda case, _: tuner_truth.beside(case, name)


def _rival(name: str, text: str) -> Preset:
    return Preset(
        f"products beside {text}",
        *(products, beside(name), partial(tuner_figures.rival_line, name)),
        partial(tuner_figures.rival_table, name),
        limit_s=SWEEP_S,
        smoke=Judged(tuner_problems.PRODUCTS, GemmProblem(9, 64, 32, dtype="bfloat16")),
        listing=listing,
        compile=compile_untuned,
    )


def sweeping(effort: str) -> Callable[[Judged, Namespace], Row]:
    """Measures the winner of a sweep beside all kernels that are built then."""

    def measure(case: Judged, args: Namespace) -> Row:
        assert case.seed is not None
        further = ["--effort", effort, *args.sweep.split()]
        with tuner_sweeps.used_mib() as used:
            row = tuner_sweeps.swept(case.problem, case.seed, further, is_fresh=args.fresh)
        winner = Config.from_json(row["winner"])
        judged = tuner_truth.judged(case, winner, _earlier(case, args))
        operands = sum(operand.bytes for operand in case.problem.operands) / 2**20
        return {
            **{name: row[name] for name in SWEEP_FACTS},
            **{"evaluations": row["kernels"], "swept_us": row["us"]["tuner"]},
            "phases": row["seconds"],
            **judged,
            "extra_mib": max(used) - used[0] - operands if used else None,
            "judged": tuner_truth.own_name(winner) if row["is_own"] else "pytorch",
            **({} if row["is_own"] else {"choice": None}),
        }

    return measure


def _earlier(case: Judged, args: Namespace) -> list[Config]:
    """Winners of the problem's sweeps with other seeds, from the file of rows."""
    if args.json is None or not Path(args.json).exists():
        return []
    problem = case.problem.to_json()
    same = [row for row in harness.read(args.json)[1] if row.get("problem") == problem]
    return [Config.from_json(row["choice"]) for row in same if row.get("choice") is not None]


def listing(judged: Sequence[Judged], _: Namespace) -> list[str]:
    """Each problem behind its kind."""
    return [f"{case.group}: {case.label}" for case in judged]


def options(parser: Parser) -> None:
    """Options of the list and of the sweeps."""
    harness.add_answers(parser)
    add = parser.add_argument
    add("--problems", type=int, default=COUNT, metavar="N", help=f"problems to draw ({COUNT})")
    add("--file", type=Path, help="problems of a list for tuner sweep, in place of the draw")
    add("--seeds", type=int, default=1, metavar="N", help="quick, full: sweeps a problem (1)")
    add("--fresh", action="store_true", help="quick, full: sweeps compile into an empty cache")
    add("--sweep", default="", metavar="OPTIONS", help="further options of tuner sweep, quoted")
    add("--recordings", type=Path, default=recording_archive.folder(), metavar="DIR",
        help="rivals, recorded: folder of recordings (default: the shipped ones)")  # fmt: skip
    add("--times", type=int, default=10, metavar="N", help="rivals, recorded: seeds (default 10)")
    samplers = ",".join(tuner_rivals.SAMPLERS)
    add("--optuna", default=samplers, metavar="NAME,...", help=f"rivals: default {samplers}")
    own = tuner_recorded.SAMPLERS
    add("--samplers", default=own, metavar="NAME,...", help=f"recorded: default {own}")
    add("--in-flight", type=int, default=1, metavar="N", help="recorded: compiled at once (1)")
    add("--least-groups", type=int, default=32, metavar="N", help="recorded: kernels (default 32)")
    add("--kernel-tuner", metavar="PYTHON", help="rivals: a Python that has kernel_tuner")
    add("--gpu", default="H200", help="--compile-only: GPU whose selections are built")


_SMOKE = Judged(
    tuner_problems.DECODING, AttentionProblem.parse("B=2,H=4,HKV=2,SQ=1,SKV=40,D=64,dtype=bf16")
)
UNTUNED = Preset(
    "what a call gets without tuning, beside every built kernel",
    *(cases, untuned, tuner_figures.line, tuner_figures.table),
    limit_s=60.0,
    smoke=_SMOKE,
    listing=listing,
    compile=compile_untuned,
)


def _swept(effort: str, text: str) -> Preset:
    smoke: Any = replace(_SMOKE, seed=0)
    return replace(
        UNTUNED,
        text=text,
        cases=seeded,
        measure=sweeping(effort),
        limit_s=SWEEP_S,
        smoke=smoke,
        compile=None,
    )


BENCH = Bench(
    "tuner",
    __doc__,
    {
        "untuned": UNTUNED,
        "quick": _swept("quick", "winners of sweeps with the default effort"),
        "full": _swept("full", "winners of sweeps with --effort full"),
        "kernels": Preset(
            "every built kernel at other models' problems, for fits",
            *(
                partial(cases, models="making"),
                surveyed,
                tuner_figures.survey_line,
                tuner_figures.survey_table,
            ),
            limit_s=60.0,
            smoke=_SMOKE,
            listing=listing,
        ),
        tuner_truth.INDUCTOR: _rival(tuner_truth.INDUCTOR, "torch.compile with max-autotune"),
        tuner_truth.HELION: _rival(tuner_truth.HELION, "Helion; settings by its variables"),
        "rivals": Preset(
            "other tuners on recorded spaces by evaluations; no GPU",
            *(tuner_rivals.spaces, tuner_rivals.measure, tuner_rivals.line, tuner_rivals.table),
            limit_s=3 * 3600.0,
            smoke=tuner_rivals.SMOKE,
            needs_gpu=False,
        ),
        "recorded": Preset(
            "own samplers on recorded sweeps by compiles, and simulated seconds; no GPU",
            *(tuner_recorded.cases, tuner_recorded.measure),
            *(tuner_recorded.line, tuner_recorded.table),
            limit_s=3 * 3600.0,
            smoke=tuner_recorded.SMOKE,
            needs_gpu=False,
        ),
    },
    options,
)
