"""The comparison of ring attention with one GPU: what follows from its times, and what it needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import context_parallel
from benchmarks.__main__ import main

torch = pytest.importorskip("torch", reason="torch is not installed")

TIMES = {"one": 1000.0, "ring": 520.0, "still": 507.0, "transfers": 130.0}


def test_the_time_that_transfers_add_is_not_hidden() -> None:
    row = context_parallel.row_of("forward", TIMES, 52e9)
    assert row["speedup"] == pytest.approx(1000 / 520)
    assert row["tflops"] == pytest.approx(100)
    assert row["exposed_of_transfers"] == pytest.approx(0.1)
    assert row["exposed_of_time"] == pytest.approx(0.025)
    hidden = context_parallel.row_of("forward", {**TIMES, "still": 530.0}, 52e9)
    assert hidden["exposed_us"] == 0


def test_a_pass_has_one_line() -> None:
    rows = [context_parallel.row_of(name, TIMES, 52e9) for name in ("forward", "backward")]
    title, head, forward, backward = context_parallel.text("S=128K", 2, rows).splitlines()
    assert title == "S=128K on 2 GPUs"
    assert len(head) == len(forward) == len(backward)
    assert forward.split() == ["forward", "1000", "520", "1.92", "100", "130", "10.0%", "2.5%"]


def test_nothing_is_sent_where_transfers_are_left_out() -> None:
    from tuner.runtime.parallel.ring import Ring

    before = Ring.start
    with context_parallel.without_transfers():
        tensor = torch.zeros(1)
        assert Ring.start(SimpleNamespace(), tensor).wait() == (tensor,)
    assert Ring.start is before


def test_it_says_that_it_needs_two_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["context_parallel"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("context_parallel: context_parallel needs two GPUs of one host; torch sees 1")


@pytest.mark.parametrize(
    "argv",
    [
        ["--gpus", "3"],
        ["--gpus", "1"],
        ["--rounds", "0"],
        ["--shape", "S=1002,D=64,causal=1"],
        ["--shape", "SQ=512,SKV=1024,D=64"],
        ["--shape", "S=1024,D=64,window=64"],
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, argv: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["context_parallel", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "allowed: 2 to 2 GPUs, 1 round or more, plain self-attention of" in line
