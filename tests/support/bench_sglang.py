"""SGLang's loop of a model runner, and its attention, for smoke runs of `benchmarks.engines`."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

VOCABULARY = 32


class Runner:
    """A model whose next token is the last one's successor; the plug-in's parts at the second.

    Args:
        is_own: True of SGLang's own attention.
    """

    def __init__(self, is_own: bool) -> None:
        self._is_own = is_own
        self.torch_runner = SimpleNamespace(model=None, attn_backend=self)

    def clear(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def extend(self, prompts: Any) -> Any:
        import torch

        ids = torch.tensor([prompt[-1] for prompt in prompts])
        return *self._after(ids), None

    def decode(self, ids: Any, batch: None) -> Any:
        return self._after(ids + (not self._is_own))

    def _after(self, ids: Any) -> tuple[Any, Any]:
        import torch

        after = (ids + 1) % VOCABULARY
        return after, 0.5 * torch.nn.functional.one_hot(after, VOCABULARY)


def arguments(**options: Any) -> SimpleNamespace:
    """As ``ServerArgs``."""
    assert options["max_running_requests"] == 3 and options["page_size"] == 64
    return SimpleNamespace(**options)


def modules() -> dict[str, ModuleType]:
    """Modules that the bench imports."""
    server_args, one_batch, sglang = map(
        ModuleType, ("sglang.srt.server_args", "sglang.benchmark.one_batch", "sglang")
    )
    ports = SimpleNamespace(init_new=lambda args: None)
    vars(server_args).update(ServerArgs=arguments, PortArgs=ports)
    vars(one_batch).update(
        SpawnRanks=SimpleNamespace,
        publish=lambda *_, **__: None,
        _init_process_global_configs=lambda: None,
        load_model=lambda args, *_: (Runner(args.attention_backend == "fa3"), None),
        prepare_synthetic_inputs_for_latency_test=lambda count, length, prompts: prompts,
    )
    vars(sglang).update(
        __version__="0.5.23", __spec__=importlib.machinery.ModuleSpec("sglang", None)
    )
    return {module.__name__: module for module in (server_args, one_batch, sglang)}


@pytest.fixture
def runner(engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from benchmarks import engines_servers, engines_sglang

    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engines_servers, "ENVIRONMENT", {})
    monkeypatch.setattr(engines_sglang, "draw_weights", lambda model: 0)
    monkeypatch.setattr("tuner.runtime.engines.sglang.register", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1 << 30)


class Steps:
    """One number, a step's answer, by either backend."""

    def __init__(self, case: Any, device: str) -> None:
        import torch

        self.queries = torch.zeros(3, case.sequences)

    def call(self, backend: str) -> Callable[[int], Any]:
        def run(copy: int) -> Any:
            from tuner.runtime.call import counters

            if backend == "tuner":
                counters.count_hit()
            return self.queries[copy] + 1.0

        return run


@pytest.fixture
def attention(runner: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import engines_attention

    monkeypatch.setattr(engines_attention, "Steps", Steps)
