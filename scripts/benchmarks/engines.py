"""Engines that serve requests: each attention in a process of its own, and the runs take turns.

Models have the shapes of Llama-3.2-1B and Llama-3-8B and random weights. All engines of a model
start together; each run asks all of them in a shuffled order, while the others wait.

Tokens are greedy and compared with those of the engine's own attention. With random weights the
logits lie close together, and two correct kernels part at some token.

- ``vllm``: vLLM's offline engine by its own kernels (``vllm``), with the plug-in's attention
  (``tuner``), and with its linear layers too (``tuner all``). In ``vllm mode`` and ``tuner mode``
  results must not depend on the batch: a request's bits are compared alone and among 127 others.
  The cache's bytes are the same for all. ``8b-fp8`` has e4m3 weights with factors of blocks, and
  ``moe`` 32 of the 48 layers of Qwen3-30B-A3B.
- ``ranks``: vLLM's engine over two GPUs, a rank each, and its calls beside those of one rank.
- ``sglang``: SGLang's model runner in the same ways, without its scheduler and server. Tokens that
  part from its own are told with the gap between the two largest logits there: zero is a tie.
- ``attention``: SGLang's attention of a captured step alone.
- ``batching``: Transformers' continuous batching. FlashAttention and the tuner have CUDA graphs and
  asynchronous steps there, `sdpa` has neither.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks import engines_attention, engines_child
from benchmarks.child import Worker
from benchmarks.engines_child import ANSWERS, RUN, START, Server
from benchmarks.engines_servers import (
    ALL,
    OPTIONS,
    TUNER_MODE,
    VLLM,
    VLLM_MODE,
    Batching,
    Load,
    Vllm,
    model_folder,
)
from benchmarks.engines_sglang import SGLANG, Sglang, parting
from benchmarks.harness import Bench, Preset, Row
from benchmarks.own_plans import build
from benchmarks.rows import TUNER, markdown
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure import device

SDPA = "sdpa"
BATCHING = {
    SDPA: "torch",
    TUNER: "torch",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn",
}
"""Attention of Transformers, and the module that it needs."""
DENSE = "8b", "1b"
BUILDS = (VLLM, "0", (*DENSE, "moe")), (VLLM, "1", DENSE), (SGLANG, "0", DENSE)
"""Engines whose kernels are built, ``TUNER_BATCH_INVARIANT``, and models."""
RANKS = 2
LIMIT_S, WHOLE_S = 240.0, 3600.0
"""Seconds for the start of an engine and for each of its runs; for all of a model's."""
FIGURES = ("first_token_ms", "token_ms", "graph_ms", "requests_per_s", "tokens_per_s")


@dataclass(frozen=True)
class Served:
    """A model whose engines serve; a load in place of the options'."""

    label: str
    requests: str = ""
    tokens: tuple[int, int] | None = None
    """Tokens of a prompt, and new ones."""

    @property
    def group(self) -> str:
        """The model."""
        return self.label

    def load(self, args: Namespace, requests: str) -> Load:
        """Requests of its engines, so many unless others are asked for."""
        counts = _numbers(self.requests or args.requests or requests)
        return Load(self.label, counts, *(self.tokens or (args.prompt, args.new)))


def models(_: Namespace) -> list[Served]:
    """Both models."""
    return [Served(model) for model in DENSE]


def models_of_vllm(args: Namespace) -> list[Served]:
    """These, one with factors of blocks, and one of experts."""
    return [*models(args), Served("8b-fp8"), Served("moe")]


def measure_vllm(case: Served, args: Namespace) -> Row:
    """Runs of vLLM's engine by its own kernels and the plug-in's."""
    _check("vllm")
    load = case.load(args, "1,16,128")
    options = args.compile, args.cache, args.eager
    modes = () if case.label in OPTIONS else (VLLM_MODE, TUNER_MODE)
    compared = VLLM, TUNER, ALL, *modes
    ways = [way for way in args.ways or compared if way in compared]
    return in_turns({way: Vllm(way, load, *options) for way in ways}, args)


def measure_ranks(case: Served, args: Namespace) -> Row:
    """Runs of vLLM's engine over two GPUs, and of one on one GPU.

    Raises:
        BenchmarkError: without two GPUs.
    """
    _check("vllm")
    if (gpus := device.count()) < RANKS:
        raise BenchmarkError(f"{gpus} GPU, {RANKS} are needed")
    load = case.load(args, "1,16,128")
    compared = VLLM, TUNER, ALL
    ways = [way for way in args.ways or compared if way in compared]
    options = args.compile, args.cache, args.eager
    servers = {way: Vllm(way, load, *options, RANKS) for way in ways}
    if ALL in ways:
        servers[f"{ALL}, one rank"] = Vllm(ALL, load, *options)
    return in_turns(servers, args)


def measure_sglang(case: Served, args: Namespace) -> Row:
    """Runs of SGLang's model runner by its own kernels and the plug-in's."""
    _check("sglang")
    load = case.load(args, "1,16,64")
    compared = SGLANG, TUNER, ALL
    ways = [way for way in args.ways or compared if way in compared]
    return in_turns({way: Sglang(way, load, args.eager) for way in ways}, args)


def measure_batching(case: Served, args: Namespace) -> Row:
    """Runs of Transformers' manager by each attention, those that are installed."""
    _check("transformers")
    load = case.load(args, "32")
    ways = [way for way in args.ways or BATCHING if way in BATCHING]
    absent = {way: f"{BATCHING[way]} is not installed" for way in ways if is_absent(way)}
    row = in_turns({way: Batching(way, load) for way in ways if way not in absent}, args)
    row["failed"] |= absent
    return row


def _check(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BenchmarkError(f"{package} is not installed")


def is_absent(way: str) -> bool:
    """True if the module that an attention needs is not there."""
    return importlib.util.find_spec(BATCHING[way]) is None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"'{text}' is wrong (allowed: whole numbers, as 1,16)") from exc
    if min(numbers) < 1:
        raise ConfigError(f"'{text}' is out of range (allowed: 1 and more)")
    return numbers


def in_turns(servers: Mapping[str, Server], args: Namespace) -> Row:
    """Start all engines together, then have each run ask every one of them in a shuffled order.

    Each tells its answers first. The end of their processes frees the caches' memory.

    Args:
        servers: engines by the name of their way.
        args: number of runs, and the seconds after which no engine is asked or waited for.

    Raises:
        BenchmarkError: without engines.
    """
    if not servers:
        raise BenchmarkError("none of the ways that --ways names is of this preset and installed")
    end = time.monotonic() + args.seconds
    with ExitStack() as stack:
        workers = {
            way: stack.enter_context(Worker(engines_child.command_of(server), LIMIT_S))
            for way, server in servers.items()
        }
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))

        def ask(way: str, question: int) -> Row:
            return workers[way].ask(question, min(LIMIT_S, max(1.0, end - time.monotonic())))

        asked = pool.map(lambda way: ask(way, START), workers)
        started = dict(zip(workers, asked, strict=True))
        failed = {way: facts["lost"] for way, facts in started.items() if "lost" in facts}
        runs: dict[str, list[Row]] = {way: [] for way in workers if way not in failed}
        answers: dict[str, Row] = {}
        for run in range(args.runs + 1):
            order = sorted(runs.keys() - failed.keys())
            random.Random(run).shuffle(order)
            for way in order:
                if time.monotonic() > end:
                    break
                answer = ask(way, RUN if run else ANSWERS)
                if "lost" in answer:
                    failed[way] = answer["lost"]
                elif run:
                    runs[way].append(answer)
                else:
                    answers[way] = answer
    return {
        "figures": {way: _medians(of) for way, of in runs.items() if of},
        "engines": {way: started[way] for way in runs},
        "answers": answers,
        "runs": {way: of for way, of in runs.items() if of},
        "failed": failed,
    }


def _medians(runs: Sequence[Row]) -> Row:
    """Median, smallest and largest of each figure, by number of requests."""
    by_count: dict[str, Row] = {}
    for count, first in runs[0]["concurrency"].items():
        for name in [name for name in first if name != "tokens"]:
            of = [run["concurrency"][count][name] for run in runs]
            by_count.setdefault(count, {})[name] = statistics.median(of), min(of), max(of)
    return by_count


def same_share(tokens: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """Share of the tokens up to the first of each request that differs."""
    same = 0
    for pairs in map(partial(zip, strict=True), tokens, wanted):
        same += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same / max(1, sum(map(len, wanted)))


def line(row: Row) -> str:
    """Output tokens a second of each way."""
    parts = [
        f"{way} {count}: {of['tokens_per_s'][0]:.0f} tokens/s"
        for way, by_count in row["figures"].items()
        for count, of in by_count.items()
        if "tokens_per_s" in of
    ]
    parts += [f"{way}: {why}" for way, why in row["failed"].items()]
    return f"{row['case']}: {', '.join(parts)}"


def table(rows: Sequence[Row]) -> list[str]:
    """Medians of the runs with their range, and each way's speed over the engine's own."""
    lines = [("model", "requests", "figure", "way", "runs", "median", "range", "speed")]
    said: list[str] = []
    for row in rows:
        for way, count, name, of in _figures(row):
            own = next(iter(row["figures"].values()))[count].get(name)
            ratio = of[0] / own[0] if own and own[0] else 0.0
            speed = ratio if name.endswith("per_s") or not ratio else 1 / ratio
            shown = ".0f" if of[0] >= 100 else ".2f"
            lines.append((
                *(row["case"], count, name, way, str(len(row["runs"][way]))),
                *(f"{of[0]:{shown}}", f"{of[1]:{shown}} to {of[2]:{shown}}"),
                f"{speed:.3f}" if speed else "",
            ))  # fmt: skip
        said += _said(row)
    return [*markdown(lines), "", *said]


def _figures(row: Row) -> Iterator[tuple[str, str, str, Sequence[float]]]:
    by_way = row.get("figures", {})
    for count in next(iter(by_way.values()), {}):
        for name, (way, by_count) in itertools.product(FIGURES, by_way.items()):
            if name in by_count[count]:
                yield way, count, name, by_count[count][name]


def _said(row: Row) -> Iterator[str]:
    """Answers, memory and share of the engine's own tokens, by way."""
    runs, answers = row.get("runs", {}), row.get("answers", {})
    for way, facts in row.get("engines", {}).items():
        last = runs[way][-1] if way in runs else {}
        seconds = f"{facts.get('import_s', 0):.0f} + {facts['ready_s']:.0f} s"
        parts = [f"{facts['attention']}, imported and ready in {seconds}"]
        if "memory_bytes" in last:
            parts.append(f"{last['memory_bytes'] / 2**30:.1f} GiB")
        for name, stats in (("start", facts), ("answers", answers.get(way, {})), ("run", last)):
            refused = [f"{count} {why}" for why, count in stats.get("refused", {}).items()]
            hits = f"{name}: {stats.get('hits', 0)} hits"
            parts.append(f"{hits}, refused: {'; '.join(refused)}" if refused else hits)
        parts += _compared(way, runs, answers)
        for rank, told in enumerate(last.get("ranks", ()), 1):
            tokens = "equal" if told["is_equal"] else "other"
            parts.append(f"rank {rank}: {told['hits']} hits, {tokens} tokens")
        yield f"- {row['case']}, {way}: {'. '.join(parts)}"
    yield from (f"- {row['case']}, {way}: {why}" for way, why in row.get("failed", {}).items())


def _compared(
    way: str, runs: Mapping[str, Sequence[Row]], answers: Mapping[str, Row]
) -> Iterator[str]:
    """Lines that compare a way's tokens with those of the engine's own kernels."""
    first = next(iter(answers), way)
    told, own = (answers.get(name, {}) for name in (way, first))
    if "same" in told:
        same = [f"{name} {'equal' if is_so else 'differs'}" for name, is_so in told["same"].items()]
        yield f"bits of a request: {', '.join(same)}"
    for count, of_way in told.get("told", {}).items() if way != first else ():
        requests, widest = parting(of_way, own["told"][count])
        yield f"{requests} of {count} requests part, gaps up to {widest:.3g}"
    if way in runs:
        last, base = runs[way][-1]["concurrency"], next(iter(runs.values()))[0]["concurrency"]
        for count, served in last.items():
            if "tokens" in served:
                share = same_share(served["tokens"], base[count]["tokens"])
                yield f"own tokens: {share:.1%} of {count}"


def compile_models(_: Namespace) -> None:
    """Build the kernels that answer the models' calls, also those of the batch-invariant mode."""
    for engine, mode, built in BUILDS:
        for model in built:
            with model_folder(model) as folder:
                build(
                    *("--model", f"{folder}/config.json", "--engine", engine),
                    TUNER_BATCH_INVARIANT=mode,
                )


def _options(parser: Parser) -> None:
    add = parser.add_argument
    ways = dict.fromkeys((VLLM, SGLANG, TUNER, ALL, VLLM_MODE, TUNER_MODE, *BATCHING))
    add("--ways", nargs="+", choices=tuple(ways), help="ways (default: the preset's)")
    add("--requests", metavar="N,N", help="at once (1,16,128; sglang 1,16,64; batching 32)")
    add("--prompt", type=int, default=1024, help="tokens of a prompt, of batching's longest")
    add("--new", type=int, default=128, help="tokens that each request generates")
    add("--runs", type=int, default=5, help="runs of each engine")
    add(
        "--seconds",
        type=float,
        default=WHOLE_S,
        help="limit of a model's runs; their answers so far count",
    )
    add("--compile", action="store_true", help="vLLM's defaults: torch.compile, piecewise graphs")
    add("--eager", action="store_true", help="vLLM and SGLang without graphs")
    add("--cache", choices=("auto", "fp8"), default="auto", help="elements of vLLM's cache")


SMALL = Served("tiny", "3", (32, 4))
_PRESETS = {
    "vllm": (
        "vLLM's offline engine by its own kernels and the plug-in's",
        models_of_vllm,
        measure_vllm,
    ),
    "ranks": ("vLLM's offline engine over two GPUs", models, measure_ranks),
    "batching": ("Transformers' continuous batching", models, measure_batching),
    "sglang": (
        "SGLang's model runner by its own kernels and the plug-in's",
        models,
        measure_sglang,
    ),
}
BENCH = Bench(
    "engines",
    __doc__,
    {
        **{
            name: Preset(text, cases, measure, line, table, WHOLE_S, SMALL, compile=compile_models)
            for name, (text, cases, measure) in _PRESETS.items()
        },
        "attention": Preset(
            "SGLang's attention of a captured step alone",
            engines_attention.decodings,
            engines_attention.measure,
            smoke=engines_attention.Decoding(64, 3),
        ),
    },
    _options,
)
