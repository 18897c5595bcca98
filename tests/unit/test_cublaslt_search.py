"""cuBLASLt's algorithms as candidates: listed, rebuilt from their numbers, and launched, with the
library's C functions in Python.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tuner.config import Config
from tuner.families import family
from tuner.families.peers import MAX_INTEGER, cublaslt_search, lt
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
from lt_fakes import VERSION, WORKSPACES, FakeLt  # noqa: E402

FAMILY = family("vendor_cublaslt_search")
PLAIN = GemmProblem(48, 32, 64)
PRODUCTS = (
    "M=48,N=32,K=64",
    "M=48,N=32,K=64,layout_a=col,layout_b=row,dtype=bf16",
    "M=48,N=32,K=64,layout_a=col,B=3",
    "M=48,N=32,K=64,layout_b=row,B=2,dtype_d=fp32",
    "M=1,N=32,K=64",
    "M=48,N=32,K=64,epilogue=bias",
    "M=48,N=32,K=64,epilogue=relu,dtype=bf16",
    "M=48,N=32,K=64,epilogue=bias_relu",
    "M=48,N=32,K=64,epilogue=gelu_tanh",
    "M=48,N=32,K=64,epilogue=bias_gelu_tanh,dtype=bf16",
    "M=48,N=32,K=64,epilogue=residual",
    "M=48,N=32,K=64,epilogue=bias_residual,layout_b=row",
    "M=48,N=32,K=64,dtype=e4m3,fast_accum=1",
    "M=48,N=32,K=64,dtype=e4m3,scales=row,fast_accum=0",
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    made = FakeLt()
    library = lt.Library(made)
    monkeypatch.setattr(lt, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def inputs_of(problem: GemmProblem) -> list[Any]:
    made = []
    for operand in problem.operands[:-1]:
        values = torch.randn(operand.shape)
        dtype = getattr(torch, operand.dtype)
        tensor = torch.empty_strided(operand.shape, operand.strides, dtype=dtype)
        made.append(tensor.copy_(values.abs() + 0.5 if "scale" in operand.name else values))
    return made


def reference(problem: GemmProblem, inputs: list[Any]) -> Any:
    a, b, *others = (tensor.double() for tensor in inputs)
    wanted = a @ b
    if problem.scales:
        return wanted * others[0].view(-1, 1) * others[1]
    wanted = wanted + (others[0] if problem.has_bias else 0)
    if problem.activation == "relu":
        wanted = wanted.relu()
    if problem.activation == "gelu_tanh":
        wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
    return wanted + (others[-1] if problem.has_residual else 0)


@pytest.mark.parametrize("text", PRODUCTS)
def test_every_listed_algorithm_computes_the_problem(fake: FakeLt, text: str) -> None:
    problem = GemmProblem.parse(text)
    inputs = inputs_of(problem)
    listed = FAMILY.listing(problem, None)
    first = FAMILY.space(problem, DEFAULT_GPU)
    for config in (*listed, *first):
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        call = FAMILY.connected(problem, config, 1.0)  # type: ignore[attr-defined]
        assert not isinstance(call, str), call
        out = call(*inputs)
        assert (out.shape, out.stride()) == (problem.output.shape, problem.output.strides)
        wanted = reference(problem, inputs)
        assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
    assert [algorithm for algorithm, *_ in fake.launched] == [21, 66, 67, 21]


def test_a_call_looks_at_addresses_only(fake: FakeLt) -> None:
    """The runtime gives the tensors of its caller, (..., K) and (N, K)."""
    problem = GemmProblem(48, 32, 64, epilogue="bias")
    call = FAMILY.connected(problem, FAMILY.listing(problem, None)[0], 1.0)  # type: ignore[attr-defined]
    x, weight = torch.randn(2, 24, 64).half(), torch.randn(32, 64).half()
    for bias in (torch.randn(32).half(), torch.randn(32).half()):
        wanted = torch.nn.functional.linear(x, weight, bias)
        assert torch.allclose(call(x, weight, bias).view(2, 24, 32), wanted, atol=2e-2)


def test_the_list_holds_what_rebuilds_each_once(fake: FakeLt) -> None:
    listed = FAMILY.listing(PLAIN, None)
    assert [config["algorithm"] for config in listed] == list(WORKSPACES)
    assert {config["version"] for config in listed} == {VERSION}
    product = lt.LtDescriptors(lt.library(), PLAIN, 0)
    for config, one in zip(listed, product.heuristics(64, 1 << 30)[::2], strict=True):
        rebuilt = product.rebuilt({name: config[name] for name in lt.ATTRIBUTES})
        assert bytes(rebuilt.algorithm) == bytes(one.algorithm)
        assert rebuilt.workspace_bytes == one.workspace_bytes
        assert Config.from_json(config.to_json()) == config
    digests = {FAMILY.compile_digest(config) for config in listed}
    assert len(digests) == 1, "one request for all: its references are computed once"


@pytest.mark.parametrize(("most", "count"), [(0, 1), (4096, 2), (None, 3)])
def test_a_limit_of_workspace_holds(fake: FakeLt, most: int | None, count: int) -> None:
    assert len(FAMILY.listing(PLAIN, most)) == count


def test_the_workspace_is_torch_s_and_as_large_as_needed(fake: FakeLt) -> None:
    inputs = inputs_of(PLAIN)
    for config in FAMILY.listing(PLAIN, None):
        FAMILY.connected(PLAIN, config, 1.0)(*inputs)  # type: ignore[attr-defined]
    assert [size for _, size, _ in fake.launched] == list(WORKSPACES.values())
    assert [bool(address) for *_, address in fake.launched] == [False, True, True]


def test_another_version_of_the_library_refuses(fake: FakeLt) -> None:
    config = FAMILY.listing(PLAIN, None)[0]
    fake.version = 130200
    refused = FAMILY.connected(PLAIN, config, 1.0)  # type: ignore[attr-defined]
    assert refused == "cublaslt_search of version 130100, and the library's here is 130200"
    first = Config(FAMILY.name, {"kernel": "cublaslt_search"})
    assert callable(FAMILY.connected(PLAIN, first, 1.0))  # type: ignore[attr-defined]


def test_what_the_library_refuses_is_a_reason(
    fake: FakeLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = FAMILY.listing(PLAIN, None)[0]
    unknown = Config(FAMILY.name, {**config.params, "algorithm": 5})
    reason = FAMILY.vendor_call(PLAIN, unknown, 1.0)
    assert reason == "cublaslt_search refuses: cublasLtMatmulAlgoInit: not supported"
    hostile = Config(FAMILY.name, {**config.params, "tile": -1})
    assert "tile=-1 is not known" in str(FAMILY.vendor_call(PLAIN, hostile, 1.0))
    assert "alpha 1" in str(FAMILY.vendor_call(PLAIN, config, 2.0))
    monkeypatch.setattr(cublaslt_search, "WORKSPACE_BYTES", 1000)
    large = Config(FAMILY.name, {**config.params, "algorithm": 66})
    assert "needs 4096 bytes" in str(FAMILY.vendor_call(PLAIN, large, 1.0))


def test_the_loaded_version_is_a_fact(fake: FakeLt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FAMILY.environment()["cublaslt_loaded"] == str(VERSION)

    def missing() -> Any:
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(lt, "library", missing)
    assert "cublaslt_loaded" not in FAMILY.environment()


def test_descriptors_go_with_their_product(fake: FakeLt) -> None:
    product = lt.LtDescriptors(lt.library(), PLAIN, 0)
    made = len(fake.things)
    product.heuristics(4, 1 << 30)
    gc.collect()
    assert len(fake.things) == made, "a preference is destroyed when the list is there"
    del product
    gc.collect()
    assert list(fake.things.values()) == ["handle"]


def test_a_config_has_all_of_its_numbers_or_none() -> None:
    numbers = {name: 1 for name in (*lt.ATTRIBUTES, "version")}
    whole = Config(FAMILY.name, {"kernel": "cublaslt_search", **numbers})
    assert FAMILY.violations(PLAIN, whole, DEFAULT_GPU) == []
    for name in numbers:
        less = {key: value for key, value in whole.params.items() if key != name}
        found = FAMILY.violations(PLAIN, Config(FAMILY.name, less), DEFAULT_GPU)
        assert found == [f"parameter {name} is missing"]
        for wrong in (-1, MAX_INTEGER + 1, "1", True):
            config = Config(FAMILY.name, {**whole.params, name: wrong})
            assert "is not known" in FAMILY.violations(PLAIN, config, DEFAULT_GPU)[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("M=48,N=32,K=64,epilogue=bias_silu", "no epilogue bias_silu"),
        ("M=48,N=32,K=64,epilogue=gelu", "no epilogue gelu"),
        ("M=48,N=32,K=64,scales=row", "takes factors of float8_e4m3fn"),
    ],
)
def test_what_it_does_not_take(text: str, reason: str) -> None:
    problem = GemmProblem.parse(text)
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []
    assert "serves gemm" in FAMILY.supports(AttentionProblem.parse("S=64,D=64"), DEFAULT_GPU)


def test_the_numbers_are_those_of_nvidia_s_binding() -> None:
    binding = pytest.importorskip("nvmath.bindings.cublasLt", reason="nvmath is not installed")
    config = binding.MatmulAlgoConfigAttribute
    assert [number for number, _ in lt.ATTRIBUTES.values()] == [
        *(config.ID, config.TILE_ID, config.SPLITK_NUM, config.REDUCTION_SCHEME),
        *(config.CTA_SWIZZLING, config.CUSTOM_OPTION, config.STAGES_ID, config.INNER_SHAPE_ID),
        config.CLUSTER_SHAPE_ID,
    ]
    description = binding.MatmulDescAttribute
    assert (lt.TRANSA, lt.TRANSB) == (description.TRANSA, description.TRANSB)
    assert (lt.EPILOGUE, lt.BIAS_POINTER) == (description.EPILOGUE, description.BIAS_POINTER)
    assert lt.BIAS_DATA_TYPE == description.BIAS_DATA_TYPE
    assert lt.FAST_ACCUM == description.FAST_ACCUM
    scales = (lt.A_SCALE_POINTER, lt.B_SCALE_POINTER, lt.A_SCALE_MODE, lt.B_SCALE_MODE)
    assert scales == (
        *(description.A_SCALE_POINTER, description.B_SCALE_POINTER),
        *(description.A_SCALE_MODE, description.B_SCALE_MODE),
    )
    assert binding.MatmulMatrixScale.OUTER_VEC_32F == lt.OUTER_VECTOR
    preference = binding.MatmulPreferenceAttribute
    assert preference.MAX_WORKSPACE_BYTES == lt.MAX_WORKSPACE
    assert lt.MIN_ALIGNMENTS == tuple(
        getattr(preference, f"MIN_ALIGNMENT_{letter}_BYTES") for letter in "ABCD"
    )
    layout = binding.MatrixLayoutAttribute
    assert (lt.BATCH_COUNT, lt.BATCH_STRIDE) == (layout.BATCH_COUNT, layout.STRIDED_BATCH_OFFSET)
    names = {"": "DEFAULT", "residual": "DEFAULT", "bias_residual": "BIAS", "bias": "BIAS"}
    names |= {"relu": "RELU", "bias_relu": "RELU_BIAS"}
    names |= {"gelu_tanh": "GELU", "bias_gelu_tanh": "GELU_BIAS"}
    assert {k: int(binding.Epilogue[v]) for k, v in names.items()} == lt.EPILOGUES
    assert set(lt.DATA_TYPES) == {"float32", "float16", "bfloat16", E4M3}
