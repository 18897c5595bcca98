"""Engines, checkouts and ranks that smoke runs of `benchmarks` need beside a device."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_machines import RefusingCompiler

from tuner.hardware import DEFAULT_GPU

PLANTED = """
import os, pytest
from tuner.runtime.call import counters
is_forced = bool(os.environ.get("PLANTED"))
def test_served():
    if is_forced:
        counters.count_hit()
def test_fails_anyway():
    assert False
def test_fused_sdp_choice():
    assert not is_forced
def test_crashes():
    os.abort()
def test_skipped():
    pytest.skip("no such GPU")
"""
#: The counters without the rest of the runtime, and torch's only question.
LIGHT = """
import pathlib, sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=bool))
import tuner
runtime = sys.modules["tuner.runtime"] = types.ModuleType("tuner.runtime")
runtime.__path__ = [str(pathlib.Path(tuner.__file__).parent / "runtime")]
from tuner.runtime.call.counters import stats
runtime.stats = stats
"""


@pytest.fixture
def transformers() -> None:
    """Transformers without its warnings, which it writes to the stream of an earlier test."""
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    module.logging.set_verbosity_error()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(f"torch.nn.attention.flex_attention.{flag}", True, raising=False)


@pytest.fixture
def helion(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's product in the place of Helion's."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    product = SimpleNamespace(call=lambda operands: lambda i: torch.mm(*operands(i)[:2]))
    monkeypatch.setattr("benchmarks.tuner_helion", product, raising=False)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of 4 us in everything."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cuda = torch.autograd.DeviceType.CUDA
    kernel = SimpleNamespace(device_type=cuda, self_device_time_total=4.0)
    seen = SimpleNamespace(key_averages=lambda: [kernel])
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(seen))


class InProcess:
    """Stands for the process of an engine, by the argument of its command; one starts at a time."""

    turn = threading.Lock()

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        from benchmarks.engines_child import asked

        self._answer = asked(command[-1])

    def ask(self, index: int, limit_s: float) -> dict[str, Any]:
        with self.turn:
            return self._answer(index)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import engines

    monkeypatch.setattr(engines, "Worker", InProcess)


@pytest.fixture
def batching(engines: None, transformers: None) -> None:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


class Answer(SimpleNamespace):
    """A request's tokens, and a log-probability of each."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in token_ids]
        super().__init__(token_ids=token_ids, logprobs=logprobs)


class Offline:
    """An offline engine: each request's tokens count up from its prompt's first."""

    def __init__(self, folder: str, **options: Any) -> None:
        assert Path(folder, "config.json").is_file() and options["max_num_seqs"] == 3
        config = SimpleNamespace(static_forward_context={"0": SimpleNamespace(impl=object())})
        vllm_config = SimpleNamespace(compilation_config=config)
        self.llm_engine = SimpleNamespace(vllm_config=vllm_config)

    def apply_model(self, function: Any) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        return [
            SimpleNamespace(outputs=[Answer(range(at, at + params.max_tokens))])
            for at in (prompt["prompt_token_ids"][0] for prompt in prompts)
        ]


@pytest.fixture
def vllm(engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm_fakes import stand_ins

    from benchmarks import engines_servers

    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    module: Any = sys.modules["vllm"]
    module.LLM, module.SamplingParams, module.__version__ = Offline, SimpleNamespace, "0.26.0"
    module.__spec__ = SimpleNamespace()
    monkeypatch.setattr(engines_servers, "ENVIRONMENT", {})
    for name in ("VLLM_BATCH_INVARIANT", "TUNER_BATCH_INVARIANT"):  # a way of the mode sets both
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr("tuner.runtime.engines.vllm._register_quantization", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1 << 30)


class OtherRank:
    """Stands for the process of another rank."""

    def __init__(self, command: Sequence[str], env: Any, **pipes: Any) -> None:
        from benchmarks.engines_child import asked

        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("1", "1", "2")
        self._answer = asked(command[-1])
        self.stdin, self.stdout = StringIO(), self

    def readline(self) -> str:
        return json.dumps(self._answer(int(self.stdin.getvalue().split()[-1])))


@pytest.fixture
def ranks(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import engines, engines_child

    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # the first rank sets them in this process
    monkeypatch.setattr(engines.device, "count", lambda: 2)
    monkeypatch.setattr(engines_child.subprocess, "Popen", OtherRank)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of planted tests, and a module that forces nothing."""
    from benchmarks import forced, suites

    texts = {suites.FILE: PLANTED}
    forcing = "import os\ndef install(built_only):\n    os.environ['PLANTED'] = '1'\n"
    texts |= {"modules/planted_forcing.py": forcing, "light/sitecustomize.py": LIGHT}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    folders = [str(tmp_path / name) for name in ("modules", "light")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suites, "Share", partial(suites.Share, forcing="planted_forcing"))
    monkeypatch.setattr(suites, "find_spec", lambda name: name)
    monkeypatch.setattr(forced, "detect", lambda: DEFAULT_GPU)
    monkeypatch.setattr(forced, "find_toolchain", lambda: None)
    monkeypatch.setattr(forced, "Compiler", lambda *_: RefusingCompiler())
    monkeypatch.setattr(forced, "HEAD_DIMS", (64,))
