"""Corrections of rates to the calls of models."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tuner.families import families
from tuner.hardware import GPUS
from tuner.problem import GemmProblem
from tuner.search.corrections import LIBRARIES, OWN, Rates, corrected
from tuner.selection.domains import AttentionDomain, ProductDomain
from tuner.selection.portfolio import serving, shipped

FEW = ProductDomain("few", "bias")
H200 = GPUS["H200"]


@pytest.mark.parametrize(("family", "added"), [("gemv", OWN), ("vendor_blas", LIBRARIES)])
def test_products_of_few_rows_are_corrected_on_the_measured_gpu(
    family: str, added: Mapping[str, Rates]
) -> None:
    one, before = families()[family], {"launch": 1.0, "output": 2.0}
    after = corrected(before, FEW, one, H200)
    assert before == {"launch": 1.0, "output": 2.0}
    gained = {term: us - before.get(term, 0.0) for term, us in after.items()}
    assert {term: us for term, us in gained.items() if us} == pytest.approx(added[H200.name])
    assert corrected(before, FEW, one, GPUS["H100"]) == before
    assert corrected(before, ProductDomain("narrow", "bias"), one, H200) == before
    assert corrected(before, AttentionDomain(64, "full", "one"), one, H200) == before


@pytest.mark.parametrize(
    ("shape", "is_own"),
    [
        ("M=4,N=320,K=320,dtype=fp16", False),
        ("M=1,N=2304,K=768,dtype=bf16,epilogue=bias", False),
        ("M=1,N=512,K=2880,dtype=bf16,epilogue=bias", True),
        ("M=1,N=3072,K=1024,dtype=bf16", True),
        ("M=1,N=6144,K=4096,dtype=bf16", True),
    ],
)
def test_a_library_multiplies_small_products_with_short_sums(shape: str, is_own: bool) -> None:
    (products,) = [one for one in serving(shipped(), H200) if one.op == "gemm"]
    found = products.select(GemmProblem.parse(shape))
    assert found is not None
    assert (found.config.family != "vendor_blas") == is_own
