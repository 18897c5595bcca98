"""The softmax family: legality, variables, launch, and the shape of its space."""

from __future__ import annotations

import random

import pytest
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Ref
from tuner.families.softmax import Softmax, softmax_launch, vectors_per_thread
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, SoftmaxProblem

FAMILY = Softmax()


def config(threads: int = 32, width: int = 4, rows: int = 4, passes: int = 1) -> Config:
    names = ("threads_per_row", "vector_width", "rows_per_block", "passes")
    return Config("softmax", dict(zip(names, (threads, width, rows, passes), strict=True)))


@pytest.mark.parametrize(
    "text, chosen, reason",
    [
        ("M=8,N=64", config(threads=256, rows=8), "2048 exceeds 1024"),
        ("M=8,N=64", config(threads=16, rows=1), "16 is not a multiple of 32"),
        ("M=8,N=60", config(width=8), "rows of 60 columns do not align vectors of 8"),
        ("M=8,N=4608", config(threads=32), "144 elements a thread exceed 128"),
        ("M=8,N=53248", config(1024, 8, 1), "56 elements a thread exceed 48"),
        ("M=8,N=65536,B=268435456", config(passes=2), "2147483648 rows exceed"),
        ("M=8,N=2147483640", config(passes=2), "2147483640 columns exceed"),
        ("M=8,N=64", config(threads=48), "threads_per_row=48 is not known (allowed: 16, 32,"),
        ("M=8,N=64", config(passes=4), "passes=4 is not known (allowed: 1, 2, 3)"),
    ],
)
def test_violations_say_the_reason(text: str, chosen: Config, reason: str) -> None:
    found = FAMILY.violations(SoftmaxProblem.parse(text), chosen, DEFAULT_GPU)
    assert len(found) == 1 and reason in found[0]


def test_every_reason_is_given_and_nothing_raises() -> None:
    problem = SoftmaxProblem(8, 5000)
    assert len(FAMILY.violations(problem, config(16, 8, 1), DEFAULT_GPU)) == 2
    assert len(FAMILY.violations(SoftmaxProblem(8, 5001), config(1024, 8, 4), DEFAULT_GPU)) == 2
    assert len(FAMILY.violations(problem, Config("softmax"), DEFAULT_GPU)) == 4
    extra = Config("softmax", {**config(1024, 8, 1).params, "colour": 3})
    assert FAMILY.violations(problem, extra, DEFAULT_GPU) == ["parameter 'colour' is not known"]
    assert FAMILY.violations(AttentionProblem(8, 8, 8), config(), DEFAULT_GPU)
    rng = random.Random(0)
    problem = SoftmaxProblem(64, 1024)
    members = FAMILY.space(problem, DEFAULT_GPU)
    drawn = [FAMILY.draw(problem, DEFAULT_GPU, members, rng) for _ in range(300)]
    verdicts = [bool(FAMILY.violations(SoftmaxProblem(64, 1024), c, DEFAULT_GPU)) for c in drawn]
    assert any(verdicts) and not all(verdicts)


@pytest.mark.parametrize(
    "text", ["M=1024,N=1024,B=16", "M=64,N=1001", "M=5,N=1", "M=4096,N=131072", "M=7,N=24,causal=1"]
)
def test_space_is_legal_distinct_and_covers_the_parameters(text: str) -> None:
    problem = SoftmaxProblem.parse(text)
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert 20 <= len(space) == len(set(space)) <= 150
    assert not any(FAMILY.violations(problem, c, DEFAULT_GPU) for c in space)
    specs = [FAMILY.kernels(problem, c)["softmax"] for c in space]
    assert len(set(specs)) == len(specs)
    best, worst = (f(FAMILY.predict_us(problem, c, DEFAULT_GPU) for c in space) for f in (min, max))
    assert 0 < best < worst


def test_space_holds_the_original_and_wider_rows() -> None:
    space = FAMILY.space(SoftmaxProblem(16384, 4096), DEFAULT_GPU)
    assert {c["threads_per_row"] for c in space} == {16, 32, 64, 128, 256, 512, 1024}
    assert {c["passes"] for c in space} == {1, 2, 3}
    assert {c["vector_width"] for c in space} == {4, 8}
    one_pass = {c["threads_per_row"] for c in space if c["passes"] == 1}
    assert min(one_pass) == 32, "4096 columns do not fit the registers of 16 threads"


def test_one_pass_holds_the_whole_row() -> None:
    for cols in (1, 7, 128, 1000, 1024, 4096):
        problem = SoftmaxProblem(8, cols)
        for chosen in FAMILY.space(problem, DEFAULT_GPU):
            covered = vectors_per_thread(problem, chosen) * chosen["vector_width"]
            covered *= chosen["threads_per_row"]
            assert chosen["passes"] > 1 or covered >= cols
            assert covered - chosen["threads_per_row"] * chosen["vector_width"] < cols


def test_launch_covers_all_matrices() -> None:
    problem = SoftmaxProblem(24, 40, batch=3, query_rows=8, is_causal=True)
    (launch,) = FAMILY.launches(problem, config(), 0.5)
    assert launch.kernel in FAMILY.kernels(problem, config())
    assert launch.tensors == (Ref("scores"), Ref("probabilities"))
    assert launch.integers == (72, 40, 40, 40, 8, 0)
    assert launch.scalars == (0.5, 1.0)
    padded = softmax_launch(
        problem,
        2.0,
        Ref("scratch", 64),
        Ref("scratch", 64),
        kernel="x",
        stride_scores=48,
        stride_probabilities=96,
        factor=4.0,
        pdl=True,
    )
    assert padded.integers == (72, 40, 48, 96, 8, 1)
    assert (padded.kernel, padded.scalars) == ("x", (2.0, 4.0))


def test_variables_follow_the_problem() -> None:
    problem = SoftmaxProblem(8, 1024, is_causal=True, dtype="bfloat16")
    variables = FAMILY.kernels(problem, config())["softmax"].variables
    assert variables == {
        "threads_per_row": 32,
        "vector_width": 4,
        "rows_per_block": 4,
        "passes": 1,
        "vectors": 8,
        "dtype": "bfloat16",
        "is_causal": True,
    }
    with pytest.raises(ConfigError, match="softmax serves softmax, not attention"):
        FAMILY.kernels(AttentionProblem(8, 8, 8), config())
    assert FAMILY.space(AttentionProblem(8, 8, 8), DEFAULT_GPU) == []


def test_estimate_orders_what_is_known() -> None:
    problem = SoftmaxProblem(1024, 1024, batch=16)

    def us(*args: int, causal: bool = False) -> float:
        shape = SoftmaxProblem(1024, 1024, batch=16, is_causal=causal)
        return FAMILY.predict_us(shape, config(*args), DEFAULT_GPU)

    assert us(32, 4, 4, 1) < us(32, 4, 4, 2) < us(32, 4, 4, 3)
    assert us(32, 4, 4, 1) < us(32, 1, 4, 1)
    assert us(32, 4, 4, 1, causal=True) < us(32, 4, 4, 1)
    moved = sum(operand.bytes for operand in problem.operands)
    assert us(32, 4, 4, 1) > moved / (DEFAULT_GPU.memory_gbs * 1e3)


def one_pass() -> str:
    return render(FAMILY.kernels(SoftmaxProblem(1024, 1024, 16), config())["softmax"], "golden")


def test_golden_text(goldens: Goldens) -> None:
    goldens.check("softmax", {"one_pass": one_pass()})


def test_variables_change_the_constants_alone() -> None:
    problem = SoftmaxProblem(64, 49152, is_causal=True, dtype="bfloat16")
    text = render(FAMILY.kernels(problem, config(256, 8, 2, 3))["softmax"], "golden")
    both = zip(one_pass().splitlines(), text.splitlines(), strict=True)
    changed = [new for old, new in both if old != new]
    assert changed == [
        "constexpr bool kBfloat16 = true;",
        "constexpr int kThreadsPerRow = 256;",
        "constexpr int kVector = 8;",
        "constexpr int kRowsPerBlock = 2;",
        "constexpr int kPasses = 3;",
        "constexpr int kVectors = 2;",
        "constexpr bool kCausal = true;",
    ]
