"""Tensors with strides of their own: views of a fused projection, of a cache, of a wider tensor.

A kernel that reads addresses and strides from the launch's arguments, as the compiled ones do,
stands for `fused_attention` and `gemv`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import Machine, answer, fake_machine, measured
from runtime_server import Server, built_dispatcher, by_kernel, dispatched_server, inputs
from runtime_server import Toy as Served

from tuner.families.base import Launch, Strides
from tuner.families.fused_attention import FusedAttention
from tuner.families.gemm import Gemm
from tuner.families.gemv import Gemv
from tuner.hardware import DEFAULT_GPU
from tuner.problem import LAYOUTS, AttentionProblem, GemmProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

import tuner  # noqa: E402

built, server, machine = built_dispatcher, dispatched_server, fake_machine

SDPA = torch.nn.functional.scaled_dot_product_attention
B, H, S, D = 2, 4, 16, 16
BSHD = AttentionProblem(S, S, D, B, H, layout="bshd")
BHSD = AttentionProblem(S, S, D, B, H)

Three = tuple[Any, Any, Any]


def split() -> Three:
    """GPT-2's and Phi-3's: slices of the columns of one projection."""
    made = torch.randn(B, S, 3 * H * D).half().split(H * D, dim=2)
    return tuple(t.view(B, S, H, D).transpose(1, 2) for t in made)  # type: ignore[return-value]


def interleaved() -> Three:
    """(B, S, 3, H, D), as BLOOM's and vision models' projections are unbound."""
    made = torch.randn(B, S, 3, H, D).half().unbind(2)
    return tuple(t.transpose(1, 2) for t in made)  # type: ignore[return-value]


def by_head() -> Three:
    """(B, S, H, 3, D), as GPT-NeoX splits its projection."""
    made = torch.randn(B, S, H, 3, D).half().unbind(3)
    return tuple(t.transpose(1, 2) for t in made)  # type: ignore[return-value]


def in_cache() -> Three:
    """The filled part of a longer cache, beside a dense query."""
    key, value = torch.randn(2, B, H, 4 * S, D).half()[..., :S, :]
    return torch.randn(B, H, S, D).half(), key, value


def tokens_first() -> Three:
    """(S, B, H, D), as Megatron's models have it: dense, and no layout of ours."""
    made = [torch.randn(S, B, H, D).half().permute(1, 2, 0, 3) for _ in range(3)]
    return made[0], made[1], made[2]


def one_head() -> Three:
    """Keys and values of one head, expanded over all."""
    key, value = torch.randn(2, B, 1, S, D).half().expand(2, B, H, S, D)
    return torch.randn(B, H, S, D).half(), key, value


#: Tensors as models give them, and the problem that they pose.
VIEWS: dict[str, tuple[Callable[[], Three], AttentionProblem]] = {
    "split": (split, BSHD),
    "interleaved": (interleaved, BSHD),
    "by head": (by_head, BSHD),
    "in a cache": (in_cache, BHSD),
    "tokens first": (tokens_first, BSHD),
    "one head": (one_head, AttentionProblem(S, S, D, B, H, 1)),
}


def at(address: int, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
    """The tensor that lies at an address."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=dtype).as_strided(tuple(shape), tuple(strides))


class Reads:
    """A loaded kernel that computes from the integers and addresses of its launch."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self.compute = compute
        self.integers: list[tuple[int, ...]] = []

    def workspace_bytes(self, integers: Sequence[int]) -> int:
        return 0

    def bind(self, integers: Sequence[int], scalars: Sequence[float]) -> Callable[..., None]:
        def launch(tensors: Sequence[int], workspace: int, stream: int) -> None:
            self.integers.append(tuple(integers))
            self.compute(tensors, integers, scalars)

        return launch


def attend(tensors: Sequence[int], n: Sequence[int], scalars: Sequence[float]) -> None:
    """`fused_attention`, by the comment of its template, without a mask."""
    batch, heads, heads_kv, queries, keys, width = n[:6]
    sizes = (heads, queries), (heads_kv, keys), (heads_kv, keys), (heads, queries)
    found = [
        at(address, (batch, *size, width), (*n[6 + 3 * i : 9 + 3 * i], 1), torch.float16)
        for i, (address, size) in enumerate(zip(tensors[:4], sizes, strict=True))
    ]
    query, key, value = (t.float() for t in found[:3])
    key, value = (t.repeat_interleave(heads // heads_kv, 1) for t in (key, value))
    scores = query @ key.mT * scalars[0]
    found[3].copy_(scores.softmax(-1) @ value)
    if tensors[4]:
        lse = at(tensors[4], (batch, heads, queries), (heads * queries, queries, 1), torch.float32)
        lse.copy_(scores.logsumexp(-1))


def multiply(tensors: Sequence[int], n: Sequence[int], scalars: Sequence[float]) -> None:
    """`gemv`, by the comment of its template."""
    m, cols, k, batch, lda, ldb, ldd, batch_a, batch_b, batch_d = n[:10]
    half = torch.float16
    a = at(tensors[0], (batch, m, k), (batch_a, lda, 1), half)
    b = at(tensors[1], (batch, cols, k), (batch_b, ldb, 1), half)
    at(tensors[2], (batch, m, cols), (batch_d, ldd, 1), half).copy_(a.float() @ b.float().mT)


@pytest.fixture
def plant(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any, Callable[..., None]], SimpleNamespace]:
    """Plants a family's first config as the winner of every problem, its kernel computed here."""

    def planted(member: Any, compute: Callable[..., None]) -> SimpleNamespace:
        kernel, asked = Reads(compute), list[Problem]()

        def answers(problem: Problem) -> Any:
            if problem.op != member.op:  # that of the gradients
                return None
            asked.append(problem)
            config = member.space(problem, DEFAULT_GPU)[0]
            artifacts = dict.fromkeys(member.kernels(problem, config), "key-first")
            return answer(measured(problem=problem, config=config, artifacts=artifacts))

        machine.answers = answers
        monkeypatch.setattr(machine.runtime.plan, "load", lambda artifact: kernel)
        monkeypatch.setattr(machine.runtime.plan, "family", lambda name: member)
        return SimpleNamespace(kernel=kernel, asked=asked, stats=machine.stats)

    return planted


@pytest.fixture
def fused(plant: Any) -> Iterator[SimpleNamespace]:
    yield plant(FusedAttention(), attend)


def close(found: Any, wanted: Any) -> bool:
    return bool(torch.allclose(found.float(), wanted.float(), atol=4e-3, rtol=4e-3))


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_served_where_it_lies(fused: SimpleNamespace, name: str) -> None:
    """The problem is the nearest layout's, the launch has the strides, and nothing is copied."""
    made, problem = VIEWS[name]
    tensors = made()
    for call in (tuner.attention, torch.ops.tuner.attention):
        out = call(*tensors)
        assert close(out, SDPA(*tensors)), name
        assert out.stride() == torch.empty_like(tensors[0]).stride()
    assert set(fused.asked) == {problem}
    assert fused.stats().hits == 2
    heads_kv = problem.heads_kv
    for i, tensor in enumerate(tensors):
        given = fused.kernel.integers[0][6 + 3 * i : 9 + 3 * i]
        assert given[::2] == tensor.stride()[:3:2]
        assert given[1] == (tensor.stride(1) if i == 0 or heads_kv > 1 else S * D)


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_of_a_view(fused: SimpleNamespace, name: str) -> None:
    tensors = [t.detach() for t in VIEWS[name][0]()]
    grad = torch.randn(B, H, S, D).half()
    found, wanted = (
        torch.autograd.grad(call(*given), given, grad)
        for call, given in (
            (tuner.attention, [t.requires_grad_() for t in tensors]),
            (SDPA, [t.float().requires_grad_() for t in tensors]),
        )
    )
    assert fused.stats().hits == 1
    assert all(close(one, other) for one, other in zip(found, wanted, strict=True))


def test_dimensions_of_one_have_strides_that_tma_takes(fused: SimpleNamespace) -> None:
    """A single query of one sequence, whatever torch calls its strides."""
    query = torch.randn(1, H, 1, D).half()
    key, value = torch.randn(2, 1, H, 4 * S, D).half()[..., :S, :]
    odd = query.as_strided(query.shape, (3, D, 5, 1))
    assert close(tuner.attention(odd, key, value), SDPA(query, key, value))
    (integers,) = fused.kernel.integers
    assert all(stride % 8 == 0 for stride in integers[6:18])


#: Changes to the keys of a call, and the reason why no kernel takes them.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "elements apart": (lambda t: torch.cat([t, t], -1)[..., ::2], "in dimension 3 is not 1"),
    "tokens expanded": (
        lambda t: t[:, :, :1].expand(t.shape),
        "in dimension 2: TMA takes no expanded tensor",
    ),
    "a batch expanded": (
        lambda t: t[:1].expand(t.shape),
        "in dimension 0: TMA takes no expanded tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_tma_does_not_take_are_refused_by_name(
    fused: SimpleNamespace, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change, words = REFUSED[name]
    query, key, value = (torch.randn(B, H, S, D).half() for _ in range(3))
    key = change(key)
    for _ in range(2):
        assert torch.equal(tuner.attention(query, key, value), SDPA(query, key, value))
    assert fused.kernel.integers == []
    assert fused.stats().fallbacks == {"nothing of the entry can run here": 2}
    assert words in caplog.text


def test_a_refusal_for_strides_speaks_for_no_other_call(fused: SimpleNamespace) -> None:
    """Neither for dense tensors of the shape, nor for a cache that grows."""
    query, (key, value) = torch.randn(1, H, 1, D).half(), torch.randn(2, 1, H, 65, D).half()
    apart = key.mT.contiguous().mT
    assert close(tuner.attention(query, apart, value), SDPA(query, apart, value))
    assert fused.stats().hits == 0
    tuner.attention(query, key, value)
    tuner.attention(query, key[:, :, :64], value[:, :, :64])
    assert fused.stats().hits == 2


def test_a_family_that_takes_no_strides_says_so(
    plant: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Stiff(FusedAttention):
        name = "stiff"

        def strided_launches(
            self, problem: Problem, config: Any, scale: float, strides: Strides
        ) -> list[Launch] | str:
            return super(FusedAttention, self).strided_launches(problem, config, scale, strides)

    made = plant(Stiff(), attend)
    tensors = split()
    assert torch.equal(tuner.attention(*tensors), SDPA(*tensors))
    assert made.kernel.integers == [] and "stiff takes no strides" in caplog.text


def test_launches_with_the_problem_s_own_strides_are_its_launches() -> None:
    problems: list[tuple[Any, Problem]] = [
        (FusedAttention(), BSHD),
        (Gemm(), GemmProblem(512, 256, 128, layout_a="col", layout_b="row")),
        (Gemv(), GemmProblem(8, 256, 128, batch=2)),
    ]
    for member, problem in problems:
        own = {o.name: o.strides for o in problem.operands if not o.is_output}
        for config in member.space(problem, DEFAULT_GPU)[:3]:
            launches = member.launches(problem, config, 0.5)
            assert member.strided_launches(problem, config, 0.5, own) == launches


def test_the_strides_of_a_gemm_are_leading_dimensions() -> None:
    problem, member = GemmProblem(512, 256, 128, layout_b="row"), Gemm()
    config = next(c for c in member.space(problem, DEFAULT_GPU) if not c["swap_ab"])
    strides = {"a": (512 * 128, 136, 1), "b": (128 * 256, 1024, 1)}
    (launch,) = member.strided_launches(problem, config, 1.0, strides)
    assert launch.integers[4:7] == (136, 1024, 256)
    for wrong, words in (
        ({"a": (512 * 128, 132, 1)}, "a's stride of 132 elements in dimension 1"),
        ({"a": (512 * 128, 8, 512)}, "is not 1"),
        ({"d": (512 * 256, 512, 1)}, "d: of A and B only"),
        ({"b": (0, 2**40, 1)}, "2^40 bytes or more"),
    ):
        assert words in member.strided_launches(problem, config, 1.0, wrong)


@pytest.fixture
def few_rows(plant: Any) -> Iterator[SimpleNamespace]:
    yield plant(Gemv(), multiply)


def test_rows_of_a_wider_tensor(few_rows: SimpleNamespace) -> None:
    """Columns of an activation, the last tokens of sequences, columns of a weight."""
    linear = torch.nn.functional.linear
    weight, wide = torch.randn(64, 128).half(), torch.randn(8, 512).half()
    hidden = torch.randn(2, 9, 128).half()
    for given, weights in (
        (wide[:, 128:256], weight),
        (hidden[:, -1:], weight),
        (hidden[:, -1], weight),
        (wide[:, :128].unflatten(0, (2, 4)), weight),
        (hidden[0, :8, :64], weight[:, 64:]),
    ):
        out = tuner.linear(given, weights)
        assert close(out, linear(given, weights)) and out.is_contiguous()
    assert few_rows.stats().hits == 5
    assert [n[4:6] for n in few_rows.kernel.integers] == [
        *((512, 128), (9 * 128, 128), (9 * 128, 128)),
        *((512, 128), (128, 128)),
    ]
    assert few_rows.asked[1] == few_rows.asked[2] == GemmProblem(2, 64, 128)


def test_batches_of_a_wider_tensor(few_rows: SimpleNamespace) -> None:
    a, b = torch.randn(6, 8, 128).half()[::2], torch.randn(3, 64, 256).half()[..., :128].mT
    assert close(tuner.matmul(a, b), a @ b)
    assert few_rows.asked == [GemmProblem(8, 64, 128, batch=3)]
    assert few_rows.kernel.integers[0][4:9] == (128, 256, 64, 2 * 8 * 128, 64 * 256)


class Strided(Served):
    """Takes any strides: it writes a pattern."""

    def strided_launches(
        self, problem: Problem, config: Any, scale: float, strides: Strides
    ) -> list[Launch]:
        return self.launches(problem, config, scale)


def test_the_dispatcher_serves_a_view_with_a_plan_of_its_own(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sizes and strides: dense tensors of the shape have another plan."""
    monkeypatch.setattr(server.runtime.plan, "family", lambda name: Strided())
    problem = AttentionProblem(S, S, D, B, H, layout="bshd")
    server.decide(problem)
    for given in (split(), inputs(problem)):
        for turn in range(2):
            out, by_python, launched = server.went(lambda given=given: server.attention(*given))
            assert launched and by_python == (turn == 0)
            assert by_kernel(out, given[0], S) and out.shape == (B, H, S, D)
            assert out.stride() == torch.empty_like(given[0]).stride()


def test_the_output_is_laid_out_as_torch_s(runtime: SimpleNamespace) -> None:
    attention_call = runtime.attention_call
    for name, (made, problem) in VIEWS.items():
        posed = attention_call.pose(*made(), False, 1 / math.sqrt(D))
        assert posed.problem == problem, name
        out = posed.strides.get("out", problem.output.strides)
        assert math.prod(problem.output.shape) == 1 + sum(
            (size - 1) * stride for size, stride in zip(problem.output.shape, out, strict=True)
        ), "dense"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_tensors_have_no_strides_of_their_own(runtime: SimpleNamespace, layout: Any) -> None:
    """Also where dimensions of one fit several layouts."""
    sizes = itertools.product((1, 2), (1, 4), (1, 2), (1, 3), (1, 5))
    for batch, heads, group, queries, keys in sizes:
        heads_kv = max(1, heads // group)
        problem = AttentionProblem(queries, keys, D, batch, heads, heads_kv, layout=layout)
        given = [
            torch.empty_strided(o.shape, o.strides, dtype=torch.float16)
            for o in problem.matrices[:3]
        ]
        posed = runtime.attention_call.pose(*given, False, 0.25)
        assert not posed.strides
        assert replace(problem, layout=posed.problem.layout) == posed.problem
