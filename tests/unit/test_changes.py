"""Two sets of decisions against each other: noise, drift, sources and exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stored import final

from tuner import cli
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Provenance, Regime
from tuner.problem import AttentionProblem
from tuner.report.changes import (
    Change,
    Pair,
    compare,
    load_entries,
)
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.selection.reader import Entry, shipped
from tuner.store import open_store

ASSETS = Path(__file__).parents[1] / "assets"
SHORT, LONG = (AttentionProblem.parse(f"S={seqlen},D=64") for seqlen in (512, 1024))
REGIME = Regime.default("attention")
FAST, OTHER = (Config("fused_attention", {"tile_n": tile_n}) for tile_n in (128, 64))


def vendor(kernel: str) -> Config:
    return Config("vendor_sdpa", {"kernel": kernel})


def entry(
    *times: tuple[Config, float],
    problem: AttentionProblem = LONG,
    deviation: float = 0.001,
    **facts: str,
) -> Entry:
    """A decision that ranks configs by their times."""
    common = {"regime": REGIME, "environment": Environment(facts or {"driver": "580"})}
    common["created_at"] = "2026-11-20T10:00:00+00:00"
    measured = [final(config, us, problem, **common, std_us=us * deviation) for config, us in times]
    return Entry.of(sorted(measured, key=lambda m: m.latency_us or 0.0))


@pytest.mark.parametrize(
    ("after", "deviation", "expected"),
    [
        (10.2, 0.001, Change.SAME),
        (10.4, 0.001, Change.SLOWER),
        (9.8, 0.001, Change.SAME),
        (9.6, 0.001, Change.FASTER),
        (10.4, 0.04, Change.SAME),  # a difference within the noise of the rounds
    ],
)
def test_a_change_is_one_beyond_noise(after: float, deviation: float, expected: Change) -> None:
    pair = Pair(entry((FAST, 10.0), deviation=deviation), entry((FAST, after), deviation=deviation))
    assert pair.change(pair.served) is expected
    assert pair.is_slower is (expected is Change.SLOWER)


def test_relative_takes_out_what_moved_all() -> None:
    before = entry((FAST, 10.0), (vendor("cudnn"), 20.0), (vendor("flash2"), 40.0))
    throttled = entry((FAST, 11.0), (vendor("cudnn"), 22.0), (vendor("flash2"), 44.0))
    plain, relative = Pair(before, throttled), Pair(before, throttled, is_relative=True)
    assert plain.drift == pytest.approx(1.1)
    assert plain.is_slower and not relative.is_slower
    assert relative.ratio(relative.served) == pytest.approx(1.0)
    # What got slower while the vendors' kernels did not is slower both ways.
    alone = entry((FAST, 11.0), (vendor("cudnn"), 20.0), (vendor("flash2"), 40.0))
    assert Pair(before, alone, is_relative=True).is_slower


def test_own_kernels_count_where_a_vendors_is_served() -> None:
    before = entry((vendor("cudnn"), 9.0), (FAST, 10.0))
    after = entry((vendor("cudnn"), 9.0), (FAST, 11.0))
    pair = Pair(before, after)
    assert pair.change(pair.served) is Change.SAME
    assert pair.is_slower


def test_a_winner_is_new_only_where_the_old_one_is_beaten() -> None:
    before = entry((FAST, 10.0), (OTHER, 11.0))
    assert Pair(before, before).new_winner == ""
    tie = entry((OTHER, 10.0), (FAST, 10.005))
    assert Pair(before, tie).new_winner == ""
    beaten = entry((OTHER, 9.0), (FAST, 10.0))
    assert Pair(before, beaten).new_winner == (
        f"fused_attention {FAST.digest[:6]} -> fused_attention {OTHER.digest[:6]}"
    )
    gone = entry((OTHER, 10.0))
    assert Pair(before, gone).new_winner


def test_what_one_side_lacks_and_the_environments_are_told() -> None:
    a = [entry((FAST, 10.0), driver="570"), entry((FAST, 5.0), problem=SHORT)]
    found = compare(a, [entry((FAST, 10.0), driver="580")])
    assert [pair.a.problem for pair in found.pairs] == [LONG]
    assert [e.problem for e in found.only_a] == [SHORT]
    assert found.only_b == ()
    assert found.environment == {"driver": ("570", "580")}


def write_recording(path: Path, us: float) -> Path:
    decided = entry((FAST, us), (vendor("cudnn"), 14.0))
    first = decided.winner
    recorded = Recording(LONG, DEFAULT_GPU, REGIME, first.environment, decided.ranking)
    recording.write(path, recorded)
    return path


def write_store(path: Path, us: float) -> Path:
    with open_store(str(path)) as store:
        store.decide(LONG, DEFAULT_GPU, REGIME, entry((FAST, us)).ranking, "sweep")
    return path


def write_export(path: Path, us: float) -> Path:
    with open_store(str(write_store(path.with_suffix(".sqlite"), us))) as store:
        path.write_text(json.dumps(store.export()))
    return path


def write_folder(path: Path, us: float) -> Path:
    write_recording(path / f"one{recording.SUFFIX}", us)
    return path


Writer = Callable[[Path, float], Path]
SOURCES: dict[str, Writer] = {
    "a.json.gz": write_recording,
    "a.sqlite": write_store,
    "a.json": write_export,
    "folder": write_folder,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_source(name: str, tmp_path: Path) -> None:
    (found,) = load_entries(str(SOURCES[name](tmp_path / name, 12.0)))
    assert (found.problem, found.winner.config, found.winner.latency_us) == (LONG, FAST, 12.0)


def test_what_ships() -> None:
    assert {e.problem for e in load_entries("shipped")} == {e.problem for e in shipped()}


def test_a_url(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a.sqlite", 12.0)
    (found,) = load_entries(f"sqlite:///{path}")
    assert found.winner.latency_us == 12.0


def test_only_measured_decisions_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    replayed = [m.but(provenance=Provenance.REPLAYED) for m in entry((FAST, 9.0)).ranking]
    with open_store(str(path)) as store:
        store.decide(LONG, DEFAULT_GPU, REGIME, replayed, "sweep")
    with pytest.raises(ConfigError, match="holds nothing that was measured"):
        load_entries(str(path))


def test_an_older_store_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path(shutil.copy(ASSETS / "store_0001.db", tmp_path))
    content = old.read_bytes()
    assert cli.main(["compare", str(old), "shipped"]) == 2
    assert "has schema 0001" in capsys.readouterr().err
    assert old.read_bytes() == content


class TestCommand:
    """Exit codes and what is printed."""

    def run(self, tmp_path: Path, before: float, after: float, *options: str) -> int:
        a = write_recording(tmp_path / "a.json.gz", before)
        b = write_store(tmp_path / "b.sqlite", after)
        return cli.main(["compare", str(a), str(b), *options])

    def test_slower_is_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path, 10.0, 11.0) == 1
        out = capsys.readouterr().out
        assert "0.91x, slower" in out
        assert out.endswith("1 compared, 1 slower\n")

    def test_faster_is_0(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path, 11.0, 10.0) == 0
        assert "faster" in capsys.readouterr().out

    def test_tolerance(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 10.0, 11.0, "--tolerance", "15") == 0
        assert self.run(tmp_path, 10.0, 10.1, "--tolerance", "0.5") == 1

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path, 10.0, 11.0, "--json") == 1
        document = json.loads(capsys.readouterr().out)
        assert document["slower"] == 1
        (pair,) = document["pairs"]
        assert pair["served"]["ratio"] == pytest.approx(1.1)
        assert pair["served"]["change"] == "slower"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere", "shipped"], "'nowhere' does not exist"),
            (["sqlite:///nowhere.sqlite", "shipped"], "nowhere.sqlite does not exist"),
            (["shipped", "shipped", "--tolerance", "-1"], "tolerance=-1.0 is out of range"),
        ],
    )
    def test_wrong_input_is_2(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["compare", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_nothing_in_common_is_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        a = write_recording(tmp_path / "a.json.gz", 10.0)
        decided = entry((FAST, 5.0), problem=SHORT)
        other = Recording(SHORT, DEFAULT_GPU, REGIME, decided.winner.environment, decided.ranking)
        recording.write(tmp_path / "b.json.gz", other)
        assert cli.main(["compare", str(a), str(tmp_path / "b.json.gz")]) == 2
        assert "nothing to compare: A holds attention B=1,H=16,S=1024" in capsys.readouterr().err

    def test_a_damaged_file_is_2(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text("{")
        assert cli.main(["compare", str(tmp_path / "a.json"), "shipped"]) == 2
        (tmp_path / "a.sqlite").write_text("no database")
        assert cli.main(["compare", str(tmp_path / "a.sqlite"), "shipped"]) == 2
