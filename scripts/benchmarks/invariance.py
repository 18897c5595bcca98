"""``scripts/bench invariance``: cost of `tuner.deterministic`.

``speed`` times the kernel of the layer's class (``tuner``) beside the own kernel that answers
without the mode (``own``). PyTorch's is beside them, and vLLM's batch-invariant kernels in Triton
where vLLM is installed. `tuner prove --invariance` compares bits.

``operations`` compares the bits of PyTorch's operations that a model has beside its products.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks import harness, invariance_operations
from benchmarks.harness import FAILURES, Bench, Contender, Preset, Row, first_line
from benchmarks.invariance_calls import VLLM
from benchmarks.own_plans import compile_specs
from benchmarks.rows import control, figures, markdown, over, values
from tuner.config import Config
from tuner.families import families
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem, GemmProblem, SwigluProblem

LAYERS: Mapping[str, tuple[int, int]] = {
    "llama-3-8b qkv": (6144, 4096),
    "llama-3-8b o": (4096, 4096),
    "llama-3-8b down": (4096, 14336),
    "llama-3-70b kv": (1024, 8192),
    "llama-3-1b qkv": (3072, 2048),
    "llama-3-1b down": (2048, 8192),
    "qwen-2.5-7b down": (3584, 18944),
}
"""N and K, by the models' config.json."""
ROWS = (1, 8, 64, 256, 1024, 8192)
BLOCKS = ((4096, 7168), (2112, 7168))
ATTENTION: tuple[tuple[int, int, int, bool], ...] = (
    *((1, 1, 1024, False), (1, 1, 8192, False), (16, 1, 2048, False), (64, 1, 1024, False)),
    *((16, 4, 2048, False), (1, 512, 512, True), (1, 2048, 2048, True), (4, 4096, 4096, True)),
)
"""Sequences, queries, keys and whether the mask is causal, of 32 query heads on 8."""
BUDGET_US = 1e5
MAX_ERROR = 1e-2
"""Largest relative error of the mode's kernel beside the other."""


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
    for m in ROWS:
        kind = f"M={m}" if m in (1, 8192) else "M between"
        linear = [GemmProblem(m, n, k, dtype="bfloat16") for n, k in LAYERS.values()]
        blocks = [GemmProblem(m, n, k, dtype=E4M3, scales="block") for n, k in BLOCKS]
        calls += [Timed(problem, f"linear {kind}") for problem in linear]
        calls += [Timed(problem, f"blocks {kind}") for problem in blocks]
        calls.append(Timed(SwigluProblem(m, 14336, 4096, dtype="bfloat16"), f"swiglu {kind}"))
    for (batch, queries, keys, is_causal), page_size in product(ATTENTION, (0, 64)):
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
    from tuner.families.by_operation import rule_of
    from tuner.selection import invariant
    from tuner.selection.portfolio import shipped

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


def compare(case: Timed, _: Namespace) -> Row:
    """Times of the own kernel with and without the mode, and PyTorch's of products."""
    import torch

    from benchmarks.invariance_calls import CallTensors

    with torch.inference_mode():
        tensors = CallTensors(case.problem)
        own, mine = pair(case.problem)
        kernels = {"own": own, **({} if own == mine else {"tuner": mine})}
        ways = tensors.ways(kernels)
        fit, failed, outs = [], {}, {}
        for name, make in ways.items():
            try:
                call = make()
                outs[name] = call(0).clone()
                torch.cuda.synchronize()
                fit.append(Contender(name, call))
            except FAILURES as exc:
                failed[name] = first_line(exc)
        times = harness.time_calls(fit, tensors.before, tensors.copies, BUDGET_US)
    kernels = {"own": own, "tuner": mine}
    is_wrong = {"own", "tuner"} <= outs.keys() and not (
        harness.distance(outs["tuner"], outs["own"]) < MAX_ERROR
    )
    if own == mine and "own" in times.us:
        times.us["tuner"] = times.us["own"]
    return {
        "us": times.us,
        "failed": {**failed, **times.failed},
        "kernels": {name: one.digest[:8] for name, one in kernels.items() if one is not None},
        "same": own == mine,
        "wrong": ["tuner"] if is_wrong else [],
    }


def line(row: Row) -> str:
    """Times, and the mode's speed over the own kernel's without it."""
    us = row.get("us", {})
    ratio = f"{us['own'] / us['tuner']:.3f}" if "own" in us and "tuner" in us else "none"
    parts = [f"{name} {one:.1f}" for name, one in us.items()]
    parts += [f"{name}: {why}" for name, why in row.get("failed", {}).items()]
    return f"{row['case']}: {', '.join(parts)}, of own {ratio}"


def table(rows: Sequence[Row]) -> list[str]:
    """The mode's speed over own kernels' without it, and over PyTorch's."""
    heads = [
        "over own",
        "at most 1",
        "worst",
        "below 0.85",
        "over PyTorch",
        "over vLLM's",
        "control",
    ]
    lines = [["group", "calls", *heads]]
    groups = dict.fromkeys(row["group"] for row in rows)
    parts = [(name, [row for row in rows if row["group"] == name]) for name in groups]
    for name, mine in [*parts, ("all", list(rows))]:
        ratios = _over(mine, "own")
        others = [figures(_over(mine, name))[0] for name in ("pytorch", VLLM)]
        slow = str(sum(ratio < SLOWEST for ratio in ratios))
        mean, worst = figures(ratios)
        capped = figures([min(1.0, ratio) for ratio in ratios])[0]
        noise = figures(values(mine, control))[0]
        lines.append([name, str(len(mine)), mean, capped, worst, slow, *others, noise])
    return markdown(lines)


def _over(rows: Sequence[Row], name: str) -> list[float]:
    return values(rows, lambda row: over(row, name))


SLOWEST = 0.85
"""Speed of the mode over own kernels' without it that no call should fall below."""


def compile_timed(_: Namespace) -> None:
    """Build the kernels that are timed."""
    compile_specs(spec for case in timed() for spec in specs_of(case))


BENCH = Bench(
    "invariance",
    __doc__,
    {
        "speed": Preset(
            "what the mode costs over own kernels without it",
            *(lambda _: timed(), compare),
            line=line,
            table=table,
            limit_s=60.0,
            smoke=Timed(GemmProblem(4, 64, 128, dtype="bfloat16"), "linear M between"),
            compile=compile_timed,
        ),
        "operations": Preset(
            "whose rows of PyTorch's operations have the same bits in any batch",
            *(lambda _: invariance_operations.operations(), invariance_operations.compare),
            line=invariance_operations.line,
            table=invariance_operations.table,
            limit_s=60.0,
            smoke=invariance_operations.Operation("softmax"),
        ),
    },
)
