"""Documents of a release: checksums, provenance, and the list of what is in it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import ran

import release

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40
METADATA = """Metadata-Version: 2.4
Name: cutlass-tuner
Version: 0.1.0
Requires-Dist: numpy>=1.26
Requires-Dist: nvidia-matmul-heuristics>=0.1; sys_platform == 'linux'
Requires-Dist: torch>=2.11; extra == 'torch'

# Text
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "cutlass_tuner-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cutlass_tuner-0.1.0.dist-info/METADATA", METADATA)
    (tmp_path / "cutlass_tuner-0.1.0.tar.gz").write_bytes(b"sources")
    return tmp_path


def documents(folder: Path) -> tuple[str, Any, Any]:
    assert release.main(folder, COMMIT) == 0
    sums, provenance, sbom = (folder / name for name in release.DOCUMENTS)
    return sums.read_text(), json.loads(provenance.read_text()), json.loads(sbom.read_text())


def test_checksums_are_those_of_the_files(folder: Path) -> None:
    documents(folder)
    checked = ran("sha256sum", "--check", "SHA256SUMS", code=None, cwd=folder)
    assert checked.returncode == 0 and checked.stdout.count(": OK") == 2


def test_the_provenance_names_the_commit_and_every_file(folder: Path) -> None:
    _, provenance, _ = documents(folder)
    subjects = {one["name"]: one["digest"]["sha256"] for one in provenance["subject"]}
    assert subjects["cutlass_tuner-0.1.0.tar.gz"] == hashlib.sha256(b"sources").hexdigest()
    assert len(subjects) == 2
    definition = provenance["predicate"]["buildDefinition"]
    assert definition["resolvedDependencies"] == [{"uri": "git", "digest": {"gitCommit": COMMIT}}]


def test_the_list_has_the_wheel_and_what_it_needs_without_extras(folder: Path) -> None:
    _, _, sbom = documents(folder)
    names = [one["name"] for one in sbom["components"]]
    assert names == ["cutlass-tuner", "numpy", "nvidia-matmul-heuristics"]
    assert sbom["components"][1]["version"] == ">=1.26"


def test_equal_files_make_equal_documents(folder: Path) -> None:
    first, second = documents(folder), documents(folder)
    assert first == second
    (folder / "cutlass_tuner-0.1.0.tar.gz").write_bytes(b"others")
    assert documents(folder)[2]["serialNumber"] != first[2]["serialNumber"]


def test_the_workflow_runs_the_script_and_publishes_nothing() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["files"]
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert len(runs) == 1 and runs[0].startswith("scripts/release ")
    assert "secrets" not in text and yaml.safe_load(text)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "usage: scripts/release"), (["--fast", "out"], "--fast is not an option")],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    done = ran(str(ROOT / "scripts" / "release"), *arguments, code=None)
    assert done.returncode == 1 and message in done.stderr
