"""Configs from outside: what is not a legal combination of declared values gets nowhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from mutants import CODE, MARK, Raw, as_config, is_declared, mutants, words_of
from shipped_recordings import FILES, read_once
from stored import final

from tuner.base import resources
from tuner.cli import main
from tuner.cli.imports import unservable
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError, RenderError
from tuner.families import families, family
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, Family
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection.shipped import shipped_index
from tuner.service.bodies import JobRequest
from tuner.store import open_store
from tuner.store.exchange import parse, read, to_text, write

PROBLEM_TEXTS = {
    "attention": ("S=1024,D=64", "B=2,H=8,HKV=2,SQ=384,SKV=1536,D=128"),
    "attention_backward": ("S=1024,D=64", "B=2,H=8,HKV=2,SQ=384,SKV=1536,D=128,causal=1"),
    "gemm": ("M=16,N=4096,K=4096",),
    "swiglu": ("M=512,N=11008,K=4096",),
    "grouped_gemm": ("G=8,M=4096,N=14336,K=4096,dtype=bf16",),
    "softmax": ("M=1024,N=1024,B=16",),
}
#: Of families that serve some of an operation's problems.
FAMILY_TEXTS = {
    "fused_attention": (*PROBLEM_TEXTS["attention"], "S=1024,D=64,block_mask=1"),
    "vendor_flex": ("S=1024,D=64,block_mask=1", "S=1024,D=64,softcap=30"),
    "mla_decode": ("B=2,H=128,HKV=1,SQ=2,SKV=900,D=576,DV=512,causal=1,page_size=64,dtype=bf16",),
    "block_scaled_gemm": ("M=16,N=4096,K=4096,dtype=e4m3,scales=block",),
    "cluster_gemm": ("M=128,N=4096,K=4096",),
    "block_scaled_grouped_gemm": ("G=16,M=2000,N=1408,K=2048,sizes=zipf,dtype=e4m3",),
}
CASES = [
    pytest.param(name, text, id=f"{name}-{text}")
    for name, member in families().items()
    for text in FAMILY_TEXTS.get(name, PROBLEM_TEXTS[member.op])
]
OWN = [case for case in CASES if not family(case.values[0]).is_vendor]  # type: ignore[arg-type]
#: Text that a template once rendered as it came, at a shape that ships.
HOSTILE = CODE[0]
ATTENTION = PROBLEMS["attention"].parse("S=1024,D=64")
REGIME = Regime.default("attention")


@cache
def legal(name: str, text: str) -> tuple[Problem, list[Config]]:
    """A problem and configs of it, some of which use every optional parameter."""
    member = family(name)
    problem = PROBLEMS[member.op].parse(text)
    space = list(member.space(problem, DEFAULT_GPU))
    every = [{name for name in c.params} for c in space]
    rare = [c for c, names in zip(space, every, strict=True) if len(names) == max(map(len, every))]
    rng = random.Random(name)
    return problem, rng.sample(space, min(60, len(space))) + rng.sample(rare, min(20, len(rare)))


def measured(problem: Problem, config: Config, **changes: Any) -> Measurement:
    return final(config, 10.0, problem, **{"created_at": "2026-01-01T00:00:00+00:00", **changes})


# --- the generator ---


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_mutant_is_refused_or_legal(name: str, text: str, long_mode: bool) -> None:
    member, (problem, configs) = family(name), legal(name, text)
    accepted = refused = 0
    known = {part for config in configs for part in parameters(config.to_json())}
    met: set[str] = set()
    found = mutants(member, configs, random.Random(f"{name} {text}"))
    for raw in islice(found, 100_000 if long_mode else 1_000):
        config = as_config(raw)
        met |= {parameter for parameter, value in {*parameters(raw)} - known}
        reasons = member.violations(problem, config, DEFAULT_GPU)
        assert all(reason.isascii() and reason.isprintable() for reason in reasons), raw
        assert all(len(reason) < 600 for reason in reasons), raw
        if reasons:
            refused += 1
            assert not member.accepts(problem, config, DEFAULT_GPU)
            continue
        accepted += 1
        assert is_declared(raw, member), raw
        for spec in member.kernels(problem, config).values():
            assert MARK not in render(spec, "id")
        assert Config.from_json(json.loads(json.dumps(raw))) == config
    assert accepted and refused > accepted
    assert met >= {parameter for parameter, _ in known}, "each had a value that is not legal"


def parameters(raw: Raw) -> Iterator[tuple[str, str]]:
    """Names and values of a config, those of its stages too."""
    for name, value in raw["params"].items():
        yield name, hex(value) if type(value) is int else repr(value)  # some have 5000 digits
    for inner in raw.get("stages", {}).values():
        yield from parameters(inner)


@pytest.mark.parametrize(("name", "text"), OWN)
def test_text_in_any_place_stops_at_the_source(name: str, text: str) -> None:
    """`render` by itself: what nobody asked `violations` about."""
    member, (problem, configs) = family(name), legal(name, text)
    refused = 0
    for config in configs[:3]:
        for raw in in_every_place(config.to_json()):
            try:
                specs = member.kernels(problem, as_config(raw)).values()
            except INCOMPATIBLE_CONFIG_ERRORS:
                continue
            for spec in specs:
                if MARK not in str(spec.variables):
                    assert MARK not in render(spec, "id"), raw
                    continue
                refused += 1
                with pytest.raises(RenderError, match=r" is .* \(allowed: "):
                    render(spec, "id")
    assert refused


def in_every_place(raw: Raw) -> Iterator[Raw]:
    """Every parameter, those of stages too, with each of the hostile texts."""
    for name in raw["params"]:
        for code in CODE:
            yield {**raw, "params": {**raw["params"], name: code}}
    for stage, inner in raw.get("stages", {}).items():
        for changed in in_every_place(inner):
            yield {**raw, "stages": {**raw["stages"], stage: changed}}


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_mutant_is_not_imported(name: str, text: str, long_mode: bool) -> None:
    """As what an entry serves, and as a trial that only lies there."""
    member, (problem, configs) = family(name), legal(name, text)
    document = json.dumps(write({0: measured(problem, configs[0])}, []))
    entry = {"ranking": [0], "pinned": None, "sweep": "", "decided_at": ""}
    imported = refused = 0
    for raw in islice(mutants(member, configs, random.Random(name)), 2_000 if long_mode else 60):
        try:
            digest = as_config(raw).digest
            changed = json.loads(document)
            changed["measurements"][0] |= {"config": raw, "config_digest": digest}
            changed = parse(json.dumps(changed))
        except ValueError:  # more digits than JSON's reader takes
            continue
        for entries in ([], [entry]):
            try:
                ((kept,), _) = read({**changed, "entries": entries}, unservable)
            except ConfigError as exc:
                refused += 1
                assert str(exc).isprintable() or "\n  measurements[0]: " in str(exc)
                continue
            imported += 1
            assert set(map(type, values(kept.config))) <= {int, bool, str}
            assert {v for v in values(kept.config) if isinstance(v, str)} <= set(WORDS)
            if entries:
                assert is_declared(raw, member), raw
                assert not member.violations(problem, kept.config, DEFAULT_GPU)
    assert imported and refused


SCHEMA = json.loads((resources.cache() / "schema" / "entries.schema.json").read_text())
WORDS: list[str] = SCHEMA["$defs"]["word"]["enum"]


def values(config: Config) -> Iterator[Any]:
    yield from config.params.values()
    for stage in config.stages.values():
        yield from values(stage)


#: Texts of `cutlass_fmha`'s parameters.
RETIRED_WORDS = {
    *("KernelTma", "KernelTmaWarpSpecializedCooperative", "KernelTmaWarpSpecializedPingpong"),
    *("IndividualTileScheduler", "PersistentTileScheduler", "ascending", "descending"),
}


def test_the_schema_names_the_families_words() -> None:
    """Removed families count: old documents have their words."""
    words = {word for member in families().values() for word in words_of(member)}
    assert not words & RETIRED_WORDS and sorted(words | RETIRED_WORDS) == WORDS


# --- what ships is legal still ---


def test_what_ships_is_made_of_declared_values() -> None:
    """Every config under cache/tuned and cache/recordings, those of stages too."""
    seen: dict[Config, str] = {}
    for path in FILES:
        for part in read_once(path).walk():
            seen |= dict.fromkeys((m.config for m in part.measurements), path.name)
    for same in shipped_index().values():
        for one in same:
            ranked = [*one.entry.ranking, one.entry.winner]
            seen |= dict.fromkeys((m.config for m in ranked), f"tuned {one.problem.label()}")
    assert len(seen) > 2000 and {c.family for c in seen} >= {m for m in families() if "_" in m} - {
        "block_scaled_gemm",
        "block_scaled_grouped_gemm",
        "cluster_gemm",
        "fused_attention_backward",
        "mla_decode",
        "sdpa_backward",
        "triton_attention",
        "vendor_cublaslt_search",
        "vendor_cudnn_plans",
        "vendor_flex",
    }
    wrong = {
        (where, reason): config.to_json()
        for config, where in seen.items()
        for reason in family(config.family).malformed(config)
    }
    assert not wrong


def test_what_ships_is_legal_where_it_was_measured() -> None:
    for same in shipped_index().values():
        for one in same:
            for m in one.entry.ranking:
                if m.ok:
                    reasons = family(m.config.family).violations(m.problem, m.config, m.gpu)
                    assert not reasons, (m.problem.label(), m.config.to_json(), reasons)
    for path in FILES:
        for part in read_once(path).walk():
            for m in part.measurements:
                reasons = family(m.config.family).violations(part.problem, m.config, m.gpu)
                assert not reasons, (path.name, m.config.to_json(), reasons)


# --- from a server's text to the compiler ---


def hostile() -> Config:
    config = next(c for c in legal("fused_attention", "S=1024,D=64")[1] if "early_exp" in c.params)
    return Config(config.family, {**config.params, "early_exp": HOSTILE})


def hostile_document() -> dict[str, Any]:
    with open_store("sqlite://") as server:
        server.decide(ATTENTION, DEFAULT_GPU, REGIME, [measured(ATTENTION, hostile())], "s")
        return server.export()


def test_hostile_text_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "hostile.json", tmp_path / "own.sqlite"
    file.write_text(to_text(hostile_document()))
    assert main(["import", str(file), "--store", str(store)]) == 2
    said = capsys.readouterr().err
    assert "measurements[0]: config.params.early_exp: '0;if(threadIdx.x==177)" in said
    with open_store(str(store)) as own:
        assert own.entries() == [] and own.measurements() == []


def test_hostile_text_is_not_mirrored() -> None:
    with open_store("sqlite://") as own:
        with pytest.raises(ConfigError, match=r"config\.params\.early_exp: '0;if"):
            own.mirror(hostile_document(), url="http://host:1", etag="x", check=unservable)
        assert own.entries() == [] and own.measurements() == []


def test_a_number_beside_the_domain_is_not_served() -> None:
    for name, value in (("early_exp", 100000), ("kv_stages", 7), ("early_exp", True)):
        config = Config("fused_attention", {**hostile().params, "early_exp": 0, name: value})
        document = write({0: measured(ATTENTION, config)}, [])
        document["entries"] = [{"ranking": [0], "pinned": None, "sweep": "", "decided_at": ""}]
        with pytest.raises(ConfigError, match=f"config: {name}={value} is not known"):
            read(document, unservable)


def test_a_store_that_holds_hostile_text_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a store of a version that took it over: `violations` refuses it before any compiler."""
    submitted: list[Any] = []
    monkeypatch.setattr("tuner.compile.toolchain.find_toolchain", lambda: None)
    monkeypatch.setattr("tuner.compile.dispatcher.build", lambda artifacts: None)
    monkeypatch.setattr("tuner.compile.compiler.Compiler", lambda *_, **__: Recorder(submitted))
    store = tmp_path / "own.sqlite"
    with open_store(str(store)) as own:
        own.decide(ATTENTION, DEFAULT_GPU, REGIME, [measured(ATTENTION, hostile())], "s")
    arguments = ["build", "--shape", "S=1024,D=64", "--gpu", "H200", "--store", str(store)]
    assert main(arguments) == 1
    assert "not legal here: early_exp='0;if(threadIdx" in capsys.readouterr().out
    assert submitted == []


class Recorder:
    """A compiler that notes what it is given."""

    def __init__(self, submitted: list[Any]) -> None:
        self._submitted = submitted

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, specs: Any, owner: Any = None) -> list[Any]:
        self._submitted += specs
        return []


def test_hostile_text_is_not_rendered() -> None:
    specs = family("fused_attention").kernels(ATTENTION, hostile())
    with pytest.raises(RenderError, match=r"'early_exp' is '0;if.* \(allowed: no text\)"):
        render(specs["attention"], "id")


def test_a_job_has_no_place_for_a_config() -> None:
    fields = set(JobRequest.model_fields)
    assert not fields & {"config", "configs", "params", "kernels"}
    in_shape = {"problems": [f"S=64,D=64,early_exp={HOSTILE}"]}
    for body in ({"problems": ["S=64,D=64"], "params": {}}, in_shape):
        with pytest.raises(ValueError, match="validation error"):
            JobRequest.model_validate(body)


# --- the rules of the base class ---


def test_no_family_has_a_predicate_of_its_own() -> None:
    assert {type(member).violations for member in families().values()} == {Family.violations}
    with pytest.raises(TypeError, match="overrides violations"):
        type("Rogue", (Family,), {"violations": lambda *_: []})


@pytest.mark.parametrize(
    ("domain", "said"),
    [
        ((1, True), "domain of x is not of one type"),
        ((), "domain of x is not of one type"),
        (range(1, 9), "x has a range for a domain, and no draws"),
    ],
)
def test_a_domain_is_checked_when_its_class_is_made(domain: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        type("Odd", (Family,), {"domains": {"x": domain}})


def test_a_family_file_that_breaks_the_rules_is_one_line(tmp_path: Path) -> None:
    from tuner.families import families_in

    file = tmp_path / "rogue.py"
    file.write_text(
        "from tuner.families.base import Family\n"
        "class Rogue(Family):\n    def violations(self, *_): return []\n"
    )
    with pytest.raises(ConfigError, match="cannot be imported: Rogue overrides violations"):
        families_in(file)
