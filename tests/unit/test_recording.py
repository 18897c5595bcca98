"""Recordings: both ways without loss, equal bytes, one clear error for what is damaged."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shipped_recordings import FILES, read_once
from stored import final

from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError, StoreError
from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
)
from tuner.problem import AttentionProblem, GemmProblem, SoftmaxProblem
from tuner.runners import recording, recording_archive
from tuner.runners.choose import Machine, Runners
from tuner.runners.recording import Recording
from tuner.store import open_store

PROBLEM = AttentionProblem.parse("S=512,D=64")
STAGE = GemmProblem(512, 512, 64)
REGIME = Regime("stream", "warm")
ENVIRONMENT = Environment({"driver": "580.1", "clock_max_mhz": 1980, "power_limit_w": 700.5})


def made(config: Config, problem: Any = PROBLEM, **changes: Any) -> Measurement:
    facts = {"regime": REGIME, "environment": ENVIRONMENT, "std_us": 0.0625, "rounds": 7}
    return final(config, 13.25, problem, **{**facts, "is_final": False, **changes})


QK = Config("gemm", {"tile_m": 128, "swap_ab": True, "schedule": "pingpong"})
PV = Config("gemm", {"tile_m": 64, "swap_ab": False})
WHOLE = Recording(
    PROBLEM,
    DEFAULT_GPU,
    REGIME,
    ENVIRONMENT,
    (
        made(Config("three_kernel_attention", {"pdl": True}, {"qk": QK, "pv": PV})),
        made(
            Config("cutlass_fmha", {"tile_m": 128, "stages": 4}),
            error=2.5e-4,
            workspace_bytes=1 << 20,
            compile_cpu_s=55.25,
            resources={"main": Resources(168, 0, 0, 16, 1024)},
            clocks=Clocks(1755, 3201, 45, 512.5, ("sw_power_cap",)),
            flags=("noisy",),
            created_at="2026-10-01T10:00:00+00:00",
            is_final=True,
        ),
        made(Config("cutlass_fmha", {"tile_m": 64}), status=Status.TIMEOUT, latency_us=None,
             std_us=None, rounds=0, log="no sign of life for 5 s"),
        made(Config("vendor_sdpa", {"backend": "cudnn"})),
    ),
    (Recording(STAGE, DEFAULT_GPU, REGIME, ENVIRONMENT, (made(QK, STAGE), made(PV, STAGE))),),
)  # fmt: skip


def test_both_ways_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json.gz"
    recording.write(path, WHOLE)
    assert recording.read(path) == WHOLE


def test_equal_recordings_are_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    recording.write(one, WHOLE)
    recording.write(other, recording.read(one))
    assert one.read_bytes() == other.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_types_of_parameters_survive(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    recording.write(path, WHOLE)
    stage = recording.read(path).stages[0].measurements[0].config
    assert stage["swap_ab"] is True
    assert stage.digest == QK.digest


def test_find_goes_by_content(tmp_path: Path) -> None:
    recording.write(tmp_path / "whatever.json.gz", WHOLE)
    find, elsewhere = recording_archive.find, [tmp_path]
    assert find(PROBLEM, DEFAULT_GPU, REGIME, elsewhere) == WHOLE
    assert find(STAGE, DEFAULT_GPU, REGIME, elsewhere) is None
    assert find(PROBLEM, GPUS["H100-PCIe"], REGIME, elsewhere) is None
    assert find(PROBLEM, DEFAULT_GPU, Regime("stream", "cold"), elsewhere) is None
    assert find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path / "none"]) is None


class TestArchive:
    """An archive answers as the single files that were packed into it."""

    NAME = recording_archive.file_name(PROBLEM, DEFAULT_GPU, REGIME)

    def test_packed_recordings_are_read_and_found(self, tmp_path: Path) -> None:
        recording.write(tmp_path / self.NAME, WHOLE)
        content = (tmp_path / self.NAME).read_bytes()
        archive = tmp_path / "attention.zip"
        assert recording_archive.pack(tmp_path) == {archive: 1}
        assert [path.name for path in tmp_path.iterdir()] == ["attention.zip"]
        (source,) = recording_archive.sources(tmp_path)
        assert (source.name, source.read_bytes()) == (self.NAME, gzip.decompress(content))
        assert recording_archive.named(tmp_path, self.NAME) is not None
        assert recording_archive.named(tmp_path, f"other{recording.SUFFIX}") is None
        assert recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path]) == WHOLE
        assert recording_archive.find(PROBLEM, GPUS["H100-PCIe"], REGIME, [tmp_path]) is None

    def test_a_former_archive_of_single_files_is_read_and_packed_anew(self, tmp_path: Path) -> None:
        recording.write(tmp_path / "single" / self.NAME, WHOLE)
        later = self.NAME.replace(recording.SUFFIX, f"_2{recording.SUFFIX}")
        with zipfile.ZipFile(tmp_path / "attention.zip", "w") as former:
            former.write(tmp_path / "single" / self.NAME, self.NAME)
        assert recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path]) == WHOLE
        recording.write(tmp_path / later, WHOLE)
        assert recording_archive.pack(tmp_path) == {tmp_path / "attention.zip": 2}
        sources = recording_archive.sources(tmp_path)
        assert [recording.read(source) for source in sources] == [WHOLE, WHOLE]

    def test_a_new_file_replaces_its_member(self, tmp_path: Path) -> None:
        recording.write(tmp_path / self.NAME, WHOLE)
        recording_archive.pack(tmp_path)
        shorter = replace(WHOLE, measurements=WHOLE.measurements[:2], stages=())
        recording.write(tmp_path / self.NAME, shorter)
        assert recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path]) == shorter
        assert recording_archive.pack(tmp_path) == {tmp_path / "attention.zip": 1}
        assert recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path]) == shorter

    def test_a_later_recording_of_the_same_is_kept_beside_it(self, tmp_path: Path) -> None:
        later = self.NAME.replace(recording.SUFFIX, f"_2{recording.SUFFIX}")
        for name in (self.NAME, later):
            recording.write(tmp_path / name, WHOLE)
        assert recording_archive.pack(tmp_path) == {tmp_path / "attention.zip": 2}
        assert {one.name for one in recording_archive.sources(tmp_path)} == {self.NAME, later}

    def test_equal_recordings_make_equal_archives(self, tmp_path: Path) -> None:
        contents = []
        for place in (tmp_path / "one", tmp_path / "other"):
            recording.write(place / self.NAME, WHOLE)
            recording_archive.pack(place)
            contents.append((place / "attention.zip").read_bytes())
        assert contents[0] == contents[1]

    def test_a_file_of_another_name_is_refused_and_kept(self, tmp_path: Path) -> None:
        recording.write(tmp_path / "whatever.json.gz", WHOLE)
        with pytest.raises(ConfigError, match=f"is not named {self.NAME}"):
            recording_archive.pack(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["whatever.json.gz"]

    def test_damage_is_one_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "attention.zip").write_bytes(b"PK not a zip")
        with pytest.raises(ConfigError, match=r"recordings .*attention\.zip cannot be read"):
            recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path])

    def test_a_damaged_member_is_one_clear_error(self, tmp_path: Path) -> None:
        recording.write(tmp_path / self.NAME, WHOLE)
        recording_archive.pack(tmp_path)
        archive = tmp_path / "attention.zip"
        content = bytearray(archive.read_bytes())
        content[len(content) // 2] ^= 0xFF
        archive.write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"attention\.zip.* cannot be read: Corrupt input data"
        ):
            recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path])
        later = self.NAME.replace(recording.SUFFIX, f"_2{recording.SUFFIX}")
        recording.write(tmp_path / later, WHOLE)
        with pytest.raises(ConfigError, match="Corrupt input data"):
            recording_archive.pack(tmp_path)

    def test_a_block_that_is_missing_is_one_clear_error(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "attention.zip", "w") as archive:
            archive.writestr(recording_archive.INDEX, json.dumps([[self.NAME]]))
        with pytest.raises(ConfigError, match=r"cannot be read: .*0\.jsonl"):
            recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path])


def test_of_several_regimes_the_first_that_was_recorded_is_found(tmp_path: Path) -> None:
    chained = replace(
        WHOLE,
        regime=REGIME.chained,
        measurements=tuple(m.but(regime=REGIME.chained) for m in WHOLE.measurements),
        stages=(),
    )
    recording.write(tmp_path / "a.json.gz", chained)
    either = Regime.preferred(REGIME)
    found = recording_archive.find(PROBLEM, DEFAULT_GPU, either, [tmp_path])
    assert found is not None and str(found.regime) == "chained-warm"
    assert recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path]) is None
    recording.write(tmp_path / "b.json.gz", WHOLE)
    assert recording_archive.find(PROBLEM, DEFAULT_GPU, either, [tmp_path]) == WHOLE


def test_a_replay_is_of_the_recorded_regime() -> None:
    """What ships is chained, and says so."""
    problem, notes = AttentionProblem.parse("S=1024,D=64"), list[str]()
    with Runners(Machine(replay=True), notes.append) as runners:
        runner = runners.of(problem, Regime.default("attention"))
        assert notes[-1].endswith("chained-warm (none was recorded in stream-warm)")
        runners.of(problem, Regime.parse("chained-warm"))
        assert notes[-1].endswith("chained-warm")
    assert (runner.provenance, str(runner.regime)) == (Provenance.REPLAYED, "chained-warm")


def test_shipped_recordings_are_whole_and_named_alike() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        found = read_once(path)
        name = re.sub(r"_\d+(?=\.json)", "", path.name)  # a later recording of the same
        assert name == recording_archive.file_name(found.problem, found.gpu, found.regime)
        assert name in names, path.name
        is_survey = found.regime.launch == "stream"
        assert any(m.ok and m.is_final is not is_survey for m in found.measurements), path.name
        # Surveys time PyTorch alone at some products, and at what a time limit cuts off.
        is_cut = is_survey and found.problem.op in ("gemm", "swiglu")
        assert found.kernels() > 0 or is_cut, path.name
        known = {m.config.digest for part in found.walk() for m in part.measurements}
        for m in found.measurements:
            assert all(stage.digest in known for stage in m.config.stages.values()), path.name


def test_file_name_holds_no_odd_characters() -> None:
    name = recording_archive.file_name(
        PROBLEM, Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 1, 1.0, 1), REGIME
    )
    assert name == "attention-B1_H16_S512_D64_dtypefp16-H100_80GB_HBM3-stream-warm.json.gz"


def damaged(change: Callable[[dict[str, Any]], None]) -> bytes:
    data = recording._encode(WHOLE)
    change(data)
    return gzip.compress(json.dumps(data).encode())


def row(data: dict[str, Any], number: int, column: str, value: Any) -> None:
    data["rows"][number][recording.ROW.index(column)] = value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"not gzip", "is damaged"),
        (gzip.compress(b"{"), "is damaged"),
        (gzip.compress(b"\xff"), "is damaged"),
        (gzip.compress(b"[]"), "is not a recording"),
        (gzip.compress(b"{}"), "is not a recording"),
        (damaged(lambda d: d.update(version=2)), r"has version 2 \(this tuner reads 1\)"),
        (damaged(lambda d: d.pop("gpu")), "is damaged: KeyError: 'gpu'"),
        (damaged(lambda d: d.update(regime="graph-hot")), "l2=hot is not known"),
        (damaged(lambda d: d["problem"].update(head_dim=63)), "D=63 has no tuned kernel"),
        (damaged(lambda d: row(d, 0, "status", "fine")), "'fine' is not a valid Status"),
        (damaged(lambda d: row(d, 0, "config", 99)), "names config 99 of 6"),
        (damaged(lambda d: row(d, 0, "config", -1)), "names config -1 of 6"),
        (damaged(lambda d: row(d, 0, "latency_us", None)), "has status ok and latency_us None"),
        (damaged(lambda d: row(d, 0, "latency_us", -1.0)), "has status ok and latency_us -1.0"),
        (damaged(lambda d: row(d, 2, "latency_us", 5.0)), "has status timeout and latency_us 5.0"),
        (damaged(lambda d: row(d, 0, "latency_us", "5")), "latency_us='5' is not a number or null"),
        (damaged(lambda d: d["rows"][0].pop()), "is damaged"),
        (damaged(lambda d: d["columns"].pop()), "columns are"),
        (damaged(lambda d: d["configs"][0]["rows"].append([1])), "is damaged"),
        (damaged(lambda d: d.update(rows=7)), "is damaged"),
        (damaged(lambda d: d.update(stages=[{}])), "is damaged"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        recording.read(path)
    assert "bad.json.gz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    recording.write(path, WHOLE)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="is damaged"):
        recording.read(path)
    with pytest.raises(ConfigError, match="is damaged"):
        recording_archive.find(PROBLEM, DEFAULT_GPU, REGIME, [tmp_path])


def test_missing_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        recording.read(tmp_path / "none.json.gz")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file cannot be made: (File exists|Not a directory)"):
        recording.write(tmp_path / "file" / "a.json.gz", WHOLE)


class TestFromStore:
    """A recording is what a store holds of one environment."""

    problem = SoftmaxProblem(64, 64)

    def measured(self, position: int, us: float, **changes: Any) -> Measurement:
        config = Softmax().space(self.problem, DEFAULT_GPU)[position]
        return made(config, self.problem, latency_us=us, **changes)

    def test_newest_of_each_and_the_decided_finals(self, tmp_path: Path) -> None:
        with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
            store.add([self.measured(0, 5.0), self.measured(1, 6.0), self.measured(0, 5.5)])
            store.add([self.measured(2, 1.0, provenance=Provenance.PREDICTED)])
            store.add([self.measured(3, 1.0, environment=Environment({"driver": "old"}))])
            finals = [self.measured(0, 5.2, is_final=True), self.measured(1, 6.1, is_final=True)]
            store.decide(self.problem, DEFAULT_GPU, REGIME, finals, "sweep")
            found = recording.from_store(store, self.problem, DEFAULT_GPU, REGIME)
        assert [(m.latency_us, m.is_final) for m in found.measurements] == [
            (5.5, False),
            (6.0, False),
            (5.2, True),
            (6.1, True),
        ]
        assert found.environment == ENVIRONMENT
        assert found.kernels() == 2

    def test_stages_come_along(self, tmp_path: Path) -> None:
        with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
            from tuner.families.three_kernel_attention import ThreeKernelAttention

            stage = ThreeKernelAttention().stages(PROBLEM)["qk"]
            store.add([made(Config("vendor_sdpa", {"backend": "cudnn"})), made(QK, stage)])
            found = recording.from_store(store, PROBLEM, DEFAULT_GPU, REGIME)
        assert [part.problem for part in found.walk()] == [PROBLEM, stage]

    def test_nothing_measured(self, tmp_path: Path) -> None:
        with (
            open_store(f"sqlite:///{tmp_path}/s.sqlite") as store,
            pytest.raises(NoValidConfigError, match="nothing was measured for M=64,N=64"),
        ):
            recording.from_store(store, self.problem, DEFAULT_GPU, REGIME)
