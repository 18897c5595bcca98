"""`attention`: the tuned kernel where there is a measured one, PyTorch's everywhere else."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner import settings
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError, TunerError
from tuner.hardware import GPUS, TMA_ALIGNMENT_BYTES, Gpu
from tuner.lookup import Answer, lookup
from tuner.problem import AttentionProblem, DType, Layout
from tuner.runtime.plan import Plan, resolve

_log = logging.getLogger("tuner.runtime")

_DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd")
#: Plans kept; more shapes than this start over, so that a server of any shape stays small.
_MAX_KNOWN = 4096


@dataclass
class _Known:
    """What was found out about one kind of call; good as long as `answer` is the store's."""

    problem: AttentionProblem
    answer: Answer | None
    plan: Plan | str
    """A text says why there is no plan."""


_known: dict[tuple[Any, ...], _Known] = {}
_withdrawn: dict[str, set[Config]] = {}
_gpus: dict[int, Gpu] = {}
_said: set[str] = set()
_lock = threading.Lock()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V by the fastest kernel measured on this GPU.

    Without a measured winner that this machine can run (other shapes, gradients, CPU tensors,
    autocast to another type, `TUNER_DISABLE=1`, ...) the call is PyTorch's
    `scaled_dot_product_attention`, and the reason is logged once to ``tuner.runtime``. Predicted
    and replayed entries are never launched. The first call of a shape loads its kernel: make one
    before capturing a CUDA graph.

    Args:
        query: (B, H, SQ, D), fp16 or bf16; contiguous, or a view of a contiguous (B, SQ, H, D).
        key: (B, HKV, SKV, D), laid out as `query`; HKV divides H.
        value: (B, HKV, SKV, D), laid out as `query`.
        is_causal: query i sees keys 0..i.
        scale: of the scores; 1/sqrt(D) when None.

    Returns:
        (B, H, SQ, D), of the inputs' type; laid out as `query` where a tuned kernel ran.

    Raises:
        Whatever `scaled_dot_product_attention` raises on tensors that it refuses.
    """
    if torch.compiler.is_compiling() or settings.disabled():
        return _pytorch(query, key, value, is_causal, scale)
    reason = _unserved(query, key, value)
    if not reason:
        served = _serve(query, key, value, is_causal, scale)
        if not isinstance(served, str):
            return served
        reason = served
    _say(reason)
    return _pytorch(query, key, value, is_causal, scale)


def _pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    grouped = query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]
    options = {"enable_gqa": True} if grouped else {}
    return scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, **options
    )


def _say(reason: str) -> None:
    with _lock:
        if reason in _said:
            return
        _said.add(reason)
    _log.warning("attention by PyTorch: %s", reason)


def _unserved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Why no tuned kernel may take these tensors, whatever the store holds; else empty."""
    tensors = (query, key, value)
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "an input is not a plain tensor"
    if any(t.dim() != 4 or t.numel() == 0 for t in tensors):
        return "the tensors are not 4-D (B, H, S, D), or are empty"
    if not all(_on_gpu(t) for t in tensors):
        return "the tensors are not on a CUDA device"
    if len({t.device for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
        return "the tensors differ in device or type"
    if query.dtype not in _DTYPES:
        return f"{query.dtype} is not tuned (fp16 and bf16 are)"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is wanted: tuned kernels have no backward pass"
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != query.dtype:
        return "autocast wants another type than the tensors'"
    if any(t.data_ptr() % TMA_ALIGNMENT_BYTES for t in tensors):
        return f"a tensor does not start at a multiple of {TMA_ALIGNMENT_BYTES} bytes"
    return ""


def _on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)


def _serve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor | str:
    """The tuned kernel's output, or why there is none."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    try:
        known = _find(query, key, value, bool(is_causal), scale)
    except TunerError as exc:
        return str(exc)
    plan = known.plan
    if isinstance(plan, str):
        return plan
    try:
        with torch.cuda.device(query.device):
            return plan.run(query, key, value)
    except torch.OutOfMemoryError:  # for this call only: the next may have more
        return f"out of memory for {plan.config.family} at {known.problem.label()}"
    except (BenchmarkError, RuntimeError) as exc:
        with _lock:
            _withdrawn.setdefault(known.problem.key, set()).add(plan.config)
            _known.clear()
        return f"{plan.config.family} failed and is withdrawn: {exc}"


def _find(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> _Known:
    """What to do with such tensors, found out anew when the store has changed."""
    device = query.device.index
    kind = (
        *(part for t in (query, key, value) for part in (t.shape, t.stride())),
        query.dtype,
        device,
        is_causal,
        scale,
    )
    known = _known.get(kind)
    problem = known.problem if known else problem_of(query, key, value, is_causal)
    answer = lookup(problem, gpu=gpu_of(device))
    if known and known.answer == answer:
        return known
    if answer is None:
        plan: Plan | str = f"no measured winner for {problem.label()}"
    elif torch.cuda.is_current_stream_capturing():
        return _Known(problem, answer, "a kernel cannot be loaded inside a graph capture")
    else:
        with torch.cuda.device(device):
            plan = resolve(problem, answer, scale, _withdrawn.get(problem.key, ()))
        if isinstance(plan, str):
            plan = f"nothing of {problem.label()} can run here: {plan}"
        for note in answer.notes:
            _log.info("%s: %s", problem.label(), note)
    known = _Known(problem, answer, plan)
    with _lock:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[kind] = known
    return known


def problem_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> AttentionProblem:
    """The problem that these tensors pose.

    Raises:
        ConfigError: when these 4-D tensors pose none: sizes or strides that no tuned kernel has.
    """
    if key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ConfigError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "are not (B, H, SQ, D) and twice (B, HKV, SKV, D)"
        )
    for layout in _LAYOUTS:
        problem = AttentionProblem(
            seqlen_q=query.shape[2],
            seqlen_kv=key.shape[2],
            head_dim=query.shape[3],
            batch=query.shape[0],
            heads_q=query.shape[1],
            heads_kv=key.shape[1],
            is_causal=is_causal,
            dtype=_DTYPES[query.dtype],
            layout=layout,
        )
        operands = zip(problem.operands[:3], (query, key, value), strict=True)
        if all(_lies(tensor, operand.strides) for operand, tensor in operands):
            return problem
    raise ConfigError("the tensors are contiguous neither as (B, H, S, D) nor as (B, S, H, D)")


def _lies(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True when `tensor` has these strides where they matter: in dimensions longer than one."""
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def gpu_of(index: int) -> Gpu:
    """The store's identity of a CUDA device; what lookup does not need of it is left at 0."""
    if index not in _gpus:
        found = torch.cuda.get_device_properties(index)
        gpu = Gpu(
            found.name, f"{found.major}.{found.minor}", found.multi_processor_count, 0, 0.0, 0
        )
        shipped = (known for known in GPUS.values() if known.identity == gpu.identity)
        _gpus[index] = next(shipped, gpu)
    return _gpus[index]
