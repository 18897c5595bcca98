"""`scaled_mm` and `linear` with factors of blocks: problems, strides, PyTorch's answers."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

M, N, K = 5, 264, 400
ROWS = torch.randn(M, K).bfloat16()
WEIGHT = torch.randn(N, K).to(torch.float8_e4m3fn)
WEIGHT_SCALE = torch.rand(3, 4) + 0.5


def side_by_side(scale: Any, rows: int) -> Any:
    """The same factors, those of the rows after one another, `rows` of them a block."""
    padded = torch.nn.functional.pad(scale.t(), (0, rows - scale.shape[0])).contiguous()
    return padded.t()[: scale.shape[0]]


def factors_of(a: Any) -> Any:
    return torch.rand(a.shape[0], 4) + 0.5


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "strides"),
    [
        (side_by_side(factors_of(ROWS), 8), WEIGHT_SCALE.t(), {}),
        (factors_of(ROWS), WEIGHT_SCALE.t(), {"scale_a": (1, 4)}),
        (side_by_side(factors_of(ROWS), 5), WEIGHT_SCALE.t(), {"scale_a": (5, 1)}),
        (
            side_by_side(factors_of(ROWS), 8),
            WEIGHT_SCALE.t().contiguous(),
            {"scale_b": (1, 3)},
        ),
    ],
)
def test_factors_of_blocks_may_lie_in_any_way(
    runtime: SimpleNamespace, scale_a: Any, scale_b: Any, strides: Any
) -> None:
    a, b = ROWS.to(torch.float8_e4m3fn), WEIGHT.t()
    call = runtime.scaled.ScaledCall(a, b, scale_a, scale_b, None, None, torch.bfloat16, False)
    posed = call.pose()
    assert posed.problem == GemmProblem.parse(f"M={M},N={N},K={K},dtype=e4m3,scales=block")
    assert (posed.strides, posed.shape) == (strides, (M, N))


def test_other_factors_and_outputs_pose_no_problem(runtime: SimpleNamespace) -> None:
    a, b = ROWS.to(torch.float8_e4m3fn), WEIGHT.t()
    problem_of = runtime.scaled.scaled_problem_of
    with pytest.raises(ConfigError, match=r"nor of blocks, \(5, 4\) and \(4, 3\)"):
        problem_of(a, b, factors_of(a), WEIGHT_SCALE, torch.bfloat16, True)
    with pytest.raises(ConfigError, match="scales=block has its own sums"):
        problem_of(a, b, factors_of(a), WEIGHT_SCALE.t(), torch.float16, True)


@pytest.mark.parametrize("k", [400, 128, 16])
def test_quantised_rows_stand_for_what_they_were(k: int) -> None:
    from tuner.runtime.products.block_scaled import MIN_MAXIMUM, quantised

    rows = torch.randn(6, k).bfloat16() * torch.logspace(-3, 3, 6).bfloat16().view(-1, 1)
    rows[2] = 0
    elements, scale = quantised(rows)
    blocks = -(-k // 128)
    assert elements.is_contiguous() and elements.dtype == torch.float8_e4m3fn
    assert (scale.shape, scale.stride()) == ((6, blocks), (1, 8)), "as the products' operands"
    each = scale.repeat_interleave(128, 1)[:, :k]
    error = (elements.float() * each - rows.float()).abs()
    # Half of a spacing of 2^-3, or of the smallest spacing, 2^-9, of a block's factor.
    assert (error <= torch.maximum(rows.float().abs() / 16, each * 2.0**-10) * 1.001).all()
    largest = torch.stack([part.float().abs().amax(1) for part in rows.split(128, 1)], 1)
    assert torch.allclose(scale * 448, largest.clamp_min(MIN_MAXIMUM))
    assert not elements[2].float().any()


class Quantiser:
    """A loaded kernel over a host's memory: PyTorch's operations, or with a bit of them wrong."""

    def __init__(self, *, is_right: bool) -> None:
        self.is_right = is_right
        self.launches: list[tuple[int, ...]] = []

    def launch(self, tensors: Any, integers: Any, *_: Any) -> None:
        from tuner.runtime.products.block_scaled import composed

        m, k, stride, block, _ = integers
        source = (ctypes.c_uint16 * ((m - 1) * stride + k)).from_address(tensors[0])
        flat = torch.frombuffer(source, dtype=torch.bfloat16)
        elements, factors = composed(flat.as_strided((m, k), (stride, 1)))
        elements.view(torch.uint8)[-1, -1] ^= not self.is_right
        ctypes.memmove(tensors[1], elements.data_ptr(), m * k)
        ctypes.memmove(tensors[2], factors.data_ptr(), 4 * ((factors.shape[1] - 1) * block + m))
        self.launches.append(integers)


@pytest.fixture
def quantiser(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runtime's quantiser where its kernel is built; `kernel` is what is loaded."""
    from tuner.runtime.call import sourced

    module = on_cpu.quantiser
    module.kernel = Quantiser(is_right=True)
    source = SimpleNamespace(find=lambda artifacts: "artifact")
    monkeypatch.setattr(module.kernels, "source", source)
    monkeypatch.setattr(sourced, "load", lambda artifact: module.kernel)
    return module


def test_a_kernel_quantises_rows_that_it_takes(quantiser: Any) -> None:
    from tuner.runtime.products.block_scaled import composed, quantised

    wide = torch.randn(12, 416).bfloat16()
    for rows in (wide[:, :400], wide[::2, :400], wide[3:4, :400]):
        before = len(quantiser.kernel.launches)
        found, wanted = quantised(rows), composed(rows)
        assert len(quantiser.kernel.launches) == before + 1 + (before == 0), "one to compare bits"
        assert found[1].stride() == wanted[1].stride()
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])
    assert quantiser.kernel.launches[1:] == [
        (12, 400, 416, 12, 1),
        (6, 400, 832, 8, 1),
        (1, 400, 400, 4, 1),
    ]


def test_other_rows_are_quantised_by_pytorch(quantiser: Any) -> None:
    wide = torch.randn(12, 416).bfloat16()
    for rows in (wide.half(), wide[:, :396], wide[:, 1:401], wide.t(), wide[:0], wide[:, ::2]):
        assert quantiser.run(rows, None) is None
    assert not quantiser.kernel.launches


def test_a_kernel_with_other_bits_is_not_served(
    quantiser: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tuner.runtime.products.block_scaled import composed, quantised

    rows = torch.randn(12, 416).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(quantiser.devices, "is_capturing", lambda: True)
        assert quantiser.run(rows, composed) is None and not quantiser.kernel.launches
    quantiser.kernel.is_right = False
    for _ in range(2):
        found, wanted = quantised(rows), composed(rows)
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert len(quantiser.kernel.launches) == 1 and caplog.text.count("results are not theirs") == 1


def test_a_linear_layer_is_pytorch_s_where_no_kernel_serves_it(
    on_cpu: SimpleNamespace, undecided: list[Any]
) -> None:
    each = WEIGHT_SCALE.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    wide, bias = (WEIGHT.float() * each).bfloat16(), torch.randn(N).bfloat16()
    out = on_cpu.products.linear(
        ROWS.view(1, M, K), WEIGHT, bias, activation="relu", weight_scale=WEIGHT_SCALE
    )
    assert torch.equal(out, torch.relu(torch.nn.functional.linear(ROWS, wide) + bias)[None])
    assert undecided == [GemmProblem.parse(f"M={M},N={N},K={K},dtype=e4m3,scales=block")]
    assert on_cpu.counters.stats().fallbacks == {on_cpu.refusal.Kind.UNSERVED: 1}


def test_a_tuned_linear_layer_multiplies_quantised_rows(
    on_cpu: SimpleNamespace, zeros: SimpleNamespace
) -> None:
    def multiply(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        of_rows = scale_a.repeat_interleave(128, 1)[:, :K]
        of_blocks = scale_b.repeat_interleave(128, 0)[:K].repeat_interleave(128, 1)[:, :N]
        return ((a.float() * of_rows) @ (b.float() * of_blocks)).bfloat16()

    zeros.compute = multiply
    linear = on_cpu.products.linear
    out = linear(ROWS.view(1, M, K), WEIGHT, weight_scale=WEIGHT_SCALE)
    each = WEIGHT_SCALE.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    wanted = ROWS.float() @ (WEIGHT.float() * each).t()
    assert out.shape == (1, M, N)
    assert 1e-3 < (out - wanted).norm() / wanted.norm() < 4e-2, "the rows are rounded to e4m3"
    needs = ROWS.clone().requires_grad_()
    linear(needs, WEIGHT, weight_scale=WEIGHT_SCALE).sum().backward()
    assert needs.grad is not None, "gradients are PyTorch's"


@pytest.mark.parametrize(
    ("input", "weight", "scale", "reason"),
    [
        (ROWS.half(), WEIGHT, WEIGHT_SCALE, "float16, float8_e4m3fn, float32 .allowed: bf16"),
        (ROWS, WEIGHT.float(), WEIGHT_SCALE, "bfloat16, float32, float32"),
        (ROWS[:, :384], WEIGHT, WEIGHT_SCALE, r"\(5, 384\) and \(264, 400\) make no product"),
        (ROWS, WEIGHT, WEIGHT_SCALE.t(), r"weight_scale is \(4, 3\) .allowed: \(3, 4\)"),
    ],
)
def test_other_weights_are_refused(
    runtime: SimpleNamespace, input: Any, weight: Any, scale: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.products.linear(input, weight, weight_scale=scale)


ROWS_OF_GROUPS = (5, 0, 1, 7)


def experts() -> tuple[Any, ...]:
    """A, B, offsets and both factors; two rows belong to no group."""
    offsets = torch.tensor([0, *ROWS_OF_GROUPS]).cumsum(0).int()
    a = torch.randn(15, K).to(torch.float8_e4m3fn)
    b = torch.randn(4, N, K).to(torch.float8_e4m3fn)
    return a, b, offsets, torch.rand(15, 4) + 0.5, torch.rand(4, 3, 4) + 0.5


def test_experts_are_multiplied_in_bf16_where_no_kernel_serves_them(
    undecided: list[Any],
) -> None:
    import tuner

    a, b, offsets, scale_a, scale_b = experts()
    out = tuner.grouped_mm(a, b, offsets, scale_a=scale_a, scale_b=scale_b)
    wide_a = a.float() * scale_a.repeat_interleave(128, 1)[:, :K]
    wide_b = b.float() * scale_b.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)[..., :K]
    groups = [group for group, rows in enumerate(ROWS_OF_GROUPS) for _ in range(rows)]
    wanted = torch.stack([wide_b[group] @ row for row, group in zip(wide_a, groups, strict=False)])
    assert out.dtype == torch.bfloat16 and out.shape == (15, N)
    assert (out[:13].float() - wanted).norm() / wanted.norm() < 8e-3
    assert [problem.label() for problem in undecided] == [f"G=4,M=16,N={N},K={K},dtype=e4m3"]


def test_experts_factors_begin_where_tma_reads(on_cpu: SimpleNamespace) -> None:
    import tuner

    a, b, offsets, scale_a, scale_b = experts()
    moved = torch.empty(4 * 16 + 1)[1:].view(4, 16).t()[:15].copy_(scale_a)
    assert moved.data_ptr() % 16 == 4 and moved.stride() == (1, 16)
    tuner.grouped_mm(a, b, offsets, scale_a=moved, scale_b=scale_b)
    [reason] = on_cpu.counters.stats().fallbacks
    assert "does not start at a multiple of 16 bytes" in reason


def test_a_kernel_is_given_the_factors_of_all_rows_side_by_side(
    zeros: SimpleNamespace,
) -> None:
    import tuner

    zeros.compute = lambda *_: torch.zeros(15, N)
    a, b, offsets, scale_a, scale_b = experts()
    assert not tuner.grouped_mm(a, b, offsets, scale_a=scale_a, scale_b=scale_b).any()
    [seen] = zeros.inputs
    assert [seen[0] is a, seen[1] is b, seen[2] is offsets, seen[4] is scale_b] == [True] * 4
    assert torch.equal(seen[3], scale_a) and seen[3].stride() == (1, 16)
    for given, reason in (
        ({"scale_a": scale_a}, "scale_b is missing"),
        ({"scale_a": scale_a[:9], "scale_b": scale_b}, r"scale_a is torch.float32 \(9, 4\)"),
        ({"scale_a": scale_a, "scale_b": scale_b.half()}, "scale_b is torch.float16"),
    ):
        with pytest.raises(ConfigError, match=reason):
            tuner.grouped_mm(a, b, offsets, **given)
    with pytest.raises(ConfigError, match="factors are for float8_e4m3fn"):
        tuner.grouped_mm(a.half(), b.half(), offsets, scale_a=scale_a, scale_b=scale_b)


def test_a_proven_kernel_serves_a_linear_layer_that_nobody_tuned(
    on_cpu: SimpleNamespace, noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = {"block_scaled_gemm": "key"}
    monkeypatch.setattr(on_cpu.proven_kernels.lists, "proven", lambda specs, capability: proven)
    on_cpu.products.linear(ROWS, WEIGHT, weight_scale=WEIGHT_SCALE)
    assert [integers[:3] for _, integers in noted] == [(M, N, K)]
    stats = on_cpu.counters.stats()
    assert (stats.hits, stats.portfolio_hits, stats.fallbacks) == (1, 1, {})
