"""Attention over paged caches: the own kernel, FlashAttention-3's serving build, the dense kernel.

``scripts/bench paged`` times decoding, chunks of prompts and batches of both as an engine has them.
Each call stands behind a kernel that writes its queries, in a CUDA graph. Caches are rotated, so
that none is in the L2. The time of a graph with only the other kernels is taken off. The contenders
are interleaved in shuffled order in every round.

FlashAttention-3 gets its scheduler's metadata, made before. Own kernels of several configs and
schedules take part in a quick pass, and the fastest in the rounds. The dense kernel takes part
where all sequences are alike.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.compile.artifacts import ArtifactCache, LoadedKernel, load
from tuner.compile.compiler import Compiler, find_toolchain
from tuner.config import Config, Value
from tuner.errors import BenchmarkError, ConfigError, TunerError
from tuner.families import family
from tuner.families.base import Strides
from tuner.families.vendor import peers, stream_of
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

FAMILY = family("fused_attention")
PEER = "flash3_serving"
#: Bytes of keys and values that the rotated caches have together at least: three times the L2.
ROTATED = 192 << 20
MIN_POOL = 4 << 30
QUICK_ROUNDS, ROUNDS = 3, 15
#: Calls of a graph: many of short ones, so that a graph takes half a millisecond or more.
CALLS = range(4, 41)
GRAPH_US = 1500.0
#: Splits that are tried, as far as they have blocks for the chip.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
Call = Callable[[int], Any]
"""A call over the cache of an index."""


@dataclass(frozen=True)
class Case:
    """One batch: what each sequence has of queries and keys."""

    group: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int = -1
    has_sinks: bool = False

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            batch=len(self.queries),
            seqlen_q=max(self.queries),
            seqlen_kv=max(self.keys),
            head_dim=self.head_dim,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            dtype="bfloat16",
            is_causal=max(self.queries) > 1 or self.window >= 0,
            window_left=self.window,
            page_size=self.page_size,
            has_sinks=self.has_sinks,
        )

    @property
    def is_even(self) -> bool:
        """All sequences have as many queries and keys."""
        return len(set(self.queries)) == len(set(self.keys)) == 1

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that queries see."""
        seen = sum(
            min(keys, self.window + queries) if self.window >= 0 else keys
            for queries, keys in zip(self.queries, self.keys, strict=True)
        )
        return 4 * seen * self.heads_kv * self.head_dim

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages of one copy of the keys and values."""
        pages = sum(-(-keys // self.page_size) for keys in self.keys)
        return 4 * pages * self.page_size * self.heads_kv * self.head_dim

    @property
    def flops(self) -> int:
        parts = zip(self.queries, self.keys, strict=True)
        one = replace(self.problem, batch=1)
        return sum(replace(one, seqlen_q=q, seqlen_kv=k).flops for q, k in parts if q)

    def label(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv},D={self.head_dim}"
        longest = f"B={len(self.queries)},SQ={max(self.queries)},SKV={max(self.keys)}"
        more = f",window={self.window}" if self.window >= 0 else ""
        return f"{self.group} {longest},{heads},page={self.page_size}{more}"


def cases(groups: Sequence[str]) -> Iterator[Case]:
    """Those of `groups`; all where none is named."""
    for case in _every():
        if not groups or case.group in groups:
            yield case


def _every() -> Iterator[Case]:
    for size in (16, 64):
        for batch in (1, 16, 64, 128):
            for keys in (1024, 4096, 16384):
                yield Case("decode", (1,) * batch, (keys,) * batch, size)
    for batch, keys in ((1, 4096), (16, 4096), (64, 4096)):
        yield Case("few", (4,) * batch, (keys,) * batch, 16)
    draw = random.Random(0)
    for batch in (16, 64, 128):
        lengths = (int(100 * 160 ** draw.random()) for _ in range(batch))
        yield Case("unlike", (1,) * batch, tuple(lengths), 16)
    for queries in (512, 2048):
        for keys in (8192, 32768):
            yield Case("chunk", (queries,), (keys,), 16)
            yield Case("chunk", (queries,), (keys,), 64)
    for keys in (4096, 8192):
        yield Case("mixed", (*(1,) * 63, 2048), (*(keys,) * 63, 8192), 16)
        yield Case("mixed", (*(1,) * 63, 512), (*(keys,) * 63, 8192), 16)
    for window in (-1, 127):
        for batch in (1, 64):
            made = Case("sinks", (1,) * batch, (4096,) * batch, 16, 64, 8, 64, window, True)
            yield made
        yield Case("sinks", (2048,), (8192,), 16, 64, 8, 64, window, True)


def configs(case: Case) -> Iterator[Config]:
    """Kernels that may be fastest, each with one split."""
    packed = case.heads_q // case.heads_kv
    rows = max(case.queries) * packed
    base: dict[str, Value] = {
        "warp_groups": 1,
        "tile_n": 128,
        "kv_stages": 2,
        "score_buffers": 1,
        "early_exp": 50,
        "q_in_registers": False,
        "persistent": False,
        "blocks_per_sm": 1,
        "splits": 1,
        "pdl": True,
        "packed_heads": packed,
    }
    if rows <= 64:
        changes: list[dict[str, Value]] = [
            {},
            {"blocks_per_sm": 2, "tile_n": 64, "kv_stages": 3},
            {"blocks_per_sm": 2, "tile_n": 64, "kv_stages": 3, "persistent": True},
        ]
        if case.head_dim == 64:
            changes[0] = {"kv_stages": 3, "blocks_per_sm": 2}
    else:
        changes = [
            {"warp_groups": 2, "ping_pong": True, "persistent": True},
            {"warp_groups": 2, "ping_pong": True},
        ]
    for change in changes:
        yield Config(FAMILY.name, {**base, **change})


def schedules(case: Case, config: Config) -> Iterator[Config]:
    """A kernel's config with each count of splits worth trying."""
    problem = case.problem
    rows = 64 * int(config["warp_groups"]) // int(config["packed_heads"])
    blocks = sum(-(-queries // rows) for queries in case.queries) * case.heads_kv
    room = 2 * DEFAULT_GPU.sm_count * int(config["blocks_per_sm"])
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
    names = ("warp_groups", "tile_n", "kv_stages", "blocks_per_sm", "splits")
    text = "/".join(str(config[name]) for name in names)
    text += " persistent" if config["persistent"] else ""
    return text + (f" {config['combine']}" if "combine" in config.params else "")


class Batch:
    """A case's tensors: caches in one pool, as many as the L2 cannot hold."""

    def __init__(self, case: Case, pool: Any) -> None:
        """Args: case: the batch; pool: bf16 numbers, keys and values of all caches."""
        import torch

        self.case, problem = case, case.problem
        size, width = case.page_size, case.heads_kv * case.head_dim
        counts = [-(-keys // size) for keys in case.keys]
        needed = sum(counts)
        self.copies = max(1, -(-ROTATED // max(1, case.bytes)))
        self.copies = min(self.copies, CALLS[-1], pool.numel() // (2 * needed * size * width))
        pages = self.copies * needed
        if not self.copies:
            raise BenchmarkError(f"{case.label()}: the caches do not fit")
        shape = (2, pages, size, case.heads_kv, case.head_dim)
        self.key, self.value = pool[: 2 * pages * size * width].view(shape)
        torch.manual_seed(0)
        columns = max(counts)
        self.tables = []
        for part in torch.randperm(pages, device="cuda").int().view(self.copies, needed):
            table = torch.zeros(len(counts), columns, dtype=torch.int32, device="cuda")
            for row, mine in zip(table, part.split(counts), strict=True):
                row[: len(mine)] = mine
            self.tables.append(table)
        total = sum(case.queries)
        query = torch.randn(total, case.heads_q, case.head_dim, device="cuda")
        self.source = query.bfloat16()
        self.query, self.out = self.source.clone(), torch.empty_like(self.source)
        self.used = torch.tensor(case.keys, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *case.queries], device="cuda").cumsum(0).int()
        self.sinks = torch.randn(case.heads_q, device="cuda") if case.has_sinks else None
        self.scale = case.head_dim**-0.5
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
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
        sinks = [] if self.sinks is None else [self.sinks.data_ptr()]

        def call(index: int) -> Any:
            place = self.tables[index % self.copies].data_ptr()
            tensors = [*fixed, 0, place, self.used.data_ptr(), self.starts.data_ptr(), *sinks]
            run(tensors, workspace.data_ptr(), stream_of(self.query.device))
            return self.out

        return call

    def dense(self, kernel: LoadedKernel, config: Config) -> Call:
        """A call of the kernel of dense caches, over as many numbers as the pages hold."""
        import torch

        problem = dense_of(self.case)
        (launch,) = _launches(problem, config, self.scale, {})
        needed = max(1, kernel.workspace_bytes(launch.integers))
        workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
        run = kernel.bind(launch.integers, launch.scalars)
        size = problem.operands[1].bytes

        def call(index: int) -> Any:
            offset = index % self.copies * size
            caches = [t.data_ptr() + offset for t in (self.key, self.value)]
            tensors = [self.query.data_ptr(), *caches, self.out.data_ptr(), 0]
            run(tensors, workspace.data_ptr(), stream_of(self.query.device))
            return self.out

        return call

    def flash3(self, module: Any) -> Call:
        """A call of FlashAttention-3's serving build, with the metadata that a server makes."""
        case, problem = self.case, self.problem
        window = (case.window, 0) if case.window >= 0 else (-1, -1)
        lengths = max(case.queries), max(case.keys)
        metadata = module.metadata(
            *(self.used, *lengths, case.heads_q, case.heads_kv, case.head_dim),
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

        def call(index: int) -> Any:
            table = self.tables[index % self.copies]
            return module.fwd(self.query, self.key, self.value, page_table=table, **options)

        return call


def _launches(problem: AttentionProblem, config: Config, scale: float, strides: Strides) -> Any:
    found = FAMILY.strided_launches(problem, config, scale, strides)
    if isinstance(found, str):
        raise BenchmarkError(found)
    return found


def dense_of(case: Case) -> AttentionProblem:
    """The same attention over caches without pages; of one query no mask is needed."""
    return AttentionProblem(
        batch=len(case.queries),
        seqlen_q=case.queries[0],
        seqlen_kv=case.keys[0],
        head_dim=case.head_dim,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        dtype="bfloat16",
    )


class Stopwatch:
    """Times of calls behind a kernel that writes their queries."""

    def __init__(self, batch: Batch, calls: int) -> None:
        """Args: batch: whose queries are written; calls: of a graph."""
        self._batch, self._calls = batch, calls
        self._alone = self._graph(None)

    def _graph(self, call: Call | None) -> Any:
        import torch

        batch = self._batch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self._calls):
                torch.add(batch.source, 0.0, out=batch.query)
                if call is not None:
                    call(index)
        return graph

    def times(self, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
        """Microseconds of each call, a number for each round."""
        import torch

        graphs = {name: self._graph(call) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                both = []
                for graph in (self._alone, graphs[name]):
                    graph.replay()  # untimed: its predecessor's clocks are not its own
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    both.append(1e3 * start.elapsed_time(end) / self._calls)
                found[name].append(both[1] - both[0])
        return found


def compared(case: Case, pool: Any, kernels: Mapping[Config, LoadedKernel]) -> dict[str, Any]:
    """Times of one case."""
    import torch

    batch = Batch(case, pool)
    expected_us = 5 + case.bytes / 4.0e6 + case.flops / 5e8
    calls = min(CALLS[-1], max(CALLS[0], round(GRAPH_US / expected_us)))
    watch = Stopwatch(batch, calls)
    own = {
        short(made): batch.own(kernels[config], made)
        for config in configs(case)
        for made in schedules(case, config)
    }
    dense: dict[str, Call] = {}
    if case.is_even and case.queries[0] == 1 and case.window < 0 and not case.has_sinks:
        dense = {
            f"dense {short(made)}": batch.dense(kernels[_dense_key(config)], made)
            for config in configs(case)
            for made in schedules(case, config)
        }
    contenders: dict[str, Call] = {}
    module = peers.module_of(PEER)
    error = math.nan
    for every in (own, dense):
        for name, call in list(every.items()):
            try:
                call(0)
            except TunerError as exc:  # a cluster that this GPU has no place for
                print(f"{case.label()}: {name}: {exc}", flush=True)
                del every[name]
        torch.cuda.synchronize()
        if every:
            quick = watch.times(every, QUICK_ROUNDS)
            best = min(quick, key=lambda name: statistics.median(quick[name]))
            contenders[best] = every[best]
    if not isinstance(module, str):
        contenders["flash3"] = flash3 = batch.flash3(module)
        wanted = flash3(0).double()
        got = next(iter(own.values()))(0).double()
        error = float((got - wanted).norm() / wanted.norm())
    times = watch.times(contenders, ROUNDS)
    best_own = next(name for name in contenders if name in own)
    us = {name: statistics.median(found) for name, found in times.items()}
    rows = {("own" if name == best_own else name.split()[0]): us[name] for name in contenders}
    return {
        "case": case.label(),
        "group": case.group,
        "us": rows,
        "spread": {n: statistics.pstdev(f) / statistics.mean(f) for n, f in times.items()},
        "config": best_own,
        "dense_config": next((name for name in contenders if name in dense), ""),
        "terabytes_s": case.bytes / rows["own"] / 1e6,
        "tflops": case.flops / rows["own"] / 1e6,
        "difference": error,
    }


def _dense_key(config: Config) -> Config:
    """Key under which the dense kernel of a config is kept."""
    return Config("dense", config.params)


def built(wanted: Sequence[Case]) -> dict[Case, dict[Config, LoadedKernel]]:
    """The kernels of all cases, by case and config."""
    places: list[tuple[Case, Config, Any]] = []
    for case in wanted:
        for config in configs(case):
            places.append((case, config, FAMILY.kernels(case.problem, config)["attention"]))
            if case.is_even and max(case.queries) == 1:
                spec = FAMILY.kernels(dense_of(case), config)["attention"]
                places.append((case, _dense_key(config), spec))
    found: dict[Case, dict[Config, LoadedKernel]] = {case: {} for case in wanted}
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        futures = compiler.submit([spec for _, _, spec in places])
        for (case, config, _), (_, future) in zip(places, futures, strict=True):
            found[case][config] = load(future.result())
    return found


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    us = found["us"]
    peer, dense = us.get("flash3", math.nan), us.get("dense", math.nan)
    return (
        f"{found['case']:58} {us['own']:8.1f} us {found['terabytes_s']:5.2f} TB/s "
        f"{found['tflops']:5.0f} TF | flash3 {peer:8.1f} {peer / us['own']:5.3f} | dense "
        f"{dense:8.1f} {dense / us['own']:5.3f} | {found['config']} | off {found['difference']:.1e}"
    )


def means(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """The peers' times over the own ones: geometric mean and least, by group."""
    lines = []
    for group in dict.fromkeys(found["group"] for found in every):
        for peer in ("flash3", "dense"):
            ratios = [
                found["us"][peer] / found["us"]["own"]
                for found in every
                if found["group"] == group and peer in found["us"]
            ]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                lines.append(f"{group:8} over {peer:7}: mean {mean:.3f}, least {min(ratios):.3f}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a group is not known.
        BenchmarkError: when torch sees no GPU.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench paged", description=__doc__)
    parser.add_argument("--group", action="append", default=[], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_place(args.json)
    known = list(dict.fromkeys(case.group for case in _every()))
    if unknown := set(args.group) - set(known):
        raise ConfigError(f"--group {min(unknown)} is not known (allowed: {', '.join(known)})")
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError(f"torch {torch.__version__} sees no GPU")
    wanted = list(cases(args.group))
    kernels = built(wanted)
    numbers = max(MIN_POOL, ROTATED + max(case.cached_bytes for case in wanted)) // 2
    pool = torch.empty(numbers, dtype=torch.bfloat16, device="cuda").normal_()
    every: list[dict[str, Any]] = []
    member = family("vendor_sdpa")
    environment = dict(member.environment())
    for case in wanted:
        try:
            every.append(compared(case, pool, kernels[case]))
        except TunerError as exc:
            print(f"{case.label()}: {exc}", flush=True)
            continue
        print(line(every[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"environment": environment, "cases": every})
    print("\n".join(means(every)))
    return 0
