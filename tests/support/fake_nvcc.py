"""A toolchain whose nvcc is a script that builds in no time and can be told to fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.compile import compiler
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, Toolchain
from tuner.families.base import KernelSpec

NVCC = r"""#!{python} -SE
import os, re, subprocess, sys, time
arguments = sys.argv[1:]
if "--dryrun" in arguments:
    sys.exit(0)
source = next(a for a in arguments if a.endswith(".cu") and not a.startswith("-"))
output = arguments[arguments.index("-o") + 1]
text = open(source).read()
ids = re.findall(r"kernel_(\w+)", text)
with open({runs!r}, "a") as file:
    file.write(" ".join(ids) + "\n")
if "CHILD" in text:
    child = subprocess.Popen([sys.executable, "-SE", "-c", "import time; time.sleep(600)"])
    open({runs!r} + ".child", "w").write(str(child.pid))
if "SLEEP" in text:
    open(os.environ["TMPDIR"] + "/tmpxft", "w").close()
    time.sleep(float(re.search(r"SLEEP(\d+(?:_\d+)?)", text)[1].replace("_", ".")))
if "FULL" in text:
    sys.exit("fatal error: error writing to unit.o: No space left on device")
if "CRASH" in text:
    os.kill(os.getpid(), 9)
if "BROKEN" in text:
    print("unit.cu(3): warning: take care")
    print("unit.cu(7): error: identifier is undefined")
    sys.exit(2)
for i in ids:
    print(f"ptxas info    : Compiling entry function '_Z39kernel_{{i}}v' for 'sm_90a'")
    print(f"ptxas info    : Function properties for _Z39kernel_{{i}}v")
    print("    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads")
    print(f"ptxas info    : Used {{text.count('kernel_')}} registers, used 1 barriers")
open(output, "w").write(" ".join(ids))
"""


class Fake:
    """A toolchain whose nvcc notes its runs, and two templates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "runs"
        nvcc = folder / "nvcc"
        nvcc.write_text(NVCC.format(python=sys.executable, runs=str(self.log)))
        nvcc.chmod(0o755)
        self.templates = folder / "templates"
        self.templates.mkdir()
        for name in ("a", "b"):
            (self.templates / f"{name}.cu.j2").write_text(
                f"{{% include 'part.j2' %}}struct kernel_{{{{ id }}}} {{{{ n }}}}; // {name}"
            )
        (self.templates / "part.j2").write_text('#include "header.h"\n')
        (self.templates / "header.h").write_text("// header\n")
        self.toolchain = Toolchain(
            nvcc, "13.0.88", Path("/usr/bin/c++"), "c++ 12", folder / "cutlass", "4.2.0"
        )
        self.cache = ArtifactCache(folder / "cache")

    @property
    def runs(self) -> list[int]:
        """Kernels of each run of nvcc, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [len(line.split()) for line in lines]

    def compiler(self, **options: int | float) -> Compiler:
        return Compiler(self.toolchain, self.cache, **options)

    def leftovers(self) -> list[Path]:
        return [p for d in (".building", ".locks") for p in (self.cache.root / d).glob("*")]


def faked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A toolchain in a folder, for whatever compiles."""
    fake = Fake(folder)
    monkeypatch.setattr(resources, "templates", lambda: fake.templates)
    monkeypatch.setattr(compiler, "available_bytes", lambda: 1 << 40)
    for variable in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    return fake


def spec(n: int | str, template: str = "a.cu.j2") -> KernelSpec:
    return KernelSpec(template, {"n": n}, {"n": (str(n),)})


def specs(count: int, template: str = "a.cu.j2") -> list[KernelSpec]:
    return [spec(n, template) for n in range(count)]
