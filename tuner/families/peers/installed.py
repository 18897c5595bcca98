"""Peers that the user has installed: modules in ``TUNER_PEERS_PATH``, or packages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tuner import settings
from tuner.families.peers import ANSWERS, BUILDS, FAILURES


class Peer(NamedTuple):
    """Module, package and file names of a peer."""

    module: str
    """Name of a file in the folder, without its ending."""
    files: str
    """Pattern of the files there that are its build."""
    package: str
    """Imported where the folder has no module; empty for a peer without such a package."""
    distributions: tuple[str, ...]
    """Names under which the package may be installed."""


PEERS = {
    "flash3": Peer("fa3", "fa3.*", "flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    "flash3_serving": Peer("fa3_serving", "fa3_serving.*", "", ()),
    "flash4": Peer("fa4", "fa4*", "flash_attn.cute", ("flash-attn-4", "flash_attn_4")),
    "deep_gemm": Peer("deep_gemm_peer", "deep_gemm*", "deep_gemm", ("deep-gemm", "deep_gemm")),
}
BENCHED = {"flash_mla": Peer("flash_mla_peer", "flash_mla*", "flash_mla", ("sgl-flash-mla",))}
"""Peers of `scripts/bench` that no sweep measures."""


def module_of(name: str) -> Any:
    """A peer's module, or the reason why it is not available.

    A module under ``TUNER_PEERS_PATH`` comes before a package there, and that before an
    installed one.

    Args:
        name: key of `PEERS` or `BENCHED`.
    """
    return _load(name, settings.peers_path())


@cache
def _load(name: str, folder: Path | None) -> Any:
    peer = {**PEERS, **BENCHED}[name]
    absent = f"{name} is not here: no {peer.module}.py in TUNER_PEERS_PATH"
    try:
        if folder and (file := folder / f"{peer.module}.py").is_file():
            return _load_file(f"tuner_peer_{peer.module}", file)
        if not peer.package:
            return absent
        if folder and str(folder) not in sys.path:
            sys.path.append(str(folder))
        return importlib.import_module(peer.package)
    except ModuleNotFoundError as exc:
        if exc.name and peer.package.startswith(exc.name):
            return f"{absent}, no {peer.package}"
        return f"{name} cannot be loaded: {exc}"
    except FAILURES as exc:
        return f"{name} cannot be loaded: {type(exc).__name__} {exc}"


def _load_file(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def version(name: str) -> str:
    """The peer's build: a package's version, or a hash of a module's files; empty without one."""
    return _version(name, settings.peers_path())


@cache
def _version(name: str, folder: Path | None) -> str:
    peer = PEERS[name]
    if folder and (folder / f"{peer.module}.py").is_file():
        content = hashlib.sha256()
        for file in sorted(folder.glob(peer.files)):
            if file.is_file() and not file.with_name(f"{file.name}.xz").exists():  # unpacked
                content.update(file.name.encode() + b"\0" + file.read_bytes())
        return f"{peer.module} {content.hexdigest()[:16]}"
    if not peer.package:
        return ""
    places = [str(folder), *sys.path] if folder else sys.path
    for name_of in peer.distributions:
        for dist in importlib.metadata.distributions(name=name_of, path=places):
            return f"{name_of} {dist.version}"
    try:
        return f"{peer.package} unversioned" if importlib.util.find_spec(peer.package) else ""
    except (ImportError, ValueError):
        return ""


def build_of(kernel: str) -> str:
    """The build here of the peer that has a kernel; empty without one, and for kernels whose
    configs hold their library's version.
    """
    name = BUILDS.get(kernel, ANSWERS.get(kernel))
    return version(name) if name in PEERS else ""


def is_package(name: str) -> bool:
    """True where a package, not a module of the folder, is the peer."""
    return bool(build := version(name)) and not build.startswith(f"{PEERS[name].module} ")


def versions(names: Iterable[str]) -> dict[str, str]:
    """The builds of those that are here, by name."""
    return {name: v for name in names if (v := version(name))}
