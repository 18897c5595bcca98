"""`tuner.deterministic("batch")` on a GPU: 10,000 rows have the same bits in other calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from runtime_gpu import forget, fresh_store, part, this_gpu

from tuner.compile.compiler import Compiler
from tuner.compile.single import BLOCK_QUANTISER, EXPERT_PRODUCTS, EXPERT_ROWS
from tuner.errors import NotInvariantError
from tuner.families import families
from tuner.families.base import KernelSpec
from tuner.families.by_operation import rule_of
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem, GemmProblem, GroupedGemmProblem, SwigluProblem
from tuner.selection import invariant
from tuner.selection.portfolio import shipped

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("own_store"),
]

own_store = fresh_store

N, K = 1024, 4096
ROWS = (1, 16, 100, 256, 1024, 8192)
"""Rows of calls whose rows are compared: 9,589 of each kind, and those of planted calls."""
HEADS, KV_HEADS, HEAD_DIM, LENGTH = 8, 2, 128, 1300
MANY = 8192
"""Sequences of the largest batches."""
EXPERTS, TOP_K, INNER = 8, 2, 512
PRODUCTS: dict[str, Any] = {
    "linear": GemmProblem(1, N, K, dtype="bfloat16"),
    "few columns": GemmProblem(1, 1024, 8192, dtype="bfloat16"),
    "bias": GemmProblem(1, N, K, dtype="bfloat16", epilogue="bias"),
    "swiglu": SwigluProblem(1, N, K, dtype="bfloat16"),
    "blocks": GemmProblem(1, N, K, dtype=E4M3, scales="block"),
    "rows": GemmProblem(1, N, K, dtype=E4M3, scales="row", fast_accum=False),
}
WINDOW = 200
E4M3_TYPE = torch.float8_e4m3fn
KINDS = "plain", "window", "e4m3"
"""Calls over pages."""


def calls() -> list[Any]:
    """Problems of the calls of this module."""
    found = [replace(problem, m=m) for problem in PRODUCTS.values() for m in ROWS]
    for (n, k), dtype in product(((2 * INNER, N), (N, INNER)), ("bfloat16", E4M3)):
        found += [
            GroupedGemmProblem(EXPERTS, m, n, k, sizes="zipf", dtype=dtype)
            for m in (2, 64, 256, 2048, 16384)
        ]
    heads = {"head_dim": HEAD_DIM, "heads_q": HEADS, "heads_kv": KV_HEADS, "dtype": "bfloat16"}
    sizes = [(1, 1, LENGTH), (64, 1, LENGTH), (MANY, 1, LENGTH), (16, 4, LENGTH)]
    sizes += [(1, LENGTH, LENGTH), (8, 300, 300)]
    for batch, queries, keys in sizes:
        one = AttentionProblem(queries, keys, batch=batch, **heads)  # type: ignore[arg-type]
        found.append(replace(one, is_causal=queries > 16))
        paged = replace(one, is_causal=True, page_size=64, layout="bshd")
        found += [paged, paged.windowed(WINDOW, -1), replace(paged, dtype=E4M3)]
        if queries == keys:
            found.append(replace(one, is_causal=True).windowed(WINDOW, -1))
    found.append(AttentionProblem(LENGTH, LENGTH, batch=4, is_causal=True, is_varlen=True, **heads))  # type: ignore[arg-type]
    return found


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`. The first kernel of each call."""
    if not torch.cuda.is_available():
        return []
    found: dict[KernelSpec, None] = {}
    for problem in calls():
        known = (one for one in shipped() if (one.op, one.gpu) == (problem.op, DEFAULT_GPU))
        portfolio = None if rule_of(problem) else next(known)
        selection = invariant.select(problem, this_gpu(), portfolio)
        config = selection.expected[0][1]
        found |= dict.fromkeys(families()[config.family].kernels(problem, config).values())
    return list(found)


@pytest.fixture(autouse=True)
def _built(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the tests' cache are served without a proof."""
    wanted = set(kernels())

    def proven(specs: Any, capability: str) -> dict[str, str] | str:
        if not wanted.issuperset(specs.values()):
            return "a kernel is not among the tests'"
        futures = compiler.submit(list(specs.values()))
        return {name: future.result().key for name, (_, future) in zip(specs, futures, strict=True)}

    monkeypatch.setattr(part("call.proven_kernels").lists, "proven", proven)
    for module in ("call.plan", "call.sourced"):
        monkeypatch.setattr(part(module), "ArtifactCache", lambda: compiler.artifacts)
    for source in (EXPERT_ROWS, EXPERT_PRODUCTS, BLOCK_QUANTISER):
        source.build(compiler.artifacts)
    forget()
    yield
    for name in ("products.expert_rows", "products.quantiser"):
        part(name).kernels.forget()


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16)


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def among(rows: Any, size: int, seed: int) -> tuple[Any, Any]:
    """Rows at random places among planted neighbours, and those places."""
    generator = torch.Generator("cuda").manual_seed(seed)
    planted = torch.tensor([1e4, -1e-6, float("inf"), float("nan")], device="cuda").bfloat16()
    out = planted[torch.arange(size, device="cuda") % 4].view(size, 1).expand(size, rows.shape[1])
    places = torch.randperm(size, generator=generator, device="cuda")[: len(rows)]
    out = out.contiguous()
    out[places] = rows
    return out, places


def by_rows(x: Any, weight: Any) -> tuple[Any, ...]:
    """Operands of `scaled_mm` with a factor of each row; columns have 1/64."""
    factors = (x.float().abs().amax(1, keepdim=True) / 448).nan_to_num(1.0, 1.0).clamp_min(1e-9)
    columns = torch.full((1, len(weight)), 1 / 64, device="cuda")
    return (x / factors).to(E4M3_TYPE), weight.t(), factors, columns


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_products(name: str) -> None:
    import tuner

    k = PRODUCTS[name].k
    rows, weight = drawn(max(ROWS), k), drawn(N, k, seed=1) / 64
    bias, both = drawn(N, seed=2), drawn(2 * N, K, seed=3) / 64
    small, scale = (weight * 64).clamp(-448, 448).to(torch.float8_e4m3fn), None
    scale = torch.full((N // 128, K // 128), 1 / 64, device="cuda")
    run = {
        **dict.fromkeys(("linear", "few columns"), lambda x: tuner.linear(x, weight)),
        "bias": lambda x: tuner.linear(x, weight, bias),
        "swiglu": lambda x: tuner.swiglu(x, both),
        "blocks": lambda x: tuner.linear(x, small, weight_scale=scale),
        "rows": lambda x: tuner.scaled_mm(*by_rows(x, small), out_dtype=torch.bfloat16),
    }[name]
    with tuner.deterministic("batch"):
        wanted = bits(run(rows))
        compared = 0
        for size in ROWS:
            assert torch.equal(bits(run(rows[:size].contiguous())), wanted[:size]), size
            mixed, places = among(rows[: size // 2], size, size)
            assert torch.equal(bits(run(mixed)[places]), wanted[: size // 2]), size
            compared += size + size // 2
        assert compared > 10_000 and tuner.stats().fallbacks == {}
    exact = rows[:8].double() @ (small if name in ("blocks", "rows") else weight * 64).double().t()
    exact /= 64
    if name not in ("bias", "swiglu"):
        out = wanted[:8].view(torch.bfloat16).double()
        assert (out - exact).norm() / exact.norm() < 4e-2


def test_a_captured_graph_has_the_bits_of_the_mode() -> None:
    """Also when it is replayed outside of the mode."""
    import tuner

    rows, weight = drawn(max(ROWS), K), drawn(N, K, seed=1) / 64
    few, graph = rows[:16].clone(), torch.cuda.CUDAGraph()
    with torch.inference_mode(), tuner.deterministic("batch"):
        wanted = bits(tuner.linear(rows, weight))
        tuner.linear(few, weight)
        with torch.cuda.graph(graph):
            out = tuner.linear(few, weight)
    few.copy_(rows[100:116])
    graph.replay()
    assert torch.equal(bits(out), wanted[100:116])


def test_rows_of_groups() -> None:
    import tuner

    rows, weights = drawn(4096, N), drawn(EXPERTS, 2 * INNER, N, seed=1) / 32

    def run(x: Any, ends: list[int]) -> Any:
        starts = torch.tensor([0, *ends], device="cuda", dtype=torch.int32)
        return bits(tuner.grouped_mm(x, weights, starts, sizes="zipf"))

    with tuner.deterministic("batch"):
        wanted = run(rows, [4096] * EXPERTS)  # all of the first group
        many = run(rows, [1500, *[4096] * (EXPERTS - 1)])
        assert torch.equal(many[:1500], wanted[:1500])
        assert torch.equal(run(rows[7:9], [2] * EXPERTS), wanted[7:9])
        assert torch.equal(run(rows[1500:], [0] + [2596] * (EXPERTS - 1)), many[1500:])


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_tokens_of_experts(dtype: str) -> None:
    import tuner

    tokens = 8192
    hidden, gates = drawn(tokens, N), drawn(EXPERTS, 2 * INNER, N, seed=1) / 32
    down = drawn(EXPERTS, N, INNER, seed=2) / 16
    generator = torch.Generator("cuda").manual_seed(3)
    experts = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=generator, device="cuda")
    weights = torch.rand(tokens, TOP_K, generator=generator, device="cuda")
    scales: dict[str, Any] = {}
    if dtype == E4M3:
        gates, down = ((one * 16).to(E4M3_TYPE) for one in (gates, down))
        for name, one in (("gate_up_scale", gates), ("down_scale", down)):
            shape = len(one), one.shape[1] // 128, one.shape[2] // 128
            scales[name] = torch.full(shape, 1 / 16, device="cuda")

    def run(at: Any) -> Any:
        return bits(tuner.moe(hidden[at], experts[at], weights[at], gates, down, **scales))

    with tuner.deterministic("batch"):
        wanted, compared = run(slice(None)), 0
        for size in (1, 30, 100, 1024, tokens):
            assert torch.equal(run(slice(size)), wanted[:size]), size
            order = torch.randperm(tokens, generator=generator, device="cuda")[:size]
            assert torch.equal(run(order), wanted[order]), size
            compared += 2 * size
        assert compared > 10_000


def test_queries_of_prompts_and_of_decoding() -> None:
    """A causal prompt's rows, alone and in a batch, and the same queries when they decode."""
    import tuner

    batch = 8
    query = drawn(batch, HEADS, LENGTH, HEAD_DIM)
    key, value = (drawn(batch, KV_HEADS, LENGTH, HEAD_DIM, seed=seed) for seed in (1, 2))

    def run(
        requests: list[int], first: int, last: int, is_causal: bool, end: int = 0, **more: Any
    ) -> Any:
        keys = slice(end or last)
        tensors = query[requests, :, first:last], key[requests, :, keys], value[requests, :, keys]
        return bits(tuner.attention(*tensors, is_causal=is_causal, enable_gqa=True, **more))

    with tuner.deterministic("batch"):
        wanted = run(list(range(batch)), 0, LENGTH, True)
        assert torch.equal(run([3], 0, LENGTH, True)[0], wanted[3])
        for length in (100, 300, 1024):
            out = run([5, 0, 5], 0, length, True)
            assert torch.equal(out[1], wanted[0, :, :length]) and torch.equal(out[0], out[2])
            assert torch.equal(out[0], wanted[5, :, :length]), length
        compared = 0
        for requests in ([2], [0, 2, 4], [*range(batch)] * 8, [*range(batch)] * (MANY // batch)):
            for at in (17, 128, 777, LENGTH - 1):
                out = run(requests, at, at + 1, False)
                assert torch.equal(out[:, :, 0], wanted[requests, :, at]), (len(requests), at)
                compared += len(requests) * HEADS
        assert compared > 10_000
        several = run([2, 1], 700, 704, False, LENGTH)
        for i in range(4):
            assert torch.equal(run([1], 700 + i, 701 + i, False, LENGTH)[0, :, 0], several[1, :, i])
        # A window hides no key of the short prompts.
        windowed = run([0, 5], 0, LENGTH, True, window=(WINDOW, -1))
        assert not torch.equal(windowed, wanted[[0, 5]])
        for length in (77, WINDOW, 2 * WINDOW):
            short = run([5], 0, length, True, window=(WINDOW, -1))
            assert torch.equal(short[0], windowed[1, :, :length]), length


def test_sequences_beside_others() -> None:
    import tuner

    query = drawn(4 * LENGTH, HEADS, HEAD_DIM)
    key, value = (drawn(4 * LENGTH, KV_HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))

    def run(parts: list[tuple[int, int]]) -> list[Any]:
        lengths = [length for _, length in parts]
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        packed = [
            torch.cat([one[first : first + length] for first, length in parts])
            for one in (query, key, value)
        ]
        longest = max(lengths)
        out = tuner.attention_varlen(
            *packed, starts, starts, longest, longest, is_causal=True, enable_gqa=True
        )
        return list(bits(out).split(lengths))

    first, second, third = (0, LENGTH), (LENGTH, 300), (2 * LENGTH, 77)
    with tuner.deterministic("batch"):
        alone = [run([part])[0] for part in (first, second, third)]
        for order in ([0, 1, 2], [2, 1, 0], [1, 1, 0, 2, 1]):
            parts = [(first, second, third)[i] for i in order]
            for i, out in zip(order, run(parts), strict=True):
                assert torch.equal(out, alone[i]), order


class Pages:
    """Requests whose keys lie in pages; what no request has written is not a number."""

    def __init__(self, requests: int, kind: str) -> None:
        sizes = (HEADS, 0), (KV_HEADS, 1), (KV_HEADS, 2)
        self.dtype = E4M3_TYPE if kind == "e4m3" else torch.bfloat16
        self.query, self.key, self.value = (
            drawn(requests, LENGTH, heads, HEAD_DIM, seed=seed).to(self.dtype)
            for heads, seed in sizes
        )
        factor = torch.full((1,), 0.5, device="cuda")
        self.options: dict[str, Any] = {"window": (WINDOW, -1)} if kind == "window" else {}
        if kind == "e4m3":
            self.options = dict.fromkeys(("q_scale", "k_scale", "v_scale"), factor)

    def run(self, chunks: list[tuple[int, int, int]], seed: int) -> list[Any]:
        """Outputs of chunks: request, first query and end of each."""
        import tuner

        columns = -(-LENGTH // 64)
        generator = torch.Generator("cuda").manual_seed(seed)
        count = len(chunks) * columns
        table = torch.randperm(count, generator=generator, device="cuda").view(-1, columns)
        caches = []
        for tensor in (self.key, self.value):
            cache = torch.full((count, 64, KV_HEADS, HEAD_DIM), float("nan"), device="cuda")
            cache = cache.to(self.dtype)
            for row, (request, _, end) in zip(table, chunks, strict=True):
                pages = cache[row].flatten(0, 1)
                pages[:end] = tensor[request, :end]
                cache[row] = pages.view(columns, 64, KV_HEADS, HEAD_DIM)
            caches.append(cache)
        lengths = [end - first for _, first, end in chunks]
        used = torch.tensor([end for *_, end in chunks], device="cuda").int()
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        query = torch.cat([self.query[request, first:end] for request, first, end in chunks])
        longest = max(lengths), int(used.max())
        tensors = query, *caches, table.int(), used, starts
        out = tuner.paged_attention(*tensors, *longest, **self.options)
        return list(bits(out).split(lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_decoding_over_pages(kind: str) -> None:
    """A prompt in chunks has the bits of one piece, and decoding those of the prompt's rows."""
    import tuner

    pages = Pages(4, kind)
    with tuner.deterministic("batch"):
        wanted = [pages.run([(request, 0, LENGTH)], request)[0] for request in range(4)]
        batches = [
            [(0, 0, 512), (1, 512, LENGTH)],
            [(2, 100, 101), (0, 1000, 1001), (3, 0, LENGTH), (1, 64, 128)],
            [(1, 0, 1)],
            [(0, LENGTH - 1, LENGTH)],
            [(i % 4, 300 + 7 * i, 301 + 7 * i) for i in range(100)],
            [(i % 4, 900 + i, 904 + i) for i in range(16)],
            [(1, 240, 256)],
            [(2, 0, 150)],  # a window hides no key of it
            [(2, 0, 150), (0, 1000, 1300)],
            [(i % 4, i % LENGTH, i % LENGTH + 1) for i in range(MANY)],
        ]
        for seed, chunks in enumerate(batches):
            outs = pages.run(chunks, seed)
            for (request, first, end), out in zip(chunks, outs, strict=True):
                assert torch.equal(out, wanted[request][first:end]), (seed, request, first, end)


def test_a_call_of_another_type_is_an_error() -> None:
    import tuner

    rows, weight = torch.ones(4, K, device="cuda"), torch.ones(N, K, device="cuda")
    with tuner.deterministic("batch"), pytest.raises(NotInvariantError, match="float32"):
        tuner.linear(rows, weight)
    tuner.linear(rows, weight)
