"""The command line: exit codes, one clear line for wrong input, what a sweep prints."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tuner
from tuner import cli
from tuner.base.processes import Interrupted, python_command, python_environment
from tuner.cli.display import Display, LiveDisplay, facts_of
from tuner.cli.result import outcome_text
from tuner.config import Config
from tuner.errors import CompileError, ConfigError, NoValidConfigError, StoreError
from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, SoftmaxProblem
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.tuning.outcome import Outcome
from tuner.tuning.progress import SweepState

PROBLEM = SoftmaxProblem(256, 512)
SHAPE = ["--op", "softmax", "--shape", "M=256,N=512"]
REGIME = Regime.default("softmax")
ENVIRONMENT = Environment({"driver": "580"})


def recorded(problem: SoftmaxProblem = PROBLEM) -> Recording:
    """Every candidate; the last of the space is the fastest; every fifth failed."""
    measured = []
    for position, config in enumerate(Softmax().space(problem, DEFAULT_GPU)):
        failed = position % 5 == 0
        measured.append(
            Measurement(
                problem,
                config,
                DEFAULT_GPU,
                REGIME,
                Status.TIMEOUT if failed else Status.OK,
                environment=ENVIRONMENT,
                latency_us=None if failed else 50.0 - 0.1 * position,
                std_us=None if failed else 0.01,
                rounds=0 if failed else 20,
            )
        )
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, tuple(measured))


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the shipped recordings, with one of `PROBLEM`."""
    folder = tmp_path / "recordings"
    recording.write(folder / "one.json.gz", recorded())
    monkeypatch.setattr(recording, "folder", lambda: folder)
    monkeypatch.setenv("TUNER_SAMPLER", "tpe")  # a tenth of the time of gp
    return folder


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
        file.write_text("- M=256,N=512\n- op=gemm,M=7,N=7,K=7\n")
        arguments = ["sweep", "--op", "softmax", "--problems", str(file), "--trials", "9"]
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
        assert second == f"`tuner lookup --shape {asked}` answers from measurements elsewhere"
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
        assert second.startswith("measurements answer 1 of the 2 problems, as `tuner lookup")

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
            ([], "arguments are required: COMMAND"),
            (["tune"], "invalid choice: 'tune' (choose from "),
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
            (["sweep", *SHAPE, "--jobs", "0"], "jobs=0 is out of range"),
            (["sweep", *SHAPE, "--device", "-1"], "device=-1 is out of range"),
            (["sweep", *SHAPE, "--device", "9"], "device=9 is no CUDA device"),
            (["sweep", *SHAPE, "--family", "gemm"], "family 'gemm' does not serve softmax"),
            (["sweep", *SHAPE, "--sampler", "cma"], "sampler=cma is not known"),
            (["sweep", *SHAPE, "--effort", "huge"], "invalid choice: 'huge'"),
            (["sweep", *SHAPE, "--max-workspace", "much"], "--max-workspace much is not a size"),
            (
                ["sweep", *SHAPE, "--max-workspace", "5"],
                "--max-workspace 5 is not a size (allowed: a number and B, KB, MB, GB",
            ),
            (["sweep", *SHAPE, "--store", "nothing://x"], "nothing"),
            (["sweep", "--problems", "/none.yaml"], "problems file /none.yaml cannot be read"),
            (["record", "out", *SHAPE, "--gpu", "B200"], "B200"),
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (CompileError("a"), 1),
        (NoValidConfigError("a"), 1),
        (StoreError("a"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGTERM), 143),
        (Interrupted(signal.SIGHUP), 129),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("tuner.cli.sweep.run", fail)
    assert cli.main(["sweep", *SHAPE]) == code
    err = capsys.readouterr().err
    assert err.startswith("tuner: ")
    assert len(err.splitlines()) == 1


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


#: Folders whose README shows commands.
README_FOLDERS = (
    "scripts",
    "scripts/benchmarks",
    "tuner",
    "tuner/runtime",
    "tuner/tuning",
    "cache",
)


def test_commands_of_the_readmes_are_the_programs() -> None:
    root, parser, seen = Path(__file__).parents[2], cli.parser(), 0
    pages = ["README.md", *(f"{folder}/README.md" for folder in README_FOLDERS)]
    for page in pages:
        text = (root / page).read_text()
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


PAUSED = """
import contextlib, sys
from pathlib import Path
from tuner import cli
from tuner.measure import device
from tuner.runners import recording
from tuner.runners.replay import ReplayRunner
device.detect = lambda index=0: None
recording.folder = lambda: Path(sys.argv[1])
collect, collected = ReplayRunner.collect, []
def pause(self):
    collected.append(collect(self))
    if len(collected) == 8:
        print("collected 8", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a terminal that is closed meanwhile
            sys.stdin.readline()
    return collected[-1]
ReplayRunner.collect = pause
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_with_its_code_and_the_best_so_far(
    recordings: Path, tmp_path: Path, number: int, code: int
) -> None:
    url = f"sqlite:///{tmp_path}/c.sqlite"
    arguments = ["sweep", *SHAPE, "--trials", "400", "--store", url]
    process = subprocess.Popen(
        python_command("-c", PAUSED, str(recordings), *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    assert process.stderr is not None
    while process.stderr.readline() not in ("collected 8\n", ""):
        pass
    process.send_signal(number)
    out, err = process.communicate("go on\n", timeout=60)
    assert process.returncode == code, err
    assert "interrupted: this is the best so far" in out
    assert "tuner: interrupted; the best so far is stored" in err
    assert "Traceback" not in err
    found = tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite")
    assert found is not None
    assert found.entry.provenance is Provenance.REPLAYED


#: What a login does to a command: a session of its own with a terminal that controls it.
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_terminal_that_is_closed_costs_nothing_of_the_best_so_far(
    recordings: Path, tmp_path: Path
) -> None:
    """Every write fails from then on; the kernel sends SIGHUP."""
    url = f"sqlite:///{tmp_path}/c.sqlite"
    sweeping = python_command("-c", PAUSED, str(recordings), "sweep", *SHAPE, "--trials", "400")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        python_command("-c", ON_TERMINAL, *sweeping, "--store", url),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=python_environment(),
    )
    os.close(theirs)
    said = b""
    while b"collected 8" not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 129, said
    found = tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite")
    assert found is not None


REPLAYED = """
import sys
from pathlib import Path
from tuner import cli
from tuner.measure import device
from tuner.runners import recording
recordings = Path(sys.argv.pop(1))
device.detect = lambda index=0: None
recording.folder = lambda: recordings
sys.exit(cli.main())
"""


@pytest.mark.parametrize("redirection", ["2>&-", "<&- 2>&-", "2>/dev/full"])
def test_a_sweep_ends_well_whatever_becomes_of_its_notes(
    recordings: Path, tmp_path: Path, redirection: str
) -> None:
    url = f"sqlite:///{tmp_path}/c.sqlite"
    done = subprocess.run(
        [
            *("sh", "-c", f'exec "$@" {redirection}', "sh"),
            *python_command("-c", REPLAYED, str(recordings), "sweep", *SHAPE, "--store", url),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(),
        timeout=120,
    )
    assert done.returncode == 0
    assert "stored as replayed in" in done.stdout
    assert tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite") is not None


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
        assert "no is no folder" in capsys.readouterr().err

    def test_nothing_measured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from tuner.store import open_store

        url = f"sqlite:///{tmp_path}/m.sqlite"
        open_store(url).close()
        assert cli.main(["record", str(tmp_path), *SHAPE, "--store", url]) == 2
        assert "nothing was measured for M=256,N=512" in capsys.readouterr().err


ATTENTION = AttentionProblem.parse("S=1024,D=64")


def attention(config: Config, us: float, **changes: object) -> Measurement:
    return Measurement(
        ATTENTION,
        config,
        DEFAULT_GPU,
        Regime(),
        Status.OK,
        latency_us=us,
        std_us=us / 200,
        rounds=20,
        is_final=True,
    ).but(**changes)


OWN = attention(Config("cutlass_fmha", {"tile_m": 128}), 13.5, workspace_bytes=2_500_000)
OTHER = attention(Config("cutlass_fmha", {"tile_m": 64}), 13.9, flags=("noisy",))
CUDNN = attention(Config("vendor_sdpa", {"backend": "cudnn"}), 14.4)
FLASH = attention(Config("vendor_sdpa", {"backend": "flash"}), 21.6)


def outcome(*ranked: Measurement, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "problem": ATTENTION,
        "gpu": DEFAULT_GPU,
        "regime": Regime(),
        "environment": ENVIRONMENT,
        "provenance": Provenance.MEASURED,
        "sweep": "s",
        "ranking": ranked,
        "candidates": 40,
        "kernels": 30,
        "resumed": 0,
        "failures": {"timeout": 2, "wrong_result": 3},
        "unavailable": {"fa3": "not installed"},
        "interrupted": False,
        "elapsed_s": 125.0,
    }
    return Outcome(**{**fields, **changes})  # type: ignore[arg-type]


class TestResult:
    """The table at the end."""

    def test_measured(self) -> None:
        text = outcome_text(outcome(OWN, OTHER, CUDNN, FLASH), "sqlite:///x")
        lines = {line.split("  ")[0]: line for line in text.splitlines()}
        winner = lines["winner, best own"].split()
        assert "13.5" in winner  # us
        assert "0.844" in winner  # us a head: 13.5 / 16
        assert "318" in winner  # TFLOP/s: 4.295e9 / 13.5e-6
        assert winner[-2:] == ["2.5", "MB"]
        assert f"flagged: cutlass_fmha {OTHER.config.digest[:6]}: noisy" in text
        assert f"\ncutlass_fmha {OWN.config.digest[:6]} (winner, best own)\n" in text
        assert "\n  cutlass_fmha tile_m=128\n" in text
        assert "cudnn" in text
        assert "own speed: 1.07x cudnn; 1.60x flash" in text
        assert "not measured: fa3: not installed" in text
        assert "failed: 3 wrong_result, 2 timeout" in text
        assert "in 2 min 05 s" in text
        assert "REPLAYED" not in text

    def test_a_tie_with_a_vendor_is_no_winner(self) -> None:
        text = outcome_text(outcome(attention(OWN.config, 14.45), CUDNN, FLASH), "sqlite:///x")
        roles = [line.split("  ")[0] for line in text.splitlines()]
        assert "tied first, best own" in roles and "tied first, baseline" in roles
        assert "own speed: 1.00x cudnn, a tie; 1.49x flash" in text
        assert "winner" not in text and "slower" not in text

    def test_long_configs_fit_the_width_and_are_complete(self) -> None:
        stage = Config("gemm", {f"parameter_number_{i}": i for i in range(12)})
        stages = {"qk": stage, "softmax": Config("softmax", {"passes": 1}), "pv": stage}
        params = {f"heads_a_launch_{i}": 16384 for i in range(8)}
        own = attention(
            Config("three_kernel_attention", params, stages), 123456.7, workspace_bytes=123_400_000
        )
        slower = attention(Config("three_kernel_attention", params), 123456.9)
        reasons = {f"fa{i}": "not installed " * 9 for i in range(2)}
        text = outcome_text(outcome(own, slower, CUDNN, unavailable=reasons), "sqlite:///x")
        assert max(map(len, text.splitlines())) <= 100
        assert all(line == line.rstrip() for line in text.splitlines())
        words = text.split()
        assert all(words.count(f"parameter_number_{i}={i}") == 2 for i in range(12))
        assert all(words.count(f"{name}=16384") == 2 for name in params)

    def test_vendor_wins(self) -> None:
        text = outcome_text(outcome(CUDNN, FLASH, OWN), "sqlite:///x")
        assert "winner, baseline" in text
        assert "runner-up, baseline" in text
        assert "\nbest own" in text
        assert "own speed: 1.07x cudnn" in text

    def test_a_loss_looks_like_one(self) -> None:
        slow = OWN.but(latency_us=16.8)
        text = outcome_text(outcome(CUDNN, FLASH, slow), "sqlite:///x")
        assert "own speed: 0.86x cudnn, slower; 1.29x flash" in text

    def test_a_replay_of_the_quick_pass_says_so(self) -> None:
        quick = [m.but(is_final=False, provenance=Provenance.REPLAYED) for m in (OWN, CUDNN)]
        text = outcome_text(outcome(*quick, provenance=Provenance.REPLAYED), "sqlite:///x")
        assert "\nREPLAYED from a recorded sweep" in text
        assert "\nQUICK PASS: the recorded final pass has none of these own kernels" in text

    def test_who_has_no_final_time_is_named_and_not_ranked(self) -> None:
        fast = OTHER.but(latency_us=9.5, is_final=False)
        vendor = CUDNN.but(latency_us=9.12, is_final=False)
        made = outcome(OWN, CUDNN, unranked=(fast,), quick_vendor=vendor)
        text = outcome_text(made, "sqlite:///x")
        name = f"cutlass_fmha {OTHER.config.digest[:6]}"
        said = f"not ranked, without a final time: {name}: 9.50 us in the quick pass"
        assert f"{said}, 0.96x cudnn there, slower" in " ".join(text.split())
        assert "QUICK PASS" not in text and "own speed: 1.07x cudnn" in text

    def test_no_own_kernel(self) -> None:
        assert "no own kernel passed" in outcome_text(outcome(CUDNN), "x")

    def test_nothing_yet(self) -> None:
        text = outcome_text(outcome(interrupted=True), "x")
        assert "interrupted before any candidate passed" in text


def state(**changes: object) -> SweepState:
    found = SweepState(
        ATTENTION, DEFAULT_GPU, Regime(), Provenance.MEASURED, started=time.monotonic() - 30
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


class TestDisplay:
    """Progress while it runs."""

    def test_facts(self) -> None:
        now = time.monotonic()
        facts = facts_of(
            state(
                phase="search",
                goal=40,
                done=20,
                done_before=10,
                phase_started=now - 10,
                in_flight=8,
                building=lambda: 5,
                candidates=12,
                best_own=OWN,
                best_vendor=CUDNN,
            )
        )
        assert facts["phase"] == "search 20/40"
        assert facts["compiling"] == "5"
        assert facts["compiled and waiting"] == "3"
        assert facts["best own"] == "13.5 us cutlass_fmha (1.07x cudnn)"
        assert facts["time"] == "0:30, 0:20 left"
        assert facts["failed"] == ""

    def test_time_limit_comes_first(self) -> None:
        facts = facts_of(state(deadline=time.monotonic() + 7.2))
        assert facts["time"] == "0:30, 0:07 left"

    def test_plain_lines_are_few(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Display("x", show_results=True)
        for done in range(50):
            display.changed(state(phase="search", goal=50, done=done))
        display.changed(state(phase="final pass"))
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2

    @pytest.mark.parametrize("create", [Display, LiveDisplay])
    def test_results_go_to_standard_output_alone(
        self, create: Callable[..., Display], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with create("x", show_results=True) as display:
            display.note("[a note] of 3")
            display.changed(state(phase="search", goal=50, done=3, best_own=OWN))
            display.finished(outcome(OWN, CUDNN))
        out, err = capsys.readouterr()
        assert "winner, best own" in out
        assert "[a note] of 3" in err
        with create("x", show_results=False) as display:
            display.finished(outcome(OWN, CUDNN))
        assert capsys.readouterr().out == ""
