"""`tuner.linear` over a vocabulary whose size is not a multiple of 8: in two parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tuner

torch = pytest.importorskip("torch", reason="torch is not installed")

COLUMNS, DEPTH = 16387, 16


@pytest.fixture
def parts(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of PyTorch's products."""
    from tuner.runtime import products

    plain, found = torch.nn.functional.linear, list[int]()

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        found.append(weight.shape[0])
        return plain(input, weight, bias)

    monkeypatch.setattr(products.functional, "linear", linear)
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


def test_other_products_stay_whole(parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = made()
    cases = [
        (*made(3),),
        (*made(columns=16392),),
        (*made(columns=8195),),
        (*made(dtype=torch.float32),),
        (rows, weight, torch.zeros(COLUMNS, dtype=torch.bfloat16)),
        (rows.clone().requires_grad_(), weight),
    ]
    for case in cases:
        tuner.linear(*case)
    tuner.linear(rows, weight, activation="relu")
    monkeypatch.setenv("TUNER_DISABLE", "1")
    tuner.linear(rows, weight)
    assert parts == [*(case[1].shape[0] for case in cases), COLUMNS, COLUMNS]
