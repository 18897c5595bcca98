"""Optuna journals that were left locked, torn or damaged: mended or refused, never made worse."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from toys import SUBJECT, finished

from tuner.cli import main
from tuner.errors import StoreError
from tuner.search import journal as journals
from tuner.search import storage
from tuner.search.samplers import KERNEL
from tuner.search.storage import StudyStorage


def copied(path: Path, *keys: str) -> list[str]:
    """Copy groups into a journal; what was noted."""
    notes: list[str] = []
    studies = StudyStorage(str(path), notes.append)
    studies.copy(finished(*keys), SUBJECT)
    studies.close()
    return notes


def kernels(path: Path) -> list[str]:
    """Kernels of the study's copied trials, as Optuna reads them."""
    opened = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.load_study(study_name=SUBJECT.name(finished()), storage=opened)
    return sorted(
        str(trial.user_attrs[KERNEL]) for trial in study.trials if KERNEL in trial.user_attrs
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    assert copied(path, "a") == []
    return path


def lock(journal: Path, target: str | Path, age_s: float) -> Path:
    """A lock that a killed process left."""
    link = journal.with_name("journal.lock")
    link.symlink_to(target)
    then = time.time() - age_s
    os.utime(link, (then, then), follow_symlinks=False)
    os.utime(journal, (then, then))
    return link


@pytest.mark.parametrize("target", ["journal", "sub/journal"], ids=["relative", "dangling"])
def test_a_lock_of_a_killed_process_is_removed(journal: Path, target: str) -> None:
    link = lock(journal, target, age_s=2 * journals.OLD_S)
    assert copied(journal, "a", "b") == []
    assert kernels(journal) == ["a", "b"]
    assert not os.path.lexists(link)


def test_a_lock_that_does_not_change_is_removed_after_the_grace(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "GRACE_S", 0.0)
    lock(journal, journal, age_s=0.0)
    assert copied(journal, "b") == []
    assert kernels(journal) == ["a", "b"]


def test_a_held_lock_holds_no_search_up(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CLOSE_WAIT_S", 0.0)
    link = lock(journal, "sub/journal", age_s=0.0)
    before = journal.read_bytes()
    [note] = copied(journal, "b")
    assert note == (
        f"Optuna storage {journal}: it did not answer within 0 s; no further trial is copied"
    )
    assert journal.read_bytes() == before
    link.unlink()  # the thread, which waits for it, ends


def test_a_signal_ends_a_sweep_that_waits_for_a_storage(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = lock(journal, "sub/journal", age_s=0.0)
    wait = storage._Writer.is_ended_within

    def ended(writer: Any, seconds: float) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(writer, 600.0)

    monkeypatch.setattr(storage._Writer, "is_ended_within", ended)
    words = ["sweep", "--shape", "S=1024,D=64", "--replay", "--trials", "2"]
    assert main([*words, "--optuna-storage", str(journal)]) == 143
    link.unlink()


def test_a_relative_path_is_resolved(
    journal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Optuna's lock is a link to the path: a relative one leads nowhere from the link's folder."""
    monkeypatch.chdir(tmp_path.parent)
    links: list[str] = []
    symlink = os.symlink

    def note(target: Any, *rest: Any, **options: Any) -> None:
        links.append(str(target))
        symlink(target, *rest, **options)

    monkeypatch.setattr(os, "symlink", note)
    assert copied(Path(tmp_path.name) / "journal", "b") == []
    # A sweep that was ended before may write its last trial only now, to its own journal.
    assert {link for link in links if tmp_path.name in link} == {str(journal.resolve())}
    assert kernels(journal) == ["a", "b"]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_cut_off_before_the_first_write(journal: Path, cut: int) -> None:
    whole = journal.read_bytes()
    torn = whole.splitlines(keepends=True)[-1]
    journal.write_bytes(whole + torn[:-cut])
    assert copied(journal, "b") == []
    assert journal.read_bytes().startswith(whole + b'{"op_code"')
    assert kernels(journal) == ["a", "b"]


def test_a_line_that_is_torn_between_two_writes_is_cut_off(journal: Path) -> None:
    notes: list[str] = []
    studies = StudyStorage(str(journal), notes.append)
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"study_id":0')
    studies.copy(finished("b"), SUBJECT)
    studies.close()
    assert notes == []
    assert kernels(journal) == ["a", "b"]


@pytest.mark.parametrize("text", ['{"a": 1}', "{"])
def test_another_file_without_a_line_end_is_refused_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(StoreError, match="is not a journal: its line has no end"):
        StudyStorage(str(file), print)
    assert file.read_text() == text


Change = Callable[[bytes], bytes]
LINES = [b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"op_code":99}']
LINES += [b'{"op_code":%d,"worker_id":"w"}' % code for code in range(11)]
LINES += [b'{"op_code":4,"worker_id":"w","study_id":0', b'{"op_code":"4"}', b"NaN", b"9" * 5000]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


def _with_field(content: bytes, line: int, field: int, value: Any) -> bytes:
    """A journal of which one field of a line has another value."""
    lines = content.splitlines(keepends=True)
    number = line % max(1, len(lines))
    try:
        record = json.loads(lines[number])
        names = sorted(record)
        record[names[field % len(names)]] = value
    except (ValueError, LookupError, TypeError, ZeroDivisionError, RecursionError):
        return content
    lines[number] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


def _spliced(content: bytes, start: int, size: int, text: bytes) -> bytes:
    start %= len(content) + 1
    return content[:start] + text + content[start + size :]


def _with_line(content: bytes, position: int, text: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines.insert(position % (len(lines) + 1), text + b"\n")
    return b"".join(lines)


def _moved(content: bytes, source: int, target: int, copies: int) -> bytes:
    """A journal of which one line is missing, twice there, or in another place."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    line = lines.pop(source % len(lines))
    place = target % (len(lines) + 1)
    return b"".join([*lines[:place], *[line] * copies, *lines[place:]])


PLACE = st.integers(0, 1 << 16)
CHANGES = st.one_of(
    st.builds(lambda at: lambda c: c[: at % (len(c) + 1)], PLACE),
    st.builds(lambda tail: lambda c: c + tail, st.sampled_from(LINES)),
    st.builds(
        lambda *arguments: lambda c: _spliced(c, *arguments),
        PLACE,
        st.integers(0, 40),
        st.binary(max_size=8),
    ),
    st.builds(
        lambda *arguments: lambda c: _with_line(c, *arguments), PLACE, st.sampled_from(LINES)
    ),
    st.builds(lambda *arguments: lambda c: _moved(c, *arguments), PLACE, PLACE, st.integers(0, 2)),
    st.builds(lambda *arguments: lambda c: _with_field(c, *arguments), PLACE, PLACE, VALUES),
)


def test_a_mutated_journal_is_refused_or_goes_on_whole(
    tmp_path_factory: pytest.TempPathFactory, long_mode: bool
) -> None:
    """Whatever was done to a journal: it is refused in a line and left as it was; or its whole
    lines stay, and Optuna reads what follows. The search notices at most a note.
    """
    folder = tmp_path_factory.mktemp("journals")
    path = folder / "journal"
    assert copied(path, "a") == []
    sound = path.read_bytes()

    @settings(max_examples=10_000 if long_mode else 200)
    @given(st.lists(CHANGES, min_size=1, max_size=3))
    def check(changes: list[Change]) -> None:
        content = sound
        for change in changes:
            content = change(content)
        path.write_bytes(content)
        try:
            notes = copied(path, "a", "b")
        except StoreError as exc:
            assert "\n" not in str(exc)
            assert path.read_bytes() == content
            return
        assert all("\n" not in note for note in notes)
        after = path.read_bytes()
        assert after.startswith(content[: content.rfind(b"\n") + 1])
        assert not os.path.lexists(f"{path}.lock")
        if not notes:
            assert after.endswith(b"\n")
            assert set(kernels(path)) >= {"a", "b"}

    check()
