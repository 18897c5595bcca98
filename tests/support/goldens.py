"""Golden texts: rendered kernels as they were when somebody last read them.

Each kernel has one whole text, ``NAME.cu``; its variants are unified diffs from it,
``NAME.VARIANT.diff``. They are written under pytest's ``--write-goldens`` only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@\n")
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
        """Compare rendered texts with the golden ones; fails with the lines that differ.

        Args:
            name: kernel's name, unique in the folder.
            texts: rendered text of each variant; the first one's golden text is the whole one.
        """
        first, *others = texts
        files = {f"{name}.cu": texts[first]}
        for variant in others:
            files[f"{name}.{variant}.diff"] = difference(
                f"{name}.cu", texts[first], f"{name}.{variant}.cu", texts[variant]
            )
        there = {f"{name}.cu", *(path.name for path in self._folder.glob(f"{name}.*.diff"))}
        if self._writes:
            self._write(files, there)
            return
        found = [
            self._compare(name, variant, text, variant == first) for variant, text in texts.items()
        ]
        found += [f"{left}: no test renders it\n" for left in sorted(there - files.keys())]
        if any(found):
            pytest.fail(f"{''.join(found)}{_MEANT}", pytrace=False)

    def _write(self, files: Mapping[str, str], there: set[str]) -> None:
        changed = [name for name, text in files.items() if self._read(name) != text]
        for name in changed:
            (self._folder / name).write_text(files[name], encoding="utf-8")
        for name in there - files.keys():
            (self._folder / name).unlink()
            changed.append(name)
        if changed:
            pytest.skip(f"wrote {', '.join(changed)}: read what changed, and run again without")

    def _read(self, name: str) -> str | None:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _compare(self, name: str, variant: str, text: str, is_whole: bool) -> str:
        """Lines in which a text differs from its golden one; empty where it does not."""
        golden = self._read(f"{name}.cu")
        stored = f"{name}.cu" if is_whole else f"{name}.{variant}.diff"
        if golden is not None and not is_whole:
            changes = self._read(stored)
            golden = None if changes is None else patched(golden, changes)
        if golden is None:
            return f"{stored} is missing, or is not a difference from {name}.cu\n"
        return difference(f"golden {variant}", golden, f"rendered {variant}", text)


def difference(old_name: str, old: str, new_name: str, new: str) -> str:
    """Unified diff with one line of context; empty where two texts are equal."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    assert all(text.endswith("\n") for text in (old, new)), "a diff ends with the last line's end"
    return "".join(difflib.unified_diff(*lines, old_name, new_name, n=1))


def patched(old: str, changes: str) -> str | None:
    """The text that `difference` was made from; None where `changes` do not fit `old`."""
    lines, made, at = old.splitlines(keepends=True), [], 0
    for line in changes.splitlines(keepends=True)[2:]:
        if hunk := _HUNK.fullmatch(line):
            start = int(hunk[1]) - (hunk[2] != "0")  # an empty range names the line before it
            made += lines[at:start]
            at = start
        elif line[0] == "+":
            made.append(line[1:])
        elif lines[at : at + 1] == [line[1:]]:
            made += [line[1:]] if line[0] == " " else []
            at += 1
        else:
            return None
    return "".join([*made, *lines[at:]])
