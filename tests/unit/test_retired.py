"""Families of earlier versions: what names them is read with one line, and not launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import H200, PROBLEM, SHAPE, WARM, decide, measured

from tuner import families
from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.measurement import Measurement
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.store import open_store

OLD = Config("cutlass_fmha", {"tile_m": 128, "kernel_schedule": "KernelTma"})
LINE = "family 'cutlass_fmha' was removed ("


def old() -> Measurement:
    return measured(11.0, config=OLD)


@pytest.fixture(autouse=True)
def silent_before() -> None:
    families.note_retired.cache_clear()


def test_a_retired_family_is_not_registered() -> None:
    assert not families.RETIRED.keys() & families.families().keys()
    assert families.find("cutlass_fmha") is None
    with pytest.raises(ConfigError, match=r"'cutlass_fmha' was removed \(.*\): no kernels"):
        families.family("cutlass_fmha")


def test_a_recording_that_names_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = Recording(PROBLEM, H200, WARM, old().environment, (old(), measured()))
    recording.write(tmp_path / "old.json.gz", written)
    for _ in range(2):
        assert recording.read(tmp_path / "old.json.gz") == written
    assert [record.message.startswith(LINE) for record in caplog.records] == [True]
    assert written.kernels() == 0
    assert ReplayRunner(written).gpu == H200


def test_an_old_document_is_imported_and_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_store(f"sqlite:///{tmp_path}/theirs.db") as store:
        decide(store, old(), measured())
        document = store.export()
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(document))
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "own"))
    assert main(["import", str(file)]) == 0
    assert [record.message.startswith(LINE) for record in caplog.records] == [True]
    assert "1 entry added" in capsys.readouterr().out
    assert main(["lookup", "--shape", SHAPE, "--gpu", "H200"]) == 0
    assert "cutlass_fmha" in capsys.readouterr().out
    assert main(["show", "--shape", SHAPE, "--gpu", "H200", "--source"]) == 2
    assert LINE in capsys.readouterr().err
