"""``scripts/bench models``: calls of whole models that the tuner answers, and tokens a second.

Models of real architectures with random weights, from Transformers and in plain PyTorch. Each runs
in four modes: eager and compiled, each forward and training. Decoders also generate token by token,
over a cache that grows and over a static one. Four ways through each: PyTorch's own attention,
``attn_implementation="tuner"``, PyTorch's under `tuner.enable`, and this with linear layers by
`tune_linear_`. A training pass is forward, backward, and a step of AdamW at a learning rate of 0,
which leaves the weights equal.

Figures of a model:

- hits and refusals by reason of one pass (`tuner.stats`)
- attention calls that were neither: each model has one a layer, and a graph may bypass the tuner
- tokens a second beside PyTorch's: the median of interleaved passes, and of their ratios with a
  95 % interval
- the control: PyTorch's second pass of a round over its first
- a verdict: a tie where the interval contains 1 or overlaps the control's (`paired.py`)
- share of a pass until its last kernel is enqueued: near 1 the host is the limit, not the GPU
- difference of the output from PyTorch's
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.child import Worker, answer_indices
from benchmarks.gpu import no_gpu
from benchmarks.paired import Ratio, ratio
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.measure.device import detect
from tuner.measure.device import environment as device_environment
from tuner.selection.describe import table

MODELS = (
    "llama", "phi3", "gpt2", "gemma2", "bert", "bert-padded", "vit", "whisper", "flux",
)  # fmt: skip
DECODERS = "llama", "phi3", "gpt2", "gemma2"
"""Models that generate."""
CACHES = {"decoding": "growing", "static decoding": "static"}
"""Modes of decoders, and the kind of their cache."""
MODES = ("eager", "compiled", "training", "compiled training", *CACHES)
TORCH, IMPLEMENTATION, ENABLED = "torch", "attn_implementation", "enable"
LAYERS = "enable+layers"
WAYS = (TORCH, IMPLEMENTATION, ENABLED, LAYERS)
LIMIT_S = 300.0
"""For all ways of a model in one mode; compiling takes most of it."""
ROUNDS, PASSES = 9, 3
GENERATED = 32
"""Tokens that a decoder generates in a pass, the last of its batch's."""
AGAIN = "torch again"
HEADING = (
    "model", "mode", "way", "hits", "selected", "refused", "unseen", "tokens/s", "over torch",
    "interval", "verdict", "host", "error", "reasons",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model in every mode; 1 when one of them has no figures."""
    args = _parser().parse_args(argv)
    todo = [
        (model, mode)
        for model, mode in product(args.models, args.modes)
        if mode not in CACHES or model in DECODERS
    ]
    for name, value in (("layers", args.layers), ("rounds", args.rounds)):
        if value < 1:
            raise ConfigError(f"--{name} {value} is out of range (allowed: 1 and more)")
    if not todo:
        raise ConfigError(f"no model generates (allowed with such modes: {', '.join(DECODERS)})")
    if args.worker:

        def measured(index: int) -> dict[str, Any]:
            options = {"rounds": args.rounds, "time_limit_s": args.time_limit}
            return measure(*todo[index], args.layers, args.device, args.ways, **options)

        return answer_indices(measured, args.device == "cuda")
    if args.device == "cuda" and detect() is None:
        raise no_gpu("--device cpu")
    if args.json:
        check_place(args.json)
    given = list(sys.argv[2:] if argv is None else argv)
    command = python_command("-m", "benchmarks", "models", *given, "--worker")
    rows: list[dict[str, Any]] = []
    document = {"environment": environment() if args.device == "cuda" else {}, "rows": rows}
    with Worker(command, args.limit) as worker:
        for index, (model, mode) in enumerate(todo):
            print(f"models: {model}, {mode} ...", file=sys.stderr, flush=True)
            rows.append({"model": model, "mode": mode, **worker.ask(index)})
            if args.json:
                write_json(args.json, document)
    print(report(rows))
    return int(any("lost" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        type=partial(_names, MODELS),
        default=list(MODELS),
        help="models between commas (default: all)",
    )
    parser.add_argument(
        "--modes",
        type=partial(_names, MODES),
        default=list(MODES),
        help="modes between commas (default: all)",
    )
    parser.add_argument(
        "--ways",
        type=partial(_names, WAYS),
        default=list(WAYS),
        help="ways between commas (default: all)",
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of each model")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of timing (default 9)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="start no further round of a model and mode after so long (default: none)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a model and mode")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of the models (default cuda)",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _names(allowed: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(
                f"'{name}' is not known (allowed: {', '.join(allowed)})"
            )
    return names


def environment() -> dict[str, Any]:
    """Versions that the figures depend on."""
    import torch

    try:
        import transformers
    except ImportError:
        version = "none"
    else:
        version = transformers.__version__
    facts = {
        "gpu": torch.cuda.get_device_name(),
        **device_environment().facts,
        "torch": torch.__version__,
        "transformers": version,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return file_head.complete(facts)


def measure(
    model: str,
    mode: str,
    layers: int,
    device: str = "cuda",
    ways: Sequence[str] = WAYS,
    rounds: int = ROUNDS,
    sizes: Any = None,
    time_limit_s: float = math.inf,
) -> dict[str, Any]:
    """Figures of each way through a model in a mode, or why it has none.

    Args:
        model: one of `MODELS`.
        mode: one of `MODES`; those of `CACHES` for `DECODERS`.
        layers: number of layers of the model.
        device: device of its weights.
        ways: some of `WAYS`.
        rounds: number of timed rounds.
        sizes: in place of the public model's (`models_built.Sizes`).
        time_limit_s: seconds after which no further round starts.
    """
    import torch

    from benchmarks.call_times import first_line
    from benchmarks.models_built import BUILDS, Sizes

    torch.compiler.reset()  # here only: it would have the other ways compiled again
    torch.manual_seed(0)
    dtype = torch.bfloat16
    built = BUILDS[model](sizes or Sizes(layers=layers), dtype, device)
    make = _generation if mode in CACHES else _pass
    passes: dict[str, Pass] = {}
    found: dict[str, Any] = {"layers": layers, "ways": {}}
    for way in ways:
        try:
            passes[way] = make(built, way, mode)
            found["ways"][way] = _answers(passes[way])
        except Exception as exc:
            passes.pop(way, None)
            found["ways"][way] = {"failed": first_line(exc)}
    _time(passes, found["ways"], rounds, device, time_limit_s)
    _compare(passes, found["ways"])
    return found


@dataclass(frozen=True)
class Pass:
    """A warm pass through a copy of a model."""

    run: Callable[[], Any]
    """Computes the output, detached."""
    tokens: int
    """Tokens, patches or frames of a pass."""
    calls: int
    """Times that a pass goes through the model's layers."""
    prepare: Callable[[], None] = lambda: None
    """Runs before each pass, untimed."""
    count: int = 1
    """Passes that are timed together."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of the way, entered outside of what is timed: a program enters it once."""

    def __call__(self) -> Any:
        with self.around():
            self.prepare()
            return self.run()


def _module(built: Any, way: str) -> Any:
    """A copy of the model with the way's attention."""
    module = copy.deepcopy(built.module)
    if way == IMPLEMENTATION:
        with contextlib.suppress(ImportError):
            importlib.import_module("tuner.runtime.engines.transformers")  # registers the name
        module.set_attn_implementation("tuner")
    if way == LAYERS:
        from tuner.runtime.layers import tune_linear_

        tune_linear_(module)
    return module


def _around(way: str) -> Callable[[], AbstractContextManager[Any]]:
    import tuner
    from tuner.runtime.call import devices, dispatch

    if way not in (ENABLED, LAYERS):
        return contextlib.nullcontext
    if devices.is_present():  # until it is there, PyTorch answers
        table = importlib.import_module("tuner.runtime.call.table").table
        dispatch.prepare(then=table.renew).join()
    return tuner.enabled


def _pass(built: Any, way: str, mode: str) -> Pass:
    """A pass forward; where the mode trains, also backward with the optimiser's step."""
    import torch

    module = _module(built, way)
    is_training = "training" in mode
    module.train(is_training)
    called = module
    if "compiled" in mode:
        called = torch.compile(module)
    kept = torch.enable_grad if is_training else torch.inference_mode
    if is_training:
        is_fused = next(module.parameters()).is_cuda
        options = {"lr": 0.0, "weight_decay": 0.0, "fused": is_fused}
        optimiser = torch.optim.AdamW(module.parameters(), **options)

    def run() -> Any:
        with kept():
            out = built.output(called)
            if is_training:
                optimiser.zero_grad(set_to_none=True)
                out.float().square().mean().backward()
                optimiser.step()
            return out.detach()

    one = Pass(run, built.tokens, calls=1, count=PASSES, around=_around(way))
    for _ in range(2):
        one()
    return one


def _generation(built: Any, way: str, mode: str) -> Pass:
    """The last `GENERATED` tokens of the batch, one a step, behind the others in a cache.

    The tokens are given: the likeliest ones would part the ways for good where two are nearly
    alike.
    """
    import torch
    from transformers import DynamicCache, StaticCache

    module = _module(built, way).eval()
    ids = built.inputs["input_ids"]
    batch, length = ids.shape
    prompt = length - GENERATED
    caches: list[Any] = [None]

    def step(start: int, end: int) -> Any:
        found = module(input_ids=ids[:, start:end], past_key_values=caches[0], use_cache=True)
        return found.last_hidden_state

    def prepare() -> None:
        config = module.config
        is_static = CACHES[mode] == "static"
        caches[0] = None  # the memory first
        caches[0] = (
            StaticCache(config=config, max_cache_len=length)
            if is_static
            else DynamicCache(config=config)
        )
        with torch.inference_mode():
            step(0, prompt)

    def run() -> Any:
        with torch.inference_mode():
            for place in range(prompt, length):
                out = step(place, place + 1)
            return out

    generation = Pass(run, batch * GENERATED, GENERATED, prepare, around=_around(way))
    for _ in range(2):
        generation()
    return generation


def _answers(one: Pass) -> dict[str, Any]:
    """Calls of one pass by what answered them."""
    import tuner

    with one.around():
        one.prepare()
        tuner.stats(reset=True)
        one.run()
        stats = tuner.stats(reset=True)
    return {
        "calls": one.calls,
        "hits": stats.hits,
        "selected": stats.portfolio_hits,
        "fallbacks": dict(stats.fallbacks),
        "errors": dict(stats.errors),
    }


def _time(
    passes: Mapping[str, Pass],
    found: dict[str, Any],
    rounds: int,
    device: str,
    time_limit_s: float,
) -> None:
    """Seconds of each way's passes, in shuffled rounds, and their ratios to PyTorch's."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    turns = dict(passes)
    if TORCH in passes:
        turns[AGAIN] = passes[TORCH]
    times: dict[str, list[float]] = {way: [] for way in turns}
    hosts: dict[str, list[float]] = {way: [] for way in turns}
    order, chance, began = list(turns), random.Random(0), time.perf_counter()
    gc.collect()
    gc.freeze()  # models and modules: later collections are short
    for turn in range(rounds):
        if turn and time.perf_counter() - began > time_limit_s:
            break
        chance.shuffle(order)
        for way in order:
            one = turns[way]
            with one.around():
                one.prepare()
                wait()
                with _uncollected():
                    start = time.perf_counter()
                    for _ in range(one.count):
                        one.run()
                    enqueued = time.perf_counter()
                    wait()
                    ended = time.perf_counter()
            times[way].append((ended - start) / one.count)
            hosts[way].append((enqueued - start) / (ended - start))
    gc.unfreeze()
    for way in passes:
        figures = found[way]
        figures["seconds"] = times[way]
        figures["host_share"] = statistics.median(hosts[way])
        figures["tokens_per_s"] = turns[way].tokens / statistics.median(times[way])
        if TORCH in passes:
            beside = AGAIN if way == TORCH else way
            figures["over_torch"] = ratio(times[TORCH], times[beside])._asdict()
    if TORCH in passes:
        found[TORCH]["again"] = turns[AGAIN].tokens / statistics.median(times[AGAIN])
        found[TORCH]["seconds_again"] = times[AGAIN]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which would lengthen some passes at random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _compare(passes: Mapping[str, Pass], found: dict[str, Any]) -> None:
    """Relative Frobenius norm of each output's difference from PyTorch's."""
    if TORCH not in passes:
        return
    wanted = passes[TORCH]().float()
    for way, run in passes.items():
        found[way]["error"] = float((run().float() - wanted).norm() / wanted.norm())


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each model, mode and way; PyTorch's has the control beside it."""
    lines: list[tuple[str, ...]] = [HEADING]
    for row in rows:
        ways = row.get("ways") or {way: {"failed": row.get("lost", "")} for way in WAYS}
        for way, found in ways.items():
            lines.append((row["model"], row["mode"], way, *_cells(row, way, found)))
    return table(lines, frozenset({*range(3, 10), 11, 12}))


def _cells(row: Mapping[str, Any], way: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in found:
        return (*[""] * 10, f"failed: {found['failed']}")
    error = f"{found['error']:.1e}" if "error" in found else ""
    refused = found["fallbacks"]
    said = [f"{count} {reason}" for reason, count in (refused | found["errors"]).items()]
    hits, refusals = found["hits"], sum(refused.values())
    called = row["layers"] * found["calls"]
    # With linear layers among the calls the attention calls are not known.
    unseen = str(max(0, called - hits - refusals)) if way not in (TORCH, LAYERS) else ""
    counts = str(hits), str(found["selected"]), str(refusals), unseen
    speeds = f"{found['tokens_per_s']:.0f}", *_beside(row["ways"], way)
    return (*counts, *speeds, f"{found['host_share']:.2f}", error, "; ".join(said))


def _beside(ways: Mapping[str, Any], way: str) -> tuple[str, str, str]:
    """Ratio to PyTorch's, its interval, and the verdict; PyTorch's is the control."""
    if "over_torch" not in ways[way]:
        return "", "", ""
    found = Ratio(**ways[way]["over_torch"])
    verdict = "control" if way == TORCH else found.verdict(Ratio(**ways[TORCH]["over_torch"]))
    return f"{found.median:.3f}", f"{found.low:.3f}..{found.high:.3f}", verdict
