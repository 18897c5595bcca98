"""``python -m tuner.bench``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.bench.__main__ import NAMES, main


@pytest.mark.parametrize("argv", [[], ["--help"], ["../gpus"]])
def test_another_name_gets_a_line_with_all(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no benchmark" in line and "gpus" in line


def test_every_benchmark_has_its_name() -> None:
    room = Path(__file__, "../../../tuner/bench").resolve()
    modules = {path.stem for path in room.glob("[!_]*.py") if "\ndef main(" in path.read_text()}
    assert set(NAMES) == modules
