"""`scaled_mm`: the problem of an e4m3 product, and what stays PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.problem import GemmProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

A = torch.randn(8, 32).half()
B = torch.randn(32, 16).half()
E4M3_A = A.to(torch.float8_e4m3fn)
E4M3_B = B.t().contiguous().to(torch.float8_e4m3fn).t()
ONE = torch.tensor(0.5)
ROWS, COLUMNS = torch.rand(8, 1) + 0.5, torch.rand(1, 16) + 0.5


@pytest.mark.parametrize(
    ("factors", "options", "wanted"),
    [
        ((ONE, ONE), (torch.bfloat16, True), "scales=tensor,fast_accum=1"),
        ((ONE.view(1, 1), ONE.view(1)), (torch.bfloat16, False), "scales=tensor,fast_accum=0"),
        ((ROWS, COLUMNS), (torch.float16, True), "scales=row,dtype_d=fp16,fast_accum=1"),
        ((ROWS, COLUMNS), (torch.bfloat16, False), "scales=row"),
        ((ONE, ONE), (None, True, ONE), "scales=tensor,dtype_d=e4m3,fast_accum=1"),
        ((ROWS, COLUMNS), (E4M3_A.dtype, True, ONE), "scales=row,dtype_d=e4m3,fast_accum=1"),
    ],
)
def test_a_scaled_problem_is_read_off_its_factors(
    runtime: SimpleNamespace, factors: Any, options: Any, wanted: str
) -> None:
    problem = runtime.scaled.scaled_problem_of(E4M3_A, E4M3_B, *factors, *options)
    assert problem == GemmProblem.parse(f"M=8,N=16,K=32,dtype=e4m3,{wanted}")


@pytest.mark.parametrize(
    ("a", "b", "factors", "out_dtype", "reason"),
    [
        (E4M3_A[0], E4M3_B, (ONE, ONE), torch.bfloat16, "not two matrices"),
        (A, B, (ONE, ONE), torch.bfloat16, "float16 is not tuned"),
        (E4M3_A, E4M3_B.contiguous(), (ONE, ONE), torch.bfloat16, "by rows and .K, N. by columns"),
        (E4M3_A[:, :16], E4M3_B[:16], (ONE, ONE), torch.bfloat16, "by rows and .K, N. by columns"),
        (E4M3_A, E4M3_B[:16], (ONE, ONE), torch.bfloat16, "by rows and .K, N. by columns"),
        (E4M3_A, E4M3_B, (ONE, ONE), None, "out_dtype=None is not tuned"),
        (E4M3_A, E4M3_B, (ONE, ONE), torch.float32, "out_dtype=torch.float32 is not tuned"),
        (E4M3_A, E4M3_B, (ONE.double(), ONE), torch.bfloat16, "not fp32"),
        (E4M3_A, E4M3_B, (ROWS, ONE), torch.bfloat16, "not one each"),
        (E4M3_A, E4M3_B, (ROWS[:, 0], COLUMNS[0]), torch.bfloat16, "not one each"),
        (E4M3_A, E4M3_B, (ROWS.expand(8, 2)[:, :1], COLUMNS.repeat(1, 2)[:, ::2]), torch.bfloat16,
         "nor dense"),
    ],
)  # fmt: skip
def test_what_poses_no_scaled_problem(
    runtime: SimpleNamespace, a: Any, b: Any, factors: Any, out_dtype: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.scaled.scaled_problem_of(a, b, *factors, out_dtype, True)


def test_an_output_s_factor_goes_with_e4m3_alone(runtime: SimpleNamespace) -> None:
    problem_of = runtime.scaled.scaled_problem_of
    for wrong, reason in ((ROWS, "one element"), (ONE.double(), "not fp32")):
        with pytest.raises(ConfigError, match=reason):
            problem_of(E4M3_A, E4M3_B, ONE, ONE, None, True, wrong)
    with pytest.raises(ConfigError, match="bfloat16 is not tuned"):
        problem_of(E4M3_A, E4M3_B, ONE, ONE, torch.bfloat16, True, ONE)
    call = runtime.scaled.ScaledCall
    given = (E4M3_A, E4M3_B, ONE, ONE, None)
    assert call(*given, ONE, torch.bfloat16, True).refusal() is not None
    assert call(*given, None, torch.float8_e4m3fn, True).refusal() is not None
    served = call(*given, ONE, torch.float8_e4m3fn, True)
    assert served.refusal() is None and served.inputs[4] is ONE
    assert [x.name for x in served.pose().problem.operands[:-1]][4] == "scale_d"


@pytest.mark.parametrize("factors", [(ONE, ONE), (ROWS, COLUMNS)])
def test_pytorch_s_answer_has_the_output_s_factor(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, factors: Any
) -> None:
    """As far as it goes: magnitudes above 448 become 448."""

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, *options: Any) -> Any:
        bias, result, out_dtype, _ = options
        assert bias is None and result is None, "PyTorch leaves it out"
        wide = scale_a * (a.float() @ b.float()) * scale_b
        return wide.clamp(-448, 448).to(out_dtype or torch.float8_e4m3fn)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(on_cpu.answers, "lookup", lambda problem, **_: None)
    for scale in (torch.tensor(3.0), torch.tensor([300.0])):
        out = on_cpu.scaled.scaled_mm(E4M3_A, E4M3_B, *factors, scale_result=scale)
        exact = factors[0] * (E4M3_A.float() @ E4M3_B.float()) * factors[1] * scale
        wanted = exact.clamp(-448, 448)
        assert out.dtype == torch.float8_e4m3fn
        assert ((out.float() - wanted).abs() <= 2**-9 + 0.07 * wanted.abs()).all()


@pytest.mark.parametrize("factors", [(ONE, ONE), (ROWS, COLUMNS)])
@pytest.mark.parametrize("out_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, 16).half()])
def test_no_output_s_factor_is_left_to_pytorch(
    on_cpu: SimpleNamespace, factors: Any, out_dtype: Any, bias: Any
) -> None:
    """PyTorch leaves it out or divides by it, as the device and the version are."""
    scale = torch.tensor(3.0)
    given = {"bias": bias, "scale_result": scale, "out_dtype": out_dtype}
    out = on_cpu.scaled.scaled_mm(E4M3_A, E4M3_B, *factors, **given)
    sums = factors[0] * (E4M3_A.float() @ E4M3_B.float()) * factors[1]
    wanted = (sums + (0 if bias is None else bias.float())) * scale
    assert out.dtype == (out_dtype or torch.float8_e4m3fn)
    rounding = 0.07 if out.dtype == torch.float8_e4m3fn else 0.13
    # The bf16 sum behind the bias may cancel.
    nearly = 2**-7 * (sums.abs() + 3) * scale
    assert ((out.float() - wanted).abs() <= nearly + rounding * wanted.abs()).all()


def test_a_wide_output_has_no_factor_of_its_own(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args: given.append(args) or E4M3_A)
    call = on_cpu.scaled.ScaledCall
    call(E4M3_A, E4M3_B, ONE, ONE, None, ONE, torch.bfloat16, True).by_pytorch()
    assert given == [(E4M3_A, E4M3_B, ONE, ONE, None, None, torch.bfloat16, True)]


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ((ONE, ONE), "no measured winner"),
        ((ROWS, COLUMNS), "the portfolio's kernel cannot run here"),
    ],
)
def test_what_no_kernel_serves_is_pytorch_s_scaled_product(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, factors: Any, reason: str
) -> None:
    asked: list[Problem] = []
    monkeypatch.setattr(on_cpu.answers, "lookup", lambda problem, **_: asked.append(problem))
    scaled_mm = on_cpu.scaled.scaled_mm
    out = scaled_mm(E4M3_A, E4M3_B, *factors, out_dtype=torch.bfloat16)
    wanted = factors[0] * (E4M3_A.float() @ E4M3_B.float()) * factors[1]
    assert out.dtype == torch.bfloat16
    assert (out.float() - wanted).norm() / wanted.norm() < 8e-3
    [problem] = asked
    assert isinstance(problem, GemmProblem) and not problem.fast_accum
    bias = torch.ones(16).bfloat16()
    added = scaled_mm(E4M3_A, E4M3_B, *factors, bias, out_dtype=torch.bfloat16)
    assert (added.float() - wanted - 1).norm() / wanted.norm() < 8e-3
    assert on_cpu.counters.stats().fallbacks == {
        "a bias or a factor of the result is given": 1,
        reason: 1,
    }


def test_a_scaled_product_is_timed_in_place(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = on_cpu.scaled.ScaledCall(E4M3_A, E4M3_B, ONE, ONE, None, None, torch.bfloat16, True)
    assert call.pose().run is None
    monkeypatch.setenv("TUNER_BENCHMARK", "1")
    assert torch.equal(call.pose().run(None), call.by_pytorch())


def test_a_tuned_scaled_product_is_run_with_its_factors(
    on_cpu: SimpleNamespace, zeros: SimpleNamespace
) -> None:
    zeros.compute = lambda *_: torch.zeros(8, 16)
    given = (E4M3_A, E4M3_B, ROWS, COLUMNS)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    assert not on_cpu.scaled.scaled_mm(*given, **options).any()
    assert all(t is wanted for t, wanted in zip(zeros.inputs[0], given, strict=True))
    assert (zeros.dispatched, zeros.posed[0].scale, zeros.posed[0].shape) == ([None], 1.0, (8, 16))
    misaligned = torch.rand(9, 1)[1:]
    assert on_cpu.scaled.scaled_mm(E4M3_A, E4M3_B, misaligned, COLUMNS, **options).any()
    assert len(zeros.inputs) == 1, "PyTorch answers where a factor is not aligned"
