"""T4 documents: what each field holds, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from ast import literal_eval
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import AttentionProblem
from tuner.store import open_store, t4

OWN = Config("fused_attention", {"tile_n": 128, "pdl": True})
PROBLEM = AttentionProblem(1024, 1024, 64)


def measured(config: Config = OWN, **changes: Any) -> Measurement:
    one = Measurement(
        PROBLEM, config, GPUS["H200"], Regime("stream", "warm"), Status.OK, latency_us=12.5
    )
    return one.but(std_us=0.5, compile_cpu_s=10.0, created_at="2026-11-01T00:00:00Z", **changes)


def test_a_result_has_its_time_and_its_configuration() -> None:
    (row,) = t4.results([measured()])["results"]
    assert row["configuration"] == {"family": "fused_attention", "tile_n": 128, "pdl": True}
    both = dict.fromkeys(("compilation_time", "compilation"), 10_000.0)
    assert row["times"] == {**both, "runtimes": [0.0125]}
    assert (row["invalidity"], row["correctness"]) == ("correct", 1.0)
    assert {"name": "time", "value": 0.0125, "unit": "ms"} in row["measurements"]


def test_a_final_time_stands_before_a_later_quick_one() -> None:
    final = measured(latency_us=14.0, is_final=True)
    later = measured().but(created_at="2026-11-02T00:00:00Z")
    (row,) = t4.results([final, later])["results"]
    assert row["times"]["runtimes"] == [0.014]
    assert {"name": "pass", "value": "final", "unit": ""} in row["measurements"]


@pytest.mark.parametrize("status", Status)
def test_each_status_has_a_word_of_the_schema(status: Status) -> None:
    failed = measured(status=status, latency_us=12.5 if status is Status.OK else None)
    (row,) = t4.results([failed])["results"]
    words = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
    assert row["invalidity"] in words
    assert (row["invalidity"] == "correct") == (status is Status.OK) == bool(row["correctness"])


def test_several_problems_are_refused_with_the_option_that_chooses() -> None:
    other = measured().but(problem=AttentionProblem(2048, 2048, 64))
    with pytest.raises(ConfigError, match=r"2 problems \(choose by --shape\)"):
        t4.results([measured(), other])


def test_a_space_has_the_measured_values_and_combinations() -> None:
    other = Config("fused_attention", {"tile_n": 64, "splits": 2})
    document = t4.space([measured(), measured(other)])
    parameters = document["ConfigurationSpace"]["TuningParameters"]
    values = {one["Name"]: literal_eval(one["Values"]) for one in parameters}
    assert values == {
        "family": ["fused_attention"],
        "pdl": [1, t4.ABSENT],
        "splits": [2, t4.ABSENT],
        "tile_n": [64, 128],
    }
    kinds = {one["Name"]: one["Type"] for one in parameters}
    assert kinds == {"family": "string", "pdl": "string", "splits": "string", "tile_n": "int"}
    conditions = document["ConfigurationSpace"]["Conditions"]
    legal = [
        row
        for row in (dict(zip(values, cells, strict=True)) for cells in product(*values.values()))
        if all(eval(condition["Expression"], {}, row) for condition in conditions)
    ]
    assert [one["tile_n"] for one in legal] == [128, 64]
    assert [len(one["Parameters"]) for one in conditions] == [2, 3, 4]
    assert conditions[-1]["Parameters"] == list(values)


def test_a_cache_file_has_a_row_by_each_combination_s_words() -> None:
    other = Config("fused_attention", {"tile_n": 64, "splits": 2})
    failed = measured(other, status=Status.LAUNCH_ERROR, latency_us=None)
    document = t4.cache([measured(), failed])
    assert document["tune_params_keys"] == ["family", "pdl", "splits", "tile_n"]
    rows = document["cache"]
    assert list(rows) == ["fused_attention,1,(absent),128", "fused_attention,(absent),2,64"]
    passed, lost = rows.values()
    assert (passed["time"], passed["times"], passed["tile_n"]) == (0.0125, [0.0125], 128)
    assert (lost["time"], lost["times"], lost["splits"]) == (t4.FAILED, [], 2)
    text = t4.text(document)
    assert text.endswith("}\n}\n") and list(json.loads(text))[-1] == "cache"


def test_kernel_tuner_searches_an_export_in_its_simulation_mode(tmp_path: Path) -> None:
    kernel_tuner = pytest.importorskip("kernel_tuner", reason="kernel-tuner is not installed")
    spaces = [
        Config("fused_attention", {"tile_n": n, "splits": s}) for n in (64, 128) for s in (1, 2)
    ]
    some = [measured(c, latency_us=10.0 + i) for i, c in enumerate(spaces[1:])]
    for name in ("t1", "kernel-tuner"):
        (tmp_path / f"{name}.json").write_text(t4.text(t4.FORMATS[name](some)))
    (tmp_path / f"{PROBLEM.op}.cu").touch()
    _, found = kernel_tuner.tune_kernel_T1(
        *(tmp_path / "t1.json", tmp_path / "kernel-tuner.json"),
        simulation_mode=True,
        strategy="brute_force",
    )
    times = [one["measurements"][0]["value"] for one in found["results"]]
    assert sorted(times) == [0.01, 0.011, 0.012]


def test_metadata_names_the_machine() -> None:
    facts = Environment({"driver": "580.159", "cuda": 13.0})
    document = t4.metadata([measured().but(environment=facts)])["metadata"]
    assert document["hardware"]["hardware_description"][0]["product_name"] == "NVIDIA H200"
    assert document["environment"]["requirements"] == ["cuda==13.0", "driver==580.159"]


@pytest.mark.parametrize("name", ["t1", "t4-metadata", "kernel-tuner"])
def test_every_format_is_of_one_space(name: str) -> None:
    other = measured().but(problem=AttentionProblem(2048, 2048, 64))
    with pytest.raises(ConfigError, match="one search space"):
        t4.FORMATS[name]([measured(), other])


@pytest.mark.parametrize(
    ("name", "said"), [("t4", "1 result"), ("t4-metadata", "t4-metadata"), ("t1", "t1")]
)
def test_an_export_is_the_format_s_document(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, path = f"sqlite:///{tmp_path}/store.sqlite", tmp_path / "out.json"
    final = measured(is_final=True)
    with open_store(url) as store:
        store.decide(PROBLEM, final.gpu, final.regime, [final], "s1")
    assert main(["store", "export", str(path), "--format", name, "--store", url]) == 0
    assert capsys.readouterr().out == f"{said} written to {path}\n"
    assert json.loads(path.read_text()).keys() == t4.FORMATS[name]([final]).keys()


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("t4", f"T4/{t4.SCHEMA_VERSION}/results-schema.json"),
        ("t4-metadata", f"T4/{t4.SCHEMA_VERSION}/metadata-schema.json"),
        ("t1", f"T1/{t4.SCHEMA_VERSION}/input-schema.json"),
    ],
)
def test_the_text_is_valid_by_kernel_tuner_s_own_schema(name: str, schema: str) -> None:
    spec = importlib.util.find_spec("kernel_tuner")
    if spec is None or spec.origin is None:
        pytest.skip("kernel-tuner is not installed")
    path = Path(spec.origin).parent / "schema" / schema
    document = json.loads(t4.text(t4.FORMATS[name]([measured()])))
    jsonschema.validate(document, json.loads(path.read_text(encoding="utf-8")))
