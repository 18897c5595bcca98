"""`linear`, `matmul`, `swiglu`: the problem of a product, and what stays PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import decide
from runtime_machine import measured as decision

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.measurement import Measurement, Regime
from tuner.problem import GemmProblem, Problem, SwigluProblem
from tuner.selection.reader import Entry, LookupResult

torch = pytest.importorskip("torch", reason="torch is not installed")

A = torch.randn(8, 32).half()
B = torch.randn(32, 16).half()


def col(tensor: Any) -> Any:
    """The same values, stored by columns."""
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (A, B, "M=8,N=16,K=32,layout_b=row"),
        (A, col(B), "M=8,N=16,K=32"),
        (col(A), B, "M=8,N=16,K=32,layout_a=col,layout_b=row"),
        (A.view(2, 4, 32), col(B), "M=8,N=16,K=32"),
        (A.expand(3, 8, 32).contiguous(), B.expand(3, 32, 16).contiguous(),
         "M=8,N=16,K=32,B=3,layout_b=row"),
        (A.expand(2, 3, 8, 32).contiguous(), col(B.expand(2, 3, 32, 16)), "M=8,N=16,K=32,B=6"),
        (A[:1], col(B), "M=1,N=16,K=32"),
        (A.view(1, 8, 32)[:, -1:], col(B), "M=1,N=16,K=32"),
        (A[:1].as_strided((1, 1, 32), (7, 5, 1)), col(B), "M=1,N=16,K=32"),
        (A.bfloat16(), col(B).bfloat16(), "M=8,N=16,K=32,dtype=bf16"),
    ],
)  # fmt: skip
def test_a_problem_is_read_off_its_matrices(
    runtime: SimpleNamespace, a: Any, b: Any, wanted: str
) -> None:
    problem = runtime.products.pose(a, b).problem
    assert problem == GemmProblem.parse(wanted)
    assert torch.matmul(a, b).numel() == problem.output.elements


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (A[0], B, "not matrices"),
        (A[:, :0], B[:0], "empty"),
        (A, B.bfloat16(), "differ in device or type"),
        (A.float(), B.float(), "is not tuned"),
        (A.expand(3, 8, 32), B, "cannot be folded"),
        (A.expand(3, 8, 32).contiguous(), B.expand(1, 32, 16), "or broadcast"),
        (A, B.expand(3, 32, 16).contiguous(), "or broadcast"),
        (A[:, ::2], B[:16], "neither rows nor columns"),
        (torch.randn(2, 4, 8, 32).half()[:, :3], B.expand(2, 3, 32, 16), "cannot be folded"),
    ],
)
def test_what_poses_no_problem(runtime: SimpleNamespace, a: Any, b: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.products.pose(a, b)


def test_what_is_not_covered_is_pytorch_s(on_cpu: SimpleNamespace) -> None:
    linear, matmul = on_cpu.products.linear, on_cpu.products.matmul
    bias, out = torch.randn(16).half(), torch.empty(8, 16).half()
    weight = B.t().contiguous()
    assert torch.equal(linear(A, weight, bias), torch.nn.functional.linear(A, weight, bias))
    assert matmul(A, B, out=out) is out and torch.equal(out, A @ B)
    assert torch.equal(matmul(A[0], B), A[0] @ B)
    assert torch.equal(linear(A, weight), A @ weight.t())
    assert on_cpu.counters.stats().fallbacks == {
        "out is given": 1,
        "no kernel takes such tensors": 1,
        "no measured winner": 2,
    }
    with pytest.raises(RuntimeError):
        matmul(A, A)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_a_bias_and_an_activation_are_part_of_the_problem(
    on_cpu: SimpleNamespace, undecided: list[Problem], activation: str | None
) -> None:
    weight, bias = B.t().contiguous(), torch.randn(16).half()
    linear = on_cpu.products.linear
    for given in (None, bias):
        wanted = torch.nn.functional.linear(A, weight, given)
        wanted = {
            None: lambda x: x,
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "silu": torch.nn.functional.silu,
        }[activation](wanted)
        assert torch.equal(linear(A, weight, given, activation=activation), wanted)
    plain = GemmProblem(m=8, n=16, k=32)
    biased = "bias" if activation is None else f"bias_{activation}"
    assert undecided == [replace(plain, epilogue=e) for e in (activation or "", biased)]


@pytest.mark.parametrize(
    ("bias", "reason"),
    [
        (torch.zeros(8).half(), "not a contiguous vector"),
        (torch.zeros(32).half()[::2], "not a contiguous vector"),
        (torch.zeros(1, 16).half(), "not a contiguous vector"),
        (torch.zeros(16), "differ in device or type"),
    ],
)
def test_what_is_no_bias(runtime: SimpleNamespace, bias: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.products.pose(A, B, bias)


def test_an_unknown_activation_is_told(on_cpu: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"activation=elu is not known \(allowed: relu, gelu"):
        on_cpu.products.linear(A, B.t().contiguous(), activation="elu")


OUTPUT, OF_INPUT, OF_WEIGHT = (
    GemmProblem.parse(shape)
    for shape in (
        "M=8,N=16,K=32",
        "M=8,N=32,K=16,layout_b=row",
        "M=16,N=32,K=8,layout_a=col,layout_b=row",
    )
)
"""The products of a layer of 32 inputs and 16 outputs, on 8 rows."""


@pytest.fixture
def measured(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Kernels for the problems in `tuned`, by a portfolio with `by_portfolio`; `ran` lists what
    they were launched for.
    """
    found = SimpleNamespace(runtime=on_cpu, tuned=set(), ran=[], by_portfolio=False)

    def find_out(kind: Any, told: Any, pose: Any, device: int, *_: Any) -> Any:
        try:
            problem = pose().problem
        except ConfigError as exc:
            return on_cpu.refusal.Refusal(on_cpu.refusal.Kind.TENSORS, str(exc))
        if replace(problem, epilogue="") not in found.tuned:
            return on_cpu.refusal.Refusal(on_cpu.refusal.Kind.MISS)

        def launch(a: Any, b: Any, bias: Any = None) -> Any:
            found.ran.append(problem)
            b = b.t() if problem == OUTPUT or bias is not None else b
            return a @ b if bias is None else torch.addmm(bias, a, b)

        return on_cpu.plan.VendorPlan(
            problem, Config("own", {}), -1, launch, by_portfolio=found.by_portfolio
        )

    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return found


def layer(dtype: Any = None) -> list[Any]:
    """Input, weight and bias that want a gradient."""
    made = A, B.t().contiguous(), torch.randn(16).half()
    return [tensor.clone().to(dtype or tensor.dtype).requires_grad_() for tensor in made]


@pytest.mark.parametrize(
    "tuned",
    [(OUTPUT, OF_INPUT, OF_WEIGHT), (OUTPUT,), (OF_INPUT,), (OF_WEIGHT,), ()],
    ids=["all", "output", "input", "weight", "none"],
)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("is_biased", [False, True])
def test_each_product_of_a_training_step_is_served_by_itself(
    measured: SimpleNamespace, tuned: tuple[Any, ...], activation: str | None, is_biased: bool
) -> None:
    measured.tuned.update(tuned)
    inputs = layer()[: 2 + is_biased]
    grad = torch.randn(8, 16).half()
    wanted = torch.nn.functional.linear(*inputs)
    wanted = wanted if activation is None else torch.nn.functional.gelu(wanted)
    exact = torch.autograd.grad(wanted, inputs, grad)
    out = measured.runtime.products.linear(*inputs, activation=activation)
    assert torch.allclose(out, wanted, atol=1e-3)
    found = torch.autograd.grad(out, inputs, grad)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-2)
    output = replace(OUTPUT, epilogue="bias" if is_biased else "")
    assert measured.ran == [output if one == OUTPUT else one for one in tuned]


def test_only_the_wanted_gradients_are_computed(measured: SimpleNamespace) -> None:
    """A frozen weight, then inputs without a gradient; in three dimensions."""
    measured.tuned.update((OUTPUT, OF_INPUT, OF_WEIGHT))
    linear = measured.runtime.products.linear
    x, weight, _ = layer()
    linear(x.view(2, 4, 32), weight.detach()).sum().backward()
    assert measured.ran == [OUTPUT]  # a sum's gradient has no strides that a kernel takes
    assert x.grad is not None and torch.equal(x.grad[0], weight.sum(0))
    linear(x.detach().view(2, 4, 32), weight).square().sum().backward()
    assert measured.ran == [OUTPUT, OUTPUT, OF_WEIGHT] and weight.grad is not None


def test_little_work_by_a_portfolio_is_pytorch_s(
    measured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = measured.runtime.products
    measured.tuned.update((OUTPUT, OF_INPUT, OF_WEIGHT))
    measured.by_portfolio = True
    inputs = layer()
    products.linear(*inputs).square().sum().backward()
    assert measured.ran == []
    fallbacks = measured.runtime.counters.stats().fallbacks
    assert fallbacks == {"a gradient is wanted": 1}
    monkeypatch.setattr(products, "MIN_FLOPS_WITH_GRADIENTS", 2.0 * 8 * 16 * 32)
    products.linear(*inputs).square().sum().backward()
    assert measured.ran == [replace(OUTPUT, epilogue="bias"), OF_INPUT, OF_WEIGHT]


def test_second_derivatives_of_a_layer(measured: SimpleNamespace) -> None:
    measured.tuned.update((OUTPUT, OF_INPUT, OF_WEIGHT))
    seconds = []
    for linear in (torch.nn.functional.linear, measured.runtime.products.linear):
        x, weight, _ = layer()
        torch.manual_seed(1)
        out = linear(x, weight).float().square().sum()
        (grad,) = torch.autograd.grad(out, weight, create_graph=True)
        seconds.append(torch.autograd.grad(grad.float().square().sum(), (x, weight)))
    # Those of the first pass, which autograd records, are PyTorch's.
    assert measured.ran == [OUTPUT, OF_INPUT, OF_WEIGHT]
    for ours, theirs in zip(*seconds, strict=True):
        assert torch.allclose(ours, theirs, rtol=2e-2, atol=1e-1)


def test_a_layer_under_transforms_autocast_and_checkpoints(measured: SimpleNamespace) -> None:
    measured.tuned.update((OUTPUT, OF_INPUT, OF_WEIGHT))
    linear = measured.runtime.products.linear
    x, weight, bias = layer()

    def loss(weight: Any) -> Any:
        return linear(x.detach(), weight).float().square().sum()

    wanted = torch.autograd.grad(loss(weight), weight)[0]
    assert measured.ran == [OUTPUT, OF_WEIGHT]
    assert torch.allclose(torch.func.grad(loss)(weight.detach()), wanted, rtol=1e-2, atol=1e-1)
    assert len(measured.ran) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert len(measured.ran) == 2
    del measured.ran[:]
    out = torch.utils.checkpoint.checkpoint(linear, x, weight, bias, use_reentrant=False)
    out.square().sum().backward()
    biased = replace(OUTPUT, epilogue="bias")
    assert measured.ran == [biased, biased, OF_INPUT, OF_WEIGHT]


def test_gradients_that_nothing_serves_are_pytorch_s(
    on_cpu: SimpleNamespace, undecided: list[Problem]
) -> None:
    """All three problems are looked up, and no memory is allocated."""
    inputs = layer()
    out = on_cpu.products.linear(*inputs)
    assert type(out.grad_fn).__name__ == "AddmmBackward0"
    assert undecided == [replace(OUTPUT, epilogue="bias"), OF_INPUT, OF_WEIGHT]
    assert on_cpu.counters.stats().fallbacks == {"no measured winner": 1}


def test_where_cublas_won_pytorch_s_own_call_answers(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = GemmProblem(m=8, n=16, k=32, layout_b="row")
    ranking = won(problem, "vendor_blas", "cublas", 1.0), won(problem, "gemm", "cublas", 2.0)
    decide(on_cpu, monkeypatch, *ranking)
    assert torch.equal(on_cpu.products.matmul(A, B), A @ B)
    assert on_cpu.counters.stats().fallbacks == {on_cpu.refusal.Kind.VENDOR: 1}


def won(problem: Problem, family: str, kernel: str, us: float, **params: int) -> Measurement:
    config, regime = Config(family, {"kernel": kernel, **params}), Regime.default("gemm")
    return decision(family, problem=problem, config=config, regime=regime, latency_us=us)


@pytest.fixture
def lt_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    from lt_fakes import FakeLt

    from tuner.families.peers import lt

    fake = FakeLt()
    library = lt.Library(fake)
    monkeypatch.setattr(lt, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fake


def algorithm(problem: GemmProblem) -> Measurement:
    listed = family("vendor_cublaslt_search").listing(problem, None)[1]
    return won(problem, listed.family, "", 1.0).but(config=listed)


def test_an_algorithm_of_cublaslt_that_won_is_served(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lt_library: Any
) -> None:
    x, weight, bias = A.view(2, 4, 32), B.t().contiguous(), torch.randn(16).half()
    problem = GemmProblem(m=8, n=16, k=32, epilogue="bias_relu")
    decide(on_cpu, monkeypatch, algorithm(problem), won(problem, "vendor_blas", "cublas", 2.0))
    wanted = torch.nn.functional.linear(x, weight, bias).relu()
    for _ in range(2):
        served = on_cpu.products.linear(x, weight, bias, activation="relu")
        assert served.shape == (2, 4, 16) and torch.allclose(served, wanted, atol=2e-2)
    assert [name for name, *_ in lt_library.launched] == [66, 66]
    assert on_cpu.counters.stats().hits == 2


def test_an_algorithm_of_cublaslt_takes_no_strides(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lt_library: Any
) -> None:
    x, weight = torch.randn(8, 96).half()[:, :32], B.t().contiguous()
    decide(on_cpu, monkeypatch, algorithm(GemmProblem(m=8, n=16, k=32)))
    assert torch.equal(on_cpu.products.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert lt_library.launched == []
    assert on_cpu.counters.stats().fallbacks == {on_cpu.refusal.Kind.UNAVAILABLE: 1}


def test_an_algorithm_of_another_version_is_not_served(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lt_library: Any
) -> None:
    problem = GemmProblem(m=8, n=16, k=32)
    first = algorithm(problem)
    lt_library.version += 1
    decide(on_cpu, monkeypatch, first, won(problem, "vendor_blas", "cublas", 2.0))
    weight = B.t().contiguous()
    assert torch.equal(on_cpu.products.linear(A, weight), torch.nn.functional.linear(A, weight))
    assert lt_library.launched == []
    assert on_cpu.counters.stats().fallbacks == {on_cpu.refusal.Kind.VENDOR: 1}


@pytest.mark.parametrize("kernel", ["torch_compile", "inductor", "deep_gemm"])
def test_a_peer_that_won_leaves_the_call_to_the_next(on_cpu: SimpleNamespace, kernel: str) -> None:
    problem = GemmProblem(m=8, n=16, k=32, epilogue="bias")
    ranking = won(problem, "vendor_blas", kernel, 1.0), won(problem, "gemm", "", 2.0)
    answer = LookupResult(Entry.of(ranking), exact=True)
    plan = on_cpu.plan
    refusal = plan.resolve(plan.Posed(problem), answer, 0, plan.Excluded())
    assert refusal.kind is on_cpu.refusal.Kind.UNAVAILABLE
    assert f"{kernel} is measured, and not served; " in refusal.detail


def test_interleaved_weights_lie_as_the_problem_says(runtime: SimpleNamespace) -> None:
    problem = SwigluProblem(8, 96, 32)
    gate, up = torch.randn(96, 32).half(), torch.randn(96, 32).half()
    weights = runtime.gated.interleave(gate, up)
    operand = problem.operands[1]
    assert weights.is_contiguous() and weights.shape == (192, 32)
    seen = weights.as_strided(operand.shape, operand.strides)
    assert torch.equal(seen[0].reshape(96, 32), gate)
    assert torch.equal(seen[1].reshape(96, 32), up)
    for wrong in (gate[:40], gate[:, :16], gate[None]):
        with pytest.raises(ConfigError, match="cannot be interleaved"):
            runtime.gated.interleave(wrong, up)


def test_swiglu_is_the_two_projections_and_asks_for_one_problem(
    on_cpu: SimpleNamespace, undecided: list[Problem]
) -> None:
    gate, up = torch.randn(64, 32).half(), torch.randn(64, 32).half()
    weights = on_cpu.gated.interleave(gate, up)
    linear = torch.nn.functional.linear
    for a in (A, A.view(2, 4, 32)):
        wanted = torch.nn.functional.silu(linear(a, gate)) * linear(a, up)
        got = on_cpu.gated.swiglu(a, weights)
        assert got.shape == wanted.shape and torch.equal(got, wanted)
    assert undecided == [SwigluProblem(8, 64, 32)] * 2
    a = A.clone().requires_grad_()
    on_cpu.gated.swiglu(a, weights).sum().backward()
    assert a.grad is not None and a.grad.any()


@pytest.mark.parametrize(
    ("a", "weights", "reason"),
    [
        (A[0], torch.zeros(64, 32).half(), "not matrices"),
        (A, torch.zeros(64, 16).half(), "allowed: .2 N, 32."),
        (A, torch.zeros(65, 32).half(), "allowed: .2 N, 32."),
        (A, torch.zeros(40, 32).half(), "N=20 cannot be interleaved"),
        (A, torch.zeros(32, 64).half().t(), "not contiguous"),
        (A, torch.zeros(64, 32), "differ in device or type"),
    ],
)
def test_what_poses_no_swiglu(runtime: SimpleNamespace, a: Any, weights: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.gated.swiglu_problem_of(a, weights)


@pytest.mark.parametrize("rows", [63, 40])
def test_weights_that_are_not_pairs_are_named(runtime: SimpleNamespace, rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"\({rows}, 32\) \(allowed: \(2 N, K\)"):
        runtime.gated.swiglu(A, torch.zeros(rows, 32).half())


def test_a_tuned_swiglu_is_run_with_both_tensors(
    on_cpu: SimpleNamespace, zeros: SimpleNamespace
) -> None:
    weights = torch.randn(128, 32).half()
    assert not on_cpu.gated.swiglu(A, weights).any()
    assert zeros.dispatched == [None] and zeros.posed[0].shape == (8, 64)
    assert all(t is wanted for t, wanted in zip(zeros.inputs[0], (A, weights), strict=True))
