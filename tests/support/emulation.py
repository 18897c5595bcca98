"""Device halves of kernels as programs of the host, on the emulated threads of a cluster
(``tests/compile/emulator``).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from programs import ran

from tuner.base import resources

EMULATOR = Path(__file__).parents[1] / "compile" / "emulator"
_SHARED = "extern __shared__ __align__(1024) char shared[];"


def device_half(text: str) -> str:
    """A rendered template without its host half."""
    return text[: text.index("inline bool aligned(")] + "}  // namespace\n"


def emulated(
    device: str,
    header: str,
    cases: Iterable[tuple[int | bool, ...]],
    nvcc: Path,
    folder: Path,
    mutant: tuple[str, str] = ("", ""),
    orders: int = 1,
) -> str:
    """Output of an emulated kernel about its products; empty where all are right.

    Args:
        device: `device_half` with the emulator's functions in place of PTX.
        header: the emulator's header, which has `emulated::run`.
        cases: arguments of each run.
        nvcc: compiler of the program.
        folder: folder of the program.
        mutant: a fault to plant: text of the kernel, and its replacement.
        orders: seeds of the order in which threads run.
    """
    assert _SHARED in device and mutant[0] in device
    device = device.replace(_SHARED, "char* const shared = nullptr;").replace(*mutant)
    given = [", ".join(str(int(value)) for value in case) for case in cases]
    calls = "".join(
        f"  if (emulated::run({{{numbers}}}, {seed})) return 1;\n"
        for seed in range(orders)
        for numbers in given
    )
    source, program = folder / "emulated.cpp", folder / "emulated"
    source.write_text(f'{device}#include "{header}"\nint main() {{\n{calls}}}\n')
    command = [str(nvcc), "-x", "c++", "-std=c++17", "-O2", "-Xcompiler=-w"]
    command += [f"-I{folder}" for folder in (EMULATOR, resources.templates())]
    subprocess.run([*command, "-o", str(program), str(source)], check=True)
    done = ran(str(program), code=None, timeout=300)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or "it failed"
