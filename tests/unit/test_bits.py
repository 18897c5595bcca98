"""`tuner.runtime.bits`: rows are compared wherever they appear again, and neighbours are not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from bits_fakes import RowByRow  # noqa: E402

from tuner.config import Config  # noqa: E402
from tuner.families import families  # noqa: E402
from tuner.hardware import DEFAULT_GPU  # noqa: E402
from tuner.problem import (  # noqa: E402
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    SwigluProblem,
)
from tuner.runtime import bits  # noqa: E402
from tuner.runtime.call import devices  # noqa: E402

PRODUCTS: dict[str, Any] = {
    "gemm": GemmProblem(64, 32, 64, dtype="bfloat16"),
    "epilogue": GemmProblem(64, 32, 64, dtype="bfloat16", epilogue="bias_residual"),
    "rows": GemmProblem(64, 32, 64, dtype=E4M3, scales="row"),
    "blocks": GemmProblem(64, 32, 256, dtype=E4M3, scales="block"),
    "gated": SwigluProblem(64, 32, 64, dtype="bfloat16"),
    "grouped": GroupedGemmProblem(3, 64, 32, 64, dtype="bfloat16"),
    "grouped blocks": GroupedGemmProblem(3, 64, 32, 256, dtype=E4M3),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TYPE", "cpu")
    # Any config is legal: the kernel is not there.
    monkeypatch.setattr(bits, "family", lambda name: families()["softmax"])
    monkeypatch.setattr(families()["softmax"].__class__, "violations", lambda *_: [])


def outcome(subject: Any, is_true: bool = True) -> bits.RowBits:
    def planner(posed: Any, _: Config) -> Any:
        for operand, tensor in zip(posed.problem.operands, _inputs(subject, posed), strict=False):
            assert tensor.numel() >= operand.elements, operand.name
        return RowByRow(posed.problem, is_true)

    return bits.outcome(Config("softmax", {}), subject.views(), planner, DEFAULT_GPU)


def _inputs(subject: Any, posed: Any) -> Any:
    if not isinstance(subject, bits.ProductRows):
        return ()
    m = posed.problem.m
    groups = getattr(posed.problem, "groups", 1)
    return subject.inputs(posed.problem, torch.arange(m), [0] * groups + [m])


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_rows_of_a_product_are_compared_beside_neighbours(name: str) -> None:
    sizes = (1, 2, 100, 300)
    subject = bits.ProductRows(PRODUCTS[name], 300, sizes, (100,))
    one = outcome(subject)
    groups = getattr(PRODUCTS[name], "groups", 0)
    assert (one.views, one.differing, one.refused) == (6 + groups, 0, {})
    # All rows of the smaller calls, the shuffled ones, and half beside neighbours.
    least = 103 + 100 + 20
    assert one.compared > least + 300 * (groups > 0)
    assert len(one.recorded.digests()) == max(1, groups)


def test_a_kernel_that_looks_at_the_number_of_rows_is_seen() -> None:
    sizes = (1, 64, 100, 300)
    one = outcome(bits.ProductRows(PRODUCTS["gemm"], 300, sizes, ()), is_true=False)
    assert one.differing == 65 and one.at == ["M=64", "M=1"]


def attention(**changes: Any) -> AttentionProblem:
    heads = {"heads_q": 8, "heads_kv": 8}
    sizes = {"seqlen_q": 64, "seqlen_kv": 64, "head_dim": 64, **heads}
    return AttentionProblem(**sizes, dtype="bfloat16", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"is_varlen": True, "batch": 2}])
def test_rows_of_attention_are_those_of_a_request_at_a_position(changes: dict[str, Any]) -> None:
    one = outcome(bits.Sequences(attention(**changes), is_grouped=False))
    assert one.views > 20 and not one.differing and not one.refused
    assert one.compared > 10_000 and "seen" in one.recorded._bits


def test_a_chunk_of_pages_holds_the_requests_keys() -> None:
    problem = attention(is_causal=True, page_size=64, layout="bshd")
    subject = bits.Sequences(problem, is_grouped=True)
    view = next(view for view in subject.views() if len(view.chunks) == 3)  # type: ignore[attr-defined]
    call = view._call()  # type: ignore[attr-defined]
    for i, (request, _, end) in enumerate(view.chunks):  # type: ignore[attr-defined]
        pages = call.key[call.page_table[i].long()].flatten(0, 1)
        assert torch.equal(pages[:end], subject.key[request, :end])
        assert bool(pages[end:].isnan().all())


def test_records_of_two_kernels_are_compared() -> None:
    mine, other = bits.Recorded(), bits.Recorded()
    rows = torch.arange(20)
    mine.take("a", rows, torch.zeros(20, 4, dtype=torch.int16))
    changed = torch.zeros(30, 4, dtype=torch.int16)
    changed[7, 3] = 1
    other.take("a", torch.arange(30), changed)
    assert mine.digests() != other.digests()
    assert mine.merge(other) == (20, 1) and mine.merge(other) == (30, 1)
    assert mine.take("a", torch.full((3,), -1), changed[:3]) == (0, 0)
