"""Whole models: calls that the tuner answers, and tokens a second beside PyTorch's.

Models of real architectures with random weights, from Transformers and in plain PyTorch, a few
layers deep. A preset is a way to run them. Decoders also generate token by token, over a static
cache. Contenders are PyTorch's attention, ``attn_implementation="tuner"``, PyTorch's under
`tuner.enable` (``tuner``), and this with linear layers by `tune_linear_`. A training pass is
forward, backward, and a step of AdamW at a learning rate of 0, which leaves the weights equal.

The table has the calls of one pass by what answered them. *Unseen* are attention calls that nothing
answered: a graph may bypass the tuner. *Host* is the share of a pass until its last kernel is
enqueued: near 1 the host is the limit, not the GPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.call_times import CONTROL, Contender, Ratio, first_line
from benchmarks.harness import Bench, Preset, Row
from benchmarks.rows import PYTORCH, TUNER, markdown
from tuner.cli import Parser

GROUPS = {
    "decoders": ("llama", "phi3", "gpt2", "gemma2"),
    "encoders": ("bert", "bert-padded", "vit", "whisper"),
    "diffusion": ("flux",),
}
IMPLEMENTATION, LAYERS = "tuner attn_implementation", "tuner layers"
WAYS = (PYTORCH, TUNER, IMPLEMENTATION, LAYERS)
PASSES = 3
"""Passes that are timed together, but of a generation."""
DECODING = "static_decoding"
HEADING = (
    *("case", "way", "hits", "refused", "unseen", "tokens/s", "over PyTorch", "interval"),
    *("verdict", "host", "error", "reasons"),
)


@dataclass(frozen=True)
class Run:
    """A model in one mode; `heads`, `batch` and `tokens` at 0 are the public model's.

    A decoder generates the last `new` of its tokens.
    """

    model: str
    mode: str
    heads: int = 0
    batch: int = 0
    tokens: int = 0
    new: int = 32

    @property
    def label(self) -> str:
        """Model and mode."""
        return f"{self.model}, {self.mode}"

    @property
    def group(self) -> str:
        """Kind of the model."""
        return next(name for name, models in GROUPS.items() if self.model in models)


def runs(mode: str, _: Namespace) -> list[Run]:
    """Every model, or every decoder where it generates."""
    groups = ["decoders"] if mode == DECODING else list(GROUPS)
    return [Run(model, mode) for name in groups for model in GROUPS[name]]


@dataclass(frozen=True)
class Pass:
    """A warm pass through a copy of a model."""

    run: Callable[[], Any]
    """Computes the output, detached."""
    tokens: int
    """Tokens, patches or frames of a pass."""
    layers: int
    """Attention calls of a pass."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of the way, entered outside of what is timed: a program enters it once."""

    def __call__(self) -> Any:
        with self.around():
            return self.run()


def measure(case: Run, args: Namespace) -> Row:
    """Times of each way through a model, and what answered its calls."""
    import torch

    from benchmarks.models_built import Sizes, build

    torch.compiler.reset()  # here only: it would have the other ways compiled again
    torch.manual_seed(0)
    sizes = Sizes(args.layers, case.heads, case.batch, case.tokens)
    built = build(case.model, sizes, torch.bfloat16, "cuda")
    make = _generation if case.mode == DECODING else _pass
    passes, answers, failed = dict[str, Pass](), dict[str, Row](), dict[str, str]()
    for way in dict.fromkeys((PYTORCH, *args.ways)):
        try:
            passes[way] = warm = make(built, way, case, args.layers)
            for _ in range(2):
                warm()
            answers[way] = _answers(warm)
        except Exception as exc:  # a model raises what it likes
            passes.pop(way, None)
            failed[way] = first_line(exc)
    contenders = [
        Contender(way, harness.every_copy(one.run), one.around) for way, one in passes.items()
    ]
    count = 1 if case.mode == DECODING else PASSES
    times = harness.time_host(contenders, count, args.rounds, is_waiting=True)
    enqueued = harness.time_host(contenders, count, 3)
    wanted = passes[PYTORCH]()
    return {
        "us": times.us,
        "over": {way: vars(times.over(PYTORCH, way)) for way in times.us},
        "host": {way: us / times.us[way] for way, us in enqueued.us.items()},
        "errors": {way: harness.distance(one(), wanted) for way, one in passes.items()},
        "answers": answers,
        "failed": failed,
        "tokens": passes[PYTORCH].tokens,
    }


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

    if way not in (TUNER, LAYERS):
        return contextlib.nullcontext
    if devices.is_present():  # until it is there, PyTorch answers
        table = importlib.import_module("tuner.runtime.call.table").table
        dispatch.prepare(then=table.renew).join()
    return tuner.enabled


def _pass(built: Any, way: str, case: Run, layers: int) -> Pass:
    """A pass forward; where the mode trains, also backward with the optimiser's step."""
    import torch

    module = _module(built, way)
    is_training = "training" in case.mode
    module.train(is_training)
    called = torch.compile(module) if "compiled" in case.mode else module
    context = torch.enable_grad if is_training else torch.inference_mode
    if is_training:
        is_fused = next(module.parameters()).is_cuda
        options = {"lr": 0.0, "weight_decay": 0.0, "fused": is_fused}
        optimiser = torch.optim.AdamW(module.parameters(), **options)

    def run() -> Any:
        with context():
            out = built.output(called)
            if is_training:
                optimiser.zero_grad(set_to_none=True)
                out.float().square().mean().backward()
                optimiser.step()
            return out.detach()

    return Pass(run, built.tokens, layers, around=_around(way))


def _generation(built: Any, way: str, case: Run, layers: int) -> Pass:
    """The last `Run.new` tokens of the batch, one a step, behind the others in a cache.

    The tokens are given: the likeliest ones would part the ways for good where two are nearly
    alike.
    """
    import torch
    import transformers

    module = _module(built, way).eval()
    ids = built.inputs["input_ids"]
    batch, length = ids.shape
    prompt = length - case.new
    caches = list[Any]()

    def step(cached: Any, start: int, end: int) -> Any:
        with torch.inference_mode():
            out = module(input_ids=ids[:, start:end], past_key_values=cached, use_cache=True)
            return out.last_hidden_state

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with _around(way)():
            for _ in range(2):  # of the pass that warms, and of the timed one
                caches.append(transformers.StaticCache(module.config, max_cache_len=length))
                step(caches[-1], 0, prompt)
            yield
        caches.clear()

    def run() -> Any:
        cached = caches.pop()
        for place in range(prompt, length):
            out = step(cached, place, place + 1)
        return out

    return Pass(run, batch * case.new, layers * case.new, around)


def _answers(one: Pass) -> Row:
    """Calls of one pass by what answered them."""
    import tuner

    with one.around():
        tuner.stats(reset=True)
        one.run()
        stats = tuner.stats(reset=True)
    refused = {**stats.fallbacks, **stats.errors}
    return {"calls": one.layers, "hits": stats.hits, "refused": refused}


def _cells(row: Row) -> Iterator[tuple[str, ...]]:
    """The table's cells of each way of a row; PyTorch's has the control beside it."""
    for way, why in row.get("failed", {}).items():
        yield (way, *[""] * 9, why)
    ratios = {way: Ratio(**found) for way, found in row.get("over", {}).items()}
    for way, answers in row.get("answers", {}).items():
        refused, hits = answers["refused"], answers["hits"]
        # With linear layers among the calls the attention calls are not known.
        unseen = max(0, answers["calls"] - hits - sum(refused.values()))
        ratio = ratios[CONTROL if way == PYTORCH else way]
        yield (
            *(way, str(hits), str(sum(refused.values()))),
            "" if way in (PYTORCH, LAYERS) else str(unseen),
            f"{row['tokens'] / row['us'][way] * 1e6:.0f}",
            *(f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"),
            "control" if way == PYTORCH else ratio.verdict(ratios[CONTROL]),
            *(f"{row['host'][way]:.2f}", f"{row['errors'][way]:.1e}"),
            "; ".join(f"{count} {reason}" for reason, count in refused.items()),
        )


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each model and way."""
    return markdown([HEADING, *((row["case"], *cells) for row in rows for cells in _cells(row))])


def _options(parser: Parser) -> None:
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="beside PyTorch (default: all)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of each model (default 4)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of timing (default 9)")


def _preset(mode: str, text: str) -> Preset:
    model = "llama" if mode == DECODING else "flux"
    smoke = Run(model, mode, heads=2, batch=2, tokens=16, new=3)
    return Preset(text, partial(runs, mode), measure, table=table, smoke=smoke)


BENCH = Bench(
    "models",
    __doc__,
    {
        "eager": _preset("eager", "forward passes"),
        "compiled": _preset("compiled", "forward passes by torch.compile"),
        "training": _preset("training", "training passes"),
        DECODING: _preset(DECODING, "decoders token by token, over a static cache"),
    },
    _options,
)
