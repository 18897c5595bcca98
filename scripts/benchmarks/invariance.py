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

from benchmarks import harness, invariance_operations
from benchmarks.harness import FAILURES, Bench, Contender, Preset, Row, first_line
from benchmarks.own_plans import built_artifacts, compile_specs
from benchmarks.rows import control, figures, markdown, over, values
from tuner.config import Config
from tuner.families import families
from tuner.families.base import KernelSpec
from tuner.families.invariance import ReductionClass
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
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
    found = bits.outcome(kernel.config, subject.views(), planned, devices.gpu_of(0))
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


def planned(posed: Any, config: Config) -> Any:
    """The plan of a built kernel, or a text why there is none."""
    from tuner.measurement import Measurement, Provenance, Regime, Status
    from tuner.runtime.call import devices
    from tuner.runtime.call.plan import Plan, plan_of

    artifacts = _artifacts(posed.problem, config)
    if isinstance(artifacts, str):
        return artifacts
    facts = Regime(), Status.OK, Provenance.PREDICTED
    measurement = Measurement(
        posed.problem, config, devices.gpu_of(0), *facts, artifacts=dict(artifacts)
    )
    plan = plan_of(posed, measurement, 0)
    return plan if isinstance(plan, Plan) else plan.detail


_built: dict[str, Mapping[str, str] | str] = {}


def _artifacts(problem: Problem, config: Config) -> Mapping[str, str] | str:
    specs = families()[config.family].kernels(problem, config)
    key = " ".join(spec.key for spec in specs.values())
    if key not in _built:
        _built[key] = built_artifacts(specs)
    return _built[key]


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


SPEED_LAYERS: Mapping[str, tuple[int, int]] = {
    "llama-3-8b qkv": (6144, 4096),
    "llama-3-8b o": (4096, 4096),
    "llama-3-8b down": (4096, 14336),
    "llama-3-70b kv": (1024, 8192),
    "llama-3-1b qkv": (3072, 2048),
    "llama-3-1b down": (2048, 8192),
    "qwen-2.5-7b down": (3584, 18944),
}
"""N and K, by the models' config.json."""
SPEED_ROWS = (1, 8, 64, 256, 1024, 8192)
SPEED_BLOCKS = ((4096, 7168), (2112, 7168))
SPEED_ATTENTION: tuple[tuple[int, int, int, bool], ...] = (
    *((1, 1, 1024, False), (1, 1, 8192, False), (16, 1, 2048, False), (64, 1, 1024, False)),
    *((16, 4, 2048, False), (1, 512, 512, True), (1, 2048, 2048, True), (4, 4096, 4096, True)),
)
"""Sequences, queries, keys and whether the mask is causal, of 32 query heads on 8."""
BUDGET_US = 1e5


@dataclass(frozen=True)
class Timed:
    """A call with and without the mode."""

    problem: Any
    group: str

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()}"


def timed() -> list[Timed]:
    """Products of few and many rows, and decoding and prompts, dense and over pages."""
    calls = []
    for m in SPEED_ROWS:
        kind = f"M={m}" if m in (1, 8192) else "M between"
        linear = [GemmProblem(m, n, k, dtype="bfloat16") for n, k in SPEED_LAYERS.values()]
        blocks = [GemmProblem(m, n, k, dtype=E4M3, scales="block") for n, k in SPEED_BLOCKS]
        calls += [Timed(problem, f"linear {kind}") for problem in linear]
        calls += [Timed(problem, f"blocks {kind}") for problem in blocks]
        calls.append(Timed(SwigluProblem(m, 14336, 4096, dtype="bfloat16"), f"swiglu {kind}"))
    for (batch, queries, keys, is_causal), page_size in product(SPEED_ATTENTION, (0, 64)):
        problem = AttentionProblem(
            queries,
            keys,
            head_dim=128,
            batch=batch,
            heads_q=32,
            heads_kv=8,
            is_causal=is_causal or (page_size > 0 and queries > 1),
            dtype="bfloat16",
            layout="bshd" if page_size else "bhsd",
            page_size=page_size,
        )
        phase = "prompts" if queries > 64 else "decoding"
        calls.append(Timed(problem, f"{'pages' if page_size else 'dense'}, {phase}"))
    # Those with another kernel in the mode come first: a run may end early.
    return sorted(calls, key=lambda call: len(set(pair(call.problem))) == 1)


def pair(problem: Any) -> tuple[Config | None, Config | None]:
    """The own kernel that is expected to be fastest, and that of the layer's class."""
    from tuner.selection import invariant
    from tuner.selection.portfolio import shipped
    from tuner.selection.rules import rule_of

    if rule := rule_of(problem):
        usual, portfolio = rule.select(problem, DEFAULT_GPU), None
        own = None if usual is None else next(usual.own(), None)
    else:
        known = (one for one in shipped() if (one.op, one.gpu) == (problem.op, DEFAULT_GPU))
        selection = (portfolio := next(known)).select(problem)
        own = None if selection is None else next(selection.ranked(), None)
    # Over pages a single query of the mode has a causal mask.
    asked = replace(problem, is_causal=True) if getattr(problem, "page_size", 0) else problem
    found = invariant.select(asked, DEFAULT_GPU, portfolio)
    return own and own[1], found and found.expected[0][1]


def specs_of(case: Timed) -> Iterator[KernelSpec]:
    """Kernels of both."""
    own, mine = pair(case.problem)
    is_paged = bool(getattr(case.problem, "page_size", 0))
    for config, causal in ((own, False), (mine, True)):
        if config is not None:
            problem = case.problem
            if is_paged and causal:
                problem = replace(problem, is_causal=True)
            yield from families()[config.family].kernels(problem, config).values()


def compare_speed(case: Timed, _: Namespace) -> Row:
    """Times of the own kernel with and without the mode, and PyTorch's of products."""
    import torch

    from benchmarks.invariance_calls import CallTensors

    with torch.inference_mode():
        tensors = CallTensors(case.problem)
        own, mine = pair(case.problem)
        ways = tensors.ways({"own": own, **({} if own == mine else {"tuner": mine})})
        fit, failed = [], {}
        for name, make in ways.items():
            try:
                call = make()
                call(0)
                torch.cuda.synchronize()
                fit.append(Contender(name, call))
            except FAILURES as exc:
                failed[name] = first_line(exc)
        times = harness.time_calls(fit, tensors.before, tensors.copies, BUDGET_US)
    kernels = {"own": own, "tuner": mine}
    if own == mine and "own" in times.us:
        times.us["tuner"] = times.us["own"]
    return {
        "us": times.us,
        "failed": {**failed, **times.failed},
        "kernels": {name: one.digest[:8] for name, one in kernels.items() if one is not None},
        "same": own == mine,
    }


def speed_line(row: Row) -> str:
    """Times, and the mode's speed over the own kernel's without it."""
    us = row.get("us", {})
    ratio = f"{us['own'] / us['tuner']:.3f}" if "own" in us and "tuner" in us else "none"
    parts = [f"{name} {one:.1f}" for name, one in us.items()]
    parts += [f"{name}: {why}" for name, why in row.get("failed", {}).items()]
    return f"{row['case']}: {', '.join(parts)}, of own {ratio}"


def speed_table(rows: Sequence[Row]) -> list[str]:
    """The mode's speed over own kernels' without it, and over PyTorch's."""
    lines = [["group", "calls", "over own", "worst", "below 0.85", "over PyTorch", "control"]]
    groups = dict.fromkeys(row["group"] for row in rows)
    parts = [(name, [row for row in rows if row["group"] == name]) for name in groups]
    for name, mine in [*parts, ("all", list(rows))]:
        ratios = values(mine, lambda row: over(row, "own"))
        theirs = values(mine, lambda row: over(row, "pytorch"))
        slow = str(sum(ratio < SLOWEST for ratio in ratios))
        noise = figures(values(mine, control))[0]
        lines.append([name, str(len(mine)), *figures(ratios), slow, figures(theirs)[0], noise])
    return markdown(lines)


SLOWEST = 0.85
"""Speed of the mode over own kernels' without it that no call should fall below."""


def compile_timed(_: Namespace) -> None:
    """Build the kernels that are timed."""
    compile_specs(spec for case in timed() for spec in specs_of(case))


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
            *(lambda _: timed(), compare_speed),
            line=speed_line,
            table=speed_table,
            limit_s=60.0,
            smoke=Timed(GemmProblem(4, 64, 128, dtype="bfloat16"), "linear M between"),
            compile=compile_timed,
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
