"""The commands that show and change what the store knows."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import ran
from stored import final

from tuner import settings
from tuner.cli import entries as commands
from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError, StoreError
from tuner.families import families_of
from tuner.hardware import GPUS
from tuner.measure.worker import POSITIVE_LOSS
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
)
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection import describe
from tuner.store import open_store

LOOKUP = importlib.import_module("tuner.selection.reader")

SHIPPED_ENTRIES = LOOKUP.shipped()
H200, H100 = GPUS["H200"], GPUS["H100"]
WARM, COLD = Regime("stream", "warm"), Regime("stream", "cold")
PROBLEM = AttentionProblem(1024, 1024, 64)
GEMM = GemmProblem(512, 512, 256)
SHAPE = ["--shape", "S=1024,D=64"]
OWN = Config("cutlass_fmha", {"tile_m": 128, "kernel_schedule": "KernelTma"})
SLOWER = Config("cutlass_fmha", {"tile_m": 64, "kernel_schedule": "KernelTma"})
CUDNN = Config("vendor_sdpa", {"backend": "cudnn"})


def measured(latency_us: float = 13.0, config: Config = OWN, **changes: Any) -> Measurement:
    own = {"artifacts": {"main": "a" * 32}, "resources": {"main": Resources(168, 4, 8, 16, 1024)}}
    facts: dict[str, Any] = own if config.family != "vendor_sdpa" else {}
    facts |= {"environment": Environment({"driver": "580.159", "cuda": "13.0"}), "error": 2.7e-4}
    facts["clocks"] = Clocks(1755, 3201, 61, 689.5, ("sw_power_cap",))
    return final(config, latency_us, PROBLEM, **{**facts, "std_us": 0.13, **changes})


@pytest.fixture(autouse=True)
def nothing_shipped_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "tuned")
    monkeypatch.setattr("tuner.selection.portfolio.shipped", lambda: ())
    monkeypatch.setattr(commands, "_detected", lambda: None)
    LOOKUP.shipped.cache_clear()
    LOOKUP.shipped_index.cache_clear()
    yield
    LOOKUP.close()
    LOOKUP.shipped.cache_clear()
    LOOKUP.shipped_index.cache_clear()


@pytest.fixture
def filled() -> Path:
    with open_store() as store:
        store.add([measured(17, SLOWER, is_final=False)])
        store.decide(PROBLEM, H200, WARM, [measured(), measured(14.1, CUDNN)], "sweep1")
    return settings.store_path()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    return int(args.run(args))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    return capsys.readouterr().out


class TestLookup:
    def test_says_what_how_fast_against_whom_and_where_from(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H200")
        for part in (
            f"attention {PROBLEM.label()} on NVIDIA H200, stream-warm",
            "cutlass_fmha kernel_schedule=KernelTma tile_m=128",
            "13.0 us (deviation 1.0 % over 20 rounds), 330 TFLOP/s",
            "over PyTorch 1.08x cudnn",
            "measured, 20",
            "cuda 13.0, driver 580.159",
            str(filled),
        ):
            assert part in out, part
        assert "note" not in out

    def test_says_what_fast_accumulation_loses(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As the worker flags it; also from an exported document."""
        problem = GemmProblem.parse("M=64,N=64,K=16384,dtype=e4m3,scales=row,fast_accum=1")
        loss = POSITIVE_LOSS.format(0.0963)
        given = {"problem": problem, "regime": COLD, "flags": (loss,)}
        with open_store() as store:
            store.decide(problem, H200, COLD, [measured(**given)], "sweep1")
            document = store.export()
        shape = "--op", "gemm", "--shape", problem.label(), "--gpu", "H200"
        assert "TFLOP/s, positive_sums_off_9.6e-02" in printed(capsys, "lookup", *shape)
        assert loss in json.dumps(document)

    def test_where_an_entry_came_from_is_no_note_of_its_own(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_store() as store:
            store.decide(PROBLEM, H200, WARM, [measured()], "sweep1")
            document = store.export()
            store.forget(PROBLEM)
            store.import_(document)
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H200")
        assert "measured, imported" in out
        assert "note" not in out

    def test_without_a_gpu_it_says_for_which(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "lookup", *SHAPE)
        assert "no GPU named: this is the answer for NVIDIA H200" in out
        assert "(no GPU is here: of what is built)" in " ".join(out.split())

    def test_this_machines_gpu_and_environment(
        self, filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(commands, "_detected", lambda: H200)
        here = Environment({"driver": "590.1", "cuda": "13.0"})
        monkeypatch.setattr("tuner.measure.device.environment", lambda: here)
        out = printed(capsys, "lookup", *SHAPE)
        assert "note         measured in another environment (driver 580.159, here 590.1)" in out

    def test_json(self, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        data = json.loads(printed(capsys, "lookup", *SHAPE, "--gpu", "H200", "--json"))
        assert data["latency_us"] == 13.0
        assert data["own_over_vendor"] == {"cudnn": pytest.approx(13 / 14.1)}
        assert data["vendors_us"] == {"cudnn": 14.1}
        assert data["provenance"] == "measured"
        assert data["environment"] == {"driver": "580.159", "cuda": "13.0"}
        assert Config.from_json(data["config"]) == OWN
        assert (data["exact"], data["notes"]) == (True, [])

    def test_a_miss_is_one_line_and_1(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("lookup", "--shape", "S=512,D=64", "--gpu", "H200") == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("tuner: nothing known for attention B=1,H=16,S=512,D=64")
        assert "; `tuner sweep` measures it (nearest: B=1,H=16,S=1024,D=64" in captured.err
        assert run("lookup", *SHAPE, "--gpu", "H100-PCIe", "--json") == 1
        captured = capsys.readouterr()
        assert captured.out == "null\n"
        assert "known for NVIDIA H200 (stream-warm); --allow-other-gpu answers" in captured.err

    def test_another_gpu_when_allowed(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H100-PCIe", "--allow-other-gpu")
        assert "measured on NVIDIA H200, not on NVIDIA H100 PCIe" in out

    def test_a_gpu_that_shares_the_decision_has_it(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H100")
        assert f"measured on NVIDIA H200, not on {H100.name}" in out

    def test_the_regime(self, filled: Path) -> None:
        assert run("lookup", *SHAPE, "--regime", "stream", "--l2", "warm") == 0
        assert run("lookup", *SHAPE, "--regime", "chained", "--l2", "warm") == 1
        assert run("lookup", *SHAPE, "--l2", "cold") == 1
        assert run("lookup", *SHAPE, "--regime", "eager") == 1

    def test_predicted_is_never_shown_as_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        with open_store() as store:
            found = measured(provenance=Provenance.PREDICTED, clocks=Clocks())
            store.decide(PROBLEM, H200, WARM, [found], "s")
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H200")
        assert "predicted, not measured" in out
        assert "provenance   predicted" in out
        out = printed(capsys, "show", *SHAPE, "--gpu", "H200")
        assert "clocks       not recorded" in out

    @pytest.mark.parametrize(
        "shape", ["S=0,D=64", "S=1024,D=63", "S=1,S=2,D=64", "Q=3", "S=x,D=64"]
    )
    def test_wrong_shapes(self, shape: str) -> None:
        with pytest.raises(ConfigError):
            run("lookup", "--shape", shape)

    def test_stores_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="does not exist"):
            run("lookup", *SHAPE, "--store", str(tmp_path / "none.sqlite"))
        (tmp_path / "text").write_text("text " * 1000)
        with pytest.raises(StoreError, match="is not an SQLite database"):
            run("lookup", *SHAPE, "--store", f"sqlite:///{tmp_path / 'text'}")
        with pytest.raises(ConfigError, match="GPU 'X1' is not known"):
            run("lookup", *SHAPE, "--gpu", "X1")

    def test_a_store_that_is_no_file(
        self, filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As on a server: the same answer through SQLAlchemy."""
        monkeypatch.setattr(commands, "sqlite_file", lambda url: None)
        out = printed(capsys, "lookup", *SHAPE, "--gpu", "H200")
        assert "13.0 us" in out

    @pytest.mark.parametrize("place", [[], ["--gpu", "H200"]])
    def test_needs_the_standard_library_only(self, filled: Path, place: list[str]) -> None:
        script = (
            "import argparse, sys\nfrom tuner.cli import entries\n"
            "parser = argparse.ArgumentParser()\n"
            "entries.register(parser.add_subparsers())\n"
            f"args = parser.parse_args({['lookup', *SHAPE, *place]!r})\n"
            "code = args.run(args)\n"
            "heavy = {'torch', 'sqlalchemy', 'optuna', 'numpy', 'jinja2', 'jsonschema'}\n"
            "sys.exit(code or ', '.join(heavy & set(sys.modules)) or None)\n"
        )
        done = ran(sys.executable, "-c", script)
        assert "13.0 us" in done.stdout


class TestList:
    def test_a_table(self, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with open_store() as store:
            gemm = Config("gemm", {"tile_m": 128})
            own = measured(5.25, gemm, problem=GEMM, regime=COLD, provenance=Provenance.REPLAYED)
            store.decide(GEMM, H200, COLD, [own], "s")
            store.pin(PROBLEM, H200, WARM, CUDNN)
        first, second = printed(capsys, "list").split("\n\n")
        place, heading, rule, row = first.splitlines()
        assert place == "attention on NVIDIA H200, stream-warm: measured, pinned"
        assert heading.split() == "shape serves us own speed".split()
        assert set(rule) == {"-", " "}
        assert row.split(maxsplit=2) == [PROBLEM.label(), "cudnn", "14.1  1.08x cudnn"]
        place, *_, row = second.splitlines()
        assert place == "gemm on NVIDIA H200, stream-cold: replayed"
        assert row.split() == [GEMM.label(), "gemm", "5.25", "-"]

    def test_sizes_are_sorted_as_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = (128, 512, 1024, 16384)
        with open_store() as store:
            for size in reversed(sizes):
                problem = AttentionProblem(size, size, 64)
                store.decide(problem, H200, WARM, [measured(problem=problem)], "s")
        rows = printed(capsys, "list").splitlines()[3:]
        shapes = [row.split()[0] for row in rows]
        assert shapes == [AttentionProblem(size, size, 64).label() for size in sizes]
        data = json.loads(printed(capsys, "list", "--json"))
        assert [row["shape"] for row in data] == shapes

    def test_what_ships_fits_120_columns(self) -> None:
        tables = describe.list_text(SHIPPED_ENTRIES)
        assert len(SHIPPED_ENTRIES) > 100
        assert max(map(len, tables.splitlines())) <= 120

    @pytest.mark.parametrize(
        ("options", "count"),
        [
            ([], 1),
            (["--op", "gemm"], 0),
            (SHAPE, 1),
            (["--gpu", "H100"], 0),
            (["--provenance", "measured"], 1),
            (["--provenance", "predicted"], 0),
            (["--l2", "cold"], 0),
        ],
    )
    def test_filters(
        self, filled: Path, capsys: pytest.CaptureFixture[str], options: list[str], count: int
    ) -> None:
        assert len(json.loads(printed(capsys, "list", "--json", *options))) == count

    def test_nothing_and_nothing_made(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no entries in" in printed(capsys, "list")
        assert not settings.store_path().exists()


class TestShow:
    def test_the_ranking_and_the_resources(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = printed(capsys, "show", *SHAPE, "--gpu", "H200")
        for part in (
            OWN.digest,
            CUDNN.digest,
            "1755 MHz, 690 W, throttle reasons: sw_power_cap",
            "2.7e-04",
            "168",
            "static smem",
            "a" * 32,
            "sweep1",
        ):
            assert part in out, part

    def test_json_holds_the_ranking(self, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        data = json.loads(printed(capsys, "show", *SHAPE, "--json"))
        assert [Measurement.from_json(m) for m in data["ranking"]] == [
            measured(),
            measured(14.1, CUDNN),
        ]

    @pytest.mark.parametrize("command", ["lookup", "show"])
    def test_lines_fit_a_hundred_columns(
        self,
        command: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        stage = Config("gemm", {f"parameter_number_{i}": i for i in range(12)})
        params = {f"heads_a_launch_{i}": 16384 for i in range(8)}
        own = Config("three_kernel_attention", params, {"qk": stage})
        facts = Environment({f"library_{i}": "13.0.88+build" for i in range(12)})
        found = measured(14.2, own, environment=facts, workspace_bytes=123_400_000)
        with open_store("s.sqlite") as store:
            ranking = [measured(14.1, CUDNN, environment=facts), found]
            store.decide(PROBLEM, H200, WARM, ranking, "sweep1")
        out = printed(capsys, command, *SHAPE, "--gpu", "H200", "--store", "s.sqlite")
        assert max(map(len, out.splitlines())) <= 100
        assert all(line == line.rstrip() for line in out.splitlines())
        words = out.replace(",", "").split()
        assert words.count("parameter_number_11=11") == 1 + (command == "show")
        assert all(f"library_{i}" in words for i in range(12))

    def test_a_miss(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("show", *SHAPE) == 1

    def test_the_source(self, capsys: pytest.CaptureFixture[str]) -> None:
        own = families_of("gemm")["gemm"]
        config = own.space(GEMM, H200)[0]
        with open_store() as store:
            found = measured(config=config, problem=GEMM, regime=COLD)
            store.decide(GEMM, H200, COLD, [found], "s")
        shape = ["--op", "gemm", "--shape", "M=512,N=512,K=256"]
        out = printed(capsys, "show", *shape, "--source")
        assert "#include" in out
        assert 'extern "C"' in out

    def test_a_vendors_kernel_has_no_source(self, filled: Path) -> None:
        with open_store() as store:
            store.pin(PROBLEM, H200, WARM, CUDNN)
        with pytest.raises(ConfigError, match="it has no source"):
            run("show", *SHAPE, "--source")


def legal(latency_us: float = 5.0) -> Measurement:
    """A measurement of a config that its family accepts."""
    own = families_of("gemm")["gemm"]
    config = own.space(GEMM, H200)[0]
    return measured(latency_us, config, problem=GEMM, regime=COLD)


class TestExchange:
    def test_a_round_trip_through_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_store() as store:
            store.decide(GEMM, H200, COLD, [legal()], "s")
        file, other = tmp_path / "e.json", f"sqlite:///{tmp_path / 'other.sqlite'}"
        out = printed(capsys, "export", str(file))
        assert out == f"1 entry with 1 measurement written to {file}\n"
        out = printed(capsys, "import", str(file), "--store", other)
        assert "1 entry added, 0 replaced, 0 known already, 0 not taken" in out
        assert "`tuner build`" in out
        assert printed(capsys, "export", "--store", other) == file.read_text()
        data = json.loads(printed(capsys, "import", str(file), "--store", other, "--json"))
        assert (data["entries_known"], data["measurements_known"]) == (1, 1)
        again = json.loads(printed(capsys, "list", "--store", other, "--json"))
        assert [entry["origin"] for entry in again] == ["imported"]

    def test_what_is_not_taken_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_store() as store:
            store.decide(GEMM, H200, COLD, [legal(5.0)], "s")
            run("export", str(tmp_path / "e.json"))
            store.decide(GEMM, H200, COLD, [legal(4.0)], "s")
        out = printed(capsys, "import", str(tmp_path / "e.json"))
        assert f"not taken: {GEMM.label()} on NVIDIA H200 (stream-cold)" in out

    def test_bad_rows_are_named_with_the_file(self, tmp_path: Path) -> None:
        with open_store() as store:
            store.decide(GEMM, H200, COLD, [legal()], "s")
            document = store.export()
        document["measurements"][0]["latency_us"] = -4
        file = tmp_path / "e.json"
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError) as error:
            run("import", str(file), "--store", str(tmp_path / "other.sqlite"))
        assert str(error.value).startswith(f"{file}: nothing was imported, ")
        assert "measurements[0]: latency_us: -4" in str(error.value)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (Config("warp_drive", {}), "config: family 'warp_drive' is not known"),
            (Config("vendor_blas", {}), "config: "),
            (Config("gemm", {"tile_m": 7}), "config: "),
            (Config("gemm", {"tile_m": "StreamK"}, {"qk": OWN}), "config: "),
            (Config("gemm", {"tile_m": "wide"}), "config.params.tile_m: 'wide' is not one of"),
        ],
    )
    def test_a_config_that_its_family_refuses_is_refused(
        self, tmp_path: Path, config: Config, reason: str
    ) -> None:
        problem = GEMM if config.family != "vendor_blas" else PROBLEM
        found = measured(config=config, problem=problem)
        with open_store("sqlite://") as store:
            store.decide(problem, H200, WARM, [found], "s")
            (tmp_path / "e.json").write_text(json.dumps(store.export()))
        with pytest.raises(ConfigError, match=r"measurements\[0\]: " + reason):
            run("import", str(tmp_path / "e.json"))
        with open_store() as store:
            assert store.measurements() == []

    def test_files_that_cannot_be(self, filled: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            run("import", str(tmp_path / "none.json"))
        with pytest.raises(StoreError, match="cannot be written: No such file"):
            run("export", str(tmp_path / "no" / "e.json"))
        with pytest.raises(StoreError, match="does not exist"):
            run("export", "--store", str(tmp_path / "none.sqlite"))

    def test_an_export_of_nothing_fails_and_writes_nothing(
        self, filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "e.json"
        for options in (["--op", "gemm"], ["--shape", "S=77,D=64"], ["--provenance", "predicted"]):
            with pytest.raises(NoValidConfigError, match="nothing to export: no such entry in /"):
                run("export", str(file), *options)
        assert not file.exists()
        assert capsys.readouterr().out == ""

    def test_an_older_export_is_replaced_as_a_whole(
        self, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "e.json"
        file.write_text("old")

        def refuse(self: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", refuse)
            with pytest.raises(StoreError, match="No space left on device"):
                run("export", str(file))
        assert file.read_text() == "old"
        assert [p.name for p in tmp_path.glob("*e.json*")] == ["e.json"]
        assert run("export", str(file), *SHAPE, "--trials") == 0
        assert len(json.loads(file.read_text())["measurements"]) == 3


class TestPinAndForget:
    def test_a_vendor_s_kernel_by_its_name(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_store() as store:
            store.add([measured(14.1, CUDNN)])
        for text in ("cudnn", "vendor_sdpa backend=cudnn"):
            out = printed(capsys, "pin", *SHAPE, "--config", text)
            assert "vendor_sdpa backend=cudnn, 14.1 us" in out

    def test_by_digest_beginning_or_json(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for text in (SLOWER.digest, SLOWER.digest[:6], json.dumps(SLOWER.to_json())):
            out = printed(capsys, "pin", *SHAPE, "--config", text)
            assert "pinned for" in out
            assert "17.0 us" in out
            assert "tile_m=64" in printed(capsys, "lookup", *SHAPE)
            assert "no longer pinned" in printed(capsys, "unpin", *SHAPE)
            assert "tile_m=128" in printed(capsys, "lookup", *SHAPE)
        assert run("unpin", *SHAPE) == 1

    def test_json(self, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        data = json.loads(printed(capsys, "pin", *SHAPE, "--config", CUDNN.digest, "--json"))
        assert (data["pinned"], data["latency_us"]) == (True, 14.1)
        assert json.loads(printed(capsys, "unpin", *SHAPE, "--json")) == {"unpinned": True}

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("ffffffff", "names none of the 3 configs that passed"),
            ("", "of the 3 configs that passed"),
            ('{"family": "gemm"', '--config {"family": "gemm": not JSON'),
            ('{"family": "gemm", "x": 1}', "unknown field 'x'"),
            ('{"family": "gemm", "params": {}}', "no measurement that passed"),
        ],
    )
    def test_configs_that_cannot_be_pinned(self, filled: Path, text: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            run("pin", *SHAPE, "--config", text)

    def test_nothing_to_pin(self, filled: Path) -> None:
        with pytest.raises(NoValidConfigError, match="nothing to pin: no config is measured for"):
            run("pin", "--shape", "S=8,D=8", "--config", "abcd")

    def test_forget(self, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("forget", *SHAPE, "--gpu", "H100") == 1
        capsys.readouterr()
        out = printed(capsys, "forget", *SHAPE)
        assert out == f"1 entry and 3 measurements of {PROBLEM.label()} deleted\n"
        assert run("lookup", *SHAPE) == 1
        assert run("forget", *SHAPE, "--json") == 1
        assert json.loads(capsys.readouterr().out) == {"entries": 0, "measurements": 0}

    def test_forget_deletes_what_cannot_be_read(
        self, filled: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with contextlib.closing(sqlite3.connect(filled, isolation_level=None)) as connection:
            connection.execute("DROP TRIGGER measurements_immutable")
            connection.execute("UPDATE measurements SET config = '{'")
        with pytest.raises(StoreError, match="or `tuner entries forget` it"):
            run("list")
        out = printed(capsys, "forget", *SHAPE)
        assert out == f"1 entry and 3 measurements of {PROBLEM.label()} deleted\n"
        assert run("list") == 0

    def test_what_ships_is_neither_pinned_nor_forgotten(
        self,
        filled: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with open_store() as store:
            (entry,) = store.entries()
        monkeypatch.setattr(commands, "shipped", lambda: (entry,))
        assert printed(capsys, "forget", *SHAPE).endswith("goes on being served\n")
        with pytest.raises(NoValidConfigError, match="to pin what ships"):
            run("pin", *SHAPE, "--config", OWN.digest)

    def test_a_wrong_shape_comes_before_a_store_that_is_not_there(self) -> None:
        for command in (["pin", "--config", "abcd"], ["unpin"], ["forget"]):
            with pytest.raises(ConfigError, match="S=0"):
                run(*command, "--shape", "S=0,D=64")

    def test_no_store_is_made(self, tmp_path: Path) -> None:
        for command in (["pin", "--config", "abcd"], ["unpin"], ["forget"]):
            with pytest.raises(StoreError, match="does not exist"):
                run(*command, *SHAPE)
        assert not settings.store_path().exists()
