"""``scripts/bench cute_dsl``: NVIDIA's GEMM in CuTe DSL beside cuBLAS and the tuner's kernels.

The kernel is NVIDIA's example ``dense_gemm_persistent.py`` of CUTLASS (BSD-3-Clause). ``--example``
names the file, which is not part of this repository. Every tile and cluster is compiled once, in
CPU-seconds of this process and its children, compared with fp32, and timed in a stream. CuTe DSL
is imported from ``PYTHONPATH`` or from the folders of peers (``TUNER_PEERS_PATH``).

``--export DIR`` compiles without a GPU, for an H200, and links the kernels into a library.
``--exported DIR`` times that library where CuTe DSL is not installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.gpu import need_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.compile.toolchain import find_toolchain
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.selection.describe import table

SHAPES = (4096, 4096, 4096), (8192, 8192, 8192), (2048, 11008, 4096)
Way = tuple[tuple[int, int], tuple[int, int]]
WAYS: tuple[Way, ...] = (
    ((128, 256), (2, 1)),
    ((128, 256), (1, 2)),
    ((128, 256), (1, 1)),
    ((128, 128), (2, 1)),
)
"""Tiles and clusters, M before N."""
LIBRARY, FACTS = "kernels.so", "facts.json"
RUNTIME = "libcuda_dialect_runtime_static.a"
"""Part of CuTe DSL that exported objects need."""
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
        for found in sorted(Path(place).glob("**/nvidia_cutlass_dsl/*_packages")):
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

    def facts(self) -> dict[str, Any]:
        """Version, size, and seconds of the import and of each compile."""
        return {
            "version": getattr(self.cutlass, "__version__", "unknown"),
            "installed_bytes": installed_bytes(self.folder),
            "importing": vars(self.importing),
            "compiling": {name: vars(one) for name, one in self.compiling.items()},
        }

    def tensor(self, torch_tensor: Any) -> Any:
        """A row-major matrix as the example's (rows, columns, batch), of any size."""
        from cutlass.cute.runtime import from_dlpack

        seen = from_dlpack(torch_tensor.unsqueeze(0).permute(1, 2, 0), assumed_align=16)
        return seen.mark_layout_dynamic(leading_dim=1)

    def call(self, way: Way, a: Any, b: Any, c: Any) -> None:
        """Enqueue c = a @ b.T on the current stream; compiles where this is the first call."""
        import torch
        from cuda.bindings import driver

        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        name = _name(way)
        if name not in self._compiled:
            size = way[1][0] * way[1][1]
            clusters = self.cutlass.utils.HardwareInfo().get_max_active_clusters(size)
            self._compiled[name] = self._kernel(way, (a, b, c), clusters, stream)
        self._compiled[name](a, b, c, stream)

    def _kernel(self, way: Way, operands: Sequence[Any], clusters: int, stream: Any) -> Any:
        """Compile one tile and cluster."""
        tile, cluster = way
        made = self.module.HopperWgmmaGemmPersistentKernel(
            self.cutlass.Float32, tile, cluster, 1, True
        )
        with cost() as self.compiling[_name(way)]:
            return self.cute.compile(made, *operands, clusters, stream)

    def export(self, folder: Path) -> None:
        """Compile every tile and cluster ahead of time, and link them into a library."""
        from cutlass.cute.runtime import make_fake_tensor
        from cutlass.runtime import make_fake_stream

        def operand() -> Any:
            """Rows of a multiple of 8 elements, one matrix."""
            row, batch = (self.cute.sym_int64(divisibility=8) for _ in range(2))
            shape = self.cute.sym_int32(), self.cute.sym_int32(divisibility=8), 1
            kind = self.cutlass.Float16
            return make_fake_tensor(kind, shape, stride=(row, 1, batch), assumed_align=16)

        folder.mkdir(parents=True, exist_ok=True)
        for way in WAYS:
            clusters = DEFAULT_GPU.sm_count // (way[1][0] * way[1][1])
            operands = [operand() for _ in range(3)]
            made = self._kernel(way, operands, clusters, make_fake_stream())
            made.export_to_c(str(folder), _symbol(way), function_prefix=_symbol(way))
        (folder / "launch.cpp").write_text(launches(), encoding="utf-8")
        (runtime,) = self.folder.parent.glob(f"*/lib/{RUNTIME}")
        _link(folder, runtime)
        facts = {**self.facts(), "library_bytes": (folder / LIBRARY).stat().st_size}
        write_json(folder / FACTS, facts)


class Exported:
    """Kernels of `Dsl.export`, without CuTe DSL."""

    def __init__(self, folder: Path) -> None:
        """Load the library.

        Raises:
            ConfigError: when the folder has none.
        """
        import torch  # loads the CUDA runtime that the library needs

        torch.cuda.init()
        try:
            self._facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
            self._launch = ctypes.CDLL(str(folder / LIBRARY)).launch
        except OSError as exc:
            raise ConfigError(f"{folder} has no exported kernels: {exc}") from exc
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._launch.argtypes = [number, *[pointer] * 3, *[number] * 3, pointer]

    def facts(self) -> dict[str, Any]:
        """As `Dsl.facts`, of the machine that compiled; and the library's size."""
        return self._facts

    def tensor(self, torch_tensor: Any) -> Any:
        """The matrix itself."""
        return torch_tensor

    def call(self, way: Way, a: Any, b: Any, c: Any) -> None:
        """Enqueue c = a @ b.T on the current stream.

        Raises:
            BenchmarkError: when the launch fails.
        """
        import torch

        (m, k), n = a.shape, b.shape[0]
        stream = torch.cuda.current_stream().cuda_stream
        pointers = a.data_ptr(), b.data_ptr(), c.data_ptr()
        status = self._launch(WAYS.index(way), *pointers, m, n, k, stream)
        if status:
            raise BenchmarkError(f"{_name(way)}: CUDA error {status}")


def launches() -> str:
    """C++ text of the exported library's one function."""
    names = [_symbol(way) for way in WAYS]
    headers = "".join(f'#include "{name}.h"\n' for name in names)
    runs = "".join(f"WAY({name})\n" for name in names)
    cases = "".join(
        f"    case {number}: return run_{name}(a, b, c, m, n, k, stream);\n"
        for number, name in enumerate(names)
    )
    return f"{headers}{_LAUNCH.replace('RUNS', runs).replace('CASES', cases)}"


_LAUNCH = """
#define WAY(NAME) \\
  static int run_##NAME(void* a, void* b, void* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) { \\
    static NAME##_Kernel_Module_t* const module = [] { \\
      auto made = new NAME##_Kernel_Module_t; \\
      NAME##_Kernel_Module_Load(made); \\
      return made; \\
    }(); \\
    NAME##_Tensor_a_t x{a, {int32_t(m), int32_t(k)}, {k, m * k}}; \\
    NAME##_Tensor_b_t y{b, {int32_t(n), int32_t(k)}, {k, n * k}}; \\
    NAME##_Tensor_c_t z{c, {int32_t(m), int32_t(n)}, {n, m * n}}; \\
    return cute_dsl_##NAME##_wrapper(module, &x, &y, &z, stream); \\
  }
RUNS
extern "C" int launch(int way, void* a, void* b, void* c, int m, int n, int k, cudaStream_t stream) {
  switch (way) {
CASES    default: return cudaErrorInvalidValue;
  }
}
"""  # noqa: E501


def _link(folder: Path, runtime: Path) -> None:
    """Link the exported objects.

    Raises:
        CompileError: when the compiler rejects them.
    """
    tools = find_toolchain()
    command = [str(tools.nvcc), f"-ccbin={tools.host_compiler}", "-shared", "-cudart=shared"]
    command += ["-Xcompiler=-fPIC", *(f"-L{path}" for path in tools.library_dirs)]
    command += [str(folder / "launch.cpp"), *(str(folder / f"{_symbol(w)}.o") for w in WAYS)]
    command += [str(runtime), "-o", str(folder / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError("the exported kernels do not link", log=done.stderr)


def _symbol(way: Way) -> str:
    """Prefix of a way's exported functions."""
    (tile_m, tile_n), (cluster_m, cluster_n) = way
    return f"gemm_{tile_m}x{tile_n}_{cluster_m}x{cluster_n}"


def _name(way: Way) -> str:
    (tile_m, tile_n), (cluster_m, cluster_n) = way
    return f"cute_dsl {tile_m}x{tile_n} cluster {cluster_m}x{cluster_n}"


def measured(dsl: Dsl | Exported, shape: tuple[int, int, int]) -> dict[str, Any]:
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
    parser = Parser(
        prog="scripts/bench cute_dsl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--example", type=Path, metavar="FILE", help="CUTLASS's example of a dense GEMM"
    )
    source.add_argument("--exported", type=Path, metavar="DIR", help="kernels of --export")
    parser.add_argument("--export", type=Path, metavar="DIR", help="compile only, without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    if args.example and not args.example.is_file():
        raise ConfigError(f"{args.example} is not there: it is CUTLASS's dense_gemm_persistent.py")
    if args.export and not args.example:
        raise ConfigError("--export compiles the file that --example names")
    if args.export:
        os.environ["CUTE_DSL_ARCH"] = "sm_90a"
        Dsl(args.example).export(args.export)
        return 0
    need_gpu("--export")
    import torch

    dsl = Dsl(args.example) if args.example else Exported(args.exported)
    about = file_head.complete({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__})
    products = []
    for shape in SHAPES:
        products.append(measured(dsl, shape))
        found = {**about, **dsl.facts(), "products": products}
        if args.json is not None:
            write_json(args.json, found)
    print(text(found))
    return 0
