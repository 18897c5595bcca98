"""Arguments of launches: declared once, by name, and the same for the template and the call."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tuner.base import resources
from tuner.compile.render import fill, render
from tuner.compile.single import SOURCES, Source
from tuner.families import families
from tuner.families.arguments import Arguments, named_strides, stride_names
from tuner.families.base import Family, Launch, Ref
from tuner.families.triton_attention import ARGUMENTS as TRITON
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    E4M3,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

DECLARED = Arguments(("a", "d"), ("m", "n", "pdl"), ("alpha",))
#: A member of an array of arguments by its number, in C++ or by way of Jinja.
_COUNTED = re.compile(r"\b(tensors|integers|scalars|arguments|call|n|x)\s*\[\s*(?:\d|\{\{)")
#: A thread's own array is not a launch's.
_LOCAL = re.compile(r"^\s+(?:float|int|uint32_t) (\w+)\[\d+\];", re.MULTILINE)
#: Nor is an array that a function takes by reference.
_PARAMETER = re.compile(r"\(&(\w+)\)\[")
BLOCKS = GemmProblem(64, 256, 512, dtype=E4M3, dtype_d="bfloat16", scales="block")
#: What launches pass by some of their names; strides of unlike extents tell a shift by one.
CASES: dict[str, tuple[str, Problem, dict[str, int]]] = {
    "softmax": ("softmax", SoftmaxProblem(24, 96), {"rows": 24, "cols": 96, "query_rows": 24}),
    "gemm": ("gemm", GemmProblem(256, 512, 128), {"m": 256, "n": 512, "k": 128, "batch": 1}),
    "gemm, residual": (
        "gemm",
        GemmProblem(256, 512, 128, epilogue="bias_residual"),
        {"m": 256, "n": 512, "k": 128, "ldd": 512, "sm_count": 0},
    ),
    "gemm, factors": (
        "gemm",
        GemmProblem(256, 512, 128, dtype=E4M3, scales="row"),
        {"lda": 128, "ldb": 128, "batch_d": 256 * 512},
    ),
    "swiglu": ("gemm_swiglu", SwigluProblem(256, 512, 128), {"m": 256, "n": 1024, "ldd": 512}),
    "gemv": ("gemv", GemmProblem(3, 512, 128), {"m": 3, "n": 512, "k": 128, "ldd": 512}),
    "clusters": (
        "cluster_gemm",
        GemmProblem(3, 512, 128),
        {"m": 3, "n": 512, "k": 128, "lda": 128},
    ),
    "grouped": ("grouped_gemm", GroupedGemmProblem(8, 64, 256, 128), {"groups": 8, "n": 256}),
    "blocks": ("block_scaled_gemm", BLOCKS, {"scale_a_block": 64, "groups": 1, "ldd": 256}),
    "blocks of groups": (
        "block_scaled_grouped_gemm",
        GroupedGemmProblem(8, 64, 256, 512, dtype=E4M3),
        {"groups": 8, "scale_b_group": 8, "lda": 512},
    ),
    "attention": (
        "fused_attention",
        AttentionProblem(192, 320, 64, batch=2, heads_q=6, heads_kv=3),
        {"seqlen_q": 192, "key_head": 320 * 64, "query_head": 192 * 64, "out_row": 64},
    ),
    "windowed": (
        "fused_attention",
        AttentionProblem(192, 320, 64, window_left=63, window_right=5),
        {"left": 63, "right": 5, "heads_kv": 16},
    ),
    "biased": (
        "fused_attention",
        AttentionProblem(192, 320, 64, bias="h", softcap=30.0),
        {"mask_head": 192 * 320, "mask_row": 320, "mask_key": 1},
    ),
    "backward": (
        "fused_attention_backward",
        AttentionBackwardProblem(192, 320, 64),
        {"grad_value_head": 320 * 64, "grad_out_head": 192 * 64},
    ),
    "latent": (
        "mla_decode",
        AttentionProblem.parse("B=3,H=20,HKV=1,SQ=2,SKV=99,D=576,DV=512,causal=1,page_size=16"),
        {"queries": 2, "heads": 20, "query_batch": 2 * 20 * 576, "out_head": 512, "lse_head": 6},
    ),
    "two kernels": ("two_kernel_attention", AttentionProblem(192, 320, 64), {"head_count": 16}),
}


def launched(family: Family, problem: Problem) -> tuple[dict[str, str], list[Launch]]:
    """Texts of the kernels of the family's first config, and its launches."""
    config = family.space(problem, DEFAULT_GPU)[0]
    texts = {name: render(s, "k") for name, s in family.kernels(problem, config).items()}
    return texts, family.launches(problem, config, 0.5)


def members(text: str, struct: str) -> list[str]:
    """Names of a struct of a kernel's text, in order."""
    [found] = re.findall(rf"struct {struct} {{ \w+ (.*); }};", text)
    return [name.strip("* ") for name in found.split(",")]


def counted_in(text: str) -> list[str]:
    local = {*_LOCAL.findall(text), *_PARAMETER.findall(text)}
    return [
        line
        for line in text.splitlines()
        if any(name not in local for name in _COUNTED.findall(line))
    ]


def test_no_template_counts_arguments() -> None:
    """But for the dispatcher, whose arguments are those of Python and PyTorch."""
    found = sorted(resources.templates().rglob("*"))
    paths = [p for p in found if p.suffix != ".md" and p.parent.name != "dispatcher"]
    counted = [
        f"{path.name}: {line.strip()}"
        for path in paths
        if path.is_file()
        for line in counted_in(path.read_text())
    ]
    assert len(paths) > 30 and not counted


@pytest.mark.parametrize("line", ["p.m = integers[0];", "n[18] > 1", "tensors[{{ 4 if bias }}]"])
def test_the_rule_sees_an_argument_that_is_counted(line: str) -> None:
    assert counted_in(line) == [line]
    assert counted_in(f"{line}\n  float y[4];") == [line]
    assert counted_in("  float x[4];\n  y = x[0];") == []


@pytest.mark.parametrize("case", CASES)
def test_the_text_names_what_the_launch_passes(case: str) -> None:
    name, problem, wanted = CASES[case]
    texts, calls = launched(families()[name], problem)
    for call in calls:
        text = texts[call.kernel]
        tensors, integers = members(text, "Tensors"), members(text, "Integers")
        scalars = members(text, "Scalars")
        assert len(tensors) == len(call.tensors) and len(scalars) == len(call.scalars)
        found = dict(zip(integers, call.integers, strict=True))
        assert found | wanted == found


def test_every_template_has_a_case() -> None:
    """Triton's arguments are compared below; three kernels of attention are other families'."""
    own = {name for name, member in families().items() if not member.is_vendor}
    asked = {name for name, *_ in CASES.values()}
    assert own - asked == {"three_kernel_attention", "triton_attention"}


def test_a_shifted_declaration_is_seen() -> None:
    name, problem, wanted = CASES["gemm"]
    family = families()[name]
    config = family.space(problem, DEFAULT_GPU)[0]
    [spec] = family.kernels(problem, config).values()
    [call] = family.launches(problem, config, 1.0)
    assert isinstance(spec.arguments, Arguments)
    moved = (*spec.arguments.integers[1:], spec.arguments.integers[0])
    shifted = replace(spec, arguments=replace(spec.arguments, integers=moved))
    found = dict(zip(members(render(shifted, "k"), "Integers"), call.integers, strict=True))
    assert found | wanted != found


def test_a_launch_orders_what_it_is_given() -> None:
    call = Launch.named(
        "one", DECLARED, {"d": Ref("d"), "a": Ref("a")}, {"pdl": 1, "n": 3, "m": 2}, {"alpha": 0.5}
    )
    assert call == Launch("one", (Ref("a"), Ref("d")), (2, 3, 1), (0.5,))


@pytest.mark.parametrize(
    ("integers", "reason"),
    [
        ({"m": 2, "n": 3}, "integers of a launch: missing pdl; not declared none"),
        ({"m": 2, "n": 3, "pdl": 0, "k": 4}, "integers of a launch: missing none; not declared k"),
        ({"m": 2, "n": 3, "PDL": 0}, "integers of a launch: missing pdl; not declared PDL"),
    ],
)
def test_other_names_than_the_declared_are_refused(integers: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DECLARED.ordered({"a": 1, "d": 2}, integers, {"alpha": 1.0})


def test_strides_have_the_names_that_are_declared() -> None:
    found = named_strides({"query": (6, 3, 2, 1), "out": (7, 8, 9, 1)})
    assert tuple(found) == stride_names("query", "out")
    assert tuple(found.values()) == (6, 3, 2, 7, 8, 9)


@pytest.mark.parametrize("kernel", SOURCES, ids=lambda one: one.name)
def test_a_source_repeats_its_declaration(kernel: Source) -> None:
    source = (resources.templates() / kernel.name).read_text()
    text = fill("arguments.cu.j2", {"arguments": kernel.arguments})
    structs = [line for line in text.splitlines() if line.startswith("struct")]
    assert len(structs) == 2 and all(f"{struct}\n" in source for struct in structs)


def test_the_signature_of_triton_is_the_declaration() -> None:
    problem = AttentionProblem(192, 320, 64)
    texts, [call] = launched(families()["triton_attention"], problem)
    [text] = texts.values()
    signature = text.partition("def attention_k(")[2].partition("HEAD_DIM:")[0]
    names = [name.strip() for name in signature.split(",") if name.strip()]
    grid, *integers = TRITON.integers
    assert names == [*TRITON.tensors, *integers, *TRITON.scalars] and grid == "programs"
    assert len(call.integers) == len(TRITON.integers)
