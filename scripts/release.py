"""Documents of a release, as ``scripts/release`` calls it: checksums, provenance and an SBOM.

``SHA256SUMS`` is what ``sha256sum --check`` reads. ``provenance.json`` is an in-toto statement with
SLSA's predicate, ``sbom.json`` a CycloneDX document of the package's own requirements. Equal files
of an equal commit make equal documents.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

DOCUMENTS = ("SHA256SUMS", "provenance.json", "sbom.json")
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "scripts/release"
_NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")
"""The namespace of URLs of RFC 4122."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a release by name, without its documents."""
    files = sorted(path for path in folder.iterdir() if path.name not in DOCUMENTS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def checksums(found: Mapping[str, str]) -> str:
    """Text of ``SHA256SUMS``."""
    return "".join(f"{digest}  {name}\n" for name, digest in found.items())


def provenance(found: Mapping[str, str], commit: str) -> dict[str, Any]:
    """The statement of which commit the files were built from."""
    source = {"uri": "git", "digest": {"gitCommit": commit}}
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": one}} for name, one in found.items()],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"source": source},
                "resolvedDependencies": [source],
            },
            "runDetails": {"builder": {"id": _BUILD_TYPE}},
        },
    }


def sbom(wheels: Sequence[Path], found: Mapping[str, str]) -> dict[str, Any]:
    """CycloneDX's document: the wheels, and the requirements that they name.

    Args:
        wheels: the release's wheels.
        found: `digests` of the release.
    """
    components: list[dict[str, Any]] = []
    for wheel in wheels:
        facts = metadata(wheel)
        components.append(
            {
                "type": "library",
                "name": facts["Name"],
                "version": facts["Version"],
                "purl": f"pkg:pypi/{facts['Name']}@{facts['Version']}",
                "hashes": [{"alg": "SHA-256", "content": found[wheel.name]}],
            }
        )
        for text in facts.get_all("Requires-Dist") or ():
            needed = Requirement(text)
            if needed.marker is None or "extra" not in str(needed.marker):
                row = {"type": "library", "name": needed.name, "purl": f"pkg:pypi/{needed.name}"}
                components.append({**row, "version": str(needed.specifier) or "any"})
    serial = uuid.uuid5(_NAMESPACE, json.dumps(dict(found), sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "components": components,
    }


def metadata(wheel: Path) -> Any:
    """Headers of a wheel's ``METADATA``."""
    with zipfile.ZipFile(wheel) as file:
        name = next(one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(file.read(name).decode())


def main(folder: Path, commit: str) -> int:
    """Write the documents beside the files, and print the checksums."""
    found = digests(folder)
    wheels = sorted(folder.glob("*.whl"))
    texts = (
        checksums(found),
        json.dumps(provenance(found, commit), indent=2) + "\n",
        json.dumps(sbom(wheels, found), indent=2) + "\n",
    )
    for name, text in zip(DOCUMENTS, texts, strict=True):
        (folder / name).write_text(text)
    print(texts[0], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
