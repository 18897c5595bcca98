"""``python -m benchmarks``."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from living import benchmarks_environment

from benchmarks.__main__ import NAMES, main
from tuner.base.processes import python_command

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("argv", [[], ["--help"], ["../gpus"]])
def test_another_name_gets_a_line_with_all(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no benchmark" in line and "gpus" in line


def test_every_benchmark_has_its_name() -> None:
    folder = TOP / "scripts" / "benchmarks"
    modules = {path.stem for path in folder.glob("[!_]*.py") if "\ndef main(" in path.read_text()}
    assert set(NAMES) == modules


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_one_line(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"scripts/bench {name}: ")


def test_every_argument_has_a_text() -> None:
    calls = [
        (path.name, node)
        for path in (TOP / "scripts").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
    ]
    silent = [
        (name, ast.unparse(call.args[0]))
        for name, call in calls
        if all(keyword.arg != "help" for keyword in call.keywords)
    ]
    assert len(calls) > 150 and silent == []


def test_without_a_gpu_nothing_is_compiled_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("benchmarks.narrow.compiled", lambda *_: pytest.fail("it compiles"))
    assert main(["narrow"]) == 1
    assert capsys.readouterr().err == "narrow: no GPU found: kernels are timed on one\n"


def test_the_script_names_them_too() -> None:
    said = subprocess.run([TOP / "scripts" / "bench"], capture_output=True, text=True, check=False)
    assert said.returncode != 0
    assert said.stderr.split()[-len(NAMES) :] == list(NAMES)
    asked = [TOP / "scripts" / "bench", "--help"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == said.stderr


@pytest.mark.parametrize("arguments", [["sweeps", "--help"], ["sweeps", "--report", "FILE"]])
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    """As in ``scripts/bench sweeps --report FILE | head -0``."""
    file = tmp_path / "sweeps.jsonl"
    file.write_text('{"format": "cutlass-tuner sweeps 1"}\n')
    given = [str(file) if word == "FILE" else word for word in arguments]
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            python_command("-m", "benchmarks", *given),
            env={**benchmarks_environment(), "PYTHONUNBUFFERED": ""},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")
