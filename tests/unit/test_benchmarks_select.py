"""`scripts/bench select`: every shipped domain has shapes, and a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import select
from tuner.selection.domains import domain_of
from tuner.selection.portfolio import shipped


def test_shapes_of_every_shipped_domain_are_of_that_domain() -> None:
    domains = {domain for one in shipped() for domain in one.domains}
    assert len(domains) > 30
    for domain in domains:
        found = select.shapes(domain, 3, seed=1)
        assert len(set(found)) == 3
        assert {domain_of(problem) for problem in found} == {domain}


def test_the_table_has_a_line_for_each_domain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(select, "shipped", lambda: shipped()[:1])
    out = tmp_path / "select.json"
    assert select.main(["--shapes", "2", "--rounds", "1", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(shipped()[0].domains)
    document = json.loads(out.read_text())
    assert {"processor", "load", "python", "date"} <= document["environment"].keys()
    assert len(document["rows"]) == len(shipped()[0].domains)
    assert all(row["us"] > 0 and row["times_us"] > 0 for row in document["rows"])
