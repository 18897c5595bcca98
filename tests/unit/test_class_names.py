"""Public classes: no new name that another one has."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import tuner

#: Names that several classes still share. None may be added; one that is free again leaves.
SHARED = set(
    "Answer Call Candidate Change Choice Claim Comparison Draw Found Graph Job Jobs Kernel Kind "
    "Limits Outcome Part Plan Product Progress Rows Served Shape Sizes Step Subject Table Target "
    "Task Tiling Timed Trial".split()
)


def test_no_two_public_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text()) for path in Path(tuner.__file__).parent.rglob("*.py")]
    names = Counter(
        node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    )
    found = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert found == SHARED
