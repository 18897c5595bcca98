"""``scripts/bench invariance``: results of a row that do not depend on the other rows of its call.

``bits`` compares the bits of equal rows by every kernel: alone, among others, and in another order.
Neighbours are huge, infinite or undefined. Attention has other batches, chunks and page tables.
Kernels are grouped by their predicted order of additions (`Family.reduction_class`). Rows of one
class must have the same bits, also by different kernels.

``speed`` times what `tuner.deterministic` costs: the kernel of the layer's class (``tuner``) beside
the own kernel that answers without it (``own``). PyTorch's is beside them.

``operations`` compares the bits of PyTorch's operations that a model has beside its products.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, zip_longest
from typing import Any

from benchmarks import invariance_calls, invariance_operations, invariance_speed
from benchmarks.harness import Bench, Preset, Row
from benchmarks.own_plans import compile_specs
from benchmarks.rows import markdown
from tuner.config import Config
from tuner.families.invariance import ReductionClass
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
)

LAYERS = ((1024, 4096), (512, 2880), (256, 18944))
"""N and K that products are compared at: 2880 ends within a tile of 128, 18944 is a long sum."""
HEAD_DIMS = (128,)
OF_KIND = 2
"""Kernels of equal predicted classes and kinds of problems that are compared."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with one choice of its run-time parameters, at a kind of problem."""

    target: Target
    problem: Problem
    config: Config

    @property
    def label(self) -> str:
        sizes = ""
        if not isinstance(self.problem, AttentionProblem):
            sizes = f" N={self.problem.n},K={self.problem.k}"  # type: ignore[attr-defined]
        mode = ",".join(
            f"{name}={self.config[name]}"
            for name in ("decomposition_mode", "splits")
            if self.config.get(name, 1) != 1
        )
        return f"{self.target.label()}{f' {mode}' if mode else ''}{sizes}{self._kind}"

    @property
    def _kind(self) -> str:
        problem = self.problem
        if not isinstance(problem, AttentionProblem):
            kinds = getattr(problem, "epilogue", ""), getattr(problem, "scales", "")
            return "".join(f" {kind}" for kind in kinds if kind)
        kind = "paged" if problem.is_paged else "varlen" if problem.is_varlen else "dense"
        return f" D={problem.head_dim} {kind}{' causal' if problem.is_causal else ''}"

    @property
    def group(self) -> str:
        return f"{self.problem.op}{self._kind} {self.problem.dtype}"  # type: ignore[attr-defined]

    @property
    def predicted(self) -> ReductionClass | None:
        """The class that the parameters predict."""
        return self.target.family.reduction_class(self.problem, self.config)


def sampled() -> list[Kernel]:
    """Kernels of the portfolios and rules, `OF_KIND` of each predicted class. Before them some
    whose parameters no portfolio has: split and stream-K sums, and other ways to rescale.
    """
    counts = Counter[Any]()
    found: list[Kernel] = []
    for target in _targets():
        for kernel in _kernels(target):
            problem = kernel.problem
            key: tuple[Any, ...] = kernel.group, target.config.family, kernel.predicted
            if isinstance(problem, AttentionProblem):
                key = *key, target.config.get("packed_heads", 1) > 1
            else:
                key = *key, problem.n, problem.k, bool(target.config.get("swap_ab"))  # type: ignore[attr-defined]
            counts[key] += 1
            if counts[key] <= OF_KIND * (1 + (target.config.family == "gemm")):
                found.append(kernel)
    parts: dict[Any, list[Kernel]] = defaultdict(list)
    for kernel in {kernel.label: kernel for kernel in found}.values():
        parts[kernel.group, kernel.predicted].append(kernel)
    turns = zip_longest(*parts.values())  # a run that ends early has some of every class
    return [kernel for turn in turns for kernel in turn if kernel is not None]


def _targets() -> Iterator[Target]:
    from tuner.selection.kernels import targets
    from tuner.selection.portfolio import shipped
    from tuner.selection.rules import rules

    yield from _further()
    for portfolio in shipped():
        if portfolio.gpu == DEFAULT_GPU:
            yield from filter(_is_compared, targets(portfolio))
    for rule in rules(("gemm", "grouped_gemm")):
        yield from filter(_is_compared, rule.targets())


def _is_compared(target: Target) -> bool:
    problem: Any = target.problem
    if isinstance(problem, AttentionProblem):
        is_plain = not (problem.modifiers or problem.is_windowed or problem.softcap)
        return (
            problem.dtype == "bfloat16"
            and is_plain
            and not problem.has_sinks
            and problem.head_dim in HEAD_DIMS
        )
    if isinstance(problem, GemmProblem):
        is_linear = (problem.layout_a, problem.layout_b) == ("row", "col")
        return is_linear and problem.epilogue in ("", "bias_gelu_tanh") and _is_short(problem.dtype)
    return _is_short(problem.dtype)


def _is_short(dtype: str) -> bool:
    return dtype != "float16"


def _further() -> Iterator[Target]:
    """Kernels that no portfolio has."""
    plain, attention = (
        GemmProblem(64, 512, 1024, dtype="bfloat16"),
        AttentionProblem(
            seqlen_q=256, seqlen_kv=256, head_dim=128, heads_q=4, heads_kv=4, dtype="bfloat16"
        ),
    )
    cutlass: dict[str, Any] = {
        **{"tile_m": 128, "tile_n": 128, "tile_k": 64, "cluster_m": 1, "cluster_n": 1},
        **{"kernel_schedule": "TmaWarpSpecializedCooperative", "swap_ab": False},
        **{"epilogue_schedule": "TmaWarpSpecializedCooperative", "tile_scheduler": "StreamK"},
        **{"raster_order": "AlongN", "max_swizzle_size": 1},
    }
    modes: tuple[dict[str, Any], ...] = (
        {"decomposition_mode": "SplitK", "splits": 2},
        {"decomposition_mode": "SplitK", "splits": 4},
        {"decomposition_mode": "StreamK"},
    )
    for more in modes:
        yield Target(Config("gemm", {**cutlass, **more}), plain)
    for swap_ab, split_k in ((True, 1), (False, 1), (True, 2)):
        params: dict[str, Any] = {
            "swap_ab": swap_ab,
            "tile_m": 64,
            "tile_n": 64,
            "stages": 6,
            "split_k": split_k,
        }
        launch: dict[str, Any] = {
            "blocks_per_sm": 1,
            "raster_order": "AlongM",
            "max_swizzle_size": 1,
            "pdl": True,
        }
        yield Target(Config("cluster_gemm", {**params, **launch}), plain)
    params = {
        **{"warp_groups": 2, "tile_n": 128, "kv_stages": 2, "score_buffers": 1},
        **{"early_exp": 50, "ping_pong": True, "q_in_registers": False, "persistent": True},
        **{"blocks_per_sm": 1, "splits": 1, "pdl": True, "rescale": "lazy"},
    }
    yield Target(Config("fused_attention", params), attention)
    parts: dict[str, Any] = {
        **{"warp_groups": 1, "tile_n": 128, "kv_stages": 3, "score_buffers": 1},
        **{"early_exp": 0, "q_in_registers": False, "persistent": False},
        **{"blocks_per_sm": 1, "splits": 1, "pdl": True, "split_keys": 512},
    }
    paged = replace(attention, is_causal=True, page_size=64, layout="bshd")
    for problem, groups in product((attention, paged), (1, 2)):
        several = {"ping_pong": False} if groups > 1 else {}
        shape = {"warp_groups": groups, "packed_heads": 4, **several}
        grouped = replace(problem, heads_kv=1)
        yield Target(Config("fused_attention", {**parts, **shape}), grouped)


def _kernels(target: Target) -> Iterator[Kernel]:
    """The kernel at the sizes that are compared: undivided, and attention also by two splits."""
    problem: Any = target.problem
    if not isinstance(problem, AttentionProblem):
        for n, k in LAYERS:
            sizes = {"groups": 4} if isinstance(problem, GroupedGemmProblem) else {}
            yield Kernel(target, replace(problem, m=64, n=n, k=k, **sizes), _called(target))
        return
    yield Kernel(target, problem, Config(target.config.family, _whole(target.config)))
    if target.config.get("combine") == "kernel" and not problem.is_paged:
        yield Kernel(
            target, problem, Config(target.config.family, {**target.config.params, "splits": 2})
        )


def _called(target: Target) -> Config:
    if "splits" in target.config.params or target.config.get("decomposition_mode"):
        return target.config
    return target.family.called(target.problem, target.config, 1)


def _whole(config: Config) -> dict[str, Any]:
    """A kernel's parameters without splits."""
    return {**{k: v for k, v in config.params.items() if k != "combine"}, "splits": 1}


_records: dict[Any, Any] = {}
"""Rows of each kind of problem and predicted class, by the kernels of this process."""


@cache
def _subject(kind: Any, problem: Any, is_grouped: bool) -> Any:
    from tuner.runtime import bits

    if isinstance(problem, AttentionProblem):
        return bits.Sequences(problem, is_grouped=is_grouped)
    return bits.ProductRows(problem)


def measure(kernel: Kernel, _: Namespace) -> Row:
    """Rows that differ from the same rows of this kernel, and of the class's kernels before."""
    from tuner.runtime import bits
    from tuner.runtime.call import devices

    problem: Any = kernel.problem
    is_grouped = int(kernel.config.get("packed_heads", 1)) > 1
    subject = _subject(kernel.group, problem, is_grouped)
    found = bits.outcome(
        kernel.config, subject.views(), invariance_calls.planned, devices.gpu_of(0)
    )
    layer = () if isinstance(problem, AttentionProblem) else (problem.n, problem.k)
    group = " ".join(word for word in kernel.group.split() if word not in _SHARED)
    record = _records.setdefault((group, layer, kernel.predicted), bits.Recorded())
    crossed, cross_differing = record.merge(found.recorded)
    reason = next(iter(found.refused.values()), "")
    return {
        "figures": {
            "class": kernel.predicted.label() if kernel.predicted else "none",
            **{"views": found.views, "compared": found.compared, "differing": found.differing},
            **{"crossed": crossed, "cross_differing": cross_differing},
            **{"at": found.at[:6], "digests": found.recorded.digests()},
            **{"refused": len(found.refused), "reason": reason[:200], "layer": list(layer)},
        },
        "wrong": ["tuner"] * bool(kernel.predicted and (found.differing or cross_differing)),
    }


_SHARED = ("dense", "varlen", "paged", "causal")
"""Kinds of attention whose rows are compared with each other's."""


def line(row: Row) -> str:
    """One kernel: rows that differ."""
    one = row["figures"]
    text = f"{row['case']}: {one['class']}: {one['differing']} of {one['compared']} rows differ"
    text += f", of the class {one['cross_differing']} of {one['crossed']}"
    text += f"; {one['refused']} views refused ({one['reason']})" if one["refused"] else ""
    return text + (f"; at {', '.join(one['at'])}" if one["at"] else "")


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each kind of problem and predicted class."""
    parts: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "figures" in row:
            parts[row["group"], row["figures"]["class"]].append(row["figures"])
    heads = ["class", "kernels", "rows", "differ", "between kernels", "differ", "patterns"]
    lines = [["group", *heads]]
    for (group, name), mine in parts.items():
        sums = [str(sum(one[key] for one in mine)) for key in _COUNTS]
        lines.append([group, name, str(len(mine)), *sums, str(_patterns(mine))])
    return markdown(lines)


_COUNTS = ("compared", "differing", "crossed", "cross_differing")


def _patterns(figures: Iterable[Mapping[str, Any]]) -> int:
    """Most different bits of the same first rows."""
    seen: dict[Any, set[str]] = defaultdict(set)
    for one in figures:
        for name, digest in one["digests"].items():
            seen[tuple(one["layer"]), name].add(digest)
    return max(map(len, seen.values()), default=0)


def compile_sampled(_: Namespace) -> None:
    """Build the kernels that are compared."""
    compile_specs(
        spec
        for kernel in sampled()
        for spec in kernel.target.family.kernels(kernel.problem, kernel.config).values()
    )


def _smoke() -> Kernel:
    problem = GemmProblem(64, 64, 128, dtype="bfloat16")
    return Kernel(target := next(_further()), problem, target.config)


BENCH = Bench(
    "invariance",
    __doc__,
    {
        "bits": Preset(
            "bits of rows by kernels of each order of additions",
            *(lambda _: sampled(), measure),
            line=line,
            table=table,
            limit_s=40.0,
            smoke=_smoke(),
            compile=compile_sampled,
        ),
        "speed": Preset(
            "what the mode costs over own kernels without it",
            *(lambda _: invariance_speed.timed(), invariance_speed.compare),
            line=invariance_speed.line,
            table=invariance_speed.table,
            limit_s=60.0,
            smoke=invariance_speed.SMOKE,
            compile=invariance_speed.compile_timed,
        ),
        "operations": Preset(
            "bits of rows by PyTorch's operations beside products",
            *(invariance_operations.operations, invariance_operations.compare),
            line=invariance_operations.line,
            table=invariance_operations.table,
            smoke=invariance_operations.Operation("softmax"),
        ),
    },
)
