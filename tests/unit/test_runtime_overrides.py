"""PyTorch's attention under `tuner.enable`, answered by the dispatcher over CPU tensors: hits and
refusals without Python, and everything that must stay PyTorch's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from runtime_server import (
    PROBLEM,
    Server,
    Toy,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    enabled_server,
    inputs,
    known_tensors,
    pytorchs,
)
from sdpa_backends import CUDNN, EFFICIENT, FLASH, sdpa_backends

from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

pytestmark = pytest.mark.usefixtures("backends", "enabled")

built, server, backends = built_dispatcher, dispatched_server, sdpa_backends
enabled, known = enabled_server, known_tensors
SDPA = torch.nn.functional.scaled_dot_product_attention
MATH = SDPBackend.MATH


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_hit_passes_no_python(server: Server, mode: Any) -> None:
    q, k, v = inputs()
    with mode():
        for by_python_wanted in (True, False, False):
            q.normal_()
            out, by_python, launched = server.went(lambda: SDPA(q, k, v))
            assert launched and by_python is by_python_wanted
            assert by_kernel(out, q, 16) and out.stride() == q.stride()
            assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
    assert server.runtime.counters.stats().hits == 3


def test_tensors_made_in_inference_mode(server: Server, known: list[Any]) -> None:
    with torch.inference_mode():
        q, k, v = inputs()
        _, by_python, launched = server.went(lambda: SDPA(q, k, v))
    assert launched and not by_python


def test_a_refusal_is_remembered_and_counted(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = inputs(AttentionProblem.parse("S=24,D=8,H=2"))
    wanted = pytorchs(lambda: SDPA(q, k, v))
    server.runtime.counters.stats(reset=True)
    for by_python_wanted in (True, False, False):
        out, by_python, launched = server.went(lambda: SDPA(q, k, v))
        assert not launched and by_python is by_python_wanted and torch.equal(out, wanted)
    assert server.runtime.counters.stats().fallbacks == {"no measured winner": 3}
    said = [record for record in caplog.records if "no measured winner" in record.message]
    assert len(said) == 1
    assert server.runtime.counters.stats(reset=True).calls == 3
    assert server.runtime.counters.stats().calls == 0


def test_one_call_is_counted_once(server: Server, known: list[Any]) -> None:
    """Also where `tuner.attention` falls back on what is overridden."""
    server.runtime.counters.stats(reset=True)
    server.attention(*known)
    SDPA(*known)
    others = inputs(AttentionProblem.parse("S=24,D=8,H=2"))
    server.attention(*others)
    SDPA(*others)
    stats = server.runtime.counters.stats()
    assert (stats.hits, stats.fallbacks) == (2, {"no measured winner": 2})


def test_a_new_decision_is_seen(server: Server) -> None:
    other = AttentionProblem.parse("S=24,D=8,H=2")
    tensors = inputs(other)
    SDPA(*tensors)
    server.decide(other)
    for by_python_wanted in (True, False):
        out, by_python, launched = server.went(lambda: SDPA(*tensors))
        assert launched and by_python is by_python_wanted and by_kernel(out, tensors[0], 24)


def test_a_look_at_an_unchanged_store_asks_no_table(server: Server, known: list[Any]) -> None:
    server.time_passes()
    _, by_python, launched = server.went(lambda: SDPA(*known))
    assert launched and not by_python


def test_switched_off(server: Server, known: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_DISABLE", "1")
    server.time_passes()
    for _ in range(2):
        _, _, launched = server.went(lambda: SDPA(*known))
        assert not launched
    monkeypatch.setenv("TUNER_DISABLE", "0")
    server.time_passes()
    assert server.went(lambda: SDPA(*known))[2]


def test_after_disable_it_is_pytorch_s(server: Server, known: list[Any]) -> None:
    pytorchs(lambda: torch.testing.assert_close(SDPA(*known), SDPA(*known)))
    calls = server.runtime.counters.stats().calls
    _, by_python, launched = pytorchs(lambda: server.went(lambda: SDPA(*known)))
    assert not by_python and not launched and server.runtime.counters.stats().calls == calls


def test_a_capture_launches_what_is_loaded(
    server: Server, known: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.decide(PROBLEM, other := AttentionProblem.parse("S=24,D=8,H=2"))
    SDPA(*known)
    monkeypatch.setattr(server.runtime.devices, "is_capturing", lambda: True)
    assert server.went(lambda: SDPA(*known))[1:] == (False, True)
    tensors = inputs(other)
    assert not server.went(lambda: SDPA(*tensors))[2]
    monkeypatch.setattr(server.runtime.devices, "is_capturing", lambda: False)
    assert server.went(lambda: SDPA(*tensors))[2], "nothing of the capture is remembered"


def test_the_backends_that_a_program_allows(server: Server, known: list[Any]) -> None:
    with sdpa_kernel(MATH):
        _, by_python, launched = server.went(lambda: SDPA(*known))
        assert not by_python and not launched
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            _, by_python, launched = server.went(lambda: SDPA(*known))
            assert launched and not by_python
    longer = inputs(AttentionProblem.parse("SQ=8,SKV=16,D=8,H=2"))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, MATH]):
        server.runtime.counters.stats(reset=True)
        SDPA(*longer, is_causal=True)
        assert server.runtime.counters.stats().calls == 0, "flash aligns such a mask otherwise"


def test_an_error_of_cuda_is_raised(server: Server, known: list[Any]) -> None:
    server.code.value = 700
    with pytest.raises(RuntimeError, match="or of an earlier kernel"):
        SDPA(*known)


def test_a_refused_launch_withdraws_the_kernel(server: Server, known: list[Any]) -> None:
    server.code.value = 701
    wanted = pytorchs(lambda: SDPA(*known))
    assert torch.equal(SDPA(*known), wanted)
    server.code.value = 0
    _, _, launched = server.went(lambda: SDPA(*known))
    assert not launched
    assert server.runtime.counters.stats().errors == {"a launch was refused": 1}


# --- PyTorch's own, whatever the table knows -------------------------------------------------


class Function(torch.Tensor):
    """A subclass without a mind of its own: PyTorch's default takes it off and puts it on."""


class Dispatch(torch.Tensor):
    """A wrapper whose operators are Python's."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pick = lambda x: x.inner if isinstance(x, Dispatch) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(pick, (args, kwargs or {}))
        put = lambda x: Dispatch(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        return torch.utils._pytree.tree_map(put, func(*args, **kwargs))


def nested(tensor: Any) -> Any:
    rows = [tensor[0].transpose(0, 1), tensor[0, :, :8].transpose(0, 1)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


Case = Callable[[Any, Any, Any], Any]
CASES: dict[str, Case] = {
    "a mask": lambda q, k, v: SDPA(q, k, v, torch.ones(16, 16).tril().log().half()),
    "a boolean mask": lambda q, k, v: SDPA(q, k, v, torch.ones(16, 16).tril() > 0),
    "causal": lambda q, k, v: SDPA(q, k, v, is_causal=True),
    "lower right": lambda q, k, v: SDPA(q[:, :, :8], k, v, causal_lower_right(8, 16)),
    "a negative scale": lambda q, k, v: SDPA(q, k, v, scale=-0.5),
    "single precision": lambda q, k, v: SDPA(q.float(), k.float(), v.float()),
    "no queries": lambda q, k, v: SDPA(q[:, :, :0], k, v),
    "no keys": lambda q, k, v: SDPA(q, k[:, :, :0], v[:, :, :0]),
    "three dimensions": lambda q, k, v: SDPA(q[0], k[0], v[0]),
    "grouped heads": lambda q, k, v: SDPA(q, k[:, :1], v[:, :1], enable_gqa=True),
    "rows apart": lambda q, k, v: SDPA(torch.cat([q, q], 3)[..., :8], k, v),
    "a negative view": lambda q, k, v: SDPA(q, torch._neg_view(k), v),
    "nested": lambda q, k, v: SDPA(*(nested(t).float() for t in (q, k, v))).values(),
    "vmap": lambda q, k, v: torch.vmap(SDPA, (0, None, None))(torch.stack([q, q]), k, v),
    "a dispatching subclass": lambda q, k, v: SDPA(*(Dispatch(t) for t in (q, k, v))).inner,
    "autocast to another type": lambda q, k, v: autocast(torch.bfloat16, q, k, v),
    "a meta tensor": lambda q, k, v: torch.zeros(SDPA(*(t.to("meta") for t in (q, k, v))).shape),
    "functorch's gradient": lambda q, k, v: torch.func.grad(
        lambda q: SDPA(q, k.float(), v.float()).square().sum()
    )(q.float()),
    "a jacobian-vector product": lambda q, k, v: torch.func.jvp(
        lambda q: by_math(q, k, v), (q,), (k,)
    )[1],
}


def autocast(dtype: Any, *tensors: Any) -> Any:
    with torch.autocast("cpu", dtype):
        return SDPA(*tensors)


def by_math(*tensors: Any) -> Any:
    with sdpa_kernel(MATH):
        return SDPA(*tensors)


@pytest.mark.filterwarnings("ignore")  # of nested tensors, vmap and jvp
@pytest.mark.parametrize("case", CASES)
def test_what_is_pytorch_s(server: Server, known: list[Any], case: str) -> None:
    wanted = pytorchs(lambda: CASES[case](*known))
    for _ in range(3):
        found, _, launched = server.went(lambda: CASES[case](*known))
        assert not launched and torch.equal(found, wanted)
    assert found.stride() == wanted.stride() and found.dtype == wanted.dtype


def test_a_plain_subclass_is_served(server: Server, known: list[Any]) -> None:
    """It has no kernels of its own: PyTorch has taken it off when the operator is called."""
    for tensors in (known, inputs(AttentionProblem.parse("S=16,D=8,H=2,layout=bshd"))):
        q = tensors[0].as_subclass(Function)
        out, _, launched = server.went(lambda q=q, t=tensors: SDPA(q, *t[1:]))
        assert type(out) is Function and launched == (tensors is known)


def test_autocast_to_the_tensors_type_is_served(server: Server, known: list[Any]) -> None:
    out, by_python, launched = server.went(lambda: autocast(torch.float16, *known))
    assert launched and not by_python and out.dtype == torch.float16
    wide = [t.float() for t in known]
    out, by_python, launched = server.went(lambda: autocast(torch.float16, *wide))
    assert launched and not by_python and out.dtype == torch.float16


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # make_dual calls it
def test_tangents(server: Server, known: list[Any]) -> None:
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(known[0], torch.ones_like(known[0]))
        with sdpa_kernel([MATH, SDPBackend.EFFICIENT_ATTENTION]):
            wanted = pytorchs(lambda: SDPA(dual, *known[1:]))
            found, _, launched = server.went(lambda: SDPA(dual, *known[1:]))
        assert not launched
        pairs = zip(*map(forward_ad.unpack_dual, (found, wanted)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that sees what operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_sees_the_same_operators(server: Server, known: list[Any], mode: Any) -> None:
    def seen() -> list[str]:
        with mode(), Counting() as counting:
            SDPA(*known)
        return counting.seen

    wanted = pytorchs(seen)
    found, _, launched = server.went(seen)
    assert found == wanted
    # In inference mode PyTorch hands modes the whole operator, and they call it below themselves.
    assert launched == (mode is torch.inference_mode)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of export
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_graph_is_the_same(server: Server, known: list[Any], mode: Any) -> None:
    """Whether traced by make_fx, by fake tensors, by export or by torch.compile."""

    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return SDPA(q, k, v, is_causal=True) + 1

    graphs: list[str] = []

    def note(graph: Any, example: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    def traced() -> list[str]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        graphs.clear()
        torch._dynamo.reset()
        with mode():
            tensors = [t.clone().requires_grad_(mode is torch.enable_grad) for t in known]
            graphs.append(str(make_fx(SDPA)(*known).code))
            graphs.append(str(make_fx(SDPA, pre_dispatch=True)(*known).code))
            graphs.append(str(make_fx(SDPA, tracing_mode="fake")(*known).code))
            backend = aot_autograd(fw_compiler=lambda g, e: make_boxed_func(note(g, e)))
            torch.compile(Model(), backend=backend, fullgraph=True)(*tensors)
            with FakeTensorMode() as fake:
                out = SDPA(*(fake.from_tensor(t) for t in known))
                graphs.append(f"{out.shape} {out.stride()} {out.dtype} {out.device}")
        exported = torch.export.export(Model(), tuple(known))
        graphs.append(str(exported.graph))
        graphs.append(str(exported.run_decompositions().graph))
        return list(graphs)

    wanted = pytorchs(traced)
    found, _, launched = server.went(traced)
    assert found == wanted and len(found) >= 6
    assert not launched, "no operator of a backend has a kernel for CPU tensors"
    torch._dynamo.reset()


@pytest.mark.parametrize("forward,backward", [(True, False), (False, True), (True, True)])
def test_gradients(server: Server, known: list[Any], forward: bool, backward: bool) -> None:
    """Whether the switch is on in one pass or in both, and with the other pass before."""

    def run(call: Callable[[], Any], is_on: bool) -> Any:
        return call() if is_on else pytorchs(call)

    def gradients(forward: bool, backward: bool) -> list[Any]:
        leaves = [t.clone().requires_grad_() for t in known]
        out = run(lambda: SDPA(*leaves, is_causal=True), forward)
        return list(run(lambda: torch.autograd.grad(out.square().sum(), leaves), backward))

    wanted = gradients(False, False)
    server.runtime.counters.stats(reset=True)
    found, _, launched = server.went(lambda: gradients(forward, backward))
    assert not launched and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert server.runtime.counters.stats().calls == 0, "such calls are the backends' to count"


def test_a_checkpoint_is_computed_again(server: Server, known: list[Any]) -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = [t.clone().requires_grad_() for t in known]
    wanted = pytorchs(lambda: torch.autograd.grad(SDPA(*leaves).square().sum(), leaves))
    out = checkpoint(SDPA, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# --- the operators of the backends -----------------------------------------------------------


def flash(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return getattr(torch.ops.aten, FLASH)(q, k, v, **options)


def cudnn(q: Any, k: Any, v: Any, wants_lse: bool = True, **options: Any) -> Any:
    return getattr(torch.ops.aten, CUDNN)(q, k, v, None, wants_lse, **options)


def efficient(q: Any, k: Any, v: Any, wants_lse: bool = False, **options: Any) -> Any:
    return getattr(torch.ops.aten, EFFICIENT)(q, k, v, None, wants_lse, **options)


@pytest.fixture
def writes_lse(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family of the kernel says that it writes the log-sum-exp."""
    monkeypatch.setattr(Toy, "writes_lse", True)


OPERATORS: dict[str, Callable[..., Any]] = {
    "flash": flash,
    "cuDNN with the log-sum-exp": cudnn,
    "cuDNN": lambda *t, **o: cudnn(*t, wants_lse=False, **o),
    "efficient": efficient,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_served_without_python(
    server: Server, backends: list[str], writes_lse: None, name: str
) -> None:
    """The output lies as PyTorch's fake kernel tells a trace: the efficient one's heads by rows."""
    call, (q, k, v) = OPERATORS[name], inputs()
    wanted = pytorchs(lambda: call(q, k, v, scale=0.3))
    is_by_rows = name == "efficient"
    traced = q.transpose(1, 2).contiguous().transpose(1, 2) if is_by_rows else q
    del backends[:]
    for by_python_wanted in (True, False, False):
        q.normal_()
        found, by_python, launched = server.went(lambda: call(q, k, v, scale=0.3))
        assert launched and by_python is by_python_wanted and by_kernel(found[0], q, 16)
        assert found[0].stride() == traced.stride()
    assert backends == []
    for mine, theirs in zip(found[1:4], wanted[1:4], strict=True):
        is_tensor = isinstance(theirs, torch.Tensor)
        assert not is_tensor or (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert len(found) == len(wanted) and found[4:6] == wanted[4:6]


@pytest.mark.parametrize("name", ["flash", "cuDNN with the log-sum-exp"])
def test_a_kernel_without_log_sum_exp_is_refused_without_python(
    server: Server, backends: list[str], name: str
) -> None:
    tensors = inputs()
    for by_python_wanted in (True, False):
        _, by_python, launched = server.went(lambda: OPERATORS[name](*tensors))
        assert not launched and by_python is by_python_wanted
    assert server.runtime.counters.stats().fallbacks == {"PyTorch wants the log-sum-exp": 2}
    assert len(backends) == 2


def test_bottom_right_is_refused_whatever_attention_knows(
    server: Server, backends: list[str], writes_lse: None
) -> None:
    """The same tensors under the same flag are served where the mask is top-left."""
    server.decide(longer := AttentionProblem.parse("SQ=8,SKV=16,D=8,H=2,causal=1"))
    tensors = inputs(longer)
    for _ in range(2):
        assert server.went(lambda: cudnn(*tensors, is_causal=True))[2]
        assert server.went(lambda: SDPA(*tensors, is_causal=True))[2]
        assert not server.went(lambda: flash(*tensors, is_causal=True))[2]
    assert server.runtime.counters.stats().fallbacks == {"the causal mask is bottom-right": 2}


def test_a_debugging_mask_and_an_efficient_log_sum_exp(
    server: Server, backends: list[str], writes_lse: None
) -> None:
    """Outputs that no tuned kernel has."""
    tensors = inputs()
    for call in (
        lambda: flash(*tensors, return_debug_mask=True),
        lambda: efficient(*tensors, wants_lse=True),
    ):
        _, by_python, launched = server.went(call)
        assert not by_python and not launched
    assert server.runtime.counters.stats().calls == 0


def test_an_output_is_laid_out_as_tracing_was_told(
    server: Server, backends: list[str], writes_lse: None
) -> None:
    """As the query, also where the kernel writes (B, H, S, D) from a query of other strides."""
    one = AttentionProblem.parse("SQ=1,SKV=16,D=8,H=2")
    server.decide(one)
    q, k, v = inputs(one)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        out, _, launched = server.went(lambda: flash(q, k, v)[0])
        assert launched and by_kernel(out, q, 16)


# --- threads and processes -------------------------------------------------------------------


def test_threads_beside_a_writer_of_the_table(server: Server, known: list[Any]) -> None:
    """PyTorch calls the operator without the GIL."""
    wrong: list[Any] = []
    done = threading.Event()
    others = inputs(AttentionProblem.parse("S=24,D=8,H=2"))
    wanted = pytorchs(lambda: SDPA(*others))

    def call() -> None:
        for _ in range(1500):
            if not by_kernel(SDPA(*known), known[0], 16):
                wrong.append("hit")
            if not torch.equal(SDPA(*others), wanted):
                wrong.append("refused")

    def write() -> None:
        while not done.wait(0.001):
            server.runtime.table.table.renew()

    server.runtime.counters.stats(reset=True)
    writer = threading.Thread(target=write)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in (writer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    writer.join()
    assert not wrong
    stats = server.runtime.counters.stats()
    assert (stats.hits, stats.fallbacks) == (6000, {"no measured winner": 6000})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_forked_child(server: Server, known: list[Any]) -> None:
    """While other threads read the table."""
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            SDPA(*known)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    is_served = by_kernel(SDPA(*known), known[0], 16)
                    server.runtime.dispatch.clear()
                    code = 0 if is_served and by_kernel(SDPA(*known), known[0], 16) else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_nothing_is_left(server: Server) -> None:
    names = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention")

    def dump() -> list[str]:
        return [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]

    before = pytorchs(dump)
    assert dump() != before
    assert pytorchs(dump) == before
