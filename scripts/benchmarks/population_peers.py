"""Peers at the problems that portfolios are made from (``population --preset peers``).

The rows of attention make `tuner fit peers`: PyTorch's choice, FlashAttention-3 and -4 as the
runtime calls them. Products of few rows are timed by PyTorch's choice and by each algorithm that
cuBLASLt lists.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

from benchmarks import harness, rows
from benchmarks.cliffs_draws import Plain
from benchmarks.harness import Row
from tuner.base import resources
from tuner.config import Config
from tuner.families import families
from tuner.families.by_operation import ProductDomain
from tuner.families.peers import ANSWERS
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.runners import recording_archive
from tuner.search import sampled_problems

BUDGET_US = 3e4
"""All rounds of a call take about so long: a fit has many calls of each kernel."""
COLD_BYTES, MAX_COPIES = 160 << 20, 40
"""As of `population_tensors`: caches come from memory."""
MAX_ERROR = 3e-2
LAYERS = ((5120, 5120), (8192, 3072), (4224, 1408))
"""N and K of layers whose products of few rows were slow by own kernels."""
LAYER_ROWS = (1, 4, 8, 16)


@dataclass(frozen=True)
class PeerCase:
    """A problem of a portfolio's domain."""

    problem: Problem
    group: str

    @property
    def label(self) -> str:
        return self.problem.label()


def peer_cases(args: Namespace) -> list[PeerCase]:
    """The problems of each operation's domains, by turns over the domains. Those come first that a
    recording has times of own kernels at.
    """
    ops = args.op.split(",") if args.op else [AttentionProblem.op, GemmProblem.op]
    found: list[PeerCase] = []
    if GemmProblem.op in ops:
        found += [
            PeerCase(GemmProblem(m, n, k, dtype="bfloat16"), "layers")
            for m, (n, k) in product(LAYER_ROWS, LAYERS)
        ]
    for op in ops:
        domains = sampled_problems.problems(op)
        if op == GemmProblem.op:
            domains = {one: domains[one] for one in (ProductDomain("few"), ProductDomain("narrow"))}
        turns = zip_longest(
            *([PeerCase(p, one.label()) for p in every] for one, every in domains.items())
        )
        drawn = [case for turn in turns for case in turn if case is not None]
        found += sorted(drawn, key=lambda case: not is_recorded(case.problem))
    return list({case.label: case for case in found}.values())


def is_recorded(problem: Problem) -> bool:
    """True if a shipped recording of this GPU has the problem, timed in a stream."""
    folder = resources.cache() / "recordings"
    regimes = (Regime("stream", state) for state in ("cold", "warm"))
    names = (recording_archive.file_name(problem, DEFAULT_GPU, one) for one in regimes)
    return any(recording_archive.named(folder, name) is not None for name in names)


def peer_measured(case: PeerCase, _: Namespace) -> Row:
    """Times of PyTorch's choice, of the tuner without peers, and of peers."""
    import torch

    with torch.inference_mode():
        torch.manual_seed(0)
        if isinstance(case.problem, GemmProblem):
            from benchmarks import cliffs_calls

            return cliffs_calls.measured(Plain(case.problem))
        return _attention(case.problem)


def _attention(problem: Any) -> Row:
    import torch
    from torch.nn import functional

    import tuner

    is_decoding = problem.is_decoding
    copies = min(MAX_COPIES, max(1, COLD_BYTES // problem.bytes)) if is_decoding else 1
    dtype = getattr(torch, problem.dtype)
    inputs = [
        [
            torch.empty_strided(o.shape, o.strides, dtype=dtype, device="cuda").normal_()
            for o in problem.operands[:3]
        ]
        for _ in range(copies)
    ]
    source = inputs[0][0].clone()
    options = {"is_causal": problem.is_causal, "enable_gqa": problem.heads_q != problem.heads_kv}
    calls: dict[str, Callable[[int], Any]] = {}
    if problem.softcap:
        calls["tuner"] = lambda i: tuner.attention(*inputs[i], softcap=problem.softcap, **options)
    else:
        attend = functional.scaled_dot_product_attention
        calls[rows.PYTORCH] = lambda i: attend(*inputs[i], **options)
        calls["tuner"] = lambda i: tuner.attention(*inputs[i], **options)
    failed: dict[str, str] = {}
    for config in peers_of(problem):
        call = families()[config.family].vendor_call(problem, config, problem.head_dim**-0.5)
        name = str(config["kernel"])
        if isinstance(call, str):
            failed[name] = call
        else:
            calls[name] = lambda i, call=call: call(*inputs[i])  # type: ignore[misc]
    outs, more = harness.first_outputs(calls)
    first = next(iter(outs.values()))
    errors = {name: harness.distance(out, first) for name, out in outs.items()}
    wrong = [name for name, error in errors.items() if not error <= MAX_ERROR]
    del outs
    fit = [harness.Contender(name, calls[name]) for name in errors if name not in wrong]
    times = harness.time_calls(
        fit, lambda i: torch.mul(source, 1.0, out=inputs[i][0]), copies, BUDGET_US
    )
    return {
        **{"problem": problem.to_json(), "us": times.us, "errors": errors, "wrong": wrong},
        "failed": {**failed, **more, **times.failed},
    }


def peers_of(problem: Problem) -> Sequence[Config]:
    """Peers' kernels of attention, as the runtime calls them."""
    space = families()["vendor_sdpa"].space(problem, DEFAULT_GPU)
    return [config for config in space if config["kernel"] in ANSWERS]


SMOKE = PeerCase(AttentionProblem.parse("B=2,H=4,HKV=2,SQ=1,SKV=40,D=16,dtype=bf16"), "smoke")
