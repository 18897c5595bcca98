"""``tuner doctor``: check everything that a sweep needs, and advise on what is missing."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.base import filesystem
from tuner.base.install import extra_command, install_command
from tuner.cli.arguments import tell
from tuner.compile import prebuilt
from tuner.errors import CompileError, ConfigError, StoreError, TunerError
from tuner.families.peers.installed import PEERS
from tuner.hardware import HOPPER, OLDEST_CAPABILITY, Gpu
from tuner.problem import Problem
from tuner.selection.kernels import BUILD, PROVE, lists, read, users
from tuner.store.faults import is_busy, store_error

OK, MISSING, NOTE = "ok", "missing", "note"
ROOM_BYTES = 64 << 20
"""Free space that a folder must have: for some kernels, or one compiler's temporary files."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    state: str
    """State: ok; missing: a sweep cannot measure without it; note: it can, but some function is
    unavailable."""
    found: str
    advice: str = ""
    """Advice if the state is not ok."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="look for GPU, driver, compilers, CUTLASS and torch, and name what is missing",
    )
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0 if a sweep can measure here, else 1."""
    findings = examine(args.device)
    missing = {f.name for f in findings if f.state == MISSING}
    verdict = conclude(missing)
    rows = [asdict(f) for f in findings]
    data = {"can_measure": not missing, "verdict": verdict, "findings": rows}
    tell(args, data, f"{findings_text(findings)}\n{verdict}")
    return 1 if missing else 0


def findings_text(findings: Sequence[Finding]) -> str:
    """One line a finding, with its advice."""
    width = max(len(f.name) for f in findings)
    return "\n".join(
        f"{f.state:<8}{f.name:<{width + 2}}{f.found}" + (f" - {f.advice}" if f.advice else "")
        for f in findings
    )


def examine(device: int = 0, *, is_quick: bool = False) -> list[Finding]:
    """Run all checks, in the order in which a sweep needs them.

    Args:
        device: index of the CUDA device.
        is_quick: only those that compile nothing and import no torch.
    """
    if is_quick:
        return [*_gpu(device), *_compilers(), *_store(), _cache(), *_lists()]
    return [
        *_gpu(device),
        *_compiling(),
        *_torch_and_peers(),
        *_store(),
        _cache(),
        *_lists(),
        _temporary(),
        *_prebuilt(),
        *_dispatcher(),
    ]


def conclude(missing: set[str]) -> str:
    """One-line verdict: whether a sweep can measure here, and otherwise what still works."""
    if not missing:
        return "A sweep can measure here."
    gpu = missing & {"GPU", "driver", "cuda-python"}
    compiling = missing & {"nvcc", "host compiler", "CUTLASS", "compiling"}
    stored = missing & {"store", "artifact cache", "TMPDIR"}
    if stored:
        still = "nothing can be stored"
    elif gpu and compiling:
        still = "a sweep replays recordings, and lookup answers"
    elif gpu:
        still = (
            "a sweep replays recordings, or compiles and ranks by predicted time; lookup and "
            "build work"
        )
    else:
        still = "lookup answers, and kernels that are compiled already run"
    return f"A sweep cannot measure here without: {', '.join(sorted(missing))}. Still: {still}."


def _gpu(index: int) -> Iterator[Finding]:
    packages = [_version(name) for name in ("cuda-core", "cuda-bindings")]
    if None in packages:
        yield Finding("cuda-python", MISSING, "not installed", install_command("cuda-core"))
        return
    yield Finding("cuda-python", OK, "cuda-core {}, cuda-bindings {}".format(*packages))

    from tuner.measure import device

    try:
        gpu = device.detect(index)
        facts = device.environment(index).facts if gpu else {}
        users = device.occupants(index) if gpu else []
    except (TunerError, RuntimeError, OSError) as exc:
        yield Finding("GPU", MISSING, f"cannot be asked: {exc}", "check the NVIDIA driver")
        return
    if gpu is None:
        yield _no_driver() or Finding("driver", OK, "libcuda.so.1 is there")
        advice = f"a GPU of compute capability {OLDEST_CAPABILITY} or newer is needed"
        yield Finding("GPU", MISSING, f"no CUDA device {index}", advice)
        return
    text = f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.sm_count} SMs"
    if gpu.compute_capability == HOPPER:
        yield Finding("GPU", OK, text)
    elif gpu.is_served:
        advice = "CUTLASS's kernels need Hopper: Triton's attention and vendors' kernels compete"
        yield Finding("GPU", NOTE, text, advice)
    else:
        allowed = f"allowed: compute capability {OLDEST_CAPABILITY} and newer"
        yield Finding("GPU", MISSING, text, allowed)
    yield _driver(str(facts.get("driver", "version unknown")), str(facts.get("cuda", "0")))
    if users:
        yield Finding("GPU use", NOTE, "; ".join(users), "others are using it: times may be off")
    if gpu.is_served:
        yield serving_finding(gpu)


def serving_finding(gpu: Gpu) -> Finding:
    """Finding about the shipped data that serves a GPU, and the kernels proven on it."""
    from tuner.selection.portfolio import serving, shipped
    from tuner.selection.shipped import shipped_index

    portfolios = serving(shipped(), gpu)
    kernels = list(lists.kernels(gpu.compute_capability))
    proven = sum(kernel.proof is not None and not kernel.fault for kernel in kernels)
    decided: dict[str, set[Problem]] = {}
    for same in shipped_index().values():
        for entry in same:
            if gpu.shares_decisions(entry.gpu):
                decided.setdefault(entry.gpu.name, set()).add(entry.problem)
    own = decided.pop(gpu.name, set())
    shared = [f"{n} of {name}" for name, keys in sorted(decided.items()) if (n := len(keys - own))]
    text = f"decisions for {', '.join([f'{len(own)} problems of its own', *shared])}"
    gpus = {models.made_on or p.gpu for p in portfolios for models in p.domains.values()}
    if not portfolios:
        advice = "PyTorch answers shapes that nobody tuned: tuner sweep"
        return Finding("shipped data", NOTE, f"{text}; no portfolio", advice)
    sources = sorted(source.name for source in gpus if source.identity != gpu.identity)
    names = [gpu.name] if len(sources) < len(gpus) else []
    names += [f"{', '.join(sources)}, rescaled to this GPU"] if sources else []
    text += f"; portfolios made on {', and on '.join(names)}"
    text += f"; {proven} of {len(kernels)} built kernels are proven"
    if not proven:
        return Finding("shipped data", NOTE, text, f"`{BUILD}`, then `{PROVE}`")
    if sources:
        advice = "expected times are predictions: TUNER_BENCHMARK=1 measures in place"
        return Finding("shipped data", NOTE, text, advice)
    return Finding("shipped data", OK, text)


def _no_driver() -> Finding | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("driver", MISSING, "no libcuda.so.1", "install NVIDIA's driver")
    return None


def _driver(version: str, cuda: str) -> Finding:
    """Finding about the driver, which runs kernels of its own CUDA major version and of older
    ones.
    """
    from tuner.compile import toolchain

    text = f"{version} (CUDA {cuda})"
    try:
        compiler = toolchain.find_nvcc()[1]
    except CompileError:
        return Finding("driver", OK, text)
    if int(cuda.partition(".")[0]) < int(compiler.partition(".")[0]):
        advice = (
            f"nvcc {compiler} needs a newer driver: update it, or set TUNER_NVCC to an older nvcc"
        )
        return Finding("driver", MISSING, text, advice)
    return Finding("driver", OK, text)


def _compiling() -> Iterator[Finding]:
    from tuner.compile import nvcc_flags, toolchain

    compilers = list(_compilers())
    yield from compilers
    for variable, flags in nvcc_flags.code_flags().items():
        what = f"{variable}={flags}: kernels of other keys, without the shipped proofs"
        advice = f"unset {variable}; or `tuner prove --carry`, then `tuner prove`"
        yield Finding("flags of nvcc", NOTE, what, advice)
    yield _triton()
    if all(finding.state != MISSING for finding in compilers):
        problem = toolchain.probe(toolchain.find_toolchain())
        if problem:
            yield Finding("compiling", MISSING, problem, toolchain.nvcc_help())
        else:
            yield Finding("compiling", OK, "an empty kernel compiles and links")


def _compilers() -> Iterator[Finding]:
    from tuner.compile import toolchain

    for name, find in (
        ("nvcc", toolchain.find_nvcc),
        ("host compiler", toolchain.find_host_compiler),
        ("CUTLASS", toolchain.find_cutlass),
    ):
        try:
            path, version = find()
        except CompileError as exc:
            what, _, how = str(exc).rpartition("): ")
            yield Finding(name, MISSING, what + ")", how)
            continue
        if name == "nvcc" and toolchain.is_old(version):
            advice = "12.8 or newer makes faster kernels"
            yield Finding(name, NOTE, f"{version} ({path})", advice)
        elif name == "nvcc" and version != toolchain.PROVEN_NVCC:
            what = f"{version} ({path}), and the shipped proofs are of {toolchain.PROVEN_NVCC}"
            advice = f"`tuner prove` after a build; or {toolchain.nvcc_help()}"
            yield Finding(name, NOTE, what, advice)
        else:
            yield Finding(name, OK, f"{version} ({path})")


def _triton() -> Finding:
    """Finding about Triton, the compiler of attention for GPUs other than Hopper."""
    from tuner.base import triton_release

    if release := triton_release.version():
        return Finding("Triton", OK, release)
    what = f"{triton_release.lacks()}, no attention on other GPUs than Hopper"
    return Finding("Triton", NOTE, what, triton_release.install())


def _torch_and_peers() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding(
            "torch",
            NOTE,
            "not installed: no vendor kernels to measure against, no tuner.attention",
            extra_command("torch"),
        )
        return
    from tuner.families import families

    facts: dict[str, str] = {}
    try:
        import torch

        build = torch.version.cuda
        for family in families().values():
            if family.is_vendor:
                facts.update(family.environment())
    except (ImportError, OSError, RuntimeError) as exc:
        yield Finding("torch", NOTE, f"cannot be imported: {exc}", extra_command("torch"))
        return
    if build is None:
        advice = "vendor kernels need a CUDA build of torch"
        yield Finding("torch", NOTE, f"{torch.__version__}, without CUDA", advice)
    else:
        yield Finding("torch", OK, f"{torch.__version__}, CUDA {build}")
    peers = ", ".join(f"{name} {facts[name]}" for name in PEERS if name in facts)
    advice = (
        "FlashAttention-3 and -4 and DeepGEMM are measured where installed or under "
        "TUNER_PEERS_PATH"
    )
    yield Finding("peers", OK, peers) if peers else Finding("peers", NOTE, "none", advice)
    place = settings.peers_path()
    if place is not None and not place.is_dir():
        yield Finding("peers", NOTE, f"TUNER_PEERS_PATH={place} is not a folder", advice)
    for family in families().values():
        if family.is_listed and (lacks := family.lacks()):
            absence, _, how = lacks.partition(": ")
            yield Finding(family.name.removeprefix("vendor_"), NOTE, absence, how)


def _store() -> Iterator[Finding]:
    from tuner.store.reading import sqlite_file

    try:
        url = settings.store_url()
        path = sqlite_file(url)
        if path is None:
            from tuner.store.engine import check_url

            check_url(url)
    except ConfigError as exc:
        yield Finding("store", MISSING, str(exc))
        return
    if path is None:
        scheme = url.partition("://")[0]
        yield Finding("store", OK, f"{scheme} (not opened: the URL may hold a password)")
        return
    folder = path.parent
    if reason := filesystem.write_fault(folder, ROOM_BYTES) or filesystem.lock_fault(folder):
        yield Finding("store", MISSING, f"{path}: {reason}", "set TUNER_STORE")
    elif not path.exists():
        yield Finding("store", OK, f"{path} (made when first needed)")
    else:
        yield _store_file(path)


def _store_file(path: Path) -> Finding:
    """Finding about an SQLite file that exists: it is read, and a write is begun."""
    import sqlite3

    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=0, isolation_level=None
        )
        try:
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA user_version={version}")  # BEGIN passes on a read-only file
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.Error as exc:
        fault = str(store_error(str(path), exc))
        if is_busy(exc):
            return Finding("store", NOTE, fault)
        return Finding("store", MISSING, fault, "or set TUNER_STORE to another")
    return Finding("store", OK, f"{path} ({tables} tables, views and indices)")


def _cache() -> Finding:
    from tuner.compile.artifacts import ArtifactCache

    cache = ArtifactCache()
    try:
        cache.check()
    except StoreError as exc:
        return Finding("artifact cache", MISSING, str(exc))
    if reason := (
        filesystem.write_fault(cache.root, ROOM_BYTES)
        or filesystem.lock_fault(cache.root)
        or filesystem.load_fault(cache.root)
    ):
        return Finding("artifact cache", MISSING, f"{cache.root}: {reason}", "set TUNER_CACHE_DIR")
    kernels, size = len(cache.keys()), cache.total_bytes() / 1e6
    return Finding("artifact cache", OK, f"{cache.root} ({kernels} kernels, {size:.1f} MB)")


def _lists() -> Iterator[Finding]:
    """Findings about the user's kernel lists that cannot be read, whose kernels do not serve."""
    for path in users():
        try:
            read(path)
        except ConfigError as exc:
            yield Finding("kernel list", NOTE, str(exc), f"remove it, then `{BUILD}`")
        except StoreError as exc:
            yield Finding("kernel list", NOTE, str(exc))


def _temporary() -> Finding:
    """Finding about the folder of temporary files, which compilers fill."""
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    if not folder.is_dir():
        return Finding("TMPDIR", MISSING, f"{folder} is not a folder", "set TMPDIR to one")
    if reason := filesystem.write_fault(folder, ROOM_BYTES):
        return Finding("TMPDIR", MISSING, reason, "free some space, or set TMPDIR to another")
    return Finding("TMPDIR", OK, str(folder))


def _prebuilt() -> Iterator[Finding]:
    """Findings about the wheels of prebuilt kernels that are installed."""
    for path in prebuilt.kernel_lists():
        yield _wheel(path)


def _wheel(path: Path) -> Finding:
    """Finding about the wheel that a kernel list is of."""
    import tuner

    distribution = prebuilt.DISTRIBUTION + path.stem.removeprefix("kernels").replace("_", "-")
    name, advice = "prebuilt kernels", install_command(distribution)
    version = _version(distribution)
    try:
        kernels = read(path)
    except (ConfigError, StoreError) as exc:
        return Finding(name, NOTE, str(exc), advice)
    every = kernels.kernels.values()
    proven = sum(kernel.proof is not None for kernel in every)
    served = sum(kernel.proof is not None and kernel.is_current for kernel in every)
    text = f"{distribution} {version}: {len(every)} kernels, {proven} proven"
    text += f", of nvcc {kernels.nvcc}, for compute capability {kernels.capability}"
    if served < proven:
        text += f"; {proven - served} are of other templates than this version's, not served"
    if version != tuner.__version__:
        text += f"; this is cutlass-tuner {tuner.__version__}"
    if served < proven or version != tuner.__version__:
        return Finding(name, NOTE, text, advice)
    return Finding(name, OK, f"{text}; they serve where the artifact cache has none")


def _dispatcher() -> Iterator[Finding]:
    """Finding about the C++ dispatcher of calls, where torch is installed."""
    from tuner.compile import dispatcher, prebuilt
    from tuner.compile.artifacts import ArtifactCache

    versions = dispatcher.installed()
    if versions is None:
        return
    build = f"for torch {versions['torch']}, {versions['python']}"
    artifact = dispatcher.find(ArtifactCache())
    if artifact is None:
        text = f"none is built {build}: the first call builds it, or calls go through Python"
        yield Finding("dispatcher", NOTE, text, "tuner build")
        return
    libraries = prebuilt.libraries()
    is_prebuilt = libraries is not None and artifact.library.is_relative_to(libraries)
    where = "of the prebuilt kernels" if is_prebuilt else "built here"
    yield Finding("dispatcher", OK, f"C++, {where}, {build}")


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
