"""The switch: what it puts before PyTorch's attention, and that nothing of it stays."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_server import built_dispatcher
from sdpa_backends import CUDNN, FLASH, sdpa_backends

torch = pytest.importorskip("torch", reason="torch is not installed")

import tuner  # noqa: E402
from tuner.config import Config  # noqa: E402
from tuner.errors import TunerError  # noqa: E402
from tuner.problem import AttentionProblem  # noqa: E402
from tuner.runtime.attention.composed import Attended  # noqa: E402
from tuner.runtime.call import native  # noqa: E402
from tuner.runtime.training import autograd  # noqa: E402

built, backends = built_dispatcher, sdpa_backends


#: Tokens at which cuDNN's gradients are finite, and at which they may be NaN.
SAFE, UNSAFE = 70, 6


def tensors(
    dtype: Any = torch.float16, requires_grad: bool = False, length: int = UNSAFE
) -> list[Any]:
    made = [torch.randn(2, 4, length, 8).to(dtype) for _ in range(3)]
    return [tensor.requires_grad_(requires_grad) for tensor in made]


def close(out: Any, wanted: Any) -> bool:
    return bool(torch.allclose(out.float(), wanted.float(), rtol=1e-2, atol=1e-2))


def flash(q: Any, k: Any, v: Any, is_causal: bool = False, **options: Any) -> Any:
    """Attention by PyTorch's flash operator, as a compiled model calls it."""
    return getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, is_causal, **options)[0]


def cudnn(q: Any, k: Any, v: Any, is_causal: bool = False, **options: Any) -> Any:
    wants_lse = any(t.requires_grad for t in (q, k, v))
    return getattr(torch.ops.aten, CUDNN)(q, k, v, None, wants_lse, 0.0, is_causal, **options)[0]


def state() -> tuple[Any, ...]:
    """Everything of the process that enabling may touch."""
    backward = FLASH + "_backward", CUDNN + "_backward"
    operators = (FLASH, CUDNN, "scaled_dot_product_attention", *backward)
    return (
        *(torch._C._dispatch_dump_table(f"aten::{name}") for name in operators),
        torch._C._get_sdp_priority_order(),
        native.exchange(native.exchange(False)),
        native.exchange,
        native.is_watched,
    )


@pytest.fixture(autouse=True)
def loaded(on_cpu: SimpleNamespace, built: SimpleNamespace) -> None:
    """The dispatcher, which overrides the operators."""
    on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest, loaded: None) -> Iterator[None]:
    if "backends" in request.fixturenames:
        request.getfixturevalue("backends")
    before = state()
    yield
    tuner.disable()
    assert state() == before


def test_importing_enables_nothing_and_loads_no_dynamo() -> None:
    code = (
        "import sys, torch, tuner; tuner.attention, tuner.enable\n"
        "import tuner.runtime.enable\n"
        "assert 'torch._dynamo' not in sys.modules, 'a second of every start'\n"
        f"for name in ('{FLASH}', 'scaled_dot_product_attention'):\n"
        "    assert 'tuner' not in torch._C._dispatch_dump('aten::' + name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("backend", [flash, cudnn])
def test_it_stands_before_both_backends(
    tuned: SimpleNamespace, backends: list[str], backend: Any
) -> None:
    q, k, v = tensors()
    wanted = backend(q, k, v, is_causal=True, scale=0.3)
    del backends[:]
    with tuner.enabled():
        found = backend(q, k, v, is_causal=True, scale=0.3)
    assert close(found, wanted) and found.stride() == q.stride()
    assert backends == [] and len(tuned.problems) == 1
    backend(q, k, v)
    assert len(backends) == 1 and len(tuned.problems) == 1


def test_flash_aligns_a_causal_mask_bottom_right(
    tuned: SimpleNamespace, backends: list[str]
) -> None:
    """As `causal_lower_right` calls it; cuDNN's operator aligns it as tuned kernels do."""
    q, (k, v) = torch.randn(2, 4, 3, 8).half(), tensors()[:2]
    with tuner.enabled():
        flash(q, k, v, is_causal=True)
        assert backends == [FLASH] and tuned.problems == []
        flash(q, k, v)
        cudnn(q, k, v, is_causal=True)
    assert backends == [FLASH] and len(tuned.problems) == 2
    assert tuned.counters.stats().fallbacks == {"the causal mask is bottom-right": 1}


@pytest.mark.parametrize("backend", [flash, cudnn])
def test_what_has_no_tuned_kernel_is_the_backend_s(
    tuned: SimpleNamespace, backends: list[str], backend: Any
) -> None:
    q, k, v = tensors(torch.float32)
    wanted = backend(q, k, v, is_causal=True, scale=0.3)
    with tuner.enabled():
        assert torch.equal(backend(q, k, v, is_causal=True, scale=0.3), wanted)
    assert len(backends) == 2 and tuned.problems == []
    assert tuned.counters.stats().fallbacks == {"no kernel takes such tensors": 1}


def test_masks_and_dropout_are_the_backend_s(tuned: SimpleNamespace, backends: list[str]) -> None:
    q, k, v = tensors()
    bias = torch.zeros(6, 6)
    with tuner.enabled():
        getattr(torch.ops.aten, CUDNN)(q, k, v, bias, False)
        getattr(torch.ops.aten, CUDNN)(q, k, v, None, False, 0.5)
        getattr(torch.ops.aten, FLASH)(q, k, v, 0.5)
    assert backends == [CUDNN, CUDNN, FLASH] and tuned.problems == []
    fallbacks = tuned.counters.stats().fallbacks
    assert fallbacks == {"dropout_p is not 0": 2, "attn_mask is given": 1}


@pytest.mark.parametrize("backend,name", [(flash, FLASH), (cudnn, CUDNN)])
def test_gradients_are_the_backend_s_from_what_the_kernel_wrote(
    tuned: SimpleNamespace, backends: list[str], backend: Any, name: str
) -> None:
    inputs = tensors(requires_grad=True, length=SAFE)
    grad = torch.randn_like(inputs[0])
    wanted = torch.autograd.grad(backend(*inputs, is_causal=True), inputs, grad)
    del backends[:]
    with tuner.enabled():
        out = backend(*inputs, is_causal=True)
    found = torch.autograd.grad(out, inputs, grad)
    assert backends == [name + "_backward"] and len(tuned.problems) == 1
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend,name", [(flash, FLASH), (cudnn, CUDNN)])
@pytest.mark.parametrize("is_large", [True, False])
def test_large_gradients_are_what_was_measured_for_them(
    tuned: SimpleNamespace,
    backends: list[str],
    monkeypatch: pytest.MonkeyPatch,
    is_large: bool,
    backend: Any,
    name: str,
) -> None:
    """The forward pass ran with the switch off."""
    limits = {FLASH: "CUDNN_FLOPS", CUDNN: "CUDNN_REPLACED_FLOPS"}
    for limit in limits.values():
        monkeypatch.setattr(autograd, limit, 1e15)
    monkeypatch.setattr(autograd, limits[name], 0.0 if is_large else 1e15)
    tuned.differentiates = True
    inputs = tensors(requires_grad=True, length=SAFE)
    grad = torch.randn_like(inputs[0])
    out = backend(*inputs, is_causal=True)
    wanted = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    del backends[:]
    with tuner.enabled():
        found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        assert backends == ([] if is_large else [name + "_backward"])
        assert len(tuned.problems) == is_large
        assert all(close(a, b) for a, b in zip(found, wanted, strict=True))
        assert [t.stride() for t in found] == [t.stride() for t in inputs]
        del backends[:]
        native.call(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    assert backends == [name + "_backward"]


def test_gradients_of_cudnn_s_masks_and_dropout_are_its_own(
    tuned: SimpleNamespace, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "CUDNN_REPLACED_FLOPS", 0.0)
    tuned.differentiates = True
    inputs, bias = tensors(requires_grad=True, length=SAFE), torch.zeros(SAFE, SAFE).half()
    with tuner.enabled():
        for options in ((bias, True), (None, True, 0.5)):
            out = getattr(torch.ops.aten, CUDNN)(*inputs, *options)[0]
            torch.autograd.grad(out.sum(), inputs)
    assert backends == [CUDNN, CUDNN + "_backward"] * 2 and tuned.problems == []


@pytest.mark.parametrize("differentiates", [True, False])
def test_cudnn_s_gradients_are_another_kernel_s_where_they_may_be_nan(
    tuned: SimpleNamespace, backends: list[str], differentiates: bool
) -> None:
    """Gradients of any size, by a measured kernel or another one of PyTorch's."""
    tuned.differentiates = differentiates
    inputs = tensors(requires_grad=True)
    grad = torch.randn_like(inputs[0])
    out = cudnn(*inputs, is_causal=True)
    wanted = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    del backends[:]
    with tuner.enabled():
        found = torch.autograd.grad(out, inputs, grad)
    assert backends == [] and len(tuned.problems) == differentiates
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_a_mask_that_flash_aligns_otherwise_are_its_own(
    tuned: SimpleNamespace, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "CUDNN_FLOPS", 0.0)
    tuned.differentiates = True
    query, key, value = tensors(requires_grad=True)
    out = flash(query[:, :, :4], key, value, is_causal=True)
    with tuner.enabled():
        torch.autograd.grad(out.sum(), (query, key, value))
    assert backends == [FLASH, FLASH + "_backward"] and tuned.problems == []


def test_a_kernel_without_log_sum_exp(tuned: SimpleNamespace, backends: list[str]) -> None:
    """cuDNN's operator says whether it is wanted; flash's returns it always."""
    tuned.writes_lse = False
    with tuner.enabled():
        cudnn(*tensors())
        cudnn(*tensors(requires_grad=True))
        flash(*tensors())
    assert backends == [CUDNN, FLASH] and len(tuned.problems) == 1
    assert tuned.counters.stats().fallbacks == {"PyTorch wants the log-sum-exp": 2}


def test_each_call_is_counted_once(tuned: SimpleNamespace, backends: list[str]) -> None:
    with tuner.enabled():
        flash(*tensors())
        native.call(flash, *tensors())
        tuned.attention.attention(*tensors(torch.float32))
    stats = tuned.counters.stats()
    assert (stats.hits, sum(stats.fallbacks.values())) == (1, 1)


def test_a_vendor_s_kernel_that_is_pytorch_s_own_is_not_answered_by_itself(
    tuned: SimpleNamespace, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tuned.plan.VendorPlan(
        AttentionProblem.parse("B=2,H=4,S=6,D=8"), Config("vendor_sdpa", {}), 0, flash
    )
    monkeypatch.setattr(tuned.table.table, "get", lambda kind: plan)
    q, k, v = tensors()
    wanted = flash(q, k, v)
    with tuner.enabled():
        assert torch.equal(cudnn(q, k, v), wanted)
    assert backends == [FLASH, FLASH]
    assert tuned.counters.stats().hits == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_is_compiled_follows_the_switch(
    tuned: SimpleNamespace, backends: list[str], mode: Any
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: 2 * cudnn(*t), fullgraph=True, backend="aot_eager")
    with mode():
        inputs = tensors(requires_grad=mode is torch.enable_grad)
        wanted = compiled(*inputs)
        with tuner.enabled():
            assert close(compiled(*inputs), wanted)
        assert torch.equal(compiled(*inputs), wanted)
    assert backends == [CUDNN, CUDNN] and len(tuned.problems) == 1


def test_without_kernels_to_stand_before_it_does_nothing() -> None:
    q, k, v = tensors()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(q, k, v)
    with tuner.enabled():
        assert is_on() and torch.equal(sdpa(q, k, v), wanted)


def is_on() -> bool:
    return native.is_watched


def test_nesting() -> None:
    with tuner.enabled():
        with tuner.enabled():
            tuner.disable()
            assert is_on()
        assert is_on()
    assert not is_on()
    tuner.enable()
    tuner.enable()
    with tuner.enabled():
        pass
    assert is_on()
    tuner.disable()
    assert not is_on()
    tuner.disable()
    with tuner.enabled():
        tuner.enable()
    assert is_on()


def test_an_error_inside_restores() -> None:
    with pytest.raises(KeyError), tuner.enabled():
        raise KeyError
    assert not is_on()


def test_threads_that_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tuner.enabled():
            inside.set()
            leave.wait(30)

    with tuner.enabled():
        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(30)
    assert is_on()
    leave.set()
    thread.join()
    assert not is_on()


@pytest.fixture
def provider(backends: list[str]) -> Iterator[Any]:
    """Another kernel of the flash operator, as a provider of flash attention registers one."""
    calls: list[str] = []

    def kernel(q: Any, k: Any, v: Any, *options: Any, scale: float | None = None) -> Any:
        calls.append("other")
        out, lse = autograd.forward_with_lse(Attended(q, k, v, False, scale))
        state = [torch.empty(2), torch.empty(()), torch.empty(0)]
        return out, lse, None, None, q.shape[2], k.shape[2], *state

    def activate() -> None:
        made.library = torch.library.Library("aten", "IMPL")
        made.library.impl(FLASH, kernel, "CPU", allow_override=True)

    def remove() -> None:
        made.library._destroy()
        made.library = None

    made = SimpleNamespace(library=None, calls=calls, activate=activate, remove=remove)
    yield made
    if made.library is not None:
        remove()


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_a_provider_that_was_active_answers_what_is_not_served(
    tuned: SimpleNamespace, backends: list[str], provider: Any
) -> None:
    provider.activate()
    with tuner.enabled():
        flash(*tensors())
        assert len(tuned.problems) == 1 and provider.calls == []
        flash(*tensors(torch.float32))
        assert provider.calls == ["other"] and backends == []
    flash(*tensors())
    assert provider.calls == ["other", "other"] and len(tuned.problems) == 1
    provider.remove()


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_a_provider_activated_meanwhile_answers_what_is_not_served(
    tuned: SimpleNamespace, backends: list[str], provider: Any
) -> None:
    with tuner.enabled():
        provider.activate()
        flash(*tensors())
        assert len(tuned.problems) == 1 and provider.calls == []
        flash(*tensors(torch.float32))
        assert provider.calls == ["other"]
    flash(*tensors())
    assert provider.calls == ["other", "other"] and backends == []
    provider.remove()


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_a_provider_removed_meanwhile_is_not_called(
    tuned: SimpleNamespace, backends: list[str], provider: Any
) -> None:
    provider.activate()
    with tuner.enabled():
        provider.remove()
        flash(*tensors(torch.float32))
        assert backends == [FLASH] and provider.calls == []
        flash(*tensors())
        assert len(tuned.problems) == 1
    assert backends == [FLASH]


class TestBeforeItIsLoaded:
    """`enable` without a dispatcher: the first minute of a machine, or no C++ compiler."""

    @pytest.fixture
    def waiting(self, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Functions that are to be called once it is loaded."""
        on_cpu.dispatch.use(None)
        called: list[Any] = []
        monkeypatch.setattr(on_cpu.dispatch, "prepare", lambda then: called.append(then))
        monkeypatch.setattr(on_cpu.devices, "is_present", lambda: True)
        return called

    def test_nothing_is_overridden(self, waiting: list[Any]) -> None:
        before = state()
        with tuner.enabled():
            assert state() == before and len(waiting) == 1
        tuner.enable()
        assert state() == before

    def test_without_a_gpu_none_is_built(
        self, on_cpu: SimpleNamespace, waiting: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(on_cpu.devices, "is_present", lambda: False)
        tuner.enable()
        assert waiting == [] and not is_on()

    def test_the_main_thread_takes_it_up_between_two_instructions(
        self,
        tuned: SimpleNamespace,
        built: SimpleNamespace,
        backends: list[str],
        waiting: list[Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        override, threads = tuned.dispatch.override, list[Any]()

        def watched(ask: Any) -> Any:
            threads.append(threading.current_thread())
            return override(ask)

        monkeypatch.setattr(tuned.dispatch, "override", watched)
        tuner.enable()
        flash(*tensors())
        assert backends == [FLASH] and tuned.problems == []
        tuned.dispatch.use(tuned.dispatch.load(built.dispatcher))
        loader = threading.Thread(target=waiting[0])
        loader.start()
        loader.join()
        assert is_on() and threads == [threading.main_thread()]
        flash(*tensors())
        assert backends == [FLASH] and len(tuned.problems) == 1

    def test_a_main_thread_that_waits_is_not_waited_for(
        self, on_cpu: SimpleNamespace, built: SimpleNamespace, waiting: list[Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        enable = importlib.import_module("tuner.runtime.enable")
        monkeypatch.setattr(enable, "TAKE_UP_S", 0.0)
        monkeypatch.setattr(enable, "_add_pending_call", lambda *_: 0)
        tuner.enable()
        on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))
        waiting[0]()
        assert is_on()

    def test_it_is_taken_up_by_whoever_holds_the_switch(
        self, on_cpu: SimpleNamespace, built: SimpleNamespace, waiting: list[Any]
    ) -> None:
        """Loaded while `enable` is between its look and its end."""
        switch = importlib.import_module("tuner.runtime.enable")._switch
        apply = switch._apply

        def late() -> None:
            del switch._apply
            apply()
            on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))
            switch.take_up()
            assert not is_on()

        switch._apply = late
        tuner.enable()
        assert is_on()

    def test_switched_off_meanwhile_nothing_is_overridden(
        self, on_cpu: SimpleNamespace, built: SimpleNamespace, waiting: list[Any]
    ) -> None:
        with tuner.enabled():
            pass
        on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))
        waiting[0]()
        assert not is_on()


def test_an_older_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(TunerError, match=r"needs PyTorch 2\.11"):
        tuner.enable()
    monkeypatch.undo()
    with tuner.enabled():
        assert is_on()
    assert not is_on()
