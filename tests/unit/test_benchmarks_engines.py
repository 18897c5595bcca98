"""``scripts/bench engines``: runs of an engine, the table, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import REGISTRY, overrides, stand_ins

from benchmarks import engines
from benchmarks.engine_report import FEW, TUNER, VLLM, agreement, report
from benchmarks.engines import PROFILE, START, STEPS, runs
from tuner.errors import BenchmarkError

pytest.importorskip("torch", reason="torch is not installed")


class Offline:
    """An offline engine: each request's tokens count up from its prompt's first."""

    made: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, folder: str, **options: Any) -> None:
        config = json.loads(Path(folder, "config.json").read_text())
        self.made.append({**options, "layers": config["num_hidden_layers"]})
        layers = {str(i): SimpleNamespace(impl=object()) for i in range(2)} | {"norm": object()}
        compilation = SimpleNamespace(static_forward_context=layers)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(compilation_config=compilation)
        )
        self.spare = 0

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        count = params.max_tokens + self.spare
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(first, first + count))])
            for first in (prompt["prompt_token_ids"][0] for prompt in prompts)
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in (*engines.ENVIRONMENT, "TUNER_VLLM_QUERIES"):
        monkeypatch.setenv(name, "")  # is put back
        monkeypatch.delenv(name)
    made = sys.modules["vllm"]
    made.LLM, made.__version__ = Offline, "0.33.0"  # type: ignore[attr-defined]
    made.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr("tuner.runtime.engines.vllm._register_quantization", lambda: None)
    Offline.made.clear()
    return made


def engine(of: str = "1b", way: str = VLLM, **changes: Any) -> engines.Engine:
    given = {"concurrency": [1, 3], "prompt": 8, "tokens": 5, "compile": False, "cache": "auto"}
    given |= {"passes": 3, "pin": False, **changes}
    return engines.Engine(argparse.Namespace(of=of, way=way, **given))


@pytest.mark.parametrize("way", [VLLM, TUNER, FEW])
def test_an_engine_starts_and_measures_runs(vllm: ModuleType, way: str) -> None:
    made = engine("8b", way)
    facts, found = made.answer(START), made.answer(1)
    [options] = Offline.made
    assert options["layers"] == 32 and options["max_num_seqs"] == 3
    assert options["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 3]
    assert options["kv_cache_memory_bytes"] >= 4 * 2048 * 32 * 2 * 8 * 128 * 2
    assert options["kv_cache_dtype"] == "auto"
    assert options.get("attention_backend") == (None if way == VLLM else "CUSTOM")
    assert bool(overrides) == (way != VLLM)
    assert engines.os.environ.get("TUNER_VLLM_QUERIES") == ("16" if way == FEW else None)
    assert facts["attention"] == "2 object" and found["prompt_tokens_per_s"] > 0
    assert set(found["concurrency"]) == {"1", "3"}
    of_three = found["concurrency"]["3"]
    assert [len(one) for one in of_three["tokens"]] == [5] * 3
    assert of_three["first_token_ms"] > 0 and of_three["tokens_per_s"] > 0
    # The same prompts in each engine and run.
    other = engine("8b")
    other.answer(START)
    for run in (1, 2):
        assert other.answer(run)["concurrency"]["3"]["tokens"] == of_three["tokens"]
    assert REGISTRY in sys.modules


def test_one_pass_measures_too(vllm: ModuleType) -> None:
    made = engine(passes=1)
    made.answer(START)
    found = made.answer(1)
    assert len(found["concurrency"]["1"]["tokens"]) == 1


def test_a_run_is_pinned_to_its_core(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda of: {9, 4, 6}, raising=False)
    monkeypatch.setattr(
        engines.os, "sched_setaffinity", lambda of, cores: pinned.append(cores), raising=False
    )
    for way in (VLLM, TUNER):
        made = engine(way=way, pin=True, passes=1)
        for index in (START, 1, 2, 3):
            assert "lost" not in made.answer(index)
    assert pinned == [{6}, {9}, {4}] * 2
    made = engine(passes=1)
    assert "lost" not in made.answer(START) and "lost" not in made.answer(1)
    assert len(pinned) == 6


def test_steps_are_recorded_at_each_concurrency(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(engine: Any, generate: Any) -> dict[str, Any]:
        assert engine is made._engine
        return {"tokens": [len(one) for one in generate()[1]]}

    made = engine(passes=1)
    assert "lost" in made.answer(STEPS)
    made = engine(passes=1)
    made.answer(START)
    for index, name in ((STEPS, "recorded"), (PROFILE, "profiled")):
        monkeypatch.setattr(engines.engine_steps, name, measure)
        of = made.answer(index)["of"]
        assert of == {"1": {"tokens": [5]}, "3": {"tokens": [5] * 3}}


def test_engines_of_all_shapes_start_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    class Fake:
        def __init__(self, command: list[str], limit: float) -> None:
            self.name = command[command.index("--of") + 1], command[command.index("--way") + 1]

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *of: object) -> None: ...

        def ask(self, index: int) -> dict[str, Any]:
            asked.append((*self.name, index))
            return {"found": index}

    monkeypatch.setattr(engines, "Worker", Fake)
    args = argparse.Namespace(ways=None, engines=1, runs=2, limit=1.0, steps=False)
    rows = list(engines.measured(["1b", "8b"], ["python"], args))
    assert [one[2] for one in asked[:4]] == [START] * 4 and START not in [a[2] for a in asked[4:]]
    assert [row["shape"] for row in rows] == ["1b"] * 4 + ["8b"] * 4
    assert {(row["run"], row["found"]) for row in rows} == {(0, 1), (1, 2)}
    args.steps = True
    more = list(engines.measured(["1b"], ["python"], args))[len(rows) // 2 :]
    assert [row["found"] for row in more] == [*[STEPS] * 2 * engines.STEP_PASSES, PROFILE, PROFILE]
    assert {row["way"] for row in more} == {VLLM, TUNER}


def test_vllm_s_defaults_are_left_where_they_are_asked_for(vllm: ModuleType) -> None:
    engine(compile=True).start()
    assert "compilation_config" not in Offline.made[0] and Offline.made[0]["layers"] == 16


def test_an_engine_that_fails_loses_its_run(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no such option\nand more")

    monkeypatch.setattr(vllm, "LLM", refuse)
    made = engine()
    assert made.answer(START) == {"lost": "ValueError: no such option"}
    assert made.answer(1) == {"lost": "BenchmarkError: the engine did not start"}

    class Short(Offline):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.spare = -1

    monkeypatch.setattr(vllm, "LLM", Short)
    made.answer(START)
    assert "did not give 4 x 1 tokens" in made.answer(1)["lost"]


def test_every_run_has_all_ways_in_a_shuffled_order() -> None:
    ways = [VLLM, TUNER, FEW]
    every = list(runs(ways, 6))
    assert every == list(runs(ways, 6))
    by_run = [[way for run, way in every if run == index] for index in range(6)]
    assert all(sorted(one) == sorted(ways) for one in by_run)
    assert len({tuple(one) for one in by_run}) > 1


def row(run: int, way: str, rate: float, tokens: list[list[int]]) -> dict[str, Any]:
    found = {"first_token_ms": 5e3 / rate, "token_ms": 1e3 / rate, "tokens_per_s": rate}
    counts = {"hits": 7, "fallbacks": {"no measured winner": 2}, "errors": {}}
    return {
        "run": run, "shape": "1b", "way": way, "attention": "16 TunerImpl", "captured": counts,
        "eager": {"hits": 0, "fallbacks": {}, "errors": {}}, "prompt_tokens_per_s": 10 * rate,
        "concurrency": {"16": {**found, "tokens": tokens}},
    }  # fmt: skip


def test_the_table_has_medians_speeds_and_agreement() -> None:
    rows = [
        row(0, TUNER, 150.0, [[1, 2, 9, 4], [5, 6, 7, 8]]),
        row(0, VLLM, 100.0, [[1, 2, 3, 4], [5, 6, 7, 8]]),
        row(1, VLLM, 120.0, [[1, 2, 3, 4], [5, 6, 7, 0]]),
        {"run": 1, "shape": "1b", "way": TUNER, "lost": "no answer after 9 s"},
    ]
    text = report(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["1b", "4", "prompt_tokens_per_s", "vllm", "2", "1100", "1200", "1000"] in lines
    assert ["1b", "16", "token_ms", "tuner", "1", "6.67", "6.67", "6.67", "1.375"] in lines
    assert ["1b", "16", "tokens_per_s", "tuner", "1", "150", "150", "150", "1.364"] in lines
    assert "1b, 16 requests: vllm has 7 of 8 tokens of vllm's" in text
    assert "1b, 16 requests: tuner has 6 of 8 tokens of vllm's" in text
    assert "captured 7 tuned, 2 no measured winner; eager 0 tuned, none refused" in text
    assert text.splitlines()[-1] == "run 1, 1b, tuner: lost: no answer after 9 s"
    assert "lost" in report([rows[-1]])


def test_agreement_ends_at_the_first_other_token() -> None:
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 0, 3], [4, 5, 6]]) == (4, 6)


def test_without_vllm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match="vllm is not installed: scripts/bench engines"):
        engines.main([])


def test_results_are_written_run_by_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []
    asked: dict[int, list[int]] = {}

    class Answers:
        def __init__(self, command: Any, limit_s: float) -> None:
            assert command[-5:-2] == ["--worker", "--of", "1b"] and limit_s == 9.0
            assert "16" in command
            self.way = command[-1]

        def __enter__(self) -> Answers:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def ask(self, index: int) -> dict[str, Any]:
            asked.setdefault(id(self), []).append(index)
            if path.exists():
                written.append(len(json.loads(path.read_text())["runs"]))
            made = row(0, self.way, 100.0 + index, [[1, 2]])
            of_start = {"attention": made.pop("attention"), "captured": made.pop("captured")}
            for name in ("run", "shape", "way"):
                del made[name]
            return of_start if index == START else made

    path = tmp_path / "out.json"
    monkeypatch.setattr(engines, "Worker", Answers)
    monkeypatch.setattr(engines, "detect", lambda: object())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    argv = ["--shape", "1b", "--concurrency", "16", "--runs", "3", "--limit", "9"]
    assert engines.main([*argv, "--json", str(path)]) == 0
    assert written == [1, 2, 3, 4, 5]
    found = json.loads(path.read_text())["runs"]
    assert [one["run"] for one in found] == [0, 0, 1, 1, 2, 2]
    assert [one["engine"] for one in found] == [0, 0, 1, 1, 0, 0]
    assert sorted(asked.values()) == [[START, 1, 3]] * 2 + [[START, 2]] * 2
    assert "tokens_per_s" in capsys.readouterr().out
