"""Own attention kernels on PyTorch's tensors, those that are compiled, and the exact output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.call_times import Contender
from benchmarks.gpu import need_gpu
from tuner.bench.results import write_json
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.toolchain import find_toolchain
from tuner.families import family
from tuner.families.base import SCRATCH
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.measure.device import environment as device_environment
from tuner.measure.subjects import WORKSPACE, CompiledSubject
from tuner.problem import AttentionProblem

FAMILY = family("fused_attention")
CHUNK = 512
"""Queries whose scores are held in float64 at once."""


class CurrentStream:
    """A device whose stream is PyTorch's current one."""

    @property
    def stream(self) -> int:
        """Handle of the stream that is current now."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)


def contenders(
    problem: AttentionProblem, tensors: Mapping[str, Any], scale: float
) -> Iterator[Contender]:
    """A call of each legal config whose kernels are compiled; nothing is compiled here.

    Args:
        problem: problem to compute.
        tensors: its inputs by operand.
        scale: factor of the scores.
    """
    import torch

    gpu = detect() or DEFAULT_GPU
    output = problem.output
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        for config in compiler.compiled(FAMILY, problem, FAMILY.space(problem, gpu)):
            kernels = {}
            for name, spec in FAMILY.kernels(problem, config).items():
                artifact = compiler.cached(spec)
                assert artifact is not None, "it was compiled a moment ago"
                kernels[name] = load(artifact)
            device: Any = CurrentStream()
            subject = CompiledSubject(device, FAMILY, problem, config, kernels, scale)
            out = torch.empty_strided(
                output.shape, output.strides, dtype=getattr(torch, output.dtype), device="cuda"
            )
            kept = [
                torch.zeros(max(1, size), dtype=torch.uint8, device="cuda")
                for size in (subject.scratch_bytes, subject.workspace_bytes)
            ]
            buffers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            buffers |= {output.name: out.data_ptr()}
            buffers |= dict(zip((SCRATCH, WORKSPACE), (t.data_ptr() for t in kept), strict=True))
            bound = subject.bind(buffers, scale)

            def call(_: int, bound: Any = bound, out: Any = out, kept: Any = kept) -> Any:
                bound()
                return out

            yield Contender(f"{config.family} {config.digest[:6]}", call)


def is_dense(problem: AttentionProblem) -> bool:
    """True if `exact` computes it: no mask but a causal one over as many keys as queries."""
    is_plain = len(problem.inputs) == 3 and not (problem.is_windowed or problem.softcap)
    return is_plain and (not problem.is_causal or problem.seqlen_q == problem.seqlen_kv)


def exact(
    query: Any, key: Any, value: Any, scale: float, *, is_causal: bool, first: int = 0
) -> Any:
    """Attention in float64 of the queries from `first` on, a chunk at a time.

    Args:
        query: (B, H, S, D) of any type.
        key: (B, HKV, S, D).
        value: as `key`.
        scale: factor of the scores.
        is_causal: True if query i sees keys up to i only.
        first: query to begin with.
    """
    import torch

    batch, heads, seqlen, head_dim = query.shape
    groups = heads // key.shape[1]
    out = torch.empty(
        batch, heads, seqlen - first, head_dim, dtype=torch.float64, device=query.device
    )
    for sequence in range(batch):
        for head in range(heads):
            keys, values = (t[sequence, head // groups].double() for t in (key, value))
            for begin in range(first, seqlen, CHUNK):
                end = min(begin + CHUNK, seqlen)
                seen = end if is_causal else seqlen
                scores = query[sequence, head, begin:end].double() @ keys[:seen].T * scale
                if is_causal:
                    places = torch.arange(seen, device=query.device)
                    hidden = places[None] > places[begin:end, None]
                    scores = scores.masked_fill(hidden, float("-inf"))
                part = torch.softmax(scores, -1) @ values[:seen]
                out[sequence, head, begin - first : end - first] = part
    return out


def relative_error(got: Any, wanted: Any) -> float:
    """Relative Frobenius norm of the error of the last queries, as many as `wanted` has."""
    part = got[:, :, -wanted.shape[2] :].double()
    return float((part - wanted).norm() / wanted.norm())


def measured(
    problems: Iterable[AttentionProblem],
    compared: Callable[[AttentionProblem], dict[str, Any]],
    text: Callable[[dict[str, Any]], str],
    path: Path | None,
) -> list[dict[str, Any]]:
    """The result of `compared` for each problem, printed by `text` and written as it comes.

    Raises:
        BenchmarkError: when torch sees no GPU.
    """
    need_gpu()
    about = environment()
    every: list[dict[str, Any]] = []
    for problem in problems:
        every.append(compared(problem))
        print(text(every[-1]), flush=True)
        if path is not None:
            write_json(path, {"environment": about, "problems": every})
    return every


def environment() -> dict[str, str | int | float]:
    """Versions and limits of this machine and its peers, and the GPU's name."""
    gpu = detect()
    facts = dict(device_environment().facts)
    for name in ("vendor_sdpa", "vendor_cudnn_plans"):
        facts |= family(name).environment()
    return file_head.complete({"gpu": gpu.name if gpu else "", **facts})
