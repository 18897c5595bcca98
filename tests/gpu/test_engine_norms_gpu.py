"""Norms of sums with a residual: a row has the same bits in calls of 1 to 4096 rows."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

ROWS = 4096


@pytest.mark.parametrize("columns", [96, 1024, 2048, 4096, 5120, 16384])
def test_rows_alone_and_among_others(columns: int) -> None:
    norms = importlib.import_module("tuner.runtime.engines.norms")
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    terms, residuals, weight = drawn(ROWS, columns), drawn(ROWS, columns), drawn(columns)

    def run(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = (one[first : first + count].clone() for one in (terms, residuals))
        assert norms.fits(x, residual, weight)
        norms.add_and_normalise(x, residual, weight, 1e-5)
        return x, residual

    wanted, sums = run(0, ROWS)
    assert torch.equal(sums, terms + residuals)
    exact = sums.double() * (sums.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    assert torch.allclose(wanted.double(), exact * weight.double(), rtol=2**-7, atol=1e-5)
    for count in (1, 16, 255, 256, 1000):
        for first in range(0, min(ROWS - count, 40 * count), count):
            out, _ = run(first, count)
            assert torch.equal(out, wanted[first : first + count]), (count, first)


def test_other_tensors_are_left_to_the_caller() -> None:
    norms = importlib.import_module("tuner.runtime.engines.norms")
    x, weight = torch.ones(4, 64, device="cuda").half(), torch.ones(64, device="cuda").half()
    assert norms.fits(x, x.clone(), weight)
    for others in ((x.float(), x, weight), (x.t(), x.t(), weight[:4]), (x, x[:2], weight)):
        assert not norms.fits(*others)
    shifted = torch.ones(4 * 64 + 1, device="cuda").half()[1:].view(4, 64)
    assert not norms.fits(shifted, x, weight)
