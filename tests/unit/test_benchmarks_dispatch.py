"""The dispatch benchmark without a GPU: its decoder, its report, and a part that fails."""

from __future__ import annotations

import hashlib
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    calls,
    decoder,
    dispatch,
    service,
)
from benchmarks.decoder import Decoder, Sizes, Way
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import GemmProblem
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.reader import decided, lookup
from tuner.store import open_store
from tuner.tuning.job import read_problems

torch = pytest.importorskip("torch", reason="torch is not installed")

SDPA = torch.nn.functional.scaled_dot_product_attention
HOST = {
    "attention": 4.5,
    "bare": 3.0,
    "python": 9.0,
    "sdpa": 25.0,
    "beyond_launch": 1.5,
    "refused_sdpa": 24.0,
    "beyond_refused": 0.75,
    "beyond_refused_enabled": 12.5,
    "enabled": 13.0,
    "enabled_over_sdpa": 0.52,
    "growing": 25.0,
    "beyond_growing": 0.5,
    "growing_dispatched": 0.99,
    "has_dispatcher": True,
    "dispatched": 0.998,
}
PROOF = Proof(64, 0, "NVIDIA H200", "580.159.04", "2026-11-24")
NEWER = b"kernel\0GLIBC_2.99\0"
WALL = {"attention": 13.0, "sdpa": 26.0, "flash4": 16.0, "graph": 12.5}
SMALL = Sizes(64, 4, 2, 16, 96, 50)


def torchs(attention: Any = SDPA) -> Way:
    return replace(decoder.ways()["torch"], attention=attention)


def test_the_decoder_with_its_cache_is_the_decoder_at_once() -> None:
    model = Decoder(SMALL, 2, 32, torch.float32, "cpu")
    tokens = torch.randint(50, (1, 9))
    with torch.inference_mode():
        at_once = model(tokens, 0, torchs())
        model(tokens[:, :-1], 0, torchs())
        assert torch.allclose(model(tokens[:, -1:], 8, torchs()), at_once, atol=1e-4)
        other = tokens.clone()
        other[0, 0] = (other[0, 0] + 1) % 50
        assert not torch.allclose(model(other, 0, torchs()), at_once, atol=1e-2), "all is seen"


def test_its_attention_is_of_a_kind_that_is_served(runtime: Any) -> None:
    model = Decoder(SMALL, 1, 32, torch.float16, "cpu")
    seen = []

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        problem = runtime.attention_call.pose(query, key, value, options["is_causal"], 1.0).problem
        seen.append(problem.label())
        return SDPA(query, key, value, **options)

    with torch.inference_mode():
        model(torch.randint(50, (1, 9)), 0, torchs(attend))
        model(torch.randint(50, (1, 1)), 9, torchs(attend))
    shape = "B=1,H=4,HKV=2,{},dtype=fp16,layout=bshd"
    assert seen == [shape.format("S=9,D=16,causal=1"), shape.format("SQ=1,SKV=10,D=16")]


def test_every_way_computes_the_same(runtime: Any) -> None:
    """Also with other weights: the gated layer's are laid out for the kernel that takes them."""
    model = Decoder(SMALL, 2, 32, torch.float32, "cpu")
    tokens = torch.randint(50, (1, 9))
    with torch.inference_mode():
        wanted, *others = (model(tokens, 0, way) for way in decoder.ways().values())
    assert len(others) == len(decoder.TUNED)
    assert all(torch.allclose(one, wanted, atol=1e-4) for one in others)


def test_decoding_feeds_the_same_tokens_to_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other from the context's end."""
    monkeypatch.setattr(decoder, "CONTEXT", 5)
    monkeypatch.setattr(decoder, "GENERATED", 3)
    model = Decoder(SMALL, 2, 32, torch.float32, "cpu")
    tokens = torch.randint(50, (1, 8))
    counts: list[int] = []

    def attend(query: Any, *others: Any, **options: Any) -> Any:
        counts.append(query.shape[2])
        return SDPA(query, *others, **options)

    with torch.inference_mode():
        run = decoder._generation(model, tokens)
        run(torchs(attend), True)
        assert counts == [1, 1]  # of both layers
        last = run(torchs(attend))
        assert counts == [1] * 8
        assert torch.allclose(model(tokens, 0, torchs()), last, atol=1e-4)


class FakeEvent:
    """The host's clock in place of the device's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_the_whole_part_on_a_small_decoder(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """Everything but the GPU: all ways agree, parts have shares, and calls are counted."""
    monkeypatch.setattr(decoder, "PREFILLS", (8, 24))
    monkeypatch.setattr(decoder, "CONTEXT", 5)
    monkeypatch.setattr(decoder, "GENERATED", 3)
    monkeypatch.setattr(decoder, "ROUNDS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    found = decoder.measure(2, SMALL, "cpu")
    assert list(found) == ["layers", "prefill 8", "prefill 24", "decoding at 5"]
    for name, tokens in (("prefill 8", 1), ("prefill 24", 1), ("decoding at 5", 3)):
        part = found[name]
        assert list(part["tokens_per_s"]) == ["torch", "attention", "block"]
        assert all(0 <= off < 1e-2 for off in part["deviation"].values()), name
        for shares in part["shares"].values():
            assert all(share > 0 for share in shares.values()) and sum(shares.values()) < 1, name
        assert list(part["calls"]["attention"]) == ["attention"]
        answers = part["calls"]["block"]
        counts = {operation: sum(each["fallbacks"].values()) for operation, each in answers.items()}
        assert counts == {"attention": 2 * tokens, "linear": 7 * tokens, "swiglu": 2 * tokens}
        assert not any(each["hits"] for each in answers.values())
    lines = dispatch.report({"environment": {}, "parts": {"decoder": found}}).splitlines()
    cells = [line.split() for line in lines if "time / torch" in line]
    assert len(cells) == 6 and all(line[4:6] == ["not", "tuned"] for line in cells)
    assert sum("nothing tuned ran: 0 hits" in line for line in lines) == 9


def test_calls_are_counted_by_what_answered_them(tuned: Any) -> None:
    model, tokens = Decoder(SMALL, 2, 32, torch.float16, "cpu"), torch.randint(50, (1, 9))
    with torch.inference_mode():
        way = decoder.ways()["attention"]
        answers = decoder._answers(decoder._prefill(model, tokens), way, ("attention",))
    assert answers == {"attention": {"hits": 2, "fallbacks": {}}}


def test_a_figure_is_told_where_something_was_tuned(runtime: Any) -> None:
    """A block is measured by its linear layers: attention has a line of its own."""
    lost = {"hits": 0, "fallbacks": {runtime.refusal.Kind.VENDOR: 13}}
    missed = {"hits": 0, "fallbacks": {"no measured winner": 4}}
    served = {"hits": 4, "fallbacks": {}}

    def figures(**answers: Any) -> list[str]:
        part = {
            "tokens_per_s": {"torch": 90.0, "attention": 100.0, "block": 120.0},
            "shares": {way: {"attention": 0.1} for way in ("torch", "attention", "block")},
            "calls": {"attention": {"attention": answers["attention"]}, "block": answers},
            "deviation": {"attention": 1e-4, "block": 2e-4},
        }
        return [row[1] for row in decoder.rows({"layers": 4, "prefill 8": part})][1:3]

    assert figures(attention=served, linear=lost, swiglu=missed) == ["0.900", "0.750"]
    assert figures(attention=served, linear=missed, swiglu=missed) == ["0.900", "not tuned"]
    assert figures(attention=missed, linear=missed, swiglu=served) == ["not tuned", "0.750"]


def test_what_it_calls_is_what_it_lists(
    runtime: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What is tuned from the list serves the decoder's own calls."""
    seen: dict[Any, None] = {}
    products = runtime.products

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen[runtime.attention_call.pose(query, key, value, options["is_causal"], 1.0).problem] = (
            None
        )
        return query

    def multiply(x: Any, weight: Any) -> Any:
        seen[products.pose(x, weight.t()).problem] = None
        return torch.nn.functional.linear(x, weight)

    def gate(x: Any, weights: Any) -> Any:
        seen[runtime.gated.swiglu_problem_of(x, weights)] = None
        return runtime.gated.swiglu(x, weights)

    way = Way(attend, multiply, gate, is_interleaved=True)
    sizes = replace(SMALL, vocabulary=48)
    model = Decoder(sizes, 1, 8192, torch.float16, "cpu")
    with torch.inference_mode():
        for length in decoder.PREFILLS:
            model(torch.randint(48, (1, length)), 0, way)
        model(torch.randint(48, (1, 1)), 1024 + decoder.GENERATED // 2 - 1, way)
    assert set(seen) == set(decoder.problems(sizes))
    assert dispatch.main(["--list-problems"]) == 0
    listed = tmp_path / "problems.yaml"
    listed.write_text(capsys.readouterr().out)
    assert read_problems(listed) == [calls.PROBLEM, *decoder.problems()]
    assert dispatch.main(["--list-problems", "--parts", "host"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_report_names_figures_and_their_limits() -> None:
    parts = {"host": {**HOST, "table": 0.1}, "wall": WALL, "decoder": {"failed": "no end"}}
    lines = dispatch.report({"environment": {"gpu": "a GPU"}, "parts": parts}).splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["host us beyond the launch"][5:7] == ["1.50", "5.0"]
    assert cells["host us of the table"][-2:] == ["0.10", "0.5"]
    assert cells["host us more, refused"][4:6] == ["0.75", "1.0"]
    assert cells["host us more, refused, enabled"][5:7] == ["12.50", "1.0"]
    assert cells["host, enabled / sdpa"][4:6] == ["0.52", "0.75"]
    assert cells["host us more, growing cache"][5:7] == ["0.50", "1.0"]
    assert cells["wall / sdpa"][-2:] == ["0.50", "0.70"]
    assert cells["wall / graph"][-2:] == ["1.04", "1.15"]
    assert cells["decoder"][1:] == ["failed", "no", "end"]
    told = dict(row[::3] for row in calls.host_rows(HOST))
    assert told["host us a call"].endswith("sdpa 25.00, no flash3, no flash4")
    assert told["host us beyond the launch"] == "99.8% of the calls by the dispatcher"
    assert told["host us more, refused"] == "24.00 of PyTorch's"
    _, beyond, *_ = calls.host_rows({**HOST, "has_dispatcher": False, "dispatched": 0.0})
    assert beyond[3] == "no dispatcher: through Python"


def test_a_part_that_fails_or_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Any = subprocess.CompletedProcess([], 1, "", "tracing\nhost: no kernel serves\n")
    monkeypatch.setattr(dispatch.subprocess, "run", lambda *_, **__: done)
    assert dispatch._in_child("host", 1, 1) == {"failed": "host: no kernel serves"}

    def hangs(command: Any, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(dispatch.subprocess, "run", hangs)
    assert dispatch._in_child("wall", 1, 1) == {"failed": "no end after 120 s"}


FIRST_CALL = """
import json, os, tempfile
path = os.environ["PYTHONPATH"].split(os.pathsep)[0]
print(json.dumps({
    "returned": float(os.environ["TOLD"]), "done": 2.0, "hits": 1, "load": 0.5, "loaded": 1,
    "packages": sorted(os.listdir(path)), "cache": os.listdir(os.environ["TUNER_CACHE_DIR"]),
    "compiler": os.path.exists(os.environ["CXX"]), "store": "TUNER_STORE" in os.environ,
}))
"""


def test_prebuilt_kernels_serve_without_cache_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TUNER_STORE", "sqlite:///elsewhere")
    monkeypatch.setenv("TOLD", "42.0")
    monkeypatch.setattr(dispatch, "_FIRST_CALL", FIRST_CALL)
    with pytest.raises(BenchmarkError, match="no kernel is built: tuner build --portfolio"):
        dispatch.wheel(1)
    (tmp_path / "kernels").mkdir()
    kernel = Kernel("spec", "k1", hashlib.sha256(b"kernel").hexdigest(), PROOF)
    library = tmp_path / "made.so"
    library.write_bytes(b"kernel")
    ArtifactCache().put("k1", library, resources=None, compile_cpu_s=1.0, source="", facts={})
    newer = Kernel("newer", "k2", hashlib.sha256(NEWER).hexdigest(), PROOF)
    library = tmp_path / "newer.so"
    library.write_bytes(NEWER)
    ArtifactCache().put("k2", library, resources=None, compile_cpu_s=1.0, source="", facts={})
    known = KernelList("13.0.88", "4.2.0", "9.0", {"newer": newer})
    known.write(tmp_path / "kernels" / "13.0.88-9.0.json")
    with pytest.raises(BenchmarkError, match="all 1 kernels need a newer glibc"):
        dispatch.wheel(1)
    known.with_kernels([kernel]).write(tmp_path / "kernels" / "13.0.88-9.0.json")
    found = dispatch.wheel(2)
    assert (found["kernels"], found["hits"], found["runs"], found["returned"]) == (1, 2, 2, 42.0)
    assert found["left_out_for_glibc"] == 1
    for each in found["each"]:
        assert each["packages"] == ["cutlass_tuner_kernels"] and each["cache"] == []
        assert not each["compiler"] and not each["store"]
    lines = dispatch.report({"environment": {}, "parts": {"wheel": found}})
    where = "1 prebuilt kernels (1 left out for their glibc), 2 of 2 served"
    assert f"first call ms, wheel  42.0      150  {where}" in lines
    assert "hashing and loading 1 0.5" in lines


def test_an_unpacked_wheel_is_measured_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOLD", "42.0")
    monkeypatch.setattr(dispatch, "_FIRST_CALL", FIRST_CALL)
    with pytest.raises(BenchmarkError, match="has no prebuilt kernels"):
        dispatch.wheel(1, tmp_path)
    known = KernelList("13.0.88", "4.2.0", "9.0").with_kernels([Kernel("a", "k1", "ab")])
    package = tmp_path / "cutlass_tuner_kernels"
    package.mkdir()
    known.write(package / "kernels.json")
    found = dispatch.wheel(1, tmp_path)
    assert (found["kernels"], found["left_out_for_glibc"]) == (1, 0)
    assert found["each"][0]["packages"] == ["cutlass_tuner_kernels"]


def test_a_first_call_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "_FIRST_CALL", "raise RuntimeError('no such device')")
    with pytest.raises(BenchmarkError, match=r"the first call failed: .*no such device"):
        dispatch._first_calls(tmp_path, 1)


def test_a_store_is_filled_with_what_can_be_looked_up(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    dispatch.fill(store, 40)
    for number in (0, 1, 39):
        problem = service.problem(number)
        answer = lookup(problem, gpu=DEFAULT_GPU, path=store)
        assert answer is not None and answer.exact
        assert {m.problem for m in answer.entry.ranking} == {problem}
        assert len(answer.entry.ranking) == 3
    assert len(decided(store)) == 40


class Built:
    """Commands that were run in place of `tuner build`, and what was said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.here: set[str] = set()

        def run(command: Any, **_: Any) -> None:
            self.commands.append(command[command.index("build") :])

        cache = SimpleNamespace(find=lambda key: key if key in self.here else None)
        monkeypatch.setattr(dispatch.subprocess, "run", run)
        monkeypatch.setattr(dispatch.device, "detect", lambda: DEFAULT_GPU)
        monkeypatch.setattr(dispatch, "ArtifactCache", lambda: cache)
        monkeypatch.setattr(dispatch.dispatcher, "build", self.refuse)

    def refuse(self, _: Any) -> None:
        raise CompileError("no g++", command="", log="")


def test_what_would_be_launched_is_built_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    built, problem = Built(monkeypatch), decoder.problems()[3]
    own = Measurement(
        problem,
        Config("gemm", {"tile_m": 128}),
        DEFAULT_GPU,
        Regime.default("gemm"),
        Status.OK,
        latency_us=10.0,
        is_final=True,
        artifacts={"gemm": "k"},
    )
    with open_store() as store:
        store.decide(problem, DEFAULT_GPU, own.regime, [own], "s")
    asked = [problem, GemmProblem(997, 4096, 4096)]  # tuned nowhere
    dispatch._build(asked, built_only=False)
    assert built.commands == [["build", "--op", "gemm", "--shape", problem.label()]]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"dispatch: not tuned: gemm {asked[1].label()}"
    assert "no dispatcher, calls go through Python: no g++" in said[1]
    dispatch._build(asked, built_only=True)
    assert len(built.commands) == 1
    built.here.add("k")
    dispatch._build(asked, built_only=False)
    assert len(built.commands) == 1


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        dispatch.main(["--parts", "host"])
    with pytest.raises(SystemExit):
        dispatch.main(["--parts", "hosts"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--layers", "0"], "layers=0 is out of range"),
        (["--runs", "0"], "runs=0 is out of range"),
        (["--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
    ],
)
def test_wrong_input_is_said_before_anything_runs(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dispatch.main(arguments)
