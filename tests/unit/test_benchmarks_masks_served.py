"""Calls of block masks through the portfolio: their problems, and what a row says."""

from __future__ import annotations

import pytest

from benchmarks import masks, masks_served
from tuner.selection.portfolio import shipped


def test_every_case_has_a_kernel_of_the_portfolio() -> None:
    known = next(one for one in shipped() if one.op == "attention")
    found = list(masks_served.cases())
    assert len({case.label() for case in found}) == len(found) > 20
    for case in found:
        assert case.mask in masks.MASKS
        selection = known.select(case.problem)
        assert selection is not None and selection.domain.label().startswith("D=")
        assert selection.config.family == "fused_attention"


def test_masks_are_chosen_by_name() -> None:
    assert {case.mask for case in masks_served.cases(["prefix"])} == {"prefix"}


@pytest.mark.parametrize("is_own", [True, False])
def test_a_row_says_who_answered(is_own: bool) -> None:
    us = {"flex": 150.0, **({"own": 100.0} if is_own else {})}
    failed = {} if is_own else {"own": "no measured winner"}
    row = masks_served.line({"case": "causal", "us": us, "failed": failed, "difference": 2e-3})
    assert "flex    150.0 us" in row and "2.0e-03" in row
    assert ("1.500" in row) == is_own and ("own: no measured winner" in row) != is_own
