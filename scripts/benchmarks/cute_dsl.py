"""``scripts/bench cute_dsl``: NVIDIA's GEMM in CuTe DSL beside cuBLAS and the tuner's kernels.

The kernel is NVIDIA's example ``dense_gemm_persistent.py`` of CUTLASS (BSD-3-Clause). ``--example``
names the file, which is not part of this repository. Every tile and cluster is compiled once, in
CPU-seconds of this process and its children, compared with fp32, and timed in a stream. CuTe DSL
is imported from ``PYTHONPATH`` or from the folders of peers (``TUNER_PEERS_PATH``).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.errors import BenchmarkError, ConfigError
from tuner.selection.describe import table

SHAPES = (4096, 4096, 4096), (8192, 8192, 8192), (2048, 11008, 4096)
WAYS = ((128, 256), (2, 1)), ((128, 256), (1, 2)), ((128, 256), (1, 1)), ((128, 128), (2, 1))
"""Tiles and clusters, M before N."""
COPIES = 2
MAX_ERROR = 1e-3
"""Relative Frobenius error of an fp16 product, as the numerics gate has it."""
BUDGET_US = 6e5
"""Longest sum of the rounds of one shape, microseconds."""
PYTORCH, AGAIN, TUNER = "cublas", "cublas again", "tuner"


@dataclass
class Cost:
    """Seconds of a part."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def cost() -> Iterator[Cost]:
    """Cost of the block, child processes included."""
    found = Cost(-time.monotonic(), -_cpu_s())
    yield found
    found.wall_s = round(found.wall_s + time.monotonic(), 2)
    found.cpu_s = round(found.cpu_s + _cpu_s(), 2)


def _cpu_s() -> float:
    own, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def package() -> Path | None:
    """Folder of CuTe DSL's modules; None where they can be imported as it is."""
    if importlib.util.find_spec("cutlass") is not None:
        return None
    places = os.environ.get("TUNER_PEERS_PATH", "").split(os.pathsep)
    for place in filter(None, places):
        for found in sorted(Path(place).glob("**/nvidia_cutlass_dsl/python_packages")):
            return found
    raise ConfigError(
        "CuTe DSL is not installed: pip install nvidia-cutlass-dsl, or set TUNER_PEERS_PATH"
    )


def installed_bytes(folder: Path) -> int:
    """Bytes of the files of the package that a module folder belongs to."""
    root = next((p for p in folder.parents if p.name.startswith("nvidia_cutlass_dsl")), folder)
    others = root.parent.glob("nvidia_cutlass_dsl*")
    return sum(f.stat().st_size for one in others for f in one.rglob("*") if f.is_file())


def loaded(example: Path) -> Any:
    """NVIDIA's example as a module.

    Raises:
        ConfigError: when it is not that example.
    """
    spec = importlib.util.spec_from_file_location("dense_gemm_persistent", example)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{example} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "HopperWgmmaGemmPersistentKernel"):
        raise ConfigError(f"{example} is not dense_gemm_persistent.py of CUTLASS's examples")
    return module


class Dsl:
    """CuTe DSL with the example's kernel, compiled once for each tile and cluster."""

    def __init__(self, example: Path) -> None:
        folder = package()
        if folder is not None:
            sys.path.insert(0, str(folder))
        with cost() as self.importing:
            self.module = loaded(example)
            import cutlass
            from cutlass import cute

            self.cutlass, self.cute = cutlass, cute
        self.folder = folder or Path(cutlass.__file__).parent
        self.compiling: dict[str, Cost] = {}
        self._compiled: dict[str, Any] = {}

    def tensor(self, torch_tensor: Any) -> Any:
        """A row-major matrix as the example's (rows, columns, batch), of any size."""
        from cutlass.cute.runtime import from_dlpack

        seen = from_dlpack(torch_tensor.unsqueeze(0).permute(1, 2, 0), assumed_align=16)
        return seen.mark_layout_dynamic(leading_dim=1)

    def call(self, way: tuple[tuple[int, int], tuple[int, int]], a: Any, b: Any, c: Any) -> None:
        """Enqueue c = a @ b.T on the current stream; compiles where this is the first call."""
        import torch
        from cuda.bindings import driver

        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        name = _name(way)
        if name not in self._compiled:
            tile, cluster = way
            kernel = self.module.HopperWgmmaGemmPersistentKernel(
                self.cutlass.Float32, tile, cluster, 1, True
            )
            info = self.cutlass.utils.HardwareInfo()
            blocks = info.get_max_active_clusters(cluster[0] * cluster[1])
            with cost() as self.compiling[name]:
                self._compiled[name] = self.cute.compile(kernel, a, b, c, blocks, stream)
        self._compiled[name](a, b, c, stream)


def _name(way: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (tile_m, tile_n), (cluster_m, cluster_n) = way
    return f"cute_dsl {tile_m}x{tile_n} cluster {cluster_m}x{cluster_n}"


def measured(dsl: Dsl, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Errors and times of one product by each way."""
    import torch

    import tuner

    torch.manual_seed(0)
    m, n, k = shape
    half = {"dtype": torch.float16, "device": "cuda"}
    source = torch.randn(m, k, **half)
    a = [torch.empty_like(source).copy_(source) for _ in range(COPIES)]
    b = [torch.randn(n, k, **half) for _ in range(COPIES)]
    c = [torch.empty(m, n, **half) for _ in range(COPIES)]
    seen = [[dsl.tensor(x) for x in (a[i], b[i], c[i])] for i in range(COPIES)]
    linear = torch.nn.functional.linear

    def of_dsl(way: Any, i: int) -> Any:
        dsl.call(way, *seen[i])
        return c[i]

    ways: dict[str, Callable[[int], Any]] = {
        PYTORCH: lambda i: linear(a[i], b[i]),
        AGAIN: lambda i: linear(a[i], b[i]),
        TUNER: lambda i: tuner.linear(a[i], b[i]),
        **{_name(way): partial(of_dsl, way) for way in WAYS},
    }
    wanted = a[1].float() @ b[1].float().T
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in ways.items():
        try:
            for one in c:
                one.fill_(float("nan"))
            call(0)
            found = call(1).float()
            torch.cuda.synchronize()
            errors[name] = float((found - wanted).norm() / wanted.norm())
        except FAILURES as exc:
            failed[name] = first_line(exc)
    fit = [Contender(name, ways[name]) for name, e in errors.items() if e <= MAX_ERROR]
    tuner.stats(reset=True)
    tuner.linear(a[0], b[0])
    stats = tuner.stats()
    own = "own kernel" if stats.hits else f"PyTorch: {next(iter(stats.fallbacks), 'not counted')}"
    before = lambda i: torch.mul(source, 1.0, out=a[i])  # noqa: E731
    times = time_calls(fit, before, COPIES, BUDGET_US)
    return {
        "shape": list(shape),
        "tuner": own,
        "us": {name: round(us, 2) for name, us in times.us.items()},
        "errors": errors,
        "failed": {**failed, **times.failed},
    }


def text(found: dict[str, Any]) -> str:
    """Tables of the compiles and of the times."""
    costs = [[name, f"{one['wall_s']:.2f}", f"{one['cpu_s']:.2f}"] for name, one in
             found["compiling"].items()]  # fmt: skip
    names = list(dict.fromkeys(name for row in found["products"] for name in row["us"]))
    rows = [
        ["x".join(map(str, row["shape"])), *(f"{row['us'].get(n, math.nan):.1f}" for n in names)]
        for row in found["products"]
    ]
    return "\n".join(
        [
            f"{found['gpu']}, CuTe DSL {found['version']}, {found['installed_bytes'] >> 20} MiB",
            table([["compile", "wall s", "CPU s"], *costs], frozenset((1, 2))),
            table([["us in a stream", *names], *rows], frozenset(range(1, len(names) + 1))),
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Compile, compare, time.

    Raises:
        ConfigError: when CuTe DSL or the example is missing.
        BenchmarkError: without a GPU.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/bench cute_dsl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--example", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_place(args.json)
    if not args.example.is_file():
        raise ConfigError(f"{args.example} is not there: it is CUTLASS's dense_gemm_persistent.py")
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError("no GPU found: scripts/bench cute_dsl runs kernels")
    dsl = Dsl(args.example)
    products = []
    for shape in SHAPES:
        products.append(measured(dsl, shape))
        found = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "version": getattr(dsl.cutlass, "__version__", "unknown"),
            "installed_bytes": installed_bytes(dsl.folder),
            "importing": vars(dsl.importing),
            "compiling": {name: vars(one) for name, one in dsl.compiling.items()},
            "products": products,
        }
        if args.json is not None:
            write_json(args.json, found)
    print(text(found))
    return 0
