"""Configs that other tuners chose, as hints: a search tries them first, and measures them as any.

They are never an answer. Two kinds of files are read:

- CSV files of CUTLASS's profiler, whose kernels' names are decoded to this project's parameters
- vLLM's tables of tiles, of fused experts and of products with factors of blocks: Triton's tiles,
  for which the nearest kernel here stands
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.base import document, output
from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families.collective import COOPERATIVE, NO_SMEM, PINGPONG, PLAIN, TMA_EPILOGUE
from tuner.hardware import Gpu
from tuner.problem import E4M3, GemmProblem, GroupedGemmProblem, Problem
from tuner.problem.base import check_extent

if TYPE_CHECKING:
    from tuner.search.family_search import FamilySearch

MAX_HINTS = 4
"""Hints that are kept of a problem, and most groups that a search begins with."""
MAX_DISTANCE = 2.0
"""Largest distance of a config from a hint: octaves of its sizes, and one for each other word."""
COLUMNS = ("Operation", "Status", "m", "n", "k", "Runtime")
"""Columns of a profiler's file that are needed."""
KERNEL = re.compile(
    r"cutlass3x_sm90_tensorop_(?:[a-z]+\d+x\d+x\d+)?gemm_(?P<a>[a-z0-9]+)_(?P<b>[a-z0-9]+)_\w+?"
    r"_(?P<tile>\d+x\d+x\d+)_(?P<cluster>\d+x\d+x\d+)_\d+_(?P<layout>[nt]{3})_align\d+"
    r"(?P<stream>_stream_k)?(?P<schedule>_warpspecialized(?:_pingpong|_cooperative)?)?"
    r"(?P<fast>_fp8_fastaccum)?(?:_epi_(?P<epilogue>tma|nosmem))?"
)
"""Names of CollectiveBuilder kernels, in both spellings (cutlass_library/gemm_operation.py)."""
_SCHEDULES = {"": PLAIN, "_pingpong": PINGPONG, "_cooperative": COOPERATIVE}
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "e4m3": E4M3}
_ROW, _COLUMN = "row", "col"
_LAYOUTS = {"t": _ROW, "n": _COLUMN}
_RASTERS = {"along_m": "AlongM", "along_n": "AlongN"}
_TABLE = re.compile(
    r"(?:E=(?P<experts>\d+),)?N=(?P<n>\d+)(?:,K=(?P<k>\d+))?,device_name=[^,]+"
    r"(?:,dtype=(?P<dtype>\w+))?(?:,block_shape=\[128, ?128\])?\.json"
)
"""Names of vLLM's tables."""
TOKEN_ROWS = 1, 2, 4, 8
"""Rows of a token among experts: tables count tokens, and do not say how many experts one has."""
_FORMAT = "cutlass-tuner hints 1"


@dataclass(frozen=True)
class Hint:
    """A config for a problem of some sizes, as far as another tuner says it."""

    op: str
    sizes: Mapping[str, Any]
    """Fields of the problem; ``inner`` is the width inside of an expert."""
    rows: int
    """M that it was chosen for."""
    params: Mapping[str, Value]
    """Parameters that are known; tiles without ``swap_ab`` count in either orientation."""
    rank: int
    """Place among the hints of its problem, the fastest first."""
    source: str
    """Name of its file."""

    def __post_init__(self) -> None:
        numbers = (self.rows, *self.sizes.values(), *self.params.values())
        for number in numbers:
            if isinstance(number, int) and not isinstance(number, bool):
                check_extent("a size", number)


def is_hints(path: Path) -> bool:
    """True for files by whose names `read` takes them."""
    return path.suffix == ".csv" or _TABLE.fullmatch(path.name) is not None


def read(path: Path) -> list[Hint]:
    """Hints of a file.

    Raises:
        ConfigError: when it cannot be read, or has none; says what was wanted.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"hints {path} cannot be read: {exc}") from exc
    table = _TABLE.fullmatch(path.name)
    hints = _profiled(path, text) if table is None else _tabled(path, table, text)
    if not hints:
        expected = "rows of kernels cutlass3x_sm90_... with Status success, row- or column-major"
        raise ConfigError(f"{path} has no hint (wanted: {expected})")
    return hints


def _profiled(path: Path, text: str) -> list[Hint]:
    """Hints of a profiler's file, the fastest `MAX_HINTS` of each problem."""
    rows = csv.DictReader(text.splitlines())
    try:
        listed = list(rows)
    except csv.Error as exc:
        raise ConfigError(f"{path} line {rows.line_num}: {exc} (wanted: CSV)") from exc
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)} of CUTLASS's profiler")
    by_problem: dict[str, list[tuple[float, dict[str, Any], dict[str, Value]]]] = {}
    for number, row in enumerate(listed, 2):
        kernel = KERNEL.fullmatch(row["Operation"] or "")
        if kernel is None or row["Status"] != "success":
            continue
        if kernel["a"] not in _DTYPES or kernel["b"] != kernel["a"]:
            continue
        try:
            runtime = float(row["Runtime"])
            if not 0 < runtime < math.inf:
                raise ValueError(f"{runtime} ms")
            sizes, params = _decoded(kernel, row)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{path} line {number}: {exc} (wanted: numbers)") from exc
        key = json.dumps(sizes, sort_keys=True)
        by_problem.setdefault(key, []).append((runtime, sizes, params))
    return [
        Hint(GemmProblem.op, sizes, sizes["m"], params, rank, path.name)
        for kernels in by_problem.values()
        for rank, (_, sizes, params) in enumerate(sorted(kernels, key=itemgetter(0))[:MAX_HINTS])
    ]


def _decoded(
    kernel: re.Match[str], row: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Value]]:
    """Sizes of the problem and parameters of a profiled kernel.

    A column-major result is that of swapped operands: the problem is the transposed product.
    """
    m, n, k = (int(row[name]) for name in "mnk")
    a, b, d = (_LAYOUTS[letter] for letter in kernel["layout"])
    tile, cluster = (
        [int(part) for part in kernel[name].split("x")] for name in ("tile", "cluster")
    )
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        **dict(zip(("cluster_m", "cluster_n"), cluster, strict=False)),
        "swap_ab": d == _COLUMN,
    }
    if kernel["schedule"] is not None:
        schedule = _SCHEDULES[kernel["schedule"].removeprefix("_warpspecialized")]
        params["kernel_schedule"] = schedule
        if kernel["epilogue"]:
            is_tma = kernel["epilogue"] == "tma"
            params["epilogue_schedule"] = TMA_EPILOGUE[schedule] if is_tma else NO_SMEM
        if schedule == COOPERATIVE:
            params["tile_scheduler"] = "StreamK" if kernel["stream"] else "Persistent"
    if (raster := row.get("raster_order")) in _RASTERS:
        params["raster_order"] = _RASTERS[raster]
    if (swizzle := row.get("swizzle_size") or "").isdecimal():
        params["max_swizzle_size"] = int(swizzle)
    if params["swap_ab"]:
        m, n = n, m
        a, b = ({_ROW: _COLUMN, _COLUMN: _ROW}[side] for side in (b, a))
    layouts = {"layout_a": a, "layout_b": b}
    dtype, batch = _DTYPES[kernel["a"]], int(row.get("batch_count") or 1)
    sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "batch": batch, "dtype": dtype, **layouts}
    if dtype == E4M3:
        sizes["fast_accum"] = kernel["fast"] is not None
    return sizes, params


def _tabled(path: Path, name: re.Match[str], text: str) -> list[Hint]:
    """Hints of a table of vLLM, one for each number of rows."""
    sizes: dict[str, Any]
    if name["experts"]:
        op, sizes = GroupedGemmProblem.op, {"groups": int(name["experts"]), "inner": int(name["n"])}
    else:
        op, sizes = GemmProblem.op, {"n": int(name["n"]), "k": int(name["k"]), "scales": "block"}
    if name["dtype"] not in (None, "fp8_w8a8"):
        raise ConfigError(f"{path} is of {name['dtype']} (allowed: fp8_w8a8, or no dtype)")
    if name["dtype"]:
        sizes["dtype"] = E4M3
    try:
        table = document.parse(text)
        return [
            Hint(
                *(op, sizes, int(rows)),
                {"tile_m": int(row["BLOCK_SIZE_M"]), "tile_n": int(row["BLOCK_SIZE_N"])},
                *(0, path.name),
            )
            for rows, row in table.items()
            if rows != "triton_version"
        ]
    except document.FAULTS as exc:
        expected = 'rows like "16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64}'
        raise ConfigError(f"{path} is not a table of vLLM (wanted: {expected}): {exc}") from exc


def file() -> Path:
    """The file of the hints that were imported."""
    return settings.cache_dir() / "hints.json"


def stored() -> list[Hint]:
    """Imported hints; none without the file.

    Raises:
        ConfigError: when the file is damaged.
    """
    try:
        data = document.parse(file().read_bytes())
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is not '{_FORMAT}'")
        return [Hint(**document.checked(Hint, row)) for row in data["hints"]]
    except FileNotFoundError:
        return []
    except document.FAULTS as exc:
        raise ConfigError(f"{file()} cannot be read (remove it and import again): {exc}") from exc


def add(hints: Sequence[Hint]) -> None:
    """Add hints to `file`, in the place of earlier ones of the same sources.

    Raises:
        ConfigError: when the file is damaged.
        StoreError: when it cannot be written.
    """
    sources = {hint.source for hint in hints}
    every = [*(hint for hint in stored() if hint.source not in sources), *hints]
    rows = ",\n".join(json.dumps(asdict(hint), sort_keys=True) for hint in every)
    text = f'{{"format": "{_FORMAT}", "hints": [\n{rows}\n]}}\n'
    output.write(file(), text, make_folder=True)


def first(
    problem: Problem, gpu: Gpu, members: Iterable[FamilySearch], hints: Sequence[Hint]
) -> list[Config]:
    """Configs to try first: for each hint of the problem the nearest of the search's spaces.

    Hints for the nearest number of rows count; of experts, of each of `TOKEN_ROWS`.
    """
    fitting = [hint for hint in hints if _fits(problem, hint)]
    rows, near = int(getattr(problem, "m", 1)), list[Hint]()
    for each in TOKEN_ROWS if isinstance(problem, GroupedGemmProblem) else (1,):
        nearest = min((_octaves(hint.rows * each, rows) for hint in fitting), default=0.0)
        near += [hint for hint in fitting if _octaves(hint.rows * each, rows) == nearest]
    configs: dict[Config, None] = {}
    spaces = [
        (member.family, config)
        for member in members
        if not member.family.is_vendor
        for group in member.groups.values()
        for config in group
    ]
    for hint in sorted(near, key=attrgetter("rank"))[:MAX_HINTS]:
        away = [
            (distance, family.predict_us(problem, config, gpu), place)
            for place, (family, config) in enumerate(spaces)
            if (distance := _distance(hint.params, config)) <= MAX_DISTANCE
        ]
        if away:
            configs.setdefault(spaces[min(away)[2]][1])
    return list(configs)


def _fits(problem: Problem, hint: Hint) -> bool:
    if hint.op != problem.op:
        return False
    sizes = dict(hint.sizes)
    inner = sizes.pop("inner", None)
    if isinstance(problem, GroupedGemmProblem) and inner is not None:
        sizes |= {} if problem.k == inner else {"n": 2 * inner}
    return all(getattr(problem, name, None) == value for name, value in sizes.items())


def _distance(params: Mapping[str, Value], config: Config) -> float:
    """Octaves between numbers and one for each other word, over the parameters of both."""
    own = dict(config.params)
    if own.get("swap_ab") and "swap_ab" not in params:
        own["tile_m"], own["tile_n"] = own["tile_n"], own["tile_m"]
    total = 0.0
    for name, value in params.items():
        if name in own and own[name] != value:
            both = (value, own[name])
            is_size = all(isinstance(one, int) and not isinstance(one, bool) for one in both)
            total += _octaves(*map(int, both)) if is_size else 1.0
    return total


def _octaves(size: int, other: int) -> float:
    return abs(math.log2(max(1, size) / max(1, other)))
