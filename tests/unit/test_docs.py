"""The site: it builds without a warning, and its tables are whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from programs import ran

TOP = Path(__file__).parents[2]
PAGES = TOP / "docs" / "pages"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs mkdocs")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--config-file", str(TOP / "docs" / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TOP), "NO_MKDOCS_2_WARNING": "1"}
    run = ran(*command, env=environment, timeout=240)
    assert run.stderr == ""
    assert "warp_softmax" in (tmp_path / "examples.html").read_text(), "examples are included"
    reference = (tmp_path / "reference.html").read_text()
    assert 'id="tuner.attention"' in reference and 'id="tuner.sweep"' in reference


def test_every_public_function_is_in_the_reference() -> None:
    runtime = pytest.importorskip("tuner.runtime", reason="the runtime needs torch")
    page = (PAGES / "reference.md").read_text()
    assert all(f"::: tuner.{name}\n" in page for name in set(runtime.__all__) - {"Stats"})


def test_every_counted_reason_has_a_remedy() -> None:
    refusal = pytest.importorskip("tuner.runtime.call.refusal", reason="the runtime needs torch")
    page = (PAGES / "troubleshooting.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    kinds = {str(kind) for kind in refusal.Kind}
    assert kinds <= rows, kinds - rows
    assert rows - kinds == {"counted as"}
