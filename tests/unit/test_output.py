"""Files that were asked for: in place whole or not at all, and nothing else replaced."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tuner.base import output
from tuner.errors import ConfigError, StoreError


@contextmanager
def reader(fifo: Path) -> Iterator[list[bytes]]:
    """What another process reads from a FIFO until its writer has gone."""
    os.mkfifo(fifo)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    thread.start()
    yield read
    thread.join(10)


class TestWrite:
    def test_a_file_takes_the_place_of_an_older_one(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        assert output.write(path, "\u00e4") == 2
        path.chmod(0o600)
        output.write(path, b"new")
        assert path.read_bytes() == b"new"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [path]

    def test_the_mask_of_the_process_holds(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            output.write(tmp_path / "a", "")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640

    def test_a_link_stays_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        target, link = tmp_path / "folder/a", tmp_path / "link"
        link.symlink_to(target)
        for text in ("first", "second"):
            output.write(link, text)
            assert link.is_symlink()
            assert target.read_text() == text

    @pytest.mark.parametrize("linked", [False, True])
    def test_a_fifo_stays_and_is_given_the_content(self, tmp_path: Path, linked: bool) -> None:
        fifo = path = tmp_path / "fifo"
        if linked:
            path = tmp_path / "link"
            path.symlink_to(fifo)
        with reader(fifo) as read:
            assert output.write(path, "text") == 4
        assert read == [b"text"]
        assert stat.S_ISFIFO(fifo.stat().st_mode)

    def test_an_error_leaves_the_old_file_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_text("old")
        with pytest.raises(StoreError, match="a cannot be written: No space left"):
            with output.replacing(path) as file:
                file.write(b"half")
                raise OSError(28, "No space left on device")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_long_name(self, tmp_path: Path) -> None:
        output.write(tmp_path / ("n" * 255), "text")

    def test_what_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        for name in ("none/a", "loop", "."):
            with pytest.raises(StoreError, match=rf"{tmp_path / name} cannot be written: \w"):
                output.write(tmp_path / name, "text")


class TestPlace:
    def test_places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        output.check_place(None)
        output.check_place(tmp_path / "a")
        os.mkfifo(tmp_path / "fifo")
        output.check_place(tmp_path / "fifo")
        (tmp_path / "link").symlink_to(tmp_path / "none/a")
        for name in ("none/a", "link"):
            with pytest.raises(ConfigError, match=rf"{name}: there is no folder .*none"):
                output.check_place(tmp_path / name)
        with pytest.raises(ConfigError, match="is a folder; name a file in it"):
            output.check_place(tmp_path)
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(ConfigError, match="a cannot be written: no permission"):
            output.check_place(tmp_path / "a")
