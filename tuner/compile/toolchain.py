"""Discovery of nvcc, the host compiler and CUTLASS, and their version checks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner import settings
from tuner.base import triton_release
from tuner.base.install import install_command
from tuner.base.processes import ProcessPool
from tuner.compile.nvcc_flags import code_flags
from tuner.compile.render import MIN_CUTLASS
from tuner.errors import CompileError

#: include/cutlass/arch/config.h of CUTLASS 4.2 switches on the last feature of Sm90 (TMA maps
#: modified on the device) from CUDA 12.3; older compilers are not accepted.
MIN_NVCC = (12, 3)
#: CUTLASS's README: "recommended" for performance.
GOOD_NVCC = (12, 8)
#: Compiler of the shipped proofs (``cache/proofs``).
PROVEN_NVCC = "13.0.88"
#: Its packages, with headers of the same CUDA.
PROVEN_PACKAGES = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.2"
#: From this major version on, CUDA's C++ library refuses an nvcc of another version.
_CHECKED_MAJOR = 13
_PROBE_TIMEOUT_S = 120.0

HOST_HELP = "install g++ (Debian, Ubuntu: apt install g++), or set NVCC_CCBIN or CXX"
CUTLASS_RELEASE = "nvidia-cutlass==4.2.0.0"


def nvcc_help() -> str:
    """Advice on installing nvcc.

    Its packages go into a folder of their own. In the environment they would meet the CUDA runtime
    that torch pins, whose headers another nvcc refuses.
    """
    command = install_command("--target", str(_own_folder()), PROVEN_PACKAGES)
    return f"install it with {command}, or set TUNER_NVCC to the nvcc of a CUDA toolkit"


def cutlass_help() -> str:
    """Advice on installing CUTLASS."""
    command = install_command(CUTLASS_RELEASE)
    return f"install it with {command}, or set TUNER_CUTLASS_DIR to a checkout"


@dataclass(frozen=True)
class Toolchain:
    """Tools that compile a kernel. Every field except the paths is part of an artifact's key."""

    nvcc: Path
    nvcc_version: str
    """As in ``13.0.88``."""
    host_compiler: Path
    host_version: str
    """First line of its ``--version``."""
    cutlass: Path
    """Folder with ``include/``, ``tools/`` and ``examples/``."""
    cutlass_version: str
    library_dirs: tuple[Path, ...] = ()
    """Folder of the static CUDA runtime if nvcc does not find it by itself."""
    cutlass_digest: str = ""
    """SHA-256 over the CUTLASS headers that a kernel can include. It detects edited checkouts."""
    triton_version: str = ""
    """Empty if Triton is not installed; only Triton kernels need it."""


def find_toolchain() -> Toolchain:
    """Find all tools that compiling needs.

    Raises:
        CompileError: names each tool that is missing or too old, every place searched, and how to
            get it.
    """
    missing: list[str] = []
    tools: dict[str, tuple[Path, str]] = {}
    for name, find in (
        ("nvcc", find_nvcc),
        ("host", find_host_compiler),
        ("cutlass", find_cutlass),
    ):
        try:
            tools[name] = find()
        except CompileError as exc:
            missing.append(str(exc))
    if missing:
        raise CompileError("; ".join(missing))
    nvcc, cutlass = tools["nvcc"][0], tools["cutlass"][0]
    return Toolchain(
        nvcc, tools["nvcc"][1], *tools["host"], cutlass, tools["cutlass"][1],
        library_dirs(nvcc), headers_digest(cutlass), triton_release.version(),
    )  # fmt: skip


def environment_facts(tools: Toolchain) -> dict[str, str]:
    """Facts of an `Environment`: versions, and options of nvcc's variables that change code."""
    flags = " ".join(f"{name}={text}" for name, text in code_flags().items())
    facts = {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}
    return {**facts, "nvcc_flags": flags} if flags else facts


def find_nvcc() -> tuple[Path, str]:
    """Path and version of the first nvcc that is new enough.

    Order: TUNER_NVCC (an unusable one is an error), CUDA_HOME, CUDA_PATH, PATH, the PyPI packages,
    first those in a folder of their own. One beside headers of another CUDA is passed over.

    Raises:
        CompileError: when there is none.
    """
    looked: list[str] = []
    for place, path in _nvcc_places():
        if path is None or not path.is_file():
            looked.append(f"{place}: {'none' if path is None else f'{path} does not exist'}")
        else:
            version = nvcc_version(path)
            headers = _headers_version(path)
            is_apart = headers and (_CHECKED_MAJOR,) <= numbers(version) != numbers(headers)
            if version and numbers(version) >= MIN_NVCC and not is_apart:
                return path, version
            beside = f", beside headers of CUDA {headers}" if is_apart else ""
            looked.append(f"{place}: {path} is {version or 'not a working nvcc'}{beside}")
        if place == "TUNER_NVCC":
            break
    raise CompileError(
        f"no nvcc >= {_dotted(MIN_NVCC)} was found (looked in {', '.join(looked)}): {nvcc_help()}"
    )


def nvcc_version(nvcc: Path) -> str:
    """Version as in ``13.0.88``; empty if `nvcc` does not run or is another program."""
    match = re.search(r"release [\d.]+, V([\d.]+)", _output(nvcc, "--version"))
    return match[1] if match else ""


def _headers_version(nvcc: Path) -> str:
    """CUDA version of the headers beside an nvcc, as ``13.0``; empty where there are none."""
    root = nvcc.resolve().parent.parent
    for folder in (root / "include", root / "targets" / "x86_64-linux" / "include"):
        with contextlib.suppress(OSError):
            text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
            if version := re.search(r"#define CUDART_VERSION\s+(\d+)", text):
                return f"{int(version[1]) // 1000}.{int(version[1]) % 1000 // 10}"
    return ""


def is_old(version: str) -> bool:
    """True if this nvcc works, but newer ones make faster kernels."""
    return numbers(version) < GOOD_NVCC


def find_host_compiler() -> tuple[Path, str]:
    """Path and version line of the C++ compiler: NVCC_CCBIN, CXX, g++ on PATH.

    Raises:
        CompileError: when there is none, or a variable names a program that does not run.
    """
    for variable in ("NVCC_CCBIN", "CXX"):
        if named := os.environ.get(variable):
            path = _executable(named)
            if path is None or not (version := _output(path, "--version")):
                raise CompileError(
                    f"{variable}={named} is not a program that runs (wanted: the name or path "
                    f"of a C++ compiler, without arguments): {HOST_HELP}"
                )
            return path, version.splitlines()[0]
    path = _executable("g++")
    if path is not None and (version := _output(path, "--version")):
        return path, version.splitlines()[0]
    raise CompileError(
        f"no host C++ compiler was found (looked in NVCC_CCBIN, CXX, g++ on PATH): {HOST_HELP}"
    )


def find_cutlass() -> tuple[Path, str]:
    """Folder and version of CUTLASS: TUNER_CUTLASS_DIR, else the nvidia-cutlass wheel.

    Raises:
        CompileError: when there is none or it is too old.
    """
    if folder := settings.cutlass_dir():
        place, root = "TUNER_CUTLASS_DIR", folder.absolute()
    else:
        # find_spec does not import the package, which would cost a second.
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or not spec.submodule_search_locations:
            raise CompileError(
                "CUTLASS was not found (looked in TUNER_CUTLASS_DIR: none, the nvidia-cutlass "
                f"package: not installed): {cutlass_help()}"
            )
        place, root = "nvidia-cutlass", Path(spec.submodule_search_locations[0]) / "source"
    header = root / "include" / "cutlass" / "version.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise CompileError(
            f"CUTLASS was not found ({place}: no {header}): {cutlass_help()}"
        ) from exc
    parts = [re.search(rf"#define CUTLASS_{p}\s+(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(m[1] if m else "0" for m in parts)
    if numbers(version) < MIN_CUTLASS:
        raise CompileError(
            f"CUTLASS {version} of {place} ({root}) is too old (allowed: >= "
            f"{_dotted(MIN_CUTLASS)}): {cutlass_help()}"
        )
    return root, version


def include_dirs(cutlass: Path) -> tuple[Path, ...]:
    """CUTLASS's include folders. No template includes from the last: it stays because flags and
    headers are part of every artifact's key.
    """
    return (
        cutlass / "include",
        cutlass / "tools" / "util" / "include",
        cutlass / "examples" / "common",
        cutlass / "examples" / "88_hopper_fmha",
    )


def headers_digest(cutlass: Path) -> str:
    """SHA-256 over names and contents of every file in `include_dirs`; takes about 0.2 s."""
    digest = hashlib.sha256()
    for folder in include_dirs(cutlass):
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(cutlass)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def path_option(source: str) -> str:
    """Option of nvcc that stands for a source's full path in the names of internal symbols.

    Both front ends hash that path. Without the option a library depends on its folder. Not part of
    a key: instructions are the same.
    """
    return f"-Xcudafe=--orig_src_path_name,{source}"


def library_dirs(nvcc: Path) -> tuple[Path, ...]:
    """Folders to add to the linker's search path.

    The PyPI packages put the CUDA runtime into ``lib``, while the nvcc among them looks in
    ``lib64`` (its nvcc.profile).
    """
    root = nvcc.resolve().parent.parent
    lib = root / "lib"
    has_own = any((root / name).exists() for name in ("lib64", "targets"))
    return (lib,) if not has_own and (lib / "libcudart_static.a").is_file() else ()


def probe(toolchain: Toolchain) -> str:
    """Compile an empty kernel, which takes 2 s. Returns the compiler's error, empty on success.

    This finds faults that versions do not show: a missing PyPI package beside nvcc, or a host
    compiler that this nvcc rejects.
    """
    try:
        return _probe(toolchain)
    except OSError as exc:
        return f"no temporary files can be written ({exc.strerror or exc})"


def _probe(toolchain: Toolchain) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(
            "#include <cuda_fp16.h>\n#include <cuda/std/cstdint>\n"
            "__global__ void probe(__half* p) { *p = __half(1); }\n"
            'extern "C" int run(__half* p) { probe<<<1, 1>>>(p); return cudaGetLastError(); }\n'
        )
        command = [
            str(toolchain.nvcc), "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared",
            "-Xcompiler", "-fPIC", "-ccbin", str(toolchain.host_compiler),
            *(f"-L{d}" for d in toolchain.library_dirs), str(source), "-o", f"{folder}/probe.so",
        ]  # fmt: skip
        try:
            done = ProcessPool(_PROBE_TIMEOUT_S).run(command, Path(folder))
        except CompileError as exc:
            return str(exc)
        if done.timed_out:
            return f"no end after {_PROBE_TIMEOUT_S:.0f} s"
        lines = [line for line in done.log.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line or "fatal" in line]
        return "" if done.returncode == 0 else (errors or lines or ["no message"])[0].strip()


def _nvcc_places() -> Iterator[tuple[str, Path | None]]:
    if named := settings.nvcc():
        yield "TUNER_NVCC", named.absolute()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        yield variable, Path(home).absolute() / "bin" / "nvcc" if home else None
    yield "PATH", _executable("nvcc")
    place = "PyPI packages"
    packaged: list[tuple[str, Path | None]] = [(place, path) for path in _packaged_nvcc()]
    if any((folder / "cuda_nvcc" / "bin" / "ptxas").is_file() for folder in _nvidia()):
        place += " (nvidia-cuda-nvcc-cu12 has no nvcc)"
    yield from packaged or [(place, None)]


def _own_folder() -> Path:
    """Folder of this environment for a compiler beside the packages that Python imports."""
    return Path(sys.prefix) / "tuner-nvcc"


def _packaged_nvcc() -> Iterator[Path]:
    """nvidia-cuda-nvcc's programs: ``nvidia/cu13/bin/nvcc``, the newest major version first."""
    for folder in _nvidia():
        yield from sorted(folder.glob("cu[0-9]*/bin/nvcc"), reverse=True)


def _nvidia() -> Iterator[Path]:
    """Folders of NVIDIA's packages: the compiler's own, and those that Python imports."""
    yield _own_folder() / "nvidia"
    spec = importlib.util.find_spec("nvidia")
    yield from map(Path, (spec and spec.submodule_search_locations) or ())


def _executable(name: str) -> Path | None:
    path = shutil.which(name)
    return Path(path).absolute() if path else None


def _output(program: Path, *arguments: str) -> str:
    """Output of a program; empty if it cannot be run."""
    try:
        done = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
