"""Compilation of a unit of rendered Triton kernels to a shared library, without a GPU.

The compiler runs this module as a process, ``python -m tuner.compile.triton_compiler 8.0``, in the
unit's folder. It imports ``unit.py`` there and has Triton compile each ``BUILD_<id>`` for the
compute capability. Then it links the cubins into ``kernel.so`` with the C interface of every
artifact (`templates/triton_library.cpp.j2`). Triton prints the output of ptxas to the log, which is
parsed like nvcc's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tuner.base import resources, triton_release
from tuner.base.processes import python_command
from tuner.compile.render import fill, template_digest
from tuner.compile.toolchain import Toolchain
from tuner.errors import CompileError, TunerError
from tuner.hardware import smem_per_block_bytes

SUFFIX = ".py.j2"
"""Suffix of the templates that this module compiles."""
LIBRARY = resources.TRITON_LIBRARY
UNIT, SOURCE = "unit.py", "library.cpp"
FLAGS = ("-std=c++17", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden")
LIBRARIES = ("-ldl",)
#: Argument types of Triton -> letters in the library's template.
LETTERS: Mapping[str, str] = {"i32": "i", "i64": "l", "fp32": "f"}
_SCRATCH_POINTERS = 2
"""Parameters that Triton appends to a kernel's own."""


def compiles(template: str) -> bool:
    """True for templates of Triton kernels."""
    return template.endswith(SUFFIX)


def ingredients(tools: Toolchain, capability: str) -> dict[str, Any]:
    """Part of an artifact's key beside its template and source.

    Raises:
        CompileError: when Triton is not installed.
    """
    if not tools.triton_version:
        raise CompileError(f"Triton is not installed: {triton_release.install()}")
    return {
        "triton": tools.triton_version,
        "capability": capability,
        "flags": FLAGS,
        "library": template_digest(LIBRARY),
    }


def command(tools: Toolchain, capability: str) -> list[str]:
    """Command that compiles the unit in the working folder."""
    options = ["--host-compiler", str(tools.host_compiler)]
    return python_command("-m", "tuner.compile.triton_compiler", capability, *options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the unit in the working folder. Returns 1 on failure, with the reason in a line that
    contains ``error``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tuner.compile.triton_compiler", description=__doc__
    )
    parser.add_argument("capability", help="compute capability, as in 8.0")
    parser.add_argument("--host-compiler", default="g++")
    args = parser.parse_args(arguments)
    # Triton reads these when it is imported. Its cache is removed with the folder. Line information
    # is most of a cubin, and contains the folder's name.
    folder = Path.cwd()
    os.environ.pop("TRITON_INTERPRET", None)  # compiles nothing
    os.environ |= {
        "TRITON_CACHE_DIR": str(folder / "made"),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    try:
        kernels = [
            compiled(name.removeprefix("BUILD_"), build, args.capability)
            for name, build in vars(_load(folder / UNIT)).items()
            if name.startswith("BUILD_")
        ]
        link(kernels, folder, args.host_compiler)
    except TunerError as exc:
        print(f"error: {exc}", flush=True)
        return 1
    except Exception as exc:  # Triton's passes raise any exception
        reason = (str(exc).strip() or "no message").splitlines()[-1]
        print(f"error: {type(exc).__name__}: {reason}", flush=True)
        traceback.print_exc()
        return 1
    return 0


def compiled(kernel_id: str, build: Mapping[str, Any], capability: str) -> dict[str, Any]:
    """Compile one kernel to the form that the library's template takes.

    Args:
        kernel_id: suffix of its functions.
        build: `kernel`, its run-time `arguments` in order as (name, type, known divisor), its
            `constants` and Triton's `options`.
        capability: compute capability, as in ``8.0``.

    Raises:
        CompileError: when it needs more than a thread block or the library provides.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, arguments = build["kernel"], build["arguments"]
    signature = {name: kind for name, kind, _ in arguments}
    signature |= dict.fromkeys(build["constants"], "constexpr")
    if list(signature) != function.arg_names:
        raise CompileError(f"{function.__name__} has other arguments than its BUILD says")
    divisors = {
        (place,): [["tt.divisibility", divisor]]
        for place, (_, _, divisor) in enumerate(arguments)
        if divisor > 1
    }
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    source = ASTSource(function, signature, build["constants"], divisors)
    kernel = triton.compile(source, target=target, options=build["options"])
    facts, ptx = kernel.metadata, kernel.asm["ptx"]
    most = smem_per_block_bytes(capability)
    if facts.shared > most:
        raise CompileError(f"{facts.shared} bytes of shared memory exceed {most}")
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise CompileError(
            "it needs scratch memory on the device, which the library does not provide"
        )
    if _parameters(ptx, facts.name) != len(arguments) + _SCRATCH_POINTERS:
        raise CompileError("its parameters are not its arguments and two pointers to scratch")
    return {
        "id": kernel_id,
        "name": facts.name,
        "threads": _threads(ptx),
        "shared": facts.shared,
        "types": "".join("p" if kind[0] == "*" else LETTERS[kind] for _, kind, _ in arguments),
        "image": ",".join(map(str, kernel.asm["cubin"])),
    }


def link(kernels: Sequence[Mapping[str, Any]], folder: Path, host_compiler: str) -> None:
    """Write and compile the library around the cubins.

    Raises:
        CompileError: when the host compiler rejects it.
    """
    source = folder / SOURCE
    source.write_text(fill(LIBRARY, {"kernels": list(kernels)}), encoding="utf-8")
    line = [host_compiler, *FLAGS, str(source), "-o", str(folder / "kernel.so"), *LIBRARIES]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [text for text in done.stderr.splitlines() if "error" in text]
        print(done.stderr)
        raise CompileError((lines or [f"{host_compiler} ended with {done.returncode}"])[0])


def _load(path: Path) -> ModuleType:
    """Load the unit as a module from its file, from which Triton reads the functions' source."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(f"tuner_unit_{digest}", path)
    if spec is None or spec.loader is None:
        raise CompileError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _parameters(ptx: str, name: str) -> int:
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    return entry[1].count(".param") if entry else 0


def _threads(ptx: str) -> int:
    """Threads of a block. With specialised warps there are more than `num_warps` says."""
    match = re.search(r"\.reqntid\s+(\d+)", ptx)
    if match is None:
        raise CompileError("the PTX does not say how many threads a block has")
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
