"""`tuner.linear` over a vocabulary whose size is not a multiple of 8: in two parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from runtime_server import Server, built_dispatcher, dispatched_server

import tuner

torch = pytest.importorskip("torch", reason="torch is not installed")

built, server = built_dispatcher, dispatched_server
COLUMNS, DEPTH = 16387, 16


@pytest.fixture
def parts(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of PyTorch's products."""
    plain, found = torch.nn.functional.linear, list[int]()

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        found.append(weight.shape[0])
        return plain(input, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return found


def made(rows: int = 4, columns: int = COLUMNS, dtype: Any = torch.bfloat16) -> list[Any]:
    return [torch.randn(size, DEPTH, dtype=dtype) for size in (rows, columns)]


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 5)])
def test_the_last_columns_are_multiplied_by_themselves(
    parts: list[int], shape: tuple[int, ...]
) -> None:
    _, weight = made()
    rows = torch.randn(*shape, DEPTH, dtype=torch.bfloat16)
    out = tuner.linear(rows, weight)
    assert parts == [16384, 3] and out.is_contiguous() and out.shape == (*shape, COLUMNS)
    torch.testing.assert_close(out, rows @ weight.t())
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}


@pytest.mark.parametrize("activation", [None, "relu"])
def test_each_part_has_its_bias(parts: list[int], activation: str | None) -> None:
    rows, weight = made()
    bias = torch.randn(COLUMNS, dtype=torch.bfloat16)
    out = tuner.linear(rows, weight, bias, activation=activation)
    assert parts == [16384, 3]
    wanted = rows @ weight.t() + bias
    wanted = wanted.relu() if activation else wanted
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("has_bias", [False, True])
def test_large_ones_have_gradients_of_aligned_rows(
    parts: list[int], monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    from tuner.runtime.products import matmul as products

    monkeypatch.setattr(products, "MIN_FLOPS_WITH_GRADIENTS", 0)
    plain, strides, widths = products.matmul, list[tuple[int, ...]](), list[int]()

    def matmul(input: Any, other: Any) -> Any:
        strides.append(input.stride())
        widths.append(input.shape[-1])
        return plain(input, other)

    monkeypatch.setattr(products, "matmul", matmul)
    rows, weight, bias, grad = (
        *made(),
        *(torch.randn(*n).bfloat16() for n in ((COLUMNS,), (4, COLUMNS))),
    )
    given = [rows, weight, *([bias] if has_bias else [])]
    found = [one.clone().requires_grad_() for one in given]
    wanted = [one.clone().requires_grad_() for one in given]
    tuner.linear(*found).backward(grad)
    assert parts == [16384, 3]
    assert strides == [(16392, 1), (1, 16392)] and widths == [16384, 4]
    torch.nn.functional.linear(*wanted).backward(grad)
    for one, other in zip(found, wanted, strict=True):
        assert (one.grad - other.grad).norm() < 1e-2 * other.grad.norm()


def test_small_ones_with_gradients_stay_whole(parts: list[int]) -> None:
    rows, weight = made()
    tuner.linear(rows.requires_grad_(), weight)
    assert parts == [COLUMNS]


def test_without_memory_for_both_it_stays_whole(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "cat", full)
    rows, weight = made()
    torch.testing.assert_close(tuner.linear(rows, weight), rows @ weight.t())
    assert parts == [16384, 3, COLUMNS]


def test_even_ones_are_multiplied_in_parts_if_they_are_large(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runtime.products import matmul as products

    tuner.linear(*made(255, 16386))
    assert parts == [16386]
    tuner.linear(*made(256, 16386))
    assert parts[1:] == [16384, 2]
    monkeypatch.setattr(products, "MIN_EVEN_WEIGHTS", 16386 * DEPTH)
    tuner.linear(*made(4, 16386))
    assert parts[3:] == [16384, 2]


def test_other_products_stay_whole(parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = made()
    cases = [
        (*made(3),),
        (*made(columns=16392),),
        (*made(columns=8195),),
        (*made(dtype=torch.float32),),
        (rows.clone().requires_grad_(), weight),
        (rows, weight, torch.zeros(COLUMNS, dtype=torch.bfloat16, requires_grad=True)),
    ]
    for case in cases:
        tuner.linear(*case)
    monkeypatch.setenv("TUNER_DISABLE", "1")
    tuner.linear(rows, weight)
    assert parts == [*(case[1].shape[0] for case in cases), COLUMNS]


def test_a_refused_vocabulary_of_an_odd_size_is_multiplied_in_two_parts(server: Server) -> None:
    """Python does, in every call: the dispatcher would multiply it whole."""
    linear = server.runtime.products.linear
    rows, weight = torch.randn(4, 32).half(), torch.randn(16387, 32).half()
    wanted, found = rows.float() @ weight.float().t(), list[Any]()
    plain = torch.cat

    def cat(parts: Any, dim: int) -> Any:
        found.append([part.shape[-1] for part in parts])
        return plain(parts, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", cat)
        for _ in range(3):
            out = linear(rows, weight)
    assert found == [[16384, 3]] * 3
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
