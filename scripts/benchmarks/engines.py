"""``scripts/bench engines``: vLLM's engine with its own attention, and with the tuner's plug-in.

The offline engine runs models of a public shape with random weights, in CUDA graphs. A shape's
engines start together, `--engines` of each way, every one in a process of its own; with
``--at-once`` those of all shapes do. The runs take turns: each of all ways in a shuffled order,
while the other engines wait. Figures of a run:

- prompt tokens a second
- for each concurrency: time to the first token, time of a further token, output tokens a second

``--steps`` adds passes that time the parts of each decoding step (`benchmarks.engine_steps`).

Greedy tokens are compared with those of vLLM's own attention. Random weights give logits that lie
close together, so a few tokens may differ. The agreement of two runs of vLLM's own attention is
printed beside it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import engine_steps, file_head
from benchmarks.child import Worker, answer_indices
from benchmarks.engine_report import FEW, PROMPTS, TUNER, VLLM, WAYS, report
from benchmarks.gpu import no_gpu
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError
from tuner.measure.device import detect

#: Llama 3.2 1B and Llama 3 8B, but for their vocabulary's last tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
VOCABULARY = 128_000
FEW_QUERIES = "16"
"""``TUNER_VLLM_QUERIES`` of the way `FEW`: decoding and speculation are served, prompts vLLM's."""
LIMIT_S = 240.0
PASSES = 3
PROMPT = 2048
"""Tokens of each of the `PROMPTS` prompts of the pass that measures them."""
#: One process, no network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WARM_TOKENS = 16
"""Prompt tokens of a request before the timed ones, from the second run on."""
START = 0
"""Index at which a worker starts its engine."""
STEPS, PROFILE = 10_000, 10_001
"""Indices at which a worker records a pass's steps, and profiles one."""
STEP_PASSES = 4
SPARE_TOKENS = 64
"""Tokens of a request beside its own in the cache: its last page, and the engine's reserve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape and way; 1 when a run has no figures.

    Raises:
        BenchmarkError: without vLLM or a GPU.
        ConfigError: when the results have no place.
    """
    args = _parser().parse_args(argv)
    if args.worker:
        return answer_indices(Engine(args).answer)
    if importlib.util.find_spec("vllm") is None:
        raise BenchmarkError("vllm is not installed: scripts/bench engines runs its offline engine")
    if detect() is None:
        raise no_gpu()
    if args.json:
        check_place(args.json)
    given = list(sys.argv[2:] if argv is None else argv)
    command = python_command("-m", "benchmarks", "engines", *given, "--worker")
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    head = {**file_head.complete({}), "options": _options(args)}
    shapes = list(dict.fromkeys(args.shape or sorted(SHAPES)))
    for together in [shapes] if args.at_once else [[shape] for shape in shapes]:
        for row in measured(together, command, args):
            (steps if "of" in row else rows).append(row)
            if args.json:
                write_json(args.json, {**head, "runs": rows, **({"steps": steps} if steps else {})})
    print(report(rows))
    if steps:
        print(engine_steps.report(steps))
    return int(any("lost" in row for row in (*rows, *steps)))


def measured(
    shapes: Sequence[str], command: Sequence[str], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The runs of shapes whose engines start together, as they end.

    Args:
        shapes: some of `SHAPES`.
        command: starts a worker that answers as `Engine` does; shape and way are added.
        args: as they are parsed.
    """
    ways = list(dict.fromkeys(args.ways or (VLLM, TUNER)))
    engines = min(args.engines, args.runs)
    places = list(itertools.product(shapes, range(engines), ways))
    with ExitStack() as stack:
        workers = {
            place: stack.enter_context(
                Worker([*command, "--of", place[0], "--way", place[2]], args.limit)
            )
            for place in places
        }
        _say(f"{', '.join(shapes)}, {len(places)} engines start ...")
        pool = stack.enter_context(ThreadPoolExecutor(len(places)))
        started = dict(zip(places, pool.map(lambda p: workers[p].ask(START), places), strict=True))
        for (shape, _, way), answer in started.items():
            _say(f"{shape}, {way}: {answer.get('lost') or answer}")
        for shape, (run, way) in itertools.product(shapes, runs(ways, args.runs)):
            place = shape, run % engines, way
            row = {"run": run, "shape": shape, "way": way, "engine": place[1], **started[place]}
            if "lost" not in row:
                _say(f"run {run}, {shape}, {way} ...")
                row |= workers[place].ask(run + 1)
            yield row
        if args.steps:
            for shape, (run, way) in itertools.product(shapes, runs(ways, STEP_PASSES + 1)):
                _say(f"steps {run}, {shape}, {way} ...")
                index = STEPS if run < STEP_PASSES else PROFILE
                found = workers[shape, 0, way].ask(index)
                yield {"shape": shape, "way": way, "of": {}, **found}


def _say(text: str) -> None:
    print(f"engines: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", action="append", choices=sorted(SHAPES), help="only this model; may be repeated"
    )
    parser.add_argument(
        "--ways", action="append", choices=WAYS, help=f"default: {VLLM} and {TUNER}"
    )
    parser.add_argument("--concurrency", type=int, action="append", help="default: 1, 16 and 128")
    parser.add_argument("--runs", type=int, default=5, help="runs of each shape and way")
    parser.add_argument("--engines", type=int, default=2, help="engines of each way")
    parser.add_argument(
        "--at-once", action="store_true", help="start the engines of all shapes together"
    )
    parser.add_argument(
        "--passes", type=int, default=PASSES, help="timed passes of a run, of which medians count"
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each request's prompt")
    parser.add_argument("--tokens", type=int, default=128, help="that each request generates")
    parser.add_argument(
        "--compile", action="store_true", help="vLLM's defaults: torch.compile, piecewise graphs"
    )
    parser.add_argument("--cache", choices=("auto", "fp8"), default="auto", help="its elements")
    parser.add_argument(
        "--pin", action="store_true", help="each run on one core, the same for all ways"
    )
    parser.add_argument(
        "--steps", action="store_true", help="at the end, time the parts of decoding steps"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for a start, and a run"
    )
    for name in ("--of", "--way"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = "prompt", "tokens", "compile", "engines", "cache", "passes", "pin"
    return {name: getattr(args, name) for name in names}


def runs(ways: Sequence[str], count: int) -> Iterator[tuple[int, str]]:
    """Run and way, in their order: each run has all ways, shuffled."""
    for run in range(count):
        every = list(ways)
        random.Random(run).shuffle(every)
        yield from ((run, way) for way in every)


class Engine:
    """One engine in this process: starts at the index `START`, and measures a run at each other.

    Args:
        args: as they are parsed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._counts = sorted(set(args.concurrency or (1, 16, 128)))
        self._generate: Generator | None = None
        self._engine: Any = None
        self._cores = sorted(os.sched_getaffinity(0))
        self._warm_tokens = 0
        """Prompt tokens of a request that warms the engine; 0: as many as the timed ones have."""

    def answer(self, index: int) -> dict[str, Any]:
        """The start's facts or a run's figures, or ``{"lost": reason}``."""
        from benchmarks.call_times import first_line

        try:
            if index == START:
                return self.start()
            if self._args.pin:  # this thread only: those that PyTorch started stay where they are
                os.sched_setaffinity(0, {self._cores[index % len(self._cores)]})
            return self.steps(index == PROFILE) if index in (STEPS, PROFILE) else self.run()
        except Exception as exc:  # an engine raises what it likes
            return {"lost": f"{type(exc).__name__}: {first_line(exc)}"}

    def start(self) -> dict[str, Any]:
        """Start the engine; facts of it."""
        way = self._args.way
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if way == FEW:
            os.environ["TUNER_VLLM_QUERIES"] = FEW_QUERIES
        import vllm

        import tuner
        from tuner.runtime.engines.vllm import register

        options = engine_options(self._args.of, self._counts, self._args)
        if way != VLLM:
            register()  # as the entry point does where the package is installed
            options["attention_backend"] = "CUSTOM"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config_of(self._args.of)))
            start = time.perf_counter()
            llm = vllm.LLM(folder, **options)
        self._generate = Generator(llm, vllm.SamplingParams)
        self._engine = llm.llm_engine
        return {
            "vllm": str(vllm.__version__),
            "attention": attention_of(llm),
            "ready_s": round(time.perf_counter() - start, 1),
            "captured": _stats(tuner.stats(reset=True)),
        }

    def run(self) -> dict[str, Any]:
        """The figures of one run."""
        import tuner

        generate = self._generate
        if generate is None:
            raise BenchmarkError("the engine did not start")
        generate(PROMPTS, self._warm_tokens or PROMPT, 1, 0)
        passes = range(1, self._args.passes + 1)
        took = statistics.median(generate(PROMPTS, PROMPT, 1, i)[0] for i in passes)
        found = {
            "prompt_tokens_per_s": PROMPTS * PROMPT / took,
            "concurrency": {
                str(count): _served(generate, count, self._args, self._warm_tokens)
                for count in self._counts
            },
            "eager": _stats(tuner.stats(reset=True)),
        }
        self._warm_tokens = WARM_TOKENS
        return found

    def steps(self, is_profile: bool) -> dict[str, Any]:
        """Parts of the steps of a pass at each concurrency; with kernels and functions instead."""
        generate, args = self._generate, self._args
        if generate is None:
            raise BenchmarkError("the engine did not start")
        found = {}
        for count in self._counts:
            one = functools.partial(generate, count, args.prompt, args.tokens, 1)
            generate(count, WARM_TOKENS, 2, 0)
            measure = engine_steps.profiled if is_profile else engine_steps.recorded
            found[str(count)] = measure(self._engine, one)
        return {"of": found}


def _served(
    generate: Generator, count: int, args: argparse.Namespace, warm_tokens: int
) -> dict[str, Any]:
    """Times of so many requests at once. Prompts are the same in every run and way."""
    generate(count, warm_tokens or args.prompt, 2, 0)
    firsts = [generate(count, args.prompt, 1, i)[0] for i in range(1, args.passes + 1)]
    wholes = [generate(count, args.prompt, args.tokens, i) for i in range(1, max(2, args.passes))]
    first, whole = statistics.median(firsts), statistics.median(took for took, _ in wholes)
    return {
        "first_token_ms": first * 1e3,
        "token_ms": (whole - first) / max(1, args.tokens - 1) * 1e3,
        "tokens_per_s": count * args.tokens / whole,
        "tokens": wholes[0][1],
    }


class Generator:
    """Requests to an engine: random prompts of one length, greedy tokens.

    Args:
        llm: vLLM's ``LLM``.
        sampling: its ``SamplingParams``.
    """

    def __init__(self, llm: Any, sampling: Any) -> None:
        self._llm, self._sampling = llm, sampling

    def __call__(
        self, count: int, length: int, tokens: int, seed: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds until all `count` requests have their `tokens`, and these."""
        draw = random.Random(f"{count},{length},{seed}")
        prompts = [
            {"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(length)]}
            for _ in range(count)
        ]
        params = self._sampling(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        found = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(one) for one in found] != [tokens] * count:
            raise BenchmarkError(f"the engine did not give {count} x {tokens} tokens")
        return took, found


def config_of(shape: str) -> dict[str, Any]:
    """Hugging Face's config of a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY + 256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": VOCABULARY,
        "eos_token_id": VOCABULARY + 1,
        "initializer_range": 0.02,
        "use_cache": True,
        **SHAPES[shape],
    }


def engine_options(shape: str, counts: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``LLM``, the same for all ways. The cache holds what the requests need, and no
    more: several engines share the GPU.
    """
    longest = max(PROMPT + 1, args.prompt + args.tokens)
    tokens = max(PROMPTS * longest, max(counts) * (args.prompt + args.tokens + SPARE_TOKENS))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": -(-longest // 1024) * 1024,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": max(counts),
        "gpu_memory_utilization": 0.01,  # of no meaning where the cache's bytes are given
        "kv_cache_memory_bytes": tokens * token_bytes(shape),
        "kv_cache_dtype": args.cache,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if not args.compile:
        sizes = sorted({*counts, *(2**i for i in range(max(counts).bit_length()))})
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size for size in sizes if size <= max(counts)],
        }
    return options


def token_bytes(shape: str) -> int:
    """Bytes of a token's keys and values."""
    config = config_of(shape)
    return 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def attention_of(llm: Any) -> str:
    """Classes of the attention layers, each with its count."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    names = [type(layer.impl).__qualname__ for layer in layers.values() if hasattr(layer, "impl")]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _stats(stats: Any) -> dict[str, Any]:
    return {"hits": stats.hits, "fallbacks": dict(stats.fallbacks), "errors": dict(stats.errors)}
