"""Shipped decisions as tables: cells, marks and means, and the page that prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import standing
from tuner.base import resources
from tuner.bench.suites import SUITES
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem
from tuner.store.entry import Entry

ROOT = Path(__file__).resolve().parents[2]
SHORT, LONG = (AttentionProblem.parse(text) for text in ("S=512,D=64", "S=8192,D=64"))
WARM = Regime("stream", "warm")


def entry(problem: AttentionProblem, own_us: float, vendor_us: float, std: float = 0.001) -> Entry:
    def measured(family: str, kernel: str, us: float) -> Measurement:
        config = Config(family, {"kernel": kernel})
        flags = ("noisy",) if std >= 0.02 else ()
        return Measurement(
            problem,
            config,
            GPUS["H100"],
            WARM,
            Status.OK,
            latency_us=us,
            std_us=std * us,
            is_final=True,
            flags=flags,
        )

    ranking = [measured("own", "a", own_us), measured("vendor_sdpa", "cudnn", vendor_us)]
    return Entry.of(sorted(ranking, key=lambda m: m.latency_us or 0.0))


def column(*entries: Entry) -> standing.Column:
    return standing.Column("H100", WARM, {e.problem: e for e in entries})


@pytest.mark.parametrize(
    ("own", "std", "shown"),
    [
        (8.0, 0.001, "8.00, 1.250 cudnn"),
        (12.5, 0.001, "12.5, 0.800 cudnn"),
        (9.95, 0.01, "9.95, 1.005 cudnn (tie)"),
        (9.95, 0.03, "9.95, 1.005 cudnn (tie, noisy)"),
    ],
)
def test_a_cell_has_time_ratio_and_marks(own: float, std: float, shown: str) -> None:
    assert column(entry(SHORT, own, 10.0, std)).cell(SHORT) == shown
    assert column().cell(SHORT) == ""


def test_means_are_apart_by_size_and_of_what_every_column_has() -> None:
    both = column(entry(SHORT, 8.0, 10.0), entry(LONG, 100.0, 98.0))
    one = replace(column(entry(SHORT, 5.0, 10.0)), gpu="H200")
    lines = standing.means([SHORT, LONG], [both, one])
    assert lines[2:] == [
        "| up to 1024 keys or rows | 1.250, 1.250 (1) | 2.000, 2.000 (1) |",
        "| above 4096 keys or rows | 0.980, 0.980 (1) |  |",
        "| all | 1.107, 0.980 (2) | 2.000, 2.000 (1) |",
        "| those of every column | 1.250, 1.250 (1) | 2.000, 2.000 (1) |",
    ]


@pytest.mark.parametrize("name", ["acceptance", "decoding", "few"])
def test_the_page_prints_the_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line, so that a decision that changes is printed anew."""
    assert standing.main(["--suite", name]) == 0
    printed = capsys.readouterr().out.strip()
    page = (ROOT / "scripts" / "benchmarks" / "README.md").read_text()
    assert all(table in page for table in printed.split("\n\n"))
    assert len(printed.splitlines()) > len(SUITES[name].problems)


@pytest.mark.parametrize(
    "arguments",
    [("attention.yaml",), ("decoding.yaml", "--l2", "cold"), ("gemm.yaml", "--op", "gemm")],
    ids=lambda arguments: arguments[0],
)
def test_the_page_prints_the_means_of_the_grid(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = arguments
    assert standing.main(["--problems", str(resources.cache() / "grid" / name), *more]) == 0
    _, means = capsys.readouterr().out.strip().split("\n\n")
    assert means in (ROOT / "scripts" / "benchmarks" / "README.md").read_text()


def test_a_list_without_decisions_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "problems.yaml"
    listed.write_text("- S=72,D=64\n")
    with pytest.raises(ConfigError, match=r"list .*problems\.yaml has no shipped decision"):
        standing.main(["--problems", str(listed)])


def test_an_unknown_suite_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main

    assert main(["standing", "--suite", "nothing"]) == 2
    assert "suite 'nothing' is not known (allowed: acceptance" in capsys.readouterr().err
