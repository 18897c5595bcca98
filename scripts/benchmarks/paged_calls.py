"""Calls of a batch over paged caches: the tuner's, each kernel's with a schedule, and peers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender
from benchmarks.own_plans import compiler
from benchmarks.paged_batches import Case
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.base import KernelSpec, Strides
from tuner.families.by_operation import AttentionDomain
from tuner.families.fused_attention import wide_rule
from tuner.families.peers import stream_of
from tuner.families.peers.sdpa import DESCALES
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3

FAMILY = family("fused_attention")
PEER = "flash3_serving"
#: Bytes of keys and values that the rotated caches have together at least: twenty times the L2, of
#: which copies that are to stay there longest keep a part. And at most, if there are several.
ROTATED, POOL = 1 << 30, 10 << 30
#: Copies of a case's caches at most: calls of a graph at most.
MAX_COPIES = 40
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
    if problem.is_wide:
        selection = wide_rule.select(problem, DEFAULT_GPU)
        kernels = [] if selection is None else [config for _, config in selection.own()]
    else:
        domain = AttentionDomain.holding(problem)
        kernels = [] if domain is None else list(domain.named_kernels)
    if not kernels:
        raise BenchmarkError(f"{case.label}: no kernels serve it")
    for kernel in kernels:
        config = FAMILY.called(problem, kernel, 1)
        if FAMILY.accepts(problem, config, DEFAULT_GPU):
            yield config


def specs_of(case: Case) -> dict[Config, KernelSpec]:
    """The kernels of `configs`."""
    return {config: FAMILY.kernels(case.problem, config)["attention"] for config in configs(case)}


def schedules(case: Case, config: Config) -> Iterator[Config]:
    """A kernel's config with each number of splits worth trying."""
    problem = case.problem
    height = 64 * int(config["warp_groups"]) // int(config.get("packed_heads", 1))
    blocks = sum(-(-queries // height) for queries in case.queries) * case.heads_kv
    room = MAX_ROUNDS * DEFAULT_GPU.sm_count * int(config["blocks_per_sm"])
    for splits in SPLITS:
        if splits > 1 and ((blocks * splits > room and case.is_even) or config["persistent"]):
            continue
        for combine in ("kernel", "cluster") if splits > 1 else (None,):
            params = {**config.params, "splits": splits}
            if combine:
                params["combine"] = combine
            schedule = Config(config.family, params)
            if not FAMILY.violations(problem, schedule, DEFAULT_GPU):
                yield schedule


def short(config: Config) -> str:
    """A config for a table."""
    names = ("warp_groups", "tile_n", "kv_stages", "packed_heads", "box_rows", "splits")
    text = "/".join(str(config.get(name, 1)) for name in names)
    text += " padded" if config.get("pads_heads") else ""
    text += " filled" if config.get("fills_rows") else ""
    text += " whole" if config.get("whole_rows") else ""
    text += " 3 warps" if config.get("copy_warps") else ""
    text += " regs" if config["q_in_registers"] else ""
    text += " persistent" if config["persistent"] else ""
    text += " stream-K" if config.get("stream_k") else ""
    return text + (f" {config['combine']}" if "combine" in config.params else "")


class Batch:
    """A case's tensors: caches in one pool, as many as the L2 cannot hold."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.manual_seed(0)
        self.case, self.problem, self.scale = case, case.problem, case.head_dim**-0.5
        size, width, needed = case.page_size, case.head_dim, sum(case.pages)
        copies = min(MAX_COPIES, -(-ROTATED // case.bytes), POOL // case.cached_bytes)
        self.copies = max(1, copies)
        pages = self.copies * needed
        numbers = self.copies * case.cached_bytes // 2
        pool = torch.empty(numbers, dtype=torch.bfloat16, device="cuda").normal_().view(torch.uint8)
        if case.dtype == E4M3:
            pool &= NUMBERS
        pool = pool.view(getattr(torch, case.dtype))
        self.caches = pool.view(2, pages, size, case.heads_kv, width)
        self.key, self.value = self.caches
        if case.is_halved:
            both = pool.view(pages, case.heads_kv, size, 2 * width).transpose(1, 2)
            self.key, self.value = both.split(width, -1)
        self.tables = self._tables(torch.randperm(pages, device="cuda"))
        self.ordered = self._tables(torch.arange(pages, device="cuda")) if case.has_dense else []
        query = torch.randn(sum(case.queries), case.heads_q, width, device="cuda")
        self.source = query.to(getattr(torch, case.dtype))
        self.query, self.out = self.source.clone(), torch.empty_like(query, dtype=torch.bfloat16)
        heads = (case.heads_q, case.heads_kv, case.heads_kv) if case.dtype == E4M3 else ()
        self.scales = [torch.full((count,), FACTOR, device="cuda") for count in heads]
        self.used = torch.tensor(case.keys, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *case.queries], device="cuda").cumsum(0).int()
        self.lengths = max(case.queries), case.longest
        self.total = None if case.room else sum(case.keys)
        self.sinks = None  # numbers that bf16 holds, which is what FlashAttention-3 takes
        if case.has_sinks:
            self.sinks = torch.randn(case.heads_q, device="cuda").bfloat16().float()

    def _tables(self, places: Any) -> list[Any]:
        """Page tables of all copies, of the pages at these places."""
        import torch

        columns = -(-self.case.longest // self.case.page_size)
        counts = torch.tensor(self.case.pages, device="cuda")
        held = torch.arange(columns, device="cuda") < counts[:, None]
        tables = torch.zeros(self.copies, *held.shape, dtype=torch.int32, device="cuda")
        tables[held.expand_as(tables)] = places.int()
        return list(tables)

    def before(self, _: int) -> Any:
        """Write the queries."""
        import torch

        source, written = (t.view(torch.uint8) for t in (self.source, self.query))
        return torch.add(source, 0, out=written)

    def own(self, kernel: LoadedKernel, config: Config) -> Call:
        """A call of a paged kernel."""
        import torch

        query, out = ((0, t.stride(1), t.stride(0), t.stride(2)) for t in (self.query, self.out))
        cache, table = self.key.transpose(1, 2).stride(), self.tables[0]
        strides: Strides = {
            **{"query": query, "out": out, "key": cache, "value": cache},
            "page_table": table.stride(),
        }
        launches = FAMILY.strided_launches(self.problem, config, self.scale, strides)
        if isinstance(launches, str):
            raise BenchmarkError(launches)
        (launch,) = launches
        *others, _total, size, _pages, stride = launch.integers
        integers = (*others, self.query.shape[0], size, self.key.shape[0], stride)
        bytes_ = max(1, kernel.workspace_bytes(integers))
        workspace = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
        run = kernel.bind(integers, launch.scalars)
        fixed = [t.data_ptr() for t in (self.query, self.key, self.value, self.out)]
        ends = [t.data_ptr() for t in (self.sinks, *self.scales) if t is not None]

        def call(index: int) -> Any:
            place = self.tables[index % self.copies].data_ptr()
            tensors = [*fixed, 0, place, self.used.data_ptr(), self.starts.data_ptr(), *ends]
            run(tensors, workspace.data_ptr(), stream_of(self.query.device))
            return self.out

        return call

    def schedules(self) -> Iterator[tuple[str, Call]]:
        """A call of each schedule whose kernel is built, by its short name."""
        for config, spec in specs_of(self.case).items():
            artifact = compiler().cached(spec)
            if artifact is not None:
                kernel = load(artifact)
                for schedule in schedules(self.case, config):
                    yield short(schedule), self.own(kernel, schedule)

    def tuner(self, tables: Sequence[Any], longest: int) -> Call:
        """A call of `tuner.paged_attention`, as an engine makes it, over the pages of tables.

        Args:
            tables: page tables of the copies.
            longest: keys of a sequence at most, as the call says it.
        """
        import tuner

        options = {
            "causal": self.problem.is_causal,
            "window": (self.case.window, -1),
            "sinks": self.sinks,
            "scale": self.scale,
            "out": self.out,
            "total_seqlen_k": self.total,
            **dict(zip(("q_scale", "k_scale", "v_scale"), self.scales, strict=False)),
        }
        tensors = self.query, self.key, self.value
        lengths = self.used, self.starts, self.lengths[0], longest
        return lambda index: tuner.paged_attention(
            *tensors, tables[index % self.copies], *lengths, **options
        )

    def posed(self) -> Any:
        """The call object of `tuner.paged_attention`, over the first copy."""
        from tuner.runtime.attention.composed import Extras
        from tuner.runtime.attention.paged import paged_call

        tensors = self.query, self.key, self.value, self.tables[0], self.used, self.starts
        extras = Extras.of((self.case.window, -1), 0.0)
        options = *self.lengths, self.problem.is_causal, extras, self.scale
        call = paged_call(*tensors, self.sinks, *options)
        return call._replace(descales=tuple(self.scales), total_kv=self.total)

    def selected(self) -> str:
        """The schedule that `tuner.paged_attention` selects, or why it has none."""
        from tuner.runtime.attention.paged import prepare
        from tuner.runtime.call.refusal import Refusal

        call = self.posed()
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
        shape = self.copies, len(case.keys), case.keys[0], case.heads_kv, case.head_dim
        keys, values = (cache.reshape(shape).transpose(2, 3) for cache in self.caches)
        query, options = self.query.unsqueeze(2), {"scale": self.scale, "enable_gqa": True}
        return lambda index: tuner.attention(
            query, keys[index % self.copies], values[index % self.copies], **options
        )

    def read(self) -> Call:
        """A sum of the bytes of a cache, in their order."""
        import torch

        caches = self.caches.view(-1).view(torch.float32).view(self.copies, -1)
        total = torch.empty((), device="cuda")
        return lambda index: torch.sum(caches[index % self.copies], 0, out=total)

    def pytorch(self) -> Call:
        """A call of PyTorch's operator over gathered pages, where `has_dense`."""
        import torch

        attend, query = torch.nn.functional.scaled_dot_product_attention, self.query.unsqueeze(2)

        def call(index: int) -> Any:
            pages = self.tables[index % self.copies].long()
            tensors = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in self.caches)
            return attend(query, *tensors, enable_gqa=True).squeeze(2)

        return call

    def flash3(self, module: Any, is_prepared: bool = True) -> Call:
        """A call of FlashAttention-3's serving build, with the metadata that a server makes, or
        without.
        """
        case = self.case
        common = {
            "cu_seqlens_q": self.starts,
            "causal": self.problem.is_causal,
            "window": (case.window, 0) if case.window >= 0 else (-1, -1),
        }
        heads = case.heads_q, case.heads_kv, case.head_dim, self.query.dtype
        sizes = self.used, *self.lengths, *heads
        metadata = None
        if is_prepared:
            metadata = module.metadata(*sizes, page_size=case.page_size, **common)
        options = {
            "max_seqlen_q": self.lengths[0],
            "seqused_k": self.used,
            "max_seqlen_k": self.lengths[1],
            "scale": self.scale,
            "sinks": None if self.sinks is None else self.sinks.bfloat16(),
            "metadata": metadata,
            **common,
        }
        if self.scales:
            options |= dict.fromkeys(DESCALES, self.scales[1].expand(len(case.keys), -1))
        tensors = self.query, self.key, self.value
        return lambda index: module.fwd(
            *tensors, page_table=self.tables[index % self.copies], **options
        )


def answer(stats: Any) -> str:
    """The one that answered a call, by the tuner's counts: ``own``, or why it was not."""
    return "own" if stats.hits else ", ".join(stats.fallbacks)


def timed(
    batch: Batch,
    calls: Mapping[str, Call],
    budget_us: float,
    before: Call | None = None,
) -> tuple[dict[str, Any], dict[str, float], dict[str, str]]:
    """By call: its output with the tuner's counts, microseconds, and why it has neither."""
    import tuner

    outs, failed = harness.first_outputs(calls, lambda out: (out.double(), tuner.stats(reset=True)))
    able = [Contender(name, calls[name]) for name in outs]
    times = harness.time_calls(able, before or batch.before, batch.copies, budget_us)
    return outs, times.us, failed | times.failed
