"""cuDNN's plans as candidates: listed, rebuilt from engine and knobs, and run, by a frontend in
Python; graphs are also checked by NVIDIA's own frontend where it is installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tuner.config import Config
from tuner.families import family
from tuner.families.peers import cudnn_graph, cudnn_plans
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
from cudnn_fakes import BROKEN, VERSION, FakeCudnn  # noqa: E402

FAMILY: Any = family("vendor_cudnn_plans")
PLAIN = AttentionProblem.parse("S=24,D=16,H=4")
PROBLEMS = (
    "S=24,D=16,H=4",
    "S=24,D=16,H=4,HKV=2,causal=1,B=2,dtype=bf16,layout=bshd",
    "SQ=40,SKV=24,D=16,H=2,layout=bshd_bhsd",
    "SQ=24,SKV=40,D=16,H=2,causal=1",
    "S=40,D=16,H=2,causal=1,left=3",
    "SQ=24,SKV=40,D=16,H=2,left=3,right=5",
    "S=24,D=16,H=4,HKV=2,B=2,causal=1,bias=h",
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    made = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cudnn_plans, "stream_of", lambda device: 7)
    monkeypatch.setattr(cudnn_graph, "_thread", type(cudnn_graph._thread)())
    return made


def inputs_of(problem: AttentionProblem) -> list[Any]:
    made = []
    for operand in problem.operands[:-1]:
        dtype = getattr(torch, operand.dtype)
        tensor = torch.empty_strided(operand.shape, operand.strides, dtype=dtype)
        made.append(tensor.copy_(torch.randn(operand.shape)))
    return made


def reference(problem: AttentionProblem, scale: float, inputs: list[Any]) -> Any:
    query, key, value, *bias = (tensor.double() for tensor in inputs)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT + (bias[0] if bias else 0)
    left, right = problem.visible
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(right).triu(-left)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0) @ value


@pytest.mark.parametrize("text", PROBLEMS)
def test_every_plan_computes_the_problem(fake: FakeCudnn, text: str) -> None:
    problem = AttentionProblem.parse(text)
    inputs, ran = inputs_of(problem), 0
    for config in (*FAMILY.listing(problem, None), *FAMILY.space(problem, DEFAULT_GPU)):
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        if config.get("engine") == BROKEN:
            continue
        out = FAMILY.connected(problem, config, 0.3)(*inputs)
        assert (out.shape, out.stride()) == (problem.output.shape, problem.output.strides)
        wanted = reference(problem, 0.3, inputs)
        assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
        ran += 1
    assert ran == len(fake.executed) == 5
    assert set(fake.streams.values()) == {7}


def test_the_list_has_every_heuristic_s_plans_once(fake: FakeCudnn) -> None:
    listed = FAMILY.listing(PLAIN, None)
    found = [(c["engine"], c.get("kernel_cfg"), c.get("tile_m"), c["is_unified"]) for c in listed]
    assert found == [
        *((10, 1, 128, False), (10, 2, 64, False), (10, 1, 128, True), (10, 2, 64, True)),
        *((4, None, None, False), (4, None, None, True)),
    ]
    assert {config["version"] for config in listed} == {VERSION}
    assert len({FAMILY.compile_digest(config) for config in listed}) == 1
    assert [Config.from_json(config.to_json()) for config in listed] == listed
    fake.has_unified = False
    assert [c["is_unified"] for c in FAMILY.listing(PLAIN, None)] == [False] * 3


def test_a_plan_is_rebuilt_by_what_names_it(fake: FakeCudnn) -> None:
    second = FAMILY.listing(PLAIN, None)[1]
    fake.graphs.clear()
    FAMILY.connected(PLAIN, second, 0.3)(*inputs_of(PLAIN))
    [graph] = fake.graphs
    assert graph.plans == [(10, {"KERNEL_CFG": 2, "TILE_M": 64})], "no heuristic was asked"
    assert graph.arguments["implementation"] == "COMPOSITE"
    assert fake.executed[-1][:2] == graph.plans[0]


def test_what_cannot_be_built_or_rebuilt_is_a_reason(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    *_, broken = FAMILY.listing(PLAIN, None)
    assert FAMILY.vendor_call(PLAIN, broken, 0.3) == "cudnn_plans refuses: no such kernel"
    unknown = Config(FAMILY.name, {**broken.params, "engine": 99})
    assert "engine 99 has no such knobs" in FAMILY.vendor_call(PLAIN, unknown, 0.3)
    fake.version = 92000
    refused = FAMILY.vendor_call(PLAIN, broken, 0.3)
    assert refused == "cudnn_plans of version 91900, and the library's here is 92000"


def test_without_any_plan_the_library_s_own_words_are_the_reason(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise fake.cudnnGraphNotSupportedError("no engine for it")

    monkeypatch.setattr(fake.pygraph, "build_operation_graph", refuse)
    with pytest.raises(fake.cudnnGraphNotSupportedError, match="no engine for it"):
        FAMILY.listing(PLAIN, None)


def test_a_missing_or_old_frontend_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ImportError, match=r"pip install nvidia-cudnn-frontend"):
        cudnn_plans.frontend()
    fake = FakeCudnn()
    monkeypatch.setattr(fake, "pygraph", object)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    with pytest.raises(ImportError, match="too old"):
        cudnn_plans.frontend()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert FAMILY.lacks().startswith("nvidia-cudnn-frontend is not installed: ")
    assert FAMILY.lacks().endswith(" -m pip install nvidia-cudnn-frontend")


def test_threads_have_handles_of_their_own(fake: FakeCudnn) -> None:
    import threading

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(cudnn_graph.handle_of(fake, 0, 1)))
    first = cudnn_graph.handle_of(fake, 0, 2)
    thread.start()
    thread.join()
    assert found != [first] and cudnn_graph.handle_of(fake, 0, 3) == first
    assert fake.streams == {first: 3, found[0]: 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("S=64,D=64,dtype=e4m3", "descale factors"),
        ("S=64,D=64,B=2,varlen=1", "variable lengths"),
        ("S=64,D=64,softcap=30", "soft cap"),
        ("SQ=64,SKV=32,D=64,window=4", "more queries than keys"),
    ],
)
def test_what_it_does_not_take(text: str, reason: str) -> None:
    problem = AttentionProblem.parse(text)
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []


def test_a_config_has_what_names_a_plan_or_nothing() -> None:
    whole = {"kernel": "cudnn_plans", "engine": 1, "is_unified": False, "version": 1, "tile_m": 64}
    assert FAMILY.violations(PLAIN, Config(FAMILY.name, whole), DEFAULT_GPU) == []
    for name in FAMILY.identity:
        less = {key: value for key, value in whole.items() if key != name}
        found = FAMILY.violations(PLAIN, Config(FAMILY.name, less), DEFAULT_GPU)
        assert found == [f"parameter {name} is missing"]
    for name, wrong in (("engine", "eng10"), ("tile_m", -1), ("is_unified", 1), ("knob", 1)):
        config = Config(FAMILY.name, {**whole, name: wrong})
        assert "is not known" in FAMILY.violations(PLAIN, config, DEFAULT_GPU)[0]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("implementation", ["AUTO", "COMPOSITE", "UNIFIED"])
def test_nvidia_s_frontend_takes_the_graphs(text: str, implementation: str) -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    made = cudnn_graph.CudnnGraph(cudnn, AttentionProblem.parse(text), 0.3, implementation, None)
    assert len(made.graph.nodes) == 1
    assert {name.lower() for name in cudnn.knob_type.__members__} - {"not_set"} == {
        *cudnn_graph.KNOBS
    }
    assert {*cudnn_graph.HEURISTICS} <= cudnn.heur_mode.__members__.keys()
