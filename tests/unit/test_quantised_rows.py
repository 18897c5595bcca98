"""Rows of a quantised latent cache, as the gate draws them and as the runtime reads them."""

from __future__ import annotations

import math
import struct

import pytest

from tuner.measure.gate import quantised_rows
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.runtime.attention import mla  # noqa: E402


def problem_of(form: str) -> AttentionProblem:
    text = f"B=2,H=4,HKV=1,SQ=1,SKV=90,D=576,DV=512,page_size=64,dtype=bf16,cache={form}"
    return AttentionProblem.parse(text)


def test_codes_are_torch_s() -> None:
    every = torch.arange(256).byte()
    wanted = every.view(torch.float8_e4m3fn).float().tolist()
    for code, value in enumerate(wanted):
        assert math.isnan(value) or quantised_rows.value_of(code) == value
        word = struct.pack("<H", quantised_rows.bf16_of(value * 0.3))
        one = torch.tensor([value * 0.3]).bfloat16()
        assert math.isnan(value) or one.view(torch.uint8).numpy().tobytes() == word


@pytest.mark.parametrize("kind", ["random", "dominant", "huge_scores"])
@pytest.mark.parametrize("form", ["e4m3", "e4m3_blocks"])
def test_rows_mean_what_the_runtime_reads(form: str, kind: str) -> None:
    problem = problem_of(form)
    packed, rows = quantised_rows.drawn(problem, kind, 3)
    assert quantised_rows.drawn(problem, kind, 3) == (packed, rows)
    width = problem.matrices[1].shape[-1]
    cache = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(1, -1, width)
    cache = cache.view(torch.float8_e4m3fn) if form == "e4m3" else cache
    query = torch.zeros(1, 1, 1, 576).bfloat16()
    none = torch.empty(0)
    call = mla.Decode(query, cache, none, none, 1.0, none, None)
    read = mla._rows(call, torch.zeros(1).long())
    elements = torch.frombuffer(bytearray(rows), dtype=torch.bfloat16).view(-1, 576)
    assert len(elements) == problem.total_kv and torch.equal(read.bfloat16(), elements)
    if kind != "huge_scores":
        assert abs(elements.float().mean() - (kind == "dominant") * 0.5) < 0.1 or form != "e4m3"
        subnormal = elements[:, :512].float().abs() < 2.0**-6
        assert subnormal.any() and not subnormal.all()


@pytest.mark.parametrize("form", ["e4m3", "e4m3_blocks"])
def test_doubled_elements_are_packed(form: str) -> None:
    problem = problem_of(form)
    _, rows = quantised_rows.drawn(problem, "huge_scores", 0)
    doubled = bytearray(rows)
    doubled[2 * 576 * 7 : 2 * 576 * 7 + 6] = struct.pack("<H", 0x4380) * 3
    packed = quantised_rows.packed_huge(problem, bytes(doubled))
    width = problem.matrices[1].shape[-1]
    latent = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, width)[:, :512]
    values = latent.contiguous().view(torch.float8_e4m3fn).float()
    assert values[7, :4].tolist() == [256, 256, 256, 128] and (values != 128).sum() == 3
