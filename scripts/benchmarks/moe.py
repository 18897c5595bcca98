"""A layer of experts by `tuner.moe`, beside the fastest compositions of peers.

``scripts/bench moe`` times layers of public mixtures with random weights, each behind an ordinary
kernel that writes the tokens, in CUDA graphs. Experts are drawn evenly or by Zipf's law. Peers of
bf16 are PyTorch's operations around `torch._grouped_mm`, as they are and through `torch.compile`.
Peers of e4m3 are compiled operations around DeepGEMM's grouped kernels, in both of its layouts.
``--products`` adds both grouped products alone, by each own kernel and by DeepGEMM's.

Peers compile for each layer, type and number of rows. A child process for each does that first,
all of them side by side. Then one after the other times its cases.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.child import Worker, answer_indices, turn
from benchmarks.gpu import need_gpu
from benchmarks.moe_layers import DTYPES, LAYERS, ROUTES, ROWS, Case, Key, Weights, cases, routed
from benchmarks.moe_peers import Peers, peers_of
from benchmarks.moe_products import prepared, products_timed
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.families.peers import installed
from tuner.selection.describe import microseconds, table

OWN = "own"
BUDGET_US = 2e5
"""All rounds of a case take about so long; the layers take milliseconds, and there are many."""
COMPILE_LIMIT_S, CASE_LIMIT_S = 150.0, 60.0
"""Seconds for the peers of all layers, which compile side by side, and for a case's times."""
MAX_CHILDREN = 64
"""Processes that compile at once, at most."""


class Calls:
    """A case's tensors and the ways to compute it.

    Args:
        case: layer and rows to compute.
        weights: weights of its layer.
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


class Layer:
    """A child process: the cases of a layer, a type and a number of rows.

    Args:
        every: the cases.
        with_products: also both products alone.
        unproven: by kernels without a proof, too.
    """

    def __init__(self, every: Sequence[Case], *, with_products: bool, unproven: bool) -> None:
        self._cases, self._with_products, self._unproven = every, with_products, unproven
        first = every[0]
        self._sizes, self._dtype = first.sizes, first.dtype
        self._compositions = peers_of(first.dtype)
        self._weights: Weights | None = None

    def answer(self, index: int) -> dict[str, Any]:
        """Compile all ways (index 0), or time a case: its row, and those of its products."""
        import torch

        with torch.inference_mode():
            if index == 0:
                return {"said": self._compiled()}
            if self._weights is None:
                self._weights = Weights(self._sizes, self._dtype)
            case, weights = self._cases[index - 1], self._weights
            row = timed(case, weights, self._compositions)
            products = (
                products_timed(case, weights, unproven=self._unproven)
                if self._with_products
                else []
            )
            return {"case": row, "products": products}

    def _compiled(self) -> list[str]:
        """Call each way once; what failed."""
        import torch

        said, case = [], self._cases[0]
        weights = Weights(self._sizes, self._dtype, is_empty=True)
        for name, call in Calls(case, weights, self._compositions).ways():
            if name == OWN:
                continue
            try:
                call(0)
                torch.cuda.synchronize()
            except ValueError:
                continue  # a layout that does not hold so many rows; its times say so
            except FAILURES as exc:
                said.append(f"{case.label()}: {name}: {first_line(exc)}")
        if self._with_products:
            said += prepared(case, weights)
        return said


def measured(
    wanted: Sequence[tuple[Key, Sequence[Case]]],
    options: Sequence[str],
    limit_s: float = COMPILE_LIMIT_S,
    lock: Path | None = None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case with its child's answer, once all children have compiled; a route after the other.

    Args:
        wanted: cases of each child.
        options: options of the children, beside their layers, types and rows.
        limit_s: seconds for the peers of each, beside those of the others.
        lock: as of `turn`, for the times.
    """

    def command(key: Key) -> list[str]:
        layer, dtype, rows = key
        given = ("--layers", layer, "--dtypes", dtype, "--rows", str(rows))
        return python_command("-m", "benchmarks", "moe", "--child", *given, *options)

    def compiled(worker: Worker) -> dict[str, Any]:
        return worker.ask(0, limit_s)

    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(command(key), CASE_LIMIT_S)) for key, _ in wanted]
        with ThreadPoolExecutor(MAX_CHILDREN) as pool:
            answers = list(pool.map(compiled, workers))
        for line in (line for answer in answers for line in answer.get("said", ())):
            print(f"not compiled: {line}", file=sys.stderr, flush=True)
        stack.enter_context(turn(lock))
        for index in range(max(len(every) for _, every in wanted)):
            for place, (worker, (_, every)) in enumerate(zip(workers, wanted, strict=True)):
                if "lost" not in answers[place]:
                    answers[place] = worker.ask(index + 1)
                yield every[index], answers[place]


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
    text = [said, "", table(lines, frozenset((2, 4, 6, 7))), *_means(ratios)]
    if document.get("products"):
        text += ["", *_of_products(document["products"])]
    return "\n".join(text)


def _means(ratios: Mapping[str, Sequence[float]]) -> list[str]:
    return [
        f"{name}: mean {math.exp(sum(map(math.log, found)) / len(found)):.3f}, "
        f"worst {min(found):.3f} of {len(found)}"
        for name, found in ratios.items()
    ]


def _of_products(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a product: the rule's first kernel and the best one, beside the fastest peer."""
    lines: list[Sequence[str]] = [
        ("product", "route", "rule", "us", "best", "us", "peer", "us", "speed")
    ]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        own = {name: us for name, us in row["us"].items() if name in row.get("estimates", ())}
        peer = {name: us for name, us in row["us"].items() if name not in own}
        if not own or not peer:
            continue
        first = next(name for name in row["estimates"] if name in own)
        best, fastest = min(own, key=own.__getitem__), min(peer, key=peer.__getitem__)
        dtype = row["problem"].rsplit("dtype=", 1)[-1]
        ratio = peer[fastest] / own[first]
        ratios.setdefault(f"products, {dtype}", []).append(ratio)
        ratios.setdefault(f"products, {dtype}, best kernel", []).append(peer[fastest] / own[best])
        us = [microseconds(found) for found in (own[first], own[best], peer[fastest])]
        lines.append(
            (
                row["problem"],
                row["route"],
                first,
                us[0],
                best,
                us[1],
                fastest,
                us[2],
                f"{ratio:.3f}",
            )
        )
    return [table(lines, frozenset((3, 5, 7, 8))), *_means(ratios)]


def environment() -> dict[str, Any]:
    """Facts that the run depends on.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
    """
    need_gpu()
    import torch

    from tuner.runtime.call import devices

    facts = dict(devices.environment().facts)
    facts |= {"cuda": torch.version.cuda, "deep_gemm": installed.version("deep_gemm") or "missing"}
    return file_head.complete({"gpu": torch.cuda.get_device_name(), **facts})


def _chosen(name: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The names between commas.

    Raises:
        ConfigError: when one is not known.
    """
    found = text.split(",")
    if unknown := [one for one in found if one not in allowed]:
        raise ConfigError(f"--{name} {unknown[0]} is not known (allowed: {', '.join(allowed)})")
    return found


def _layer(every: Sequence[Case], args: argparse.Namespace) -> Layer:
    return Layer(every, with_products=args.products, unproven=args.unproven)


def main(argv: Sequence[str]) -> int:
    """Run it; writes the file after each case, and prints the tables last.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        ConfigError: when an option is wrong.
    """
    args = _parser().parse_args(argv)
    check_place(args.json)
    rows = _chosen("rows", args.rows, [str(1 << power) for power in range(17)])
    routes = _chosen("routes", args.routes, ROUTES)
    dtypes = _chosen("dtypes", args.dtypes, tuple(DTYPES))
    layers = [*LAYERS, *(f"{layer}:{dtype}" for layer in LAYERS for dtype in DTYPES)]
    chosen: list[tuple[Key, list[Case]]] = []
    for layer in _chosen("layers", args.layers, layers):
        name, _, only = layer.partition(":")
        numbers = [int(count) for count in rows]
        chosen += cases([name], numbers, routes, [only] if only else dtypes)
    if args.child:
        return answer_indices(_layer(chosen[0][1], args).answer)
    document: dict[str, Any] = {"environment": environment(), "cases": [], "products": []}
    options = ["--routes", args.routes]
    options += ["--products"] * args.products + ["--unproven"] * args.unproven
    for case, answer in measured(chosen, options, args.compile_limit, args.turn):
        if "lost" in answer:
            print(f"{case.label()}: {answer['lost']}", file=sys.stderr, flush=True)
            continue
        document["cases"].append(answer["case"])
        document["products"] += answer["products"]
        if args.json:
            write_json(args.json, document)
    print(report(document))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scripts/bench moe", description=__doc__)
    parser.add_argument(
        "--layers", default=",".join(LAYERS), metavar="NAME,...", help="NAME:TYPE has one type only"
    )
    parser.add_argument(
        "--rows", default=",".join(map(str, ROWS)), metavar="N,...", help="numbers of tokens"
    )
    parser.add_argument(
        "--routes",
        default=",".join(ROUTES),
        metavar="NAME,...",
        help="distributions of the tokens over experts",
    )
    parser.add_argument(
        "--dtypes", default=",".join(DTYPES), metavar="NAME,...", help="types of the weights"
    )
    parser.add_argument(
        "--products", action="store_true", help="also both products alone, by each kernel"
    )
    parser.add_argument(
        "--unproven",
        action="store_true",
        help="with --products: also kernels that are built and not proven",
    )
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=COMPILE_LIMIT_S,
        metavar="SECONDS",
        help=f"for the peers of all layers, side by side (default {COMPILE_LIMIT_S:g})",
    )
    parser.add_argument(
        "--turn", type=Path, metavar="FILE", help="take the times under a lock of this file"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser
