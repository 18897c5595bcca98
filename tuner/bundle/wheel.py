"""Wheels of prebuilt kernels, written by `scripts/build-kernels`.

A bundle packs decisions with their kernels for one store. The wheels pack the proven kernels of a
kernel list, for every machine of the GPU's kind, and pip installs them beside the tuner. What does
not fit into the first is in others, ``cutlass_tuner_kernels_2`` and so on, which put their files
beside the first one's::

    cutlass_tuner_kernels/__init__.py                 of the first wheel
                          kernels.json                artifacts by spec, with proofs
                          artifacts/<key>/meta.json   facts, and the library's SHA-256
                          libraries/<SHA-256>.so      once for all the kernels in it
    cutlass_tuner_kernels-<version>.dist-info/

Beside these kernels the first has those of `tuner.compile.single`, as far as they are built. It
also has the C++ dispatchers of the artifact cache, one for each version of torch and Python. Other
versions are served through Python.

Equal kernels make equal wheels, byte by byte. Members are sorted and dated 1980. Facts that
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
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tuner
from tuner.base import output
from tuner.compile import dispatcher
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.prebuilt import ARTIFACTS, KERNELS, LIBRARIES, PACKAGE
from tuner.compile.single import SOURCES
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import read, users

MAX_BYTES = 60_000_000
"""Maximum size of a wheel, the default limit of package indexes."""
PLATFORM = "manylinux_2_34_x86_64"
"""The libraries need glibc 2.34, which nvcc's static runtime is linked to on Debian 12."""
MAX_GLIBC = (2, 34)
_SPARE_BYTES, _KERNEL_BYTES = 2_000_000, 2_000
"""Bytes of a wheel beside its kernels, and of a kernel beside its library."""
_DATE = (1980, 1, 1, 0, 0, 0)
_MODE, _UNIX = 0o644, 3
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)\0")
_KEPT = ("template", "variables", "nvcc", "cutlass", "advice", *dispatcher.VERSIONS)
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
    dispatchers: tuple[str, ...]
    """Versions of torch and Python whose C++ dispatcher is in it."""


def write_wheels(
    kernels: KernelList, artifacts: ArtifactCache, folder: Path, *, with_unproven: bool = False
) -> list[Wheel]:
    """Write the wheels of a kernel list, and remove further ones that an earlier call left there.

    Args:
        kernels: kernels to pack. Those without a proof are left out.
        artifacts: cache with the kernels.
        folder: folder for the wheels.
        with_unproven: True to also pack kernels without a proof, which are not served.

    Raises:
        ConfigError: when no kernel is left to pack, an artifact is missing or was rebuilt, a
            library needs a newer glibc, or a library exceeds `MAX_BYTES`.
        StoreError: when one cannot be written or removed.
    """
    packed, wheels = _packed(kernels, with_unproven), dict[Wheel, bytes]()
    left_out = len(kernels.kernels) - len(packed.kernels)
    for number, part in enumerate(_parts(packed, artifacts), 1):
        end = "" if number == 1 else f"_{number}"
        name = f"{PACKAGE}{end}-{tuner.__version__}"
        beside = beside_kernels(artifacts) if number == 1 else []
        units = [one.facts for one in beside if one.facts.get("template") == dispatcher.SOURCE]
        versions = tuple(sorted(f"torch {facts['torch']}, {facts['python']}" for facts in units))
        members = dict(_package(part, artifacts, beside, end))
        members |= dict(_info(part, versions, name))
        members[f"{name}.dist-info/RECORD"] = _record(members, f"{name}.dist-info/RECORD")
        data = _zipped(members)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"a wheel has {len(data):,} bytes (allowed: {MAX_BYTES:,})")
        path, digest = folder / f"{name}-py3-none-{PLATFORM}.whl", hashlib.sha256(data).hexdigest()
        wheel = Wheel(path, len(part.kernels), len(data), digest, left_out, versions)
        wheels[wheel] = data
    for wheel, data in wheels.items():
        output.write(wheel.path, data, make_folder=True)
    _remove_stale(folder, len(wheels))
    return list(wheels)


def _remove_stale(folder: Path, count: int) -> None:
    """Remove wheels of this version that an earlier call wrote behind the first `count` ones.

    Raises:
        StoreError: when one cannot be removed.
    """
    names = re.compile(rf"{PACKAGE}_(\d+)-{re.escape(tuner.__version__)}-py3-none-{PLATFORM}\.whl")
    for path in folder.iterdir():
        name = names.fullmatch(path.name)
        if name and int(name[1]) > count:
            try:
                path.unlink()
            except OSError as exc:
                raise StoreError(f"{path} is of an earlier build, and stays: {exc}") from exc


def _parts(kernels: KernelList, artifacts: ArtifactCache) -> list[KernelList]:
    """Kernels of each wheel, in the list's order; those of one library stay together."""
    by_library: dict[str, dict[str, Kernel]] = {}
    for spec, kernel in kernels.kernels.items():
        by_library.setdefault(kernel.sha256, {})[spec] = kernel
    parts, left = list[dict[str, Kernel]](), 0
    for together in by_library.values():
        artifact = artifacts.find(next(iter(together.values())).artifact)
        library = b"" if artifact is None else artifact.library.read_bytes()
        size = len(zlib.compress(library, 9)) + _KERNEL_BYTES * len(together)
        if not parts or size > left:
            parts.append({})
            left = MAX_BYTES - _SPARE_BYTES
        parts[-1] |= together
        left -= size
    return [replace(kernels, kernels=part) for part in parts]


def write_package(kernels: KernelList, artifacts: ArtifactCache, folder: Path) -> int:
    """Write the wheel's package into a folder, as pip installs it. Returns the number of kernels.

    Args:
        kernels: as in `write_wheels`.
        artifacts: as in `write_wheels`.
        folder: folder on Python's path.

    Raises:
        ConfigError: as in `write_wheels`, except for the size.
        StoreError: when it cannot be written.
    """
    packed = _packed(kernels, with_unproven=False)
    for member, data in dict(_package(packed, artifacts, beside_kernels(artifacts))).items():
        output.write(folder / member, data, make_folder=True)
    return len(packed.kernels)


def _packed(kernels: KernelList, with_unproven: bool) -> KernelList:
    """Kernels of a list to pack.

    Raises:
        ConfigError: when no kernel is left.
    """
    packed = [k for k in kernels.kernels.values() if k.proof is not None or with_unproven]
    if not packed:
        raise ConfigError(f"none of {len(kernels.kernels)} kernels is proven: tuner prove")
    return replace(kernels, kernels={kernel.spec: kernel for kernel in packed})


def beside_kernels(artifacts: ArtifactCache) -> list[Artifact]:
    """Dispatchers and kernels without a spec that the runtime loads, those built for an older
    glibc than a wheel allows.
    """
    sourced = (source.find(artifacts) for source in SOURCES)
    libraries = [*dispatcher.built(artifacts), *(one for one in sourced if one is not None)]
    return [
        library for library in libraries if newest_glibc(library.library.read_bytes()) <= MAX_GLIBC
    ]


def newest_glibc(library: bytes) -> tuple[int, int]:
    """The newest version of glibc whose symbols a library uses."""
    versions = (tuple(map(int, match)) for match in _GLIBC.findall(library))
    return max((version for version in versions if len(version) == 2), default=(0, 0))


def without_newer_glibc(kernels: KernelList, artifacts: ArtifactCache) -> KernelList:
    """A list without the kernels that `write_wheels` refuses for their glibc."""

    def is_newer(key: str) -> bool:
        artifact = artifacts.find(key)
        return artifact is not None and newest_glibc(artifact.library.read_bytes()) > MAX_GLIBC

    older = {spec: k for spec, k in kernels.kernels.items() if not is_newer(k.artifact)}
    return replace(kernels, kernels=older)


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


def _package(
    kernels: KernelList, artifacts: ArtifactCache, beside: Iterable[Artifact], end: str = ""
) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file of the package. A library of several kernels comes with each of
    them, under one path.

    Args:
        kernels: kernels to pack.
        artifacts: cache with them.
        beside: libraries without a kernel.
        end: end of the name of a wheel that is not the first.
    """
    if not end:
        yield f"{PACKAGE}/__init__.py", b'"""Prebuilt kernels of cutlass-tuner: data only."""\n'
    yield f"{PACKAGE}/{KERNELS.replace('*', end)}", kernels.text().encode()
    for kernel in kernels.kernels.values():
        artifact = artifacts.find(kernel.artifact)
        if artifact is None:
            raise ConfigError(f"artifact {kernel.artifact} is not in {artifacts.root}")
        if artifact.sha256 != kernel.sha256:
            raise ConfigError(f"artifact {kernel.artifact} was rebuilt: tuner build --portfolio")
        data = artifact.library.read_bytes()
        if (glibc := newest_glibc(data)) > MAX_GLIBC:
            version = ".".join(map(str, glibc))
            raise ConfigError(f"artifact {kernel.artifact} needs glibc {version} (allowed: 2.34)")
        yield from _members(artifact, data)
    for artifact in beside:
        yield from _members(artifact, artifact.library.read_bytes())


def _members(artifact: Artifact, library: bytes) -> Iterator[tuple[str, bytes]]:
    yield f"{PACKAGE}/{LIBRARIES}/{artifact.sha256}.so", library
    yield f"{PACKAGE}/{ARTIFACTS}/{artifact.key}/meta.json", _meta(artifact)


def _info(
    kernels: KernelList, dispatchers: Sequence[str], name: str
) -> Iterator[tuple[str, bytes]]:
    """Path and content of the wheel's metadata files, without the record."""
    info = f"{name}.dist-info"
    summary = f"{len(kernels.kernels)} prebuilt kernels of cutlass-tuner"
    if dispatchers:
        summary += f", dispatchers for {'; '.join(dispatchers)}"
    metadata = {
        "Metadata-Version": "2.1",
        "Name": name.partition("-")[0].replace("_", "-"),
        "Version": tuner.__version__,
        "Summary": summary,
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
    facts = {name: artifact.facts[name] for name in _KEPT if name in artifact.facts}
    meta = replace(artifact, compile_cpu_s=0.0, facts=facts).meta()
    return (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode()


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
    """Write the wheels that the arguments name, and print their sizes and hashes."""
    parser = argparse.ArgumentParser(
        prog="scripts/build-kernels",
        description="Compiles the shipped portfolios' kernels, and writes them as wheels for "
        "machines without a compiler. `tuner prove` on a GPU comes before, but for --unproven.",
    )
    text = "kernel list (default: the one of `tuner build --portfolio`)"
    parser.add_argument("--kernels", type=Path, metavar="FILE", help=text)
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER")
    parser.add_argument("--unproven", action="store_true", help="pack unproven kernels too")
    args = parser.parse_args(arguments)
    try:
        lists = [args.kernels] if args.kernels else users()[-1:]
        if not lists:
            raise ConfigError("there is no kernel list: tuner build --portfolio")
        kernels = KernelList.read(args.kernels) if args.kernels else read(lists[0])
        wheels = write_wheels(kernels, ArtifactCache(), args.out, with_unproven=args.unproven)
    except TunerError as exc:
        print(f"build-kernels: {exc}", file=sys.stderr)
        return 1
    for wheel in wheels:
        text = f"{wheel.kernels} kernels, {wheel.bytes:,} bytes, SHA-256 {wheel.sha256}"
        print(f"{wheel.path}: {text}")
    if wheels[0].left_out:
        print(f"left out, for they are not proven: {wheels[0].left_out}")
    dispatchers = "; ".join(wheels[0].dispatchers) or "none, calls go through Python"
    print(f"dispatchers: {dispatchers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
