"""``scripts/bench population``: calls of public models by the tuner, PyTorch and its peers.

`tuner.problem.population` draws the calls of ``models``; each is made as its model makes it.
Contenders are `tuner.attention`, `tuner.linear` or `tuner.swiglu`; PyTorch's own choice; PyTorch
under `tuner.enable`; and cuDNN, FlashAttention-3 and -4, cuBLAS and cuBLASLt. Outputs are compared
with fp32 before the timing. ``--list`` also prints what `tuner lookup` answers to each call.
``own_calls`` are calls of models that make selections, which own kernels answer: their times make
`tuner fit corrections`.
"""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import rows
from benchmarks.harness import Bench, Preset, Row, add_answers, ratio_table
from benchmarks.population_kernels import (
    FP8,
    FP8_SMOKE,
    SUSTAINED,
    SUSTAINED_SMOKE,
    compile_fp8,
    fp8_measured,
    loads_line,
    loads_table,
    sustained_measured,
)
from benchmarks.population_long import LONG, compile_long, long_measured, long_table
from benchmarks.population_long import SMOKE as LONG_SMOKE
from benchmarks.population_masks import MASKED, masked_measured
from benchmarks.population_masks import SMOKE as MASK_SMOKE
from benchmarks.population_peers import SMOKE as PEER_SMOKE
from benchmarks.population_peers import peer_cases, peer_measured
from benchmarks.population_widths import CASES as WIDTHS
from benchmarks.population_widths import SMOKE as WIDTH_SMOKE
from benchmarks.population_widths import compile_widths
from benchmarks.population_widths import measured as width_measured
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.families.by_operation import AttentionDomain
from tuner.hardware import Gpu
from tuner.problem import GemmProblem, Problem, SwigluProblem
from tuner.problem import listing as problem_listing
from tuner.problem.population import (
    HALF_TYPES,
    MAX_BYTES,
    MAX_FLOPS,
    ModelCall,
    draw,
    linears,
    subset,
)
from tuner.selection.choice import Selection
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu, lookup
from tuner.store.entry import is_vendor

NOT_POSED = "not posed"
"""The runtime reads no problem off such tensors, and looks none up."""
LAYER_MODELS = (
    *("bert-base", "bloom-7b1", "gemma-2-9b", "gpt2", "llama-2-13b", "llama-2-7b", "mpt-7b"),
    *("olmo-2-7b", "qwen2.5-7b", "vit-base-16"),
)
"""Held-out models of text and vision."""
LAYER_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEW_ROWS, OWN_ROWS = LAYER_ROWS[:5], (32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
SMALL_BYTES = 12e6
"""Weights up to here are left out of `own_calls` at few rows: they stay in the L2."""
OWN_SEED, OWN_DRAWN, MAX_US = "calibration of 27 November", 6000, 3000.0
"""The draw of `own_calls`' attention, and the longest expected time of a call."""
MOST = {"gemm": 40, "attention": 30}
"""Most calls of a domain of `own_calls`."""
OFTEN = {"gemm": (2, ("M to 16", "M to 256", "M above 256")), "attention": (3, ("one query",))}
"""Domains, by the ends of their labels, that have so many times as many calls."""
WORST = 10
OWN = "own decision", "selection"
"""Kinds of answers by own kernels."""


@dataclass(frozen=True)
class DrawnCall:
    """A call of a model."""

    call: ModelCall

    @property
    def label(self) -> str:
        return self.call.label

    @property
    def group(self) -> str:
        return "attention" if self.call.views else "products"


def measure(case: DrawnCall, _: Namespace) -> Row:
    """Kind of answer, errors, and times beside PyTorch and its peers."""
    from benchmarks.population_calls import measured

    call = case.call
    row = measured(call, "cuda")
    return {**row, "model": call.model, "problem": call.problem.to_json()}


def models_drawn(args: Namespace) -> list[DrawnCall]:
    """The seed's calls of the models of ``--models``."""
    calls = draw(args.seed, args.count, subset(args.models))
    return _cases(call for call in calls if not args.op or call.problem.op in args.op.split(","))


def _cases(calls: Iterable[ModelCall]) -> list[DrawnCall]:
    """Calls with labels of their own."""
    return list({call.label: DrawnCall(call) for call in calls}.values())


def layers_of(
    names: Sequence[str], counts: Sequence[int] = LAYER_ROWS, max_bytes: float = math.inf
) -> list[ModelCall]:
    """Calls of the models' linear layers, those of equal sizes once, in an order by hash.

    Args:
        names: models, as `subset` takes them.
        counts: numbers of rows.
        max_bytes: most bytes of a layer's weights, 2 for each element.

    Raises:
        ConfigError: when a model is not known.
    """
    calls: dict[str, ModelCall] = {}
    for model in subset(",".join(names)):
        dtype = HALF_TYPES[0] if model.dtype == "float32" else model.dtype
        for stack in model.stacks:
            for name, (n, k, epilogue) in linears(stack).items():
                for m in counts if 2 * n * k <= max_bytes else ():
                    problem: Problem = (
                        SwigluProblem(m, n, k, dtype=dtype)
                        if name == "swiglu"
                        else GemmProblem(m, n, k, dtype=dtype, epilogue=epilogue)
                    )
                    call = ModelCall(model.name, stack.name, name, 1, problem)
                    if call.bytes <= MAX_BYTES and problem.flops <= MAX_FLOPS:
                        calls.setdefault(call.key, call)
    return sorted(calls.values(), key=lambda call: hashlib.sha256(call.key.encode()).hexdigest())


def own_calls(op: str, gpu: Gpu) -> dict[str, list[ModelCall]]:
    """Calls that a selection answers by an own kernel, by the label of their domain.

    Args:
        op: ``gemm`` (gated products among them) or ``attention``.
        gpu: GPU whose selections are asked.
    """
    portfolios = {one.op: one for one in serving(shipped(), gpu)}
    calls: dict[str, dict[str, ModelCall]] = defaultdict(dict)
    for call in _making_products() if op == "gemm" else _making_attention():
        selection = _chosen(call, portfolios)
        if selection is not None and (op == "gemm" or _is_plain(selection)):
            calls[selection.domain.label()].setdefault(call.key, call)
    return {label: list(some.values()) for label, some in calls.items()}


def by_turns(op: str, calls: Mapping[str, Sequence[ModelCall]]) -> list[ModelCall]:
    """At most `MOST` turns of a domain's calls, by turns over the domains."""
    often, ends = OFTEN[op]
    turns = list[ModelCall]()
    for turn in range(MOST[op]):
        for label in sorted(calls):
            width = often if label.endswith(ends) else 1
            turns += calls[label][turn * width : (turn + 1) * width]
    return turns


def _making_products() -> Iterator[ModelCall]:
    names = [model.name for model in subset("making")]
    yield from layers_of(names, OWN_ROWS)
    small = {call.key for call in layers_of(names, FEW_ROWS, SMALL_BYTES)}
    for call in layers_of(names, FEW_ROWS):
        if call.key not in small and call.problem.op == "gemm":
            yield call


def _making_attention() -> Iterator[ModelCall]:
    for call in draw(OWN_SEED, OWN_DRAWN, subset("making")):
        if call.views and not call.mask:
            yield call


def _is_plain(selection: Selection) -> bool:
    """Few queries or causal prompts, without a window, a soft cap or a mask."""
    domain = selection.domain
    assert isinstance(domain, AttentionDomain)
    if domain.has_softcap or domain.operand or domain.mask == "windowed":
        return False
    return domain.phase != "prompt" or domain.mask == "causal"


def _chosen(call: ModelCall, portfolios: Mapping[str, Portfolio]) -> Selection | None:
    """The selection of an own kernel; None where PyTorch's is chosen or the call is long."""
    from benchmarks.population_tensors import posed

    try:
        problem = posed(call)
    except ConfigError:
        return None
    selection = portfolios[problem.op].select(problem)
    if selection is None or selection.expected_us > MAX_US:
        return None
    return selection if next(selection.own(), None) else None


def listing(cases: Sequence[DrawnCall], args: Namespace) -> Iterable[str]:
    """Every call with what lookup answers on ``--gpu``, then the counts; or the problems."""
    if args.problems:
        yield problem_listing(dict.fromkeys(case.call.problem for case in cases)).rstrip("\n")
        return
    gpu, counts = find_gpu(args.gpu), Counter[tuple[str, ...]]()
    for case in cases:
        kind, detail = looked_up(case.call, gpu)
        yield f"{case.label}  [{kind}{': ' + detail if detail else ''}]"
        counts[case.group, kind, detail if kind == NOT_POSED else ""] += 1
    yield ""
    for (operation, kind, reason), count in sorted(counts.items()):
        share = count / sum(n for key, n in counts.items() if key[0] == operation)
        yield f"{count:5d} {share:6.1%}  {operation}, {kind}{': ' + reason if reason else ''}"


def looked_up(call: ModelCall, gpu: Gpu) -> tuple[str, str]:
    """Kind of lookup result for the problem that the runtime reads off the call's tensors, and a
    reason or a source.
    """
    from benchmarks.population_tensors import posed

    try:
        problem = posed(call)
    except ConfigError as exc:
        return NOT_POSED, str(exc)
    answer = lookup(problem, gpu=gpu)
    if answer is None:
        return "nothing known", ""
    config = answer.candidates[0].config
    by = f"PyTorch's {config.get('kernel')}" if is_vendor(config) else "own kernel"
    return f"{answer.kind}, {by}", "" if answer.exact else answer.entry.problem.label()


def answers_table(measured: Sequence[Row]) -> list[str]:
    """Ratios by operation and by who answered, the worst calls, and reasons of refusals."""
    answered = sorted(
        ({**row, "group": f"{row['group']}, {row.get('answered', 'lost')}"} for row in measured),
        key=lambda row: str(row["group"]),
    )
    own = sum(row.get("answered") in OWN for row in measured) / max(1, len(measured))
    lines = [*ratio_table(measured), "", *ratio_table(answered), "", f"own share {own:.0%}"]
    enabled = [
        {**row, "us": {**row["us"], "tuner": row["us"]["tuner enabled"]}, "group": "tuner.enable"}
        for row in measured
        if "tuner enabled" in row.get("us", {})
    ]
    lines += ["", *ratio_table(enabled)] if enabled else []
    timed = [(ratio, row) for row in measured if (ratio := rows.over_fastest(row)) is not None]
    lines += ["", "worst to the fastest:", ""]
    for ratio, row in sorted(timed, key=lambda pair: pair[0])[:WORST]:
        lines.append(f"- {ratio:.3f}, {row['us']['tuner']:.1f} us, {row['case']}")
    refused = Counter(row["reason"] for row in measured if row.get("answered") == "refused")
    lines += ["", *(f"refused {n} times: {reason}" for reason, n in refused.most_common())]
    return lines + [f"lost: {row['case']}: {row['lost']}" for row in measured if "lost" in row]


def options(parser: Parser) -> None:
    """Options of the draws."""
    parser.add_argument("--count", type=int, default=400, help="calls to draw (default 400)")
    parser.add_argument(
        "--models", default="held-out", help="held-out, making, all, or names with commas between"
    )
    parser.add_argument("--op", help="only calls of these operations, as gemm,swiglu")
    parser.add_argument("--gpu", default="H200", help="GPU whose selections are asked")
    add_answers(parser)
    parser.add_argument(
        "--problems", action="store_true", help="with --list: print problems for `tuner sweep`"
    )


SMOKE = DrawnCall(ModelCall("smoke", "layers", "up", 1, GemmProblem(9, 64, 32, dtype="bfloat16")))
BENCH = Bench(
    "population",
    __doc__,
    {
        "models": Preset(
            "calls drawn from public models",
            *(models_drawn, measure),
            table=answers_table,
            limit_s=120.0,
            smoke=SMOKE,
            listing=listing,
        ),
        "layers": Preset(
            "the linear layers of ten held-out models at 1 to 8192 rows",
            *(lambda _: _cases(layers_of(LAYER_MODELS)), measure),
            table=answers_table,
            limit_s=60.0,
            smoke=SMOKE,
            listing=listing,
        ),
        "own_calls": Preset(
            "calls that own kernels answer, of models that make selections (--op)",
            *(lambda a: _cases(_own_by_turns(a)), measure),
            table=answers_table,
            limit_s=40.0,
            smoke=SMOKE,
            listing=listing,
        ),
        "fp8_attention": Preset(
            "built kernels of e4m3 beside FlashAttention-3's serving build and cuDNN's plans",
            *(lambda _: FP8, fp8_measured),
            smoke=FP8_SMOKE,
            compile=lambda _: compile_fp8(FP8),
        ),
        "sustained": Preset(
            "long causal attention beside FlashAttention-3, in bursts and at the power limit",
            *(lambda _: SUSTAINED, sustained_measured),
            line=loads_line,
            table=loads_table,
            smoke=SUSTAINED_SMOKE,
        ),
        "long": Preset(
            "large attention by several loop orders, beside cuDNN and FlashAttention-3",
            *(lambda _: LONG, long_measured),
            table=long_table,
            smoke=LONG_SMOKE,
            compile=lambda _: compile_long(LONG),
        ),
        "masks": Preset(
            "block-sparse masks beside compiled FlexAttention and dense masks",
            *(lambda _: MASKED, masked_measured),
            smoke=MASK_SMOKE,
        ),
        "widths": Preset(
            "heads wider than 256, and keys of 192 with values of 128, beside cuDNN's plans",
            *(lambda _: WIDTHS, width_measured),
            line=rows.rates_line,
            smoke=WIDTH_SMOKE,
            compile=lambda _: compile_widths(WIDTHS),
        ),
        "peers": Preset(
            "peers at the problems of portfolios, for `tuner fit peers` (--op)",
            *(peer_cases, peer_measured),
            limit_s=60.0,
            smoke=PEER_SMOKE,
        ),
    },
    options,
)


def _own_by_turns(args: Namespace) -> list[ModelCall]:
    gpu, wanted = find_gpu(args.gpu), args.op.split(",") if args.op else MOST
    return [call for op in wanted for call in by_turns(op, own_calls(op, gpu))]
