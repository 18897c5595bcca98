"""`tuner.mla_decode`: by PyTorch's operations, by a kernel, and what is refused."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from latent_calls import SIZES, drawn, is_close, quantised, wanted
from noted_kernels import find_kernels

from tuner.errors import ConfigError
from tuner.families.mla_decode import ARGUMENTS, MlaDecode
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.runtime.attention import mla  # noqa: E402


def given(number: int = 1) -> dict[str, Any]:
    """Arguments of a call."""
    return drawn("bfloat16", "cpu", SIZES[number])


def element_by_element(call: dict[str, Any], b: int, q: int, h: int) -> tuple[Any, Any]:
    """One row of the output and its log-sum-exp, in double precision."""
    query, cache, table = (call[name] for name in ("query", "cache", "block_table"))
    seen = int(call["lengths"][b]) - query.shape[1] + 1 + q
    if seen <= 0:
        return torch.zeros(512).double(), torch.tensor(-torch.inf).double()
    size = cache.shape[1]
    rows = torch.stack([cache[table[b, k // size], k % size] for k in range(seen)]).double()
    scores = rows @ query[b, q, h].double() * call["scale"]
    return torch.softmax(scores, 0) @ rows[:, :512], torch.logsumexp(scores, 0)


@pytest.mark.parametrize("number", [1, 2])
def test_pytorch_s_operations_compute_it(number: int) -> None:
    call = given(number)
    out, lse = mla.mla_decode(**call, return_lse=True)
    batch, queries, heads, _ = call["query"].shape
    assert out.shape == (batch, queries, heads, 512) and lse.shape == (batch, heads, queries)
    for b in range(batch):
        for q in range(queries):
            wanted, statistics = element_by_element(call, b, q, 5)
            assert torch.allclose(out[b, q, 5].double(), wanted, atol=4e-3)
            assert torch.allclose(lse[b, 5, q].double(), statistics, atol=1e-4)


@pytest.mark.parametrize("form", ["e4m3", "e4m3_blocks"])
def test_pytorch_s_operations_read_quantised_rows(form: str) -> None:
    call = quantised(given(), form)
    out, lse = mla.mla_decode(**call, return_lse=True)
    assert is_close(out, lse, wanted(call))
    pages, size, _ = call["cache"].shape
    plain = torch.full((pages, size, 576), torch.nan)
    for page in range(pages):
        for slot in range(size):
            row = call["cache"][page, slot].view(torch.uint8).clone()
            latent = row[:512].view(torch.float8_e4m3fn).float()
            if form == "e4m3":
                plain[page, slot] = row.view(torch.float8_e4m3fn).float() * call["descale"]
                continue
            factors = row[512:528].clone().view(torch.float32)
            for block in range(4):
                part = latent[128 * block : 128 * block + 128] * factors[block]
                plain[page, slot, 128 * block : 128 * block + 128] = part.bfloat16().float()
            plain[page, slot, 512:] = row[528:].clone().view(torch.bfloat16).float()
    query = call["query"].float()
    for b in (0, 5):
        exact = element_by_element({**call, "cache": plain, "query": query}, b, 1, 7)
        assert torch.allclose(out[b, 1, 7].double(), exact[0], atol=2e-2, rtol=1e-2)
        assert torch.allclose(lse[b, 7, 1].double(), exact[1], atol=1e-3)


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("e4m3", {"descale": None}, "descale is None"),
        ("e4m3", {"descale": torch.ones(2)}, r"descale is torch.float32 \(2,\)"),
        ("e4m3", {"descale": torch.ones(1).double()}, "descale is torch.float64"),
        ("e4m3", {"query": torch.zeros(6, 3, 20, 576).half()}, "query is torch.float16, cache"),
        ("e4m3_blocks", {"descale": torch.ones(1)}, "allowed for this cache: None"),
        ("e4m3_blocks", {"cache": torch.zeros(9, 16, 640).byte()}, "cache torch.uint8"),
    ],
)
def test_quantised_caches_that_are_refused(form: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        mla.mla_decode(**{**quantised(given(), form), **changes})


def test_it_writes_to_a_tensor_and_counts_the_reason(runtime: SimpleNamespace) -> None:
    call = given()
    out = torch.empty(*call["query"].shape[:3], 512, dtype=torch.bfloat16)
    assert mla.mla_decode(**call, out=out) is out
    assert torch.equal(out, mla.mla_decode(**call))
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache": torch.zeros(9, 16, 576)}, "query is torch.bfloat16, cache torch.float32"),
        ({"query": torch.zeros(6, 3, 20, 512).bfloat16()}, r"query \(6, 3, 20, 512\)"),
        ({"query": torch.zeros(6, 20, 576).bfloat16()}, r"query \(6, 20, 576\)"),
        ({"cache": torch.tensor(0.0).bfloat16()}, r"cache \(\) \(allowed"),
        ({"cache": torch.zeros(9, 24, 576).bfloat16()}, "pages have 24 slots"),
        ({"cache": torch.zeros(9, 576, 16).bfloat16().mT}, "columns of query and cache"),
        ({"lengths": torch.zeros(5).int()}, r"lengths is torch.int32 \(5,\)"),
        ({"lengths": torch.zeros(6)}, "lengths is torch.float32"),
        ({"block_table": torch.zeros(5, 9).int()}, r"block_table is torch.int32 \(5, 9\)"),
        ({"block_table": torch.zeros(6).int()}, r"block_table is \(6,\)"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"out": torch.zeros(6, 3, 20, 576).bfloat16()}, r"out is torch.bfloat16"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        mla.mla_decode(**{**given(), **changes})


def computed(tensors: Any, integers: Any, scalars: Any) -> None:
    """Do a kernel's work by PyTorch's operations, over the addresses that it was given."""
    n = dict(zip(ARGUMENTS.integers, integers, strict=True))
    at = dict(zip(ARGUMENTS.tensors, tensors, strict=True))

    def view(name: str, dtype: Any, shape: Any, strides: Any) -> Any:
        last = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        size = torch.empty((), dtype=dtype).element_size()
        memory = (ctypes.c_uint8 * (last * size)).from_address(at[name])
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)

    rows = n["batch"], n["queries"], n["heads"]
    query, out = ([n[f"{x}_{part}"] for part in ("batch", "row", "head")] for x in ("query", "out"))
    cache, kind = (n["pages"], n["page_size"], 576), torch.bfloat16
    of_lse = (rows[0], rows[2], rows[1]), (n["lse_batch"], n["lse_head"], 1)
    mla.composed(
        mla.Decode(
            view("query", kind, (*rows, 576), (*query, 1)),
            view("cache", kind, cache, (n["cache_page"], n["cache_slot"], 1)),
            view("block_table", torch.int32, (rows[0], n["table_row"]), (n["table_row"], 1)),
            view("lengths", torch.int32, rows[:1], (1,)),
            scalars[0],
            view("out", kind, (*rows, 512), (*out, 1)),
            view("lse", torch.float32, *of_lse) if at["lse"] else None,
        )
    )


@pytest.fixture
def served(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel of the family for every problem."""
    return find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_kernel_has_the_call_s_sizes_and_strides(served: SimpleNamespace, number: int) -> None:
    call = given(number)
    out, lse = mla.mla_decode(**call, return_lse=True)
    [launch] = served.launched
    computed(*launch)
    assert is_close(out, lse, wanted(call))
    [(_, problem)] = served.posed
    size, queries, heads = SIZES[number]
    longest = 1 << (call["block_table"].shape[1] * size - 1).bit_length()
    assert problem == AttentionProblem.parse(
        f"B=8,H={heads},HKV=1,SQ={queries},SKV={longest},D=576,DV=512,dtype=bf16,"
        f"causal={int(queries > 1)},page_size={size}"
    )


@pytest.mark.parametrize("form", ["e4m3", "e4m3_blocks"])
def test_a_kernel_gets_the_bytes_and_the_factor(served: SimpleNamespace, form: str) -> None:
    call = quantised(given(0), form)
    mla.mla_decode(**call)
    [(addresses, integers, _)] = served.launched
    assert addresses[1] == call["cache"].data_ptr()
    factors = [call["descale"].data_ptr()] if form == "e4m3" else []
    assert list(addresses[6:]) == factors
    n = dict(zip(ARGUMENTS.integers, integers, strict=True))
    assert (n["cache_page"], n["cache_slot"]) == call["cache"].stride()[:2]
    [(_, problem)] = served.posed
    assert problem.cache == form


def test_views_of_larger_tensors(served: SimpleNamespace) -> None:
    call = given(2)
    batch, queries, heads, _ = call["query"].shape
    wide = torch.empty(batch, heads, queries, 640).bfloat16()
    call["query"] = wide.transpose(1, 2)[..., :576].copy_(call["query"])
    out = torch.empty(batch, queries, heads + 8, 512).bfloat16()[:, :, 4:-4]
    assert mla.mla_decode(**call, out=out) is out
    computed(*served.launched[0])
    assert is_close(out, None, wanted(call))


@pytest.mark.parametrize("pad", [4, 2])
def test_rows_that_tma_cannot_read_are_pytorch_s(
    served: SimpleNamespace, on_cpu: SimpleNamespace, pad: int
) -> None:
    call = given(0)
    call["cache"] = torch.nn.functional.pad(call["cache"], (0, pad))[..., :576]
    out, lse = mla.mla_decode(**call, return_lse=True)
    assert is_close(out, lse, wanted(call)) and not served.launched
    assert on_cpu.counters.stats().fallbacks == {"no kernel takes such tensors": 1}


def test_opcheck() -> None:
    call = given(1)
    operator = torch.ops.tuner.mla_decode.default
    torch.library.opcheck(operator, tuple(call.values()))
    torch.library.opcheck(operator, tuple(quantised(call, "e4m3_blocks").values()))
    # Its other checks multiply the inputs, which e4m3 has no operation for.
    checks = "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator, tuple(quantised(call, "e4m3").values()), test_utils=checks)


def test_a_compiled_model_holds_the_operator() -> None:
    call = given(1)
    compiled = torch.compile(mla.mla_decode, fullgraph=True, backend="eager")
    out, lse = compiled(**call, return_lse=True)
    wanted, statistics = mla.mla_decode(**call, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, statistics)
