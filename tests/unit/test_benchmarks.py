"""Every bench: its cases without a GPU, and a case of each preset on a device that is not there."""

from __future__ import annotations

import ast
import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from bench_device import FOLDER, fake_device, fake_gpu, on_the_cpu  # noqa: F401
from bench_fakes import (  # noqa: F401
    built_attention,
    built_products,
)
from bench_kernels import (  # noqa: F401
    built_schedules,
    first_calls,
    gradients,
    latent_kernels,
)
from bench_programs import (  # noqa: F401
    batching,
    checkout,
    engines,
    helion,
    profiler,
    ranks,
    transformers,
    uncompiled,
    vllm,
)  # fmt: skip
from bench_sglang import attention, runner  # noqa: F401
from bench_sweeps import sweeps  # noqa: F401
from bits_fakes import row_by_row  # noqa: F401
from programs import ran

from benchmarks import harness, population, population_peers
from benchmarks.__main__ import NAMES, main
from benchmarks.harness import Bench
from tuner.problem import GemmProblem

TOP = Path(__file__).resolve().parents[2]
BENCHES: dict[str, Bench] = {
    name: module.BENCH
    for name in NAMES
    if hasattr(module := importlib.import_module(f"benchmarks.{name}"), "BENCH")
}
PRESETS = [(name, preset) for name, bench in BENCHES.items() for preset in bench.presets]
PREPARED: dict[tuple[str, str], str] = {
    ("backward", "acceptance"): "gradients",
    ("block", "llama"): "profiler",
    ("cliffs", "compiled"): "uncompiled",
    ("dispatch", "first-call"): "first_calls",
    ("engines", "attention"): "attention",
    ("engines", "batching"): "batching",
    ("engines", "ranks"): "ranks",
    ("engines", "sglang"): "runner",
    ("engines", "vllm"): "vllm",
    **{("invariance", preset): "row_by_row" for preset in ("speed", "operations")},
    ("models", "compiled"): "uncompiled",
    ("models", "static_decoding"): "transformers",
    ("moe", "layers"): "uncompiled",
    ("paged", "mla"): "latent_kernels",
    ("population", "fp8_attention"): "built_attention",
    ("population", "long"): "built_attention",
    ("population", "masks"): "uncompiled",
    ("population", "sustained"): "built_attention",
    ("products", "e4m3"): "built_products",
    ("products", "holes"): "built_products",
    ("products", "narrow"): "built_products",
    ("products", "scaled"): "built_products",
    ("products", "tables"): "built_products",
    ("suites", "pytorch"): "checkout",
    **{("tuner", preset): "sweeps" for preset in ("quick", "full")},
    ("tuner", "helion"): "helion",
    ("tuner", "inductor"): "uncompiled",
}
"""Fixtures that smoke runs need beside the device, by bench and preset."""


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_cases_are_listed_without_a_gpu(name: str, preset: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(population, "OWN_DRAWN", 100)
    args = harness.parser_of(BENCHES[name]).parse_args(["--preset", preset])
    args.count = 60
    cases = BENCHES[name].presets[preset].cases(args)
    labels = [case.label for case in cases]
    assert labels and len(labels) == len(set(labels))
    said = "\n".join(BENCHES[name].presets[preset].listing(cases[:2], args))
    assert all(label in said for label in labels[:2])


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_case_is_measured_on_a_fake_device(
    name: str, preset: str, tmp_path: Path, capsys: Any, request: pytest.FixtureRequest
) -> None:
    if fixture := PREPARED.get((name, preset)):
        request.getfixturevalue(fixture)
    path = tmp_path / "rows.jsonl"
    assert main([name, "--preset", preset, "--smoke", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    said = {line.split(" s ", 1)[-1] for line in captured.err.splitlines()}
    assert said <= {"first answer verified after 1 s"}, "what a sweep says"
    assert captured.out.startswith("1/1 ")
    table = captured.out.split("1 of 1 cases\n\n")[1]
    assert main([name, "--table", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{table}")
    if not BENCHES[name].presets[preset].needs_gpu:
        return
    _, (row,) = harness.read(path)
    assert row.get("us") or row.get("figures"), "a row has times, or figures of another kind"


@pytest.mark.usefixtures("fake_device", "built_schedules")
def test_every_schedule_of_pages_is_timed_for_a_fit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert main(["paged", "--schedules", "--smoke", "--json", str(path)]) == 0
    _, (row,) = harness.read(path)
    assert len(row["schedules"]) > 20 and row["best"] in row["schedules"]
    assert row["us"]["best"] and len(row["queries"]) == len(row["keys"]) == row["problem"]["batch"]


@pytest.mark.usefixtures("fake_device")
def test_peers_of_a_product_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cliffs_calls.algorithm_ways", lambda *_: [])
    case = population_peers.PeerCase(GemmProblem(9, 64, 32, dtype="bfloat16"), "products")
    with on_the_cpu():
        row = population_peers.peer_measured(case, Namespace())
    assert row["us"]["tuner"] == 8.0 and row["us"]["pytorch"] == 10.0


@pytest.mark.parametrize("argv", [["--help"], ["--list"]])
def test_all_names_are_printed(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert {*NAMES} <= {*line.split()}


@pytest.mark.parametrize("argv", [[], ["../products"]])
def test_another_name_gets_a_line_with_all(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown benchmark" in line and "products" in line


def test_every_bench_has_its_name() -> None:
    texts = {path.stem: path.read_text() for path in FOLDER.glob("[!_]*.py")}
    modules = {name for name, text in texts.items() if "\nBENCH" in text or "\ndef main(" in text}
    assert set(NAMES) == modules - {"harness"}
    assert all(name == bench.name for name, bench in BENCHES.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_one_line(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"scripts/bench {name}: ")


def test_every_argument_has_a_text() -> None:
    calls = [
        (path.name, node)
        for path in (TOP / "scripts").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")
    ]
    silent = [
        (name, ast.unparse(call.args[0]))
        for name, call in calls
        if all(keyword.arg != "help" for keyword in call.keywords)
    ]
    assert silent == []
    for name, bench in BENCHES.items():
        assert all(action.help for action in harness.parser_of(bench)._actions), name


def test_the_script_names_them_too() -> None:
    said = ran(TOP / "scripts" / "bench", code=None)
    assert said.returncode != 0
    assert said.stderr.split()[-len(NAMES) :] == list(NAMES)
    asked = [TOP / "scripts" / "bench", "--help"]
    assert ran(*asked).stdout == said.stderr
