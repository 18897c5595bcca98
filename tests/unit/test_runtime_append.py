"""`tuner.paged_append`: by PyTorch's operations, by the kernel, and what is refused."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.compile.single import PAGED_APPEND  # noqa: E402
from tuner.runtime.attention import append  # noqa: E402
from tuner.runtime.call import sourced  # noqa: E402

HEADS, HEADS_KV, WIDTH, SIZE, PAGES = 4, 2, 32, 16, 12
QUERIES, USED = (1, 0, 9, 2), (40, 3, 20, 70)
"""The last sequence's keys 68 and 69 have no column in a table of four."""
E4M3 = torch.float8_e4m3fn


def given(dtype: Any = torch.bfloat16, kind: Any = None, rotated: int = WIDTH) -> dict[str, Any]:
    """Arguments of a call: one token behind the last sequence, a cache whose halves share rows."""
    torch.manual_seed(0)
    kind = kind or dtype
    tokens = sum(QUERIES) + 1
    rows = {
        name: torch.randn(tokens, heads, WIDTH).to(dtype)
        for name, heads in (("query", HEADS), ("key", HEADS_KV), ("value", HEADS_KV))
    }
    both = torch.full((PAGES, HEADS_KV, SIZE, 2 * WIDTH), 7.0).to(kind).transpose(1, 2)
    angles = torch.rand(64, rotated // 2) * 6
    made: dict[str, Any] = {
        **rows,
        "key_cache": both[..., :WIDTH],
        "value_cache": both[..., WIDTH:],
        "page_table": torch.randperm(PAGES)[: len(USED) * 3].int().view(len(USED), 3),
        "seqused_k": torch.tensor(USED).int(),
        "cu_seqlens_q": torch.tensor([0, *QUERIES]).cumsum(0).int(),
    }
    if rotated:
        made |= {"cosine": angles.cos().contiguous(), "sine": angles.sin().contiguous()}
    if kind == E4M3:
        made |= {"q_scale": torch.rand(HEADS) + 0.1, "k_scale": torch.rand(HEADS_KV) + 0.1}
        made["v_scale"] = torch.tensor([0.5])
    return made


def rotate(row: Any, call: dict[str, Any], position: int, *, interleaved: bool) -> Any:
    """One head, element by element."""
    row = row.float()
    if "cosine" not in call:
        return row
    count = call["cosine"].shape[1]
    found = row.clone()
    for i in range(count):
        low, high = (2 * i, 2 * i + 1) if interleaved else (i, i + count)
        cosine, sine = call["cosine"][position, i], call["sine"][position, i]
        found[low] = row[low] * cosine - row[high] * sine
        found[high] = row[high] * cosine + row[low] * sine
    return found


def narrow(row: Any, kind: Any, call: dict[str, Any], name: str, head: int) -> Any:
    if kind != E4M3:
        return row.to(kind)
    factor = call[f"{name}_scale"]
    return (row / factor[head if len(factor) > 1 else 0]).clamp(-448, 448).to(kind)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [0, 16, WIDTH])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, E4M3])
def test_every_token_has_its_slot_and_angles(kind: Any, rotated: int, interleaved: bool) -> None:
    dtype = torch.float16 if kind == E4M3 else kind
    call = given(dtype, kind, rotated)
    wanted_key, wanted_value = (call[f"{n}_cache"].float().clone() for n in ("key", "value"))
    out = torch.zeros(call["query"].shape).to(kind)
    wanted = out.float().clone()
    token = 0
    for sequence, (count, used) in enumerate(zip(QUERIES, USED, strict=True)):
        for position in range(used - count, used):
            if position < 3 * SIZE:
                page = int(call["page_table"][sequence, position // SIZE])
                options = {"interleaved": interleaved}
                for head in range(HEADS):
                    row = rotate(call["query"][token, head], call, position, **options)
                    wanted[token, head] = narrow(row, kind, call, "q", head).float()
                for head in range(HEADS_KV):
                    row = rotate(call["key"][token, head], call, position, **options)
                    slot = page, position % SIZE, head
                    wanted_key[slot] = narrow(row, kind, call, "k", head).float()
                    row = call["value"][token, head].float()
                    wanted_value[slot] = narrow(row, kind, call, "v", head).float()
            token += 1
    found = append.paged_append(**call, interleaved=interleaved, out=out)
    assert found is out
    assert torch.equal(out.float(), wanted)
    assert torch.equal(call["key_cache"].float(), wanted_key)
    assert torch.equal(call["value_cache"].float(), wanted_value)
    assert (wanted_key == 7).any() and (wanted_key != 7).any()


def test_tokens_without_a_place_write_nothing() -> None:
    call = given()
    call["page_table"][0] = torch.tensor([0, 1, PAGES])  # a page that does not exist
    call["page_table"][2] = -1
    call["cosine"], call["sine"] = (call[name][:40] for name in ("cosine", "sine"))
    out = torch.zeros_like(call["query"])
    append.paged_append(**call, out=out)
    assert not out.any() and (call["key_cache"] == 7).all() and (call["value_cache"] == 7).all()


def test_equal_counts_and_queries_in_place() -> None:
    call = given()
    for name in ("query", "key", "value"):
        call[name] = call[name][:8]
    call["seqused_k"] = torch.tensor([2, 17, 33, 48]).int()
    call["cu_seqlens_q"] = torch.tensor([0, 2, 4, 6, 8]).int()
    wanted = append.paged_append(**call)
    first = call["key_cache"].clone()
    again = {**call, "cu_seqlens_q": None}
    again["query"] = again["query"].clone()
    assert torch.equal(append.paged_append(**again, out=again["query"]), wanted)
    assert torch.equal(call["key_cache"], first) and not torch.equal(wanted, call["query"])


def test_what_is_appended_is_what_attention_reads() -> None:
    """A sequence that grows token by token equals one whose keys were all appended at once."""
    import tuner

    torch.manual_seed(1)
    rows = [torch.randn(20, n, WIDTH).bfloat16() for n in (HEADS, HEADS_KV, HEADS_KV)]
    angles = torch.rand(32, WIDTH // 2)
    tables = {"cosine": angles.cos(), "sine": angles.sin()}
    outs = []
    for steps in (1, 20):
        caches = [torch.zeros(2, SIZE, HEADS_KV, WIDTH).bfloat16() for _ in range(2)]
        table, found = torch.tensor([[1, 0]]).int(), []
        for end in range(20 // steps, 21, 20 // steps):
            part = [tensor[end - 20 // steps : end] for tensor in rows]
            used = torch.tensor([end]).int()
            given = *part, *caches, table, used
            query = tuner.paged_append(*given, **tables)
            found.append(tuner.paged_attention(query, caches[0], caches[1], table, used))
        outs.append(torch.cat(found))
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": torch.zeros(13, HEADS_KV, WIDTH)}, "query, key and value are"),
        ({"key": torch.zeros(12, HEADS_KV, WIDTH).bfloat16()}, r"key \(12, 2, 32\)"),
        ({"sine": None}, "cosine and sine come together"),
        ({"sine": torch.zeros(64, 8)}, r"sine torch.float32 \(64, 8\)"),
        ({"cosine": torch.zeros(64, 16).half()}, r"cosine torch.float16 \(64, 16\)"),
        ({"cosine": torch.zeros(64, 12), "sine": torch.zeros(64, 12)}, "a multiple of 16 up to 32"),
        ({"out": torch.zeros(13, HEADS, WIDTH)}, r"out is torch.float32 \(13, 4, 32\)"),
        ({"q_scale": torch.ones(1)}, "factors are for float8_e4m3fn"),
        ({"page_table": torch.zeros(4, 3)}, "page_table is torch.float32"),
        ({"cu_seqlens_q": None}, "13 queries of 4 sequences without cu_seqlens_q"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    call = {**given(), **changes}
    with pytest.raises(ConfigError, match=reason):
        append.paged_append(**call)
    assert (call["key_cache"] == 7).all(), "nothing was written"


def test_caches_of_another_type_are_refused() -> None:
    call = given(torch.bfloat16, torch.float16)
    with pytest.raises(ConfigError, match=r"the caches are torch\.float16"):
        append.paged_append(**call)
    call = given(torch.bfloat16, E4M3)
    with pytest.raises(ConfigError, match="k_scale is missing"):
        append.paged_append(**{**call, "k_scale": None})


class Kernel:
    """A loaded kernel over a host's memory: PyTorch's operations, or with a bit of them wrong."""

    def __init__(self) -> None:
        self.launches: list[dict[str, int]] = []
        self.is_right = True

    def launch(self, pointers: Any, integers: Any, *_: Any) -> None:
        numbers = dict(zip(PAGED_APPEND.arguments.integers, integers, strict=True))
        at = dict(zip(PAGED_APPEND.arguments.tensors, pointers, strict=True))
        dtype = torch.bfloat16 if numbers["is_bf16"] else torch.float16
        kind = E4M3 if numbers["is_e4m3"] else dtype

        def view(name: str, kind: Any, shape: Any, strides: Any) -> Any:
            if not at[name]:
                return None
            last = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            size = torch.empty((), dtype=kind).element_size()
            memory = (ctypes.c_uint8 * (last * size)).from_address(at[name])
            flat = torch.frombuffer(memory, dtype=torch.uint8).view(kind)
            return flat.as_strided(shape, strides)

        n = SimpleNamespace(**numbers)
        counts = {"query": n.heads_q, "key": n.heads_kv, "value": n.heads_kv, "out": n.heads_q}
        rows = {
            name: view(
                *(name, kind if name == "out" else dtype, (n.tokens, count, n.head_dim)),
                (numbers[f"{name}_row"], numbers[f"{name}_head"], 1),
            )
            for name, count in counts.items()
        }
        caches = [
            view(
                *(name, kind, (n.pages, n.page_size, n.heads_kv, n.head_dim)),
                (*(numbers[f"{name}_{part}"] for part in ("page", "slot", "head")), 1),
            )
            for name in ("key_cache", "value_cache")
        ]
        angles = [
            view(name, torch.float32, (n.positions, n.rotary_dim // 2), (n.rotary_dim // 2, 1))
            for name in ("cosine", "sine")
        ]
        scales = [
            view(f"factor_{name}", torch.float32, (count,), (1,))
            for name, count in zip("qkv", (n.heads_q, n.heads_kv, n.heads_kv), strict=True)
        ]
        starts = view("starts", torch.int32, (n.batch + 1,), (1,))
        assert (starts is None) == (n.queries > 0)
        call = append.Append(
            query=rows["query"],
            key=rows["key"],
            value=rows["value"],
            key_cache=caches[0],
            value_cache=caches[1],
            page_table=view("table", torch.int32, (n.batch, n.columns), (n.table_row, 1)),
            seqused_k=view("used", torch.int32, (n.batch,), (1,)),
            starts=starts,
            cosine=angles[0],
            sine=angles[1],
            interleaved=bool(n.interleaves),
            scales=tuple(one for one in scales if one is not None),
            out=rows["out"],
        )
        append.composed(call)
        if not self.is_right:
            rows["out"].view(torch.uint8)[0, 0, 0] ^= 1
        self.launches.append(numbers)


@pytest.fixture
def kernel(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Kernel()
    monkeypatch.setattr(
        append.kernels, "source", SimpleNamespace(find=lambda artifacts: "artifact")
    )
    monkeypatch.setattr(sourced, "load", lambda artifact: made)
    append.kernels.forget()
    yield made
    append.kernels.forget()


PROVING = 8


def test_the_kernel_is_launched_after_its_proof(kernel: Kernel) -> None:
    for kind in (torch.bfloat16, E4M3):
        call, other = given(torch.bfloat16, kind), given(torch.bfloat16, kind)
        before = len(kernel.launches)
        found = append.paged_append(**call)
        assert len(kernel.launches) == max(before, PROVING) + 1
        append.composed(append._checked(*_positional(other)))
        assert torch.equal(call["key_cache"].float(), other["key_cache"].float())
        assert found.dtype == kind
    last = kernel.launches[-1]
    assert (last["key_cache_slot"], last["key_cache_head"]) == (2 * WIDTH, SIZE * 2 * WIDTH)
    call = given()
    for name in ("query", "key", "value"):
        call[name] = call[name][:8]
    append.paged_append(**{**call, "cu_seqlens_q": None})
    assert kernel.launches[-1]["queries"] == 2


def _positional(call: dict[str, Any]) -> tuple[Any, ...]:
    names = "query key value key_cache value_cache page_table seqused_k cu_seqlens_q cosine sine"
    scales = tuple(call.get(f"{name}_scale") for name in "qkv")
    return *(call.get(name) for name in names.split()), False, scales, None


def test_a_kernel_with_other_bits_is_not_served(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.is_right = False
    out = [torch.zeros_like(given()["query"]) for _ in range(2)]
    found, again = (append.paged_append(**given(), out=one) for one in out)
    assert torch.equal(found, again) and found.any()
    assert len(kernel.launches) == 1 and "results are not theirs" in caplog.text


def test_strides_that_the_kernel_does_not_take(kernel: Kernel) -> None:
    call = given()
    wide = torch.randn(13, HEADS, WIDTH + 4).bfloat16()
    append.paged_append(**{**call, "query": wide[..., 4:]})
    assert not kernel.launches


def test_no_grid_is_launched_for_heads_that_are_not_there(kernel: Kernel) -> None:
    call = given()
    for name in ("query", "key", "value"):
        call[name] = call[name][:, :0]
    for name in ("key_cache", "value_cache"):
        call[name] = call[name][:, :, :0]
    assert append.paged_append(**call).shape == (sum(QUERIES) + 1, 0, WIDTH)
    assert not kernel.launches
