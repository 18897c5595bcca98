"""``scripts/bench models``: calls of whole models that the tuner answers, and tokens a second.

Models of real architectures with random weights, from Transformers and in plain PyTorch. Each runs
in four modes: eager and compiled, each forward and training. Three ways through each: PyTorch's own
attention, ``attn_implementation="tuner"``, and PyTorch's under `tuner.enable`.

Figures of a model:

- hits and refusals by reason of one pass (`tuner.stats`)
- attention calls that were neither: each model has one a layer, and a graph may bypass the tuner
- tokens a second beside PyTorch's, medians of interleaved passes
- difference of the output from PyTorch's
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.child import Worker, answer_indices
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure.device import detect
from tuner.selection.describe import table

MODELS = (
    "llama", "phi3", "gpt2", "gemma2", "bert", "bert-padded", "vit", "whisper", "flux",
)  # fmt: skip
MODES = ("eager", "compiled", "training", "compiled training")
TORCH, IMPLEMENTATION, ENABLED = "torch", "attn_implementation", "enable"
WAYS = (TORCH, IMPLEMENTATION, ENABLED)
LIMIT_S = 300.0
"""For all ways of a model in one mode; compiling takes most of it."""
ROUNDS, PASSES = 9, 3
HEADING = (
    "model", "mode", "way", "hits", "selected", "refused", "unseen", "tokens/s", "over torch",
    "error", "reasons",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model in every mode; 1 when one of them has no figures."""
    args = _parser().parse_args(argv)
    todo = list(product(args.models, args.modes))
    if args.worker:
        return answer_indices(lambda i: measure(*todo[i], args.layers, args.device), args.device)
    if args.device == "cuda" and detect() is None:
        raise BenchmarkError(
            "no GPU found: scripts/bench models runs kernels (--device cpu does not)"
        )
    if args.json:
        check_place(args.json)
    given = list(sys.argv[2:] if argv is None else argv)
    command = python_command("-m", "benchmarks", "models", *given, "--worker")
    rows: list[dict[str, Any]] = []
    with Worker(command, args.limit) as worker:
        for index, (model, mode) in enumerate(todo):
            print(f"models: {model}, {mode} ...", file=sys.stderr, flush=True)
            rows.append({"model": model, "mode": mode, **worker.ask(index)})
            if args.json:
                write_json(args.json, rows)
    print(report(rows))
    return int(any("lost" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=partial(_names, MODELS), default=list(MODELS))
    parser.add_argument("--modes", type=partial(_names, MODES), default=list(MODES))
    parser.add_argument("--layers", type=int, default=4, help="layers of each model")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a model and mode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
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


def measure(
    model: str, mode: str, layers: int, device: str = "cuda", sizes: Any = None
) -> dict[str, Any]:
    """Figures of each way through a model in a mode, or why it has none.

    Args:
        model: one of `MODELS`.
        mode: one of `MODES`.
        layers: of the model.
        device: of its weights.
        sizes: in place of the public model's (`models_built.Sizes`).
    """
    import torch

    from benchmarks.call_times import first_line
    from benchmarks.models_built import BUILDS, Sizes

    if layers < 1:
        raise ConfigError(f"--layers {layers} is out of range (allowed: 1 and more)")
    torch.compiler.reset()  # here only: it would have the other ways compiled again
    torch.manual_seed(0)
    dtype = torch.bfloat16
    built = BUILDS[model](sizes or Sizes(layers=layers), dtype, device)
    passes: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {"layers": layers, "ways": {}}
    for way in WAYS:
        try:
            passes[way] = _pass(built, way, mode)
            found["ways"][way] = _answers(passes[way])
        except Exception as exc:
            passes.pop(way, None)
            found["ways"][way] = {"failed": first_line(exc)}
    _time(passes, found["ways"], built.tokens, device)
    _compare(passes, found["ways"])
    return found


def _pass(built: Any, way: str, mode: str) -> Callable[[], Any]:
    """One pass through a copy of the model, warm; returns the output, detached."""
    import torch

    import tuner

    module = copy.deepcopy(built.module)
    if way == IMPLEMENTATION:
        with contextlib.suppress(ImportError):
            import tuner.runtime.transformers
        module.set_attn_implementation("tuner")
    is_training = "training" in mode
    module.train(is_training)
    called = module
    if "compiled" in mode:
        called = torch.compile(module)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if way == ENABLED:
        around = tuner.enabled
    kept = torch.enable_grad if is_training else torch.inference_mode

    def run() -> Any:
        with around(), kept():
            out = built.output(called)
            if is_training:
                module.zero_grad(set_to_none=True)
                out.float().square().mean().backward()
            return out.detach()

    for _ in range(2):
        run()
    return run


def _answers(run: Callable[[], Any]) -> dict[str, Any]:
    """Calls of one pass by what answered them."""
    import tuner

    tuner.stats(reset=True)
    run()
    stats = tuner.stats(reset=True)
    return {
        "hits": stats.hits,
        "selected": stats.portfolio_hits,
        "fallbacks": dict(stats.fallbacks),
        "errors": dict(stats.errors),
    }


def _time(
    passes: Mapping[str, Callable[[], Any]], found: dict[str, Any], tokens: int, device: str
) -> None:
    """Tokens a second of each way, interleaved, each round in the other direction."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {way: [] for way in passes}
    for turn in range(ROUNDS):
        for way in list(passes) if turn % 2 else reversed(list(passes)):
            wait()
            start = time.perf_counter()
            for _ in range(PASSES):
                passes[way]()
            wait()
            times[way].append((time.perf_counter() - start) / PASSES)
    for way, seconds in times.items():
        found[way]["tokens_per_s"] = tokens / statistics.median(seconds)


def _compare(passes: Mapping[str, Callable[[], Any]], found: dict[str, Any]) -> None:
    """Relative Frobenius norm of each output's difference from PyTorch's."""
    if TORCH not in passes:
        return
    wanted = passes[TORCH]().float()
    for way, run in passes.items():
        found[way]["error"] = float((run().float() - wanted).norm() / wanted.norm())


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each model, mode and way."""
    lines: list[tuple[str, ...]] = [HEADING]
    for row in rows:
        for way in WAYS:
            found = row.get("ways", {}).get(way, {"failed": row.get("lost", "")})
            lines.append((row["model"], row["mode"], way, *_cells(row, way, found)))
    return table(lines, frozenset(range(3, 10)))


def _cells(row: Mapping[str, Any], way: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in found:
        return (*[""] * 7, f"failed: {found['failed']}")
    speed = found["tokens_per_s"]
    beside = row["ways"].get(TORCH, {}).get("tokens_per_s")
    ratio = f"{speed / beside:.3f}" if beside else ""
    error = f"{found['error']:.1e}" if "error" in found else ""
    refused = found["fallbacks"]
    said = [f"{count} {reason}" for reason, count in (refused | found["errors"]).items()]
    hits, refusals = found["hits"], sum(refused.values())
    unseen = str(max(0, row["layers"] - hits - refusals)) if way != TORCH else ""
    counts = str(hits), str(found["selected"]), str(refusals), unseen
    return (*counts, f"{speed:.0f}", ratio, error, "; ".join(said))
