"""Attention over paged caches: what is served, FlashAttention-3's serving build, the dense kernel.

``scripts/bench paged`` times decoding, chunks of prompts and batches of both as an engine has them.
Each call stands behind a kernel that writes its queries, in a CUDA graph. Caches are rotated, so
that none is in the L2 (`call_times.time_calls`). Contenders of a case, in shuffled order:

- ``tuner``: `tuner.paged_attention`, with the kernel and the number of splits that it selects
- ``best``: the fastest schedule of the kernels that it selects from, found in a pass of its own
- ``flash3``: FlashAttention-3's serving build with its scheduler's metadata, made before
- ``dense``: `tuner.attention` over a dense cache, where all sequences are alike and have one query
- ``in order``: as ``tuner``, over pages that lie in their order, beside ``dense``
- ``read``: PyTorch's sum of as many bytes in their order, beside ``dense``

Only compiled kernels take part; ``--compile`` compiles them, and times nothing. ``--selected``
leaves out ``best`` and its pass.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import own_kernels
from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.gpu import need_gpu
from benchmarks.paged_batches import Case, cases, groups
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.cli.aot import compile_aot
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.compile.toolchain import find_toolchain
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.base import KernelSpec, Strides
from tuner.families.peers import installed, stream_of
from tuner.families.peers.sdpa import DESCALES
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem
from tuner.selection.domains import AttentionDomain

FAMILY = own_kernels.FAMILY
PEER = "flash3_serving"
#: Bytes of keys and values that the rotated caches have together at least: twenty times the L2, of
#: which copies that are to stay there longest keep a part.
ROTATED = 1 << 30
MIN_POOL = 4 << 30
#: Copies of a case's caches at most: calls of a graph at most.
MAX_COPIES = 40
#: Microseconds of replays of the pass over all schedules, and of the one beside the peers.
QUICK_US, FINAL_US = 1e5, 4e5
#: Splits that are tried, as far as they have blocks for the chip.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: Factor of queries, keys and values of e4m3, and the bits of elements below 2: none is a NaN.
FACTOR, NUMBERS = 0.5, 0xBF
#: Blocks of a schedule at most, where all sequences are alike: rounds over the chip.
MAX_ROUNDS = 8
Call = Callable[[int], Any]
"""A call over the cache of an index."""


def configs(case: Case) -> Iterator[Config]:
    """Kernels that `tuner.paged_attention` selects from, each with one split."""
    problem = case.problem
    domain = AttentionDomain.holding(problem)
    if domain is None:
        raise BenchmarkError(f"{case.label()}: no kernels serve it")
    for kernel in domain.named_kernels:
        config = FAMILY.called(problem, kernel, 1)
        if FAMILY.accepts(problem, config, DEFAULT_GPU):
            yield config


def schedules(case: Case, config: Config) -> Iterator[Config]:
    """A kernel's config with each number of splits worth trying."""
    problem = case.problem
    rows = 64 * int(config["warp_groups"]) // int(config.get("packed_heads", 1))
    blocks = sum(-(-queries // rows) for queries in case.queries) * case.heads_kv
    room = MAX_ROUNDS * DEFAULT_GPU.sm_count * int(config["blocks_per_sm"])
    for splits in SPLITS:
        if splits > 1 and ((blocks * splits > room and case.is_even) or config["persistent"]):
            continue
        for combine in ("kernel", "cluster") if splits > 1 else (None,):
            params = {**config.params, "splits": splits}
            if combine:
                params["combine"] = combine
            made = Config(config.family, params)
            if not FAMILY.violations(problem, made, DEFAULT_GPU):
                yield made


def short(config: Config) -> str:
    """A config for a table."""
    names = ("warp_groups", "tile_n", "kv_stages", "packed_heads", "box_rows", "splits")
    text = "/".join(str(config.get(name, 1)) for name in names)
    text += " padded" if config.get("pads_heads") else ""
    text += " whole" if config.get("whole_rows") else ""
    text += " regs" if config["q_in_registers"] else ""
    text += " persistent" if config["persistent"] else ""
    return text + (f" {config['combine']}" if "combine" in config.params else "")


class Batch:
    """A case's tensors: caches in one pool, as many as the L2 cannot hold."""

    def __init__(self, case: Case, pool: Any) -> None:
        """Args: case: the batch; pool: bytes, of keys and values of all caches."""
        import torch

        self.case, problem = case, case.problem
        dtype = getattr(torch, case.dtype)
        pool = pool.view(dtype)
        size, width = case.page_size, case.heads_kv * case.head_dim
        counts = [-(-keys // size) for keys in case.keys]
        needed = sum(counts)
        self.copies = max(1, -(-ROTATED // max(1, case.bytes)))
        self.copies = min(self.copies, MAX_COPIES, pool.numel() // (2 * needed * size * width))
        pages = self.copies * needed
        if not self.copies:
            raise BenchmarkError(f"{case.label()}: the caches do not fit")
        pool = pool[: 2 * pages * size * width]
        self.rows = pool.view(2, pages, size, case.heads_kv, case.head_dim)
        if case.is_halved:
            both = pool.view(pages, case.heads_kv, size, 2 * case.head_dim).transpose(1, 2)
            self.key, self.value = both.split(case.head_dim, -1)
        else:
            self.key, self.value = self.rows
        torch.manual_seed(0)
        columns = max(counts)

        def tables(places: Any) -> list[Any]:
            found = []
            for part in places.int().view(self.copies, needed):
                table = torch.zeros(len(counts), columns, dtype=torch.int32, device="cuda")
                for row, mine in zip(table, part.split(counts), strict=True):
                    row[: len(mine)] = mine
                found.append(table)
            return found

        self.tables = tables(torch.randperm(pages, device="cuda"))
        self.ordered = tables(torch.arange(pages, device="cuda")) if case.has_dense else []
        total = sum(case.queries)
        query = torch.randn(total, case.heads_q, case.head_dim, device="cuda")
        self.source = query.to(dtype)
        self.query, self.out = self.source.clone(), torch.empty_like(query, dtype=torch.bfloat16)
        heads = (case.heads_q, case.heads_kv, case.heads_kv) if case.dtype == E4M3 else ()
        self.scales = [torch.full((count,), FACTOR, device="cuda") for count in heads]
        self.used = torch.tensor(case.keys, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *case.queries], device="cuda").cumsum(0).int()
        self.sinks = None  # numbers that bf16 holds, which is what FlashAttention-3 takes
        if case.has_sinks:
            self.sinks = torch.randn(case.heads_q, device="cuda").bfloat16().float()
        self.scale = case.head_dim**-0.5
        self.problem = problem

    def own(self, kernel: LoadedKernel, config: Config) -> Call:
        """A call of a paged kernel."""
        import torch

        row, head, column = self.query.stride()
        packed = (0, head, row, column)
        cache = self.key.transpose(1, 2).stride()
        table = self.tables[0]
        strides: Strides = {
            **{"query": packed, "out": packed, "key": cache, "value": cache},
            "page_table": table.stride(),
        }
        (launch,) = _launches(self.problem, config, self.scale, strides)
        *others, _total, size, _pages, stride = launch.integers
        integers = (*others, self.query.shape[0], size, self.key.shape[0], stride)
        bytes_ = max(1, kernel.workspace_bytes(integers))
        workspace = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
        run = kernel.bind(integers, launch.scalars)
        fixed = [t.data_ptr() for t in (self.query, self.key, self.value, self.out)]
        others = [t.data_ptr() for t in (self.sinks, *self.scales) if t is not None]

        def call(index: int) -> Any:
            place = self.tables[index % self.copies].data_ptr()
            tensors = [*fixed, 0, place, self.used.data_ptr(), self.starts.data_ptr(), *others]
            run(tensors, workspace.data_ptr(), stream_of(self.query.device))
            return self.out

        return call

    def tuner(self, tables: Sequence[Any]) -> Call:
        """A call of `tuner.paged_attention`, as an engine makes it, over the pages of tables."""
        import tuner

        case = self.case
        options = {
            "causal": self.problem.is_causal,
            "window": (case.window, -1),
            "sinks": self.sinks,
            "scale": self.scale,
            "out": self.out,
            "total_seqlen_k": sum(case.keys),
            **dict(zip(("q_scale", "k_scale", "v_scale"), self.scales, strict=False)),
        }
        lengths = self.used, self.starts, max(case.queries), max(case.keys)

        def call(index: int) -> Any:
            table = tables[index % self.copies]
            return tuner.paged_attention(
                self.query, self.key, self.value, table, *lengths, **options
            )

        return call

    def chosen(self) -> str:
        """The schedule that `tuner.paged_attention` selects, or why it has none."""
        from tuner.runtime.attention.composed import Extras
        from tuner.runtime.attention.paged import paged_call, prepare
        from tuner.runtime.call.refusal import Refusal

        case = self.case
        tensors = self.query, self.key, self.value, self.tables[0], self.used, self.starts
        extras = Extras.of((case.window, -1), 0.0)
        options = max(case.queries), max(case.keys), self.problem.is_causal, extras, self.scale
        call = paged_call(*tensors, self.sinks, *options)
        call = call._replace(descales=tuple(self.scales), total_kv=sum(case.keys))
        plan = prepare(call)
        if isinstance(plan, Refusal):
            return plan.reason
        kernel = {name: v for name, v in plan.config.params.items() if name != "combine"}
        schedule = dict(call.schedule(plan.config)) or plan.config.params
        return short(Config(plan.config.family, {**kernel, **schedule}))

    def dense(self) -> Call:
        """A call of `tuner.attention` over a dense cache of as many numbers."""
        import tuner

        case = self.case
        shape = len(case.keys), case.keys[0], case.heads_kv, case.head_dim
        caches = [cache.view(self.copies, *shape).transpose(2, 3) for cache in self.rows]
        query = self.query.unsqueeze(2)

        def call(index: int) -> Any:
            key, value = (each[index % self.copies] for each in caches)
            return tuner.attention(query, key, value, scale=self.scale, enable_gqa=True)

        return call

    def read(self) -> Call:
        """A sum of the bytes of a cache, in their order."""
        import torch

        caches = self.rows.view(-1).view(torch.float32).view(self.copies, -1)
        total = torch.empty((), device="cuda")
        return lambda index: torch.sum(caches[index % self.copies], 0, out=total)

    def flash3(self, module: Any) -> Call:
        """A call of FlashAttention-3's serving build, with the metadata that a server makes."""
        case, problem = self.case, self.problem
        window = (case.window, 0) if case.window >= 0 else (-1, -1)
        lengths = max(case.queries), max(case.keys)
        metadata = module.metadata(
            *(self.used, *lengths, case.heads_q, case.heads_kv, case.head_dim, self.query.dtype),
            cu_seqlens_q=self.starts,
            page_size=case.page_size,
            causal=problem.is_causal,
            window=window,
        )
        options = {
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": lengths[0],
            "seqused_k": self.used,
            "max_seqlen_k": lengths[1],
            "causal": problem.is_causal,
            "scale": self.scale,
            "window": window,
            "sinks": None if self.sinks is None else self.sinks.bfloat16(),
            "metadata": metadata,
        }
        if self.scales:
            one = self.scales[1].expand(len(case.keys), -1)
            options |= dict.fromkeys(DESCALES, one)

        def call(index: int) -> Any:
            table = self.tables[index % self.copies]
            return module.fwd(self.query, self.key, self.value, page_table=table, **options)

        return call


def _launches(problem: AttentionProblem, config: Config, scale: float, strides: Strides) -> Any:
    found = FAMILY.strided_launches(problem, config, scale, strides)
    if isinstance(found, str):
        raise BenchmarkError(found)
    return found


def compared(
    case: Case,
    pool: Any,
    kernels: Mapping[Config, LoadedKernel],
    final_us: float = FINAL_US,
    quick_us: float = QUICK_US,
) -> dict[str, Any]:
    """Times of one case.

    Args:
        case: the batch.
        pool: bytes that hold its caches.
        kernels: the compiled ones of `configs` that ``best`` is found among; none: it is left out.
        final_us: microseconds of each contender's replays in the last pass.
        quick_us: microseconds of each schedule's replays in the pass before.
    """
    import tuner

    batch = Batch(case, pool)
    own = {
        short(made): batch.own(kernel, made)
        for config, kernel in kernels.items()
        for made in schedules(case, config)
    }
    failed: dict[str, str] = {}
    quick = _timed(batch, own, quick_us, failed) if own else {}
    best = min(quick, key=lambda name: quick[name], default="")
    contenders = {"tuner": batch.tuner(batch.tables)}
    if best:
        contenders["best"] = own[best]
    if case.has_dense:
        contenders |= {"dense": batch.dense(), "read": batch.read()}
        contenders["in order"] = batch.tuner(batch.ordered)
    module = installed.module_of(PEER)
    if isinstance(module, str):
        failed["flash3"] = module
    else:
        contenders["flash3"] = batch.flash3(module)
    outs, answered = {}, {}
    for name, call in contenders.items():
        tuner.stats(reset=True)
        outs[name] = call(0).double()
        seen = tuner.stats(reset=True)
        if name in ("tuner", "dense"):
            answered[name] = "own" if seen.hits else ", ".join(seen.fallbacks)
    wanted = outs.get("flash3")
    return {
        "case": case.label(),
        "group": case.group,
        "problem": case.problem.to_json(),
        "queries": case.queries,
        "keys": case.keys,
        "bytes": case.bytes,
        "flops": case.flops,
        "us": _timed(batch, contenders, final_us, failed),
        "answered": answered,
        "chosen": batch.chosen(),
        "best": best,
        "schedules": quick,
        "difference": {
            name: float((out.flatten() - wanted.flatten()).norm() / wanted.norm())
            for name, out in outs.items()
            if wanted is not None and name in ("tuner", "best")
        },
        "failed": failed,
    }


def _timed(
    batch: Batch, calls: Mapping[str, Call], budget_us: float, failed: dict[str, str]
) -> dict[str, float]:
    """Microseconds of each call; why others have none is added to `failed`."""
    import torch

    able = []
    for name, call in calls.items():
        try:
            call(0)
            able.append(Contender(name, call))
        except FAILURES as exc:  # a cluster that this GPU has no place for
            torch.cuda.synchronize()  # raises again where the device is lost
            failed[name] = first_line(exc)
    source, written = (t.view(torch.uint8) for t in (batch.source, batch.query))
    times = time_calls(able, lambda _: torch.add(source, 0, out=written), batch.copies, budget_us)
    failed |= times.failed
    return times.us


def kernels_of(case: Case) -> dict[Config, KernelSpec]:
    """The kernels of `configs`."""
    return {config: FAMILY.kernels(case.problem, config)["attention"] for config in configs(case)}


def loaded(wanted: Sequence[Case]) -> dict[Case, dict[Config, LoadedKernel]]:
    """The compiled kernels of all cases, by case and config."""
    known: dict[KernelSpec, LoadedKernel | None] = {}
    found: dict[Case, dict[Config, LoadedKernel]] = {case: {} for case in wanted}
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        for case in wanted:
            for config, spec in kernels_of(case).items():
                if spec not in known:
                    artifact = compiler.cached(spec)
                    known[spec] = None if artifact is None else load(artifact)
                if (kernel := known[spec]) is not None:
                    found[case][config] = kernel
    return found


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    us = found["us"]
    own = us.get("tuner", math.nan)
    others = "".join(
        f" | {name} {us[name]:.1f} {us[name] / own:.3f}"
        for name in ("flash3", "dense", "in order", "read", "best")
        if name in us
    )
    text = (
        f"{found['case']:56} {own:8.1f} us {found['bytes'] / own / 1e6:5.2f} TB/s "
        f"{found['flops'] / own / 1e6:5.0f} TFLOP/s{others} | {found['chosen']}"
    )
    if found["best"] not in ("", found["chosen"]):
        text += f", best {found['best']}"
    slow = {name: by for name, by in found["answered"].items() if by != "own"}
    return text + "".join(f" | {name}: {by}" for name, by in slow.items())


def ratios(
    every: Sequence[Mapping[str, Any]], over: str, own: str = "tuner"
) -> dict[str, list[float]]:
    """Times of a contender over the own ones, by group."""
    found: dict[str, list[float]] = {}
    for case in every:
        if over in case["us"] and own in case["us"]:
            found.setdefault(case["group"], []).append(case["us"][over] / case["us"][own])
    return found


def table(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown by group: the peer's and the dense call's time over the own one, mean and least.

    A last column has the best schedule's time over the own one, where schedules were timed.
    """
    columns = [ratios(every, name) for name in ("flash3", "dense", "best")]
    heads = ["batches", "cases", "over FlashAttention-3", "least", "over the dense call", "least"]
    heads += ["of the best schedule"] if columns[2] else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for group in dict.fromkeys(case["group"] for case in every):
        cells = [group, str(sum(case["group"] == group for case in every))]
        for column in columns[:2]:
            some = column.get(group, [])
            mean = f"{statistics.geometric_mean(some):.3f}" if some else ""
            cells += [mean, f"{min(some):.3f}" if some else ""]
        if columns[2]:
            best = columns[2].get(group, [])
            cells.append(f"{statistics.geometric_mean(best):.3f}" if best else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a group is not known.
        BenchmarkError: when torch sees no GPU.
    """
    args = _parser().parse_args(argv)
    check_place(args.json)
    known = groups()
    if unknown := set(args.group) - set(known):
        raise ConfigError(f"--group {min(unknown)} is not known (allowed: {', '.join(known)})")
    wanted = list(cases(args.group))
    if args.compile:
        specs = dict.fromkeys(spec for case in wanted for spec in kernels_of(case).values())
        with Compiler(find_toolchain(), ArtifactCache()) as compiler:
            return compile_aot(list(specs), compiler, None)
    need_gpu("--compile")
    import torch

    kernels = {case: {} for case in wanted} if args.selected else loaded(wanted)
    size = max(MIN_POOL, ROTATED + max(case.cached_bytes for case in wanted))
    numbers = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda").normal_()
    pool = numbers.view(torch.uint8)
    every: list[dict[str, Any]] = []
    environment = own_kernels.environment()
    for case in sorted(wanted, key=lambda case: case.dtype == E4M3):
        if case.dtype == E4M3:
            pool &= NUMBERS
        try:
            every.append(compared(case, pool, kernels[case], args.us, args.quick_us))
        except FAILURES as exc:
            print(f"{case.label()}: {first_line(exc)}", flush=True)
            continue
        print(line(every[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"environment": environment, "cases": every})
    print("\n".join(table(every)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench paged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help="only this group of cases; may be repeated",
    )
    parser.add_argument("--compile", action="store_true", help="compile kernels, time nothing")
    parser.add_argument("--selected", action="store_true", help="leave out the other schedules")
    parser.add_argument(
        "--us", type=float, default=FINAL_US, help="microseconds of a contender's replays"
    )
    parser.add_argument(
        "--quick-us", type=float, default=QUICK_US, help="the same, of a schedule in the first pass"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser
