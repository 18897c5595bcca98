"""A layer of experts by `tuner.moe`, beside the fastest compositions of peers.

``scripts/bench moe`` times layers of public mixtures with random weights, each behind an ordinary
kernel that writes the tokens, in CUDA graphs. Experts are drawn evenly or by Zipf's law. Peers of
bf16 are PyTorch's operations around `torch._grouped_mm`, as they are and through `torch.compile`.
Peers of e4m3 are compiled operations around DeepGEMM's grouped kernels, in both of its layouts.

Peers compile for each layer, type and number of rows. Child processes do that side by side first
and leave their kernels in PyTorch's and DeepGEMM's caches. A peer that does not compile is named
there, with the compiler's words.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.moe_peers import Peers, peers_of
from tuner.base.output import check_place
from tuner.base.processes import python_command, python_environment
from tuner.bench.results import write_json
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.vendor import peers
from tuner.measurement import Status
from tuner.problem import E4M3, SCALE_BLOCK, DType, GroupedGemmProblem
from tuner.selection.describe import microseconds, table


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer of experts."""

    experts: int
    top_k: int
    hidden: int
    inner: int


LAYERS: Mapping[str, Sizes] = {
    "mixtral-8x7b": Sizes(8, 2, 4096, 14336),
    "olmoe-1b-7b": Sizes(64, 8, 2048, 1024),
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "qwen3-235b-a22b": Sizes(128, 8, 4096, 1536),
    "deepseek-v3": Sizes(256, 8, 7168, 2048),
}
"""The models' config.json: routed experts, experts of a token, hidden and expert's inner size."""
ROWS = (128, 1024, 8192)
"""Rows of all experts: tokens times experts of a token."""
ROUTES = ("uniform", "zipf")
DTYPES: Mapping[str, DType] = {"bf16": "bfloat16", "e4m3": E4M3}
OWN = "own"
BUDGET_US = 3e5
"""All rounds of a case take about so long; the layers take milliseconds, and there are many."""
COMPILE_LIMIT_S = 90.0
"""Seconds for the peers of a layer and type, beside those of the others."""
COMPILERS = 16
"""Processes that compile at once, at most, and at most one a core."""
KEPT_LINES = 20
"""Last lines that are shown of one that failed."""


@dataclass(frozen=True)
class Case:
    """A layer, its rows and how the router chooses."""

    layer: str
    rows: int
    route: str
    dtype: str

    @property
    def sizes(self) -> Sizes:
        return LAYERS[self.layer]

    @property
    def tokens(self) -> int:
        return max(1, self.rows // self.sizes.top_k)

    def label(self) -> str:
        return f"{self.layer} {self.dtype} {self.rows} rows, {self.route}"

    def products(self) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
        """Problems of both products."""
        one, dtype = self.sizes, DTYPES[self.dtype]
        rows = self.tokens * one.top_k
        return (
            GroupedGemmProblem(one.experts, rows, 2 * one.inner, one.hidden, "zipf", dtype),
            GroupedGemmProblem(one.experts, rows, one.hidden, one.inner, "zipf", dtype),
        )


class Weights:
    """Random weights of a layer.

    Args:
        sizes: of the layer.
        dtype: bf16 or e4m3.
        is_empty: leave the memory as it is, where only sizes matter.
    """

    def __init__(self, sizes: Sizes, dtype: str, *, is_empty: bool = False) -> None:
        import torch

        shapes = (
            (sizes.experts, 2 * sizes.inner, sizes.hidden),
            (sizes.experts, sizes.hidden, sizes.inner),
        )
        self.scales: tuple[Any, ...] = (None, None)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
        self.matrices = [torch.empty(shape, dtype=kind, device="cuda") for shape in shapes]
        if dtype == "e4m3":
            self.scales = tuple(
                torch.rand(
                    (s[0], math.ceil(s[1] / SCALE_BLOCK), math.ceil(s[2] / SCALE_BLOCK)),
                    device="cuda",
                )
                * (s[2] ** -0.5 / 100)
                + s[2] ** -0.5 / 100
                for s in shapes
            )
        if not is_empty:
            for matrix, shape in zip(self.matrices, shapes, strict=True):
                factor = shape[2] ** -0.5 if dtype == "bf16" else 100.0
                for expert in matrix:
                    drawn = torch.randn(expert.shape, device="cuda", dtype=torch.bfloat16)
                    expert.copy_(drawn.mul_(factor).clamp_(-448, 448))


def routed(case: Case) -> tuple[Any, Any]:
    """Experts int64 and weights bf16, (T, top_k): each token's experts are unlike."""
    import torch

    sizes, generator = case.sizes, torch.Generator("cuda").manual_seed(7)
    chances = torch.ones(sizes.experts, device="cuda")
    if case.route == "zipf":
        ranks = torch.randperm(sizes.experts, generator=generator, device="cuda")
        chances = 1 / (ranks + 1.0)
    every = chances.expand(case.tokens, -1)
    experts = torch.multinomial(every, sizes.top_k, generator=generator)
    weights = torch.rand(experts.shape, generator=generator, device="cuda").softmax(-1)
    return experts, weights.bfloat16()


class Calls:
    """A case's tensors and the ways to compute it.

    Args:
        case: what is computed.
        weights: of its layer.
        compositions: the peers of its type.
    """

    def __init__(self, case: Case, weights: Weights, compositions: Peers) -> None:
        import torch

        generator = torch.Generator("cuda").manual_seed(3)
        shape = (case.tokens, case.sizes.hidden)
        drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
        self.source = drawn.bfloat16()
        self.hidden, self._weights = self.source.clone(), weights
        self.experts, self.by = routed(case)
        self.peers = compositions

    def before(self, _: int) -> Any:
        """Write the tokens."""
        import torch

        return torch.add(self.source, 0.0, out=self.hidden)

    def own(self, _: int) -> Any:
        """The layer by the tuner."""
        import tuner

        gate_up_scale, down_scale = self._weights.scales
        return tuner.moe(
            self.hidden,
            self.experts,
            self.by,
            *self._weights.matrices,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    def ways(self) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """All ways, the own one first."""
        yield OWN, self.own
        weights = self._weights
        for name, peer in self.peers.items():

            def call(_: int, peer: Any = peer) -> Any:
                inputs = self.hidden, self.experts, self.by
                return peer(*inputs, *weights.matrices, *weights.scales)

            yield name, call


def timed(case: Case, weights: Weights, compositions: Peers) -> dict[str, Any]:
    """Times of a case, and how far the results are from the first peer's."""
    import torch

    import tuner

    calls = Calls(case, weights, compositions)
    outs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tuner.stats(reset=True)
    for name, call in calls.ways():
        try:
            outs[name] = call(0).float()
            torch.cuda.synchronize()
        except FAILURES as exc:
            failed[name] = first_line(exc)
    answered = tuner.stats()
    peers = [name for name in outs if name != OWN]
    wanted = outs[peers[0]] if peers else None
    far = {
        name: float((out - wanted).norm() / wanted.norm())
        for name, out in outs.items()
        if wanted is not None and name != peers[0]
    }
    ways = [Contender(name, call) for name, call in calls.ways() if name in outs]
    times = time_calls(ways, calls.before, 1, BUDGET_US)
    counts = torch.bincount(calls.experts.view(-1), minlength=case.sizes.experts)
    return {
        "layer": case.layer,
        "dtype": case.dtype,
        "rows": case.tokens * case.sizes.top_k,
        "route": case.route,
        "largest": int(counts.max()),
        "empty": int((counts == 0).sum()),
        "us": {name: round(us, 2) for name, us in times.us.items()},
        "difference": {name: round(value, 5) for name, value in far.items()},
        "failed": {**failed, **times.failed},
        "hits": answered.hits,
        "fallbacks": dict(answered.fallbacks),
    }


def products_timed(case: Case, weights: Weights) -> list[dict[str, Any]]:
    """Times of both products by each kernel of the rule, and by `torch._grouped_mm`."""
    import torch

    from tuner.runtime import block_scaled

    experts, _ = routed(case)
    counts = torch.bincount(experts.view(-1), minlength=case.sizes.experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = []
    for problem, b, scale_b in zip(case.products(), weights.matrices, weights.scales, strict=True):
        a: Any = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
        inputs: tuple[Any, ...] = (a, b, offsets)
        if scale_b is not None:
            a, scale_a = block_scaled.quantised(a)
            inputs = (a, b, offsets, scale_a, scale_b)
        source = a.clone().view(torch.int16)

        def before(_: int, source: Any = source, a: Any = a) -> Any:
            return torch.bitwise_or(source, 0, out=a.view(torch.int16))

        ways = [Contender(name, partial(_run, plan, inputs)) for name, plan in _plans(problem)]
        if scale_b is None:
            ways.append(Contender("grouped_mm", partial(_pytorchs, inputs)))
        times = time_calls(ways, before, 1, BUDGET_US)
        us = {name: round(value, 2) for name, value in times.us.items()}
        row = {"problem": problem.label(), "route": case.route, "us": us, "failed": times.failed}
        rows.append({**row, "estimates": _estimates(problem)})
    return rows


def _run(plan: Any, inputs: tuple[Any, ...], _: int) -> Any:
    return plan.run_uncounted(*inputs)


def _pytorchs(inputs: tuple[Any, ...], _: int) -> Any:
    import torch

    a, b, offsets = inputs
    return torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets[1:])


def _estimates(problem: GroupedGemmProblem) -> dict[str, float]:
    """The families' estimates of the rule's kernels, microseconds."""
    from tuner.families import families
    from tuner.runtime import devices
    from tuner.selection import grouped

    gpu = devices.gpu_of(0)
    return {
        _name(config): round(families()[config.family].predict_us(problem, config, gpu), 2)
        for config in grouped.KERNELS[problem.dtype]
    }


def _plans(problem: GroupedGemmProblem) -> Iterator[tuple[str, Any]]:
    """The rule's kernels that are proven here, as plans."""
    from tuner.families import families
    from tuner.measurement import Measurement, Provenance, Regime
    from tuner.runtime import devices
    from tuner.runtime.plan import Plan, Posed, plan_of
    from tuner.selection import grouped
    from tuner.selection.kernels import lists

    gpu = devices.gpu_of(0)
    selection = grouped.select(problem, gpu)
    for _, config in selection.own() if selection is not None else ():
        specs = families()[config.family].kernels(problem, config)
        found = lists.proven(specs, gpu.compute_capability)
        if isinstance(found, str):
            continue
        status, predicted = Status.OK, Provenance.PREDICTED
        known = Measurement(problem, config, gpu, Regime(), status, predicted, artifacts=found)
        plan = plan_of(Posed(problem), known, 0)
        if isinstance(plan, Plan):
            yield _name(config), plan


def _name(config: Any) -> str:
    return f"{'swapped ' * config['swap_ab']}{config['tile_m']}x{config['tile_n']}"


def cases(
    layers: Sequence[str], rows: Sequence[int], routes: Sequence[str], dtypes: Sequence[str]
) -> Iterator[tuple[tuple[str, str], list[Case]]]:
    """The cases by layer and type, which share weights."""
    for layer in layers:
        for dtype in dtypes:
            yield (
                (layer, dtype),
                [Case(layer, count, route, dtype) for count in rows for route in routes],
            )


def fastest_peer(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest way that is not the own one."""
    peers = {name: us for name, us in row["us"].items() if name != OWN}
    return min(peers.items(), key=lambda one: one[1]) if peers else None


def report(document: Mapping[str, Any]) -> str:
    """A line a case, the geometric means and the worst."""
    lines: list[Sequence[str]] = [("layer", "type", "rows", "route", "own", "peer", "us", "speed")]
    ratios: dict[str, list[float]] = {}
    for row in document["cases"]:
        best, own = fastest_peer(row), row["us"].get(OWN)
        ratio = "" if best is None or own is None else f"{best[1] / own:.3f}"
        if best is not None and own is not None:
            ratios.setdefault(row["dtype"], []).append(best[1] / own)
        lines.append(
            (
                row["layer"],
                row["dtype"],
                str(row["rows"]),
                row["route"],
                "" if own is None else microseconds(own),
                "" if best is None else best[0],
                "" if best is None else microseconds(best[1]),
                ratio,
            )
        )
    said = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    means = [
        f"{dtype}: mean {math.exp(sum(map(math.log, found)) / len(found)):.3f}, "
        f"worst {min(found):.3f} of {len(found)}"
        for dtype, found in ratios.items()
    ]
    return "\n".join([said, "", table(lines, frozenset((2, 4, 6, 7))), *means])


def environment() -> dict[str, Any]:
    """Facts that the run depends on.

    Raises:
        BenchmarkError: where there is no GPU or no PyTorch.
    """
    try:
        import torch
    except ImportError as exc:
        raise BenchmarkError(f"PyTorch cannot be imported: {exc}") from exc
    if not torch.cuda.is_available():
        raise BenchmarkError("a layer is timed on a GPU: none is here", status=Status.UNAVAILABLE)
    from tuner.runtime import devices

    facts = dict(devices.environment().facts)
    facts |= {"cuda": torch.version.cuda, "deep_gemm": peers.version("deep_gemm") or "missing"}
    return {"gpu": torch.cuda.get_device_name(), **facts}


def _chosen(name: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The names between commas.

    Raises:
        ConfigError: when one is not known.
    """
    found = text.split(",")
    if unknown := [one for one in found if one not in allowed]:
        raise ConfigError(f"--{name} {unknown[0]} is not known (allowed: {', '.join(allowed)})")
    return found


def main(argv: Sequence[str]) -> int:
    """Run it; writes the file after each layer, and prints the table last.

    Raises:
        BenchmarkError: where there is no GPU or no PyTorch.
        ConfigError: when an option is wrong.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench moe", description=__doc__)
    parser.add_argument("--layers", default=",".join(LAYERS), metavar="NAME,...")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), metavar="N,...")
    parser.add_argument("--routes", default=",".join(ROUTES), metavar="NAME,...")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="NAME,...")
    parser.add_argument(
        "--products", action="store_true", help="also both products by each own kernel"
    )
    parser.add_argument(
        "--warm", action="store_true", help="only compile the peers' kernels, time nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_place(args.json)
    rows = _chosen("rows", args.rows, [str(1 << power) for power in range(17)])
    chosen = list(
        cases(
            _chosen("layers", args.layers, tuple(LAYERS)),
            [int(count) for count in rows],
            _chosen("routes", args.routes, ROUTES),
            _chosen("dtypes", args.dtypes, tuple(DTYPES)),
        )
    )
    document: dict[str, Any] = {"environment": environment(), "cases": [], "products": []}
    if not args.warm:
        compile_peers([key for key, _ in chosen], args.rows)
    import torch

    are_whole = True
    with torch.inference_mode():
        for (layer, dtype), every in chosen:
            weights = Weights(LAYERS[layer], dtype, is_empty=args.warm)
            for _, group in groupby(every, key=lambda case: case.rows):
                compositions = peers_of(dtype)  # which routes share
                for case in group:
                    if args.warm:
                        are_whole = _warm(case, weights, compositions) and are_whole
                        continue
                    document["cases"].append(timed(case, weights, compositions))
                    if args.products:
                        document["products"] += products_timed(case, weights)
            del weights
            torch.cuda.empty_cache()
            print(f"{layer} {dtype}: done", file=sys.stderr, flush=True)
            if args.json and not args.warm:
                write_json(args.json, document)
    if args.warm:
        return int(not are_whole)
    print(report(document))
    return 0


def compile_peers(wanted: Sequence[tuple[str, str]], rows: str) -> None:
    """Compile the peers of layers and types in processes side by side; say what failed.

    Args:
        wanted: layers and types.
        rows: with commas between.
    """
    jobs = min(COMPILERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        for said in pool.map(partial(_compiled, rows=rows), wanted):
            if said:
                print(said, file=sys.stderr, flush=True)


def _compiled(wanted: tuple[str, str], rows: str) -> str:
    """Why peers of a layer and type were not compiled, with the compiler's words; else empty."""
    (layer, dtype), limit = wanted, COMPILE_LIMIT_S
    options = ["--layers", layer, "--dtypes", dtype, "--rows", rows, "--routes", ROUTES[0]]
    with subprocess.Popen(
        python_command("-m", "benchmarks", "moe", "--warm", *options),
        env={**python_environment(), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"{layer} {dtype}: the peers were not compiled within {limit:g} s"
        finally:  # and with it the compilers that it started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if not process.returncode:
        return ""
    return f"{layer} {dtype}: peers were not compiled: " + "\n".join(
        said.splitlines()[-KEPT_LINES:]
    )


def _warm(case: Case, weights: Weights, compositions: Peers) -> bool:
    """Call each peer once; True when all could be."""
    import torch

    are_whole = True
    for name, call in Calls(case, weights, compositions).ways():
        if name == OWN:
            continue
        try:
            call(0)
            torch.cuda.synchronize()
        except ValueError:
            continue  # a layout that does not hold so many rows; its times say so
        except FAILURES as exc:
            are_whole = False
            print(f"{case.label()}: {name}: {first_line(exc)}", file=sys.stderr)
    return are_whole
