"""Tensors of a call that is timed with and without the mode of `tuner.deterministic`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from benchmarks.own_plans import built_artifacts, own_plan
from benchmarks.products_ways import MAX_COPIES, ROTATED_BYTES
from tuner.config import Config
from tuner.families import families
from tuner.problem import AttentionProblem, Problem

Way = Callable[[], Callable[[int], Any]]
VLLM = "vllm"
"""vLLM's batch-invariant kernel, where vLLM is installed."""


class CallTensors:
    """A call's tensors, the weights or the caches in several copies, which are used in turn.

    Args:
        problem: a product, SwiGLU, or attention, dense or over pages.
    """

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self._calls = _attention if isinstance(problem, AttentionProblem) else _product
        rotated = [operand.bytes for operand in problem.operands[1:3]]
        is_few = not isinstance(problem, AttentionProblem) or problem.is_decoding
        size = max(1, sum(rotated))
        self.copies = min(MAX_COPIES, ceil(ROTATED_BYTES / size) + 1) if is_few else 1
        self._inputs = [self._calls(problem, seed) for seed in range(self.copies)]
        self.source = self._inputs[0][0].clone()

    def before(self, i: int) -> Any:
        """Write the first operand, all of whose copies are the same tensor."""
        import torch

        words = self._inputs[0][0].view(torch.int16)
        return torch.bitwise_or(self.source.view(torch.int16), 0, out=words)

    def ways(self, kernels: Mapping[str, Config | None]) -> dict[str, Way]:
        """Makers of calls: PyTorch's of a plain product, vLLM's of the mode, then own kernels'."""
        import torch

        found: dict[str, Way] = {}
        if self.problem.op == "gemm" and not self.problem.scales:
            inputs = self._inputs

            def plain(i: int) -> Any:
                return torch.nn.functional.linear(inputs[0][0], inputs[i][1])

            found["pytorch"] = lambda: plain
        if importlib.util.find_spec("vllm") is not None:
            found |= _vllms(self.problem, self._inputs)
        for name, config in kernels.items():
            if config is not None:
                found[name] = lambda config=config, name=name: self._own(config, name == "tuner")  # type: ignore[misc]
        return found

    def _own(self, config: Config, is_mode: bool) -> Callable[[int], Any]:
        """The call of a built kernel.

        Raises:
            RuntimeError: when it has no plan.
        """
        from tuner.runtime.call.plan import Posed

        problem = self.problem
        if isinstance(problem, AttentionProblem) and problem.is_paged:
            return self._paged(config, is_mode)
        scale = problem.head_dim**-0.5 if isinstance(problem, AttentionProblem) else 1.0
        plan = planned(Posed(problem, scale), config)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        first = self._inputs[0][0]
        return lambda i: plan.run_uncounted(first, *self._inputs[i][1:])

    def _paged(self, config: Config, is_mode: bool) -> Callable[[int], Any]:
        """The call over pages by a kernel, with the schedule that the runtime gives it."""
        import torch

        from tuner.runtime.attention.composed import NONE
        from tuner.runtime.attention.paged import paged_call
        from tuner.runtime.call.refusal import Refusal

        problem, calls = self.problem, []
        is_causal = is_mode or problem.is_causal
        for _, key, value, table, used, starts in self._inputs:
            tensors = self._inputs[0][0], key, value, table, used, starts, None
            sizes = problem.seqlen_q, problem.seqlen_kv
            call = paged_call(*tensors, *sizes, is_causal, NONE, problem.head_dim**-0.5)
            total = problem.batch * problem.seqlen_kv
            calls.append(call._replace(is_causal=is_causal, total_kv=total))
        plan = planned(calls[0].pose(), config)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        plan = replace(plan, by_portfolio=not is_mode)  # whose schedule splits the keys
        sized = []
        for call in calls:
            launched = call.sized(plan)
            if isinstance(launched, Refusal):
                raise RuntimeError(launched.reason)
            sized.append(launched)
        out = torch.empty_like(self._inputs[0][0])
        return lambda i: sized[i].run_into(out, None, *calls[i].inputs)


def _vllms(problem: Any, inputs: Sequence[Sequence[Any]]) -> dict[str, Way]:
    """VLLM's batch-invariant kernels in Triton: of products in bf16, and over pages."""
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    first = inputs[0][0]
    if problem.op == "gemm" and not problem.scales:
        layers = importlib.import_module("vllm.model_executor.layers.batch_invariant")
        return {VLLM: lambda: lambda i: layers.matmul_persistent(first, inputs[i][1].t())}
    if not getattr(problem, "page_size", 0):
        return {}
    kernels = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    out = first.new_empty(first.shape)
    sizes = problem.seqlen_q, problem.seqlen_kv, problem.head_dim**-0.5

    def attend(i: int) -> Any:
        _, key, value, table, used, starts = inputs[i]
        tensors = first, key, value, out, starts, sizes[0], used, sizes[1], sizes[2]
        kernels.unified_attention(*tensors, True, (-1, -1), table, 0, None, None, None)
        return out

    return {VLLM: lambda: attend}


def planned(posed: Any, config: Config) -> Any:
    """The plan of a built kernel, or a text why there is none."""
    artifacts = _artifacts(posed.problem, config)
    if isinstance(artifacts, str):
        return artifacts
    return own_plan(posed.problem, config, artifacts, posed.scale)


_built: dict[str, Mapping[str, str] | str] = {}


def _artifacts(problem: Problem, config: Config) -> Mapping[str, str] | str:
    specs = families()[config.family].kernels(problem, config)
    key = " ".join(spec.key for spec in specs.values())
    if key not in _built:
        _built[key] = built_artifacts(specs)
    return _built[key]


def _product(problem: Any, seed: int) -> list[Any]:
    """Tensors in the order of the operands; the rows are the same for every seed."""
    import torch

    from tuner.runtime.bits import ProductRows

    rows = ProductRows(problem, problem.m, (), ())
    at = torch.arange(problem.m, device="cuda")
    tensors = rows.inputs(problem, at, [0, problem.m])
    if problem.op == "gemm":
        tensors[1] = tensors[1].view(problem.n, problem.k)
    return tensors


def _attention(problem: AttentionProblem, seed: int) -> list[Any]:
    import torch

    dtype = getattr(torch, problem.dtype)

    def drawn(shape: tuple[int, ...]) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

    batch, head_dim = problem.batch, problem.head_dim
    if not problem.is_paged:
        of_queries = batch, problem.heads_q, problem.seqlen_q, head_dim
        of_keys = batch, problem.heads_kv, problem.seqlen_kv, head_dim
        return [drawn(of_queries), drawn(of_keys), drawn(of_keys)]
    columns = -(-problem.seqlen_kv // problem.page_size)
    cache = batch * columns, problem.page_size, problem.heads_kv, head_dim
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns).to(torch.int32)
    used = torch.full((batch,), problem.seqlen_kv, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * problem.seqlen_q
    query = drawn((batch * problem.seqlen_q, problem.heads_q, head_dim))
    return [query, drawn(cache), drawn(cache), table, used, starts]
