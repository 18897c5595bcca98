"""Golden texts: rendered kernels as they were when somebody last read them.

Each kernel has one whole text, ``NAME.cu``, for review. ``manifest.json`` holds the SHA-256 of that
text and of every variant's. Both are written under pytest's ``--write-goldens`` only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

MANIFEST = "manifest.json"
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

        Fails with the lines in which the whole text differs, and with the variants that differ.

        Args:
            name: kernel's name, unique in the folder.
            texts: rendered text of each variant; the first one's golden text is the whole one.
        """
        whole = next(iter(texts))
        hashes = {variant: hashlib.sha256(text.encode()).hexdigest()
                  for variant, text in texts.items()}  # fmt: skip
        manifest = self._manifest()
        golden = self._whole(name)
        stored = manifest.get(name, {})
        if stored == hashes and golden == texts[whole]:
            return
        if self._writes:
            (self._folder / f"{name}.cu").write_text(texts[whole], encoding="utf-8")
            text = json.dumps({**manifest, name: hashes}, indent=1, sort_keys=True)
            (self._folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
            changed = [variant for variant in hashes if hashes[variant] != stored.get(variant)]
            pytest.skip(f"wrote {name}.cu, {', '.join(changed)}: read what changed, and run again "
                        "without")  # fmt: skip
        reasons = [_difference(f"{name}.cu", golden or "", f"rendered {whole}", texts[whole])]
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

    def _whole(self, name: str) -> str | None:
        path = self._folder / f"{name}.cu"
        return path.read_text(encoding="utf-8") if path.is_file() else None


def _difference(old_name: str, old: str, new_name: str, new: str) -> str:
    """Unified diff with one line of context; empty where two texts are equal."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, old_name, new_name, n=1))
