"""The command line: exit codes, one clear line for wrong input, what a sweep prints."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_softmax import (
    SHAPE,
    recorded,
    recordings_fixture,
)

import tuner
from tuner import cli
from tuner.cli.sweep import problems_of
from tuner.errors import CompileError, ConfigError
from tuner.problem import AttentionProblem
from tuner.runners import recording

recordings = recordings_fixture


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.measure.device.detect", lambda index=0: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise CompileError("no nvcc was found")

    monkeypatch.setattr("tuner.compile.toolchain.find_toolchain", refuse)


@pytest.mark.usefixtures("recordings", "no_gpu")
class TestReplayedSweep:
    """A machine without a GPU and a shape with a recording."""

    def test_it_says_so_and_shows_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["sweep", *SHAPE, "--trials", "500", "--seed", "1"]) == 0
        out, err = capsys.readouterr()
        assert "no GPU found: nothing is measured here" in err
        assert "replaying the recorded sweep of M=256,N=512" in err
        assert "REPLAYED from a recorded sweep: measured on NVIDIA H200" in out
        assert "winner, best own" in out
        assert "runner-up" in out
        assert "failed: " in out
        assert " timeout" in out
        assert "stored as replayed in sqlite:///" in out

    def test_json_is_one_document_and_nothing_else(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["sweep", *SHAPE, "--trials", "20", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["provenance"] == "replayed"
        assert document["winner"]["provenance"] == "replayed"
        assert document["winner"]["latency_us"] == document["ranking"][0]["latency_us"]
        assert document["kernels"] <= 20
        assert document["store"].startswith("sqlite:///")

    def test_the_store_option_and_a_second_sweep(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = f"sqlite:///{tmp_path}/other.sqlite"
        arguments = ["sweep", *SHAPE, "--trials", "10", "--json", "--store", url]
        assert cli.main(arguments) == 0
        first = json.loads(capsys.readouterr().out)
        assert cli.main(arguments) == 0
        second = json.loads(capsys.readouterr().out)
        assert (tmp_path / "other.sqlite").is_file()
        assert (first["resumed"], second["resumed"]) == (0, 10)
        assert first["winner"]["config"] == second["winner"]["config"]

    def test_an_optuna_storage_takes_the_study_or_is_refused_first(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        journal = tmp_path / "optuna.log"
        words = ["sweep", *SHAPE, "--trials", "5", "--optuna-storage"]
        assert cli.main([*words, str(journal)]) == 0
        out, err = capsys.readouterr()
        assert "Optuna" not in out + err, "its log is quiet"
        assert "softmax M=256,N=512" in journal.read_text()
        assert cli.main([*words, str(tmp_path)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"Optuna storage {tmp_path} is a folder; name a file in it" in err
        assert cli.main([*words, str(journal), "--list"]) == 2

    def test_problems_goes_on_and_reports_at_the_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "p.yaml"
        file.write_text("- op=softmax,M=256,N=512\n- op=gemm,M=7,N=7,K=7\n")
        arguments = ["sweep", "--problems", str(file), "--trials", "9"]
        assert cli.main(arguments) == 1
        out, err = capsys.readouterr()
        assert "softmax M=256,N=512" in out
        assert "tuner: gemm M=7,N=7,K=7,dtype=fp16: no candidate for" in err
        assert cli.main([*arguments, "--json"]) == 1
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert [p["cols"] for p in document["skipped"]] == [512]
        assert len(document["failed"]) == 1
        assert "M=256,N=512,dtype=fp16 is tuned already" in err

    def test_a_damaged_recording_is_one_line(
        self, recordings: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (recordings / "one.json.gz").write_bytes(b"\x1f\x8b")
        assert cli.main(["sweep", *SHAPE]) == 2
        (last,) = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
        assert last.startswith("tuner: recording ")


@pytest.mark.usefixtures("recordings", "no_gpu", "no_compiler")
def test_without_a_recording_it_predicts_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("tuner.runners.opening")  # a kind of runner subclasses the compiler
    monkeypatch.setattr(
        "tuner.compile.compiler.Compiler", lambda *_, **__: pytest.fail("a compiler")
    )
    assert cli.main(["sweep", "--op", "softmax", "--shape", "M=64,N=64"]) == 0
    out, err = capsys.readouterr()
    assert "ranking by predicted time, nothing is compiled" in err
    assert "no recording of M=64,N=64" in err
    assert "PREDICTED for NVIDIA H200: estimates, nothing was measured" in out
    assert "stored as predicted in" in out


@pytest.mark.usefixtures("recordings", "no_gpu")
class TestKnownAlready:
    """A machine without a GPU and shapes that measurements answer, or a portfolio does."""

    def said(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
        assert cli.main(["sweep", "--trials", "2", "--json", *arguments]) == 0
        return capsys.readouterr().err.splitlines()

    def test_what_answers_is_named_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second, third, *_ = self.said(capsys, "--shape", "S=1000,D=64")
        assert first == "no GPU found: nothing is measured here"
        asked = AttentionProblem.parse("S=1000,D=64").label()
        assert second == f"`tuner lookup --shape {asked}` answers from a portfolio's prediction"
        assert third.startswith(f"no recording of {asked}")

    def test_a_measured_shape(self, capsys: pytest.CaptureFixture[str]) -> None:
        shape = ("--op", "gemm", "--shape", "M=8192,N=8192,K=8192")
        _, second, *_ = self.said(capsys, *shape)
        label = "M=8192,N=8192,K=8192,dtype=fp16"
        wanted = f"`tuner lookup --op gemm --shape {label}` answers from measurements of this shape"
        assert second == wanted

    def test_of_a_list_how_many(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "p.json"
        file.write_text('["op=softmax,M=64,N=64", "S=1024,D=64"]')
        _, second, *_ = self.said(capsys, "--problems", str(file))
        wanted = "of the 2 problems 1 have measured decisions and 0 a portfolio's prediction"
        assert second.startswith(wanted)

    def test_a_replay_that_was_asked_for_needs_no_hint(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = self.said(capsys, "--shape", "S=1024,D=64", "--replay")
        assert not [line for line in said if "tuner lookup" in line or "no GPU" in line]


@pytest.mark.usefixtures("recordings", "no_gpu")
class TestWrongInput:
    """Exit code 2, one line on standard error that names what was wrong."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["jobs"], "arguments are required: COMMAND (`tuner jobs --help` lists them)"),
            (["tune"], "invalid choice: 'tune' (choose from "),
            (["sweeep"], "; did you mean sweep?"),
            (["cache", "prun"], "; did you mean prune?"),
            (["sweep"], "one of the arguments --shape --problems is required"),
            (["sweep", "--shape", "S=0,D=64"], "S=0 is out of range"),
            (["sweep", "--shape", "S=1024,D=63"], "D=63 has no tuned kernel"),
            (["sweep", "--shape", "S=1024,D=64,X=1"], "unknown key 'X' for attention"),
            (["sweep", "--shape", "S=1024,D=64,S=2"], "key 'S' is given twice (allowed: once)"),
            (["sweep", "--shape", "S=8,D=8,H=10,HKV=3"], "H"),
            (
                ["sweep", "--shape", "S=abc,D=64"],
                "S=abc is not a whole number (allowed: as in S=1024)",
            ),
            (["sweep", "--shape", "S=1024"], "attention needs D"),
            (["sweep", "--op", "conv", "--shape", "M=1"], "invalid choice: 'conv'"),
            (["sweep", *SHAPE, "--trials", "x"], "argument --trials: invalid int value: 'x'"),
            (["sweep", *SHAPE, "--trials", "0"], "trials=0 is out of range"),
            (["sweep", *SHAPE, "--time-limit", "-1"], "time-limit=-1.0 is out of range"),
            (["sweep", *SHAPE, "--jobs", "0"], "argument --jobs: 0 is out of range"),
            (["sweep", *SHAPE, "--gpus", "0"], "argument --gpus: 0 is out of range"),
            (["build", "--jobs", "0"], "argument --jobs: 0 is out of range (allowed: 1 or more)"),
            (["lookup", *SHAPE, "--tensor-parallel", "0"], "--tensor-parallel: 0 is out of range"),
            (["bench", "gemm", "--rounds", "1"], "argument --rounds: 1 is out of range"),
            (["bench", "gemm", "--own", "0"], "argument --own: 0 is out of range"),
            (["prove", "--processes", "0"], "0 is out of range (allowed: 1 to 64)"),
            (["plan", *SHAPE, "--within", "-1"], "argument --within: -1 is out of range"),
            (["plan", *SHAPE, "--within", "nan"], "argument --within: nan is out of range"),
            (["serve", "--port", "65536"], "65536 is out of range (allowed: 0 to 65535)"),
            (["profile", *SHAPE, "--timeout", "0"], "argument --timeout: 0 is out of range"),
            (["revalidate", "--more", "-1"], "argument --more: -1 is out of range"),
            (["shapes", "--model", "x", "--ranks", "0"], "argument --ranks: 0 is out of range"),
            (["shapes", "--model", "x", "--chunk", "0"], "argument --chunk: 0 is out of range"),
            (["fit", "--kernels", "0"], "argument --kernels: 0 is out of range"),
            (["sweep", *SHAPE, "--device", "-1"], "device=-1 is out of range"),
            (["sweep", *SHAPE, "--device", "9"], "device=9 is not a CUDA device"),
            (["sweep", *SHAPE, "--family", "gemm"], "family 'gemm' does not serve softmax"),
            (["sweep", *SHAPE, "--sampler", "cma"], "sampler=cma is not known"),
            (["sweep", *SHAPE, "--effort", "huge"], "invalid choice: 'huge'"),
            (["sweep", *SHAPE, "--max-workspace", "much"], "--max-workspace much is not a size"),
            (
                ["sweep", *SHAPE, "--max-workspace", "5"],
                "--max-workspace 5 is not a size (allowed: a number and B, KB, MB, GB",
            ),
            (["sweep", *SHAPE, "--store", "nothing://x"], "nothing"),
            (
                ["sweep", "--problems", "/none.yaml"],
                "/none.yaml cannot be read: No such file",
            ),
            (["record", "out", *SHAPE, "--gpu", "B200"], "B200"),
            (["list", "--store", ""], "argument --store: its value is empty"),
            (["lookup", *SHAPE, "--gpu="], "argument --gpu: its value is empty"),
            (["report", *SHAPE, "--out", ""], "--out: its value is empty"),
            (["shapes", "--model", ""], "argument --model: its value is empty"),
            (["store", "backup", ""], "argument FILE: its value is empty"),
            (["build", "--op", "conv"], "invalid choice: 'conv'"),
            (["prove", "--op", "conv"], "invalid choice: 'conv'"),
        ],
    )
    def test_one_clear_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if arguments[:1] == ["record"]:
            assert cli.main(["sweep", *SHAPE, "--trials", "2"]) == 0
            capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as exc:  # argparse's own
            code = int(exc.code or 0)
        err = capsys.readouterr().err.strip()
        assert code == 2
        assert message in err
        assert len(err.splitlines()) == 1
        assert err.startswith("tuner")

    def test_all_bad_entries_of_a_list(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "p.json"
        file.write_text('["S=1,D=63", "S=8,D=8", "Q=1"]')
        assert cli.main(["sweep", "--problems", str(file)]) == 2
        err = capsys.readouterr().err
        assert "entry 1: D=63" in err
        assert "entry 3: unknown key 'Q'" in err


def test_a_store_that_is_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corrupt.sqlite"
    file.write_bytes(b"this is not a database" * 100)
    before = file.read_bytes()
    assert cli.main(["sweep", *SHAPE, "--replay", "--store", f"sqlite:///{file}"]) == 1
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert "corrupt.sqlite" in err
    assert file.read_bytes() == before


def test_help_names_the_exit_codes_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n  {code:<5}" in out for code in (0, 1, 2))
    assert "129, 130, 143" in out
    assert "TUNER_STORE" in out
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"cutlass-tuner {tuner.__version__}"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = cli.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert {"sweep", "record", "lookup", "build", "cache", "doctor"} <= set(commands or ())
    for name in commands or ():
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert "usage: tuner" in capsys.readouterr().out


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Every argument of a parser and of its commands, with the command's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from arguments_of(command)
        else:
            yield parser.prog, action


def test_every_argument_has_a_text() -> None:
    found = list(arguments_of(cli.parser()))
    assert len(found) > 200
    assert [(name, action.dest) for name, action in found if not action.help] == []


#: Folders whose README shows commands.
README_FOLDERS = (
    "scripts",
    "scripts/benchmarks",
    "tuner",
    "cache",
)


def test_commands_of_the_readmes_are_the_programs() -> None:
    root, parser, seen = Path(__file__).parents[2], cli.parser(), 0
    pages = [root / "README.md", *(root / folder / "README.md" for folder in README_FOLDERS)]
    for page in (*pages, *(root / "docs" / "pages").glob("*.md")):
        text = page.read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += [f"tuner {line}" for line in re.findall(r"`tuner ([^`\n]+--shape [^`\n]+)`", text)]
        for line in lines:
            for part in re.split(r";|&&|>", line.partition("#")[0]):
                command = re.match(r"\s*(?:RUN )?(?:scripts/)?tuner (.+)", part)
                if command and "..." not in part:
                    parser.parse_args(shlex.split(command[1]))
                    seen += 1
    assert seen > 30


@pytest.mark.parametrize(
    "arguments",
    [
        ["jobs", "show", "\udcff"],
        ["jobs", "submit", "--shape", "\udcff"],
        ["show", *SHAPE, "--gpu", "\udcff"],
        ["sync", "http://\udcff"],
        ["list", "--store", "\udcff"],
        ["pin", *SHAPE, "--config", "\udcff"],
        ["bundle", "install", "\udcff"],
    ],
    ids=lambda words: words[0],
)
def test_words_that_are_no_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"'\udcff' is not UTF-8 text") or r"http://\udcff" in line


def test_a_file_may_have_any_name() -> None:
    args = cli.parser().parse_args(["jobs", "submit", "\udcff"])
    assert args.problems == Path("\udcff")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("9" * 400 + "GB", "99... is too large (allowed: below 2^63 bytes)"),
        ("9223373TB", "9223373TB is too large"),
        ("1" * 30 + "B", "is too large"),
        ("x" * 9999, "x... is not a size"),
        ("\x1b[2J", r"\x1b[2J is not a size"),
    ],
)
def test_sizes_out_of_range(size: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "prune", "--max-size", size]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert len(line) < 400


class TestRecord:
    """From a store to a file."""

    def test_what_was_measured_is_written_and_replays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from tuner.store import open_store

        folder = tmp_path / "out"
        folder.mkdir()
        url = f"sqlite:///{tmp_path}/m.sqlite"
        with open_store(url) as store:
            store.add(recorded().measurements)
        arguments = ["record", str(folder), *SHAPE, "--store", url]
        assert cli.main([*arguments, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["measurements"] == len(recorded().measurements)
        assert recording.read(Path(facts["path"])) == recorded()
        assert cli.main(arguments) == 0
        assert f"{facts['kernels']} kernels" in capsys.readouterr().out
        assert cli.main(["record", str(folder), "--pack"]) == 0
        (archive,) = folder.iterdir()
        assert capsys.readouterr().out == f"{archive}: 1 recordings\n"
        assert cli.main(["record", str(archive), "--pack"]) == 2
        assert "is not a folder" in capsys.readouterr().err

    def test_a_list_is_a_file_each(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from tuner.store import open_store

        folder, problems = tmp_path / "out", tmp_path / "p.yaml"
        folder.mkdir()
        problems.write_text(f"- op={SHAPE[1]},{SHAPE[3]}\n- op=gemm,M=8,N=8,K=8\n")
        url = f"sqlite:///{tmp_path}/m.sqlite"
        with open_store(url) as store:
            store.add(recorded().measurements)
        arguments = ["--problems", str(problems), "--store", url]
        assert cli.main(["record", str(folder), *arguments, "--json"]) == 1
        captured = capsys.readouterr()
        assert "nothing was measured for M=8,N=8,K=8" in captured.err
        (facts,) = json.loads(captured.out)
        assert recording.read(Path(facts["path"])) == recorded()
        assert cli.main(["record", str(tmp_path / "no"), *arguments]) == 2
        assert "no is not a folder" in capsys.readouterr().err

    def test_nothing_measured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from tuner.store import open_store

        url = f"sqlite:///{tmp_path}/m.sqlite"
        open_store(url).close()
        assert cli.main(["record", str(tmp_path), *SHAPE, "--store", url]) == 1
        assert "nothing was measured for M=256,N=512" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ((), ["attention", "gemm"]),
        (("--op", "attention"), ["attention"]),
        (("--op", "gemm"), ["gemm"]),
    ],
)
def test_a_list_is_of_the_operation_that_is_named(
    named: tuple[str, ...], labels: list[str], tmp_path: Path
) -> None:
    problems = tmp_path / "problems.yaml"
    problems.write_text("- op=attention,S=512,D=64\n- op=gemm,M=512,N=512,K=512\n")
    args = cli.parser().parse_args(["sweep", "--problems", str(problems), *named])
    assert sorted(problem.op for problem in problems_of(args)) == labels
    args = cli.parser().parse_args(["sweep", "--problems", str(problems), "--op", "softmax"])
    with pytest.raises(ConfigError, match="has no problem of --op softmax"):
        problems_of(args)
