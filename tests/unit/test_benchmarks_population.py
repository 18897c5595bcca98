"""``scripts/bench population``: drawn calls on CPU tensors, the file of rows, and the tables."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import population
from benchmarks.call_times import MAX_CALLS
from benchmarks.child import Worker
from benchmarks.population import described, failure, listing, measured
from benchmarks.population_report import over_peer, over_pytorch, report
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import GPUS
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.problem.population import (
    LOWER_RIGHT,
    PADDING,
    POSITIONS,
    ModelCall,
    View,
    draw,
    subset,
)
from tuner.selection.domains import domain_of
from tuner.selection.portfolio import serving, shipped

CALLS = draw(3, 12, subset("all"))
HEADING = {"format": population.FORMAT, "seed": "3", "models": "all"}


def views(problem: AttentionProblem) -> tuple[View, ...]:
    named = zip(("query", "key", "value"), problem.matrices, strict=False)
    return tuple(View(name, name, m.shape, m.strides) for name, m in named)


def attention(text: str, kind: str = "prompt", mask: str = "") -> ModelCall:
    problem = AttentionProblem.parse(text)
    return ModelCall("toy", "layers", kind, 1, problem, views(problem), mask)


def fused(batch: int, heads: int, tokens: int, width: int) -> ModelCall:
    problem = AttentionProblem.parse(
        f"B={batch},H={heads},S={tokens},D={width},causal=1,dtype=bf16,layout=bshd"
    )
    row = 3 * heads * width
    shape, strides = (batch, heads, tokens, width), (tokens * row, width, row, 1)
    made = [
        View(name, "projection", shape, strides, place * heads * width)
        for place, name in enumerate(("query", "key", "value"))
    ]
    return ModelCall("toy", "layers", "prompt", 1, problem, tuple(made))


SMALL = {
    "plain": attention("B=2,H=4,HKV=2,S=48,D=16,causal=1,dtype=bf16,layout=bshd"),
    "fused": fused(2, 3, 33, 16),
    "window": attention("H=2,S=96,D=16,causal=1,window=15,dtype=bf16"),
    "window both ways": attention("H=2,S=96,D=16,window=15,dtype=fp16", "encoding"),
    "softcap": attention("H=2,S=64,D=16,causal=1,softcap=30,dtype=bf16"),
    "capped drafts": attention(
        "B=2,H=4,HKV=2,SQ=5,SKV=70,D=16,softcap=30,dtype=bf16", "decoding", LOWER_RIGHT
    ),
    "padded window": attention("B=3,H=2,S=96,D=16,window=7,dtype=fp16", "encoding", PADDING),
    "padding": attention("B=3,H=2,S=40,D=16,dtype=fp16", "encoding", PADDING),
    "drafts": attention("B=2,H=4,HKV=2,SQ=5,SKV=70,D=16,dtype=bf16", "decoding", LOWER_RIGHT),
    "positions": attention("B=2,H=4,S=50,D=16,bias=h,dtype=bf16", "prompt", POSITIONS),
    "decoding": attention("B=2,H=4,HKV=1,SQ=1,SKV=70,D=16,dtype=bf16", "decoding"),
    "linear": ModelCall("toy", "layers", "up", 1, GemmProblem(9, 64, 32, dtype="bfloat16")),
    "gelu": ModelCall(
        "toy", "layers", "up", 1,
        GemmProblem(9, 64, 32, dtype="float16", epilogue="bias_gelu_tanh"),
    ),
    "swiglu": ModelCall("toy", "layers", "swiglu", 1, SwigluProblem(9, 64, 32, dtype="bfloat16")),
}  # fmt: skip

CAPPED = "softcap", "capped drafts"
"""PyTorch answers these by FlexAttention."""


@pytest.fixture(scope="module")
def calls() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks import population_calls

    return population_calls


def times_of(contenders: Sequence[Any], before: Callable[[int], Any], copies: int) -> Any:
    """Calls everyone with every copy, and says 10 us of each but 8 of the tuner's."""
    from benchmarks.call_times import Times

    for one in contenders:
        for i in range(copies):
            before(i)
            with one.around():
                one.call(i)
    return Times({one.name: 8.0 if one.name == "tuner" else 10.0 for one in contenders}, {})


@pytest.mark.parametrize("name", [name for name in SMALL if name not in CAPPED])
def test_a_call_is_made_checked_and_timed(calls: Any, name: str, monkeypatch: Any) -> None:
    from benchmarks import population_ways

    # Compiling FlexAttention takes a C++ compiler and a minute.
    off = functools.partial(population_ways._refuse, "off")
    monkeypatch.setattr(population_ways, "_flex", lambda problem: off)
    row = calls.measure(SMALL[name], "cpu", times_of)
    assert row["us"]["tuner"] == 8.0 and row["us"]["pytorch"] == row["us"]["pytorch again"] == 10.0
    assert not row["wrong"], row["errors"]
    assert 0 < row["errors"]["tuner"] < 0.02
    said = "the tensors are not on a CUDA device"
    assert (row["answered"], row["reason"]) == ("refused", said)
    json.dumps(row)
    if name in SMALL and SMALL[name].views:
        assert {"flash3", "flash4"} <= set(row["failed"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [*CAPPED, "window", "padded window"])
def test_flex_attention_computes_the_call(calls: Any, name: str, monkeypatch: Any) -> None:
    import torch

    from benchmarks import population_ways

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = SMALL[name]
    (at,) = calls.made(call, "cpu", 1)
    assert isinstance(call.problem, AttentionProblem)
    out = population_ways._flex(call.problem)(at)
    plain = torch.nn.functional.scaled_dot_product_attention(*at.tensors, enable_gqa=True)
    errors = calls._errors(call, at, {"flex": out, "unmasked": plain})
    assert errors["flex"] < 0.02 < errors["unmasked"]


def test_rows_that_see_no_key_are_not_compared(calls: Any) -> None:
    call = SMALL["padded window"]
    (at,) = calls.made(call, "cpu", 1)
    blind = ~at.seen
    assert blind.any() and not blind.all()
    out = calls._errors(call, at, {"tuner": at.tensors[0]})["tuner"]
    assert 0.5 < out < float("inf")
    right = torch_attention(at)
    assert calls._errors(call, at, {"tuner": right.masked_fill(blind, 9.0)})["tuner"] < 0.02
    assert calls._errors(call, at, {"tuner": right.masked_fill(~blind, 9.0)})["tuner"] > 0.5


def torch_attention(at: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*at.tensors, at.whole_mask)


def test_a_soft_cap_is_the_references_too(calls: Any) -> None:
    import tuner

    call = SMALL["softcap"]
    (at,) = calls.made(call, "cpu", 1)
    out = tuner.attention(*at.tensors, is_causal=True, softcap=30)
    assert calls._errors(call, at, {"tuner": out})["tuner"] < 0.02
    uncapped = tuner.attention(*at.tensors, is_causal=True)
    scores = calls._errors(call, at, {"tuner": uncapped, "capped": out})
    assert scores["tuner"] > scores["capped"]


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_output_is_found(calls: Any, name: str) -> None:
    call = SMALL[name]
    (at,) = calls.made(call, "cpu", 1)
    cut, reference = calls._references(call, at)
    right = reference(False)
    shape = call.problem.output.shape
    wrong = right.new_zeros(shape if call.views else shape[-2:])
    assert cut(wrong).shape == right.shape
    assert calls._errors(call, at, {"cudnn": wrong})["cudnn"] > 0.5


def test_tensors_lie_as_the_views_say(calls: Any) -> None:
    call = SMALL["fused"]
    first, second = calls.made(call, "cpu", 2)
    for inputs in (first, second):
        query, key, value = inputs.tensors
        assert [t.stride() for t in inputs.tensors] == [v.strides for v in call.views]
        base = query.untyped_storage().data_ptr()
        assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == base
        assert inputs.source.equal(query) and inputs.source.is_contiguous()
    assert first.tensors[0].data_ptr() != second.tensors[0].data_ptr()


def test_caches_and_weights_are_rotated_and_prompts_are_not(calls: Any) -> None:
    for name in ("decoding", "linear"):  # a graph calls no copy twice, and each replay is evicted
        assert calls.copies_of(SMALL[name]) == MAX_CALLS
    assert calls.copies_of(SMALL["plain"]) == 1
    assert calls.copies_of(attention("B=64,H=32,SQ=1,SKV=8192,D=128", "decoding")) == 1


STATS = {"hits": 0, "fallbacks": {}, "errors": {}}


@pytest.mark.parametrize(
    ("stats", "kind", "said"),
    [
        ({"hits": 1}, "exact", ("own decision", "")),
        ({"hits": 1}, "portfolio", ("selection", "")),
        ({"fallbacks": {"PyTorch's own kernel was the fastest": 1}}, "exact",
         ("PyTorch's by choice", "PyTorch's own kernel was the fastest")),
        ({"fallbacks": {"no measured winner": 1}}, None, ("refused", "no measured winner")),
        ({"errors": {"a launch was refused": 1}}, "exact", ("refused", "a launch was refused")),
        ({}, None, ("refused", "not counted")),
    ],
)  # fmt: skip
def test_kinds_of_answers(calls: Any, stats: Any, kind: str | None, said: tuple[str, str]) -> None:
    from tuner.config import Config

    own = SimpleNamespace(config=Config("fused_attention", {}))
    answer: Any = SimpleNamespace(kind=kind, candidates=(own,)) if kind else None
    assert calls.answered(SimpleNamespace(**{**STATS, **stats}), answer) == said


def test_a_vendors_kernel_is_pytorchs_by_choice(calls: Any) -> None:
    from tuner.config import Config

    vendors = SimpleNamespace(config=Config("vendor_sdpa", {"kernel": "cudnn"}))
    answer: Any = SimpleNamespace(kind="exact", candidates=(vendors,))
    stats = SimpleNamespace(**{**STATS, "hits": 1})
    assert calls.answered(stats, answer) == ("PyTorch's by choice", "cudnn")


def test_what_the_runtime_reads_off_the_tensors(calls: Any) -> None:
    plain = SMALL["plain"]
    assert calls.posed(plain) == plain.problem
    assert calls.posed(SMALL["positions"]) == SMALL["positions"].problem
    assert calls.posed(SMALL["gelu"]) == SMALL["gelu"].problem
    assert calls.posed(SMALL["swiglu"]) == SMALL["swiglu"].problem
    padded, drafts = (SMALL[name].problem for name in ("padding", "drafts"))
    assert isinstance(padded, AttentionProblem) and isinstance(drafts, AttentionProblem)
    assert calls.posed(SMALL["padding"]) == replace(padded, mask="bk")
    assert calls.posed(SMALL["drafts"]) == replace(drafts, mask="1")


def test_calls_of_public_models_have_own_kernels(calls: Any) -> None:
    portfolios = {g: one for g in ("H200", "H100") for one in serving(shipped(), GPUS[g])
                  if one.op == AttentionProblem.op}  # fmt: skip
    for call in draw("kinds", 800, subset("all")):
        if call.views:
            for gpu, portfolio in portfolios.items():
                models = portfolio.models_of(domain_of(calls.posed(call)))
                assert models is not None, (gpu, call.label)
                assert not all(one.is_vendor for one in models.candidates), (gpu, call.label)


def test_a_listing_counts_every_call(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.runtime.call.refusal import Kind, Refusal

    refusal = Refusal(Kind.MASK, "not of the query's type")
    tensors = "benchmarks.population_tensors.as_operand"
    monkeypatch.setattr(tensors, lambda *arguments: refusal)
    few = [SMALL["padding"], SMALL["linear"], SMALL["plain"]]
    text = listing(few)
    assert all(call.label in text for call in few)
    assert "not posed: attn_mask is given" in text
    totals = [line.split() for line in text.splitlines() if " all " in line]
    (reason,) = [line for line in text.splitlines() if line.startswith("    1  attn_mask is given")]
    assert "not of the query's type" in reason
    assert [line[:3] for line in totals] == [["attention", "all", "2"], ["products", "all", "1"]]


def test_a_listing_is_of_the_gpu_that_is_named(
    calls: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(population, "lookup", lambda problem, gpu: asked.append(gpu))
    assert population.main(["--list", "--count", "2", "--gpu", "H100"]) == 0
    assert set(asked) == {GPUS["H100"]}
    assert "nothing known" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--gpu is for --list"):
        population.main(["--problems", "--gpu", "H100"])


ANSWERING = """
import json, sys
for line in sys.stdin:
    index = int(line)
    if index == {dies}:
        sys.exit(3)
    if index == {hangs}:
        sys.stdin.read()
    if index == {loses}:
        print(json.dumps({{"lost": "an illegal access"}}), flush=True)
        continue
    row = {{"answered": "refused", "reason": "why", "us": {{"tuner": 2.0, "pytorch": 3.0}},
           "errors": {{}}, "wrong": [], "failed": {{}}, "copies": 1}}
    print(json.dumps(row), flush=True)
"""
#: For a child that never answers: it reads its own input to an end that does not come.
SHORT_S = 1.0


def child(dies: int = -1, hangs: int = -1, loses: int = -1) -> list[str]:
    """Command of a worker that answers all indices but these."""
    return [sys.executable, "-c", ANSWERING.format(dies=dies, hangs=hangs, loses=loses)]


def test_a_worker_that_is_lost_costs_its_call() -> None:
    with Worker(child(dies=1, loses=3), 60.0) as worker:
        assert worker.ask(0)["us"] == {"tuner": 2.0, "pytorch": 3.0}
        assert worker.ask(1) == {"lost": "the worker ended: code 3"}
        assert worker.ask(0)["answered"] == "refused"
        assert worker.ask(3) == {"lost": "an illegal access"}
        assert worker.ask(4)["answered"] == "refused"


def test_a_call_that_never_answers_is_given_up() -> None:
    with Worker(child(hangs=2), SHORT_S) as worker:
        found = worker.ask(2)
    assert found == {"lost": "no answer after 1 s"}


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    half = measured(CALLS[:3], HEADING, path, child(dies=1), 60.0)
    assert [row["answered"] for row in half] == ["refused", "failed", "refused"]
    assert half[1]["failed"] == failure("the worker ended: code 3")["failed"]
    with path.open("a") as file:
        file.write('{"key": "cut o')
    rows = measured(CALLS, HEADING, path, child(), 60.0)
    assert len(rows) == len(CALLS) and rows[:3] == half
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == HEADING and [line["key"] for line in lines[1:]] == [c.key for c in CALLS]
    again = measured(CALLS, HEADING, path, ["false"], 60.0)
    assert again == rows
    assert population.main(["--report", str(path)]) == 0
    assert capsys.readouterr().out == report(rows) + "\n"


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_appended_to_a_compressed_file(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "rows.jsonl.gz"
    packed = gzip.compress(json.dumps(HEADING).encode() + b"\n")
    if is_there:
        path.write_bytes(packed)
    with pytest.raises(ConfigError, match=r"appended to plain files .allowed: rows\.jsonl\)"):
        measured(CALLS, HEADING, path, ["false"], 60.0)
    assert path.read_bytes() == packed if is_there else not path.exists()


def test_a_file_of_another_population_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**HEADING, "seed": "4"}) + "\n")
    with pytest.raises(ConfigError, match="holds another population"):
        population.read(path, HEADING)
    path.write_text("[1]\n[2]\n")
    with pytest.raises(ConfigError, match="is not a file of"):
        population.read(path, HEADING)


def row(index: int, answered: str, us: dict[str, float], **changes: Any) -> dict[str, Any]:
    measured_row = {"reason": "", "errors": {}, "wrong": [], "failed": {}, "copies": 1}
    own = {"answered": answered, "us": us}
    return {**described(CALLS[index]), "call": f"call {index}", **measured_row, **own, **changes}


def test_ratios_leave_out_what_is_no_peer() -> None:
    us = {"tuner": 10.0, "pytorch": 12.0, "pytorch again": 1.0, "enabled": 1.0, "cudnn": 11.0}
    assert over_pytorch(row(0, "own decision", us)) == 1.2
    assert over_peer(row(0, "own decision", us)) == 1.1
    assert over_peer(row(0, "own decision", {"tuner": 10.0, "pytorch": 12.0})) is None
    assert over_pytorch(row(0, "failed", {})) is None


def test_the_report_leaves_nothing_out() -> None:
    us = {"tuner": 10.0, "pytorch": 10.0, "pytorch again": 10.0, "cudnn": 5.0}
    faster = {**us, "tuner": 5.0}
    rows = [
        row(0, "own decision", faster, operation="attention"),
        row(1, "own decision", {**us, "tuner": 20.0}, operation="attention"),
        row(2, "refused", us, operation="attention", reason="no measured winner"),
        row(3, "failed", {}, operation="attention", reason="no answer after 120 s"),
        row(4, "selection", faster, operation="products", wrong=["cudnn"]),
    ]
    text = report(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["own", "decision", "2", "50.0%", "2", "1.000", "0.500", "0.500", "0.250"] in lines
    assert ["failed", "1", "25.0%", "0"] in lines
    assert ["all", "4", "100.0%", "3", "1.000", "0.500", "0.500", "0.250"] in lines
    assert ["selection", "1", "100.0%", "1", "2.000", "2.000", "1.000", "1.000"] in lines
    first_of_worst = text.split("worst to PyTorch's own choice\n")[1].splitlines()[2]
    assert first_of_worst.split() == ["0.500", "20.0", "own", "decision", "call", "1"]
    assert "wrong outputs\ncall 4: cudnn" in text
    assert "without a time\ncall 3: no answer after 120 s" in text
    assert ["1", "attention", "no", "measured", "winner", "0.500", "0.500"] in lines


def test_the_seed_of_a_commit_is_heads(monkeypatch: Any, tmp_path: Path) -> None:
    from tuner.base import resources

    monkeypatch.setattr(resources, "checkout", lambda: tmp_path)
    with pytest.raises(ConfigError, match="needs a checkout of git"):
        population.commit()
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert len(population.commit()) == 40


def test_without_a_gpu_one_line_says_so(monkeypatch: Any) -> None:
    from tuner.measure import device

    monkeypatch.setattr(device, "detect", lambda: None)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        population.main([])


def test_problems_are_listed_for_a_sweep(capsys: Any, tmp_path: Path) -> None:
    from tuner.tuning.job import read_problems

    assert population.main(["--problems", "--count", "20", "--models", "gpt2,bert-base"]) == 0
    path = tmp_path / "problems.yaml"
    path.write_text(capsys.readouterr().out)
    drawn = draw("0", 20, subset("gpt2,bert-base"))
    assert read_problems(path) == list(dict.fromkeys(call.problem for call in drawn))


def test_shipped_rows_are_read_as_they_are() -> None:
    shipped_rows = Path(population.__file__).parent / "evidence" / "population-h200.jsonl.gz"
    assert len(population.read(shipped_rows)) == 400
