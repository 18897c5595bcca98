"""Golden texts: rendered kernels as they were when somebody last read them.

Each kernel has one text for review, ``NAME.cu``. A comment stands for every passage that is in
``templates/`` as it is; the rest is what rendering made. ``manifest.json`` holds the SHA-256 of
the whole text of every variant. Both are written under pytest's ``--write-goldens`` only.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tuner.base import resources

MANIFEST = "manifest.json"
PASSAGE = "// ... as in the templates"
_SHORT_PASSAGE = 1  #: lines of a passage that a text for review repeats
_MEANT = "if this is meant: scripts/test -k golden --write-goldens"


class Goldens:
    """The golden texts of one folder.

    Args:
        folder: place of the files.
        writes: replace what differs, in place of failing.
    """

    def __init__(self, folder: Path, writes: bool = False) -> None:
        self._folder, self._writes = folder, writes

    def check(self, name: str, texts: Mapping[str, str]) -> None:
        """Compare rendered texts with the golden ones.

        Fails with the lines for review that differ, and with the variants that differ.

        Args:
            name: kernel's name, unique in the folder.
            texts: rendered text of each variant; the first one is shown for review.
        """
        first = next(iter(texts))
        shown = reviewed(texts[first])
        hashes = {variant: hashlib.sha256(text.encode()).hexdigest()
                  for variant, text in texts.items()}  # fmt: skip
        manifest = self._manifest()
        golden = self._reviewed(name)
        stored = manifest.get(name, {})
        if stored == hashes and golden == shown:
            return
        if self._writes:
            (self._folder / f"{name}.cu").write_text(shown, encoding="utf-8")
            text = json.dumps({**manifest, name: hashes}, indent=1, sort_keys=True)
            (self._folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
            changed = [variant for variant in hashes if hashes[variant] != stored.get(variant)]
            pytest.skip(f"wrote {name}.cu, {', '.join(changed)}: read what changed, and run again "
                        "without")  # fmt: skip
        reasons = [_difference(f"{name}.cu", golden or "", f"rendered {first}", shown)]
        for variant in sorted(hashes.keys() | stored.keys()):
            if variant not in hashes:
                reasons.append(f"{name}: no test renders the variant {variant}\n")
            elif hashes[variant] != stored.get(variant):
                reasons.append(f"{name}: the text of the variant {variant} differs\n")
        pytest.fail(f"{''.join(reasons)}{_MEANT}", pytrace=False)

    def _manifest(self) -> dict[str, dict[str, str]]:
        """Hashes by kernel and variant."""
        path = self._folder / MANIFEST
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def _reviewed(self, name: str) -> str | None:
        path = self._folder / f"{name}.cu"
        return path.read_text(encoding="utf-8") if path.is_file() else None


def reviewed(text: str) -> str:
    """The text with each passage that the templates have as it is put as one comment."""
    lines: list[str] = []
    groups = itertools.groupby(text.splitlines(), _template_lines().__contains__)
    for is_passage, group in groups:
        passage = list(group)
        is_left_out = is_passage and len(passage) > _SHORT_PASSAGE
        lines += [PASSAGE] if is_left_out else passage
    return "\n".join([*lines, ""])


@functools.cache
def _template_lines() -> frozenset[str]:
    files = (path for path in resources.templates().rglob("*") if path.suffix in (".j2", ".h"))
    return frozenset(line for path in files for line in path.read_text().splitlines())


def _difference(old_name: str, old: str, new_name: str, new: str) -> str:
    """Unified diff with one line of context; empty where two texts are equal."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, old_name, new_name, n=1))
