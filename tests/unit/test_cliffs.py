"""`scripts/bench cliffs`: draws from every domain, smaller calls, and what a file's rows become."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench_device import fake_device, fake_gpu  # noqa: F401

from benchmarks import cliffs, cliffs_draws, harness, rows
from benchmarks.cliffs_draws import Draw, Packed, Plain, draws, smaller, strata
from benchmarks.paged_batches import Case as Pages
from tuner.problem import E4M3, AttentionProblem, GemmProblem
from tuner.problem.population import ModelCall

DRAWN = draws("a seed", 400)


def test_draws_take_turns_over_all_domains_and_depend_on_seed_and_index() -> None:
    names = [name for name, _ in strata()]
    assert [draw.group for draw in DRAWN] == [names[i % len(names)] for i in range(400)]
    assert draws("a seed", 90) == DRAWN[:90]
    assert draws("another", 90) != DRAWN[:90]
    compiled = {draw.group for draw in draws("x", 2000) if not draw.index % cliffs.COMPILED_EVERY}
    assert len(compiled) == 50, "the compiled peers meet 50 domains, none twice"


def test_calls_are_small_legal_and_of_many_shapes() -> None:
    kinds = Counter(type(draw.call) for draw in DRAWN)
    assert set(kinds) == {ModelCall, Pages, Packed, Plain}
    assert all(cliffs_draws.is_small(draw.call) for draw in DRAWN)
    attention = [
        draw.call.problem
        for draw in DRAWN
        if isinstance(draw.call, ModelCall) and isinstance(draw.call.problem, AttentionProblem)
    ]
    assert {problem.head_dim % 8 for problem in attention} == {0}
    assert len({problem.head_dim for problem in attention}) > 20
    assert len({problem.heads_q // problem.heads_kv for problem in attention}) > 10
    assert min(problem.seqlen_kv for problem in attention) < 4
    pages = [draw.call for draw in DRAWN if isinstance(draw.call, Pages)]
    assert {case.dtype for case in pages} == {"bfloat16", E4M3}
    assert any(len(set(case.keys)) > 1 for case in pages) and len({c.page_size for c in pages}) == 4


@pytest.mark.parametrize("draw", DRAWN[: len(list(strata()))], ids=lambda draw: draw.group)
def test_every_smaller_call_is_smaller_and_the_descent_ends(draw: Draw) -> None:
    call, steps = draw.call, 0
    while candidates := list(smaller(call)):
        assert all(candidate.label != call.label for candidate in candidates)
        call, steps = candidates[-1], steps + 1
        assert steps < 100
    assert cliffs_draws.is_small(call)


def ratio_of(call: Any) -> float:
    """A cliff at 4096 columns and more, of any M and K."""
    return 0.5 if call.problem.n >= 4096 else 1.1


def measured(call: Any) -> dict[str, Any]:
    return {"us": {"pytorch": 10.0 * ratio_of(call), "tuner": 10.0}, "failed": {}}


def test_a_cliff_shrinks_to_the_smallest_call_that_shows_it() -> None:
    call = Plain(GemmProblem(300, 16384, 2048, dtype=E4M3, scales="row"))
    row = cliffs.smallest(call, measured, lambda: 0.0)
    left = GemmProblem(1, 4096, 16, dtype=E4M3, scales="row")
    assert row["smallest"] == Plain(left).label and row["steps"] == 8 + 2 + 7
    assert rows.over_fastest(row) == 0.5


def test_a_call_that_is_no_cliff_any_more_says_so_and_time_ends_a_descent() -> None:
    fine = Plain(GemmProblem(300, 2048, 2048, dtype=E4M3, scales="row"))
    assert cliffs.smallest(fine, measured, lambda: 0.0)["smallest"] == ""
    steep = Plain(GemmProblem(300, 16384, 2048, dtype=E4M3, scales="row"))
    now = iter(range(0, 1000, 50))
    assert cliffs.smallest(steep, measured, lambda: float(next(now)))["steps"] == 1


def test_a_smaller_call_that_fails_is_passed_over() -> None:
    def failing(call: Any) -> dict[str, Any]:
        if call.problem.m < 300:
            raise RuntimeError("too few rows")
        return measured(call)

    call = Plain(GemmProblem(300, 4096, 32, dtype=E4M3, scales="row"))
    row = cliffs.smallest(call, failing, lambda: 0.0)
    assert row["smallest"].startswith("gemm M=300,N=4096,K=16,") and row["steps"] == 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run over 20 draws: 5 is a cliff, 10 is slow, 3 is lost, and 7 has no peer."""
    path = tmp_path / "rows.jsonl"
    head = {"format": rows.FORMAT, "bench": "cliffs", "preset": "draws", "gpu": "H200"}
    lines: list[dict[str, Any]] = [{**head, "options": {"seed": "s", "count": "20"}}]
    for draw in draws("s", 20):
        ratio = {5: 0.4, 10: 0.95}.get(draw.index, 1.1)
        us = {"pytorch": 10 * ratio, "tuner": 10.0, "control": 10 * ratio}
        us = {"tuner": 10.0} if draw.index == 7 else us
        row = {"case": draw.label, "group": draw.group, "us": us, "failed": {}}
        lost = {"case": draw.label, "group": draw.group, "lost": "no answer"}
        lines.append(lost if draw.index == 3 else {**row, "answered": "selection"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("preset", "indices"),
    [("failures", [3, 5, 10]), ("smallest", [3, 5]), ("worst", [3] * 3 + [5] * 3 + [10] * 3)],
)
def test_presets_take_their_calls_from_a_file(file: Path, preset: str, indices: list[int]) -> None:
    args = harness.parser_of(cliffs.BENCH).parse_args(["--rows", str(file)])
    cases = cliffs.BENCH.presets[preset].cases(args)
    assert [case.index for case in cases][: len(indices)] == indices
    assert len({case.label for case in cases}) == len(cases)


def test_the_table_has_totals_and_the_worst_domain_first(file: Path) -> None:
    _, every = rows.read(file)
    lines = cliffs.table(every)
    assert "18 timed, 11.1% below 0.97, own share: attention 95%, products 0%" in lines
    domains = lines[len(lines) - lines[::-1].index("") - 24 :]
    assert any(
        line.startswith(f"| {draws('s', 20)[5].group} | 1 | 1 | 0.400 |") for line in domains[2:4]
    )
    assert any(line.startswith("- 0.400 selection: 5 ") for line in lines)
    assert lines[-1].startswith("- wrong or lost: 3 ") and lines[-1].endswith("no answer")


SMALL = {
    "paged": Pages("", (1, 1), (20, 33), 16, 10, 2, 64),
    "window": Pages("", (3, 1), (40, 33), 16, 4, 2, 64, window=8),
    "e4m3 cache": Pages("", (1,), (20,), 16, 4, 2, 64, dtype=E4M3),
    "packed": Packed(
        AttentionProblem.parse("B=2,H=4,HKV=2,S=30,D=16,causal=1,dtype=bf16,varlen=1,layout=bshd"),
        (30, 7),
    ),
    "sinks": Pages("", (1, 1), (20, 33), 16, 4, 2, 64, has_sinks=True),
    "plain": Plain(GemmProblem(16, 24, 40, dtype="float16")),
    "rows": Plain(GemmProblem(16, 32, 64, dtype=E4M3, scales="row")),
}


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("name", SMALL)
def test_kinds_of_calls_are_made_and_checked(name: str, monkeypatch: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from bench_device import on_the_cpu

    from benchmarks import cliffs_calls

    monkeypatch.setattr(cliffs_calls, "algorithm_ways", lambda *_: [])
    with on_the_cpu():
        row = cliffs_calls.measured(SMALL[name])
    assert row["us"].get("tuner") == 8.0, row
    assert row["errors"]["tuner"] < 0.03 and not row["wrong"]
    assert row["answered"] == "pytorch" and row["reason"]
    json.dumps(row)


def test_the_page_of_figures_has_the_shares_of_the_committed_draws() -> None:
    root = Path(__file__).parents[2]
    _, every = rows.read(root / "scripts/benchmarks/results/cliffs.jsonl.gz")
    assert len({row["case"] for row in every}) == len(every)
    ratios = rows.values(every, rows.over_fastest)
    share = sum(ratio < rows.FLOOR for ratio in ratios) / len(ratios)
    page = (root / "docs/pages/figures.md").read_text()
    mean, worst = rows.figures(ratios)
    assert f"| all | {len(ratios)} | {mean} | {worst} | {100 * share:.1f} % |" in page
