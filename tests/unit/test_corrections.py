"""Corrections of rates to the calls of models."""

from __future__ import annotations

import pytest

from tuner.families import families
from tuner.families.by_operation import AnyDomain, AttentionDomain, ProductDomain
from tuner.families.gemm.domains import Rows
from tuner.hardware import GPUS
from tuner.problem import GemmProblem
from tuner.search.corrections import (
    ACTIVATED,
    LIBRARIES,
    OWN,
    corrected,
    margins,
)
from tuner.selection.portfolio import serving, shipped

H200 = GPUS["H200"]


RATES = {"launch": 1.0, "output": 2.0}
ONE = AttentionDomain(64, "full", "one")


def gained(domain: AnyDomain, family: str, gpu: str = "H200") -> dict[str, float]:
    """Microseconds that corrections add to `RATES`, by term."""
    after = corrected(RATES, domain, families()[family], GPUS[gpu])
    found = {term: us - RATES.get(term, 0.0) for term, us in after.items()}
    return {term: us for term, us in found.items() if us}


@pytest.mark.parametrize("rows", ["few", "narrow", "tall"])
def test_launches_of_own_small_products_are_longer_on_the_measured_gpu(rows: Rows) -> None:
    domain = ProductDomain(rows, "bias")
    assert gained(domain, "gemm") == pytest.approx({"launch": OWN[H200.name][rows]})
    assert not gained(domain, "gemm", "H100")
    plain = corrected(RATES, domain, families()["gemv"], H200, is_plain=True)
    assert plain == RATES, "never launched early"
    assert gained(domain, "vendor_blas") == (
        pytest.approx(LIBRARIES[H200.name]) if rows == "few" else {}
    )


@pytest.mark.parametrize("epilogue", ["bias_gelu", "gelu_tanh"])
def test_so_are_those_of_activated_products_of_many_rows(epilogue: str) -> None:
    domain = ProductDomain("wide", epilogue)
    assert gained(domain, "gemm") == pytest.approx({"launch": OWN[H200.name][ACTIVATED]})
    assert not gained(domain, "vendor_blas") and not gained(domain, "gemm", "H100")
    assert margins(ONE._replace(head_dim=96), H200) == (0.0,) and margins(domain, H200) is None


@pytest.mark.parametrize(
    "domain",
    [
        ProductDomain("wide", "bias"),
        ProductDomain("wide", gradient="input"),
        AttentionDomain(64, "full", "few"),
        ONE,
        AttentionDomain(64, "causal", "prompt"),
    ],
)
def test_other_domains_are_left_as_fitted(domain: AnyDomain) -> None:
    family = "gemm" if isinstance(domain, ProductDomain) else "fused_attention"
    assert not gained(domain, family)


def test_what_ships_is_corrected() -> None:
    """Margins of models' calls, and the rates of one query as the fit that was corrected."""
    for one in shipped():
        for domain, models in one.domains.items():
            wanted = margins(domain, one.gpu)
            assert wanted is None or (models.margin,) == wanted


@pytest.mark.parametrize(
    ("shape", "is_own"),
    [
        ("M=4,N=320,K=320,dtype=fp16", False),
        ("M=1,N=2304,K=768,dtype=bf16,epilogue=bias", False),
        ("M=1,N=512,K=2880,dtype=bf16,epilogue=bias", True),
        ("M=1,N=3072,K=1024,dtype=bf16", True),
        ("M=1,N=1024,K=4096,dtype=bf16", True),
        ("M=1,N=4096,K=4096,dtype=bf16", True),
        ("M=4,N=50256,K=1600,dtype=bf16", False),
        ("M=4,N=50257,K=1600,dtype=bf16", True),
    ],
)
def test_a_library_multiplies_small_products_with_short_sums_and_even_columns(
    shape: str, is_own: bool
) -> None:
    (products,) = [one for one in serving(shipped(), H200) if one.op == "gemm"]
    found = products.select(GemmProblem.parse(shape))
    assert (found.config.family != "vendor_blas") == is_own
