"""SGLang's model runner for ``scripts/bench engines``, without its scheduler and server.

`sglang.benchmark.one_batch` has the runner's own loop: prompts of all requests in one batch, then
steps of one token each, captured in a graph.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.engines_servers import (
    ALL,
    WARM_TOKENS,
    Load,
    draw_weights,
    environment,
    model_folder,
    stats_of,
)
from benchmarks.engines_steps import FIRSTS, WHOLES, counted_replays, figures_of, median_s

SGLANG = "sglang"
"""The way by SGLang's own kernels."""
OWN_ATTENTION = "fa3"
PAGE_SIZE, CONTEXT = 64, 4096
"""Slots of a page; keys of a sequence, the captured step's longest."""
SHARE_OF_MEMORY = 0.9
FIRST_PORT, PORTS = 20000, 20000


@dataclass
class Sglang:
    """A model runner with drawn weights, greedy tokens, and graphs of decoding only.

    Args:
        way: ``sglang`` is its own kernels, others the plug-in's.
        load: requests.
        is_eager: without graphs.
    """

    way: str
    load: Load
    is_eager: bool = False
    _bench: Any = None
    _runner: Any = None

    def start(self) -> dict[str, Any]:
        """Make the runner, which captures its graphs; facts of it."""
        environment()
        begun = time.perf_counter()
        from tuner.runtime.engines.sglang import register

        register()  # as the entry point does where the package is installed
        self._bench = bench = importlib.import_module("sglang.benchmark.one_batch")
        vars(bench)["get_tokenizer"] = lambda *_, **__: None
        start = time.perf_counter()
        with model_folder(self.load.model) as folder:
            arguments = importlib.import_module("sglang.srt.server_args")
            args = arguments.ServerArgs(model_path=folder, **self._options())
            ports = arguments.PortArgs.init_new(args)
            ranks = bench.SpawnRanks(world_rank=0, gpu_id=0)
            bench.publish(args, role="scheduler", ranks=ranks)
            bench._init_process_global_configs()
            self._runner, _ = bench.load_model(args, ports, 0, 0)
        engine = self._runner.torch_runner
        draw_weights(engine.model)
        return {
            "version": importlib.import_module("sglang").__version__,
            "attention": type(engine.attn_backend).__name__,
            "import_s": round(start - begun, 1),
            "ready_s": round(time.perf_counter() - start, 1),
            **stats_of(),
        }

    def _options(self) -> dict[str, Any]:
        """Arguments of ``ServerArgs``; caches of several runners share the GPU."""
        load, most = self.load, max(self.load.counts)
        tokens = -(-(load.prompt + load.new + PAGE_SIZE) // PAGE_SIZE) * PAGE_SIZE
        return {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "device": "cuda",
            "attention_backend": OWN_ATTENTION if self.way == SGLANG else "tuner",
            "page_size": PAGE_SIZE,
            "context_length": CONTEXT,
            "max_running_requests": most,
            "max_total_tokens": most * tokens,
            "mem_fraction_static": SHARE_OF_MEMORY,
            "sampling_backend": "pytorch",
            "disable_radix_cache": True,
            "disable_custom_all_reduce": True,
            "random_seed": 0,
            "chunked_prefill_size": -1,
            "cuda_graph_bs_decode": list(load.counts),
            "disable_prefill_cuda_graph": True,
            "disable_cuda_graph": self.is_eager,
            "port": FIRST_PORT + os.getpid() % PORTS,
            **({"quantization": "tuner"} if self.way == ALL else {}),
        }

    def run(self) -> dict[str, Any]:
        """Times of each number of requests."""
        import torch

        served = {str(count): self._served(count) for count in self.load.counts}
        return {
            "concurrency": served, "memory_bytes": torch.cuda.max_memory_reserved(), **stats_of()
        }  # fmt: skip

    def _served(self, count: int) -> dict[str, Any]:
        new = self.load.new
        self._generate(count, WARM_TOKENS, 2)
        decoding: list[float] = []

        def seconds() -> float:
            _, (start, first, last) = self._generate(count, self.load.prompt, new)
            decoding.append(last - first)
            return last - start

        with counted_replays() as graphs:
            whole = median_s(count, WHOLES, seconds)
            figures = figures_of(graphs)
        return {
            "first_token_ms": median_s(count, FIRSTS, lambda: self._first_s(count)) * 1e3,
            "token_ms": statistics.median(decoding) / max(1, new - 1) * 1e3,
            "tokens_per_s": count * new / whole,
            **figures,
        }

    def _first_s(self, count: int) -> float:
        _, (start, first, _) = self._generate(count, self.load.prompt, 1)
        return first - start

    def answers(self) -> dict[str, Any]:
        """Tokens of each number of requests, and how far the two largest logits are apart."""
        told = {}
        for count in self.load.counts:
            steps, _ = self._generate(count, self.load.prompt, self.load.new, is_told=True)
            tokens, gaps = zip(*steps, strict=True)
            told[str(count)] = {
                "tokens": [list(of_one) for of_one in zip(*tokens, strict=True)],
                "gaps": [list(of_one) for of_one in zip(*gaps, strict=True)],
            }
        return {"told": told, **stats_of()}

    def _generate(
        self, count: int, length: int, new: int, is_told: bool = False
    ) -> tuple[list[tuple[list[int], list[float]]], tuple[float, float, float]]:
        """Tokens and gaps of each step if they are told; seconds at the start, after the first
        tokens and after the last.
        """
        runner, steps = self._runner, []
        runner.clear()
        prompts = self.load.prompts(count, length)
        requests = self._bench.prepare_synthetic_inputs_for_latency_test(count, length, prompts)
        runner.synchronize()
        start = time.perf_counter()
        ids, logits, batch = runner.extend(requests)
        if is_told:
            steps.append(_told(ids, logits))
        runner.synchronize()
        first = time.perf_counter()
        for _ in range(new - 1):
            ids, logits = runner.decode(ids, batch)
            if is_told:
                steps.append(_told(ids, logits))
        runner.synchronize()
        return steps, (start, first, time.perf_counter())


def _told(ids: Any, logits: Any) -> tuple[list[int], list[float]]:
    top = logits.float().topk(2, -1).values
    return ids.tolist(), (top[:, 0] - top[:, 1]).tolist()


def parting(told: dict[str, Any], own: dict[str, Any]) -> tuple[int, float]:
    """Requests whose tokens part from the engine's own, and the widest gap between its two largest
    logits where one parts.
    """
    gaps = []
    rows = zip(told["tokens"], own["tokens"], own["gaps"], strict=True)
    for tokens, wanted, of_own in rows:
        steps = zip(tokens, wanted, of_own, strict=True)
        gaps += [gap for token, right, gap in steps if token != right][:1]
    return len(gaps), max(gaps, default=0.0)
