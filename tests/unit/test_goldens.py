"""The comparison with golden texts itself, in a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from goldens import MANIFEST, PASSAGE, Goldens, reviewed

from tuner.base import resources

BASE = "".join(f"line {number}\n" for number in range(20))
TEXTS = {"plain": BASE, "causal": BASE.replace("line 7\n", "line seven\n")}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with pytest.raises(pytest.skip.Exception, match=r"wrote k\.cu, plain, causal"):
        Goldens(tmp_path, writes=True).check("k", TEXTS)
    return tmp_path


def test_one_text_is_for_review_and_the_others_are_hashes(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["k.cu", MANIFEST]
    assert (written / "k.cu").read_text() == BASE
    assert set(json.loads((written / MANIFEST).read_text())["k"]) == {"plain", "causal"}
    Goldens(written).check("k", TEXTS)
    Goldens(written, writes=True).check("k", TEXTS)  # nothing to write


@pytest.mark.parametrize("variant", ["plain", "causal"])
def test_a_changed_text_fails_by_name_and_writes_nothing(written: Path, variant: str) -> None:
    before = {path: path.read_text() for path in written.iterdir()}
    changed = {**TEXTS, variant: TEXTS[variant].replace("line 12\n", "line twelve\n")}
    with pytest.raises(pytest.fail.Exception) as failure:
        Goldens(written).check("k", changed)
    lines = [
        "--- k.cu",
        "+++ rendered plain",
        "@@ -12,3 +12,3 @@",
        " line 11",
        "-line 12",
        "+line twelve",
        " line 13",
    ]
    assert failure.value.msg is not None
    assert failure.value.msg.splitlines() == [
        *(lines if variant == "plain" else []),
        f"k: the text of the variant {variant} differs",
        "if this is meant: scripts/test -k golden --write-goldens",
    ]
    assert {path: path.read_text() for path in written.iterdir()} == before


def test_missing_and_needless_variants_are_named(written: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="k: the text of the variant full differs"):
        Goldens(written).check("k", {**TEXTS, "full": BASE})
    with pytest.raises(pytest.fail.Exception, match="k: no test renders the variant causal"):
        Goldens(written).check("k", {"plain": BASE})
    with pytest.raises(pytest.fail.Exception, match="other: the text of the variant plain differs"):
        Goldens(written).check("other", TEXTS)
    with pytest.raises(pytest.skip.Exception):
        Goldens(written, writes=True).check("k", {"plain": BASE})
    Goldens(written).check("k", {"plain": BASE})


def test_passages_of_the_templates_are_not_repeated() -> None:
    """A change inside of such a passage shows in the template and in the hash."""
    passage = (resources.templates() / "reduce.h").read_text()
    line = passage.splitlines(keepends=True)[0]
    text = f"{passage}rendered\n{line}rendered anew\n"
    assert reviewed(text) == f"{PASSAGE}\nrendered\n{line}rendered anew\n"


def test_a_text_edited_by_hand_is_seen(written: Path) -> None:
    (written / "k.cu").write_text(f"{BASE}one more\n")
    with pytest.raises(pytest.fail.Exception, match="-one more"):
        Goldens(written).check("k", TEXTS)


def test_kernels_share_a_manifest(written: Path) -> None:
    with pytest.raises(pytest.skip.Exception):
        Goldens(written, writes=True).check("other", TEXTS)
    for name in ("k", "other"):
        Goldens(written).check(name, TEXTS)
