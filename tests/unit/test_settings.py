"""Folders of users without a home, and the group that may share a cache."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

import tuner
from tuner import cli, settings
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import ConfigError


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A container's user without HOME and without a name; gives the folder of temporary files."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "TUNER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError):
        Path.home()
    return tmp_path


def test_without_a_home_the_cache_is_a_private_folder(homeless: Path) -> None:
    folder = settings.cache_dir()
    assert folder == settings.cache_dir() and folder.parent == homeless
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("taken", ["open", "link", "another user's", "read-only"])
def test_a_taken_name_is_never_used(
    homeless: Path, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = homeless / f"cutlass-tuner-{os.geteuid()}"
    if taken == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif taken == "link":
        (homeless / "elsewhere").mkdir(0o700)
        folder.symlink_to(homeless / "elsewhere")
    elif taken == "another user's":
        folder.mkdir(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        folder.rename(homeless / "cutlass-tuner-54321")
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(homeless / "missing"))
    assert settings.cache_dir() == settings.NOWHERE
    assert tuner.lookup("S=1024,D=64") is not None and ArtifactCache().keys() == []


def test_without_a_home_everything_answers(
    homeless: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuner.lookup("S=1024,D=64") is not None
    assert ArtifactCache().keys() == []
    assert cli.main(["lookup", "--shape", "S=1024,D=64"]) == 0
    assert cli.main(["cache", "info"]) == 0
    cli.main(["doctor"])
    assert str(homeless) in capsys.readouterr().out


def test_a_path_that_needs_a_home_is_refused_in_one_line(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", "~/kernels")
    assert cli.main(["list"]) == 2
    assert capsys.readouterr().err == (
        "tuner: TUNER_CACHE_DIR=~/kernels: there is no home folder (write the whole path)\n"
    )


@pytest.mark.parametrize(("name", "number"), [("", None), ("77", 77), ("root", 0)])
def test_the_trusted_group(name: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_TRUST_CACHE", name)
    assert settings.trusted_group() == number


def test_a_group_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_TRUST_CACHE", "no such group")
    with pytest.raises(ConfigError, match=r"no such group is not a group here \(allowed: "):
        settings.trusted_group()
