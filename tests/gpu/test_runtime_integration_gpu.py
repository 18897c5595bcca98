"""The runtime inside PyTorch and Transformers on the GPU: real kernels, against float64.

The entries are written into a store of the test's own, so it is known what is tuned: the problems
of `TUNED`, by the most promising kernel of the family that writes the log-sum-exp.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from programs import ran
from runtime_gpu import fresh_store, grouped, inputs, part, store, this_gpu

import tuner
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    # Inductor's and Triton's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
]

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

own_store, options = fresh_store, grouped
stats = part("call.counters").stats
SDPA = torch.nn.functional.scaled_dot_product_attention
FAMILY = "fused_attention"
FULL, CAUSAL, GROUPED, CACHED = (
    AttentionProblem.parse(shape)
    for shape in (
        "H=8,S=1024,D=64",
        "H=8,S=1024,D=64,causal=1",
        "B=2,H=4,HKV=2,S=256,D=64,causal=1,layout=bshd",
        "B=2,H=4,HKV=2,S=256,D=64,causal=1,layout=bshd_bhsd",
    )
)
BERT = AttentionProblem.parse("B=2,H=4,S=256,D=64,layout=bshd")
TUNED = (FULL, CAUSAL, GROUPED, CACHED, BERT)
TOLERANCE = 1e-3


@cache
def chosen(problem: AttentionProblem, gpu: Gpu) -> Config:
    """A config that an earlier problem has already, where it is legal, so that few compile."""
    member = family(FAMILY)
    for other in TUNED[: TUNED.index(problem)]:
        config = chosen(other, gpu)
        if not member.violations(problem, config, gpu):
            return config
    return member.seeds(problem, gpu, member.space(problem, gpu), 1)[0]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    if not torch.cuda.is_available():
        return []
    needed = [family(FAMILY).kernels(p, chosen(p, this_gpu())) for p in TUNED]
    return list(dict.fromkeys(spec for specs in needed for spec in specs.values()))


@pytest.fixture(autouse=True)
def decided(compiler: Compiler, own_store: None) -> Iterator[None]:
    """The problems of `TUNED` have a winner, and nothing else has."""
    for problem in TUNED:
        config = chosen(problem, this_gpu())
        specs = family(FAMILY).kernels(problem, config)
        keys = [future.result().key for _, future in compiler.submit(list(specs.values()))]
        store(problem, this_gpu(), config, artifacts=dict(zip(specs, keys, strict=True)))
    stats(reset=True)
    torch._dynamo.reset()
    yield
    tuner.disable()


def leaves(problem: AttentionProblem) -> list[Any]:
    """Inputs that want a gradient."""
    return [tensor.requires_grad_() for tensor in inputs(problem)]


def reference(problem: AttentionProblem, tensors: list[Any]) -> Any:
    """Attention written out in float64."""
    query, key, value = (t.double() for t in tensors)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = problem.head_dim**-0.5 * query @ key.mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def error(found: Any, wanted: Any) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def check(problem: AttentionProblem, out: Any, tensors: list[Any]) -> None:
    assert error(out, reference(problem, tensors)) < TOLERANCE


# --- operators ------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [CAUSAL, GROUPED], ids=str)
def test_opcheck(problem: AttentionProblem) -> None:
    q, k, v = leaves(problem)
    ops, causal = torch.ops.tuner, problem.is_causal
    tolerance = {"rtol": 1e-2, "atol": 1e-2}
    torch.library.opcheck(ops.attention.default, (q, k, v, causal), **tolerance)
    torch.library.opcheck(ops.attention_with_lse.default, (q, k, v, causal), **tolerance)
    out, lse = ops.attention_with_lse(q, k, v, causal)
    backward = (torch.randn_like(out), q, k, v, out.detach(), lse, causal)
    torch.library.opcheck(ops.attention_backward.default, backward, **tolerance)


@pytest.mark.parametrize("problem", TUNED, ids=str)
def test_the_log_sum_exp_is_natural_and_pytorch_s(problem: AttentionProblem) -> None:
    tensors = inputs(problem)
    out, lse = torch.ops.tuner.attention_with_lse(*tensors, problem.is_causal)
    assert stats().hits == 1
    check(problem, out, tensors)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, problem.is_causal)
    assert lse.shape == flash[1].shape and torch.allclose(lse, flash[1], atol=2e-3)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *tensors, None, True, 0.0, problem.is_causal
    )
    assert torch.allclose(lse, cudnn[1].squeeze(-1), atol=2e-3)


#: PyTorch warms its graph trees up with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_inductor(mode: str, dynamic: bool) -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return 2 * tuner.attention(q * 1, k, v, is_causal=True)

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, mode=mode)
    other = AttentionProblem.parse("H=8,S=640,D=64,causal=1")
    with torch.no_grad():
        for problem in (CAUSAL, other, CAUSAL, CAUSAL):
            tensors = inputs(problem)
            check(problem, compiled(*tensors) / 2, tensors)
    seen = stats()
    assert seen.hits >= 1 and sum(seen.fallbacks.values()) >= 1


def test_exported() -> None:
    class Block(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return tuner.attention(q, k, v, is_causal=True)

    tensors = inputs(CAUSAL)
    program = torch.export.export(Block(), tuple(tensors))
    check(CAUSAL, program.module()(*tensors), tensors)
    assert stats().hits == 1


def test_autocast_and_inference_mode() -> None:
    tensors = [t.float() for t in inputs(FULL)]
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        for attend in (tuner.attention, torch.ops.tuner.attention):
            out = attend(*tensors)
            assert out.dtype == torch.float16
            check(FULL, out, [t.half() for t in tensors])
    assert stats().hits == 2


def test_captured_on_streams_of_their_own() -> None:
    torch.ops.tuner.attention(*inputs(FULL))  # loads the kernel
    torch.cuda.synchronize()
    captured = []
    for _ in range(2):
        tensors, graph = inputs(FULL), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = torch.ops.tuner.attention(*tensors)
        captured.append((tensors, graph, out))
    for tensors, graph, out in captured:
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape))
        out.fill_(float("nan"))
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
        torch.cuda.synchronize()
        check(FULL, out, tensors)


def test_two_gpus_in_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU here")
    for device in ("cuda:1", "cuda:0", "cuda:1"):  # the current one stays the first
        tensors = [tensor.to(device) for tensor in inputs(FULL)]
        out = torch.ops.tuner.attention(*tensors)
        assert str(out.device) == device
        check(FULL, out, tensors)
    assert stats().hits == 3


CHILD = """
import torch, tuner
from tuner.runtime import stats
q, k, v = (torch.randn(1, 8, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(3))
out = tuner.attention(q, k, v)
wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
assert (out.float() - wanted).norm() / wanted.norm() < 1e-3
print(stats().hits)
"""


class Squares(torch.utils.data.Dataset):  # type: ignore[misc]
    """What data workers compute beside a process that uses the GPU."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        q = torch.full((1, 1, 4, 8), float(index))
        return tuner.attention(q, q, q).mean()


def test_processes() -> None:
    tensors = inputs(FULL)
    check(FULL, tuner.attention(*tensors), tensors)
    workers = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(workers)).tolist() == list(range(8))
    done = ran(sys.executable, "-c", CHILD, code=None, timeout=240, env=dict(os.environ))
    assert done.stdout.split() == ["1"], done.stderr


# --- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("problem", TUNED, ids=str)
def test_gradients_by_each_of_pytorch_s_kernels(problem: AttentionProblem, backend: str) -> None:
    """At most a quarter worse than PyTorch's own; MATH is recomputed."""
    tensors = leaves(problem)
    grad = torch.randn(problem.output.shape, device="cuda", dtype=torch.float16)
    exact = torch.autograd.grad(reference(problem, tensors), tensors, grad.double())
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = tuner.attention(*tensors, **options(problem))
        found = torch.autograd.grad(out, tensors, grad)
    own = torch.autograd.grad(SDPA(*tensors, **options(problem)), tensors, grad)
    assert stats().hits == 1
    for ours, theirs, wanted in zip(found, own, exact, strict=True):
        assert ours.dtype == torch.float16
        assert error(ours, wanted) < 1.25 * error(theirs, wanted) + 1e-4


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training(dynamic: bool) -> None:
    # A sum: the gradient of a mean is 2^-18 of it, among float16's subnormals.
    def loss(q: Any, k: Any, v: Any) -> Any:
        return tuner.attention(q, k, v, is_causal=True).float().square().sum()

    tensors = leaves(CAUSAL)
    exact = torch.autograd.grad(reference(CAUSAL, tensors).square().sum(), tensors)
    value = torch.compile(loss, fullgraph=True, dynamic=dynamic)(*tensors)
    found = torch.autograd.grad(value, tensors)
    assert stats().hits == 1
    assert all(error(a, b) < 5e-3 for a, b in zip(found, exact, strict=True))


# --- enable ---------------------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    backends = (f"_scaled_dot_product_{one}_attention" for one in ("flash", "cudnn", "efficient"))
    return (
        *(
            torch._C._dispatch_dump_table(f"aten::{name}")
            for name in ("scaled_dot_product_attention", *backends)
        ),
        torch._C._get_sdp_priority_order(),
    )


@pytest.mark.parametrize("backends", [None, "FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("problem", TUNED, ids=str)
def test_pytorch_s_attention_is_answered(problem: AttentionProblem, backends: str | None) -> None:
    tensors = inputs(problem)
    SDPA(*tensors, **options(problem))  # PyTorch settles its order of backends at its first call
    before = state()
    with tuner.enabled():
        assert state() != before
        if backends is None:
            out = SDPA(*tensors, **options(problem))
        else:
            with sdpa_kernel(getattr(SDPBackend, backends)):
                out = SDPA(*tensors, **options(problem))
    assert state() == before
    check(problem, out, tensors)
    assert stats().hits == 1
    SDPA(*tensors, **options(problem))
    assert stats().calls == 1


def test_what_is_not_tuned_is_bitwise_what_it_was() -> None:
    other = AttentionProblem.parse("H=8,S=640,D=64")
    tensors = inputs(other)
    mask = torch.ones(640, 640, dtype=torch.bool, device="cuda").tril()
    calls = [{}, {"attn_mask": mask}, {"is_causal": True, "scale": 0.3}]
    wanted = [SDPA(*tensors, **call) for call in calls]
    with tuner.enabled():
        found = [SDPA(*tensors, **call) for call in calls]
        with sdpa_kernel(SDPBackend.MATH):
            SDPA(*inputs(FULL))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert stats().hits == 0


def test_what_inductor_compiled_follows_the_switch() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return SDPA(q, k, v, is_causal=True).float().square().sum()

    tensors = inputs(CAUSAL)
    exact = reference(CAUSAL, tensors).square().sum()
    compiled = torch.compile(loss, fullgraph=True)
    for is_on, hits in ((False, 0), (True, 1), (False, 1)):
        if is_on:
            tuner.enable()
        else:
            tuner.disable()
        value = compiled(*tensors)
        assert stats().hits == hits
        assert error(value, exact) < 5e-3


@pytest.mark.parametrize("kernel", ["cudnn", "flash2"])
@torch.no_grad()
def test_a_vendor_that_won_answers_behind_pytorch_s_attention(kernel: str) -> None:
    """Its first call tries the kernel, which is PyTorch's own: not through the switch again."""
    problem = AttentionProblem.parse("H=8,S=512,D=64")
    store(problem, this_gpu(), Config("vendor_sdpa", {"kernel": kernel}))
    tensors = inputs(problem)
    with tuner.enabled(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # wants no log-sum-exp
        for _ in range(2):
            check(problem, SDPA(*tensors), tensors)
    assert (stats().hits, stats().calls, stats().errors) == (2, 2, {})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_served_call_passes_no_python(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager without and with gradients, and compiled."""
    monkeypatch.setattr(part("call.table"), "LOOK_EVERY_S", 1e6)
    part("call.dispatch").prepare(then=part("call.table").table.renew).join(300)
    tensors = (leaves if mode is torch.enable_grad else inputs)(CAUSAL)
    compiled = torch.compile(lambda *t: SDPA(*t, is_causal=True), fullgraph=True)
    with mode(), tuner.enabled():
        for call in (lambda: SDPA(*tensors, is_causal=True), lambda: compiled(*tensors)):
            for _ in range(3):
                call()
            asked = stats().hits
            with monkeypatch.context() as patch:
                patch.setattr(part("enable"), "_answer", lambda *_: pytest.fail("Python was asked"))
                for _ in range(5):
                    out = call()
            check(CAUSAL, out.detach(), [t.detach() for t in tensors])
            assert stats().hits == asked + 5


@torch.no_grad()
def test_a_mask_that_an_encoder_builds_while_it_is_traced_is_served() -> None:
    """As Transformers builds it: `query >= 0`, expanded over the keys. PyTorch's fused kernels
    refuse its strides.
    """
    part("call.dispatch").prepare(then=part("call.table").table.renew).join(300)

    def encode(query: Any, key: Any, value: Any) -> Any:
        length = query.shape[2]
        rows = torch.arange(length, device=query.device)[:, None] >= 0
        return SDPA(query, key, value, rows.expand(query.shape[0], 1, length, length))

    tensors = inputs(BERT)
    compiled = torch.compile(encode, fullgraph=True)
    with tuner.enabled():
        compiled(*tensors)
        asked = stats().hits
        for _ in range(3):
            out = compiled(*tensors)
    check(BERT, out, tensors)
    assert stats().hits == asked + 3


def test_captured_behind_pytorch_s_attention() -> None:
    tensors, graph = inputs(FULL), torch.cuda.CUDAGraph()
    with torch.no_grad(), tuner.enabled():
        SDPA(*tensors)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = SDPA(*tensors)
    tensors[0].copy_(torch.randn(tensors[0].shape))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(FULL, out, tensors)
    assert stats().hits == 2


# --- Transformers ---------------------------------------------------------------------------

HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
SMALL = {**HEADS, "intermediate_size": 384, "max_position_embeddings": 320, "pad_token_id": 0}
GROUPS = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 320, "vocab_size": 97}
#: Architecture -> configuration's class and values, and what its layers pose without a cache.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], AttentionProblem | None]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPS, GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPS, GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPS, "head_dim": 64}, GROUPED),
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": None}, None),
    "BertForMaskedLM": ("BertConfig", SMALL, BERT),
}


def pair(name: str) -> tuple[Any, Any]:
    """The same model twice, by `tuner` and by `sdpa`."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    importlib.import_module("tuner.runtime.engines.transformers")
    config, values, _ = ARCHITECTURES[name]
    made = []
    for implementation in ("tuner", "sdpa"):
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(
            getattr(transformers, config)(**values), attn_implementation=implementation
        )
        made.append(model.eval().half().cuda())
    return made[0], made[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_transformers_logits(name: str) -> None:
    model, other = pair(name)
    problem = ARCHITECTURES[name][2]
    ids = torch.randint(2, 97, (2, 256), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    call = {} if name == "BertForMaskedLM" else {"use_cache": False}
    assert error(model(ids, **call).logits, other(ids, **call).logits) < 5e-3
    assert stats().hits == (2 if problem else 0)
    stats(reset=True)
    padded = [m(ids, attention_mask=mask, **call).logits for m in (model, other)]
    # The padded rows themselves see no key: zeros by the one, what the backend makes by the other.
    ours, theirs = (logits[mask.bool()] for logits in padded)
    assert error(ours, theirs) < 5e-3
    assert stats().fallbacks == {"no measured winner": 2}  # a mask is an operand
    with tuner.enabled():
        stats(reset=True)
        assert error(other(ids, **call).logits, model(ids, **call).logits) < 5e-3
        assert stats().hits == (4 if problem else 0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "BertForMaskedLM"])
def test_transformers_generation(name: str, cache: str) -> None:
    model, other = pair(name)
    ids = torch.randint(2, 97, (2, 256), device="cuda")
    padded = torch.ones_like(ids)
    padded[0, :40] = 0
    for mask in (torch.ones_like(ids), padded):
        call = {
            "attention_mask": mask,
            "cache_implementation": cache,
            "max_new_tokens": 16,
            "do_sample": False,
            "pad_token_id": 0,
            "disable_compile": True,
        }
        found = model.generate(ids, **call)
        assert found.shape == (2, 272) and torch.equal(found, other.generate(ids, **call))
    if cache == "dynamic" and ARCHITECTURES[name][2] == GROUPED:
        assert stats().hits == 2, "the prompt without padding poses `CACHED` to both layers"
