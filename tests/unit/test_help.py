"""``tuner help`` and ``tuner quickstart``: what a new user reads and runs first."""

from __future__ import annotations

import importlib
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner import cli
from tuner.base.install import extra_command
from tuner.cli import doctor, groups, quickstart, start
from tuner.cli.doctor import MISSING, OK, Finding
from tuner.cli.help import GROUPS, WORDS, commands_of, shapes_text
from tuner.errors import CompileError, ConfigError
from tuner.problem import PROBLEMS, Problem
from tuner.report.glossary import MEANINGS
from tuner.selection import reader


class TestHelp:
    def test_every_command_stands_in_one_group(self, capsys: pytest.CaptureFixture[str]) -> None:
        grouped = [name for group in GROUPS for name in group.commands]
        assert set(commands_of(cli.parser())) == {*grouped, *groups.hidden()}
        assert len(grouped) == len(set(grouped)) <= 18 and not groups.hidden() & set(grouped)
        assert cli.main(["help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in grouped)
        assert max(map(len, lines)) <= 120

    @pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
    def test_the_examples_can_be_typed(self, group: Any) -> None:
        program, *arguments = shlex.split(group.example)
        assert program == "tuner"
        assert cli.parser().parse_args(arguments).command in group.commands

    def test_of_a_command_and_of_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["help", "sweep"]) == 0
        assert capsys.readouterr().out.startswith("usage: tuner sweep")
        assert cli.main(["help", "nope"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            "tuner: 'nope' is not a topic (allowed: shapes, glossary, or a command: "
        )

    @pytest.mark.parametrize("group", groups.MEMBERS)
    def test_a_group_and_a_former_name_run_the_same_command(
        self, group: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        members = commands_of(commands_of(cli.parser())[group])
        for name in groups.MEMBERS[group]:
            assert members[name] is not None
            with pytest.raises(SystemExit) as ended:
                cli.main([name, "--help"])
            assert ended.value.code == 0
            former = capsys.readouterr().out
            with pytest.raises(SystemExit):
                cli.main([group, name, "--help"])
            assert capsys.readouterr().out == former
            assert former.startswith(f"usage: tuner {group} {name}")

    def test_a_wrong_command_is_told_the_listed_ones(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            cli.main(["unpinn"])
        (line,) = capsys.readouterr().err.splitlines()
        assert "'entries'" in line and "'unpin'" not in line
        assert line.endswith("did you mean unpin?")

    def test_options_stand_anywhere_beside_files(self) -> None:
        for line in (
            "fit cost --gpu H200 a b",
            "fit cost a b --gpu H200",
            "fit --gpu H200 cost a b",
        ):
            args = cli.parser().parse_args(line.split())
            assert (args.name, args.files) == ("cost", [Path("a"), Path("b")])
            assert args.gpu == "H200"

    def test_a_glossary_of_words_and_of_parameters(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["help", "glossary"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 120
        words, parameters = ([r.split()[0] for r in p.splitlines()] for p in out.split("\n\n"))
        assert words[2:] == list(WORDS)
        assert parameters[3:] == list(MEANINGS)

    def test_shapes_describe_every_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["help", "shapes"]) == 0
        out = capsys.readouterr().out
        assert out == shapes_text() + "\n"
        for op, kind in PROBLEMS.items():
            assert list(kind.meanings) == list(kind.keys)
            [part] = (p for p in out.split("\n\n") if p.startswith(f"--op {op}\n"))
            assert [line.split()[0] for line in part.splitlines()[3:]] == list(kind.keys)
        assert max(map(len, out.splitlines())) <= 120

    @pytest.mark.parametrize("kind", PROBLEMS.values(), ids=lambda kind: kind.op)
    def test_a_default_that_is_typed_changes_nothing(self, kind: type[Problem]) -> None:
        sizes = {key: "64" for key in kind.required}
        plain = kind.from_keys(sizes)
        for row in kind.described_keys():
            if row.default == "required" or row.default.startswith("in place of "):
                assert row.key in kind.required or row.default[-1] in kind.required
            elif row.default != "none" and not row.default.startswith("as "):
                assert kind.from_keys({**sizes, row.key: row.default}) == plain


class TestLookupOfText:
    def test_an_attention_shape(self) -> None:
        found = tuner.lookup("S=1024,D=64", gpu="H200")
        asked = tuner.AttentionProblem.parse("S=1024,D=64")
        assert found == reader.lookup(asked, gpu="H200")
        assert found is not None and found.entry.problem == asked

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ("M=64,N=64", "unknown key 'M' for attention"),
            (1024, r"1024 is not a problem \(allowed: .* or text, as 'S=1024,D=64'\)"),
        ],
    )
    def test_what_it_wants(self, asked: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            tuner.lookup(asked)
        with pytest.raises(ConfigError, match=message):
            tuner.sweep(asked)

    def test_a_regime_by_its_name(self) -> None:
        wanted: Any = "stream"
        with pytest.raises(ConfigError, match=r"tuner\.Regime\('stream', 'warm'\)"):
            tuner.lookup("S=1024,D=64", regime=wanted)

    def test_a_path_as_text(self, tmp_path: Path) -> None:
        missing = tmp_path / "none.sqlite"
        found = tuner.lookup("S=1024,D=64", gpu="H200", path=str(missing))
        assert found == tuner.lookup("S=1024,D=64", gpu="H200", path=missing)
        assert not missing.exists()


Machine = Callable[..., None]


class TestQuickstart:
    @pytest.fixture
    def ran(self) -> list[str]:
        return []

    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> Machine:
        """A machine that lacks some things; its build and its Python only note that they ran."""

        def build(args: Any) -> int:
            ran.append(f"build {args.shape}")
            return 0

        def call(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
            ran.append(command[-1])
            return subprocess.CompletedProcess(command, 0)

        def make(*missing: str) -> None:
            names = ("cuda-python", "GPU", "nvcc", "torch")
            found = [Finding(n, MISSING if n in missing else OK, f"about {n}") for n in names]
            monkeypatch.setattr(doctor, "examine", lambda: found)

        monkeypatch.setattr("tuner.measure.device.detect", lambda index=0: None)
        monkeypatch.setattr(importlib.import_module("tuner.cli.build"), "run", build)
        monkeypatch.setattr(quickstart.subprocess, "run", call)
        return make

    def test_all_steps(
        self, machine: Machine, ran: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine()
        assert cli.main(["quickstart"]) == 0
        assert ran == [f"build {quickstart.SHAPE}", quickstart.CALL]
        out = capsys.readouterr().out
        steps = ["$ tuner doctor", "$ tuner lookup", "$ tuner build", "$ python", "tuner.stats()"]
        assert [out.index(step) for step in steps] == sorted(out.index(step) for step in steps)

    def test_without_a_gpu_it_goes_up_to_the_call(
        self, machine: Machine, ran: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine("GPU", "torch")
        assert cli.main(["quickstart"]) == 0
        assert ran == [f"build {quickstart.SHAPE}"]
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == (
            "The call is left out, for what is missing here: GPU (about GPU); torch (about torch); "
            f"PyTorch with CUDA ({extra_command('torch')})."
        )

    def test_without_a_compiler_nothing_is_built(self, machine: Machine, ran: list[str]) -> None:
        machine("nvcc", "GPU")
        assert cli.main(["quickstart"]) == 0
        assert ran == []

    def test_a_step_that_fails_is_one_line_and_ends_nothing(
        self,
        machine: Machine,
        ran: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def refuse(args: Any) -> int:
            raise CompileError("nvcc refused")

        machine()
        monkeypatch.setattr(importlib.import_module("tuner.cli.build"), "run", refuse)
        assert cli.main(["quickstart"]) == 1
        assert "\ntuner: nvcc refused\n" in capsys.readouterr().out
        assert ran == [quickstart.CALL]


class TestStart:
    """``tuner`` without a command."""

    def test_says_what_this_machine_can_do(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "Commands: tuner --help"
        assert lines[-2].startswith("Next: tuner ") and "A sweep can" in lines[-3]
        program, *words = shlex.split(lines[-2].removeprefix("Next: "))
        assert program == "tuner" and cli.parser().parse_args(words).command == words[0]

    @pytest.mark.parametrize(
        ("findings", "command"),
        [
            ([Finding("GPU", OK, ""), Finding("store", MISSING, "full")], "doctor"),
            ([Finding("GPU", MISSING, "none")], "lookup --shape S=1024,D=64 --gpu H200"),
            ([Finding("shipped data", doctor.NOTE, "0 proven")], "quickstart"),
            ([Finding("shipped data", OK, "")], "sweep --shape S=1024,D=64"),
        ],
    )
    def test_the_next_command(self, findings: list[Finding], command: str) -> None:
        assert start.next_command(findings) == f"tuner {command}"
