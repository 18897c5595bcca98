"""Figures that pages print are those of the data that ships."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from operator import eq
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pytest
from shipped_recordings import recording_of

from benchmarks import batching, batching_judge, calls, cost, fp8_attention, paged, sustained
from benchmarks.population_report import OWN, SELECTED, over_peer, over_pytorch
from tuner.base import resources
from tuner.bench.suites import SUITES
from tuner.families import family
from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, Problem
from tuner.selection.reader import shipped
from tuner.store.entry import Entry
from tuner.tuning.job import read_problems

H200 = GPUS["H200"]
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "scripts" / "benchmarks" / "evidence"
RESULTS = ROOT / "scripts" / "benchmarks" / "README.md"
"""Where every line of the final passes is printed."""


#: A line of its first table: the sizes, the mask, a mark, and the figures.
_LINE = re.compile(r"\| \((\d+),(\d+),(\d+),(\d+)\)( causal)?(?: \\?\*)? \|(.*)\|")


def _readme_lines() -> list[tuple[AttentionProblem, list[str]]]:
    found = []
    for line in RESULTS.read_text().splitlines():
        if match := _LINE.match(line):
            batch, heads, seqlen, head_dim = map(int, match.group(1, 2, 3, 4))
            problem = AttentionProblem(
                seqlen, seqlen, head_dim, batch, heads, is_causal=match[5] is not None
            )
            found.append((problem, [cell.strip() for cell in match[6].split("|")]))
    return found


def _as_printed(text: str, value: float) -> bool:
    """True when a printed number is the value, rounded to the number's digits."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.51 * 10**-digits


@pytest.mark.parametrize(
    ("problem", "cells"), _readme_lines(), ids=[p.label() for p, _ in _readme_lines()]
)
def test_the_readme_prints_what_ships(problem: AttentionProblem, cells: list[str]) -> None:
    """Each figure of its table is in ``cache/tuned``, with its environment."""
    (entry,) = [
        e
        for e in shipped()
        if (e.problem, e.gpu, e.regime) == (problem, H200, Regime.default(problem.op).chained)
    ]
    own, vendors = entry.best_own, {name: m.latency_us for name, m in entry.vendors.items()}
    assert own is not None and own.latency_us is not None and own.tflops is not None
    name, us = cells[0].split()
    assert name == own.config.family and _as_printed(us, own.latency_us)
    assert _as_printed(cells[1], own.tflops)
    assert _as_printed(cells[2], vendors["cudnn"] or 0)
    assert _as_printed(cells[3], min(vendors["flash3"] or 0, vendors["flash3_splits"] or 0))
    assert _as_printed(cells[4], vendors["flash4"] or 0)
    assert _as_printed(cells[5], min(filter(None, vendors.values())) / own.latency_us)
    configs = {m.config for m in recording_of(problem).measurements}
    groups = {family(c.family).compile_digest(c) for c in configs if not family(c.family).is_vendor}
    assert int(cells[6]) == len(groups)


def shipped_of(problems: Iterable[Problem], gpu: str) -> list[Entry]:
    """The decisions of those of the problems that ship for a GPU, each in its usual state."""
    wanted = {(problem, cost.estimated(problem)) for problem in problems}
    of_gpu = (e for e in shipped() if e.gpu == GPUS[gpu])
    return [e for e in of_gpu if (e.problem, e.regime) in wanted]


def summary(entries: list[Entry]) -> tuple[int, str, str]:
    """How many; mean and worst of the fastest vendor's time over the best own kernel's."""
    ratios = []
    for entry in entries:
        assert entry.best_own is not None and entry.best_own.latency_us
        vendors = filter(None, (m.latency_us for m in entry.vendors.values()))
        ratios.append(min(vendors) / entry.best_own.latency_us)
    return len(ratios), f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"


@pytest.mark.parametrize(
    ("group", "gpu", "place"),
    [
        ("H200, acceptance suite", "H200", ""),
        ("H200, other shapes (`cache/grid/attention.yaml`)", "H200", "attention"),
        ("H200, decoding, other shapes", "H200", "decoding"),
        ("H200, products, other shapes", "H200", "gemm"),
        ("H100 80GB HBM3, acceptance suite", "H100", ""),
        ("H100 80GB HBM3, decoding suite", "H100", "suite"),
    ],
)
def test_the_readme_s_summaries_are_of_what_ships(group: str, gpu: str, place: str) -> None:
    if place in ("", "suite"):
        problems: Iterable[Problem] = SUITES["decoding" if place else "acceptance"].problems
    else:
        op = "gemm" if place == "gemm" else "attention"
        problems = read_problems(resources.cache() / "grid" / f"{place}.yaml", op)
    rows = [x for x in RESULTS.read_text().splitlines() if x.startswith(f"| {group}")]
    (printed,) = [[cell.strip() for cell in row.split("|")[2:5]] for row in rows]
    count, mean, worst = summary(shipped_of(problems, gpu))
    assert printed == [str(count), mean, worst]


def test_the_table_of_final_passes_is_read() -> None:
    assert len(_readme_lines()) > 8


#: Rows of the README's table: the beginning of a name, the suite, and which of its problems.
STREAM: dict[str, tuple[str, Callable[[Problem], bool]]] = {
    "attention, acceptance suite, up to": ("acceptance", lambda p: p.seqlen_q <= 1024),
    "attention, acceptance suite, 2048": ("acceptance", lambda p: p.seqlen_q > 1024),
    "attention, decoding": ("decoding", lambda p: True),
    "products of 1 to 64 rows": ("few", lambda p: True),
}


GROUPS: dict[str, tuple[str, Callable[[Problem], bool]]] = {
    "products, plain": ("plain", lambda p: True),
    "products with bias": ("mlp", lambda p: True),
    "products of e4m3, chained": ("fp8", lambda p: True),
}


def readme_row(name: str) -> list[str]:
    """Cells of a row of the README's tables behind its name."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {name}")]
    return [cell.strip().strip("*") for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("name", GROUPS)
def test_the_readme_s_table_is_of_what_ships(name: str) -> None:
    suite, belongs = GROUPS[name]
    problems = [problem for problem in SUITES[suite].problems if belongs(problem)]
    count, mean, worst = summary(shipped_of(problems, "H200"))
    assert readme_row(name) == [str(count), mean, worst]


def test_the_readme_s_row_of_swiglu_is_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "bench-swiglu-gated.json.gz", "rt") as file:
        rows = [row for run in json.load(file)["runs"] for row in run["rows"]]
    ratios = [
        kernel["latency_us"] / row["own_us"]
        for row in rows
        for kernel in row["kernels"]
        if kernel["name"] == "inductor"
    ]
    count = f"{len(ratios)} of {len(SUITES['gated'].problems)}"
    assert readme_row("SwiGLU") == [count, f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"]


@pytest.mark.parametrize("name", STREAM)
def test_the_readme_s_rows_in_a_stream_are_of_what_ships(name: str) -> None:
    suite, belongs = STREAM[name]
    problems = [problem for problem in SUITES[suite].problems if belongs(problem)]
    timed = {
        entry.problem: next(iter(entry.speedups.values()))
        for entry in shipped()
        if entry.gpu == GPUS["H200"] and entry.regime.launch == "stream" and entry.speedups
    }
    found = [timed[problem] for problem in problems if problem in timed]
    count = f"{len(found)} of {len(problems)}" if len(found) < len(problems) else f"{len(found)}"
    mean = geometric_mean(found)
    assert readme_row(name) == [count, f"{mean:.3f}", f"{min(found):.3f}"]


def test_the_readme_s_row_of_attention_in_e4m3_is_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "fp8-attention-h200.json.gz", "rt") as file:
        problems = json.load(file)["problems"]

    def leads(peer: str) -> tuple[float, float]:
        found = []
        for problem in problems:
            own = min(row["us"] for row in problem["rows"] if row["is_own"])
            times = [row["us"] for row in problem["rows"] if row["name"].startswith(peer)]
            found.append(min(times) / own)
        assert len(found) == len(fp8_attention.SHAPES)
        return geometric_mean(found), min(found)

    figures = [
        f"{flash:.3f} ({cudnn:.3f})"
        for flash, cudnn in zip(leads("flash3_serving"), leads("cudnn"), strict=True)
    ]
    assert readme_row("attention of e4m3") == ["8", *figures]


def test_the_page_prints_the_loads_of_the_evidence() -> None:
    page = RESULTS.read_text()
    for found in json.loads((EVIDENCE / "sustained-h100.json").read_text())["problems"]:
        cells, ratios = [], sustained.leads(found)
        for load in ("bursts_us", "sustained_us"):
            times = found[load]
            own = min(us for name, us in times.items() if name in found["own"])
            other = min(us for name, us in times.items() if name not in found["own"])
            cells += [f"{own:.0f}", f"{other:.0f}", f"{ratios[load]:.3f}"]
        of = found["problem"]
        name = f"({of['batch']},{of['heads_q']}/{of['heads_kv']},{of['seqlen_kv']},128)"
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_the_page_prints_e4m3_of_the_evidence() -> None:
    page = RESULTS.read_text()
    with gzip.open(EVIDENCE / "fp8-attention-h100.json.gz", "rt") as file:
        problems = json.load(file)["problems"]
    for found in problems:
        own = next(row for row in found["rows"] if row["is_own"])
        cells = [f"{own['us']:.1f} ({1e3 * own['error']:.2f})"]
        for name in ("flash3_serving", "cudnn"):
            best = next((row for row in found["rows"] if row["name"].startswith(name)), None)
            cells += [f"{best['us']:.1f} ({1e3 * best['error']:.2f})"] if best else []
        lead = fp8_attention.lead(found)
        mask = " causal" if found["problem"]["is_causal"] else ""
        head = f"| {found['problem']['seqlen_q']}{mask} | {' | '.join(cells)}"
        assert lead and f"{head} | {lead[0]:.3f} |" in page


@pytest.mark.parametrize(
    ("operation", "is_own"),
    [(op, own) for op in ("attention", "products") for own in (True, False)] + [("", False)],
)
def test_the_readme_s_population_is_of_the_evidence(operation: str, is_own: bool) -> None:
    with gzip.open(EVIDENCE / "population-h200.jsonl.gz", "rt") as lines:
        _, *rows = map(json.loads, lines)
    of = [row for row in rows if operation in ("", row["operation"])]
    part = [row for row in of if not is_own or row["answered"] in (OWN, SELECTED)]
    over = [[x for row in part if (x := ratio(row))] for ratio in (over_pytorch, over_peer)]
    figures = [f"{x:.3f}" for y in over for x in (geometric_mean(y), min(y))]
    name = f"{operation}, {len(of)}" if operation else f"all {len(of)}"
    by = "own kernels" if is_own else "all"
    share = f"{100 * len(part) / len(of):.0f} %"
    lines_of = (ROOT / "README.md").read_text().splitlines()
    found = [[c.strip().strip("*") for c in line.split("|")[1:-1]] for line in lines_of]
    assert [name, by, share, *figures] in found


def test_the_page_prints_sections_of_heads_of_the_evidence() -> None:
    found = json.loads((EVIDENCE / "causal-sections-h200.json").read_text())["problems"]
    page, printed = RESULTS.read_text(), 0
    for text, runs in found.items():
        if "before" not in runs:
            continue
        problem = AttentionProblem.parse(text)
        after = runs["after"]
        theirs = min(us for name, us in after.items() if name.startswith("flash3"))
        sizes = f"{problem.batch}, {problem.heads_q}, {problem.seqlen_q}"
        times = f"{runs['before']['own']:.1f} | {after['own']:.1f} | {theirs:.1f}"
        assert f"| {sizes} | {times} |" in page
        printed += 1
    assert printed == 3


def test_pages_print_the_block_of_the_evidence() -> None:
    page = RESULTS.read_text()
    for gpu in ("h100", "h200"):
        with gzip.open(EVIDENCE / f"block-{gpu}.json.gz", "rt") as file:
            passes = json.load(file)["passes"]
        found = []
        for name, one in passes.items():
            ways = {way: seen["us"] for way, seen in one["ways"].items()}
            us = ways.pop("torch")
            cells = [f"{time:.1f}, {us / time:.3f}" for time in ways.values()]
            assert f"| {name} | {us:.1f} | {' | '.join(cells)} |" in page
            found.append(us / ways["block"])
    figures = f"{geometric_mean(found):.3f}", f"{min(found):.3f}"
    assert readme_row("a block of Llama-3-8B") == [str(len(found)), *figures]


def test_the_readme_s_row_of_block_masks_is_of_the_evidence() -> None:
    rows = json.loads((EVIDENCE / "served-block-masks.json").read_text())["rows"]
    found = [row["flex_over_own"] for row in rows]
    figures = f"{geometric_mean(found):.3f}", f"{min(found):.3f}"
    assert readme_row("block masks that nobody tuned") == [str(len(found)), *figures]


@pytest.mark.parametrize("name", ["pytorch", "flash-attention"])
def test_the_page_prints_other_projects_tests_of_the_evidence(name: str) -> None:
    evidence = json.loads((EVIDENCE / "suites-h100.json").read_text())
    found = evidence["suites"][name]
    assert (found["new_failures"], found["expected_failures"], found["not_run"]) == ([], [], [])
    assert not evidence["broken"]
    forced, alone = found["forced"], found["alone"]
    cells = [name, found["tests"], forced["skipped"]]
    cells += [f"{mode['passed']}, {mode['failed']}" for mode in (forced, alone)]
    cells += [len(found["new_failures"]), found["tests_with_hits"], found["hits"]]
    cells.append(sum(found["fallbacks"].values()))
    page = RESULTS.read_text()
    assert f"| {' | '.join(map(str, cells))} |" in page
    assert f", {len(found['failures_of_both'])}**: " in page


def test_the_page_prints_the_host_s_time_of_the_evidence() -> None:
    found = json.loads((EVIDENCE / "dispatch-host-h100.json").read_text())["parts"]["host"]
    page = RESULTS.read_text()
    limited = [(float(here), float(most)) for _, here, most, _ in calls.host_rows(found) if most]
    for here, most in limited:
        assert f" | {here:.2f} | {most:.2f} |" in page
    assert [here > most for here, most in limited] == [True, True, True, False, False, False]
    assert f"beyond the bare launch of {found['bare']:.2f} |" in page
    times = {"attention": "takes", "sdpa": "PyTorch's call"}
    times |= {"flash3": "FlashAttention-3's", "flash4": "FlashAttention-4's"}
    for key, name in times.items():
        assert f"{name} {found[key]:.2f}" in page


def test_the_page_prints_paged_caches_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "paged-h200.json.gz", "rt") as text:
        cases = json.load(text)["cases"]
    assert {case["answered"]["tuner"] for case in cases} == {"own"}
    assert not any(case["failed"] for case in cases)
    page = RESULTS.read_text().splitlines()
    assert [line for line in paged.table(cases) if line not in page] == []
    missing = []
    for case in cases:
        if case["group"] != "decode":
            continue
        us, size = case["us"], case["case"].rpartition("=")[2]
        batch, keys = re.findall(r"(?:B|SKV)=(\d+)", case["case"])
        times = (f"{us[name]:.1f}" for name in ("dense", "in order", "read"))
        cells = [f"{batch} x {keys}", size, f"{us['tuner']:.1f}", f"{us['flash3']:.1f}"]
        cells += [f"{us['flash3'] / us['tuner']:.3f}", *times]
        line = f"| {' | '.join(cells)} | {case['bytes'] / us['tuner'] / 1e6:.2f} |"
        missing += [] if line in page else [line]
    assert missing == []


def test_the_page_prints_chunks_over_small_pages_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "paged-schedules-h200.json.gz", "rt") as text:
        first, second = (run["cases"] for run in json.load(text)["runs"])
    page = RESULTS.read_text()
    kernels = "2/160/2/4/16/1 whole persistent", "2/128/2/4/16/1 whole persistent"
    kernels = *kernels, "2/128/2/4/16/1 persistent", "1/64/3/4/16/1 whole", "1/64/3/4/16/1"
    missing = []
    for case in first:
        if case["group"] in ("chunk", "mixed") and "page=16" in case["case"]:
            label = re.sub(r"B=\d+,|,32/8,D=128,page=16", "", case["case"]).replace(",SKV", ", SKV")
            row = " | ".join(f"{case['schedules'][kernel]:.0f}" for kernel in kernels)
            found = [line for line in page.splitlines() if line.startswith(f"| {label}")]
            missing += [] if any(line.endswith(f" | {row} |") for line in found) else [row]
    assert missing == []
    two, three = "1/64/2/4/16/1 whole", "1/64/3/4/16/1 whole"
    ratios: dict[int, list[float]] = {16: [], 128: []}
    for case in second:
        if match := re.match(r"decode B=(16|128),.*page=16$", case["case"]):
            times = case["schedules"]
            if two in times:
                ratios[int(match[1])].append(100 * (times[two] / times[three] - 1))
    less, more = sorted(-ratio for ratio in ratios[128]), sorted(ratios[16])
    assert f"take {less[0]:.1f} to {less[-1]:.1f} % less than three at 128 sequences" in page
    assert f"and {more[0]:.1f} to {more[-1]:.1f} % more at 16" in page
    with gzip.open(EVIDENCE / "paged-chunks-h200.json.gz", "rt") as text:
        last = json.load(text)["runs"][-1]["cases"]
    [sinks] = [case["us"] for case in last if case["case"].startswith("sinks")]
    of_two, of_three = (sinks[f"{count} groups, 128 keys"] for count in (2, 3))
    said = f"{of_two:.0f} us by two groups, {of_three:.0f} by three"
    assert f"{said}, FlashAttention-3 {sinks['flash3']:.0f}" in page


def test_the_page_prints_counters_of_paged_kernels() -> None:
    with gzip.open(EVIDENCE / "paged-counters-h200.json.gz", "rt") as text:
        calls = json.load(text)["calls"]
    page = RESULTS.read_text()
    shown = (("decode B=64,", "1/64/3/4/16/1"), ("decode B=64,", "1/64/3/4/16/1 whole"))
    shown = *shown, ("decode B=64,", "dense"), ("decode B=64,", "flash3")
    shown = *shown, ("chunk", "2/128/2/4/16/1 persistent"), ("chunk", "flash3")
    shown = *shown, ("chunk", "2/160/2/4/16/1 whole persistent")
    for case, call in shown:
        found = [one for one in calls if one["case"].startswith(case) and one["call"] == call]
        counted = next(one["counters"] for one in found if one["case"].endswith("page=16"))
        busy = counted["sm__cycles_active.avg"] / counted["sm__cycles_elapsed.max"]
        dram = counted["dram__throughput.avg.pct_of_peak_sustained_elapsed"]
        pipe = counted["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"]
        us, gb = counted["gpu__time_duration.sum"] / 1e3, counted["lts__t_bytes.sum"] / 1e9
        assert f"| {us:.1f} | {dram:.1f} | {gb:.2f} | {pipe:.1f} | {100 * busy:.1f} |" in page


def engine_runs() -> dict[tuple[str, int, str], dict[str, Any]]:
    with gzip.open(EVIDENCE / "engines-h200.json.gz", "rt") as text:
        rows = json.load(text)["runs"]
    return {(row["shape"], row["run"], row["way"]): row["concurrency"] for row in rows}


def test_the_plug_in_s_tokens_are_vllm_s() -> None:
    """Every run of the evidence, as the benchmarks' README counts them."""
    same = wanted = 0
    found = engine_runs()
    for shape, run, way in found:
        if way != "tuner":
            continue
        for count, served in found[shape, run, way].items():
            theirs = found[shape, run, "vllm"][count]["tokens"]
            for own, other in zip(served["tokens"], theirs, strict=True):
                same += sum(map(eq, own, other))
                wanted += len(other)
    assert f"{same:,} of {wanted:,}" in RESULTS.read_text()


@pytest.mark.parametrize("shape", ["8b", "1b"])
@pytest.mark.parametrize("count", ["1", "16", "128"])
def test_the_page_prints_the_engines_of_the_evidence(count: str, shape: str) -> None:
    found, page = engine_runs(), RESULTS.read_text()
    for figure, name, shown in (
        ("first_token_ms", "first token, ms", "{:.1f}"),
        ("token_ms", "a further token, ms", "{:.2f}"),
        ("tokens_per_s", "output tokens a second", "{:.0f}"),
    ):
        of_way = {
            way: [found[shape, run, way][count][figure] for run in range(5)]
            for way in ("vllm", "tuner")
        }
        cells = [
            "{} ({} to {})".format(*map(shown.format, (median(v), min(v), max(v))))
            for v in of_way.values()
        ]
        ratio = median(of_way["tuner"]) / median(of_way["vllm"])
        ratio = ratio if figure.endswith("per_s") else 1 / ratio
        assert f"| {shape} | {count} | {name} | {' | '.join(cells)} | {ratio:.3f} |" in page


def test_the_page_prints_continuous_batching_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "batching-h200.json.gz", "rt") as text:
        rows = json.load(text)["rows"]
    assert not any("lost" in row or row["fallbacks"] or row["errors"] for row in rows)
    assert len(rows) == 3
    for line in batching.report(rows).splitlines()[2:5]:
        way, *figures = line.split()[:5]
        assert f"| `{way}` | {' | '.join(figures)} |" in RESULTS.read_text()
    speeds = {row["attention"]: row["requests_per_s"] for row in rows}
    ratio = speeds["tuner"] / speeds["flash_attention_3"]
    assert f"The tuner has {ratio:.3f} of FlashAttention-3's speed." in RESULTS.read_text()


def test_the_page_prints_the_training_calls_of_the_evidence() -> None:
    def speeds(file: str, way: str) -> list[float]:
        with gzip.open(EVIDENCE / file, "rt") as text:
            rows = json.load(text)["rows"]
        assert len(rows) == 28 and not any("lost" in row or row["wrong"] for row in rows)
        return [row["us"]["pytorch"] / row["us"][way] for row in rows]

    cells = []
    for file in ("training-flash3-h200.json.gz", "training-h200.json.gz"):
        for way in ("tuner", "enabled"):
            found = speeds(file, way)
            cells.append(f"{geometric_mean(found):.3f}, {min(found):.3f}")
    page = RESULTS.read_text().replace("**", "")
    assert f"| all | 28 | {' | '.join(cells)} |" in page


def test_the_page_prints_the_gradients_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "backward-again-h200.json.gz", "rt") as text:
        found = json.load(text)["problems"]
    groups: dict[str, list[dict[str, float]]] = {}
    for row in found:
        problem, us = row["problem"], {one["name"]: one["us"] for one in row["rows"]}
        columns, is_causal = problem["head_dim"], problem["is_causal"]
        mask = f"{columns}, {'causal' if is_causal else 'full'}"
        name = {80: "80 and 96", 96: "80 and 96", 192: "192", 256: "256"}.get(columns, mask)
        groups.setdefault(name, []).append(us)
        if columns in (64, 128, 256):
            groups.setdefault("all", []).append(us)
    assert len(groups["all"]) == 22
    for name, rows in groups.items():
        ratios = [[us[peer] / us["own"] for us in rows] for peer in ("flash3", "cudnn", "flash2")]
        pair = "flash3, deterministic", "own, ordered"
        ratios.append([us[pair[0]] / us[pair[1]] for us in rows if pair[0] in us])
        ratios.append([fastest_gradients(us) / us["served"] for us in rows])
        cells = [f"{geometric_mean(one):.3f}, {min(one):.3f}" for one in ratios if one]
        pattern = rf"^\| {re.escape(name)} \| {len(rows)} \| {re.escape(' | '.join(cells[:3]))} \|"
        lines = re.findall(pattern + ".*$", RESULTS.read_text(), re.MULTILINE)
        assert any(all(cell in line for cell in cells) for line in lines), (name, cells)


def fastest_gradients(us: dict[str, float]) -> float:
    """Time of the fastest kernel that need not be deterministic, the own one among them."""
    return min(one for name, one in us.items() if not re.search("determ|ordered|served", name))


def test_the_page_compares_what_pages_were_served_by_with_all_kernels() -> None:
    def cases(file: str) -> dict[str, Any]:
        with gzip.open(EVIDENCE / file, "rt") as text:
            found = json.load(text)
        rows = found["runs"][1]["cases"] if "runs" in found else found["cases"]
        return {row["case"]: row for row in rows}

    served, every = cases("paged-h200.json.gz"), cases("paged-schedules-h200.json.gz")

    def speeds(names: Iterable[str]) -> tuple[list[float], list[float]]:
        rows, others = [served[name] for name in names], [every[name] for name in names]
        return (
            [row["us"]["flash3"] / row["us"]["tuner"] for row in rows],
            [row["us"]["flash3"] / min(row["schedules"].values()) for row in others],
        )

    page = RESULTS.read_text()
    many = [n for n, row in served.items() if row["group"] == "decode" and "B=1," not in n]
    assert len(many) == 18
    means = " | ".join(f"{geometric_mean(part):.3f}" for part in speeds(many))
    assert f"18 cases, mean | 1.08 | {means} |" in page
    rows = {
        f"{keys}": [f"decode B=1,SQ=1,SKV={keys},32/8,D=128,page={page}" for page in (16, 64)]
        for keys in (1024, 4096, 16384)
    }
    rows["16 and 64 sequences"] = [name for name in every if name.startswith("unlike")]
    for name, of_row in rows.items():
        parts = [", ".join(f"{one:.3f}" for one in part) for part in speeds(of_row)]
        assert re.search(rf"^\|.*{name}.*\| {re.escape(' | '.join(parts))} \|$", page, re.M), name


def test_the_page_prints_the_judged_tokens_of_the_evidence() -> None:
    found = json.loads((EVIDENCE / "batching-judged-h200.json").read_text())
    page = RESULTS.read_text()
    assert f"up to {found['rounding']['largest']:.2f}, with PyTorch's dense attention" in page
    assert f"lie {found['ties']['median']:.2f} in the median" in page
    for line in batching_judge.report(found).splitlines()[2:5]:
        way, *figures = line.split()
        if way != "flash_attention_3":
            assert f"| `{way}` | {' | '.join(figures)} |" in page


def test_the_page_prints_the_steps_of_the_evidence() -> None:
    with gzip.open(EVIDENCE / "engines-steps-h200.json.gz", "rt") as text:
        found = json.load(text)
    page = RESULTS.read_text()
    for way, name in (("vllm", "vLLM's own"), ("tuner", "plug-in")):
        passes = [row["of"]["128"]["median"] for row in found["steps"] if row["way"] == way]
        passes = passes[:4]  # the last is profiled
        walls = ", ".join(f"{one:.2f}" for one in sorted(one["wall"] for one in passes))
        graph = median(one["graph"] for one in passes)
        assert re.search(rf"\| {name} \| {walls} \| the same \| .* \| {graph:.2f} \|", page)
        assert all(abs(one["thread"] / one["wall"] - 1) < 0.01 for one in passes)
        speeds = [
            row["concurrency"]["128"]["tokens_per_s"] for row in found["runs"] if row["way"] == way
        ]
        shown = f"{median(speeds):,.0f} (" if way == "vllm" else f"{median(speeds):,.0f} tokens"
        assert shown in page and f"({min(speeds):,.0f} to {max(speeds):,.0f})" in page


def test_every_file_of_evidence_is_explained_and_none_is_missing() -> None:
    root = resources.cache().parent
    there = {path.name for path in (root / "scripts/benchmarks/evidence").iterdir()}
    explained = (root / "scripts/benchmarks/README.md").read_text()
    assert [name for name in sorted(there) if f"`{name}`" not in explained] == []
    for page in (RESULTS, root / "templates" / "README.md", root / "scripts/README.md"):
        named = set(re.findall(r"evidence/([\w-]+\.jsonl?(?:\.gz)?)", page.read_text()))
        assert named - there == set(), page


def test_the_page_prints_the_models_of_the_evidence() -> None:
    found = json.loads((EVIDENCE / "models-eager-h200.json").read_text())
    page = RESULTS.read_text()
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        torch, enabled = row["ways"]["torch"], row["ways"]["enable"]
        theirs = torch["tokens_per_s"]
        cells = f"{enabled['tokens_per_s'] / theirs:.3f} | {torch['again'] / theirs:.3f}"
        assert f"| {row['model']} | {cells} |" in page
        assert row["mode"] == "eager" and enabled["hits"] == row["layers"] * enabled["calls"]
        assert enabled["error"] < 0.02 and not enabled["errors"]
