"""The comparison with golden texts itself, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from goldens import Goldens, difference, patched
from hypothesis import given
from hypothesis import strategies as st

BASE = "".join(f"line {number}\n" for number in range(20))
CHANGED = BASE.replace("line 7\n", "line seven\n")
TEXTS = {"plain": BASE, "causal": CHANGED}

lines = st.lists(st.sampled_from(["a\n", "b\n", "\n", " +\n", "@@ -1 +1 @@\n"]), min_size=1)


@given(lines.map("".join), lines.map("".join))
def test_a_difference_gives_the_text_back(old: str, new: str) -> None:
    assert patched(old, difference("old", old, "new", new)) == new


def test_a_difference_fits_no_other_text() -> None:
    changes = difference("old", BASE, "new", CHANGED)
    assert patched(BASE.replace("line 8\n", "line eight\n"), changes) is None
    assert patched("line 0\n", changes) is None


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with pytest.raises(pytest.skip.Exception, match=r"wrote k\.cu, k\.causal\.diff"):
        Goldens(tmp_path, writes=True).check("k", TEXTS)
    return tmp_path


def test_one_text_is_whole_and_the_others_are_differences(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["k.causal.diff", "k.cu"]
    assert (written / "k.cu").read_text() == BASE
    assert (written / "k.causal.diff").read_text().splitlines() == [
        "--- k.cu",
        "+++ k.causal.cu",
        "@@ -7,3 +7,3 @@",
        " line 6",
        "-line 7",
        "+line seven",
        " line 8",
    ]
    Goldens(written).check("k", TEXTS)
    Goldens(written, writes=True).check("k", TEXTS)  # nothing to write


@pytest.mark.parametrize("variant", ["plain", "causal"])
def test_a_changed_text_fails_with_its_lines_and_writes_nothing(
    written: Path, variant: str
) -> None:
    before = {path: path.read_text() for path in written.iterdir()}
    changed = {**TEXTS, variant: TEXTS[variant].replace("line 12\n", "line twelve\n")}
    with pytest.raises(pytest.fail.Exception) as failure:
        Goldens(written).check("k", changed)
    assert failure.value.msg is not None
    assert failure.value.msg.splitlines() == [
        f"--- golden {variant}",
        f"+++ rendered {variant}",
        "@@ -12,3 +12,3 @@",
        " line 11",
        "-line 12",
        "+line twelve",
        " line 13",
        "if this is meant: scripts/test -k golden --write-goldens",
    ]
    assert {path: path.read_text() for path in written.iterdir()} == before


def test_missing_and_needless_files_are_named(written: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"k\.full\.diff is missing"):
        Goldens(written).check("k", {**TEXTS, "full": BASE})
    with pytest.raises(pytest.fail.Exception, match=r"k\.causal\.diff: no test renders it"):
        Goldens(written).check("k", {"plain": BASE})
    with pytest.raises(pytest.fail.Exception, match=r"other\.cu is missing"):
        Goldens(written).check("other", TEXTS)
    with pytest.raises(pytest.skip.Exception):
        Goldens(written, writes=True).check("k", {"plain": BASE})
    assert [path.name for path in written.iterdir()] == ["k.cu"]


def test_a_change_of_the_whole_text_leaves_the_differences_readable(written: Path) -> None:
    """A line that all variants share is rewritten in the whole text; the diffs follow."""
    moved = {name: f"// first\n{text}" for name, text in TEXTS.items()}
    with pytest.raises(pytest.skip.Exception):
        Goldens(written, writes=True).check("k", moved)
    Goldens(written).check("k", moved)
