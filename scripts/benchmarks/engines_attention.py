"""Attention as SGLang calls it, for ``scripts/bench engines``: its own kernel beside the plug-in's.

The cases are built by the package's own test kit (`sglang.test.kits`): its pool of pages, and its
metadata of a captured step. Each copy of a call has a backend and pages of its own.
"""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.engines_servers import environment, stats_of
from benchmarks.engines_sglang import CONTEXT, OWN_ATTENTION, PAGE_SIZE, SGLANG
from benchmarks.harness import Contender, Row, distance, first_outputs
from benchmarks.rows import TUNER
from tuner.errors import BenchmarkError

KIT = "sglang.test.kits.attention_unittest.attention_methods.dense_attention"
CONTEXTS = "sglang.srt.model_executor.forward_context"
HEADS, HEADS_KV = 32, 8
LENGTHS = range(500, 2000)
"""Keys of the sequences."""
STRIDE = 37
COPIES = 3
MAX_ERROR = 1e-2
"""Largest relative error of the plug-in's output beside SGLang's."""


@dataclass(frozen=True)
class Decoding:
    """A step of one query a sequence."""

    head_dim: int
    sequences: int

    @property
    def label(self) -> str:
        """Its sizes."""
        return f"D={self.head_dim}, {self.sequences} sequences"

    @property
    def group(self) -> str:
        """Sequences of unlike lengths that a captured step serves."""
        return f"{self.sequences} sequences"

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence."""
        return [LENGTHS[STRIDE * i % len(LENGTHS)] for i in range(self.sequences)]


def decodings(_: Namespace) -> list[Decoding]:
    """Heads and numbers of requests of the two models."""
    return [Decoding(width, count) for width in (64, 128) for count in (1, 16, 64, 128)]


class Steps:
    """A call's tensors, and SGLang's state of its captured step, once a copy.

    Args:
        case: sizes.
        device: the tensors'.
    """

    def __init__(self, case: Decoding, device: str) -> None:
        import torch

        kit = importlib.import_module(KIT)
        self._modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        mode, count = self._modes.ForwardMode.DECODE, case.sequences
        lengths, rows = case.lengths, COPIES * count
        self._case, self._device = case, device
        posed = kit.DenseAttentionCase(
            name="bench", backend=OWN_ATTENTION, forward_mode=mode, num_heads=HEADS,
            num_kv_heads=HEADS_KV, page_size=PAGE_SIZE, prefix_lens=tuple(n - 1 for n in lengths),
            extend_lens=(),
        )  # fmt: skip
        config = kit.TinyModelConfig(
            num_heads=HEADS, num_kv_heads=HEADS_KV, head_dim=case.head_dim, hidden_size=64,
            context_len=CONTEXT,
        )  # fmt: skip
        self.runner = kit.MockModelRunner(
            case=posed, model_config=config, dtype=torch.bfloat16, device=device,
            max_context_len=CONTEXT, head_dim=case.head_dim, runner_batch_size=rows,
        )  # fmt: skip
        pages = torch.randperm(rows * CONTEXT // PAGE_SIZE).view(rows, -1).to(device) + 1
        at = torch.arange(CONTEXT, device=device)
        slots = pages[:, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        self.runner.req_to_token_pool.req_to_token[:rows, :CONTEXT] = slots.int()
        for buffer in self.runner.token_to_kv_pool.get_kv_buffer(0):
            buffer.normal_()
        radix = importlib.import_module("sglang.srt.layers.radix_attention")
        self._layer = radix.RadixAttention(
            HEADS, case.head_dim, case.head_dim**-0.5, HEADS_KV, 0, logit_cap=0.0
        )
        width = HEADS * case.head_dim
        self.queries = torch.randn(COPIES, count, width, device=device, dtype=torch.bfloat16)

    def call(self, backend: str) -> Callable[[int], Any]:
        """The attention of copy i by a backend's captured step.

        Args:
            backend: its name in SGLang's registry.
        """
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        contexts = importlib.import_module(CONTEXTS)
        steps = []
        for copy in range(COPIES):
            made = registry.ATTENTION_BACKENDS[backend](self.runner)
            captured = self._batch(copy, [1] * self._case.sequences)
            with contexts.forward_context(contexts.ForwardContext(attn_backend=made)):
                made.init_cuda_graph_state(self._case.sequences, self._case.sequences)
                made.init_forward_metadata_out_graph(captured, in_capture=True)
                made.init_forward_metadata_in_graph(captured)
            keys = made.forward_metadata.max_seq_len_k
            made.init_forward_metadata_out_graph(self._batch(copy, self._case.lengths))
            made.forward_metadata.max_seq_len_k = keys  # as while SGLang captures
            steps.append((made, captured))

        def run(copy: int) -> Any:
            made, batch = steps[copy]
            with contexts.forward_context(contexts.ForwardContext(attn_backend=made)):
                return made.forward(self.queries[copy], None, None, self._layer, batch, False)

        return run

    def _batch(self, copy: int, lengths: list[int]) -> Any:
        import torch

        count, device = len(lengths), self._device
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        first = copy * count
        batch = self._modes.ForwardBatch(
            forward_mode=self._modes.ForwardMode.DECODE, batch_size=count, input_ids=zeros,
            req_pool_indices=torch.arange(first, first + count, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32), out_cache_loc=zeros,
            seq_lens_sum=sum(lengths), positions=zeros,
        )  # fmt: skip
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch


def measure(case: Decoding, _: Namespace, device: str = "cuda") -> Row:
    """Times of SGLang's own kernel and of the plug-in's.

    Raises:
        BenchmarkError: without SGLang.
    """
    if importlib.util.find_spec("sglang") is None:
        raise BenchmarkError("sglang is not installed")
    # Every call that has a kernel is the tuner's, also where SGLang's is expected to be faster.
    os.environ["TUNER_SGLANG_QUERIES"] = "1000000"
    environment()
    import torch

    from tuner.runtime.engines.sglang import register

    register()
    with torch.no_grad():
        steps = Steps(case, device)
        stats_of()
        calls = {SGLANG: steps.call(OWN_ATTENTION), TUNER: steps.call("tuner")}
        outs, failed = first_outputs(calls, read=torch.Tensor.clone)
        said = stats_of()
        if TUNER in outs and not said["hits"]:
            failed[TUNER] = "; ".join(said["refused"]) or "SGLang's own backend"
        fit = [Contender(name, call) for name, call in calls.items() if name not in failed]
        source = steps.queries.clone()
        times = harness.time_calls(
            fit, lambda i: torch.mul(source[i], 1.0, out=steps.queries[i]), COPIES
        )
    wrong = [
        name for name, out in outs.items() if not distance(out, outs.get(SGLANG, out)) < MAX_ERROR
    ]
    return {"us": times.us, "failed": {**failed, **times.failed}, "wrong": wrong, **said}
