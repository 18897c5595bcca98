"""`tuner.mla_decode`: by PyTorch's operations, by a kernel, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.families.mla_decode import ARGUMENTS, KERNELS

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.runtime.attention import mla  # noqa: E402
from tuner.runtime.call import counters, devices, guards  # noqa: E402

SINGLE = KERNELS["bfloat16"]
CPU = torch.device("cpu")


def given(number: int = 1) -> dict[str, Any]:
    """Arguments of a call."""
    call = mla.drawn(SINGLE, CPU, number)
    names = ("query", "cache", "block_table", "lengths", "scale")
    return {name: getattr(call, name) for name in names}


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


def test_it_writes_to_a_tensor_and_counts_the_reason() -> None:
    call = given()
    counters.stats(reset=True)
    out = torch.empty(*call["query"].shape[:3], 512, dtype=torch.bfloat16)
    assert mla.mla_decode(**call, out=out) is out
    assert torch.equal(out, mla.mla_decode(**call))
    assert counters.stats().fallbacks == {"the tensors are not on a CUDA device": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache": torch.zeros(9, 16, 576)}, "query is torch.bfloat16, cache torch.float32"),
        ({"query": torch.zeros(6, 3, 20, 512).bfloat16()}, r"query \(6, 3, 20, 512\)"),
        ({"query": torch.zeros(6, 20, 576).bfloat16()}, r"query \(6, 20, 576\)"),
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


class Loaded:
    """A loaded kernel over a host's memory: PyTorch's operations, with a fault if wanted."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def workspace_bytes(self, integers: Any) -> int:
        return 8

    def launch(self, pointers: Any, integers: Any, scalars: Any, *_: Any) -> None:
        n = dict(zip(ARGUMENTS.integers, integers, strict=True))
        at = dict(zip(ARGUMENTS.tensors, pointers, strict=True))

        def view(name: str, dtype: Any, shape: Any, strides: Any) -> Any:
            last = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            size = torch.empty((), dtype=dtype).element_size()
            memory = (ctypes.c_uint8 * (last * size)).from_address(at[name])
            return (
                torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)
            )

        rows = n["batch"], n["queries"], n["heads"]
        steps = {
            name: [n[f"{name}_{part}"] for part in parts]
            for name, parts in (
                ("query", ("batch", "row", "head")),
                ("cache", ("page", "slot")),
                ("out", ("batch", "row", "head")),
            )
        }
        columns = n["table_row"]
        call = mla.Decode(
            view("query", torch.bfloat16, (*rows, 576), (*steps["query"], 1)),
            view("cache", torch.bfloat16, (n["pages"], n["page_size"], 576), (*steps["cache"], 1)),
            view("block_table", torch.int32, (n["batch"], columns), (columns, 1)),
            view("lengths", torch.int32, (n["batch"],), (1,)),
            scalars[0] * (1.1 if self.fault == "scale" else 1.0),
            view("out", torch.bfloat16, (*rows, 512), (*steps["out"], 1)),
            None if not at["lse"] else torch.empty(rows[0], rows[2], rows[1]),
        )
        mla.composed(call)
        if call.lse is not None:
            stored = view("lse", torch.float32, call.lse.shape, call.lse.stride())
            stored.copy_(call.lse + (0.01 if self.fault == "lse" else 0.0))
        if self.fault == "a head":
            call.out[3, 0, 1] = 0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for those of a device."""
    monkeypatch.setattr(guards, "unserved", lambda tensors: None)
    for name in ("bind", "stream_of"):
        monkeypatch.setattr(devices, name, lambda index: 0)
    monkeypatch.setattr(devices, "use", lambda index: torch.no_grad())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("fault", ["", "scale", "lse", "a head"])
def test_only_a_right_kernel_is_proven(fault: str) -> None:
    assert mla._is_proven(SINGLE, CPU, Loaded(fault)) == (not fault)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_cpu")
def test_a_proven_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    call = given(0)
    wanted, _ = mla.mla_decode(**call, return_lse=True)
    monkeypatch.setattr(mla.kernels[SINGLE], "of", lambda device, is_proven: Loaded())
    counters.stats(reset=True)
    assert torch.equal(mla.mla_decode(**call), wanted)
    assert (counters.stats().hits, counters.stats().fallbacks) == (1, {})
    narrow = torch.nn.functional.pad(call["cache"], (0, 4))[..., :576]
    assert torch.equal(mla.mla_decode(**{**call, "cache": narrow}), wanted)
    assert counters.stats().fallbacks == {"no kernel takes such tensors": 1}


def test_opcheck() -> None:
    call = given(1)
    operator = torch.ops.tuner.mla_decode.default
    torch.library.opcheck(operator, tuple(call.values()))


def test_a_compiled_model_holds_the_operator() -> None:
    call = given(1)
    compiled = torch.compile(mla.mla_decode, fullgraph=True, backend="eager")
    out, lse = compiled(**call, return_lse=True)
    wanted, statistics = mla.mla_decode(**call, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, statistics)
