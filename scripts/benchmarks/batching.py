"""``scripts/bench batching``: Transformers' continuous batching, requests and tokens a second.

A model with the shapes of Llama-3.2-1B or Llama-3-8B and random weights answers requests through
the manager behind `generate_batch`. Prompts differ in length; each request gets the same number of
new tokens. Each attention runs in a process of its own, with the engine's defaults for it. A first
pass captures the graphs and loads the kernels; the median of the others counts. With ``--at-once``
the processes start together, and their passes take turns in a shuffled order.

FlashAttention and the tuner have CUDA graphs and asynchronous steps, `sdpa` has neither. On a
machine without FlashAttention-3 its serving build under ``TUNER_PEERS_PATH`` stands in.

Tokens are compared with those of `sdpa`, request by request. With random weights the logits lie
close together, and two correct kernels diverge at some token. ``--judge FILE`` reads an earlier
run's tokens by the same model in fp32 and tells how far each is from that model's first choice.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import batching_judge, file_head, flash_attention_package, json_file
from benchmarks.child import Worker, answer_indices
from benchmarks.decoder import LLAMA_3_8B, Sizes
from benchmarks.gpu import no_gpu
from tuner.base.install import extra_command
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure.device import detect
from tuner.selection.describe import table

SDPA, TUNER, FLASH_3 = "sdpa", "tuner", "flash_attention_3"
#: Attention of Transformers -> the module that it needs.
WAYS: Mapping[str, str] = {
    SDPA: "torch",
    TUNER: "torch",
    FLASH_3: flash_attention_package.MODULE,
    "flash_attention_2": "flash_attn",
}
#: Sizes and layers of a model card's config.json; `tiny` is for trying this out.
MODELS: Mapping[str, tuple[Sizes, int]] = {
    "1b": (Sizes(2048, 32, 8, 64, 8192, 128256), 16),
    "8b": (LLAMA_3_8B, 32),
    "tiny": (Sizes(64, 4, 2, 16, 96, 512), 2),
}
SHORTEST = 8
"""The longest prompt has so many times the tokens of the shortest; lengths are log-uniform."""
LIMIT_S = 240.0
START = 0
"""Index at which a worker makes its model; each other one is a pass."""
STEP_TOKENS = 8192
"""New tokens of a step at most: `max_batch_tokens`, by default of Transformers 5.23."""
HEADING = ("attention", "requests/s", "tokens/s", "over sdpa", "same tokens", "hits", "refused")


@dataclass(frozen=True)
class Load:
    """Requests that the model is given."""

    model: str
    requests: int
    prompt: int
    """Tokens of the longest prompt."""
    new: int
    """New tokens of each request."""
    page_size: int

    def prompts(self) -> list[list[int]]:
        """Tokens of each request: the same on every machine."""
        draw = random.Random(0)
        shortest, vocabulary = max(1, self.prompt // SHORTEST), MODELS[self.model][0].vocabulary
        lengths = [
            round(shortest * (self.prompt / shortest) ** draw.random())
            for _ in range(self.requests)
        ]
        return [[draw.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each attention; 1 when one that is installed has no figures."""
    args = _parser().parse_args(argv)
    load = Load(args.model, args.requests, args.prompt_tokens, args.new_tokens, args.page_size)
    if args.worker:
        server = Server(args.way, load, args.device)
        return answer_indices(
            lambda i: server.start() if i == START else server.run(), args.device == "cuda"
        )
    _check(args)
    if args.judge:
        return _judge(args)
    given = list(sys.argv[2:] if argv is None else argv)
    command = python_command("-m", "benchmarks", "batching", *given, "--worker")
    rows: list[dict[str, Any]] = []
    about = file_head.complete({})
    with tempfile.TemporaryDirectory() as folder:
        if is_absent(FLASH_3) and flash_attention_package.is_there():
            sys.path.append(str(flash_attention_package.written(Path(folder))))
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), folder])
        ways = [way for way in args.ways if not is_absent(way)]
        for way in args.ways:
            if way not in ways:
                print(f"batching: {way} is left out: {WAYS[way]} is not installed", file=sys.stderr)
        for together in [ways] if args.at_once else [[way] for way in ways]:
            before = rows
            for found in _measured(together, command, args):
                rows = before + [{"attention": w, **vars(load), **row} for w, row in found.items()]
                if args.json:
                    write_json(args.json, {**about, "rows": rows})
    print(report(rows))
    return int(any("lost" in row for row in rows))


def _judge(args: argparse.Namespace) -> int:
    """Judge the tokens of an earlier run, whose rows say of what load."""
    rows = [row for row in json_file.read(args.judge)["rows"] if "lost" not in row]
    if not rows:
        raise ConfigError(f"--judge {args.judge}: no attention has tokens there")
    rows.sort(key=lambda row: row["attention"] != SDPA)
    load = Load(**{name: rows[0][name] for name in Load.__dataclass_fields__})
    ways = {row["attention"]: row["tokens"] for row in rows}
    found = batching_judge.judged(_model(SDPA, load, args.device, ""), load.prompts(), ways)
    if args.json:
        write_json(args.json, {**file_head.complete({}), **vars(load), **found})
    print(batching_judge.report(found))
    return 0


def _measured(
    ways: Sequence[str], command: Sequence[str], args: argparse.Namespace
) -> Iterator[dict[str, dict[str, Any]]]:
    """Figures of attentions whose processes live together, behind each round of passes. The
    processes' end frees the caches' memory.
    """
    with ExitStack() as stack:
        workers = {
            way: stack.enter_context(Worker([*command, "--way", way], args.limit)) for way in ways
        }
        print(f"batching: {', '.join(ways)} ...", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(max(1, len(ways))) as pool:
            starts = list(pool.map(lambda way: workers[way].ask(START), ways))
        rows = dict(zip(ways, starts, strict=True))
        passes: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for index in range(1, args.rounds + 1):
            order = [way for way in ways if "lost" not in rows[way]]
            random.Random(index).shuffle(order)
            for way in order:
                answer = workers[way].ask(index)
                passes[way].append(answer)
                rows[way] = answer if "lost" in answer else summary(rows[way], passes[way])
            yield rows


def summary(start: Mapping[str, Any], passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of an attention.

    Args:
        start: result of `Server.start`.
        passes: results of `Server.run`, one a pass.
    """
    last = passes[-1]
    seconds = [one["seconds"] for one in passes]
    took = statistics.median(seconds)
    return {
        **start,
        **last,
        "seconds": seconds,
        "requests_per_s": len(last["tokens"]) / took,
        "tokens_per_s": sum(map(len, last["tokens"])) / took,
    }


def is_absent(way: str) -> bool:
    """True if the module that an attention needs is not installed."""
    return importlib.util.find_spec(WAYS[way]) is None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench batching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="1b", help="model to run (default 1b)"
    )
    parser.add_argument("--ways", type=_ways, default=list(WAYS), help=f"some of {','.join(WAYS)}")
    parser.add_argument("--requests", type=int, default=32, help="requests at once (default 32)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=1024, help="tokens of the longest prompt"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each request")
    parser.add_argument("--page-size", type=int, default=256, help="tokens of a page of the cache")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of all requests")
    parser.add_argument(
        "--judge", type=Path, metavar="FILE", help="instead, judge the tokens of an earlier run"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"for an attention's start, and for each of its passes (default {LIMIT_S:.0f})",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of the model (default cuda)",
    )
    parser.add_argument(
        "--at-once", action="store_true", help="start the attentions together; passes take turns"
    )
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _ways(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WAYS:
            raise argparse.ArgumentTypeError(f"'{name}' is not known (allowed: {','.join(WAYS)})")
    return names


def _check(args: argparse.Namespace) -> None:
    for name in ("requests", "prompt_tokens", "new_tokens", "page_size", "rounds"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {getattr(args, name)} is out of range (allowed: 1 or more)"
            )
    if importlib.util.find_spec("transformers") is None:
        raise BenchmarkError(f"Transformers is not installed: `{extra_command('transformers')}`")
    if args.device == "cuda" and detect() is None:
        raise no_gpu("--device cpu")
    if args.json:
        check_place(args.json)


class Server:
    """One attention's model and manager in this process.

    Args:
        way: one of `WAYS`.
        load: requests to serve.
        device: device of the model.
    """

    def __init__(self, way: str, load: Load, device: str = "cuda") -> None:
        self._way, self._load, self._device = way, load, device
        self._manager: Any = None
        self._open = ExitStack()

    def close(self) -> None:
        """End the manager."""
        self._open.close()

    def start(self) -> dict[str, Any]:
        """Make the model, and answer all requests once; facts of it."""
        import torch
        import transformers
        from transformers.generation.continuous_batching.utils import WorkloadHints

        importlib.import_module("tuner.runtime.engines.transformers")  # registers the attention
        load = self._load
        model = _model(self._way, load, self._device)
        self._manager = self._open.enter_context(
            model.continuous_batching_context_manager(
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0
                ),
                continuous_batching_config=_config(load),
                workload_hints=WorkloadHints(
                    max_prompt_length=load.prompt,
                    max_generated_length=load.new,
                    num_requests=load.requests,
                ),
            )
        )
        return {
            "first_seconds": self.run()["seconds"],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "device": torch.cuda.get_device_name() if self._device == "cuda" else self._device,
            **({"appends": appends()} if self._way == FLASH_3 else {}),
        }

    def run(self) -> dict[str, Any]:
        """Answer all requests: seconds, tokens and counts."""
        import tuner

        start = time.perf_counter()
        tokens = _pass(self._manager, self._load)
        seconds, stats = time.perf_counter() - start, tuner.stats()
        return {
            "seconds": seconds,
            "hits": stats.hits,
            "fallbacks": dict(stats.fallbacks),
            "errors": dict(stats.errors),
            "tokens": tokens,
        }


def appends() -> bool:
    """True if FlashAttention-3 writes new keys and values to the cache itself; False for a serving
    build that PyTorch's operations do it for.
    """
    module = importlib.import_module(WAYS[FLASH_3])
    asked = getattr(module, flash_attention_package.appends.__name__, None)
    return True if asked is None else bool(asked())


def _pass(manager: Any, load: Load) -> list[list[int]]:
    """New tokens of all requests, in their order.

    Raises:
        RuntimeError: when one has not as many as were asked.
    """
    names = manager.add_requests(load.prompts(), max_new_tokens=load.new)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("Transformers' generation thread ended")
        elif result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        elif result.is_finished():
            found[result.request_id] = list(map(int, result.generated_tokens))
    tokens = [found[name] for name in names]
    if any(len(of_one) != load.new for of_one in tokens):
        raise RuntimeError(f"a request has not {load.new} new tokens")
    return tokens


def _model(way: str, load: Load, device: str, cache: str = "paged|") -> Any:
    """The model with an attention over pages, or over dense tensors where `cache` is empty."""
    import torch
    import transformers

    sizes, layers = MODELS[load.model]
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads_kv,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=sizes.vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=max(8192, load.prompt + load.new),
    )
    known = transformers.AttentionInterface._global_mapping
    name = f"{cache}{way}" if "paged|sdpa" in known else way  # Transformers 5.17, and 5.23
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=name
        )
    return model.eval()


def _config(load: Load) -> Any:
    """A cache of as many pages as all requests fill together, and the engine's defaults."""
    import transformers

    kind = transformers.ContinuousBatchingConfig
    known = kind.__dataclass_fields__
    pages = -(-(load.prompt + load.new) // load.page_size) + 1
    options: dict[str, Any] = {
        "page_size" if "page_size" in known else "block_size": load.page_size,
        "num_blocks": load.requests * pages,
        "max_batch_tokens": min(STEP_TOKENS, load.requests * pages * load.page_size),
    }
    if "auto_switch_to_flash" in known:
        options["auto_switch_to_flash"] = False
    # Else the passes behind the first would find their prompts in the cache.
    return kind(**options, allow_block_sharing=False)


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each attention."""
    rows = list(rows)
    beside = next((row for row in rows if row["attention"] == SDPA and "lost" not in row), None)
    lines: list[tuple[str, ...]] = [HEADING]
    for row in rows:
        if "lost" in row:
            lines.append((row["attention"], *[""] * 5, f"failed: {row['lost']}"))
            continue
        ratio = same = ""
        if beside is not None:
            ratio = f"{row['requests_per_s'] / beside['requests_per_s']:.3f}"
            same = f"{same_share(row['tokens'], beside['tokens']):.1%}"
        speeds = f"{row['requests_per_s']:.2f}", f"{row['tokens_per_s']:.0f}"
        said = row["fallbacks"] | row["errors"]
        reasons = "; ".join(f"{count} {reason}" for reason, count in said.items())
        lines.append((row["attention"], *speeds, ratio, same, str(row["hits"]), reasons))
    text = table(lines, frozenset(range(1, 6)))
    for row in rows:
        if "appends" in row:
            by = "its own kernel" if row["appends"] else "PyTorch's operations"
            text += f"\n{row['attention']}: new keys and values are written to the cache by {by}"
    return text


def same_share(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """Share of the tokens up to the first of each request that differs."""
    same = 0
    for mine, theirs in zip(found, wanted, strict=True):
        pairs = enumerate(zip(mine, theirs, strict=True))
        same += next((index for index, (a, b) in pairs if a != b), len(mine))
    return same / max(1, sum(map(len, wanted)))
