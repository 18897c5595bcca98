"""The dispatch benchmark without a GPU: its decoder, its report, and a part that fails."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from tuner.bench import decoder, dispatch
from tuner.bench.decoder import Decoder, Sizes
from tuner.errors import BenchmarkError, ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

SDPA = torch.nn.functional.scaled_dot_product_attention
HOST = {"attention": 4.5, "bare": 3.0, "python": 9.0, "sdpa": 25.0, "beyond_launch": 1.5}
WALL = {"attention": 13.0, "sdpa": 26.0, "flash4": 16.0, "graph": 12.5}


def test_the_decoder_with_its_cache_is_the_decoder_at_once() -> None:
    model = Decoder(Sizes(64, 4, 2, 16, 96, 50), 2, 32, torch.float32, "cpu")
    tokens = torch.randint(50, (1, 9))
    with torch.inference_mode():
        at_once = model(tokens, 0, SDPA)
        model(tokens[:, :-1], 0, SDPA)
        assert torch.allclose(model(tokens[:, -1:], 8, SDPA), at_once, atol=1e-4)
        other = tokens.clone()
        other[0, 0] = (other[0, 0] + 1) % 50
        assert not torch.allclose(model(other, 0, SDPA), at_once, atol=1e-2), "all is attended to"


def test_its_attention_is_of_a_kind_that_is_served(runtime: Any) -> None:
    model = Decoder(Sizes(64, 4, 2, 16, 96, 50), 1, 32, torch.float16, "cpu")
    seen = []

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        problem = runtime.attention.problem_of(query, key, value, options["is_causal"])
        seen.append(problem.label())
        return SDPA(query, key, value, **options)

    with torch.inference_mode():
        model(torch.randint(50, (1, 9)), 0, attend)
        model(torch.randint(50, (1, 1)), 9, attend)
    shape = "B=1,H=4,HKV=2,{},dtype=fp16,layout=bshd"
    assert seen == [shape.format("S=9,D=16,causal=1"), shape.format("SQ=1,SKV=10,D=16")]


def test_decoding_feeds_the_same_tokens_to_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other from the context's end; the cache is filled by the way itself."""
    monkeypatch.setattr(decoder, "CONTEXT", 5)
    monkeypatch.setattr(decoder, "GENERATED", 3)
    model = Decoder(Sizes(64, 4, 2, 16, 96, 50), 2, 32, torch.float32, "cpu")
    tokens = torch.randint(50, (1, 8))
    rows: list[int] = []

    def attend(query: Any, *others: Any, **options: Any) -> Any:
        rows.append(query.shape[2])
        return SDPA(query, *others, **options)

    with torch.inference_mode():
        run = decoder._generation(model, tokens, attend)
        assert rows == [5, 5]  # of both layers
        # `run` has its number of tokens from the module that was loaded.
        last = run(attend, 3)
        assert rows[2:] == [1] * 6
        assert torch.allclose(model(tokens, 0, SDPA), last, atol=1e-4)


class FakeEvent:
    """The host's clock in place of the device's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_the_whole_part_on_a_small_decoder(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """Everything but the GPU: both ways agree, each has a share, and calls are counted."""
    monkeypatch.setattr(decoder, "PREFILLS", (8, 24))
    monkeypatch.setattr(decoder, "CONTEXT", 5)
    monkeypatch.setattr(decoder, "GENERATED", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    found = decoder.measure(2, Sizes(64, 4, 2, 16, 96, 50), "cpu")
    assert list(found) == ["layers", "prefill 8", "prefill 24", "decoding at 5"]
    for name in list(found)[1:]:
        part = found[name]
        assert part["deviation"] < 1e-2, name
        assert all(0 < part[f"{way} share"] < 1 for way in ("sdpa", "tuner")), name
        assert part["hits"] == 0 and sum(part["fallbacks"].values()) > 0, name
    rows = dispatch.report({"environment": {}, "parts": {"decoder": found}}).splitlines()
    assert sum("time / sdpa" in row and "tokens/s" in row for row in rows) == 3


def test_what_it_calls_is_what_it_lists(runtime: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What is tuned from the list serves the decoder's own calls."""
    sizes = decoder.LLAMA_3_8B
    small = Sizes(64, sizes.heads, sizes.heads_kv, sizes.head_dim, 96, 50)
    model = Decoder(small, 1, 2048, torch.float16, "cpu")
    seen = []

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append(runtime.attention.problem_of(query, key, value, options["is_causal"]))
        return query

    with torch.inference_mode():
        model(torch.randint(50, (1, 1024)), 0, attend)
        model(torch.randint(50, (1, 1)), 1024 + decoder.GENERATED // 2 - 1, attend)
    first, _, last = decoder.problems()
    assert seen == [first, last]
    assert dispatch.main(["--list-problems"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[1] == f"- op=attention,{first.label()}" and len(listed) == 4


def test_the_report_names_figures_and_their_limits() -> None:
    parts = {"host": {**HOST, "table": 0.1}, "wall": WALL, "decoder": {"failed": "no end"}}
    lines = dispatch.report({"environment": {"gpu": "a GPU"}, "parts": parts}).splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["host us beyond the launch"][-2:] == ["1.50", "5.0"]
    assert cells["host us of the table"][-2:] == ["0.10", "0.5"]
    assert cells["wall / sdpa"][-2:] == ["0.50", "0.70"]
    assert cells["wall / graph"][-2:] == ["1.04", "1.15"]
    assert cells["decoder"][1:] == ["failed", "no", "end"]


def test_a_part_that_fails_or_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Any = subprocess.CompletedProcess([], 1, "", "tracing\nhost: no kernel serves\n")
    monkeypatch.setattr(dispatch.subprocess, "run", lambda *_, **__: done)
    assert dispatch._in_child("host", 1) == {"failed": "host: no kernel serves"}

    def hangs(command: Any, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(dispatch.subprocess, "run", hangs)
    assert dispatch._in_child("wall", 1) == {"failed": "no end after 120 s"}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchmarkError, match="sees no CUDA GPU"):
        dispatch.main(["--parts", "host"])
    with pytest.raises(SystemExit):
        dispatch.main(["--parts", "hosts"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--layers", "0"], "layers=0 is out of range"),
        (["--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
    ],
)
def test_wrong_input_is_said_before_anything_runs(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dispatch.main(arguments)
