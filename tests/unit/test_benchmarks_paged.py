"""The benchmark of paged caches: its cases, the kernels that it tries, and what it prints."""

from __future__ import annotations

import math

import pytest

from benchmarks import paged, paged_batches
from tuner.hardware import DEFAULT_GPU

CASES = list(paged_batches.cases([]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label())
def test_each_case_has_the_kernels_that_serve_it(case: paged_batches.Case) -> None:
    configs = list(paged.configs(case))
    packed = {config.get("packed_heads", 1) for config in configs}
    assert max(packed) >= case.heads_q // case.heads_kv, "each key is read once"
    for config in configs:
        made = list(paged.schedules(case, config))
        assert made, paged.short(config)
        for one in made:
            assert paged.FAMILY.accepts(case.problem, one, DEFAULT_GPU), paged.short(one)
        kernels = {paged.FAMILY.kernels(case.problem, one)["attention"] for one in made}
        assert kernels == {paged.kernels_of(case)[config]}


def test_cases_are_chosen_by_group() -> None:
    assert {case.group for case in paged_batches.cases(["few", "mixed"])} == {"few", "mixed"}
    decoding = [(len(case.keys), case.keys[0]) for case in paged_batches.cases(["decode"])]
    assert len(set(decoding)) == 12 and len(decoding) == 24


def test_bytes_and_operations_are_those_of_what_is_seen() -> None:
    case = paged_batches.Case("mixed", (1, 3), (100, 7), 16, heads_q=4, heads_kv=2, head_dim=64)
    assert case.bytes == 2 * 2 * 2 * 64 * 107
    assert case.cached_bytes == 2 * 2 * 2 * 64 * 16 * 8
    assert case.flops == 4 * 4 * 64 * (100 + 5 + 6 + 7)
    assert not case.is_even and paged_batches.Case("decode", (1, 1), (9, 9), 16).is_even


def test_a_row_and_the_table_say_who_was_faster() -> None:
    found = {
        "case": "decode B=1", "group": "decode", "bytes": 40_000_000, "flops": 10**9,
        "us": {"tuner": 10.0, "flash3": 12.0, "best": 9.5}, "answered": {"tuner": "own"},
        "chosen": "1/64/3/4/16/2 kernel", "best": "1/64/3/4/16/4 cluster",
    }  # fmt: skip
    row = paged.line(found)
    assert "10.0 us" in row and "4.00 TB/s" in row and "flash3 12.0 1.200" in row
    assert "best 9.5 0.950" in row and "| 1/64/3/4/16/2 kernel, best 1/64" in row
    slower = {**found, "us": {"tuner": 10.0, "flash3": 9.0, "dense": 9.8}}
    lost = {**found, "us": {"flash3": 9.0}, "answered": {"tuner": "no kernel"}}
    assert "nan" in paged.line(lost) and paged.line(lost).endswith("| tuner: no kernel")
    mean = math.sqrt(1.2 * 0.9)
    assert paged.table([found, slower, lost])[-1] == (
        f"| decode | 3 | {mean:.3f} | 0.900 | 0.980 | 0.980 | 0.950 |"
    )
