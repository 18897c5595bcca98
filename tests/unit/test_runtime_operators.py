"""The operators: what a compiler or an exporter sees, on CPU tensors, tuned and not."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import ran

from tuner.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")
importlib.import_module("tuner.runtime")  # defines the operators

SDPA = torch.nn.functional.scaled_dot_product_attention


def tensors(
    heads: int = 4,
    heads_kv: int = 4,
    lengths: tuple[int, int] = (6, 6),
    layout: str = "bhsd",
    dtype: Any = torch.float16,
    requires_grad: bool = False,
) -> list[Any]:
    """Query, key and value of two batches, D=8."""
    made = []
    for count, length in ((heads, lengths[0]), (heads_kv, lengths[1]), (heads_kv, lengths[1])):
        if layout == "bhsd":
            tensor = torch.randn(2, count, length, 8)
        else:
            tensor = torch.randn(2, length, count, 8).transpose(1, 2)
        made.append(tensor.to(dtype).requires_grad_(requires_grad))
    return made


def close(out: Any, wanted: Any) -> bool:
    return bool(torch.allclose(out.float(), wanted.float(), rtol=1e-2, atol=1e-2))


def nodes(graphs: list[Any]) -> list[str]:
    """Names of the operators that the graphs call, but for unpacking."""
    calls = (n for graph in graphs for n in graph.graph.nodes if n.op == "call_function")
    return [str(n.target) for n in calls if "getitem" not in str(n.target)]


def recording(graphs: list[Any]) -> Callable[..., Any]:
    """A backend that keeps the graphs of operators that it is given."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


#: Graphs are traced, which takes seconds, of one of the kinds of operands.
UNTRACED = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}


@pytest.mark.parametrize(
    "heads_kv,is_causal,layout,options",
    [(4, False, "bhsd", UNTRACED), (2, True, "bshd", {})],
    ids=["untraced", "traced"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own, PyTorch 2.14
def test_opcheck(heads_kv: int, is_causal: bool, layout: str, options: dict[str, Any]) -> None:
    q, k, v = tensors(4, heads_kv, (5, 5), layout, torch.float64, requires_grad=True)
    ops, check = torch.ops.tuner, functools.partial(torch.library.opcheck, **options)
    check(ops.attention.default, (q, k, v, is_causal))
    check(ops.attention_with_lse.default, (q, k, v, is_causal, 0.5))
    out, lse = ops.attention_with_lse(q, k, v, is_causal)
    backward = (torch.randn_like(out), q, k, v, out.detach(), lse, is_causal)
    check(ops.attention_backward.default, backward)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck_of_what_a_tuned_kernel_answers(tuned: SimpleNamespace, layout: str) -> None:
    inputs = tensors(layout=layout)
    torch.library.opcheck(torch.ops.tuner.attention.default, (*inputs, True))
    torch.library.opcheck(torch.ops.tuner.attention_with_lse.default, (*inputs, True))
    assert tuned.problems


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_a_graph_holds_a_mask_as_an_operand(tuned: SimpleNamespace, dtype: Any) -> None:
    """Each call of the graph decides; without a gradient only."""
    import tuner

    q, k, v = tensors(4, 2, (5, 7))
    mask = (torch.randn(2, 1, 5, 7) > 0).to(dtype)
    graphs: list[Any] = []
    attend = torch.compile(
        lambda *t: tuner.attention(*t, enable_gqa=True), backend=recording(graphs), fullgraph=True
    )
    wanted = SDPA(q, k, v, mask, enable_gqa=True)
    assert close(attend(q, k, v, mask), wanted)
    assert nodes(graphs) == ["tuner.attention.default"]
    torch.library.opcheck(torch.ops.tuner.attention.default, (q, k, v, False, None, mask))
    graphs.clear()
    learnt = [t.requires_grad_() for t in (q, k, v)]
    assert close(attend(*learnt, mask), wanted)
    assert "tuner.attention.default" not in nodes(graphs)
    with pytest.raises(ConfigError, match="no gradient with attn_mask"):
        torch.ops.tuner.attention(*learnt, False, None, mask).sum().backward()


def test_the_log_sum_exp(tuned: SimpleNamespace) -> None:
    q, k, v = tensors(4, 2, (5, 7))
    out, lse = torch.ops.tuner.attention_with_lse(q, k, v, True, 0.3)
    seen = torch.ones(5, 7, dtype=torch.bool).tril()
    scores = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT
    wanted = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    assert lse.dtype == torch.float32 and torch.allclose(lse.double(), wanted, atol=1e-5)
    assert close(out, SDPA(q, k, v, is_causal=True, scale=0.3, enable_gqa=True))
    tuned.writes_lse = False
    again, lse = torch.ops.tuner.attention_with_lse(q, k, v, True, 0.3)
    assert torch.allclose(lse.double(), wanted, atol=1e-5) and close(again, out)
    assert len(tuned.problems) == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t, t], -1)[..., 8:16],
        lambda t: t[:, :1].expand_as(t),
    ],
    ids=["bhsd", "bshd", "packed", "expanded"],
)
def test_strides_are_those_of_the_fake(tuned: SimpleNamespace, view: Callable[..., Any]) -> None:
    from torch._subclasses import FakeTensorMode

    q, k, v = (view(t) for t in tensors())
    real = torch.ops.tuner.attention(q, k, v)
    with FakeTensorMode() as mode:
        fake = torch.ops.tuner.attention(*(mode.from_tensor(t) for t in (q, k, v)))
    assert real.stride() == fake.stride()
    assert close(real, SDPA(q, k, v))


def test_what_is_no_attention_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"query \(2, 3, 6, 8\).* HKV a divisor of H"):
        torch.ops.tuner.attention(q[:, :3], k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"are not \(B, H, SQ, D\)"):
        torch.ops.tuner.attention(q[0], k[0], v[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_into_one_graph(tuned: SimpleNamespace, dynamic: bool) -> None:
    graphs: list[Any] = []

    def block(q: Any, k: Any, v: Any) -> Any:
        return 2 * tuned.attention.attention(q + 0, k, v, is_causal=True)

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=recording(graphs))
    for length in (16, 24, 40):
        q, k, v = tensors(lengths=(length, length))
        assert close(compiled(q, k, v), 2 * SDPA(q, k, v, is_causal=True))
    assert [problem.seqlen_q for problem in tuned.problems] == [16, 24, 40]
    assert nodes(graphs).count("tuner.attention.default") == len(graphs) == (1 if dynamic else 3)


def test_compiled_calls_that_no_kernel_takes_stay_pytorch_s(tuned: SimpleNamespace) -> None:
    graphs: list[Any] = []
    mask = torch.randn(6, 6)  # of another type than the tensors

    def block(q: Any, k: Any, v: Any) -> Any:
        masked = tuned.attention.attention(q, k, v, mask)
        return masked, tuned.attention.attention(q.float(), k.float(), v.float())

    q, k, v = tensors()
    masked, wide = torch.compile(block, fullgraph=True, backend=recording(graphs))(q, k, v)
    assert close(masked, SDPA(q, k, v, mask)) and close(wide, SDPA(q, k, v))
    assert tuned.problems == [] and "tuner" not in str(nodes(graphs))


def test_exported_with_a_dynamic_length(tuned: SimpleNamespace) -> None:
    class Block(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return tuned.attention.attention(q, k, v, is_causal=True)

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({2: length}, {2: length}, {2: length})
    program = torch.export.export(Block(), tuple(tensors()), dynamic_shapes=shapes)
    assert nodes([program.graph_module]) == ["tuner.attention.default"]
    q, k, v = tensors(lengths=(40, 40))
    assert close(program.module()(q, k, v), SDPA(q, k, v, is_causal=True))
    assert tuned.problems[-1].seqlen_q == 40


def test_autocast_casts_as_pytorch_s(tuned: SimpleNamespace) -> None:
    q, k, v = tensors(dtype=torch.float32)
    attention = tuned.attention.attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = SDPA(q, k, v)
        eager = attention(q, k, v)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
        direct = torch.ops.tuner.attention(q, k, v)
        with_lse = torch.ops.tuner.attention_with_lse(q, k, v)[0]
        double = attention(q.double(), k.double(), v.double())
    assert len(tuned.problems) == 4 and double.dtype == torch.double
    for out in (eager, compiled, direct, with_lse):
        assert out.dtype == wanted.dtype == torch.bfloat16 and close(out, wanted)


def test_inference_mode(tuned: SimpleNamespace) -> None:
    with torch.inference_mode():
        q, k, v = tensors()
        out = torch.compile(tuned.attention.attention, fullgraph=True, backend="aot_eager")(q, k, v)
        assert close(out, SDPA(q, k, v)) and out.is_inference()
    assert len(tuned.problems) == 1


def test_threads(tuned: SimpleNamespace) -> None:
    sets = [tensors(lengths=(length, length)) for length in range(8, 16)]
    wanted = [SDPA(*inputs) for inputs in sets]

    def work(index: int) -> bool:
        return close(torch.ops.tuner.attention(*sets[index % 8]), wanted[index % 8])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert tuned.counters.stats().hits == 400


WORKER = """
import multiprocessing, sys
import torch, tuner.runtime

def attend(inputs, answers):
    torch.set_num_threads(1)
    answers.put(torch.ops.tuner.attention(*map(torch.tensor, inputs)).tolist())

if __name__ == "__main__":
    inputs = torch.randn(3, 1, 2, 16, 8)
    wanted = torch.ops.tuner.attention(*inputs)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        worker = context.Process(target=attend, args=(inputs.tolist(), answers))
        worker.start()
        assert torch.allclose(torch.tensor(answers.get(timeout=100)), wanted)
        worker.join(100)
        print(method, worker.exitcode)
"""


def test_worker_processes(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = ran(sys.executable, script, code=None, timeout=200)
    assert done.stdout.split() == ["fork", "0", "spawn", "0"], done.stderr
