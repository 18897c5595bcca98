"""`scripts/lines` on a small repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "lines"

FILES = {
    "tuner/__init__.py": 3,
    "tuner/base/output.py": 5,
    "templates/gemm.cu.j2": 7,
    "templates/README.md": 11,
    "docs/index.md": 13,
    "cache/rows.json": 17,
}


def test_lines_are_counted_by_package(tmp_path: Path) -> None:
    for name, count in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\n" * count)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "tuner" / "untracked.py").write_text("text\n")
    done = subprocess.run(
        [tmp_path / "scripts" / "lines"], capture_output=True, text=True, check=True
    )
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["templates", "7"],
        ["templates/*", "7"],
        ["tuner", "8"],
        ["tuner/*", "3"],
        ["tuner/base", "5"],
        ["all", "sources", "15"],
        ["Markdown", "outside", "docs/", "11"],
        ["tracked", "files", "7"],
    ]
