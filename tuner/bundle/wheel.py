"""Wheel of prebuilt kernels, written by `scripts/build-kernels`.

A bundle packs decisions with their kernels for one store. The wheel packs the proven kernels of a
kernel list, for every machine of the GPU's kind, and pip installs it beside the tuner::

    cutlass_tuner_kernels/__init__.py
                          kernels.json                artifacts by spec, with proofs
                          artifacts/<key>/kernel.so   as in the artifact cache
                                          meta.json
    cutlass_tuner_kernels-<version>.dist-info/

Equal kernels make an equal wheel, byte by byte. Members are sorted and dated 1980. Facts that
differ from build to build (CPU-seconds, the rendered source) are left out.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import tuner
from tuner.base import output
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.prebuilt import ARTIFACTS, DISTRIBUTION, KERNELS, PACKAGE
from tuner.errors import ConfigError, TunerError
from tuner.selection.kernels import KernelList, users

MAX_BYTES = 60_000_000
"""Maximum size of a wheel, the default limit of package indexes."""
PLATFORM = "manylinux_2_34_x86_64"
"""The libraries need glibc 2.34, which nvcc's static runtime is linked to on Debian 12."""
MAX_GLIBC = (2, 34)
_DATE = (1980, 1, 1, 0, 0, 0)
_MODE, _UNIX = 0o644, 3
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)\0")
_KEPT = ("template", "variables", "nvcc", "cutlass", "advice")
"""Facts of an artifact that are the same in each build."""


@dataclass(frozen=True)
class Wheel:
    """The written wheel."""

    path: Path
    kernels: int
    bytes: int
    sha256: str
    left_out: int
    """Kernels without a proof."""


def write_wheel(
    kernels: KernelList, artifacts: ArtifactCache, folder: Path, *, with_unproven: bool = False
) -> Wheel:
    """Write the wheel of a kernel list.

    Args:
        kernels: kernels to pack. Those without a proof are left out.
        artifacts: cache with the kernels.
        folder: folder for the wheel.
        with_unproven: True to also pack kernels without a proof, which are not served.

    Raises:
        ConfigError: when no kernel is left to pack, an artifact is missing or was rebuilt, a
            library needs a newer glibc, or the wheel exceeds `MAX_BYTES`.
        StoreError: when it cannot be written.
    """
    packed = _packed(kernels, with_unproven)
    name = f"{PACKAGE}-{tuner.__version__}"
    path = folder / f"{name}-py3-none-{PLATFORM}.whl"
    members = {**dict(_package(packed, artifacts)), **dict(_info(packed, name))}
    members[f"{name}.dist-info/RECORD"] = _record(members, f"{name}.dist-info/RECORD")
    data = _zipped(members)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the wheel has {len(data):,} bytes (allowed: {MAX_BYTES:,})")
    output.write(path, data, make_folder=True)
    count = len(packed.kernels)
    left_out = len(kernels.kernels) - count
    return Wheel(path, count, len(data), hashlib.sha256(data).hexdigest(), left_out)


def write_package(kernels: KernelList, artifacts: ArtifactCache, folder: Path) -> int:
    """Write the wheel's package into a folder, as pip installs it. Returns the number of kernels.

    Args:
        kernels: as in `write_wheel`.
        artifacts: as in `write_wheel`.
        folder: folder on Python's path.

    Raises:
        ConfigError: as in `write_wheel`, except for the size.
        StoreError: when it cannot be written.
    """
    packed = _packed(kernels, with_unproven=False)
    for member, data in _package(packed, artifacts):
        output.write(folder / member, data, make_folder=True)
    return len(packed.kernels)


def _packed(kernels: KernelList, with_unproven: bool) -> KernelList:
    """Kernels of a list to pack.

    Raises:
        ConfigError: when no kernel is left.
    """
    chosen = [k for k in kernels.kernels.values() if k.proof is not None or with_unproven]
    if not chosen:
        raise ConfigError(f"none of {len(kernels.kernels)} kernels is proven: tuner prove")
    return replace(kernels, kernels={kernel.spec: kernel for kernel in chosen})


def newest_glibc(library: bytes) -> tuple[int, int]:
    """The newest version of glibc whose symbols a library uses."""
    found = (tuple(map(int, match)) for match in _GLIBC.findall(library))
    return max((version for version in found if len(version) == 2), default=(0, 0))


def without_newer_glibc(kernels: KernelList, artifacts: ArtifactCache) -> KernelList:
    """A list without the kernels that `write_wheel` refuses for their glibc."""

    def is_newer(key: str) -> bool:
        artifact = artifacts.find(key)
        return artifact is not None and newest_glibc(artifact.library.read_bytes()) > MAX_GLIBC

    kept = {spec: k for spec, k in kernels.kernels.items() if not is_newer(k.artifact)}
    return replace(kernels, kernels=kept)


def _zipped(members: Mapping[str, bytes]) -> bytes:
    """Zip file that depends only on its members."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for member, data in sorted(members.items()):
            info = zipfile.ZipInfo(member, _DATE)
            info.external_attr, info.compress_type = _MODE << 16, zipfile.ZIP_DEFLATED
            info.create_system = _UNIX
            target.writestr(info, data)
    return whole.getvalue()


def _package(kernels: KernelList, artifacts: ArtifactCache) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file of the package."""
    yield f"{PACKAGE}/__init__.py", b'"""Prebuilt kernels of cutlass-tuner: data only."""\n'
    yield f"{PACKAGE}/{KERNELS}", kernels.text().encode()
    for kernel in kernels.kernels.values():
        artifact = artifacts.find(kernel.artifact)
        if artifact is None:
            raise ConfigError(f"artifact {kernel.artifact} is not in {artifacts.root}")
        if artifact.sha256 != kernel.sha256:
            raise ConfigError(f"artifact {kernel.artifact} was rebuilt: tuner build --portfolio")
        data = artifact.library.read_bytes()
        if (wanted := newest_glibc(data)) > MAX_GLIBC:
            version = ".".join(map(str, wanted))
            raise ConfigError(f"artifact {kernel.artifact} needs glibc {version} (allowed: 2.34)")
        yield f"{PACKAGE}/{ARTIFACTS}/{kernel.artifact}/kernel.so", data
        yield f"{PACKAGE}/{ARTIFACTS}/{kernel.artifact}/meta.json", _meta(artifact)


def _info(kernels: KernelList, name: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of the wheel's metadata files, without the record."""
    info = f"{name}.dist-info"
    metadata = {
        "Metadata-Version": "2.1",
        "Name": DISTRIBUTION,
        "Version": tuner.__version__,
        "Summary": f"{len(kernels.kernels)} prebuilt kernels of cutlass-tuner",
        "License-Expression": "BSD-3-Clause",
        "Requires-Python": ">=3.11",
    }
    yield f"{info}/METADATA", _headers(metadata)
    tags = {
        "Wheel-Version": "1.0",
        "Generator": "cutlass-tuner",
        "Root-Is-Purelib": "false",
        "Tag": f"py3-none-{PLATFORM}",
    }
    yield f"{info}/WHEEL", _headers(tags)


def _meta(artifact: Artifact) -> bytes:
    """Facts of the artifact, without those that differ from build to build."""
    meta = json.loads((artifact.library.parent / "meta.json").read_text())
    facts = {name: meta["facts"][name] for name in _KEPT if name in meta["facts"]}
    kept = {**meta, "compile_cpu_s": 0.0, "facts": facts}
    return (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode()


def _headers(lines: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\n" for name, value in lines.items()).encode()


def _record(members: Mapping[str, bytes], own: str) -> bytes:
    """The list of files with their hashes, which pip checks."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for member, data in sorted(members.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((member, f"sha256={digest}", len(data)))
    rows.writerow((own, "", ""))
    return text.getvalue().encode()


def main(arguments: list[str] | None = None) -> int:
    """Write the wheel that the arguments name, and print its size and hash."""
    parser = argparse.ArgumentParser(prog="scripts/build-kernels", description=__doc__)
    text = "kernel list (default: the one of `tuner build --portfolio`)"
    parser.add_argument("--kernels", type=Path, metavar="FILE", help=text)
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER")
    parser.add_argument("--unproven", action="store_true", help="pack unproven kernels too")
    args = parser.parse_args(arguments)
    try:
        lists = [args.kernels] if args.kernels else users()[-1:]
        if not lists:
            raise ConfigError("there is no kernel list: tuner build --portfolio")
        known = KernelList.read(lists[0])
        made = write_wheel(known, ArtifactCache(), args.out, with_unproven=args.unproven)
    except TunerError as exc:
        print(f"build-kernels: {exc}", file=sys.stderr)
        return 1
    print(f"{made.path}: {made.kernels} kernels, {made.bytes:,} bytes, SHA-256 {made.sha256}")
    if made.left_out:
        print(f"left out, for they are not proven: {made.left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
